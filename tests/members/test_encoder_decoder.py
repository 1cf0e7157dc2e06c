"""Encoder-decoder members as assistants: what they write with others is what a plain reference writes."""

import functools
import math

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizer,
)

from hf_ensemble import (
    ConfigurationError,
    DeepenConfig,
    EnsembleConfig,
    EnsembleForCausalLM,
    EvaConfig,
    GacConfig,
    MemberConfig,
    MinedConfig,
    RerankConfig,
    SweetSpanConfig,
    UniteConfig,
    VocabularyError,
    VoteConfig,
    packllm_weights,
)
from hf_ensemble.members.encoder_decoder import EncoderDecoderMember
from hf_ensemble.members.local import LocalMember
from hf_ensemble.members.member import RowPrompt
from tests import tiny
from tests.far_members import FarMember
from tests.following import follow_reference
from tests.reference import Reference, ReferenceMember, is_utf8
from tests.reference_alignment import ReferenceEva, ReferenceMined
from tests.reference_deepen import ReferenceDeepen
from tests.reference_encoder_decoder import ReferenceEncoderDecoder
from tests.reference_scores import score, split
from tests.reference_spans import ReferenceSpans, compare_rounds
from tests.tiny_encoder_decoders import nllb_like, t5_like, tiny_nllb, tiny_t5

pytestmark = [
    pytest.mark.filterwarnings("ignore:the primary .* wrote the control token"),
    pytest.mark.filterwarnings("ignore:reduction. 'mean' divides"),  # what the published code does
]

PROMPTS = ("The capital of France is", "Say:\n", "Die Hauptstadt von Deutschland ", "She sells sea")
SOURCES = ("The king had three daughters.", None, "No.", "The train from London to Paris takes about two hours.")
"""What the specialists read in place of the prompts."""

NUM_NEW = 6


@functools.cache
def trio():
    """A generalist, one like NLLB, one like T5, and a generalist that writes no broken characters, with tokenizers."""
    smol, nllb, t5 = tiny.smol_like(), nllb_like(), t5_like()
    whole = tiny.sentencepiece_bpe(300, texts=tiny.ENGLISH + tiny.GERMAN, byte_fallback=False)
    return (
        (tiny.tiny_llama(smol, seed=1), smol),
        (tiny_nllb(nllb, seed=2), nllb),
        (tiny_t5(t5, seed=3), t5),
        (tiny.tiny_llama(whole, seed=4), whole),
    )


@functools.cache
def ensemble_of(*indices):
    names = [MemberConfig(name=name) for name in ("generalist", "nllb", "t5", "whole")]
    parts = [trio()[index] for index in indices]
    return EnsembleForCausalLM.from_members(
        *zip(*parts, strict=True), member_configs=[names[index] for index in indices]
    )


@functools.cache
def described(index):
    model, tokenizer = trio()[index]
    if index in (0, 3):
        return ReferenceMember(model, tokenizer)
    return ReferenceEncoderDecoder(model, tokenizer, "deu_Latn" if index == 1 else None)


def members_of(indices, source=None):
    members = [described(index) for index in indices]
    for member in members[1:]:
        member.source = source
    return members


def padded_batch(ensemble, prompts=PROMPTS):
    return ensemble.tokenizer(list(prompts), return_tensors="pt", padding=True)


def unpadded(batch, row):
    return [
        i for i, keep in zip(batch.input_ids[row].tolist(), batch.attention_mask[row].tolist(), strict=True) if keep
    ]


def compare(indices, make, tolerance=2e-5, num_steps=NUM_NEW, sources=SOURCES, **options):
    """Distributions, row by row in one batch of unequal sources, along the reference's own texts, and the texts."""
    ensemble = ensemble_of(*indices)
    batch = padded_batch(ensemble)
    output = ensemble.generate(
        **batch,
        member_prompts=[None, *[list(sources)] * (len(indices) - 1)],
        max_new_tokens=num_steps,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )
    for row, source in enumerate(sources):
        reference = make(members_of(indices, source))
        prompt = unpadded(batch, row)
        found = output.sequences[row, batch.input_ids.shape[1] :].tolist()
        logits = [step[row] for step in output.logits]

        # How members read what is no text is told apart elsewhere.
        def is_text(written, reference=reference):
            return is_utf8(reference.primary.text_of_prompt(written))

        follow_reference(reference, prompt, found, logits, num_steps, tolerance, margin=1e-4, goes_on=is_text)


METHODS = {
    "unite": (UniteConfig(), lambda members: Reference(members, "unite")),
    "gac": (GacConfig(), lambda members: Reference(members, "gac")),
    "deepen": (DeepenConfig(support=None), ReferenceDeepen),
    "mined": (MinedConfig(), ReferenceMined),
    "eva": (EvaConfig(min_similarity=0.02), lambda members: ReferenceEva(members, min_similarity=0.02)),
    "product": (GacConfig(space="log"), lambda members: Reference(members, "gac", space="log")),
    "gate": (UniteConfig(threshold=0.3), lambda members: Reference(members, "unite", threshold=0.3)),
}


def slow(*values):
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


@pytest.mark.parametrize("method", ["unite", "deepen", "gate", *slow("gac", "mined", "eva", "product")])
def test_a_batch_of_unequal_sources_equals_the_reference(method):
    config, make = METHODS[method]
    compare((0, 1, 2), make, method=config, num_steps=3 if method == "deepen" else NUM_NEW)


@pytest.mark.slow
@pytest.mark.parametrize("indices", [(0, 1), (0, 2), (0, 2, 1)], ids=str)
@pytest.mark.parametrize("method", ["unite", "gac", "deepen"])
def test_each_kind_equals_the_reference(method, indices):
    config, make = METHODS[method]
    compare(indices, make, method=config, num_steps=12 if method != "deepen" else 4)


def test_the_prompt_is_the_source_where_there_is_no_other():
    compare((0, 1), METHODS["unite"][1], sources=(None,) * 4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the prompt contains control tokens")  # its unknown token, for a newline
def test_spans_equal_the_reference():
    indices, ensemble = (3, 1, 2), ensemble_of(3, 1, 2)
    batch = padded_batch(ensemble)
    config = SweetSpanConfig(span_length=2, max_span_tokens=12, filter_ratio=3.0)
    output = ensemble.generate(
        **batch,
        member_prompts=[None, list(SOURCES), list(SOURCES)],
        method=config,
        max_new_tokens=40,
        do_sample=False,
        return_dict_in_generate=True,
    )
    winners = set()
    for row, source in enumerate(SOURCES):
        reference = ReferenceSpans(members_of(indices, source), span_length=2, filter_ratio=3.0, max_span_tokens=12)
        ids, expected = reference.run(unpadded(batch, row), 3, 40)
        count, problem = compare_rounds(output.rounds[row], expected)
        assert problem is None
        assert count >= min(2, len(expected))
        if count == len(expected):
            assert output.sequences[row, batch.input_ids.shape[1] :].tolist()[: len(ids)] == ids
        winners |= {one.candidates[one.winner].proposers[0] for one in expected}
    assert winners - {0}, "no specialist won a round"


def first_pieces(index, source):
    """What a specialist begins with, as its tokenizer has it, from the surest on."""
    member = described(index)
    member.source = source
    ids = member.last_logits(member.read_prompt(b"", True).start, 1)[0].argsort(descending=True).tolist()
    return [member.token_bytes[i] for i in ids if i in member.token_bytes]


@pytest.mark.parametrize("index", [2, *slow(1)])
@pytest.mark.parametrize("prompt", ["Say:\n", "The capital of France is", "It is "])
def test_a_first_word_takes_its_space_where_the_prompt_leaves_it_one(prompt, index):
    """After a line's end or a space a specialist's text begins without the space of its tokenizer; else with it."""
    sources = (*tiny.ENGLISH, *tiny.GERMAN)
    source = next(text for text in sources if len(first := first_pieces(index, text)[0]) > 1 and first[:1] == b" ")
    expected = first_pieces(index, source)[0].decode()
    ensemble = ensemble_of(0, index)
    ids = ensemble.tokenizer(prompt, return_tensors="pt")
    options = {"weights": [0, 1], "member_prompts": [None, source], "do_sample": False, "max_new_tokens": 12}
    for method in ("unite", "gac", SweetSpanConfig(span_length=2)):
        output = ensemble.generate(**ids, method=method, **options)
        text = ensemble.tokenizer.decode(output[0, ids.input_ids.shape[1] :])
        # UniTE writes the first of the primary's ids of an entry.
        assert text[:2] == (expected if prompt.endswith("is") else expected[1:])[:2], method


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}], ids=str)
def test_the_lost_space_of_a_whole_answer_completes_no_stop_string(options):
    ensemble = ensemble_of(0, 1)
    options = {"stop_strings": [" "], "max_new_tokens": 12, "do_sample": False, **options}

    def answer(prompt, source):
        ids, own = ensemble.tokenizer(prompt, return_tensors="pt"), [None, source]
        output = ensemble.generate(
            **ids, method="vote", weights=[0, 1], member_prompts=own, return_dict_in_generate=True, **options
        )
        return output.answers[0][0].text

    source = next(text for text in (*tiny.ENGLISH, *tiny.GERMAN) if answer("Say", text).startswith(" "))
    assert answer("Say", source).count(" ") == 1
    found = answer("Say:\n", source)
    assert found[0] != " "
    assert found.count(" ") == 1


@pytest.mark.parametrize("method", ["gac", "unite"])
def test_decisions_show_first_words_as_they_count(method):
    ensemble = ensemble_of(0, 1)
    for prompts in (["Say:\n"], ["Say:\n", "Say"]):
        sources = [text for text in (*tiny.ENGLISH, *tiny.GERMAN) if first_pieces(1, text)[0][:1] == b" "][:1]
        expected = first_pieces(1, sources[0])[0].decode()
        output = ensemble.generate(
            **padded_batch(ensemble, prompts),
            member_prompts=[None, sources * len(prompts)],
            method=method,
            weights=[0.01, 0.99],
            max_new_tokens=4,
            do_sample=False,
            return_dict_in_generate=True,
            output_decisions=True,
        )
        for row, name in zip(output.decisions.rows, [expected[1:], expected], strict=False):
            said = row[0].members[1]
            assert said.best[0].text == name
            assert said.agrees
            assert said.probability > 0.05
            assert row[0].decided_by == 1


def search(reference, prompt, num_beams, num_new):
    """A plain beam search over the folded columns, for texts that do not end: the best, and the least margin."""
    beams, least = [(0.0, reference.prompt_state(prompt), [])], math.inf
    for _ in range(num_new):
        found = []
        for total, state, ids in beams:
            columns = reference.distribution(state).columns
            found += [(total + math.log(p), state, [*ids, i]) for i, p in columns.items() if p]
        found.sort(key=lambda beam: -beam[0])
        assert all(ids[-1] not in reference.primary.eos_ids for _, _, ids in found[: 2 * num_beams])
        least = min(least, found[num_beams - 1][0] - found[num_beams][0], found[0][0] - found[1][0])
        beams = [(total, reference.advance(state, ids[-1:]), ids) for total, state, ids in found[:num_beams]]
    return beams[0][2], least


@pytest.mark.parametrize("method", ["gac", *slow("unite")])
def test_beams_equal_a_plain_search(method):
    indices, ensemble = (0, 1, 2), ensemble_of(0, 1, 2)
    batch = padded_batch(ensemble, PROMPTS[:2])
    sources = [SOURCES[0], SOURCES[3]]
    options = {"member_prompts": [None, sources, sources], "num_beams": 3, "max_new_tokens": 5, "do_sample": False}
    found = ensemble.generate(**batch, method=method, **options)
    for row, source in enumerate(sources):
        reference = Reference(members_of(indices, source), method)
        expected, margin = search(reference, unpadded(batch, row), 3, 5)
        assert margin > 1e-5
        assert found[row, batch.input_ids.shape[1] :].tolist() == expected


# --- Rows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["gac", "vote", *slow("unite", "deepen", SweetSpanConfig(span_length=2))], ids=str)
def test_a_row_alone_is_the_row_in_a_batch(method):
    ensemble = ensemble_of(0, 1, 2)
    options = {"method": method, "max_new_tokens": 6, "do_sample": False}
    batch = padded_batch(ensemble)
    together = ensemble.generate(**batch, member_prompts=[None, list(SOURCES), list(SOURCES)], **options)
    for row, source in enumerate(SOURCES):
        ids = unpadded(batch, row)
        alone = ensemble.generate(torch.tensor([ids]), member_prompts=[None, source, source], **options)
        new = alone[0, len(ids) :].tolist()
        found = together[row, batch.input_ids.shape[1] :].tolist()
        assert found[: len(new)] == new


def count_sources(monkeypatch, ensemble, index):
    """How many rows the encoder of a member reads, pass by pass."""
    member, counts = ensemble.member_views[index], []
    run = member.run_encoder
    monkeypatch.setattr(member, "run_encoder", lambda sources: [counts.append(len(sources)), run(sources)][1])
    return counts


@pytest.mark.parametrize(
    "options",
    [
        {"method": "unite"},
        {"method": "gac", "num_beams": 3},
        {"method": "unite", "do_sample": True, "num_return_sequences": 2},
        {"method": SweetSpanConfig(span_length=2)},
        {"method": "unite", "use_cache": False},
        {"method": "vote"},
    ],
    ids=str,
)
@pytest.mark.parametrize("index", [1, *slow(2)])
def test_the_encoder_runs_once_a_row_and_equal_sources_share_it(monkeypatch, options, index):
    ensemble = ensemble_of(0, 1, 2)
    ensemble.member_views[index].cache_mode = "aligned"
    counts = count_sources(monkeypatch, ensemble, index)
    sources = [*SOURCES[:3], SOURCES[0]]
    options = {"do_sample": False, "max_new_tokens": 6, **options}
    ensemble.generate(**padded_batch(ensemble), member_prompts=[None, sources, sources], **options)
    assert counts == [3]


def test_a_member_that_nobody_needs_is_not_run(monkeypatch):
    ensemble = ensemble_of(0, 1)
    ensemble.member_views[1].cache_mode = "aligned"
    counts = count_sources(monkeypatch, ensemble, 1)
    ensemble.generate(**padded_batch(ensemble), method=GacConfig(threshold=0.0), max_new_tokens=4, do_sample=False)
    assert counts == []


@pytest.mark.parametrize("method", ["gac", *slow("unite")])
def test_behind_a_gate_rows_catch_up(method):
    """Rows of which some wait give what they give alone."""
    config = {"unite": UniteConfig, "gac": GacConfig}[method](threshold=0.12)
    compare((0, 1, 2), lambda members: Reference(members, method, threshold=0.12), method=config, num_steps=10)


def test_the_trial_of_a_cache_finds_that_it_can_be_used(recwarn):
    for index in (1, 2):
        model, tokenizer = trio()[index]
        parts = [trio()[0], (model, tokenizer)]
        ensemble = EnsembleForCausalLM.from_members(*zip(*parts, strict=True))
        assert ensemble.member_views[1].cache_mode == "aligned"
    assert not [warning for warning in recwarn if "no cache" in str(warning.message)]


# --- Sources --------------------------------------------------------------------------------------------------------


def sources_read(monkeypatch, ensemble, ids, **options):
    member, found = ensemble.member_views[1], []
    run = member.run_encoder
    monkeypatch.setattr(member, "run_encoder", lambda sources: [found.extend(sources), run(sources)][1])
    member.cache_mode = "aligned"
    ensemble.generate(ids, max_new_tokens=2, do_sample=False, **options)
    return [member.tokenizer.decode(source) for source in found]


def test_of_a_conversation_the_last_user_turn_is_the_source(monkeypatch):
    ensemble = ensemble_of(0, 1)
    turns = [
        {"role": "system", "content": "You translate."},
        {"role": "user", "content": "The cat"},
        {"role": "assistant", "content": "Die Katze"},
        {"role": "user", "content": "The dog"},
    ]
    ids = ensemble.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert sources_read(monkeypatch, ensemble, ids.input_ids) == ["eng_Latn The dog</s>"]
    own = [None, "The king"]
    assert sources_read(monkeypatch, ensemble, ids.input_ids, member_prompts=own)[-1] == "eng_Latn The king</s>"


@pytest.mark.parametrize("source", ["", " ", "a\ud800", "\x00"], ids=repr)
@pytest.mark.parametrize("index", [1, *slow(2)])
def test_odd_sources_are_read(source, index):
    ensemble = ensemble_of(0, index)
    ids = ensemble.tokenizer("Say:\n", return_tensors="pt").input_ids
    reference = Reference(members_of((0, index), source.replace("\ud800", "?")), "gac")
    found = ensemble.generate(ids, method="gac", member_prompts=[None, source], max_new_tokens=1, do_sample=False)
    expected, margin = reference.choose(reference.distribution(reference.prompt_state(ids[0].tolist())))
    assert margin > 1e-4
    assert found[0, -1] == expected[0]


def test_control_tokens_that_a_source_spells_are_text(monkeypatch):
    ensemble = ensemble_of(0, 1)
    ids = ensemble.tokenizer("The dog", return_tensors="pt").input_ids
    member = ensemble.member_views[1]
    found = []
    run = member.run_encoder
    monkeypatch.setattr(member, "run_encoder", lambda sources: [found.extend(sources), run(sources)][1])
    ensemble.generate(ids, member_prompts=[None, "a </s> deu_Latn b"], max_new_tokens=1)
    control = [i for i in found[0] if member.is_control(i) and i != member.tokenizer.unk_token_id]
    assert control == [member.tokenizer.convert_tokens_to_ids("eng_Latn"), member.tokenizer.eos_token_id]


def test_a_source_longer_than_learned_positions_is_refused_before_anybody_runs():
    tokenizer = tiny.unigram(texts=tiny.ENGLISH)
    sizes = {"d_model": 32, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 16}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_layers": 1, "decoder_layers": 1}
    options = {**sizes, **heads, "decoder_start_token_id": 0, "forced_eos_token_id": None}
    model = tiny.build(BartForConditionalGeneration, BartConfig, tokenizer, options)
    primary = trio()[0]
    ensemble = EnsembleForCausalLM.from_members(
        [primary[0], model],
        [primary[1], tokenizer],
        member_configs=[MemberConfig(name="a"), MemberConfig(name="bart")],
    )
    ids = ensemble.tokenizer("Say", return_tensors="pt").input_ids
    assert ensemble.generate(ids, member_prompts=[None, "The king"], max_new_tokens=4).shape[1] > ids.shape[1]
    with pytest.raises(ConfigurationError, match=r"'bart' has positions for 16 ids, but the source takes \d\d"):
        ensemble.generate(ids, member_prompts=[None, " ".join(tiny.ENGLISH)], max_new_tokens=4)


# --- Whole answers and likelihoods ----------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [1, *slow(2)])
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, *slow({"repetition_penalty": 1.3})], ids=str)
def test_a_whole_answer_is_what_the_model_generates(index, options):
    model, tokenizer = trio()[index]
    ensemble, member = ensemble_of(0, 1, 2), described(index)
    sources, prompts_end_in_word = [text for text in SOURCES if text], [True, False, False]
    inputs = padded_batch(ensemble, PROMPTS[: len(sources)])
    output = ensemble.generate(
        **inputs,
        method="vote",
        member_prompts=[None, sources, sources],
        max_new_tokens=8,
        do_sample=False,
        return_dict_in_generate=True,
        **options,
    )
    for row, source in enumerate(sources):
        start = [model.config.decoder_start_token_id, *member.forced]
        expected = model.generate(
            torch.tensor([member.source_ids(source)]),
            decoder_input_ids=torch.tensor([start]),
            generation_config=GenerationConfig(
                eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
            ),
            max_new_tokens=8,
            do_sample=False,
            **options,
        )[0, len(start) :]
        text = b"".join(member.token_bytes.get(i, b"") for i in expected.tolist()).decode()
        written = next(answer for answer in output.answers[row] if any(w.member == index for w in answer.writers))
        # A text that begins a line has no space before it.
        expected = text if prompts_end_in_word[row] else text.removeprefix(" ")
        # The primary has eight ids for it.
        assert len(written.text) > 3
        assert expected.startswith(written.text)


CONTINUATIONS = ("Berlin is hat", " the king", "Paris", " three daughters")


@pytest.mark.parametrize("method", ["unite", "gac"])
def test_likelihoods_equal_the_reference(method):
    ensemble = ensemble_of(0, 1, 2)
    own = [None, list(SOURCES), list(SOURCES)]
    found = ensemble.score(list(PROMPTS), list(CONTINUATIONS), method=method, member_prompts=own, batch_size=3)
    for row, (prompt, continuation, source) in enumerate(zip(PROMPTS, CONTINUATIONS, SOURCES, strict=True)):
        reference = Reference(members_of((0, 1, 2), source), method)
        before, after = split(reference.primary, prompt, continuation)
        expected = score(reference, before, after).log_prob
        assert math.isclose(found.log_probs[row], expected, rel_tol=1e-4) or found.log_probs[row] == expected


def test_likelihoods_by_spans_are_the_mean_of_the_members():
    ensemble = ensemble_of(0, 1, 2)
    own = [None, list(SOURCES), list(SOURCES)]
    found = ensemble.score(list(PROMPTS), list(CONTINUATIONS), method="sweetspan", member_prompts=own, batch_size=3)
    for row, (prompt, continuation, source) in enumerate(zip(PROMPTS, CONTINUATIONS, SOURCES, strict=True)):
        members = members_of((0, 1, 2), source)
        before, after = split(members[0], prompt, continuation)
        state = Reference(members, "gac").prompt_state(before)
        text = members[0].text_of_prompt([*before, *after])[len(members[0].text_of_prompt(before)) :]
        totals = [log_prob_of(members[0], before, after)]
        for member, own_state in zip(members[1:], state.assistants, strict=True):
            ids = member.append_ids(member.written_after(own_state, text).decode())
            totals.append(log_prob_of(member, own_state.start, ids))
        assert math.isclose(found.log_probs[row], sum(totals) / 3, rel_tol=1e-4)


def log_prob_of(member, before, ids):
    logits = member.last_logits([*before, *ids], len(ids) + 1).double()
    real = torch.tensor(sorted(i for i in member.vocab.values() if i < member.num_rows))
    logprobs = logits - logits[:, real].logsumexp(-1, keepdim=True)
    return sum(logprobs[n, i].item() for n, i in enumerate(ids))


@pytest.mark.parametrize("method", [*slow("mbr"), RerankConfig(score="likelihood")], ids=str)
def test_other_choices_among_answers_take_specialists_too(method):
    ensemble = ensemble_of(0, 1, 2)
    options = {"member_prompts": [None, list(SOURCES), list(SOURCES)], "max_new_tokens": 6, "do_sample": False}
    output = ensemble.generate(**padded_batch(ensemble), method=method, return_dict_in_generate=True, **options)
    for answers in output.answers:
        assert {writer.member for answer in answers for writer in answer.writers} == {0, 1, 2}


def test_samples_depend_on_their_seed_alone():
    ensemble = ensemble_of(0, 1, 2)
    config = VoteConfig(num_candidates=2)
    options = {"method": config, "do_sample": True, "max_new_tokens": 5, "seed": 7, "return_dict_in_generate": True}
    batch = padded_batch(ensemble)
    own = [None, list(SOURCES), list(SOURCES)]
    together = ensemble.generate(**batch, member_prompts=own, **options).answers
    ids = torch.tensor([unpadded(batch, 3)])
    alone = ensemble.generate(ids, member_prompts=[None, SOURCES[3], SOURCES[3]], **options).answers
    assert [answer.text for answer in together[3]] == [answer.text for answer in alone[0]]


# --- What it cannot be ----------------------------------------------------------------------------------------------


def test_what_a_specialist_cannot_do_is_refused_by_name():
    (smol, smol_tokenizer), (nllb, tokenizer), _, _ = trio()
    names = [MemberConfig(name="translator"), MemberConfig(name="generalist")]
    with pytest.raises(ConfigurationError, match="'translator' .*as the primary.*Put another member first"):
        EnsembleForCausalLM.from_members([nllb, smol], [tokenizer, smol_tokenizer], member_configs=names)
    ensemble = ensemble_of(0, 1)
    ids = ensemble.tokenizer("Say", return_tensors="pt").input_ids
    for options, match in (
        ({"method": UniteConfig(threshold=0.5, gate=1)}, "'nllb' .*gate"),
        ({"speculation": "nllb"}, "'nllb'"),
        ({"speculation": "ngram"}, "'nllb'"),
    ):
        with pytest.raises(ConfigurationError, match=match):
            ensemble.generate(ids, max_new_tokens=2, do_sample=False, **options)
    assert ensemble.generate(ids, max_new_tokens=2, do_sample=False, speculation="auto").shape[1] == ids.shape[1] + 2
    with pytest.raises(ConfigurationError, match="'nllb'.*how well it predicts the prompt"):
        packllm_weights(ensemble, ids)
    with pytest.raises(ConfigurationError, match="'nllb'"):
        ensemble.alone("nllb")


@pytest.mark.parametrize(
    ("languages", "message"),
    [
        ({"tgt_lang": None}, "'translator'.*tgt_lang"),
        ({"tgt_lang": "xyz_Latn"}, r"'translator' does not know the language 'xyz_Latn' \(`tgt_lang`\)"),
        ({"src_lang": "english", "tgt_lang": "deu_Latn"}, r"language 'english' \(`src_lang`\).*eng_Latn"),
    ],
    ids=str,
)
def test_languages_are_named_and_known(languages, message):
    tokenizer = nllb_like()
    for option, language in languages.items():
        setattr(tokenizer, option, language)
    parts = [trio()[0], (tiny_nllb(tokenizer), tokenizer)]
    names = [MemberConfig(name="a"), MemberConfig(name="translator")]
    with pytest.raises(ConfigurationError, match=message):
        EnsembleForCausalLM.from_members(*zip(*parts, strict=True), member_configs=names)


def test_a_model_that_starts_from_its_language_starts_from_it_once():
    """Like mBART; others, like NLLB, start from another control token, which the language follows."""
    tokenizer = nllb_like(tgt_lang="fra_Latn")
    for start, expected in ((tokenizer.convert_tokens_to_ids("deu_Latn"), []), (tokenizer.eos_token_id, [2])):
        member = EncoderDecoderMember(tiny_nllb(tokenizer, decoder_start_token_id=start), tokenizer)
        ids = member.read(RowPrompt(b"The dog"), "append").ids
        assert list(map(int, ids)) == [*expected, tokenizer.convert_tokens_to_ids("fra_Latn")]


class PythonTokenizer(PreTrainedTokenizer):
    """Like those of Marian and M2M-100: no `tokenizers` backend."""

    vocab_size = 4

    def get_vocab(self):
        return {"a": 0, "b": 1, "c": 2, "</s>": 3}


def test_a_tokenizer_of_python_code_is_refused_with_the_reason(folders, tmp_path):
    model = tiny_nllb(trio()[1][1])
    parts = [trio()[0], (model, PythonTokenizer())]
    names = [MemberConfig(name="a"), MemberConfig(name="opus")]
    with pytest.raises(VocabularyError, match=r"'opus' cannot be used: its tokenizer \(PythonTokenizer\) .* or T5"):
        EnsembleForCausalLM.from_members(*zip(*parts, strict=True), member_configs=names)
    model.save_pretrained(tmp_path / "opus")
    (tmp_path / "opus" / "tokenizer_config.json").write_text('{"tokenizer_class": "M2M100Tokenizer"}', "utf-8")
    with pytest.raises(VocabularyError, match=r"opus' cannot be used: its tokenizer \(M2M100Tokenizer\) .* or T5"):
        EnsembleForCausalLM.from_pretrained([str(folders / "generalist"), str(tmp_path / "opus")])


def test_in_an_actor_it_is_refused_before_any_is_started(folders):
    listed_ones = [str(folders / "generalist"), MemberConfig(path=str(folders / "t5"), ray={})]
    with pytest.raises(ConfigurationError, match="t5' is an encoder-decoder model .* in this process only.*`ray`"):
        EnsembleForCausalLM.from_pretrained(listed_ones)


@pytest.mark.parametrize("option", ["chat_template", "system_prompt"])
def test_a_template_for_a_specialist_is_refused(option):
    items = [MemberConfig(name="a"), MemberConfig(name="translator", **{option: "x"})]
    with pytest.raises(ConfigurationError, match=f"'translator'.*{option}"):
        EnsembleForCausalLM.from_members(*zip(*trio()[:2], strict=True), member_configs=items)


def test_a_member_that_sends_few_entries_is_asked_for_first_words_without_their_space():
    (smol, smol_tokenizer), (nllb, nllb_tokenizer) = trio()[:2]
    models, tokenizers = [smol, smol, nllb], [smol_tokenizer, tiny.smol_like(), nllb_tokenizer]
    items = [MemberConfig(name=f"member {n}") for n in range(3)]
    config = EnsembleConfig(members=items, primary_config=smol.config)
    kinds = (LocalMember, FarMember, EncoderDecoderMember)
    members = [kind(*part) for kind, *part in zip(kinds, models, tokenizers, strict=True)]
    far, near = EnsembleForCausalLM(config, members), EnsembleForCausalLM.from_members(models, tokenizers)
    options = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    for prompts in (PROMPTS, PROMPTS[1:2]):
        own = [None, None, list(SOURCES)[: len(prompts)]]
        found, expected = (
            one.generate(**padded_batch(one, prompts), member_prompts=own, method=UniteConfig(top_k=4), **options)
            for one in (far, near)
        )
        assert torch.equal(found.sequences, expected.sequences)
        for one, other in zip(found.logits, expected.logits, strict=True):
            torch.testing.assert_close(one, other)
    assert members[1].num_ids_sent


def test_the_check_of_members_reads_them_as_they_are():
    report = ensemble_of(0, 1, 2).check()
    assert {finding.check for finding in report.findings} <= {"round trip", "spaces"}
    assert [member.steps for member in report.members[1:]] == ["cache mode 'aligned'"] * 2


# --- Files ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("specialists")
    for name, (model, tokenizer) in zip(("generalist", "nllb", "t5"), trio(), strict=False):
        model.save_pretrained(folder / name)
        # What is loaded is told which languages.
        (nllb_like(src_lang="fra_Latn", tgt_lang=None) if name == "nllb" else tokenizer).save_pretrained(folder / name)
    return folder


def listed(folders):
    languages = {"src_lang": "eng_Latn", "tgt_lang": "deu_Latn"}
    nllb = MemberConfig(path=str(folders / "nllb"), tokenizer_kwargs=languages)
    return [str(folders / "generalist"), nllb, str(folders / "t5")]


@pytest.mark.parametrize("include_members", [*slow(False), True])
def test_loaded_saved_and_loaded_again_it_writes_the_same(folders, tmp_path, include_members):
    options = {"max_new_tokens": 6, "do_sample": False, "method": "gac"}
    first = EnsembleForCausalLM.from_pretrained(listed(folders))
    batch = padded_batch(first)
    own = [None, list(SOURCES), list(SOURCES)]
    expected = ensemble_of(0, 1, 2).generate(**batch, member_prompts=own, **options)
    assert torch.equal(first.generate(**batch, member_prompts=own, **options), expected)
    first.save_pretrained(tmp_path / "saved", include_members=include_members)
    again = EnsembleForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(again.generate(**batch, member_prompts=own, **options), expected)
    assert again.config.members[1].tokenizer_kwargs == {"src_lang": "eng_Latn", "tgt_lang": "deu_Latn"}


def test_files_that_cannot_stand_there_are_refused_before_any_weight_is_read(folders, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", refuse)
    with pytest.raises(ConfigurationError, match="t5' is an encoder-decoder model.*cannot be the primary"):
        EnsembleForCausalLM.from_pretrained([str(folders / "t5"), str(folders / "generalist")])
    with pytest.raises(ConfigurationError, match="tokenizer_kwargs"):
        MemberConfig(path="x", tokenizer_kwargs="eng_Latn")
