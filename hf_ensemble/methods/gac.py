"""GaC: averaging over the union vocabulary; in log space, a product of experts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..config import METHODS, GatedConfig, is_number
from ..errors import ConfigurationError
from ..members.member import Member
from ..mixing import merge_duplicates, normalize_, put_eos
from ..vocabulary.context import Resync
from ..vocabulary.token_bytes import CONTROL
from ..vocabulary.union import UnionVocabulary
from .base import Mixed, TokenMethod


@dataclass(frozen=True)
class GacConfig(GatedConfig):
    """GaC: the weighted average over the union vocabulary; with `space="log"`, a product of experts."""

    name: ClassVar[str] = "gac"

    space: Literal["linear", "log"] = "linear"
    """`"linear"` averages probabilities. `"log"` sums log-probabilities, with weights as given, negative ones too."""

    alpha: float | None = None
    """With `space="log"`: entries that the primary gives less than `alpha` times its best are dropped."""

    strategy: Literal["mixture_sampling"] | None = None
    """`"mixture_sampling"`: one member, drawn with the weights, decides each token, and only it runs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.space not in ("linear", "log"):
            raise ConfigurationError(f"`space` has to be 'linear' or 'log', but is {self.space!r}.")
        if self.alpha is not None:
            if self.space != "log":
                raise ConfigurationError(f'`alpha` is {self.alpha!r}, but does nothing without `space="log"`.')
            if not (is_number(self.alpha) and 0 <= self.alpha <= 1):
                raise ConfigurationError(f"`alpha` has to be a number from 0 to 1, or None, but is {self.alpha!r}.")
        if self.strategy not in (None, "mixture_sampling"):
            raise ConfigurationError(f"`strategy` has to be 'mixture_sampling' or None, but is {self.strategy!r}.")
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
    def cuts_off(self) -> bool:
        """Whether implausible entries are dropped even if the primary has all the weight."""
        return self.alpha is not None

    def build(
        self, members: Sequence[Member], union: UnionVocabulary, eos_ids: Sequence[Sequence[int]], device: torch.device
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
        UniTE mixes over the few best entries of each member instead of all, and needs no column for what only an
        assistant has.
    """

    resync: Resync = "append"
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
            # One column more, which stays 0, is what an entry that the member lacks reads.
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
            columns = self._columns[index]
            if index == 0:
                fused[:, : self.union.primary_size].addcmul_(probs[:, :-1], weight[:, None])
            elif columns is None:
                fused.addcmul_(probs[:, :union_size], weight[:, None])
            else:
                fused.addcmul_(probs.index_select(1, columns), weight[:, None])
        fused.index_fill_(1, self.unwritable, 0.0)
        eos_ids = self.maps[0].eos_ids
        if eos_ids.numel():
            put_eos(fused, eos_mass, primary, eos_ids)
        if self.unwritable.numel() or not eos_ids.numel():
            normalize_(fused)
        return Mixed(fused.log_(), normalizers)

    @cached_property
    def _columns(self) -> list[Tensor | None]:
        """For each union entry the column of each member's probabilities to read, one past the last for none.

        None for a member that has every entry in its place, as one with the primary's vocabulary.
        """
        columns: list[Tensor | None] = []
        for maps in self.maps:
            ids = maps.from_union[:-1]
            vocab_size = len(maps.mask)
            ids = torch.where(ids < 0, vocab_size, ids)
            in_place = torch.equal(ids, torch.arange(len(ids), device=ids.device).clamp_max(vocab_size))
            columns.append(None if in_place else ids)
        return columns


class ProductOfExperts(TokenMethod):
    """Fuse `log q(x) = sum_i w_i log p_i(x) + const` over the entries x of the members that have a weight.

    Weights are taken as given. A negative one turns a member into what the others are contrasted with; where it gives
    nothing, it does not count. An entry that a member lacks has the log-probability of the first id that writes it.
    Control tokens of the primary other than EOS take no part.

    Args:
        union: The union vocabulary of the members.
        eos_ids: For each member, the ids that end a text.
        device: Where the primary's logits are.
        alpha: Plausibility cut-off: entries with less than `alpha` times the probability of the primary's best are
            dropped. None: none is.

    Reference:
        Li et al., "Contrastive Decoding: Open-ended Text Generation as Optimization"
        (https://arxiv.org/abs/2210.15097), for the cut-off; Liu et al., "Tuning Language Models by Proxy"
        (https://arxiv.org/abs/2401.08565), for negative weights.

    Relations:
        GaC averages probabilities: an entry needs one member that believes in it, here it needs all of them.
    """

    resync: Resync = "append"
    is_wide = True
    reads_first_ids = True

    def __init__(
        self,
        union: UnionVocabulary,
        eos_ids: Sequence[Sequence[int]],
        device: torch.device,
        alpha: float | None = None,
    ):
        super().__init__(union, eos_ids, device)
        # The primary says what is plausible, whatever its weight.
        self.starts_from_primary = alpha is not None
        self.proposes_few = bool(alpha)
        self.alpha = alpha
        is_control = torch.as_tensor(union.encoders[0].token_bytes.kinds == CONTROL, device=device)
        ids = torch.arange(union.primary_size, device=device)
        self._no_entry = (is_control | (self.maps[0].from_union[: union.primary_size] != ids)).nonzero()[:, 0]
        is_control[self.maps[0].eos_ids] = False
        self._primary_control = is_control.nonzero()[:, 0]  # but EOS
        # For each member and union entry the column to read: of its entries, of its ids, or of none.
        self._own, self._first, self._lacks, self._cannot = [], [], [], []
        for maps in self.maps:
            own, first = maps.from_union[:-1], maps.first_id[:-1]
            self._own.append(own.clamp_min(0))
            self._first.append(first.clamp_min(0))
            self._lacks.append(own < 0)
            self._cannot.append((own < 0) & (first < 0))

    def mix(self, logits: Sequence[Tensor | None], weights: Tensor) -> Mixed:
        """Fuse one step; see `TokenMethod.mix`. Weights need not sum to 1."""
        primary = logits[0]
        assert primary is not None
        fused = primary.new_zeros(primary.shape[0], len(self.union))
        fused_eos = primary.new_zeros(primary.shape[0])
        proposed = torch.zeros_like(fused, dtype=torch.bool)
        for index, lacks in enumerate(self._lacks):
            proposed |= (weights[:, index, None] != 0) & ~lacks
        proposed.index_fill_(1, self._no_entry, False)
        normalizers = torch.zeros_like(weights)
        logits = [primary.index_fill(1, self._primary_control, -torch.inf), *logits[1:]]
        for index, masked in self.taking_part(logits, normalizers):
            entry_logprobs, eos_logprob = self._logprobs(masked - normalizers[:, index, None], index)
            weight = weights[:, index]
            fused += _weighted(entry_logprobs, weight[:, None])
            fused_eos += _weighted(eos_logprob, weight)
            if index == 0 and self.alpha:
                best = entry_logprobs.masked_fill(~proposed, -torch.inf).amax(-1)
                least = torch.maximum(best, eos_logprob) + math.log(self.alpha)
                fused.masked_fill_(entry_logprobs < least[:, None], -torch.inf)
                fused_eos.masked_fill_(eos_logprob < least, -torch.inf)
        fused.masked_fill_(~proposed, -torch.inf).index_fill_(1, self.unwritable, -torch.inf)
        if self.maps[0].eos_ids.numel():
            put_eos(fused, fused_eos, primary, self.maps[0].eos_ids, nothing=-torch.inf)
        # Where nothing is left, all are `-inf`.
        return Mixed(fused.log_softmax(-1).nan_to_num_(nan=-torch.inf, neginf=-torch.inf), normalizers)

    def _logprobs(self, logprobs: Tensor, index: int) -> tuple[Tensor, Tensor]:
        """A member's log-probabilities of union entries, of shape `(batch_size, union_size)`, and of EOS."""
        maps = self.maps[index]
        entries = merge_duplicates(logprobs, maps.duplicates)
        read = torch.where(
            self._lacks[index], logprobs.index_select(1, self._first[index]), entries.index_select(1, self._own[index])
        )
        read = read.masked_fill(self._cannot[index], -torch.inf)
        if maps.eos_ids.numel():
            return read, entries.index_select(1, maps.eos_ids[:1])[:, 0]
        return read, torch.full_like(read[:, 0], -torch.inf)


def _weighted(logprobs: Tensor, weight: Tensor) -> Tensor:
    """The log-probabilities times a weight; 0 where that is `-inf` under a weight below 0, or the weight is 0."""
    return torch.where((weight <= 0) & (logprobs == -torch.inf), 0.0, logprobs * weight)
