"""Arithmetic on next-token distributions: pure functions of tensors, row by row."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_BLOCK = 128
_TINY = torch.finfo(torch.float32).tiny


class Duplicates(NamedTuple):
    """Ids of one member that write the same entry.

    Attributes:
        ids: Ids that write the same as another id, of shape `(num_duplicates,)`.
        canonical_ids: The id that represents each entry, of shape `(num_entries,)`.
        position: For each of `ids`, its index in `canonical_ids`, of shape `(num_duplicates,)`.
    """

    ids: Tensor
    canonical_ids: Tensor
    position: Tensor

    def by_canonical_id(self) -> dict[int, list[int]]:
        """The other ids of every entry that has several."""
        found: dict[int, list[int]] = {}
        canonical_ids = self.canonical_ids[self.position].tolist()
        for canonical_id, other in zip(canonical_ids, self.ids.tolist(), strict=True):
            found.setdefault(canonical_id, []).append(other)
        return found


def merge_duplicates(logits: Tensor, duplicates: Duplicates) -> Tensor:
    """Give every entry's canonical id the log-sum-exp of all its ids' logits, and its other ids `-inf`.

    Args:
        logits: Of shape `(batch_size, vocab_size)`; not changed.
        duplicates: The ids to merge.

    Returns:
        Logits of shape `(batch_size, vocab_size)`; `logits` itself if there is nothing to merge.
    """
    if duplicates.ids.numel() == 0:
        return logits
    joined = _joined(logits[:, duplicates.canonical_ids], logits[:, duplicates.ids], duplicates.position)
    merged = logits.clone().index_copy_(1, duplicates.canonical_ids, joined)
    return merged.index_fill_(1, duplicates.ids, -torch.inf)


def top_entries(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Find the k best ids of every row; ties at the k-th go to the lowest ids.

    Args:
        logits: Of shape `(batch_size, vocab_size)`.
        k: Number of ids, at most `vocab_size`.

    Returns:
        Their logits and ids, each of shape `(batch_size, k)`.
    """
    values, ids = top_entries_of_each([logits], k)
    return values[0], ids[0]


def top_entries_of_each(logits: Sequence[Tensor], k: int) -> tuple[Tensor, Tensor]:
    """Find the k best ids of every row of every member at once, which needs fewer GPU kernels.

    Args:
        logits: Each member's, of shape `(batch_size, vocab_size)`.
        k: Number of ids, at most the largest `vocab_size`; a member with fewer gives `-inf` for the rest.

    Returns:
        Their logits and ids, each of shape `(num_members, batch_size, k)`; see `top_entries`.
    """
    # Blocks first: the k best are in the k blocks with the best maxima (ties to the first), and searching those few is
    # much faster.
    most_blocks = max(-(-one.shape[-1] // _BLOCK) for one in logits)
    num_best = min(k, most_blocks)
    blocks = [_in_blocks(one, num_best) for one in logits]
    # Among `-inf`, the first count as best, so padding is never chosen.
    maxima = logits[0].new_full((len(logits), len(logits[0]), most_blocks), -torch.inf)
    for of_member, one in zip(maxima, blocks, strict=True):
        torch.amax(one, -1, out=of_member[:, : one.shape[1]])
    best_blocks = _first_best(maxima, num_best).sort(dim=-1).values
    values = torch.stack(
        [
            one.gather(1, places[..., None].expand(-1, -1, _BLOCK)).flatten(1)
            for one, places in zip(blocks, best_blocks, strict=True)
        ]
    )
    at = _first_best(values, k)
    ids = best_blocks.gather(-1, at // _BLOCK) * _BLOCK + at % _BLOCK
    for of_member, one in zip(ids, logits, strict=True):
        if one.shape[-1] % _BLOCK or one.shape[-1] < k:
            # A GPU may sort negative NaN after the padding of the blocks; its id must still be valid.
            of_member.clamp_max_(one.shape[-1] - 1)
    return values.gather(-1, at), ids


def _in_blocks(logits: Tensor, at_least: int) -> Tensor:
    """Rows of shape `(batch_size, vocab_size)` as `(batch_size, num_blocks, _BLOCK)`, filled up with `-inf`."""
    num_missing = max(-(-logits.shape[-1] // _BLOCK), at_least) * _BLOCK - logits.shape[-1]
    filled = torch.nn.functional.pad(logits, (0, num_missing), value=-torch.inf) if num_missing else logits
    return filled.reshape(len(logits), -1, _BLOCK)


def _first_best(values: Tensor, k: int) -> Tensor:
    """The indices of the k greatest values of every row, in order; ties go to the first, and NaN comes first."""
    values = values + 0.0  # without -0.0
    if values.is_cuda:
        # For so few values, faster than a search for the best.
        return values.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    # The sign of NaN has no meaning, but its bits include one.
    bits = values.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf).view(torch.int32)
    places = torch.arange(values.shape[-1], device=values.device)
    order = 2**32 * (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() - places
    return order.topk(k, dim=-1).indices


def log_normalizer(logits: Tensor) -> Tensor:
    """Logsumexp of every row.

    Args:
        logits: Of shape `(batch_size, vocab_size)`.

    Returns:
        Of shape `(batch_size,)`; NaN or infinite if a row contains NaN or `inf`, or only `-inf`.
    """
    best = logits.amax(-1, keepdim=True)
    # `torch.logsumexp` runs more kernels, and `log_softmax` uses only one GPU processor per row.
    return (logits - best).exp_().sum(-1).log_() + best[:, 0]


def normalize_(probs: Tensor) -> Tensor:
    """Divide every row by its sum, in place. A row of zeros stays zero: it has nothing left to choose from.

    Args:
        probs: Not negative, of shape `(batch_size, width)`; changed in place.

    Returns:
        `probs`.
    """
    return probs.div_(probs.sum(-1, keepdim=True).clamp_min_(_TINY))


def fold(logprobs: Tensor, first_ids: Tensor, width: int) -> Tensor:
    """Move every column of a wide row onto the first id that writes it.

    Args:
        logprobs: Log-probabilities (or scores) over union ids, of shape `(batch_size, union_size)`.
        first_ids: For the columns from `width` on, the column below `width` that each moves to, of shape
            `(union_size - width,)`.
        width: Number of columns to fold onto.

    Returns:
        Of shape `(batch_size, width)`: log-sum-exp over the columns that are combined.
    """
    if logprobs.shape[-1] == width:
        return logprobs
    return _joined(logprobs[:, :width], logprobs[:, width:], first_ids)


def _joined(kept: Tensor, moved: Tensor, into: Tensor) -> Tensor:
    """Log-sum-exp of every kept column and of those that are moved into it."""
    into = into.expand_as(moved)
    top = torch.nan_to_num(kept.scatter_reduce(1, into, moved, "amax"), neginf=0.0)
    return (kept - top).exp_().scatter_add_(1, into, (moved - top.gather(1, into)).exp_()).log_().add_(top)


def put_eos(probs: Tensor, eos_mass: Tensor, primary_logits: Tensor, eos_ids: Tensor, nothing: float = 0.0) -> Tensor:
    """Write the probability of EOS at the primary's EOS id with the highest logit, in place.

    Args:
        probs: Probabilities (or log-probabilities) over the primary's ids or union ids, of shape `(batch_size, width)`;
            changed in place.
        eos_mass: Probability of EOS, of shape `(batch_size,)`.
        primary_logits: Of shape `(batch_size, primary_vocab_size)`.
        eos_ids: The primary's EOS ids, of shape `(num_eos,)`, at least one.
        nothing: The value of an id without probability.

    Returns:
        `probs`.
    """
    probs.index_fill_(1, eos_ids, nothing)
    best = eos_ids if len(eos_ids) == 1 else eos_ids[primary_logits[:, eos_ids].argmax(-1)]  # (B,) or (1,)
    return probs.scatter_(1, best.expand(len(probs))[:, None], eos_mass[:, None])
