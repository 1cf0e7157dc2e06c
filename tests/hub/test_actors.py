"""Which members run in Ray actors: options and refusals, none of which needs Ray."""

import json
import sys

import pytest

from hf_ensemble import ConfigurationError, EnsembleForCausalLM, MemberConfig
from hf_ensemble.config import EnsembleConfig
from hf_ensemble.errors import EnsembleError, MemberError
from hf_ensemble.hub.actors import start_actor
from tests import tiny


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tiny.save_pair(tmp_path_factory.mktemp("members"), "a", "b")


@pytest.fixture
def without_ray(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ("node-b", "has to be a dictionary"),
        ({"num_gpu": 1}, "no option 'num_gpu'. Options: num_cpus, num_gpus, memory, resources, accelerator_type"),
        ({"runtime_env": {"pip": ["x"]}}, "no option 'runtime_env'.*ray.init"),
        ({"lifetime": "detached"}, "no option 'lifetime'"),
        ({"num_gpus": -1}, "'num_gpus' of a member's `ray` has to be a number of at least 0, but is -1"),
        ({"num_cpus": True}, "'num_cpus'.*but is True"),
        ({"resources": {"b": "1"}}, "'b' of a member's `ray`.*'1'"),
        ({"resources": ["b"]}, "`resources` of a member's `ray` has to be a dictionary"),
        ({"accelerator_type": 3}, "`accelerator_type`.*3"),
    ],
)
def test_options_of_an_actor_are_checked_when_they_are_given(given, rule):
    with pytest.raises(ConfigurationError, match=rule):
        MemberConfig(path="a", ray=given)


def test_options_are_saved_and_an_actor_without_any_is_no_member_of_this_process():
    item = MemberConfig(path="a", ray={"num_gpus": 0.5, "resources": {"b": 1}, "num_cpus": None})
    assert item.ray == {"num_gpus": 0.5, "resources": {"b": 1}}
    config = EnsembleConfig(members=[item, MemberConfig(path="b", ray={}), MemberConfig(path="c")])
    again = EnsembleConfig(**json.loads(config.to_json_string(use_diff=False)))
    assert [one.ray for one in again.members] == [item.ray, {}, None]


def test_a_saved_ensemble_starts_actors_only_where_that_is_allowed(folders, tmp_path, without_ray):
    EnsembleForCausalLM.from_pretrained(folders).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text("utf-8"))
    config["members"][1]["ray"] = {"num_cpus": 0}
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    with pytest.raises(ConfigurationError, match=r"'.*b' of this saved ensemble.*num_cpus.*`allow_remote=True`"):
        EnsembleForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match=r'member \'b\'.*`ray` is not installed: `pip install "ray>=2.10"`'):
        EnsembleForCausalLM.from_pretrained(tmp_path, allow_remote=True)


def test_a_placement_is_known_and_is_for_all_members(folders, without_ray):
    with pytest.raises(ConfigurationError, match="`placement` has to be None or 'ray', but is 'dask'"):
        EnsembleForCausalLM.from_pretrained(folders, placement="dask")
    with pytest.raises(ConfigurationError, match=r"member 'a'.*`ray` is not installed"):
        EnsembleForCausalLM.from_pretrained(folders, placement="ray")


@pytest.mark.parametrize(
    ("ray", "device_map", "expected"),
    [
        ({}, None, None),
        ({"num_gpus": 0}, None, None),
        ({"num_gpus": 1}, None, 0),
        ({"num_gpus": 0.5}, None, 0),
        ({"num_gpus": 2}, None, "auto"),
        ({"num_gpus": 2}, "cuda:1", "cuda:1"),
    ],
)
def test_an_actor_with_gpus_puts_its_weights_there(ray, device_map, expected, monkeypatch):
    monkeypatch.setattr("hf_ensemble.hub.actors.RayMember", lambda name, load, options: load)
    found = start_actor(
        MemberConfig(path="x/y", ray=ray), device_map, lambda item, device_map: (item.name, device_map)
    )
    assert found() == ("y", expected)


def test_members_of_this_process_are_not_restarted_and_closing_them_does_nothing(folders):
    with EnsembleForCausalLM.from_pretrained(folders) as ensemble:
        with pytest.raises(
            ConfigurationError, match="member 'a' cannot be restarted: it is a causal language model of"
        ):
            ensemble.restart_member("a")
        with pytest.raises(ConfigurationError, match="no member 'c' to restart. Members: 'a', 'b'"):
            ensemble.restart_member("c")
    inputs = ensemble.tokenizer("The cat", return_tensors="pt")
    assert ensemble.generate(**inputs, max_new_tokens=2).shape[1] > inputs.input_ids.shape[1]


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"method": "sweetspan"}, {"weights": [1, 0]}], ids=str)
def test_an_error_says_what_had_been_written(options, folders):
    ensemble = EnsembleForCausalLM.from_pretrained(folders)
    inputs = ensemble.tokenizer(["The cat", "The train"], padding=True, return_tensors="pt")
    options = {"method": "gac", "max_new_tokens": 12, "eos_token_id": [], "pad_token_id": 0, **options}
    expected = ensemble.generate(**inputs, **options)[:, inputs.input_ids.shape[1] :]
    member = ensemble.member_views[0]
    member.cache_mode = "repack"  # trying it out takes calls too
    model = member.model
    forward, calls = model.forward, []

    def failing(*args, **kwargs):
        calls.append(None)
        if len(calls) > 4:
            raise ValueError("a cable is loose")
        return forward(*args, **kwargs)

    model.forward = failing
    with pytest.raises(MemberError, match="a cable is loose") as caught:
        ensemble.generate(**inputs, **options)
    assert isinstance(caught.value, EnsembleError)
    if "num_beams" in options:
        assert len(caught.value.written) == 4
    elif options["method"] == "gac":
        written = tuple(ensemble.tokenizer.batch_decode(expected[:, :4]))
        assert caught.value.written == written
        assert str(caught.value).endswith(f"Written so far, in 4 steps (row 0 of 2): {written[0]!r}.")
