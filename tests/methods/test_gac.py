"""GaC beside another method, and which methods propose few entries. Its arithmetic: `test_methods_equal_reference.py`."""

import pytest
import torch

from hf_ensemble import DeepenConfig, EvaConfig, GacConfig, MinedConfig, UniteConfig
from hf_ensemble.methods import Gac
from tests.contracts import CORE_RECIPES

CPU = torch.device("cpu")
PROPOSE_FEW = [UniteConfig(top_k=3), EvaConfig(top_k=3), GacConfig(space="log", alpha=0.1)]
PROPOSE_ALL = [GacConfig(), GacConfig(space="log"), GacConfig(space="log", alpha=0.0), MinedConfig(), DeepenConfig()]


def built(config):
    ensemble = CORE_RECIPES[0].ensemble
    members = ensemble._members
    return config.build(members, ensemble.union_vocabulary, [member.eos_token_ids for member in members], CPU)


def step(batch_size=4, seed=0):
    """Logits, and weights of which some are 0."""
    generator = torch.Generator().manual_seed(seed)
    members = CORE_RECIPES[0].ensemble._members
    logits = [3 * torch.randn(batch_size, member.vocab_size, generator=generator) for member in members]
    weights = torch.rand(batch_size, len(members), generator=generator)
    weights[0, 0] = weights[1, 1] = 0.0
    return logits, weights / weights.sum(-1, keepdim=True)


@pytest.mark.parametrize("config", [*PROPOSE_FEW, *PROPOSE_ALL], ids=str)
def test_beside_any_method_it_is_the_same_and_shares_the_maps(config):
    method, logits_and_weights = built(config), step()
    beside = Gac.beside(method)
    assert all(mine is its for mine, its in zip(beside.maps, method.maps, strict=True))
    found, expected = beside.mix(*logits_and_weights), built(GacConfig()).mix(*logits_and_weights)
    assert torch.equal(found.logprobs, expected.logprobs)
    assert torch.equal(found.normalizers, expected.normalizers)
    assert Gac.beside(method) is beside
    method.forget()
    assert Gac.beside(method) is not beside


@pytest.mark.parametrize("config", PROPOSE_FEW, ids=str)
def test_what_is_not_proposed_has_mass_in_the_average(config):
    method = built(config)
    assert method.proposes_few
    logits, weights = step()
    has_none = method.mix(logits, weights).logprobs == -torch.inf
    average = Gac.beside(method).mix(logits, weights).logprobs[:, : has_none.shape[1]]
    assert (has_none[:, : average.shape[1]] & (average > -torch.inf)).any(-1).all()


@pytest.mark.parametrize("config", PROPOSE_ALL, ids=str)
def test_the_others_propose_all(config):
    assert not built(config).proposes_few
