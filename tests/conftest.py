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
