"""The fused step: turns the members' logits at some positions into one distribution per position.

The token loop calls it with its rows, drafts with the positions of a round, and likelihoods with the steps of given
texts. Only this module handles gates, weights, members that sit out, masks and normalizers.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..members.member import Member
from ..members.transfer import sent
from ..methods.base import CapturedMix, Mixed, TokenMethod
from ..methods.gac import Gac
from ..mixing import fold
from .draws import Draws
from .listed_ids import UNKNOWN, ListedIds


class Reader(Protocol):
    """Provides the members' logits at the positions of a step."""

    def sitting_out(self) -> Mapping[int, Sequence[int]]:
        """For each member, the positions at which it sits out."""

    def read(self, needed: Tensor) -> list[Tensor | None]:
        """Run the members that are needed. A step with a gate asks for this member first, and then for all.

        Args:
            needed: Whether each member is needed at each position, of shape `(num_positions, num_members)`, on the
                CPU.

        Returns:
            Each member's logits in float32 on the mixing device, of shape `(num_positions, vocab_size)`; None if it is
            needed nowhere. At positions where it is not needed, they have no meaning.
        """

    def losing_space(self) -> list[int]:
        """The positions at the beginning of a text, where some members' entries have lost a leading space."""

    def normalizers(self) -> Mapping[int, Tensor | None]:
        """For members that send few entries, logsumexp of all their logits, of shape `(num_positions,)`, or None."""

    def where(self, position: int) -> str:
        """The place of a position, for errors: "in row 0 at step 1"."""


@dataclass(frozen=True)
class Fused:
    """One fused step.

    Attributes:
        logprobs: Fused log-probabilities, of shape `(num_positions, union_size)` if the decision is made over the union
            vocabulary, else `(num_positions, primary_vocab_size)`.
        normalizers: Logsumexp of every member's logits, of shape `(num_positions, num_members)`; 0 if a member takes
            no part; NaN or infinite if its logits are.
        weights: The weights of this step, of the same shape, on the mixing device.
        plan: The same on the CPU.
        needed: Whether each member takes part at each position, of the same shape, on the CPU.
        closed: Positions at which a gate decided alone; None without a gate.
        logits: Each member's logits, as they were mixed.
        whole: Log-probabilities of the weighted mean of the members' whole distributions, over the primary's ids; None
            if nothing constrains the choice, or the method proposes everything.
        starts: Positions at the beginning of a text, where some members' entries have lost a leading space.
    """

    logprobs: Tensor
    normalizers: Tensor
    weights: Tensor
    plan: Tensor
    needed: Tensor
    closed: set[int] | None
    logits: list[Tensor | None]
    whole: Tensor | None = None
    starts: Sequence[int] = ()

    @property
    def level(self) -> Tensor:
        """The weighted logsumexp of the members' logits, of shape `(num_positions, 1)`, on which penalties depend."""
        return (self.weights * self.normalizers).sum(-1, keepdim=True)

    @property
    def is_not_finite(self) -> Tensor:
        """Whether a member's logits were NaN or infinite, of shape `(num_positions, num_members)`."""
        return ~self.normalizers.isfinite()


class FusedStep:
    """Mixes members at any number of positions.

    Args:
        members: The members; the first is the primary.
        method: The method, made for these members.
        is_wide: Whether to return columns of the union vocabulary, if the method has them; otherwise all are folded
            onto the primary's ids.
        gate: The gate member's number and its threshold; None for no gate.
        draws: Draws, by the weights, the one member that decides at each position; None if several decide.
        captures: Whether mixing runs through CUDA graphs, one for each number of positions.
    """

    def __init__(
        self,
        members: Sequence[Member],
        method: TokenMethod,
        *,
        is_wide: bool,
        gate: tuple[int, float] | None = None,
        draws: Draws | None = None,
        captures: bool = True,
    ):
        self.members = members
        self.method = method
        self.is_wide = is_wide and method.is_wide
        self._width = members[0].vocab_size
        self._gate = gate
        self._draws = draws
        self._alone = torch.eye(len(members))  # the weights if one member decides
        self._captures = captures
        self._listed: dict[int, ListedIds] = {}
        self._mixes: dict[int, Callable[[Sequence[Tensor | None], Tensor], Mixed]] = {}
        self._sent: tuple[Tensor, Tensor] | None = None

    @property
    def follows_weights(self) -> bool:
        """Whether the weights alone determine which members are needed, so that this is known before the step."""
        return self._gate is None and self._draws is None

    def needed_next(self, plan: Tensor, decides: Sequence[bool], weights_vary: bool) -> Tensor | None:
        """Which members the next step needs, where that is known before it.

        Args:
            plan: The weights of this step, of shape `(num_positions, num_members)`.
            decides: Where something is chosen.
            weights_vary: Whether the weights may be others then.

        Returns:
            Of the shape of `plan`; None if it is not known.
        """
        if self._gate is not None:
            # The gate is asked wherever something is chosen, and says whether the others are.
            is_gate = torch.arange(plan.shape[1]) == self._gate[0]
            return torch.tensor(decides)[:, None] & is_gate
        return plan != 0 if self.follows_weights and not weights_vary else None

    def _mixed(
        self, logits: Sequence[Tensor | None], weights: Tensor, starts: Sequence[int], is_whole: bool = False
    ) -> Mixed:
        """Fuse positions, using the method for the beginning of a text where one begins.

        Args:
            logits: As for `TokenMethod.mix`.
            weights: As for `TokenMethod.mix`.
            starts: Positions at which a text begins.
            is_whole: Whether to average whole distributions instead of using the method.
        """

        def mix(method: TokenMethod, some: Sequence[Tensor | None], weights: Tensor) -> tuple[Tensor, Tensor]:
            mixed = self._mix(method, is_whole)(some, weights)
            return mixed.logprobs, mixed.normalizers

        return Mixed(*self._by_place(mix, logits, weights, starts))

    def _by_place(
        self,
        fuse: Callable[[TokenMethod, Sequence[Tensor | None], Tensor], tuple[Tensor, ...]],
        logits: Sequence[Tensor | None],
        weights: Tensor,
        starts: Sequence[int],
    ) -> tuple[Tensor, ...]:
        """Fuse most positions by the method, and the beginnings of texts by its variant for them."""
        if not starts:
            return fuse(self.method, logits, weights)
        if len(starts) == len(weights):
            return fuse(self.method.at_start, logits, weights)
        others = sorted(set(range(len(weights))).difference(starts))
        places, parts = [], []
        for method, positions in ((self.method, others), (self.method.at_start, starts)):
            at = sent(positions, weights.device)
            places.append(at)
            parts.append(fuse(method, [None if one is None else one[at] for one in logits], weights[at]))
        order = torch.cat(places).argsort()
        return tuple(torch.cat(rows)[order] for rows in zip(*parts, strict=True))

    @property
    def listed(self) -> ListedIds:
        """Maps the members' ids to the primary's columns."""
        return self._listed_ids(self.method)

    def _listed_ids(self, method: TokenMethod) -> ListedIds:
        return self._listed.setdefault(id(method), ListedIds(method))

    def _mix(self, method: TokenMethod, is_whole: bool) -> Callable[[Sequence[Tensor | None], Tensor], Mixed]:
        method = Gac.beside(method) if is_whole else method
        if id(method) not in self._mixes:
            self._mixes[id(method)] = CapturedMix(method) if self._captures else method.mix
        return self._mixes[id(method)]

    def run(
        self,
        reader: Reader,
        weights: Tensor,
        deciding: Sequence[int] | None = None,
        is_constrained: bool = False,
    ) -> Fused:
        """Fuse one step.

        Args:
            reader: Gives the members' logits.
            weights: Mixing weights of each position, of shape `(num_positions, num_members)`, on the CPU.
            deciding: Positions that make a choice. Default: all.
            is_constrained: Whether constraints may allow none of the proposals; if so, the mean of the members' whole
                distributions is computed too, for a method that proposes few.

        Raises:
            MemberError: If the gate member returned NaN or infinite logits. For other members, see `is_not_finite`.
        """
        plan, closed = self._plan(reader, weights, deciding)
        needed = plan != 0
        needed[:, 0] |= self.method.starts_from_primary
        logits = reader.read(needed)
        there = self._there(plan)
        everywhere, anywhere = needed.all(0).tolist(), needed.any(0).tolist()
        is_partial = not anywhere[0]
        for index, one in enumerate(logits):
            if one is None or not anywhere[index]:
                logits[index] = None
            elif not everywhere[index]:
                is_partial = True
                # Logits of a member that takes no part must not count, not even as NaN.
                logits[index] = one.masked_fill(there[:, index, None] == 0, 0.0)
        if logits[0] is None:
            # So EOS is written as the primary's first EOS id.
            logits[0] = torch.zeros(len(plan), self._width, device=self.method.device)
        starts = reader.losing_space() if self.method.build_at_start is not None else []
        mixed = self._mixed(logits, there, starts)
        normalizers = mixed.normalizers
        if known := reader.normalizers():
            normalizers = with_known(normalizers, known, there)
        if is_partial:
            takes_part = there != 0
            takes_part[:, 0] |= self.method.starts_from_primary
            normalizers = torch.where(takes_part, normalizers, 0.0)
        return Fused(
            logprobs=mixed.logprobs if self.is_wide else self.folded(mixed.logprobs),
            normalizers=normalizers,
            weights=there,
            plan=plan,
            needed=needed,
            closed=closed,
            logits=logits,
            whole=self.whole(logits, there, known, starts) if is_constrained and self.method.proposes_few else None,
            starts=starts,
        )

    def folded(self, rows: Tensor) -> Tensor:
        """Fold rows over the union vocabulary onto the primary's ids; leave others unchanged."""
        if rows.shape[-1] == self._width:
            return rows
        return fold(rows, self.method.first_ids_beyond_primary, self._width)

    def entry(self, column: int) -> tuple[list[int], bytes]:
        """Return the primary's ids that write an entry (none if it cannot), and the entry's bytes.

        Args:
            column: An id of the primary, or a union id of what only another member has.
        """
        if column < self._width:
            return [column], self.members[0].encoder.token_bytes.write([column])
        return self.method.union.continuation(column, 0) or [], self.method.union.entry(column)

    def _plan(self, reader: Reader, weights: Tensor, deciding: Sequence[int] | None) -> tuple[Tensor, set[int] | None]:
        """The final weights of every position, and the positions where a gate closed."""
        plan = weights
        sitting_out = reader.sitting_out()
        for index, positions in sitting_out.items():
            if positions:
                plan = without_member(plan, index, positions)
        if self.follows_weights and deciding is None:
            return plan, None
        deciding = list(range(len(plan)) if deciding is None else deciding)
        if len(deciding) < len(plan) and not (self.follows_weights and deciding):
            # Without a choice, no member is needed; the primary stands in, so that there is something to mix.
            idle = torch.ones(len(plan), dtype=torch.bool)
            idle[deciding] = False
            plan = torch.where(idle[:, None], self._alone[0], plan)
        if self._draws is not None and deciding:
            plan = plan.clone()
            plan[deciding] = self._alone[self._draws.choose(plan[deciding], deciding)]
        if self._gate is None:
            return plan, None
        gate, _ = self._gate
        asked = sorted({*deciding} - {*sitting_out.get(gate, ())})
        closed = self._closed(reader, asked, plan)
        if closed:
            plan = plan.clone()
            plan[list(closed)] = self._alone[gate]
        return plan, closed

    def _closed(self, reader: Reader, positions: Sequence[int], plan: Tensor) -> set[int]:
        """The positions at which the gate member is so sure that it decides alone."""
        assert self._gate is not None
        gate, threshold = self._gate
        needed = torch.zeros_like(plan, dtype=torch.bool)
        needed[positions, gate] = True
        logits = reader.read(needed)[gate] if positions else None
        if logits is None:
            return set()
        confidence = self.method.confidence(logits, gate, reader.normalizers().get(gate)).tolist()
        for position in positions:
            if confidence[position] != confidence[position]:
                raise self.members[gate].not_finite(reader.where(position))
        return {position for position in positions if confidence[position] > threshold}

    def whole(
        self,
        logits: Sequence[Tensor | None],
        weights: Tensor,
        listing: Collection[int] = (),
        starts: Sequence[int] = (),
    ) -> Tensor:
        """The weighted mean of the members' whole distributions.

        Args:
            logits: Each member's, as they were mixed.
            weights: Of shape `(num_positions, num_members)`, on the mixing device.
            listing: Members that give log-probabilities of few ids. An id that no member lists has the probability
                `UNKNOWN`.
            starts: Positions at which a text begins.

        Returns:
            Log-probabilities over the primary's ids.
        """
        # Weights that are taken as given may be negative, and need not sum to 1.
        shares = weights.clamp_min(0)
        shares = torch.where((shares > 0).any(-1, keepdim=True), shares, (weights != 0).float())
        shares = shares / shares.sum(-1, keepdim=True)
        if not listing:
            return self.folded(self._mixed(logits, shares, starts, is_whole=True).logprobs)

        def of_listed(method: TokenMethod, some: Sequence[Tensor | None], weights: Tensor) -> tuple[Tensor]:
            assert some[0] is not None
            known = {
                index: one if index in listing else method.masked(one, index).log_softmax(-1)
                for index, one in enumerate(some)
                if one is not None
            }
            return (self._listed_ids(method).masses(known, weights, some[0]).clamp_min(UNKNOWN).log(),)

        return self._by_place(of_listed, logits, shares, starts)[0]

    def _there(self, plan: Tensor) -> Tensor:
        """The weights on the mixing device; fixed weights are sent once."""
        if self._sent is None or self._sent[0] is not plan:
            self._sent = plan, sent(plan, self.method.device)
        return self._sent[1]


def without_member(plan: Tensor, member: int, positions: Sequence[int]) -> Tensor:
    """Take a member out of some positions, and scale the other weights there to the sum that they had with it.

    Args:
        plan: Weights, of shape `(num_positions, num_members)`.
        member: Number of the member.
        positions: Where it sits out.
    """
    kept = plan.clone()
    kept[list(positions), member] = 0.0
    before, after = plan.sum(-1, keepdim=True), kept.sum(-1, keepdim=True)
    # If some are negative, they are not shares, and stay as given.
    is_share = (plan >= 0).all(-1, keepdim=True) & (after > 0)
    kept = torch.where(is_share, kept * before / after, kept)
    # If no other member has a weight, the primary decides until the member can.
    kept[(kept == 0).all(-1), 0] = 1.0
    return kept


def with_known(normalizers: Tensor, known: Mapping[int, Tensor | None], weights: Tensor) -> Tensor:
    """Fill in the normalizers of members that sent few entries.

    An unknown normalizer becomes the weighted mean of the others', or 0 if there is none.

    Args:
        normalizers: Of shape `(num_positions, num_members)`.
        known: By member index, of shape `(num_positions,)` each, or None.
        weights: The weights of the step, of shape `(num_positions, num_members)`.
    """
    normalizers = normalizers.clone()
    unknown = [index for index, values in known.items() if values is None]
    for index, values in known.items():
        normalizers[:, index] = 0.0 if values is None else values.to(normalizers.device)
    if unknown:
        shares = weights.clone()
        shares[:, unknown] = 0.0
        total = shares.sum(-1)
        mean = torch.where(total > 0, (shares * normalizers).sum(-1) / total, 0.0)
        normalizers[:, unknown] = mean[:, None]
    return normalizers
