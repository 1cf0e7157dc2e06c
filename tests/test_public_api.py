"""The public names are what they are said to be. That importing them changes nothing: `bug_bank/test_f_saving.py`."""

from pathlib import Path

import hf_ensemble

DOCS = Path(__file__).resolve().parents[1]


def test_public_names_are_importable_sorted_and_documented():
    assert hf_ensemble.__all__ == sorted(hf_ensemble.__all__)
    pages = (DOCS / "README.md").read_text("utf-8") + "".join(
        page.read_text("utf-8") for page in (DOCS / "docs").rglob("*.md")
    )
    for name in hf_ensemble.__all__:
        assert getattr(hf_ensemble, name).__doc__
        assert name in pages, f"{name} is not in the docs"
