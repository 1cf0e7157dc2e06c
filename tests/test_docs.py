"""Every Python block in the README and the docs runs, and every command of `hf-ensemble`, on tiny members."""

import json
import re
import shlex
from pathlib import Path
from unittest import mock

import pytest

import hf_ensemble
from hf_ensemble.cli import main
from hf_ensemble.config import METHODS
from tests import tiny
from tests.tiny_encoder_decoders import nllb_like, tiny_nllb

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(python|bash)\n(.*?)^```", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"^hf-ensemble (?!serve|chat).*", re.MULTILINE)
"""A command by itself: not one that goes on until it is stopped, nor one at the end of a pipe."""


def blocks_of(page):
    """The Python blocks of a page, and its commands as lists of arguments, in their order."""
    for language, text in BLOCK.findall(page.read_text("utf-8")):
        if language == "python":
            yield text
        else:
            yield from (
                shlex.split(command, comments=True)[1:] for command in COMMAND.findall(text.replace("\\\n", " "))
            )


QUICK = ("quickstart.md", "add_a_method.md")
"""Pages whose blocks also run where slow tests do not."""
WITH_CODE = [
    pytest.param(page, id=str(page.relative_to(ROOT)), marks=[] if page.name in QUICK else [pytest.mark.slow])
    for page in PAGES
    if any(blocks_of(page))
]


@pytest.fixture
def members_in_the_working_folder(tmp_path, monkeypatch, page):
    monkeypatch.chdir(tmp_path)
    tiny.save_pair(tmp_path, "model-a", "model-b")
    if page.name == "specialists.md":
        tokenizer = nllb_like(tgt_lang=None)
        tiny_nllb(tokenizer).save_pretrained(tmp_path / "translator")
        tokenizer.save_pretrained(tmp_path / "translator")
    examples = [json.dumps({"prompt": f"{n} and 1 make", "reference": str(n + 1)}) for n in range(20)]
    (tmp_path / "dev.jsonl").write_text("\n".join(examples), "utf-8")
    with mock.patch.dict(METHODS):  # a page adds a method
        yield


@pytest.mark.filterwarnings("ignore:the primary .* wrote the control token")
@pytest.mark.parametrize("page", WITH_CODE)
def test_blocks_run(page, members_in_the_working_folder):
    names: dict = {}
    for block in blocks_of(page):
        if isinstance(block, str):
            exec(compile(block, str(page), "exec"), names)
        else:
            assert main(block) == 0


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^):#]+\.md)\)", page.read_text("utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r"^ +- (\S+\.md)$", (ROOT / "docs" / "mkdocs.yml").read_text("utf-8"), re.MULTILINE))
    assert listed == {str(page.relative_to(ROOT / "docs")) for page in PAGES[1:]}


def test_every_public_name_is_in_the_api():
    text = (ROOT / "docs" / "api.md").read_text("utf-8")
    missing = [name for name in hf_ensemble.__all__ if f"::: hf_ensemble.{name}\n" not in text]
    assert not missing


def test_every_file_that_contributing_names_exists():
    text = (ROOT / "docs/contributing.md").read_text("utf-8")
    named = re.findall(r"`([a-z_/*]+(?:/|\.py|\.sh|\.md|\.yml))`", text)
    missing = [
        path
        for path in named
        if not any(next(folder.glob(path.rstrip("/")), None) for folder in (ROOT, ROOT / "hf_ensemble", ROOT / "docs"))
    ]
    assert not missing
