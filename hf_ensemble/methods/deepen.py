"""DeePEn: mixing in a space of similarities to anchor tokens, and searching the way back to the primary's tokens."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..config import DeepenConfig
from ..errors import ConfigurationError, VocabularyError
from ..mixing import log_normalizer, merge_duplicates, put_eos, top_entries
from ..vocabulary.anchors import AnchorTokens
from ..vocabulary.context import Resync
from ..vocabulary.relative import RelativeRows, TakenRows, inverse_norms
from ..vocabulary.union import UnionVocabulary
from .base import Mixed, TokenMethod

_SHARPNESS = 100.0
_BETAS = (0.9, 0.999)
_EPS = 1e-8
_WEIGHT_DECAY = 0.01
_ANNEALING_STEPS = 10
_TINY = 1e-30


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
        self.config = config
        self.anchors = AnchorTokens(union, config.num_anchors, config.anchor_seed)
        self._embeddings = list(embeddings)
        self._state = self._state_of_embeddings()
        self._build_rows()

    def mix(self, logits: Sequence[Tensor | None], weights: Tensor) -> Mixed:
        """Fuse one step; see `TokenMethod.mix`."""
        primary = logits[0]
        assert primary is not None
        if (state := self._state_of_embeddings()) != self._state:
            self._state = state
            self._build_rows()
        normalizers = primary.new_zeros(primary.shape[0], len(logits))
        taking_part: dict[int, Tensor] = {}
        for index, member_logits in enumerate(logits):
            if member_logits is not None:
                taking_part[index] = self.masked(member_logits, index)
                normalizers[:, index] = log_normalizer(taking_part[index])
        fused = taking_part[0]
        rows = self._rows_to_fuse(taking_part, weights).nonzero()[:, 0]
        for some in rows.split(self._rows_at_once or max(1, len(rows))):
            part = {index: member_logits[some] for index, member_logits in taking_part.items()}
            fused = fused.index_copy(0, some, self._fuse(part, weights[some]))
        return Mixed(self._pooled(fused, primary), normalizers)

    def forget(self) -> None:
        """Give the memory of the kept rows back; they are formed again when needed."""
        for rows in self._rows:
            rows.forget()

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
        support = self.config.support
        # As many rows of a batch as their supports' rows surely fit; with all ids, one pass serves the whole batch.
        self._rows_at_once = max(1, min(rows.capacity for rows in self._rows) // support) if support else None

    def _state_of_embeddings(self) -> list[tuple[int, int]]:
        """What changes when somebody moves or trains the embeddings."""
        weights = [module.weight for module in self._embeddings]
        return [(w.data_ptr(), 0 if w.is_inference() else w._version) for w in weights]  # type: ignore[operator]

    def _rows_to_fuse(self, logits: dict[int, Tensor], weights: Tensor) -> Tensor:
        """Which rows of a batch are fused, of shape `(batch_size,)`."""
        is_fused = (weights[:, 1:] > 0).any(-1)
        is_fused &= ~torch.isin(logits[0].argmax(-1), self.maps[0].eos_ids)
        if self.config.skip_on_agreement:
            best = {
                index: self.maps[index].to_union[merge_duplicates(one, self.maps[index].duplicates).argmax(-1)]
                for index, one in logits.items()
            }
            agrees = [(entries == best[0]) | (weights[:, index] == 0) for index, entries in best.items()]
            is_fused &= ~torch.stack(agrees).all(0)
        return is_fused

    def _fuse(self, logits: dict[int, Tensor], weights: Tensor) -> Tensor:
        """Fuse rows that are to be fused: the primary's logits after the search, `-inf` for ids that take no part."""
        target = weights.new_zeros(weights.shape[0], self._num_anchors)
        for index in reversed(logits):  # the primary last: its rows are needed on
            alive = logits[index].index_fill(-1, self._dead_ids[index], -torch.inf)
            support = _Support(alive, self._rows[index], self.config.support)
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
            put_eos(probs, probs[:, maps.eos_ids[0]].clone(), primary, maps.eos_ids)
        return probs.log_()


class _Support:
    """The ids of each row for which rows of the relative representation are used, and the products with them.

    Attributes:
        logits: Of shape `(batch_size, num_ids)`.
    """

    def __init__(self, logits: Tensor, rows: RelativeRows, size: int | None):
        vocab_size = logits.shape[-1]
        self._ids: Tensor | None = None
        if size is None or size >= vocab_size:
            self.logits = logits
            taken = torch.arange(vocab_size, device=logits.device)
        else:
            self.logits, self._ids = top_entries(logits, size)
            taken, self._place = self._ids.unique(return_inverse=True)
        self._num_taken = len(taken)
        self._taken: TakenRows = rows.take(taken.to(rows.device))

    def combine(self, probs: Tensor) -> Tensor:
        """`p R`: from `(batch_size, num_ids)` to `(batch_size, num_anchors)`."""
        if self._ids is not None:
            probs = probs.new_zeros(probs.shape[0], self._num_taken).scatter_(1, self._place, probs)
        return self._taken.combine(probs)

    def compare(self, weights: Tensor) -> Tensor:
        """`R x`: from `(batch_size, num_anchors)` to `(batch_size, num_ids)`."""
        products = self._taken.compare(weights)
        return products if self._ids is None else products.gather(1, self._place)

    def put(self, values: Tensor, into: Tensor) -> Tensor:
        """Write values of shape `(batch_size, num_ids)` at their ids into `(batch_size, vocab_size)`, in place."""
        return values if self._ids is None else into.scatter_(1, self._ids, values)


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
