"""SweetSpan's rounds and ids against the plain reference, on tiny members."""

import functools
import itertools
import zlib

import pytest
import torch

from hf_ensemble import EnsembleForCausalLM, MemberError, SweetSpanConfig
from tests import tiny
from tests.contracts import padded
from tests.reference import ReferenceMember, split_begun
from tests.reference_spans import ReferenceSpans, compare_rounds, word_ends

pytestmark = pytest.mark.slow

PROMPTS = {
    "english": "The capital of France is",
    "german": "Die Hauptstadt von Österreich heißt",
    "chinese": "今天天气很好",
    "thai": "สวัสดีครับ",
    "code": "def f(x):\n    if x:\n        return x  + 1\n",
    "emoji": "Family: 👩‍💻 🎉",
    "trailing_space": "The answer is ",
    "newlines_and_tabs": "One\n\n\nTwo\t\t",
}
SETTINGS = list(itertools.product((1, 2, 4, 8), ("perplexity", "bits_per_byte"), (0, 1.01, 10)))


def by_turns(cases, first=0):
    """Give every case the next of the settings; neighbours differ in all three."""
    return [(*case, *SETTINGS[(first + 5 * number) % len(SETTINGS)]) for number, case in enumerate(cases)]


# --- Members --------------------------------------------------------------------------------------------------------

STORIES = {
    "smol": "and the king said that 今天天气很好 because of the rain, สวัสดีครับ to all  of you.\n",
    "gemma": "and the king had three daughters: 法国的首都 is Paris.\n\tThe end of ภาษาไทย and so on 👩‍💻",
    "unigram": "and the cat sat on the mat ; 我们去公园吧 , Größe und Straße, then ก็ดี",
    "qwen": "and there was   a train from วันนี้อากาศดีมาก to 巴黎 about two hours",
    "llama2": "or so they\nsay. I think that カタカナ is the best thing\n",
    "ends_soon": "and that is",
    "ends_with_white_space": "and that was  ",
    "has_lines": "and\nthe\nking\nsaid\nno",
}
TOKENIZERS = {
    "smol": tiny.smol_like,
    "gemma": tiny.gemma_like,
    "unigram": tiny.unigram,
    "qwen": functools.partial(tiny.qwen_like, vocab_size=350),
    "llama2": functools.partial(tiny.sentencepiece_bpe, 600, style="llama2"),
    "wordpiece": tiny.wordpiece,
}
tokenizer_of = functools.cache(lambda name: TOKENIZERS[name]())


@functools.cache
def random_member(name):
    tokenizer = tokenizer_of(name)
    return {
        "smol": lambda: tiny.tiny_llama(tokenizer, seed=1),
        "gemma": lambda: tiny.tiny_gemma3(tokenizer, seed=2),
        "unigram": lambda: tiny.tiny_gpt2(tokenizer, n_positions=256, seed=3),
        "qwen": lambda: tiny.tiny_mamba(tokenizer, seed=4, extra_rows=5),
        "wordpiece": lambda: tiny.tiny_mixtral(tokenizer, seed=5),
    }[name](), tokenizer


@functools.cache
def telling_member(name, story=None, *, newline_ends=False):
    """A member that tells its story from the place where the text has got to, more or less surely."""
    tokenizer = tokenizer_of(name)
    model = tiny.ScriptedModel(tokenizer)
    if newline_ends:
        model.generation_config.eos_token_id = [tokenizer.eos_token_id, newline_of(name)]
    own = ReferenceMember(model, tokenizer)
    story = STORIES[story or name]
    longest = max(map(len, own.entries))

    def script(context):
        seen = own.text_of_prompt(context)
        text, begun = split_begun(seen)
        place = len(text) - max((len(prompt) for prompt in PROMPTS.values() if text.startswith(prompt)), default=0)
        rest = story[place:].encode().removeprefix(begun)
        entry = next((rest[:n] for n in range(min(longest, len(rest)), 0, -1) if rest[:n] in own.entries), None)
        logits = 2 * torch.randn(own.num_rows, generator=torch.Generator().manual_seed(zlib.crc32(seen)))
        logits[tokenizer.eos_token_id if entry is None else own.canonical_id(entry)] += 8
        return logits

    model.script = script
    return model, tokenizer


@functools.cache
def newline_of(name):
    return ReferenceMember(tiny.ScriptedModel(tokenizer_of(name)), tokenizer_of(name)).canonical_id(b"\n")


described = functools.cache(ReferenceMember)


@functools.cache
def ensemble_of(members, weights=None):
    return EnsembleForCausalLM.from_members(*zip(*members, strict=True), weights=weights)


def assert_equal(members, prompts, span_length, score, filter_ratio, max_span_tokens=None, weights=None, num_rounds=2):
    """The first rounds of every row are those of the reference, and so are the ids."""
    options = {"span_length": span_length, "filter_ratio": filter_ratio, "score": score}
    ensemble = ensemble_of(members, weights)
    reference = ReferenceSpans(
        [described(*member) for member in members], weights, max_span_tokens=max_span_tokens, **options
    )
    rows = [ensemble.tokenizer(prompt)["input_ids"] for prompt in prompts]
    expected = [reference.run(row, num_rounds, 1000) for row in rows]
    inputs = padded(rows, fill=lambda n: ensemble.tokenizer.pad_token_id or 0)
    output = ensemble.generate(
        **inputs,
        method=SweetSpanConfig(max_span_tokens=max_span_tokens, **options),
        max_new_tokens=max(len(ids) for ids, _ in expected),
        do_sample=False,
        return_dict_in_generate=True,
    )
    width = inputs["input_ids"].shape[1]
    assert output.sequences[:, :width].tolist() == inputs["input_ids"].tolist()
    for row, (ids, rounds) in enumerate(expected):
        number, difference = compare_rounds(output.rounds[row], rounds)
        assert difference is None, f"row {row}, round {number}: {difference}"
        settled = ids if number == len(rounds) else [i for round in rounds[:number] for i in round.ids]
        assert output.sequences[row, width:].tolist()[: len(settled)] == settled
        if number == len(rounds) and (ids[-1] in reference.primary.eos_ids or len(rows) == 1):
            assert len(output.rounds[row]) == number
    return [rounds for _, rounds in expected]


# --- Random members -------------------------------------------------------------------------------------------------


def rotations(*names):
    return [(*names[n:], *names[:n]) for n in range(len(names))]


RANDOM = [
    *itertools.product(rotations("smol", "gemma"), PROMPTS),
    *zip(rotations("smol", "gemma", "unigram") * 4, [*PROMPTS, *PROMPTS][:12], strict=True),
    *zip(rotations("qwen", "gemma", "smol", "unigram"), ("english", "thai", "emoji", "code"), strict=True),
]
BATCHED = [(("gemma", "smol"),), (("unigram", "smol", "gemma"),), (("qwen", "gemma", "smol", "unigram"),)]


def random_members(names):
    return tuple(random_member(name) for name in names)


def bound_of(span_length):
    """Words are rare in what random members write, and the bound common."""
    return None if span_length == 1 else 12


@pytest.mark.parametrize(("names", "prompt", "span_length", "score", "filter_ratio"), by_turns(RANDOM))
def test_random_members(names, prompt, span_length, score, filter_ratio):
    members = random_members(names)
    assert_equal(members, [PROMPTS[prompt]], span_length, score, filter_ratio, bound_of(span_length))


@pytest.mark.parametrize(("names", "span_length", "score", "filter_ratio"), by_turns(BATCHED, first=1))
def test_a_batch_of_random_members(names, span_length, score, filter_ratio):
    prompts = [PROMPTS[name] for name in ("english", "thai", "newlines_and_tabs", "emoji")]
    assert_equal(random_members(names), prompts, span_length, score, filter_ratio, 8)


LOSSY = [
    ("english", 4, "perplexity"),
    ("code", 8, "perplexity"),
    ("code", 1, "bits_per_byte"),
    ("newlines_and_tabs", 8, "bits_per_byte"),
]


@pytest.mark.parametrize(("prompt", "span_length", "score"), LOSSY)
def test_a_member_that_cannot_write_everything(prompt, span_length, score):
    """It scores what it reads."""
    members = random_members(("smol", "wordpiece"))
    assert_equal(members, [PROMPTS[prompt]], span_length, score, 10, bound_of(span_length))


@pytest.mark.parametrize("weights", [(0, 1, 1), (1, 0, 1), (1, 2, 3), (0, 0, 1)])
def test_random_members_with_weights(weights):
    members = random_members(("smol", "gemma", "unigram"))
    assert_equal(members, [PROMPTS["english"]], 2, "perplexity", 10, 8, weights)


# --- Members with a story -------------------------------------------------------------------------------------------

TELLING = [
    *itertools.product(rotations("smol", "gemma"), ("english", "chinese")),
    *itertools.product(rotations("smol", "gemma", "unigram"), PROMPTS),
    *zip(rotations("qwen", "gemma", "smol", "llama2"), ("german", "chinese", "emoji", "code"), strict=True),
]
TELLING_BATCHED = [(("smol", "gemma"),), (("gemma", "qwen", "smol"),), (("qwen", "llama2", "smol", "unigram"),)]


@pytest.mark.parametrize(("names", "prompt", "span_length", "score", "filter_ratio"), by_turns(TELLING, first=2))
def test_members_with_a_story(names, prompt, span_length, score, filter_ratio):
    members = tuple(telling_member(name) for name in names)
    (rounds,) = assert_equal(members, [PROMPTS[prompt]], span_length, score, filter_ratio)
    winners = [round.candidates[round.winner] for round in rounds]
    assert all(winner.has_eos or len(word_ends(winner.data)) == span_length - 1 for winner in winners)


@pytest.mark.parametrize(("names", "span_length", "score", "filter_ratio"), by_turns(TELLING_BATCHED, first=3))
def test_a_batch_of_members_with_a_story(names, span_length, score, filter_ratio):
    prompts = [PROMPTS[name] for name in ("code", "german", "trailing_space", "chinese")]
    members = tuple(telling_member(name) for name in names)
    assert_equal(members, prompts, span_length, score, filter_ratio)


ENDING = list(itertools.product(("ends_soon", "ends_with_white_space"), rotations("smol", "gemma", "unigram")))


@pytest.mark.parametrize(("story", "names", "span_length", "score", "filter_ratio"), by_turns(ENDING, first=4))
def test_members_that_end(story, names, span_length, score, filter_ratio):
    """All but the last have the same story, so that it wins and the row ends."""
    members = tuple(telling_member(name, story if name != names[-1] else None) for name in names)
    prompts = [PROMPTS["trailing_space"], PROMPTS["emoji"], PROMPTS["code"]]
    results = assert_equal(members, prompts, span_length, score, filter_ratio)
    if span_length == 8:
        assert any(rounds[-1].candidates[rounds[-1].winner].has_eos for rounds in results)


LINES = [(names, (at,)) for names in rotations("smol", "gemma") for at in range(2)]
LINES.append((("smol", "gemma", "unigram"), (0, 1)))


@pytest.mark.parametrize(("names", "with_lines", "span_length", "score", "filter_ratio"), by_turns(LINES, first=6))
def test_a_newline_that_ends(names, with_lines, span_length, score, filter_ratio):
    """For some of the members it is an end id: the primary's ends the row."""
    members = tuple(
        telling_member(name, "has_lines", newline_ends=index in with_lines) for index, name in enumerate(names)
    )
    assert_equal(members, [PROMPTS["trailing_space"]], span_length, score, filter_ratio)


# --- Members that do one odd thing ----------------------------------------------------------------------------------


def odd_member(name, rows, end_ids=("EOS",)):
    """What it writes after some texts is given by rows of logits that are added to noise, by entry or control token."""
    tokenizer = tokenizer_of(name)
    model = tiny.ScriptedModel(tokenizer)
    plain = ReferenceMember(model, tokenizer)

    def id_of(entry):
        if isinstance(entry, bytes):
            return plain.canonical_id(entry)
        return tokenizer.eos_token_id if entry == "EOS" else tokenizer.unk_token_id

    model.generation_config.eos_token_id = [id_of(entry) for entry in end_ids]

    def script(context):
        seen = plain.text_of_prompt(context).removeprefix(PROMPTS["english"].encode())
        logits = 2 * torch.randn(plain.num_rows, generator=torch.Generator().manual_seed(zlib.crc32(seen)))
        for entry, bonus in rows.get(seen, {}).items():
            logits[id_of(entry)] += bonus
        return logits

    model.script = script
    return model, tokenizer


ENDS = {b"": {b" a": 20}, b" a": {"EOS": 20}}
ENDS_INSIDE_A_CHARACTER = {b"": {b" a": 20}, b" a": {b"\xe0": 20}, b" a\xe0": {"EOS": 20}}
BEGINS = {b"": {b" a": 20}, b" a": {b"\xe0": 20}, b" a\xe0": {b" ": 8, b"\xb8": 6}, b" a\xe0\xb8": {b"\x81": 6}}
CONTINUES = {
    b" a\xe0": {b"\xb8": 20},
    b" a\xe0\xb8": {b"\x81": 20},
    b" a\xe0\xb8\x81": {b"b": 20},
    b" a\xe0\xb8\x81b": {b" ": 20},
}
CANNOT_BE_READ = {b"": {b" a": 20}, b" a": {b"\xf2": 20}, b" a\xf2": {b" ": 20}, b" a\xf2 ": {b"b": 20}}
CANNOT_BE_WRITTEN = {b"": {b"\xff": 20}, b"\xff": {b" a": 20}}
TWO = ("EOS", "UNK")
ODD = {
    "end_inside_a_character": [("gemma", ENDS_INSIDE_A_CHARACTER), ("smol", {})],
    "an_assistants_end_inside_a_character": [("smol", {}), ("gemma", ENDS_INSIDE_A_CHARACTER)],
    "a_character_over_two_rounds": [("gemma", BEGINS), ("smol", CONTINUES)],
    "an_assistant_continues_a_character": [("smol", CONTINUES), ("gemma", BEGINS)],
    "an_assistant_waits_for_a_character": [("gemma", CANNOT_BE_READ), ("smol", {})],
    "the_primary_cannot_write_one_of_two": [("smol", {}), ("gemma", CANNOT_BE_WRITTEN)],
    "the_primary_cannot_write_one_of_three": [("smol", {}), ("gemma", CANNOT_BE_WRITTEN), ("unigram", {})],
    "likelier_end_id": [("smol", {b"": {b" a": 20}, b" a": {"EOS": 18, "UNK": 20}}, TWO), ("gemma", {})],
    "an_assistants_end_ids": [("gemma", {}), ("smol", {b"": {b" a": 20}, b" a": {"EOS": 18, "UNK": 19}}, TWO)],
    "an_assistant_cannot_end": [("smol", ENDS), ("gemma", {}, (b"\n",))],
    "the_primary_cannot_end": [("smol", {}, (b"\n",)), ("gemma", ENDS)],
    "nothing_but_eos": [("smol", {b"": {"EOS": 20}}), ("gemma", {b"": {"EOS": 5}})],
}


@pytest.mark.filterwarnings("ignore:member .* ends texts with ids")
@pytest.mark.parametrize("span_length", [1, 2])
@pytest.mark.parametrize("case", ODD)
def test_odd_cases(case, span_length):
    members = tuple(odd_member(*options) for options in ODD[case])
    assert_equal(members, [PROMPTS["english"]], span_length, "perplexity", 10, 6, num_rounds=3)


def test_an_end_id_of_a_primary_of_weight_0():
    members = odd_member("smol", {b" a": {"EOS": 18, "UNK": 20}}, TWO), odd_member("gemma", ENDS)
    assert_equal(members, [PROMPTS["english"]], 2, "perplexity", 10, 6, (0, 1))


def test_an_empty_candidate_is_none():
    members = odd_member("smol", {b"": {b"\xe0": 20}}), odd_member("gemma", {b"": {b" a": 20}})
    assert_equal(members, [PROMPTS["english"]], 1, "bits_per_byte", 10, 1, num_rounds=1)
    members = members[0], odd_member("gemma", {b"": {b"\xe0": 20}})
    ensemble = ensemble_of(members)
    with pytest.raises(MemberError, match="no member proposed a span"):
        ensemble.generate(
            **ensemble.tokenizer(PROMPTS["english"], return_tensors="pt"),
            method=SweetSpanConfig(span_length=1, max_span_tokens=1),
            max_new_tokens=3,
        )


# --- A long prompt --------------------------------------------------------------------------------------------------

CHARACTERS = "法国的首都是巴黎今天气很好我们去公园吧他在学校习中文和数"
SPAN_LENGTH = 2


def window_member():
    """Every character is an id."""
    tokenizer = tiny.sentencepiece_bpe(4 + len(CHARACTERS), texts=(CHARACTERS,), byte_fallback=False)
    return tiny.tiny_gemma3(tokenizer, window=8, seed=7), tokenizer


def member_that_wins_every_other_round(prompt):
    """Sure of its own characters in even rounds, and of nothing in odd ones."""
    tokenizer = tiny.byte_level_bpe(texts=(CHARACTERS,) * 3)
    model = tiny.ScriptedModel(tokenizer)
    own = ReferenceMember(model, tokenizer)

    def script(context):
        text, begun = split_begun(own.text_of_prompt(context))
        place = len(text) - len(prompt)
        rest = CHARACTERS[place % len(CHARACTERS)].encode().removeprefix(begun)
        entry = next(rest[:n] for n in range(len(rest), 0, -1) if rest[:n] in own.entries)
        logits = torch.zeros(own.num_rows)
        logits[own.canonical_id(entry)] = 20 if place // SPAN_LENGTH % 2 == 0 else 0.01
        return logits

    model.script = script
    return model, tokenizer


@pytest.mark.parametrize("window_is_first", [True, False])
def test_a_sliding_window_that_loses_every_other_round_after_a_long_prompt(window_is_first):
    prompt = (CHARACTERS * 26)[:700]
    members = window_member(), member_that_wins_every_other_round(prompt)
    members = members if window_is_first else members[::-1]
    (rounds,) = assert_equal(members, [prompt], SPAN_LENGTH, "perplexity", 10, num_rounds=4)
    winners = [round.candidates[round.winner].proposers for round in rounds]
    assert winners == [(1,), (0,)] * 2 if window_is_first else [(0,), (1,)] * 2
