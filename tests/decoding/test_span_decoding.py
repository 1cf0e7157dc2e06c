"""Decoding by spans: lengths, ends, streams, options, caches and errors. Equality with a reference stands elsewhere.

| Bug bank | Where |
| --- | --- |
| A6-A9, B3, B5, C3, C4, D2, D5, D6, E10, G1, G3, I2, I8 | here, for spans |
"""

import gc
import threading
import warnings
import weakref

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache, TextIteratorStreamer, TextStreamer

from hf_ensemble import (
    ConfigurationError,
    EnsembleForCausalLM,
    EnsembleLogitsProcessor,
    MemberConfig,
    MemberError,
    SpanStoppingCriteria,
    SweetSpanConfig,
)
from hf_ensemble.decoding.spans.participant import Participant
from tests import contracts, tiny
from tests.bug_bank.kit import (
    contexts_of,
    ensemble_of,
    id_of,
    output_ids,
    ready,
    spelling,
    text_of,
    texts_of,
    texts_shown_to,
    tokenizer_of,
    writer,
)
from tests.contracts import CORE_RECIPES, Recorder, changed_logits, make_ensemble, padded, prompt_rows
from tests.contracts import SPANS as SHORT_SPANS

ENGLISH = "The cat sat on the mat, and the rat sat on the hat."
GERMAN = "Größe, Straße und Übermut: schöne Wörter mit Umlauten."
THAI = "วันนี้อากาศดีมาก เราไปเที่ยวกันเถอะ"
ONE = "a one two three four five six seven eight nine."
SIX = "a six seven eight nine ten eleven twelve."
SPANS = "sweetspan"


def members_of(*members, method=SPANS, **options):
    """A scripted ensemble whose members have tried out their caches, given as (tokenizer, script)."""
    ensemble = ensemble_of(*members, method=method, **options)
    for model, member in zip(ensemble.members, ensemble._members, strict=True):
        assert member.cache_mode == "repack"
        model.calls.clear()
    return ensemble


def duet(names, *wholes, **options):
    """Members that all write the same texts, each cut its own way."""
    tokenizers = [tokenizer_of(name) for name in names]
    return members_of(*((tokenizer, writer(tokenizer, *wholes)) for tokenizer in tokenizers), **options)


def story(tokenizer, chances):
    """A script that writes these texts (prompt included) with these chances, as the tokenizer cuts them."""
    member = spelling(tokenizer)
    paths = {}
    for whole in chances:
        seen, paths[whole] = b"", {}
        for i in tokenizer(whole, add_special_tokens=False)["input_ids"]:
            paths[whole][seen] = i
            seen += member.token_bytes[i]
        paths[whole][seen] = tokenizer.eos_token_id

    def script(context):
        seen = member.text_of_prompt(context)
        row = {}
        for whole, chance in chances.items():
            if (i := paths[whole].get(seen)) is not None:
                row[i] = row.get(i, 0.0) + chance
        total = sum(row.values())
        return {i: p / total for i, p in row.items()} if row else {tokenizer.eos_token_id: 1.0}

    return script


def rivals(names=("small", "gemma"), own=0.6, other=0.05, **options):
    """The primary would write `ONE`, the assistant would rather write `SIX` and has its way."""
    first, second = (tokenizer_of(name) for name in names)
    return members_of(
        (first, story(first, {ONE: own, SIX: 1 - own})),
        (second, story(second, {ONE: other, SIX: 1 - other})),
        **options,
    )


def generate(ensemble, prompt="a", **options):
    inputs = ensemble.tokenizer(prompt, return_tensors="pt", padding=not isinstance(prompt, str))
    return ensemble.generate(**inputs, **{"max_new_tokens": 24, **options})


def rounds_of(ensemble, prompt="a", **options):
    return generate(ensemble, prompt, return_dict_in_generate=True, **options).rounds


@pytest.fixture
def ensemble():
    """Llama with a byte-level tokenizer, and Gemma-3 with a window of 8."""
    return CORE_RECIPES[0].ensemble


# --- Lengths --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "names"),
    [
        pytest.param(text, names, id=f"{language}-{' + '.join(names)}", marks=[pytest.mark.slow] * ((n + turn) % 2))
        for n, (language, text) in enumerate({"english": ENGLISH, "german": GERMAN, "thai": THAI}.items())
        for turn, names in enumerate((("smol", "gemma"), ("gemma", "smol")))
    ],
)
def test_lengths_count_the_primarys_ids_and_the_last_span_is_cut(names, text):
    ensemble = duet(names, text)
    prompt = text[:3]
    length = len(ensemble.tokenizer(prompt)["input_ids"])
    [whole] = output_ids(ensemble, prompt, max_new_tokens=12)
    assert len(whole) == length + 12
    for budget in (1, 2, 5):
        assert output_ids(ensemble, prompt, max_new_tokens=budget) == [whole[: length + budget]]
        assert output_ids(ensemble, prompt, max_new_tokens=None, max_length=length + budget) == [
            whole[: length + budget]
        ]


def test_a_span_of_eight_words_with_three_ids_left_is_cut_to_them():
    ensemble = duet(("smol", "gemma"), ENGLISH, method=SweetSpanConfig(span_length=8))
    inputs = ensemble.tokenizer("The cat", return_tensors="pt")
    output = ensemble.generate(**inputs, max_new_tokens=3, return_dict_in_generate=True)
    assert output.sequences.shape[1] == inputs["input_ids"].shape[1] + 3
    assert [len(of_row) for of_row in output.rounds] == [1]
    assert output.rounds[0][0].candidates[0].text == " sat on the mat, and the rat sat"


def test_the_default_length_is_that_of_transformers_with_its_warning():
    ensemble = duet(("smol", "gemma"), ENGLISH * 3)
    with pytest.warns(UserWarning, match="default `max_length`"):
        output = ensemble.generate(**ensemble.tokenizer("The", return_tensors="pt"))
    length = len(ensemble.tokenizer("The")["input_ids"])
    assert output.shape[1] == length + 20


# --- Ends -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["call", "generation_config"])
def test_a_stop_string_inside_a_span_cuts_it_there(source, monkeypatch):
    ensemble = duet(("small", "gemma"), "abcabcab one two three four five six")
    options = {"stop_strings": ["bca"]}
    if source == "generation_config":
        monkeypatch.setattr(ensemble.generation_config, "stop_strings", ["bca"])
        options = {}
    text = text_of(ensemble, "a", **options)
    full = text_of(ensemble, "a", stop_strings=["four five"])
    assert "bca" in text
    assert len(text) < len("abcabcab one")
    assert full.startswith(text)
    assert full.startswith("abcabcab one two three four five")


def test_the_end_of_a_text_inside_a_span_is_written_with_it():
    ensemble = duet(("small", "gemma"), "a one two", method=SweetSpanConfig(span_length=8))
    [ids] = output_ids(ensemble, "a")
    assert ids[-1] == tokenizer_of("small").eos_token_id
    assert texts_of(ensemble, ["a"]) == ["a one two"]
    [[only]] = rounds_of(ensemble)
    assert [(item.text, item.has_eos, item.proposers) for item in only.candidates] == [(" one two", True, (0, 1))]


@pytest.mark.parametrize("names", [("smol", "gemma"), ("gemma", "small")], ids=" + ".join)
def test_rows_that_have_ended_hold_only_padding_while_others_go_on(names):
    wholes = ["a one two.", "The cat sat on the mat, and the rat sat on the hat.", "Es war einmal ein König."]
    prompts = ["a", "The cat", "Es war"]
    ensemble = duet(names, *wholes)
    end, pad = ensemble.tokenizer.eos_token_id, ensemble.tokenizer.pad_token_id
    rows = output_ids(ensemble, prompts)
    width = max(len(ensemble.tokenizer(prompt)["input_ids"]) for prompt in prompts)
    assert texts_of(ensemble, prompts) == wholes
    for row in rows:
        new = row[width:]
        at = new.index(end)
        assert set(new[at + 1 :]) <= {pad}
    assert len({row[width:].index(end) for row in rows}) == 3
    rounds = rounds_of(ensemble, prompts, max_new_tokens=60)
    assert len({len(of_row) for of_row in rounds}) > 1
    names_of_control = [token for token in ensemble.tokenizer.all_special_tokens if token]
    for shown in texts_shown_to(ensemble, 1):
        own = shown.removeprefix(ensemble.tokenizers[1].bos_token or "")
        assert not any(name in own for name in names_of_control)


def test_a_batch_ends_with_its_last_row():
    ensemble = duet(("small", "gemma"), "a one two")
    rows = output_ids(ensemble, ["a", "a"])
    assert rows[0] == rows[1]
    assert rows[0][-1] == ensemble.tokenizer.eos_token_id


def test_the_end_of_an_assistant_is_written_as_the_primarys_likelier_end_id():
    """EOS is matched by role; the primary may end with `<|end|>` or with `<|im|>`."""
    tokenizer, large = tiny.byte_level_bpe(400, specials=["<|im|>"]), tokenizer_of("large")
    end, im = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im|>")
    a = id_of(tokenizer, "a")
    primary = tiny.ScriptedModel(tokenizer, [{a: 0.7, im: 0.2, end: 0.1}])
    assistant = tiny.ScriptedModel(large, [{large.eos_token_id: 1}])
    ensemble = make_ensemble([primary, assistant], [tokenizer, large], method=SPANS)
    ids = torch.tensor([[a]])
    for ends, written in (([end, im], im), ([im, end], im), (end, end), (im, im)):
        output = ensemble.generate(ids, max_new_tokens=4, eos_token_id=ends)
        assert output[0, 1:].tolist() == [written]


def early_enders(names=("small", "gemma")):
    """Members whose end is likely from the first step on."""
    members = []
    for name, chance in zip(names, (0.3, 0.95), strict=True):
        tokenizer = tokenizer_of(name)
        row = {tokenizer.eos_token_id: chance, id_of(tokenizer, "b"): 0.6 * (1 - chance)}
        row[id_of(tokenizer, " ")] = 0.4 * (1 - chance)
        rows = [row, {**row, id_of(tokenizer, " "): 0.7 * (1 - chance)}]
        members.append((tokenizer, lambda context, rows=rows: rows[len(context) % 2]))
    return members_of(*members)


@pytest.mark.crossed
@pytest.mark.parametrize("names", [("small", "gemma"), ("gemma", "small")], ids=" + ".join)
@pytest.mark.parametrize("do_sample", [False, True])
def test_a_minimum_length_holds_back_every_members_end(names, do_sample):
    ensemble = early_enders(names)
    end, length = ensemble.tokenizer.eos_token_id, len(ensemble.tokenizer("a")["input_ids"])
    torch.manual_seed(0)
    for minimum in (1, 8):
        for options in ({"min_new_tokens": minimum}, {"min_length": length + minimum}):
            new = generate(ensemble, do_sample=do_sample, top_k=0, **options)[0, length:].tolist()
            assert end not in new[:minimum]
            if not do_sample:
                assert new.index(end) < 24
    if not do_sample:
        assert end in generate(ensemble)[0, length:].tolist()[:8]


def test_a_minimum_length_holds_back_an_end_id_that_writes_text():
    """The newline ends the primary's texts only, so an assistant may propose it."""
    small = tokenizer_of("small")
    ensemble = duet(("small", "gemma"), "a one\ntwo three\nfour")
    ends = [small.eos_token_id, id_of(small, "\n")]
    new = generate(ensemble, eos_token_id=ends, min_new_tokens=8)[0, 1:].tolist()
    assert not set(new[:8]) & set(ends)
    assert len(new) >= 8


def test_the_likelier_end_id_is_written_also_after_words_where_the_primary_would_go_on():
    tokenizer, large = tiny.byte_level_bpe(400, specials=["<|im|>"]), tokenizer_of("large")
    end, im = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im|>")
    member, longer = spelling(tokenizer), story(tokenizer, {"a one two three four": 1})

    def script(context):
        row = longer(context)
        return {next(iter(row)): 0.5, im: 0.3, end: 0.2} if member.text_of_prompt(context) == b"a one two" else row

    models = [tiny.ScriptedModel(tokenizer, script), tiny.ScriptedModel(large, story(large, {"a one two": 1}))]
    ensemble = make_ensemble(models, [tokenizer, large], method=SPANS)
    output = ensemble.generate(torch.tensor([[id_of(tokenizer, "a")]]), max_new_tokens=30, eos_token_id=[end, im])
    assert member.text_of_prompt(output[0].tolist()) == b"a one two"
    assert output[0, -1] == im


# --- Criteria and streams -------------------------------------------------------------------------------------------


def test_a_criterion_sees_every_id_one_a_call_and_ends_rows():
    ensemble = rivals()
    seen = []

    def criterion(input_ids, scores, **kwargs):
        seen.append(input_ids.tolist())
        return torch.tensor([input_ids.shape[1] >= 8] * len(input_ids))

    output = generate(ensemble, stopping_criteria=[criterion]).tolist()
    assert len(output[0]) == 8
    assert seen == [[output[0][:n]] for n in range(2, 9)]


def test_a_criterion_ends_rows_one_by_one():
    ensemble = duet(("small", "gemma"), ENGLISH)

    def criterion(input_ids, scores, **kwargs):
        return torch.tensor([input_ids.shape[1] - width > row for row in range(2)])

    width = len(ensemble.tokenizer("The")["input_ids"])
    rows = output_ids(ensemble, ["The", "The"], stopping_criteria=[criterion])
    assert rows[0] == [*rows[1][:-1], ensemble.tokenizer.pad_token_id]
    assert len(rows[0]) == width + 2


def test_a_stream_has_every_id_and_ends_once():
    ensemble = rivals()
    streamer = Recorder(ensemble.tokenizer)
    output = generate(ensemble, streamer=streamer)
    assert streamer.ids == output[0].tolist()
    assert streamer.num_ends == 1


@pytest.mark.parametrize("text", [ENGLISH, THAI, "法国的首都是巴黎。今天天气很好。", "I love it 😀😀 👍🏽"])
def test_a_text_iterator_gives_the_final_text(text):
    ensemble = duet(("smol", "gemma"), text)
    streamer = TextIteratorStreamer(ensemble.tokenizer, skip_prompt=True, skip_special_tokens=True, timeout=60)
    thread = threading.Thread(target=lambda: generate(ensemble, text[0], streamer=streamer, max_new_tokens=200))
    thread.start()
    found = "".join(streamer)
    thread.join()
    assert text[0] + found == text


@pytest.mark.parametrize("index", [0, 1])
def test_a_stream_is_ended_once_also_when_a_call_fails(index):
    ensemble = rivals()
    streamer = Recorder(ensemble.tokenizer)
    with (
        changed_logits(ensemble.members[index], lambda logits: logits * torch.nan),
        pytest.raises(MemberError, match=f"member-{index}"),
    ):
        generate(ensemble, streamer=streamer)
    assert streamer.num_ends == 1
    for options in ({"num_beams": 2}, {"weights": [1]}, {"output_scores": True, "return_dict_in_generate": True}):
        streamer = Recorder(ensemble.tokenizer)
        with pytest.raises(ConfigurationError):
            generate(ensemble, streamer=streamer, **options)
        assert streamer.num_ends == 1


def test_a_stream_of_two_rows_raises_as_in_transformers():
    ensemble = duet(("small", "gemma"), ENGLISH)
    with pytest.raises(ValueError, match="only supports batch size 1"):
        generate(ensemble, ["The", "The"], streamer=TextStreamer(ensemble.tokenizer))


# --- Members and weights --------------------------------------------------------------------------------------------


def test_the_same_model_twice_writes_its_own_text():
    tokenizer = tokenizer_of("small")
    model = tiny.ScriptedModel(tokenizer, story(tokenizer, {ONE: 0.6, SIX: 0.4}))
    twice = make_ensemble([model, model], [tokenizer, tokenizer], method=SPANS)
    ids = tokenizer("a", return_tensors="pt")["input_ids"]
    mask = torch.ones_like(ids)
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=40)
    assert twice.generate(ids, max_new_tokens=40).tolist() == expected.tolist()


def test_all_weight_on_one_member_gives_its_text():
    ensemble = rivals(own=0.9, other=0.01)
    assert text_of(ensemble, "a", weights=[0, 1]) == SIX
    calls = [len(model.calls) for model in ensemble.members]
    assert calls[0] == 0
    assert calls[1] > 0
    assert text_of(ensemble, "a", weights=[1, 0]) == ONE
    assert len(ensemble.members[1].calls) == calls[1]


def test_all_weight_on_the_primary_runs_its_own_generate():
    ensemble = CORE_RECIPES[0].ensemble
    ids = ensemble.tokenizer("The cat", return_tensors="pt")
    options = {"max_new_tokens": 8, "num_beams": 2, "suppress_tokens": [3]}
    found = ensemble.generate(**ids, method=SPANS, weights=[1, 0], **options)
    assert found.tolist() == ensemble.members[0].generate(**ids, **options).tolist()


def test_members_that_agree_are_not_scored():
    """A round takes one forward an id written, the one that shows the span's end included."""
    ensemble = duet(("small", "large"), ONE)
    rounds = rounds_of(ensemble, max_new_tokens=60)[0]
    assert all(len(item.candidates) == 1 for item in rounds)
    assert all(item.candidates[0].scores is None for item in rounds)
    assert all(item.candidates[0].proposers == (0, 1) for item in rounds)
    for index, model in enumerate(ensemble.members):
        assert sum(item.num_forwards[index] for item in rounds) == len(model.calls)
        for item in rounds:
            [candidate] = item.candidates
            written = len(ensemble.tokenizers[index](candidate.text, add_special_tokens=False)["input_ids"])
            assert item.num_forwards[index] <= written + 1


def test_a_round_keeps_every_candidate_its_scores_and_its_winner():
    first = rounds_of(rivals())[0][0]
    assert [(item.text, item.proposers) for item in first.candidates] == [
        (" one two three four", (0,)),
        (" six seven eight nine", (1,)),
    ]
    assert first.winner == 1
    assert all(score is not None for item in first.candidates for score in item.scores)


@pytest.mark.parametrize("prompts", [["a"], ["a", "a one", "a six", "a one two"]], ids=len)
def test_forwards_in_a_round_are_at_most_those_of_the_longest_candidate_and_one(prompts):
    """The look-ahead id that shows the end included; over several rounds with rejections and agreements."""
    ensemble = rivals(method=SweetSpanConfig(span_length=2))
    rounds = rounds_of(ensemble, prompts, max_new_tokens=60)
    for of_round in zip(*rounds):  # noqa: B905
        for index, tokenizer in enumerate(ensemble.tokenizers):
            longest = max(
                len(tokenizer(candidate.text, add_special_tokens=False)["input_ids"])
                for one in of_round
                for candidate in one.candidates
                if index in candidate.proposers
            )
            assert of_round[0].num_forwards[index] <= longest + 2
    assert len(rounds[0]) > 2
    for index, model in enumerate(ensemble.members):
        assert sum(one.num_forwards[index] for one in rounds[0]) == len(model.calls)


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [1, 4])
def test_forwards_of_random_members_in_a_round(ensemble, num_rows, monkeypatch):
    prompts = ["The capital of France is", "The cat", "Once upon a time", "She sells"][:num_rows]
    written = {member.name: [] for member in ensemble.member_views}
    propose = Participant.propose

    def spy(self, rows):
        proposals = yield from propose(self, rows)
        written[self.member.name].append(max(len(proposal.ids) for proposal in proposals))
        return proposals

    monkeypatch.setattr(Participant, "propose", spy)
    generate(ensemble, prompts, method=SHORT_SPANS, max_new_tokens=1)  # members have tried out their caches
    for lengths in written.values():
        lengths.clear()
    rounds = rounds_of(ensemble, prompts, method=SweetSpanConfig(span_length=2), max_new_tokens=30)
    longest = max(rounds, key=len)
    assert len(longest) > 1
    for one, limits in zip(longest, zip(*written.values(), strict=True), strict=True):
        assert all(num <= limit + 1 for num, limit in zip(one.num_forwards, limits, strict=True))


# --- Sampling and processors ----------------------------------------------------------------------------------------


def test_the_seed_decides(ensemble):
    def draw(seed):
        torch.manual_seed(seed)
        options = {"method": SHORT_SPANS, "do_sample": True, "temperature": 2.0, "max_new_tokens": 12}
        return generate(ensemble, "The cat", **options).tolist()

    first = draw(1)
    assert draw(1) == first
    assert any(draw(seed) != first for seed in (0, 2))


@pytest.mark.parametrize("options", [{"top_k": 1}, {"temperature": 1e-3}], ids=str)
def test_drawing_from_the_best_only_is_greedy(ensemble, options):
    batch = padded(prompt_rows(ensemble), fill=lambda n: ensemble.tokenizer.pad_token_id)
    greedy = ensemble.generate(**batch, method=SHORT_SPANS, max_new_tokens=12)
    drawn = ensemble.generate(**batch, method=SHORT_SPANS, max_new_tokens=12, do_sample=True, **options)
    assert drawn.tolist() == greedy.tolist()


def test_returned_sequences_stand_together_by_prompt(ensemble):
    batch = padded(prompt_rows(ensemble), fill=lambda n: ensemble.tokenizer.pad_token_id)
    torch.manual_seed(0)
    options = {"method": SHORT_SPANS, "do_sample": True, "num_return_sequences": 3, "temperature": 3.0}
    output = ensemble.generate(**batch, max_new_tokens=6, **options)
    width = batch["input_ids"].shape[1]
    assert output[:, :width].tolist() == batch["input_ids"].repeat_interleave(3, dim=0).tolist()
    assert len({tuple(row) for row in output[:, width:].tolist()}) > 5


def test_sequences_of_one_prompt_share_its_forward():
    ensemble = rivals()
    generate(ensemble, do_sample=True, num_return_sequences=3, max_new_tokens=3)
    for model in ensemble.members:
        sizes = [len(call.input_ids) for call in model.calls]
        assert sizes[0] == 1
        assert sizes[1] == 3


def test_processors_that_read_ids_act_on_every_member():
    for weights in ([1, 1], [0, 1]):
        members = []
        for name in ("small", "gemma"):
            tokenizer = tokenizer_of(name)
            row = {id_of(tokenizer, text): p for text, p in (("b", 0.4), (" ", 0.3), ("c", 0.2), ("d", 0.1))}
            members.append((tokenizer, lambda context, row=row: row))
        ensemble = members_of(*members, weights=weights)
        assert text_of(ensemble, "a", max_new_tokens=4) == "abbbb"
        text = text_of(ensemble, "a", max_new_tokens=4, repetition_penalty=9.0)
        assert text.startswith("ab cd")
        text = text_of(ensemble, "a", max_new_tokens=8, no_repeat_ngram_size=2)
        assert len({text[n : n + 2] for n in range(8)}) == 8


def halve(input_ids, scores):
    return scores


REFUSED = {
    "logits_processor": ({"logits_processor": [halve]}, "function"),
    "bad_words_ids": ({"bad_words_ids": [[100]]}, "NoBadWords|bad_words_ids"),
    "suppress_tokens": ({"suppress_tokens": [100]}, "SuppressTokens|suppress_tokens"),
    "prefix_allowed_tokens_fn": ({"prefix_allowed_tokens_fn": lambda row, ids: [1]}, "prefix_allowed_tokens_fn"),
    "num_beams": ({"num_beams": 2}, "num_beams"),
    "output_scores": ({"output_scores": True, "return_dict_in_generate": True}, "output_scores"),
    "output_logits": ({"output_logits": True, "return_dict_in_generate": True}, "output_logits"),
    "output_attentions": ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
    "cache_implementation": ({"cache_implementation": "static"}, "cache_implementation"),
    "past_key_values": ({"past_key_values": DynamicCache()}, "past_key_values"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_by_name_before_any_forward(case):
    ensemble = rivals()
    options, match = REFUSED[case]
    with pytest.raises(ConfigurationError, match=match):
        generate(ensemble, **options)
    assert not any(model.calls for model in ensemble.members)


def test_a_processor_works_where_all_members_share_a_tokenizer():
    tokenizer, five = tokenizer_of("small"), "a one two three four five."
    banned = tokenizer(" six", add_special_tokens=False)["input_ids"][0]
    assert banned not in tokenizer(five)["input_ids"]

    def processor(input_ids, scores):
        return scores.index_fill(1, torch.tensor([banned]), -torch.inf)

    ensemble = members_of(*((tokenizer, story(tokenizer, {five: 1 - chance, SIX: chance})) for chance in (0.6, 0.9)))
    assert text_of(ensemble, "a") == SIX
    assert text_of(ensemble, "a", logits_processor=[processor]) == five
    assert text_of(ensemble, "a", suppress_tokens=[banned]) == five


def test_processors_that_leave_nothing_are_an_error_that_names_the_member():
    tokenizer = tokenizer_of("small")
    ensemble = members_of(*((tokenizer, story(tokenizer, {ONE: 1})) for _ in range(2)))
    for do_sample in (False, True):
        with pytest.raises(MemberError, match="member 'member-0' has nothing left"):
            generate(
                ensemble,
                do_sample=do_sample,
                logits_processor=[lambda ids, scores: torch.full_like(scores, -torch.inf)],
            )


# --- Caches and positions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_draft_is_kept_whole_or_dropped_whole(use_cache):
    """The scripted models raise where a cache is not what its context says."""
    agreeing = duet(("small", "gemma"), ONE)
    assert text_of(agreeing, "a", use_cache=use_cache) == ONE
    ensemble = rivals()
    assert text_of(ensemble, "a", use_cache=use_cache) == SIX
    first = rounds_of(ensemble, use_cache=use_cache)[0][0]
    assert first.candidates[first.winner].proposers == (1,)
    drafts = [ensemble.tokenizer(item.text, add_special_tokens=False)["input_ids"] for item in first.candidates]
    assert drafts[0][0] != drafts[1][0]


def test_a_prompt_may_be_empty():
    for names in (("smol", "gemma"), ("gemma", "smol")):
        ensemble = duet(names, "one two three four five.")
        output = ensemble.generate(torch.empty(1, 0, dtype=torch.long), max_new_tokens=40)
        assert spelling(ensemble.tokenizer).text_of_prompt(output[0].tolist()) == b"one two three four five."


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "index"), [("mamba", 1), ("jamba", 0), ("falcon_h1", 1)])
def test_recurrent_members_follow_rejections(architecture, index):
    smol, gemma = tokenizer_of("smol"), tokenizer_of("gemma")
    models = [tiny.tiny_llama(smol, seed=2)]
    models.insert(index, getattr(tiny, f"tiny_{architecture}")(gemma, seed=1))
    tokenizers = [smol]
    tokenizers.insert(index, gemma)
    ensemble = make_ensemble(models, tokenizers, method=SweetSpanConfig(span_length=1, max_span_tokens=4))
    options = {"max_new_tokens": 14, "return_dict_in_generate": True}
    found = generate(ensemble, ["The cat", "Once upon a"], **options)
    expected = generate(ensemble, ["The cat", "Once upon a"], use_cache=False, **options)
    assert found.sequences.tolist() == expected.sequences.tolist()
    lost = [index not in one.candidates[one.winner].proposers for of_row in found.rounds for one in of_row]
    assert any(lost)
    assert len(lost) > 4


def with_positions(limit, names=("small", "gemma"), limited=(0,), whole=ENGLISH):
    """Scripted members, of which some have learned positions."""
    models, tokenizers = [], [tokenizer_of(name) for name in names]
    for index, tokenizer in enumerate(tokenizers):
        model = tiny.ScriptedModel(tokenizer, writer(tokenizer, whole), max_position_embeddings=limit)
        if index in limited:
            model.position_table = nn.Embedding(limit, 1)
        models.append(model)
    return ready(make_ensemble(models, tokenizers, method=SPANS))


def with_a_gpt2(limited):
    """Random members, of which one has 64 learned positions."""
    names = ["smol", "gemma"]
    models = [tiny.tiny_llama(tokenizer_of(name), seed=1) for name in names]
    models[limited] = tiny.tiny_gpt2(tokenizer_of(names[limited]), n_positions=64)
    return make_ensemble(models, [tokenizer_of(name) for name in names], method=SPANS)


@pytest.mark.parametrize("limited", [0, 1])
def test_a_prompt_too_long_for_a_member_is_refused_before_any_forward(limited):
    ensemble = with_a_gpt2(limited)
    calls = []
    for model in ensemble.members:
        model.register_forward_pre_hook(lambda *args: calls.append(1))
    with pytest.raises(ConfigurationError, match=f"'member-{limited}' has positions for 64"):
        generate(ensemble, "xq" * 60)
    assert not calls


@pytest.mark.parametrize("limited", [0, 1])
def test_a_row_whose_positions_run_out_ends_with_a_warning(limited):
    ensemble = with_a_gpt2(limited)
    with pytest.warns(UserWarning, match=f"ends after .* member 'member-{limited}' has positions for 64"):
        output = generate(ensemble, "xq" * 20, max_new_tokens=60)
    assert output.shape[1] > len(ensemble.tokenizer("xq" * 20)["input_ids"])
    if limited == 0:
        assert output.shape[1] <= 65


@pytest.mark.parametrize("limited", [(0,), (0, 1)], ids=str)
def test_a_length_that_just_fits_the_positions_is_filled_without_a_warning(limited):
    for budget in (1, 2, 5, 9):
        ensemble = with_positions(1 + budget, ("small", "large"), limited, whole="The" + ENGLISH[3:])
        ids = torch.tensor([[id_of(ensemble.tokenizer, "T")]])
        assert ensemble.generate(ids, max_new_tokens=budget).shape[1] == 1 + budget


@pytest.mark.parametrize("limited", [(0,), (1,), (0, 1)], ids=str)
def test_positions_that_run_out_inside_a_character_end_the_row(limited):
    whole, length = "a" + "🙃" * 6, len(tokenizer_of("small")("🙃")["input_ids"])
    assert length > 2
    ensemble = with_positions(1 + length + 2, ("small", "small"), limited, whole)
    with pytest.warns(UserWarning, match=f"has positions for {length + 3}"):
        text = text_of(ensemble, "a", max_new_tokens=20)
    assert text == "a🙃"


# --- Numbers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "do_sample", "index"),
    [
        pytest.param(bad, do_sample, index, marks=[pytest.mark.slow] * ((n + do_sample + index) % 2))
        for n, bad in enumerate((torch.nan, torch.inf))
        for do_sample in (False, True)
        for index in (0, 1)
    ],
)
def test_what_is_not_finite_names_member_dtype_and_round(index, do_sample, bad):
    names = ["smol", "gemma"]
    models = [tiny.tiny_llama(tokenizer_of(name), seed=1) for name in names]
    models[index].to(torch.float16)
    ensemble = make_ensemble(models, [tokenizer_of(name) for name in names], method=SHORT_SPANS)
    generate(ensemble, "The", max_new_tokens=1)
    torch.manual_seed(0)
    spoilt = torch.zeros(models[index].config.vocab_size)
    spoilt[100] = bad
    with (
        changed_logits(models[index], lambda logits: logits + spoilt),
        pytest.raises(MemberError, match=rf"'member-{index}' returned NaN.*round 1.*float16"),
    ):
        generate(ensemble, "The", do_sample=do_sample)


@pytest.mark.parametrize("index", [0, 1])
def test_nan_that_arises_only_where_a_candidate_is_scored_is_named(index):
    ensemble = rivals(own=0.6, other=0.3)
    model = ensemble.members[index]
    script, member = model.script, spelling(ensemble.tokenizers[index])
    other = (SIX if index == 0 else ONE)[: len("a six")].encode()

    def spoilt(context):
        if member.text_of_prompt(context).startswith(other):
            return torch.full((model.config.vocab_size,), torch.nan)
        return script(context)

    model.script = spoilt
    with pytest.raises(MemberError, match=f"'member-{index}' returned NaN.*round 1"):
        generate(ensemble)


@pytest.mark.parametrize("half", [0, 1])
def test_bfloat16_beside_float32(half):
    names = ["smol", "gemma"]
    models = [tiny.tiny_llama(tokenizer_of(name), seed=1) for name in names]
    models[half].to(torch.bfloat16)
    ensemble = make_ensemble(models, [tokenizer_of(name) for name in names], method=SPANS)
    assert generate(ensemble, ["The cat", "Once upon a"], max_new_tokens=10).shape[0] == 2


# --- Text -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [("small", "gemma"), ("gemma", "with_bos"), ("with_bos", "smol")], ids=" + ".join)
def test_every_member_has_its_start_of_text_once(names):
    ensemble = rivals(names, method=SweetSpanConfig(span_length=2))
    text_of(ensemble, "a")
    for index, name in enumerate(names):
        tokenizer = ensemble.tokenizers[index]
        contexts = contexts_of(ensemble, index)
        assert contexts
        for context in contexts:
            at = [place for place, i in enumerate(context) if i == tokenizer.bos_token_id and i is not None]
            assert at == ([0] if name in ("gemma", "with_bos") else [])


def test_a_member_that_cleans_up_reads_spaces_before_punctuation():
    small, wordpiece = tokenizer_of("small"), tokenizer_of("wordpiece")
    whole = "the cat , the rat . the hat , the mat ."
    ensemble = members_of((small, writer(small, whole)), (wordpiece, ()))
    assert text_of(ensemble, "the") == whole


@pytest.mark.parametrize("name", ["nfkc", "lowercase"])
def test_what_a_lossy_member_rewrites_is_written_as_it_is_with_one_warning(name):
    small, lossy = tokenizer_of("small"), tokenizer_of(name)
    whole = "ﬁle ＡＢ ½ x² and ﬁ ＡＢ ½ x² The End of ﬁ."
    ensemble = members_of((small, writer(small, whole)), (lossy, ()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert text_of(ensemble, "ﬁle ＡＢ", max_new_tokens=120) == whole
    lossy_warnings = [one for one in caught if "does not read the text exactly" in str(one.message)]
    assert len(lossy_warnings) == 1


def test_a_span_that_ends_inside_an_entry_of_the_primary_cannot_be_written():
    """Its tokenizer begins no text with `##er`, and the second word ends inside an entry of several Thai words."""
    tokenizer = tokenizer_of("wordpiece")
    [long] = [i for token, i in tokenizer.get_vocab().items() if token.startswith("เรา")]
    script = [{tokenizer.convert_tokens_to_ids("##er"): 1.0}, {long: 1.0}]
    ensemble = members_of((tokenizer, script), (tokenizer, script), method=SweetSpanConfig(span_length=2))
    with pytest.raises(MemberError, match="cannot write 'er เ'"):
        generate(ensemble, "a", max_new_tokens=4)


@pytest.mark.parametrize("do_sample", [False, True])
def test_rows_without_a_token_are_never_chosen(do_sample):
    models, tokenizers = [], [tokenizer_of("small"), tokenizer_of("holes")]
    for tokenizer in tokenizers:
        script, size = writer(tokenizer, ONE), tiny.rows_of(tokenizer)
        bare = tiny.ScriptedModel(tokenizer, script, extra_rows=16)

        def padded_best(context, bare=bare, script=script, size=size, tokenizer=tokenizer):
            logits = torch.full((bare.config.vocab_size,), -40.0)
            for i, p in script(context).items():
                logits[i] = torch.tensor(p).log()
            logits[size:] = 5.0
            if size > 400:
                logits[[300, 301]] = 6.0
            return logits

        models.append(tiny.ScriptedModel(tokenizer, padded_best, extra_rows=16))
    ensemble = make_ensemble(models, tokenizers, method=SPANS)
    assert text_of(ensemble, "a", do_sample=do_sample) == ONE
    torch.testing.assert_close(
        torch.tensor(rounds_of(ensemble)[0][0].candidates[0].scores or (1.0, 1.0)), torch.ones(2)
    )


def test_a_control_token_that_ends_nothing_is_never_proposed():
    smol, gemma = tokenizer_of("smol"), tokenizer_of("gemma")
    control = {0: smol.unk_token_id, 1: gemma.bos_token_id}
    members = []
    for index, tokenizer in enumerate((smol, gemma)):
        script = story(tokenizer, {ONE: 1})
        members.append(
            (
                tokenizer,
                lambda context, script=script, index=index: (
                    {i: 0.1 * p for i, p in script(context).items()} | {control[index]: 0.9}
                ),
            )
        )
    ensemble = members_of(*members)
    [ids] = output_ids(ensemble, "a")
    assert smol.unk_token_id not in ids
    assert text_of(ensemble, "a") == ONE


def begun_prompt(tokenizer):
    """`a` and the first two bytes of a Thai letter."""
    member = spelling(tokenizer)
    ids = tokenizer("a")["input_ids"]
    return torch.tensor([[*ids, member.canonical_id(b"\xe0"), member.canonical_id(b"\xb8")]])


@pytest.mark.parametrize("names", [("small", "gemma"), ("gemma", "small")], ids=" + ".join)
def test_a_prompt_may_end_inside_a_character(names):
    whole = "aกข one two three four five."
    ensemble = duet(names, whole)
    output = ensemble.generate(begun_prompt(ensemble.tokenizer), max_new_tokens=80)
    assert spelling(ensemble.tokenizer).text_of_prompt(output[0].tolist()).decode() == whole


def test_a_member_without_byte_tokens_sits_out_until_the_character_is_complete():
    whole = "aกข one two three four five six seven eight."
    members = [tokenizer_of(name) for name in ("small", "gemma", "wordpiece")]
    ensemble = members_of(
        *((tokenizer, writer(tokenizer, whole)) for tokenizer in members[:2]), (members[2], ()), method=SPANS
    )
    output = ensemble.generate(begun_prompt(members[0]), max_new_tokens=80, return_dict_in_generate=True)
    assert spelling(members[0]).text_of_prompt(output.sequences[0].tolist()).decode() == whole
    first, second = output.rounds[0][:2]
    assert all(2 not in item.proposers for item in first.candidates)
    assert all(item.scores is None or item.scores[2] is None for item in first.candidates)
    assert any(2 in item.proposers for item in second.candidates)


# --- Errors and options ---------------------------------------------------------------------------------------------


def test_a_bound_too_small_for_any_character_is_named():
    ensemble = duet(("small", "large"), "a🙃🙃🙃", method=SweetSpanConfig(span_length=1, max_span_tokens=1))
    with pytest.raises(MemberError, match="max_span_tokens=1"):
        generate(ensemble)


@pytest.mark.parametrize("weights", [[1], [-1, 2], [0, 0], [float("nan"), 1]], ids=str)
def test_bad_weights_are_refused_before_any_forward(weights):
    ensemble = rivals()
    with pytest.raises(ConfigurationError, match="weights"):
        generate(ensemble, weights=weights)
    assert not any(model.calls for model in ensemble.members)


def test_a_member_that_fails_is_named():
    ensemble = rivals()

    def broken(context):
        raise RuntimeError("out of cheese")

    ensemble.members[1].script = broken
    with pytest.raises(MemberError, match="'member-1' failed in its forward pass: out of cheese"):
        generate(ensemble)


def test_a_failed_call_leaves_the_ensemble_usable():
    ensemble = rivals()
    with changed_logits(ensemble.members[1], lambda logits: logits * torch.nan), pytest.raises(MemberError):
        generate(ensemble)
    assert text_of(ensemble, "a") == SIX


def test_spans_are_no_logits_processor():
    small, gemma = tokenizer_of("small"), tokenizer_of("gemma")
    models = [tiny.ScriptedModel(tokenizer, story(tokenizer, {ONE: 1})) for tokenizer in (small, gemma)]
    with pytest.raises(ConfigurationError, match="(?i)sweetspan"):
        EnsembleLogitsProcessor(models, [small, gemma], method=SPANS)


def test_the_options_survive_saving_and_loading_as_an_auto_model(tmp_path):
    names, models, items = ("smol", "gemma"), [], []
    for name in names:
        models.append(tiny.tiny_llama(tokenizer_of(name)))
        models[-1].save_pretrained(tmp_path / name)
        tokenizer_of(name).save_pretrained(tmp_path / name)
        items.append(MemberConfig(path=str(tmp_path / name)))
    method = SweetSpanConfig(span_length=3, filter_ratio=5.0, score="bits_per_byte", max_span_tokens=20)
    ensemble = EnsembleForCausalLM.from_members(
        models, [tokenizer_of(name) for name in names], method=method, member_configs=items
    )
    ensemble.save_pretrained(tmp_path / "ensemble")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ensemble")
    assert loaded.config.method == method
    texts = [generate(one, "The cat", max_new_tokens=12).tolist() for one in (loaded, ensemble)]
    assert texts[0] == texts[1]


# --- The criterion by itself ----------------------------------------------------------------------------------------


def criterion_of(name="small", **options):
    return SpanStoppingCriteria(tokenizer_of(name), **options)


def model_that_writes(*wholes, name="small"):
    return tiny.ScriptedModel(tokenizer_of(name), writer(tokenizer_of(name), *wholes))


def written(model, criterion, *prompts, name="small"):
    tokenizer = tokenizer_of(name)
    inputs = tokenizer(list(prompts), return_tensors="pt", padding=True)
    output = model.generate(**inputs, stopping_criteria=[criterion], max_new_tokens=60)
    texts = [tokenizer.decode(row, skip_special_tokens=True) for row in output]
    return texts if len(texts) > 1 else texts[0]


def test_any_models_own_generate_stops_after_a_span():
    model = model_that_writes(ENGLISH)
    text = written(model, criterion_of(span_length=3), "The cat")
    assert text.startswith("The cat sat on the")
    assert len(text) < len("The cat sat on the mat,")


def test_rows_of_any_models_own_generate_end_one_by_one():
    model = model_that_writes(ENGLISH, GERMAN)
    first, second = written(model, criterion_of(span_length=2), "The cat", "Größe,")
    assert first.startswith("The cat sat on")
    assert second.startswith("Größe, Straße und")
    assert len(first) < len("The cat sat on the mat")
    assert len(second) < len("Größe, Straße und Übermut")


def test_a_criterion_may_be_used_again_for_another_text():
    model, criterion = model_that_writes(ENGLISH, GERMAN), criterion_of(span_length=2)
    for prompt, start in (
        ("The cat", "The cat sat on"),
        ("Größe, Straße", "Größe, Straße und Übermut"),
        ("The", "The"),
    ):
        text = written(model, criterion, prompt)
        assert text.startswith(start)
        assert text == written(model, criterion_of(span_length=2), prompt)


def test_a_criterion_may_be_used_again_for_the_text_that_it_has_just_ended():
    """Span by span, as the method itself proposes."""
    model, tokenizer, criterion = model_that_writes(ENGLISH), tokenizer_of("small"), criterion_of(span_length=2)
    ids = tokenizer("The", return_tensors="pt")["input_ids"]
    options = {"max_new_tokens": 60}
    for _ in range(2):
        mask = torch.ones_like(ids)
        fresh = model.generate(ids, attention_mask=mask, stopping_criteria=[criterion_of(span_length=2)], **options)
        ids = model.generate(ids, attention_mask=mask, stopping_criteria=[criterion], **options)
        assert ids.tolist() == fresh.tolist()


def test_a_criterion_ends_at_the_end_of_a_text_and_at_its_bound():
    tokenizer = tokenizer_of("small")
    ids = tokenizer("The cat sat", return_tensors="pt")["input_ids"]
    ended = torch.cat([ids, torch.tensor([[tokenizer.eos_token_id]])], dim=-1)
    assert criterion_of(span_length=8, start=0)(ended, None).tolist() == [True]
    assert criterion_of(span_length=8, start=0)(ids, None).tolist() == [False]
    bound = ids.shape[1]
    assert criterion_of(span_length=1, max_span_tokens=bound, start=0)(ids[:, :1], None).tolist() == [False]
    assert criterion_of(span_length=bound, max_span_tokens=bound, start=0)(ids, None).tolist() == [True]


@pytest.mark.parametrize("options", [{"span_length": 0}, {"span_length": 4, "max_span_tokens": 3}], ids=str)
def test_a_criterion_refuses_bad_options(options):
    with pytest.raises(ConfigurationError, match="span_length|max_span_tokens"):
        criterion_of(**options)


def test_a_call_by_spans_leaves_nothing_for_the_garbage_collector(monkeypatch):
    """Its caches, which hold buffers on a GPU, go with the call."""
    ensemble = make_ensemble([tiny.tiny_llama(contracts.small(), seed=n) for n in range(2)], [contracts.small()] * 2)
    made = []
    begin = Participant.__init__
    monkeypatch.setattr(
        Participant, "__init__", lambda self, *args: (made.append(weakref.ref(self)), begin(self, *args))[1]
    )
    gc.collect()
    gc.disable()
    try:
        inputs = ensemble.tokenizer("The cat", return_tensors="pt")
        ensemble.generate(**inputs, method="sweetspan", max_new_tokens=8, do_sample=False)
        assert len(made) == 2
        assert [one() for one in made] == [None, None]
    finally:
        gc.enable()
