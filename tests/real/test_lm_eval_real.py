"""A task of lm-evaluation-harness on the two real models."""

import json

import pytest

from hf_ensemble import EnsembleForCausalLM

pytestmark = [pytest.mark.real, pytest.mark.slow]


@pytest.mark.filterwarnings("ignore")
def test_a_local_task_of_lm_eval_runs(models, tokenizers, tmp_path, monkeypatch):
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
    ensemble = EnsembleForCausalLM.from_members(models, tokenizers, method="gac")
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    results = lm_eval.simple_evaluate(
        model=EnsembleLM(ensemble=ensemble), tasks=["capitals"], task_manager=manager, bootstrap_iters=0
    )
    assert results["results"]["capitals"]["acc,none"] >= 0.75
