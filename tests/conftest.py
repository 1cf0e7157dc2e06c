"""Nothing is downloaded, stored maps go to a folder of their own, and one process is one thread.

Imports nothing large: a process that only hands out tests to others needs none of it.
"""

import gc
import os

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest

pytest.register_assert_rewrite("tests.contracts")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What is imported stays: looking for garbage in it would take seconds in every process."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Of the quick cases of a test marked `crossed`, leave so few that each value of each parameter occurs in one."""
    cases = {}
    for item in items:
        if item.get_closest_marker("crossed") and not item.get_closest_marker("slow"):
            cases.setdefault((item.parent, item.originalname), []).append(item)
    for left in cases.values():
        values = {item: {(name, id(value)) for name, value in item.callspec.params.items()} for item in left}
        missing = set().union(*values.values())
        while missing:
            best = max(left, key=lambda item: len(missing & values[item]))
            missing -= values[best]
            left.remove(best)
        for item in left:
            item.add_marker("slow")
            item.add_marker("further")


@pytest.fixture(scope="session", autouse=True)
def map_folder(tmp_path_factory):
    """Where vocabulary maps are stored during the tests."""
    folder = tmp_path_factory.mktemp("maps")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENSEMBLE_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def equal_models_try_their_caches_once():
    """Tests make the same models over and over; what a trial finds for one holds for its equals in this process."""
    import torch

    from hf_ensemble.members import local

    find, found = local.find_cache_mode, {}

    def is_stock(module):
        named = type(module).__module__.startswith(("torch.nn.", "transformers."))
        return named and not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))

    def find_once(member, ids, new_rows, modes, start=()):
        model = member.model
        weights = list(model.parameters())
        is_tiny = sum(weight.numel() for weight in weights) < 10**6
        is_plain = all(type(weight) is torch.nn.Parameter and not weight.is_meta for weight in weights)
        if not (is_tiny and is_plain) or model.training or not all(map(is_stock, model.modules())):
            return find(member, ids, new_rows, modes, start)
        sums = [weight.double().sum().item() for weight in weights]
        kind = (
            type(model),
            model.config.to_json_string(),
            model.config._attn_implementation,
            model.dtype,
            model.device,
        )
        key = (*kind, torch.is_autocast_enabled("cpu"), *map(tuple, (ids, modes, start, sums)))
        if key not in found:
            mode, is_final = find(member, ids, new_rows, modes, start)
            if not is_final:
                return mode, is_final
            found[key] = mode
        return found[key], True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "find_cache_mode", find_once)
        yield
