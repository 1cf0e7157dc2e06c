"""Writing ids that were decided ahead, one column after the other."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import StoppingCriteriaList


class Decoder(Protocol):
    """Decides ids, of which a row may have some in store."""

    def next_ids(self, live: Sequence[bool]) -> list[int | None]:
        """Return the id to write next in every live row; None where there is none, and the row ends."""


def write_decided(
    decoder: Decoder,
    input_ids: Tensor,
    stopping_criteria: StoppingCriteriaList,
    pad_token_id: int | None,
    streamer: Any = None,
) -> Tensor:
    """Write id by id what a decoder decides, as the stock loop does: criteria and streamers see every id.

    Args:
        decoder: Decides the ids.
        input_ids: The prompts, of shape `(batch_size, prompt_length)`.
        stopping_criteria: When a row ends.
        pad_token_id: What fills rows that have ended; None to let them go on until all have.
        streamer: Receives the prompt's successor ids one by one.

    Returns:
        All ids, of shape `(batch_size, length)`.
    """
    batch_size = len(input_ids)
    finished, live = [False] * batch_size, [True] * batch_size
    while not all(finished):
        column = decoder.next_ids(live)
        finished = [end or i is None for end, i in zip(finished, column, strict=True)]
        if all(i is None for i in column):
            break
        filler = pad_token_id if pad_token_id is not None else 0
        next_ids = torch.tensor([filler if i is None else i for i in column])
        input_ids = torch.cat([input_ids, next_ids[:, None].to(input_ids.device)], dim=-1)
        done: Any = stopping_criteria(input_ids, None)
        finished = [end or now for end, now in zip(finished, done.tolist(), strict=True)]
        if pad_token_id is not None:
            live = [not end for end in finished]
        if streamer is not None:
            streamer.put(next_ids)
    if streamer is not None:
        streamer.end()
    return input_ids
