"""Determine, then ensemble: on published figures, at the limits, and on members that run."""

import pytest
import torch

from hf_ensemble import ConfigurationError, EnsembleForCausalLM, MemberConfig, select_members
from tests import tiny
from tests.contracts import Recipe

CANDIDATES = ["Mistral", "DeepSeek", "OpenChat"]
TABLE_3 = {
    "GSM8K": ([56.48, 59.67, 73.46], ["OpenChat"]),
    "PIQA": ([80.63, 72.66, 87.10], ["OpenChat", "Mistral"]),
    "MMLU": ([59.28, 46.97, 60.80], ["OpenChat", "Mistral"]),
    "ARC-C": ([74.49, 58.73, 78.05], ["OpenChat", "Mistral"]),
    "TriviaQA": ([64.30, 47.63, 61.77], ["Mistral", "OpenChat"]),
    "NQ": ([24.25, 11.37, 31.08], ["OpenChat", "Mistral"]),
}
"""Table 3 of the UniTE paper, and who follows from it where all answer at equal length."""
GAPS = {"PIQA": "14.4", "MMLU": "13.8"}


def example(prompt, reference):
    return {"prompt": prompt, "reference": reference}


@pytest.mark.parametrize("task", TABLE_3)
def test_published_scores_give_the_published_choice(task):
    scores, expected = TABLE_3[task]
    selection = select_members(CANDIDATES, scores=scores, mean_lengths=[50, 50, 50])
    assert selection.names == expected
    assert selection.indices == [CANDIDATES.index(name) for name in expected]
    assert selection.scores == sorted(selection.scores, reverse=True)
    reasons = {row.name: row.reason for row in selection.table}
    assert reasons[expected[0]] == "the best score"
    for row in selection.table:
        if not row.is_taken:
            assert row.gap > 10
            assert f"points below {expected[0]}, more than 10" in row.reason
    if task in GAPS:
        assert reasons["DeepSeek"] == f"{GAPS[task]} points below OpenChat, more than 10"


def test_the_table_says_who_and_why():
    text = str(select_members(CANDIDATES, scores=TABLE_3["PIQA"][0], mean_lengths=[50, 40, 60]))
    assert [line.split()[:2] for line in text.splitlines()[1:]] == [
        ["taken", "OpenChat"],
        ["taken", "Mistral"],
        ["left", "DeepSeek"],
    ]
    assert "6.5 points below OpenChat, lengths within a factor 1.2" in text


@pytest.mark.parametrize(("length", "is_taken"), [(24.9, False), (25, True), (100, True), (100.1, False)])
def test_a_length_ratio_above_two_puts_a_member_out(length, is_taken):
    selection = select_members(["a", "b"], scores=[60, 55], mean_lengths=[50, length])
    assert selection.table[1].is_taken == is_taken
    assert ("than those of a, more than 2" in selection.table[1].reason) != is_taken


def test_limits_are_inclusive_in_decimal_figures():
    assert 64.4 - 54.4 > 10
    assert select_members(["a", "b"], scores=[64.4, 54.4]).names == ["a", "b"]
    assert select_members(["a", "b"], scores=[64.4, 54.3]).names == ["a"]


def test_distance_is_to_the_best_not_to_the_last_taken():
    assert select_members(["a", "b", "c"], scores=[70, 62, 55]).names == ["a", "b"]


def test_no_more_than_max_members_and_equal_scores_keep_their_order():
    selection = select_members(["a", "b", "c"], scores=[60, 62, 60], max_members=2)
    assert selection.names == ["b", "a"]
    assert selection.table[2].reason == "there are 2 members already"


def test_lengths_come_from_responses_without_white_space_at_their_ends():
    selection = select_members(["a", "b"], scores=[60, 60], responses=[["B", " C"], ["  B\n", "\n\nC  "]])
    assert [row.mean_length for row in selection.table] == [1, 1]
    assert selection.table[0].responses == ("B", " C")


def test_silence_is_not_like_speech():
    assert select_members(["a", "b", "c"], scores=[60, 60, 60], mean_lengths=[0, 0, 3]).names == ["a", "b"]


def test_lengths_that_are_not_given_are_not_compared_and_the_reason_says_so():
    assert "lengths not compared" in select_members(["a", "b"], scores=[60, 60]).table[1].reason


def test_members_run_alone_as_they_do_by_themselves():
    ensemble = Recipe((("llama", "smol"), ("gemma3", "gemma"))).ensemble
    prompts = ["The capital of France is", "The cat", "Once upon a time there was a king"]
    expected = []
    for model, tokenizer in zip(ensemble.members, ensemble.tokenizers, strict=True):
        expected.append([])
        for prompt in prompts:
            ids = torch.tensor([tokenizer(prompt)["input_ids"]])
            written = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False)
            expected[-1].append(tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True))
    examples = [example(prompt, text) for prompt, text in zip(prompts, expected[1], strict=True)]
    selection = select_members(ensemble, examples, "exact_match", max_new_tokens=5, batch_size=2)
    assert selection.table[0].index == 1
    assert selection.table[0].score == 100
    by_index = sorted(selection.table, key=lambda row: row.index)
    assert [list(row.responses) for row in by_index] == expected
    assert selection.indices == [1]


def test_members_end_at_their_own_eos_and_at_stop_strings():
    tokenizers = [tiny.byte_level_bpe(300), tiny.gemma_like()]
    models = []
    for tokenizer in tokenizers:
        newline = tokenizer("a\nb", add_special_tokens=False)["input_ids"][1]
        a = tokenizer("a", add_special_tokens=False)["input_ids"][0]
        start = len(tokenizer("x")["input_ids"])
        models.append(tiny.ScriptedModel(tokenizer, [{a: 1}, {newline: 1}, {a: 1}], prompt_length=start))
    ensemble = EnsembleForCausalLM.from_members(models, tokenizers)
    stopped = select_members(ensemble, [("x", "a")], "exact_match", max_new_tokens=4, stop_strings=["\n"])
    assert [row.responses for row in stopped.table] == [("a\n",)] * 2
    assert stopped.scores == [100, 100]
    end = tokenizers[0]("a\nb", add_special_tokens=False)["input_ids"][1]
    ends = [MemberConfig(eos_token_id=[end]), MemberConfig()]
    ensemble = EnsembleForCausalLM.from_members(models, tokenizers, member_configs=ends)
    ended = select_members(ensemble, [("x", "a\naa")], "contains", max_new_tokens=4)
    assert [row.responses[0].strip() for row in sorted(ended.table, key=lambda row: row.index)] == ["a", "a\naa"]


def test_a_metric_may_be_any_function():
    ensemble = Recipe((("llama", "smol"), ("gemma3", "gemma"))).ensemble
    seen = []

    def metric(response, reference):
        seen.append(reference)
        return 0.5

    selection = select_members(ensemble, [("The cat", {"any": "thing"})], metric, max_new_tokens=2)
    assert seen == [{"any": "thing"}] * 2
    assert [row.score for row in selection.table] == [50, 50]


GIVEN = {"scores": [60, 50]}
RUN = {"examples": [("The cat", "sat")], "metric": "contains", "max_new_tokens": 2}


@pytest.mark.parametrize(
    ("candidates", "options", "message"),
    [
        (["a", "b"], {"scores": [60, 50, 40]}, "`scores` must have one entry per candidate: got 3 for 2"),
        (["a", "b"], {"scores": [60, float("nan")]}, "`scores` must be finite"),
        (["a", "b"], {"scores": [0.6, 0.5]}, "in points.*best is 0.6"),
        (["a", "b"], {}, "either `scores`, or `examples`"),
        (["a", "b"], GIVEN | {"mean_lengths": [1]}, "`mean_lengths` must have one entry per candidate: got 1 for 2"),
        (["a", "b"], GIVEN | {"mean_lengths": [1, -1]}, "`mean_lengths` must be at least 0"),
        (["a", "b"], GIVEN | {"responses": [["x"], []]}, "one non-empty list per candidate"),
        (["a", "b"], GIVEN | {"responses": [["x"]] * 2, "mean_lengths": [1, 1]}, "not both"),
        (["a", "b"], GIVEN | {"max_members": 0}, "`max_members` has to be a positive integer, but is 0"),
        (["a", "b"], GIVEN | {"max_gap": -1}, "`max_gap` has to be a number of at least 0"),
        (["a", "b"], GIVEN | {"max_gap": "10"}, "`max_gap` has to be a number"),
        (["a", "b"], {"scores": ["good", "bad"]}, "`scores` must be numbers, one per candidate"),
        (["a", "b"], GIVEN | {"responses": [["x"], None]}, "`responses` must have a list of texts"),
        (["a", "b"], GIVEN | {"max_length_ratio": 0.5}, "`max_length_ratio` has to be a number of at least 1"),
        (["a", "b"], GIVEN | {"metric": "contains"}, "`metric` has no effect"),
        (["a", "b"], GIVEN | {"temperature": 2}, "`temperature` has no effect"),
        ([], {"scores": []}, "at least one name"),
        ("ab", GIVEN, "a list of at least one name"),
        (["a", "b"], RUN, "not a list of names"),
        (None, RUN | {"examples": []}, "the development set is empty"),
        (None, RUN | {"examples": [{"question": "x"}]}, "example 0 of the development set"),
        (None, RUN | {"examples": [("", "x")]}, "prompt 0 has to be a non-empty text"),
        (None, RUN | {"metric": None}, "`metric` must be given"),
        (None, RUN | {"examples": [("The cat", 3)]}, "a text or a list of texts, but the reference is 3"),
        (None, RUN | {"examples": [("The cat", ["sat", None])]}, "but the reference is .'sat', None."),
        (None, RUN | {"metric": "rouge"}, "one of exact_match, contains, but is 'rouge'"),
        (None, RUN | {"metric": lambda *_: "good"}, "finite number, but returned 'good' for example 0"),
        (None, RUN | {"metric": lambda *_: None}, "finite number, but returned None"),
        (None, RUN | {"metric": lambda *_: 60}, "from 0 to 1, but its mean .* is 60"),
        (None, RUN | {"mean_lengths": [1, 1]}, "measured when you give `examples`"),
        (None, RUN | {"max_new_tokens": None}, "give `max_new_tokens`"),
        (None, RUN | {"max_new_tokens": 0}, "`max_new_tokens` has to be a positive integer"),
        (None, RUN | {"eos_token_id": 3}, "each tokenizer has its own ids"),
        (None, RUN | {"num_return_sequences": 2, "num_beams": 2}, "one text per prompt"),
    ],
)
def test_bad_input_is_named(candidates, options, message):
    ensemble = Recipe((("llama", "smol"), ("gemma3", "gemma"))).ensemble
    with pytest.raises(ConfigurationError, match=message):
        select_members(ensemble if candidates is None else candidates, **options)
