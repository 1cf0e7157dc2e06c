"""How a notebook displays an ensemble."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from .checking.models import weight_bytes
from .config import normalize_weights
from .members.member import Member
from .pages import tables_in_notebook
from .tables import shown_size, spelled_value


def ensemble_in_notebook(ensemble: Any) -> str:
    """Return HTML for a notebook: the members with their weights, and the method with its options.

    Args:
        ensemble: An `EnsembleForCausalLM`.
    """
    members, config = ensemble.member_views, ensemble.config
    weights = normalize_weights(config.weights, len(members), config.method.takes_weights_as_given)
    rows = [["member", "role", "weight", "kind", "dtype", "device", "parameters", "weights in memory"]]
    for number, (member, weight) in enumerate(zip(members, weights, strict=True)):
        role = "assistant" if number else "primary"
        rows.append([member.name, role, f"{weight:.3g}", *_cells(member)])
    options = [["option", f"value for method {config.method.name!r}"]]
    for option in dataclasses.fields(config.method):
        options.append([option.name, spelled_value(getattr(config.method, option.name))])
    title = f"Ensemble of {len(members)} {'member' if len(members) == 1 else 'members'}"
    remarks = () if len(options) > 1 else (f"Method {config.method.name!r}, which has no options.",)
    return tables_in_notebook(title, [rows, options] if len(options) > 1 else [rows], remarks)


def _cells(member: Member) -> Iterator[str]:
    """Return a member's kind and size."""
    yield member.kind
    yield str(member.dtype).removeprefix("torch.")
    yield str(member.device)
    yield f"{member.num_parameters:,}" if member.num_parameters else "not known"
    size = weight_bytes(member)
    yield "elsewhere" if size is None else shown_size(size)
