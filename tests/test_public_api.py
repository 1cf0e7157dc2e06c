"""The public names are what they are said to be. That importing them changes nothing: `bug_bank/test_f_saving.py`."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hf_ensemble
from tests import tiny

DOCS = Path(__file__).resolve().parents[1]


def test_public_names_are_importable_sorted_and_documented():
    assert hf_ensemble.__all__ == sorted(hf_ensemble.__all__)
    pages = (DOCS / "README.md").read_text("utf-8") + "".join(
        page.read_text("utf-8") for page in (DOCS / "docs").rglob("*.md")
    )
    for name in hf_ensemble.__all__:
        assert getattr(hf_ensemble, name).__doc__
        assert name in pages, f"{name} is not in the docs"


def test_where_names_are_is_what_type_checkers_read():
    tree = ast.parse(Path(hf_ensemble.__file__).read_text("utf-8"))
    block = next(
        node for node in tree.body if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
    )
    read = {"." * node.level + node.module: tuple(item.name for item in node.names) for node in block.body}
    assert read == hf_ensemble._SOURCES
    assert sorted(hf_ensemble._MODULE_OF) == hf_ensemble.__all__


@pytest.mark.slow
def test_an_import_brings_no_model_code_but_the_model_type(tmp_path):
    tiny.save_pair(tmp_path, "a", "b")
    hf_ensemble.EnsembleForCausalLM.from_pretrained([tmp_path / "a", tmp_path / "b"]).save_pretrained(
        tmp_path / "both"
    )
    code = (
        "import sys, hf_ensemble\n"
        "assert 'transformers.modeling_utils' not in sys.modules\n"
        "from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer\n"
        f"assert AutoConfig.from_pretrained({str(tmp_path / 'both')!r}).method.name == 'unite'\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(tmp_path / 'both')!r})\n"
        "assert type(model) is hf_ensemble.EnsembleForCausalLM\n"
        f"assert type(AutoTokenizer.from_pretrained({str(tmp_path / 'both')!r})).__name__ == 'EnsembleTokenizer'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_name_is_no_attribute():
    with pytest.raises(AttributeError, match="no attribute 'Ensemble'"):
        hf_ensemble.Ensemble  # noqa: B018
