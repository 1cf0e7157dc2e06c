"""Finding by trial how a member's cache can follow a text."""

import logging
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .cached_rows import CachedRows
from .contexts import PlainContext
from .member_model import MemberModel

logger = logging.getLogger(__name__)

NUM_TRIAL_IDS = 10

_STEPS = (
    ((0, 4), (2, 3)),
    ((0, 5), (2, 6)),
    ((1, 6), (2, 5)),
    ((1, 6), (2, 7)),
    ((1, 7), (2, 8)),
)
"""Of which text two rows hold how many ids, at steps that grow, roll back and branch off."""

NewRows = Callable[[int, str], CachedRows]
"""Makes caches for a number of rows in a cache mode."""


def find_cache_mode(member: MemberModel, ids: Sequence[int], new_rows: NewRows) -> str:
    """Find the first cache mode in which a member gives the logits that it gives without a cache.

    Args:
        member: The member.
        ids: `NUM_TRIAL_IDS` of its ids, none of which is a control token.
        new_rows: Makes caches.

    Returns:
        The mode.

    Raises:
        MemberError: If the member fails, or gives NaN or infinite logits, without a cache too.
    """
    texts = [list(ids[:5]), [*ids[:3], *ids[6:]], list(ids[2:])]
    with torch.no_grad():
        expected = _logits_without_cache(texts, new_rows)
        if not bool(expected.isfinite().all()):
            raise member.not_finite(f"before step 1, on {len(ids)} ids that were tried")
        # Rounding moves the logits of half precision by some hundredths of their spread; a wrong cache by its whole.
        tolerance = 1e-3 if member.model.dtype == torch.float32 else 0.1
        modes = ["static", "repack", "row_chunks", "row_tokens"]
        for mode in modes if member.device.type == "cuda" else modes[1:]:
            try:
                found = _logits_in_mode(mode, texts, new_rows)
            except Exception as error:
                logger.info("member %r cannot use cache mode %s: %s", member.name, mode, error)
                reason = str(error)
            else:
                distance = (found - expected).std(-1) / expected.std(-1).clamp_min(1e-12)  # (num_steps, num_rows)
                logger.info("member %r in cache mode %s: distance %.2g", member.name, mode, distance.max())
                if bool((distance <= tolerance).all()):
                    return mode
                reason = "with a cache of fixed size it gives other logits"
            if mode == "static":
                member.warn_uncaptured(reason)
    warnings.warn(
        f"no cache of member {member.name!r} ({type(member.model).__name__}) gives the logits that it gives without "
        "one, so its whole context is computed again at every step.",
        stacklevel=2,
    )
    return "recompute"


def _logits_without_cache(texts: Sequence[list[int]], new_rows: NewRows) -> Tensor:
    """What `_logits_in_mode` has to give, from one forward for each text."""
    contexts = [PlainContext(ids) for ids in texts]
    logits = new_rows(len(texts), "recompute").forward(contexts, [len(ids) for ids in texts])
    seen = [torch.stack([logits[text, num - 1 - len(texts[text])] for text, num in step]) for step in _STEPS]
    return torch.stack(seen).float()


def _logits_in_mode(mode: str, texts: Sequence[list[int]], new_rows: NewRows) -> Tensor:
    """Logits of two rows along the steps, of shape `(num_steps, 2, vocab_size)`."""
    rows = new_rows(2, mode)
    contexts = [PlainContext([]), PlainContext([])]
    seen = []
    for step in _STEPS:
        for context, (text, num) in zip(contexts, step, strict=True):
            context.change(texts[text][:num])
        seen.append(rows.collect(rows.forward(contexts, [1, 1]))[:, -1])
        for context in contexts:
            context.num_kept = len(context.ids)
    return torch.stack(seen).float()
