"""A model behind a server, as a member: only its tokenizer is in this process."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from ... import messages
from ...config import MethodConfig
from ...errors import ConfigurationError
from ...offers import Offer
from ...vocabulary.context import MemberContext
from ..member import Member, OwnAnswer, OwnLikelihood, OwnText, end_ids_of
from .answers import refuse_options, request_of, sampling_of, written_answer
from .completions import Completions
from .http_client import HttpClient
from .rows import SPARE, ServedRows
from .start_check import check_server


class ServedMember(Member):
    """A model that a server of vLLM has loaded.

    Args:
        client: Reaches the server.
        model: The name under which it serves the model.
        tokenizer: The model's tokenizer.
        config: The model's configuration, if it can be read.
        generation_config: Its generation config, if it can be read.
        vocab_size: Number of its ids, if no configuration says it.
        extra_eos_token_ids: More ids that end a text, in addition to its generation config's.
        chat_template: A template to use instead of the tokenizer's own.
        system_prompt: A system turn to use instead of every conversation's; empty for none.

    Attributes:
        server: The model behind its server.
        max_listed: Number of best ids that the server lists.

    Raises:
        ConfigurationError: If the server has no such model, or the tokenizer belongs to another model.
        MemberError: If the server does not answer.
        VocabularyError: If the tokenizer is not supported.
    """

    offers = frozenset({Offer.ENTRIES, Offer.SPANS, Offer.ANSWERS, Offer.LIKELIHOODS, Offer.PRIMARY})
    kind = "a model behind a server"
    is_served = True
    writes_by_itself = True
    device = torch.device("cpu")
    dtype = torch.float32
    num_parameters = 0

    def __init__(
        self,
        client: HttpClient,
        model: str,
        tokenizer: PreTrainedTokenizerBase,
        config: PreTrainedConfig | None = None,
        generation_config: GenerationConfig | None = None,
        vocab_size: int | None = None,
        extra_eos_token_ids: Iterable[int] = (),
        chat_template: str | None = None,
        system_prompt: str | None = None,
    ):
        if vocab_size is None and config is not None:
            vocab_size = int(config.get_text_config(decoder=True).vocab_size)
        self._knows_size = vocab_size is not None
        if vocab_size is None:
            vocab_size = max(tokenizer.get_vocab().values()) + 1
            messages.warn(
                f"member {client.name!r} has no `config.json` beside its tokenizer. By its tokenizer, it has "
                f"{vocab_size} ids and ends texts with id {tokenizer.eos_token_id}. If that is wrong, set "
                "`MemberConfig(eos_token_id=..., vocab_size=...)`."
            )
        self.generation_config = generation_config
        # Libraries read its width if it is the primary.
        self.config = PreTrainedConfig.from_dict({"vocab_size": vocab_size}) if config is None else config
        ends = end_ids_of(client.name, generation_config, config, tokenizer, extra_eos_token_ids)
        super().__init__(client.name, tokenizer, vocab_size, ends, chat_template, system_prompt)
        self.server = Completions(client, model, vocab_size if self._knows_size else None)
        limits = check_server(self.server, tokenizer, self.encoder.token_bytes)
        self._max_positions, self.max_listed = limits.max_positions, limits.max_listed

    @property
    def max_positions(self) -> int | None:
        """Largest number of ids of a prompt that the server can continue; None if it does not say."""
        return self._max_positions

    @property
    def place(self) -> str:
        """The server, which runs beside this process and other servers."""
        return self.server.client.url

    def description(self) -> list[Any]:
        """Server, model, tokenizer and EOS ids; the model behind a name cannot be inspected."""
        return [self.place, self.server.model, self.encoder.token_bytes.fingerprint, self.eos_token_ids]

    def sends_entries(self, needs_whole_rows: bool) -> bool:
        """Always, because it has no rows to send."""
        return True

    def check_method(self, config: MethodConfig) -> None:
        """Refuse to propose more entries than the server lists."""
        count = config.num_entries
        if count is not None and min(count, self.vocab_size) > self.max_listed:
            raise ConfigurationError(
                f"method {config.name!r} asks member {self.name!r} for {count} best entries, but its server at {self.place} "
                f"lists {self.max_listed}. Start it with `--max-logprobs {count + SPARE}`, or lower `top_k`."
            )

    def new_rows(self, num_rows: int, num_expected: int = 0, mode: str | None = None) -> ServedRows:
        """Create rows, whose cache is at the server; see `Member.new_rows`."""
        return ServedRows(self.server, num_rows, min(self.max_listed, self.vocab_size))

    sampling_of = staticmethod(sampling_of)
    """Returns the sampling options of a request for the options of a call."""

    def answers(
        self, contexts: Sequence[MemberContext], settings: GenerationConfig, seeds: Sequence[int] | None
    ) -> list[OwnAnswer]:
        """Write whole answers, each by one request; see `Member.answers`."""
        refuse_options(self.name, settings)

        def write(number: int) -> OwnAnswer:
            ids = contexts[number].ids
            seed = None if seeds is None else seeds[number]
            options = request_of(settings, seed, self.max_length + 1 - len(ids))
            written, reason = self.server.write(ids, options, f"in answer {number}")
            return written_answer(written, reason, settings, self.is_control)

        return self.server.client.side_by_side(write, range(len(contexts)))

    def likelihoods(self, texts: Sequence[OwnText]) -> list[OwnLikelihood]:
        """Return how likely texts are, each by one request; see `Member.likelihoods`."""

        def read(text: OwnText) -> OwnLikelihood:
            if text.end_ids is None and not text.ids:
                return OwnLikelihood([], True)
            ends = list(text.end_ids or ())
            reading = self.server.read([*text.prompt, *text.ids], len(text.prompt), ends, text.where)
            log_probs = [one.log_prob for one in reading.ids]
            is_greedy = all(one.is_best for one in reading.ids)
            if ends:
                log_probs.append(torch.tensor([reading.others[i] for i in ends]).double().logsumexp(0).item())
                is_greedy &= reading.next_id == ends[0]
            return OwnLikelihood(log_probs, is_greedy)

        return self.server.client.side_by_side(read, list(texts))

    def close(self) -> None:
        """Close the connections; later requests open new ones."""
        self.server.client.close()
