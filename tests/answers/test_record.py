"""The record of whole answers: it says what was written and chosen, as a table and as a safe page too."""

import dataclasses
import math

import pytest

from hf_ensemble import ConfigurationError
from hf_ensemble.answers.base import Candidate, Choice, Question, Written
from hf_ensemble.answers.record import Answer, Answers, AnswerWriter, record_of
from hf_ensemble.pages import PICTURES
from tests.html_page import Page, check_loads_nothing, page_in_notebook

NASTY = [
    *("</table><script>alert(1)</script>", "<b>&amp;\"'@@rows@@", "\n\t  ", "  a ", "\x00\x1b\r\x7f\u202e\u2028"),
    *("שלום <i>", "今天", "", "a\n\nb"),
]


def candidate(data, *writers, ended=True):
    return Candidate(data, ended, writers, tuple(0.25 for _ in writers))


def question(*candidates):
    return Question([{"role": "user", "content": "q"}], candidates)


FIRST = Written(0, "first", 0, (1, 2, 3), b"Paris", "eos", -1.5, 0.25)
SECOND = Written(1, "second", 1, (4,), b"Paris", "text", None, 0.5)
METHOD = Written(None, "gac", 0, (5, 6), b"\xffRome", None, None, 1.0)


@pytest.fixture(scope="module")
def record():
    """Two prompts: of the first the candidates change places; of the second another model writes the answer."""
    questions = [
        question(candidate(b"\xffRome", METHOD, ended=False), candidate(b"Paris", FIRST, SECOND)),
        question(candidate(b"", FIRST)),
    ]
    choices = [
        Choice([1, 0], {"vote": [0.25, math.inf], "likelihood": [None, math.nan]}, ["", None]),
        Choice([0], {"other": [1.0]}, written="<b>Fused"),
    ]
    return record_of(questions, choices, [[1, 1, 0], [0]], ["a?", "b?"], "vote")


def strange(texts=NASTY, num_prompts=2):
    """A record whose every text is one of these: names, prompts, what was read out of answers, and the answers."""
    writers = tuple(AnswerWriter(text, n or None, n, n, None, math.nan, math.inf) for n, text in enumerate(texts))
    scores = {text: [-math.inf, math.nan, None, 0.5][n % 4] for n, text in enumerate(texts)}
    row = tuple(
        Answer(text, text.encode(), bool(n % 2), writers, 0.1, scores, text, len(texts) - 1 - n, (n,) * (n % 2))
        for n, text in enumerate(texts)
    )
    prompts = tuple(texts[n % len(texts)] for n in range(num_prompts))
    return Answers((row,) * num_prompts, prompts, tuple(texts), texts[0], (texts[1],) * num_prompts)


def pages_of(answers, tmp_path, **options):
    """The page as a file and as a notebook has it."""
    answers.to_html(tmp_path / "page.html", **options)
    return (tmp_path / "page.html").read_text("utf-8"), page_in_notebook(answers._repr_html_())[0]


def test_a_record_says_what_was_written_and_chosen(record):
    (rome, paris), (empty,) = record
    assert (paris.text, paris.data, paris.ended, paris.weight) == ("Paris", b"Paris", True, 0.5)
    assert (rome.text, rome.data, rome.ended, rome.weight) == ("�Rome", b"\xffRome", False, 0.25)
    assert paris.writers == (
        AnswerWriter("first", 0, 0, 3, "eos", -1.5, 0.25),
        AnswerWriter("second", 1, 1, 1, "text", None, 0.5),
    )
    assert rome.writers == (AnswerWriter("gac", None, 0, 2, None, None, 1.0),)
    assert (paris.rank, paris.places, paris.answer) == (0, (0, 1), None)
    assert (rome.rank, rome.places, rome.answer) == (1, (2,), "")
    assert rome.scores == {"vote": 0.25, "likelihood": None, "other": None}
    assert (empty.text, empty.answer, empty.places) == ("", None, ())
    assert empty.scores == {"vote": None, "likelihood": None, "other": 1.0}
    assert (record.criteria, record.method) == (("vote", "likelihood", "other"), "vote")
    assert (record.prompts, record.written) == (("a?", "b?"), (None, "<b>Fused"))


def test_a_record_is_a_sequence_of_its_prompts(record):
    assert len(record) == 2
    assert record[1] is record.rows[1]
    assert list(record) == list(record.rows)
    assert repr(record) == "Answers(prompts=2, candidates=3, method='vote')"
    hash(record)
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.method = "mbr"


def test_candidates_that_were_not_ranked_have_no_rank():
    pair = question(candidate(b"a", FIRST), candidate(b"b", SECOND))
    [[a, b]] = record_of([pair], [Choice([1], {})], [[1]], ["q"], "rerank")
    assert (a.rank, b.rank) == (None, 0)


@pytest.mark.parametrize("few", ["choices", "places"])
def test_every_question_has_a_choice_and_places(few):
    given = {"choices": [Choice([0], {})] * 2, "places": [[0]] * 2} | {few: []}
    with pytest.raises(ValueError, match="argument"):
        record_of([question(candidate(b"a", FIRST))] * 2, prompts=["q"] * 2, method="vote", **given)


# --- Table ----------------------------------------------------------------------------------------------------------


def test_the_table_has_a_line_for_each_candidate_and_writer(record):
    pytest.importorskip("pandas")
    frame = record.to_pandas()
    assert list(frame.columns) == [
        *("row", "candidate", "text", "ended", "weight", "answer", "rank", "places"),
        *("score_vote", "score_likelihood", "score_other"),
        *("writer", "member", "number", "num_tokens", "ended_by", "log_prob", "seconds"),
    ]
    assert frame["writer"].tolist() == ["gac", "first", "second", "first"]
    assert frame["row"].tolist() == [0, 0, 0, 1]
    assert frame["candidate"].tolist() == [0, 1, 1, 0]
    assert frame["num_tokens"].tolist() == [2, 3, 1, 3]
    line = frame.iloc[1]
    assert (line["text"], line["rank"], line["score_vote"], line["log_prob"]) == ("Paris", 0, math.inf, -1.5)
    assert line["places"] == [0, 1]
    missing = frame.isna()
    assert missing["member"].tolist() == [True, False, False, False]
    assert missing["answer"].tolist() == [False, True, True, True]
    assert missing["score_likelihood"].all()
    numbers = [name for name in frame.columns if name.startswith("score_")]
    numbers += ["weight", "rank", "member", "log_prob", "seconds"]
    assert (frame.dtypes[numbers] == "float64").all()


def test_the_table_of_nothing_has_its_columns():
    pytest.importorskip("pandas")
    frame = Answers((), (), ("vote",), "vote", ()).to_pandas()
    assert len(frame) == 0
    assert frame.dtypes["score_vote"] == frame.dtypes["rank"] == "float64"


def test_criteria_named_like_columns_have_columns_of_their_own():
    pytest.importorskip("pandas")
    frame = strange(["weight", "text"]).to_pandas()
    assert frame.columns.is_unique
    assert frame["weight"].eq(0.1).all()
    assert frame["score_weight"].eq(-math.inf).all()


def test_the_table_without_pandas_says_what_to_install(record, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(ConfigurationError, match='`to_pandas` .*pip install "pandas>=2.2"'):
        record.to_pandas()


# --- Page -----------------------------------------------------------------------------------------------------------


class AnswersPage(Page):
    """Also the texts in boxes, and the bodies of the tables: whether each is chosen, and its cells."""

    def __init__(self, source):
        self.boxes, self.bodies = [], []
        super().__init__(source)

    def handle_starttag(self, tag, attrs):
        super().handle_starttag(tag, attrs)
        kind = self.open[-1][1] if self.open else ""
        if tag == "div" and "text" in kind.split():
            self.boxes.append("")
        elif tag == "tbody":
            self.bodies.append((kind, []))
        elif tag == "td":
            self.bodies[-1][1].append("")

    def handle_data(self, data):
        super().handle_data(data)
        if any(tag == "div" and "text" in kind.split() for tag, kind in self.open):
            self.boxes[-1] += data
        if any(tag == "td" for tag, _ in self.open):
            self.bodies[-1][1][-1] += data


def test_the_page_shows_the_best_first_and_marks_what_was_returned(record, tmp_path):
    for source in pages_of(record, tmp_path):
        page = AnswersPage(source)
        paris, rome, empty = page.bodies
        assert [kind for kind, _ in page.bodies] == ["chosen", "chosen", ""]
        head = ["1", "✓ 1, 2", "0.5", "–", "inf", "nan", "–"]
        writers = ["first answer 1", "3", "0.25", "end token", "-1.5", "second answer 2", "1", "0.5", "text", "–"]
        assert paris[1] == [*head, *writers, "Paris"]
        head = ["2", "✓ 3", "0.25", "", "0.25", "–", "–"]
        assert rome[1] == [*head, "gac method answer 1", "2", "1", "not ended", "–", "�Rome"]
        assert empty[1][:3] == ["1", "", "0.25"]
        assert page.boxes == ["a?", "Paris", "�Rome", "b?", "<b>Fused", ""]
        assert [text for text in page.texts if text.startswith("Prompt")] == ["Prompt 1", "Prompt 2"]
        notes = "; 3 candidates of 4 written answers; 2 prompts; the best first, returned ones with a ✓."
        assert notes in page.texts


def test_a_page_of_one_prompt_and_one_returned_answer_is_plain(tmp_path):
    choice = Choice([0], {"vote": [1.0]})
    record = record_of([question(candidate(b"a", FIRST))], [choice], [[0]], ["q"], "vote")
    for source in pages_of(record, tmp_path):
        page = AnswersPage(source)
        assert page.bodies == [("chosen", ["1", "✓", "0.25", "1", "first", "3", "0.25", "end token", "-1.5", "a"])]
        assert "h2" not in page.tags
        assert {"weight", "score: vote", "written by"} < set(page.texts)
        assert "; 1 candidate of 1 written answer; 1 prompt; the best first, returned ones with a ✓." in page.texts


def test_the_page_shows_any_text_as_text_and_loads_nothing(tmp_path):
    shown = [text.translate(PICTURES) for text in NASTY]
    for source in pages_of(strange(), tmp_path, title="Answers"):
        check_loads_nothing(source)
        page = AnswersPage(source)
        assert not {"script", "i", "u"} & set(page.tags)
        assert page.boxes == [*shown[:2], *shown[::-1], shown[1], shown[1], *shown[::-1]]
        assert not [c for c in source if c < " " and c not in "\t\n"]
        for text in shown:
            assert "".join(page.texts).count(text) >= len(NASTY)
    source, _ = pages_of(strange(), tmp_path, title="<u>@@rows@@</title>")
    page = AnswersPage(source)
    assert "<u>@@rows@@</title>" in page.texts
    assert "u" not in page.tags


def test_white_space_at_the_ends_of_a_text_can_be_seen(tmp_path):
    source, _ = pages_of(strange(["  a b\n", "a"], num_prompts=1), tmp_path)
    space, newline = '<b class="space"> </b>', '<b class="newline"></b>\n'
    assert f">{space}{space}a b{newline}<" in source


def test_pages_of_little(tmp_path):
    for answers in (
        Answers((), (), (), "vote", ()),
        Answers(((),), ("",), (), "vote", (None,)),
        Answers(((Answer("", b"", False, (), 1.0, {}, None, None, ()),),), ("",), (), "vote", (None,)),
    ):
        for source in pages_of(answers, tmp_path):
            check_loads_nothing(source)


def test_a_notebook_shows_the_first_prompts_of_many():
    source, height = page_in_notebook(strange(["a", "b"], num_prompts=50)._repr_html_())
    page = AnswersPage(source)
    assert "Answers: 20 of 50 prompts" in page.texts
    assert page.tags.count("section") == 20
    assert height > page_in_notebook(strange(["a", "b"], num_prompts=1)._repr_html_())[1]


def test_a_page_is_whole_or_not_there(record, tmp_path):
    with pytest.raises(ConfigurationError, match="not the name of a file"):
        record.to_html(tmp_path)
    assert list(tmp_path.iterdir()) == []
