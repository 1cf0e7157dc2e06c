"""Members that were quantised after they had been loaded: they run, and are not saved as what they are not."""

import warnings

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_ensemble import ConfigurationError, EnsembleForCausalLM
from hf_ensemble.checking.run import check_members
from hf_ensemble.members.member_model import is_quantized
from tests import tiny
from tests.scripts import ROOT, load_script

pytestmark = pytest.mark.filterwarnings("ignore:the primary .* wrote the control token")


def by_torch(model):
    """As torch does it by itself: head and layers hold no tensors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)


def by_example(model):
    with pytest.MonkeyPatch.context() as patch:
        return load_script("examples/int8_members.py", patch).to_int8(model)


WAYS = {"by the example": by_example, "by torch": by_torch}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tiny.save_pair(tmp_path_factory.mktemp("members"), "a", "b")


@pytest.fixture(params=WAYS)
def quantise(request):
    return WAYS[request.param]


def ensemble_of(folders, quantise):
    models = [quantise(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)) for folder in folders]
    return EnsembleForCausalLM.from_members(models, [AutoTokenizer.from_pretrained(folder) for folder in folders])


def text_of(ensemble, **options):
    inputs = ensemble.tokenizer("The capital", return_tensors="pt")
    settings = {"do_sample": False, "max_new_tokens": 5, "min_new_tokens": 5}
    return ensemble.generate(**inputs, **settings, **options)[0].tolist()


def test_they_run_with_every_method_and_a_cache(folders, quantise):
    ensemble = ensemble_of(folders, quantise)
    assert all(map(is_quantized, ensemble.members))
    assert not any(map(is_quantized, EnsembleForCausalLM.from_pretrained(folders).members))
    assert [member.cache_mode for member in ensemble.member_views] == ["repack", "repack"]
    assert [member.output_embeddings() is not None for member in ensemble.member_views] == [True, True]
    for method in ("gac", "unite", "deepen", "mined", "sweetspan"):
        assert len(text_of(ensemble, method=method)) > 5
    assert not [one for one in check_members(ensemble).findings if one.check == "steps"]


def test_eva_says_that_it_needs_the_head(folders, quantise):
    ensemble = ensemble_of(folders, quantise)
    with pytest.raises(ConfigurationError, match=r"EVA reads the output embeddings .*(packed|torch.int8)"):
        text_of(ensemble, method="eva")


def test_the_example_rounds_little_and_keeps_rows_apart(folders):
    plain = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32)
    embeddings = plain.get_input_embeddings().weight.clone()
    ids = torch.arange(24).reshape(2, 12) + 5
    with torch.no_grad():
        expected = plain(ids).logits
        quantised = by_example(plain)
        found = quantised(ids).logits
        alone = quantised(ids[:1]).logits
    assert torch.equal(quantised.get_input_embeddings().weight, embeddings), "which may be the head's"
    assert 0 < (found - expected).std() < 0.05 * expected.std()
    torch.testing.assert_close(found[:1], alone)


@pytest.mark.parametrize("include_members", [False, True])
def test_they_are_not_saved(folders, quantise, include_members, tmp_path):
    ensemble = ensemble_of(folders, quantise)
    with pytest.raises(ConfigurationError, match=r"member 'a' .*quantised after it had been loaded"):
        ensemble.save_pretrained(tmp_path / "saved", include_members=include_members)
    assert not (tmp_path / "saved").exists()


def test_the_recipe_of_the_docs_is_the_example():
    source = (ROOT / "examples" / "int8_members.py").read_text("utf-8")
    recipe = source[source.index("class Int8Linear") : source.index("def int8_ensemble")].strip()
    assert recipe in (ROOT / "docs" / "how-to" / "quantized.md").read_text("utf-8")
