"""What members, ids and prompts are called, and what ids write, where decisions are shown."""

from collections.abc import Sequence
from itertools import compress
from typing import TypeAlias

import torch
from torch import Tensor

from ..members.member import Member
from .decision import texts_of_pieces

Piece: TypeAlias = tuple[tuple[int, ...], bytes, str, str]
"""What one decision writes: the first fields of `Decision`, ids, data, text and control."""


def name_of(member: Member, i: int) -> str:
    """Say what one of a member's ids writes, or its token's name."""
    entry = member.encoder.token_bytes.entry(i)
    if entry:
        return entry.decode("utf-8", "replace")
    return str(member.tokenizer.convert_ids_to_tokens(i) or f"id {i}")


def pieces_of(primary: Member, ids_of_decisions: Sequence[Sequence[int]]) -> list[Piece]:
    """Say what the primary's ids of each decision of a row write."""
    written = [primary.encoder.token_bytes.write(ids) for ids in ids_of_decisions]
    return [
        (tuple(ids), data, text, "".join(name_of(primary, i) for i in ids if primary.is_control(i)))
        for ids, data, text in zip(ids_of_decisions, written, texts_of_pieces(written), strict=True)
    ]


def names_of(members: Sequence[Member]) -> tuple[str, ...]:
    """Give the members' names; equal ones are numbered."""
    names = [member.name for member in members]
    numbers = [names[: n + 1].count(name) for n, name in enumerate(names)]
    return tuple(f"{name} ({n})" if names.count(name) > 1 else name for name, n in zip(names, numbers, strict=True))


def prompts_of(primary: Member, ids: Tensor, mask: Tensor | None) -> tuple[str, ...]:
    """Give each row's prompt as text, control tokens by name; see `DecisionRecorder` for the arguments."""
    keep = torch.ones_like(ids) if mask is None else mask[:, : ids.shape[1]]
    keep = keep.repeat_interleave(len(ids) // len(keep), dim=0)
    rows = [list(compress(row, kept)) for row, kept in zip(ids.tolist(), keep.tolist(), strict=True)]
    decoded: list[str] = primary.tokenizer.batch_decode(rows, skip_special_tokens=False)
    return tuple(decoded)
