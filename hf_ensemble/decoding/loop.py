"""The loop of one call, ready to run: the stock one, or one that writes ids decided ahead."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList


@dataclass
class Loop:
    """The stock decoding loop of a call, ready to run.

    Attributes:
        input_ids: The primary's prompt ids, of shape `(batch_size, prompt_length)`.
        processors: The call's processors, as its mode combines them.
        criteria: Its stopping criteria, as its mode combines them.
        settings: Its prepared generation config.
        kwargs: Other arguments of the stock loop: the streamer, and the inputs of `forward`.
        stock: Runs the loop.
    """

    input_ids: Tensor
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    settings: Any
    kwargs: dict[str, Any]
    stock: Callable[..., Any]

    @property
    def mask(self) -> Tensor | None:
        """1 for ids of the prompt and 0 for padding, of the shape of `input_ids`; None for no padding."""
        return self.kwargs.get("attention_mask")

    @property
    def max_new_tokens(self) -> int:
        """Number of new ids after which a row is complete."""
        return int(self.settings.max_length - self.input_ids.shape[1])

    @property
    def filler(self) -> int | None:
        """The id that fills rows that have ended; None to let them go on until all have."""
        found: Tensor | None = self.settings._pad_token_tensor
        return None if found is None else int(found)

    def run(self) -> Any:
        """Run the stock loop."""
        return self.stock(self.input_ids, self.processors, self.criteria, self.settings, **self.kwargs)

    def write(self, next_ids_of: Callable[[Sequence[bool]], list[int | None]]) -> Tensor:
        """Write a decoder's ids one by one, as the stock loop does: criteria and streamers see every id.

        Args:
            next_ids_of: Given which rows are live, returns the next id of each; None if there is none, and the row
                ends.

        Returns:
            All ids, of shape `(batch_size, length)`.
        """
        input_ids, filler, streamer = self.input_ids, self.filler, self.kwargs.get("streamer")
        finished, live = [False] * len(input_ids), [True] * len(input_ids)
        while not all(finished):
            column = next_ids_of(live)
            finished = [end or i is None for end, i in zip(finished, column, strict=True)]
            if all(i is None for i in column):
                break
            next_ids = torch.tensor([filler or 0 if i is None else i for i in column])
            input_ids = torch.cat([input_ids, next_ids[:, None].to(input_ids.device)], dim=-1)
            done: Any = self.criteria(input_ids, None)
            finished = [end or now for end, now in zip(finished, done.tolist(), strict=True)]
            if filler is not None:
                live = [not end for end in finished]
            if streamer is not None:
                streamer.put(next_ids)
        if streamer is not None:
            streamer.end()
        return input_ids
