"""Log-probabilities of whole answers under every member, including their ends."""

import functools
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from ..decoding.parts import in_parts
from ..decoding.prompts import Prompts
from ..members.member import Member
from ..methods.base import eos_ids_of
from ..scoring.by_member import score_by_member
from ..scoring.pairs import Pair, own_pair, reads_as_cut
from .base import Candidate


def log_probs_of_answers(
    members: Sequence[Member],
    prompts: Prompts,
    weights: Tensor,
    rows: Sequence[int],
    answers: Sequence[Sequence[Candidate]],
    end_ids: Sequence[int],
) -> list[list[list[float | None]]]:
    """Let every member with a weight above 0 score all answers, each in its own ids.

    Args:
        members: The members, the primary first.
        prompts: What they read of the prompts.
        weights: Each row's mixing weights, of shape `(num_rows, num_members)`.
        rows: Numbers of the rows whose answers are scored.
        answers: For each of them its answers.
        end_ids: The primary's ids that end a text.

    Returns:
        By row, answer and member, the natural logarithm of the answer's probability after the prompt. If a control
        token ended the answer, the probability of any control token that ends the member's texts is included. None for
        members of weight 0.

    Raises:
        ConfigurationError: If prompt and answer do not fit a member's positions.
        MemberError: If a member fails, or returns NaN.
    """
    eos_ids = eos_ids_of(members, end_ids)
    found: list[list[list[float | None]]] = [[[None] * len(members) for _ in of_row] for of_row in answers]
    for index, member in enumerate(members):
        control_eos = tuple(i for i in eos_ids[index] if member.is_control(i))
        places, items = [], []
        for place, (row, of_row) in enumerate(zip(rows, answers, strict=True)):
            if weights[row, index] == 0:
                continue
            prompt = prompts.prompt_of_row[row]
            context, before = prompts.contexts[index][prompt], prompts.texts[prompt]
            is_own_cut = reads_as_cut(member, context, before)
            for number, answer in enumerate(of_row):
                pair = own_pair(member, context, before, answer.data, is_own_cut)
                places.append((place, number))
                items.append(
                    (replace(pair, end_ids=control_eos if answer.has_eos else None), f"answer {number} to row {row}")
                )
        log_probs = in_parts(items, functools.partial(_log_probs_of, member))
        for (place, number), log_prob in zip(places, log_probs, strict=True):
            found[place][number][index] = log_prob
    return found


def _log_probs_of(member: Member, items: Sequence[tuple[Pair, str]]) -> list[float]:
    """One member's log-probabilities of some answers, each given with what errors call it."""
    pairs, names = zip(*items, strict=True)
    remedy = "Ask for fewer `max_new_tokens`, shorten the prompt, or choose in another way"
    return [one.log_prob for one in score_by_member([member], {0: pairs}, names, remedy=remedy)[0]]
