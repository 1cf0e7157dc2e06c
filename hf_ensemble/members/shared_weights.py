"""Members that share one set of weights, such as adapters on one model, and run in one forward pass if possible."""

import logging
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .adapted import identity_of_weights
from .cache_probe import distance_of_logits, tolerance_of
from .cached_rows import CachedRows
from .member_model import MemberModel, is_out_of_memory
from .mixed_model import MixedModel, can_mix
from .repacked_cache import RepackedRows, forward_together, num_new_ids

logger = logging.getLogger(__name__)

_MOST_AGAIN = 8
"""Number of ids that a row may read again, to run along with rows that have more new ids."""


class SharedWeights:
    """Members that share their weights.

    Requests wait until the result of one is needed. Then all requested members run in one forward pass, if a trial
    found that they can, or else one after the other.

    Args:
        members: The members.
    """

    def __init__(self, members: Sequence[Any]):
        self._members = list(members)
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._of_thread = threading.local()
        self._mixed: tuple[Any, MixedModel | None] = (None, None)

    def __getstate__(self) -> Any:
        # A copy of the members has a mixed model of its own.
        return self._members

    def __setstate__(self, state: Any) -> None:
        self._members = state
        self._begin()

    def mixed_model(self) -> MixedModel | None:
        """A model for all members that can currently share a batch; None if there are none.

        It checks all members, so ask once per call.
        """
        made_for = [member.fingerprint() for member in self._members]
        with self._lock:
            if self._mixed[0] != made_for:
                self._mixed = made_for, self._found()
            return self._mixed[1]

    def _found(self) -> MixedModel | None:
        members = [member for member in self._members if can_mix(member)]
        names = ", ".join(member.name for member in members)
        if len(members) < 2:
            return None
        try:
            with torch.no_grad():
                mixed = MixedModel(members)
                distance = _distance(members, mixed, members[0].trial_ids())
        except Exception as error:
            if is_out_of_memory(error):
                raise
            logger.info("members %s cannot run in one forward pass: %s", names, error)
            return None
        logger.info("members %s in one forward pass: distance %.2g", names, distance)
        return mixed if distance <= tolerance_of(members[0]) else None

    # Waiting requests

    def wait(self, rows: "SharedRows") -> None:
        """Let rows wait until some results are needed."""
        self._waiting.append(weakref.ref(rows))

    @property
    def _waiting(self) -> list[Any]:
        """This thread's requests; other threads have their own calls."""
        try:
            waiting: list[Any] = self._of_thread.waiting
        except AttributeError:
            waiting = self._of_thread.waiting = []
        return waiting

    def run(self) -> None:
        """Run all waiting rows."""
        waiting, self._of_thread.waiting = self._waiting, []
        asked = [rows for rows in (reference() for reference in waiting) if rows is not None and rows.asked]
        if len(asked) > 1 and not all(rows.has_looked for rows in asked):
            mixed = self.mixed_model()
            for rows in asked:
                rows.has_looked = True
                rows.mixed = mixed if mixed is not None and rows.own.member in mixed else None
        asked.sort(key=lambda rows: rows.num_new)
        while asked:
            last = asked[-1]
            together = [
                rows for rows in asked if rows.mixed is last.mixed and last.num_new - rows.num_new <= _MOST_AGAIN
            ]
            if last.mixed is None or len(together) == 1 or not _run_together(last.mixed, together):
                last.run_alone()
                together = [last]
            asked = [rows for rows in asked if rows not in together]


class SharedRows(CachedRows):
    """The cache of one of the members that share weights; forward passes are for all of them.

    Args:
        shared: The members.
        own: The one's own rows.

    Attributes:
        asked: What is asked and has not run.
        num_new: How many ids each row takes for that.
        mixed: The model that is several members at once, this one among them; None if there is none.
        has_looked: Whether that has been looked for.
    """

    mode = "repack"

    def __init__(self, shared: SharedWeights, own: RepackedRows):
        self._shared = shared
        self.own = own
        self.mixed: MixedModel | None = None
        self.has_looked = False
        self.asked: Any = None
        self.num_new = 0
        self._logits: Tensor | None = None

    @property
    def cached(self) -> list[list[int]]:  # type: ignore[override]
        """The ids of each row that are in its cache."""
        return self.own.cached

    def forward(self, texts: Sequence[Sequence[int]], num_last: Sequence[int]) -> Tensor:
        """Request every row to be brought to its text; this runs once these or another member's logits are needed."""
        # A new request replaces one that has not run.
        self.num_forwards = 0 if self.asked else 1
        self.asked = self.own, list(map(list, texts)), list(num_last)
        self.num_new = num_new_ids(self.asked)
        if self.num_forwards:
            self._shared.wait(self)
        member = self.own.member
        nothing = torch.zeros((), dtype=member.model.dtype, device=member.device)
        return nothing.expand(len(texts), max(num_last), member.vocab_size)

    def collect(self, logits: Tensor) -> Tensor:
        """Run the waiting requests, and return the logits."""
        self._settle()
        assert self._logits is not None
        logits, self._logits = self._logits, None
        return logits

    def run_alone(self) -> None:
        """Run the request by the member alone."""
        _, texts, num_last = self.asked
        self.take(self.own.forward(texts, num_last))

    def take(self, logits: Tensor) -> None:
        """Take the requested result."""
        self.asked, self._logits = None, logits

    def _settle(self) -> None:
        if self.asked:
            self._shared.run()

    def select(self, rows: Sequence[int]) -> None:
        """Keep, repeat or drop rows."""
        self._settle()
        self.own.select(rows)

    def fork(self, rows: Sequence[int]) -> "SharedRows":
        """Return independent rows that continue from these."""
        self._settle()
        twin = SharedRows(self._shared, self.own.fork(rows))
        twin.mixed, twin.has_looked = self.mixed, self.has_looked
        return twin

    def adopt(self, fork: "SharedRows", rows: Sequence[int | None]) -> None:
        """Let row n continue from row `rows[n]` of a fork; None leaves it unchanged."""
        self._settle()
        fork._settle()
        self.own.adopt(fork.own, rows)


def _run_together(mixed: MixedModel, together: Sequence[SharedRows]) -> bool:
    members = [rows.own.member for rows in together]
    counts = [len(rows.own.cached) for rows in together]
    found = forward_together(lambda *inputs: mixed.run(members, counts, *inputs), [rows.asked for rows in together])
    if found is None:
        return False
    for rows, logits in zip(together, found, strict=True):
        rows.take(logits)
    return True


def _distance(members: Sequence[MemberModel], mixed: MixedModel, ids: Sequence[int]) -> float:
    """The distance of the members' logits in one batch from those of each alone, at a prompt and at a step after it."""
    alone = [RepackedRows(member, 1) for member in members]
    beside = [RepackedRows(member, 1) for member in members]
    distance = 0.0
    for count in (len(ids) - 1, len(ids)):
        texts = [list(ids[n % 3 : count]) for n in range(len(members))]
        found = forward_together(
            lambda *inputs: mixed.run(members, [1] * len(members), *inputs),
            [(rows, [text], [1]) for rows, text in zip(beside, texts, strict=True)],
        )
        assert found is not None
        for rows, text, logits in zip(alone, texts, found, strict=True):
            expected = rows.forward([text], [1])[:, -1].float()
            distance = max(distance, distance_of_logits(logits[:, -1].float(), expected))
    return distance


def join_members(members: Sequence[Any]) -> None:
    """Tell members which others share their weights, if some of them have adapters.

    Args:
        members: Distinct members that run models of this process.
    """
    models = {id(member.model): member.model for member in members}
    if len(models) < 2 or not any(getattr(model, "peft_config", None) for model in models.values()):
        return
    groups: dict[Any, list[Any]] = {}
    for member in members:
        groups.setdefault(identity_of_weights(member.model), []).append(member)
    for group in groups.values():
        if len({id(member.model) for member in group}) > 1:
            shared = SharedWeights(group)
            for member in group:
                member.shared = shared


def can_share_pass(member: Any, others: Iterable[Any]) -> bool:
    """Whether a step of a member can share a forward pass with a step of some of the others."""
    shared = getattr(member, "shared", None)
    is_beside = any(other is not member and getattr(other, "shared", None) is shared for other in others)
    return shared is not None and is_beside and member.cache_mode == "repack"
