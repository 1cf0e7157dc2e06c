"""Nothing is downloaded, stored maps go to a folder of their own, and test modules share one copy of the helpers."""

import importlib
import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch

pytest.register_assert_rewrite("tests.contracts")
torch.set_num_threads(1)

for _name in ("tiny", "reference", "contracts"):
    # `import tiny` gives the same module as `from tests import tiny`.
    sys.modules.setdefault(_name, importlib.import_module(f"tests.{_name}"))


@pytest.fixture(scope="session", autouse=True)
def map_folder(tmp_path_factory):
    """Where vocabulary maps are stored during the tests."""
    folder = tmp_path_factory.mktemp("maps")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENSEMBLE_CACHE", str(folder))
        yield folder
