"""The contracts, for every method on unlike architectures and tokenizers."""

import functools

import pytest

from hf_ensemble import EnsembleForCausalLM, EvaConfig
from hf_ensemble.decoding.speculation.draft_length import DraftLength
from tests import contracts
from tests.contracts import cases

ALL = (*contracts.METHODS, *contracts.MAPPED, contracts.SPANS)
FIRST = (*contracts.AVERAGING, contracts.SPANS)
"""Those whose contexts and caches the others share."""


@pytest.mark.parametrize(
    ("recipe", "method"), [*cases(contracts.RECIPES, FIRST), *cases(contracts.CORE_RECIPES, sorted({*ALL} - {*FIRST}))]
)
@pytest.mark.parametrize("contract", contracts.EVERYWHERE, ids=lambda contract: contract.__name__)
def test_contract_about_caches_and_positions_holds(contract, recipe, method):
    contract(recipe.ensemble, method)


@pytest.mark.parametrize(("recipe", "method"), cases(contracts.CORE_RECIPES, ALL))
@pytest.mark.parametrize("contract", contracts.ABOUT_DISTRIBUTIONS, ids=lambda contract: contract.__name__)
def test_contract_about_distributions_holds(contract, recipe, method):
    if method == contracts.SPANS and contract is contracts.the_same_model_twice_is_that_model:
        pytest.skip("about distributions: for spans see tests/decoding/test_span_decoding.py")
    if method == "eva" and contract is contracts.the_same_model_twice_is_that_model:
        # The two logits of the entry where proposals are cut may differ in rounding.
        method = EvaConfig(top_k=10_000)
    contract(recipe.ensemble, method)


@pytest.mark.parametrize(
    "method",
    ["gac", *(pytest.param(method, marks=pytest.mark.slow) for method in ("unite", "deepen", "mined", "eva"))],
)
@pytest.mark.parametrize("contract", [*contracts.EVERYWHERE, *contracts.CORE], ids=lambda contract: contract.__name__)
def test_contract_holds_with_speculation(contract, method, monkeypatch):
    """Whatever can be drafted is: three entries in every round after the first."""
    monkeypatch.setattr(DraftLength, "choose", lambda self, drafters, share=1.0: (drafters[0], 3))
    generate = EnsembleForCausalLM.generate
    monkeypatch.setattr(EnsembleForCausalLM, "generate", functools.partialmethod(generate, speculation="auto"))
    if method == "eva" and contract is contracts.the_same_model_twice_is_that_model:
        method = EvaConfig(top_k=10_000)
    contract(contracts.CORE_RECIPES[0].ensemble, method)


@pytest.mark.crossed
@pytest.mark.parametrize(("recipe", "method"), cases(contracts.CORE_RECIPES, (*contracts.METHODS, contracts.SPANS)))
@pytest.mark.parametrize("contract", contracts.ABOUT_THE_CALL, ids=lambda contract: contract.__name__)
def test_contract_about_the_call_holds(contract, recipe, method):
    contract(recipe.ensemble, method)


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(recipe, id=str(recipe), marks=[pytest.mark.slow] * (n % 3 > 0))
        for n, recipe in enumerate(contracts.RECIPES)
    ],
)
def test_under_gac_all_weight_on_an_assistant_is_its_text(recipe):
    contracts.all_weight_on_an_assistant_is_its_text(recipe.ensemble, "gac")


@pytest.mark.parametrize(
    ("recipe", "method"),
    [
        (contracts.CORE_RECIPES[0], "unite"),
        (contracts.CORE_RECIPES[2], "gac"),
        pytest.param(contracts.CORE_RECIPES[1], contracts.SPANS, marks=pytest.mark.slow),
        pytest.param(contracts.CORE_RECIPES[0], "mined", marks=pytest.mark.slow),
        pytest.param(contracts.CORE_RECIPES[1], "eva", marks=pytest.mark.slow),
    ],
    ids=lambda value: str(value) if isinstance(value, contracts.Recipe) else contracts.name_of(value),
)
def test_a_saved_and_loaded_ensemble_is_the_same(recipe, method, tmp_path):
    contracts.saved_and_loaded_is_the_same(recipe.ensemble, method, tmp_path)
