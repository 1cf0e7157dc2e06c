"""Live rows of several calls, which join and leave."""

from collections.abc import Collection, Sequence
from typing import Any

from .live_rows import LiveRows


class JoiningRows(LiveRows):
    """Live rows that rows of other calls can join; see `LiveRows`."""

    def read_all(self) -> None:
        """Let every member read the prompts now, even if it is not needed yet."""
        self.read_prompts()
        for index, state in self.states.items():
            if not state.caches.is_elsewhere:
                with self.seconds.of(index):
                    state.start()

    def join(self, other: "JoiningRows") -> None:
        """Append the rows of other calls, none of which has ended.

        Either both have read their prompts, or neither has; then equal prompts are shared, and all are read together.

        Args:
            other: Rows of a call with the same members and method; not used afterwards.
        """
        self._end_what_is_begun()
        if self._prompt_of_row is not None and other._prompt_of_row is not None:
            self._prompt_of_row += self._take_prompts(other, other._prompt_of_row)
        else:
            assert self._prompt_of_row is None
            assert other._prompt_of_row is None
            for index, state in self.states.items():
                state.join(other.states[index])
        count = len(self.live)
        self.live = list(range(count + len(other.live)))
        self._place_of = {row: row for row in self.live}
        self._num_rows = self._few.num_rows = len(self.live)
        self._prompt_lengths += other._prompt_lengths
        self._begun_at += [self.num_steps - other.num_steps + other._begun_at[row] for row in other.live]

    def _take_prompts(self, other: "JoiningRows", prompt_of_row: Sequence[int]) -> list[int]:
        """Append prompts or find equal ones, and return each row's prompt index."""
        numbers: dict[Any, int] = {}
        for rows in (self, other):
            for prompt in range(len(next(iter(rows.states.values())).contexts)):
                key = rows._ids_of(prompt)
                if key not in numbers:
                    numbers[key] = len(numbers)
                    if rows is other:
                        for index, state in self.states.items():
                            state.extend(other.states[index].contexts[prompt : prompt + 1])
        return [numbers[other._ids_of(prompt)] for prompt in prompt_of_row]

    def _ids_of(self, prompt: int) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(state.contexts[prompt].ids) for state in self.states.values())

    def renumber(self) -> list[int]:
        """Renumber the live rows from 0 on, in order, and return their former numbers."""
        live = self.live
        self._prompt_lengths = [self._prompt_lengths[row] for row in live]
        self._begun_at = [self._begun_at[row] for row in live]
        self._num_rows = self._few.num_rows = len(live)
        self.live = list(range(len(live)))
        self._place_of = {row: row for row in self.live}
        return live

    def drop(self, rows: Collection[int]) -> None:
        """End rows."""
        if rows:
            self._end_what_is_begun()
        super().drop(rows)

    def _end_what_is_begun(self) -> None:
        """Wait for steps that were started ahead of the loop."""
        for index in self._begun:
            if index in self._sparse:
                self.states[index].entries()
        self._begun = {}
