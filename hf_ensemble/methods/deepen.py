"""DeePEn: mixes in a space of similarities to anchor tokens, and searches for the primary's distribution."""

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from ..config import METHODS, MethodConfig, check_option, check_positive_integer, is_integer, is_number
from ..errors import ConfigurationError, VocabularyError
from ..members.cuda_graphs import Captured
from ..members.member import Member
from ..mixing import merge_duplicates, put_eos, top_entries
from ..offers import Offer
from ..vocabulary.anchors import AnchorTokens
from ..vocabulary.relative import KeptRows, RelativeRows, TakenRows, distinct_ids, inverse_norms
from ..vocabulary.union import UnionVocabulary
from .base import EosIds, Mixed, TokenMethod, versions_of

_SHARPNESS = 100.0
_BETAS = (0.9, 0.999)
_EPS = 1e-8
_WEIGHT_DECAY = 0.01
_ANNEALING_STEPS = 10
_TINY = 1e-30


DeepenVariant = Literal["released", "paper"]


@dataclass(frozen=True)
class DeepenConfig(MethodConfig):
    """DeePEn: mixing in the space of similarities to anchor tokens."""

    name: ClassVar[str] = "deepen"

    variant: DeepenVariant = "released"
    """`"released"` (the published code: AdamW on logits) or `"paper"` (its equations: gradient steps on probabilities;
    greedy decoding only)."""

    num_anchors: int | None = None
    """Number of anchors, drawn from the entries that all members have. None, or more than exist: all of them."""

    anchor_seed: int = 0
    """Seed of the draw."""

    learning_rate: float = 0.15
    """η: rate of the search; the paper tries 0.05 to 0.30."""

    num_steps: int = 5
    """T: steps of the search."""

    support: int | None = 512
    """Number of each member's best ids whose similarities are used. The primary's other ids keep their logits; an
    assistant's other ids count nothing. None: all ids, which is exact, but suits small vocabularies only.
    """

    skip_on_agreement: bool = False
    """Whether to keep the primary's own distribution if all members have the same best entry; greedy decoding only."""

    def __post_init__(self) -> None:
        variants, rate, skips = get_args(DeepenVariant), self.learning_rate, self.skip_on_agreement
        check_option("variant", self.variant, self.variant in variants, f"one of {', '.join(variants)}")
        check_positive_integer("num_steps", self.num_steps)
        for name in ("num_anchors", "support"):
            if getattr(self, name) is not None:
                check_positive_integer(name, getattr(self, name))
        check_option("anchor_seed", self.anchor_seed, is_integer(self.anchor_seed), "an integer")
        check_option("learning_rate", rate, is_number(rate) and 0 < rate <= 1, "above 0 and at most 1")
        check_option("skip_on_agreement", skips, isinstance(skips, bool), "a bool")

    @property
    def greedy_only(self) -> str | None:
        """Why these options allow neither sampling nor beams; None if they do."""
        if self.variant == "paper":
            return "the distribution of variant 'paper' is nearly flat and only ranks tokens"
        if self.skip_on_agreement:
            return (
                "with `skip_on_agreement`, steps keep the primary's distribution if the members agree on the best "
                "entry"
            )
        return None

    @property
    def asks(self) -> frozenset[Offer]:
        """What every member that takes part has to provide."""
        return frozenset({Offer.ROWS, Offer.EMBEDDINGS})

    def build(
        self, members: Sequence[Member], union: UnionVocabulary, eos_ids: EosIds, device: torch.device
    ) -> TokenMethod:
        """Build the method; see `MethodConfig.build`."""
        embeddings = [member.input_embeddings() for member in members]
        return Deepen(union, eos_ids, device, embeddings, self)


METHODS[DeepenConfig.name] = DeepenConfig


class Deepen(TokenMethod):
    """Fuse `r = sum_i w_i p_i R_i`, the members' distributions in the relative space, and search the primary's `p`.

    `R_i` holds every token's similarities to the anchors (see `RelativeRows`). The search starts from the primary's
    own distribution and lowers `KL(r || p R_0)` in a few steps. Rows in which the primary's best token is EOS, or no
    other member takes part, keep the primary's own distribution.

    Args:
        union: The union vocabulary of the members.
        eos_ids: For each member, the ids that end a text.
        device: Device of the primary's logits.
        embeddings: For each member the module whose `weight` holds its input embeddings.
        config: The options.

    Reference:
        Huang et al., "Ensemble Learning for Heterogeneous Large Language Models with Deep Parallel Collaboration"
        (https://arxiv.org/abs/2404.12715).

    Relations:
        GaC and UniTE average probabilities of equal tokens; here, a token of one member also counts for similar tokens
        of another.
    """

    resync = "retokenize"
    is_wide = False
    is_capturable = False
    starts_from_primary = True

    def __init__(
        self,
        union: UnionVocabulary,
        eos_ids: EosIds,
        device: torch.device,
        embeddings: Sequence[nn.Module],
        config: DeepenConfig,
    ):
        super().__init__(union, eos_ids, device)
        self.device = self.maps[0].mask.device  # with its number
        self.config = config
        self.anchors = AnchorTokens(union, config.num_anchors, config.anchor_seed)
        self._embeddings = list(embeddings)
        self._versions: list[tuple[Any, ...]] = []
        with _turn(self._devices()):
            self._build_rows()

    def mix(self, logits: Sequence[Tensor | None], weights: Tensor) -> Mixed:
        """Fuse one step; see `TokenMethod.mix`."""
        with _turn(self._devices()):
            self._build_rows()
            return Mixed(*self._mix_parts(logits, weights, self._rows_at_once or len(weights)))

    def forget(self) -> None:
        """Free the memory of the kept rows; they are formed again when needed."""
        super().forget()
        with _turn(self._devices()):
            for rows in self._rows:
                rows.forget()
            self._drop_graphs()

    # The rows of the relative representation

    def _build_rows(self) -> None:
        """Prepare every member's rows, if embeddings have changed. Rows of zeros are masked and cannot be anchors."""
        versions = versions_of([module.weight for module in self._embeddings])  # type: ignore[misc]
        if versions == self._versions:
            return
        self._versions = versions
        weights = [
            _checked_weight(module, index, len(self.maps[index].mask)) for index, module in enumerate(self._embeddings)
        ]
        ids = [torch.from_numpy(own).to(weight.device) for own, weight in zip(self.anchors.ids, weights, strict=True)]
        is_dead = [inverse_norms(weight) == 0 for weight in weights]
        lives = torch.stack([~dead[own].to(self.device) for dead, own in zip(is_dead, ids, strict=True)]).all(0)
        if not bool(lives.any()):
            raise VocabularyError("no anchor token has a non-zero embedding in every member.")
        sharpness = _SHARPNESS if self.config.variant == "released" else None
        self._rows = [
            RelativeRows(weight, own[lives.to(own.device)], sharpness)
            for weight, own in zip(weights, ids, strict=True)
        ]
        self._dead_ids = [dead.nonzero()[:, 0].to(self.device) for dead in is_dead]
        self._num_anchors = int(lives.sum())
        # For each member, the number of ids per row of a batch; None for all ids, which the rows of a batch share.
        support = self.config.support
        self._sizes = [support if support and support < len(weight) else None for weight in weights]
        are_shared = all(rows.are_shared for rows in self._rows)
        # Else one by one, so that rows are copied for few ids, and a row that is not fused costs nothing.
        self._rows_at_once = None if are_shared or not any(self._sizes) else 1
        self._drop_graphs()

    def _drop_graphs(self) -> None:
        """Drop the captured graphs, which read the memory of the kept rows."""
        can_capture = all(
            rows.device == self.device and (size or len(maps.mask)) <= rows.capacity
            for rows, size, maps in zip(self._rows, self._sizes, self.maps, strict=True)
        )
        self._captured_look = Captured(self._look, can_capture)
        self._captured_fuse = Captured(self._fuse, can_capture)

    def _devices(self) -> set[torch.device]:
        return {self.device, *(module.weight.device for module in self._embeddings)}  # type: ignore[arg-type]

    # One step

    def _mix_parts(self, logits: Sequence[Tensor | None], weights: Tensor, size: int) -> tuple[Tensor, ...]:
        """Fuse rows of a batch, `size` at a time: log-probabilities and normalizers."""
        parts = [
            self._mix_part([None if one is None else one[n : n + size] for one in logits], weights[n : n + size])
            for n in range(0, len(weights), size)
        ]
        return tuple(map(torch.cat, zip(*parts, strict=True)))

    def _mix_part(self, logits: Sequence[Tensor | None], weights: Tensor) -> tuple[Tensor, ...]:
        """Fuse rows of a batch, in parts if their ids do not fit the kept rows."""
        counts, is_fused, *found = self._captured_look(weights, *logits)
        num_fused, *numbers = counts.tolist()
        if not num_fused:
            return self._fuse(None, weights, *logits)
        taking_part = [index for index, one in enumerate(logits) if one is not None]
        ids, places = found[: len(taking_part)], found[len(taking_part) :]
        nums_ids, nums_missing = numbers[::2], numbers[1::2]
        excess = max(num / self._rows[index].capacity for index, num in zip(taking_part, nums_ids, strict=True))
        if places and excess > 1:
            return self._mix_parts(logits, weights, math.ceil(len(weights) / math.ceil(excess)))
        for n, index in enumerate(taking_part):
            rows = self._rows[index]
            if nums_ids[n] <= rows.capacity:
                rows.keep(ids[n][: nums_ids[n]].to(rows.device), nums_missing[n])
            if places and (size := self._sizes[index]):
                # Rounded up, because every number of ids has a graph of its own.
                ids[n] = ids[n][: max(1, math.ceil(nums_ids[n] / size)) * size]
        return self._captured_fuse(is_fused, weights, *logits, *ids, *places)

    def _look(self, weights: Tensor, *logits: Tensor | None) -> tuple[Tensor, ...]:
        """Find what a step needs.

        Returns:
            The number of fused rows and, for each member that takes part, how many ids are needed and how many of
            these have no kept row; which rows are fused, of shape `(batch_size,)`; for each of these members its ids,
            the needed ones first, of shape `(num_ids,)`; and for each that has a support of its own in every row of a
            batch, where its ids are among these, of shape `(batch_size, support)`.
        """
        masked = {index: self.masked(one, index) for index, one in enumerate(logits) if one is not None}
        is_fused = self._rows_to_fuse(masked, weights)
        is_asked = is_fused[:, None] & (weights > 0)
        is_asked[:, 0] = is_fused
        counts, ids, places = [is_fused.sum()], [], []
        for index, member_logits in masked.items():
            rows, size = self._rows[index], self._sizes[index]
            best = None if size is None else top_entries(self._alive(member_logits, index), size)[1]
            if best is not None and len(best) > 1:
                own, place, num_ids = distinct_ids(best, is_asked[:, index], member_logits.shape[-1], rows.capacity)
                places.append(place)
                is_needed = torch.arange(len(own), device=self.device) < num_ids
            else:
                own = torch.arange(member_logits.shape[-1], device=self.device) if best is None else best[0]
                num_ids, is_needed = torch.full_like(counts[0], len(own)), is_asked[:, index].any()
            is_missing = rows.is_missing(own.to(rows.device)).to(self.device)
            counts += [num_ids, (is_missing & is_needed).sum()]
            ids.append(own)
        return torch.stack(counts), is_fused, *ids, *places

    def _alive(self, masked: Tensor, index: int) -> Tensor:
        return masked.index_fill(-1, self._dead_ids[index], -torch.inf)

    def _rows_to_fuse(self, logits: dict[int, Tensor], weights: Tensor) -> Tensor:
        """Which rows of a batch are fused, of shape `(batch_size,)`."""
        is_fused = (weights[:, 1:] > 0).any(-1)
        is_fused &= ~(logits[0].argmax(-1, keepdim=True) == self.maps[0].eos_ids).any(-1)
        if self.config.skip_on_agreement:
            best = {
                index: self.maps[index].to_union[merge_duplicates(one, self.maps[index].duplicates).argmax(-1)]
                for index, one in logits.items()
            }
            agrees = [(entries == best[0]) | (weights[:, index] == 0) for index, entries in best.items()]
            is_fused &= ~torch.stack(agrees).all(0)
        return is_fused

    def _fuse(self, is_fused: Tensor | None, weights: Tensor, *logits_and_ids: Any) -> tuple[Tensor, ...]:
        """Fuse a step.

        Args:
            is_fused: Which rows are fused, of shape `(batch_size,)`; the others are the primary's own. None: no row.
            weights: Of shape `(batch_size, num_members)`.
            logits_and_ids: The logits, one a member as in `mix`; then, unless `is_fused` is None, the ids and places
                that `_look` found.

        Returns:
            Log-probabilities and normalizers, as in `Mixed`.
        """
        num_members = len(self.maps)
        logits, found = logits_and_ids[:num_members], logits_and_ids[num_members:]
        normalizers = torch.zeros_like(weights)
        masked = dict(self.taking_part(logits, normalizers))
        fused = masked[0]
        if is_fused is not None:
            ids = dict(zip(masked, found[: len(masked)], strict=True))
            with_places = [index for index in masked if self._sizes[index]] if len(found) > len(masked) else []
            places = dict(zip(with_places, found[len(masked) :], strict=True))
            fused = torch.where(is_fused[:, None], self._searched(masked, ids, places, weights), fused)
        return self._pooled(fused, logits[0]), normalizers

    def _searched(
        self, masked: dict[int, Tensor], ids: dict[int, Tensor], places: dict[int, Tensor], weights: Tensor
    ) -> Tensor:
        """The primary's logits after the search, `-inf` for ids that take no part.

        Args:
            masked: The logits of the members that take part, of shape `(batch_size, vocab_size)`.
            ids: The ids of their supports, of all rows.
            places: Where the ids of each row are among these; none for a member whose rows all have the same ids.
            weights: Of shape `(batch_size, num_members)`.
        """
        target = weights.new_zeros(len(weights), self._num_anchors)
        # The primary comes last, because its rows are needed afterwards.
        for index in reversed(masked):
            alive, place = self._alive(masked[index], index), places.get(index)
            own = ids[index][None] if place is None else ids[index][place]
            start = alive.gather(1, own) if self._sizes[index] else alive
            rows = self._rows[index].take(ids[index], place)
            relative = rows.combine(start.softmax(-1))
            weight = weights[:, index, None]
            # A member that sits out a row may have NaN there.
            target += torch.where(weight > 0, weight * relative, 0.0)
        search = self._search_logits if self.config.variant == "released" else self._search_probs
        found, outside = search(alive, start, rows, relative, target)
        return outside.scatter_(1, own, found) if self._sizes[0] else found

    # The searches, for the logits of the support, of shape (B, num_ids), and of all ids, of which the others' count

    def _search_logits(
        self, alive: Tensor, start: Tensor, rows: TakenRows | KeptRows, relative: Tensor, target: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The search of the published code: AdamW on the logits, under a loss averaged over the anchors."""
        # A constant added to the logits changes nothing, even with weight decay.
        top = start.amax(-1, keepdim=True)
        logits = start - top
        mean, square = torch.zeros_like(logits), torch.zeros_like(logits)
        total_decay = 1.0
        for step in range(self.config.num_steps):
            probs = logits.softmax(-1)
            if step:
                relative = rows.combine(probs)
            # dKL/dlogits = p (1 - R r/(pR)), and rows of R sum to 1.
            ascent = rows.compare((relative - target) / relative.clamp_min(_TINY))
            # The gradient sums to zero. AdamW would take full steps along rounding errors where it is zero everywhere.
            ascent = ascent - (probs * ascent).sum(-1, keepdim=True)
            gradient = probs * ascent / self._num_anchors
            mean = mean.lerp(gradient, 1 - _BETAS[0])
            square = square.mul(_BETAS[1]).addcmul(gradient, gradient, value=1 - _BETAS[1])
            rate = self._rate(step)
            decay = 1 - rate * _WEIGHT_DECAY
            length = (square / (1 - _BETAS[1] ** (step + 1))).sqrt() + _EPS
            logits = logits * decay - rate / (1 - _BETAS[0] ** (step + 1)) * mean / length
            total_decay *= decay
        return logits, (alive - top) * total_decay

    def _search_probs(
        self, alive: Tensor, start: Tensor, rows: TakenRows | KeptRows, relative: Tensor, target: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The search of the paper: plain gradient steps on the probabilities."""
        probs = start.softmax(-1)
        for step in range(self.config.num_steps):
            if step:
                relative = rows.combine(probs)
            probs = probs + self.config.learning_rate * rows.compare(target / relative.clamp_min(_TINY))
            probs = torch.where(start > -torch.inf, probs, 0.0)
        return probs.clamp_min(0).log(), alive - start.logsumexp(-1, keepdim=True)

    def _rate(self, step: int) -> float:
        """Cosine annealing from the learning rate to a quarter of it."""
        low, high = self.config.learning_rate / 4, self.config.learning_rate
        return low + (high - low) * (1 + math.cos(math.pi * step / _ANNEALING_STEPS)) / 2

    def _pooled(self, logits: Tensor, primary: Tensor) -> Tensor:
        """Log-probabilities of entries: each at its canonical id, EOS at its best id."""
        maps = self.maps[0]
        probs = merge_duplicates(logits, maps.duplicates).softmax(-1)
        if len(maps.eos_ids) > 1:
            put_eos(probs, probs.index_select(1, maps.eos_ids[:1])[:, 0], primary, maps.eos_ids)
        return probs.log_()


_turns = threading.Lock()
_last_turn: dict[torch.device, torch.cuda.Event] = {}


@contextmanager
def _turn(devices: set[torch.device]) -> Iterator[None]:
    """Let one step at a time form and read kept rows, on the host and across GPU streams.

    Products are in float32 whatever the caller's autocast, because kept rows outlive it.
    """
    with ExitStack() as stack:
        stack.enter_context(_turns)
        for kind in filter(torch.amp.is_autocast_available, {device.type for device in devices}):
            stack.enter_context(torch.autocast(kind, enabled=False))
        # Buffers live longer than a call, so they must not be tied to its inference mode.
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        streams = {device: torch.cuda.current_stream(device) for device in devices if device.type == "cuda"}
        for device, stream in streams.items():
            if device in _last_turn:
                stream.wait_event(_last_turn[device])
        try:
            yield
        finally:
            _last_turn.update({device: stream.record_event() for device, stream in streams.items()})


def _checked_weight(module: nn.Module, member: int, vocab_size: int) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    if weight.is_meta or not weight.is_floating_point() or weight.ndim != 2 or len(weight) < vocab_size:
        where = "offloaded" if weight.is_meta else f"{weight.dtype} of shape {tuple(weight.shape)}"
        raise ConfigurationError(
            f"method 'deepen' reads the input embeddings, one row of numbers for each of {vocab_size} ids, but those of "
            f"member {member} are {where}. Load them unquantised and on a device."
        )
    return weight.detach()[:vocab_size]
