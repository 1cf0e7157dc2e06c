"""The option `speculation`, and what it cannot be combined with."""

from collections.abc import Sequence
from typing import Any

from ...errors import ConfigurationError
from ...members.member import Member
from ...offers import Offer
from ..call import Call
from ..refusals import Obstacle, first_obstacle
from .drafts import NGRAM

AUTO = "auto"


class Speculation:
    """The drafters of a call.

    Args:
        name: `"auto"`, `"ngram"` or a member's name.
        members: The members.

    Attributes:
        is_auto: Whether the plain loop may run if speculation cannot be used.
        uses_ngrams: Whether drafts are looked up in the text.

    Raises:
        ConfigurationError: If there is no such drafter, or more than one of that name.
    """

    def __init__(self, name: Any, members: Sequence[Member]):
        names = [member.name for member in members]
        if not isinstance(name, str) or name not in (AUTO, NGRAM, *names):
            raise ConfigurationError(
                f"`speculation` must be 'auto', 'ngram' or the name of a member ({', '.join(map(repr, names))}), but is "
                f"{name!r}."
            )
        if name not in (AUTO, NGRAM) and names.count(name) > 1:
            raise ConfigurationError(
                f"`speculation={name!r}` names {names.count(name)} members ({', '.join(map(repr, names))}). Give each its "
                "own name (`MemberConfig.name`), or pass `speculation='auto'`."
            )
        self.name = name
        self.is_auto = name == AUTO
        self.uses_ngrams = name in (AUTO, NGRAM)
        self._members = list(members)

    def drafters(self, participants: Sequence[int], num_parameters: Sequence[int]) -> list[int]:
        """Indices of the members that may draft, the cheapest first; the cheapest of those that share a name.

        Args:
            participants: Indices of the members that have a weight. A drafter given by name needs none.
            num_parameters: Each member's size.
        """
        if self.is_auto:
            first_of: dict[str, int] = {}
            for index in sorted(participants, key=lambda index: num_parameters[index]):
                first_of.setdefault(self._members[index].name, index)
            return list(first_of.values())
        return [n for n, member in enumerate(self._members) if member.name == self.name and not self.uses_ngrams][:1]

    def refuse(self, obstacle: Obstacle) -> None:
        """Refuse drafts, unless the plain loop may run instead.

        Raises:
            ConfigurationError: If it may not.
        """
        if not self.is_auto:
            raise ConfigurationError(
                f"`speculation={self.name!r}` cannot be used with {obstacle.what}: {obstacle.why}. {obstacle.remedy}, or "
                "pass `speculation='auto'`, which then decodes without drafts."
            )


def obstacle_to_drafts(call: Call, settings: Any, synced_gpus: Any) -> Obstacle | None:
    """Return why a call cannot use drafts; None if it can.

    Args:
        call: The call.
        settings: Its generation config.
        synced_gpus: As given to `generate`.
    """
    own_caches = "drafts are rolled back in the members' own caches"
    positions = "it would need positions for the drafts"
    moving = "beams move between rows at every step"
    returns = settings.return_dict_in_generate
    beams, cache = settings.num_beams, settings.cache_implementation
    records = call.num_decision_entries is not None
    in_call = [
        Obstacle(beams not in (None, 1), f"`num_beams={beams}`", moving, "Pass `num_beams=1`"),
        Obstacle(records, "`output_decisions`", "decisions are recorded in the plain loop only"),
        Obstacle(returns and settings.output_attentions, "`output_attentions`", positions),
        Obstacle(returns and settings.output_hidden_states, "`output_hidden_states`", positions),
        Obstacle(settings.use_cache is False, "`use_cache=False`", own_caches),
        Obstacle(call.has_cache, "a cache that you pass in", own_caches),
        Obstacle(cache not in (None, "dynamic"), f"`cache_implementation={cache!r}`", own_caches),
        Obstacle(settings.prefill_chunk_size is not None, "`prefill_chunk_size`", own_caches),
        Obstacle(synced_gpus, "`synced_gpus`", "a round runs in one process"),
    ]
    method = call.config
    drafting = "its candidates are drafts already" if method.decides == "spans" else "every member writes by itself"
    gating = "it decides at every step which members run, so the others could not check several tokens"
    drawing = "one drawn member decides each token, so the others cannot check it"
    varying = "it is called at every step with the ids so far"
    unable = [call.members[n] for n in sorted(call.participants) if Offer.DRAFTS not in call.members[n].offers]
    in_method = [
        *(Obstacle(True, f"member {one.name!r}", f"it is {one.kind}, which cannot check drafts") for one in unable),
        Obstacle(method.decides != "tokens", f"method {method.name!r}", drafting, "Choose a token-level method"),
        Obstacle(method.gate_rule is not None, "a gate", gating, "Leave out `threshold`"),
        Obstacle(method.draws_one, "mixture sampling", drawing, "Leave out `strategy`"),
        Obstacle(call.weights.varies, "`weights` that are a function", varying, "Give the weights as numbers"),
    ]
    return first_obstacle(in_call if call.is_by_primary else in_call + in_method)


def whole_batch_obstacle(processor_name: str) -> Obstacle:
    """The obstacle to drafts if a processor has to see several rows at once."""
    return Obstacle(
        True,
        f"the logits processor {processor_name} and several rows",
        "rows are decided at their own pace, so a processor is called with one row at a time",
        "Decode the rows one by one",
    )
