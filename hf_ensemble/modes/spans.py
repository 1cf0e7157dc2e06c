"""Deciding span by span: members propose spans of words and score each other's, and the best is written."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..decoding.call import Call
from ..decoding.loop import Loop
from ..decoding.refusals import Obstacle, refuse
from ..decoding.row_processors import WARPERS, counting_all
from ..decoding.spans.decoder import SpanDecoder, SpanDecoderOutput
from ..errors import ConfigurationError
from ..scoring.likelihoods import Batch, Found, score_by_spans
from .base import Mode

_ACTING_ANYWHERE = WARPERS | {"RepetitionPenaltyLogitsProcessor", "NoRepeatNGramLogitsProcessor"}
"""Processors that use only a row's earlier ids, if any, so that they can act on any member's own ids."""

_EARLY_END_PROCESSORS = {"MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor"}


class SpanMode(Mode):
    """A span-level method decides several words at a time."""

    def __init__(self, call: Call):
        super().__init__(call)
        if call.weights.varies or call.weights.num_rows > 1:
            raise ConfigurationError(
                f"method {call.config.name!r} does not mix by weights: give one weight per member (0 excludes a "
                "member), not one per row or step."
            )

    def refuse(self) -> None:
        """Refuse what needs a distribution over tokens, or another loop."""
        no_distribution = "a span has no distribution over tokens; use `rounds` of the output"
        outputs = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
        knows_primary = "it knows the primary's ids only, but every member proposes"
        rolled_back = "rejected spans are rolled back, which needs a dynamic cache"
        settings, arguments = self.call.settings, self.call.arguments
        prefixes, cache = arguments["prefix_allowed_tokens_fn"], settings.cache_implementation
        refuse(
            [
                *(Obstacle(getattr(settings, name, None), f"`{name}`", no_distribution) for name in outputs),
                Obstacle(settings.num_beams not in (None, 1), "`num_beams`", "a round keeps one span"),
                Obstacle(prefixes is not None, "`prefix_allowed_tokens_fn`", knows_primary),
                Obstacle(arguments["synced_gpus"], "`synced_gpus`", "a round runs in one process"),
                Obstacle(cache not in (None, "dynamic"), "`cache_implementation`", rolled_back),
                Obstacle(self.call.has_cache, "`past_key_values`", "the members keep caches of their own"),
            ],
            f"method {self.call.config.name!r}",
        )

    def processors(self, stock: Sequence[Any], prompt_ids: Tensor, prompt_mask: Tensor | None) -> Sequence[Any]:
        """Keep those that act on every member's proposals; refuse those that know the primary's ids only."""
        # The earliest end of a text is counted in the primary's ids: see `SpanDecoder`. Members read rows one by one,
        # without padding.
        kept = [counting_all(item) for item in stock if type(item).__name__ not in _EARLY_END_PROCESSORS]
        writing = {0, *self.call.weights.participants}
        fingerprints = {self.call.members[index].encoder.token_bytes.fingerprint for index in writing}
        names = (type(item).__name__ for item in kept if len(fingerprints) > 1)
        knows_primary = "it knows the primary's ids only, but every member proposes in its own"
        refuse(
            (Obstacle(name not in _ACTING_ANYWHERE, f"the logits processor {name}", knows_primary) for name in names),
            f"method {self.call.config.name!r} unless all members have the same tokenizer",
        )
        return kept

    def sample(self, loop: Loop) -> Any:
        """Decide round by round, and write the result id by id."""
        decoder = SpanDecoder(self.call, loop)
        ids = loop.write(decoder.next_ids)
        if not loop.settings.return_dict_in_generate:
            return ids
        output = SpanDecoderOutput(sequences=ids, rounds=decoder.rounds)  # type: ignore[arg-type]
        if self.call.num_decision_entries is not None:
            output["decisions"] = decoder.decisions()
        return output

    def score_batch(self, batch: Batch, end_ids: Sequence[int]) -> Found:
        """Score by the mean of the members' own log-probabilities."""
        return score_by_spans(self.call.members, batch)
