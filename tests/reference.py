"""The plain, slow reference for GaC and UniTE, with gates and log space: dictionaries keyed by bytes, and a fresh
forward for every step.

It implements sections 1 to 5 of the semantics from the tokenizers and models alone and shares no code with the
library. No cache, no batch, no vectorised arithmetic beyond one softmax.
"""

import codecs
import copy
import functools
import heapq
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

EOS = "EOS"
Key = bytes | str | tuple[str, int]
"""What an entry stands for: the bytes it writes, `EOS`, or `("control", id)` for another control token."""

SPACE_SIGN = "\u2581"
REPLACEMENT = "\ufffd"


# --- Tokens as bytes (section 1) ------------------------------------------------------------------------------------


class TextRules(NamedTuple):
    tokenizer: Tokenizer
    member_ids: dict[int, int]
    """Its numbering to the member's: added tokens may have moved."""


class ReferenceMember:
    """A model, its tokenizer and what its ids write.

    Args:
        model: A causal language model in float32.
        tokenizer: A tokenizer with a `tokenizers` backend.
        eos_ids: End ids that replace those of the generation config, the config and the tokenizer.
        name: For error messages.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        eos_ids: Iterable[int] | int | None = None,
        name: str = "member",
    ):
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self.backend = tokenizer.backend_tokenizer
        self.spec = json.loads(self.backend.to_str())
        self.decoder_types = set(_parts(self.spec["decoder"], "type"))
        self.vocab = self.backend.get_vocab(with_added_tokens=True)
        self.num_rows = model.config.get_text_config().vocab_size
        self.added = tokenizer.added_tokens_decoder

        self.eos_ids = self._find_eos_ids(eos_ids)
        special = {i for i, token in self.added.items() if token.special} | set(tokenizer.all_special_ids)
        self.control = special | {i for i in self.eos_ids if self._is_end_marker(i)}
        self.control &= set(self.vocab.values())
        self.rowless = {i for i in self.vocab.values() if i >= self.num_rows}

        textless = self.control | self.rowless
        hidden = {token for token, i in self.vocab.items() if i in textless}
        make = functools.partial(_text_only, self.spec, self.vocab, hidden, {})
        self._view = make(inserts_space=True, normalizes=True)
        self._continue = make(inserts_space=False, normalizes=True)
        self._continue_plain = make(inserts_space=False, normalizes=False)

        self.token_bytes = {}
        for token, i in self.vocab.items():
            written = None if i in textless else self._bytes_of(token, i)
            if written:
                self.token_bytes[i] = written
        self.entries: dict[bytes, list[int]] = {}
        for i in sorted(self.token_bytes):
            self.entries.setdefault(self.token_bytes[i], []).append(i)
        self.control_eos = sorted(i for i in self.eos_ids & self.control if i < self.num_rows)
        self.prompt_prefix = self._find_prompt_prefix()
        self._encoded: dict[bytes, list[int] | None] = {}

    def _find_eos_ids(self, given: Iterable[int] | int | None) -> set[int]:
        generation_config = getattr(self.model, "generation_config", None)
        configured = (given, getattr(generation_config, "eos_token_id", None), self.model.config.eos_token_id)
        for ids in (*configured, self.tokenizer.eos_token_id):
            if ids is not None:
                return {ids} if isinstance(ids, int) else set(ids)
        return set()

    def _is_end_marker(self, i: int) -> bool:
        """Whether an end id is a marker such as `<|im_end|>`, flagged or not, rather than text such as a newline."""
        return i in self.added and not self.added[i].content.isspace()

    def _bytes_of(self, token: str, i: int) -> bytes | None:
        if "ByteLevel" in self.decoder_types:
            alphabet = _gpt2_bytes()
            if i in self.added or not set(token) <= alphabet.keys():
                return token.encode()
            return bytes(alphabet[char] for char in token)
        if self.decoder_types & {"Replace", "Metaspace", "ByteFallback"}:
            if "ByteFallback" in self.decoder_types and len(token) == 6 and token[:3] == "<0x" and token[-1] == ">":
                return bytes([int(token[3:5], 16)])
            return token.replace(SPACE_SIGN, " ").encode()
        if i in self.added:
            return token.encode()
        if "WordPiece" in self.decoder_types:
            prefix = self.spec["decoder"]["prefix"]
            return token.removeprefix(prefix).encode() if token.startswith(prefix) else b" " + token.encode()
        anchor = min(set(self.vocab.values()) - self.added.keys())
        before = self.backend.decode([anchor], skip_special_tokens=False)
        both = self.backend.decode([anchor, i], skip_special_tokens=False)
        return both.removeprefix(before).encode() if both.startswith(before) else None

    def _find_prompt_prefix(self) -> list[int]:
        """What the tokenizer puts in front of a prompt: BOS, if that is its rule."""
        bare = self.tokenizer("a", add_special_tokens=False)["input_ids"]
        full = self.tokenizer("a")["input_ids"]
        start = next(at for at in range(len(full)) if full[at : at + len(bare)] == bare)
        return full[:start]

    def canonical_id(self, data: bytes) -> int:
        """Of the ids that write these bytes, the one the tokenizer itself gives, else the lowest."""
        ids = self.entries[data]
        if len(ids) > 1 and is_utf8(data):
            given = self._ids(self._continue, data.decode())
            if len(given) == 1 and given[0] in ids:
                return given[0]
        return ids[0]

    def written(self, ids: Iterable[int]) -> bytes | None:
        """The bytes that these ids write in the middle of a text; None if one of them is no text."""
        parts = [self.token_bytes.get(i) for i in ids]
        return None if None in parts else b"".join(parts)

    def encode(self, data: bytes) -> list[int] | None:
        """Ids that write exactly these bytes as the continuation of a text; None if the member cannot write them."""
        if data not in self._encoded:
            self._encoded[data] = self._encode(data)
        return self._encoded[data]

    def _encode(self, data: bytes) -> list[int] | None:
        if data in self.entries:
            return [self.canonical_id(data)]
        for rules in (self._continue, self._continue_plain):
            ids = []
            for run in _runs(data):
                run_ids = self._ids(rules, run) if isinstance(run, str) else self.byte_ids(run)
                ids.extend(run_ids if run_ids is not None else [-1])
            if self.written(ids) == data:
                return ids
        return self.byte_ids(data)

    def byte_ids(self, data: bytes) -> list[int] | None:
        """One id a byte."""
        pieces = [data[at : at + 1] for at in range(len(data))]
        return [self.canonical_id(piece) for piece in pieces] if all(p in self.entries for p in pieces) else None

    def prompt_ids(self, text: str) -> list[int]:
        """The tokenizer's own view of a whole text, without BOS. May be lossy, but no character is dropped unseen."""
        return self._seen(text, self._view)

    def append_ids(self, text: str) -> list[int]:
        """As `encode`, but lossy where the member cannot write the text."""
        ids = self.encode(text.encode())
        return ids if ids is not None else self._seen(text, self._continue)

    def _seen(self, text: str, rules: TextRules) -> list[int]:
        if "ByteLevel" not in self.decoder_types or self._keeps(text, rules):
            return self._ids(rules, text)
        kept = (char if self._keeps(char, self._continue) else REPLACEMENT for char in text)
        return self._ids(rules, "".join(kept))

    def _keeps(self, text: str, rules: TextRules) -> bool:
        normalizer = rules.tokenizer.normalizer
        normalized = normalizer.normalize_str(text) if normalizer else text
        return self.written(self._ids(rules, text)) == normalized.encode()

    def _ids(self, rules: TextRules, text: str) -> list[int]:
        return [rules.member_ids[i] for i in rules.tokenizer.encode(text, add_special_tokens=False).ids]

    def text_of_prompt(self, ids: Sequence[int]) -> bytes:
        """The text that a prompt's ids write: control tokens dropped, the space that the decoder strips stripped."""
        data = b"".join(self.token_bytes.get(i, b"") for i in ids)
        strips = self.decoder_types & {"Strip", "Metaspace", "WordPiece"}
        return data.removeprefix(b" ") if strips else data

    def read_prompt(self, data: bytes, is_open: bool) -> "AssistantState":
        """The state of an assistant after the text of a prompt; `is_open` does not matter to it."""
        text, begun = split_begun(data)
        start = AssistantState(data, [*self.prompt_prefix, *self.prompt_ids(text)])
        return append(self, start, begun) if begun else start

    def context(self, state: "AssistantState", resync: str) -> list[int] | None:
        """What it reads; None where it sits out."""
        if resync == "append":
            return None if state.held else state.appended
        text, begun = split_begun(state.text)
        begun_ids = self.byte_ids(begun)
        start = [*self.prompt_prefix, *self.prompt_ids(text)]
        return None if begun_ids is None else [*start, *begun_ids]

    def written_after(self, state: "AssistantState", data: bytes) -> bytes:
        """What it reads in place of bytes that are appended."""
        return state.held + data

    def loses_space(self, state: "AssistantState") -> bool:
        """Whether its entries lose a leading space here."""
        return False

    def input_embeddings(self) -> torch.Tensor:
        """Of shape `(num_rows, width)`."""
        return self.model.get_input_embeddings().weight

    @torch.no_grad()
    def last_logits(self, context: Sequence[int], count: int) -> torch.Tensor:
        """The logits after the last ids, of shape `(count, vocab_size)`."""
        if len(context) < count:
            raise ValueError(f"{self.name} has no token to start from.")
        ids = torch.tensor([list(context)], device=self.model.device)
        output = self.model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
        return output.logits[0, -count:].cpu()

    def entry_logits(self, context: Sequence[int]) -> tuple[dict[Key, float], list[float]]:
        """The logits of the entries after these ids (several ids: their log-sum-exp), and those of the ids."""
        row = self.last_logits(context, 1)[0].tolist()
        logits = {data: _logsumexp([row[i] for i in ids]) for data, ids in self.entries.items()}
        if self.control_eos:
            logits[EOS] = _logsumexp([row[i] for i in self.control_eos])
        return logits, row


@functools.cache
def _gpt2_bytes() -> dict[str, int]:
    printable = [byte for byte in range(256) if 33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{chr(b): b for b in printable}, **{chr(256 + rank): b for rank, b in enumerate(others)}}


def _parts(spec: object, name: str) -> Iterable:
    """All values under a key, at any depth."""
    if isinstance(spec, dict):
        if name in spec:
            yield spec[name]
        for value in spec.values():
            yield from _parts(value, name)
    elif isinstance(spec, list):
        for value in spec:
            yield from _parts(value, name)


def _text_only(
    spec: dict,
    vocab: dict[str, int],
    hidden: set[str],
    made: dict[str, TextRules],
    *,
    inserts_space: bool,
    normalizes: bool,
) -> TextRules:
    """A copy of a tokenizer that cannot produce the tokens in `hidden` from text, and adds nothing at the ends.

    Replacing spaces by the space sign is spelling, no normalization, and always kept. `made` has the copies of other
    rules: where the tokenizer has none of them, it is the same copy, which takes seconds to make.
    """
    added = [token for token in spec["added_tokens"] if token["content"] not in hidden]
    model = dict(spec["model"])
    unreachable = {token: f"\U0010ffff{rank}" for rank, token in enumerate(sorted(hidden - {model.get("unk_token")}))}
    if isinstance(model["vocab"], list):
        model["vocab"] = [[unreachable.get(token, token), score] for token, score in model["vocab"]]
    else:
        model["vocab"] = {unreachable.get(token, token): i for token, i in model["vocab"].items()}
    if "merges" in model:
        model["merges"] = [pair for pair in model["merges"] if unreachable.keys().isdisjoint((*pair, "".join(pair)))]

    def keeps(rule: dict) -> bool:
        if rule["type"] == "Prepend":
            return inserts_space
        return normalizes or (rule["type"] == "Replace" and rule["content"] == SPACE_SIGN)

    normalizer = spec["normalizer"]
    rules = normalizer["normalizers"] if normalizer and normalizer["type"] == "Sequence" else [normalizer]
    kept = [rule for rule in rules if rule and keeps(rule)]
    normalizer = {"type": "Sequence", "normalizers": kept} if kept else None
    pre_tokenizer = copy.deepcopy(spec["pre_tokenizer"])
    if pre_tokenizer and not inserts_space and {"WhitespaceSplit", "Metaspace"} <= set(_parts(pre_tokenizer, "type")):
        # It cuts white space out, so that a space of the text would be none before the next word.
        pre_tokenizer["pretokenizers"] = [r for r in pre_tokenizer["pretokenizers"] if r["type"] != "WhitespaceSplit"]
        if normalizes:
            own = normalizer["normalizers"] if normalizer else []
            one_space = {"type": "Replace", "pattern": {"Regex": r"\s+"}, "content": " "}
            no_space = {"type": "Replace", "pattern": {"Regex": r"\s+$"}, "content": ""}
            normalizer = {"type": "Sequence", "normalizers": [*own, one_space, no_space]}
    if pre_tokenizer and not inserts_space:
        for rule in pre_tokenizer.get("pretokenizers", [pre_tokenizer]):
            if rule["type"] == "Metaspace":
                rule["prepend_scheme"] = "never"
            elif rule["type"] == "ByteLevel":
                rule["add_prefix_space"] = False
    key = json.dumps([normalizer, pre_tokenizer])
    if key in made:
        return made[key]
    own = {"added_tokens": added, "model": model, "normalizer": normalizer, "pre_tokenizer": pre_tokenizer}
    nothing = dict.fromkeys(("post_processor", "truncation", "padding"))
    tokenizer = Tokenizer.from_str(json.dumps({**spec, **own, **nothing}))
    spelled = {name: token for token, name in unreachable.items()}
    made[key] = TextRules(tokenizer, {i: vocab[spelled.get(name, name)] for name, i in tokenizer.get_vocab().items()})
    return made[key]


def is_utf8(data: bytes) -> bool:
    return data.decode(errors="replace").encode() == data


def _runs(data: bytes) -> list[str | bytes]:
    """Cut bytes into text and what is no complete UTF-8."""
    chars = data.decode(errors="surrogateescape")
    groups = groupby(chars, key=lambda char: "\udc80" <= char <= "\udcff")
    runs = ((broken, "".join(group)) for broken, group in groups)
    return [run.encode(errors="surrogateescape") if broken else run for broken, run in runs]


def split_begun(data: bytes) -> tuple[str, bytes]:
    """The text that the bytes write, and the bytes of the character that they begin at their end."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(data)
    return text, decoder.getstate()[0]


def _logsumexp(values: Sequence[float]) -> float:
    highest = max(values)
    if len(values) == 1 or highest == -math.inf:
        return highest
    return highest + math.log(sum(math.exp(value - highest) for value in values))


def _softmax(logits: dict[Key, float]) -> dict[Key, float]:
    total = _logsumexp(list(logits.values()))
    return {key: math.exp(logit - total) for key, logit in logits.items()}


def _softmaxes(logits: list[dict[Key, float] | None]) -> list[dict[Key, float] | None]:
    return [_softmax(by_key) if by_key is not None else None for by_key in logits]


def _average(weights: Sequence[float], members: Sequence[dict[Key, float] | None]) -> dict[Key, float]:
    fused: dict[Key, float] = {}
    for weight, probs in zip(weights, members, strict=True):
        if weight:
            for key, prob in probs.items():
                fused[key] = fused.get(key, 0.0) + weight * prob
    return fused


# --- Contexts, distributions and choices (sections 2 to 5) ----------------------------------------------------------


@dataclass(frozen=True)
class AssistantState:
    text: bytes
    """The prompt's text and all that was generated."""
    appended: list[int] = field(default_factory=list)
    """The context of an assistant that appends."""
    held: bytes = b""
    """The begun character that an appending assistant without byte tokens waits for."""


@dataclass(frozen=True)
class State:
    primary_ids: list[int]
    assistants: list[AssistantState]
    prompt_length: int = 0
    """How many of the primary's ids are the prompt."""


@dataclass
class Step:
    fused: dict[Key, float]
    """GaC: by entry of the union. UniTE: by key of the union of the best k. Methods in the primary's space: by entry of
    the primary. What the primary cannot write is gone."""
    columns: dict[int, float]
    """`fused` on the primary's ids; ids that are not listed have nothing."""
    contexts: list[list[int] | None]
    """What each member was run on; None if it was not."""
    members: list[dict[Key, float] | None]
    """Each member's own distribution (UniTE: over the keys of `fused`, before the primary's limits)."""
    weights: list[float]
    """As used: 0 for members that sat out; sum 1, but for log space."""
    eos_id: int | None
    """The primary's id that EOS is written as."""
    is_closed: bool = False
    """Whether the gate left this step to its own member."""


class Reference:
    """An ensemble of members, the first of which is the primary.

    With one member, or all weight on the primary, the library runs the primary's own `generate`, which does not pool
    ids of the same bytes: compare with that instead.

    Where the semantics leave something open:

    - The gate is not asked in a step that its member sits out; the step is then open. A closed step is the method on
      the gate's member alone: pooled by entry, UniTE cut to its best k, DeePEn's logits decayed.
    - Log space. The entries are those of the members that run in the step. A missing entry takes the log-probability
      of that id alone, not of the ids of the same bytes. Every member's log-probabilities are normalized over its
      entries and EOS. EOS has no mass in a member without an end id. When a member sits out, the sum of the weights
      is kept if none is negative, else they stay as given. The cut-off compares the same log-probabilities that are
      summed, so an entry that the primary lacks stands and falls with its first id. It needs the primary to run even
      at weight 0, and in a step that is closed on an assistant.

    Args:
        members: At least one.
        method: `"gac"` or `"unite"`.
        weights: One a member, uniform by default, or a function of the ensemble and the state that gives them.
        top_k: For UniTE.
        threshold: Where the gate's highest probability is above this, the gate's member decides alone.
        gate: Index of the member that is asked; it may have weight 0.
        space: For GaC: `"linear"` or `"log"`.
        alpha: For log space: drop what has less than this times the primary's highest probability.
        resync: `"append"` or `"retokenize"`, the method's own by default.
    """

    resyncs = {"gac": "append", "unite": "retokenize"}
    """How the contexts of assistants grow, by method."""

    def __init__(
        self,
        members: Sequence[ReferenceMember],
        method: str = "gac",
        weights: Sequence[float] | Callable[["Reference", State], Sequence[float]] | None = None,
        top_k: int = 10,
        threshold: float | None = None,
        gate: int = 0,
        space: str = "linear",
        alpha: float | None = None,
        resync: str | None = None,
    ):
        if method not in self.resyncs:
            raise ValueError(f"Unknown method {method!r}.")
        if space not in ("linear", "log") or (space == "log" and method != "gac"):
            raise ValueError(f"{method} has no space {space!r}.")
        if alpha is not None and space == "linear":
            raise ValueError("alpha is for log space.")
        self.members, self.primary, self.assistants = list(members), members[0], list(members[1:])
        self.method, self.resync, self.top_k = method, resync or self.resyncs[method], top_k
        self.threshold, self.gate, self.space, self.alpha = threshold, gate, space, alpha
        if callable(weights):
            self.weights = weights
        else:
            self.weights = [float(weight) for weight in weights or [1 / len(members)] * len(members)]

    # Contexts

    def prompt_state(self, primary_prompt_ids: Sequence[int]) -> State:
        """The state after a prompt, given as the primary's ids without padding."""
        data = self.primary.text_of_prompt(primary_prompt_ids)
        text, _ = split_begun(data)
        is_open = not data or text[-1:].isspace() or primary_prompt_ids[-1] in self.primary.control
        states = [member.read_prompt(data, is_open) for member in self.assistants]
        return State(list(primary_prompt_ids), states, len(primary_prompt_ids))

    def advance(self, state: State, chosen: Key | Sequence[int]) -> State:
        """The state after an entry was written, given as its key or as the primary's ids."""
        if isinstance(chosen, bytes):
            ids, data = self.primary.encode(chosen), chosen
        elif chosen == EOS:
            ids, data = self.primary.control_eos[:1], b""
        elif isinstance(chosen, tuple) and chosen[0] == "control":
            ids, data = [chosen[1]], b""
        else:
            ids, data = list(chosen), b"".join(self.primary.token_bytes.get(i, b"") for i in chosen)
        states = state.assistants
        if data:
            states = [
                replace(append(member, old, data), text=old.text + data)
                for member, old in zip(self.assistants, states, strict=True)
            ]
        return State([*state.primary_ids, *ids], states, state.prompt_length)

    def contexts(self, state: State) -> list[list[int] | None]:
        """What each member reads; None for those that sit out."""
        contexts = [state.primary_ids]
        for member, own in zip(self.assistants, state.assistants, strict=True):
            contexts.append(member.context(own, self.resync))
        return contexts

    # Distributions

    def distribution(self, state: State) -> Step:
        pairs = zip(self.assistants, state.assistants, strict=True)
        lose_space = any(member.loses_space(own) for member, own in pairs)
        return (self._at_start if lose_space else self)._distribution(state)

    @functools.cached_property
    def _at_start(self) -> "Reference":
        """The same with members whose entries have lost a leading space."""
        return self._with_members([getattr(member, "without_space", member) for member in self.members])

    def _with_members(self, members: list[ReferenceMember]) -> "Reference":
        twin = copy.copy(self)
        twin.members, twin.primary, twin.assistants = members, members[0], members[1:]
        return twin

    def _distribution(self, state: State) -> Step:
        contexts = self.contexts(state)
        given = [float(w) for w in (self.weights(self, state) if callable(self.weights) else self.weights)]
        is_closed = self._is_closed(contexts)
        if is_closed:
            given = [float(index == self.gate) for index in range(len(self.members))]
        weights = [w if c is not None else 0.0 for c, w in zip(contexts, given, strict=True)]
        if not any(weights):
            weights[0] = 1.0
        if self.space == "linear":
            weights = [weight / sum(weights) for weight in weights]
        elif min(given) >= 0:
            weights = [weight * sum(given) / sum(weights) for weight in weights]
        runs = [bool(w) or (index == 0 and self._needs_primary(is_closed)) for index, w in enumerate(weights)]
        contexts = [context if run else None for context, run in zip(contexts, runs, strict=True)]

        logits, rows = [], []
        for index, context in enumerate(contexts):
            by_key, row = self._logits(index, context) if context is not None else (None, None)
            logits.append(by_key)
            rows.append(row)

        fused, members, weights = self._fuse(weights, logits, rows)
        eos_id = self._eos_id(rows[0])
        spelled = {key: ids for key in fused if (ids := self._primary_ids(key, eos_id))}
        total = sum(fused[key] for key in spelled)
        if not total:
            raise ValueError("The primary cannot write any of the entries that have probability.")
        fused = {key: fused[key] / total for key in spelled}
        columns: dict[int, float] = {}
        for key, prob in fused.items():
            columns[spelled[key][0]] = columns.get(spelled[key][0], 0.0) + prob
        return Step(fused, columns, contexts, members, weights, eos_id, is_closed)

    def _logits(self, index: int, context: list[int]) -> tuple[dict[Key, float], list[float]]:
        """A member's logits by entry, with the control tokens that are entries of the primary, and by id."""
        member = self.members[index]
        by_key, row = member.entry_logits(context)
        if index == 0:
            others = member.control - set(member.control_eos) - member.rowless
            by_key |= {("control", i): row[i] for i in others}
        return by_key, row

    def _is_closed(self, contexts: list[list[int] | None]) -> bool:
        if self.threshold is None or contexts[self.gate] is None:
            return False
        by_key, _ = self._logits(self.gate, contexts[self.gate])
        return max(_softmax(by_key).values()) > self.threshold

    def _needs_primary(self, is_closed: bool) -> bool:
        """Whether the primary runs in a step in which it has no weight."""
        return self.alpha is not None

    def _fuse(
        self, weights: list[float], logits: list[dict[Key, float] | None], rows: list[list[float] | None]
    ) -> tuple[dict[Key, float], list[dict[Key, float] | None], list[float]]:
        """The fused distribution, up to a factor, each member's own, and the weights as used."""
        if self.space == "log":
            return self._product(weights, logits, rows), _softmaxes(logits), weights
        if self.method == "unite":
            logits = self._over_best_keys(logits, rows)
        members = _softmaxes(logits)
        return _average(weights, members), members, weights

    def _product(
        self, weights: list[float], logits: list[dict[Key, float] | None], rows: list[list[float] | None]
    ) -> dict[Key, float]:
        logits = [
            {key: logit for key, logit in by_key.items() if key == EOS or isinstance(key, bytes)} if by_key else None
            for by_key in logits
        ]
        keys = {key for by_key, weight in zip(logits, weights, strict=True) if weight for key in by_key}
        logprobs: list[dict[Key, float] | None] = []
        for member, by_key, row in zip(self.members, logits, rows, strict=True):
            if by_key is None:
                logprobs.append(None)
                continue
            total, own = _logsumexp(list(by_key.values())), {}
            for key in keys:
                own[key] = by_key.get(key, -math.inf) - total
                if key not in by_key and key != EOS and (ids := member.encode(key)):
                    own[key] = row[ids[0]] - total
            logprobs.append(own)
        if self.alpha is not None and logprobs[0] is not None:
            least = max(logprobs[0].values()) + (math.log(self.alpha) if self.alpha else -math.inf)
            keys = {key for key in keys if logprobs[0][key] >= least}
        sums = {}
        for key in keys:
            terms = [(weight, own[key]) for weight, own in zip(weights, logprobs, strict=True) if weight]
            sums[key] = sum(weight * logprob for weight, logprob in terms if weight > 0 or logprob != -math.inf)
        written = {key: value for key, value in sums.items() if key == EOS or self.primary.encode(key) is not None}
        highest = max(written.values(), default=-math.inf)
        if highest == -math.inf:
            raise ValueError("No entry that the primary can write has probability.")
        return {key: math.exp(value - highest) for key, value in written.items()}

    def _over_best_keys(self, logits: list[dict[Key, float] | None], rows: list[list[float] | None]) -> list:
        union: set[Key] = set()
        for member, by_key in zip(self.members, logits, strict=True):
            if by_key is not None:
                union.update(self._best_keys(member, by_key))
        extended = []
        for member, by_key, row in zip(self.members, logits, rows, strict=True):
            if by_key is None:
                extended.append(None)
                continue
            own = {}
            for key in union:
                own[key] = by_key.get(key, -math.inf)
                if key not in by_key and isinstance(key, bytes) and (ids := member.encode(key)):
                    own[key] = row[ids[0]]
            extended.append(own)
        return extended

    def _best_keys(self, member: ReferenceMember, by_key: dict[Key, float]) -> list[Key]:
        return heapq.nsmallest(self.top_k, by_key, key=lambda key: (-by_key[key], _own_id(member, key)))

    def _eos_id(self, row: list[float] | None) -> int | None:
        ids = self.primary.control_eos
        if not ids:
            return None
        return max(ids, key=lambda i: row[i]) if row is not None else ids[0]

    def _primary_ids(self, key: Key, eos_id: int | None) -> list[int] | None:
        if key == EOS:
            return None if eos_id is None else [eos_id]
        return self.primary.encode(key) if isinstance(key, bytes) else [key[1]]

    # Choices

    @functools.cached_property
    def union_index(self) -> dict[Key, int]:
        """Where an entry stands in the union vocabulary: the primary's ids first, then what each assistant adds."""
        primary = self.primary
        index: dict[Key, int] = {data: primary.canonical_id(data) for data in primary.entries}
        index |= {("control", i): i for i in primary.control}
        if primary.control_eos:
            index[EOS] = primary.control_eos[0]
        starts = [member.without_space for member in self.assistants if hasattr(member, "without_space")]
        for member in [*self.assistants, *starts]:
            for data in sorted(member.entries, key=lambda data: _own_id(member, data)):
                index.setdefault(data, primary.num_rows + len(index))
        return index

    def choose(self, step: Step) -> tuple[list[int], float]:
        """The primary's ids of the best entry, and how far it is ahead of the next in log-probability."""
        if self.method == "unite":
            best = heapq.nsmallest(2, step.columns, key=lambda i: (-step.columns[i], i))
            return best[:1], _margin([step.columns[i] for i in best])
        best = heapq.nsmallest(2, step.fused, key=lambda key: (-step.fused[key], self.union_index[key]))
        return self._primary_ids(best[0], step.eos_id), _margin([step.fused[key] for key in best])

    def greedy(self, primary_prompt_ids: Sequence[int], max_new_tokens: int) -> tuple[list[int], list[float]]:
        """Decode greedily.

        Returns:
            The new ids, the end id included, and the margin of every decision (one a step, not one an id).
        """
        state, new_ids, margins = self.prompt_state(primary_prompt_ids), [], []
        while len(new_ids) < max_new_tokens:
            ids, margin = self.choose(self.distribution(state))
            margins.append(margin)
            state = self.advance(state, ids)
            for i in ids:
                new_ids.append(i)
                if i in self.primary.eos_ids or len(new_ids) == max_new_tokens:
                    return new_ids, margins
        return new_ids, margins

    def distributions_along(
        self, primary_prompt_ids: Sequence[int], forced_continuation_ids: Sequence[int], positions: Iterable[int]
    ) -> dict[int, dict[int, float]]:
        """The fused columns by position, each id of the continuation taken as a choice of its own.

        Position t is what is said about `forced_continuation_ids[t]`: 0 follows the prompt.
        """
        wanted, found = set(positions), {}
        state = self.prompt_state(primary_prompt_ids)
        for t in range(max(wanted) + 1):
            if t in wanted:
                found[t] = self.distribution(state).columns
            if t < len(forced_continuation_ids):
                state = self.advance(state, [forced_continuation_ids[t]])
        return found


def append(member: ReferenceMember, state: AssistantState, data: bytes) -> AssistantState:
    """Let the context of an appending assistant grow by what a step wrote."""
    data = member.written_after(state, data)
    ids = member.encode(data)
    if ids is not None:
        return replace(state, appended=[*state.appended, *ids], held=b"")
    text, begun = split_begun(data)
    begun_ids = member.encode(begun) if begun else []
    ids = [*state.appended, *(member.append_ids(text) if text else [])]
    if begun_ids is None:
        return replace(state, appended=ids, held=begun)
    return replace(state, appended=[*ids, *begun_ids], held=b"")


def _own_id(member: ReferenceMember, key: Key) -> int:
    if key == EOS:
        return member.control_eos[0]
    return member.encode(key)[0] if isinstance(key, bytes) else key[1]


def _margin(best_two: Sequence[float]) -> float:
    if len(best_two) < 2 or best_two[1] == 0:
        return math.inf
    return math.log(best_two[0]) - math.log(best_two[1])
