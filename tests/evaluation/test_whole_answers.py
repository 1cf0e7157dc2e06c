"""Evaluating, tuning and advising with methods that choose among whole answers."""

import pytest
import torch

from hf_ensemble import ConfigurationError, MbrConfig, RerankConfig, VoteConfig, tune_method
from hf_ensemble.evaluation import Configuration, evaluate, read_set
from tests import tiny
from tests.answers.test_refusals import running_nobody
from tests.bug_bank import kit
from tests.contracts import make_ensemble

pytestmark = [kit.control_tokens_may_be_chosen]

SAMPLES = {"do_sample": True, "temperature": 0.8}
QUESTIONS = [{"question": f"What is {n}?", "answer": "e"} for n in range(6)]
CHOICES = [{"question": f"Is it {n}?", "A": "yes", "B": "no", "answer": "A"} for n in range(3)]


@pytest.fixture(scope="module")
def ensemble():
    tokenizers = [kit.tokenizer_of("smol"), kit.tokenizer_of("gemma")]
    return make_ensemble([tiny.tiny_llama(tokenizers[0]), tiny.tiny_gemma3(tokenizers[1])], tokenizers)


@pytest.fixture(scope="module")
def sets():
    return [read_set(QUESTIONS, name="questions"), read_set(CHOICES, name="choices")]


def run(ensemble, sets, **options):
    return evaluate(ensemble, sets, **{"members": False, "max_new_tokens": 4, **options})


def test_likelihoods_are_measured_where_there_are_some(ensemble, sets):
    found = run(
        ensemble, sets, configurations={"rerank": Configuration("rerank"), "spans": Configuration("sweetspan")}
    )
    measured = {(result.set_name, result.measure, result.system) for result in found.results}
    assert ("choices", "accuracy", "rerank") in measured
    one, other = (found["questions", "bits per byte", name] for name in ("rerank", "spans"))
    assert one.estimate == other.estimate
    found = run(ensemble, sets, configurations={"vote": Configuration("vote"), "rerank": Configuration("rerank")})
    measured = {(result.set_name, result.measure, result.system) for result in found.results}
    assert ("questions", "exact match", "vote") in measured
    assert {measure for _, measure, system in measured if system == "vote"} == {"exact match", "F1"}
    assert found.is_complete
    assert "vote" in found.to_markdown()


def test_nothing_to_measure_is_refused(ensemble, sets):
    with pytest.raises(ConfigurationError, match="'vote' chooses among whole answers.*likelihoods"):
        run(ensemble, sets[1], configurations={"vote": Configuration("vote")})
    with pytest.raises(ConfigurationError, match="method 'mbr' compares whole answers"):
        ensemble.score(["a"], ["b"], method="mbr")


@pytest.mark.parametrize("batch_size", [1, 6])
def test_samples_are_the_same_in_every_run(ensemble, sets, batch_size):
    config = VoteConfig(num_candidates=3, generate_options=SAMPLES)
    names = {"vote": Configuration(config)}
    torch.manual_seed(batch_size)
    found = run(ensemble, sets[0], configurations=names, measures=["exact match"], batch_size=batch_size)
    torch.manual_seed(0)
    again = run(ensemble, sets[0], configurations=names, measures=["exact match"], batch_size=4)
    assert found.responses == again.responses


def test_work_goes_on_and_is_told_apart(ensemble, sets, tmp_path, monkeypatch):
    state = tmp_path / "state.jsonl"
    options = {"measures": ["exact match"], "state_file": state, "batch_size": 2}
    several = {"vote": Configuration(VoteConfig(num_candidates=2, generate_options=SAMPLES))}
    first = run(ensemble, sets[0], configurations=several, **options)
    size = state.stat().st_size
    assert run(ensemble, sets[0], configurations=several, **options).responses == first.responses
    assert state.stat().st_size == size
    other = {"vote": Configuration(VoteConfig(num_candidates=2, generate_options={**SAMPLES, "temperature": 2.0}))}
    assert run(ensemble, sets[0], configurations=other, **options).responses != first.responses


def test_functions_without_a_name_of_their_own_are_told_apart(ensemble, sets, tmp_path):
    extractors = {name: Configuration(MbrConfig(utility)) for name, utility in _utilities().items()}
    found = run(ensemble, sets[0], configurations=extractors, measures=["exact match"])
    assert found.responses["questions", "first"] != found.responses["questions", "second"]
    with pytest.raises(ConfigurationError, match="cannot be imported by that path"):
        run(ensemble, sets[0], configurations=extractors, state_file=tmp_path / "state.jsonl")


def _utilities():
    def by_length(sign):
        return lambda candidates, references: [sign * float(len(text)) for text in candidates]

    return {"first": by_length(1), "second": by_length(-1)}


def test_a_configuration_that_cannot_run_is_found_before_another_runs(ensemble, sets):
    configurations = {"gac": Configuration("gac"), "vote": Configuration(VoteConfig(num_candidates=2))}
    with running_nobody(ensemble), pytest.raises(ConfigurationError, match="2` are samples.*`generate_options`"):
        run(ensemble, sets[0], configurations=configurations, members=True)


def test_options_are_tuned(ensemble):
    examples = [{"prompt": "The cat", "reference": "e"}, {"prompt": "A king", "reference": "a"}]
    grid = {"num_candidates": [1, 2]}
    config = RerankConfig(generate_options=SAMPLES)
    found = tune_method(ensemble, examples, "contains", grid, method=config, max_new_tokens=4)
    assert [point.method.num_candidates for point in found.table] == [1, 2]
    assert "num_candidates" in str(found)
