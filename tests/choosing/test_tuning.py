"""A search over a method's options: every point once, the best kept, and a stopped search that goes on."""

import json

import pytest
import torch

from hf_ensemble import ConfigurationError, EnsembleForCausalLM, GacConfig, UniteConfig, tune_method
from tests import tiny
from tests.contracts import PROMPTS, Recipe, model_of, tokenizer_of

RECIPE = Recipe((("llama", "smol"), ("gemma3", "gemma")))
GRID = {"top_k": [1, 5], "weights": [[1, 1], [0.9, 0.1]]}
EXAMPLES = [{"prompt": prompt, "reference": prompt} for prompt in PROMPTS]


def length(response, reference):
    return len(response) + len(reference) / 100


@pytest.fixture
def ensemble():
    return RECIPE.ensemble


@pytest.fixture
def calls(monkeypatch):
    """The method and weights of every call of `generate`."""
    made = []
    generate = EnsembleForCausalLM.generate

    def counted(self, *args, **kwargs):
        made.append((kwargs["method"], tuple(kwargs["weights"]), len(kwargs["input_ids"])))
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(EnsembleForCausalLM, "generate", counted)
    return made


def test_every_point_runs_and_the_best_is_what_generate_gives(ensemble):
    result = tune_method(ensemble, EXAMPLES, length, GRID, max_new_tokens=5)
    assert [(point.method.top_k, point.weights) for point in result.table] == [
        (1, (0.5, 0.5)),
        (1, (0.9, 0.1)),
        (5, (0.5, 0.5)),
        (5, (0.9, 0.1)),
    ]
    best = result.best
    assert best.score == max(point.score for point in result.table)
    for row, prompt in enumerate(PROMPTS):
        ids = ensemble.tokenizer(prompt, return_tensors="pt")["input_ids"]
        written = ensemble.generate(ids, method=best.method, weights=best.weights, max_new_tokens=5, do_sample=False)
        text = ensemble.tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True)
        assert best.responses[row] == text
    total = sum(map(length, best.responses, PROMPTS))
    assert best.score == pytest.approx(total / 3)


def test_the_table_is_aligned_and_begins_with_the_best(ensemble):
    result = tune_method(ensemble, EXAMPLES, length, GRID, max_new_tokens=3)
    lines = str(result).splitlines()
    assert lines[0].split() == ["top_k", "weights", "score", "seconds"]
    assert len(lines) == 5
    assert f"{result.best.score:.4f}" in lines[1]
    assert all(line[lines[0].index("score") - 1] == " " for line in lines)


def test_of_equals_the_first_of_the_grid_is_best(ensemble):
    result = tune_method(ensemble, EXAMPLES[:1], lambda *_: 1, GRID, max_new_tokens=1)
    assert result.best is result.table[0]


def test_weights_that_are_the_same_run_once(ensemble, calls):
    result = tune_method(ensemble, EXAMPLES, length, {"weights": [[1, 1], [2, 2], None]}, max_new_tokens=1)
    assert len(result.table) == 3
    assert len(calls) == 1


def test_weights_of_log_space_stay_as_they_are(ensemble, calls):
    method = GacConfig(space="log")
    tune_method(ensemble, EXAMPLES, length, {"weights": [[1, -0.5]]}, method=method, max_new_tokens=1)
    assert calls[0][1] == (1, -0.5)
    with pytest.raises(ConfigurationError, match="at least 0"):
        tune_method(ensemble, EXAMPLES, length, {"weights": [[1, -0.5]]}, method="gac", max_new_tokens=1)


def test_options_outside_the_grid_are_those_given_else_the_ensembles(ensemble, calls):
    tune_method(ensemble, EXAMPLES[:1], length, {"weights": [[1, 3]]}, method=UniteConfig(top_k=3), max_new_tokens=1)
    tune_method(ensemble, EXAMPLES[:1], length, {"top_k": [4]}, weights=[1, 3], max_new_tokens=1)
    tune_method(ensemble, EXAMPLES[:1], length, {"weights": [None]}, method="gac", max_new_tokens=1)
    assert [call[:2] for call in calls] == [
        (UniteConfig(top_k=3), (0.25, 0.75)),
        (UniteConfig(top_k=4), (0.25, 0.75)),
        (GacConfig(), (0.5, 0.5)),
    ]


def test_spans_are_searched_too(ensemble):
    result = tune_method(ensemble, EXAMPLES[:1], length, {"span_length": [1, 2]}, method="sweetspan", max_new_tokens=4)
    assert [point.method.span_length for point in result.table] == [1, 2]


def test_a_search_that_was_stopped_goes_on(ensemble, calls, tmp_path):
    state = tmp_path / "state.jsonl"
    whole = tune_method(ensemble, EXAMPLES, length, GRID, max_new_tokens=3, batch_size=2)
    assert [call[2] for call in calls] == [2, 1] * 4
    calls.clear()

    class Stopped(Exception):
        pass

    seen = []

    def stops(response, reference):
        seen.append(response)
        if len(seen) > 6:
            raise Stopped
        return 0

    with pytest.raises(Stopped):
        tune_method(ensemble, EXAMPLES, stops, GRID, max_new_tokens=3, batch_size=2, state_file=state)
    assert len(state.read_text("utf-8").splitlines()) == 3
    with state.open("a", encoding="utf-8") as file:
        file.write('{"search": {"form')  # killed while it wrote
    calls.clear()
    resumed = tune_method(ensemble, EXAMPLES, length, GRID, max_new_tokens=3, batch_size=2, state_file=state)
    assert len(calls) == 2
    assert calls[0][:2] == (UniteConfig(top_k=5), (0.9, 0.1))
    assert [(p.score, p.responses) for p in resumed.table] == [(p.score, p.responses) for p in whole.table]
    assert len(state.read_text("utf-8").splitlines()) == 4


def test_a_finished_search_takes_another_metric_and_a_larger_grid(ensemble, calls, tmp_path):
    state = tmp_path / "state.jsonl"
    tune_method(ensemble, EXAMPLES, length, {"top_k": [1, 5]}, max_new_tokens=3, state_file=state)
    calls.clear()
    references = [(prompt, "e") for prompt in PROMPTS]
    result = tune_method(ensemble, references, "contains", {"top_k": [5, 2]}, max_new_tokens=3, state_file=state)
    assert [call[0].top_k for call in calls] == [2]
    assert all(0 <= point.score <= 1 for point in result.table)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"max_new_tokens": 4}, "options"),
        ({"repetition_penalty": 1.2}, "options"),
        ({"examples": EXAMPLES[:2]}, "prompts"),
        ({"order": (("gemma3", "gemma"), ("llama", "smol"))}, "members, generation config"),
        ({"seed": 5}, "members"),
    ],
)
def test_a_state_file_of_another_search_is_refused(ensemble, tmp_path, changes, part):
    state = tmp_path / "state.jsonl"
    tune_method(ensemble, EXAMPLES, length, {"top_k": [1]}, max_new_tokens=3, state_file=state)
    before = state.read_bytes()
    if "order" in changes:
        ensemble = Recipe(changes.pop("order")).ensemble
    if "seed" in changes:
        models = [ensemble.members[0], tiny.tiny_gemma3(ensemble.tokenizers[1], seed=changes.pop("seed"))]
        ensemble = EnsembleForCausalLM.from_members(models, ensemble.tokenizers)
    options = {"examples": EXAMPLES, "max_new_tokens": 3, **changes}
    with pytest.raises(ConfigurationError, match=f"belongs to another search, with other {part}. Name another file"):
        tune_method(ensemble, metric=length, grid={"top_k": [1]}, state_file=state, **options)
    assert state.read_bytes() == before


def test_the_same_members_loaded_again_are_the_same_search(ensemble, calls, tmp_path):
    state = tmp_path / "state.jsonl"
    pairs = [("llama", "smol"), ("gemma3", "gemma")]
    for n, pair in enumerate(pairs):
        model_of(*pair, seed=n).save_pretrained(tmp_path / pair[1])
        tokenizer_of(pair[1]).save_pretrained(tmp_path / pair[1])
    for _ in range(2):
        loaded = EnsembleForCausalLM.from_pretrained([tmp_path / name for _, name in pairs])
        tune_method(loaded, EXAMPLES, length, {"top_k": [1]}, max_new_tokens=1, state_file=state)
    assert len(calls) == 1


@pytest.mark.parametrize(
    "content", ["my notes\n", "my notes", '{"score": 1}\n', "[1]\n", '{"search": 3, "point": 1}\n']
)
def test_a_file_that_is_no_state_is_left_alone(ensemble, tmp_path, content):
    state = tmp_path / "notes.txt"
    state.write_text(content, "utf-8")
    with pytest.raises(ConfigurationError, match="is not a file of a search"):
        tune_method(ensemble, EXAMPLES, length, GRID, max_new_tokens=1, state_file=state)
    assert state.read_text("utf-8") == content


@pytest.mark.parametrize("damaged", ["text", [1, 2], ["one"], None])
def test_responses_that_are_damaged_are_named(ensemble, tmp_path, damaged):
    state = tmp_path / "s"
    tune_method(ensemble, EXAMPLES, length, GRID, max_new_tokens=1, state_file=state)
    line, *others = state.read_text("utf-8").splitlines(keepends=True)
    state.write_text(json.dumps(json.loads(line) | {"responses": damaged}) + "\n" + "".join(others), "utf-8")
    with pytest.raises(ConfigurationError, match="line 1 cannot be read .*`responses` is not a list of"):
        tune_method(ensemble, EXAMPLES, length, GRID, max_new_tokens=1, state_file=state)


def test_nothing_of_the_ensemble_and_no_random_number_is_used_up(ensemble, tmp_path):
    before = torch.random.get_rng_state(), json.dumps(ensemble.config.to_dict(), default=str)
    tune_method(ensemble, EXAMPLES, length, GRID, max_new_tokens=2, state_file=tmp_path / "s")
    assert torch.equal(torch.random.get_rng_state(), before[0])
    assert json.dumps(ensemble.config.to_dict(), default=str) == before[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grid": {}}, "`grid` must name at least one option"),
        ({"grid": {"top_k": []}}, r"`grid\['top_k'\]` has to be a list of at least one value"),
        ({"grid": {"top_k": 3}}, r"`grid\['top_k'\]` has to be a list"),
        ({"grid": {"top_k": "13"}}, r"`grid\['top_k'\]` has to be a list"),
        ({"grid": {"eta": [1]}}, "method 'unite' has no option 'eta' to search. Options: top_k, .*weights"),
        ({"grid": {"top_k": [5, 0]}}, "`top_k` has to be a positive integer, but is 0"),
        ({"grid": {"weights": [[1, 1], [1, -1]]}}, "`weights` must be finite and at least 0"),
        ({"grid": {"weights": [[1, 1, 1]]}}, "`weights` must have one entry per member: got 3 for 2"),
        (
            {"grid": {"weights": [lambda step: [1, 1]]}},
            "have to be lists if they are searched or kept in a search, but are <function",
        ),
        ({"examples": []}, "the development set is empty"),
        ({"metric": "bleu"}, "one of exact_match, contains, but is 'bleu'"),
        ({"max_new_tokens": -1}, "`max_new_tokens` has to be a positive integer"),
        ({"batch_size": 0}, "`batch_size` has to be a positive integer"),
    ],
)
def test_bad_input_is_named_before_anything_runs(ensemble, calls, changes, message):
    options = {"examples": EXAMPLES, "metric": length, "grid": GRID, "max_new_tokens": 1, **changes}
    with pytest.raises(ConfigurationError, match=message):
        tune_method(ensemble, **options)
    assert not calls


def test_a_metric_that_gives_no_number_is_named(ensemble):
    with pytest.raises(ConfigurationError, match="finite number, but returned nan for example 0"):
        tune_method(ensemble, EXAMPLES, lambda *_: float("nan"), GRID, max_new_tokens=1)


def test_an_option_that_cannot_be_written_down_has_no_state_file(ensemble, tmp_path):
    options = {"max_new_tokens": 1, "logits_processor": [lambda ids, scores: scores]}
    tune_method(ensemble, EXAMPLES[:1], length, {"top_k": [2]}, **options)
    with pytest.raises(ConfigurationError, match="the options of this search cannot be written as JSON.*Leave out"):
        tune_method(ensemble, EXAMPLES[:1], length, {"top_k": [2]}, state_file=tmp_path / "s", **options)
