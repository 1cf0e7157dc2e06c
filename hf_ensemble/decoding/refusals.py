"""Options that cannot be combined: all refusals of options of `generate` are worded here."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from transformers import GenerationConfig

from ..errors import ConfigurationError

_NOT_FOR_ENSEMBLES = {
    "guidance_scale": "it would run the primary alone a second time",
    "token_healing": "it rewrites the prompt in the primary's tokens only",
    "watermarking_config": "its green lists are made for one vocabulary",
    "prompt_lookup_num_tokens": 'only the primary would check its drafts. Pass `speculation="ngram"` instead',
    "assistant_early_exit": "only the primary would check its drafts",
    "penalty_alpha": "it needs the primary's hidden states for every candidate",
    "dola_layers": "it contrasts layers of the primary only",
    "use_mtp": "the other members do not check multi-token prediction drafts",
}


class Obstacle(NamedTuple):
    """An option that a way of writing does not support.

    Attributes:
        is_there: Whether the call uses it.
        what: Its name in errors: "`num_beams=2`".
        why: Why it cannot be used.
        remedy: What to do instead.
    """

    is_there: Any
    what: str
    why: str
    remedy: str = "Leave it out"


def first_obstacle(obstacles: Iterable[Obstacle]) -> Obstacle | None:
    """Return the first obstacle that is there, or None."""
    return next((obstacle for obstacle in obstacles if obstacle.is_there), None)


def refuse(obstacles: Iterable[Obstacle], with_what: str) -> None:
    """Refuse the first obstacle that is there.

    Args:
        obstacles: The possible obstacles.
        with_what: What it cannot be used with: "method 'sweetspan'".

    Raises:
        ConfigurationError: If one is there.
    """
    found = first_obstacle(obstacles)
    if found is not None:
        raise ConfigurationError(f"{found.what} cannot be used with {with_what}: {found.why}.")


def refuse_for_ensembles(settings: GenerationConfig, kwargs: Mapping[str, Any], refused: Mapping[str, Any]) -> None:
    """Refuse what no ensemble can do.

    Args:
        settings: The generation config of the call.
        kwargs: The other keyword arguments of the call.
        refused: Arguments of `generate` that have to be None, by name.

    Raises:
        ConfigurationError: If the call asks for any of it.
    """
    for name, value in refused.items():
        if value is not None:
            raise ConfigurationError(f"`{name}` cannot be used with an ensemble.")
    options = {name: getattr(settings, name, kwargs.get(name)) for name in _NOT_FOR_ENSEMBLES}
    if options["guidance_scale"] == 1:
        options["guidance_scale"] = None
    cache = settings.cache_implementation
    reasons = _NOT_FOR_ENSEMBLES.items()
    obstacles = [Obstacle(options[name] not in (None, False), f"`{name}`", why) for name, why in reasons]
    why = "the paged loop decodes with the primary alone"
    obstacles.append(Obstacle("paged" in str(cache), f"`cache_implementation={cache!r}`", why))
    refuse(obstacles, "an ensemble")


def refuse_without_output(settings: GenerationConfig) -> None:
    """Refuse to record decisions for a call that has nowhere to put them.

    Args:
        settings: The generation config of the call.

    Raises:
        ConfigurationError: If it returns no output object, or searches with beams.
    """
    if not settings.return_dict_in_generate:
        raise ConfigurationError(
            "`output_decisions` puts `decisions` into the output object: pass `return_dict_in_generate=True` too."
        )
    beams = settings.num_beams
    why = "beams are chosen by the probabilities of whole texts, so no member decides a token. Pass `num_beams=1`"
    refuse([Obstacle(beams not in (None, 1), "`output_decisions`", why)], f"`num_beams={beams}`")
