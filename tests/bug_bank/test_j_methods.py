"""Bug bank, section J: methods.

| case | where |
| --- | --- |
| J11 | here |
| all that is proposed is what the primary cannot write (a sibling of J1) | here |
"""

import pytest
import torch

from hf_ensemble import DeepenConfig, EnsembleLogitsProcessor, GacConfig, MemberError, SweetSpanConfig, UniteConfig
from hf_ensemble.config import method_config
from tests import tiny
from tests.contracts import CORE_RECIPES, padded, prompt_rows, run

from .kit import TOKEN_METHODS, control_tokens_may_be_chosen, each_averaging_method, ensemble_of, id_of, tokenizer_of

pytestmark = control_tokens_may_be_chosen

OTHER_OPTIONS = (
    GacConfig(space="log", alpha=0.01),
    GacConfig(threshold=0.02, gate=1),
    DeepenConfig(variant="paper"),
    DeepenConfig(support=None),
)
EVERY_METHOD = [*map(method_config, TOKEN_METHODS), *OTHER_OPTIONS]
each_with_options = pytest.mark.parametrize("config", EVERY_METHOD, ids=str)


# --- J11 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [*EVERY_METHOD, SweetSpanConfig(max_span_tokens=8)], ids=str)
def test_a_call_under_autocast_works(config):
    """J11: In a batch; the members run in bfloat16 there, what comes out is in float32 and sums to 1."""
    ensemble = CORE_RECIPES[0].ensemble
    rows = padded(prompt_rows(ensemble), fill=lambda n: 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = run(ensemble, rows, method=config, max_new_tokens=3, eos_token_id=None)
    assert output.num_new == 3
    for logits in output.logits or ():
        assert logits.dtype == torch.float32
        assert logits.exp().sum(-1).tolist() == pytest.approx([1] * 3, abs=1e-5)


@each_with_options
def test_mixing_does_not_depend_on_autocast(config, tmp_path, monkeypatch):
    """J11: Neither in a step, nor in what is kept for later steps, nor in maps on disk."""
    ensemble = CORE_RECIPES[0].ensemble
    members, union = ensemble._members, ensemble.union_vocabulary
    generator = torch.Generator().manual_seed(0)
    logits = [3 * torch.randn(2, member.vocab_size, generator=generator) for member in members]
    weights = torch.tensor([[0.3, 0.7], [0.8, 0.2]])
    eos_ids = [member.eos_token_ids for member in members]

    def mixed(method):
        with torch.no_grad():
            return method.mix(logits, weights).logprobs

    expected = mixed(config.build(members, union, eos_ids, torch.device("cpu")))
    monkeypatch.setenv("HF_ENSEMBLE_CACHE", str(tmp_path))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        method = config.build(members, union, eos_ids, torch.device("cpu"))
        assert torch.equal(mixed(method), expected)
    assert torch.equal(mixed(method), expected)
    assert torch.equal(mixed(config.build(members, union, eos_ids, torch.device("cpu"))), expected)


# --- What nobody can write ------------------------------------------------------------------------------------------


def wants_what_the_primary_lacks(method):
    """The assistant is sure of an entry with a byte that the primary has no token for."""
    primary, other = tiny.byte_level_bpe(missing_bytes=(0xF0,)), tokenizer_of("gemma")
    row = torch.full((tiny.rows_of(other),), -200.0)
    row[id_of(other, "🎉")] = 200.0
    start = id_of(primary, "a")
    return ensemble_of((primary, [{start: 1.0}]), (other, [row]), method=method), start


ONLY_THAT = [UniteConfig(top_k=1), UniteConfig(), GacConfig()]


@pytest.mark.crossed
@pytest.mark.parametrize("method", ONLY_THAT, ids=str)
@pytest.mark.parametrize("options", [{}, {"do_sample": True}, {"num_beams": 2}, {"use_cache": False}], ids=str)
def test_where_only_that_is_proposed_nothing_is_left(method, options):
    """The error names the method; it is no member's NaN, and no text from NaN."""
    ensemble, start = wants_what_the_primary_lacks(method)
    with pytest.raises(MemberError, match=rf"nothing is left.*step 1.*{method.name}"):
        ensemble.generate(torch.tensor([[start]]), max_new_tokens=2, weights=[0, 1], **options)
    with pytest.raises(MemberError, match=rf"nothing is left.*step 1.*{method.name}"):
        ensemble.score(["a"], ["aa"], weights=[0, 1])


@pytest.mark.parametrize("method", ONLY_THAT, ids=str)
def test_a_plain_processor_says_so_too(method):
    ensemble, start = wants_what_the_primary_lacks(method)
    processor = EnsembleLogitsProcessor(list(ensemble.members), ensemble.tokenizers, method, [0, 1])
    with pytest.raises(MemberError, match=rf"nothing is left.*row 0 at step 1.*{method.name}"):
        ensemble.members[0].generate(
            torch.tensor([[start]]), logits_processor=[processor], max_new_tokens=2, do_sample=False
        )


@pytest.mark.parametrize("method", ONLY_THAT, ids=str)
def test_where_others_propose_something_that_is_written(method):
    ensemble, start = wants_what_the_primary_lacks(method)
    assert ensemble.generate(torch.tensor([[start]]), max_new_tokens=2).tolist() == [[start] * 3]


@each_averaging_method
def test_rows_without_mass_hold_no_nan(method):
    """Nor where the product of the members leaves nothing."""
    ensemble, _ = wants_what_the_primary_lacks(method)
    config = GacConfig(space="log") if method == "gac" else method_config(method)
    members = ensemble._members
    eos_ids = [member.eos_token_ids for member in members]
    built = config.build(members, ensemble.union_vocabulary, eos_ids, torch.device("cpu"))
    rows = [torch.full((1, member.vocab_size), -torch.inf) for member in members]
    rows[0][0, 50], rows[1][0, id_of(ensemble.tokenizers[1], "🎉")] = 0.0, 0.0
    mixed = built.mix(rows, torch.tensor([[0.0, 1.0]]))
    assert not mixed.logprobs.isnan().any()
    assert mixed.normalizers.isfinite().all()
