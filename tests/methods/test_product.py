"""The product of experts: log space, negative weights, the plausibility cut-off."""

import pytest
import torch

from hf_ensemble import ConfigurationError, EnsembleForCausalLM, GacConfig
from tests import contracts, tiny
from tests.contracts import CORE_RECIPES, changed_logits, make_ensemble, prompt_rows, run

pytestmark = pytest.mark.filterwarnings("ignore:the primary .* wrote the control token")

LOG = GacConfig(space="log")


@pytest.fixture(scope="module")
def twins():
    tokenizer = tiny.byte_level_bpe(300)
    return make_ensemble([tiny.tiny_llama(tokenizer, seed=seed) for seed in (1, 2)], [tokenizer] * 2)


@pytest.fixture
def prompt(twins):
    return {"input_ids": twins.tokenizer(["The cat", "The kin"], return_tensors="pt").input_ids}


def log_probs(twins, prompt):
    with torch.no_grad():
        return [model(**prompt).logits[:, -1].log_softmax(-1) for model in twins.members]


@pytest.mark.parametrize("weights", [[0.5, 0.5], [1, 1], [1.5, -0.5], [0, 2], [-1, 2], [2, 0]])
def test_weighted_log_probabilities_are_summed(twins, prompt, weights):
    found = run(twins, prompt, max_new_tokens=1, method=LOG, weights=weights).logits[0]
    summed = sum(w * part for w, part in zip(weights, log_probs(twins, prompt), strict=True))
    end = twins.tokenizer.eos_token_id
    special = [i for i in twins.tokenizer.all_special_ids if i != end]
    summed[:, special] = -torch.inf
    torch.testing.assert_close(found, summed.log_softmax(-1), atol=1e-4, rtol=1e-4)


def test_the_default_weights_are_one_over_the_number_of_members(twins, prompt):
    found = run(twins, prompt, max_new_tokens=1, method=LOG).logits[0]
    expected = run(twins, prompt, max_new_tokens=1, method=LOG, weights=[0.5, 0.5]).logits[0]
    assert torch.equal(found, expected)


def test_what_the_primary_finds_implausible_is_dropped(twins, prompt):
    alpha = 0.8
    found = run(twins, prompt, max_new_tokens=1, method=GacConfig(space="log", alpha=alpha), weights=[1, -1]).logits[0]
    primary = log_probs(twins, prompt)[0].exp()
    primary[:, [i for i in twins.tokenizer.all_special_ids if i != twins.tokenizer.eos_token_id]] = 0.0
    kept = primary >= alpha * primary.amax(-1, keepdim=True)
    assert 1 < kept.sum() < kept.numel()
    assert torch.equal(found > -torch.inf, kept)


def test_what_a_member_with_a_negative_weight_rules_out_is_not_infinitely_good(twins, prompt):
    """Its weight does not count there; the others decide."""
    banned = 65

    def ban(logits):
        return logits.index_fill(-1, torch.tensor([banned]), -torch.inf)

    with changed_logits(twins.members[1], ban):
        found = run(twins, prompt, max_new_tokens=1, method=LOG, weights=[1, -0.5]).logits[0]
        parts = log_probs(twins, prompt)
    assert found.isfinite().sum(-1).min() > 250
    at = 70
    contrast = (parts[0] - 0.5 * parts[1])[:, at] - parts[0][:, banned]
    torch.testing.assert_close(found[:, at] - found[:, banned], contrast, atol=1e-4, rtol=1e-4)


def test_what_a_member_with_a_positive_weight_rules_out_is_out(twins, prompt):
    with changed_logits(twins.members[1], lambda logits: logits.index_fill(-1, torch.tensor([65]), -torch.inf)):
        found = run(twins, prompt, max_new_tokens=1, method=LOG).logits[0]
    assert (found[:, 65] == -torch.inf).all()


def test_negative_weights_need_log_space(twins, prompt):
    with pytest.raises(ConfigurationError, match='at least 0, but are \\[1.5, -0.5\\].*space="log"'):
        run(twins, prompt, method="gac", weights=[1.5, -0.5])


def test_negative_weights_are_saved_as_given(tmp_path):
    tokenizer = tiny.smol_like()
    tiny.tiny_llama(tokenizer).save_pretrained(tmp_path / "a")
    tokenizer.save_pretrained(tmp_path / "a")
    method = GacConfig(space="log", alpha=0.1)
    path = str(tmp_path / "a")
    ensemble = EnsembleForCausalLM.from_pretrained([path, path], method=method, weights=[1.5, -0.5])
    ensemble.save_pretrained(tmp_path / "ensemble")
    loaded = EnsembleForCausalLM.from_pretrained(tmp_path / "ensemble")
    assert loaded.config.weights == [1.5, -0.5]
    assert loaded.config.method == method
    # For one call with another method its own rule holds.
    with pytest.raises(ConfigurationError, match="at least 0"):
        run(loaded, prompt_rows(loaded)[:1], method="unite")


CONTRACTS = (
    contracts.a_row_alone_is_the_row_in_a_batch,
    contracts.the_cache_changes_nothing,
    contracts.an_ensemble_of_one_is_that_model,
    contracts.all_weight_on_the_primary_is_the_primary,
    contracts.a_constant_on_a_members_logits_changes_nothing,
    contracts.the_streamed_text_is_the_final_text,
    contracts.a_member_that_gives_nan_is_named,
)


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.__name__)
def test_contract_holds_in_log_space(contract):
    contract(CORE_RECIPES[1].ensemble, LOG)
