"""Adapters such as LoRA: finding, loading and writing them."""

import copy
import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..config import MemberConfig
from ..errors import ConfigurationError
from ..members.adapted import (
    active_adapters,
    base_model,
    plain_weights,
    put_weights,
    restore_trained,
    states_of_weights,
    trained_weights,
    twin_of,
    wrapped_modules,
)
from ..optional_packages import not_installed
from .member_files import check_json
from .references import Place, check_place, name_of

_CONFIG_FILE = "adapter_config.json"
_WEIGHTS_FILE = "adapter_model.safetensors"

_PREFIX = "base_model.model."
"""Prefix of weight names in adapter files."""

_KEPT_DTYPE = "kept_dtype"
"""Key in the metadata of weights that we wrote: they keep their dtype, unless the user asks for another."""

# Finding


def find_adapter(item: MemberConfig, has_config: bool, hub: Mapping[str, Any]) -> MemberConfig:
    """Return the member with its adapter named separately from its model; unchanged if it has no adapter.

    As with `AutoModelForCausalLM`, a path may lead to an adapter, which names its model; a folder may contain both.

    Args:
        item: The member.
        has_config: Whether there is a model's configuration at its path.
        hub: Options of Hub access.

    Raises:
        ConfigurationError: If the adapter cannot be found or used, or does not name its model.
    """
    place = Place.of_model(item)
    own = None if item.gguf_file else place.file(_CONFIG_FILE, hub)
    if own is None and item.adapter is None:
        return item
    if own is None:
        place = Place.of_adapter(item)
        check_place(name_of(item), place, hub)
        file = place.file(_CONFIG_FILE, hub)
        if file is None:
            raise ConfigurationError(
                f"member {name_of(item)!r} cannot be loaded: there is no adapter at {item.adapter!r}, or it cannot be read."
            )
        _checked_config(item, file)
        return dataclasses.replace(item, adapter_commit=place.commit(_CONFIG_FILE, hub))
    if item.adapter is not None and Place.of_adapter(item) != place:
        raise ConfigurationError(
            f"member {name_of(item)!r} cannot have the adapter {item.adapter!r}: {item.path!r} is an adapter itself. "
            "Give the model's own id or path, or merge that adapter into the model first."
        )
    config = _checked_config(item, own)
    name = item.short_name
    if os.path.isdir(place.path):
        item = dataclasses.replace(item, path=os.path.normpath(os.path.dirname(own)), subfolder=None)
    found = dataclasses.replace(
        item,
        adapter=item.path,
        adapter_revision=item.revision,
        adapter_subfolder=item.subfolder,
        adapter_commit=place.commit(_CONFIG_FILE, hub),
    )
    if has_config and os.path.isdir(place.path):
        return found
    base = config.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ConfigurationError(
            f"member {name_of(item)!r} is an adapter that does not name its model. Name it: `MemberConfig(path=<the "
            f"model>, adapter={item.path!r})`."
        )
    return dataclasses.replace(found, path=base, revision=None, subfolder=None, commit=None, name=name)


def _checked_config(item: MemberConfig, file: str) -> dict[str, Any]:
    """Return the adapter's configuration, if this kind of adapter changes the model and can be loaded."""
    what = f"member {name_of(item)!r} has an adapter"
    try:
        import peft
    except ImportError as error:
        raise not_installed(what, "peft") from error
    config = dict(check_json(f"the adapter of member {name_of(item)!r}", Path(file)))
    try:
        kind = peft.PEFT_TYPE_TO_CONFIG_MAPPING[config["peft_type"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"{what} whose {_CONFIG_FILE} cannot be read: {error!r}.") from error
    if issubclass(kind, peft.PromptLearningConfig):
        raise ConfigurationError(
            f"{what} of type {config['peft_type']}, which puts learned vectors before the text instead of changing "
            "the model's weights: an ensemble cannot use it. Use LoRA or a similar type."
        )
    return config


def check_adapters(models: Sequence[Any]) -> None:
    """Refuse loaded models for which it is unclear which adapter is meant.

    Args:
        models: All members' models.

    Raises:
        ConfigurationError: If a model with several adapters is listed more than once, or a model is listed with and
            without its `peft` wrapper, or in two wrappers.
    """
    firsts: dict[int, Any] = {}
    for model in models:
        base = base_model(model)
        adapters = list(getattr(base, "peft_config", None) or ())
        first = firsts.get(id(base))
        firsts[id(base)] = model
        if adapters and first is not None and (first is not model or len(adapters) > 1):
            raise ConfigurationError(
                f"`models` lists one model that holds several adapters ({', '.join(adapters)}) more than once, and "
                "nothing says which adapter belongs to which entry: all would use the active one. Load each adapter "
                "as a member, which shares the model's weights too: `from_pretrained([MemberConfig(path=<the model>, "
                "adapter=<the adapter>), ...])`."
            )


# Loading


def can_share(item: MemberConfig, hub: Mapping[str, Any]) -> bool:
    """Whether a member's model can be shared with other members: if its adapter leaves the model's weights alone.

    Args:
        item: The member, with its adapter named separately from its model.
        hub: Options of Hub access.
    """
    if item.adapter is None:
        return True
    place = Place.of_adapter(item)
    config = json.loads(Path(place.file(_CONFIG_FILE, hub) or "").read_text("utf-8"))
    # PiSSA and similar kinds change the model first. The stock loader loads an adapter beside a model at once.
    keeps_weights = not isinstance(config.get("init_lora_weights"), str) or config["init_lora_weights"] == "gaussian"
    return keeps_weights and place != Place.of_model(item)


def add_adapter(model: PreTrainedModel, item: MemberConfig, hub: Mapping[str, Any]) -> None:
    """Load a member's adapter into its model, as `AutoModelForCausalLM` does.

    Args:
        model: The model, changed in place.
        item: The member.
        hub: Options of Hub access.

    Raises:
        ConfigurationError: If the adapter cannot be read or does not fit.
    """
    import peft

    what = f"the adapter {item.adapter!r} of member {name_of(item)!r} cannot be loaded"
    if any(parameter.device.type == "meta" for parameter in model.parameters()):
        raise ConfigurationError(f"{what}: weights of the model are offloaded. Merge it into the model first.")
    try:
        place = Place.of_adapter(item)
        folder = os.path.dirname(place.file(_CONFIG_FILE, hub) or "")
        weights_file = place.file(_WEIGHTS_FILE, hub)
        if weights_file is None:
            raise OSError(
                f"there is no {_WEIGHTS_FILE} beside its {_CONFIG_FILE}; other files of weights are not read."
            )
        config = peft.PeftConfig.from_pretrained(folder)
        config.inference_mode = True
        # If both are in one folder, the stock loader has loaded it already. Otherwise its initial weights are random.
        if not getattr(model, "peft_config", None):
            with torch.random.fork_rng(devices=[]):
                peft.inject_adapter_in_model(config, model)
        weights = peft.load_peft_weights(folder, device="cpu")
        weights = {key.removeprefix(_PREFIX): weight for key, weight in weights.items()}
        is_single = any(weight.dtype == torch.float32 for weight in weights.values())
        if is_single and item.dtype is not None and weights_file and _is_kept(weights_file):
            peft.tuners.tuners_utils.cast_adapter_dtype(model, "default")
        found = peft.set_peft_model_state_dict(model, weights)
    except Exception as error:
        remedy = (
            " It belongs to another model, or to one whose embeddings were resized. If so, merge it into that model "
            "(`merge_and_unload`), save the result, and use it as the member."
        )
        raise ConfigurationError(f"{what}: {error}{remedy if 'size mismatch' in str(error) else ''}") from error
    missing = sorted(set(peft.get_peft_model_state_dict(model, save_embedding_layers=False)).difference(weights))
    if missing or found.unexpected_keys:
        raise ConfigurationError(
            f"{what}: it belongs to another model. Weights that the adapter lacks: {missing[:3]}; weights that the "
            f"model lacks: {found.unexpected_keys[:3]}."
        )
    model._hf_peft_config_loaded = True
    model.eval()


def with_adapter(model: PreTrainedModel, item: MemberConfig, hub: Mapping[str, Any]) -> PreTrainedModel:
    """Return a model with a member's adapter that shares another model's weights; that one stays unchanged.

    Args:
        model: The other model, without an adapter.
        item: The member.
        hub: Options of Hub access.

    Raises:
        ConfigurationError: If the adapter cannot be read, does not fit, or changes the model's own weights.
    """
    flags, before = trained_weights(model), states_of_weights(model)
    twin: PreTrainedModel = twin_of(model)
    # Some adapters bring weights of the model, such as embeddings of new tokens, mostly equal to the model's.
    weights = dict(model.named_parameters(remove_duplicate=False))
    brought = {id(weights[name]): weights[name] for name in _names_in(item, hub) if name in weights}
    own = {old: nn.Parameter(weight.detach().clone(), requires_grad=False) for old, weight in brought.items()}
    put_weights(twin, own)
    add_adapter(twin, item, hub)
    put_weights(twin, {id(new): brought[old] for old, new in own.items() if torch.equal(new, brought[old])})
    restore_trained(flags)
    if states_of_weights(model) != before:
        raise ConfigurationError(
            f"the adapter {item.adapter!r} of member {name_of(item)!r} changes weights of the model itself, which "
            "other members use too. Merge it into a copy of the model."
        )
    return twin


def _names_in(item: MemberConfig, hub: Mapping[str, Any]) -> list[str]:
    """The names without adapters of weights in an adapter's file, including those a model may have."""
    file = Place.of_adapter(item).file(_WEIGHTS_FILE, hub)
    if file is None:
        return []
    with safe_open(file, "pt") as weights:
        return [key.removeprefix(_PREFIX).replace(".base_layer.", ".") for key in weights.keys()]  # noqa: SIM118


def _is_kept(file: str) -> bool:
    with safe_open(file, "pt") as weights:
        return _KEPT_DTYPE in (weights.metadata() or {})


# Writing


def obstacle_to_writing(model: Any) -> str | None:
    """Return why a model's adapters cannot be written apart from its weights, with the remedy; None if they can."""
    configs = getattr(model, "peft_config", None) or {}
    if not configs:
        flagged = getattr(model, "_hf_peft_config_loaded", False)
        return (
            "carries adapters that cannot be told apart from its weights. Merge them into it first"
            if flagged
            else None
        )
    base, names = base_model(model), active_adapters(model)
    if any(config.is_prompt_learning for config in configs.values()):
        return "carries learned prompts, which are not weights of the model. Use LoRA or a similar type"
    if len(names) > 1:
        return f"has {len(names)} active adapters ({', '.join(names)}). Merge them into it, or activate one"
    if any(getattr(module, "merged", False) for module in wrapped_modules(base).values()):
        return "has adapters that are temporarily merged. Unmerge them, or merge and unload them"
    if getattr(base, "hf_quantizer", None) is not None or any(p.device.type == "meta" for p in base.parameters()):
        return (
            "carries adapters and is quantised or offloaded. Name model and adapter by their Hub ids or paths instead"
        )
    return None


def weights_without_adapters(base: PreTrainedModel) -> dict[str, Tensor] | None:
    """Return a model's weights without its adapters, by their plain names; None if it has no adapter."""
    if not getattr(base, "peft_config", None):
        return None
    return plain_weights(base, base.state_dict())


def write_adapter(base: Any, folder: Path) -> None:
    """Write the active adapter of a model, if there is one.

    Args:
        base: The model.
        folder: The folder; created if there is an adapter.
    """
    for name in active_adapters(base):
        import peft

        folder.mkdir(parents=True)
        config = copy.deepcopy(base.peft_config[name])
        # It may be a path of this machine, and the member names the model anyway.
        config.base_model_name_or_path = None
        config.inference_mode = True
        if isinstance(getattr(config, "init_lora_weights", None), str):
            # PiSSA and similar kinds took their initial weights from the model's, which are written in their current
            # state.
            config.init_lora_weights = True
        config.save_pretrained(str(folder))
        weights = peft.get_peft_model_state_dict(base, adapter_name=name, save_embedding_layers=False)
        save_file(
            {f"{_PREFIX}{key}": weight.contiguous() for key, weight in weights.items()},
            folder / _WEIGHTS_FILE,
            metadata={"format": "pt", _KEPT_DTYPE: "yes"},
        )
