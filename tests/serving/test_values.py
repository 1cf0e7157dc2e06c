"""Bug bank, J27: values of the wrong kind are refused with the field's name, before anything is computed."""

import re

import pytest

from hf_ensemble import ConfigurationError

pytest.importorskip("fastapi")
openai = pytest.importorskip("openai")

from hf_ensemble.serving import Limits  # noqa: E402
from hf_ensemble.serving.fields import read_fields, read_prompts, refuse_of_responses  # noqa: E402
from hf_ensemble.serving.values import read_logit_bias  # noqa: E402

MESSAGES = [{"role": "user", "content": "The cat"}]


def turn(content):
    return {"messages": [{"role": "user", "content": content}]}


OF_BOTH = [
    ({"temperature": "hot"}, "`temperature` has to be a number from 0 to 2, but is 'hot'"),
    ({"temperature": 1e300}, "`temperature` has"),
    ({"temperature": float("nan")}, "`temperature` has"),
    ({"temperature": True}, "`temperature` has"),
    ({"top_p": 1.5}, "`top_p` has to be a number from 0 to 1"),
    ({"frequency_penalty": -3}, "`frequency_penalty` has to be a number from -0.9 to 2"),
    ({"stream": "yes"}, "`stream` has to be true or false"),
    ({"generation_config": "{"}, "`generation_config` has to be an object as JSON text, but is '{'"),
    ({"generation_config": "[]"}, "`generation_config` has"),
    ({"generation_config": {"top_k": 3}}, "`generation_config` has"),
    ({"stream": True, "stream_options": "x"}, "`stream_options` has to be an object"),
    ({"n": 1.0}, "`n` has to be a whole number"),
    ({"stop": 7}, "`stop` has"),
    ({"stop": ["\ud800"]}, "text that is not Unicode"),
]
OF_CHAT = [
    ({"messages": "x"}, "`messages` has to be a list of turns"),
    ({"messages": [3]}, "`messages[0]` has to be an object, but is 3"),
    ({"messages": [{"role": "user"}]}, "`messages[0]` has no `content`"),
    (turn(3), "`content` has to be a text or a list of parts in `messages[0]`"),
    (turn([3]), "`messages[0].content[0]` has to be an object"),
    (turn([{"type": "text", "text": 3}]), "`text` has to be a text in `messages[0].content[0]`"),
    (turn([{"type": "text", "text": "a"}, {"type": "image_url"}]), "`messages[0].content[1].type='image_url'` is not"),
    ({"chat_template_kwargs": 3}, "`chat_template_kwargs` has to be an object"),
    ({"chat_template_kwargs": {"chat_template": "{{ 1/0 }}"}}, "`chat_template_kwargs.chat_template` is not"),
    ({"tools": [{"type": "web_search"}]}, "`tools[0].type='web_search'` is not"),
    ({"tools": [3]}, "`tools[0].type=3` is not"),
]
OF_RESPONSES = [
    ({"seed": 1.5}, "`seed` has to be a whole number"),
    ({"temperature": 3}, "`temperature` has"),
    ({"instructions": 3}, "`instructions` has to be a text"),
    ({"input": "\ud800 x"}, "text that is not Unicode"),
    ({"input": 3}, "`input` has to be a list of turns"),
    ({"input": [{"type": "input_image", "image_url": "x"}]}, "`input[0].type='input_image'` is not"),
    ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "`input[0].content[0].type='input_file'`"),
    ({"tools": [{"type": "web_search"}]}, "`tools[0].type='web_search'` is not"),
    ({"reasoning": {"effort": "low"}}, "`reasoning="),
    ({"parallel_tool_calls": False}, "`parallel_tool_calls=False` is not"),
]


def refuses(words):
    return pytest.raises(ConfigurationError, match=re.escape(words))


@pytest.mark.parametrize(("fields", "words"), [*OF_BOTH, *OF_CHAT], ids=ascii)
def test_chat_refuses_by_name(fields, words):
    with refuses(words):
        read_fields({"messages": MESSAGES, **fields}, True, Limits())


@pytest.mark.parametrize(("fields", "words"), [*OF_BOTH, ({"suffix": 3}, "`suffix` has to be a text")], ids=ascii)
def test_completions_refuse_by_name(fields, words):
    with refuses(words):
        read_fields({"prompt": "The cat", **fields}, False, Limits())


@pytest.mark.parametrize(("fields", "words"), OF_RESPONSES, ids=ascii)
def test_responses_refuse_by_name(fields, words):
    with refuses(words):
        refuse_of_responses({"input": "The cat", **fields}, Limits())


def test_what_clients_send_is_taken():
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {"messages": [*turn(parts)["messages"], call], "tools": tools, "temperature": 0, "top_p": 1, "stream": None}
    asked = read_fields({**body, "chat_template_kwargs": {"enable_thinking": False}}, True, Limits())
    assert asked.tools == tools
    for given in ("a", [{"type": "input_text", "text": "a"}], turn(parts)["messages"]):
        refuse_of_responses({"input": given, "tools": tools, "seed": -1, "temperature": 2}, Limits())


@pytest.mark.parametrize(
    ("bias", "words"),
    [
        ([], "`logit_bias` has to be an object"),
        ({"abc": 1}, "from 0 to 9, but names 'abc'"),
        ({"-1": 1}, "names '-1'"),
        ({"10": 1}, "names '10'"),
        ({"²": 1}, "names '²'"),
        ({"3": True}, "`logit_bias[3]` has"),
        ({"9" * 5000: 1}, "names '999"),
        ({"3": "x"}, "`logit_bias[3]` has to be a number from -100 to 100"),
        ({"3": float("inf")}, "`logit_bias[3]` has"),
    ],
    ids=str,
)
def test_biases_are_refused_by_name(bias, words):
    with refuses(words):
        read_logit_bias({"logit_bias": bias}, 10)


def test_biases_are_numbers_by_id():
    assert read_logit_bias({"logit_bias": {"3": 2, "9": -0.5}}, 10) == {(3,): 2.0, (9,): -0.5}
    assert read_logit_bias({"logit_bias": {}}, 10) == read_logit_bias({"logit_bias": None}, 10) == {}


def test_ids_beyond_any_vocabulary_are_refused_as_ids():
    with refuses("`prompt` has to be"):
        read_prompts([[5], [10**20]], list)


def test_clients_are_told(ask, ensemble):
    size = ensemble.member_views[0].vocab_size
    with pytest.raises(openai.BadRequestError, match=f"`logit_bias` has to name ids from 0 to {size - 1}"):
        ask(logit_bias={str(size): 1})
    with pytest.raises(openai.BadRequestError, match="`num_return_sequences` is not supported"):
        ask(extra_body={"generation_config": '{"num_return_sequences": 2, "do_sample": true}'})
    assert ask(max_tokens=2, logit_bias={}).usage.completion_tokens == 2
