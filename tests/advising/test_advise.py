"""Advice on tiny members whose answers are given, and on tiny members that run."""

import json
import math
import re
import types

import pytest
import torch

from hf_ensemble import (
    ConfigurationError,
    DeepenConfig,
    EnsembleForCausalLM,
    GacConfig,
    MemberConfig,
    MemberError,
    SweetSpanConfig,
    advise,
)
from hf_ensemble.advising.trial import Trial
from hf_ensemble.evaluation import read_set
from hf_ensemble.tables import spelled
from tests.contracts import Recipe
from tests.html_page import check_loads_nothing

NUM = 200


def questions(count=NUM):
    return [{"prompt": f"Question {n}:", "answers": [f"word{n}"]} for n in range(count)]


@pytest.fixture(scope="module")
def ensemble():
    made = Recipe((("llama", "smol"), ("gemma3", "gemma"), ("llama", "smol"))).ensemble
    configs = [MemberConfig(path=f"somewhere/{name}", name=name) for name in ("first", "second", "third")]
    return EnsembleForCausalLM.from_members(made.members, made.tokenizers, member_configs=configs)


@pytest.fixture
def scripted(monkeypatch):
    """Gives right answers to the examples for which a rule holds; other wrong ones from each member.

    Rules, by a member's name or a method's: from the number of an example to whether the answer is right.
    """
    rules, calls = {}, []

    def run_batches(model, prompts, *, batch_size, method=None, weights=None, **options):
        names = [member.name for member in model.member_views]
        who = names[0] if len(names) == 1 else method.name
        for start in range(0, len(prompts), batch_size):
            batch = [int(re.search(r"\d+", prompt)[0]) for prompt in prompts[start : start + batch_size]]
            calls.append((who, tuple(weights or ()), batch))
            yield [f" word{n}" if rules[who](n) else f" {who}" for n in batch]

    monkeypatch.setattr("hf_ensemble.evaluation.run.run_batches", run_batches)
    return rules, calls


def set_rules(rules, first, second, third, together):
    rules.update(first=first, second=second, third=third, gac=together, unite=together, sweetspan=together)
    rules.update(vote=first, mbr=first, rerank=first)


def test_it_pays(ensemble, scripted):
    rules, calls = scripted
    set_rules(rules, lambda n: n % 10 < 5, lambda n: n % 10 < 6, lambda n: n % 10 < 1, lambda n: n % 10 < 8)
    advice = advise(ensemble, questions())
    assert advice.pays is True
    assert advice.reason.startswith("Yes: ")
    assert advice.gain.value == pytest.approx(0.2, abs=0.01)
    assert advice.gain.low > 0
    assert [member.name for member in advice.members] == ["second", "first", "third"]
    assert "more than 10" in advice.members[2].reason
    chosen = advice.chosen
    assert chosen.members == ("second", "first")
    assert chosen.indices == (1, 0)
    assert chosen.difference.value == pytest.approx(0.2)
    # Both are wrong on 40 % and write other things then; only the second is right on 10 %.
    assert advice.differing == pytest.approx(0.5)
    assert advice.either == pytest.approx(0.6)
    assert {one.members for one in advice.ensembles} == {("second", "first")}
    # Equal weights, weights by values, and three more, for a method that takes some.
    weights = [one.weights for one in advice.ensembles if one.method.name == "gac"]
    assert (0.5, 0.5) in weights
    assert any(own == pytest.approx((0.6 / 1.1, 0.5 / 1.1)) for own in weights)
    assert {len(own) for who, own, _ in calls if who == "gac"} == {2}
    text = str(advice)
    for part in ("+20.0 points", "second and first answer 50 % of the examples differently", "60.0"):
        assert part in text
    built = advice.build(ensemble)
    assert [member.name for member in built.member_views] == ["second", "first"]
    assert built.config.method == chosen.method
    assert built.config.weights == pytest.approx(list(chosen.weights))


def test_it_does_not_pay(ensemble, scripted):
    rules, _ = scripted
    set_rules(rules, lambda n: n % 10 < 5, lambda n: n % 10 < 8, lambda n: False, lambda n: n % 10 < 7)
    advice = advise(ensemble, questions())
    assert advice.pays is False
    assert advice.reason.startswith("No: nothing that was tried is worth its cost")
    assert "against second, the best member: -10" in advice.reason
    assert "times as long" not in str(advice)


def test_it_is_not_decided(ensemble, scripted):
    rules, _ = scripted
    set_rules(rules, lambda n: n % 2 == 0, lambda n: n % 4 < 2, lambda n: False, lambda n: n % 2 == 0 or n == 1)
    advice = advise(ensemble, questions(60))
    assert advice.pays is None
    assert advice.gain.low < 0 < advice.gain.high
    enough = int(re.search(r"About ([\d,]+) examples", advice.reason)[1].replace(",", ""))
    assert enough > 60


def test_members_that_cannot_do_it_are_no_case_for_an_ensemble(ensemble, scripted):
    set_rules(scripted[0], lambda n: n % 25 == 0, lambda n: n % 50 == 0, lambda n: False, lambda n: n % 25 == 1)
    advice = advise(ensemble, questions())
    assert advice.pays is False
    assert "No: the members cannot do this task yet. first, the best member, reaches 4.0 %" in advice.reason


def test_what_counts_as_a_gain_can_be_said(ensemble, scripted):
    rules, _ = scripted
    set_rules(rules, lambda n: n % 10 < 5, lambda n: n % 10 < 8, lambda n: False, lambda n: n % 10 < 8 or n in (8, 9))
    assert advise(ensemble, questions()).pays is None
    assert advise(ensemble, questions(), least_gain=0.05).pays is False


def test_members_that_answer_alike_are_one(ensemble, scripted):
    rules, calls = scripted
    set_rules(rules, lambda n: True, lambda n: True, lambda n: True, lambda n: True)
    advice = advise(ensemble, questions())
    assert advice.pays is False
    assert "the same answers to everything" in advice.reason
    assert advice.chosen is None
    assert advice.gain is None
    assert {who for who, *_ in calls} == {"first", "second", "third"}
    with pytest.raises(ConfigurationError, match="no ensemble to build: No: "):
        advice.build(ensemble)


def test_three_that_come_near_are_tried_together_too(ensemble, scripted):
    rules, _ = scripted
    rules.update({name: lambda n, k=k: n % 10 != k for k, name in enumerate(("first", "second", "third"))})
    rules.update(dict.fromkeys(("gac", "unite", "sweetspan", "vote", "mbr", "rerank"), lambda n: True))
    advice = advise(ensemble, questions())
    assert {len(one.members) for one in advice.ensembles} == {2, 3}


def test_work_goes_on(ensemble, scripted, tmp_path):
    rules, calls = scripted
    set_rules(rules, lambda n: n % 10 < 5, lambda n: n % 10 < 6, lambda n: False, lambda n: n % 10 < 8)
    stopping = rules["unite"]

    def stop(n):
        raise MemberError("member 'second' ran out of memory.")

    rules["unite"] = stop
    with pytest.raises(MemberError, match="second"):
        advise(ensemble, questions(), state_folder=tmp_path / "state", batch_size=50)
    before = len(calls)
    rules["unite"] = stopping
    again = advise(ensemble, questions(), state_folder=tmp_path / "state", batch_size=50)
    members = {who for who, *_ in calls[before:]}
    assert not members & {"first", "second", "third"}
    assert again.pays is True
    before = len(calls)
    third = advise(ensemble, questions(), state_folder=tmp_path / "state", batch_size=50)
    assert (third.gain, third.chosen.title) == (again.gain, again.chosen.title)
    assert len(calls) == before


@pytest.mark.parametrize("count", [0, 2, 19])
def test_too_few_examples_are_refused(ensemble, count):
    with pytest.raises(ConfigurationError, match="at least (one example|20)"):
        advise(ensemble, questions(count))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"minutes": 0}, "`minutes`"),
        ({"minutes": math.inf}, "`minutes`"),
        ({"least_gain": -1}, "`least_gain`"),
        ({"least_gain": "much"}, "`least_gain`"),
        ({"measure": "chrF"}, "`measure` has to be one of exact match"),
        ({"methods": []}, "`methods`"),
        ({"methods": ["nonsense"]}, "unknown method 'nonsense'"),
    ],
)
def test_arguments_are_checked_before_anything_runs(ensemble, scripted, options, message):
    with pytest.raises(ConfigurationError, match=message):
        advise(ensemble, questions(), **options)
    assert not scripted[1]


def test_one_member_or_two_of_one_name_are_refused(ensemble):
    with pytest.raises(ConfigurationError, match="two or more members"):
        advise(ensemble.alone(0), questions())
    configs = [MemberConfig(path="x", name="same"), MemberConfig(path="y", name="same")]
    pair = EnsembleForCausalLM.from_members(ensemble.members[:2], ensemble.tokenizers[:2], member_configs=configs)
    with pytest.raises(ConfigurationError, match="'same', 'same'"):
        advise(pair, questions())


def test_no_time_is_said(ensemble, scripted):
    set_rules(scripted[0], *[lambda n: True] * 4)
    with pytest.raises(
        ConfigurationError, match="only 0 of 200 examples ran on all of them, but 20 are needed: give more minutes"
    ):
        advise(ensemble, questions(), minutes=1e-9)


def test_a_page_is_well_formed_and_escapes_names(ensemble, scripted, tmp_path):
    rules, _ = scripted
    set_rules(rules, lambda n: n % 10 < 5, lambda n: n % 10 < 6, lambda n: False, lambda n: n % 10 < 8)
    advice = advise(ensemble, read_set(questions(), name="<b>@@answer@@</b>"))
    advice.write_page(tmp_path / "advice.html")
    text = (tmp_path / "advice.html").read_text("utf-8")
    assert "&lt;b&gt;@@answer@@" in text
    assert "<b>" not in text
    assert "http" not in text.replace("http-equiv", "")
    check_loads_nothing(text)
    for one in advice.ensembles:
        assert text.count(one.title) >= 1
    with pytest.raises(ConfigurationError, match=r"\.html"):
        advice.write_page(tmp_path / "advice.txt")


def test_everything_is_json(ensemble, scripted):
    rules, _ = scripted
    set_rules(rules, lambda n: n % 10 < 5, lambda n: n % 10 < 6, lambda n: False, lambda n: n % 10 < 8)
    advice = advise(ensemble, questions())
    values = json.loads(json.dumps(advice.to_dict(), allow_nan=False))
    assert values["pays"] is True
    assert values["ensembles"][0]["method"]["name"] == advice.chosen.method.name
    assert values["members"][0]["estimate"]["value"] == pytest.approx(0.6)


@pytest.mark.parametrize(("count", "pays"), [(60, None), (600, False)])
def test_members_and_ensembles_that_are_right_alike_gain_nothing(ensemble, scripted, count, pays):
    set_rules(scripted[0], lambda n: n % 2, lambda n: n % 3 == 0, lambda n: False, lambda n: n % 2)
    advice = advise(ensemble, questions(count))
    assert advice.pays is pays
    assert advice.gain == pytest.approx((0, -3 / count, 3 / count))


def test_a_member_that_is_hardly_ever_right_is_no_error(ensemble, scripted):
    set_rules(scripted[0], lambda n: n == 1, lambda n: False, lambda n: False, lambda n: n < 2)
    advice = advise(ensemble, questions())
    assert advice.members[0].name == "first"
    assert "0.5 points less than first" in advice.members[1].reason


def test_copies_of_an_example_count_once(ensemble, scripted):
    set_rules(scripted[0], *[lambda n: True] * 4)
    with pytest.raises(ConfigurationError, match="has 3 examples"):
        advise(ensemble, questions(3) * 100)


def test_a_gate_stays_the_members_that_it_was(ensemble, scripted):
    """Members are put in the order of their values; the gate is counted in that of the user."""
    rules, _ = scripted
    set_rules(rules, lambda n: n % 10 < 5, lambda n: n % 10 < 6, lambda n: n % 10 < 1, lambda n: n % 10 < 8)
    gated = [GacConfig(threshold=0.5, gate=gate) for gate in (0, 1, 2)]
    advice = advise(ensemble, questions(), methods=gated)
    # The third is not near; its gate is left out with it.
    assert {one.method.gate for one in advice.ensembles} == {0, 1}
    for one in advice.ensembles:
        assert one.members == ("second", "first")
    first = next(one for one in advice.ensembles if one.weights == (0.5, 0.5))
    assert first.spelled in ("gac:threshold=0.5,gate=1@0.5,0.5", "gac:threshold=0.5@0.5,0.5")
    advice.build(ensemble)
    with pytest.raises(ConfigurationError, match="only 3 members|numbered from 0 to 2"):
        advise(ensemble, questions(), methods=[GacConfig(threshold=0.5, gate=3)])


def test_other_things_than_an_ensemble_of_these_members_are_refused(ensemble, scripted, tmp_path):
    rules, calls = scripted
    set_rules(rules, lambda n: n % 10 < 5, lambda n: n % 10 < 6, lambda n: False, lambda n: n % 10 < 8)
    with pytest.raises(ConfigurationError, match="has to be an ensemble of all members"):
        advise(["a", "b"], questions())
    with pytest.raises(ConfigurationError, match="writes answers greedily"):
        advise(ensemble, questions(), methods=[GacConfig(strategy="mixture_sampling")])
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="`state_folder` .* cannot be created"):
        advise(ensemble, questions(), state_folder=tmp_path / "file")
    assert not calls
    with pytest.raises(ConfigurationError, match="but the ensemble has \\['first'\\]"):
        advise(ensemble, questions()).build(ensemble.alone(0))


@pytest.mark.parametrize(("count", "said"), [(1, "1 example"), (7, "7 examples")])
def test_few_examples_in_common_decide_nothing(ensemble, scripted, monkeypatch, count, said):
    rules, _ = scripted
    set_rules(rules, lambda n: False, lambda n: n % 10 < 6, lambda n: False, lambda n: True)
    run_ensembles = Trial.run_ensembles

    def run_few(trial, *args):
        run_ensembles(trial, *args)
        for ran in trial.ensembles.values():
            for place in sorted(ran.values)[count:]:
                del ran.values[place]

    monkeypatch.setattr(Trial, "run_ensembles", run_few)
    advice = advise(ensemble, questions())
    assert advice.pays is None
    assert f"time for only {said}." in advice.reason


def test_choices_differ_by_what_is_chosen(monkeypatch):
    made = Recipe((("llama", "smol"), ("gemma3", "gemma"))).ensemble
    configs = [MemberConfig(path=name, name=name) for name in ("first", "second")]
    pair = EnsembleForCausalLM.from_members(made.members, made.tokenizers, member_configs=configs)

    def score(self, prompts, continuations, **options):
        # Neither is ever right, and they choose different wrong ones.
        wrong = " b" if [view.name for view in self.member_views] == ["first"] else " c"
        likely = torch.tensor([0.0 if text == wrong else -1.0 for text in continuations])
        return types.SimpleNamespace(log_probs=likely)

    monkeypatch.setattr(EnsembleForCausalLM, "score", score)
    data = [{"question": f"{n}?", "A": "a", "B": "b", "C": "c", "answer": "A"} for n in range(24)]
    advice = advise(pair, data)
    assert advice.differing == 1
    assert advice.ensembles


def test_a_method_that_gives_an_example_nothing_is_not_chosen(ensemble):
    texts = [{"prompt": "The cat", "text": f" sat on {n} mats."} for n in range(24)]
    pair = EnsembleForCausalLM.from_members(
        ensemble.members[:2], ensemble.tokenizers[:2], member_configs=ensemble.config.members[:2]
    )
    advice = advise(pair, texts, batch_size=24, methods=["unite", "gac"])
    assert [one.method.name for one in advice.ensembles if math.isinf(one.estimate.value)] == ["unite"]
    assert advice.chosen.method.name == "gac"
    assert math.isfinite(advice.gain.value)


def test_methods_are_spelled_as_the_command_line_takes_them():
    assert spelled(GacConfig()) == "gac"
    assert spelled(GacConfig(threshold=0.5, gate=1)) == "gac:threshold=0.5,gate=1"
    assert spelled(DeepenConfig(support=None, skip_on_agreement=True)) == "deepen:support=none,skip_on_agreement=true"
    assert spelled(SweetSpanConfig(span_length=1)) == "sweetspan:span_length=1"


def test_bits_of_texts_on_members_that_run(ensemble):
    texts = [{"prompt": "The cat", "text": f" sat on {n} mats."} for n in range(24)]
    pair = EnsembleForCausalLM.from_members(
        ensemble.members[:2], ensemble.tokenizers[:2], member_configs=ensemble.config.members[:2]
    )
    advice = advise(pair, texts, batch_size=24)
    assert advice.measure == "bits per byte"
    best, other = advice.members
    assert best.estimate.value <= other.estimate.value
    # What both do better at one example at a time is at most what the best does.
    assert advice.either <= best.estimate.value
    differences = [one.difference.value for one in advice.ensembles]
    assert differences == sorted(differences)
    # All methods by which texts have one likelihood are there once.
    assert [one.method.name for one in advice.ensembles].count("sweetspan") == 1
    assert (advice.gain.value < 0) == (advice.pays is not False)
