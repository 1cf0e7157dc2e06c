"""The primary alone: its own `generate` runs unchanged, if its steps cannot be captured."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteriaList

from ..decoding.call import end_ids
from ..methods.base import MemberMaps, eos_ids_of
from ..recording.recorder import DecisionRecorder
from ..scoring.likelihoods import Batch, Found, score_alone
from .base import Mode
from .captured_primary import CapturedPrimaryMode
from .stock_loop import FollowingCriteriaList, Hook


class PrimaryMode(Mode):
    """The primary has all the weight, and decides every token."""

    def refuse(self) -> None:
        """Refuse nothing: the primary can do here what it can do alone."""

    def for_processors(self, stock: Sequence[Any], num_rows: int) -> Mode:
        """Use captured steps instead of the stock loop's, if possible; output objects need the stock loop."""
        call = self.call
        stays = call.settings.return_dict_in_generate or call.needs_stock_passes
        return self if stays or not call.members[0].is_captured else CapturedPrimaryMode(call)

    def processors(self, stock: Sequence[Any], prompt_ids: Tensor, prompt_mask: Tensor | None) -> Sequence[Any]:
        """Leave them unchanged, and add the recorder of decisions if there is one."""
        call = self.call
        entries = call.num_decision_entries
        if entries is None:
            return stock
        ends = eos_ids_of(call.members[:1], end_ids(call.settings))[0]
        maps = MemberMaps(call.kept.union, 0, ends, prompt_ids.device)
        recorder = self.recorder = DecisionRecorder(call.members, [maps], prompt_ids, prompt_mask, entries)

        def take(input_ids: Tensor, scores: Tensor) -> Tensor:
            weights = torch.eye(len(call.members))[:1].expand(len(scores), -1)
            logits = scores.float()
            recorder.take([logits], logits.log_softmax(-1), weights, weights != 0)
            return scores

        return [Hook(take), *stock]

    def criteria(self, stock: StoppingCriteriaList) -> StoppingCriteriaList:
        """Let the recorder see the written ids."""
        recorder = self.recorder
        if recorder is None:
            return stock

        def record(input_ids: Tensor, done: Tensor) -> Tensor:
            recorder.choose(input_ids[:, -1], done)
            return done

        return FollowingCriteriaList(stock, record)

    def score_batch(self, batch: Batch, end_ids: Sequence[int]) -> Found:
        """Score by the primary's own distribution."""
        return score_alone(self.call.members[0], batch)
