"""Likelihoods of the two real models: against the plain reference, and through lm-evaluation-harness."""

import json

import pytest

from hf_ensemble import EnsembleForCausalLM
from tests.reference import Reference, ReferenceMember
from tests.reference_scores import score, split

pytestmark = [pytest.mark.real, pytest.mark.slow]

PAIRS = [("The capital of France is", " Paris."), ("The capital of France is", " Berlin"), ("今天天气", "很好")]


@pytest.fixture(scope="module")
def ensemble(demo_models):
    return EnsembleForCausalLM.from_pretrained(list(demo_models), method="gac", dtype="float32")


def test_scores_equal_the_reference(ensemble):
    members = [ReferenceMember(*pair) for pair in zip(ensemble.members, ensemble.tokenizers, strict=True)]
    found = ensemble.score(*zip(*PAIRS, strict=True))
    expected = score(Reference(members, "gac"), *split(members[0], *PAIRS[2]))
    assert found.log_probs[2].item() == pytest.approx(expected.log_prob, abs=1e-3)
    assert found.is_greedy[2].item() == expected.is_greedy
    assert found.log_probs[0] > found.log_probs[1]


@pytest.mark.filterwarnings("ignore")
def test_a_local_task_of_lm_eval_runs(ensemble, tmp_path, monkeypatch):
    lm_eval = pytest.importorskip("lm_eval")
    import datasets
    from lm_eval.tasks import TaskManager

    from hf_ensemble.lm_eval import EnsembleLM

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "capitals.jsonl"
    capitals = {"France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Japan": "Tokyo"}
    choices = list(capitals.values())
    rows = [{"country": name, "choices": choices, "label": choices.index(city)} for name, city in capitals.items()]
    file.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    (tmp_path / "capitals.yaml").write_text(
        f"task: capitals\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {file}}}}}\ntest_split: test\n"
        "output_type: multiple_choice\ndoc_to_text: The capital of {{country}} is\ndoc_to_choice: '{{choices}}'\n"
        "doc_to_target: label\nmetric_list: [{metric: acc}]\nmetadata: {version: 1}\n",
        "utf-8",
    )
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    results = lm_eval.simple_evaluate(
        model=EnsembleLM(ensemble=ensemble), tasks=["capitals"], task_manager=manager, bootstrap_iters=0
    )
    assert results["results"]["capitals"]["acc,none"] >= 0.75
