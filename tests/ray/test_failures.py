"""What dies, fails or ends: an error that names the member, or a clean end, and no process left."""

import gc
import os
import subprocess
import sys
import textwrap
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


@pytest.mark.parametrize(
    "options", [{"method": "unite"}, {"method": "sweetspan"}, {"method": "gac", "num_beams": 2}], ids=str
)
@pytest.mark.filterwarnings("ignore:the primary 'smol' wrote the control token")
def test_an_actor_that_dies_is_an_error_with_what_was_written(options, mixed):
    expected = write(mixed, **options)
    process = process_of(mixed.member_views[1])
    with pytest.raises(
        MemberError, match=r"'gemma' \(process \d+ on .*\) is gone .*restart_member\('gemma'\).*Written so far"
    ) as caught:
        write(mixed, stopping_criteria=[At(3, lambda: (end(process), wait_until_ended(process)))], **options)
    written = caught.value.written
    # A span that was decided before is written out.
    if "num_beams" not in options:
        num_written = range(3, 8 if options["method"] == "sweetspan" else 4)
        assert written in [texts_of(mixed, expected[:, : n - 8][:, -n:]) for n in num_written]
    with pytest.raises(MemberError, match="'gemma'"):
        write(mixed, **options)
    mixed.restart_member("gemma")
    assert process_of(mixed.member_views[1]) != process
    assert torch.equal(write(mixed, **options), expected)


def kill(cluster, node, process):
    """Kill a node; its processes end when they notice."""
    cluster.remove_node(node, allow_graceful=False)
    wait_until_ended(process)


def test_a_node_that_is_killed_is_an_error(cluster, folders):
    node = cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20, resources={"lost": 1})
    item = MemberConfig(path=folders[1], ray={"num_cpus": 0, "resources": {"lost": 1}})
    with EnsembleForCausalLM.from_pretrained([folders[0], item]) as ensemble:
        expected = write(ensemble)
        process = process_of(ensemble.member_views[1])
        with pytest.raises(MemberError, match="'gemma'.*gone") as caught:
            write(ensemble, stopping_criteria=[At(3, lambda: kill(cluster, node, process))])
        assert caught.value.written == texts_of(ensemble, expected[:, :-5][:, -3:])
        while any(one["Alive"] and "lost" in one["Resources"] for one in ray.nodes()):
            time.sleep(0.1)
        with pytest.raises(ConfigurationError, match=r"asks for \{'lost': 1\}, which no node of the Ray cluster has"):
            ensemble.restart_member("gemma")
        cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20, resources={"lost": 1})
        ensemble.restart_member("gemma")
        assert torch.equal(write(ensemble), expected)


def failing_member(step):
    """A member that raises when its text has grown by some ids; made in the actor."""
    from hf_ensemble.members.local import LocalMember

    tokenizer = tiny.smol_like()
    model = tiny.tiny_llama(tokenizer)
    forward, calls = model.forward, []

    def failing(*args, **kwargs):
        calls.append(None)
        if len(calls) > step:
            raise ValueError("a cable is loose")
        return forward(*args, **kwargs)

    model.forward = failing
    member = LocalMember(model, tokenizer, "loose")
    member.cache_mode = "repack"
    return member


def raises_at_load():
    raise ConfigurationError("member 'x' cannot be loaded: there is nothing")


def test_an_actor_that_raises_says_what_it_raised(cluster):
    import functools

    member = RayMember("loose", functools.partial(failing_member, 3), FAR)
    member.finish(tiny.smol_like(), None, None)
    config = EnsembleConfig(members=[MemberConfig(name="loose")], method="gac", primary_config=member.config)
    ensemble = EnsembleForCausalLM(config, [member])
    with ensemble, pytest.raises(MemberError, match="'loose' failed in its forward pass: a cable is loose") as caught:
        write(ensemble)
    assert all(caught.value.written)
    with pytest.raises(MemberError, match="has been ended"):
        write(ensemble)


def test_what_fails_while_loading_is_the_error_that_it_is_here_and_leaves_no_actor(cluster, folders, tmp_path):
    member = RayMember("x", raises_at_load, FAR)
    with pytest.raises(ConfigurationError, match="'x' cannot be loaded: there is nothing"):
        member.finish(tiny.smol_like(), None, None)
    assert member.link.is_closed
    with pytest.raises(ConfigurationError, match=r"'smol' asks for \{'nowhere': 1\}"):
        EnsembleForCausalLM.from_pretrained([MemberConfig(path=folders[0], ray={"resources": {"nowhere": 1}})])


def test_closing_and_forgetting_an_ensemble_end_its_actors(cluster, folders):
    items = [folders[0], MemberConfig(path=folders[1], ray=FAR)]
    ensemble = EnsembleForCausalLM.from_pretrained(items)
    process = process_of(ensemble.member_views[1])
    write(ensemble, num_new=2)
    ensemble.close()
    wait_until_ended(process)
    ensemble.restart_member("gemma")
    process = process_of(ensemble.member_views[1])
    write(ensemble, num_new=2)
    del ensemble
    gc.collect()
    wait_until_ended(process)
    assert ray.is_initialized()  # which the test has started


def run_driver(code, folder, address, before=""):
    """Start a process that makes an ensemble with an actor, says where that is, and writes.

    Args:
        code: What it does then.
        folder: Of the member.
        address: Of the Ray that it joins; "local" to start one.
        before: What it does first.
    """
    prelude = """
        import signal, sys, time
        import numpy as np
        from hf_ensemble import EnsembleForCausalLM, MemberError
        ensemble = EnsembleForCausalLM.from_pretrained(sys.argv[1:2], placement="ray")
        print("actor:", ensemble.member_views[0].address, flush=True)
        inputs = ensemble.tokenizer("The cat", return_tensors="pt")
        text = ensemble.generate(**inputs, max_new_tokens=4, method="gac").tolist()
    """
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "RAY_ADDRESS": address}
    return subprocess.Popen(
        [sys.executable, "-c", "".join(map(textwrap.dedent, (before, prelude, code))), folder],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def actor_of(driver):
    """The process of its actor; what Ray itself prints of the cluster may come before it."""
    return next(int(line.split()[2]) for line in driver.stdout if line.startswith("actor:"))


def test_a_driver_that_is_killed_or_ends_leaves_no_actor(cluster, folders):
    killed = run_driver("time.sleep(600)", folders[0], cluster.address)
    ended = run_driver("assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL", folders[0], "local")
    processes = actor_of(killed), actor_of(ended)
    killed.kill()
    killed.communicate()
    output, errors = ended.communicate(timeout=120)
    assert (ended.returncode, output) == (0, ""), errors
    # A Ray that nobody asked for says nothing.
    assert not [line for line in errors.splitlines() if "ray" in line.lower()], errors
    wait_until_ended(*processes)


def test_a_full_object_store_is_survived(tmp_path):
    """Whole rows of a large vocabulary travel through the store, which somebody else has filled."""
    tokenizer = tiny.smol_like()
    tiny.tiny_llama(tokenizer, extra_rows=30000).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    before = """
        import ray
        config = {"automatic_object_spilling_enabled": False}
        ray.init(object_store_memory=80 * 2**20, log_to_driver=False, logging_level="error", _system_config=config)
    """
    code = """
        kept = [ray.put(np.zeros(2**20, np.uint8)) for _ in range(120)]  # more than there is room for
        try:
            print("same:", ensemble.generate(**inputs, max_new_tokens=4, method="gac").tolist() == text)
        except MemberError as error:
            print("error:", error)
        ensemble.close()
    """
    driver = run_driver(code, str(tmp_path), "local", before)
    process = actor_of(driver)
    output, errors = driver.communicate(timeout=200)
    assert driver.returncode == 0, errors
    print(output)
    last = output.splitlines()[-1]
    assert last == "same: True" or last.startswith("error: the actor of member")
    wait_until_ended(process)
