"""Processes of their own that make ensembles with actors: how they end, and what Ray they start or find."""

import os
import subprocess
import sys
import textwrap

import pytest

from tests import tiny
from tests.ray.conftest import wait_until_ended


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


def test_a_driver_that_is_killed_leaves_no_actor(cluster, folders):
    killed = run_driver("time.sleep(600)", folders[0], cluster.address)
    process = actor_of(killed)
    killed.kill()
    killed.communicate()
    wait_until_ended(process)


@pytest.mark.slow
def test_a_driver_for_which_ray_was_started_ends_with_it(folders):
    """And a Ray that nobody asked for says nothing and takes no signal."""
    code = """
        import ray
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        twin = EnsembleForCausalLM.from_pretrained(sys.argv[1:2], placement="ray")
        ensemble.close()
        assert ray.is_initialized()
        twin.close()
        assert not ray.is_initialized()
        ensemble.restart_member(ensemble.member_views[0].name)
        assert ensemble.generate(**inputs, max_new_tokens=4, method="gac").tolist() == text
    """
    ended = run_driver(code, folders[0], "local")
    process = actor_of(ended)
    output, errors = ended.communicate(timeout=200)
    assert (ended.returncode, output) == (0, ""), errors
    assert not [line for line in errors.splitlines() if "ray" in line.lower()], errors
    wait_until_ended(process)


@pytest.mark.slow
def test_a_full_object_store_is_survived_and_a_driver_that_ends_leaves_no_actor(tmp_path):
    """Whole rows of a large vocabulary travel through the store, which somebody else has filled."""
    tokenizer = tiny.smol_like()
    tiny.tiny_llama(tokenizer, extra_rows=30000).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    before = """
        import ray
        config = {"automatic_object_spilling_enabled": False}
        ray.init(
            num_cpus=1, object_store_memory=80 * 2**20, include_dashboard=False, log_to_driver=False, logging_level="error",
            _system_config=config,
        )
    """
    code = """
        kept = [ray.put(np.zeros(2**20, np.uint8)) for _ in range(120)]  # more than there is room for
        try:
            print("same:", ensemble.generate(**inputs, max_new_tokens=4, method="gac").tolist() == text)
        except MemberError as error:
            print("error:", error)
    """
    driver = run_driver(code, str(tmp_path), "local", before)
    process = actor_of(driver)
    output, errors = driver.communicate(timeout=200)
    assert driver.returncode == 0, errors
    last = output.splitlines()[-1]
    assert last == "same: True" or last.startswith("error: the actor of member"), output
    wait_until_ended(process)
