"""Members that send few entries in place of whole rows, as those elsewhere do, made of models of this process."""

import torch

from hf_ensemble import EnsembleConfig, EnsembleForCausalLM, MemberConfig
from hf_ensemble.members.cached_rows import CachedRows
from hf_ensemble.members.entries import Entries
from hf_ensemble.members.local import LocalMember
from hf_ensemble.offers import ALL_OFFERS
from hf_ensemble.vocabulary.token_bytes import CONTROL, TEXT


class FarMember(LocalMember):
    """A member whose model the stock loop cannot run, and whose whole rows travel only where they must."""

    kind = "a member far away"
    offers = ALL_OFFERS
    runs_in_loop = False
    knows_normalizer = True
    is_primary = False

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.num_ids_sent = []
        self.num_requests = []

    def sends_entries(self, needs_whole_rows):
        return not needs_whole_rows

    def new_rows(self, num_rows, num_expected=0, mode=None):
        return FarRows(self, super().new_rows(num_rows, num_expected, mode))

    @property
    def groups(self):
        """The ids of every entry that takes part, of which EOS is one."""
        found = {}
        for i, entry in enumerate(self.encoder.token_bytes.entries):
            kind = self.encoder.token_bytes.kinds[i]
            if kind == TEXT:
                found.setdefault(entry, []).append(i)
            elif kind == CONTROL and i in self.eos_token_ids:
                found.setdefault("end", []).append(i)
            elif kind == CONTROL and self.is_primary:
                found[i] = [i]
        return found


class FarRows(CachedRows):
    """Rows of a far member: they pass on what is asked of them, and keep count of what travels."""

    mode = "far"
    run_beside = True

    def __init__(self, member, inner):
        super().__init__(len(inner.cached))
        self.member, self.inner, self.can_be_cut = member, inner, inner.can_be_cut
        self.cached = inner.cached

    def forward(self, texts, num_last):
        logits = self.inner.forward(texts, num_last)
        self.num_forwards = self.inner.num_forwards
        return logits

    def collect(self, logits):
        return self.inner.collect(logits)

    def hold(self):
        self.inner.hold()

    def select(self, rows):
        self.inner.select(rows)
        self.cached = self.inner.cached

    def fork(self, rows):
        return FarRows(self.member, self.inner.fork(rows))

    def adopt(self, fork, rows):
        self.inner.adopt(fork.inner, rows)

    def start_entries(self, texts, rows, count, entry_ids):
        held = self.inner.cached
        logits = self.inner.forward(
            [text if row in rows or not held[row] else list(held[row]) for row, text in enumerate(texts)],
            [int(row in rows or not held[row]) for row in range(len(texts))],
        )
        self.logits = self.inner.collect(logits)[list(rows), -1].float()
        self.count = count
        self.member.num_requests.append(1)

    def entries(self):
        groups = self.member.groups
        taking_part = sorted(i for ids in groups.values() for i in ids)
        rows = []
        for row in self.logits:
            best = sorted(groups.values(), key=lambda ids: -float(row[ids].logsumexp(-1)))[: self.count]
            rows.append(sorted({i for ids in best for i in ids} | set(groups.get("end", ()))))
        normalizers = self.logits[:, taking_part].logsumexp(-1)
        self.member.num_ids_sent.append(max(map(len, rows)))
        return Entries(*self._listed(rows), normalizers if self.member.knows_normalizer else None)

    def start_logits_of(self, ids):
        self.asked = ids
        self.member.num_requests[-1] += 1

    def logits_of(self):
        self.member.num_ids_sent.append(max(map(len, self.asked)))
        return Entries(*self._listed(self.asked))

    def _listed(self, rows):
        width = max(map(len, rows))
        ids = torch.tensor([[*row, *[-1] * (width - len(row))] for row in rows])
        return ids, torch.where(ids >= 0, self.logits.gather(1, ids.clamp_min(0)), -torch.inf)


def far_ensemble(models, tokenizers, far, **options):
    """An ensemble in which the members with these numbers are far away."""
    items = [MemberConfig(name=f"member {n}") for n in range(len(models))]
    config = EnsembleConfig(members=items, primary_config=models[0].config, **options)
    members = []
    for n, (model, tokenizer) in enumerate(zip(models, tokenizers, strict=True)):
        member = (FarMember if n in far else LocalMember)(model, tokenizer, name=f"member {n}")
        if n == 0 and isinstance(member, FarMember):
            member.is_primary = True
        members.append(member)
    return EnsembleForCausalLM(config, members)
