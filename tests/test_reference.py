"""Hand-computed values: what the reference says has to be right without it."""

import math

import pytest
import torch

from tests import tiny
from tests.reference import EOS, Reference, ReferenceMember, split_begun

pytestmark = pytest.mark.slow


def member(tokenizer, script=(), **options):
    eos_ids = options.pop("eos_ids", None)
    return ReferenceMember(tiny.ScriptedModel(tokenizer, script, **options), tokenizer, eos_ids)


def ids_of(tokenizer, *tokens):
    """The only id of each token, by its spelling in the vocabulary."""
    return [tokenizer.get_vocab()[token] for token in tokens]


@pytest.fixture(scope="module")
def smol():
    return tiny.smol_like()


@pytest.fixture(scope="module")
def gemma():
    return tiny.gemma_like()


@pytest.fixture(scope="module")
def small():
    """Writes ` capital` as two tokens, `large` as one."""
    return tiny.byte_level_bpe(400)


@pytest.fixture(scope="module")
def large():
    return tiny.byte_level_bpe(500)


# Section 1


def test_token_bytes_of_each_family():
    byte_level = tiny.odd_added_bpe()
    assert member(byte_level).written(ids_of(byte_level, "Ġis", "Ċ", "čaj", "Ġra", "<tool_call>")) == (
        b" is\n" + "čajĠra<tool_call>".encode()
    )
    pieces = tiny.gemma_like(added=["a▁b"])
    assert member(pieces).written(ids_of(pieces, "▁of", "<0xE0>", "\n", "<0x0A>", "a▁b")) == b" of\xe0\n\na b"
    words = tiny.wordpiece()
    assert member(words).written(ids_of(words, "the", "##ing", "##s")) == b" theings"
    words = tiny.wordpiece(added=["<tool_call>"])
    assert member(words).written(ids_of(words, "<tool_call>")) == b"<tool_call>"


def test_control_tokens_write_nothing(smol):
    own = member(smol)
    assert own.control == set(ids_of(smol, "<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    assert own.written(ids_of(smol, "<|im_start|>")) is None


def test_an_unflagged_end_marker_is_control_but_a_newline_is_text():
    tokenizer = tiny.byte_level_bpe(added=["<|eot|>"])
    marker, newline = ids_of(tokenizer, "<|eot|>", "Ċ")
    assert member(tokenizer).written([marker]) == b"<|eot|>"
    own = member(tokenizer, eos_ids=[marker, newline])
    assert own.written([marker]) is None
    assert own.control_eos == [marker]
    assert own.written([newline]) == b"\n"


def test_end_ids_come_from_the_generation_config_first(smol):
    model = tiny.ScriptedModel(smol)
    assert ReferenceMember(model, smol).eos_ids == {smol.eos_token_id}
    model.config.eos_token_id = 5
    model.generation_config.eos_token_id = [6, 7]
    assert ReferenceMember(model, smol).eos_ids == {6, 7}
    model.generation_config.eos_token_id = None
    assert ReferenceMember(model, smol).eos_ids == {5}
    assert ReferenceMember(model, smol, eos_ids=8).eos_ids == {8}


def test_padded_rows_and_holes_have_no_bytes():
    tokenizer = tiny.byte_level_bpe(holes=[300, 301])
    own = member(tokenizer, extra_rows=5)
    assert not {300, 301, *range(tiny.rows_of(tokenizer), tiny.rows_of(tokenizer) + 5)} & own.token_bytes.keys()


@pytest.mark.parametrize(
    "make", [tiny.smol_like, tiny.gemma_like, tiny.qwen_like, tiny.odd_added_bpe, tiny.unigram, tiny.lowercasing_bpe]
)
@pytest.mark.parametrize(
    "text", ["The capital of France", " Größe\n\n\t\tx", "ภาษาไทย 法国 😀", "y =  f(x) , z .", "<eos></s>"]
)
def test_encoding_writes_exactly_the_text(make, text):
    own = member(make())
    assert own.written(own.encode(text.encode())) == text.encode()


@pytest.mark.parametrize("style", ["gemma", "llama2", "metaspace"])
def test_encoding_inserts_no_space(style):
    tokenizer = tiny.sentencepiece_bpe(style=style)
    own = member(tokenizer)
    assert own.encode(b" capital of") == ids_of(tokenizer, "▁capital", "▁of")
    assert own.written(own.encode(b"capital of")) == b"capital of"


def test_incomplete_utf8_is_one_id_a_byte(gemma):
    own = member(gemma)
    assert own.encode(b" of\xe0\xb8") == ids_of(gemma, "▁of", "<0xE0>", "<0xB8>")
    assert own.encode(b"\x81 of") == ids_of(gemma, "<0x81>", "▁of")


def test_bytes_that_a_normalizer_changes_are_encoded_without_it():
    tokenizer = tiny.qwen_like()
    own = member(tokenizer)
    assert own.written(own.encode("e\u0301".encode())) == "e\u0301".encode()
    pieces = tiny.gemma_like()
    own = member(pieces)
    assert own.encode("▁".encode()) == ids_of(pieces, "<0xE2>", "<0x96>", "<0x81>")


def test_bytes_without_a_token_cannot_be_written(smol):
    own = member(smol)
    assert own.encode(b"\xff") is None
    assert own.encode(b"a\x04b") is None


def test_canonical_id_is_what_the_tokenizer_gives(gemma):
    newline, fallback = ids_of(gemma, "\n", "<0x0A>")
    assert fallback < newline
    assert member(gemma).encode(b"\n") == [newline]


# Section 2


def test_prompt_of_an_assistant_is_the_text_without_control_tokens(smol, gemma):
    text = "The capital of <eos><bos> is"
    ids = [smol.bos_token_id, *smol(text)["input_ids"]]
    for method in ("gac", "unite"):
        ensemble = Reference([member(smol), member(gemma)], method)
        context = ensemble.contexts(ensemble.prompt_state(ids))[1]
        assert context[0] == gemma.bos_token_id
        assert not set(context[1:]) & ensemble.assistants[0].control
        assert ensemble.assistants[0].written(context[1:]) == text.encode()


def test_the_dummy_space_of_the_primary_is_not_text(smol):
    llama2 = tiny.sentencepiece_bpe(style="llama2")
    ensemble = Reference([member(llama2), member(smol)])
    context = ensemble.contexts(ensemble.prompt_state(llama2("The answer")["input_ids"]))[1]
    assert context == smol("The answer")["input_ids"]


def test_append_keeps_the_steps_and_retokenize_forgets_them(smol, large):
    prompt = smol("The")["input_ids"]
    chosen = [b" cap", b"ital", b" of"]
    contexts = {}
    for method in ("gac", "unite"):
        ensemble = Reference([member(smol), member(large)], method)
        state = ensemble.prompt_state(prompt)
        for key in chosen:
            state = ensemble.advance(state, key)
        contexts[method] = ensemble.contexts(state)[1]
    own = ensemble.assistants[0]
    assert contexts["gac"] == [*own.prompt_ids("The"), *(i for key in chosen for i in own.encode(key))]
    assert contexts["unite"] == own.prompt_ids("The capital of")


def test_a_begun_character_is_byte_tokens_for_those_that_have_them(smol, gemma):
    thai = "ก".encode()
    words = tiny.wordpiece()
    for method in ("gac", "unite"):
        ensemble = Reference([member(smol), member(gemma), member(words)], method)
        state = ensemble.prompt_state(smol(" of")["input_ids"])
        before = ensemble.contexts(state)
        state = ensemble.advance(state, thai[:2])
        begun = ensemble.contexts(state)
        assert begun[1] == [*before[1], *ids_of(gemma, "<0xE0>", "<0xB8>")]
        assert begun[2] is None
        step = ensemble.distribution(state)
        assert step.weights == [0.5, 0.5, 0]
        assert step.members[2] is None
        after = ensemble.contexts(ensemble.advance(state, thai[2:]))
        assert after[2] is not None
        if method == "gac":
            assert after[1] == [*begun[1], *ids_of(gemma, "<0x81>")]
        else:
            assert after[1] == [*before[1], *ensemble.members[1].prompt_ids("ก")]


def test_bytes_that_a_member_cannot_write_are_replacement_characters(gemma, smol):
    assert split_begun(b"a\xffb\xe0\xb8") == ("a\ufffdb", b"\xe0\xb8")
    replacement = member(smol).encode("\ufffd".encode())
    for method in ("gac", "unite"):
        ensemble = Reference([member(gemma), member(smol)], method)
        start = ensemble.prompt_state(gemma("of")["input_ids"])
        for broken in (b"\x04", b"\xff"):
            context = ensemble.contexts(ensemble.advance(start, broken))[1]
            assert context == [*ensemble.contexts(start)[1], *replacement]
        prompt = gemma("of\x04")["input_ids"]
        assert ensemble.contexts(ensemble.prompt_state(prompt))[1] == context


def test_a_control_token_of_the_primary_moves_nobody_else(smol, gemma):
    ensemble = Reference([member(smol), member(gemma)])
    state = ensemble.prompt_state(smol("The")["input_ids"])
    after = ensemble.advance(state, ("control", smol.bos_token_id))
    assert after.primary_ids == [*state.primary_ids, smol.bos_token_id]
    assert ensemble.contexts(after)[1] == ensemble.contexts(state)[1]


# Section 4


def test_two_newline_ids_are_pooled_and_win(gemma, smol):
    newline, fallback, other = ids_of(gemma, "\n", "<0x0A>", "▁is")
    scripted = member(gemma, [{newline: 0.30, fallback: 0.30, other: 0.40}])
    uniform = member(smol)
    for members in ([scripted], [scripted, uniform]):
        ensemble = Reference(members)
        step = ensemble.distribution(ensemble.prompt_state(gemma("a")["input_ids"]))
        assert step.members[0][b"\n"] == pytest.approx(0.60)
        assert step.members[0][b" is"] == pytest.approx(0.40)
        assert ensemble.choose(step)[0] == [newline]
    num_entries = len(uniform.entries) + 1
    assert step.members[1][b"\n"] == pytest.approx(1 / num_entries)
    assert sum(step.fused.values()) == pytest.approx(1)
    assert sum(step.columns.values()) == pytest.approx(1)
    assert fallback not in step.columns
    assert step.fused[b"\n"] == pytest.approx(0.30 + 0.5 / num_entries)


def test_fused_is_the_weighted_sum_over_the_union(small, large):
    the, a = ids_of(small, "Ġthe", "a")
    own_the, capital = ids_of(large, "Ġthe", "Ġcapital")
    members = [member(small, [{the: 0.75, a: 0.25}]), member(large, [{own_the: 0.10, capital: 0.90}])]
    ensemble = Reference(members, weights=[3, 1])
    step = ensemble.distribution(ensemble.prompt_state([a]))
    assert step.fused[b" the"] == pytest.approx(0.75 * 0.75 + 0.25 * 0.10)
    assert step.fused[b"a"] == pytest.approx(0.75 * 0.25)
    assert step.fused[b" capital"] == pytest.approx(0.25 * 0.90)
    assert step.columns[ids_of(small, "Ġc")[0]] == pytest.approx(0.25 * 0.90)


def test_an_entry_of_several_ids_is_written_whole_and_cut_at_the_budget(small, large):
    (capital,) = ids_of(large, "Ġcapital")
    ensemble = Reference([member(small), member(large, [{capital: 1.0}, {large.eos_token_id: 1.0}])], weights=[0, 1])
    prompt = ids_of(small, "a")
    ids, margins = ensemble.greedy(prompt, 10)
    assert ids == [*ids_of(small, "Ġc", "apital"), small.eos_token_id]
    assert len(margins) == 2
    assert ensemble.greedy(prompt, 1)[0] == ids_of(small, "Ġc")


def test_end_ids_are_one_entry_written_as_the_likeliest_of_the_primary(smol, gemma):
    ends = ids_of(smol, "<|endoftext|>", "<|im_end|>")
    a, b = ids_of(smol, "a", "b")
    (own_a,) = ids_of(gemma, "a")
    ensemble = Reference(
        [
            member(smol, [{ends[0]: 0.10, ends[1]: 0.15, a: 0.40, b: 0.35}], eos_ids=ends),
            member(gemma, [{gemma.eos_token_id: 0.8, own_a: 0.2}]),
        ]
    )
    step = ensemble.distribution(ensemble.prompt_state(smol("a")["input_ids"]))
    assert step.fused[EOS] == pytest.approx(0.5 * 0.25 + 0.5 * 0.8)
    assert step.columns[ends[1]] == pytest.approx(0.525)
    assert ends[0] not in step.columns
    assert ensemble.choose(step)[0] == [ends[1]]
    assert ensemble.greedy(smol("a")["input_ids"], 5)[0] == [ends[1]]


def test_control_tokens_that_end_nothing(smol, gemma):
    (a, start), (own_a, own_start) = ids_of(smol, "a", "<|im_start|>"), ids_of(gemma, "a", "<bos>")
    ensemble = Reference([member(smol, [{a: 0.6, start: 0.4}]), member(gemma, [{own_a: 0.3, own_start: 0.7}])])
    step = ensemble.distribution(ensemble.prompt_state(smol("a")["input_ids"]))
    assert step.fused["control", start] == pytest.approx(0.5 * 0.4)
    assert step.fused[b"a"] == pytest.approx(0.5 * 0.6 + 0.5 * 1.0)
    assert ("control", own_start) not in step.fused


def test_what_the_primary_cannot_write_is_dropped(smol, gemma):
    a, (own_a, byte) = ids_of(smol, "a")[0], ids_of(gemma, "a", "<0xFF>")
    ensemble = Reference([member(smol, [{a: 1.0}]), member(gemma, [{own_a: 0.2, byte: 0.8}])])
    step = ensemble.distribution(ensemble.prompt_state(smol("a")["input_ids"]))
    assert b"\xff" not in step.fused
    assert step.fused[b"a"] == pytest.approx(1.0)


def test_ties_go_to_the_lowest_union_index(smol):
    a, b = ids_of(smol, "a", "b")
    ensemble = Reference([member(smol, [{b: 0.5, a: 0.5}])])
    ids, margin = ensemble.choose(ensemble.distribution(ensemble.prompt_state([a])))
    assert ids == [min(a, b)]
    assert margin == 0


def test_margin_is_a_difference_of_log_probabilities(smol):
    a, b = ids_of(smol, "a", "b")
    ensemble = Reference([member(smol, [{a: 0.8, b: 0.2}])])
    assert ensemble.greedy([a], 1)[1] == [pytest.approx(math.log(4))]


def test_a_newline_that_ends_the_row_is_written(smol):
    (newline,) = ids_of(smol, "Ċ")
    ensemble = Reference([member(smol, [{newline: 1.0}], eos_ids=[newline, smol.eos_token_id])])
    assert ensemble.greedy(smol("a")["input_ids"], 5)[0] == [newline]


# Section 5


def logits_row(tokenizer, logits):
    row = torch.full((tiny.rows_of(tokenizer),), -60.0)
    for i, logit in logits.items():
        row[i] = logit
    return [row]


def test_unite_is_a_softmax_of_logits_over_the_best_of_all(small, large):
    a, b, c, space_c = ids_of(small, "a", "b", "c", "Ġc")
    own_a, own_b, capital = ids_of(large, "a", "b", "Ġcapital")
    first = member(small, logits_row(small, {a: 3.0, b: 2.0, c: 1.0, space_c: 0.5}))
    second = member(large, logits_row(large, {capital: 5.0, own_a: 4.0, own_b: 0.0}))
    ensemble = Reference([first, second], "unite", weights=[0.7, 0.3], top_k=2)
    step = ensemble.distribution(ensemble.prompt_state([a]))

    z_first = math.exp(3.0) + math.exp(2.0) + math.exp(0.5)
    z_second = math.exp(5.0) + math.exp(4.0) + math.exp(0.0)
    assert step.fused.keys() == {b"a", b"b", b" capital"}
    assert step.fused[b"a"] == pytest.approx(0.7 * math.exp(3.0) / z_first + 0.3 * math.exp(4.0) / z_second)
    assert step.fused[b"b"] == pytest.approx(0.7 * math.exp(2.0) / z_first + 0.3 * math.exp(0.0) / z_second)
    assert step.fused[b" capital"] == pytest.approx(0.7 * math.exp(0.5) / z_first + 0.3 * math.exp(5.0) / z_second)
    assert step.columns.keys() == {a, b, space_c}
    assert step.columns[space_c] == step.fused[b" capital"]


def test_unite_gives_a_key_no_mass_where_it_cannot_be_written(smol, gemma):
    a, (own_a, byte) = ids_of(smol, "a")[0], ids_of(gemma, "a", "<0xFF>")
    first = member(smol, logits_row(smol, {a: 1.0, smol.eos_token_id: 2.0}))
    second = member(gemma, logits_row(gemma, {own_a: 1.0, byte: 3.0, gemma.eos_token_id: 0.0}))
    ensemble = Reference([first, second], "unite", top_k=2)
    step = ensemble.distribution(ensemble.prompt_state([a]))
    assert step.members[0][b"\xff"] == 0
    q_a = 0.5 * math.e / (math.e + math.exp(2)) + 0.5 * math.e / (math.e + math.exp(3) + 1)
    q_eos = 0.5 * math.exp(2) / (math.e + math.exp(2)) + 0.5 / (math.e + math.exp(3) + 1)
    assert step.fused == {b"a": pytest.approx(q_a / (q_a + q_eos)), EOS: pytest.approx(q_eos / (q_a + q_eos))}


def test_unite_decides_by_the_sums_of_columns(small, large):
    a, space_c = ids_of(small, "a", "Ġc")
    own_a, own_capital, own_c = ids_of(large, "a", "Ġcapital", "Ġc")
    second = member(large, [{own_a: 0.4, own_capital: 0.3, own_c: 0.3}])
    ensemble = Reference([member(small), second], "unite", weights=[0, 1], top_k=3)
    step = ensemble.distribution(ensemble.prompt_state([a]))
    assert step.fused[b"a"] == pytest.approx(0.4)
    assert step.columns[space_c] == pytest.approx(0.6)
    assert ensemble.choose(step) == ([space_c], pytest.approx(math.log(1.5)))


# Whole ensembles


@pytest.mark.parametrize("method", ["gac", "unite"])
@pytest.mark.parametrize("make", [tiny.tiny_llama, tiny.tiny_gemma3, tiny.tiny_mamba])
def test_one_member_is_its_own_generate(method, make, smol):
    model = make(smol, extra_rows=3)
    with torch.no_grad():
        model.get_output_embeddings().weight[-3:] *= 0
    ids = smol("The capital of France is")["input_ids"]
    inputs = torch.tensor([ids])
    expected = model.generate(inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=8, do_sample=False)
    own = ReferenceMember(model, smol)
    assert Reference([own], method).greedy(ids, 8)[0] == expected[0, len(ids) :].tolist()
    if method == "gac":
        assert Reference([own, ReferenceMember(model, smol)]).greedy(ids, 8)[0] == expected[0, len(ids) :].tolist()


def test_distributions_along_the_greedy_text_choose_it(smol, gemma):
    members = [ReferenceMember(tiny.tiny_llama(smol), smol), ReferenceMember(tiny.tiny_gemma3(gemma), gemma)]
    prompt = smol("The capital of")["input_ids"]
    ensemble = Reference(members, "unite")
    ids, _ = ensemble.greedy(prompt, 6)
    found = ensemble.distributions_along(prompt, ids, range(len(ids)))
    assert [max(columns, key=columns.get) for columns in found.values()] == ids
    for columns in found.values():
        assert sum(columns.values()) == pytest.approx(1)
