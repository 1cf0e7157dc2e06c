"""What all prompts of a batch begin with, such as a system prompt, is read once."""

import pytest
import torch

from hf_ensemble.members import state as state_module
from hf_ensemble.members.local import LocalMember
from hf_ensemble.members.state import MemberState, PlainContext
from tests import contracts, tiny

SYSTEM = [20 + n * 7 % 60 for n in range(70)]
ROWS = [[*SYSTEM, 5, 6], [*SYSTEM, 9], [*SYSTEM, 5, 7, 8, 11], [*SYSTEM, 30]]
CASES = {
    "repack": (tiny.tiny_llama, "repack"),
    "static": (tiny.tiny_llama, "static"),
    "recompute": (tiny.tiny_llama, "recompute"),
    "windows": (tiny.tiny_gemma3, None),
    "recurrent": (tiny.tiny_mamba2, None),
    "token by token": (tiny.tiny_mamba, None),
}
"""A model, and its cache mode; None for the one that its member finds."""


@pytest.fixture(autouse=True)
def saves_a_few(monkeypatch):
    monkeypatch.setattr(state_module, "_LEAST_SAVED", 100)


def member_of(make=tiny.tiny_llama):
    return LocalMember(make(contracts.small(), seed=2), contracts.small())


def state_of(member, rows, mode="repack"):
    return MemberState(member, [PlainContext(list(ids)) for ids in rows], mode)


def counting(member):
    """The shapes of the ids that a member reads from now on."""
    shapes = []
    member.model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    return shapes


@pytest.mark.parametrize("num_last", [1, [2, 1, 3, 1]], ids=str)
@pytest.mark.parametrize(("make", "mode"), CASES.values(), ids=CASES)
def test_logits_are_those_of_every_row_alone_then_and_later(make, mode, num_last):
    member = member_of(make)
    state = state_of(member, ROWS, mode)
    with torch.no_grad():
        for _ in range(3):
            found = state.logits(num_last)
            found = found if found.ndim == 3 else found[:, None]
            for n, (row, context) in enumerate(zip(found, state.contexts, strict=True)):
                count = num_last if isinstance(num_last, int) else num_last[n]
                expected = member.model(torch.tensor([context.ids]), use_cache=False).logits[0, -count:]
                torch.testing.assert_close(row[-count:], expected, atol=2e-4, rtol=1e-3)
            state.select([1, 1, 2, 0])
            state.contexts = [PlainContext([*context.ids, 40 + n, 50]) for n, context in enumerate(state.contexts)]
            num_last = num_last if isinstance(num_last, int) else 1


def test_the_beginning_is_read_once_by_one_row():
    member = member_of()
    shapes = counting(member)
    state = state_of(member, ROWS)
    with torch.no_grad():
        state.logits()
    assert shapes == [(1, len(SYSTEM)), (4, 4)]
    assert state.num_forwards == 2


@pytest.mark.parametrize(
    "rows",
    [ROWS[:1], [ids[40:] for ids in ROWS], [[5, *ids] for ids in ROWS[:2]], [[n, *ids] for n, ids in enumerate(ROWS)]],
    ids=["one row", "short", "two rows", "nothing in common"],
)
def test_what_saves_little_is_read_with_the_rest(rows):
    member = member_of()
    shapes = counting(member)
    with torch.no_grad():
        state_of(member, rows).logits()
    assert len(shapes) == 1


def test_rows_that_would_read_what_follows_token_by_token_read_it_all_at_once():
    member = member_of(tiny.tiny_mamba)
    shapes = counting(member)
    state = state_of(member, ROWS, "row_tokens")
    with torch.no_grad():
        state.logits()
    assert len(shapes) == state.num_forwards == 2 * len(ROWS)


def test_slots_are_reserved_once_for_all_rows_and_ids():
    """Not for one row, then for all, then for longer ones."""
    member = member_of()
    rows = [*ROWS[:3], [*SYSTEM, *range(100, 200)]]
    state = state_of(member, rows, "static")
    made = []
    acquire = member.buffer_pool.acquire
    member.buffer_pool.acquire = lambda *args: made.append(acquire(*args)) or made[-1]
    with torch.no_grad():
        state.logits()
    assert [(buffers.num_rows, buffers.capacity > len(rows[-1])) for buffers in made] == [(4, True)]


def test_a_row_that_is_the_beginning_of_the_others_still_has_logits():
    member = member_of()
    rows = [SYSTEM, *ROWS]
    with torch.no_grad():
        found = state_of(member, rows).logits()
        for row, ids in zip(found, rows, strict=True):
            expected = member.model(torch.tensor([ids]), use_cache=False).logits[0, -1]
            torch.testing.assert_close(row, expected, atol=2e-4, rtol=1e-3)


def test_texts_of_a_batch_with_one_system_prompt_are_those_of_each_prompt_alone():
    tokenizers = [tiny.smol_like(), tiny.gemma_like()]
    models = [tiny.tiny_llama(tokenizers[0], seed=1), tiny.tiny_gemma3(tokenizers[1], seed=2)]
    ensemble = contracts.make_ensemble(models, tokenizers)
    shapes = counting(ensemble._members[1])
    system = "You are a helpful assistant who answers briefly, and never says more than what was asked. " * 2
    prompts = [system + question for question in ("What is 1 + 1?", "Who are you", "The capital of France is")]

    def new_ids(texts):
        inputs = dict(ensemble.tokenizer(texts, return_tensors="pt", padding=True))
        found = contracts.run(ensemble, inputs, method="unite", max_new_tokens=6, eos_token_id=[])
        return found.sequences[:, -6:].tolist()

    found = new_ids(prompts)
    rows, width = shapes[0]
    assert rows == 1
    assert width > 40
    assert found == [row for prompt in prompts for row in new_ids([prompt])]
