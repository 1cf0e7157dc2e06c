"""F1, chrF and BLEU against plain references; values of examples, comparisons, and everything written in a file."""

import json
import math
import random
import sys

import numpy as np
import pytest

from hf_ensemble import ConfigurationError
from hf_ensemble.evaluation import Evaluation, estimates, measures, normalize_answer, read_set
from hf_ensemble.evaluation.estimates import NUM_DRAWS, Z, bootstrap
from hf_ensemble.evaluation.marking import Outcomes
from hf_ensemble.evaluation.measures import DEFAULT_MEASURES, MEASURES

sacrebleu = pytest.importorskip("sacrebleu")

WORDS = [
    "the",
    "a",
    "fox",
    "dog",
    "quick",
    "brown",
    "lazy,",
    "jumps",
    "over.",
    "Paris",
    "in",
    "12",
    "months",
    "king's",
    "daughters",
    "an-other",
]
NAMES = ("member-a", "member-b", "both")


def texts(generator, count):
    return [" ".join(generator.choices(WORDS, k=generator.randint(0, 12))) for _ in range(count)]


def a_set(count, seed=0, **options):
    """Questions with one to three accepted answers."""
    generator = random.Random(seed)
    answers = [[f"fox {text}" for text in texts(generator, generator.randint(1, 3))] for _ in range(count)]
    records = [{"question": f"{n}?", "answer": accepted} for n, accepted in enumerate(answers)]
    return read_set(records, name="set", **options)


def written(questions, seed=1, missing=()):
    """What three systems wrote: accepted answers with some words changed, and what follows the line."""
    generator = random.Random(seed)
    found = []
    for name in NAMES:
        ran = {}
        for n, item in enumerate(questions.items):
            words = generator.choice(item.accepted).split()
            kept = [
                w if generator.random() < 0.7 else generator.choice(WORDS) for w in words if generator.random() < 0.9
            ]
            if (name, n) not in missing:
                ran[n] = f" {' '.join(kept)}{generator.choice(['', '.', '!'])}\nQuestion: no", 0.5
        found.append(Outcomes(name, name != "both", questions, "write", ran))
    return found


def plain_f1(response, accepted):
    """Words are paired off one by one."""
    best = 0.0
    for answer in accepted:
        found, left = normalize_answer(response.split("\n")[0]).split(), normalize_answer(answer).split()
        num_found, num_wanted, num_common = len(found), len(left), 0
        for word in found:
            if word in left:
                left.remove(word)
                num_common += 1
        if num_common:
            precision, recall = num_common / num_found, num_common / num_wanted
            best = max(best, 2 * precision * recall / (precision + recall))
    return best


def lines_and_streams(questions, outcomes, places):
    """What `sacrebleu` takes: lines, and references by number, None where there is none."""
    lines = [outcomes.ran[n][0].split("\n")[0].strip() for n in places]
    most = max(len(item.accepted) for item in questions.items)
    streams = [[(*questions.items[n].accepted, None, None, None)[k] for n in places] for k in range(most)]
    return lines, streams


METRICS = {"chrF": sacrebleu.CHRF(), "BLEU": sacrebleu.BLEU()}
ALONE = {"chrF": sacrebleu.CHRF(), "BLEU": sacrebleu.BLEU(effective_order=True)}


def test_f1_is_that_of_words_paired_off_and_its_mean_has_the_normal_interval():
    questions = a_set(40)
    outcomes = written(questions)
    evaluation = Evaluation.from_outcomes(outcomes, ["F1"])
    for own in outcomes:
        expected = {n: plain_f1(text, questions.items[n].accepted) for n, (text, _) in own.ran.items()}
        assert evaluation.values("set", "F1", own.system) == pytest.approx(expected)
        value, low, high = evaluation["set", "F1", own.system].estimate
        array = np.array(list(expected.values()))
        assert 0.3 < value < 0.9
        assert value == pytest.approx(array.mean())
        assert high - value == pytest.approx(Z * array.std(ddof=1) / math.sqrt(40)) == pytest.approx(value - low)
    one, other = (np.array(list(evaluation.values("set", "F1", name).values())) for name in ("both", "member-a"))
    found = evaluation.compare("set", "F1", "both", "member-a")
    assert found.value == pytest.approx((one - other).mean())
    assert found.high - found.value == pytest.approx(Z * (one - other).std(ddof=1) / math.sqrt(40))


@pytest.mark.parametrize(
    ("response", "accepted", "f1"),
    [
        (" The red fox!\nA dog", ["the dog", "a fox"], 2 / 3),
        (" dog dog", ["dog"], 2 / 3),
        (" cat", ["dog"], 0),
        ("\ndog", ["dog"], 0),
        (" +-*/\n", ["+-*/"], 1),  # nothing is left of it but what it is
        (" the", ["dog"], 0),
        (" ...", ["+-*/"], 0),
        (" dog", ["the", "the dog"], 1),
    ],
)
def test_f1_of_an_answer(response, accepted, f1):
    questions = read_set([{"question": "?", "answer": accepted}])
    assert questions.f1(response, questions.items[0]) == pytest.approx(f1)


def test_what_is_right_has_an_f1_of_1_and_no_f1_is_outside_0_and_1():
    questions = a_set(60)
    for own in written(questions):
        for n, (text, _) in own.ran.items():
            f1 = questions.f1(text, questions.items[n])
            assert 0 <= f1 <= 1
            assert not questions.is_right(text, questions.items[n]) or f1 == 1


def test_sets_marked_by_numbers_are_measured_by_exact_match_alone():
    questions = read_set([{"question": "?", "answer": "12"}], name="set", marking="number")
    outcomes = [Outcomes("one", True, questions, "write", {0: (" 11, no, 12", 1.0)})]
    assert [r.measure for r in Evaluation.from_outcomes(outcomes, MEASURES).results] == ["exact match"]
    with pytest.raises(
        ConfigurationError, match="F1 needs answers marked as 'text', but 'set' has `marking` 'number'"
    ):
        questions.f1(" 12", questions.items[0])


@pytest.mark.parametrize("name", ["chrF", "BLEU"])
def test_corpus_measures_are_those_of_sacrebleu(name):
    questions = a_set(30)
    outcomes = written(questions)
    evaluation = Evaluation.from_outcomes(outcomes, [name])
    for own in outcomes:
        lines, streams = lines_and_streams(questions, own, range(30))
        assert evaluation["set", name, own.system].estimate.value == METRICS[name].corpus_score(lines, streams).score
        for n, value in evaluation.values("set", name, own.system).items():
            (line,), streams = lines_and_streams(questions, own, [n])
            alone = ALONE[name].sentence_score(line, [text for (text,) in streams if text is not None])
            assert value == pytest.approx(alone.score)


@pytest.mark.parametrize("name", ["chrF", "BLEU"])
def test_corpus_intervals_are_those_of_texts_read_anew_in_every_sample(name, monkeypatch):
    monkeypatch.setattr(estimates, "NUM_DRAWS", 40)
    questions = a_set(12)
    outcomes = written(questions, missing={("both", 3)})
    evaluation = Evaluation.from_outcomes(outcomes, [name])

    def scores(number, places):
        """Of samples of these places."""
        generator = np.random.default_rng(0)
        samples = [[places[k] for k in generator.integers(len(places), size=len(places))] for _ in range(40)]
        return np.array(
            [
                METRICS[name].corpus_score(*lines_and_streams(questions, outcomes[number], s)).score
                for s in (places, *samples)
            ]
        )

    alone = scores(0, range(12))
    found = evaluation["set", name, "member-a"].estimate
    assert found == pytest.approx((alone[0], *np.percentile(alone[1:], [2.5, 97.5])))
    both = [n for n in range(12) if n != 3]
    differences = scores(2, both) - scores(0, both)
    found = evaluation.compare("set", name, "both", "member-a")
    assert found == pytest.approx((differences[0], *np.percentile(differences[1:], [2.5, 97.5])))
    mirrored = evaluation.compare("set", name, "member-a", "both")
    assert mirrored == pytest.approx((-found.value, -found.high, -found.low))


def test_bootstrap_intervals_hold_the_truth_in_95_of_100_samples():
    generator = random.Random(0)

    def score(counts):
        return 100 * counts[0] / counts[1]

    inside = 0
    for _ in range(100):
        sizes = [generator.randint(5, 60) for _ in range(60)]
        rows = [[sum(generator.random() < 0.3 for _ in range(size)), size] for size in sizes]
        value, low, high = bootstrap(score, rows)
        assert low <= value <= high
        inside += low < 30 < high
    assert 87 <= inside <= 100  # 95 less 3.7 standard errors, for a bootstrap is a little narrow
    assert NUM_DRAWS == 1000


@pytest.mark.crossed
@pytest.mark.parametrize("name", ["F1", "chrF", "BLEU"])
@pytest.mark.parametrize("response", [" the quick brown fox jumps\n", "", "\n", " zzz"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_intervals_lie_within_limits(name, response, count):
    records = [{"question": f"{n}?", "answer": "the quick brown fox jumps"} for n in range(count)]
    questions = read_set(records, name="set")
    other = [" zzz", " the quick brown fox jumps"] * 5
    outcomes = [
        Outcomes("one", True, questions, "write", dict.fromkeys(range(count), (response, 0.1))),
        Outcomes("other", False, questions, "write", {n: (other[n], 0.1) for n in range(count)}),
    ]
    evaluation = Evaluation.from_outcomes(outcomes, [name])
    most = 1 if name == "F1" else 100
    for result in evaluation.results:
        for (value, low, high), least in ((result.estimate, 0), (result.difference or (0, 0, 0), -most)):
            assert least <= value <= most
            assert math.isnan(low) if math.isnan(high) else least <= low <= value <= high <= most
            assert count == 1 or not math.isnan(low)
    expected = most if "fox" in response else 0
    assert evaluation["set", name, "one"].estimate.value == pytest.approx(expected)
    assert evaluation.values("set", name, "one") == pytest.approx(dict.fromkeys(range(count), expected))


def test_tables_write_each_measure_on_its_scale():
    evaluation = Evaluation.from_outcomes(written(a_set(5)), ["F1", "chrF", "BLEU"])
    head, _, row, *_ = evaluation.to_markdown().splitlines()
    assert head == "|  | set, F1, % | set, chrF | set, BLEU | seconds |"
    shown = [float(cell.split()[0]) for cell in row.split(" | ")[1:4]]
    values = [evaluation["set", name, "member-a"].estimate.value for name in ("F1", "chrF", "BLEU")]
    assert shown == pytest.approx([100 * values[0], *values[1:]], abs=0.06)


def test_values_and_comparisons_of_what_is_scored():
    choices = read_set(
        [{"question": "?", "A": "one", "B": "a dog", "answer": answer} for answer in "AB"], name="choices"
    )
    outcomes = [
        Outcomes("a", True, choices, "score", {0: ([-1.0, -2.0], 0.1), 1: ([-1.0, -4.0], 0.1)}),
        Outcomes("b", True, choices, "score", {1: ([-2.0, -3.0], 0.1)}),
        Outcomes("none", False, choices, "score", {}),
    ]
    evaluation = Evaluation.from_outcomes(outcomes, DEFAULT_MEASURES)
    assert evaluation.values("choices", "accuracy", "a") == {0: 1, 1: 0}
    assert evaluation.values("choices", "normalized accuracy", "b") == {1: 1}
    assert evaluation.values("choices", "accuracy", "none") == {}
    bits = {0: 1 / math.log(2) / 4, 1: 4 / math.log(2) / 6}
    assert evaluation.values("choices", "bits per byte", "a") == pytest.approx(bits)
    assert evaluation.compare("choices", "normalized accuracy", "b", "a").value == 1
    assert evaluation.compare("choices", "bits per byte", "b", "a").value == pytest.approx(-1 / math.log(2) / 6)
    assert all(map(math.isnan, evaluation.compare("choices", "accuracy", "none", "a")))
    assert evaluation.responses == {}
    with pytest.raises(ConfigurationError, match="unknown system 'c': there are 'a', 'b', 'none'"):
        evaluation.compare("choices", "accuracy", "a", "c")
    with pytest.raises(ConfigurationError, match="'choices' was not measured by 'F1'. Measured: choices, accuracy;"):
        evaluation.values("choices", "F1", "a")


def test_differences_in_the_table_are_comparisons_with_the_best_member():
    evaluation = Evaluation.from_outcomes(written(a_set(20), missing={("both", 7)}), MEASURES)
    for result in evaluation.results:
        best = max(NAMES[:2], key=lambda name: evaluation["set", result.measure, name].estimate.value)
        if result.system == best:
            assert result.difference is None
        else:
            assert result.difference == evaluation.compare("set", result.measure, result.system, best)


def test_everything_written_is_kept_and_goes_into_a_file(tmp_path):
    questions = a_set(3)
    outcomes = written(questions, missing={("both", 1)})
    scored = Outcomes("both", False, questions, "score", {n: ([-1.0], 0.1) for n in range(3)})
    evaluation = Evaluation.from_outcomes([*outcomes, scored], MEASURES)
    assert list(evaluation.responses) == [("set", name) for name in NAMES]
    assert evaluation.responses["set", "member-a"] == [outcomes[0].ran[n][0] for n in range(3)]
    assert evaluation.responses["set", "both"] == [outcomes[2].ran[0][0], None, outcomes[2].ran[2][0]]
    evaluation.write_responses(tmp_path / "responses.jsonl")
    records = [json.loads(line) for line in (tmp_path / "responses.jsonl").read_text("utf-8").split("\n")[:-1]]
    assert [(record["system"], record["place"]) for record in records] == [
        (name, n) for name in NAMES for n in range(3) if (name, n) != ("both", 1)
    ]
    last = records[-1]
    assert last["set"] == "set"
    assert last["prompt"] == questions.items[2].prompt
    assert last["accepted"] == list(questions.items[2].accepted)
    assert last["response"] == outcomes[2].ran[2][0]
    assert last["values"] == {
        name: evaluation.values("set", name, "both")[2] for name in ("exact match", "F1", "chrF", "BLEU")
    }


def test_responses_that_there_are_none_of_are_not_written(tmp_path):
    with pytest.raises(ConfigurationError, match="there are no responses, .* ask for exact match, F1, chrF or BLEU"):
        Evaluation.from_outcomes([], ["accuracy"]).write_responses(tmp_path / "responses.jsonl")
    with pytest.raises(ConfigurationError, match=r"has to end in .jsonl, but is 'responses.txt'"):
        Evaluation.from_outcomes(written(a_set(1)), ["F1"]).write_responses(tmp_path / "responses.txt")
    assert not list(tmp_path.iterdir())


def test_sacrebleu_is_needed_only_when_it_is_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)
    measures._metrics.cache_clear()
    outcomes = written(a_set(2))
    assert Evaluation.from_outcomes(outcomes, DEFAULT_MEASURES).results
    for name in ("chrF", "BLEU"):
        with pytest.raises(ConfigurationError, match='`pip install "sacrebleu>=2.4,<3"`'):
            Evaluation.from_outcomes(outcomes, ["exact match", name])
    monkeypatch.undo()
    measures._metrics.cache_clear()
    assert Evaluation.from_outcomes(outcomes, ["chrF"]).results
