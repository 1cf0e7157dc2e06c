"""The processors of a call, for rows that are decided at their own pace."""

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from hf_ensemble.decoding.row_processors import RowProcessors

PROMPT = torch.tensor([[9, 9, 1, 2], [3, 4, 3, 5]])


class Noted(LogitsProcessor):
    """Doubles the scores and remembers the ids."""

    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores):
        self.seen.append(input_ids.tolist())
        return scores * 2


def test_warpers_alone_need_no_ids_and_take_any_positions():
    warpers = [TemperatureLogitsWarper(2.0), TopKLogitsWarper(2)]
    processors = RowProcessors(warpers, PROMPT, None)
    assert not processors.read_ids
    scores = torch.randn(7, 10)
    torch.testing.assert_close(processors.warp(scores), LogitsProcessorList(warpers)(torch.zeros(7, 1).long(), scores))


def test_what_stands_before_the_last_constraint_is_applied_with_it_in_the_order_of_the_call():
    noted = Noted()
    in_order = [TopKLogitsWarper(4), noted, TemperatureLogitsWarper(0.5)]
    processors = RowProcessors(in_order, PROMPT, None)
    assert processors.read_ids
    scores = torch.randn(1, 10)
    constrained = processors.constrain(1, [7, 8], scores)
    assert noted.seen == [[[3, 4, 3, 5, 7, 8]]]
    assert constrained.isfinite().sum() == 4
    torch.testing.assert_close(constrained, TopKLogitsWarper(4)(None, scores) * 2)
    torch.testing.assert_close(processors.warp(constrained), constrained / 0.5)


def test_every_row_has_its_own_ids_and_padding_is_none_of_them():
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    constraints = [RepetitionPenaltyLogitsProcessor(2.0), NoRepeatNGramLogitsProcessor(2)]
    processors = RowProcessors(constraints, PROMPT, mask)
    first = processors.constrain(0, [], torch.ones(1, 10))
    assert (first == 0.5).nonzero()[:, 1].tolist() == [1, 2]
    second = processors.constrain(1, [3], torch.ones(1, 10))
    assert (second == 0.5).nonzero()[:, 1].tolist() == [3]
    assert (second == -torch.inf).nonzero()[:, 1].tolist() == [4, 5]
