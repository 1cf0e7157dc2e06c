"""What a notebook shows of an ensemble: its members, weights and method, as texts."""

import dataclasses

import pytest

from hf_ensemble import EnsembleForCausalLM, GacConfig, MemberConfig, MinedConfig
from hf_ensemble.ensemble_page import ensemble_in_notebook
from tests.contracts import model_of, tokenizer_of
from tests.html_page import Page, check_loads_nothing, page_in_notebook

HOSTILE = '</td></iframe><script>alert("1")</script>@@tables@@'


def shown(ensemble):
    source, _ = page_in_notebook(ensemble._repr_html_())
    check_loads_nothing(source)
    page = Page(source)
    assert page.tags.count("script") == 0
    return [text for text in page.texts if text.strip()]


def ensemble_of(names, **options):
    parts = [("llama", "smol"), ("gemma3", "gemma")][: len(names)]
    models, tokenizers = [model_of(*part) for part in parts], [tokenizer_of(part[1]) for part in parts]
    configs = [MemberConfig(name=name) for name in names]
    return EnsembleForCausalLM.from_members(models, tokenizers, member_configs=configs, **options)


def test_members_and_method_are_shown_as_texts():
    ensemble = ensemble_of([HOSTILE, "b"], method=GacConfig(threshold=0.5), weights=[3, 1])
    sizes = [f"{sum(w.numel() for w in model.parameters()):,}" for model in ensemble.members]
    texts = shown(ensemble)
    assert texts[0] == "Ensemble of 2 members"
    start = texts.index("weights in memory") + 1
    kind = "a causal language model of this process"
    assert texts[start : start + 7] == [HOSTILE, "primary", "0.75", kind, "float32", "cpu", sizes[0]]
    assert texts[start + 8 : start + 15] == ["b", "assistant", "0.25", kind, "float32", "cpu", sizes[1]]
    assert texts[start + 7].endswith(" MB")
    options = texts[texts.index("value for method 'gac'") + 1 :]
    assert dict(zip(options[::2], options[1::2], strict=True)) == {
        **{"threshold": "0.5", "gate": "0", "space": "linear"},
        **{"alpha": "none", "strategy": "none"},
    }


def test_a_method_without_options_says_so():
    pytest.importorskip("rapidfuzz")
    assert shown(ensemble_of(["a", "b"], method=MinedConfig()))[-1] == "Method 'mined', which has no options."


def test_a_member_elsewhere_has_no_size_here():
    ensemble = ensemble_of(["a"], method="gac")
    far = type("Far", (), {**dataclasses.asdict(MemberConfig()), "name": "far", "kind": HOSTILE, "model": None})
    far.num_parameters, far.dtype, far.device = 0, ensemble.dtype, "tpu:7"
    stand_in = type("Ensemble", (), {"member_views": [far], "config": ensemble.config})
    texts = Page(page_in_notebook(ensemble_in_notebook(stand_in))[0]).texts
    start = texts.index("far")
    assert texts[start : start + 8] == ["far", "primary", "1", HOSTILE, "float32", "tpu:7", "not known", "elsewhere"]
