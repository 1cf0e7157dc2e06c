"""The plain, slow references for MinED and EVA (section 7): a table of distances, and full matrices in float64."""

import heapq
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tests.reference import EOS, Key, Reference, ReferenceMember, State, _average, _own_id, _softmaxes, is_utf8

Map = dict[Key, dict[Key, float]]
"""By entry of an assistant: the shares of the primary's entries."""


class _ReferenceMapped(Reference):
    """Members whose mass is moved to the primary's entries and then averaged.

    Where the semantics leave something open:

    - Contexts are retokenized: what is written is always one of the primary's tokens, often a piece of an
      assistant's. `resync="append"` gives the other.
    - EOS is moved to EOS, the primary's other control tokens are entries of their own and never the target of a text.
    - Mass that has no target (EOS where the primary has none, EVA's entries without neighbours) is dropped and the
      average renormalized; a member left with nothing sits the step out. If that leaves nobody, it
      is an error.
    - `Step.members` are the distributions after the move, None for a member that sat out.
    """

    def __init__(
        self,
        members: Sequence[ReferenceMember],
        method: str,
        weights: Sequence[float] | Callable[[Reference, State], Sequence[float]] | None,
        threshold: float | None,
        gate: int,
        resync: str | None,
    ):
        super().__init__(members, method, weights, threshold=threshold, gate=gate, resync=resync)
        self.maps = [self._build_map(member) for member in self.assistants]

    def _with_members(self, members: list[ReferenceMember]) -> Reference:
        twin = super()._with_members(members)
        twin.maps = [twin._build_map(member) for member in twin.assistants]
        return twin

    def _build_map(self, member: ReferenceMember) -> Map:
        raise NotImplementedError

    def _move(self, index: int, probs: dict[Key, float]) -> dict[Key, float] | None:
        """A member's distribution over the primary's entries."""
        moved: dict[Key, float] = {}
        for key, prob in probs.items():
            if index == 0:
                shares = {key: 1.0}
            elif key == EOS:
                shares = {EOS: 1.0} if self.primary.control_eos else {}
            else:
                shares = self.maps[index - 1].get(key, {})
            for target, share in shares.items():
                moved[target] = moved.get(target, 0.0) + share * prob
        return moved or None

    def _fuse(
        self, weights: list[float], logits: list[dict[Key, float] | None], rows: list[list[float] | None]
    ) -> tuple[dict[Key, float], list[dict[Key, float] | None], list[float]]:
        members: list[dict[Key, float] | None] = []
        for index, probs in enumerate(_softmaxes(logits)):
            members.append(None if probs is None else self._move(index, self._cut(index, probs)))
        members = self._filtered(members)
        weights = [w if probs else 0.0 for w, probs in zip(weights, members, strict=True)]
        if not any(weights):
            raise ValueError("No member has mass on the primary's entries.")
        weights = [weight / sum(weights) for weight in weights]
        return _average(weights, members), members, weights

    def _cut(self, index: int, probs: dict[Key, float]) -> dict[Key, float]:
        return probs

    def _filtered(self, members: list[dict[Key, float] | None]) -> list[dict[Key, float] | None]:
        return members


class ReferenceMined(_ReferenceMapped):
    """Every assistant entry is moved to the primary's entry of least edit distance.

    Where the semantics leave something open: two entries are compared by characters if both are valid UTF-8, else by
    bytes, and the two kinds of distance with each other; the id that decides ties is the canonical one. See also
    `_ReferenceMapped`.

    Args:
        members: At least one.
        weights: See `Reference`.
        threshold: See `Reference`.
        gate: See `Reference`.
        resync: See `Reference`.
    """

    resyncs = {"mined": "retokenize"}

    def __init__(
        self,
        members: Sequence[ReferenceMember],
        weights: Sequence[float] | Callable[[Reference, State], Sequence[float]] | None = None,
        threshold: float | None = None,
        gate: int = 0,
        resync: str | None = None,
    ):
        super().__init__(members, "mined", weights, threshold, gate, resync)

    def _build_map(self, member: ReferenceMember) -> Map:
        targets = sorted(self.primary.entries, key=self.primary.canonical_id)
        return {data: {nearest(data, targets): 1.0} for data in member.entries}


def nearest(data: bytes, targets: Sequence[bytes]) -> bytes:
    """The first of those at the least distance."""
    if data in targets:
        return data
    best, least = None, None
    for target in targets:
        in_chars = is_utf8(data) and is_utf8(target)
        a, b = (data.decode(), target.decode()) if in_chars else (data, target)
        if least is not None and abs(len(a) - len(b)) >= least:
            continue  # the difference in length is a lower bound
        distance = edit_distance(a, b)
        if least is None or distance < least:
            best, least = target, distance
    return best


def edit_distance(a: str | bytes, b: str | bytes) -> int:
    """The least number of insertions, deletions and substitutions that make `b` of `a`."""
    table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i in range(len(a) + 1):
        for j in range(len(b) + 1):
            if i == 0 or j == 0:
                table[i][j] = i + j
            else:
                substituted = table[i - 1][j - 1] + (a[i - 1] != b[j - 1])
                table[i][j] = min(substituted, table[i - 1][j] + 1, table[i][j - 1] + 1)
    return table[-1][-1]


class ReferenceEva(_ReferenceMapped):
    """Assistant entries are moved to the primary's entries that are near in the space of output embeddings.

    Where the semantics leave something open:

    - The map of an assistant is fitted on what it and the primary have in common, whatever third members have.
    - Embeddings are those of text entries, at canonical ids: EOS and other control tokens are in neither mean nor
      neighbourhood. All-zero rows are left out of everything (a common entry is mapped to itself nonetheless).
    - CSLS is `2 cos(x, y) - r(x) - r(y)`, r the mean cosine to the 10 nearest entries of the other side, or to all
      if there are fewer. All entries of the assistant, common ones too, are neighbours. Biases are not read.
    - Of equal similarities the lower canonical id is kept. Rows are proportional to the CSLS values.
    - The best 320 count control entries and EOS in; ties: lowest id.
    - The filter concerns members that run in the step, and ranks entries with probability only; ties: lowest id of
      the primary. A member that runs alone is not filtered.

    See also `_ReferenceMapped`.

    Args:
        members: At least one.
        weights: See `Reference`.
        neighbours: How many entries make a neighbourhood, and are kept at most.
        min_similarity: Entries of less CSLS are not kept.
        top_k: How many best entries of each member take part.
        filter_top_k: Among how many best entries of another member a member's best one must be.
        threshold: See `Reference`.
        gate: See `Reference`.
        resync: See `Reference`.
    """

    resyncs = {"eva": "retokenize"}

    def __init__(
        self,
        members: Sequence[ReferenceMember],
        weights: Sequence[float] | Callable[[Reference, State], Sequence[float]] | None = None,
        neighbours: int = 10,
        min_similarity: float = 0.1,
        top_k: int = 320,
        filter_top_k: int = 5,
        threshold: float | None = None,
        gate: int = 0,
        resync: str | None = None,
    ):
        self.neighbours, self.min_similarity = neighbours, min_similarity
        self.top_best, self.filter_top_k = top_k, filter_top_k
        super().__init__(members, "eva", weights, threshold, gate, resync)

    def _build_map(self, member: ReferenceMember) -> Map:
        sources, source = _entry_embeddings(member)  # (S, D)
        targets, target = _entry_embeddings(self.primary)  # (T, D)
        width = max(source.shape[1], target.shape[1])
        source, target = _padded(source, width), _padded(target, width)
        fitted = [(row, targets.index(data)) for row, data in enumerate(sources) if data in targets]
        if not fitted:
            raise ValueError(f"{member.name} has no entry in common with the primary.")
        own, theirs = (list(rows) for rows in zip(*fitted, strict=True))
        u, _, vh = torch.linalg.svd(source[own].T @ target[theirs], full_matrices=True)
        cosines = source @ (u @ vh) @ target.T  # (S, T)
        near_source = cosines.topk(min(self.neighbours, len(targets)), dim=1).values.mean(1)
        near_target = cosines.topk(min(self.neighbours, len(sources)), dim=0).values.mean(0)
        similarities = 2 * cosines - near_source[:, None] - near_target[None]

        shares: Map = {}
        for data, row in zip(sources, similarities.tolist(), strict=True):
            kept = heapq.nsmallest(self.neighbours, range(len(targets)), key=lambda at, row=row: (-row[at], at))
            kept = [at for at in kept if row[at] >= self.min_similarity]
            total = sum(row[at] for at in kept)
            shares[data] = {targets[at]: row[at] / total for at in kept}
        return shares | {data: {data: 1.0} for data in member.entries if data in self.primary.entries}

    def _cut(self, index: int, probs: dict[Key, float]) -> dict[Key, float]:
        best = _best(self.members[index], probs, self.top_best)
        return _normalized({key: probs[key] for key in best})

    def _filtered(self, members: list[dict[Key, float] | None]) -> list[dict[Key, float] | None]:
        best = [_best(self.primary, probs, self.filter_top_k) if probs else [] for probs in members]
        agrees = [
            any(own and own[0] in theirs for other, theirs in enumerate(best) if other != index)
            for index, own in enumerate(best)
        ]
        return [probs if agreed or not any(agrees) else None for probs, agreed in zip(members, agrees, strict=True)]


def _entry_embeddings(member: ReferenceMember) -> tuple[list[bytes], Tensor]:
    """The entries by canonical id, and their output embeddings: unit length, then mean 0, then unit length."""
    rows = member.model.get_output_embeddings().weight.detach().double()
    entries = sorted(member.entries, key=member.canonical_id)
    entries = [data for data in entries if rows[member.canonical_id(data)].any()]
    rows = rows[[member.canonical_id(data) for data in entries]]
    rows = rows / rows.norm(dim=1, keepdim=True)
    rows = rows - rows.mean(0)
    return entries, torch.nn.functional.normalize(rows, dim=1)


def _padded(rows: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(rows, (0, width - rows.shape[1]))


def _best(member: ReferenceMember, probs: dict[Key, float], count: int) -> list[Key]:
    present = [key for key, prob in probs.items() if prob > 0]
    return heapq.nsmallest(count, present, key=lambda key: (-probs[key], _own_id(member, key)))


def _normalized(probs: dict[Key, float]) -> dict[Key, float] | None:
    total = sum(probs.values())
    return {key: prob / total for key, prob in probs.items()} if total else None
