"""The README of a saved ensemble: what it is made of, and how it is used."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCardData
from huggingface_hub.repocard import metadata_load

from .planning import SavePlan
from .references import is_local

_CARD = """---
{metadata}
---

# {title}

{count} language models that decode together as one model, made with `hf_ensemble`.

```bash
pip install hf_ensemble
```

```python
from hf_ensemble import EnsembleForCausalLM

ensemble = EnsembleForCausalLM.from_pretrained({source})
inputs = ensemble.tokenizer("The capital of France is", return_tensors="pt")
ids = ensemble.generate(**inputs, max_new_tokens=32)
print(ensemble.tokenizer.decode(ids[0], skip_special_tokens=True))
```

After `import hf_ensemble`, `AutoModelForCausalLM`, `AutoTokenizer` and `pipeline` of `transformers` load it too. No remote code is needed.

## Members

The first is the primary: its tokenizer reads and writes the ids.

| member | from | revision | licence | parameters | weight |
|---|---|---|---|---|---|
{rows}

## Method

`{method}`{options}
"""


@dataclass(frozen=True)
class _CardMember:
    """What a card says about one member."""

    name: str
    hub_id: str | None
    """Where it comes from on the Hub; None: not from there."""

    adapter_id: str | None
    """Where its adapter comes from on the Hub; None: it has none, or not from there."""

    revision: str | None
    license: str | None
    num_parameters: int
    is_bundled: bool


def model_card(plan: SavePlan, title: str, source: str, tags: Sequence[str], api: HfApi | None) -> str:
    """Write the README.

    Args:
        plan: What is saved.
        title: Its heading.
        source: What `from_pretrained` is to be given.
        tags: Tags for the metadata.
        api: The Hub, asked for licences; None: nothing is asked.
    """
    config, members = plan.config, _members_of(plan, api)
    licenses = {member.license for member in members}
    is_one = len(licenses) == 1 and not licenses & {None, "other"}
    metadata = ModelCardData(
        library_name="hf_ensemble",
        pipeline_tag="text-generation",
        base_model=list(dict.fromkeys(i for member in members for i in (member.hub_id, member.adapter_id) if i))
        or None,
        license=licenses.pop() if is_one else "other",
        license_name=None if is_one else "licences-of-the-members",
        tags=list(dict.fromkeys(["ensemble", "hf_ensemble", config.method.name, *tags])),
    )
    weights = config.weights or [1 / len(members)] * len(members)
    options = {key: value for key, value in config.method.to_dict().items() if key != "name"}
    return _CARD.format(
        metadata=metadata.to_yaml(),
        title=_plain(title),
        count=len(members),
        source=json.dumps(source),
        rows="\n".join(_row(member, weight) for member, weight in zip(members, weights, strict=True)),
        method=config.method.name,
        options=f" with `{json.dumps(options)}`" if options else "",
    )


def _members_of(plan: SavePlan, api: HfApi | None) -> list[_CardMember]:
    found = []
    for item, given, member in zip(plan.config.members, plan.parts.config.members, plan.parts.members, strict=True):
        revision = given.commit or given.revision if plan.bundled else item.revision
        found.append(
            _CardMember(
                name=member.name,
                hub_id=_hub_id(given.path),
                adapter_id=_hub_id(given.adapter),
                revision=revision,
                license=_license(given.path, revision, api),
                num_parameters=member.model.num_parameters(),
                is_bundled=bool(plan.bundled),
            )
        )
    return found


def _hub_id(path: str | None) -> str | None:
    return path if path and not is_local(path) else None


def _license(path: str | None, revision: str | None, api: HfApi | None) -> str | None:
    """A member's licence, by the metadata of its README; None if that cannot be told."""
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


def _row(member: _CardMember, weight: float) -> str:
    origin = _link(member.hub_id) if member.hub_id else "a local folder"
    origin += f" with adapter {_link(member.adapter_id)}" if member.adapter_id else ""
    cells = [
        _plain(member.name),
        origin + (", included here" if member.is_bundled else ""),
        f"`{member.revision}`" if member.revision else "",
        member.license or "not known",
        f"{member.num_parameters:,}",
        f"{weight:.4g}",
    ]
    return f"| {' | '.join(cells)} |"


def _link(hub_id: str) -> str:
    return f"[{hub_id}](https://huggingface.co/{hub_id})"


def _plain(text: str) -> str:
    """A text that ends no heading or cell."""
    return " ".join(text.split()).replace("|", "\\|")
