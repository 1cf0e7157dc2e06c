"""The frame of all pages: what is put into it stays where it is put."""

import pytest

from hf_ensemble.pages import escaped, in_notebook, marked, page, table, tables_in_notebook
from tests.html_page import Page, check_loads_nothing, page_in_notebook

PARTS = {"notes": "@@rows@@", "rows": "<p>@@style@@ @@notes@@</p>"}


@pytest.mark.parametrize("has_script", [False, True])
def test_a_page_holds_what_it_is_filled_with(has_script):
    source = page("hf_ensemble.answers", "answers_page", "</title><u>@@body@@\0", PARTS, has_script)
    check_loads_nothing(source)
    found = Page(source)
    assert "u" not in found.tags
    texts = [text for text in found.texts if text.strip()]
    assert texts == ["</title><u>@@body@@␀", "@@rows@@.", "@@style@@ @@notes@@"]
    assert ("script-src 'unsafe-inline'" in source) == has_script


def test_texts_are_escaped_and_white_space_has_signs():
    assert escaped("<&\"'\x00\x1b\r\x7f\t\n") == "&lt;&amp;&quot;&#x27;␀␛␍␡\t\n"
    assert marked("<\t\n") == '&lt;<b class="tab"></b>\t<b class="newline"></b>\n'


def test_a_table_has_a_title_for_each_column_and_a_name_for_each_row():
    found = Page(table([["", "a"], ["<u>", "1\0"], ["x", "</td>"]]))
    assert found.tags.count("th") == 2 + 2
    assert found.tags.count("td") == 2
    assert found.texts == ["a", "<u>", "1␀", "x", "</td>"]


def test_a_page_of_tables_is_as_high_as_they_are():
    rows = [["", "a"], ["@@remarks@@", "1"]]
    source, height = page_in_notebook(tables_in_notebook("<t>", [rows, rows], ["<r>"]))
    check_loads_nothing(source)
    assert [text for text in Page(source).texts if text.strip()] == ["<t>", *["a", "@@remarks@@", "1"] * 2, "<r>"]
    assert height > page_in_notebook(tables_in_notebook("<t>", [rows]))[1]


def test_a_notebook_gives_a_page_the_room_that_it_needs():
    heights = [page_in_notebook(in_notebook("", ["a"] * num))[1] for num in (0, 1, 5, 1000)]
    assert heights == sorted(heights)
    assert heights[1] < heights[2]
    assert heights[-1] < 800
    assert page_in_notebook(in_notebook("", ["a\na"])) == page_in_notebook(in_notebook("", ["a", "a"]))
    assert page_in_notebook(in_notebook("", ["a" * 200]))[1] > heights[1]
    source = '<p title="&quot;">"\'</iframe>&amp;</p>\n'
    assert page_in_notebook(in_notebook(source, []))[0] == source
