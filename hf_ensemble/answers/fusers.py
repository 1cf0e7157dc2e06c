"""Models that write one answer from several."""

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)

from ..config import check_option, check_positive_integer
from ..errors import ConfigurationError
from ..members.state import padded_left
from .base import Turns
from .loaded import ModelSource, Reader, in_batches, learned_positions, padded_right, text_of

if TYPE_CHECKING:
    # Importing it takes most of a second, so only calls with a fuser do.
    from transformers import PreTrainedModel

TEMPLATE = (
    "Below are a conversation and several answers to it, each written by another assistant. Some may be wrong or "
    "incomplete. Write the one best answer to the conversation: use what is right in them, and leave out what is wrong. "
    "Do not mention these answers; write only the answer itself.\n\n"
    "Conversation:\n{prompt}\n\n{answers}\n\nBest answer:\n"
)
"""The default input of a causal model. The answers are numbered: `Answer 1:`, and so on, each on lines of its own."""

MAX_NEW_TOKENS = 512
"""Number of ids that a fuser may write if no option sets it."""

_MAX_FUSER_LENGTH = 1024
"""Ids that GenFuser was trained to read, as published."""

_OF_THE_OUTPUT = (
    *("num_beams", "num_return_sequences", "return_dict_in_generate", "output_scores", "output_logits"),
    *("output_attentions", "output_hidden_states"),
)
"""Overrides a checkpoint's own defaults, to get one greedy text."""

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h")


@dataclass(frozen=True)
class Fuser(ModelSource):
    """A model that reads a conversation with several answers, and writes one answer.

    A sequence-to-sequence model reads the published format of LLM-Blender's GenFuser. There, the conversation follows
    "Input:" and a system turn at its beginning follows "Instruction:". Each candidate has a number from 0 on and a
    sentinel token, and EOS tokens separate them. As published, a single user turn is read unchanged, and several turns
    are headed by their roles. Unlike in the published code, no candidate is cut.

    A causal model reads a template, by default a plain request for one best answer: as a user turn if it has a chat
    template, else as a text after its BOS.

    Reference:
        Jiang, Ren and Lin, "LLM-Blender: Ensembling Large Language Models with Pairwise Ranking and Generative Fusion",
        https://arxiv.org/abs/2306.02561
    """

    kind: ClassVar[str] = "fuser"
    what: ClassVar[str] = "fuser"

    template: str | None = None
    """The model's input, with the fields `{prompt}` and `{answers}`. None: the format of GenFuser for a
    sequence-to-sequence model, else `TEMPLATE`.
    """

    max_length: int | None = None
    """Number of ids that it reads; for a causal model, including those that it writes. None: as many as its
    configuration has positions; 1024, as published, for a sequence-to-sequence model without learned positions.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.template is not None:
            check_template(self.template)
        if self.max_length is not None:
            check_positive_integer("max_length", self.max_length)

    def load(self) -> "LoadedFuser":
        """Load the model and its tokenizer.

        Raises:
            ConfigurationError: If there is no such model or tokenizer, or it does not write text.
        """
        model_class = AutoModelForSeq2SeqLM if self.load_config().is_encoder_decoder else AutoModelForCausalLM
        tokenizer = self.load_tokenizer()
        return LoadedFuser(self, self.load_model(model_class), tokenizer)


def check_template(template: str) -> None:
    """Refuse a template without the fields for conversation and answers, or with other fields.

    Args:
        template: A format string.

    Raises:
        ConfigurationError: Naming the rule and the remedy.
    """
    rule = (
        "`template` has to have the fields `{prompt}` and `{answers}` and no others; write braces that are text "
        "twice, `{{` and `}}`"
    )
    try:
        parts = [part[1:] for part in string.Formatter().parse(template) if part[1] is not None]
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{rule}. It is {template!r:.200}: {error}.") from error
    fields = {name for name, _, _ in parts}
    if fields != {"prompt", "answers"} or any(spec or conversion for _, spec, conversion in parts):
        raise ConfigurationError(f"{rule}. It is {template!r:.200}.")


class LoadedFuser:
    """A fuser that is ready to write.

    Args:
        source: Where it came from.
        model: The model, which only this object uses.
        tokenizer: Its tokenizer.

    Raises:
        ConfigurationError: If it has to read the format of GenFuser, but lacks its tokens.
    """

    def __init__(self, source: Fuser, model: "PreTrainedModel", tokenizer: PreTrainedTokenizerBase):
        self._source, self._tokenizer = source, tokenizer
        self._model: Any = model
        self._reader = Reader(tokenizer, model, source.name)
        self._is_seq2seq = bool(model.config.is_encoder_decoder)
        self._max_length = source.max_length or learned_positions(model) or self._told_length(model.config)
        settings = self._model.generation_config
        # Passed only if it samples: a greedy call would warn about them.
        self._sampling = {key: getattr(settings, key, None) for key in _SAMPLING}
        for key in ("do_sample", *_SAMPLING, *_OF_THE_OUTPUT):
            setattr(settings, key, None)
        ends = settings.eos_token_id if settings.eos_token_id is not None else tokenizer.eos_token_id
        self._end_ids: list[int] = ends if isinstance(ends, list) else [ends] if ends is not None else []
        pad_ids = (tokenizer.pad_token_id, settings.pad_token_id, *self._end_ids, 0)
        # Padding is masked, so any id works.
        self._pad_id: int = next(i for i in pad_ids if isinstance(i, int))
        if self._is_seq2seq and source.template is None:
            self._check_sentinels(1)

    def write(
        self, turns_of_rows: Sequence[Turns], answers_of_rows: Sequence[list[str]], generate_options: Mapping[str, Any]
    ) -> list[str]:
        """Write one answer for each conversation.

        Args:
            turns_of_rows: The conversations.
            answers_of_rows: The answers to each, the best first. What they spell is never a control token.
            generate_options: Options of `generate`. By default it decodes greedily and stops at the model's own EOS.

        Returns:
            The texts, without control tokens.

        Raises:
            ConfigurationError: If an input is too long, or more than one answer is asked for.
        """
        options = self._with_defaults(generate_options)
        rows = [self._input(*row) for row in zip(turns_of_rows, answers_of_rows, strict=True)]
        for ids in rows:
            self._check_length(len(ids), options)
        texts = [""] * len(rows)
        for numbers in in_batches(rows, self._source.batch_size, len):
            for n, text in zip(numbers, self._generate([rows[n] for n in numbers], options), strict=True):
                texts[n] = text
        return texts

    def _with_defaults(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Options of `generate`, completed by defaults."""
        num_returned = given.get("num_return_sequences") or 1
        check_option(
            "num_return_sequences", num_returned, num_returned == 1, f"1, because {self._source.name} writes one"
        )
        options: dict[str, Any] = {"do_sample": False, **given}
        if options["do_sample"]:
            options = {**{key: value for key, value in self._sampling.items() if value is not None}, **options}
        if options.get("max_new_tokens") is None and options.get("max_length") is None:
            options["max_new_tokens"] = MAX_NEW_TOKENS
        if options.get("stop_strings") is not None:
            options["tokenizer"] = self._tokenizer
        return options

    def _input(self, turns: Turns, answers: Sequence[str]) -> list[int]:
        """The ids that the model reads."""
        template = self._source.template
        if self._is_seq2seq and template is None:
            return self._gen_fuser_input(turns, answers)
        template = TEMPLATE if template is None else template
        numbered = "\n\n".join(f"Answer {n}:\n{answer}" for n, answer in enumerate(answers, start=1))
        fields = {"prompt": self._reader.plain_text(turns), "answers": numbered}
        if self._is_seq2seq:
            return self._reader.frame(1).around(self._reader.encode(template, fields))
        if self._reader.has_template:
            return self._reader.conversation(
                [{"role": "user", "content": template.format(**fields)}], adds_prompt=True
            )
        return self._reader.encode(template, fields, starts=True)

    def _gen_fuser_input(self, turns: Turns, answers: Sequence[str]) -> list[int]:
        """The ids of a conversation and answers as GenFuser was trained to read them."""
        self._check_sentinels(len(answers))
        instruction = ""
        if len(turns) > 1 and turns[0]["role"] == "system":
            instruction, turns = text_of(turns[0]), turns[1:]
        fields = {f"answer_{n}": answer for n, answer in enumerate(answers)}
        candidates = [f"Candidate {n}: <extra_id_{n}>:{{{name}}}" for n, name in enumerate(fields)]
        question = "Summarize candidates into a better one for the given instruction:"
        form = "</s>".join(["Instruction: {instruction}", "Input: {prompt}", *candidates, question])
        fields |= {"instruction": instruction, "prompt": self._reader.plain_text(turns)}
        return self._reader.encode(form, fields)

    def _check_sentinels(self, num_answers: int) -> None:
        known = self._tokenizer.get_vocab()
        for token in ("</s>", *(f"<extra_id_{n}>" for n in range(num_answers))):
            if token not in known:
                raise ConfigurationError(
                    f"{self._source.name} cannot read {num_answers} answers in the format of GenFuser: its tokenizer "
                    f"has no {token!r}. Set `template`, or use a T5."
                )

    def _told_length(self, config: PreTrainedConfig) -> int | None:
        """Number of ids that a model without learned positions reads."""
        if self._is_seq2seq:
            return _MAX_FUSER_LENGTH
        return getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)

    def _check_length(self, length: int, options: Mapping[str, Any]) -> None:
        num_new = 0
        if not self._is_seq2seq:
            num_new = options.get("max_new_tokens") or max(0, (options.get("max_length") or 0) - length)
        if self._max_length is not None and length + num_new > self._max_length:
            raise ConfigurationError(
                f"{self._source.name} reads {self._max_length} ids, but the conversation and its answers have "
                f"{length}{f', and {num_new} may be written' if num_new else ''}. Ask for shorter answers, or fuse "
                "fewer."
            )

    def _generate(self, rows: Sequence[list[int]], options: Mapping[str, Any]) -> list[str]:
        pad, device = padded_right if self._is_seq2seq else padded_left, self._model.device
        ids, mask = pad(rows, self._pad_id)
        with torch.inference_mode():
            found: Tensor = self._model.generate(
                input_ids=ids.to(device),
                attention_mask=mask.to(device),
                **{"pad_token_id": self._pad_id, **options},
            )
        # A decoder starts with its own id.
        num_read = 1 if self._is_seq2seq else ids.shape[1]
        return [self._text(row[num_read:]) for row in found.tolist()]

    def _text(self, ids: list[int]) -> str:
        end = next((n for n, i in enumerate(ids) if i in self._end_ids), len(ids))
        text = self._tokenizer.decode(ids[:end], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text)
