"""Saving an ensemble to a folder, with references to its members or with the members."""

import dataclasses
import os
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError
from .in_place import write_in_place
from .model_card import model_card
from .planning import EnsembleParts, plan_push, plan_save
from .pushing import PushOptions, push_plan
from .writing import write_files


def save_ensemble(
    parts: EnsembleParts,
    save_directory: str | os.PathLike[str],
    include_members: bool,
    max_shard_size: int | str,
    push_options: dict[str, Any] | None,
) -> None:
    """Save an ensemble to a folder, and upload it too if that is asked for.

    Args:
        parts: The ensemble.
        save_directory: Folder to write to.
        include_members: Whether to write the members too.
        max_shard_size: Most bytes of a file of an included member, or a size like `"5GB"`.
        push_options: `repo_id` (default: the folder's name) and `PushOptions`; None: it is not uploaded.

    Raises:
        ConfigurationError: If it cannot be saved or uploaded. Nothing is written then.
    """
    folder = Path(save_directory).resolve()
    if folder.is_file():
        raise ConfigurationError(f"{str(folder)!r} is a file; an ensemble is saved to a folder.")
    plan, pushed = plan_save(parts, include_members, folder), None
    if push_options is not None:
        repo_id = push_options.pop("repo_id", folder.name)
        options = PushOptions(**push_options)
        pushed = plan_push(parts, include_members, options.connect())
    card = model_card(plan, folder.name, folder.name, parts.tags, api=None)
    write_in_place(folder, lambda new: write_files(plan, new, max_shard_size, card))
    if pushed is not None:
        push_plan(pushed, repo_id, max_shard_size, options)


def check_save_options(
    state_dict: Any, safe_serialization: bool, push_to_hub: bool, push_options: dict[str, Any]
) -> None:
    """Refuse options of `save_pretrained` that do nothing for an ensemble.

    Args:
        state_dict: Weights to save in place of a model's own.
        safe_serialization: Whether weights are written as safetensors.
        push_to_hub: Whether the ensemble is uploaded too.
        push_options: What else was given.

    Raises:
        ConfigurationError: Naming the first of them.
    """
    if state_dict is not None or not safe_serialization:
        raise ConfigurationError(
            "an ensemble takes neither `state_dict` nor `safe_serialization=False`: with `include_members=True` its "
            "members are written with their own weights, as safetensors."
        )
    if push_options and not push_to_hub:
        raise ConfigurationError(f"options {sorted(push_options)} do nothing without `push_to_hub=True`.")
    known = {"repo_id", *(option.name for option in dataclasses.fields(PushOptions))}
    if unknown := set(push_options) - known:
        raise ConfigurationError(f"`save_pretrained` of an ensemble has no option {min(unknown)!r}.")
