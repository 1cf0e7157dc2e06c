"""Finds by trial how a member's cache can follow a text."""

import logging
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .. import messages
from .cached_rows import CachedRows
from .member_model import MemberModel, is_out_of_memory, is_quantized

logger = logging.getLogger(__name__)

NUM_TRIAL_IDS = 10

_STEPS = (
    ((0, 4), (2, 3)),
    ((0, 5), (2, 6)),
    ((1, 6), (2, 5)),
    ((1, 6), (2, 7)),
    ((1, 7), (2, 8)),
)
"""The text and number of ids of two rows, at steps that grow, roll back and branch off."""

NewRows = Callable[[int, str], CachedRows]
"""Creates caches for a number of rows in a cache mode."""


def find_cache_mode(
    member: MemberModel, ids: Sequence[int], new_rows: NewRows, modes: Sequence[str], start: Sequence[int] = ()
) -> tuple[str, bool]:
    """Find the first cache mode in which a member returns the same logits as without a cache.

    Args:
        member: The member.
        ids: `NUM_TRIAL_IDS` of its ids, none of which is a control token.
        new_rows: Creates caches.
        modes: The modes to try, the fastest first.
        start: Ids that every row of the member has to begin with, if any.

    Returns:
        The mode, and whether it is final: not if memory did not suffice to try a better one.

    Raises:
        MemberError: If the member fails, or returns NaN or infinite logits, without a cache too.
    """
    texts = [[*start, *text] for text in (ids[:5], [*ids[:3], *ids[6:]], ids[2:])]
    is_training = member.model.training
    devices = [member.device] if member.device.type == "cuda" else []
    # Dropout must not advance the user's generators.
    with torch.no_grad(), torch.random.fork_rng(devices, enabled=is_training):
        expected = _logits_without_cache(texts, new_rows, len(start))
        if not bool(expected.logsumexp(-1).isfinite().all()):
            where = f"before step 1, on {len(ids)} ids that were tried"
            raise messages.not_finite(member.name, member.model.dtype, where)
        tolerance = tolerance_of(member)
        if (
            is_training
            and distance_of_logits(_logits_without_cache(texts, new_rows, len(start)), expected) > tolerance
        ):
            messages.warn(
                f"member {member.name!r} is in training mode and returns different logits every time (dropout), so it "
                "cannot use a cache: its whole context is computed again at every step. Call its `eval()`."
            )
            return "recompute", True

        def distance_of(mode: str) -> float:
            return distance_of_logits(_logits_in_mode(mode, texts, new_rows, len(start)), expected)

        return _first_that_works(member, tolerance, distance_of, modes)


def _first_that_works(
    member: MemberModel, tolerance: float, distance_of: Callable[[str], float], modes: Sequence[str]
) -> tuple[str, bool]:
    is_final = True
    member.cache_obstacles.clear()
    for mode in modes:
        try:
            distance = distance_of(mode)
        except Exception as error:
            if is_out_of_memory(error):
                is_final = False
                logger.warning(
                    "there was not enough memory to try cache mode %s of member %r; the next call tries it again: %s",
                    mode,
                    member.name,
                    error,
                )
                continue
            logger.info("member %r cannot use cache mode %s: %s", member.name, mode, error)
            reason = str(error)
        else:
            logger.info("member %r in cache mode %s: distance %.2g", member.name, mode, distance)
            if distance <= tolerance:
                return mode, is_final
            reason = "with such a cache, its logits differ from those without"
        member.cache_obstacles[mode] = reason
        if mode == "static":
            member.warn_uncaptured(reason)
    if is_final:
        messages.warn(
            f"no cache of member {member.name!r} ({type(member.model).__name__}) gives the same logits as without a "
            "cache, so its whole context is computed again at every step."
        )
    return "recompute", is_final


def tolerance_of(member: MemberModel) -> float:
    """The largest effect of rounding on a member's logits, as a share of their spread; wrong caches have a larger one."""
    if is_quantized(member.model):
        return 0.4  # rounding of 8-bit activations depends on the rest of the batch: 0.3 was seen
    is_exact = member.model.dtype == torch.float32 and not torch.is_autocast_enabled(member.device.type)
    return 1e-3 if is_exact else 0.1


def distance_of_logits(found: Tensor, expected: Tensor) -> float:
    """The largest distance of logits from others at any step, as a share of their spread."""
    is_out = expected == -torch.inf
    if not torch.equal(found == -torch.inf, is_out):
        return math.inf
    found, expected = found.masked_fill(is_out, 0.0), expected.masked_fill(is_out, 0.0)
    return float(((found - expected).std(-1) / expected.std(-1).clamp_min(1e-12)).max())


def _logits_without_cache(texts: Sequence[list[int]], new_rows: NewRows, num_before: int) -> Tensor:
    """The expected result of `_logits_in_mode`, from one forward pass per text."""
    logits = new_rows(len(texts), "recompute").forward(texts, [len(ids) for ids in texts])
    seen = [
        torch.stack([logits[text, num_before + num - 1 - len(texts[text])] for text, num in step]) for step in _STEPS
    ]
    return torch.stack(seen).float()


def _logits_in_mode(mode: str, texts: Sequence[list[int]], new_rows: NewRows, num_before: int) -> Tensor:
    """Logits of two rows along the steps, of shape `(num_steps, 2, vocab_size)`."""
    rows = new_rows(2, mode)
    seen = []
    for step in _STEPS:
        logits = rows.forward([texts[text][: num_before + num] for text, num in step], [1, 1])
        seen.append(rows.collect(logits)[:, -1])
    return torch.stack(seen).float()
