"""Rows of members that share their weights, in one forward pass, against what each member says by itself."""

import functools
import random

import pytest
import torch

from hf_ensemble.members import repacked_cache
from hf_ensemble.members.adapted import twin_of
from hf_ensemble.members.local import LocalMember
from hf_ensemble.members.member_model import MemberModel
from hf_ensemble.members.shared_weights import join_members
from hf_ensemble.members.state import MemberState, PlainContext
from tests import tiny

peft = pytest.importorskip("peft")

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

WINDOW, MARGIN = 8, 3

each_model = pytest.mark.parametrize("model", ["llama", "gemma3", "mistral"])


@functools.cache
def members_of(name):
    """Three adapters on one model, and the model itself. Two of the models have windows."""
    tokenizer = tiny.byte_level_bpe(300)
    options = {} if name == "llama" else {"window": WINDOW}
    base = getattr(tiny, f"tiny_{name}")(tokenizer, seed=7, **options).eval()
    models = [base]
    for number, target in enumerate((["q_proj", "v_proj"], ["o_proj"], ["k_proj", "down_proj", "up_proj"])):
        torch.manual_seed(number)
        config = peft.LoraConfig(r=2 + number, target_modules=target, lora_alpha=32, init_lora_weights=False)
        models.append(peft.inject_adapter_in_model(config, twin_of(base)).eval())
    members = [LocalMember(model, tokenizer, f"{name}-{number}") for number, model in enumerate(models)]
    join_members(members)
    assert len({id(member.shared) for member in members}) == 1
    return members


@pytest.fixture
def members(model, monkeypatch):
    monkeypatch.setattr(repacked_cache, "_MARGIN", MARGIN)
    monkeypatch.setattr(repacked_cache, "_ROOM", 4)
    return members_of(model)


def assert_right(states):
    """All are started before one is waited for; each says what it says without a cache, by itself."""
    for state in states:
        state.start()
    for state in states:
        found = state.logits()
        for row, context in enumerate(state.contexts):
            expected = alone(state.member, tuple(context.ids))
            torch.testing.assert_close(found[row], expected, atol=2e-4, rtol=1e-4)


@functools.cache
def alone(member, ids):
    ids = torch.tensor([ids])
    return member.forward(ids, torch.arange(ids.shape[1])[None], None, None, 1)[0, -1]


def draw(source, count):
    return [source.randrange(10, 250) for _ in range(count)]


@each_model
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 8))])
@torch.no_grad()
def test_rows_follow_whatever_texts_do(seed, members, monkeypatch):
    """At random: grow alike or not, roll back, move, end, branch off and come back, one or all; past the window."""
    source = random.Random(seed)
    names = []
    stock = MemberModel.forward
    monkeypatch.setattr(MemberModel, "forward", lambda self, *args: names.append(self.name) or stock(self, *args))
    lengths = [[source.randrange(1, 30) for _ in range(2)] for _ in members]
    states = [
        MemberState(member, [PlainContext(draw(source, length)) for length in of_member])
        for member, of_member in zip(members, lengths, strict=True)
    ]
    for _ in range(14):
        assert_right(states)
        what = source.choice(["grow", "grow", "grow", "unequal", "back", "move", "end", "fork", "one"])
        for state in states if what != "one" else states[:1]:
            rows = range(len(state.contexts))
            if what == "fork":
                place = source.choice(rows)
                forked = PlainContext([*state.contexts[place].ids, *draw(source, 2)])
                fork = state.fork([place], [forked])
                assert_right([fork])
                if source.random() < 0.5:
                    state.adopt(fork, [0 if row == place else None for row in rows])
            elif what in ("move", "end") and len(state.contexts) < 5:
                count = source.randrange(1, 4) if what == "move" else 1
                parents = [source.choice(rows) for _ in range(count)]
                state.select(parents, [PlainContext(list(state.contexts[row].ids)) for row in parents])
            for context in state.contexts:
                if what == "back":
                    del context.ids[max(1, len(context.ids) - source.randrange(5)) :]
                count = source.randrange(1, 12) if what == "unequal" else 1
                context.ids += draw(source, count)
    assert_right(states)
    together = [name for name in names if " + " in name]
    assert len(together) >= 10


@each_model
@torch.no_grad()
def test_who_is_asked_alone_runs_alone(members, monkeypatch):
    """And nobody else's rows are run for it."""
    states = [MemberState(member, [PlainContext([20, 30, 40])]) for member in members]
    assert_right(states)
    names = []
    stock = MemberModel.forward
    monkeypatch.setattr(MemberModel, "forward", lambda self, *args: names.append(self.name) or stock(self, *args))
    states[2].contexts[0].ids.append(50)
    states[2].logits()
    assert names == [members[2].name]


@each_model
@torch.no_grad()
def test_a_state_that_is_gone_is_not_run(members, monkeypatch):
    """What it asked for and never waited for goes with it."""
    gone = MemberState(members[0], [PlainContext([20, 30, 40])])
    gone.start()
    del gone
    names = []
    stock = MemberModel.forward
    monkeypatch.setattr(MemberModel, "forward", lambda self, *args: names.append(self.name) or stock(self, *args))
    MemberState(members[1], [PlainContext([20, 30])]).logits()
    assert names == [members[1].name]


@each_model
@torch.no_grad()
def test_many_new_ids_are_not_read_by_everybody(members, monkeypatch):
    """A row that has one new id does not read its last twenty again beside one that has twenty."""
    states = [MemberState(member, [PlainContext(list(range(20, 45)))]) for member in members]
    assert_right(states)
    widths = []
    stock = MemberModel.forward
    monkeypatch.setattr(
        MemberModel, "forward", lambda self, ids, *args: widths.append(tuple(ids.shape)) or stock(self, ids, *args)
    )
    for number, state in enumerate(states):
        state.contexts[0].ids += range(50, 70 if number == 0 else 51 + number)
    for state in states:
        state.start()
    states[0].logits()
    assert sorted(widths) == [(1, 20), (3, 4)]
