"""Names of members, ids and prompts, and texts of ids, for showing decisions."""

from collections.abc import Sequence
from itertools import compress
from typing import TypeAlias

import torch
from torch import Tensor

from ..members.member import Member
from .decision import texts_of_pieces

Piece: TypeAlias = tuple[tuple[int, ...], bytes, str, str]
"""The first fields of a `Decision`: ids, data, text and control."""


def name_of(member: Member, i: int) -> str:
    """Return the text of one of a member's ids, or its token's name."""
    entry = member.encoder.token_bytes.entry(i)
    if entry:
        return entry.decode("utf-8", "replace")
    return str(member.tokenizer.convert_ids_to_tokens(i) or f"id {i}")


def pieces_of(primary: Member, ids_of_decisions: Sequence[Sequence[int]]) -> list[Piece]:
    """Return the text of the primary's ids for each decision of a row."""
    written = [primary.encoder.token_bytes.write(ids) for ids in ids_of_decisions]
    return [
        (tuple(ids), data, text, "".join(name_of(primary, i) for i in ids if primary.is_control(i)))
        for ids, data, text in zip(ids_of_decisions, written, texts_of_pieces(written), strict=True)
    ]


def names_of(members: Sequence[Member]) -> tuple[str, ...]:
    """Return the members' names; equal names are numbered."""
    names = [member.name for member in members]
    numbers = [names[: n + 1].count(name) for n, name in enumerate(names)]
    return tuple(f"{name} ({n})" if names.count(name) > 1 else name for name, n in zip(names, numbers, strict=True))


def prompts_of(primary: Member, ids: Tensor, mask: Tensor | None) -> tuple[str, ...]:
    """Return each row's prompt as text, control tokens by name; see `DecisionRecorder` for the arguments."""
    keep = torch.ones_like(ids) if mask is None else mask[:, : ids.shape[1]]
    keep = keep.repeat_interleave(len(ids) // len(keep), dim=0)
    rows = [list(compress(row, kept)) for row, kept in zip(ids.tolist(), keep.tolist(), strict=True)]
    decoded: list[str] = primary.tokenizer.batch_decode(rows, skip_special_tokens=False)
    return tuple(decoded)
