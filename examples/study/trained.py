"""The study's members: their names, their folders, and how to load an ensemble of them."""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from demo_models import models_or_demo

from hf_ensemble import EnsembleForCausalLM, MemberConfig

BASES = ("smollm2", "gemma")
TRAIN_SETS = {"qamr": ("qa_train", "qa_dev"), "gsm": ("gsm_train", "gsm_dev")}
"""The training set and the set to monitor, by task."""


def member_name(base: str, task: str, kind: str, seed: int, percent: int = 100) -> str:
    """Return a member's name: `smollm2-qamr-lora-s0`, or `smollm2-qamr-lora-s0-at25` after 25 % of the steps.

    Args:
        base: The base model.
        task: The training task.
        kind: `"lora"` or `"full"`.
        seed: Seed of the training.
        percent: How much of the training is done.
    """
    return f"{base}-{task}-{kind}-s{seed}" + (f"-at{percent}" if percent < 100 else "")


def without_seed(name: str) -> str:
    """Return a member's name without its seed, the key for pooling results.

    Args:
        name: The member's name.
    """
    return re.sub(r"-s\d+", "", name)


def base_path(folder: Path, base: str) -> str:
    """Return the path of an untuned model: in the study's `bases` if it exists, otherwise the demo model.

    Args:
        folder: The study's folder.
        base: One of `BASES`.
    """
    own = folder / "bases" / base
    return str(own) if own.is_dir() else models_or_demo(None)[BASES.index(base)]


def load(folder: Path, names: Sequence[str], device: str, dtype: str) -> EnsembleForCausalLM:
    """Load an ensemble of members.

    Args:
        folder: The study's folder.
        names: Names of members, or of `BASES`, the primary first.
        device: The device for the members.
        dtype: What they compute in.
    """
    items = []
    for name in names:
        if name in BASES:
            items.append(MemberConfig(path=base_path(folder, name), name=name))
            continue
        own = folder / "members" / name
        kind = {"path": str(own)}
        if (own / "adapter_config.json").exists():
            base = json.loads((own / "training.json").read_text("utf-8"))["base"]
            kind = {"path": base_path(folder, base), "adapter": str(own)}
        items.append(MemberConfig(name=name, **kind))
    return EnsembleForCausalLM.from_pretrained(items, dtype=dtype, device_map=device)
