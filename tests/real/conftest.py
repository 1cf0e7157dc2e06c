import pytest

from examples.demo_models import demo_model_paths


@pytest.fixture(scope="session")
def demo_models():
    """The folders of SmolLM2-135M-Instruct and Gemma-3-270M."""
    return demo_model_paths()
