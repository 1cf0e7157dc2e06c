"""What `speculation=` asks for, and what stands against it."""

from collections.abc import Sequence
from typing import Any, TypeAlias

from ...config import MethodConfig, SweetSpanConfig
from ...errors import ConfigurationError
from ...members.member import Member
from ..step_weights import MixingWeights
from .drafts import NGRAM

AUTO = "auto"


class Speculation:
    """Who drafts in a call.

    Args:
        name: `"auto"`, `"ngram"` or a member's name.
        members: The members.

    Attributes:
        is_auto: Whether the plain loop may take over where speculation cannot be used.
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
        """Numbers of the members that may draft, the cheapest first; the cheapest one of those that share a name.

        Args:
            participants: Numbers of the members that have a weight. One that is asked for by name needs none.
            num_parameters: Each member's size.
        """
        if self.is_auto:
            first_of: dict[str, int] = {}
            for index in sorted(participants, key=lambda index: num_parameters[index]):
                first_of.setdefault(self._members[index].name, index)
            return list(first_of.values())
        return [n for n, member in enumerate(self._members) if member.name == self.name and not self.uses_ngrams][:1]

    def refuse(self, what: str, why: str, remedy: str) -> None:
        """Refuse an option, unless the plain loop may take over.

        Args:
            what: What cannot be used with drafts.
            why: Why not.
            remedy: What to do: "Leave it out".

        Raises:
            ConfigurationError: If the plain loop may not.
        """
        if not self.is_auto:
            raise ConfigurationError(
                f"`speculation={self.name!r}` cannot be used with {what}: {why}. {remedy}, or pass "
                "`speculation='auto'`, which then decodes without drafts."
            )


Obstacle: TypeAlias = tuple[str, str, str]
"""What cannot be combined with drafts, why, and what to do."""


def obstacle_in_call(settings: Any, has_cache: bool, synced_gpus: Any, records: bool) -> Obstacle | None:
    """What stands against drafts among the options of a call; None if nothing does.

    Args:
        settings: The generation config of the call.
        has_cache: Whether a cache was passed in.
        synced_gpus: As given to `generate`.
        records: Whether decisions are recorded.
    """
    own_caches = "drafts are rolled back in the members' own caches"
    returns = settings.return_dict_in_generate
    beams, cache = settings.num_beams, settings.cache_implementation
    return _first([
        (beams not in (None, 1), f"`num_beams={beams}`", "beams move between rows at every step", "Pass `num_beams=1`"),
        (records, "`output_decisions`", "decisions are recorded in the plain loop only"),
        (returns and settings.output_attentions, "`output_attentions`", "positions of drafts would be among them"),
        (returns and settings.output_hidden_states, "`output_hidden_states`", "positions of drafts would be among them"),
        (settings.use_cache is False, "`use_cache=False`", own_caches),
        (has_cache, "a cache that is passed in", own_caches),
        (cache not in (None, "dynamic"), f"`cache_implementation={cache!r}`", own_caches),
        (settings.prefill_chunk_size is not None, "`prefill_chunk_size`", own_caches),
        (synced_gpus, "`synced_gpus`", "rounds run on one process"),
    ])  # fmt: skip


def obstacle_in_method(method: MethodConfig, weights: MixingWeights) -> Obstacle | None:
    """What stands against drafts in how members are mixed; None if nothing does.

    Args:
        method: The method's options.
        weights: The mixing weights.
    """
    return _first([
        (isinstance(method, SweetSpanConfig), "method 'sweetspan'", "its candidates are drafts already",
         "Choose a token-level method"),
        (method.gate_rule is not None, "a gate", "it decides at every step who runs, so that nobody could check several",
         "Leave out `threshold`"),
        (method.draws_one, "mixture sampling", "one drawn member decides each token, so that the others cannot check it",
         "Leave out `strategy`"),
        (weights.varies, "`weights` that are a function", "it is called at every step with the ids so far",
         "Give the weights as numbers"),
    ])  # fmt: skip


def _first(cases: Sequence[tuple[Any, ...]]) -> Obstacle | None:
    return next(((what, why, *(remedy or ["Leave it out"])) for found, what, why, *remedy in cases if found), None)
