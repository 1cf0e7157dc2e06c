"""Checks of a member's model: whether it computes correctly, how much it reads, and how fast it can follow a text."""

from collections.abc import Iterator, Sequence

from ..errors import EnsembleError
from ..members.cached_rows import CAPTURED_MODES
from ..members.local import LocalMember
from ..members.member import Member, RowPrompt
from ..members.member_model import tensors_of
from ..members.state import MemberState, PlainContext
from ..offers import Offer
from .findings import Finding

_TEXT = "The committee met on Monday and agreed that the old bridge should be mended before the winter. "
_LONG = 1024
"""Number of ids of the test text."""

_FAST = (*CAPTURED_MODES, "repack", "aligned")
"""Cache modes in which all rows run together."""


def check_model(member: Member) -> Iterator[Finding]:
    """Check a member's model, which runs once on a long text."""
    name, model = member.name, member.model
    if model is not None and model.training:
        yield Finding(
            name,
            "training mode",
            "its model is in training mode",
            "Dropout, if it has any, changes its logits at every step.",
            "Call the model's `eval()`.",
        )
    if Offer.ROWS not in member.offers:
        return  # a server was checked when the ensemble was created
    context = member.read(RowPrompt(_TEXT.encode()), "append")
    context.write(_TEXT.encode() * 99)
    ids = context.ids[: int(min(member.max_length, _LONG))]
    reason = ""
    try:
        logits = MemberState(member, [PlainContext(ids)]).logits().float()
        if not bool(logits.logsumexp(-1).isfinite().all()):
            reason = f"returns NaN or infinite logits (its dtype is {member.dtype})"
    except EnsembleError as error:
        reason = f"fails: {error}"
    if reason:
        yield Finding(
            name,
            "long text",
            f"after {len(ids)} tokens it {reason}",
            "The ensemble raises an error as soon as this happens.",
            "Load it in bfloat16 or float32. If that fails too, its weights are damaged.",
        )
    elif isinstance(member, LocalMember):
        yield from _check_steps(member)


def _check_steps(member: LocalMember) -> Iterator[Finding]:
    best, mode = member.modes_of_device[0], member.cache_mode
    if mode == best:
        return
    reasons = "; ".join(f"{name}: {reason}" for name, reason in member.cache_obstacles.items())
    slow = "All rows run together, but its steps take longer than they could."
    yield Finding(
        member.name,
        "steps",
        f"its cache mode is {mode!r}, not {best!r} ({reasons or 'set by hand'})",
        slow if mode in _FAST else "Rows run one after the other, or are read again at every step.",
        "The texts are right. For speed, load it with another `attn_implementation` or `dtype`, or choose a model of "
        "a common architecture.",
    )


def check_together(members: Sequence[Member]) -> Iterator[Finding]:
    """Compare the members with each other."""
    lengths = [member.context_length for member in members]
    for member in members:
        others = [length for length, other in zip(lengths, members, strict=True) if other is not member and length]
        if member.max_positions is not None and others and member.max_positions < min(others):
            yield Finding(
                member.name,
                "positions",
                f"it has learned positions for {member.max_positions} tokens, the others read {min(others)} or more",
                "A row ends, with a warning, when this member has no position left.",
                "Keep prompt and answer shorter, or leave this member out (weight 0) for longer texts.",
            )
    for n, member in enumerate(members):
        same = next((other for other in members[:n] if other is member or _are_equal(other, member)), None)
        if same is not None:
            yield Finding(
                member.name,
                "equal members",
                f"it is the same model with the same tokenizer as member {same.name!r}",
                "Running it twice costs time and only doubles its weight.",
                "List it once, with a greater weight.",
            )


def weight_bytes(member: Member) -> int | None:
    """Bytes of a member's weights in this process; None if they are elsewhere."""
    if member.model is None:
        return None
    return sum(tensor.nbytes for tensor in tensors_of([member.model]))


def cache_bytes(member: Member, num_tokens: int) -> int | None:
    """Largest number of bytes of a row's keys and values; None if the configuration does not say."""
    config = member.config.get_text_config(decoder=True)
    heads = getattr(config, "num_attention_heads", None)
    layers, hidden = getattr(config, "num_hidden_layers", None), getattr(config, "hidden_size", None)
    if not (heads and layers and hidden):
        return None
    width = getattr(config, "head_dim", None) or getattr(config, "d_kv", None) or hidden // heads
    kept = getattr(config, "num_key_value_heads", None) or heads
    num_values = int(2 * layers * kept * width * num_tokens)
    return num_values * member.dtype.itemsize


def _are_equal(one: Member, other: Member) -> bool:
    if one.model is None or other.model is None or one.num_parameters != other.num_parameters:
        return False
    return bool(one.description() == other.description())
