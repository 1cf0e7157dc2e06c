"""What constraints leave where they leave no proposal, of members that list few ids: these are asked for it afterwards."""

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
    """Find out how likely the ids are that are left in rows that have no proposal left.

    Args:
        rows: The rows.
        step: What has fused them.
        fused: What it made.
        proposals: What was proposed, and what is known of the rest.
        scores: What the processors made of what they were offered, of shape `(batch_size, primary_vocab_size)`.
        idle: Rows in which nothing is chosen.

    Returns:
        Proposals and scores in which these ids have their own log-probabilities.

    Raises:
        MemberError: If there are too many, or the processors have changed their scores, so that nobody can say what they
            would have made of the right ones.
    """
    is_left = scores > BANNED
    falls_back = proposals.settled(scores)[1][:, 0]
    places = [row for row in rows.live if row not in idle and falls_back[row] and int(is_left[row].sum()) > 1]
    if not places:
        return proposals, scores
    # All that was added to the log-probabilities is the level of a row.
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
