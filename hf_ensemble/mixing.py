"""Arithmetic on next-token distributions: pure functions of tensors, each row on its own."""

import torch
from torch import Tensor


def merge_duplicates(logits: Tensor, duplicate_ids: Tensor, canonical_ids: Tensor) -> Tensor:
    """Give the canonical id of every entry the log-sum-exp of all its ids' logits, and its other ids `-inf`.

    Args:
        logits: Of shape `(batch_size, vocab_size)`. Left as it is.
        duplicate_ids: Ids that write the same as another id, of shape `(num_duplicates,)`.
        canonical_ids: The canonical id of each of them, of the same shape.

    Returns:
        Logits of shape `(batch_size, vocab_size)`; `logits` itself if there are no duplicates.
    """
    if duplicate_ids.numel() == 0:
        return logits
    merged = logits.clone()
    top = torch.full_like(logits[:, :1], -torch.inf)
    top = torch.maximum(top, logits[:, duplicate_ids].amax(-1, keepdim=True))
    top = torch.maximum(top, logits[:, canonical_ids].amax(-1, keepdim=True))
    top = torch.nan_to_num(top, neginf=0.0)
    canonical = torch.unique(canonical_ids)
    position = torch.searchsorted(canonical, canonical_ids)
    sums = (logits[:, canonical] - top).exp()
    sums.index_add_(1, position, (logits[:, duplicate_ids] - top).exp())
    merged[:, canonical] = sums.log() + top
    merged[:, duplicate_ids] = -torch.inf
    return merged


def top_entries(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Find the k best ids of every row; where the k-th best is tied, the lowest ids.

    Args:
        logits: Of shape `(batch_size, vocab_size)`.
        k: Number of ids, at most `vocab_size`.

    Returns:
        Their logits and ids, each of shape `(batch_size, k)`.
    """
    values, ids = logits.topk(k, dim=-1)
    worst = values[:, -1:]
    tied = logits == worst  # (B, V)
    # `topk` picks any of the tied. Asking whether that matters costs a synchronisation on a GPU, more than the answer.
    if not logits.is_cuda and bool((tied.sum(-1) == (values == worst).sum(-1)).all()):
        return values, ids
    rank = torch.arange(logits.shape[-1], 0, -1, device=logits.device)
    lowest_tied = (tied * rank).topk(k, dim=-1).indices  # (B, k), lowest id first
    num_better = (values > worst).sum(-1, keepdim=True)
    at = torch.arange(k, device=logits.device) - num_better  # (B, k)
    return values, torch.where(at < 0, ids, lowest_tied.gather(-1, at.clamp_min(0)))


def fold(logprobs: Tensor, first_ids: Tensor, width: int) -> Tensor:
    """Move every column of a wide row onto the id that it is written with first.

    Args:
        logprobs: Log-probabilities (or scores) over union ids, of shape `(batch_size, union_size)`.
        first_ids: For the columns from `width` on, the column below `width` that each moves to, of shape
            `(union_size - width,)`.
        width: Number of columns to fold onto.

    Returns:
        Of shape `(batch_size, width)`: log-sum-exp over the columns that meet.
    """
    if logprobs.shape[-1] == width:
        return logprobs
    top = torch.nan_to_num(logprobs.amax(-1, keepdim=True), neginf=0.0)
    folded = (logprobs[:, :width] - top).exp_()
    folded.index_add_(1, first_ids, (logprobs[:, width:] - top).exp_())
    return folded.log_().add_(top)


def put_eos(probs: Tensor, eos_mass: Tensor, primary_logits: Tensor, eos_ids: Tensor) -> Tensor:
    """Write the mass of EOS at the primary's EOS id that has the highest logit, in place.

    Args:
        probs: Probabilities over the primary's ids or union ids, of shape `(batch_size, width)`; changed in place.
        eos_mass: Probability of EOS, of shape `(batch_size,)`.
        primary_logits: Of shape `(batch_size, primary_vocab_size)`.
        eos_ids: The primary's EOS ids, of shape `(num_eos,)`, at least one.

    Returns:
        `probs`.
    """
    probs[:, eos_ids] = 0.0
    best = eos_ids[primary_logits[:, eos_ids].argmax(-1)]  # (B,)
    return probs.scatter_(1, best[:, None], eos_mass[:, None])
