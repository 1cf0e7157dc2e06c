"""Sampled candidates: each has a generator of its own, so they depend on nothing but their own row; and their law."""

import functools
import math

import pytest
import torch

from hf_ensemble import MbrConfig, RerankConfig, VoteConfig
from tests import tiny
from tests.bug_bank import kit
from tests.contracts import make_ensemble, padded

pytestmark = [kit.control_tokens_may_be_chosen]

PROMPTS = ("The capital of France is", "The cat", "Once upon a time there was a king")
SEED = 20
NUM = 3


@functools.cache
def model_of(name):
    make = {"gemma": tiny.tiny_gemma3, "qwen": tiny.tiny_gpt2}.get(name, tiny.tiny_llama)
    return make(kit.tokenizer_of(name))


@functools.cache
def ensemble_of(*names):
    return make_ensemble([model_of(name) for name in names], [kit.tokenizer_of(name) for name in names])


def sampled(ensemble, prompts=PROMPTS, config=None, **options):
    """The output for prompts, padded on the left."""
    rows = [ensemble.tokenizer(prompt)["input_ids"] for prompt in prompts]
    inputs = padded(rows, fill=lambda n: ensemble.tokenizer.pad_token_id)
    options = {"max_new_tokens": 6, "do_sample": True, "seed": SEED, "return_dict_in_generate": True, **options}
    return ensemble.generate(**inputs, method=config or VoteConfig(num_candidates=NUM), **options)


def written(output, row=0):
    """Who wrote what, with how many ids: by writer and number."""
    return {
        (writer.name, writer.number): (answer.data, writer.num_tokens, writer.ended_by)
        for answer in output.answers[row]
        for writer in answer.writers
    }


def of_members(found, *indices):
    return {key: value for key, value in found.items() if key[0] in {f"member-{index}" for index in indices}}


# --- What they depend on --------------------------------------------------------------------------------------------

CONFIGS = {
    "vote": VoteConfig(num_candidates=NUM),
    "mbr": MbrConfig(num_candidates=NUM, aggregate=True),
    "rerank": RerankConfig(num_candidates=NUM),
    "one": VoteConfig(),
}
each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


@pytest.mark.crossed
@each_config
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.7, "top_p": 0.9}, {"min_new_tokens": 3, "repetition_penalty": 1.3}], ids=str
)
def test_a_row_alone_is_the_row_in_a_batch(config, options):
    ensemble = ensemble_of("smol", "gemma", "qwen")
    together = sampled(ensemble, config=config, **options)
    ends = ensemble.tokenizer.eos_token_id
    longest = max(len(ids) for ids in ensemble.tokenizer(list(PROMPTS))["input_ids"])
    for number, prompt in enumerate(PROMPTS):
        alone = sampled(ensemble, [prompt], config, **options)
        assert written(alone) == written(together, number)
        assert [answer.rank for answer in alone.answers[0]] == [answer.rank for answer in together.answers[number]]
        own = len(ensemble.tokenizer(prompt)["input_ids"])
        new = alone.sequences[0, own:].tolist()
        found = together.sequences[number, longest:].tolist()
        assert found[: len(new)] == new
        assert set(found[len(new) :]) <= {ends}


def test_the_same_call_twice_is_the_same():
    ensemble = ensemble_of("smol", "gemma")
    first, second = sampled(ensemble), sampled(ensemble)
    assert first.sequences.tolist() == second.sequences.tolist()
    assert [written(first, row) for row in range(3)] == [written(second, row) for row in range(3)]


@pytest.mark.slow
def test_the_order_of_other_rows_changes_nothing():
    ensemble = ensemble_of("smol", "gemma")
    expected = [written(sampled(ensemble), row) for row in range(3)]
    for order in ((2, 0, 1), (1, 2, 0), (0, 2, 1)):
        found = sampled(ensemble, [PROMPTS[n] for n in order])
        assert [written(found, order.index(n)) for n in range(3)] == expected


def test_equal_rows_have_samples_of_their_own():
    """The n-th row of a prompt has the samples of the n-th, wherever it stands; the first those of the row alone."""
    ensemble = ensemble_of("smol", "gemma")
    one, other = PROMPTS[:2]
    expected = sampled(ensemble, [one, one, one])
    of_prompt = [written(expected, row) for row in range(3)]
    assert len({str(found) for found in of_prompt}) == 3
    assert all(of_prompt[0][key] != of_prompt[1][key] for key in of_prompt[0])
    assert of_prompt[0] == written(sampled(ensemble, [one]))
    mixed = sampled(ensemble, [other, one, other, one, one])
    assert [written(mixed, row) for row in (1, 3, 4)] == of_prompt
    assert written(mixed, 0) == written(sampled(ensemble, [other]))
    assert written(mixed, 0) != written(mixed, 2)


def test_who_else_writes_changes_nothing():
    """Neither further members, nor weights, nor methods: a member's place and name say what it draws."""
    two, three = ensemble_of("smol", "gemma"), ensemble_of("smol", "gemma", "qwen")
    expected = written(sampled(three))
    assert written(sampled(two)) == of_members(expected, 0, 1)
    assert written(sampled(three, weights=(0, 1, 1))) == of_members(expected, 1, 2)
    assert written(sampled(three, weights=(3, 1, 0))) == of_members(expected, 0, 1)
    by_row = sampled(three, weights=((1, 0, 1), (0, 1, 0), (1, 1, 1)))
    assert written(by_row, 0) == of_members(expected, 0, 2)
    together = sampled(three)
    assert written(by_row, 1) == of_members(written(together, 1), 1)
    assert written(by_row, 2) == written(together, 2)
    with_methods = written(sampled(two, config=VoteConfig(num_candidates=NUM, methods=("gac", "unite"))))
    assert of_members(with_methods, 0, 1) == of_members(expected, 0, 1)


def test_a_members_place_and_name_are_part_of_its_seed():
    twice = ensemble_of("smol", "smol")
    found = written(sampled(twice, config=VoteConfig(num_candidates=5)))
    mine, others = ([found[f"member-{index}", n][0] for n in range(5)] for index in (0, 1))
    assert all(a != b for a, b in zip(mine, others, strict=True))
    assert len(set(mine)) == 5


def test_the_number_of_candidates_changes_none_of_them():
    ensemble = ensemble_of("smol", "gemma")
    expected = written(sampled(ensemble, config=VoteConfig(num_candidates=6)))
    assert len(expected) == 12
    for count in (1, 2, 4):
        found = written(sampled(ensemble, config=VoteConfig(num_candidates=count)))
        assert found == {key: value for key, value in expected.items() if key[1] < count}


def test_how_answers_are_chosen_changes_none_of_them():
    ensemble = ensemble_of("smol", "gemma")
    expected = written(sampled(ensemble))
    for config in CONFIGS.values():
        found = written(sampled(ensemble, config=config))
        assert found == {key: value for key, value in expected.items() if key in found}


def test_other_seeds_and_prompts_have_other_samples():
    ensemble = ensemble_of("smol", "gemma")
    found = [written(sampled(ensemble, PROMPTS[:1], seed=seed)) for seed in (0, 1, SEED, 2**63 - 1)]
    assert all(a != b for n, a in enumerate(found) for b in found[:n])
    assert written(sampled(ensemble), 0) != written(sampled(ensemble), 1)


def test_prompts_of_members_own_do_not_make_rows_alike():
    """Rows with the same ids, told apart by what another member reads only."""
    ensemble = ensemble_of("smol", "gemma")
    given = [None, ["The cat", "The dog", "The cat"]]
    output = sampled(ensemble, [PROMPTS[0]] * 3, member_prompts=given)
    rows = [of_members(written(output, row), 0) for row in range(3)]
    assert all(rows[0][key] != rows[1][key] for key in rows[0])
    assert all(rows[0][key] != rows[2][key] for key in rows[0])


def test_prompts_that_write_the_same_are_not_alike_either():
    """The same text in other ids."""
    ensemble = ensemble_of("smol", "gemma")
    tokenizer = ensemble.tokenizer
    whole, by_letter = tokenizer(PROMPTS[1])["input_ids"], [tokenizer(c)["input_ids"][0] for c in PROMPTS[1]]
    assert tokenizer.decode(whole) == tokenizer.decode(by_letter)
    inputs = padded([whole, by_letter], fill=lambda n: tokenizer.pad_token_id)
    options = {"max_new_tokens": 6, "do_sample": True, "seed": SEED, "return_dict_in_generate": True}
    output = ensemble.generate(**inputs, method=VoteConfig(num_candidates=NUM), **options)
    rows = [of_members(written(output, row), 1) for row in range(2)]
    assert all(rows[0][key] != rows[1][key] for key in rows[0])


# --- Torch's generator ----------------------------------------------------------------------------------------------


def test_without_a_seed_one_number_is_drawn_and_says_all():
    ensemble = ensemble_of("smol", "gemma")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        drawn = int(torch.randint(2**63 - 1, ()))
        expected_state = torch.get_rng_state()
        for config in (VoteConfig(), VoteConfig(num_candidates=NUM), VoteConfig(methods=("gac", "sweetspan"))):
            torch.manual_seed(7)
            found = sampled(ensemble, config=config, seed=None)
            assert torch.equal(torch.get_rng_state(), expected_state)
            told = sampled(ensemble, config=config, seed=drawn)
            assert torch.equal(torch.get_rng_state(), expected_state)
            assert [written(found, row) for row in range(3)] == [written(told, row) for row in range(3)]
        assert written(sampled(ensemble, config=config, seed=None)) != written(found)


def test_greedy_draws_nothing():
    ensemble = ensemble_of("smol", "gemma")
    before = torch.get_rng_state()
    for seed in (None, 3):
        sampled(ensemble, config=VoteConfig(methods=("gac",)), do_sample=False, seed=seed)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("config", [VoteConfig(), VoteConfig(num_candidates=4)], ids=["one", "four"])
def test_the_best_alone_is_greedy(config):
    ensemble = ensemble_of("smol", "gemma", "qwen")
    greedy = sampled(ensemble, config=VoteConfig(), do_sample=False)
    best = sampled(ensemble, config=config, top_k=1)
    cold = sampled(ensemble, config=config, temperature=1e-4)
    for row in range(len(PROMPTS)):
        expected = written(greedy, row)
        for output in (best, cold):
            found = written(output, row)
            assert all(found[name, number] == expected[name, 0] for name, number in found)
            assert [answer.weight for answer in output.answers[row]] == pytest.approx(
                [answer.weight for answer in greedy.answers[row]]
            )
    assert best.sequences.tolist() == greedy.sequences.tolist()


# --- Methods --------------------------------------------------------------------------------------------------------

METHODS = ("gac", "sweetspan", "unite")


@pytest.mark.slow
@pytest.mark.parametrize("do_sample", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_methods_answer_alone_is_that_in_a_batch(do_sample):
    ensemble = ensemble_of("smol", "gemma")
    config = VoteConfig(methods=METHODS)
    prompts = [*PROMPTS, PROMPTS[1]]
    together = sampled(ensemble, prompts, config, do_sample=do_sample)
    for number, prompt in enumerate(PROMPTS):
        alone = written(sampled(ensemble, [prompt], config, do_sample=do_sample))
        assert {name for name, _ in alone} >= set(METHODS)
        assert alone == written(together, number)
    assert (written(together, 1) == written(together, 3)) == (not do_sample)


@pytest.mark.slow
def test_a_methods_samples_depend_on_its_own_row_only():
    ensemble = ensemble_of("smol", "gemma")
    expected = written(sampled(ensemble, config=VoteConfig(methods=("gac", "unite"))))
    more = written(sampled(ensemble, config=VoteConfig(num_candidates=2, methods=("gac", "unite"))))
    assert {key: value for key, value in more.items() if key in expected} == expected
    sampled_once = written(sampled(ensemble, config=VoteConfig(methods=("gac",))))
    assert sampled_once["gac", 0] == expected["gac", 0]
    greedy = written(sampled(ensemble, config=VoteConfig(methods=("gac",)), do_sample=False))
    assert greedy["gac", 0] != expected["gac", 0]


# --- Self-consistency -----------------------------------------------------------------------------------------------


def test_one_member_by_itself_is_asked_often():
    ensemble = ensemble_of("smol")
    output = sampled(ensemble, config=VoteConfig(num_candidates=5, extract=r"[a-z]"), max_new_tokens=4)
    for answers in output.answers:
        writers = [writer for answer in answers for writer in answer.writers]
        assert [writer.number for writer in sorted(writers, key=lambda one: one.number)] == list(range(5))
        assert {writer.name for writer in writers} == {"member-0"}
        assert sum(answer.weight for answer in answers) == pytest.approx(1)
        assert all(answer.weight == pytest.approx(len(answer.writers) / 5) for answer in answers)
    of_two = sampled(ensemble_of("smol", "gemma"), config=VoteConfig(num_candidates=5), max_new_tokens=4)
    assert written(output) == of_members(written(of_two), 0)


def test_as_many_are_returned_as_were_written():
    ensemble = ensemble_of("smol")
    output = sampled(ensemble, config=VoteConfig(num_candidates=4), num_return_sequences=4, max_new_tokens=2)
    assert len(output.sequences) == 4 * len(PROMPTS)
    for answers in output.answers:
        assert sorted(place for answer in answers for place in answer.places) == list(range(4))
        assert all(len(answer.places) == len(answer.writers) for answer in answers)


# --- Their law ------------------------------------------------------------------------------------------------------

PIECES = ("a", "b", "c", "d", "e")
PROBS = (0.4, 0.25, 0.2, 0.1, 0.05)


@functools.cache
def dice():
    """Two members that write one of a few letters, with different probabilities, then end."""
    tokenizer = tiny.pieces("x", *PIECES)
    first = tokenizer.convert_tokens_to_ids("a")

    def script(probs):
        return lambda context: {0: 1.0} if context[-1] >= first else {first + n: prob for n, prob in enumerate(probs)}

    models = [tiny.ScriptedModel(tokenizer, script(probs)) for probs in (PROBS, PROBS[::-1])]
    return make_ensemble(models, [tokenizer, tokenizer])


def expected_law(probs, temperature=1.0, top_p=1.0, top_k=0):
    powers = [prob ** (1 / temperature) for prob in probs]
    powers = [power / sum(powers) for power in powers]
    order = sorted(range(len(powers)), key=lambda n: -powers[n])
    kept, total = [], 0.0
    for n in order:
        if total < top_p and (not top_k or len(kept) < top_k):
            kept.append(n)
        total += powers[n]
    whole = sum(powers[n] for n in kept)
    return [powers[n] / whole if n in kept else 0.0 for n in range(len(powers))]


def assert_law(counts, probs):
    """Pearson's statistic is below its 99.99th percentile, and what has no probability never happens."""
    total = sum(counts)
    assert all(count == 0 for count, prob in zip(counts, probs, strict=True) if not prob)
    terms = [(count - total * prob) ** 2 / (total * prob) for count, prob in zip(counts, probs, strict=True) if prob]
    degrees = len(terms) - 1
    bound = {1: 15.2, 2: 18.5, 3: 21.2, 4: 23.6}[degrees]
    assert math.fsum(terms) < bound


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "law"),
    [
        ({}, {}),
        ({"temperature": 0.5}, {"temperature": 0.5}),
        ({"temperature": 2.0, "top_k": 3}, {"temperature": 2.0, "top_k": 3}),
        ({"top_p": 0.8}, {"top_p": 0.8}),
    ],
    ids=str,
)
def test_the_first_token_has_the_members_processed_distribution(options, law):
    ensemble = dice()
    count = 2500
    output = sampled(ensemble, ["x"], VoteConfig(num_candidates=count), max_new_tokens=2, **options)
    for index, probs in enumerate((PROBS, PROBS[::-1])):
        counts = dict.fromkeys(PIECES, 0)
        for answer in output.answers[0]:
            assert answer.ended
            counts[answer.text] += sum(writer.member == index for writer in answer.writers)
        assert sum(counts.values()) == count
        assert_law([counts[piece] for piece in PIECES], expected_law(probs, **law))


def test_samples_of_two_members_and_of_equal_rows_are_independent():
    """Their joint law is the product of their laws."""
    ensemble = dice()
    count = 1500
    output = sampled(ensemble, ["x", "x"], VoteConfig(num_candidates=count), max_new_tokens=1)
    letters = {
        (row, writer.member, writer.number): answer.text == "a"
        for row in range(2)
        for answer in output.answers[row]
        for writer in answer.writers
    }
    pairs = [((0, 0), (0, 1)), ((0, 0), (1, 0)), ((0, 1), (1, 1))]
    probs = {0: PROBS[0], 1: PROBS[-1]}
    for (row, index), (other_row, other) in pairs:
        p, q = probs[index], probs[other]
        laws = [p * q, p * (1 - q), (1 - p) * q, (1 - p) * (1 - q)]
        counts = [0] * 4
        for n in range(count):
            first, second = letters[row, index, n], letters[other_row, other, n]
            counts[2 * (not first) + (not second)] += 1
        assert_law(counts, laws)
    successive = [letters[0, 0, n] and letters[0, 0, n + 1] for n in range(count - 1)]
    assert sum(successive) / len(successive) == pytest.approx(PROBS[0] ** 2, abs=0.05)


def test_a_sampled_methods_first_token_has_its_law():
    """The mixture's, over many rows of one prompt."""
    ensemble = dice()
    output = sampled(ensemble, ["x"] * 800, VoteConfig(methods=("gac",)), max_new_tokens=1)
    counts = dict.fromkeys(PIECES, 0)
    for row in range(800):
        counts[written(output, row)["gac", 0][0].decode()] += 1
    law = [(a + b) / 2 for a, b in zip(PROBS, PROBS[::-1], strict=True)]
    assert_law([counts[piece] for piece in PIECES], law)
