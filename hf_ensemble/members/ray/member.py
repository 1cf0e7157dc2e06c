"""A member whose model lives in a Ray actor."""

import weakref
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from ...errors import ConfigurationError, MemberError
from ...offers import ALL_OFFERS
from ..member import Member
from .actor import Description
from .link import ActorLink, Traffic
from .rows import RemoteRows
from .wire import Packed


class RayMember(Member):
    """A causal language model in a Ray actor, with its tokenizer here.

    The actor holds the model and all caches, and runs the steps. The ensemble reads the model's description once, when
    the actor is created, because nothing else can change it.

    Args:
        name: Name in errors.
        load: Creates the member in the actor, with the same code as in this process.
        options: Options of the actor, as for Ray's `.options(...)`.

    A copy shares the actor.

    Raises:
        ConfigurationError: If Ray is not available, or no node has what the actor asks for.
    """

    offers = ALL_OFFERS
    kind = "a causal language model in a Ray actor"
    device = torch.device("cpu")  # the device on which its logits arrive

    def __init__(self, name: str, load: Callable[[], Any], options: Mapping[str, Any]):
        self.name = name
        self._load, self._options = load, dict(options)
        self._links: list[ActorLink] = []
        self._ends: Any = weakref.finalize(self, _close, self._links)
        self._start()

    def _start(self) -> None:
        self._links[:] = [ActorLink(self.name, self._load, self._options)]

    @property
    def link(self) -> ActorLink:
        """The actor that currently holds the member."""
        return self._links[0]

    def finish(self, tokenizer: PreTrainedTokenizerBase, chat_template: str | None, system_prompt: str | None) -> None:
        """Wait until the model is loaded, and complete the member.

        Args:
            tokenizer: Its fast tokenizer.
            chat_template: A template to use instead of the tokenizer's own.
            system_prompt: A system turn to use instead of every conversation's; empty for none.

        Raises:
            EnsembleError: As when loading it in this process.
        """
        try:
            self._known = known = self.link.description()
            self.config, self.generation_config = known.config, known.generation_config
            super().__init__(self.name, tokenizer, known.vocab_size, known.eos_token_ids, chat_template, system_prompt)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the actor."""
        self._ends()

    def restart(self) -> None:
        """End the actor, if it still lives, and start another.

        Raises:
            EnsembleError: As when creating the ensemble.
            ConfigurationError: If another model is loaded now.
        """
        self.link.close()
        self._start()
        found = self.link.description()
        if _of_model(found) != _of_model(self._known):
            self.link.close()
            raise ConfigurationError(
                f"member {self.name!r} cannot be restarted: its path now leads to another model, with "
                f"{_of_model(found)} instead of {_of_model(self._known)}. Create the ensemble again."
            )
        self._known = found
        for name in ("_input_embeddings", "_output_embeddings", "cache_mode"):
            vars(self).pop(name, None)

    # What it is

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which it computes, and in which whole rows of logits travel."""
        return self._known.dtype

    @property
    def num_parameters(self) -> int:
        """Number of the model's weights."""
        return self._known.num_parameters

    @property
    def max_positions(self) -> int | None:
        """How many ids it can read; None if there is no limit."""
        return self._known.max_positions

    @property
    def place(self) -> Any:
        """Its actor: it writes whole answers beside all other members."""
        return id(self)

    @property
    def traffic(self) -> Traffic:
        """The traffic between the ensemble and the actor since its start."""
        return self.link.traffic

    def description(self) -> Any:
        """A value that identifies it; see `LocalMember.description`."""
        return self.link.wait(self.link.ask("describe"))

    def __deepcopy__(self, memo: Any) -> "RayMember":
        return self

    @property
    def address(self) -> str:
        """The place of its actor: "process 4193 on host-b"."""
        return self._known.address

    @cached_property
    def cache_mode(self) -> str:
        """How the member's cache in the actor follows a text; see `LocalMember.cache_mode`."""
        mode: str = self.link.wait(self.link.ask("cache_mode"))
        return mode

    # What it computes

    def new_rows(self, num_rows: int, num_expected: int = 0, mode: str | None = None) -> RemoteRows:
        """Make caches in the actor for the rows of a call."""
        return RemoteRows(self.link, num_rows, num_expected, mode, self.dtype, self.vocab_size)

    def sends_entries(self, needs_whole_rows: bool) -> bool:
        """Whether a few entries are enough, because whole rows take long to travel."""
        return not needs_whole_rows

    def not_finite(self, where: str) -> MemberError:
        """Return the error for NaN or infinite logits, with where it runs."""
        return MemberError(f"{super().not_finite(where)} It runs in {self.address}.")

    def input_embeddings(self) -> Any:
        """A copy of its input embeddings, fetched on first use."""
        return self._input_embeddings

    def output_embeddings(self) -> Any:
        """A copy of its output embeddings, fetched on first use."""
        return self._output_embeddings

    @cached_property
    def _input_embeddings(self) -> nn.Module:
        return self._fetched("get_input_embeddings")

    @cached_property
    def _output_embeddings(self) -> nn.Module:
        return self._fetched("get_output_embeddings")

    def _fetched(self, name: str) -> nn.Module:
        packed: Packed | None = self.link.wait(self.link.ask("embeddings", name))
        if packed is None:
            raise MemberError(f"member {self.name!r} has no such embeddings ({name}).")
        layer: nn.Module = nn.Embedding.from_pretrained(packed.tensor())
        return layer


def _of_model(known: Description) -> str:
    """The properties that a reloaded model has to share with the earlier one, worded for errors."""
    return f"{known.vocab_size} ids, {known.num_parameters} weights, {known.dtype} and EOS {list(known.eos_token_ids)}"


def _close(links: list[ActorLink]) -> None:
    for link in links:
        link.close()
