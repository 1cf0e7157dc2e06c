"""Whole answers, from the prompts to the ids and the record, against each member's own `generate` and the plain
reference."""

import functools
import itertools
import math
import random
import warnings
import zlib
from dataclasses import replace

import pytest
import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.generation.stopping_criteria import StopStringCriteria

from hf_ensemble import MbrConfig, RerankConfig, VoteConfig
from hf_ensemble.errors import ConfigurationError
from tests import reference_answers, tiny
from tests.bug_bank import kit
from tests.contracts import make_ensemble, padded
from tests.reference import ReferenceMember, split_begun
from tests.reference_answers import Written

pytestmark = [kit.control_tokens_may_be_chosen]

PROMPTS = ("The capital of France is", "The cat", "Once upon a time there was a king")
LOWER = tuple(prompt.lower() for prompt in PROMPTS)
TOKENIZERS = {
    "smol": tiny.smol_like,
    "gemma": tiny.gemma_like,
    "qwen": functools.partial(tiny.qwen_like, vocab_size=350),
    "unigram": tiny.unigram,
    "wordpiece": tiny.wordpiece,
    "lowercase": tiny.lowercasing_bpe,
    "llama2": functools.partial(tiny.sentencepiece_bpe, 600, style="llama2"),
    "no_bytes": functools.partial(
        tiny.sentencepiece_bpe, texts=(*tiny.ENGLISH, *tiny.GERMAN, "\ufffd"), byte_fallback=False, add_bos=False
    ),
    "bytes_only": functools.partial(tiny.byte_level_bpe, 260),
    "long": functools.partial(tiny.byte_level_bpe, 700),
}
tokenizer_of = functools.cache(lambda name: TOKENIZERS[name]())


def slow_but(num_quick, *cases):
    """Mark all but the first of some cases as slow, and as further ones."""
    marks = [pytest.mark.slow, pytest.mark.further]
    return [pytest.param(case, marks=marks if n >= num_quick else []) for n, case in enumerate(cases)]


# --- Members --------------------------------------------------------------------------------------------------------


def telling_member(name, answers, end=None, sureness=20):
    """A member with an answer to each prompt, written in its longest entries; where it has said all, it ends.

    Args:
        answers: By prompt, as text or bytes.
        end: Text that is an end id too; an answer with it ends there.
        sureness: How far what it writes is ahead of noise.
    """
    tokenizer = tokenizer_of(name)
    model = tiny.ScriptedModel(tokenizer)
    plain = kit.spelling(tokenizer)
    if end is not None:
        model.generation_config.eos_token_id = [tokenizer.eos_token_id, plain.canonical_id(end.encode())]
    stories = []
    for prompt, answer in answers.items():
        start = plain.text_of_prompt(plain.prompt_ids(prompt))
        stories.append((start, start + (answer if isinstance(answer, bytes) else answer.encode())))
    longest = max(map(len, plain.entries))

    def script(context):
        seen = plain.text_of_prompt(context)
        logits = 2 * torch.randn(plain.num_rows, generator=torch.Generator().manual_seed(zlib.crc32(seen)))
        chosen = tokenizer.eos_token_id
        for start, story in stories:
            rest = story.removeprefix(seen)
            if rest and story.startswith(seen) and seen.startswith(start):
                entry = next(rest[:n] for n in range(longest, 0, -1) if rest[:n] in plain.entries)
                chosen = plain.canonical_id(entry)
        logits[chosen] += sureness
        return logits

    model.script = script
    return model, tokenizer


@functools.cache
def random_member(name, seed=0, **options):
    tokenizer = tokenizer_of(name)
    make = {"gemma": tiny.tiny_gemma3, "unigram": tiny.tiny_mixtral, "qwen": tiny.tiny_gpt2}.get(name, tiny.tiny_llama)
    return make(tokenizer, seed=seed, **options), tokenizer


@functools.cache
def described(model, tokenizer):
    return ReferenceMember(model, tokenizer)


# --- The reference --------------------------------------------------------------------------------------------------


def stock_answer(member, index, ids, settings):
    """What a member writes by itself, in stock generation of one row."""
    config = GenerationConfig(
        **settings, do_sample=False, eos_token_id=sorted(member.eos_ids), pad_token_id=member.tokenizer.pad_token_id
    )
    row = torch.tensor([ids])
    output = member.model.generate(
        row, attention_mask=torch.ones_like(row), generation_config=config, tokenizer=member.tokenizer
    )
    new = output[0, len(ids) :].tolist()
    end = None
    if new[-1] in member.eos_ids:
        end = "eos" if new[-1] in member.control else "text"
    elif config.stop_strings and bool(StopStringCriteria(member.tokenizer, config.stop_strings)(output, None)):
        end = "text"
    data = b"".join(member.token_bytes.get(i, b"") for i in new)
    log_prob = None if config.num_beams not in (None, 1) else log_prob_of(member, ids, new)
    return Written(index, 0, data, end, tuple(new), log_prob)


@torch.no_grad()
def log_prob_of(member, ids, new, real_only=False, ends=()):
    """The log-probability of ids after others, and of any of some end ids after those."""
    row = torch.tensor([[*ids, *new]])
    logits = member.model(input_ids=row, attention_mask=torch.ones_like(row), use_cache=False).logits[0].double()
    if real_only:
        real = torch.tensor(sorted(i for i in member.vocab.values() if i < member.num_rows))
        logprobs = logits - logits[:, real].logsumexp(-1, keepdim=True)
    else:
        logprobs = logits.log_softmax(-1)
    total = sum(logprobs[len(ids) + n - 1, i].item() for n, i in enumerate(new))
    return total + (logprobs[-1, list(ends)].logsumexp(-1).item() if ends else 0.0)


def likelihood(member, start, before, candidate):
    """Of a whole answer with its end, in the member's own cut of prompt and answer."""

    def encoded(data):
        text, begun = split_begun(data)
        begun_ids = member.byte_ids(begun)
        return None if begun_ids is None else [*member.prompt_prefix, *member.prompt_ids(text), *begun_ids]

    alone, whole = encoded(before), encoded(before + candidate.data)
    if alone == start and whole is not None and whole[: len(start)] == start:
        ids = whole[len(start) :]
    else:
        ids = member.encode(candidate.data)
        if ids is None:
            text, begun = split_begun(candidate.data)
            ids = [*(member.append_ids(text) if text else []), *(member.encode(begun) or [] if begun else [])]
    if candidate.has_eos and not member.control_eos:
        return -math.inf
    return log_prob_of(member, start, ids, real_only=True, ends=member.control_eos if candidate.has_eos else ())


def choice_of(config, candidates, log_probs, weights):
    if isinstance(config, VoteConfig):
        return "votes", reference_answers.vote(candidates, config.extract)
    if isinstance(config, MbrConfig):
        name = config.utility if isinstance(config.utility, str) else config.utility.__name__
        return name, reference_answers.mbr(candidates, config.utility, config.aggregate)
    return "bits per byte", reference_answers.rerank_by_likelihood(candidates, log_probs(), weights)


EACH = (VoteConfig(), MbrConfig(), MbrConfig(aggregate=True), RerankConfig())
SETTINGS = {"max_new_tokens": 24}


def assert_equal(members, prompts, configs=EACH, weights=None, num_return_sequences=1, own_ids=None, **options):
    """All that `generate` returns is what the reference says, for each way of choosing.

    Args:
        own_ids: By row and member, what each reads where that is not the text of the prompt.
        **options: Of `generate`.

    Returns:
        The reference's candidates by row.
    """
    ensemble = make_ensemble(*zip(*members, strict=True))
    rows = [ensemble.tokenizer(prompt)["input_ids"] for prompt in prompts]
    inputs = padded(rows, fill=lambda n: ensemble.tokenizer.pad_token_id or 0)
    return compare(ensemble, inputs, rows, configs, weights, num_return_sequences, own_ids, **options)


def compare(ensemble, inputs, rows, configs, weights, num_return_sequences, own_ids, **options):
    described_members = [described(*pair) for pair in zip(ensemble.members, ensemble.tokenizers, strict=True)]
    primary, count = described_members[0], len(described_members)
    options = {**SETTINGS, **options}
    settings = {key: value for key, value in options.items() if key != "member_prompts"}
    of_row = [[1 / count] * count] * len(rows) if weights is None else weights
    of_row = of_row if isinstance(of_row[0], (list, tuple)) else [of_row] * len(rows)
    found = []
    for number, row in enumerate(rows):
        before = primary.text_of_prompt(row)
        text, begun = split_begun(before)
        assert not begun
        starts = [list(row)] + [[*one.prompt_prefix, *one.prompt_ids(text)] for one in described_members[1:]]
        if own_ids is not None:
            starts = [own or start for own, start in zip(own_ids[number], starts, strict=True)]
        written = [
            stock_answer(member, index, starts[index], settings)
            for index, member in enumerate(described_members)
            if of_row[number][index]
        ]
        cut = [reference_answers.cut(one, primary, options["max_new_tokens"]) for one in written]
        found.append((reference_answers.merge(cut, of_row[number]), starts, before))

    @functools.cache
    def log_probs(number):
        candidates, starts, before = found[number]
        return [
            [
                likelihood(member, start, before, candidate) if weight else None
                for member, start, weight in zip(described_members, starts, of_row[number], strict=True)
            ]
            for candidate in candidates
        ]

    for config in configs:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="no candidate contains an answer")
            output = ensemble.generate(
                **inputs,
                method=config,
                weights=weights,
                num_return_sequences=num_return_sequences,
                return_dict_in_generate=True,
                **{"do_sample": False, **options},
            )
        expected = []
        assert output.answers.method == config.name
        for number, (candidates, _, _) in enumerate(found):
            name, choice = choice_of(config, candidates, functools.partial(log_probs, number), of_row[number])
            record = output.answers[number]
            members = [view.name for view in ensemble.member_views]
            ranking = assert_same_candidates(record, candidates, name, choice, config, members)
            places = reference_answers.places(candidates, ranking, num_return_sequences)
            expected += [reference_answers.ids_returned(candidates[place], primary) for place in places]
            filled = {n: tuple(at for at, place in enumerate(places) if place == n) for n in range(len(candidates))}
            assert [answer.places for answer in record] == list(filled.values())
        width, longest = inputs["input_ids"].shape[1], max(map(len, expected))
        prompts = inputs["input_ids"].repeat_interleave(num_return_sequences, dim=0)
        filler = ensemble.tokenizer.pad_token_id
        filler = ensemble.tokenizer.eos_token_id if filler is None else filler
        assert output.sequences[:, :width].tolist() == prompts.tolist()
        filled = [[*ids, *[filler] * (longest - len(ids))] for ids in expected]
        assert output.sequences[:, width:].tolist() == filled
    return [candidates for candidates, _, _ in found]


def assert_same_candidates(record, candidates, name, choice, config, members):
    """The record's candidates are the reference's; gives the ranking that holds."""
    assert [answer.data for answer in record] == [candidate.data for candidate in candidates]
    for answer, candidate, score in zip(record, candidates, choice.scores, strict=True):
        assert (answer.text, answer.ended) == (candidate.text, candidate.ended)
        assert answer.weight == pytest.approx(candidate.weight)
        assert answer.scores[name] == (score if score is None else pytest.approx(score, rel=1e-4, abs=1e-6))
        if isinstance(config, VoteConfig):
            assert answer.answer == reference_answers.answer_in(candidate.text, config.extract)
        for writer, own in zip(answer.writers, candidate.writers, strict=True):
            assert (writer.member, writer.number, writer.ended_by) == (own.writer, own.number, own.end)
            assert (writer.name, writer.num_tokens) == (members[own.writer], len(own.ids))
            log_prob = own.log_prob if own.log_prob is None else pytest.approx(own.log_prob, rel=1e-3, abs=1e-3)
            assert writer.log_prob == log_prob
    ranking = choice.ranking
    if isinstance(config, RerankConfig):
        # Sums over ids are rounded in another order.
        sorted_scores = sorted(choice.scores)
        close = [b - a < 1e-4 * abs(a) for a, b in itertools.pairwise(sorted_scores) if math.isfinite(a)]
        if any(close):
            ranking = reference_answers.best_first([-answer.scores[name] for answer in record])
    assert [answer.rank for answer in record] == [ranking.index(n) for n in range(len(record))]
    return ranking


# --- Random members -------------------------------------------------------------------------------------------------

TRIOS = [("smol", "gemma", "qwen"), ("gemma", "unigram", "smol"), ("unigram", "qwen", "gemma")]


@pytest.mark.parametrize("names", slow_but(1, *TRIOS), ids="+".join)
def test_a_batch_of_random_members(names):
    members = [random_member(name, seed) for seed, name in enumerate(names)]
    assert_equal(members, PROMPTS, max_new_tokens=12)


@pytest.mark.parametrize(
    "names", slow_but(1, ("wordpiece", "smol"), ("smol", "wordpiece", "lowercase"), ("lowercase", "gemma"))
)
@pytest.mark.filterwarnings("ignore:member .* does not read the text exactly")
def test_members_that_read_less_than_there_is(names):
    """A WordPiece primary can write what follows a space; the answers of others have U+FFFD in its ids, or cannot be written."""
    if names[0] == "wordpiece":
        answers = dict.fromkeys(LOWER, " paris and the king")
        members = [telling_member(name, answers) for name in names]
        assert_equal(members, LOWER)
        return
    members = [random_member(name, seed) for seed, name in enumerate(names)]
    assert_equal(members, LOWER, max_new_tokens=10)


@pytest.mark.parametrize(
    "weights", slow_but(1, ((1, 1, 0), (0, 2, 1), (1, 2, 3)), (0, 1, 1), (1, 0, 2), (0, 0, 1)), ids=str
)
def test_weights(weights):
    """A member of weight 0 writes nothing, in that row, and has no part in likelihoods."""
    members = [random_member(name, seed) for seed, name in enumerate(("smol", "gemma", "qwen"))]
    assert_equal(members, PROMPTS, weights=weights, max_new_tokens=8)


@pytest.mark.slow
@pytest.mark.parametrize("num_return_sequences", slow_but(1, 2, 3))
def test_several_are_returned(num_return_sequences):
    members = [random_member(name, seed) for seed, name in enumerate(("smol", "gemma", "qwen"))]
    assert_equal(members, PROMPTS, num_return_sequences=num_return_sequences, max_new_tokens=8)


def test_one_member_of_two_equal_ones():
    """The same model twice writes the same, if that is how it would encode it."""
    smol, gemma = telling(("smol", EQUAL), ("gemma", LONG))
    [candidates, *_] = assert_equal([smol, smol, gemma], PROMPTS)
    assert [len(candidate.writers) for candidate in candidates] == [2, 1]


@pytest.mark.parametrize(
    "options",
    slow_but(
        3,
        {"min_new_tokens": 12},
        {"num_beams": 2},
        {"max_new_tokens": 1},
        {"num_beams": 3, "length_penalty": 0.5},
        {"repetition_penalty": 1.5},
        {"no_repeat_ngram_size": 1},
    ),
    ids=str,
)
def test_options_of_generate(options):
    """They act in every member's own ids."""
    members = [random_member(name, seed) for seed, name in enumerate(("smol", "gemma", "unigram"))]
    assert_equal(members, PROMPTS, (VoteConfig(), RerankConfig()), **{"max_new_tokens": 14, **options})


@pytest.mark.parametrize("num_beams", [1, 2])
def test_the_least_length_holds_for_every_member(num_beams):
    """In its own ids: all would end at once."""
    answers = dict.fromkeys(PROMPTS, "")
    members = [telling_member(name, answers, sureness=4) for name in ("smol", "gemma")]
    rows = assert_equal(members, PROMPTS, (VoteConfig(),), min_new_tokens=5, max_new_tokens=9, num_beams=num_beams)
    assert all(len(one.ids) >= 5 for candidates in rows for candidate in candidates for one in candidate.writers)


# --- Members with answers -------------------------------------------------------------------------------------------


def telling(*members):
    """Members given as a tokenizer's name, what it answers to the prompts (one for all, or a list), and options."""
    made = []
    for name, answers, *options in members:
        answers = [answers] * len(PROMPTS) if isinstance(answers, (str, bytes)) else answers
        made.append(telling_member(name, dict(zip(PROMPTS, answers, strict=True)), **(options[0] if options else {})))
    return made


EQUAL = " Paris."
ENDINGS = {
    "all_equal": [("smol", EQUAL), ("gemma", EQUAL), ("qwen", EQUAL)],
    "two_of_three": [("smol", " Berlin."), ("gemma", EQUAL), ("qwen", EQUAL)],
    "white_space_around": [("smol", " Berlin"), ("gemma", "  Paris.\n"), ("qwen", EQUAL)],
    "all_differ": [("smol", " Berlin."), ("gemma", EQUAL), ("qwen", " the king")],
    "by_row": [
        ("smol", [EQUAL, " sat.", ""]),
        ("gemma", [" Berlin", " sat.", " had three daughters and a very big house"]),
        ("unigram", [EQUAL, "", ""]),
    ],
    "all_empty": [("smol", ""), ("gemma", ""), ("qwen", "")],
    "some_empty": [("smol", ""), ("gemma", EQUAL), ("qwen", "")],
    "an_assistant_is_empty": [("smol", EQUAL), ("gemma", ""), ("qwen", " Berlin")],
    "white_space_only": [("smol", "\n"), ("gemma", ""), ("qwen", "  ")],
    "chinese": [("smol", " 巴黎。"), ("gemma", " 法国的首都是巴黎。"), ("qwen", " 巴黎。")],
    "thai_and_emoji": [("gemma", " ภาษาไทย 😀"), ("smol", " ภาษาไทย 👍🏽"), ("unigram", " 😀😀")],
}


QUICK = "by_row", "two_of_three", "chinese"


@pytest.mark.parametrize("case", slow_but(len(QUICK), *QUICK, *(case for case in ENDINGS if case not in QUICK)))
def test_answers_that_end(case):
    assert_equal(telling(*ENDINGS[case]), PROMPTS, max_new_tokens=40)


@pytest.mark.slow
@pytest.mark.parametrize("case", ENDINGS)
def test_answers_that_end_with_the_members_turned_round(case):
    assert_equal(telling(*ENDINGS[case][1:], ENDINGS[case][0]), PROMPTS, weights=(1, 2, 1), max_new_tokens=40)


LONG = " had three daughters, and the cat sat on the mat."


@pytest.mark.parametrize("max_new_tokens", slow_but(1, 5, 1, 2, 3, 8, 13))
@pytest.mark.parametrize("primary", ["bytes_only", "no_bytes", "smol"])
def test_answers_that_are_too_long_for_the_primary(primary, max_new_tokens):
    """A member of long tokens fits where the primary does not; what is cut has not ended."""
    members = telling((primary, EQUAL), ("long", LONG), ("gemma", " the king"))
    assert_equal(members, PROMPTS, max_new_tokens=max_new_tokens)


@pytest.mark.parametrize("names", slow_but(1, ("bytes_only", "smol", "gemma"), ("gemma", "smol"), ("smol", "gemma")))
@pytest.mark.parametrize("max_new_tokens", slow_but(1, 4, 1, 2, 3, 5, 6, 7, 30))
def test_a_character_that_is_begun_is_cut_off(names, max_new_tokens):
    answers = " 😀😀", " 天气 ก็ดี", " 👩‍💻👍🏽"
    members = telling(*((name, answers[n]) for n, name in enumerate(names)))
    assert_equal(members, PROMPTS, max_new_tokens=max_new_tokens)


@pytest.mark.slow
def test_bytes_that_are_no_character():
    """Ended with a begun character, or with a byte that begins none: kept, and U+FFFD for who cannot write it."""
    broken = " a\xe0".encode("latin-1"), b" a\xe0\xb8", b" \xb8b\xff"
    for names in (("gemma", "qwen"), ("smol", "gemma"), ("no_bytes", "gemma")):
        first = EQUAL if names[0] == "no_bytes" else list(broken)[::-1]
        if names[0] == "smol":
            first = [b" a\xe0", b" a\xe0\xb8", b" \xb8b"]
        members = telling((names[0], first), (names[1], list(broken)))
        for weights in ((1, 1), (1, 2)):
            assert_equal(members, PROMPTS, weights=weights)


def test_what_the_primary_cannot_write():
    """U+FFFD for each character, in the ids; the text and the record keep it."""
    members = telling(("no_bytes", " Paris"), ("gemma", " 巴黎 ok"), ("smol", " 巴黎 ok"))
    rows = assert_equal(members, PROMPTS)
    assert rows[0][1].text == " 巴黎 ok"
    assert_equal(telling(("smol", EQUAL), ("gemma", " \x04\x06 ok"), ("gemma", " \x04\x06 ok")), PROMPTS)


def test_a_primary_that_can_write_neither_is_named():
    answers = {"wordpiece": " paris", "gemma": " 貓"}
    ensemble = make_ensemble(*zip(*(telling_member(name, {LOWER[0]: answers[name]}) for name in answers), strict=True))
    with pytest.raises(ConfigurationError, match=r"member-0.*U\+FFFD.*another member the primary"):
        ensemble.generate(**ensemble.tokenizer(LOWER[0], return_tensors="pt"), method="vote", weights=(1, 2))


@pytest.mark.slow
@pytest.mark.parametrize("max_new_tokens", slow_but(1, 20, 4))
@pytest.mark.parametrize("names", slow_but(1, ("smol", "gemma", "qwen"), ("gemma", "unigram", "smol")))
def test_an_end_id_that_writes_text(names, max_new_tokens):
    """A newline ends the primary, or an assistant: no EOS then, unless the earliest writer has one."""
    first, second, third = names
    lines = " Paris\nand more"
    for members in (
        [(first, lines, {"end": "\n"}), (second, " Paris\n"), (third, " Berlin")],
        [(first, " Paris\n"), (second, lines, {"end": "\n"}), (third, " Berlin")],
        [(first, " Berlin"), (second, lines, {"end": "\n"}), (third, " Paris\n")],
        [(first, " Berlin"), (second, " Paris\n"), (third, lines, {"end": "\n"})],
        [(first, lines, {"end": "\n"}), (second, lines, {"end": "\n"}), (third, lines)],
    ):
        assert_equal(telling(*members), PROMPTS, max_new_tokens=max_new_tokens)


@pytest.mark.parametrize("stop_strings", slow_but(1, [".", "aug"], ["mat"], [", and"], ["never"]), ids=str)
@pytest.mark.parametrize("names", slow_but(1, ("smol", "gemma", "long"), ("gemma", "bytes_only", "smol")))
def test_stop_strings_work_by_text_in_every_member(names, stop_strings):
    answers = LONG, [LONG, " sat on the mat, or", EQUAL], LONG
    members = telling(*zip(names, answers, strict=True))
    for max_new_tokens in (12, 60):
        assert_equal(members, PROMPTS, stop_strings=stop_strings, max_new_tokens=max_new_tokens)


@pytest.mark.slow
def test_stop_strings_with_beams():
    members = telling(("smol", LONG), ("gemma", LONG))
    assert_equal(members, PROMPTS[:1], (VoteConfig(),), stop_strings=["mat"], max_new_tokens=60, num_beams=2)


@pytest.mark.slow
def test_beams_of_members_that_end():
    for case in ("by_row", "two_of_three", "some_empty", "chinese"):
        assert_equal(telling(*ENDINGS[case]), PROMPTS, (VoteConfig(),), max_new_tokens=40, num_beams=2)


@pytest.mark.slow
def test_ties_go_to_the_primary_then_to_the_earliest():
    names = "smol", "gemma", "qwen"
    for answers in itertools.product((" a", " b"), (" a", " c"), (" b", " c")):
        assert_equal(telling(*zip(names, answers, strict=True)), PROMPTS[:1], EACH[:3])


@pytest.mark.slow
def test_a_tie_of_weights_that_differ_by_rounding():
    """Three times a third of a third."""
    members = telling(("smol", " a"), ("gemma", " b"), ("qwen", " b"), ("unigram", " b"), ("llama2", " c"))
    assert_equal(members, PROMPTS[:1], EACH[:3], weights=(0.3, 0.1, 0.1, 0.1, 0.2))


# --- Votes ----------------------------------------------------------------------------------------------------------

SENTENCES = [
    ("smol", " The answer is 42, or 24."),
    ("gemma", [" It is 24.", " None.", " 42 and 24"]),
    ("qwen", [" 24", " nothing", " I think 42"]),
]


def first_number(text):
    digits = [char for char in text if char.isdigit()]
    return "".join(digits[:2]) if digits else None


EXTRACTORS = {
    "a_group_that_took_no_part": r"(x)?\d+",
    "function": first_number,
    "numbers": r"\d+",
    "a_group": r"(\d)\d",
    "one_group_of_two": r"is (?:(\d+)|that)",
    "none": r"never",
    "strip": str.strip,
    "empty": lambda text: "",
}


@pytest.mark.parametrize("name", slow_but(1, *EXTRACTORS))
def test_votes_by_what_is_read_out(name):
    for weights in (None, (1, 1, 1), (1, 4, 1), (0, 1, 1)):
        assert_equal(
            telling(*SENTENCES), PROMPTS, (VoteConfig(extract=EXTRACTORS[name]),), weights=weights, max_new_tokens=60
        )


def test_no_answer_at_all_is_the_primarys_with_a_warning():
    members = telling(*SENTENCES)
    ensemble = make_ensemble(*zip(*members, strict=True))
    inputs = ensemble.tokenizer(PROMPTS[0], return_tensors="pt")
    with pytest.warns(UserWarning, match="no candidate contains an answer.*primary.*extract.*never"):
        found = ensemble.generate(**inputs, method=VoteConfig(extract="never"), max_new_tokens=60)
    assert ensemble.tokenizer.decode(found[0], skip_special_tokens=True) == PROMPTS[0] + SENTENCES[0][1]


def equal_length(hypotheses, references):
    return [float(-abs(len(h) - len(r))) for h, r in zip(hypotheses, references, strict=True)]


def test_a_utility_of_ones_own():
    assert_equal(telling(*SENTENCES), PROMPTS, (MbrConfig(utility=equal_length),), max_new_tokens=60)
    with pytest.raises(ConfigurationError, match="aggregate"):
        MbrConfig(utility=equal_length, aggregate=True)


# --- What members read ----------------------------------------------------------------------------------------------

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TURNS = (
    "{{ bos_token }}{% for m in messages %}{{ '<turn>' + m['role'] + '\n' + m['content'] + '</turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<turn>model\n' }}{% endif %}"
)
CONVERSATIONS = [
    [{"role": "user", "content": "The capital of France?"}],
    [
        {"role": "user", "content": "Who sat?"},
        {"role": "assistant", "content": "The cat."},
        {"role": "user", "content": "And who else sat on the mat, or on the hat?"},
    ],
]


@functools.cache
def chatting_members():
    smol, gemma = tiny.smol_like(), tiny.gemma_like(specials=("<turn>", "</turn>"))
    smol.chat_template, gemma.chat_template = CHATML, TURNS
    return (tiny.tiny_llama(smol, seed=1), smol), (tiny.tiny_gemma3(gemma, seed=2), gemma)


@pytest.mark.slow
@pytest.mark.parametrize("first", slow_but(1, 0, 1))
def test_conversations_in_every_members_own_template(first):
    members = chatting_members()[first:] + chatting_members()[:first]
    ensemble = make_ensemble(*zip(*members, strict=True))
    own_ids = []
    for conversation in CONVERSATIONS:
        apply = functools.partial(PreTrainedTokenizerBase.apply_chat_template, conversation=conversation)
        own_ids.append([apply(t, add_generation_prompt=True)["input_ids"] for _, t in members])
    inputs = ensemble.apply_chat_template(
        CONVERSATIONS, add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True
    )
    rows = [row[mask.bool()].tolist() for row, mask in zip(*inputs.values(), strict=True)]
    assert rows == [ids[0] for ids in own_ids]
    compare(ensemble, dict(inputs), rows, EACH, None, 1, own_ids, max_new_tokens=10)
    compare(ensemble, dict(inputs), rows, EACH, (1, 3), 2, own_ids, max_new_tokens=10)


def test_prompts_of_members_own():
    members = [random_member(name, seed) for seed, name in enumerate(("smol", "gemma", "qwen"))]
    given = [None, "Die Hauptstadt von Frankreich ist", ["Water boils", None, "Es war einmal ein König"]]
    own_ids = []
    for row in range(len(PROMPTS)):
        texts = [entry[row] if isinstance(entry, list) else entry for entry in given]
        references = [described(*member) for member in members]
        own_ids.append(
            [
                None if text is None else [*one.prompt_prefix, *one.prompt_ids(text)]
                for one, text in zip(references, texts, strict=True)
            ]
        )
    assert_equal(members, PROMPTS, own_ids=own_ids, member_prompts=given, max_new_tokens=8)


# --- Many cases -----------------------------------------------------------------------------------------------------

POOL = [
    "",
    " ",
    EQUAL,
    " Paris",
    " Berlin.",
    LONG,
    " 巴黎。",
    " 😀",
    "\n",
    " a\n\n\nb",
    " Größe",
    " 42",
    " 42.",
    " 24",
]


@pytest.mark.slow
@pytest.mark.parametrize("part", range(3))
def test_many_cases(part):
    for seed in range(20 * part, 20 * part + 20):
        rng = random.Random(seed)
        names = rng.sample(["smol", "gemma", "qwen", "unigram", "llama2", "long", "bytes_only"], rng.choice((2, 3, 4)))
        specs = []
        for name in names:
            options = {"end": "\n"} if rng.random() < 0.2 else {}
            specs.append((name, [rng.choice(POOL) for _ in PROMPTS], options))
        members = telling(*specs)
        weights = [rng.choice((0, 1, 1, 2)) for _ in names]
        weights = weights if any(weights) and rng.random() < 0.6 else None
        options = {"max_new_tokens": rng.choice((1, 2, 3, 5, 8, 13, 21, 60))}
        if rng.random() < 0.3:
            options["stop_strings"] = rng.sample(["Paris", ".", "a", "王", "2"], rng.choice((1, 2)))
        num_writers = sum(map(bool, weights)) if weights else len(names)
        num_return_sequences = rng.randint(1, num_writers)
        assert_equal(members, PROMPTS, EACH, weights, num_return_sequences, **options)


# --- Methods --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("methods", slow_but(1, ("gac", "sweetspan"), ("unite",)), ids="+".join)
def test_methods_write_candidates_too(methods):
    """Theirs are the primary's ids, and count as one member of all."""
    members = [random_member(name, seed) for seed, name in enumerate(("smol", "gemma", "qwen"))]
    ensemble = make_ensemble(*zip(*members, strict=True))
    primary = described(*members[0])
    rows = [ensemble.tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    inputs = padded(rows, fill=lambda n: ensemble.tokenizer.pad_token_id)
    for weights in ((1, 1, 2), (0, 1, 2)):
        config = VoteConfig(methods=methods, extract=r"[a-z]+")
        options = {"max_new_tokens": 8, "do_sample": False, "weights": weights}
        output = ensemble.generate(**inputs, method=config, return_dict_in_generate=True, **options)
        for number, row in enumerate(rows):
            written = []
            for index, member in enumerate(members):
                if weights[index]:
                    one = described(*member)
                    text = primary.text_of_prompt(row).decode()
                    start = [*one.prompt_prefix, *one.prompt_ids(text)] if index else row
                    written.append(stock_answer(one, index, start, {"max_new_tokens": 8}))
            for name in methods:
                alone = ensemble.generate(torch.tensor([row]), method=name, **options)[0, len(row) :].tolist()
                data = b"".join(primary.token_bytes.get(i, b"") for i in alone)
                end = "eos" if alone[-1] in primary.control_eos else None
                written.append(Written(name, 0, data, end, tuple(alone)))
            cut = [reference_answers.cut(one, primary, 8) for one in written]
            candidates = reference_answers.merge(cut, weights, methods=methods)
            choice = reference_answers.vote(candidates, config.extract)
            record = output.answers[number]
            assert [answer.data for answer in record] == [candidate.data for candidate in candidates]
            assert [answer.weight for answer in record] == pytest.approx([one.weight for one in candidates])
            assert [answer.rank for answer in record] == [choice.ranking.index(n) for n in range(len(candidates))]
            named = [[(w.name, w.member, w.number) for w in answer.writers] for answer in record]
            assert named == [
                [
                    (w.writer, None, 0) if isinstance(w.writer, str) else (f"member-{w.writer}", w.writer, 0)
                    for w in c.writers
                ]
                for c in candidates
            ]
            expected = reference_answers.ids_returned(candidates[choice.ranking[0]], primary)
            assert output.sequences[number, inputs["input_ids"].shape[1] :].tolist()[: len(expected)] == expected


def test_the_prompts_are_in_the_record():
    members = telling(*ENDINGS["two_of_three"])
    ensemble = make_ensemble(*zip(*members, strict=True))
    inputs = ensemble.tokenizer(list(PROMPTS), return_tensors="pt", padding=True)
    output = ensemble.generate(**inputs, method="mbr", return_dict_in_generate=True)
    assert output.answers.prompts == PROMPTS
    assert output.answers.criteria == ("chrf",)
    assert output.answers.written == (None,) * len(PROMPTS)
    assert output.scores is None
    assert replace(output.answers) == output.answers
