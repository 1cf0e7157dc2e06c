"""GaC: averaging over the union vocabulary; in log space, a product of experts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from ..config import METHODS, GatedConfig, check_option, is_number
from ..errors import ConfigurationError
from ..members.member import Member
from ..mixing import merge_duplicates, normalize_, put_eos
from ..vocabulary.token_bytes import CONTROL
from ..vocabulary.union import UnionVocabulary
from .base import EosIds, Mixed, TokenMethod


@dataclass(frozen=True)
class GacConfig(GatedConfig):
    """GaC: the weighted average over the union vocabulary; with `space="log"`, a product of experts."""

    name: ClassVar[str] = "gac"

    space: Literal["linear", "log"] = "linear"
    """`"linear"` averages probabilities. `"log"` sums log-probabilities, with weights as given, which may be negative.
    """

    alpha: float | None = None
    """With `space="log"`: drops entries to which the primary gives less than `alpha` times its best probability."""

    strategy: Literal["mixture_sampling"] | None = None
    """`"mixture_sampling"`: one member, drawn by the weights, decides each token, and only this member runs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_option("space", self.space, self.space in ("linear", "log"), "'linear' or 'log'")
        if self.alpha is not None:
            if self.space != "log":
                raise ConfigurationError(f'`alpha` is {self.alpha!r}, but has no effect without `space="log"`.')
            is_share = is_number(self.alpha) and 0 <= self.alpha <= 1
            check_option("alpha", self.alpha, is_share, "a number from 0 to 1, or None")
        is_known = self.strategy in (None, "mixture_sampling")
        check_option("strategy", self.strategy, is_known, "'mixture_sampling' or None")
        if self.strategy is not None and (self.threshold is not None or self.space != "linear"):
            other = "a `threshold`" if self.threshold is not None else '`space="log"`'
            raise ConfigurationError(
                f'`strategy="mixture_sampling"` cannot be combined with {other}: it draws one member for each token.'
            )

    @property
    def takes_weights_as_given(self) -> bool:
        """Whether mixing weights may be negative and need not sum to 1."""
        return self.space == "log"

    @property
    def draws_one(self) -> bool:
        """Whether one member, drawn at random, decides each token."""
        return self.strategy == "mixture_sampling"

    @property
    def acts_on_one(self) -> bool:
        """Whether it changes anything if the primary has all the weight: `alpha` drops entries."""
        return self.alpha is not None

    def build(
        self, members: Sequence[Member], union: UnionVocabulary, eos_ids: EosIds, device: torch.device
    ) -> TokenMethod:
        """Build the method; see `MethodConfig.build`."""
        if self.space == "log":
            return ProductOfExperts(union, eos_ids, device, alpha=self.alpha)
        return Gac(union, eos_ids, device)


METHODS[GacConfig.name] = GacConfig


class Gac(TokenMethod):
    """Fuse `q(x) = sum_i w_i p_i(x)` over the entries x of the union vocabulary.

    Ids of one member that write the same are one entry; the EOS ids of all members are one entry. Entries that the
    primary cannot write are dropped and the rest renormalised.

    Reference:
        Yu et al., "Breaking the Ceiling of the LLM Community by Treating Token Generation as a Classification for
        Ensembling" (https://arxiv.org/abs/2406.12585).

    Relations:
        UniTE mixes over the few best entries of each member instead of all, and needs no columns for entries that only
        an assistant has.
    """

    resync = "append"
    is_wide = True

    @classmethod
    def beside(cls, method: TokenMethod) -> TokenMethod:
        """The average of the members' whole distributions beside another method, whose index maps it shares.

        It is made once and kept with that method.
        """
        if method.average is None:
            method.average = cls(method.union, (), method.device)
            method.average.maps = method.maps
        return method.average

    def mix(self, logits: Sequence[Tensor | None], weights: Tensor) -> Mixed:
        """Fuse one step; see `TokenMethod.mix`."""
        primary = logits[0]
        assert primary is not None
        batch_size, union_size = primary.shape[0], len(self.union)
        fused = primary.new_zeros(batch_size, union_size)
        eos_mass = primary.new_zeros(batch_size)
        normalizers = torch.zeros_like(weights)
        for index, member_logits in self.taking_part(logits, normalizers):
            maps = self.maps[index]
            # Entries that the member lacks read one more column, which stays 0.
            probs = primary.new_zeros(batch_size, member_logits.shape[-1] + 1)
            torch.sub(member_logits, normalizers[:, index, None], out=probs[:, :-1])
            probs[:, :-1].exp_()
            weight = weights[:, index]
            if maps.duplicates.ids.numel():
                into = maps.duplicates.canonical_ids[maps.duplicates.position]
                probs.index_add_(1, into, probs[:, maps.duplicates.ids])
                probs.index_fill_(1, maps.duplicates.ids, 0.0)
            if maps.eos_ids.numel():
                eos_mass += weight * probs.index_select(1, maps.eos_ids[:1])[:, 0]
                probs.index_fill_(1, maps.eos_ids[:1], 0.0)
            if index == 0:
                fused[:, : self.union.primary_size].addcmul_(probs[:, :-1], weight[:, None])
            else:
                fused.addcmul_(probs.index_select(1, self._columns[index]), weight[:, None])
        fused.index_fill_(1, self.unwritable, 0.0)
        eos_ids = self.maps[0].eos_ids
        if eos_ids.numel():
            put_eos(fused, eos_mass, primary, eos_ids)
        if self.unwritable.numel() or not eos_ids.numel():
            normalize_(fused)
        return Mixed(fused.log_(), normalizers)

    @cached_property
    def _columns(self) -> list[Tensor]:
        """For each union entry, the column to read in each member's probabilities; one past the last for none."""
        return [torch.where(maps.from_union < 0, len(maps.mask), maps.from_union)[:-1] for maps in self.maps]


class ProductOfExperts(TokenMethod):
    """Fuse `log q(x) = sum_i w_i log p_i(x) + const` over the entries x of the members that have a weight.

    Weights are used as given. A negative weight contrasts the others with that member; for entries to which the member
    gives no probability, it is ignored. An entry that a member lacks has the log-probability of the first id that
    writes it. Control tokens of the primary other than EOS take no part.

    Args:
        union: The union vocabulary of the members.
        eos_ids: For each member, the ids that end a text.
        device: Device of the primary's logits.
        alpha: Plausibility cut-off: entries with less than `alpha` times the probability of the primary's best are
            dropped. None: no cut-off.

    Reference:
        Li et al., "Contrastive Decoding: Open-ended Text Generation as Optimization"
        (https://arxiv.org/abs/2210.15097), for the cut-off; Liu et al., "Tuning Language Models by Proxy"
        (https://arxiv.org/abs/2401.08565), for negative weights.

    Relations:
        In GaC, an entry needs one member that believes in it; here it needs all of them.
    """

    resync = "append"
    is_wide = True
    reads_first_ids = True

    def __init__(self, union: UnionVocabulary, eos_ids: EosIds, device: torch.device, alpha: float | None = None):
        super().__init__(union, eos_ids, device)
        # The primary decides what is plausible, whatever its weight.
        self.starts_from_primary = alpha is not None
        self.proposes_few = bool(alpha)
        self.alpha = alpha
        is_control = torch.as_tensor(union.encoders[0].token_bytes.kinds == CONTROL, device=device)
        # The last column, EOS, can always be chosen; the primary's other control tokens cannot.
        self._has = [functional.pad(maps.from_union[:-1] >= 0, (0, 1), value=True) for maps in self.maps]
        self._has[0][: union.primary_size] &= ~is_control
        is_control[self.maps[0].eos_ids] = False
        self._primary_control = is_control.nonzero()[:, 0]  # except EOS
        self._reads = [(at.clamp_min(0), at < 0) for at in (maps.read_from() for maps in self.maps)]

    def mix(self, logits: Sequence[Tensor | None], weights: Tensor) -> Mixed:
        """Fuse one step; see `TokenMethod.mix`. Weights need not sum to 1."""
        primary = logits[0]
        assert primary is not None
        fused = primary.new_zeros(primary.shape[0], len(self.union) + 1)
        proposed = torch.zeros_like(fused, dtype=torch.bool)
        for index, has in enumerate(self._has):
            proposed |= (weights[:, index, None] != 0) & has
        normalizers = torch.zeros_like(weights)
        logits = [primary.index_fill(1, self._primary_control, -torch.inf), *logits[1:]]
        for index, masked in self.taking_part(logits, normalizers):
            logprobs = self._logprobs(masked - normalizers[:, index, None], index)
            fused += _weighted(logprobs, weights[:, index, None])
            if index == 0 and self.alpha:
                best = logprobs.masked_fill(~proposed, -torch.inf).amax(-1, keepdim=True)
                fused.masked_fill_(logprobs < best + math.log(self.alpha), -torch.inf)
        fused.masked_fill_(~proposed, -torch.inf).index_fill_(1, self.unwritable, -torch.inf)
        entries, eos = fused[:, :-1], fused[:, -1]
        if self.maps[0].eos_ids.numel():
            put_eos(entries, eos, primary, self.maps[0].eos_ids, nothing=-torch.inf)
        # Where nothing is left, all are `-inf`.
        return Mixed(entries.log_softmax(-1).nan_to_num_(nan=-torch.inf, neginf=-torch.inf), normalizers)

    def _logprobs(self, logprobs: Tensor, index: int) -> Tensor:
        """A member's log-probabilities of union entries and, last, EOS, of shape `(batch_size, union_size + 1)`."""
        (at, cannot), maps = self._reads[index], self.maps[index]
        rows = maps.readable(logprobs, merge_duplicates(logprobs, maps.duplicates))
        return rows.index_select(1, at).masked_fill_(cannot, -torch.inf)


def _weighted(logprobs: Tensor, weight: Tensor) -> Tensor:
    """The log-probabilities times a weight; 0 where that is `-inf` under a weight below 0, or the weight is 0."""
    return torch.where((weight <= 0) & (logprobs == -torch.inf), 0.0, logprobs * weight)
