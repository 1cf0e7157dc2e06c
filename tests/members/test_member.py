"""A member's state against fresh forwards over the whole context."""

import functools
import random
import warnings

import pytest
import torch

from hf_ensemble import ConfigurationError, EnsembleForCausalLM, MemberError
from hf_ensemble.members.local import LocalMember
from hf_ensemble.members.state import MemberState
from hf_ensemble.vocabulary.context import num_common
from tests import tiny
from tests.contracts import CACHE_MODES, METHODS, make_ensemble, padded

ARCHITECTURES = [model_type.removesuffix("_text") for model_type in CACHE_MODES if model_type != "scripted"]

STATIC = ["static llama", "static gpt2", "static gemma3", "static mistral"]
"""Architectures in the cache of fixed size that a GPU's captured steps have, here without a GPU."""

QUICK = ("llama", "gpt2", "gemma3", "mamba", "falcon_h1", "jamba", "static gpt2", "static gemma3")
"""With rotary and learned positions, with a window, recurrent, and two that are both."""

each_architecture = pytest.mark.parametrize(
    "architecture",
    [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in (*ARCHITECTURES, *STATIC)],
)
each_method = pytest.mark.parametrize("method", METHODS)


@functools.cache
def tokenizer():
    return tiny.byte_level_bpe(300)


@functools.cache
def model_of(architecture):
    return getattr(tiny, f"tiny_{architecture}")(tokenizer(), seed=7)


@functools.cache
def member_of(architecture):
    member = LocalMember(model_of(architecture.removeprefix("static ")), tokenizer(), name=architecture)
    if architecture in STATIC:
        member.cache_mode = "static"
    return member


class Row:
    """A context of ids."""

    def __init__(self, ids):
        self.ids = list(ids)

    def roll_back(self, length):
        del self.ids[length:]

    def copy(self):
        return Row(self.ids)


@functools.cache
def logits_along(model, ids):
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def fresh_logits(member, ids, num_last=1):
    return logits_along(member.model, tuple(ids))[-num_last:]


def assert_up_to_date(state, num_last=1):
    """The logits of every row are those of a fresh forward over it."""
    with torch.no_grad():
        found = state.logits(num_last)
    assert found.shape[0] == len(state.contexts)
    for row, context in enumerate(state.contexts):
        own = found[row] if num_last > 1 else found[row, None]
        torch.testing.assert_close(own, fresh_logits(state.member, context.ids, num_last), atol=2e-4, rtol=1e-3)
        assert state.num_cached(row, context) == len(context.ids)


def draw(source, count):
    return [source.randrange(10, 250) for _ in range(count)]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_cache_mode_is_the_one_that_works(architecture):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert member_of(architecture).cache_mode == CACHE_MODES[model_of(architecture).config.model_type]


@each_architecture
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_rows_that_grow_roll_back_move_and_end_are_always_up_to_date(architecture, seed):
    """At random, from short to well past the windows."""
    source = random.Random(seed)
    state = MemberState(member_of(architecture), [Row(draw(source, length)) for length in (3, 7, 5)])
    assert_up_to_date(state)
    for step in range(9):
        for context in state.contexts:
            if source.random() < 0.4:
                context.roll_back(source.randint(2, len(context.ids)))
            context.ids += draw(source, source.choice([0, 1, 1, 3]))
        if step in (3, 6):
            kept = [source.randrange(len(state.contexts)) for _ in range(3)]
            state.select(kept, [state.contexts[row].copy() for row in kept])
            state.contexts[-1].ids += draw(source, 1)
        if step == 7:
            state.select([2, 0], [state.contexts[2], state.contexts[0]])
        assert_up_to_date(state, num_last=source.choice([1, 1, 2]))


@each_architecture
def test_one_id_at_a_time_is_followed_past_every_window(architecture):
    source = random.Random(0)
    state = MemberState(member_of(architecture), [Row(draw(source, 2)), Row(draw(source, 6))])
    for _ in range(14):
        assert_up_to_date(state)
        for context in state.contexts:
            context.ids += draw(source, 1)


@each_architecture
def test_logits_of_several_last_ids_are_those_of_fresh_forwards(architecture):
    source = random.Random(0)
    state = MemberState(member_of(architecture), [Row(draw(source, 9)), Row(draw(source, 12))])
    assert_up_to_date(state, num_last=4)
    state.contexts[0].ids += draw(source, 2)
    assert_up_to_date(state, num_last=3)
    assert_up_to_date(state, num_last=5)
    state.contexts[1].roll_back(6)
    assert_up_to_date(state, num_last=6)


@each_architecture
def test_a_pure_roll_back_needs_no_new_ids(architecture):
    source = random.Random(0)
    state = MemberState(member_of(architecture), [Row(draw(source, 12)), Row(draw(source, 4))])
    assert_up_to_date(state)
    state.contexts[0].roll_back(5)
    assert_up_to_date(state)
    state.contexts[0].roll_back(1)
    state.contexts[1].roll_back(1)
    assert_up_to_date(state)


@each_architecture
def test_all_rows_may_be_replaced_at_once(architecture):
    source = random.Random(0)
    state = MemberState(member_of(architecture), [Row(draw(source, 5)), Row(draw(source, 3))])
    assert_up_to_date(state)
    for context in state.contexts:
        context.roll_back(0)
        context.ids += draw(source, 4)
    assert_up_to_date(state)


@each_architecture
def test_every_row_may_be_dropped(architecture):
    state = MemberState(member_of(architecture), [Row([10, 11]), Row([12])])
    assert_up_to_date(state)
    state.select([], [])
    assert state.contexts == []


@each_architecture
def test_rows_do_not_share_what_they_branched_from(architecture):
    source = random.Random(0)
    state = MemberState(member_of(architecture), [Row(draw(source, 6))])
    assert_up_to_date(state)
    state.select([0, 0, 0], [state.contexts[0].copy() for _ in range(3)])
    for context in state.contexts:
        context.ids += draw(source, 2)
    assert_up_to_date(state)
    state.contexts[1].roll_back(4)
    assert_up_to_date(state)


def test_rows_with_unlike_progress_take_one_forward():
    source = random.Random(0)
    state = MemberState(member_of("llama"), [Row(draw(source, 3)), Row(draw(source, 9))])
    assert_up_to_date(state)
    state.contexts[0].ids += draw(source, 4)
    state.contexts[1].roll_back(7)
    assert_up_to_date(state)
    assert state.num_forwards == 2


@each_architecture
def test_what_has_not_changed_is_not_computed_again(architecture):
    state = MemberState(member_of(architecture), [Row([20, 21, 22]), Row([23])])
    assert_up_to_date(state)
    before = state.num_forwards
    assert_up_to_date(state)
    assert state.num_forwards == before


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3"])
def test_only_what_is_new_is_computed(architecture):
    member = member_of(architecture)
    state = MemberState(member, [Row(range(20, 30))])
    assert_up_to_date(state)
    widths = []
    handle = member.model.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        state.contexts[0].ids.append(40)
        state.logits()
        state.contexts[0].roll_back(9)
        state.contexts[0].ids += [50, 51]
        state.logits()
    finally:
        handle.remove()
    assert widths == [1, 2]


def test_no_cache_is_used_where_none_works():
    """A script that reads its cache wrongly when it holds anything."""
    model = tiny.ScriptedModel(tokenizer(), lambda context: torch.arange(float(len(tokenizer()))) * sum(context) % 7)
    forward = model.forward

    def forget(input_ids, past_key_values=None, cache=None, **kwargs):
        kwargs.pop("attention_mask", None), kwargs.pop("position_ids", None)
        return forward(input_ids=input_ids, **{**kwargs, "use_cache": False})

    class Forgetful(tiny.ScriptedModel):
        def forward(self, input_ids, past_key_values=None, cache=None, use_cache=None, **kwargs):
            return forget(input_ids)

    model.__class__ = Forgetful
    member = LocalMember(model, tokenizer(), name="forgetful")
    with pytest.warns(UserWarning, match="forgetful.*whole context is computed again"):
        assert member.cache_mode == "recompute"
    state = MemberState(member, [Row([20, 21]), Row([22])])
    assert_up_to_date(state)
    state.contexts[0].ids.append(23)
    assert_up_to_date(state)


# --- Learned positions ----------------------------------------------------------------------------------------------


def with_positions(limit, limited):
    """Two GPT-2, the one at place `limited` with that many positions."""
    models = [tiny.tiny_gpt2(tokenizer(), n_positions=limit if index == limited else 64) for index in range(2)]
    return make_ensemble(models, [tokenizer()] * 2)


def count_forwards(ensemble):
    counts = [0, 0]

    def count(index):
        def hook(module, args, kwargs):
            counts[index] += 1

        return hook

    for index, model in enumerate(ensemble.members):
        model.register_forward_pre_hook(count(index), with_kwargs=True)
    return counts


def test_learned_positions_are_a_limit_and_rotary_ones_are_not():
    assert member_of("gpt2").max_positions == 64
    assert member_of("llama").max_positions is None


@each_method
@pytest.mark.parametrize("limited", [0, 1])
def test_a_prompt_beyond_the_positions_is_refused_before_any_forward(method, limited):
    ensemble = with_positions(20, limited)
    ensemble.generate(torch.tensor([[30]]), max_new_tokens=1, method=method)
    counts = count_forwards(ensemble)
    with pytest.raises(ConfigurationError, match=f"member-{limited}.* 20 .*21"):
        ensemble.generate(torch.arange(30, 51)[None], max_new_tokens=2, method=method)
    assert counts == [0, 0]


@pytest.mark.crossed
@each_method
@pytest.mark.parametrize("limited", [0, 1])
def test_a_row_without_positions_ends_with_a_warning(method, limited):
    ensemble = with_positions(24, limited)
    ids = tokenizer()("The cat sat on the mat", return_tensors="pt")["input_ids"]
    with pytest.warns(UserWarning, match=f"member-{limited}.*24"):
        output = ensemble.generate(ids, max_new_tokens=40, method=method, eos_token_id=None)
    length = output.shape[1]
    assert ids.shape[1] < length < ids.shape[1] + 40
    if limited == 0:
        assert length == 25


@each_method
def test_other_rows_go_on_when_one_has_no_positions_left(method):
    ensemble = with_positions(16, 1)
    rows = [list(range(40, 52)), list(range(60, 63))]
    batch = padded(rows, fill=lambda n: tokenizer().pad_token_id)
    options = {"method": method, "eos_token_id": tokenizer().eos_token_id, "suppress_tokens": [0, 1]}
    alone = [None, None]
    for row, ids in enumerate(rows):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            alone[row] = ensemble.generate(torch.tensor([ids]), max_new_tokens=12, **options)[0, len(ids) :].tolist()
    with pytest.warns(UserWarning, match="member-1.*16"):
        output = ensemble.generate(**batch, max_new_tokens=12, **options)[:, 12:].tolist()
    assert len(alone[0]) < len(alone[1])
    for row in range(2):
        assert output[row][: len(alone[row])] == alone[row]
    assert set(output[0][len(alone[0]) :]) <= {tokenizer().pad_token_id}


@pytest.mark.parametrize("limited", [0, 1])
def test_beams_that_run_out_of_positions_are_an_error_that_names_the_member(limited):
    ensemble = with_positions(12, limited)
    with pytest.raises(MemberError, match=f"member-{limited}.* 12 "):
        ensemble.generate(torch.arange(30, 40)[None], max_new_tokens=8, num_beams=2, suppress_tokens=[0, 1])


# --- What can be a member -------------------------------------------------------------------------------------------


def test_an_encoder_decoder_is_refused_by_name():
    with pytest.raises(ConfigurationError, match="'translator' is an encoder-decoder"):
        LocalMember(tiny.tiny_m2m100(tokenizer()), tokenizer(), name="translator")


def test_a_model_without_a_head_is_refused_by_name():
    with pytest.raises(ConfigurationError, match=r"'encoder'.*no language-modelling head"):
        LocalMember(tiny.tiny_bert(tokenizer()), tokenizer(), name="encoder")


def test_the_name_is_the_end_of_the_path_or_the_class():
    model = tiny.tiny_llama(tokenizer())
    assert LocalMember(model, tokenizer()).name == "LlamaForCausalLM"
    model.config._name_or_path = model.name_or_path = "some/where/tiny-llama/"
    assert LocalMember(model, tokenizer()).name == "tiny-llama"


def test_an_ensemble_of_none_is_refused():
    with pytest.raises(ConfigurationError, match="at least one member"):
        EnsembleForCausalLM.from_members([], [])


# --- What is cached ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_the_common_beginning_of_two_texts_is_found(seed):
    source = random.Random(seed)
    for _ in range(200):
        common = [source.randrange(3) for _ in range(source.randint(0, 40))]
        a, b = ([*common, *(source.randrange(3) for _ in range(source.randint(0, 3)))] for _ in range(2))
        expected = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        assert num_common(a, b) == expected


@each_architecture
def test_a_text_that_is_put_in_the_place_of_another_takes_only_what_is_new(architecture):
    """Whoever changed it, and whatever it went through."""
    state = MemberState(member_of(architecture), [Row(range(20, 28)), Row(range(30, 36))])
    assert_up_to_date(state)
    before = state.num_forwards
    state.contexts = [Row([*range(20, 27), 99]), state.contexts[1]]
    state.contexts = [Row(range(20, 28)), Row(range(30, 36))]
    assert_up_to_date(state)
    assert state.num_forwards == before
    state.contexts[0].ids = [*range(20, 27), 99, 98]
    assert_up_to_date(state)


def test_what_ran_ahead_is_what_the_text_says_or_forgotten():
    member = member_of("static llama")
    state = MemberState(member, [Row(range(20, 25)), Row(range(30, 37))])
    with torch.no_grad():
        state.logits()
        assert state.run_ahead(torch.tensor([40, 41]))
        for context, new in zip(state.contexts, (40, 41), strict=True):
            context.ids.append(new)
        num_forwards = state.num_forwards
        assert_up_to_date(state)
        assert state.num_forwards == num_forwards
        assert state.run_ahead(torch.tensor([42, 43]))
        state.forget_ahead()
    for context in state.contexts:
        context.ids.append(50)
    assert_up_to_date(state)


def test_two_rows_may_go_on_from_one_row_of_a_fork():
    for architecture in ("llama", "mamba", "static llama"):
        state = MemberState(member_of(architecture), [Row(range(20, 26)), Row(range(30, 35)), Row(range(40, 44))])
        assert_up_to_date(state)
        fork = state.fork([0], [Row([*range(20, 26), 90])])
        assert_up_to_date(fork)
        state.adopt(fork, [0, None, 0])
        state.contexts = [context.copy() for context in state.contexts]
        for context, new in zip(state.contexts, (91, 92, 93), strict=True):
            context.ids.append(new)
        assert_up_to_date(state)


def test_a_cache_mode_that_there_is_not_is_refused():
    member = LocalMember(model_of("llama"), tokenizer(), name="llama")
    with pytest.raises(ConfigurationError, match="'llama' has no cache mode 'repacked'.*static, repack"):
        member.cache_mode = "repacked"
