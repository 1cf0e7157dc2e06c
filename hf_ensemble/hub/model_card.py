"""The README of a saved ensemble: its parts, and how to use it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCard, ModelCardData
from huggingface_hub.repocard import metadata_load

from ..config import is_local
from .planning import SavePlan

_TEMPLATE = Path(__file__).with_suffix(".md")


def model_card(plan: SavePlan, source: str, tags: Sequence[str], api: HfApi | None) -> str:
    """Write the README.

    Args:
        plan: What is saved.
        source: The argument for `from_pretrained`; its last part is the heading.
        tags: Tags for the metadata.
        api: The Hub, to look up licences; None for no look-up.
    """
    config, loaded = plan.config, plan.ensemble.config.members
    commits = [item.commit or item.revision for item in (loaded if plan.bundled else config.members)]
    licenses = [_license(item.path, commit, api) for item, commit in zip(loaded, commits, strict=True)]
    is_one = len(set(licenses)) == 1 and licenses[0] not in (None, "other")
    ids = [path for item in loaded for path in (item.path, item.adapter) if path and not is_local(path)]
    metadata = ModelCardData(
        library_name="hf_ensemble",
        pipeline_tag="text-generation",
        base_model=list(dict.fromkeys(ids)) or None,
        license=licenses[0] if is_one else "other",
        license_name=None if is_one else "licences-of-the-members",
        tags=list(dict.fromkeys(["ensemble", "hf_ensemble", config.method.name, *tags])),
    )
    weights = config.weights or [1 / len(loaded)] * len(loaded)
    options = {key: value for key, value in config.method.to_dict().items() if key != "name"}
    card = ModelCard.from_template(
        metadata,
        str(_TEMPLATE),
        title=source.rsplit("/", 1)[-1],
        source=json.dumps(source),
        rows=list(zip(plan.ensemble.member_views, loaded, commits, licenses, weights, strict=True)),
        is_included=bool(plan.bundled),
        is_remote=any(item.is_elsewhere for item in loaded),
        key_name=next((item.api_key_env for item in loaded if item.api_key_env is not None), None),
        origin=_origin,
        plain=_plain,
        method=config.method.name,
        options=json.dumps(options) if options else None,
    )
    return f"{card}\n"


def _origin(path: str | None) -> str:
    return f"[{path}](https://huggingface.co/{path})" if path and not is_local(path) else "a local folder"


def _license(path: str | None, revision: str | None, api: HfApi | None) -> str | None:
    """A member's licence, from the metadata of its README; None if unknown."""
    if path is None:
        return None
    try:
        if is_local(path):
            metadata: Any = metadata_load(Path(path, "README.md")) or {}
        elif api is not None:
            metadata = api.model_info(path, revision=revision).card_data or {}
        else:
            return None
    except (OSError, ValueError):
        return None
    license = metadata.get("license")
    if license == "other":
        license = metadata.get("license_name")
    return license if isinstance(license, str) else None


def _plain(text: str) -> str:
    """A text that cannot end a heading or a cell."""
    return " ".join(text.split()).replace("|", "\\|")
