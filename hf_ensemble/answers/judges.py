"""Models that judge answers: reward models, and PairRM, which compares two answers at a time."""

import functools
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerBase

from ..config import check_option, check_positive_integer
from ..errors import ConfigurationError
from .base import Turns
from .loaded import ModelSource, Reader, in_batches, learned_positions, padded_right, text_of, told_length

if TYPE_CHECKING:
    # Importing it takes most of a second, so only calls with a judge do.
    from transformers import PreTrainedModel

_MAX_SOURCE_LENGTH = 1224
"""Ids of a source that PairRM was trained to read, as published."""

_MAX_CANDIDATE_LENGTH = 412
"""Ids of each candidate beside a source of full length, as published."""

_MANY_TURNS = "Finish the following coversation in each i-th turn by filling in <Response i> with your response."
"""PairRM's instruction for conversations, misspelt as published."""


class LoadedJudge(ABC):
    """A judge that is ready to score."""

    @abstractmethod
    def scores(self, turns: Turns, answers: list[str]) -> list[float]:
        """Score answers to a conversation.

        Equal answers have equal scores.

        Args:
            turns: The conversation.
            answers: Texts, in which nothing is a control token.

        Returns:
            A score for each answer; the highest is best.

        Raises:
            ConfigurationError: If the judge cannot read them, or a score is NaN or infinite.
        """


@dataclass(frozen=True)
class RewardModel(ModelSource):
    """A sequence-classification model of one output, which scores an answer to a conversation.

    It reads conversation and answer in its chat template. If it has none, it reads a pair of texts, as cross-encoders
    such as OpenAssistant's reward models do: the conversation (a single user turn unchanged, otherwise each turn
    headed by its role) and the answer.

    Reference:
        OpenAssistant, "Reward model trained from human feedback",
        https://huggingface.co/OpenAssistant/reward-model-deberta-v3-large-v2
    """

    kind: ClassVar[str] = "reward"
    what: ClassVar[str] = "reward model"

    truncation: bool = False
    """Whether to cut the beginning (except BOS) of a conversation that is too long. The answer is never cut."""

    max_length: int | None = None
    """Number of ids that it reads. None: its number of learned positions, or else its tokenizer's limit."""

    chat_template: str | None = None
    """Jinja template for conversations. None: the tokenizer's own."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_option("truncation", self.truncation, isinstance(self.truncation, bool), "True or False")
        if self.max_length is not None:
            check_positive_integer("max_length", self.max_length)

    def load(self) -> "LoadedRewardModel":
        """Load the model and its tokenizer.

        Raises:
            ConfigurationError: If there is no such model or tokenizer, it has not exactly one output, or its head is not in
                the checkpoint.
        """
        num_outputs = self.load_config().num_labels
        if num_outputs != 1:
            raise ConfigurationError(
                f"{self.name} has {num_outputs} outputs (`num_labels`), but a reward model has one. Use a "
                "sequence-classification model with one output."
            )
        tokenizer = self.load_tokenizer()
        return LoadedRewardModel(self, self.load_model(AutoModelForSequenceClassification), tokenizer)


class LoadedRewardModel(LoadedJudge):
    """A reward model that is ready to score.

    Args:
        source: Where it came from.
        model: The model, which only this object uses.
        tokenizer: Its tokenizer.

    Raises:
        ConfigurationError: If `max_length` exceeds its number of positions.
    """

    def __init__(self, source: RewardModel, model: "PreTrainedModel", tokenizer: PreTrainedTokenizerBase):
        self._source, self._model, self._tokenizer = source, model, tokenizer
        self._reader = Reader(tokenizer, model, source.name, source.chat_template)
        self._frame = self._reader.frame(2)
        positions = learned_positions(model)
        if source.max_length is not None and positions is not None and source.max_length > positions:
            raise ConfigurationError(
                f"`max_length` of {source.name} is {source.max_length}, but it has {positions} learned positions."
            )
        self._max_length = source.max_length or positions or told_length(tokenizer)
        self._config: Any = model.config.get_text_config()
        pad_id, end_id = self._config.pad_token_id, self._config.eos_token_id
        ends = {tokenizer.eos_token_id, *(end_id if isinstance(end_id, list) else [end_id])}
        # The stock head takes the last id that is not the padding, so an EOS must not be one.
        self._pad_id = pad_id if pad_id == tokenizer.pad_token_id and pad_id not in ends else None

    def scores(self, turns: Turns, answers: list[str]) -> list[float]:
        """Score answers to a conversation; see `LoadedJudge.scores`.

        In float32 a score does not depend on the other answers.

        Raises:
            ConfigurationError: If an answer or the conversation is too long, the chat template refuses the conversation,
                the model has no row for an id, or a score is NaN or infinite.
        """
        texts = list(dict.fromkeys(answers))
        read = self._in_template if self._reader.has_template else self._as_pair
        rows = [read(turns, text) for text in texts]
        found: dict[str, float] = {}
        is_padded = self._pad_id is not None and all(ids[-1] != self._pad_id for ids, _ in rows)
        for numbers in in_batches(rows, self._source.batch_size if is_padded else 1, lambda row: len(row[0])):
            outputs = self._run([rows[n] for n in numbers], is_padded)
            found.update(zip([texts[n] for n in numbers], outputs, strict=True))
        for value in found.values():
            _check_finite(value, self._source, self._model)
        return [found[text] for text in answers]

    def _in_template(self, turns: Turns, answer: str) -> tuple[list[int], None]:
        """The ids of the conversation with the answer in the chat template."""
        ids = self._conversation(turns, answer)
        if self._max_length is not None and len(ids) > self._max_length:
            # The part that does not depend on the answer comes first.
            others = zip(ids, self._conversation(turns, "" if answer else "a"), strict=False)
            num_before = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], others))
            start = ids[:1] if ids[0] == self._tokenizer.bos_token_id else []
            room = self._max_length - len(start)
            self._check_fits(len(ids), len(ids) - num_before + len(start))
            ids = [*start, *ids[len(ids) - room :]]
        return ids, None

    def _as_pair(self, turns: Turns, answer: str) -> tuple[list[int], list[int] | None]:
        """The ids of conversation and answer as a pair of texts, and their segments if the model reads them."""
        first = self._reader.encode("{text}", {"text": self._reader.plain_text(turns)})
        second = self._reader.encode("{text}", {"text": answer})
        length = len(first) + len(second) + len(self._frame)
        if self._max_length is not None and length > self._max_length:
            self._check_fits(length, len(second) + len(self._frame))
            first = first[length - self._max_length :]
        reads_segments = "token_type_ids" in self._tokenizer.model_input_names
        segments = self._frame.segments(first, second) if reads_segments else None
        return self._frame.around(first, second), segments

    def _conversation(self, turns: Turns, answer: str) -> list[int]:
        return self._reader.conversation([*turns, {"role": "assistant", "content": answer}])

    def _check_fits(self, length: int, num_kept: int) -> None:
        """Refuse a text that is too long, unless it may be cut and the rest fits."""
        if not self._source.truncation:
            raise ConfigurationError(
                f"{self._source.name} reads {self._max_length} ids, but a conversation with its answer has {length}. "
                "Set `truncation=True` to cut the beginning of the conversation, or ask for shorter answers."
            )
        if self._max_length is not None and num_kept > self._max_length:
            raise ConfigurationError(
                f"{self._source.name} reads {self._max_length} ids, but an answer alone has {num_kept}, and answers "
                "are never cut. Ask for shorter answers."
            )

    def _run(self, rows: Sequence[tuple[list[int], list[int] | None]], is_padded: bool) -> list[float]:
        if not self._model.config.is_encoder_decoder:
            # Without one, the stock head takes the last id, whatever it is.
            self._config.pad_token_id = self._pad_id if is_padded else None
        pad_id = self._pad_id if is_padded and self._pad_id is not None else 0
        ids, mask = padded_right([ids for ids, _ in rows], pad_id)
        inputs = {"input_ids": ids, "attention_mask": mask}
        segments = [row for _, row in rows if row is not None]
        if segments:
            inputs["token_type_ids"], _ = padded_right(segments, 0)
        inputs = {name: value.to(self._model.device) for name, value in inputs.items()}
        with torch.inference_mode():
            logits: Tensor = self._model(**inputs).logits  # (B, 1)
        scores: list[float] = logits.flatten().tolist()
        return scores


@dataclass(frozen=True)
class PairRanker(ModelSource):
    """A model that compares two answers, in the layout of `llm-blender/PairRM-hf`.

    A DeBERTa reads the conversation and two candidates; a head on its hidden states of their prefix tokens gives a
    logit, which is higher the better the first candidate is. Every ordered pair is read, and a candidate's score is
    the sum, over the others, of the logits for it minus those against it ("max logits").

    It reads a conversation as published. A single user turn is the source, unchanged. If users and the assistant
    alternate, the source is an instruction and the user turns with a numbered place for each response, and a candidate
    is all responses, including the earlier ones. A system turn at the beginning goes in front of the source, on lines
    of its own. Any other conversation is plain text, each turn headed by its role.

    Reference:
        Jiang, Ren and Lin, "LLM-Blender: Ensembling Large Language Models with Pairwise Ranking and Generative Fusion",
        https://arxiv.org/abs/2306.02561
    """

    kind: ClassVar[str] = "pairs"
    what: ClassVar[str] = "pairwise ranker"

    truncation: bool = False
    """Whether to cut texts that are too long at their ends, as published: the source after 1224 ids, a candidate after
    half of the rest of 2048.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        check_option("truncation", self.truncation, isinstance(self.truncation, bool), "True or False")

    def load(self) -> "LoadedPairRanker":
        """Load the model and its tokenizer.

        Raises:
            ConfigurationError: If there is no such model or tokenizer, or it is not a pairwise ranker.
        """
        config = self.load_config()
        needed = ("n_tasks", "drop_out", *_PREFIXES)
        missing = [name for name in needed if getattr(config, name, None) is None]
        if config.model_type != "deberta-v2" or missing:
            raise ConfigurationError(
                f"{self.name} is not a pairwise ranker: its configuration says "
                f"{config.model_type!r}{f' and lacks `{missing[0]}`' if missing else ''}, but has to be that of a "
                "DeBERTa with a head for pairs. Use a model in the layout of llm-blender/PairRM-hf."
            )
        tokenizer = self.load_tokenizer()
        return LoadedPairRanker(self, self.load_model(_pair_model_class(), refuses_unexpected=True), tokenizer)


_PREFIXES = ("source_prefix_id", "cand1_prefix_id", "cand2_prefix_id")


class LoadedPairRanker(LoadedJudge):
    """A pairwise ranker that is ready to score.

    Args:
        source: Where it came from.
        model: The model.
        tokenizer: Its tokenizer.

    Raises:
        ConfigurationError: If the tokenizer lacks a prefix token.
    """

    def __init__(self, source: PairRanker, model: "PreTrainedModel", tokenizer: PreTrainedTokenizerBase):
        self._source, self._model = source, model
        ids = [getattr(model.config, name) for name in _PREFIXES]
        self._reader = Reader(tokenizer, model, source.name, control=ids)
        self._frame = self._reader.frame(1)
        self._prefixes: list[str] = []
        for i in ids:
            prefix: Any = tokenizer.convert_ids_to_tokens(i)
            if prefix is None or self._reader.encode(prefix, {}) != [i]:
                raise ConfigurationError(
                    f"{source.name} has no token for the prefix id {i} of its configuration. Save it with its own tokenizer."
                )
            self._prefixes.append(prefix)
        # Padding is masked, so any id will do.
        self._pad_id = tokenizer.pad_token_id or 0
        self._max_positions = learned_positions(model)

    def scores(self, turns: Turns, answers: list[str]) -> list[float]:
        """Score answers against each other; see `LoadedJudge.scores`. A single answer has the score 0.

        Raises:
            ConfigurationError: If an answer or the conversation is too long, the model has no row for an id, or a logit is
                NaN or infinite.
        """
        source, candidates = self._texts(turns, answers)
        logits = self._logits(source, candidates)
        return [
            math.fsum(logits[a, b] - logits[b, a] for m, b in enumerate(candidates) if m != n)
            for n, a in enumerate(candidates)
        ]

    def _texts(self, turns: Turns, answers: list[str]) -> tuple[str, list[str]]:
        """The source and the candidates, as published."""
        system, rest = "", turns
        if len(turns) > 1 and turns[0]["role"] == "system":
            system, rest = text_of(turns[0]) + "\n", turns[1:]
        roles = [turn["role"] for turn in rest]
        if roles == ["user"]:
            return system + text_of(rest[0]), answers
        if len(roles) % 2 == 0 or roles != [("user", "assistant")[n % 2] for n in range(len(roles))]:
            return self._reader.plain_text(turns), answers
        asked, said = [text_of(turn) for turn in rest[::2]], [text_of(turn) for turn in rest[1::2]]
        source = "\n".join(f"USER: {text}\nAssistant: <Response {n}>" for n, text in enumerate(asked, start=1))
        before = "".join(f"<Response {n}>: {text}\n" for n, text in enumerate(said, start=1))
        return f"{system}{_MANY_TURNS}{source}", [f"{before}<Response {len(asked)}>: {text}" for text in answers]

    def _logits(self, source: str, candidates: list[str]) -> dict[tuple[str, str], float]:
        """The logit of each ordered pair of different places, by their texts."""
        max_length = _MAX_SOURCE_LENGTH + 2 * _MAX_CANDIDATE_LENGTH
        source_ids = self._part(0, source, _MAX_SOURCE_LENGTH)
        share = (max_length - len(source_ids)) // 2
        by_place = [{text: self._part(place, text, share) for text in candidates} for place in (1, 2)]
        pairs = list(dict.fromkeys(itertools.permutations(candidates, 2)))
        found: dict[tuple[str, str], float] = {}

        def length(pair: tuple[str, str]) -> int:
            return sum(len(ids[text]) for ids, text in zip(by_place, pair, strict=True))

        for numbers in in_batches(pairs, self._source.batch_size, length):
            batch = [pairs[n] for n in numbers]
            logits = self._run([(source_ids, by_place[0][a], by_place[1][b]) for a, b in batch])
            found.update(zip(batch, logits, strict=True))
        for value in found.values():
            _check_finite(value, self._source, self._model)
        return found

    def _part(self, place: int, text: str, limit: int) -> list[int]:
        """The ids of a source or candidate behind its prefix, each encoded by itself."""
        ids = self._reader.encode(self._prefixes[place] + "{text}", {"text": text})
        room = limit - len(self._frame)
        if len(ids) > room and not self._source.truncation:
            raise ConfigurationError(
                f"{self._source.name} reads {limit} ids of {'the conversation' if place == 0 else 'an answer'}, but "
                f"it has {len(ids) + len(self._frame)}. Set `truncation=True` to cut it at the end, or shorten it."
            )
        return self._frame.around(ids[:room])

    def _run(self, rows: Sequence[tuple[list[int], list[int], list[int]]]) -> list[float]:
        joined = [[*source, *first, *second] for source, first, second in rows]
        if self._max_positions is not None and max(map(len, joined)) > self._max_positions:
            raise ConfigurationError(
                f"{self._source.name} has {self._max_positions} learned positions, but a conversation with two "
                f"answers has {max(map(len, joined))} ids. Shorten them."
            )
        # A prefix follows what the tokenizer puts in front of each part.
        start = len(self._frame.ids[0])
        places = [[start, start + len(a), start + len(a) + len(b)] for a, b, _ in rows]
        inputs = *padded_right(joined, self._pad_id), torch.tensor(places)
        with torch.inference_mode():
            logits: Tensor = self._model(*(value.to(self._model.device) for value in inputs))  # (B,)
        found: list[float] = logits.tolist()
        return found


@functools.cache
def _pair_model_class() -> Any:
    """The class of PairRM's model. Created on first use, because importing DeBERTa takes long."""
    from transformers.models.deberta_v2.modeling_deberta_v2 import DebertaV2Model, DebertaV2PreTrainedModel

    class DebertaForPairs(DebertaV2PreTrainedModel):
        """A DeBERTa with a head that scores a candidate beside its source."""

        base_model_prefix = "pretrained_model"

        def __init__(self, config: Any):
            super().__init__(config)
            size = config.hidden_size
            self.pretrained_model = DebertaV2Model(config)
            self.head_layer = nn.Sequential(
                nn.Dropout(config.drop_out),
                nn.Linear(2 * size, size),
                nn.Tanh(),
                nn.Dropout(config.drop_out),
                nn.Linear(size, config.n_tasks),
            )
            self.post_init()

        def forward(self, input_ids: Tensor, attention_mask: Tensor, places: Tensor) -> Tensor:
            """Compare two candidates.

            Args:
                input_ids: Source and candidates, of shape `(batch_size, num_ids)`.
                attention_mask: Of the same shape.
                places: Positions of the three prefixes, of shape `(batch_size, 3)`.

            Returns:
                Logits of shape `(batch_size,)`, above 0 if the first candidate is better.
            """
            hidden = self.pretrained_model(input_ids, attention_mask=attention_mask).last_hidden_state  # (B, T, H)
            rows = torch.arange(len(places), device=places.device)[:, None]
            source, first, second = hidden[rows, places].unbind(1)  # (B, H) each
            better = self.head_layer(torch.cat([source, first], -1))  # (B, n_tasks)
            worse = self.head_layer(torch.cat([source, second], -1))
            logits: Tensor = (better - worse).mean(-1)
            return logits

    return DebertaForPairs


Judge = RewardModel | PairRanker


def judge_of(saved: dict[str, Any]) -> Judge:
    """Read a judge from the result of `to_dict`.

    Raises:
        ConfigurationError: If there is no such kind of judge, or no such option.
    """
    kinds: dict[str, type[Judge]] = {kind.kind: kind for kind in (RewardModel, PairRanker)}
    kind = saved.get("kind")
    if kind not in kinds:
        raise ConfigurationError(f"unknown kind of judge {kind!r}. Kinds: {', '.join(sorted(kinds))}.")
    return kinds[kind].from_dict(saved)


def _check_finite(value: float, source: ModelSource, model: "PreTrainedModel") -> None:
    """Refuse a score that cannot be compared.

    Raises:
        ConfigurationError: If it is NaN or infinite.
    """
    if not math.isfinite(value):
        remedy = "Its weights may be damaged" if model.dtype == torch.float32 else 'Set `dtype="float32"`'
        raise ConfigurationError(f"{source.name} gave the score {value} (its dtype is {model.dtype}). {remedy}.")
