"""The check of a whole ensemble."""

from typing import Any

import torch

from ..members.local import LocalMember
from ..members.member import Member
from .findings import CheckReport, Finding, MemberReport
from .models import cache_bytes, check_model, check_together, weight_bytes
from .templates import check_template, read_by_template
from .tokenizers import check_tokenizer


@torch.no_grad()
def check_members(ensemble: Any) -> CheckReport:
    """Check every member of an ensemble, each once.

    Args:
        ensemble: An `EnsembleForCausalLM`.
    """
    members = list(ensemble.member_views)
    findings: list[Finding] = []
    for member in dict.fromkeys(members):
        for check in (check_tokenizer, check_template, check_model):
            findings += check(member)
    findings += check_together(members)
    return CheckReport(tuple(findings), tuple(map(_report_of, members)))


def _report_of(member: Member) -> MemberReport:
    steps = "elsewhere"
    if isinstance(member, LocalMember):
        steps = "CUDA graphs" if member.is_captured else f"cache mode {member.cache_mode!r}"
    dtype = str(member.dtype).removeprefix("torch.")
    return MemberReport(
        name=member.name,
        runs=f"{dtype} on {member.device}",
        steps=steps,
        weight_bytes=weight_bytes(member),
        cache_bytes=cache_bytes(member, 1000),
        reads=read_by_template(member),
    )
