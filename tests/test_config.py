"""The methods' options: what is saved of them, what they say of the method, and their order."""

import pytest

from hf_ensemble import (
    ConfigurationError,
    DeepenConfig,
    EvaConfig,
    GacConfig,
    MinedConfig,
    SweetSpanConfig,
    UniteConfig,
)
from hf_ensemble.config import METHODS, GatedConfig, method_config

SAVED = {
    GacConfig(): {
        "name": "gac", "threshold": None, "gate": 0, "space": "linear", "alpha": None, "strategy": None,
    },
    UniteConfig(): {"name": "unite", "top_k": 10, "threshold": None, "gate": 0},
    DeepenConfig(): {
        "name": "deepen", "variant": "released", "num_anchors": None, "anchor_seed": 0, "learning_rate": 0.15,
        "num_steps": 5, "support": 512, "skip_on_agreement": False,
    },
    MinedConfig(): {"name": "mined"},
    EvaConfig(): {"name": "eva", "neighbours": 10, "min_similarity": 0.1, "top_k": 320, "filter_top_k": 5},
    SweetSpanConfig(): {
        "name": "sweetspan", "span_length": 4, "filter_ratio": 10.0, "score": "perplexity", "max_span_tokens": None,
    },
}  # fmt: skip


@pytest.mark.parametrize("config", SAVED, ids=lambda config: config.name)
def test_options_are_saved_and_read_under_the_methods_name(config):
    assert list(config.to_dict().items()) == list(SAVED[config].items())
    assert method_config(SAVED[config]) == method_config(config.name) == config
    assert METHODS[config.name] is type(config)


def test_every_method_of_the_package_is_known():
    answers = {config.name for config in METHODS.values() if config.decides == "answers"}
    assert set(METHODS) - answers == {config.name for config in SAVED}
    assert answers == {"fuse", "mbr", "rerank", "vote"}


def test_options_may_be_given_by_position():
    assert UniteConfig(20, 0.5, 1) == UniteConfig(top_k=20, threshold=0.5, gate=1)
    assert GacConfig(0.5, 1, "log", 0.1) == GacConfig(threshold=0.5, gate=1, space="log", alpha=0.1)


@pytest.mark.parametrize("config", [GacConfig, UniteConfig])
def test_a_gate_is_checked_and_read_alike_in_every_method_that_has_one(config):
    assert issubclass(config, GatedConfig)
    assert config().gate_rule is None
    assert config(threshold=0.5, gate=1).gate_rule == (1, 0.5)
    for options in ({"threshold": 1.5}, {"threshold": True}, {"gate": 1}, {"threshold": 0.5, "gate": -1}):
        with pytest.raises(ConfigurationError, match="`gate`|`threshold`"):
            config(**options)
    with pytest.raises(ConfigurationError, match="`gate` is 2"):
        config(threshold=0.5, gate=2).check_members(2)


@pytest.mark.parametrize("config", SAVED, ids=lambda config: config.name)
def test_options_say_what_their_method_decides(config):
    assert config.decides == ("spans" if config.name == "sweetspan" else "tokens")
    if config.decides == "spans":
        with pytest.raises(ConfigurationError, match="not a token-level method"):
            config.build([], None, [], None)
