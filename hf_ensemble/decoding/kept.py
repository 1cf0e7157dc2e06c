"""What an ensemble keeps from call to call: methods that are ready, and how its drafts have fared."""

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from ..config import MethodConfig
from ..members.member import Member
from ..methods.base import TokenMethod, eos_ids_of
from ..vocabulary.union import UnionVocabulary

_MAX_METHODS = 8
"""Methods kept ready, each with its index maps on the device; a call with other options or EOS ids makes another."""

_MAX_DRAFT_LENGTHS = 64
"""Kinds of calls of which it is kept how fast their drafts are checked and how many are accepted."""


class Kept:
    """Methods and draft lengths of one set of members. Of a copy all is made anew: it belongs to a device.

    Args:
        members: The members; the first is the primary.

    Attributes:
        union: Their union vocabulary.
        methods: Those that are ready, by options, EOS ids and device.
        draft_lengths: What calls have measured, by their kind. A call takes it out, and hands it back when it is through.
    """

    def __init__(self, members: Sequence[Member]):
        self.members = members
        self.union = UnionVocabulary([member.encoder for member in members])
        self.methods: dict[Hashable, TokenMethod] = {}
        self.draft_lengths: dict[Hashable, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "methods": {}, "draft_lengths": {}}

    def method(self, config: MethodConfig, eos_ids: Sequence[int], device: torch.device | None = None) -> TokenMethod:
        """Give a token-level method, made for these members; others give back memory of what can be made again.

        Args:
            config: The method's options.
            eos_ids: The primary's ids that end a text.
            device: Where the mixing happens. Default: where the primary is.
        """
        device = device or self.members[0].device
        key = (config, tuple(eos_ids), device)
        for other_key, other in list(self.methods.items()):
            if other_key != key:
                other.forget()
        method = self.methods.get(key)
        if method is None or method.is_stale:
            if len(self.methods) >= _MAX_METHODS:
                self.methods.clear()
            method = config.build(self.members, self.union, eos_ids_of(self.members, eos_ids), device)
            self.methods[key] = method
        return method

    def keep_draft_length(self, kind: Hashable, draft_length: Any) -> None:
        """Keep what a call has measured for the next one of its kind."""
        if len(self.draft_lengths) >= _MAX_DRAFT_LENGTHS:
            self.draft_lengths.clear()
        self.draft_lengths[kind] = draft_length
