"""Log-probabilities of texts under each member alone, in its own ids."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import messages
from ..decoding.teacher_forcing import ForcedMember, ForcedText, OwnLogProbs, advance_by_blocks
from ..members.member import Member, OwnText
from .pairs import Pair

_REMEDY = "Shorten the prompt, or score the text in parts"


@dataclass(frozen=True)
class OwnScore:
    """The score of one text under one member.

    Attributes:
        log_probs: Natural logarithm of the probability of each of its ids, in float64 on the CPU, of shape
            `(num_tokens,)`; `-inf` if the member gives an id no probability.
        num_bytes: Number of UTF-8 bytes of the text.
        is_greedy: Whether every id is the member's best.
    """

    log_probs: Tensor
    num_bytes: int
    is_greedy: bool

    @property
    def log_prob(self) -> float:
        """Natural logarithm of the probability of the text; 0 for no ids."""
        return float(self.log_probs.sum())

    @property
    def num_tokens(self) -> int:
        """Number of the member's ids in the text."""
        return len(self.log_probs)


@torch.no_grad()
def score_by_member(
    members: Sequence[Member],
    pairs: Mapping[int, Sequence[Pair]],
    names: Sequence[str] | None = None,
    over_all_ids: bool = False,
    remedy: str = _REMEDY,
) -> dict[int, list[OwnScore]]:
    """Let members score texts, each by itself and in its own ids. All rows of a member run together.

    Args:
        members: The members.
        pairs: By member index, its ids of every row's prompt and of the text after it: see `own_pairs`. A text that
            has to end, but cannot end for the member, has probability 0.
        names: Names of each row's text in errors, such as "continuation 3"; None for the rest of the prompt.
        over_all_ids: Whether the distributions include ids without a token, as when a member decodes by itself.
        remedy: What to do if a text is too long.

    Returns:
        By member index, the scores of every row's text.

    Raises:
        ConfigurationError: If prompt and text do not fit a member's positions; before anything runs.
        MemberError: If a member fails, or returns NaN.
    """
    texts = {
        index: dict(enumerate(ForcedText.of_ids(pair.prompt, pair.targets) for pair in rows))
        for index, rows in pairs.items()
    }
    check_positions(members, texts, names, remedy)
    scores = {}
    for index, rows in pairs.items():
        member = members[index]
        by_itself = _by_itself(member, rows, names)
        if by_itself is not None:
            scores[index] = by_itself
            continue
        forced, own = ForcedMember(member, texts[index]), OwnLogProbs(member, over_all_ids)
        targets = [pair.targets for pair in rows]
        found: list[list[float]] = [[-math.inf] if pair.end_ids == () else [] for pair in rows]
        is_greedy = [pair.end_ids != () for pair in rows]
        for steps in advance_by_blocks([forced], list(map(len, targets)), member.vocab_size):
            log_probs = own(forced.take(steps))
            of_steps = torch.tensor([targets[row][step] for row, step in steps], device=log_probs.device)
            best, choices = log_probs.max(-1)
            of_targets = _with_ends(log_probs, log_probs.gather(-1, of_steps[:, None])[:, 0], steps, rows)
            host = torch.stack([of_targets, choices == of_steps, best.isnan()])
            for (row, step), log_prob, greedy, has_failed in zip(steps, *host.tolist(), strict=True):
                if has_failed:
                    where = "on the prompt" if names is None else f"in {names[row]} at step {step + 1}"
                    raise member.not_finite(where)
                found[row].append(log_prob)
                is_greedy[row] &= bool(greedy)
        scores[index] = [
            OwnScore(torch.tensor(values, dtype=torch.float64), pair.num_bytes, greedy)
            for values, pair, greedy in zip(found, rows, is_greedy, strict=True)
        ]
    return scores


def _by_itself(member: Member, rows: Sequence[Pair], names: Sequence[str] | None) -> list[OwnScore] | None:
    """The scores from a member that does not return logits; None for other members."""
    found = member.likelihoods(
        [
            OwnText(
                pair.prompt,
                pair.continuation,
                pair.end_ids or None,
                "on the prompt" if names is None else f"in {name}",
            )
            for pair, name in zip(rows, names or [""] * len(rows), strict=True)
        ]
    )
    if found is None:
        return None
    scores = []
    for pair, own in zip(rows, found, strict=True):
        cannot_end = pair.end_ids == ()
        log_probs = [*own.log_probs, *[-math.inf] * cannot_end]
        is_greedy = own.is_greedy and not cannot_end
        scores.append(OwnScore(torch.tensor(log_probs, dtype=torch.float64), pair.num_bytes, is_greedy))
    return scores


def _with_ends(
    log_probs: Tensor, of_targets: Tensor, steps: Sequence[tuple[int, int]], rows: Sequence[Pair]
) -> Tensor:
    """Let any of a row's end ids count at the end of a text, each `(num_steps,)`."""
    ending: dict[tuple[int, ...], list[int]] = {}
    for n, (row, step) in enumerate(steps):
        if step == len(rows[row].continuation):
            ending.setdefault(rows[row].end_ids or (), []).append(n)
    for end_ids, places in ending.items():
        at = torch.tensor(places, device=log_probs.device)
        columns = torch.tensor(end_ids, device=log_probs.device)
        of_targets = of_targets.index_copy(0, at, log_probs[at][:, columns].logsumexp(-1))
    return of_targets


def check_positions(
    members: Sequence[Member],
    texts: Mapping[int, Mapping[int, ForcedText]],
    names: Sequence[str] | None = None,
    remedy: str = _REMEDY,
) -> None:
    """Refuse texts that are too long for a member's positions.

    Args:
        members: The members.
        texts: By member index, what it reads in each row.
        names: Names of each row's text in errors; see `score_by_member`.
        remedy: What to do.

    Raises:
        ConfigurationError: If one is too long.
    """
    for index, rows in texts.items():
        limit = members[index].max_positions
        for row, text in rows.items():
            if limit is not None and text.longest > limit:
                what = "the prompt takes" if names is None else f"prompt and {names[row]} take"
                raise messages.too_long(members[index].name, limit, what, text.longest, remedy)
