"""Other clients than `openai`: `curl`, LangChain with a server, and LangChain without one."""

import json
import shutil
import subprocess

import pytest
from transformers import pipeline

from tests.serving.conftest import MESSAGES, served, text_alone, tiny_ensemble

pytestmark = [
    pytest.mark.filterwarnings("ignore:the primary .* wrote the control token"),
    # Of libraries between.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::PendingDeprecationWarning"),
]


@pytest.fixture(scope="module")
def address(ensemble):
    with served(ensemble) as (_, address):
        yield address


@pytest.fixture
def curl(address):
    """Asks with `curl`; gives the status and the body."""
    if shutil.which("curl") is None:
        pytest.skip("there is no curl")

    def curl(path, body, *options):
        command = ["curl", "--silent", "--no-buffer", "--noproxy", "*", "--write-out", "\n%{http_code}", *options]
        command += ["--header", "Content-Type: application/json", "--data", json.dumps(body), address + path]
        done = subprocess.run(command, capture_output=True, check=True, timeout=60)
        text, _, status = done.stdout.decode().rpartition("\n")
        return int(status), text

    return curl


def test_curl_gets_whole_answers_and_streams(curl, ensemble):
    expected = text_alone(ensemble, "The cat", max_new_tokens=6)
    body = {"model": "both", "prompt": "The cat", "max_tokens": 6}
    status, text = curl("/v1/completions", body)
    assert status == 200
    assert json.loads(text)["choices"][0]["text"] == expected
    status, text = curl("/v1/completions", {**body, "stream": True})
    assert status == 200
    *events, last = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert last == "[DONE]"
    assert "".join(json.loads(one)["choices"][0]["text"] for one in events) == expected
    status, text = curl("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 6})
    assert status == 200
    assert json.loads(text)["choices"][0]["message"]["content"] == text_alone(ensemble, MESSAGES, max_new_tokens=6)


@pytest.mark.parametrize("stream", [False, True])
def test_curl_gets_errors_as_errors(curl, stream):
    body = {"messages": MESSAGES, "max_tokens": 2, "stream": stream}
    for more, expected, words in (
        ({"model": "other"}, 404, "'other' does not exist"),
        ({"presence_penalty": 1}, 400, "presence_penalty"),
        ({"nonsense": 1}, 422, "nonsense"),
    ):
        status, text = curl("/v1/chat/completions", {**body, **more})
        assert status == expected
        assert words in json.loads(text)["error"]["message"]


@pytest.fixture(scope="module")
def chat(address):
    """LangChain's client of OpenAI's API."""
    model = pytest.importorskip("langchain_openai").ChatOpenAI
    return model(base_url=f"{address}/v1", api_key="none", model="both", max_tokens=6, max_retries=0)


def test_langchain_gets_the_text_of_generate(chat, ensemble):
    expected = text_alone(ensemble, MESSAGES, max_new_tokens=6)
    answer = chat.invoke("The cat")
    assert answer.content == expected
    assert answer.response_metadata["finish_reason"] == "length"
    assert answer.usage_metadata["output_tokens"] == 6
    pieces = [piece.content for piece in chat.stream("The cat")]
    assert "".join(pieces) == expected
    assert len(pieces) > 2
    assert [one.content for one in chat.batch(["The cat", "The cat"])] == [expected] * 2


def test_langchain_gets_options_and_log_probabilities(chat, ensemble):
    whole = text_alone(ensemble, MESSAGES, max_new_tokens=6)
    stop = whole[2:4]
    assert chat.invoke("The cat", stop=[stop]).content == whole[: whole.index(stop)]
    hot = [chat.bind(temperature=1.5, seed=seed).invoke("The cat").content for seed in (1, 1, 2)]
    assert hot[0] == hot[1] != hot[2]
    found = chat.bind(logprobs=True, top_logprobs=2).invoke("The cat").response_metadata["logprobs"]["content"]
    assert [len(token["top_logprobs"]) for token in found] == [2] * len(found)


def test_langchain_gets_json_by_a_schema(chat):
    pytest.importorskip("xgrammar")
    schema = {
        "title": "pet",
        "description": "a pet",
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 4}, "kind": {"enum": ["cat", "dog"]}},
        "required": ["name", "kind"],
        "additionalProperties": False,
    }
    found = chat.model_copy(update={"max_tokens": 60}).with_structured_output(schema, method="json_schema")
    answer = found.invoke("The cat")
    assert set(answer) == {"name", "kind"}
    assert answer["kind"] in ("cat", "dog")


@pytest.mark.parametrize("method", ["unite", "gac"])
def test_langchain_takes_a_pipeline_of_an_ensemble(method):
    """J23: it reads the ensemble's config, and where it was loaded from."""
    langchain = pytest.importorskip("langchain_huggingface")
    ensemble = tiny_ensemble(method=method)
    options = {"max_new_tokens": 6, "do_sample": False, "return_full_text": False}
    made = pipeline("text-generation", model=ensemble, tokenizer=ensemble.tokenizer, **options)
    model = langchain.HuggingFacePipeline(pipeline=made)
    assert model.invoke("The cat") == text_alone(ensemble, "The cat", max_new_tokens=6)
    assert "".join(model.stream("The cat")) == text_alone(ensemble, "The cat", max_new_tokens=6)
    chat = langchain.ChatHuggingFace(llm=model, tokenizer=ensemble.tokenizer)
    assert chat.invoke("The cat").content == text_alone(ensemble, MESSAGES, max_new_tokens=6)
