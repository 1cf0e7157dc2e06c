"""Speculation: whatever is drafted, the text is that of the plain loop."""

import copy
import itertools
import math
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from transformers import LogitsProcessor

from hf_ensemble import ConfigurationError, GacConfig, MemberError, SpeculationRound, SpeculationStats
from hf_ensemble.decoding.speculation import decoder as speculation_module
from hf_ensemble.decoding.speculation.draft_length import DraftLength, clock_of
from hf_ensemble.decoding.speculation.drafts import MemberDrafter, PromptLookup
from hf_ensemble.decoding.speculation.options import Speculation
from hf_ensemble.members.local import LocalMember
from hf_ensemble.modes import drafts
from tests import tiny
from tests.contracts import (
    CORE_RECIPES,
    PROMPTS,
    Recorder,
    assert_same_choices,
    assert_same_output,
    changed_logits,
    from_call,
    large,
    make_ensemble,
    model_of,
    new_ids,
    padded,
    prompt_rows,
    run,
    small,
    tokenizer_of,
)

pytestmark = pytest.mark.filterwarnings("ignore:the primary .* wrote the control token")

METHODS = ("gac", "unite", "deepen", "mined", "eva")
LENGTH = 4
QUICK = [(CORE_RECIPES[0], "gac"), (CORE_RECIPES[0], "deepen"), (CORE_RECIPES[1], "unite"), (CORE_RECIPES[2], "gac")]
SLOWLY_UNITE = ["gac", pytest.param("unite", marks=pytest.mark.slow)]


@pytest.fixture
def ensemble():
    return CORE_RECIPES[0].ensemble


@pytest.fixture
def row(ensemble):
    return prompt_rows(ensemble)[:1]


@pytest.fixture
def batch(ensemble):
    return padded(prompt_rows(ensemble), fill=lambda n: ensemble.tokenizer.pad_token_id)


def force_length(monkeypatch, length=LENGTH):
    """Let every draft have this length, whatever pays."""
    monkeypatch.setattr(DraftLength, "choose", lambda self, drafters, share=1.0: (drafters[0], length))


class Stub:
    """In place of look-up in the text: drafts what was written in an earlier call, or something else.

    Attributes:
        columns: For each row, the entries that it was decided as.
    """

    def __init__(self, monkeypatch):
        self.columns: list[list[int]] = []
        self._recorded: list[list[int]] = []
        self._spoil = lambda row, number, columns: columns
        stub = self

        class Text(PromptLookup):
            def __init__(self, ids, is_control):
                self.row, self.count = len(stub.columns), 0
                stub.columns.append([])

            def append(self, column, ids):
                stub.columns[self.row].append(column)
                self.count += 1

            def continuation(self, length):
                if not stub._recorded:
                    return [], 0
                columns = stub._recorded[self.row][self.count : self.count + length]
                return stub._spoil(self.row, self.count, columns), 3

        monkeypatch.setattr(speculation_module, "PromptLookup", Text)

    def draft_from_now(self, spoil=None):
        """Draft what has been recorded so far, changed by `spoil(row, number of entries before, entries)`."""
        self._recorded, self.columns = self.columns, []
        if spoil is not None:
            self._spoil = spoil


def half_right(row, number, columns):
    """Right up to a place that changes, then wrong."""
    right = (row + number) % (LENGTH + 1)
    return columns[:right] + [(column + 1) % 100 + 20 for column in columns[right:]]


# --- The text is that of the plain loop -----------------------------------------------------------------------------


def assert_row_by_row(found, expected, end_ids):
    for row in range(len(expected.sequences)):
        logits = [step[row] for step in expected.logits]
        assert_same_choices(new_ids(found, row, end_ids), new_ids(expected, row, end_ids), logits)


CASES = [
    pytest.param(
        recipe,
        method,
        id=f"{recipe}-{method}",
        marks=[] if (recipe, method) in QUICK else [pytest.mark.slow],
    )
    for recipe in CORE_RECIPES
    for method in METHODS
]


@pytest.mark.parametrize(("recipe", "method"), CASES)
def test_greedy_texts_and_distributions_are_those_of_the_plain_loop(recipe, method, monkeypatch):
    """In a left-padded batch, with right, wrong and half right drafts, and with a member's."""
    force_length(monkeypatch)
    stub = Stub(monkeypatch)
    ensemble = recipe.ensemble
    rows = padded(prompt_rows(ensemble), fill=lambda n: ensemble.tokenizer.pad_token_id or 0)
    options = {"method": method, "max_new_tokens": 12, "output_scores": True, "eos_token_id": [], "pad_token_id": 0}
    expected = run(ensemble, rows, **options)
    drafters = ["ngram", "ngram", f"member-{len(ensemble.members) - 1}"]
    for drafter in drafters[: 3 if recipe is CORE_RECIPES[0] else 2]:
        found = run(ensemble, rows, speculation=drafter, **options)
        assert_same_output(found, expected)
        for a, b in zip(found.scores, expected.scores, strict=True):
            torch.testing.assert_close(a.softmax(-1), b.softmax(-1), atol=1e-5, rtol=1e-3)
        if drafter == "ngram":
            stub.draft_from_now(half_right)
            continue
        assert found.speculation.drafted[drafter] > 0


def test_outputs_stand_in_the_order_of_stock_outputs(ensemble, row):
    """Who takes the second of an output has the scores."""
    output = run(ensemble, row, speculation="ngram", output_scores=True)
    assert [*output][:3] == ["sequences", "scores", "logits"]


def test_a_row_alone_is_the_row_in_a_batch(ensemble, batch, monkeypatch):
    force_length(monkeypatch)
    found = run(ensemble, batch, speculation="member-0", method="gac", max_new_tokens=10)
    for n, ids in enumerate(prompt_rows(ensemble)):
        alone = run(ensemble, [ids], speculation="member-0", method="gac", max_new_tokens=10)
        logits = [step[0] for step in alone.logits]
        end_ids = [ensemble.tokenizer.eos_token_id]
        assert_same_choices(new_ids(found, n, end_ids), new_ids(alone, 0, end_ids), logits)


def test_every_drafter_drafts_and_is_counted(ensemble, row, monkeypatch):
    force_length(monkeypatch, 3)
    for name in ("member-0", "member-1", "auto"):
        found = run(ensemble, row, speculation=name, max_new_tokens=9)
        stats = found.speculation
        assert sum(stats.drafted.values()) > 0
        assert all(0 <= stats.accepted[drafter] <= count for drafter, count in stats.drafted.items())
        assert stats.num_rounds == len(stats.rounds[0])
        assert stats.entries_per_round >= 1
        assert found.share_ensembled == [1.0]


OPTIONS = {
    "a penalty and a ban": {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
    "a least length": {"min_new_tokens": 6, "bad_words_ids": [[7]], "sequence_bias": [[[30], 4.0]]},
    "several ends": {"eos_token_id": list(range(40, 90))},
    "stop strings": {"stop_strings": ["e", "a", "t"]},
    "a short budget": {"max_new_tokens": 2},
    "one id": {"max_new_tokens": 1},
}


@pytest.mark.parametrize(
    ("method", "name"),
    [
        pytest.param(method, name, id=f"{method}-{name}", marks=[pytest.mark.slow] * ((n + turn) % 2))
        for turn, method in enumerate(("gac", "unite"))
        for n, name in enumerate(OPTIONS)
    ],
)
def test_an_option_acts_as_in_the_plain_loop(name, method, ensemble, batch, monkeypatch):
    force_length(monkeypatch)
    stub = Stub(monkeypatch)
    options = {"method": method, "max_new_tokens": 10, **OPTIONS[name]}
    end_ids = options.get("eos_token_id", [ensemble.tokenizer.eos_token_id])
    expected = run(ensemble, batch, **options)
    for _ in range(2):
        found = run(ensemble, batch, speculation="ngram", **options)
        if "stop_strings" in options:
            assert found.sequences.tolist() == expected.sequences.tolist()
        else:
            assert_row_by_row(found, expected, end_ids)
        stub.draft_from_now(half_right)


def test_a_processor_of_ones_own_is_called_once_an_id_with_the_ids_before_it(ensemble, row, monkeypatch):
    force_length(monkeypatch)
    stub = Stub(monkeypatch)

    class Keeper(LogitsProcessor):
        def __init__(self):
            self.seen = []

        def __call__(self, input_ids, scores):
            self.seen.append(input_ids.tolist())
            return scores.index_fill(-1, input_ids[0, -3:], -torch.inf)

    keepers = [Keeper(), Keeper(), Keeper()]
    options = {"max_new_tokens": 9, "method": "gac", "eos_token_id": []}
    expected = run(ensemble, row, logits_processor=[keepers[0]], **options)
    for keeper in keepers[1:]:
        assert_same_output(run(ensemble, row, logits_processor=[keeper], speculation="ngram", **options), expected)
        assert keeper.seen == keepers[0].seen
        stub.draft_from_now(half_right)


def test_streamed_and_stopped_id_by_id(ensemble, row, monkeypatch):
    force_length(monkeypatch)
    lengths = []

    def stops(input_ids, scores, **kwargs):
        lengths.append(input_ids.shape[1])
        return torch.tensor([input_ids.shape[1] == len(row[0]) + 7])

    streamer = Recorder(ensemble.tokenizer)
    found = run(ensemble, row, speculation="member-0", max_new_tokens=12, streamer=streamer, stopping_criteria=[stops])
    assert lengths == list(range(len(row[0]) + 1, len(row[0]) + 8))
    assert streamer.ids == found.sequences[0].tolist()
    assert streamer.num_ends == 1


@pytest.mark.parametrize("length", [1, pytest.param(3, marks=pytest.mark.slow), LENGTH])
def test_captured_members_draft_before_the_last_ids_are_handed_out(length, ensemble, row, batch, monkeypatch):
    def stops(input_ids, scores, **kwargs):
        # The first row ends where nobody else can know.
        return torch.tensor([index == 0 and input_ids.shape[1] == start + 6 for index in range(len(input_ids))])

    start = batch["input_ids"].shape[1]
    options = {"method": "gac", "max_new_tokens": 12, "stopping_criteria": [stops]}
    expected = run(ensemble, batch, **options)
    force_length(monkeypatch, length)
    monkeypatch.setattr(LocalMember, "cache_mode", property(lambda member: "static"))
    assert run(ensemble, batch, speculation="member-1", **options).sequences.tolist() == expected.sequences.tolist()

    events = []
    draft = MemberDrafter.draft
    monkeypatch.setattr(MemberDrafter, "draft", lambda *args: events.append("draft") or draft(*args))
    streamer = Recorder(ensemble.tokenizer)
    monkeypatch.setattr(streamer, "put", lambda ids: events.append("put"))
    run(ensemble, row, speculation="member-1", max_new_tokens=4, streamer=streamer)
    assert events[:3] == ["put", "draft", "put"]  # the prompt comes first


@pytest.mark.parametrize("method", ["gac", "unite"])
def test_a_member_may_sit_out_within_a_draft(method, monkeypatch):
    """The second one has no byte tokens, and the text is pushed through characters byte by byte."""
    force_length(monkeypatch)
    stub = Stub(monkeypatch)
    first, second = tokenizer_of("byte-level"), tiny.sentencepiece_bpe(300, byte_fallback=False)
    ids = [first.convert_tokens_to_ids(token) for token in "".join(_bytes_as_tokens("é天a"))]

    def script(context):
        return {ids[len(context) % len(ids)]: 0.9, 40: 0.1}

    ensemble = make_ensemble([tiny.ScriptedModel(first, script), tiny.tiny_llama(second)], [first, second])
    options = {"method": method, "weights": [0.9, 0.1], "max_new_tokens": 14}
    expected = run(ensemble, [[50]], **options)
    assert set(expected.sequences[0].tolist()) & set(ids)
    for _ in range(2):
        assert_same_output(run(ensemble, [[50]], speculation="ngram", **options), expected)
        stub.draft_from_now()


@pytest.mark.parametrize("speculation", ["ngram", "member-0", "member-1"])
def test_a_primary_without_weight_completes_a_character_that_nobody_else_can(speculation, monkeypatch):
    """Written is the first byte of what the second one, which has no byte tokens, would write as a whole."""
    force_length(monkeypatch)
    first, second = tokenizer_of("byte-level"), tiny.sentencepiece_bpe(300, byte_fallback=False)
    ids = [first.convert_tokens_to_ids(token) for token in _bytes_as_tokens("国")]
    follows = dict(itertools.pairwise(ids))
    models = [
        tiny.ScriptedModel(first, lambda context: {follows.get(context[-1], 40): 1.0}),
        tiny.ScriptedModel(second, [{second.convert_tokens_to_ids("国"): 1.0}]),
    ]
    options = {"method": "unite", "weights": [0, 1], "max_new_tokens": 9}
    ensemble = make_ensemble(models, [first, second])
    expected = run(ensemble, [[50]], **options)
    assert expected.sequences[0, 1:].tolist() == 3 * ids
    assert_same_output(run(ensemble, [[50]], speculation=speculation, **options), expected)


def _bytes_as_tokens(text):
    alphabet = tiny.byte_alphabet()
    return [alphabet[byte] for byte in text.encode()]


def test_a_full_member_ends_the_row_as_in_the_plain_loop(monkeypatch):
    force_length(monkeypatch)
    stub = Stub(monkeypatch)
    models = [tiny.tiny_llama(small()), tiny.tiny_gpt2(large(), n_positions=12, seed=1)]
    ensemble = make_ensemble(models, [small(), large()], method="gac")
    rows = prompt_rows(ensemble, PROMPTS[:1])
    options = {"max_new_tokens": 20, "eos_token_id": []}
    with pytest.warns(UserWarning, match="positions for 12 ids") as plain:
        expected = run(ensemble, rows, **options)
    for _ in range(2):
        with pytest.warns(UserWarning, match="positions for 12 ids") as caught:
            assert_same_output(run(ensemble, rows, speculation="ngram", **options), expected)
        assert [str(item.message) for item in caught] == [str(item.message) for item in plain]
        stub.draft_from_now()


def test_all_weight_on_the_primary_is_its_own_text_with_anybodys_drafts(ensemble, row, monkeypatch):
    force_length(monkeypatch)
    expected = run(ensemble.members[0], row, max_new_tokens=10)
    for name in ("member-1", "member-0", "ngram"):
        found = run(ensemble, row, weights=[1, 0], speculation=name, max_new_tokens=10)
        assert_same_output(found, expected)
    assert found.num_forwards[1] == 0
    auto = run(ensemble, row, weights=[1, 0], speculation="auto", max_new_tokens=10)
    assert "speculation" not in auto
    of_spans = run(ensemble, row, weights=[1, 0], speculation="ngram", method="sweetspan", max_new_tokens=10)
    assert of_spans.sequences.tolist() == expected.sequences.tolist()


def test_several_sequences_and_prompts_of_their_own(ensemble, batch, monkeypatch):
    force_length(monkeypatch)
    prompts = [None, ["Paris is the capital", "A dog", None]]
    options = {"member_prompts": prompts, "max_new_tokens": 6, "output_logits": False, "method": "gac"}
    expected = run(ensemble, batch, **options)
    assert run(ensemble, batch, speculation="member-1", **options).sequences.tolist() == expected.sequences.tolist()
    found = run(ensemble, batch, speculation="auto", do_sample=True, num_return_sequences=2, **options)
    assert found.sequences.shape[0] == 6
    assert len(found.speculation.rounds) == 6


def test_a_member_without_weight_may_draft(ensemble, row, monkeypatch):
    force_length(monkeypatch)
    models = [*ensemble.members, model_of("llama", "smol", 5)]
    three = make_ensemble(models, [*ensemble.tokenizers, ensemble.tokenizers[0]], weights=[0.5, 0.5, 0])
    expected = run(three, row, method="gac", max_new_tokens=10)
    found = run(three, row, method="gac", max_new_tokens=10, speculation="member-2")
    assert_same_output(found, expected)
    assert found.speculation.drafted["member-2"] > 0
    assert expected.num_forwards[2] == 0


@pytest.mark.parametrize("method", SLOWLY_UNITE)
def test_a_drafter_without_weight_and_positions_left_stops_drafting(method, monkeypatch):
    force_length(monkeypatch)
    models = [tiny.tiny_llama(small()), tiny.tiny_llama(large(), seed=1), tiny.tiny_gpt2(large(), n_positions=12)]
    ensemble = make_ensemble(models, [small(), large(), large()], weights=[0.5, 0.5, 0])
    rows = prompt_rows(ensemble, PROMPTS[1::-1])
    options = {"method": method, "max_new_tokens": 16, "eos_token_id": [], "pad_token_id": 0}
    for inputs in (rows[:1], padded(rows, fill=lambda n: 0)):
        expected = run(ensemble, inputs, **options)
        found = run(ensemble, inputs, speculation="member-2", **options)
        assert_same_output(found, expected)
        assert found.speculation.drafted["member-2"] > 0


def test_what_came_of_the_drafts_is_summed_by_drafter():
    rounds = [[("ngram", 4, 1), (None, 0, 0), ("small", 2, 2)], [("ngram", 1, 1)]]
    stats = SpeculationStats([[SpeculationRound(*one) for one in row] for row in rounds])
    assert stats.num_rounds == 4
    assert stats.drafted == {"ngram": 5, "small": 2}
    assert stats.accepted == stats.kept == {"ngram": 2, "small": 2}
    assert stats.acceptance_rate == {"ngram": 0.4, "small": 1.0}
    assert stats.entries_per_round == 2.0
    assert stats.rounds[0][0].num_accepted == stats.rounds[0][0].num_kept == 1


# --- What is run ----------------------------------------------------------------------------------------------------


def scripted_pair(monkeypatch):
    """Members that write ` capital` again and again, which only the second has as one token."""
    one = large()(" capital", add_special_tokens=False)["input_ids"]
    assert len(one) == 1
    models = [tiny.ScriptedModel(small(), [{40: 1.0}]), tiny.ScriptedModel(large(), [{one[0]: 1.0}])]
    return make_ensemble(models, [small(), large()], method="gac", weights=[0.1, 0.9])


@pytest.mark.parametrize("case", ["right", "wrong", "half right"])
def test_a_round_takes_one_forward_of_each_member(case, ensemble, row, monkeypatch):
    force_length(monkeypatch)
    stub = Stub(monkeypatch)
    options = {"max_new_tokens": 11, "method": "gac", "eos_token_id": [], "speculation": "ngram"}
    plain = run(ensemble, row, **options)
    num_entries = len(stub.columns[0])
    assert plain.num_forwards == (num_entries, num_entries)
    spoil = {
        "right": lambda row, number, columns: columns,
        "wrong": lambda row, number, columns: [column + 1 for column in columns],
        "half right": lambda row, number, columns: [*columns[:2], *(column + 1 for column in columns[2:])],
    }[case]
    stub.draft_from_now(spoil)
    found = run(ensemble, row, **options)
    assert_same_output(found, plain)
    # The first round reads the prompt and writes one entry.
    per_round = {"right": LENGTH + 1, "wrong": 1, "half right": 3}[case]
    num_rounds = 1 + math.ceil((num_entries - 1) / per_round)
    assert found.num_forwards == (num_rounds, num_rounds)
    assert found.speculation.num_rounds == num_rounds


def test_where_the_text_is_cut_otherwise_the_round_ends(monkeypatch):
    """Drafted in the primary's ids, written as one entry of the assistant's: kept is the chosen entry."""
    force_length(monkeypatch)
    stub = Stub(monkeypatch)
    ensemble = scripted_pair(monkeypatch)
    ids = small()(" capital", add_special_tokens=False)["input_ids"]
    options = {"max_new_tokens": 3 * len(ids), "output_scores": True}
    expected = run(ensemble, [[50]], **options)
    assert expected.sequences[0, 1:].tolist() == 3 * ids
    first = run(ensemble, [[50]], speculation="ngram", **options)
    assert_same_output(first, expected)
    assert [len(entry) for entry in stub.columns] == [3]
    stub.draft_from_now()
    whole = run(ensemble, [[50]], speculation="ngram", **options)
    assert whole.speculation.num_rounds == 2
    stub.columns = [[1]]
    stub.draft_from_now(lambda row, number, columns: ids)
    apart = run(ensemble, [[50]], speculation="ngram", **options)
    for found in (whole, apart):
        assert_same_output(found, expected)
        for a, b in zip(found.scores, expected.scores, strict=True):
            torch.testing.assert_close(a, b)
    assert apart.speculation.num_rounds == 3
    assert apart.speculation.accepted == {"ngram": 0}


def test_logits_of_a_position_that_was_not_used_may_be_anything(ensemble, row, monkeypatch):
    force_length(monkeypatch)
    stub = Stub(monkeypatch)
    options = {"max_new_tokens": 8, "method": "gac", "eos_token_id": [], "speculation": "ngram"}
    expected = run(ensemble, row, **options)
    stub.draft_from_now(lambda row, number, columns: [column + 1 for column in columns])

    def all_but_first_nan(logits):
        return torch.cat([logits[:, : -LENGTH or None], logits[:, -LENGTH:] * torch.nan], dim=1)

    def spoil(logits):
        return all_but_first_nan(logits) if logits.shape[1] == LENGTH + 1 else logits

    with changed_logits(ensemble.members[1], spoil):
        assert_same_output(run(ensemble, row, **options), expected)
    stub.columns.clear()
    with (
        changed_logits(ensemble.members[1], from_call(1, lambda logits: logits * torch.nan)),
        pytest.raises(MemberError, match="member-1.*row 0 at step 2"),
    ):
        run(ensemble, row, **options)


# --- Sampling -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", SLOWLY_UNITE)
def test_a_sampled_text_does_not_depend_on_the_drafts(method, ensemble, batch, monkeypatch):
    force_length(monkeypatch)
    stub = Stub(monkeypatch)
    options = {"method": method, "do_sample": True, "temperature": 0.7, "top_k": 20, "eos_token_id": []}
    found = []
    for name in ("ngram", "ngram", "member-0"):
        torch.manual_seed(5)
        found.append(run(ensemble, batch, speculation=name, **{**options, "max_new_tokens": 10}))
        stub.draft_from_now(half_right)
    assert_same_output(found[1], found[0])
    assert_same_output(found[2], found[0])
    assert found[1].speculation.accepted["ngram"] > 0
    torch.manual_seed(6)
    other = run(ensemble, batch, speculation="ngram", **{**options, "max_new_tokens": 10})
    assert other.sequences.tolist() != found[0].sequences.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["gac", "unite"])
def test_sampled_texts_have_the_law_of_the_plain_loop(method, monkeypatch):
    """Chi-square over the texts of two entries, against the product of the fused probabilities."""
    force_length(monkeypatch, 2)
    a, b, c = (small().convert_tokens_to_ids(token) for token in "abc")

    def script(shares):
        return lambda context: dict(zip((a, b, c), shares[context[-1] == b], strict=True))

    models = [
        tiny.ScriptedModel(small(), script([(0.5, 0.3, 0.2), (0.1, 0.2, 0.7)])),
        tiny.ScriptedModel(small(), script([(0.1, 0.7, 0.2), (0.6, 0.2, 0.2)])),
    ]
    ensemble = make_ensemble(models, [small()] * 2, method=method)
    monkeypatch.setattr(PromptLookup, "continuation", lambda self, length: ([b, a], 2))
    num_texts = 500
    torch.manual_seed(0)
    output = run(
        ensemble,
        [[a]] * num_texts,
        do_sample=True,
        top_k=0,
        max_new_tokens=3,
        speculation="ngram",
        output_logits=False,
    )
    assert output.speculation.accepted["ngram"] > num_texts / 10
    counts = Counter(map(tuple, output.sequences[:, 1:].tolist()))
    first = {a: 0.3, b: 0.5, c: 0.2}
    after_b = {a: 0.35, b: 0.2, c: 0.45}
    statistic = 0.0
    for x in first:
        for y in first:
            for z in first:
                expected = num_texts * first[x] * (after_b if x == b else first)[y] * (after_b if y == b else first)[z]
                statistic += (counts[x, y, z] - expected) ** 2 / expected
    assert sum(counts.values()) == num_texts
    assert statistic < 54.1  # the 99.9 % quantile of chi-square with 26 degrees of freedom


# --- Drafters and lengths -------------------------------------------------------------------------------------------


def test_the_text_is_looked_up_by_its_last_ids():
    text = PromptLookup([1, 2, 3, 4, 5, 9, 2, 3], lambda i: i == 99)
    assert text.continuation(2) == ([4, 5], 2)
    text.append(7, [7])
    assert text.continuation(2) == ([], 0)
    for column, ids in ((500, [11, 12]), (2, [2]), (3, [3])):
        text.append(column, ids)
    assert text.continuation(4) == ([7, 500, 2, 3], 2)
    text.append(7, [7])
    assert text.continuation(3) == ([500, 2, 3], 3)
    text.append(11, [11])
    assert text.continuation(2) == ([12, 2], 3)
    assert PromptLookup([1, 2, 99, 1, 2], lambda i: i == 99).continuation(3)[0] == []
    # A repetition is continued beyond the end of the text.
    assert PromptLookup([5, 6, 5, 6, 5, 6, 5, 6], lambda i: False).continuation(5) == ([5, 6, 5, 6, 5], 5)
    assert PromptLookup([1], lambda i: False).continuation(3) == ([], 0)


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def decode(length, seconds, keeps, num_rounds, drafting=0.0):
    """Rounds that take `seconds(length)`, in which each drafted entry is kept with a chance; the lengths chosen."""
    chosen = []
    for _ in range(num_rounds):
        count = length.choose(["drafter"])[1]
        chosen.append(count)
        if count and drafting:
            length.drafted("drafter", count, drafting * count)
        kept = count if keeps == 1 else int(count * keeps)
        length.verified(count, seconds(count), kept + 1)
        if count:
            length.judged("drafter", kept, kept < count)
        else:
            length.judged("drafter", round(keeps), 1 - round(keeps))
    return chosen


def usual(lengths):
    """The length that was chosen most often of late."""
    return Counter(lengths[-20:]).most_common(1)[0][0]


def test_drafts_are_as_long_as_pays():
    assert usual(decode(DraftLength(), lambda n: 1.0, 1.0, 60)) == 7
    assert usual(decode(DraftLength(), lambda n: 1.0 if n <= 4 else 4.0, 1.0, 60)) == 3
    never = decode(DraftLength(), lambda n: 1.0 + n, 0.0, 300)
    assert sum(map(bool, never)) < 15
    # Drafting costs as much as deciding: off but for a trial now and then, even with right drafts.
    dear = decode(DraftLength(), lambda n: 1.0 + 0.1 * n, 1.0, 300, drafting=1.0)
    assert sum(map(bool, dear[20:])) <= 2 * 300 / 64


def test_what_pays_changes_with_the_machine_and_the_text():
    length = DraftLength()
    assert usual(decode(length, lambda n: 1.0, 1.0, 60)) == 7
    assert usual(decode(length, lambda n: 1.0 + n, 0.0, 60)) == 0
    assert usual(decode(length, lambda n: 1.0, 1.0, 400)) == 7


def test_drafts_that_never_pay_cost_next_to_nothing():
    """Also where a text promises again and again what it does not keep, and another drafter is tried after each."""
    length, spent = DraftLength(), 0.0

    def seconds(count):
        nonlocal spent
        spent += 1.0 + 0.3 * count**0.5
        return 1.0 + 0.3 * count**0.5

    for _ in range(20):
        for _ in range(9):
            length.judged("drafter", 1, 0)  # what it would have drafted was right
        decode(length, seconds, 0.0, 50)
    assert spent < 1.01 * 1000 + 5


def test_drafts_return_soon_after_bad_luck():
    """The debt is not waited off if the drafter's choices in plain steps show that drafts would pay."""
    length = DraftLength()
    decode(length, lambda n: 1.0 + 1.2 * (n > 0), 1.0, 40)
    for _ in range(20):
        if count := length.choose(["drafter"])[1]:
            length.verified(count, 2.2, 1)
    assert count == 0
    assert decode(length, lambda n: 1.0 + 1.2 * (n > 0), 1.0, 10)[-1] == 7


def test_the_next_call_of_a_kind_begins_with_what_the_last_one_measured(ensemble, row, monkeypatch):
    seen = []
    choose = DraftLength.choose
    monkeypatch.setattr(DraftLength, "choose", lambda self, *args: seen.append(self) or choose(self, *args))
    ensemble = copy.deepcopy(ensemble)
    options = {"method": "unite", "speculation": "member-1", "max_new_tokens": 6, "eos_token_id": []}
    expected = run(ensemble, row, **options).sequences.tolist()
    first = seen[-1]
    assert run(ensemble, row, **options).sequences.tolist() == expected
    assert seen[-1] is first
    run(ensemble, row, **{**options, "method": "gac"})
    assert seen[-1] is not first
    run(copy.deepcopy(ensemble), row, **options)
    assert seen[-1] is not first
    run(ensemble, row, **options)
    assert seen[-1] is first


def test_first_times_that_capture_graphs_are_not_believed():
    def seconds_of(slow):
        return lambda length: slow[length].pop() if slow[length] else 1.0

    def first_ones():
        return {0: [], **{length: [20.0, 30.0, 20.0] for length in (1, 3, 7)}}

    assert usual(decode(DraftLength(), seconds_of(first_ones()), 1.0, 60)) == 0
    assert usual(decode(DraftLength(num_trials=4), seconds_of(first_ones()), 1.0, 60)) == 7


def test_a_few_entries_that_were_accepted_are_no_reason_to_draft():
    """Nor are many in another text, once this one has rejected some."""
    length = DraftLength()
    for count, seconds in {0: 1.0, 1: 1.9, 3: 2.6, 7: 4.4}.items():
        for _ in range(2):
            length.verified(count, seconds, count + 1)

    def drafts_after(accepted, rejected):
        length.judged("drafter", accepted, rejected)
        return length.choose(["drafter"])[1] > 0

    assert not drafts_after(3, 0)
    assert drafts_after(7, 0)
    drafts_after(90, 0)
    length.begin_text()
    assert drafts_after(0, 0)
    assert not drafts_after(1, 2)


@pytest.mark.parametrize(
    ("places", "clock"),
    [
        ([torch.device("cpu")] * 2, time.thread_time),
        ([torch.device("cpu"), torch.device("cuda")], time.perf_counter),
        ([torch.device("cpu"), ("an actor", 1)], time.perf_counter),
    ],
)
def test_only_members_of_this_thread_are_timed_by_its_processor_time(places, clock):
    assert clock_of(places) is clock


def test_the_better_of_two_drafters_is_asked():
    length = DraftLength(shares={"cheap": 0.1, "dear": 0.9})
    length.verified(0, 1.0, 1)
    for name, kept in (("cheap", 5), ("dear", 9)):
        length.judged(name, kept, 10 - kept)
    assert length.choose(["cheap", "dear"])[0] == "cheap"
    for _ in range(30):
        length.verified(0, 1.0, 1)
        length.judged("cheap", 0, 1)
        length.judged("dear", 1, 0)
    length.drafted("dear", 1, 0.01)
    assert length.choose(["cheap", "dear"])[0] == "dear"


def test_the_clock_is_read_around_drafting_and_verifying(ensemble, row, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(drafts, "clock_of", lambda places: clock)
    seen = []
    ensemble = copy.deepcopy(ensemble)  # which has measured nothing yet
    monkeypatch.setattr(DraftLength, "verified", lambda self, count, seconds, decided: seen.append((count, seconds)))
    force_length(monkeypatch, 2)
    with changed_logits(ensemble.members[1], lambda logits: setattr(clock, "now", clock.now + 3.0) or logits):
        found = run(ensemble, row, speculation="member-0", max_new_tokens=8, method="gac")
    assert len(seen) == found.speculation.num_rounds - 1
    assert {seconds for _, seconds in seen} == {3.0}


@pytest.mark.crossed
@pytest.mark.parametrize("mode", ["repack", "static"])
@pytest.mark.parametrize("case", ["a control token at once", "a control token later", "few positions left", "whole"])
def test_the_time_of_a_draft_counts_for_what_was_drafted(case, mode, monkeypatch):
    """However early a draft is cut, every step of it took as long as any other."""
    force_length(monkeypatch)
    clock, seen = Clock(), []
    monkeypatch.setattr(drafts, "clock_of", lambda places: clock)
    monkeypatch.setattr(DraftLength, "drafted", lambda self, *args: seen.append(args))
    monkeypatch.setattr(LocalMember, "cache_mode", property(lambda member: mode, lambda member, value: None))
    tokenizer = small()
    drafter = tiny.tiny_gpt2(tokenizer, n_positions=12 if case == "few positions left" else 99)
    ensemble = make_ensemble([tiny.tiny_llama(tokenizer), drafter], [tokenizer] * 2, weights=[1, 0])
    num_written = {"a control token at once": 0, "a control token later": 2}.get(case)

    def slow(logits):
        clock.now += 3.0
        written = (clock.now - began) / 3.0 - 1
        return logits.index_fill(-1, torch.tensor([tokenizer.eos_token_id]), 1e9 * (written == num_written) - 1e8)

    began = 0.0
    draft = MemberDrafter.draft

    def timed(self, lengths, clock):
        nonlocal began
        began = clock()
        return draft(self, lengths, clock)

    monkeypatch.setattr(MemberDrafter, "draft", timed)
    with changed_logits(ensemble.members[1], slow):
        run(ensemble, [[50, 51, 52]], speculation="member-1", max_new_tokens=16, eos_token_id=[])
    assert len(seen) > 1
    assert {seconds / count for _, count, seconds in seen} == {3.0}


# --- What is refused ------------------------------------------------------------------------------------------------

REFUSED = {
    "beams": ({"num_beams": 2}, "num_beams=2"),
    "a gate": ({"method": GacConfig(threshold=0.5)}, "a gate.*threshold"),
    "mixture sampling": (
        {"method": GacConfig(strategy="mixture_sampling"), "do_sample": True, "top_k": 0}, "mixture sampling",
    ),
    "a function": ({"weights": lambda step, ids: [0.5, 0.5]}, "weights.*function"),
    "decisions": ({"output_decisions": True}, "output_decisions"),
    "hidden states": ({"output_hidden_states": True}, "output_hidden_states"),
    "no cache": ({"use_cache": False}, "use_cache=False"),
    "a static cache": ({"cache_implementation": "static"}, "cache_implementation='static'"),
    "spans": ({"method": "sweetspan"}, "sweetspan.*candidates are drafts"),
    "allowed ids": ({"prefix_allowed_tokens_fn": lambda row, ids: [30 + row]}, "PrefixConstrained.*one by one"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_drafted_is_refused_or_decoded_plainly(name, ensemble, batch):
    options, message = REFUSED[name]
    options = {"method": "gac", "max_new_tokens": 2, **options}
    with pytest.raises(ConfigurationError, match=message):
        run(ensemble, batch, speculation="ngram", **options)
    torch.manual_seed(1)
    expected = run(ensemble, batch, **options)
    torch.manual_seed(1)
    found = run(ensemble, batch, speculation="auto", **options)
    assert found.sequences.tolist() == expected.sequences.tolist()
    assert "speculation" not in found


def test_allowed_ids_are_no_obstacle_for_one_row(ensemble, row, monkeypatch):
    force_length(monkeypatch)
    options = {"prefix_allowed_tokens_fn": lambda row, ids: list(range(30, 60)), "max_new_tokens": 6, "method": "gac"}
    assert_same_output(run(ensemble, row, speculation="member-0", **options), run(ensemble, row, **options))


def test_an_unknown_drafter_is_named_with_those_there_are(ensemble, row):
    for name in ("member-7", True, 3):
        with pytest.raises(ConfigurationError, match="'auto', 'ngram'.*'member-0', 'member-1'"):
            run(ensemble, row, speculation=name)
    with pytest.raises(ConfigurationError, match='speculation="ngram"'):
        run(ensemble, row, prompt_lookup_num_tokens=2)


def test_of_members_that_share_a_name_only_the_cheapest_drafts():
    members = [SimpleNamespace(name=name) for name in ("twin", "other", "twin", "twin")]
    with pytest.raises(ConfigurationError, match=r"'twin'` names 3 members.*MemberConfig\.name"):
        Speculation("twin", members)
    assert Speculation("auto", members).drafters([0, 1, 2], [30, 20, 10, 5]) == [2, 1]
    assert Speculation("other", members).drafters([0, 1, 2], [30, 20, 10, 5]) == [1]
    for name in ("auto", "ngram"):
        assert Speculation(name, [SimpleNamespace(name=name)] * 2).uses_ngrams


def test_an_ensemble_of_recurrent_members_drafts_too(monkeypatch):
    force_length(monkeypatch, 3)
    stub = Stub(monkeypatch)
    models = [model_of("falcon_h1", "qwen"), model_of("mamba", "gemma", 1)]
    ensemble = make_ensemble(models, [tokenizer_of("qwen"), tokenizer_of("gemma")], method="unite")
    rows = prompt_rows(ensemble)[:1]
    expected = run(ensemble, rows, max_new_tokens=8, eos_token_id=[], pad_token_id=0)
    for _ in range(2):
        found = run(ensemble, rows, max_new_tokens=8, eos_token_id=[], pad_token_id=0, speculation="ngram")
        assert_same_choices(new_ids(found), new_ids(expected), [step[0] for step in expected.logits])
        stub.draft_from_now(half_right)
