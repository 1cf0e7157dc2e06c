"""What must hold for every method and any members: each contract takes an ensemble and a method, and asserts it.

Contracts decode greedily and change nothing that outlives them, so that many of them may share one ensemble.
"""

import copy
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, TextStreamer, pipeline

from hf_ensemble import EnsembleForCausalLM, MemberConfig, MemberError, SweetSpanConfig
from tests import tiny
from tests.reference import EOS, ReferenceMember

AVERAGING = ("gac", "unite")
"""Methods of which a test can say what members' distributions are averaged to."""

METHODS = (*AVERAGING, "deepen")

MAPPED = ("mined", "eva")
"""Methods that move entries to the primary's, then average; all else that they do is tested with GaC."""

SPANS = SweetSpanConfig(max_span_tokens=8)
"""Random members hardly ever complete a word."""

CACHE_MODES = {
    "scripted": "repack",
    "llama": "repack",
    "gpt2": "repack",
    "gemma3_text": "repack",
    "mistral": "repack",
    "mixtral": "repack",
    "mamba": "row_tokens",
    "mamba2": "row_chunks",
    "falcon_h1": "row_chunks",
    "lfm2": "row_chunks",
    "jamba": "row_tokens",
}
"""How each architecture's cache can follow a text, as `tests/members/test_member.py` finds by trying; Gemma-3 and Mistral have
a window of 8."""

PROMPTS = ("The capital of France is", "The cat", "Once upon a time there was a king")
NUM_NEW = 6
CLOSE = 1e-4
"""Two entries nearer than this in log-probability may change places by rounding."""


# --- Ensembles ------------------------------------------------------------------------------------------------------

TOKENIZERS = {
    "smol": tiny.smol_like,
    "byte-level": functools.partial(tiny.byte_level_bpe, 500, pad="<|end|>"),
    "qwen": functools.partial(tiny.qwen_like, vocab_size=350),
    "gemma": tiny.gemma_like,
    "llama2": functools.partial(tiny.sentencepiece_bpe, 600, style="llama2"),
    "unigram": tiny.unigram,
    "wordpiece": tiny.wordpiece,
}


@functools.cache
def tokenizer_of(name: str):
    return TOKENIZERS[name]()


@functools.cache
def model_of(architecture: str, tokenizer: str, seed: int = 0):
    return getattr(tiny, f"tiny_{architecture}")(tokenizer_of(tokenizer), seed=seed)


@dataclass(frozen=True)
class Recipe:
    """Architectures and tokenizers of an ensemble's members, the primary first."""

    members: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return " + ".join(f"{architecture}/{tokenizer}" for architecture, tokenizer in self.members)

    @functools.cached_property
    def ensemble(self) -> EnsembleForCausalLM:
        models = [model_of(*member, seed) for seed, member in enumerate(self.members)]
        return make_ensemble(models, [tokenizer_of(tokenizer) for _, tokenizer in self.members])


def make_ensemble(models: Sequence, tokenizers: Sequence, **options: Any) -> EnsembleForCausalLM:
    """Members are named `member-0`, `member-1`, …"""
    names = [MemberConfig(name=f"member-{index}") for index in range(len(models))]
    ensemble = EnsembleForCausalLM.from_members(models, tokenizers, member_configs=names, **options)
    for member in ensemble._members:
        mode = CACHE_MODES.get(member.model.config.model_type)
        if mode is not None:
            member.cache_mode = mode  # trying would take a tenth of many a test's time
    return ensemble


@functools.cache
def small():
    """A tokenizer of few entries."""
    return tiny.byte_level_bpe(400)


@functools.cache
def large():
    """Has ` capital`, which `small` writes with several ids."""
    return tiny.byte_level_bpe(500)


CORE_RECIPES = (
    Recipe((("llama", "smol"), ("gemma3", "gemma"))),
    Recipe((("gemma3", "gemma"), ("mixtral", "unigram"))),
    Recipe((("gpt2", "byte-level"), ("llama", "wordpiece"), ("falcon_h1", "llama2"))),
)
"""For every contract."""

RECIPES = (
    *CORE_RECIPES,
    Recipe((("mixtral", "unigram"), ("jamba", "byte-level"))),
    Recipe((("lfm2", "llama2"), ("gpt2", "qwen"))),
    Recipe((("falcon_h1", "qwen"), ("lfm2", "gemma"))),
    Recipe((("jamba", "byte-level"), ("mistral", "smol"))),
    Recipe((("llama", "wordpiece"), ("mamba", "gemma"))),
    Recipe((("mamba2", "gemma"), ("mamba2", "smol"))),
)
"""For the contracts that lean on caches and positions."""


def name_of(method: Any) -> str:
    return method if isinstance(method, str) else method.name


def cases(recipes: Sequence[Recipe], methods: Sequence[Any]) -> list[Any]:
    """Recipes with methods: quick are every method on the first recipe and GaC on the third, the others are marked slow."""
    found = []
    for recipe, method in itertools.product(recipes, methods):
        is_quick = recipe is recipes[0] or (method == "gac" and recipe is recipes[2])
        marks = [] if is_quick else [pytest.mark.slow]
        found.append(pytest.param(recipe, method, marks=marks, id=f"{recipe}-{name_of(method)}"))
    return found


# --- Running and comparing ------------------------------------------------------------------------------------------


def prompt_rows(ensemble: EnsembleForCausalLM, prompts: Sequence[str] = PROMPTS) -> list[list[int]]:
    return [ensemble.tokenizer(prompt)["input_ids"] for prompt in prompts]


def padded(rows: Sequence[Sequence[int]], *, side: str = "left", fill: Callable[[int], int]) -> dict[str, Tensor]:
    """Rows as a batch; `fill` gives the n-th padding id of a row."""
    width = max(map(len, rows))
    ids, mask = [], []
    for row in rows:
        pads = [fill(n) for n in range(width - len(row))]
        real, empty = [1] * len(row), [0] * len(pads)
        ids.append([*pads, *row] if side == "left" else [*row, *pads])
        mask.append([*empty, *real] if side == "left" else [*real, *empty])
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def run(model, rows: Sequence[Sequence[int]] | dict[str, Tensor], **options: Any):
    """Greedy output with ids and, but for spans, distributions, for rows of one length or a padded batch."""
    if not isinstance(rows, dict):
        rows = {"input_ids": torch.tensor(rows), "attention_mask": torch.ones(len(rows), len(rows[0])).long()}
    settings = {"max_new_tokens": NUM_NEW, "do_sample": False, "return_dict_in_generate": True}
    method = options.get("method") or getattr(model.config, "method", None)
    settings["output_logits"] = SPANS.name not in (method, getattr(method, "name", None))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the primary .* wrote the control token")
        output = model.generate(**rows, **{**settings, **options})
    if not isinstance(output, Tensor):
        output.num_new = output.sequences.shape[1] - rows["input_ids"].shape[1]
    return output


def greedy(ensemble: EnsembleForCausalLM, number: int, method: Any):
    """What `run` gives for a prompt alone, computed once for each `generate` that the class may be given."""
    return _greedy(ensemble, number, method, vars(EnsembleForCausalLM)["generate"])


@functools.cache
def _greedy(ensemble: EnsembleForCausalLM, number: int, method: Any, generate: Any):
    return run(ensemble, prompt_rows(ensemble)[number : number + 1], method=method)


def new_ids(output, row: int = 0, end_ids: Sequence[int] = ()) -> list[int]:
    """The ids that a row got, up to and including its end."""
    ids = output.sequences[row, output.sequences.shape[1] - output.num_new :].tolist()
    end = next((at for at, i in enumerate(ids) if i in end_ids), len(ids))
    return ids[: end + 1]


def assert_same_choices(found: Sequence[int], expected: Sequence[int], logits: Sequence[Tensor] | None) -> None:
    """Two rows of ids are the same up to the first step whose best two are too close to tell apart."""
    assert len(found) > 0
    if logits is None:
        assert list(found) == list(expected)
        return
    for step, (a, b) in enumerate(zip(found, expected, strict=False)):
        if a != b:
            best = logits[step].log_softmax(-1).topk(2).values
            assert best[0] - best[1] < CLOSE, f"step {step}: {list(found)} is not {list(expected)}"
            return
    assert len(found) == len(expected)


def assert_same_output(found, expected) -> None:
    """Ids are equal, and distributions, where there are any, up to rounding."""
    assert found.sequences.tolist() == expected.sequences.tolist()
    if found.logits is None or expected.logits is None:
        return
    for step, (a, b) in enumerate(zip(found.logits, expected.logits, strict=True)):
        torch.testing.assert_close(
            a.log_softmax(-1).exp(), b.log_softmax(-1).exp(), atol=1e-5, rtol=1e-3, msg=lambda m, s=step: f"{s}: {m}"
        )


@contextmanager
def changed_logits(model, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    def hook(module, args, output):
        output.logits = change(output.logits)
        return output

    handle = model.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def from_call(number: int, change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Leave the logits of the first `number` forwards as they are."""
    calls = iter(range(10**6))
    return lambda logits: change(logits) if next(calls) >= number else logits


@functools.cache
def reference_of(model, tokenizer) -> ReferenceMember:
    return ReferenceMember(model, tokenizer)


def reference_member(ensemble: EnsembleForCausalLM, index: int) -> ReferenceMember:
    return reference_of(ensemble.members[index], ensemble.tokenizers[index])


@functools.cache
def repeated(model, tokenizer, count: int) -> EnsembleForCausalLM:
    return make_ensemble([model] * count, [tokenizer] * count)


def reads_as_written(member: ReferenceMember, ids: Sequence[int]) -> bool:
    """Whether the member would encode the text that these ids write as these ids."""
    text = member.text_of_prompt(ids).decode(errors="replace")
    return [*member.prompt_prefix, *member.prompt_ids(text)] == list(ids)


# --- Contracts ------------------------------------------------------------------------------------------------------


def an_ensemble_of_one_is_that_model(ensemble: EnsembleForCausalLM, method: Any) -> None:
    rows = prompt_rows(ensemble)[:1]
    one = repeated(ensemble.members[0], ensemble.tokenizers[0], 1)
    assert_same_output(run(one, rows, method=method), run(ensemble.members[0], rows))


def the_same_model_twice_is_that_model(ensemble: EnsembleForCausalLM, method: Any) -> None:
    """Over the entries that it proposes: control tokens that do not end a text are the primary's only.

    Compared as long as both read the same: until an id is written that is not the canonical one of its entry, or,
    where a method encodes the whole text again, until that gives other ids than the model wrote. DeePEn's search decays
    all logits a little, so that its distributions are only near.
    """
    is_near = method == "deepen"
    close, atol, rtol = (0.2, 0.05, 0.2) if is_near else (CLOSE, 1e-5, 1e-3)
    member = reference_member(ensemble, 0)
    entries = [*member.entries.values(), *([member.control_eos] if member.control_eos else [])]
    entry_of = torch.tensor([(i, entry) for entry, ids in enumerate(entries) for i in ids]).T
    twice = repeated(member.model, member.tokenizer, 2)
    num_compared = 0
    for row in prompt_rows(ensemble)[1:]:
        found, expected = run(twice, [row], method=method), run(member.model, [row])
        ids = new_ids(expected)
        for step, (a, b) in enumerate(zip(found.logits, expected.logits, strict=True)):
            pooled = torch.zeros(2, len(entries))
            pooled.index_add_(1, entry_of[1], torch.cat([a, b]).softmax(-1)[:, entry_of[0]])
            mine, its = (pooled * (pooled[0] > 0)).unbind()
            torch.testing.assert_close(mine / mine.sum(), its / its.sum(), atol=atol, rtol=rtol)
            num_compared += 1
            chosen = new_ids(found)[step]
            if its.topk(2).values.log().diff().abs() > close:
                assert chosen in entries[its.argmax()]
            if chosen != ids[step] or (method != "gac" and not reads_as_written(member, [*row, *ids[: step + 1]])):
                break
    assert num_compared >= 2


def all_weight_on_the_primary_is_the_primary(ensemble: EnsembleForCausalLM, method: Any) -> None:
    """Nor do the others run: one that gives NaN is no reason to fail."""
    rows = prompt_rows(ensemble)[:1]
    weights = [1, *[0] * (len(ensemble.members) - 1)]
    with changed_logits(ensemble.members[1], lambda logits: logits * torch.nan):
        found = run(ensemble, rows, method=method, weights=weights)
    assert_same_output(found, run(ensemble.members[0], rows))


def all_weight_on_an_assistant_is_its_text(ensemble: EnsembleForCausalLM, method: Any) -> None:
    """For GaC: the bytes are those of member 1 alone, kept to entries that the primary can write."""
    primary, alone = reference_member(ensemble, 0), reference_member(ensemble, 1)
    weights = [0, 1, *[0] * (len(ensemble.members) - 2)]
    [row] = prompt_rows(ensemble)[:1]
    output = run(ensemble, [row], method=method, weights=weights)
    found = b"".join(primary.token_bytes.get(i, b"") for i in new_ids(output, end_ids=primary.eos_ids))

    # What the primary's ids write: its tokenizer may have changed the text.
    ids, expected = [*alone.prompt_prefix, *alone.prompt_ids(primary.text_of_prompt(row).decode())], b""
    while len(expected) < len(found):
        logits, _ = alone.entry_logits(ids)
        best = max((key for key in logits if key == EOS or primary.encode(key)), key=logits.get)
        if best == EOS:
            break
        ids, expected = [*ids, *alone.encode(best)], expected + best
    assert found
    assert expected[: len(found)] == found


def a_constant_on_a_members_logits_changes_nothing(ensemble: EnsembleForCausalLM, method: Any) -> None:
    rows = prompt_rows(ensemble)[:1]
    expected = greedy(ensemble, 0, method)
    for model in ensemble.members:
        with changed_logits(model, lambda logits: logits + 16.0):
            assert_same_output(run(ensemble, rows, method=method), expected)


def a_row_alone_is_the_row_in_a_batch(ensemble: EnsembleForCausalLM, method: Any) -> None:
    """Padded by the user on either side, whatever stands under a mask of 0."""
    rows = prompt_rows(ensemble)
    pad, size = ensemble.tokenizer.eos_token_id, len(ensemble.tokenizer)
    end_ids = [pad]
    alone = [greedy(ensemble, number, method) for number in range(len(rows))]
    expected = [new_ids(output, 0, end_ids) for output in alone]
    on_the_left = padded(rows, fill=lambda n: (37 * n + 11) % size)
    on_the_right = padded(rows, side="right", fill=lambda n: pad)
    for batch in (on_the_left, on_the_right):
        if batch is on_the_right:
            with pytest.warns(UserWarning, match="padded on the right"):
                found = run(ensemble, batch, method=method)
        else:
            found = run(ensemble, batch, method=method)
        for row, output in enumerate(alone):
            own = new_ids(found, row, end_ids)
            if output.logits is None:
                assert own == expected[row]
                continue
            assert_same_choices(own, expected[row], [step[0] for step in output.logits])
            torch.testing.assert_close(found.logits[0][row].exp(), output.logits[0][0].exp(), atol=1e-4, rtol=1e-3)


def the_cache_changes_nothing(ensemble: EnsembleForCausalLM, method: Any) -> None:
    rows = prompt_rows(ensemble)[:1]
    expected = greedy(ensemble, 0, method)
    found = run(ensemble, rows, method=method, use_cache=False)
    logits = None if expected.logits is None else [row[0] for row in expected.logits]
    assert_same_choices(new_ids(found), new_ids(expected), logits)


class Recorder(TextStreamer):
    """Keeps what it is given and what it would print."""

    def __init__(self, tokenizer):
        super().__init__(tokenizer, skip_prompt=True)
        self.ids: list[int] = []
        self.text = ""
        self.num_ends = 0

    def put(self, value):
        self.ids += value.flatten().tolist()
        super().put(value)

    def on_finalized_text(self, text, stream_end=False):
        self.text += text
        self.num_ends += stream_end


def the_streamed_text_is_the_final_text(ensemble: EnsembleForCausalLM, method: Any) -> None:
    rows = prompt_rows(ensemble)[:1]
    streamer = Recorder(ensemble.tokenizer)
    output = run(ensemble, rows, method=method, streamer=streamer)
    assert streamer.ids == output.sequences[0].tolist()
    if not reference_member(ensemble, 0).decoder_types & {"Strip", "WordPiece"}:
        # These drop a space after a line break when streamed, as with a single model.
        assert streamer.text == ensemble.tokenizer.decode(new_ids(output))
    assert streamer.num_ends == 1


def saved_and_loaded_is_the_same(ensemble: EnsembleForCausalLM, method: Any, folder: Path) -> None:
    rows = prompt_rows(ensemble)[:1]
    expected = greedy(ensemble, 0, method)
    paths = []
    for index, (model, tokenizer) in enumerate(zip(ensemble.members, ensemble.tokenizers, strict=True)):
        paths.append(folder / f"member-{index}")
        model.save_pretrained(paths[-1])
        tokenizer.save_pretrained(paths[-1])
    loaded = EnsembleForCausalLM.from_pretrained(paths, method=method)
    assert_same_output(run(loaded, rows), expected)
    loaded.save_pretrained(folder / "ensemble")
    for cls in (EnsembleForCausalLM, AutoModelForCausalLM):
        again = cls.from_pretrained(folder / "ensemble")
        assert isinstance(again, EnsembleForCausalLM)
        assert again.config.method == loaded.config.method
        assert_same_output(run(again, rows), expected)
    text_pipeline = pipeline("text-generation", model=str(folder / "ensemble"))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the primary .* wrote the control token")
        found = text_pipeline(PROMPTS[0], max_new_tokens=NUM_NEW, do_sample=False, return_tensors=True)
    assert found[0]["generated_token_ids"] == expected.sequences[0].tolist()


def state_of(ensemble: EnsembleForCausalLM) -> dict[str, Any]:
    """Everything that a call must leave as it was."""
    state: dict[str, Any] = {
        "ensemble": (ensemble.config.to_dict(), ensemble.generation_config.to_dict(), ensemble.training),
        "random": torch.get_rng_state().tolist(),
        "threads": torch.get_num_threads(),
        "grad": torch.is_grad_enabled(),
    }
    for index, (model, tokenizer) in enumerate(zip(ensemble.members, ensemble.tokenizers, strict=True)):
        state[f"model {index}"] = (
            model.config.to_dict(),
            model.generation_config.to_dict(),
            [(name, module.training) for name, module in model.named_modules()],
            [(name, p.requires_grad, p.grad, p.dtype, p._version) for name, p in model.named_parameters()],
            len(model._forward_hooks),
            sorted(vars(model)),
        )
        state[f"tokenizer {index}"] = (
            tokenizer.backend_tokenizer.to_str(),
            tokenizer.special_tokens_map,
            tokenizer.padding_side,
            tokenizer.truncation_side,
            {key: repr(value) for key, value in vars(tokenizer).items()},
        )
    return copy.deepcopy(state)


def a_call_leaves_nothing_behind(ensemble: EnsembleForCausalLM, method: Any) -> None:
    """Neither in the next result nor in anybody's configuration, tokenizer or training mode."""
    rows = prompt_rows(ensemble)[:1]
    run(ensemble, rows, method=method)
    ensemble.members[1].train()
    try:
        before = state_of(ensemble)
        first = run(ensemble, rows, method=method)
        between = {"method": method} if method == SPANS else {"method": method, "num_beams": 2}
        run(ensemble, prompt_rows(ensemble)[1:2], max_new_tokens=3, **between)
        second = run(ensemble, rows, method=method)
        after = state_of(ensemble)
    finally:
        ensemble.members[1].eval()
    for name, value in before.items():
        assert after[name] == value, name
    assert_same_output(second, first)


def control_tokens_in_a_users_text_are_text(ensemble: EnsembleForCausalLM, method: Any) -> None:
    """What an assistant reads is the text that spells its control tokens, and none of them after its own BOS."""
    spelled_by_primary = set(ensemble.tokenizer.all_special_tokens)
    for index in range(1, len(ensemble.members)):
        member = reference_member(ensemble, index)
        spelled = [token for token in member.tokenizer.all_special_tokens if token not in spelled_by_primary]
        assert spelled
        prompt = f"Say {' '.join(spelled)}{spelled[-1]} now"
        seen: list[int] = []

        def record(module, args, kwargs, seen=seen):
            ids, positions = kwargs["input_ids"], kwargs.get("position_ids")
            # A step of fixed width is padded on the left, by what is at no position of its own.
            begin = 0 if positions is None else max(0, int((positions[0] == 0).sum()) - 1)
            seen += ids[:, begin:].flatten().tolist()

        run(ensemble, prompt_rows(ensemble, PROMPTS[:1]), method=method, max_new_tokens=1)
        handle = member.model.register_forward_pre_hook(record, with_kwargs=True)
        try:
            run(ensemble, prompt_rows(ensemble, [prompt]), method=method)
        finally:
            handle.remove()
        start = len(member.prompt_prefix)
        assert seen[:start] == member.prompt_prefix
        unknown = {member.tokenizer.unk_token_id} if "WordPiece" in member.decoder_types else set()
        assert (member.control - unknown).isdisjoint(seen[start:])
        if "WordPiece" not in member.decoder_types:
            length = len(member.prompt_ids(prompt))
            assert member.text_of_prompt(seen[start : start + length]).decode() == prompt


def a_member_that_raises_is_named(ensemble: EnsembleForCausalLM, method: Any) -> None:
    rows = prompt_rows(ensemble)[:1]

    def fail(logits: Tensor) -> Tensor:
        raise ValueError("out of order")

    greedy(ensemble, 0, method)  # members have tried out their caches
    for index, model in enumerate(ensemble.members):
        for number in (0, 2):
            with (
                changed_logits(model, from_call(number, fail)),
                pytest.raises(MemberError, match=f"member-{index}.*out of order"),
            ):
                run(ensemble, rows, method=method, max_new_tokens=2 * NUM_NEW)


def a_member_that_gives_nan_is_named(ensemble: EnsembleForCausalLM, method: Any) -> None:
    """In any column, and infinite logits too."""
    rows = prompt_rows(ensemble)[:1]

    def some_nan(logits: Tensor) -> Tensor:
        return logits.index_fill(-1, torch.tensor([logits.shape[-1] // 2]), torch.nan)

    def some_inf(logits: Tensor) -> Tensor:
        return logits.index_fill(-1, torch.tensor([logits.shape[-1] // 2]), torch.inf)

    greedy(ensemble, 0, method)  # members have tried out their caches
    for index, model in enumerate(ensemble.members):
        cases = [(0, some_nan, {}), (2, some_inf, {}), (1, some_nan, {"num_beams": 2})]
        for number, change, options in cases[: 2 if method == SPANS else 3]:
            with (
                changed_logits(model, from_call(number, change)),
                pytest.raises(MemberError, match=f"member-{index}.*"),
            ):
                # An assistant does not run again while the primary writes control tokens.
                run(ensemble, rows, method=method, max_new_tokens=2 * NUM_NEW, **options)


EVERYWHERE = (a_row_alone_is_the_row_in_a_batch, the_cache_changes_nothing)
"""Contracts that lean on caches and positions."""

ABOUT_DISTRIBUTIONS = (
    an_ensemble_of_one_is_that_model,
    the_same_model_twice_is_that_model,
    all_weight_on_the_primary_is_the_primary,
    a_constant_on_a_members_logits_changes_nothing,
)

ABOUT_THE_CALL = (
    the_streamed_text_is_the_final_text,
    a_call_leaves_nothing_behind,
    control_tokens_in_a_users_text_are_text,
    a_member_that_raises_is_named,
    a_member_that_gives_nan_is_named,
)

CORE = (*ABOUT_DISTRIBUTIONS, *ABOUT_THE_CALL)
