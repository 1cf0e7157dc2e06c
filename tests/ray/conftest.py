"""Two nodes of one machine, and the same members in actors and in this process."""

import copy
import os
import signal
import time
import warnings

import pytest

ray = pytest.importorskip("ray")

from tests import tiny  # noqa: E402

NAMES = ("smol", "gemma")
FAR = {"num_cpus": 0, "resources": {"far": 1}}
"""Options of an actor that runs on the second node."""
NEAR = {"num_cpus": 0, "resources": {"near": 1}}


@pytest.fixture(scope="session")
def cluster():
    """Two nodes; what only the second has is called `far`."""
    from ray.cluster_utils import Cluster

    from hf_ensemble.members.ray import link

    link._PATIENCE = 300.0  # a machine that is busy with other tests is no news
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = Cluster()
        # Nodes that are killed are found to be dead in seconds, and none starts workers that nobody needs.
        options = {
            "health_check_initial_delay_ms": 0,
            "health_check_period_ms": 1000,
            "health_check_failure_threshold": 4,
            "prestart_worker_first_driver": False,
        }
        near = {"resources": {"near": 8}, "_system_config": options, "include_dashboard": False}
        found.add_node(num_cpus=1, object_store_memory=80 * 2**20, **near)
        found.add_node(num_cpus=1, object_store_memory=80 * 2**20, resources={"far": 8})
        ray.init(address=found.address, log_to_driver=False, logging_level="error")
        yield found
        ray.shutdown()
        found.shutdown()


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    return tiny.save_pair(tmp_path_factory.mktemp("members"), *NAMES)


@pytest.fixture(scope="session")
def here(folders):
    from hf_ensemble import EnsembleForCausalLM

    return EnsembleForCausalLM.from_pretrained(folders)


@pytest.fixture(scope="session")
def there(cluster, folders):
    """The members of `here`, in an actor each, on a node each."""
    from hf_ensemble import EnsembleForCausalLM, MemberConfig

    items = [MemberConfig(path=path, ray=options) for path, options in zip(folders, (NEAR, FAR), strict=True)]
    with EnsembleForCausalLM.from_pretrained(items) as ensemble:
        yield ensemble


def process_of(member) -> int:
    """The number of the process of a member's actor."""
    return int(member.address.split()[1])


def parent_of(process: int) -> int:
    """The process that started another: of an actor its node."""
    with open(f"/proc/{process}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


def end(process: int) -> None:
    os.kill(process, signal.SIGKILL)


def is_alive(process: int) -> bool:
    """Whether a process runs; one that nobody has waited for does not."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_ended(*processes: int, seconds: float = 30.0) -> None:
    until = time.monotonic() + seconds
    while any(map(is_alive, processes)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(is_alive, processes))


def traffic_of(ensemble, inputs, numbers):
    """For each member bytes to its actor, bytes from it and calls, between two calls with so many ids of UniTE."""
    options = {"method": "unite", "do_sample": False, "eos_token_id": [], "pad_token_id": 0}
    ensemble.generate(**inputs, max_new_tokens=1, **options)  # the actors learn what the method reads
    totals = []
    for number in numbers:
        before = [copy.copy(member.traffic) for member in ensemble.member_views]
        ensemble.generate(**inputs, max_new_tokens=number, **options)
        pairs = zip(before, (member.traffic for member in ensemble.member_views), strict=True)
        totals.append([(b.sent - a.sent, b.received - a.received, b.trips - a.trips) for a, b in pairs])
    return [[m - f for f, m in zip(*of_member, strict=True)] for of_member in zip(*totals, strict=True)]
