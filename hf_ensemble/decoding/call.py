"""The data of one call of `generate` or `score`, and what an ensemble keeps from call to call."""

import functools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..config import MethodConfig
from ..members.member import Member, ids_in
from ..methods.base import TokenMethod, eos_ids_of
from ..methods.primary_alone import PrimaryAlone
from ..offers import Offer
from ..vocabulary.union import UnionVocabulary
from .draws import Draws
from .prompts import OwnPrompts, encode_primary_prompt, prepare_prompt
from .refusals import Obstacle, refuse
from .step_weights import StepWeights

_MAX_METHODS = 8
"""Number of methods kept ready, each with its index maps on the device. Other options or EOS ids need another one."""

_MAX_DRAFT_LENGTHS = 64
"""Number of kinds of calls whose measurements of drafts are kept."""


class Kept:
    """Methods and draft lengths of one set of members. A copy starts empty, because they belong to a device.

    Args:
        members: The members; the first is the primary.

    Attributes:
        union: Their union vocabulary.
        methods: Methods that are ready, by options, EOS ids and device.
        draft_lengths: What calls have measured, by their kind. A call takes it out, and puts it back when it is done.
        alone: Members as ensembles of one that calls have needed, by index.
        judges: Models that calls have loaded to judge or fuse answers, by what they were loaded from.
    """

    def __init__(self, members: Sequence[Member]):
        self.members = members
        self.union = UnionVocabulary([member.encoder for member in members])
        self.methods: dict[Hashable, TokenMethod] = {}
        self.draft_lengths: dict[Hashable, Any] = {}
        self.alone: dict[int, Any] = {}
        self.judges: dict[Hashable, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "methods": {}, "draft_lengths": {}, "alone": {}, "judges": {}}

    def method(self, config: MethodConfig, eos_ids: Sequence[int], device: torch.device | None = None) -> TokenMethod:
        """Return a token-level method for these members; the other methods free memory that can be rebuilt.

        Args:
            config: The method's options.
            eos_ids: The primary's ids that end a text.
            device: Device of the mixing. Default: the primary's.
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
            ends = eos_ids_of(self.members, eos_ids)
            if self._at_start is None:
                method = config.build(self.members, self.union, ends, device)
            else:
                union, at_start = self._unions
                method = config.build(self.members, union, ends, device)
                method.build_at_start = functools.partial(config.build, self._at_start, at_start, ends, device)
            self.methods[key] = method
        return method

    @functools.cached_property
    def _at_start(self) -> list[Member] | None:
        """The members with their entries at the beginning of a text; None if no member's entries differ there."""
        found = [member.at_text_start for member in self.members]
        if not any(found):
            return None
        return [other or member for other, member in zip(found, self.members, strict=True)]

    @functools.cached_property
    def _unions(self) -> tuple[UnionVocabulary, UnionVocabulary]:
        """The union vocabulary in general and at the beginning of a text; their entries have the same numbers."""
        assert self._at_start is not None
        count = len(self.members)
        starts = [n for n, pair in enumerate(zip(self._at_start, self.members, strict=True)) if pair[0] is not pair[1]]
        others = [self._at_start[n].encoder for n in starts]
        whole = UnionVocabulary([*(member.encoder for member in self.members), *others])
        places = [count + starts.index(n) if n in starts else n for n in range(count)]
        return whole.of_members(range(count)), whole.of_members(places)

    def keep_draft_length(self, kind: Hashable, draft_length: Any) -> None:
        """Keep what a call has measured for the next one of its kind."""
        if len(self.draft_lengths) >= _MAX_DRAFT_LENGTHS:
            self.draft_lengths.clear()
        self.draft_lengths[kind] = draft_length


@dataclass
class Call:
    """The data of a call. Calls leave no state on the model, so concurrent calls are independent.

    Attributes:
        kept: What the ensemble keeps from call to call, its members included.
        config: The method's options.
        weights: The step weights.
        chat_id: The `chat_id` of the ensemble, whose conversations are read.
        own_prompts: What members read instead of the text of the prompt ids.
        num_decision_entries: Number of best entries per member to record at each decision; None if decisions are not
            recorded.
        primary_inputs: Inputs of the primary besides its prompt: a cache, positions and the like, by name.
        settings: The generation config of `generate`, prepared by the stock loop once it runs.
        arguments: Arguments of `generate` that are not generation options, by name.
        draws: Draws samples.
        ends: Receives at each step which rows the criteria have ended, of shape `(batch_size,)`; None if unused.
        seed: Seed of the call, if its mode takes one.
        prompt_length: Number of the primary's ids before the first new one, padding included.
        num_prompts: Number of prompts, each of which may have several rows.
        written: All ids after the last complete step, of shape `(num_rows, length)`; None before the first.
    """

    kept: Kept
    config: MethodConfig
    weights: StepWeights
    chat_id: str = ""
    own_prompts: OwnPrompts | None = None
    num_decision_entries: int | None = None
    primary_inputs: frozenset[str] = frozenset()
    settings: Any = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    draws: Draws = field(default_factory=Draws)
    ends: list[Tensor] | None = None
    seed: int | None = None
    prompt_length: int = 0
    num_prompts: int = 1
    written: Tensor | None = None

    @property
    def members(self) -> Sequence[Member]:
        """The members; the first is the primary."""
        return self.kept.members

    @property
    def has_cache(self) -> bool:
        """Whether a cache was passed in."""
        return not self.primary_inputs.isdisjoint(("past_key_values", "cache"))

    @property
    def needs_stock_passes(self) -> bool:
        """Whether the call asks for something that only the primary's own passes through the decoding loop provide."""
        settings = self.settings
        outputs = settings.output_attentions or settings.output_hidden_states
        return bool(
            self.primary_inputs
            or settings.num_beams > 1
            or settings.use_cache is False
            or settings.prefill_chunk_size is not None
            or settings.cache_implementation not in (None, "dynamic")
            or (settings.return_dict_in_generate and outputs)
        )

    @property
    def participants(self) -> set[int]:
        """Indices of the members that may be needed: those that may have a weight, and the gate member."""
        gate = self.config.gate_rule
        return self.weights.participants | ({gate[0]} if gate else set())

    @property
    def is_by_primary(self) -> bool:
        """Whether the primary decides everything, and so runs by itself."""
        gives_rows = Offer.ROWS in self.members[0].offers or self.config.decides != "tokens"
        return gives_rows and self.weights.is_only(0) and self.participants == {0} and not self.config.acts_on_one

    def method(self) -> TokenMethod:
        """The method that decides token by token, once the generation config is prepared."""
        ends = end_ids(self.settings)
        if self.is_by_primary:
            return PrimaryAlone(self.kept.union, eos_ids_of(self.members, ends), self.members[0].device)
        return self.kept.method(self.config, ends)


def refuse_for_primary_elsewhere(call: Call) -> None:
    """Refuse what needs the primary in the stock loop, if the primary is not in this process.

    Raises:
        ConfigurationError: If something of it is asked for.
    """
    settings, primary = call.settings, call.members[0]
    inside = "this process cannot look inside it"
    caches = "it keeps a cache of its own"
    cache = settings.cache_implementation
    refuse(
        [
            *(Obstacle(True, f"`{name}`", caches) for name in sorted(call.primary_inputs)),
            Obstacle(settings.output_attentions, "`output_attentions`", inside),
            Obstacle(settings.output_hidden_states, "`output_hidden_states`", inside),
            Obstacle(cache not in (None, "dynamic"), f"`cache_implementation={cache!r}`", caches),
            Obstacle(settings.prefill_chunk_size is not None, "`prefill_chunk_size`", caches),
        ],
        f"the primary {primary.name!r}, which is {primary.kind}",
    )


def take_prompt(call: Call, inputs: Tensor | None, kwargs: dict[str, Any], member_prompts: Any) -> Tensor | None:
    """Take the prompt out of the arguments of `generate`, and put what members read instead into the call.

    Args:
        call: The call; its `own_prompts` are set.
        inputs: The primary's ids of shape `(batch_size, length)`; None if they are in `kwargs`, or nowhere.
        kwargs: The keyword arguments of `generate`; the ids are taken out, and the mask put in.
        member_prompts: As in `generate`.

    Returns:
        The ids, left-padded; None if there are none.

    Raises:
        ConfigurationError: If they do not fit.
    """
    kwargs.pop("token_type_ids", None)  # harmless, and part of what some tokenizers return
    primary, mask = call.members[0], kwargs.get("attention_mask")
    inputs = kwargs.pop("input_ids", None) if inputs is None else inputs
    of_primary = member_prompts[0] if isinstance(member_prompts, (list, tuple)) and member_prompts else None
    if inputs is None and of_primary is not None:
        inputs, mask = encode_primary_prompt(primary, of_primary, call.chat_id)
        member_prompts = [None, *member_prompts[1:]]
    if inputs is not None:
        inputs, kwargs["attention_mask"] = prepare_prompt(primary, inputs, mask)
    call.own_prompts = OwnPrompts(call.members, member_prompts, 1 if inputs is None else len(inputs), call.chat_id)
    return inputs


def end_ids(settings: Any) -> list[int]:
    """Return the ids that end a text by a generation config."""
    return ids_in(settings.eos_token_id)


def keeps_rows(settings: Any) -> bool:
    """Whether rows of `scores` or `logits` are kept by a generation config."""
    return bool(settings.return_dict_in_generate and (settings.output_logits or settings.output_scores))
