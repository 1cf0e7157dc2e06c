"""What somebody who tried to break whole answers has found."""

import re

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from hf_ensemble import FuseConfig, Fuser, GacConfig, MbrConfig, RerankConfig, RewardModel, VoteConfig, tune_method
from hf_ensemble.answers.base import AnswersConfig, Choice
from hf_ensemble.cli.arguments import read_configuration
from hf_ensemble.cli.parsers import UsageError
from hf_ensemble.decoding.draws import Draws
from hf_ensemble.errors import ConfigurationError
from hf_ensemble.evaluation import Configuration, evaluate, read_set
from hf_ensemble.modes.writing import Writing
from hf_ensemble.state_file import describe_method
from hf_ensemble.tables import spelled
from tests import tiny
from tests.answers.test_refusals import call, random_ensemble, running_nobody
from tests.bug_bank import kit
from tests.contracts import make_ensemble

pytestmark = [kit.control_tokens_may_be_chosen]

SAMPLED = {"do_sample": True, "seed": 1}


def test_functions_of_one_name_are_tuned_apart(tmp_path):
    scores = [lambda p, a, sign=sign: [sign * len(text.encode()) for text in a] for sign in (1, -1)]
    examples, options = [("The capital of France is", "?")], {"max_new_tokens": 6, "method": "rerank"}
    found = tune_method(random_ensemble(), examples, "exact_match", {"score": scores}, **options)
    first, second = (point.responses[0] for point in found.table)
    assert first != second
    with pytest.raises(ConfigurationError, match="could not find it again"):
        tune_method(
            random_ensemble(), examples, "exact_match", {"score": scores}, state_file=tmp_path / "state", **options
        )


@pytest.mark.filterwarnings("ignore:row 0 ends after")
def test_an_answer_that_one_member_cannot_read_names_it_and_what_to_do():
    tokenizers = [kit.tokenizer_of("smol"), kit.tokenizer_of("gemma")]
    models = [tiny.tiny_gpt2(tokenizers[0], n_positions=24), tiny.tiny_gemma3(tokenizers[1])]
    ensemble = make_ensemble(models, tokenizers)
    with pytest.raises(
        ConfigurationError, match=r"'member-0' has positions for 24 ids.*answer \d to row 0.*max_new_tok"
    ):
        call("The capital of France is the", "rerank", ensemble, max_new_tokens=30, min_new_tokens=28)


@pytest.mark.parametrize(
    "method",
    [
        RerankConfig(RewardModel("./nowhere")),
        FuseConfig("./nowhere"),
        VoteConfig(methods=(GacConfig(strategy="mixture_sampling"),)),
    ],
    ids=spelled,
)
def test_what_cannot_work_is_found_before_anybody_writes(method):
    with running_nobody(random_ensemble()), pytest.raises(ConfigurationError, match="no such folder|greedy decoding"):
        call(method=method)


def test_a_rankers_judge_is_looked_for_first(tmp_path):
    method = FuseConfig("./nowhere", RerankConfig(RewardModel("./neither")))
    with running_nobody(random_ensemble()), pytest.raises(ConfigurationError, match="nowhere|neither"):
        call(method=method)


def test_lengths_of_a_methods_own_options_hold():
    width = random_ensemble().tokenizer("The cat", return_tensors="pt").input_ids.shape[1]
    for length in (width + 2, width + 9):
        options = {"max_length": length, "min_length": length}
        expected = call(max_new_tokens=None, **options)
        found = call(method=VoteConfig(generate_options=options), max_new_tokens=None)
        assert found.tolist() == expected.tolist()
        assert found.shape[1] == length


def test_what_is_alone_left_is_always_drawn(monkeypatch):
    """Also by the greatest numbers, whose wait a float would round to one without end."""
    monkeypatch.setattr(torch.Tensor, "random_", lambda self, generator=None: self.fill_(2**31 - 1))
    probs = torch.zeros(2, 8)
    probs[0, 5], probs[1, 7] = 1, 0.5
    assert Draws([0, 1]).choose(probs, [0, 1]).tolist() == [5, 7]


def test_a_judge_that_was_trained_again_is_another(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"1")
    config = RerankConfig(RewardModel(str(tmp_path)))
    before = describe_method(config)
    assert describe_method(config) == before
    (tmp_path / "model.safetensors").write_bytes(b"12")
    assert describe_method(config) != before
    assert describe_method(VoteConfig()) == VoteConfig().to_dict()


@pytest.mark.parametrize("extract", [str.strip, str.lower, re.compile("e").search])
def test_methods_of_built_in_types_have_a_name(extract):
    config = VoteConfig(extract)
    assert ":" in config.to_dict()["extract"]["function"]
    assert extract.__name__ in spelled(config)


def test_evaluating_with_a_method_of_a_built_in_type():
    questions = read_set([{"question": "What?", "answer": "e"}], name="q")
    found = evaluate(
        random_ensemble(), questions, configurations={"vote": Configuration(VoteConfig(str.strip))}, members=False,
        measures=["exact match"], max_new_tokens=2,
    )  # fmt: skip
    assert found.is_complete


def test_the_command_line_says_which_scores_there_are():
    with pytest.raises(UsageError, match="`--option score` has to be likelihood or reward:PATH or pairs:PATH, but is"):
        read_configuration("rerank:score=foo")
    with pytest.raises(UsageError, match="'vote:extract=a.1,2.': .*Every comma begins another option"):
        read_configuration("vote:extract=a{1,2}")


@pytest.mark.parametrize(
    ("utility", "said"),
    [
        (lambda c, r: (1 / 0 for _ in c), "raised ZeroDivisionError"),
        (lambda c, r: [10**400] * len(c), "has to return 9 numbers"),
        (lambda c, r: dict.fromkeys(range(len(c)), 1.0), "has to return 9 numbers"),
        (lambda c, r: ["1"] * len(c), "has to return 9 numbers"),
        (lambda c, r: 1.0, "has to return 9 numbers"),
    ],
    ids=["lazy", "huge", "dictionary", "texts", "one"],
)
def test_odd_returns_of_a_utility_are_named(utility, said):
    with pytest.raises(ConfigurationError, match=f"`utility`.*{said}"):
        call(method=MbrConfig(utility))


def test_a_class_of_judges_is_no_judge():
    with pytest.raises(ConfigurationError, match="`score` has to be 'likelihood', a `RewardModel`"):
        RerankConfig(RewardModel)


def test_surrogates_do_not_break_the_page(tmp_path):
    output = call(method=VoteConfig(lambda text: "\ud83d"), return_dict_in_generate=True)
    output.answers.to_html(tmp_path / "answers.html")
    assert "?" in (tmp_path / "answers.html").read_text("utf-8")


def test_unknown_options_of_a_method_are_refused_beside_a_generation_config_too():
    method = MbrConfig(generate_options={"max_new_token": 5})
    for options in ({}, {"generation_config": GenerationConfig(max_new_tokens=4)}):
        with pytest.raises(ConfigurationError, match="`max_new_token`.*no such option"):
            call(method=method, **options)


def test_integers_of_other_libraries_are_seeds():
    config = VoteConfig(num_candidates=2)
    expected = call(method=config, do_sample=True, seed=3).tolist()
    assert call(method=config, do_sample=True, seed=np.int64(3)).tolist() == expected


def test_all_writers_share_the_time(monkeypatch):
    seen = []
    run = Writing._run

    def noted(self, mode, ensemble, ids, mask, settings, *others):
        seen.append(settings.max_time)
        return run(self, mode, ensemble, ids, mask, settings, *others)

    monkeypatch.setattr(Writing, "_run", noted)
    call(method=VoteConfig(methods=("gac",)), max_time=50.0)
    assert len(seen) == 4
    assert sorted(seen, reverse=True) == seen
    assert seen[0] <= 50


@pytest.mark.slow
def test_rows_are_written_and_read_in_parts_where_memory_does_not_do_for_all(monkeypatch):
    config = RerankConfig(num_candidates=3)
    prompts = ["The cat", "The capital of France is"]
    expected = call(prompts, config, **SAMPLED).tolist()
    sizes: dict[str, list[int]] = {"write": [], "read": []}

    def few(kind, size_of, function):
        def run(*args, **kwargs):
            size = size_of(*args)
            sizes[kind].append(size)
            if size > 2:
                raise torch.OutOfMemoryError("out of memory")
            return function(*args, **kwargs)

        return run

    from hf_ensemble.answers import likelihood

    monkeypatch.setattr(Writing, "_run", few("write", lambda self, mode, model, ids, *_: len(ids), Writing._run))
    scoring = few("read", lambda members, pairs, *_: len(pairs[0]), likelihood.score_by_member)
    monkeypatch.setattr(likelihood, "score_by_member", scoring)
    assert call(prompts, config, **SAMPLED).tolist() == expected
    assert sizes["write"] == [6, 3, 1, 2, 3, 1, 2] * 3
    assert max(sizes["read"]) > 2
    assert sizes["read"].count(1) + sizes["read"].count(2) >= 9


class _Own(AnswersConfig):
    name = "own"
    ranking: list[int] = []

    def choose(self, questions, panel):
        return [Choice(self.ranking, {}) for _ in questions]


@pytest.mark.parametrize("ranking", [[], [0], [0, 1, 3], [0, 0, 1]])
def test_a_ranking_that_is_none_is_named(ranking, monkeypatch):
    monkeypatch.setattr(_Own, "ranking", ranking)
    with pytest.raises(
        ConfigurationError, match="method 'own' has to rank every candidate of every row once, but row 0"
    ):
        call(method=_Own())


def test_models_are_kept_only_so_many(monkeypatch):
    class Judge:
        def scores(self, turns, answers):
            return [float(len(text)) for text in answers]

    loads = []
    monkeypatch.setattr(RewardModel, "load", lambda self: loads.append(self.path) or Judge())
    ensemble = make_ensemble([tiny.tiny_llama(kit.tokenizer_of("smol"))], [kit.tokenizer_of("smol")])
    for path in ("a", "b", "a", "c", "a", "b"):
        call(method=RerankConfig(RewardModel(path)), ensemble=ensemble)
    assert loads == ["a", "b", "c", "b"]


def test_a_fuser_writes_greedily_whatever_its_checkpoint_says(tmp_path):
    tokenizer = kit.tokenizer_of("smol")
    model = tiny.tiny_llama(tokenizer)
    folders = [tmp_path / "plain", tmp_path / "odd"]
    for folder in folders:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    GenerationConfig(
        num_beams=3, num_return_sequences=2, return_dict_in_generate=True, output_scores=True,
        eos_token_id=model.generation_config.eos_token_id,
    ).save_pretrained(folders[1])  # fmt: skip
    plain, odd = (Fuser(str(folder)).load() for folder in folders)
    row = [{"role": "user", "content": "Hi"}]
    assert odd.write([row], [["a", "b"]], {"max_new_tokens": 5}) == plain.write(
        [row], [["a", "b"]], {"max_new_tokens": 5}
    )
