"""What every way of writing has in common."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from ..decoding.call import Call
from ..recording.recorder import DecisionRecorder
from ..scoring.likelihoods import Batch, Found


@dataclass
class Loop:
    """The stock decoding loop of a call, ready to run.

    Attributes:
        input_ids: The primary's prompt ids, of shape `(batch_size, prompt_length)`.
        processors: The call's processors, as its mode has put them together.
        criteria: Its stopping criteria, likewise.
        settings: Its prepared generation config.
        streamer: Receives the ids; None for none.
        model_kwargs: What `forward` is called with.
        stock: Runs the loop.
    """

    input_ids: Tensor
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    settings: Any
    streamer: Any
    model_kwargs: dict[str, Any]
    stock: Callable[..., Any]

    @property
    def mask(self) -> Tensor | None:
        """1 for ids of the prompt and 0 for padding, of the shape of `input_ids`; None for no padding."""
        return self.model_kwargs.get("attention_mask")

    @property
    def max_new_tokens(self) -> int:
        """Number of ids after which a row needs no more."""
        return int(self.settings.max_length - self.input_ids.shape[1])

    def run(self) -> Any:
        """Run the stock loop."""
        return self.stock(
            self.input_ids,
            self.processors,
            self.criteria,
            self.settings,
            streamer=self.streamer,
            **self.model_kwargs,
        )


class Mode(ABC):
    """One way of writing. What depends on it stands in its file; one object serves one call.

    The hooks of `generate` call, in this order: `refuse`, `processors`, `criteria`, `sample` (not in beam search) and, for
    an output object, `fill`. `score` calls `score_batch`.

    Args:
        call: What the call works with.
    """

    recorder: DecisionRecorder | None = None
    """What records the decisions of the call; None if nothing does."""

    def __init__(self, call: Call):
        self.call = call

    @abstractmethod
    def refuse(self, settings: GenerationConfig, arguments: Mapping[str, Any]) -> None:
        """Refuse what cannot work in this mode, before anything runs.

        Args:
            settings: The generation config of the call.
            arguments: Arguments of `generate` that are no generation options, by name.

        Raises:
            ConfigurationError: If something of it is asked for.
        """

    def for_processors(self, stock: Sequence[Any], num_rows: int) -> "Mode":
        """The mode to go on with, now that the processors of the call are known."""
        return self

    @abstractmethod
    def processors(
        self, stock: Sequence[Any], settings: Any, prompt_ids: Tensor, prompt_mask: Tensor | None
    ) -> Sequence[Any]:
        """Put the mode's processors around those of the call.

        Args:
            stock: The call's processors, the user's included.
            settings: The prepared generation config.
            prompt_ids: The primary's prompt ids, a row for each row that is decoded, of shape `(num_rows, length)`.
            prompt_mask: 1 for ids of the prompt and 0 for padding, of the same shape; None for no padding.
        """

    def criteria(self, stock: StoppingCriteriaList, settings: GenerationConfig) -> StoppingCriteriaList:
        """Put the mode's criteria around those of the call."""
        return stock

    def sample(self, loop: Loop) -> Any:
        """Write, greedily or sampling."""
        return loop.run()

    def fill(self, output: Any, settings: GenerationConfig) -> None:
        """Put into an output object what the mode knows beside the ids: here, the decisions."""
        if self.recorder is not None:
            output["decisions"] = self.recorder.decisions(output.sequences)

    @abstractmethod
    def score_batch(self, batch: Batch, end_ids: Sequence[int]) -> Found:
        """Score continuations together.

        Args:
            batch: Prompts and continuations.
            end_ids: The primary's ids that end a text.
        """
