"""DeePEn: mixing in a space of similarities to anchor tokens, and searching the way back to the primary's tokens."""

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from ..config import METHODS, MethodConfig, check_positive_integer, is_number
from ..errors import ConfigurationError, VocabularyError
from ..members.cuda_graphs import Captured
from ..members.member import Member
from ..mixing import log_normalizer, merge_duplicates, put_eos, top_entries
from ..vocabulary.anchors import AnchorTokens
from ..vocabulary.context import Resync
from ..vocabulary.relative import RelativeRows, TakenRows, inverse_norms
from ..vocabulary.union import UnionVocabulary
from .base import Mixed, TokenMethod, versions_of

_SHARPNESS = 100.0
_BETAS = (0.9, 0.999)
_EPS = 1e-8
_WEIGHT_DECAY = 0.01
_ANNEALING_STEPS = 10
_TINY = 1e-30

_HELD_BYTES = 256 * 2**20
"""Most memory of the rows of one member that a part of a batch works with, unless one row of the batch needs more."""


DeepenVariant = Literal["released", "paper"]


@dataclass(frozen=True)
class DeepenConfig(MethodConfig):
    """DeePEn: mixing in the space of similarities to anchor tokens."""

    name: ClassVar[str] = "deepen"

    variant: DeepenVariant = "released"
    """`"released"` (the published code: AdamW on logits) or `"paper"` (its equations: gradient steps on probabilities;
    greedy decoding only)."""

    num_anchors: int | None = None
    """Number of anchors, drawn from the entries that all members have. None, or more than there are: all of them."""

    anchor_seed: int = 0
    """Seed of the draw."""

    learning_rate: float = 0.15
    """η: rate of the search; the paper tries 0.05 to 0.30."""

    num_steps: int = 5
    """T: steps of the search."""

    support: int | None = 512
    """Number of each member's best ids whose similarities are used. The primary's other ids keep their logits, an
    assistant's count nothing. None: all ids, which is exact and for small vocabularies."""

    skip_on_agreement: bool = False
    """Whether the primary's own distribution stands where all members' best entries are the same; greedy decoding
    only."""

    def __post_init__(self) -> None:
        if self.variant not in get_args(DeepenVariant):
            raise ConfigurationError(
                f"`variant` has to be one of {', '.join(get_args(DeepenVariant))}, but is {self.variant!r}."
            )
        for name in ("num_anchors", "num_steps", "support"):
            value = getattr(self, name)
            if value is not None or name == "num_steps":
                check_positive_integer(name, value)
        if not isinstance(self.anchor_seed, int) or isinstance(self.anchor_seed, bool):
            raise ConfigurationError(f"`anchor_seed` has to be an integer, but is {self.anchor_seed!r}.")
        rate = self.learning_rate
        if not (is_number(rate) and 0 < rate <= 1):
            raise ConfigurationError(f"`learning_rate` has to be above 0 and at most 1, but is {rate!r}.")
        if not isinstance(self.skip_on_agreement, bool):
            raise ConfigurationError(f"`skip_on_agreement` has to be a bool, but is {self.skip_on_agreement!r}.")

    @property
    def greedy_only(self) -> str | None:
        """Why these options allow neither sampling nor beams; None if they do."""
        if self.variant == "paper":
            return "the distribution of variant 'paper' is nearly flat and only ranks tokens"
        if self.skip_on_agreement:
            return "with `skip_on_agreement`, steps have the primary's distribution where members agree on the best"
        return None

    def build(
        self, members: Sequence[Member], union: UnionVocabulary, eos_ids: Sequence[Sequence[int]], device: torch.device
    ) -> TokenMethod:
        """Build the method; see `MethodConfig.build`."""
        embeddings = [member.model.get_input_embeddings() for member in members]
        return Deepen(union, eos_ids, device, embeddings, self)


METHODS[DeepenConfig.name] = DeepenConfig


class Deepen(TokenMethod):
    """Fuse `r = sum_i w_i p_i R_i`, the members' distributions in the relative space, and search the primary's `p`.

    `R_i` holds every token's similarities to the anchors (see `RelativeRows`). The search starts from the primary's own
    distribution and lowers `KL(r || p R_0)` in a few steps. Rows in which the primary's best token is EOS, or nobody
    else takes part, are the primary's own.

    Args:
        union: The union vocabulary of the members.
        eos_ids: For each member, the ids that end a text.
        device: Where the primary's logits are.
        embeddings: For each member the module whose `weight` holds its input embeddings.
        config: The options.

    Reference:
        Huang et al., "Ensemble Learning for Heterogeneous Large Language Models with Deep Parallel Collaboration"
        (https://arxiv.org/abs/2404.12715).

    Relations:
        GaC and UniTE average probabilities of equal tokens; here a token of one member also counts for similar ones of
        another.
    """

    resync: Resync = "retokenize"
    is_wide = False
    is_capturable = False
    starts_from_primary = True

    def __init__(
        self,
        union: UnionVocabulary,
        eos_ids: Sequence[Sequence[int]],
        device: torch.device,
        embeddings: Sequence[nn.Module],
        config: DeepenConfig,
    ):
        super().__init__(union, eos_ids, device)
        self.device = self.maps[0].mask.device  # with its number
        self.config = config
        self.anchors = AnchorTokens(union, config.num_anchors, config.anchor_seed)
        self._embeddings = list(embeddings)
        self._versions = self._versions_of_embeddings()
        with _turns.take(self._devices()):
            self._build_rows()

    def mix(self, logits: Sequence[Tensor | None], weights: Tensor) -> Mixed:
        """Fuse one step; see `TokenMethod.mix`."""
        with _turns.take(self._devices()):
            if (versions := self._versions_of_embeddings()) != self._versions:
                self._versions = versions
                self._build_rows()
            parts = [
                self._mix_part([None if one is None else one[some] for one in logits], weights[some])
                for some in _slices(len(weights), self._rows_at_once)
            ]
        logprobs, normalizers = zip(*parts, strict=True)
        return Mixed(torch.cat(logprobs), torch.cat(normalizers))

    def forget(self) -> None:
        """Give the memory of the kept rows back; they are formed again when needed."""
        super().forget()
        with _turns.take(self._devices()):
            for rows in self._rows:
                rows.forget()
            self._drop_graphs()

    def _build_rows(self) -> None:
        """Prepare every member's rows. Embeddings of zeros are masked, and no anchors."""
        weights = [_checked_weight(module, index, len(self.maps[index].mask))
                   for index, module in enumerate(self._embeddings)]  # fmt: skip
        ids = [torch.from_numpy(own).to(weight.device) for own, weight in zip(self.anchors.ids, weights, strict=True)]
        is_dead = [inverse_norms(weight) == 0 for weight in weights]
        lives = torch.stack([~dead[own].to(self.device) for dead, own in zip(is_dead, ids, strict=True)]).all(0)
        if not bool(lives.any()):
            raise VocabularyError("no anchor token has an embedding other than zeros in every member.")
        sharpness = _SHARPNESS if self.config.variant == "released" else None
        self._rows = [
            RelativeRows(weight, own[lives.to(own.device)], sharpness)
            for weight, own in zip(weights, ids, strict=True)
        ]
        self._dead_ids = [dead.nonzero()[:, 0].to(self.device) for dead in is_dead]
        self._num_anchors = int(lives.sum())
        # Of each member how many ids of each row of a batch; None for all ids, which the rows of a batch share.
        support = self.config.support
        self._sizes = [support if support and support < len(weight) else None for weight in weights]
        limits = [
            min(rows.capacity, _HELD_BYTES // (4 * self._num_anchors)) // size
            for rows, size in zip(self._rows, self._sizes, strict=True)
            if size
        ]
        # On a CPU one by one, so that a row that is not fused costs nothing.
        self._rows_at_once = None if not limits else 1 if self.device.type == "cpu" else max(1, min(limits))
        self._drop_graphs()

    def _drop_graphs(self) -> None:
        """Forget the captured graphs, which read the memory of the kept rows."""
        can_capture = all(
            rows.device == self.device and (size or len(maps.mask)) <= rows.capacity
            for rows, size, maps in zip(self._rows, self._sizes, self.maps, strict=True)
        )
        self._captured_look = Captured(self._look, can_capture)
        self._captured_fuse = Captured(self._fuse, can_capture)

    def _devices(self) -> set[torch.device]:
        return {self.device, *(module.weight.device for module in self._embeddings)}  # type: ignore[arg-type]

    def _versions_of_embeddings(self) -> list[tuple[Any, ...]]:
        return versions_of([module.weight for module in self._embeddings])  # type: ignore[misc]

    def _mix_part(self, logits: Sequence[Tensor | None], weights: Tensor) -> tuple[Tensor, ...]:
        """Fuse rows of a batch whose supports fit the kept rows: log-probabilities and normalizers."""
        counts, is_asked, *ids = self._captured_look(*logits, weights)
        num_fused, *num_missing = counts.tolist()
        if not num_fused:
            return self._fuse(*logits, None, weights)
        taking_part = [index for index, one in enumerate(logits) if one is not None]
        for index, own_ids, num in zip(taking_part, ids, num_missing, strict=True):
            self._keep(index, own_ids, is_asked[:, index], num)
        return self._captured_fuse(*logits, is_asked[:, 0], weights, *ids)

    def _look(self, *arguments: Tensor | None) -> tuple[Tensor, ...]:
        """Find what a step needs, from `(*logits, weights)`.

        Returns:
            How many rows of the batch are fused, and how many ids of each member that takes part have no kept row; for
            which members each row needs similarities, of shape `(batch_size, num_members)`; the ids of each member that
            takes part, of shape `(batch_size, num_ids)`, or `(vocab_size,)` for all.
        """
        *logits, weights = arguments
        assert weights is not None
        masked = self._masked_all(logits)
        is_fused = self._rows_to_fuse(masked, weights)
        is_asked = is_fused[:, None] & (weights > 0)
        is_asked[:, 0] = is_fused
        counts, ids = [is_fused.sum()], []
        for index, member_logits in masked.items():
            rows, size = self._rows[index], self._sizes[index]
            if size is None:
                own = torch.arange(member_logits.shape[-1], device=self.device)
            else:
                own = top_entries(self._alive(member_logits, index), size)[1]
            is_missing = rows.is_missing(own.to(rows.device)).to(self.device)
            counts.append((is_missing & is_asked[:, index, None]).sum())
            ids.append(own)
        return torch.stack(counts), is_asked, *ids

    def _keep(self, index: int, ids: Tensor, is_asked: Tensor, num_missing: int) -> None:
        """Form the rows of some ids that one member lacks, unless they are so many that they are formed at each use."""
        rows = self._rows[index]
        if ids.numel() > rows.capacity:
            return
        rows.reserve()
        if not num_missing:
            return
        if ids.ndim == 2 and len(ids) == 1:
            rows.keep(ids[0].to(rows.device), num_missing)
        else:  # rows of a batch share ids
            ids = (ids if ids.ndim == 1 else ids[is_asked].unique()).to(rows.device)
            rows.keep(ids, int(rows.is_missing(ids).sum()))

    def _masked_all(self, logits: Sequence[Tensor | None]) -> dict[int, Tensor]:
        return {index: self.masked(one, index) for index, one in enumerate(logits) if one is not None}

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

    def _fuse(self, *arguments: Tensor | None) -> tuple[Tensor, ...]:
        """Fuse a step, from `(*logits, is_fused, weights, *ids)`.

        Rows that are not fused are the primary's own; so are all if `is_fused` is None, and then no ids are needed.

        Returns:
            Log-probabilities and normalizers, as in `Mixed`.
        """
        num_members = len(self.maps)
        logits, (is_fused, weights), ids = (
            arguments[:num_members], arguments[num_members : num_members + 2], arguments[num_members + 2 :],
        )  # fmt: skip
        primary = logits[0]
        assert primary is not None
        assert weights is not None
        masked = self._masked_all(logits)
        normalizers = primary.new_zeros(len(weights), num_members)
        for index, member_logits in masked.items():
            normalizers[:, index] = log_normalizer(member_logits)
        fused = masked[0]
        if is_fused is not None:
            taking_part = {
                index: (masked[index], own) for index, own in zip(masked, ids, strict=True) if own is not None
            }
            fused = torch.where(is_fused[:, None], self._searched(taking_part, weights), fused)
        return self._pooled(fused, primary), normalizers

    def _searched(self, taking_part: dict[int, tuple[Tensor, Tensor]], weights: Tensor) -> Tensor:
        """The primary's logits after the search, `-inf` for ids that take no part.

        Args:
            taking_part: For members that take part their logits and the ids of their support.
            weights: Of shape `(batch_size, num_members)`.
        """
        target = weights.new_zeros(weights.shape[0], self._num_anchors)
        for index in reversed(taking_part):  # the primary last: its rows are needed on
            masked, ids = taking_part[index]
            alive = self._alive(masked, index)
            support = _Support(alive, self._rows[index], ids)
            relative = support.combine(support.logits.softmax(-1))
            weight = weights[:, index, None]
            # A member that sits out a row may have no number there.
            target += torch.where(weight > 0, weight * relative, 0.0)
        if self.config.variant == "released":
            return self._search_logits(alive, support, relative, target)
        return self._search_probs(alive, support, relative, target)

    def _search_logits(self, alive: Tensor, support: "_Support", relative: Tensor, target: Tensor) -> Tensor:
        """The search of the published code: AdamW on the logits, under a loss averaged over the anchors."""
        # A constant on the logits changes nothing, the weight decay included.
        top = support.logits.amax(-1, keepdim=True)
        logits = support.logits - top
        mean, square = torch.zeros_like(logits), torch.zeros_like(logits)
        total_decay = 1.0
        for step in range(self.config.num_steps):
            probs = logits.softmax(-1)
            if step:
                relative = support.combine(probs)
            # dKL/dlogits = p (1 - R r/(pR)), and rows of R sum to 1.
            ascent = support.compare((relative - target) / relative.clamp_min(_TINY))
            gradient = probs * ascent / self._num_anchors
            mean = mean.lerp(gradient, 1 - _BETAS[0])
            square = square.mul(_BETAS[1]).addcmul(gradient, gradient, value=1 - _BETAS[1])
            rate = self._rate(step)
            decay = 1 - rate * _WEIGHT_DECAY
            length = (square / (1 - _BETAS[1] ** (step + 1))).sqrt() + _EPS
            logits = logits * decay - rate / (1 - _BETAS[0] ** (step + 1)) * mean / length
            total_decay *= decay
        return support.put(logits, (alive - top) * total_decay)

    def _search_probs(self, alive: Tensor, support: "_Support", relative: Tensor, target: Tensor) -> Tensor:
        """The search of the paper: plain gradient steps on the probabilities."""
        probs = support.logits.softmax(-1)
        for step in range(self.config.num_steps):
            if step:
                relative = support.combine(probs)
            probs = probs + self.config.learning_rate * support.compare(target / relative.clamp_min(_TINY))
            probs = torch.where(support.logits > -torch.inf, probs, 0.0)
        outside = alive - support.logits.logsumexp(-1, keepdim=True)
        return support.put(probs.clamp_min(0).log(), outside)

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


class _Support:
    """The ids of each row for which rows of the relative representation are used, and the products with them.

    Attributes:
        logits: Of shape `(batch_size, num_ids)`.
    """

    def __init__(self, logits: Tensor, rows: RelativeRows, ids: Tensor):
        self._ids = ids
        self.logits = logits if ids.ndim == 1 else logits.gather(1, ids)
        shared = ids[0] if ids.ndim == 2 and len(ids) == 1 else ids
        self._taken: TakenRows = rows.take(shared.to(rows.device))

    def combine(self, probs: Tensor) -> Tensor:
        """`p R`: from `(batch_size, num_ids)` to `(batch_size, num_anchors)`."""
        return self._taken.combine(probs)

    def compare(self, weights: Tensor) -> Tensor:
        """`R x`: from `(batch_size, num_anchors)` to `(batch_size, num_ids)`."""
        return self._taken.compare(weights)

    def put(self, values: Tensor, into: Tensor) -> Tensor:
        """Write values of shape `(batch_size, num_ids)` at their ids into `(batch_size, vocab_size)`, in place."""
        return values if self._ids.ndim == 1 else into.scatter_(1, self._ids, values)


class _Turns:
    """Lets one step at a time form and read kept rows: on the host, and on the GPU where streams differ."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: dict[torch.device, torch.cuda.Event] = {}

    @contextmanager
    def take(self, devices: set[torch.device]) -> Iterator[None]:
        with self._lock:
            streams = {device: torch.cuda.current_stream(device) for device in devices if device.type == "cuda"}
            for device, stream in streams.items():
                if device in self._last:
                    stream.wait_event(self._last[device])
            try:
                # Buffers live longer than a call, so they must not be tied to its inference mode.
                with torch.inference_mode(False), torch.no_grad():
                    yield
            finally:
                for device, stream in streams.items():
                    self._last[device] = stream.record_event()


_turns = _Turns()


def _slices(length: int, size: int | None) -> list[slice]:
    size = size or max(1, length)
    return [slice(start, start + size) for start in range(0, length, size)]


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
