"""The base class of all ways of writing."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import StoppingCriteriaList

from ..decoding.call import Call
from ..decoding.loop import Loop
from ..decoding.token_decoder import TokenDecoder
from ..recording.recorder import DecisionRecorder
from ..scoring.likelihoods import Batch, Found


class Mode(ABC):
    """One way of writing. Everything that depends on it is in its file; one object serves one call.

    `generate` calls, in this order: `refuse` and `run`, which runs the stock loop; its hooks call `processors`, `criteria`,
    `sample` (not in beam search) and, for an output object, `fill`. `score` calls `score_batch`.

    Args:
        call: The call.

    Attributes:
        decoder: Decides token by token, counts, and keeps the results of every step; None if unused.
        recorder: Records the decisions of the call; None if unused.
    """

    decoder: Any = None
    recorder: DecisionRecorder | None = None

    def __init__(self, call: Call):
        self.call = call

    @abstractmethod
    def refuse(self) -> None:
        """Refuse what cannot work in this mode, before anything runs.

        Raises:
            ConfigurationError: If the call asks for any of it.
        """

    def run(self, ensemble: Any, inputs: Tensor | None, options: dict[str, Any]) -> Any:
        """Write, and return the result of `generate`.

        Args:
            ensemble: The `EnsembleForCausalLM` whose call it is.
            inputs: The primary's prompt ids, of shape `(batch_size, length)` and left-padded; None for none.
            options: The other arguments of the stock `generate`, by name.
        """
        return ensemble.generate_in(self, inputs, **options)

    @property
    def runs_primary(self) -> bool:
        """Whether the primary runs in its own state, not in the stock loop."""
        return isinstance(self.decoder, TokenDecoder) and self.decoder.rows.runs_primary

    def for_processors(self, stock: Sequence[Any], num_rows: int) -> "Mode":
        """The mode to continue with, now that the processors of the call are known."""
        return self

    def processors(self, stock: Sequence[Any], prompt_ids: Tensor, prompt_mask: Tensor | None) -> Sequence[Any]:
        """Add the mode's processors around those of the call; by default, none.

        Args:
            stock: The call's processors, the user's included.
            prompt_ids: The primary's prompt ids, a row for each row that is decoded, of shape `(num_rows, length)`.
            prompt_mask: 1 for ids of the prompt and 0 for padding, of the same shape; None for no padding.
        """
        return stock

    def criteria(self, stock: StoppingCriteriaList) -> StoppingCriteriaList:
        """Add the mode's criteria around those of the call."""
        return stock

    def sample(self, loop: Loop) -> Any:
        """Write, greedily or sampling."""
        return loop.run()

    def fill(self, output: Any) -> None:
        """Add to an output object what the mode knows besides the ids."""
        settings = self.call.settings
        if self.decoder is not None:
            # In the order of stock outputs. If the stock loop chooses, it has the scores already.
            if settings.output_scores and self.decoder.scores_rows:
                output["scores"] = tuple(self.decoder.scores_rows)
            if settings.output_logits:
                output["logits"] = tuple(self.decoder.logits_rows)
            output["num_forwards"] = self.decoder.num_forwards
            share = getattr(self.decoder, "share_in_one_request", None)
            if share is not None:
                output["share_in_one_request"] = share
            if settings.num_beams in (None, 1):
                output["share_ensembled"] = self.decoder.share_ensembled
        if self.recorder is not None:
            output["decisions"] = self.recorder.decisions(output.sequences)

    @abstractmethod
    def score_batch(self, batch: Batch, end_ids: Sequence[int]) -> Found:
        """Score continuations together.

        Args:
            batch: Prompts and continuations.
            end_ids: The primary's ids that end a text.
        """
