"""The README of a saved ensemble: what it is made of, and how it is used."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from huggingface_hub import ModelCardData

from ..config import EnsembleConfig

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
class CardMember:
    """What a card says about one member."""

    name: str
    hub_id: str | None
    """Where it comes from on the Hub; None: not from there."""

    revision: str | None
    license: str | None
    num_parameters: int
    is_bundled: bool


def model_card(
    title: str, source: str, config: EnsembleConfig, members: Sequence[CardMember], tags: Sequence[str] = ()
) -> str:
    """Write the README.

    Args:
        title: Its heading.
        source: What `from_pretrained` is to be given.
        config: The ensemble's configuration.
        members: What is known of each member, the primary first.
        tags: More tags for the metadata.
    """
    licenses = {member.license for member in members}
    is_one = len(licenses) == 1 and not licenses & {None, "other"}
    metadata = ModelCardData(
        library_name="hf_ensemble",
        pipeline_tag="text-generation",
        base_model=list(dict.fromkeys(member.hub_id for member in members if member.hub_id)) or None,
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


def _row(member: CardMember, weight: float) -> str:
    origin = f"[{member.hub_id}](https://huggingface.co/{member.hub_id})" if member.hub_id else "a local folder"
    cells = [
        _plain(member.name),
        origin + (", included here" if member.is_bundled else ""),
        f"`{member.revision}`" if member.revision else "",
        member.license or "not known",
        f"{member.num_parameters:,}",
        f"{weight:.4g}",
    ]
    return f"| {' | '.join(cells)} |"


def _plain(text: str) -> str:
    """A text that ends no heading or cell."""
    return " ".join(text.split()).replace("|", "\\|")
