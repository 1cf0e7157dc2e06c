"""The interface of members, whatever their kind."""

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from .. import messages
from ..chat.conversation import Conversation
from ..config import MethodConfig
from ..errors import ConfigurationError, MemberError
from ..offers import Offer
from ..vocabulary.context import MemberContext, Resync
from .cached_rows import CachedRows
from .tokenized import TokenizedMember


@dataclass(frozen=True)
class RowPrompt:
    """The prompt of one row. Each kind of member reads its part of it.

    Attributes:
        text: The text of the primary's ids.
        own: The member's own plain text in its place; None if it has none.
        conversation: The conversation behind the ids; None if there is none.
        is_open: Whether the next word takes no space: the text is empty or ends in white space, or the ids end in a
            control token.
    """

    text: bytes
    own: str | None = None
    conversation: Conversation | None = None
    is_open: bool = False


@dataclass(frozen=True)
class OwnAnswer:
    """A whole answer that a member wrote by itself.

    Attributes:
        ids: Its ids, including the one that ended it.
        end: What ended it: a control token, or text such as a stop string; None if it was cut.
        log_prob: Its log-probability by the member's own distribution; None if unknown.
    """

    ids: tuple[int, ...]
    end: Literal["eos", "text"] | None
    log_prob: float | None = None


@dataclass(frozen=True)
class OwnText:
    """A text for which to ask a member's likelihood.

    Attributes:
        prompt: Ids before it, at least one.
        ids: Its ids.
        end_ids: Ids, one of which has to follow it; None if it need not end.
        where: Its place in errors: "in continuation 3".
    """

    prompt: Sequence[int]
    ids: Sequence[int]
    end_ids: Sequence[int] | None
    where: str


@dataclass(frozen=True)
class OwnLikelihood:
    """How likely a text is.

    Attributes:
        log_probs: Natural logarithm of the probability of each of its ids, and of its end, if it has to end.
        is_greedy: Whether each is the member's best.
    """

    log_probs: Sequence[float]
    is_greedy: bool


class Member(TokenizedMember, ABC):
    """A language model with its tokenizer, as an ensemble sees it.

    Each kind (a model of this process, one with an encoder, one elsewhere) has its own file. `offers` lists what a
    member can provide; asking for more is refused before anything runs.

    Neither the model nor the tokenizer, nor their configurations, are ever changed.

    Args:
        name: Name in errors.
        tokenizer: Its fast tokenizer.
        vocab_size: Number of ids that the model has logits for.
        eos_token_ids: Ids that end a text; ids without a row in the model are left out.
        chat_template: A template to use instead of the tokenizer's own.
        system_prompt: A system turn to use instead of every conversation's; empty for none.

    Attributes:
        offers: What it can provide.
        model: The model, if it is a causal one of this process; None otherwise.
        config: The model's configuration; for a served one possibly only its size.
        generation_config: The model's generation config; None if there is none.
        encoder: Finds its ids that write given bytes.
        renderer: How it reads a conversation.

    Raises:
        VocabularyError: If the tokenizer is not supported.
    """

    offers: ClassVar[frozenset[Offer]]
    runs_in_loop: ClassVar[bool] = False
    """Whether the stock loop can run it as the primary; otherwise its own state runs it at every step."""
    shares_beginnings: ClassVar[bool] = False
    """Whether rows of ids that begin alike may continue from one row that has read the beginning."""
    is_served: ClassVar[bool] = False
    """Whether it is behind a server."""
    writes_by_itself: ClassVar[bool] = False
    """Whether it writes whole answers by itself, not as an ensemble of one."""
    model: Any = None
    config: PreTrainedConfig
    generation_config: GenerationConfig | None

    # What it is

    @property
    @abstractmethod
    def kind(self) -> str:
        """Its kind in errors: "a causal language model of this process"."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device on which its logits arrive."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The dtype in which it computes, and in which its logits arrive."""

    @property
    @abstractmethod
    def num_parameters(self) -> int:
        """Its size, by which drafters are chosen."""

    @property
    @abstractmethod
    def max_positions(self) -> int | None:
        """Number of ids it can read; None if there is no limit."""

    @property
    def max_length(self) -> float:
        """`max_positions` as a number to compare with; infinite if there is no limit."""
        return math.inf if self.max_positions is None else self.max_positions

    @property
    def context_length(self) -> int | None:
        """Number of ids that its model was made for; None if its configuration does not say."""
        length: int | None = getattr(self.config.get_text_config(decoder=True), "max_position_embeddings", None)
        return length

    @property
    def is_captured(self) -> bool:
        """Whether its steps run as CUDA graphs of this process."""
        return False

    @property
    def place(self) -> Hashable:
        """Its place: members in different places can write whole answers at the same time."""
        return self.device

    def description(self) -> Any:
        """A JSON value that identifies it, for files that depend on the member."""
        raise NotImplementedError

    def check_size(self) -> None:
        """Check that the member still has the vocabulary that the ensemble was created with.

        Raises:
            ConfigurationError: If it does not.
        """
        return

    def refuse(self, asked: Iterable[Offer], by: str) -> None:
        """Refuse what the member cannot provide.

        Args:
            asked: What is asked of it.
            by: What asks, for the error: "method 'gac'".

        Raises:
            ConfigurationError: If it cannot provide one of them.
        """
        for one in sorted(set(asked) - self.offers, key=lambda one: one.name):
            raise ConfigurationError(
                f"{by} asks member {self.name!r} for {one.what}, but it is {self.kind}, which cannot provide that. "
                f"{one.remedy}, or load it as a causal language model of this process."
            )

    def check_method(self, config: MethodConfig) -> None:
        """Refuse options of a method that exceed what it provides.

        Args:
            config: The method's options.

        Raises:
            ConfigurationError: If there are any.
        """
        return

    def accepts(self, keyword: str) -> bool:
        """Whether the model's forward has a parameter of this name, if the stock loop runs it."""
        return False

    def sends_entries(self, needs_whole_rows: bool) -> bool:
        """Whether it sends few entries if these are enough, because whole rows are expensive or impossible.

        Args:
            needs_whole_rows: Whether more is read than the entries that a method asks for.
        """
        return False

    @property
    def at_text_start(self) -> "Member | None":
        """The member's variant for the beginning of a text, where a first word takes no space; None if it is the same."""
        return None

    # What it reads and computes

    def read(self, prompt: RowPrompt, resync: Resync) -> MemberContext:
        """Create the member's context of a prompt, as an assistant.

        A context is ids, and it is all that a state, a fork or a likelihood knows about a row. A member that reads
        something else too, such as a source, puts it in front of its ids.

        Args:
            prompt: The prompt.
            resync: How the context follows the text.

        Raises:
            ConfigurationError: If the chat template refuses the conversation, or its prompt does not fit.
        """
        if prompt.own is None and prompt.conversation is not None:
            return MemberContext.of_ids(self.encoder, self.renderer.ids(prompt.conversation), resync)
        data = prompt.text if prompt.own is None else prompt.own.encode("utf-8", "replace")
        return MemberContext(self.encoder, resync, data)

    @abstractmethod
    def new_rows(self, num_rows: int, num_expected: int = 0, mode: str | None = None) -> CachedRows:
        """Make caches for the rows of a call.

        Args:
            num_rows: Number of rows.
            num_expected: Expected number of new ids per row.
            mode: The cache mode; default: the member's.
        """

    def input_embeddings(self) -> Any:
        """The module whose `weight` holds its input embeddings, of shape `(vocab_size, hidden_size)`."""
        raise NotImplementedError

    def output_embeddings(self) -> Any:
        """The module whose `weight` holds its output embeddings, of shape `(vocab_size, hidden_size)`."""
        raise NotImplementedError

    def answers(
        self, contexts: Sequence[MemberContext], settings: GenerationConfig, seeds: Sequence[int] | None
    ) -> list[OwnAnswer]:
        """Write a whole answer after each context, of a member that `writes_by_itself`.

        Args:
            contexts: One context per answer.
            settings: The options.
            seeds: Seed of each answer; None without sampling.

        Returns:
            An answer for each context.

        Raises:
            ConfigurationError: If it does not support an option.
            MemberError: If it fails.
        """
        raise NotImplementedError

    def likelihoods(self, texts: Sequence[OwnText]) -> list[OwnLikelihood] | None:
        """Return how likely texts are, if the member computes this itself rather than by its logits.

        Args:
            texts: The texts.

        Returns:
            The likelihood of each; None for a member whose logits are read.

        Raises:
            MemberError: If it fails.
        """
        return None

    # Its life

    def close(self) -> None:
        """Release what it holds outside of this process; it cannot run afterwards. By default, nothing."""
        return

    def restart(self) -> None:
        """Restart it after it has died.

        Raises:
            ConfigurationError: If it runs in this process, or cannot be started from here.
        """
        raise ConfigurationError(
            f"member {self.name!r} cannot be restarted: it is {self.kind}, which this process did not start."
        )

    # What goes wrong

    def not_finite(self, where: str) -> MemberError:
        """Return the error for NaN or infinite logits; `where` goes on "in row 0 at step 1"."""
        return messages.not_finite(self.name, self.dtype, where)


def end_ids_of(
    name: str,
    generation_config: Any,
    config: Any,
    tokenizer: PreTrainedTokenizerBase,
    extra: Iterable[int],
) -> list[int]:
    """Return the ids that end a member's texts: of its generation config, else its model's, else its tokenizer.

    Args:
        name: The member's name.
        generation_config: Its generation config, if there is one.
        config: Its model's configuration, if there is one.
        tokenizer: Its tokenizer.
        extra: More ids that end a text.
    """
    sources = (generation_config, config, tokenizer)
    found = next((i for i in (getattr(source, "eos_token_id", None) for source in sources) if i is not None), None)
    ids = ids_in(found)
    tokenizer_eos = tokenizer.eos_token_id
    if tokenizer_eos is not None and ids and tokenizer_eos not in ids:
        messages.warn(
            f"member {name!r} ends texts with ids {ids} by its configuration, but its tokenizer's EOS token is "
            f"{tokenizer_eos}: the configuration is used. If the model ends texts with the tokenizer's EOS, add it "
            "with `MemberConfig(eos_token_id=...)`."
        )
    return [*ids, *extra]


def ids_in(given: Any) -> list[int]:
    """Return the ids of an option that takes one or several, such as `eos_token_id`; empty for None."""
    return [] if given is None else list(torch.as_tensor(given).flatten().tolist())


def refuse_missing_offers(members: Sequence[Member], config: MethodConfig, participants: Collection[int]) -> None:
    """Refuse a method that asks members for what they cannot provide.

    Args:
        members: The members; the first is the primary.
        config: The method's options.
        participants: Indices of the members that may have a weight.

    Raises:
        ConfigurationError: If a member cannot; names the method, the member and the remedy.
    """
    members[0].refuse({Offer.PRIMARY}, "the ensemble")
    for index in sorted(participants):
        members[index].refuse(config.asks, f"method {config.name!r}")
        members[index].check_method(config)
    if config.gate_rule is not None:
        members[config.gate_rule[0]].refuse({Offer.GATE}, f"method {config.name!r}")
