"""The plain, slow reference for DeePEn (section 6): full matrices, and the inverse by torch's own optimizer.

Everything is float64 after the members' logits. Rows of relative representations are formed anew in every step.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from tests.reference import EOS, Key, Reference, ReferenceMember, State, _own_id, _softmaxes

BETAS, EPS, WEIGHT_DECAY = (0.9, 0.999), 1e-8, 0.01
ANNEALING_STEPS = 10
SHARPNESS = 100
"""What the released variant multiplies similarities by."""


class ReferenceDeepen(Reference):
    """Members that meet in the space of their embeddings' similarities to common tokens.

    Where the semantics leave something open:

    - The primary always runs, at weight 0 and under a gate closed on an assistant too: the search starts from it.
    - A step without fusion is the primary's distribution pooled by entry, untouched. With all weight on the primary
      (a closed gate, or assistants that sit out) the search runs as ever: its logits decay.
    - The primary's best token is its best entry, several EOS ids counting together; of equals, the one of lowest id.
      "All members" of `skip_on_agreement` are those that run in the step.
    - Anchors are common to all members, whatever their weights, and sorted by the primary's canonical ids before they
      are drawn. An entry whose canonical id has an all-zero embedding in some member is no anchor. More than there
      are: all.
    - All-zero rows take no part as ids without a token do: probability 0, also in the result, where the primary's are
      concerned.
    - Annealing takes 10 steps whatever `num_steps` is; further steps climb again, as torch's scheduler does.
    - With `support`, the best ids (not entries; ties: lowest id) of a member are renormalized among themselves, the
      primary's too, in its own relative representation and in each step of the search. Released: the logits of the
      others decay by the same factors, and the softmax over all is the result. Paper: what the support had is
      distributed anew within it, the others keep their probabilities.
    - Paper: the divergence is the sum over the anchors, and `p` is not renormalized between steps. Similarities are
      not normalized in any way before their softmax.

    Args:
        members: At least one.
        weights: See `Reference`.
        variant: `"released"` or `"paper"`.
        num_anchors: All by default.
        anchor_seed: For drawing them.
        learning_rate: Of the search, at its start.
        num_steps: Of the search.
        support: How many best ids of each member take part, all by default.
        skip_on_agreement: Whether to leave the primary alone where all members' best entries are the same.
        threshold: See `Reference`.
        gate: See `Reference`.
    """

    resyncs = {"deepen": "retokenize"}

    def __init__(
        self,
        members: Sequence[ReferenceMember],
        weights: Sequence[float] | Callable[[Reference, State], Sequence[float]] | None = None,
        variant: str = "released",
        num_anchors: int | None = None,
        anchor_seed: int = 0,
        learning_rate: float = 0.15,
        num_steps: int = 5,
        support: int | None = None,
        skip_on_agreement: bool = False,
        threshold: float | None = None,
        gate: int = 0,
    ):
        super().__init__(members, "deepen", weights, threshold=threshold, gate=gate)
        if variant not in ("released", "paper"):
            raise ValueError(f"Unknown variant {variant!r}.")
        self.variant, self.learning_rate, self.num_steps = variant, learning_rate, num_steps
        self.support, self.skip_on_agreement = support, skip_on_agreement
        self.embeddings = [m.input_embeddings().detach().double().cpu() for m in self.members]
        self._drawn = num_anchors, anchor_seed
        self._meet()

    def _with_members(self, members: list[ReferenceMember]) -> Reference:
        twin = super()._with_members(members)
        twin._meet()
        return twin

    def _meet(self) -> None:
        self.live_ids = [self._find_live_ids(index) for index in range(len(self.members))]
        self.anchors = self._draw_anchors(*self._drawn)

    def _find_live_ids(self, index: int) -> list[int]:
        """The ids that take part, in ascending order."""
        member = self.members[index]
        control = member.control - member.rowless if index == 0 else member.control_eos
        return sorted(i for i in {*member.token_bytes, *control} if self.embeddings[index][i].any())

    def _draw_anchors(self, num_anchors: int | None, seed: int) -> list[bytes]:
        common = [
            data
            for data in self.primary.entries
            if all(
                data in member.entries and member.canonical_id(data) in live
                for member, live in zip(self.members, map(set, self.live_ids), strict=True)
            )
        ]
        if not common:
            raise ValueError("No entry is common to all members.")
        common.sort(key=self.primary.canonical_id)
        if num_anchors is None:
            return common
        order = torch.randperm(len(common), generator=torch.Generator().manual_seed(seed)).tolist()
        return [common[at] for at in order[:num_anchors]]

    def relative(self, index: int, ids: Sequence[int]) -> Tensor:
        """The relative representations of a member's ids, each summing to 1, of shape `(len(ids), num_anchors)`."""
        anchor_ids = [self.members[index].canonical_id(data) for data in self.anchors]
        embeddings = self.embeddings[index]
        tokens = embeddings[list(ids)] / embeddings[list(ids)].norm(dim=-1, keepdim=True)
        anchors = embeddings[anchor_ids] / embeddings[anchor_ids].norm(dim=-1, keepdim=True)
        cosines = tokens @ anchors.T
        if self.variant == "released":
            cosines = SHARPNESS * functional.normalize(cosines, dim=-1)
        return cosines.softmax(-1)

    def _needs_primary(self, is_closed: bool) -> bool:
        return True

    def _fuse(
        self, weights: list[float], logits: list[dict[Key, float] | None], rows: list[list[float] | None]
    ) -> tuple[dict[Key, float], list[dict[Key, float] | None], list[float]]:
        members = _softmaxes(logits)
        best = [
            min(by_key, key=lambda key: (-by_key[key], _own_id(member, key)))
            for member, by_key in zip(self.members, logits, strict=True)
            if by_key is not None
        ]
        if best[0] == EOS or (self.skip_on_agreement and len(set(best)) == 1):
            return members[0], members, weights

        target = torch.zeros(len(self.anchors), dtype=torch.float64)  # (A)
        for index, (weight, row) in enumerate(zip(weights, rows, strict=True)):
            if weight:
                ids = self._supported(index, row)
                probs = torch.tensor([row[i] for i in ids], dtype=torch.float64).softmax(-1)
                target += weight * (probs @ self.relative(index, ids))
        probs = self._search(rows[0], target)

        fused: dict[Key, float] = {}
        for i, prob in zip(self.live_ids[0], probs.tolist(), strict=True):
            key = EOS if i in self.primary.control_eos else self.primary.token_bytes.get(i, ("control", i))
            fused[key] = fused.get(key, 0.0) + prob
        return fused, members, weights

    def _supported(self, index: int, row: list[float]) -> list[int]:
        """The ids of a member that take part in this step, in ascending order."""
        ids = self.live_ids[index]
        return ids if self.support is None else sorted(sorted(ids, key=lambda i: (-row[i], i))[: self.support])

    def _search(self, row: list[float], target: Tensor) -> Tensor:
        """The primary's distribution over its live ids that comes near the target, of shape `(num_live_ids,)`."""
        ids = self._supported(0, row)
        supported = torch.tensor([at for at, i in enumerate(self.live_ids[0]) if i in set(ids)])
        relative = self.relative(0, ids)  # (S, A)
        logits = torch.tensor([row[i] for i in self.live_ids[0]], dtype=torch.float64)  # (V)
        search = self._search_logits if self.variant == "released" else self._search_probs
        return search(logits, supported, relative, target)

    def _search_logits(self, logits: Tensor, supported: Tensor, relative: Tensor, target: Tensor) -> Tensor:
        logits = logits.clone().requires_grad_()
        optimizer = torch.optim.AdamW([logits], lr=self.learning_rate, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
            optimizer, T_max=ANNEALING_STEPS, eta_min=self.learning_rate / 4
        )
        for _ in range(self.num_steps):
            optimizer.zero_grad()
            found = logits[supported].softmax(-1) @ relative
            loss = functional.kl_div(found.log(), target, reduction="sum") / len(target)
            loss.backward()
            optimizer.step()
            scheduler.step()
        return logits.detach().softmax(-1)

    def _search_probs(self, logits: Tensor, supported: Tensor, relative: Tensor, target: Tensor) -> Tensor:
        probs = logits.softmax(-1)
        mass = probs[supported].sum()
        moved = probs[supported] / mass
        for _ in range(self.num_steps):
            moved = moved.detach().requires_grad_()
            functional.kl_div((moved @ relative).log(), target, reduction="sum").backward()
            moved = moved.detach() - self.learning_rate * moved.grad
        moved = moved.clamp(min=0)
        if not moved.any():
            raise ValueError("The search left no probability.")
        probs[supported] = mass * moved / moved.sum()
        return probs
