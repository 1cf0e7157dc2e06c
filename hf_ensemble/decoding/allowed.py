"""Constraints that allow no proposal, for members that list only a few ids: these members are asked again afterwards."""

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor

from .. import messages
from .listed_ids import UNKNOWN
from .live_rows import LiveRows
from .proposals import BANNED, Proposals
from .step import Fused, FusedStep


def with_allowed(
    rows: LiveRows, step: FusedStep, fused: Fused, proposals: Proposals, scores: Tensor, idle: Collection[int]
) -> tuple[Proposals, Tensor]:
    """Find the probabilities of the ids that are left, in rows without a proposal left.

    Args:
        rows: The rows.
        step: The step that fused them.
        fused: Its result.
        proposals: The proposals, and what is known about the rest.
        scores: The scores after the processors, of shape `(batch_size, primary_vocab_size)`.
        idle: Rows that choose nothing.

    Returns:
        Proposals and scores in which these ids have their own log-probabilities.

    Raises:
        MemberError: If there are too many, or the processors have changed their scores, so their result for the right
            scores is unknown.
    """
    is_left = scores > BANNED
    falls_back = proposals.settled(scores)[1][:, 0]
    places = [row for row in rows.live if row not in idle and falls_back[row] and int(is_left[row].sum()) > 1]
    if not places:
        return proposals, scores
    # Only the level of a row was added to the log-probabilities.
    for row in places:
        added = (scores[row] - proposals.whole[row])[is_left[row]]
        if (added - added[0]).abs().max() > 1e-3:
            listing = rows.normalizers()
            raise messages.changed_beside([rows.members[index].name for index in listing], rows.where(row))
    columns = {row: is_left[row].nonzero()[:, 0].tolist() for row in places}
    logits = rows.ask(fused.logits, fused.needed, columns)
    whole = step.whole(logits, fused.weights, rows.normalizers(), rows.losing_space())
    at = torch.tensor(places, device=scores.device)
    known = torch.where(whole[at].exp() > 2 * UNKNOWN, whole[at], -torch.inf)
    moved = torch.where(is_left[at], scores[at] - proposals.whole[at] + known, scores[at])
    return replace(proposals, whole=proposals.whole.index_copy(0, at, known)), scores.index_copy(0, at, moved)
