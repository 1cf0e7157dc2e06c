"""Writes an ensemble's files, without anything about the machine they were written on."""

import copy
import json
import os
import re
from pathlib import Path
from typing import Any

from ..members.adapted import base_model
from ..members.member import Member
from .adapters import weights_without_adapters, write_adapter
from .planning import ADAPTER_FOLDER, SavePlan
from .quantized import is_from_gguf
from .references import HUB_OPTIONS

_OF_ONE_MACHINE = (*HUB_OPTIONS, "is_local", "name_or_path", "_name_or_path")
"""Keys that models and tokenizers may write about how they were loaded."""

_ANY_TEXT = ("chat_template", "content")
"""Texts that may look like a path but are not."""

_IN_A_HOME = re.compile(r"/home/\w|/Users/\w|/root/\w|[A-Za-z]:\\Users\\|(?:^|[=:\s])~/\w")
"""Pattern of paths within any user's home folder."""


def write_files(plan: SavePlan, folder: Path, max_shard_size: int | str, card: str | None) -> None:
    """Write the files of a plan.

    Args:
        plan: What to write.
        folder: The folder; created if it does not exist.
        max_shard_size: Largest size of a file of a bundled member, in bytes or as `"5GB"`.
        card: Text of the README; None for no README.
    """
    folder.mkdir(exist_ok=True)
    for place, bundled in plan.bundled.items():
        if bundled.with_model:
            _write_model(bundled.member, folder / place, max_shard_size)
        adapter = folder / place / ADAPTER_FOLDER
        write_adapter(base_model(bundled.member.model), adapter)
        if bundled.with_tokenizer:
            bundled.member.tokenizer.save_pretrained(folder / place if bundled.with_model else adapter)
    plan.ensemble.generation_config.save_pretrained(folder)
    plan.ensemble.tokenizer.save_pretrained(folder)
    if card is not None:
        (folder / "README.md").write_text(card, "utf-8")
    plan.config.save_pretrained(folder)
    for file in folder.rglob("*config.json"):
        # Written again, without what belongs to one machine.
        values = json.loads(file.read_text("utf-8"))
        kept = _without_private(values)
        if "members" in values:
            # These are kept: their paths have to be found again.
            kept["members"] = values["members"]
        if kept != values:
            file.write_text(json.dumps(kept, indent=2, sort_keys=True, ensure_ascii=False) + "\n", "utf-8")


def _write_model(member: Member, folder: Path, max_shard_size: int | str) -> None:
    base = base_model(member.model)
    # A shallow copy of the model, because saving writes into its configuration.
    model: Any = copy.copy(base)
    model.config = copy.deepcopy(base.config)
    if is_from_gguf(base):
        # Its weights are unpacked.
        del model.config.quantization_config
        model.hf_quantizer = None
    weights = weights_without_adapters(base)
    if weights is not None:
        # Otherwise only the adapter would be written, or the model's weights under an adapter's names.
        model._hf_peft_config_loaded, model._weight_conversions = False, None
    model.save_pretrained(folder, state_dict=weights, max_shard_size=max_shard_size)


def _without_private(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {key: part for key, part in value.items() if not (_is_private(key, part) or _is_private("", key))}
        return {key: _without_private(part) for key, part in kept.items()}
    if isinstance(value, list):
        return [_without_private(part) for part in value if not _is_private("", part)]
    return value


def _is_private(key: str, value: Any) -> bool:
    is_path = isinstance(value, str) and key not in _ANY_TEXT and _is_of_this_machine(value)
    # In a mapping of labels, a label may have such a name.
    return is_path or (key in _OF_ONE_MACHINE and type(value) is not int)


def _is_of_this_machine(text: str) -> bool:
    """Whether a text is an existing path, or contains one within a home folder; other slashes are no sign of a path."""
    is_there = os.path.isabs(text) and len(Path(text).parts) > 2 and os.path.exists(text)
    return is_there or str(Path.home()) in text or _IN_A_HOME.search(text) is not None
