"""The sizes that docs/contributing.md promises."""

import ast

import pytest

from tests.scripts import ROOT

FILES = sorted((ROOT / "hf_ensemble").rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_function_or_class_is_too_large(path):
    text = path.read_text("utf-8")
    assert len(text.splitlines()) <= 450
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            assert sum(isinstance(item, ast.FunctionDef) for item in node.body) <= 25, node.name
        elif isinstance(node, ast.FunctionDef):
            docstring = ast.get_docstring(node, clean=False) or ""
            assert node.end_lineno - node.lineno - docstring.count("\n") <= 60, node.name
