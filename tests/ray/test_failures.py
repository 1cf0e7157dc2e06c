"""What dies, fails or ends: an error that names the member, or a clean end, and no process left."""

import functools
import gc
import importlib
import os
import time

import pytest
import ray
import torch
from transformers import StoppingCriteria

from hf_ensemble import ConfigurationError, EnsembleConfig, EnsembleForCausalLM, MemberConfig, MemberError
from hf_ensemble.members.ray.member import RayMember
from tests import tiny
from tests.ray.conftest import FAR, end, process_of, wait_until_ended

PROMPTS = ["The capital of France is", "The cat"]
LOST = {"num_cpus": 0, "resources": {"lost": 1}}
"""Options of an actor on a node that is killed."""


class At(StoppingCriteria):
    """Does something once, after a step."""

    def __init__(self, step, what):
        self.step, self.what = step, what

    def __call__(self, input_ids, scores, **kwargs):
        self.step -= 1
        if self.step == 0:
            self.what()
        return torch.zeros(len(input_ids), dtype=torch.bool)


def write(ensemble, num_new=8, **options):
    inputs = ensemble.tokenizer(PROMPTS, padding=True, return_tensors="pt")
    return ensemble.generate(**inputs, max_new_tokens=num_new, eos_token_id=[], pad_token_id=0, **options)


def texts_of(ensemble, ids):
    return tuple(ensemble.tokenizer.batch_decode(ids, skip_special_tokens=True))


class LostNode:
    """A node that can be killed, and another put in its place."""

    def __init__(self, cluster):
        self._cluster = cluster
        self.start()

    def start(self):
        self._node = self._cluster.add_node(num_cpus=0, object_store_memory=80 * 2**20, resources={"lost": 1})

    def kill(self, process):
        """Kill it; its processes end when they notice."""
        self._cluster.remove_node(self._node, allow_graceful=False)
        wait_until_ended(process)

    def wait_until_known(self):
        """Wait until the cluster knows that it is gone."""
        while any(one["Alive"] and "lost" in one["Resources"] for one in ray.nodes()):
            time.sleep(0.1)


@pytest.fixture(scope="module")
def lost_node(cluster):
    return LostNode(cluster)


@pytest.fixture(scope="module")
def mixed(lost_node, folders):
    """The first member in this process, the second in an actor on the node that can be killed. Tests bring it back."""
    items = [folders[0], MemberConfig(path=folders[1], ray=LOST)]
    with EnsembleForCausalLM.from_pretrained(items) as ensemble:
        yield ensemble
        process = process_of(ensemble.member_views[1])
    wait_until_ended(process)
    with pytest.raises(
        MemberError, match=r"'gemma' has ended. To start it again, call `ensemble.restart_member\('gemma'\)`"
    ):
        write(ensemble)
    assert ray.is_initialized()  # which the tests have started


def test_a_node_that_is_killed_is_an_error_until_the_member_is_restarted(mixed, lost_node):
    expected = write(mixed)
    process = process_of(mixed.member_views[1])
    with pytest.raises(
        MemberError,
        match=r"'gemma' \(process \d+ on .*\) is gone.*restart_member\('gemma'\).*Written so far, in [34] steps",
    ) as caught:
        write(mixed, stopping_criteria=[At(3, lambda: lost_node.kill(process))])
    # What had been answered before still counts.
    assert caught.value.written in [texts_of(mixed, expected[:, : n - 8][:, -n:]) for n in (3, 4)]
    # Nothing is written without the member.
    with pytest.raises(MemberError, match="'gemma'"):
        write(mixed)
    lost_node.wait_until_known()
    with pytest.raises(ConfigurationError, match=r"asks for \{'lost': 1\}, which no node of the Ray cluster has"):
        mixed.restart_member("gemma")
    lost_node.start()
    mixed.restart_member("gemma")
    assert process_of(mixed.member_views[1]) != process
    assert torch.equal(write(mixed), expected)


def test_an_actor_that_dies_while_it_loads_says_so(cluster):
    """There is no ensemble yet in which a member could be restarted."""
    member = RayMember("smol", functools.partial(os._exit, 3), FAR)
    with pytest.raises(
        MemberError, match="'smol' .not started yet. is gone.*had not loaded the member yet.*load the ensemble"
    ) as e:
        member.finish(tiny.smol_like(), None, None)
    assert "restart_member" not in str(e.value)


@pytest.mark.parametrize(
    "options",
    [
        {"method": "unite"},
        pytest.param({"method": "sweetspan"}, marks=pytest.mark.slow),
        pytest.param({"method": "gac", "num_beams": 2}, marks=pytest.mark.slow),
        pytest.param({"method": "unite", "speculation": "gemma"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:the primary 'smol' wrote the control token")
def test_an_actor_that_dies_is_an_error_with_what_was_written(options, mixed):
    expected = write(mixed, **options)
    process = process_of(mixed.member_views[1])
    criteria = [At(3, lambda: (end(process), wait_until_ended(process)))]
    with pytest.raises(
        MemberError, match=r"'gemma' \(process \d+ on .*\) is gone.*restart_member\('gemma'\)"
    ) as caught:
        write(mixed, stopping_criteria=criteria, **options)
    # A span that was decided before is written out.
    if "num_beams" in options:
        assert len(caught.value.written) == 4
    else:
        # What it had answered before it died still counts.
        num_written = range(3, 5 if options == {"method": "unite"} else 8)
        assert caught.value.written in [texts_of(mixed, expected[:, : n - 8][:, -n:]) for n in num_written]
    mixed.restart_member("gemma")
    assert torch.equal(write(mixed, **options), expected)


def odd_member(num_good):
    """A member that gives NaN when it has run so often, and raises from then on; made in the actor."""
    from hf_ensemble.members.local import LocalMember

    tokenizer = tiny.smol_like()
    model = tiny.tiny_llama(tokenizer)
    forward, calls = model.forward, []

    def failing(*args, **kwargs):
        calls.append(None)
        if len(calls) > num_good + 1:
            raise ValueError("a cable is loose")
        output = forward(*args, **kwargs)
        if len(calls) > num_good:
            output.logits = output.logits * torch.nan
        return output

    model.forward = failing
    member = LocalMember(model, tokenizer, "loose")
    member.cache_mode = "repack"
    return member


def ensemble_of(member):
    member.finish(tiny.smol_like(), None, None)
    config = EnsembleConfig(members=[MemberConfig(name="loose")], method="gac", primary_config=member.config)
    return EnsembleForCausalLM(config, [member])


def test_an_actor_that_gives_nan_or_raises_says_so_and_one_that_is_forgotten_ends(cluster):
    ensemble = ensemble_of(RayMember("loose", functools.partial(odd_member, 3), FAR))
    process = process_of(ensemble.member_views[0])
    with pytest.raises(MemberError, match=r"'loose' returned NaN .* step 4 .*It runs in process \d+ on ") as caught:
        write(ensemble)
    assert all(caught.value.written)
    where = rf"It runs in process {process} on "
    with pytest.raises(MemberError, match=f"'loose' failed in its forward pass: a cable is loose {where}"):
        write(ensemble)
    del ensemble, caught
    gc.collect()
    wait_until_ended(process)


def raises_at_load():
    raise ConfigurationError("member 'x' cannot be loaded: there is nothing")


def test_what_fails_while_loading_is_the_error_that_it_is_here_and_leaves_no_actor(cluster):
    member = RayMember("x", raises_at_load, FAR)
    with pytest.raises(ConfigurationError, match="'x' cannot be loaded: there is nothing"):
        member.finish(tiny.smol_like(), None, None)
    assert member.link.is_closed


@pytest.mark.slow
def test_what_an_actor_cannot_import_is_named(cluster, tmp_path, monkeypatch):
    """As where a host lacks a package."""
    (tmp_path / "only_here.py").write_text("def load():\n    return None\n", "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    member = RayMember("x", importlib.import_module("only_here").load, FAR)
    with pytest.raises(MemberError, match=r"'x'.*is gone.*No module named 'only_here'"):
        member.finish(tiny.smol_like(), None, None)


def test_what_no_node_has_is_refused_at_once(cluster, folders):
    options = {"num_gpus": 0.5, "resources": {"nowhere": 1}}
    with pytest.raises(ConfigurationError, match=r"'smol' asks for \{'nowhere': 1, 'GPU': 0.5\}, which no node"):
        EnsembleForCausalLM.from_pretrained([MemberConfig(path=folders[0], ray=options)])


@pytest.mark.slow
def test_an_ensemble_that_was_closed_can_be_restarted_and_forgotten(cluster, folders):
    items = [folders[0], MemberConfig(path=folders[1], ray=FAR)]
    ensemble = EnsembleForCausalLM.from_pretrained(items)
    processes = [process_of(ensemble.member_views[1])]
    expected = write(ensemble, num_new=2)
    ensemble.close()
    ensemble.restart_member("gemma")
    processes.append(process_of(ensemble.member_views[1]))
    assert torch.equal(write(ensemble, num_new=2), expected)
    del ensemble
    gc.collect()
    wait_until_ended(*processes)
