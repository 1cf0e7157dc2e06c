"""The two models, and ensembles of them, each loaded or made once for all tests that a process runs."""

import functools

import pytest

from examples.demo_models import demo_model_paths

NAMES = ("smol", "gemma")


@pytest.fixture(scope="session")
def demo_models():
    """The folders of SmolLM2-135M-Instruct and Gemma-3-270M."""
    return demo_model_paths()


@pytest.fixture(scope="session")
def tokenizers(demo_models):
    from transformers import AutoTokenizer

    return [AutoTokenizer.from_pretrained(path) for path in demo_models]


@pytest.fixture(scope="session")
def models(demo_models):
    from transformers import AutoModelForCausalLM

    return [AutoModelForCausalLM.from_pretrained(path) for path in demo_models]


@pytest.fixture(scope="session")
def made(models, tokenizers):
    """Ensembles of the two models in any order."""
    from hf_ensemble import EnsembleForCausalLM, MemberConfig

    @functools.cache
    def make(*order):
        ensemble = EnsembleForCausalLM.from_members(
            [models[n] for n in order],
            [tokenizers[n] for n in order],
            member_configs=[MemberConfig(name=NAMES[n]) for n in order],
        )
        if order != (0, 1):
            for member, n in zip(ensemble.member_views, order, strict=True):
                member.cache_mode = make(0, 1)._members[n].cache_mode  # trying it out takes seconds
        return ensemble

    return make


@pytest.fixture(scope="session")
def ensemble(made):
    return made(0, 1)
