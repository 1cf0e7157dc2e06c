"""Candidates: the answers of every member, and of every named method, to the prompts of a call."""

import contextlib
import copy
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.utils import logging

from ..answers.base import AnswersConfig, Written
from ..config import MethodConfig
from ..decoding.call import Call, end_ids
from ..decoding.draws import Draws, seed_of
from ..decoding.parts import in_parts
from ..decoding.prompts import OwnPrompts, Prompts
from ..errors import ConfigurationError
from ..members.member import Member
from ..members.state import padded_left
from ..recording.names import names_of
from .registry import mode_of
from .stop_strings import AfterLostSpace, stop_string_criteria
from .writer import WriterMode

_Item = TypeVar("_Item")
_Made = TypeVar("_Made")

_PATIENCE = 3.0
"""Seconds before a progress bar is shown."""


@dataclass(frozen=True)
class Asked:
    """The task of a call's writers.

    Attributes:
        inputs: The primary's prompt ids, of shape `(num_rows, length)`, left-padded.
        mask: 1 for ids of the prompt and 0 for padding, of the same shape; None for no padding.
        prompts: What every member reads.
        weights: Each row's mixing weights, of shape `(num_rows, num_members)`.
        settings: The options of the call.
        max_new_tokens: Largest number of ids of an answer.
        seed: Determines all writers' seeds; None without sampling.
        arguments: Processors and criteria of the call, by their names in `generate`.
    """

    inputs: Tensor
    mask: Tensor | None
    prompts: Prompts
    weights: Tensor
    settings: Any
    max_new_tokens: int
    seed: int | None
    arguments: dict[str, Any]


class Writing:
    """Lets all writers of a call write.

    Args:
        ensemble: The `EnsembleForCausalLM`.
        call: The call.
        asked: The task.
    """

    def __init__(self, ensemble: Any, call: Call, asked: Asked):
        self._ensemble, self._call, self._asked = ensemble, call, asked
        config = call.config
        assert isinstance(config, AnswersConfig)
        self._config = config
        self._num_rows = len(asked.inputs)
        self._names = names_of(call.members)
        self._stop_at: float | None = None
        self._rows_of = {
            index: (asked.weights[:, index] != 0).nonzero()[:, 0].tolist()
            for index in sorted(call.weights.participants)
        }

    def check(self, num_returned: int) -> None:
        """Refuse prompts that a member cannot continue, and too few written answers, before anything runs.

        Args:
            num_returned: Number of answers that are returned for each row.

        Raises:
            ConfigurationError: If a prompt ends inside a character and a member has no byte tokens, or too few answers
                are written for it.
        """
        for row, count in enumerate(self.num_written):
            if num_returned > count:
                raise ConfigurationError(
                    f"`num_return_sequences={num_returned}` answers cannot be returned, because only {count} were "
                    f"written for row {row}. Ask for more candidates, or fewer sequences."
                )
        prompts = self._asked.prompts
        for index, rows in self._rows_of.items():
            for row in rows:
                if prompts.contexts[index][prompts.prompt_of_row[row]].sits_out:
                    raise ConfigurationError(
                        f"the prompt of row {row} ends inside a character, which member {self._names[index]!r} cannot "
                        "continue. End the prompt with a whole character."
                    )

    @property
    def num_written(self) -> list[int]:
        """Number of answers written for each row."""
        config = self._config
        num_members: list[int] = (self._asked.weights != 0).sum(-1).tolist()
        return [config.num_candidates * num + len(config.methods) for num in num_members]

    def run(self) -> list[list[Written]]:
        """Write, at all places at the same time.

        Returns:
            For each row, its answers.

        Raises:
            MemberError: If a member fails.
        """
        if self._asked.settings.max_time is not None:
            # The time of all that write together.
            self._stop_at = time.monotonic() + self._asked.settings.max_time
        by_place: dict[Hashable, list[int]] = {}
        for index in self._rows_of:
            by_place.setdefault(self._call.members[index].place, []).append(index)
        found: list[list[Written]] = [[] for _ in range(self._num_rows)]
        with logging.tqdm(total=sum(self.num_written), desc="candidates", unit="answer", delay=_PATIENCE) as bar:

            def write_all(indices: Sequence[int]) -> list[tuple[int, Written]]:
                written = []
                for index in indices:
                    written += self._by_member(index)
                    bar.update(len(self._rows_of[index]) * self._config.num_candidates)
                return written

            # First those that may still refuse options.
            for number, method in enumerate(self._config.methods):
                for row, written in self._by_method(number, method):
                    found[row].append(written)
                bar.update(self._num_rows)
            for row, written in _side_by_side(write_all, list(by_place.values())):
                found[row].append(written)
        return found

    # Members

    def _by_member(self, index: int) -> list[tuple[int, Written]]:
        member, prompts = self._call.members[index], self._asked.prompts
        contexts = prompts.contexts[index]
        rows = self._rows_of[index]
        settings = self._settings_of(index)
        items = [(row, number) for row in rows for number in range(self._config.num_candidates)]

        def write(some: Sequence[tuple[int, int]]) -> list[tuple[int, Written]]:
            own = self._by_itself(index, settings, some)
            if own is not None:
                return own
            alone = self._alone(index)
            ids, mask = padded_left(
                [contexts[prompts.prompt_of_row[row]].ids for row, _ in some], member.tokenizer.pad_token_id or 0
            )
            call = alone.new_call(is_writer=True)
            if not member.runs_in_loop:
                call.own_prompts = OwnPrompts([member], num_rows=len(some))
                call.own_prompts.starts = [contexts[prompts.prompt_of_row[row]].ids[0] for row, _ in some]
            call.draws = self._draws(index, member.name, some)
            loses_space = [contexts[prompts.prompt_of_row[row]].loses_space for row, _ in some]
            return self._run(WriterMode(call, loses_space), alone, ids, mask, settings, some, loses_space)

        written = in_parts(items, write)
        return [(row, replace(one, writer=index, name=self._names[index])) for row, one in written]

    def _by_itself(
        self, index: int, settings: Any, items: Sequence[tuple[int, int]]
    ) -> list[tuple[int, Written]] | None:
        """The answers of a member that writes by itself; None for one that writes as an ensemble of one."""
        member, prompts = self._call.members[index], self._asked.prompts
        if not member.writes_by_itself:
            return None
        given = [name for name, value in self._asked.arguments.items() if value and name != "synced_gpus"]
        if index == 0 and given:
            raise ConfigurationError(
                f"`{given[0]}` cannot be used if the primary {member.name!r} writes whole answers: it is "
                f"{member.kind}, which does not support it. Leave it out, or load the member into this process."
            )
        began = time.perf_counter()
        contexts = [prompts.contexts[index][prompts.prompt_of_row[row]] for row, _ in items]
        answers = member.answers(contexts, settings, self._seeds(index, member.name, items))
        seconds = (time.perf_counter() - began) / len(items)
        write = member.encoder.token_bytes.write
        return [
            (row, Written(None, "", number, one.ids, write(one.ids), one.end, one.log_prob, seconds))
            for (row, number), one in zip(items, answers, strict=True)
        ]

    def _alone(self, index: int) -> Any:
        """A member as an ensemble of one, with an empty generation config."""
        kept = self._call.kept.alone
        if index not in kept:
            kept[index] = self._ensemble.writer(index)
            kept[index].generation_config = GenerationConfig()
        return kept[index]

    def _settings_of(self, index: int) -> Any:
        """The options of the call for one member."""
        own, member = self._own_settings(), self._call.members[index]
        if index > 0:
            own.eos_token_id = list(member.eos_token_ids) or None
            own.pad_token_id = member.tokenizer.pad_token_id
            own.bos_token_id = None
        return own

    def _own_settings(self) -> Any:
        asked = self._asked
        own = copy.deepcopy(asked.settings)
        own.max_new_tokens, own.max_length = asked.max_new_tokens, None
        # It counts the prompt, which has a different number of ids for every member.
        own.min_new_tokens = max(own.min_new_tokens or 0, (own.min_length or 0) - asked.inputs.shape[1]) or None
        own.min_length = None
        own.num_return_sequences = 1
        own.return_dict_in_generate = False
        if self._stop_at is not None:
            own.max_time = max(1e-3, self._stop_at - time.monotonic())
        return own

    # Methods

    def _by_method(self, number: int, method: MethodConfig) -> list[tuple[int, Written]]:
        call, asked = self._call, self._asked

        def write(rows: Sequence[int]) -> list[tuple[int, Written]]:
            own = None if call.own_prompts is None else call.own_prompts.of_rows(rows)
            items = [(row, 0) for row in rows]
            twin = replace(
                call,
                config=method,
                weights=call.weights.of_prompts(rows) if call.weights.num_rows > 1 else copy.copy(call.weights),
                own_prompts=own,
                seed=None,
                draws=self._draws(len(call.members) + number, method.name, items),
            )
            mode = mode_of(twin)
            mode.refuse()
            ids = asked.inputs[list(rows)]
            mask = None if asked.mask is None else asked.mask[list(rows)]
            settings = self._own_settings()
            twin.settings = settings
            return self._run(mode, self._ensemble, ids, mask, settings, items, [False] * len(items))

        return [(row, replace(one, name=method.name)) for row, one in in_parts(range(self._num_rows), write)]

    def _draws(self, index: int, name: str, items: Sequence[tuple[int, int]]) -> Draws:
        seeds = self._seeds(index, name, items)
        return Draws() if seeds is None else Draws(seeds)

    def _seeds(self, index: int, name: str, items: Sequence[tuple[int, int]]) -> list[int] | None:
        seed, prompts = self._asked.seed, self._asked.prompts
        if seed is None:
            return None
        parts = []
        num_earlier: Counter[bytes] = Counter()
        for prompt in prompts.prompt_of_row:
            text = prompts.texts[prompt]
            parts.append((text, num_earlier[text]))
            num_earlier[text] += 1
        return [seed_of(seed, name, index, *parts[row], number) for row, number in items]

    # Running one of them

    def _run(
        self,
        mode: Any,
        ensemble: Any,
        ids: Tensor,
        mask: Tensor | None,
        settings: Any,
        items: Sequence[tuple[int, int]],
        loses_space: Sequence[bool],
    ) -> list[tuple[int, Written]]:
        """Let a mode write for rows, and read its answers.

        Args:
            mode: The mode.
            ensemble: Whose stock loop runs: the ensemble, or a member as an ensemble of one.
            ids: The writer's prompt ids, of shape `(num_items, length)`, left-padded.
            mask: 1 for ids of the prompt and 0 for padding, of the same shape; None for no padding.
            settings: The options.
            items: For each row, its index in the call, and which of the writer's answers it is.
            loses_space: For each row, whether the first written word loses its space.
        """
        writer = mode.call.members[0]
        is_primary = writer is self._call.members[0]
        arguments = self._asked.arguments if is_primary else dict.fromkeys(self._asked.arguments)
        mode.call.ends = []
        began = time.perf_counter()
        output = ensemble.generate_in(
            mode,
            ids.to(writer.device),
            attention_mask=None if mask is None else mask.to(writer.device),
            generation_config=settings,
            tokenizer=writer.tokenizer,
            **arguments,
        )
        found = list(_read_answers(writer, output, ids.shape[1], settings, mode.call.ends, arguments, loses_space))
        log_probs = _summed(getattr(mode, "log_probs", []), [len(new) for new, _ in found])
        seconds = (time.perf_counter() - began) / len(items)
        texts = [writer.encoder.token_bytes.write(new) for new, _ in found]
        texts = [text.removeprefix(b" ") if loses else text for text, loses in zip(texts, loses_space, strict=True)]
        return [
            (row, Written(None, "", number, new, text, end, log_prob, seconds))
            for (row, number), (new, end), text, log_prob in zip(items, found, texts, log_probs, strict=True)
        ]


def _side_by_side(run: Callable[[_Item], list[_Made]], items: Sequence[_Item]) -> list[_Made]:
    """Run items at the same time, each in its own thread; a single item stays in this thread."""
    if len(items) < 2:
        return [made for item in items for made in run(item)]
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    dtypes = {kind: torch.get_autocast_dtype(kind) for kind in kinds}

    def run_alike(item: _Item) -> list[_Made]:
        # Thread-local settings are copied from this thread.
        with contextlib.ExitStack() as stack:
            for kind, dtype in dtypes.items():
                stack.enter_context(torch.autocast(kind, dtype))
            return run(item)

    with ThreadPoolExecutor(len(items)) as pool:
        return [made for part in pool.map(run_alike, items) for made in part]


def _summed(steps: Sequence[Tensor], lengths: Sequence[int]) -> list[float | None]:
    """Sums of each row's first log-probabilities; None if there are none."""
    if not steps:
        return [None] * len(lengths)
    rows = torch.stack(list(steps), dim=-1).double().tolist()
    return [math.fsum(row[:length]) for row, length in zip(rows, lengths, strict=True)]


def _read_answers(
    member: Member,
    output: Tensor,
    prompt_length: int,
    settings: Any,
    ends: Sequence[Tensor],
    arguments: dict[str, Any],
    loses_space: Sequence[bool],
) -> Iterator[tuple[tuple[int, ...], Literal["eos", "text"] | None]]:
    """Read the written ids, without the padding of rows that ended before others.

    Args:
        member: The member that wrote them.
        output: All ids, of shape `(num_rows, length)`.
        prompt_length: Number of ids of the prompts, padding included.
        settings: The options.
        ends: For each step, which rows the criteria had ended, of shape `(num_rows,)`. Not used for beam search.
        arguments: Processors and criteria of the call.
        loses_space: For each row whether its first word loses a space.

    Yields:
        For each row the new ids, and what ended it: see `Written`.
    """
    ends_text = set(member.ids_with_row(end_ids(settings)))
    stops: Any = [None] * len(output)
    if settings.stop_strings is not None:
        stop = stop_string_criteria(settings.stop_strings, member.tokenizer)
        stops = [AfterLostSpace(stop, [loses], member.encoder.token_bytes.write) for loses in loses_space]

    # What may have ended a row early, other than the user's criteria.
    is_early = bool(arguments.get("stopping_criteria")) and settings.max_time is None
    done = torch.stack(list(ends)).T.tolist() if ends and settings.num_beams == 1 else [[]] * len(output)
    for row, done_at, stop in zip(output, done, stops, strict=True):
        new = row[prompt_length:].tolist()
        if settings.num_beams == 1:
            length = done_at.index(True) + 1 if True in done_at else len(new)
        else:
            # Beam search returns nothing but ids.
            length = next((n for n, i in enumerate(new, start=1) if i in ends_text), None)
            if length is None:
                length = len(new) - _num_padding(member, new, settings.pad_token_id)
            steps = range(1, length) if stop is not None else ()
            length = next((n for n in steps if stop(row[None, : prompt_length + n], None)), length)
        new = new[:length]
        end: Literal["eos", "text"] | None = None
        if new and new[-1] in ends_text:
            end = "eos" if member.is_control(new[-1]) else "text"
        elif (stop is not None and stop(row[None, : prompt_length + length], None)) or (
            is_early and length < settings.max_new_tokens
        ):
            end = "text"
        yield tuple(new), end


def _num_padding(member: Member, ids: Sequence[int], pad_id: int | None) -> int:
    """Number of padding ids at the end; padding is a control token, others were written."""
    is_padding = [i == pad_id and member.is_control(i) for i in ids]
    return len(list(itertools.takewhile(bool, reversed(is_padding))))
