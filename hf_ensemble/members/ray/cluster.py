"""Ray itself: joined if it runs, otherwise started for as long as a member needs it."""

import logging
import signal
import threading
from collections.abc import Mapping
from typing import Any

from ...errors import ConfigurationError
from ...optional_packages import not_installed

_lock = threading.Lock()
_users = 0
"""Number of actors in a Ray that we started or joined; 0 if Ray is not running or the user started it."""


def join(name: str) -> Any:
    """Join the Ray that runs, or start one.

    A Ray that the user started keeps running afterwards.

    Args:
        name: The member that needs it.

    Returns:
        `ray`, and whether `leave` has to be called.

    Raises:
        ConfigurationError: If Ray is not installed, or cannot be started.
    """
    global _users
    try:
        import ray
    except ImportError as error:
        raise not_installed(f"member {name!r} is to run in a Ray actor", "ray") from error
    with _lock:
        if not ray.is_initialized():
            _start(ray, name)
            _users = 1
            return ray, True
        _users += _users > 0
        return ray, _users > 0


def _start(ray: Any, name: str) -> None:
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    try:
        # The address comes from the environment, or from a cluster on this host; otherwise a cluster is started.
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:
        raise ConfigurationError(
            f"member {name!r} is to run in a Ray actor, but Ray cannot be started or joined: {error} Call "
            "`ray.init(...)` yourself first."
        ) from error
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, before)


def leave(ray: Any) -> None:
    """Record that an actor has ended; after the last one, leave Ray."""
    global _users
    with _lock:
        _users -= 1
        if _users == 0 and ray.is_initialized():
            ray.shutdown()


def check_resources(ray: Any, name: str, options: Mapping[str, Any]) -> None:
    """Refuse resources that no node of the cluster has, because the actor would wait forever.

    Args:
        ray: The module.
        name: The member's name.
        options: Options of its actor.

    Raises:
        ConfigurationError: If no node has them; names the resources and what the nodes have.
    """
    asked = {**(options.get("resources") or {})}
    for option, resource in (("num_cpus", "CPU"), ("num_gpus", "GPU"), ("memory", "memory")):
        if options.get(option):
            asked[resource] = options[option]
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if any(all(node.get(key, 0) >= amount for key, amount in asked.items()) for node in nodes):
        return
    kept = ("CPU", "GPU", "memory", *asked)
    found = [{key: value for key, value in node.items() if key in kept} for node in nodes]
    raise ConfigurationError(
        f"member {name!r} asks for {asked}, which no node of the Ray cluster has: {found}. Start a node that has it "
        "(`ray start --resources=...`), or change `MemberConfig(ray=...)`."
    )
