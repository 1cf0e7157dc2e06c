"""The result of a step for a member that does not send whole rows of logits: a few ids with their logits."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..mixing import Duplicates


@dataclass(frozen=True, eq=False)
class EntryIds:
    """Which ids of a member take part in a method, and which of them are the same entry.

    Attributes:
        mask: 0 for ids that take part and `-inf` for the others, of shape `(vocab_size,)`.
        duplicates: Ids that are the same entry, including EOS.
        eos_ids: Ids that end a text, of shape `(num_eos,)`.
    """

    mask: Tensor
    duplicates: Duplicates
    eos_ids: Tensor


@dataclass(frozen=True)
class Entries:
    """Some ids of every row with their logits, on the CPU.

    Ids of the same entry are all included, so that the entry's logit can be summed up.

    Attributes:
        ids: Of shape `(num_rows, num_ids)`; -1 for none.
        logits: In float32, of the same shape. Log-probabilities if a member gives no logits.
        normalizers: Logsumexp of all the member's logits, of shape `(num_rows,)`; NaN or infinite where these are.
            None if unknown.
        contenders: For each row, ids of further entries that may be among the best once all their ids are known.
    """

    ids: Tensor
    logits: Tensor
    normalizers: Tensor | None = None
    contenders: Sequence[Sequence[int]] = ()

    def beside(self, other: "Entries") -> "Entries":
        """Return these and others of the same rows."""
        ids, logits = torch.cat([self.ids, other.ids], dim=-1), torch.cat([self.logits, other.logits], dim=-1)
        return Entries(ids, logits, self.normalizers)

    def spread(self, width: int, device: torch.device | None = None) -> Tensor:
        """Return rows of logits, of shape `(num_rows, width)`: `-inf` for missing ids, and 0 in a row without any."""
        rows = torch.full((len(self.ids), width), -torch.inf, device=device)
        rows[(self.ids < 0).all(-1).nonzero()[:, 0].to(rows.device)] = 0.0
        # Positions are found on the CPU, because a GPU would have to be waited for.
        row, place = (self.ids >= 0).nonzero(as_tuple=True)
        at = row.to(rows.device), self.ids[row, place].to(rows.device)
        rows[at] = self.logits[row, place].to(rows.device)
        return rows


def padded_ids(rows: Sequence[Sequence[int]]) -> Tensor:
    """Ids of every row, of shape `(num_rows, longest)`; -1 for none."""
    width = max(map(len, rows), default=0)
    return torch.tensor([[*row, *[-1] * (width - len(row))] for row in rows], dtype=torch.long)
