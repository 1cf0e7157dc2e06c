"""Evaluations mark, compare, stop and go on, on tiny members."""

import dataclasses
import json
import math
from itertools import pairwise

import pytest
import torch

from hf_ensemble import ConfigurationError, EnsembleForCausalLM, GacConfig, SweetSpanConfig
from hf_ensemble.evaluation import Configuration, Evaluation, evaluate, read_set
from hf_ensemble.evaluation.marking import Outcomes
from hf_ensemble.evaluation.measures import MEASURES
from hf_ensemble.evaluation.results import TABLE_ENDINGS
from hf_ensemble.evaluation.results import written as str_of
from tests.contracts import Recipe
from tests.html_page import Page, check_loads_nothing, page_in_notebook

QUESTIONS = [
    {"question": "The capital of France is?", "answer": ["Paris", "the"]},
    {"question": "Who had three daughters?", "answer": "a king"},
    {"question": "How many months are there in a year?", "answer": ["12", "twelve"]},
]
CHOICES = [
    {"question": "The fox is", "A": "brown", "B": "as lazy as the dog", "answer": "A"},
    {"question": "The cat sat on", "A": "the mat", "B": "Berlin", "C": "a king", "answer": "C"},
]
TEXTS = [{"text": "The rat sat on the hat.", "prompt": "The cat"}, {"text": " is best", "prompt": "This"}]


@pytest.fixture(scope="module")
def ensemble():
    return Recipe((("llama", "smol"), ("gemma3", "gemma"))).ensemble


@pytest.fixture(scope="module")
def sets():
    named = {"questions": QUESTIONS, "choices": CHOICES, "texts": TEXTS}
    return [read_set(records, name=name) for name, records in named.items()]


CONFIGURATIONS = {"gac": Configuration("gac"), "first": Configuration("gac", [1, 0])}


@pytest.fixture(scope="module")
def whole(ensemble, sets):
    return evaluate(ensemble, sets, configurations=CONFIGURATIONS, max_new_tokens=4)


def test_every_measure_of_every_system(whole):
    assert whole.is_complete
    names = [result.system for result in whole.results[:4]]
    assert names[2:] == ["gac", "first"]
    measures = {(result.set_name, result.measure) for result in whole.results}
    assert measures == {
        ("questions", "exact match"),
        ("questions", "F1"),
        ("questions", "bits per byte"),
        ("choices", "accuracy"),
        ("choices", "normalized accuracy"),
        ("choices", "bits per byte"),
        ("texts", "bits per byte"),
    }
    assert len(whole.results) == 4 * 7
    for result in whole.results:
        assert result.count == result.num_examples
        assert result.estimate.low <= result.estimate.value <= result.estimate.high
        assert result.num_without == 0
        assert result.seconds > 0


def test_all_the_weight_on_the_primary_is_the_primary_alone(whole):
    primary = whole.results[0].system
    for result in whole.results:
        if result.system == "first":
            alone = whole[result.set_name, result.measure, primary]
            assert result.estimate == pytest.approx(alone.estimate, abs=1e-5)


def test_bits_per_byte_are_those_of_score(ensemble, whole):
    scores = ensemble.score([item["prompt"] for item in TEXTS], [item["text"] for item in TEXTS], method="gac")
    bits = -scores.log_probs.double() / math.log(2)
    num_bytes = torch.tensor([len(item["text"]) for item in TEXTS])
    assert whole["texts", "bits per byte", "gac"].estimate.value == pytest.approx(
        float(bits.sum() / num_bytes.sum()), abs=1e-5
    )


class Stopped(Exception):
    pass


@pytest.fixture
def scripted(ensemble, monkeypatch):
    """Scores and responses that are given, and a list of the calls."""
    calls = []
    log_probs = {" brown": -2.0, " as lazy as the dog": -3.0, " the mat": -9.0, " Berlin": -math.inf, " a king": -1.0}

    class Scores:
        def __init__(self, values):
            self.log_probs = torch.tensor(values)

    def score(self, prompts, continuations, *, method=None, weights=None, batch_size=8):
        calls.append(("score", self is ensemble, list(continuations)))
        factor = 1.0 if self is ensemble else 2.0
        return Scores([factor * log_probs.get(text, -4.0) for text in continuations])

    def run_batches(model, prompts, *, batch_size, **options):
        for start in range(0, len(prompts), batch_size):
            batch = prompts[start : start + batch_size]
            calls.append(("write", model is ensemble, list(batch)))
            yield [" Twelve.\nQuestion" if "months" in prompt else " a the" for prompt in batch]

    monkeypatch.setattr(EnsembleForCausalLM, "score", score, raising=False)
    monkeypatch.setattr("hf_ensemble.evaluation.run.run_batches", run_batches)
    return calls


def test_the_likeliest_choice_is_right_in_two_ways(ensemble, sets, scripted):
    result = evaluate(ensemble, sets[1], members=False)
    assert result["choices", "accuracy", "unite"].estimate.value == 1
    assert result["choices", "normalized accuracy", "unite"].estimate.value == 0.5
    bits = (2 + 1) / math.log(2) / (len(" brown") + len(" a king"))
    assert result["choices", "bits per byte", "unite"].estimate.value == pytest.approx(bits)
    assert all(r.difference is None for r in result.results)
    assert [len(call[2]) for call in scripted] == [5]


def test_members_differ_by_pairs(ensemble, sets, scripted):
    result = evaluate(ensemble, sets[1])
    rows = [r for r in result.results if r.measure == "bits per byte"]
    # Both members say the same, so the first is the best.
    assert rows[0].difference is None
    assert rows[1].difference.value == 0
    assert rows[2].difference.value == pytest.approx(rows[2].estimate.value - rows[0].estimate.value)
    assert rows[2].difference.high < 0
    assert " *" in result.to_markdown().splitlines()[-1]


def test_choices_without_probability_are_not_right(ensemble, scripted):
    record = {"question": "Where?", "A": "Berlin", "B": "Berlin", "answer": "A"}
    result = evaluate(ensemble, read_set([record, CHOICES[0]], name="s"), members=False)
    accuracy = result["s", "accuracy", "unite"]
    assert (accuracy.estimate.value, accuracy.num_without) == (0.5, 1)
    bits = result["s", "bits per byte", "unite"]
    assert (bits.estimate.value, bits.num_without) == (math.inf, 1)
    assert "infinite [1 without probability]" in result.to_markdown()
    assert "1 without probability" in str(result)
    assert result.to_records()[-1]["value"] == "inf"


@pytest.fixture
def clock(scripted, monkeypatch):
    """A clock that goes on by a second with every call of a model."""
    monkeypatch.setattr("time.perf_counter", lambda: float(len(scripted)))


def test_nothing_runs_after_the_limit(ensemble, sets, scripted, tmp_path):
    state = tmp_path / "state.jsonl"
    evaluation = evaluate(ensemble, sets[:2], time_limit=1e-9, state_file=state)
    assert not evaluation.is_complete
    assert not scripted
    assert not state.exists()
    assert all(result.difference is None for result in evaluation.results)


def test_work_that_was_stopped_goes_on(ensemble, sets, scripted, clock, tmp_path):
    state = tmp_path / "state.jsonl"
    options = {"batch_size": 2, "state_file": state}
    first = evaluate(ensemble, sets[:2], time_limit=3.5, **options)
    assert not first.is_complete
    assert len(scripted) == len(state.read_text("utf-8").splitlines()) == 3
    # A batch of each set: writing and scoring the questions, and the choices.
    assert [(result.measure, result.count) for result in first.results if result.count] == [
        ("exact match", 1), ("F1", 1), ("bits per byte", 1), ("accuracy", 1), ("normalized accuracy", 1), ("bits per byte", 1)
    ]  # fmt: skip
    assert "1 of 3" in str(first)
    responses = first.responses["questions", first.results[0].system]
    assert sum(text is not None for text in responses) == 1
    with state.open("a", encoding="utf-8") as file:
        file.write('{"evaluation": {"form')  # killed while it wrote
    second = evaluate(ensemble, sets[:2], **options)
    assert second.is_complete
    written = [prompt for kind, _, prompts in scripted if kind == "write" for prompt in prompts]
    assert len(written) == 3 * 3
    scripted.clear()
    again = evaluate(ensemble, sets[:2], **options)
    assert not scripted
    assert [r.estimate for r in again.results] == [r.estimate for r in second.results]
    assert again.responses == second.responses
    fresh = evaluate(ensemble, sets[:2], batch_size=3)
    assert [r.estimate for r in fresh.results] == [r.estimate for r in second.results]


def test_under_a_limit_all_systems_run_the_same_examples_in_all_runs(ensemble, scripted, clock, tmp_path):
    records = [{"question": f"{'Long ' * n}question {n}?", "answer": "the"} for n in range(40)]
    questions = read_set(records, name="s")
    options = {"configurations": CONFIGURATIONS, "batch_size": 4, "measures": ["exact match", "bits per byte"]}

    def places(evaluation):
        found = evaluation.responses.values()
        return [{n for n, text in enumerate(texts) if text is not None} for texts in found]

    once = evaluate(ensemble, questions, time_limit=39.5, **options)
    ran = places(once)
    assert len(ran) == 4
    assert len(set.union(*ran)) - len(set.intersection(*ran)) <= 4
    assert 8 <= len(set.intersection(*ran)) < 30
    assert len(scripted) <= 39
    assert places(evaluate(ensemble, questions, time_limit=39.5, **options)) == ran
    # With a state file more runs come to more of the same, also if one was cut off between two systems.
    state = tmp_path / "state.jsonl"
    limited = [
        evaluate(ensemble, questions, time_limit=seconds, state_file=state, **options) for seconds in (9.5, 11.5, 9.5)
    ]
    for before, after in pairwise(map(places, limited)):
        assert all(one <= other for one, other in zip(before, after, strict=True))
        assert after != before
        assert len(set.union(*after)) - len(set.intersection(*after)) <= 4
    whole = evaluate(ensemble, questions, state_file=state, **options)
    assert whole.is_complete
    assert [r.estimate for r in whole.results] == [
        r.estimate for r in evaluate(ensemble, questions, **options).results
    ]


def test_a_limit_that_suffices_gives_all(ensemble, sets, scripted, clock):
    limited = evaluate(ensemble, sets, time_limit=1e6, configurations=CONFIGURATIONS)
    assert limited.is_complete
    whole = evaluate(ensemble, sets, configurations=CONFIGURATIONS)
    assert [r.estimate for r in limited.results] == [r.estimate for r in whole.results]
    assert limited.responses == whole.responses


def test_configurations_and_examples_may_be_added(ensemble, sets, scripted, tmp_path):
    state = tmp_path / "state.jsonl"
    evaluate(ensemble, read_set(QUESTIONS[:2], name="questions"), measures=["exact match"], state_file=state)
    scripted.clear()
    more = {"unite": Configuration(), "gac": Configuration(GacConfig())}
    evaluate(ensemble, sets[0], configurations=more, measures=["exact match"], state_file=state)
    assert [len(call[2]) for call in scripted] == [1, 1, 1, 3]


def test_spans_are_scored_once_whatever_their_length(ensemble, sets, scripted):
    spans = {f"L = {n}": Configuration(SweetSpanConfig(span_length=n)) for n in (1, 4)}
    result = evaluate(ensemble, sets[1], configurations=spans, members=False)
    assert len(scripted) == 1
    assert result["choices", "accuracy", "L = 1"].estimate == result["choices", "accuracy", "L = 4"].estimate


def test_a_state_of_other_members_is_refused(ensemble, sets, scripted, tmp_path):
    state = tmp_path / "state.jsonl"
    evaluate(ensemble, sets[1], state_file=state)
    other = Recipe((("gemma3", "gemma"), ("llama", "smol"))).ensemble
    with pytest.raises(ConfigurationError, match="belongs to another evaluation, with other members"):
        evaluate(other, sets[1], state_file=state)
    state.write_text("notes\n", "utf-8")
    with pytest.raises(ConfigurationError, match="is not a file of an evaluation"):
        evaluate(ensemble, sets[1], state_file=state)
    assert state.read_text("utf-8") == "notes\n"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sets": []}, "`sets` have to be at least one"),
        ({"measures": ["bleu"]}, "`measures` have to be of exact match"),
        ({"batch_size": 0}, "`batch_size` has to be a positive integer"),
        ({"time_limit": 0}, "`time_limit` has to be a positive number"),
        ({"configurations": {"x": Configuration("unit")}}, "unknown method 'unit'"),
        ({"configurations": {"x": Configuration("gac", [1, 1, 1])}}, "`weights` must have one entry per member"),
    ],
)
def test_bad_input_is_named_before_anything_runs(ensemble, sets, scripted, changes, message):
    with pytest.raises(ConfigurationError, match=message):
        evaluate(ensemble, **{"sets": sets, **changes})
    assert not scripted


def test_tables_are_written_in_one_go(whole, tmp_path):
    for ending in ("md", "txt", "csv", "json"):
        whole.write_table(tmp_path / f"table.{ending}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["table.csv", "table.json", "table.md", "table.txt"]
    lines = (tmp_path / "table.md").read_text("utf-8").splitlines()
    assert len(lines) == 2 + 4
    assert all(line.count("|") == lines[0].count("|") for line in lines)
    assert (tmp_path / "table.txt").read_text("utf-8") == f"{whole}\n"
    assert len(json.loads((tmp_path / "table.json").read_text("utf-8"))) == len(whole.results)
    assert len((tmp_path / "table.csv").read_text("utf-8").splitlines()) == 1 + len(whole.results)
    with pytest.raises(ConfigurationError, match=r"has to end in .md, .txt, .csv, .json, but is 'table.doc'"):
        whole.write_table(tmp_path / "table.doc")
    with pytest.raises(ConfigurationError, match="the folder does not exist"):
        whole.write_table(tmp_path / "none" / "table.md")


def outcomes_of(kind, count, values=None):
    """What two members and an ensemble came to on one set: the ensemble knows nothing, or all."""
    records = {
        "questions": QUESTIONS,
        "choices": [*CHOICES, CHOICES[0]],
        "texts": [*TEXTS, {"text": "The end"}],
    }[kind][:count]
    one = read_set(records, name=kind)
    found = []
    for work in ("write", "score") if kind == "questions" else ("score",):
        for n, name in enumerate(("member-a", "member-b", "both")):
            given = []
            for k, item in enumerate(one.items):
                log_probs = [(values or [-1.0, -40.0, 0.0])[(n + k) % 3]] * len(item.continuations)
                given.append(
                    (item.accepted[0] if n and work == "write" else " x" if work == "write" else log_probs, 0.1)
                )
            found.append(Outcomes(name, n < 2, one, work, dict(enumerate(given))))
    return found


def written(evaluation, folder):
    """The evaluation as every kind of table, by endings."""
    texts = {}
    for ending in TABLE_ENDINGS:
        evaluation.write_table(folder / f"table{ending}")
        texts[ending] = (folder / f"table{ending}").read_text("utf-8")
    return texts


KINDS_AND_COUNTS = [(kind, count) for kind in ("questions", "choices", "texts") for count in (1, 2, 3)]


@pytest.mark.crossed
@pytest.mark.parametrize(("kind", "count"), KINDS_AND_COUNTS)
@pytest.mark.parametrize("values", [None, [0.0, 1e-7, -0.0], [-math.inf, -1.0, -2.0]], ids=["far", "certain", "never"])
def test_intervals_of_few_examples_hold_their_values_within_limits_or_are_said_not_to_exist(
    kind, count, values, tmp_path
):
    evaluation = Evaluation.from_outcomes(outcomes_of(kind, count, values), MEASURES)
    table = written(evaluation, tmp_path)
    for result in evaluation.results:
        most = {"bits per byte": math.inf, "chrF": 100, "BLEU": 100}.get(result.measure, 1)
        estimates = [(result.estimate, 0, most)]
        if result.difference is not None:
            estimates.append((result.difference, -most, most))
        for (value, low, high), least, most in estimates:
            if not math.isfinite(value):
                continue
            assert least <= value <= most
            is_share = result.measure in ("exact match", "accuracy", "normalized accuracy")
            if count > 1 or (is_share and least == 0):
                assert least <= low <= value <= high <= most
            else:
                assert math.isnan(low)
                assert math.isnan(high)
                assert "no interval" in table[".txt"]
                assert "no interval" in table[".md"]


@pytest.mark.parametrize(
    ("kind", "measures"),
    [
        ("questions", ["accuracy", "normalized accuracy"]),
        ("choices", ["exact match"]),
        ("texts", ["exact match", "accuracy"]),
    ],
)
def test_a_set_that_no_measure_is_for_makes_a_table_that_says_so(ensemble, sets, scripted, kind, measures, tmp_path):
    own = next(one for one in sets if one.name == kind)
    evaluation = evaluate(ensemble, own, measures=measures)
    assert not scripted
    assert not evaluation.results
    assert evaluation.is_complete
    table = written(evaluation, tmp_path)
    for ending in (".txt", ".md"):
        assert f"nothing to measure in {kind}" in table[ending]
    assert table[".csv"].startswith("set,measure,system,is_member,value,low,high,difference_value")
    assert len(table[".csv"].splitlines()) == 1
    assert json.loads(table[".json"]) == []
    both = evaluate(ensemble, sets, measures=measures)
    assert f"nothing to measure in {kind}" in str(both)


def test_a_notebook_shows_every_result(whole):
    hostile = "<img src=x>@@tables@@"
    renamed = [dataclasses.replace(own, system=hostile) if own.system == "gac" else own for own in whole.results]
    shown = dataclasses.replace(whole, results=tuple(renamed), unmeasured=("<u>",))
    source, _ = page_in_notebook(shown._repr_html_())
    check_loads_nothing(source)
    texts = [text for text in Page(source).texts if text.strip()]
    assert texts[-1] == "nothing to measure in <u>: none of these measures applies to such a set"
    for result in shown.results:
        start = texts.index(f"{result.set_name}, {result.measure}")
        own = texts[start + texts[start:].index(result.system) :]
        assert own[1] == str_of(result.measure, result.estimate)[0]
    assert texts.count(hostile) == sum(own.system == "gac" for own in whole.results)


@pytest.mark.crossed
@pytest.mark.parametrize(("kind", "count"), [("questions", 0), *KINDS_AND_COUNTS[:2], *KINDS_AND_COUNTS[-3:]])
def test_plots_are_drawn_of_any_number_of_examples(kind, count, tmp_path):
    pytest.importorskip("matplotlib")
    outcomes = outcomes_of(kind, count) if count else []
    Evaluation.from_outcomes(outcomes, MEASURES).plot(tmp_path / "plot.svg")
    drawn = (tmp_path / "plot.svg").read_text("utf-8")
    assert ("nothing to measure" in drawn) == (count == 0)
    assert drawn.count('<g id="axes_') == {"questions": 5, "choices": 3, "texts": 1}[kind] * (count > 0)


@pytest.mark.slow
def test_plots_have_a_panel_for_each_measure(whole, tmp_path):
    pytest.importorskip("matplotlib")
    whole.plot(tmp_path / "plot.svg")
    drawn = (tmp_path / "plot.svg").read_bytes()
    assert drawn.count(b"bits per byte") == 3
    whole.plot(tmp_path / "plot.svg")
    assert (tmp_path / "plot.svg").read_bytes() == drawn


def test_a_plot_of_another_ending_is_refused(whole, tmp_path):
    with pytest.raises(ConfigurationError, match=r"has to end in .svg"):
        whole.plot(tmp_path / "plot.md")
