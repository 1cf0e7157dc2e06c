"""Caches that grow, where window layers drop what no window reaches, against states that keep nothing."""

import functools
import random

import pytest
import torch

from hf_ensemble.members import repacked_cache
from hf_ensemble.members.local import LocalMember
from hf_ensemble.members.state import MemberState, PlainContext
from tests import tiny

WINDOW, MARGIN = 8, 3

each_member = pytest.mark.parametrize(
    "member", [(name, attention) for name in ("gemma3", "mistral") for attention in ("sdpa", "eager")], indirect=True
)


@functools.cache
def member_of(name, attention):
    """Gemma-3 has a window layer before a full one; all of Mistral's have windows."""
    tokenizer = tiny.byte_level_bpe(300)
    model = getattr(tiny, f"tiny_{name}")(tokenizer, seed=7, window=WINDOW, attn_implementation=attention)
    assert model.config._attn_implementation == attention
    return LocalMember(model, tokenizer)


@pytest.fixture
def member(request, monkeypatch):
    monkeypatch.setattr(repacked_cache, "_MARGIN", MARGIN)
    monkeypatch.setattr(repacked_cache, "_ROOM", 4)
    return member_of(*getattr(request, "param", ("gemma3", "sdpa")))


def started(member, *rows):
    return MemberState(member, [PlainContext(list(row)) for row in rows], "repack")


def write_on(state, *ids):
    """Let every row go on with these ids."""
    for context in state.contexts:
        context.ids = [*context.ids, *ids]


def grown(member, *rows):
    """A state that has read these rows, and one id more in a step of its own."""
    state = started(member, *rows)
    state.logits()
    write_on(state, 50)
    state.logits()
    return state


def draw(source, count):
    return [source.randrange(10, 250) for _ in range(count)]


def assert_up_to_date(state, num_last=1):
    """The logits of every row are those of a state without a cache."""
    with torch.no_grad():
        found = state.logits(num_last)
        contexts = [PlainContext(list(context.ids)) for context in state.contexts]
        expected = MemberState(state.member, contexts, "recompute").logits(num_last)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def window_layers(state):
    return [layer for layer in state.caches.cache.layers if layer.is_sliding]


def widths_of(state):
    """How many positions each window layer holds."""
    return [layer.keys.shape[-2] for layer in window_layers(state)]


def ids_run(state):
    """How many ids of each row the model is given to bring the state up to date."""
    widths = []
    handle = state.member.model.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        with torch.no_grad():
            state.logits()
    finally:
        handle.remove()
    return widths


@pytest.mark.crossed
@each_member
@pytest.mark.parametrize("lengths", [(30,), (30, 5, 17)], ids=str)
def test_window_layers_hold_the_window_and_a_margin(member, lengths):
    source = random.Random(0)
    state = started(member, *(draw(source, length) for length in lengths))
    assert_up_to_date(state)
    for _ in range(20):
        for context in state.contexts:
            context.ids = [*context.ids, *draw(source, 1)]
        assert_up_to_date(state)
        (width,) = set(widths_of(state))
        assert WINDOW + MARGIN < width <= WINDOW + 2 * MARGIN
        assert state.caches.cache.get_seq_length() == max(len(context.ids) for context in state.contexts)


def test_few_steps_drop(member):
    state = started(member, range(10, 40))
    state.logits()
    dropped = []
    for last in range(50, 50 + 4 * MARGIN):
        state.contexts[0].ids = [*state.contexts[0].ids, last]
        state.logits()
        dropped.append(window_layers(state)[0].num_dropped)
    assert len(set(dropped)) <= 5


@each_member
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_rows_that_grow_roll_back_move_fork_and_come_back_are_always_up_to_date(member, seed):
    """At random, from short to well past the window and the margin."""
    source = random.Random(seed)

    def grow(contexts, at_most):
        for context in contexts:
            ids = list(context.ids)
            if source.random() < 0.4:
                del ids[max(3, len(ids) - source.choice([1, 2, 4, 6, 20])) :]
            context.ids = ids + draw(source, source.randint(0, at_most))

    state = started(member, *(draw(source, source.randint(3, 30)) for _ in range(3)))
    assert_up_to_date(state)
    for _ in range(14):
        act = source.choice(["grow", "step", "step", "select", "fork", "wait"])
        if act == "grow":
            grow(state.contexts, 12)
        elif act == "step":
            for context in state.contexts:
                context.ids = [*context.ids, *draw(source, 1)]
        elif act == "select":
            rows = [source.randrange(len(state.contexts)) for _ in range(source.randint(2, 4))]
            state.select(rows, [PlainContext(list(state.contexts[r].ids)) for r in rows])
            grow(state.contexts, 2)
        elif act == "fork":
            forked = [source.randrange(len(state.contexts)) for _ in range(3)]
            fork = state.fork(forked, [PlainContext(list(state.contexts[r].ids)) for r in forked])
            grow(fork.contexts, 5)
            assert_up_to_date(fork)
            grow(state.contexts, 3)
            assert_up_to_date(state)
            assert_up_to_date(fork)
            state.adopt(fork, [source.randrange(3), *(source.choice([None, 0, 1, 2]) for _ in state.contexts[1:])])
            state.contexts = [PlainContext(list(c.ids)) for c in state.contexts]
            grow(state.contexts, 1)
        else:
            for context in state.contexts:
                context.ids = [*context.ids, *draw(source, source.randint(1, 9))]
            with torch.no_grad():
                state.logits(rows=[0])
        assert_up_to_date(state, source.choice([1, 1, 1, 3]))


@each_member
def test_a_short_roll_back_runs_only_what_is_new(member):
    state = grown(member, range(10, 40), range(20, 35))
    for context, count in zip(state.contexts, (MARGIN, 1), strict=True):
        context.ids = [*context.ids[:-count], *range(60, 60 + count)]
    assert ids_run(state) == [MARGIN]
    assert_up_to_date(state)


@each_member
def test_what_the_last_forward_added_can_be_rolled_back(member):
    """As branches of a text do that was read at once."""
    state = started(member, range(10, 30), range(20, 50))
    state.logits()
    write_on(state, *range(60, 75))
    state.logits()
    fork = state.fork([1, 0], [PlainContext([*range(20, 50), 60, 90]), PlainContext([*range(10, 30), 91])])
    assert ids_run(fork) == [1]
    assert_up_to_date(fork)
    assert_up_to_date(state)


@each_member
@pytest.mark.parametrize("with_others", [True, False])
def test_rows_that_need_what_was_dropped_are_computed_from_their_beginning(member, with_others):
    rows = [range(10, 50), range(20, 45)][: 1 + with_others]
    state = grown(member, *rows)
    state.contexts[0].ids = list(range(10, 35))
    assert ids_run(state) == [26 if with_others else 25]
    assert_up_to_date(state)
    write_on(state, 51)
    assert ids_run(state) == [1]
    assert_up_to_date(state)


def test_logits_of_more_last_ids_than_are_held_are_computed_from_the_beginning(member):
    state = started(member, range(10, 50), range(20, 45))
    state.logits()
    state.contexts[0].ids = [*state.contexts[0].ids, *range(50, 55)]
    state.logits()
    state.contexts[1].ids = [*state.contexts[1].ids, *range(50, 55)]
    assert_up_to_date(state, num_last=25)


@each_member
def test_others_do_not_begin_anew_when_a_row_catches_up(member):
    """It takes its new ids in pieces, so that no other rolls back beyond the margin."""
    state = started(member, range(10, 50), range(20, 45))
    state.logits()
    for last in range(50, 60):
        write_on(state, last)
        state.logits(rows=[0])
    assert ids_run(state) == [MARGIN, MARGIN, 4]
    assert_up_to_date(state)


@each_member
def test_a_row_that_is_replaced_needs_nothing_that_was_dropped(member):
    state = grown(member, range(10, 50), range(20, 45))
    state.contexts[1].ids = [70, 71]
    assert ids_run(state) == [2]
    assert_up_to_date(state)


def test_models_without_windows_keep_every_position(member):
    tokenizer = tiny.byte_level_bpe(300)
    state = started(LocalMember(tiny.tiny_llama(tokenizer), tokenizer), range(10, 40))
    for last in range(50, 60):
        state.contexts[0].ids = [*state.contexts[0].ids, last]
        state.logits()
    assert {layer.keys.shape[-2] for layer in state.caches.cache.layers} == {40}
