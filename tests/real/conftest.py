import os

import pytest

from examples.demo_models import demo_model_paths

# Read before the tests get a folder of their own for maps: the models stay where they are.
CACHE = os.environ.get("HF_ENSEMBLE_CACHE")


@pytest.fixture(scope="session")
def demo_models():
    """The folders of SmolLM2-135M-Instruct and Gemma-3-270M."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENSEMBLE_CACHE", CACHE or "")
        return demo_model_paths()
