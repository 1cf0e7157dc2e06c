"""One member's log-probabilities over its own ids."""

import torch
from torch import Tensor

from ..members.member import Member
from ..vocabulary.token_bytes import NO_TOKEN


class OwnLogProbs:
    """Turns a member's logits into log-probabilities over its own ids, in float32; an id without a token has none.

    Where a row of logits holds NaN or `inf`, or nothing but `-inf`, the row of log-probabilities has the maximum NaN.

    Args:
        member: The member.
        over_all_ids: Whether ids without a token have a share too, as they do when the member decodes by itself.
    """

    def __init__(self, member: Member, over_all_ids: bool = False):
        self._left_out: Tensor | None = None
        if not over_all_ids:
            self._left_out = torch.as_tensor(member.encoder.token_bytes.kinds == NO_TOKEN, device=member.device)

    def __call__(self, logits: Tensor) -> Tensor:
        """Log-probabilities of the shape of the logits, `(..., vocab_size)`."""
        logits = logits.float()
        if self._left_out is not None:
            logits = logits.masked_fill(self._left_out, -torch.inf)
        return logits.log_softmax(-1)
