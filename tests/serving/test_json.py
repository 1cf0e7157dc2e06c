"""Answers that are JSON, by a grammar over the fused law."""

import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.serving.conftest import MESSAGES, client_of, served, tiny_ensemble

openai = pytest.importorskip("openai")

pytestmark = pytest.mark.filterwarnings("ignore:the primary .* wrote the control token")

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "kind": {"enum": ["cat", "dog"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA, "strict": True}}


def fits(text):
    found = json.loads(text)
    return list(found) == ["name", "kind"] and len(found["name"]) <= 4 and found["kind"] in ("cat", "dog")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["unite", "gac"])
def test_a_schema_is_kept_to_beside_answers_without_one(method):
    pytest.importorskip("xgrammar")
    with served(tiny_ensemble(method=method)) as (_, address), client_of(address) as client:

        def ask(options):
            return client.chat.completions.create(model="both", messages=MESSAGES, **options).choices[0]

        plain = ask({"max_tokens": 6})
        bounded = [
            {"response_format": FORMAT, "max_tokens": 60, "temperature": 1.0, "seed": seed} for seed in range(4)
        ]
        cut = {"response_format": FORMAT, "max_tokens": 3}
        with ThreadPoolExecutor(6) as pool:
            *answers, short, other = pool.map(ask, [*bounded, cut, {"max_tokens": 6}])
        assert [answer.finish_reason for answer in answers] == ["stop"] * 4
        assert all(fits(answer.message.content) for answer in answers)
        assert [ask(options).message.content for options in bounded] == [a.message.content for a in answers]
        assert short.finish_reason == "length"
        assert other.message.content == plain.message.content


def test_an_object_is_json(ask):
    pytest.importorskip("xgrammar")
    choice = ask(response_format={"type": "json_object"}, max_tokens=40).choices[0]
    assert re.match(r"\s*\{", choice.message.content)
    if choice.finish_reason == "stop":
        json.loads(choice.message.content)
    stream = ask(response_format={"type": "json_object"}, max_tokens=40, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == choice.message.content


def test_text_is_any_text(ask):
    plain = ask(max_tokens=4).choices[0].message.content
    assert ask(response_format={"type": "text"}, max_tokens=4).choices[0].message.content == plain


@pytest.mark.parametrize(
    ("response_format", "words"),
    [
        ({"type": "json_schema"}, "json_schema.schema"),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no such type"}}},
            "cannot be compiled",
        ),
        ({"type": "grammar"}, "'grammar'"),
    ],
)
def test_a_format_that_is_none_is_refused(ask, response_format, words):
    pytest.importorskip("xgrammar")
    with pytest.raises(openai.BadRequestError, match=words):
        ask(response_format=response_format)


@pytest.mark.slow
def test_without_the_package_it_is_said_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    found = refusal(tiny_ensemble())
    assert 'pip install "xgrammar>=0.2.8"' in found


def test_spans_refuse_it_with_the_reason():
    pytest.importorskip("xgrammar")
    assert "sweetspan" in refusal(tiny_ensemble(method="sweetspan"))


def refusal(ensemble):
    with (
        served(ensemble) as (_, address),
        client_of(address) as client,
        pytest.raises(openai.BadRequestError) as caught,
    ):
        client.chat.completions.create(model="both", messages=MESSAGES, response_format={"type": "json_object"})
    return str(caught.value)
