"""Steps over a cache of fixed size, as a GPU's captured ones are, here without graphs."""

import contextlib
import functools
import gc
import itertools
import weakref

import pytest
import torch

from hf_ensemble import EnsembleForCausalLM, MemberError
from hf_ensemble.decoding.speculation.draft_length import DraftLength
from hf_ensemble.members import static_buffers
from hf_ensemble.members.local import LocalMember
from hf_ensemble.members.state import MemberState, PlainContext
from hf_ensemble.members.static_buffers import BufferPool, _SlotCache, masks_of
from tests import contracts, tiny
from tests.contracts import PROMPTS, make_ensemble, padded
from tests.test_contracts import ALL

RECIPE = contracts.CORE_RECIPES[0]


@pytest.fixture
def static(monkeypatch):
    """Every member has a cache of fixed size."""
    make_static(monkeypatch)


def make_static(monkeypatch):
    monkeypatch.setattr(LocalMember, "cache_mode", property(lambda member: "static", lambda member, mode: None))
    monkeypatch.setattr(LocalMember, "is_captured", True)


def pair(seed=0):
    tokenizers = [contracts.tokenizer_of(tokenizer) for _, tokenizer in RECIPE.members]
    return make_ensemble([contracts.model_of(*member, seed) for member in RECIPE.members], tokenizers)


@functools.cache
def shared_pair():
    """For tests that leave the ensemble as it was."""
    return pair()


def text_of(ensemble, method, **options):
    inputs = padded([ensemble.tokenizer(prompt).input_ids for prompt in PROMPTS], fill=lambda n: 0)
    return ensemble.generate(**inputs, method=method, **{"max_new_tokens": 12, "do_sample": False, **options})


@pytest.mark.parametrize(
    ("contract", "method"),
    [
        pytest.param(contract, method, id=f"{contract.__name__}-{contracts.name_of(method)}", marks=marks)
        for contract in (*contracts.EVERYWHERE, *contracts.CORE)
        for method, marks in (
            ("unite", []),
            (contracts.SPANS, [] if contract in contracts.EVERYWHERE else [pytest.mark.slow]),
        )
    ],
)
def test_contracts_hold(contract, method, static):
    if method == contracts.SPANS and contract is contracts.the_same_model_twice_is_that_model:
        pytest.skip("about distributions")
    contract(shared_pair(), method)


@pytest.mark.filterwarnings("ignore:the primary .* wrote the control token")
@pytest.mark.parametrize(
    ("method", "options"),
    [
        *((method, {"eos_token_id": 260}) for method in ALL),
        ("unite", {"num_beams": 3}),
        ("gac", {"num_return_sequences": 2, "num_beams": 2}),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else contracts.name_of(value),
)
def test_texts_are_those_of_a_cache_that_grows(method, options, monkeypatch):
    expected = text_of(shared_pair(), method, **options)
    make_static(monkeypatch)
    assert text_of(shared_pair(), method, **options).tolist() == expected.tolist()


@pytest.mark.parametrize("method", ["gac", "unite"])
def test_the_primary_runs_once_an_id_although_it_runs_ahead(method, static):
    output = text_of(pair(), method, return_dict_in_generate=True, max_new_tokens=10, eos_token_id=[])
    assert output.num_forwards[0] <= 10
    assert method == "gac" or output.num_forwards[0] == 10


@pytest.mark.filterwarnings("ignore:the primary .* wrote the control token")
@pytest.mark.parametrize("length", [0, 3], ids=["quiet", "drafted"])
@pytest.mark.parametrize("method", ["gac", pytest.param("unite", marks=pytest.mark.slow)])
def test_drafts_whose_ids_stay_on_the_device_change_no_text(method, length, static, monkeypatch):
    """Without drafts the primary runs ahead; with them the drafter's ids reach the host at its last step."""
    expected = text_of(shared_pair(), method, max_new_tokens=24)
    ahead = []
    run_ahead = MemberState.run_ahead

    def counted(state, last_ids):
        ahead.append((state.member.name, run_ahead(state, last_ids)))
        return ahead[-1][1]

    monkeypatch.setattr(MemberState, "run_ahead", counted)
    monkeypatch.setattr(DraftLength, "choose", lambda self, drafters, share=1.0: (drafters[0], length))
    options = {"speculation": "member-1", "return_dict_in_generate": True}
    found = text_of(shared_pair(), method, max_new_tokens=24, **options)
    assert found.sequences.tolist() == expected.tolist()
    assert (f"member-{int(length > 0)}", True) in ahead
    assert sum(found.speculation.drafted.values()) > 3 * length or not length


@pytest.mark.filterwarnings("ignore:the primary .* wrote the control token")
def test_the_primary_runs_ahead_in_a_round_after_which_nothing_is_drafted(static, monkeypatch):
    """The next length is chosen before the round is decided, and not again after it."""
    expected = text_of(shared_pair(), "gac", max_new_tokens=24)
    ahead, lengths = [], itertools.cycle([0, 0, 0, 2, 0, 3, 3])
    run_ahead = MemberState.run_ahead
    monkeypatch.setattr(
        MemberState, "run_ahead", lambda state, ids: ahead.append(state.member.name) or run_ahead(state, ids)
    )
    monkeypatch.setattr(DraftLength, "choose", lambda self, drafters, share=1.0: (drafters[0], next(lengths)))
    options = {"speculation": "member-1", "return_dict_in_generate": True, "max_new_tokens": 24}
    found = text_of(shared_pair(), "gac", **options)
    assert found.sequences.tolist() == expected.tolist()
    assert any(one.num_drafted for rounds in found.speculation.rounds for one in rounds)
    ahead.clear()
    monkeypatch.setattr(DraftLength, "choose", lambda self, drafters, share=1.0: (drafters[0], 0))
    found = text_of(shared_pair(), "gac", **options)
    assert found.sequences.tolist() == expected.tolist()
    assert ahead.count("member-0") >= max(map(len, found.speculation.rounds)) - 2


@pytest.mark.parametrize("method", ["gac", "unite"])
def test_a_primary_that_only_drafts_does_not_run_ahead_of_a_text_that_it_has_not_read(method, static, monkeypatch):
    monkeypatch.setattr(DraftLength, "choose", lambda self, drafters, share=1.0: (drafters[0], 0))
    options = {"max_new_tokens": 12, "weights": [0, 1], "return_dict_in_generate": True}
    found = text_of(pair(), method, speculation="member-0", **options)
    assert found.sequences.tolist() == text_of(pair(), method, **options).sequences.tolist()
    assert found.num_forwards[0] == 0


@pytest.mark.filterwarnings("ignore:row .* ends after")
@pytest.mark.parametrize(("speculation", "length"), [(None, 0), ("member-1", 0), ("member-0", 8)])
def test_no_step_runs_ahead_of_the_last_position(speculation, length, static, monkeypatch):
    """A position beyond a table of position embeddings would take a GPU down."""
    monkeypatch.setattr(DraftLength, "choose", lambda self, drafters, share=1.0: (drafters[0], length))
    tokenizer = contracts.small()
    ensemble = make_ensemble(
        [tiny.tiny_gpt2(tokenizer, n_positions=32, seed=1), tiny.tiny_llama(tokenizer, seed=2)], [tokenizer] * 2
    )
    inputs = tokenizer("The capital of France is", return_tensors="pt")
    options = {"do_sample": False, "max_new_tokens": 60, "eos_token_id": [], "pad_token_id": 0}
    ids = ensemble.generate(**inputs, method="unite", speculation=speculation, **options)
    assert ids.shape[1] == 33


def test_a_text_is_scored_in_as_few_forwards_as_with_a_cache_that_grows():
    pair_of_texts = ["The capital of France is"], [" Paris, and the capital of Germany is Berlin."]
    found = []
    for mode in ("repack", "static"):
        ensemble = pair()
        for member in ensemble._members:
            member.cache_mode = mode
        counts = [0]
        hook = ensemble.members[1].register_forward_hook(lambda *_, counts=counts: counts.append(1))
        score = ensemble.score(*pair_of_texts, method="unite").log_probs
        hook.remove()
        found.append((len(counts), round(score.item(), 3)))
    assert found[0] == found[1]


def test_rows_that_outgrow_their_capacity_go_on(static):
    ensemble = pair()
    member = ensemble._members[0]
    source = torch.Generator().manual_seed(0)
    ids = torch.randint(10, 250, (2, 200), generator=source).tolist()
    state = MemberState(member, [PlainContext(row[:5]) for row in ids])
    with torch.no_grad():
        for end in (5, 60, 66, 150, 200):
            for context, row in zip(state.contexts, ids, strict=True):
                context.ids = row[:end]
            found = state.logits(3)
            expected = member.model(torch.tensor([row[:end] for row in ids]), use_cache=False).logits[:, -3:]
            torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_buffers_of_a_call_that_ran_out_of_memory_are_used_no_more(number, static, monkeypatch):
    """Some of their layers have slots, others none."""
    ensemble = pair()
    inputs = ensemble.tokenizer(["The cat", "The capital of France"], return_tensors="pt", padding=True)
    options = {"max_new_tokens": 6, "do_sample": False}
    expected = ensemble.generate(**inputs, **options)
    for member in ensemble._members:
        member.buffer_pool._free.clear()
    make, count = _SlotCache.slots_for, itertools.count(1)

    def make_few(cache, states):
        if next(count) == number:
            raise torch.OutOfMemoryError("out of memory")
        return make(cache, states)

    monkeypatch.setattr(_SlotCache, "slots_for", make_few)
    with pytest.raises(MemberError, match="out of memory"):
        ensemble.generate(**inputs, **options)
    gc.collect()
    assert ensemble.generate(**inputs, **options).tolist() == expected.tolist()


def test_buffers_are_used_again_but_by_one_call_at_a_time(static):
    member = pair()._members[0]

    def started():
        state = MemberState(member, [PlainContext([11, 12, 13])])
        with torch.no_grad():
            state.logits()
        return state

    first, second = started(), started()
    assert first.caches._buffers is not second.caches._buffers
    held = first.caches._buffers
    del first
    assert started().caches._buffers is held


def test_buffers_for_more_rows_serve_fewer(static):
    """The graphs of the last batch of many, which is smaller, are then there; but much memory is not held for little."""
    member = pair()._members[0]
    pool = BufferPool(member)
    buffers = pool.acquire(8, 64)
    for num_rows in (4, 2, 8):
        pool.release(buffers)
        assert pool.acquire(num_rows, 64) is buffers
    pool.release(buffers)
    assert pool.acquire(1, 64) is not buffers


def test_calls_of_different_sizes_in_turn_find_their_buffers_again(static, monkeypatch):
    """Small ones: what takes much memory goes when something else is needed."""
    member = pair()._members[0]

    def call(length):
        state = MemberState(member, [PlainContext([20 + n % 50 for n in range(length)])])
        with torch.no_grad():
            state.logits()
        return weakref.ref(state.caches._buffers)

    first = [call(10), call(200)]
    assert all(buffers() is not None for buffers in first)
    assert [call(length)() for length in (10, 200, 10)] == [first[n]() for n in (0, 1, 0)]
    sizes = [buffers().num_bytes for buffers in first]
    assert 0 < sizes[0] < sizes[1]
    monkeypatch.setattr(static_buffers, "_MOST_OTHER_BYTES", sizes[0])
    last = call(400)
    # The one used last comes first.
    assert [buffers() is not None for buffers in (*first, last)] == [True, False, True]
    again = call(200)
    # A large one that goes takes no small one with it.
    assert [buffers() is not None for buffers in (first[0], last, again)] == [True, False, True]


def test_after_memory_ran_out_what_was_kept_for_other_calls_goes(static):
    member = pair()._members[0]

    def call(*lengths):
        state = MemberState(member, [PlainContext([20 + n % 50 for n in range(length)]) for length in lengths])
        with torch.no_grad():
            state.logits()
        return weakref.ref(state.caches._buffers)

    def run_out(module, args, kwargs):
        if len(kwargs["input_ids"]) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")

    handle = member.model.register_forward_pre_hook(run_out, with_kwargs=True)
    first = [call(10), call(200)]
    with pytest.raises(MemberError, match="out of memory"):
        call(400, 390, 380)
    assert all(buffers() is not None for buffers in first)
    call(400, 390)
    assert [buffers() for buffers in first] == [None, None]
    handle.remove()


def test_fewer_rows_in_buffers_for_more_are_up_to_date(static):
    member = pair()._members[0]
    for num_rows in (8, 3, 1, 7):
        rows = [[20 + 7 * row + n for n in range(5 + row)] for row in range(num_rows)]
        state = MemberState(member, [PlainContext(row) for row in rows])
        with torch.no_grad():
            for new in (90, 91):
                found = state.logits()
                for row, logits in zip(rows, found, strict=True):
                    expected = member.model(torch.tensor([row]), use_cache=False).logits[0, -1]
                    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-3)
                for row in rows:
                    row.append(new)
        del state


def test_a_failed_call_leaves_no_nan_behind(static):
    ensemble = pair()
    expected = text_of(ensemble, "gac").tolist()
    head = ensemble.members[1].get_input_embeddings().weight
    kept = head.detach().clone()
    with torch.no_grad():
        head.fill_(torch.nan)
    try:
        with pytest.raises(MemberError, match="member-1"):
            text_of(ensemble, "gac")
    finally:
        with torch.no_grad():
            head.copy_(kept)
    assert text_of(ensemble, "gac").tolist() == expected


def test_graphs_of_replaced_weights_are_not_used_again():
    model = tiny.tiny_llama(contracts.small(), seed=1)
    member = LocalMember(model, contracts.small(), name="llama")
    pool = BufferPool(member)
    buffers = pool.acquire(1, 64)
    pool.release(buffers)
    assert pool.acquire(1, 64) is buffers
    pool.release(buffers)
    for change in (model.double, model.train, lambda: model.register_forward_hook(lambda *_: None)):
        change()
        other = pool.acquire(1, 64)
        assert other is not buffers
        pool.release(buffers)  # that of a call which began before the change
        assert pool.acquire(1, 64) is not buffers
        pool.release(other)
        buffers = other


def test_attention_that_takes_no_mask_is_named():
    model = tiny.tiny_llama(contracts.small(), seed=1)
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(MemberError, match="flash_attention_2.*'sdpa' or 'eager'"):
        masks_of(LocalMember(model, contracts.small(), name="llama"))


def test_eager_attention_sees_what_sdpa_sees():
    texts = []
    for implementation in ("sdpa", "eager"):
        model = tiny.tiny_gemma3(contracts.small(), seed=1)
        model.set_attn_implementation(implementation)
        member = LocalMember(model, contracts.small(), name="gemma")
        state = MemberState(member, [PlainContext(list(range(20, 40))), PlainContext([7, 8, 9])], "static")
        with torch.no_grad():
            texts.append(state.logits())
    torch.testing.assert_close(*texts, atol=1e-4, rtol=1e-4)


# --- The primary alone ------------------------------------------------------------------------------------------------

ALONE = [
    {},
    {"eos_token_id": 260},
    {"do_sample": True, "top_k": 20, "temperature": 0.8},
    {"repetition_penalty": 1.5, "no_repeat_ngram_size": 3},
    {"num_return_sequences": 2, "do_sample": True},
    {"min_new_tokens": 5, "eos_token_id": [260, 262]},
    {"eos_token_id": list(range(0, 400, 9)), "pad_token_id": 0},
    {"do_sample": True, "num_return_sequences": 3, "eos_token_id": list(range(0, 400, 9)), "pad_token_id": 0},
    {"stop_strings": ["e", "the"], "pad_token_id": 0},
    {"num_beams": 2},
    {"use_cache": False},
    {"output_attentions": True, "return_dict_in_generate": True},
]


@pytest.mark.filterwarnings("ignore:the primary .* wrote the control token")
@pytest.mark.parametrize("options", ALONE, ids=str)
def test_a_primary_alone_writes_what_the_stock_loop_writes(options, monkeypatch):
    """By captured steps where the options leave them any."""
    ensemble, found = pair(), []
    for is_captured in (False, True):
        if is_captured:
            make_static(monkeypatch)
        torch.manual_seed(7)
        output = text_of(ensemble, "unite", weights=[1, 0], tokenizer=ensemble.tokenizer, **options)
        found.append(getattr(output, "sequences", output).tolist())
    assert found[0] == found[1]


def test_output_objects_of_a_primary_alone_are_the_stock_loops(static):
    wanted = {"output_scores": True, "output_logits": True, "return_dict_in_generate": True}
    found = text_of(shared_pair(), "unite", weights=[1, 0], **wanted)
    primary = shared_pair().members[0]
    inputs = padded([shared_pair().tokenizer(prompt).input_ids for prompt in PROMPTS], fill=lambda n: 0)
    expected = primary.generate(**inputs, max_new_tokens=12, do_sample=False, **wanted)
    assert found.keys() == expected.keys()
    assert all(map(torch.equal, found.logits, expected.logits))


@contextlib.contextmanager
def seen_by(model):
    """What the model's forward is called with."""
    seen = []
    hook = model.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True)
    try:
        yield seen
    finally:
        hook.remove()


def test_a_primary_alone_runs_once_an_id(static):
    with seen_by(shared_pair().members[0]) as seen:
        text_of(shared_pair(), "gac", weights=[1, 0], max_new_tokens=10, eos_token_id=[])
    assert len(seen) == 10


@pytest.mark.parametrize("weights", [[1, 0], [0.5, 0.5]], ids=str)
def test_the_next_step_starts_before_criteria_look_at_the_last_one(weights, static):
    """So a criterion that takes long, or waits for the GPU, delays nothing."""
    num_forwards = []

    def criterion(input_ids, scores):
        num_forwards.append(len(seen))
        return torch.zeros(len(input_ids), dtype=torch.bool)

    options = {"max_new_tokens": 6, "eos_token_id": [], "stopping_criteria": [criterion]}
    with seen_by(shared_pair().members[0]) as seen:
        text_of(shared_pair(), "unite", weights=weights, **options)
    assert num_forwards == [2, 3, 4, 5, 6, 6]


@pytest.mark.parametrize("do_sample", [False, True])
def test_nan_of_a_primary_alone_is_an_error(do_sample, static):
    tokenizer = contracts.small()
    ensemble = make_ensemble([tiny.tiny_llama(tokenizer, seed=seed) for seed in (1, 2)], [tokenizer] * 2)
    with torch.no_grad():
        ensemble.members[0].get_input_embeddings().weight.fill_(torch.nan)
    with pytest.raises(MemberError, match="returned NaN or infinite logits in row 0 at step 1"):
        text_of(ensemble, "unite", weights=[1, 0], do_sample=do_sample)


@pytest.mark.parametrize("weights", [[1, 0], [0.5, 0.5]], ids=str)
def test_what_is_given_for_the_primarys_own_forward_is_not_passed_over(weights, static):
    ensemble = shared_pair()
    inputs = padded([ensemble.tokenizer(prompt).input_ids for prompt in PROMPTS], fill=lambda n: 0)
    position_ids = (inputs["attention_mask"].cumsum(-1) - 1).clamp_min(0) + 3
    with seen_by(ensemble.members[0]) as seen:
        ensemble.generate(**inputs, position_ids=position_ids, weights=weights, max_new_tokens=2, do_sample=False)
    assert seen[0]["position_ids"].tolist() == position_ids.tolist()


def test_nothing_is_tried_of_a_primary_alone_that_cannot_be_captured():
    tokenizer = contracts.small()
    model = tiny.tiny_llama(tokenizer, seed=1)
    ensemble = EnsembleForCausalLM.from_members([model], [tokenizer])
    with seen_by(model) as seen:
        ensemble.generate(
            **tokenizer("The cat", return_tensors="pt"), max_new_tokens=4, eos_token_id=[], do_sample=False
        )
    assert len(seen) == 4
