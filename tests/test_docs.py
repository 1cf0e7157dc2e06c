"""Every Python block in the README and the docs runs, on tiny members."""

import re
from pathlib import Path

import pytest

from tests import tiny

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
WITH_CODE = [page for page in PAGES if "```python" in page.read_text("utf-8")]


@pytest.fixture
def members_in_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny.save_pair(tmp_path, "model-a", "model-b")


@pytest.mark.filterwarnings("ignore:the primary .* wrote the control token")
@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_blocks_run(page, members_in_the_working_folder):
    names: dict = {}
    for block in re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL):
        exec(compile(block, str(page), "exec"), names)


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^):#]+\.md)\)", page.read_text("utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
