"""lm-evaluation-harness: an ensemble of one is its own `hf` model, local tasks run, and the command line knows us."""

import functools
import json
import re
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("lm_eval")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from hf_ensemble.lm_eval import EnsembleLM, main, quote_lists

from hf_ensemble import ConfigurationError, EnsembleForCausalLM, GacConfig, VoteConfig
from hf_ensemble.chat.memory import recall
from tests import tiny
from tests.contracts import make_ensemble

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # the harness's own
]

PAIRS = [
    ("The capital of France is", " Paris"),
    ("The capital of France is", " Berlin, of course"),
    ("The cat sat on the ", "mat"),
    ("", "Once upon a time"),
    ("今天", "天气很好"),
]
LONG = "Once upon a time there was a king who had three daughters. Die Hauptstadt von Frankreich ist Paris. " * 2
QUESTIONS = [
    ("The cat sat on the", [" mat", " hat", " king"], 0),
    ("The capital of Germany is", [" Paris", " Berlin"], 1),
]


@functools.cache
def member(name):
    tokenizer = {"smol": tiny.smol_like, "gemma": tiny.gemma_like}[name]()
    model = {"smol": tiny.tiny_llama, "gemma": tiny.tiny_gemma3}[name](tokenizer, seed=1)
    return model, tokenizer


@functools.cache
def two():
    return make_ensemble(*zip(member("smol"), member("gemma"), strict=True), method="gac")


def requests(*arguments):
    return [SimpleNamespace(args=args, task_name="t") for args in arguments]


@pytest.fixture(params=["smol", "gemma"])
def alone(request):
    """One model as the harness's own, and as an ensemble of one."""
    model, tokenizer = member(request.param)
    options = {"max_length": 24, "batch_size": 2}
    theirs = HFLM(pretrained=model, tokenizer=tokenizer, device="cpu", **options)
    return theirs, EnsembleLM(ensemble=EnsembleForCausalLM.from_members([model], [tokenizer]), **options)


def test_likelihoods_of_one_member_are_those_of_the_harness(alone):
    theirs, ours = alone
    expected = theirs.loglikelihood(requests(*PAIRS), disable_tqdm=True)
    found = ours.loglikelihood(requests(*PAIRS), disable_tqdm=True)
    for mine, other in zip(found, expected, strict=True):
        assert mine == (pytest.approx(other[0], abs=1e-4), other[1])


def test_a_text_of_a_task_is_plain_unless_it_was_rendered():
    """Whatever conversation had the same ids before."""
    tokenizers = tiny.smol_like(), tiny.gemma_like()
    tokenizers[0].chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    models = [tiny.tiny_llama(tokenizers[0]), tiny.tiny_gemma3(tokenizers[1])]
    ensemble = EnsembleForCausalLM.from_members(models, tokenizers)
    lm = EnsembleLM(ensemble=ensemble)
    turns = [{"role": "user", "content": "Hi"}]
    ids = ensemble.apply_chat_template(turns)["input_ids"]
    assert recall(ensemble.config.chat_id, ids) is not None
    assert lm.tok_encode("Hi") == ids
    assert recall(ensemble.config.chat_id, ids) is None
    assert lm.tok_encode(lm.apply_chat_template(turns)) == ids
    assert recall(ensemble.config.chat_id, ids) is not None


def test_long_prompts_are_cut_as_the_harness_does(alone):
    theirs, ours = alone
    pair = (LONG, " The end")
    expected = theirs.loglikelihood(requests(pair), disable_tqdm=True)[0]
    assert ours.loglikelihood(requests(pair), disable_tqdm=True)[0][0] == pytest.approx(expected[0], abs=1e-4)


def test_rolling_likelihoods_of_one_member_are_those_of_the_harness(alone):
    """But for the BOS that it scores where the tokenizer puts one."""
    theirs, ours = alone
    theirs.add_bos_token = False
    expected = theirs.loglikelihood_rolling(requests((LONG,), ("The cat",)), disable_tqdm=True)
    found = ours.loglikelihood_rolling(requests((LONG,), ("The cat",), ("",)), disable_tqdm=True)
    assert found == [*(pytest.approx(value, abs=1e-3) for value in expected), 0]


def test_texts_of_one_member_are_those_of_the_harness(alone):
    theirs, ours = alone
    options = {"until": ["e", "\n\n"], "max_gen_toks": 8, "do_sample": False}
    asked = requests(*((prompt, options) for prompt in ("The cat", LONG, "Once upon a time")))
    expected = theirs.generate_until(asked, disable_tqdm=True)
    assert ours.generate_until(asked, disable_tqdm=True) == expected


def test_likelihoods_are_those_of_score():
    ours = EnsembleLM(ensemble=two(), batch_size=3)
    found = ours.loglikelihood(requests(*PAIRS), disable_tqdm=True)
    scores = two().score(*zip(*PAIRS, strict=True))
    torch.testing.assert_close(torch.tensor([value for value, _ in found]), scores.log_probs, atol=1e-4, rtol=0)
    other = EnsembleLM(ensemble=two(), method="gac", weights="1,0", threshold=0.5)
    alone = two().score(*zip(*PAIRS, strict=True), method=GacConfig(threshold=0.5), weights=[1, 0])
    found = other.loglikelihood(requests(*PAIRS), disable_tqdm=True)
    torch.testing.assert_close(torch.tensor([value for value, _ in found]), alone.log_probs, atol=1e-4, rtol=0)


def test_rows_end_at_their_own_stop_strings():
    ours = EnsembleLM(ensemble=two(), batch_size=4)
    free = [(prompt, {"until": [], "max_gen_toks": 10}) for prompt in ("The cat", "Once upon a time", "A")]
    texts = ours.generate_until(requests(*free), disable_tqdm=True)
    stop = next(char for char in texts[0] if char.isalnum())
    asked = [(prompt, {"until": [stop], "max_gen_toks": 10}) for prompt, _ in free]
    found = ours.generate_until(requests(*asked), disable_tqdm=True)
    assert found == [text.split(stop)[0] for text in texts]


def test_whole_answers_are_written_to_the_tasks_ends():
    """What a method says of its candidates goes before what a task says of sampling."""
    config = VoteConfig(num_candidates=2, generate_options={"do_sample": True, "temperature": 0.7})
    ensemble = make_ensemble(*zip(member("smol"), member("gemma"), strict=True), method=config)
    prompts = ("The cat sat on the", "Once upon a time")
    asked = requests(*((prompt, {"until": ["e"], "max_gen_toks": 8, "do_sample": False}) for prompt in prompts))
    torch.manual_seed(0)
    found = EnsembleLM(ensemble=ensemble, batch_size=2).generate_until(asked)
    torch.manual_seed(0)
    inputs = ensemble.tokenizer(list(prompts), return_tensors="pt", padding=True)
    ids = ensemble.generate(**inputs, max_new_tokens=8, stop_strings=["e"])[:, inputs["input_ids"].shape[1] :]
    expected = [text.split("e")[0] for text in ensemble.tokenizer.batch_decode(ids, skip_special_tokens=True)]
    assert found == expected
    plain = EnsembleLM(ensemble=two(), method="vote", batch_size=2)
    alone = EnsembleLM(ensemble=two().alone(0)).generate_until(asked)
    # A character that has begun at the end is cut off.
    assert plain.generate_until(asked) == [text.rstrip("\ufffd") for text in alone]
    with pytest.raises(ConfigurationError, match="compares whole answers"):
        plain.loglikelihood(requests(PAIRS[0]))


def test_tokens_without_probability_are_reported(caplog):
    ours = EnsembleLM(ensemble=two(), method="unite", top_k=1)
    ours.loglikelihood(requests(*PAIRS), disable_tqdm=True)
    assert "continuations have probability 0" in caplog.text


@pytest.fixture
def tasks(tmp_path):
    """A folder of a multiple-choice, a rolling and a generating task."""
    files = {
        "choice": ({"question": q, "choices": c, "label": n} for q, c, n in QUESTIONS),
        "rolling": [{"text": "The cat sat on the mat."}, {"text": LONG}],
        "writing": [{"question": "The cat", "answer": "x"}],
    }
    common = "dataset_path: json\ntest_split: test\nmetadata: {version: 1}\n"
    choice = "output_type: multiple_choice\ndoc_to_text: '{{question}}'\ndoc_to_choice: '{{choices}}'\n"
    rolling = "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{text}}'\n"
    writing = "output_type: generate_until\ndoc_to_text: '{{question}}'\ndoc_to_target: '{{answer}}'\n"
    writing += "generation_kwargs: {until: ['.'], max_gen_toks: 4}\nmetric_list: [{metric: exact_match}]\n"
    choice += "doc_to_target: label\ntarget_delimiter: ''\nmetric_list: [{metric: acc}, {metric: acc_norm}]\n"
    rolling += "metric_list: [{metric: bits_per_byte}]\n"
    for name, text in {"choice": choice, "rolling": rolling, "writing": writing}.items():
        file = tmp_path / f"{name}.jsonl"
        file.write_text("\n".join(map(json.dumps, files[name])), "utf-8")
        data = f"dataset_kwargs: {{data_files: {{test: {file}}}}}\n"
        (tmp_path / f"{name}.yaml").write_text(f"task: {name}\n{common}{data}{text}", "utf-8")
    return tmp_path


@pytest.fixture
def caches(tmp_path, monkeypatch):
    """Data sets are prepared below the test's folder."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def test_local_tasks_run(tasks, caches):
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    options = {"tasks": ["choice", "rolling", "writing"], "task_manager": manager, "bootstrap_iters": 0}
    results = lm_eval.simple_evaluate(model=EnsembleLM(ensemble=two()), **options)["results"]
    expected = 0
    for question, choices, label in QUESTIONS:
        scores = two().score([question] * len(choices), choices)
        expected += int(scores.log_probs.argmax()) == label
    assert results["choice"]["acc,none"] == expected / len(QUESTIONS)
    assert results["rolling"]["bits_per_byte,none"] > 0
    assert results["writing"]["exact_match,none"] == 0


def test_the_command_line_knows_ensembles(tasks, caches, tmp_path, monkeypatch, capsys):
    members = tiny.save_pair(tmp_path, "a", "b")
    model_args = f"members={members[0]},{members[1]},method=gac,weights=0.5,0.5"
    command = ["run", "--model", "hf_ensemble", "--model_args", model_args, "--tasks", "choice"]
    monkeypatch.setattr(sys, "argv", ["lm_eval", *command, "--include_path", str(tasks)])
    # Without `--device` the harness passes "cuda:0", GPU or not.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    # Reading all the harness's own tasks takes a minute.
    monkeypatch.setattr("lm_eval.tasks.TaskManager", functools.partial(TaskManager, include_defaults=False))
    main()
    assert "acc_norm" in capsys.readouterr().out


def test_the_page_about_it_runs(caches, tmp_path, monkeypatch):
    """With the page's own files, in a process that has not imported the harness's parts yet."""
    page = Path(__file__).resolve().parents[1] / "docs" / "how-to" / "lm_eval.md"
    blocks = dict(re.findall(r"```(json|yaml|py)\n(.*?)```", page.read_text("utf-8"), re.DOTALL))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "choice.jsonl").write_text(blocks["json"], "utf-8")
    (tmp_path / "tasks" / "choice.yaml").write_text(blocks["yaml"], "utf-8")
    tiny.save_pair(tmp_path, "model-a", "model-b")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delattr(lm_eval, "tasks")
    exec(compile(blocks["py"], str(page), "exec"), {})


def test_lists_in_model_arguments_are_kept_together():
    given = ["run", "--model_args", "members=a,b,method=gac", "dtype=float32", "--tasks", "x,y"]
    kept = ["run", "--model_args", 'members="a,b",method=gac', "dtype=float32", "--tasks", "x,y"]
    assert quote_lists(given) == quote_lists(kept) == kept
    as_json = ["-a", '{"members": ["a", "b"]}']
    assert quote_lists(as_json) == as_json


def test_a_model_from_an_argument_string(tmp_path):
    members = tiny.save_pair(tmp_path, "a", "b")
    text = f"members={members[0]},{members[1]},method=gac,threshold=0.5,weights=0.25,0.75,max_length=64"
    ours = EnsembleLM.create_from_arg_string(text, {"batch_size": 2, "max_batch_size": None, "device": "cpu"})
    info = ours.get_model_info()
    assert info["method"]["threshold"] == 0.5
    assert info["weights"] == [0.25, 0.75]
    assert (ours.batch_size, ours.max_length, len(info["members"])) == (2, 64, 2)
    single = EnsembleLM(pretrained=members[0], device="cpu")
    assert len(single.ensemble.members) == 1
    assert EnsembleLM(members=members, device="cpu").get_model_info()["method"]["name"] == "gac"


def test_what_makes_no_sense_is_refused():
    for options, message in (
        ({}, "give one of `members`, `pretrained` and `ensemble`: got none"),
        ({"ensemble": two(), "members": "a,b"}, r"got \['members', 'ensemble'\]"),
        ({"ensemble": two(), "batch_size": "auto"}, "`batch_size` has to be a positive integer"),
        ({"ensemble": two(), "method": "gac", "top_k": 3}, "`top_k` cannot be used"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            EnsembleLM(**options)
    ours = EnsembleLM(ensemble=two(), max_length=8)
    with pytest.raises(ConfigurationError, match="leave no room"):
        ours.generate_until(requests(("A", {"max_gen_toks": 8})), disable_tqdm=True)
    with pytest.raises(ConfigurationError, match="`max_length` is 8"):
        ours.loglikelihood(requests(("A", LONG)), disable_tqdm=True)
