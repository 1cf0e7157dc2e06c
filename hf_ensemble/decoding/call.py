"""One call of `generate` or `score`: what it works with."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..config import MethodConfig
from ..members.member import Member
from ..methods.base import TokenMethod, eos_ids_of
from ..methods.primary_alone import PrimaryAlone
from .kept import Kept
from .prompts import OwnPrompts, encode_primary_prompt, prepare_prompt
from .step_weights import StepWeights


@dataclass
class Call:
    """What a call works with. Nothing of it stays on the model, so calls at the same time are independent.

    Attributes:
        kept: What the ensemble keeps from call to call, its members included.
        config: The method's options.
        weights: The step weights.
        own_prompts: What members read in place of the text of the prompt ids.
        num_decision_entries: Number of each member's best entries that are recorded at each decision; None where
            decisions are not recorded.
        has_cache: Whether a cache was passed in.
    """

    kept: Kept
    config: MethodConfig
    weights: StepWeights
    own_prompts: OwnPrompts | None = None
    num_decision_entries: int | None = None
    has_cache: bool = False

    @property
    def members(self) -> Sequence[Member]:
        """The members; the first is the primary."""
        return self.kept.members

    @property
    def participants(self) -> set[int]:
        """Numbers of the members that may be needed: those that may have a weight, and the gate member."""
        gate = self.config.gate_rule
        return self.weights.participants | ({gate[0]} if gate else set())

    @property
    def is_by_primary(self) -> bool:
        """Whether the primary decides everything, and so runs by itself."""
        return self.weights.is_only(0) and self.participants == {0} and not self.config.cuts_off

    def method(self, settings: Any) -> TokenMethod:
        """What decides token by token, for a prepared generation config."""
        if self.is_by_primary:
            return PrimaryAlone(self.kept.union, eos_ids_of(self.members, end_ids(settings)), self.members[0].device)
        return self.kept.method(self.config, end_ids(settings))


def take_prompt(call: Call, inputs: Tensor | None, kwargs: dict[str, Any], member_prompts: Any) -> Tensor | None:
    """Take the prompt out of what `generate` was called with, and what members read in its place into the call.

    Args:
        call: What the call works with; its `own_prompts` are set.
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
        inputs, mask = encode_primary_prompt(primary, of_primary)
        member_prompts = [None, *member_prompts[1:]]
    if inputs is not None:
        inputs, kwargs["attention_mask"] = prepare_prompt(primary, inputs, mask)
    call.own_prompts = OwnPrompts(call.members, member_prompts, 1 if inputs is None else len(inputs))
    return inputs


def end_ids(settings: Any) -> list[int]:
    """The ids that end a text by a prepared generation config."""
    found: Tensor | None = settings._eos_token_tensor
    return [] if found is None else found.tolist()


def keeps_rows(settings: Any) -> bool:
    """Whether rows of `scores` or `logits` are kept by a generation config."""
    return bool(settings.return_dict_in_generate and (settings.output_logits or settings.output_scores))
