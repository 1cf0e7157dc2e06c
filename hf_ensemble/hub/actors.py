"""Members that run in Ray actors: checks, and loading."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedConfig

from ..config import MemberConfig
from ..errors import ConfigurationError
from ..members.ray.member import RayMember
from .references import name_of

_PLACEMENTS = (None, "ray")


def check_placement(items: Sequence[MemberConfig], placement: Any, is_saved: bool, allow_remote: bool) -> None:
    """Apply the placement to all members, and refuse a saved ensemble that would start actors unasked.

    Args:
        items: The members, changed in place.
        placement: The argument of `from_pretrained`.
        is_saved: Whether the members come from a saved ensemble, not from the user.
        allow_remote: Whether saved members may run elsewhere.

    Raises:
        ConfigurationError: If the placement is unknown, or a member runs elsewhere and may not.
    """
    if placement not in _PLACEMENTS:
        raise ConfigurationError(f"`placement` has to be None or 'ray', but is {placement!r:.200}.")
    for item in items:
        if item.ray is not None and is_saved and not allow_remote:
            raise ConfigurationError(
                f"member {name_of(item)!r} of this saved ensemble runs in a Ray actor (`ray={item.ray}`). A saved "
                "ensemble starts actors only if you allow it: pass `allow_remote=True`, or `--allow-remote` on the "
                "command line."
            )
        if placement == "ray" and not item.is_elsewhere:
            item.ray = {}


def check_actor(item: MemberConfig, config: PreTrainedConfig) -> None:
    """Refuse members that cannot run in an actor.

    Args:
        item: The member.
        config: Its model's configuration.

    Raises:
        ConfigurationError: If the model has an encoder.
    """
    if config.is_encoder_decoder:
        raise ConfigurationError(
            f"member {name_of(item)!r} is an encoder-decoder model ({config.model_type}), which can run in this "
            "process only, not in a Ray actor. Leave `ray` out of its `MemberConfig`, and `placement` out of the "
            "call: set `ray` for the other members."
        )


def start_actor(item: MemberConfig, device_map: Any, load: Callable[..., Any], *arguments: Any) -> RayMember:
    """Start the actor of a member, which begins to load it.

    Args:
        item: The member.
        device_map: Device of its weights. None: the actor's GPUs, if it asks for any.
        load: Called in the actor, with the member, its device map and the other arguments.
        *arguments: The other arguments.

    Raises:
        ConfigurationError: If Ray is not available, or no node has what the actor asks for.
    """
    num_gpus = (item.ray or {}).get("num_gpus", 0)
    if device_map is None and num_gpus:
        device_map = 0 if num_gpus <= 1 else "auto"
    item = dataclasses.replace(item, name=item.short_name)
    return RayMember(item.short_name, functools.partial(load, item, device_map, *arguments), item.ray or {})
