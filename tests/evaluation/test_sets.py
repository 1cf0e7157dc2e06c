"""Sets of every form are read, and answers marked."""

import json

import pytest

from hf_ensemble import ConfigurationError
from hf_ensemble.evaluation import normalize_answer, read_set


@pytest.mark.parametrize(
    ("answer", "normalized"),
    [
        (" The Sunset  Boulevard.\n", "sunset boulevard"),
        ("Sir Henry Campbell-Bannerman", "sir henry campbell bannerman"),
        ("an Apple_Pie, the‘best’", "apple pie best"),
        ("Athens", "athens"),
        ("U.S.", "u s"),
        ("a", ""),
    ],
)
def test_answers_are_normalized(answer, normalized):
    assert normalize_answer(answer) == normalized


def test_questions_are_right_up_to_the_end_of_the_line():
    (item,) = (own := read_set([{"question": "Who?", "answer": ["Exile", "An exile"]}])).items
    assert own.kind == "questions"
    assert item.prompt == "Question: Who?\nAnswer:"
    assert item.continuations == (" Exile",)
    assert own.is_right(" the exile.\nQuestion: Whose?", item)
    assert not own.is_right(" Exiles", item)
    assert not own.is_right("\nExile", item)


def test_choices_and_texts():
    record = {"question": "Which?", "A": "é", "B": "dry palms", "answer": "B"}
    own = read_set([record])
    assert own.kind == "choices"
    assert own.items[0][:3] == ("Question: Which?\nAnswer:", (" é", " dry palms"), 1)
    assert own.items[0].lengths == (2, 9)
    own = read_set([{"text": "Once upon"}, {"text": " a time", "prompt": "Once upon"}])
    assert own.kind == "texts"
    assert [item[:2] for item in own.items] == [("", ("Once upon",)), ("Once upon", (" a time",))]


def test_prompts_that_stand_as_they_are():
    own = read_set([{"prompt": "1 + 1 =", "reference": "2"}, {"prompt": "Sum: ", "answers": ["3", "three"]}])
    assert [item[:2] for item in own.items] == [("1 + 1 =", (" 2",)), ("Sum: ", ("3",))]
    assert own.items[1].accepted == ("3", "three")


def test_files_with_worked_examples_and_a_limit(tmp_path):
    data, head = tmp_path / "trivia.jsonl", tmp_path / "head.txt"
    records = [{"question": f"one\u2028{n}?", "answer": "1"} for n in range(3)]
    data.write_text("\n\n".join(json.dumps(record, ensure_ascii=False) for record in records), "utf-8")
    head.write_text("Question: zero?\nAnswer: 0\n\n", "utf-8")
    own = read_set(data, worked_examples=head, limit=2)
    assert own.name == "trivia"
    assert len(own.items) == 2
    assert own.items[1].prompt == "Question: zero?\nAnswer: 0\n\nQuestion: one\u20281?\nAnswer:"


def test_reasoned_answers_are_marked_by_their_last_number():
    records = [{"question": "How many?", "answer": "1 + 1199 = 1,200"}]
    own = read_set(records, cue="\nThink.\n", marking="number")
    assert own.items[0].prompt.endswith("\nThink.\n")
    assert own.items[0].continuations == ("1 + 1199 = 1,200",)
    assert own.is_right("It is 7, no, 1200.00.\n\nQuestion: 8?", own.items[0])
    assert not own.is_right("1200, no, 7", own.items[0])
    assert not own.is_right("none", own.items[0])


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([], "the set 'examples' is empty"),
        ([{"question": "Who?"}], "example 1 of 'examples' has no known form"),
        ([{"question": "Who?", "answer": []}], "no known form"),
        ([{"question": "Who?", "A": "x", "B": "y", "answer": "C"}], "no known form"),
        ([{"question": "Who?", "A": "x", "answer": "A"}], "no known form"),
        ([{"text": " "}], "no known form"),
        (["Who?"], "no known form"),
        (
            [{"text": "x"}, {"question": "Who?", "answer": "I"}],
            "example 2 .* is a questions example, but the ones before are of kind",
        ),
    ],
)
def test_bad_examples_are_named(records, message):
    with pytest.raises(ConfigurationError, match=message):
        read_set(records)


def test_damaged_examples_are_left_out_only_if_asked_and_counted():
    good = {"question": "Who?", "A": "x", "B": "y", "answer": "B"}
    records = [good, {"question": "What?", "A": "", "B": "", "answer": "2"}, good | {"answer": "A"}, good]
    with pytest.raises(ConfigurationError, match="example 2 .* has no known form.*`skip_damaged=True`"):
        read_set(records)
    with pytest.warns(UserWarning, match="1 examples of 'examples' have no known form and are skipped.*example 2"):
        own = read_set(records, skip_damaged=True, limit=2)
    assert [item.right for item in own.items] == [1, 0]


def test_bad_files_are_named(tmp_path):
    with pytest.raises(ConfigurationError, match="none.jsonl cannot be read"):
        read_set(tmp_path / "none.jsonl")
    (tmp_path / "bad.jsonl").write_text('{"text": "x"}\n{"text"', "utf-8")
    with pytest.raises(ConfigurationError, match="line 2 of .*bad.jsonl is not JSON"):
        read_set(tmp_path / "bad.jsonl")
    with pytest.raises(ConfigurationError, match="answer without a number"):
        read_set([{"question": "Who?", "answer": "I"}], marking="number")
    with pytest.raises(ConfigurationError, match="`limit` has to be a positive integer, but is 0"):
        read_set([{"text": "x"}], limit=0)
    with pytest.raises(ConfigurationError, match="`marking` has to be"):
        read_set([{"text": "x"}], marking="words")


def test_an_empty_choice_is_none():
    """ARC-Challenge has a few questions with three choices among those with four."""
    record = {"question": "Which?", "A": "x", "B": "y", "C": "z", "D": "", "answer": "C"}
    item = read_set([record]).items[0]
    assert (item.continuations, item.right) == ((" x", " y", " z"), 2)
    with pytest.raises(ConfigurationError, match="no known form"):
        read_set([{**record, "answer": "D"}])


def test_nothing_is_never_the_right_answer():
    """TriviaQA accepts `+-*/`, of which normalisation leaves nothing."""
    own = read_set([{"question": "What?", "answer": ["Arithmetic", "+-*/"]}])
    assert not any(own.is_right(text, own.items[0]) for text in ("", " \n", "the", "..."))
    assert all(own.is_right(text, own.items[0]) for text in (" +-*/\n", "arithmetic."))


@pytest.mark.parametrize(
    ("response", "reference", "is_right"),
    [
        ("so 0.5", ".5", True),
        ("5", ".5", False),
        ("it is −3 degrees", "-3", True),
        ("1,200.0 in all", "1200", True),
        ("9" * 400, "8" * 400, False),
        ("none", "0", False),
    ],
)
def test_numbers_are_compared_as_such(response, reference, is_right):
    questions = read_set([{"prompt": "?", "reference": reference}], marking="number")
    assert questions.is_right(response, questions.items[0]) == is_right


def test_an_answer_of_nothing_but_an_article_is_compared_in_any_case():
    questions = read_set([{"prompt": "?", "reference": "The"}])
    assert questions.is_right(" the", questions.items[0])
