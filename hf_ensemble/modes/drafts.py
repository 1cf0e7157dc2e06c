"""Deciding with drafts: several tokens are drafted, and all members check them in one forward pass each."""

from collections.abc import Sequence
from typing import Any

from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..decoding.loop import Loop
from ..decoding.row_processors import needs_whole_batch
from ..decoding.speculation.decoder import SpeculativeDecoder
from ..decoding.speculation.draft_length import DraftLength, clock_of
from ..decoding.speculation.options import Speculation, whole_batch_obstacle
from ..scoring.likelihoods import Batch, Found
from .base import Mode


class DraftMode(Mode):
    """Drafts are checked by a token-level method, or by the primary alone.

    Args:
        plain: The mode of the call without drafts, used if drafts are not possible.
        speculation: The drafters.
    """

    decoder: SpeculativeDecoder

    def __init__(self, plain: Mode, speculation: Speculation):
        super().__init__(plain.call)
        self._plain = plain
        self._speculation = speculation

    def refuse(self) -> None:
        """Refuse what the plain mode refuses."""
        self._plain.refuse()

    def for_processors(self, stock: Sequence[Any], num_rows: int) -> Mode:
        """Decode without drafts if a processor has to see all rows at once."""
        name = needs_whole_batch(stock) if num_rows > 1 else None
        if name is None:
            return self
        self._speculation.refuse(whole_batch_obstacle(name))
        return self._plain

    def sample(self, loop: Loop) -> Any:
        """Decide round by round, and write what is decided id by id."""
        call, speculation = self.call, self._speculation
        members = call.members
        method = call.method()
        num_parameters = [member.num_parameters for member in members]
        participants = tuple(sorted(call.weights.participants))
        drafters = speculation.drafters(participants, num_parameters)
        kind = (call.config, call.is_by_primary, speculation.name, participants, len(loop.input_ids), method.device)
        running = sum(num_parameters[index] for index in participants)
        draft_length = call.kept.draft_lengths.pop(kind, None) or DraftLength(
            clock=clock_of(members[index].place for index in {*participants, *drafters}),
            shares={members[index].name: num_parameters[index] / running for index in drafters},
            # The first three also capture graphs, of steps and of mixing.
            num_trials=4 if any(members[index].is_captured for index in participants) else 1,
        )
        draft_length.begin_text()
        self.decoder = SpeculativeDecoder(call, loop, method, drafters, speculation.uses_ngrams, draft_length)
        try:
            ids = loop.write(self.decoder.next_ids)
        finally:
            self.decoder.close()
        call.kept.keep_draft_length(kind, draft_length)
        if not loop.settings.return_dict_in_generate:
            return ids
        return GenerateDecoderOnlyOutput(sequences=ids)  # type: ignore[arg-type]

    def fill(self, output: Any) -> None:
        """Add the statistics of the drafts."""
        super().fill(output)
        output["speculation"] = self.decoder.stats

    def score_batch(self, batch: Batch, end_ids: Sequence[int]) -> Found:
        """Score as the plain mode does; drafts do not change likelihoods."""
        return self._plain.score_batch(batch, end_ids)
