"""What options of the ways of choosing say of themselves: saved, moved, spelled, and what functions are given."""

import json

import pytest

from hf_ensemble import (
    ConfigurationError,
    EnsembleForCausalLM,
    FuseConfig,
    Fuser,
    MbrConfig,
    PairRanker,
    RerankConfig,
    RewardModel,
    SweetSpanConfig,
    VoteConfig,
)
from hf_ensemble.answers.base import Candidate, Panel, Question, Written
from hf_ensemble.cli.arguments import read_configuration
from hf_ensemble.config import method_config
from hf_ensemble.tables import spelled
from tests import tiny
from tests.bug_bank import kit
from tests.contracts import make_ensemble

pytestmark = [kit.control_tokens_may_be_chosen]

JUDGED = [
    RerankConfig(RewardModel("judge")),
    RerankConfig(PairRanker("judge", truncation=True)),
    FuseConfig("judge", RerankConfig(RewardModel("judge"))),
    FuseConfig(Fuser("judge", max_length=64), top=2),
]


@pytest.mark.parametrize("config", JUDGED, ids=spelled)
def test_a_judges_folder_moves_with_the_ensemble(config, tmp_path, monkeypatch):
    home = tmp_path / "home"
    (home / "judge").mkdir(parents=True)
    paths = tiny.save_pair(home, "a", "b")
    monkeypatch.chdir(home)
    EnsembleForCausalLM.from_pretrained(paths, method=config).save_pretrained("saved")
    saved = json.loads((home / "saved" / "config.json").read_text("utf-8"))["method"]
    assert str(tmp_path) not in json.dumps(saved)
    assert '"../judge"' in json.dumps(saved)
    monkeypatch.chdir(tmp_path)
    home.rename(tmp_path / "elsewhere")
    found = EnsembleForCausalLM.from_pretrained("elsewhere/saved").config.method
    assert set(found.models) == {str(tmp_path / "elsewhere" / "judge")}
    assert found.with_paths(lambda path: "judge") == config


def test_a_judge_of_this_machine_is_not_pushed(tmp_path, monkeypatch):
    (tmp_path / "judge").mkdir()
    monkeypatch.chdir(tmp_path)
    for config in JUDGED:
        with pytest.raises(ConfigurationError, match="'judge', a folder of this machine"):
            config.check_saveable(is_for_hub=True)
        config.check_saveable(is_for_hub=False)


def test_what_json_has_not_is_not_saved(tmp_path):
    ensemble = make_ensemble([tiny.tiny_llama(kit.tokenizer_of("smol"))], [kit.tokenizer_of("smol")])
    ensemble.config.method = VoteConfig(generate_options={"stop_strings": {"a"}})
    with pytest.raises(ConfigurationError, match="`generate_options` cannot be saved.*set"):
        ensemble.save_pretrained(tmp_path / "saved", include_members=True)
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize(
    "config",
    [
        VoteConfig(),
        VoteConfig(r"\d+$", num_candidates=5, methods=("gac", "sweetspan")),
        MbrConfig(aggregate=True, methods=("unite",)),
        RerankConfig(RewardModel("some/judge"), num_candidates=2),
        RerankConfig(PairRanker("some/judge")),
        FuseConfig("some/fuser", MbrConfig(), top=2),
        FuseConfig(Fuser("some/fuser")),
        VoteConfig(generate_options={"do_sample": True, "temperature": 0.7}),
    ],
    ids=spelled,
)
def test_what_is_spelled_is_read_again(config):
    assert read_configuration(spelled(config)).method == config
    assert method_config(json.loads(json.dumps(config.to_dict()))) == config


def test_methods_that_write_are_read_by_name():
    config = VoteConfig(methods=["sweetspan", {"name": "unite", "top_k": 3}, "gac"])
    assert [method.name for method in config.methods] == ["sweetspan", "unite", "gac"]
    assert config.methods[0] == SweetSpanConfig()
    assert hash(config) == hash(VoteConfig(methods=config.methods, generate_options={"do_sample": False}))


def question_of(*texts, turns=None):
    share = 1 / len(texts)
    candidates = [
        Candidate(text.encode(), True, (Written(n, f"m{n}", 0, (), text.encode(), "eos"),), (share,))
        for n, text in enumerate(texts)
    ]
    return Question(turns or [{"role": "user", "content": "Well?"}], tuple(candidates))


def unused(questions):
    raise AssertionError


PANEL = Panel(unused, {}, {})


def test_a_utility_may_read_the_prompts():
    seen = []

    def utility(candidates, references, prompts):
        seen.append((candidates, references, prompts))
        return [float(len(a)) for a in candidates]

    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    questions = [question_of("x", "yyy"), question_of("zz", turns=talk)]
    choices = MbrConfig(utility).choose(questions, PANEL)
    assert [choice.ranking for choice in choices] == [[1, 0], [0]]
    assert seen == [(["x", "x", "yyy", "yyy"], ["x", "yyy"] * 2, ["Well?"] * 4), (["zz"], ["zz"], [talk])]


def test_a_score_reads_all_prompts_at_once():
    seen = []

    def score(prompts, answers):
        seen.append((prompts, answers))
        return [float(len(a)) for a in answers]

    choices = RerankConfig(score).choose([question_of("x", "yyy"), question_of("zz")], PANEL)
    assert [choice.ranking for choice in choices] == [[1, 0], [0]]
    assert [list(choice.scores) for choice in choices] == [["score"]] * 2
    assert seen == [(["Well?"] * 3, ["x", "yyy", "zz"])]


def test_judges_are_loaded_once(monkeypatch):
    loaded = []

    class Judge:
        def scores(self, turns, answers):
            return [float(len(text)) for text in answers]

    monkeypatch.setattr(RewardModel, "load", lambda self: loaded.append(self.path) or Judge())
    panel = Panel(unused, {}, {})
    for _ in range(2):
        choices = RerankConfig(RewardModel("one")).choose([question_of("x", "yyy")] * 2, panel)
        assert [choice.ranking for choice in choices] == [[1, 0]] * 2
    RerankConfig(RewardModel("other")).choose([question_of("x")], panel)
    assert loaded == ["one", "other"]


def test_two_members_need_not_be_tried_where_they_cannot_gain():
    assert [VoteConfig().least_members, MbrConfig().least_members, RerankConfig().least_members] == [3, 3, 2]
    assert VoteConfig(num_candidates=2).least_members == MbrConfig(methods=("gac",)).least_members == 1
