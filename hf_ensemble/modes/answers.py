"""Whole answers: every member writes answers by itself, and one of them is chosen."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..answers.base import AnswersConfig, Choice, Panel, Question, Written
from ..answers.candidates import PrimaryIds, merged
from ..answers.likelihood import log_probs_of_answers
from ..answers.record import Answers, record_of
from ..decoding.call import end_ids
from ..decoding.prompts import Prompts, read_prompts
from ..decoding.refusals import Obstacle, refuse
from ..errors import ConfigurationError
from ..recording.names import prompts_of
from ..scoring.likelihoods import Batch, Found, score_by_spans
from .base import Mode
from .registry import mode_of
from .writing import Asked, Writing

_OF_IDS = (
    *("bad_words_ids", "force_words_ids", "sequence_bias", "suppress_tokens", "begin_suppress_tokens"),
    *("forced_bos_token_id", "forced_eos_token_id"),
)
"""Options that contain ids of one tokenizer."""

_FUNCTIONS = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn")
"""Arguments that act on ids of one tokenizer."""

_DEFAULT_LENGTH = 20
"""Default number of new ids, as in `transformers`."""


@dataclass
class AnswersOutput(GenerateDecoderOnlyOutput):
    """What `generate` returns with `return_dict_in_generate` for methods that choose among whole answers.

    Attributes:
        answers: All candidates, with their writers and scores.
    """

    answers: Answers | None = None


class AnswersMode(Mode):
    """The mode of a way of choosing among whole answers."""

    @property
    def _config(self) -> AnswersConfig:
        config = self.call.config
        assert isinstance(config, AnswersConfig)
        return config

    def refuse(self) -> None:
        """Refuse what needs a distribution or uses ids of one tokenizer, before anything runs."""
        config, settings, arguments = self._config, self.call.settings, self.call.arguments
        primary = self.call.members[0]
        no_distribution = "answers are chosen as a whole. Use `answers` of the output"
        outputs = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
        one_tokenizer = "every member writes in its own ids"
        is_shared = self.call.weights.participants != {0}
        is_function = self.call.weights.varies
        others = sorted(self.call.primary_inputs)
        reads = "every member reads the prompt by itself"
        refuse(
            [
                *(Obstacle(getattr(settings, name, None), f"`{name}`", no_distribution) for name in outputs),
                Obstacle(self.call.num_decision_entries is not None, "`output_decisions`", no_distribution),
                *self._obstacles_to_samples(),
                Obstacle(is_function, "`weights` that are a function", "a weight counts for a whole answer"),
                Obstacle(arguments["synced_gpus"], "`synced_gpus`", "the members write in one process"),
                *(
                    Obstacle(True, f"`{name}`", reads if primary.accepts(name) else "there is no such option")
                    for name in others
                ),
            ],
            f"method {config.name!r}",
        )
        refuse(
            [
                *(
                    Obstacle(
                        is_shared and getattr(settings, name, None) not in (None, [], {}), f"`{name}`", one_tokenizer
                    )
                    for name in _OF_IDS
                ),
                *(Obstacle(is_shared and arguments[name], f"`{name}`", one_tokenizer) for name in _FUNCTIONS),
            ],
            f"method {config.name!r} unless only the primary writes",
        )
        if config.returns_one and (settings.num_return_sequences or 1) > 1:
            raise ConfigurationError(
                f"`num_return_sequences={settings.num_return_sequences}` cannot be used with method {config.name!r}, "
                "which returns one answer."
            )
        for method in config.methods:
            mode_of(replace(self.call, config=method, seed=None)).refuse()

    def _obstacles_to_samples(self) -> list[Obstacle]:
        """The obstacles to the requested samples."""
        config, settings, seed = self._config, self.call.settings, self.call.seed
        several, beams = config.num_candidates > 1, settings.num_beams not in (None, 1)
        drawn = f"`num_candidates={config.num_candidates}` are samples"
        return [
            Obstacle(
                several and not settings.do_sample,
                "`do_sample=False`",
                f"{drawn}. Pass `do_sample=True`, or add it to the method's `generate_options`",
            ),
            Obstacle(
                settings.do_sample and beams and not several,
                f"`num_beams={settings.num_beams}`",
                "sampled beams draw from torch's global generator for all rows together. Pass `num_beams=1`, or "
                "`do_sample=False`",
            ),
            Obstacle(several and beams, f"`num_beams={settings.num_beams}`", f"{drawn}. Pass `num_beams=1`"),
            Obstacle(
                seed is not None and not (_is_index(seed) and 0 <= seed < 2**63),
                f"`seed={seed!r}`",
                "a seed is an integer from 0 to 2**63 - 1",
            ),
        ]

    def run(self, ensemble: Any, inputs: Tensor | None, options: dict[str, Any]) -> Any:
        """Write all candidates, choose, and return the primary's ids of the choice; see `Mode.run`."""
        call, settings = self.call, self.call.settings
        primary, num_returned = call.members[0], settings.num_return_sequences or 1
        asked = self._ask(ensemble, inputs, options)
        writing = Writing(ensemble, call, asked)
        writing.check(num_returned)
        if options.get("streamer") is not None and len(asked.inputs) * num_returned > 1:
            raise ConfigurationError(
                "`streamer` takes one row: leave it out, or give one prompt and ask for one answer."
            )
        self._config.load(self._panel(asked.max_new_tokens))
        ids_of = PrimaryIds(primary, end_ids(settings))
        questions = self._questions(asked, writing.run(), ids_of)
        choices = self._choose(asked, questions)
        places = [_places(*pair, num_returned) for pair in zip(questions, choices, strict=True)]
        rows = [
            ids_of.of(question.candidates[number])
            if choice.written is None
            else ids_of.of_bytes(choice.written.encode("utf-8", "replace"))
            for question, choice, of_row in zip(questions, choices, places, strict=True)
            for number in of_row
        ]
        sequences = self._sequences(asked.inputs, rows, num_returned)
        self._stream(sequences, asked.inputs.shape[1], options.get("streamer"))
        if not settings.return_dict_in_generate:
            return sequences
        prompts = prompts_of(primary, asked.inputs, asked.mask)
        record = record_of(questions, choices, places, prompts, call.config.name)
        return AnswersOutput(sequences=sequences, answers=record)  # type: ignore[arg-type]

    def _ask(self, ensemble: Any, inputs: Tensor | None, options: dict[str, Any]) -> Asked:
        """Read the prompts, and return the task of the writers."""
        call, primary = self.call, self.call.members[0]
        if inputs is None:
            if not primary.encoder.start_ids:
                raise ConfigurationError("there is no prompt. Pass `input_ids`.")
            inputs = torch.tensor([primary.encoder.start_ids], device=primary.device)
        mask = options.get("attention_mask")
        by_row = copy.copy(call.weights)
        by_row.expand(len(inputs), 1)
        return Asked(
            inputs=inputs,
            mask=mask,
            prompts=read_prompts(
                call.members, call.weights.participants | {0}, "append", inputs, mask, call.own_prompts
            ),
            weights=by_row.fixed,
            settings=call.settings,
            max_new_tokens=self._max_new_tokens(ensemble, inputs.shape[1], options),
            seed=self._seed(),
            arguments={name: options.get(name) for name in _FUNCTIONS},
        )

    def _questions(self, asked: Asked, written: Sequence[Sequence[Written]], ids_of: PrimaryIds) -> list[Question]:
        """The candidates of every row, with the conversation behind its prompt."""
        turns = _turns_of(asked.prompts)
        found = []
        for prompt, of_row, weights in zip(asked.prompts.prompt_of_row, written, asked.weights.tolist(), strict=True):
            cut = [ids_of.cut(one, asked.max_new_tokens) for one in of_row]
            found.append(Question(turns[prompt], merged(cut, weights, self._config.num_candidates)))
        return found

    def _choose(self, asked: Asked, questions: Sequence[Question]) -> list[Choice]:
        def log_probs(asked_for: Sequence[Question]) -> list[list[list[float | None]]]:
            rows = [next(n for n, question in enumerate(questions) if question is one) for one in asked_for]
            candidates = [one.candidates for one in asked_for]
            ends = end_ids(asked.settings)
            return log_probs_of_answers(self.call.members, asked.prompts, asked.weights, rows, candidates, ends)

        choices = self._config.choose(questions, self._panel(asked.max_new_tokens, log_probs))
        _check_choices(self._config.name, questions, choices)
        return choices

    def _panel(self, max_new_tokens: int, log_probs: Any = None) -> Panel:
        return Panel(log_probs, {"max_new_tokens": max_new_tokens}, self.call.kept.judges)

    def _max_new_tokens(self, ensemble: Any, prompt_length: int, options: dict[str, Any]) -> int:
        settings = self.call.settings
        if settings.max_new_tokens is not None:
            return int(settings.max_new_tokens)
        said = [options.get("max_length"), self._config.generate_options.get("max_length")]
        said += [
            getattr(config, "max_length", None)
            for config in (options.get("generation_config"), ensemble.generation_config)
        ]
        is_given = any(length is not None for length in said)
        if not is_given:
            return _DEFAULT_LENGTH
        left = int(settings.max_length) - prompt_length
        if left < 1:
            raise ConfigurationError(
                f"the prompt has {prompt_length} ids, but `max_length` is {settings.max_length}. Pass `max_new_tokens`."
            )
        return left

    def _seed(self) -> int | None:
        call = self.call
        if not call.settings.do_sample:
            return None
        return int(torch.randint(2**63 - 1, ()) if call.seed is None else call.seed)

    def _sequences(self, inputs: Tensor, rows: Sequence[list[int]], num_returned: int) -> Tensor:
        """Prompts and answers, of shape `(num_rows * num_returned, length)`, padded on the right."""
        pad = self.call.settings.pad_token_id
        ends = self.call.members[0].ids_with_row(end_ids(self.call.settings))
        filler = int(pad) if pad is not None else (ends or [0])[0]
        width = max(map(len, rows))
        new = torch.tensor([[*ids, *[filler] * (width - len(ids))] for ids in rows], dtype=torch.long)
        return torch.cat([inputs.repeat_interleave(num_returned, dim=0), new.to(inputs.device)], dim=-1)

    def _stream(self, sequences: Tensor, prompt_length: int, streamer: Any) -> None:
        """Stream the choice, as the stock loop does; nothing can be streamed earlier."""
        if streamer is None:
            return
        streamer.put(sequences[:, :prompt_length].cpu())
        for column in sequences[:, prompt_length:].T:
            streamer.put(column.cpu())
        streamer.end()

    def score_batch(self, batch: Batch, end_ids: Sequence[int]) -> Found:
        """Score by the mean of the members' own log-probabilities, if candidates are ranked by it.

        Raises:
            ConfigurationError: If they are not.
        """
        if not self._config.gives_likelihoods:
            raise ConfigurationError(
                f"method {self._config.name!r} compares whole answers and has no likelihoods. Score with a token- or "
                'span-level `method`, or with `RerankConfig(score="likelihood")`.'
            )
        return score_by_spans(self.call.members, batch)


def _is_index(value: Any) -> bool:
    """Whether a value is an integer of any library; a bool is not."""
    return hasattr(value, "__index__") and not isinstance(value, bool)


def _check_choices(name: str, questions: Sequence[Question], choices: Sequence[Choice]) -> None:
    """Refuse an invalid choice.

    Raises:
        ConfigurationError: If it does not rank each candidate of each question once.
    """
    found = [sorted(choice.ranking) for choice in choices]
    expected = [list(range(len(question.candidates))) for question in questions]
    if found != expected:
        n = next((n for n, pair in enumerate(zip(found, expected, strict=False)) if pair[0] != pair[1]), len(found))
        raise ConfigurationError(
            f"method {name!r} has to rank every candidate of every row once, but row {n} has "
            f"{len(expected[n]) if n < len(expected) else 'no'} candidates and the ranking is "
            f"{found[n] if n < len(found) else None}."
        )


def _places(question: Question, choice: Choice, count: int) -> list[int]:
    """The candidates that are returned: each fills as many places as it has writers."""
    return [number for number in choice.ranking for _ in question.candidates[number].writers][:count]


def _turns_of(prompts: Prompts) -> list[list[dict[str, Any]]]:
    """The conversation behind each distinct prompt; a single user turn for plain text."""
    found = []
    for conversation, data in zip(prompts.conversations, prompts.texts, strict=True):
        plain = [{"role": "user", "content": data.decode("utf-8", "replace")}]
        found.append(plain if conversation is None else conversation.with_joined_parts().messages)
    return found
