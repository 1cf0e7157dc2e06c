"""Bug bank, J17: every entry of a list is a member with its own name and options, whatever it shares with others."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_ensemble import EnsembleForCausalLM, MemberConfig
from tests import tiny

pytestmark = pytest.mark.filterwarnings("ignore:the primary .* wrote the control token")


@pytest.fixture
def path(tmp_path):
    """One model."""
    return tiny.save_pair(tmp_path, "model", "other")[0]


@pytest.mark.parametrize("how", ["listed", "objects", "saved", "bundled"])
def test_one_model_under_two_names_is_two_members(how, path, tmp_path):
    """J17: With its weights once; each name chooses its member."""
    items = [MemberConfig(path=path, name="a"), MemberConfig(path=path, name="b", eos_token_id=3)]
    if how == "objects":
        model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
        ensemble = EnsembleForCausalLM.from_members([model] * 2, [tokenizer] * 2, member_configs=items)
    else:
        ensemble = EnsembleForCausalLM.from_pretrained(items)
    if how in ("saved", "bundled"):
        ensemble.save_pretrained(tmp_path / "saved", include_members=how == "bundled")
        ensemble = EnsembleForCausalLM.from_pretrained(tmp_path / "saved")
        assert len(list((tmp_path / "saved").glob("members/*"))) == (how == "bundled")
    assert [member.name for member in ensemble.member_views] == ["a", "b"]
    assert [3 in member.eos_token_ids for member in ensemble.member_views] == [False, True]
    assert ensemble.members[0] is ensemble.members[1]
    inputs = ensemble.tokenizer("The cat", return_tensors="pt")
    options = {"max_new_tokens": 4, "do_sample": False}
    expected = ensemble.generate(**inputs, **options)
    for name in ("a", "b"):
        assert torch.equal(ensemble.generate(**inputs, **options, speculation=name), expected)


def test_an_error_names_the_entry_that_it_is_about(path, monkeypatch):
    """J17: Not the first one of the same model."""
    ensemble = EnsembleForCausalLM.from_pretrained(
        [MemberConfig(path=path, name="a"), MemberConfig(path=path, name="b")]
    )
    names = [ensemble.member_views[n].not_finite("in row 0 at step 1").args[0].split(" returned")[0] for n in range(2)]
    assert names == ["member 'a'", "member 'b'"]


def test_names_are_taken_from_paths_where_none_is_given(path):
    ensemble = EnsembleForCausalLM.from_pretrained([path, MemberConfig(path=path, name="again"), path])
    assert [member.name for member in ensemble.member_views] == ["model", "again", "model"]
