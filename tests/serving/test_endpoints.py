"""What every endpoint owes its clients, streamed or not: the same text, the same ends, the same refusals."""

import itertools
from dataclasses import dataclass

import pytest

from hf_ensemble import EnsembleForCausalLM
from tests import tiny
from tests.serving.conftest import MESSAGES, alone, client_of, served, text_alone

openai = pytest.importorskip("openai")

pytestmark = [
    pytest.mark.filterwarnings("ignore:the primary .* wrote the control token"),
    pytest.mark.filterwarnings("ignore:row .* ends after"),
]

ENDPOINTS = ("chat", "completions", "responses")


def each_way(*slow_ways):
    """Every endpoint, streamed or not; some of them only where slow tests run."""
    ways = [
        pytest.param(
            name, stream, id=f"{name}{', streamed' * stream}", marks=[pytest.mark.slow] * (stream in slow_ways)
        )
        for name, stream in itertools.product(ENDPOINTS, (False, True))
    ]
    return pytest.mark.parametrize(("endpoint", "stream"), ways)


@dataclass
class Reply:
    """An answer, however it came."""

    texts: list[str]
    ends: list[str]
    num_tokens: int
    log_probs: object = None


def ask(client, endpoint, stream, words="The cat", most=6, model="both", **options):
    """Ask an endpoint for an answer to a text, a conversation of one turn but for completions."""
    if endpoint == "responses":
        return of_response(
            client.responses.create(model=model, input=words, max_output_tokens=most, stream=stream, **options), stream
        )
    if stream:
        options["stream_options"] = {"include_usage": True}
    if endpoint == "chat":
        messages = [{"role": "user", "content": words}]
        made = client.chat.completions.create(
            model=model, messages=messages, max_completion_tokens=most, stream=stream, **options
        )
    else:
        made = client.completions.create(model=model, prompt=words, max_tokens=most, stream=stream, **options)
    return of_chunks(list(made) if stream else [made])


def of_response(made, stream):
    events = list(made) if stream else []
    last = events[-1].response if stream else made
    if stream:
        pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(pieces) == last.output_text
        assert len(pieces) > 1
    return Reply([last.output_text], [last.status], last.usage.output_tokens)


def of_chunks(chunks):
    texts, ends, log_probs, num_tokens = {}, {}, {}, None
    for chunk in chunks:
        num_tokens = chunk.usage.completion_tokens if chunk.usage else num_tokens
        for choice in chunk.choices:
            said = getattr(choice, "delta", None) or getattr(choice, "message", None)
            texts[choice.index] = texts.get(choice.index, "") + ((said.content if said else choice.text) or "")
            ends[choice.index] = choice.finish_reason
            if choice.logprobs:
                found = log_probs.setdefault(choice.index, [])
                found += choice.logprobs.content if said else choice.logprobs.token_logprobs
    return Reply([texts[n] for n in sorted(texts)], [ends[n] for n in sorted(ends)], num_tokens, log_probs)


def prompt_of(endpoint):
    return "The cat" if endpoint == "completions" else MESSAGES


@each_way()
def test_an_answer_is_that_of_generate_and_its_budget_cuts_it(client, ensemble, endpoint, stream):
    reply = ask(client, endpoint, stream)
    assert reply.texts == [text_alone(ensemble, prompt_of(endpoint), max_new_tokens=6)]
    # The formats of responses are those of the stock server, which has one word for all ends.
    assert reply.ends == ["completed" if endpoint == "responses" else "length"]
    assert reply.num_tokens == 6


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_seed_gives_the_same_text_streamed_or_not(client, endpoint):
    def hot(stream, seed):
        seeded = {"extra_body": {"seed": seed}} if endpoint == "responses" else {"seed": seed}
        return ask(client, endpoint, stream, temperature=1.5, **seeded).texts

    assert hot(False, 1) == hot(True, 1) != hot(True, 2)


@pytest.mark.parametrize("endpoint", ENDPOINTS[:2])
def test_several_answers_are_the_same_streamed_or_not(client, endpoint):
    whole, streamed = (ask(client, endpoint, stream, n=3, temperature=1.5, seed=4) for stream in (False, True))
    assert whole == streamed
    assert len(set(whole.texts)) == 3
    assert 6 < whole.num_tokens <= 18


@pytest.mark.parametrize("endpoint", ENDPOINTS[:2])
def test_log_probabilities_are_the_same_streamed_or_not(client, ensemble, endpoint):
    options = {"logprobs": True, "top_logprobs": 2} if endpoint == "chat" else {"logprobs": 2}
    whole, streamed = (ask(client, endpoint, stream, **options) for stream in (False, True))
    assert whole == streamed
    ids, output = alone(ensemble, prompt_of(endpoint), max_new_tokens=6)
    law = output.logits[0][0].log_softmax(-1)
    first = whole.log_probs[0][0]
    assert getattr(first, "logprob", first) == pytest.approx(float(law[ids[0]]), abs=1e-4)


@pytest.mark.parametrize("endpoint", ENDPOINTS[:2])
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_an_answer(client, ensemble, endpoint, stream):
    whole = text_alone(ensemble, prompt_of(endpoint), max_new_tokens=16)
    stop = whole[4:6]
    reply = ask(client, endpoint, stream, most=16, stop=["never", stop])
    assert reply.texts == [whole[: whole.index(stop)]]
    assert reply.ends == ["stop"]


@each_way()
def test_another_model_is_a_404(client, endpoint, stream):
    with pytest.raises(
        openai.NotFoundError, match="'other' does not exist here. This server has 'both' only"
    ) as caught:
        ask(client, endpoint, stream, model="other")
    assert caught.value.code == "model_not_found"


@pytest.fixture(scope="module")
def short_client():
    """Asks an ensemble whose assistant has 48 positions."""
    tokenizers = [tiny.smol_like(), tiny.smol_like()]
    tokenizers[0].chat_template = "{% for message in messages %}<{{ message['content'] }}>{% endfor %}"
    models = [tiny.tiny_llama(tokenizers[0], seed=1), tiny.tiny_gpt2(tokenizers[1], n_positions=48, seed=2)]
    with served(EnsembleForCausalLM.from_members(models, tokenizers)) as (_, address), client_of(address) as client:
        yield client


@each_way(True)
def test_a_prompt_that_is_too_long_is_a_400_with_the_limit(short_client, endpoint, stream):
    with pytest.raises(openai.BadRequestError, match="positions for 48 ids"):
        ask(short_client, endpoint, stream, words="x" * 60, most=2)
    # Then the same server answers.
    assert ask(short_client, endpoint, stream, most=2).num_tokens == 2


def test_a_conversation_and_a_plain_prompt_with_the_same_ids_are_told_apart(monkeypatch):
    """Also if one endpoint is asked after the other."""
    tokenizers = [tiny.smol_like(), tiny.smol_like()]
    tokenizers[0].chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    models = [tiny.tiny_llama(tokenizer, num_hidden_layers=1) for tokenizer in tokenizers]
    ensemble, seen = EnsembleForCausalLM.from_members(models, tokenizers), []
    assistant = ensemble.member_views[1]
    read = assistant.read
    monkeypatch.setattr(assistant, "read", lambda prompt, resync: (seen.append(prompt), read(prompt, resync))[1])
    with served(ensemble) as (_, address), client_of(address) as client:
        for endpoint in (*ENDPOINTS, *reversed(ENDPOINTS)):
            seen.clear()
            ask(client, endpoint, False, words="Hi", most=1)
            assert {prompt.conversation is None for prompt in seen} == {endpoint == "completions"}


NOT_SERVED = {
    "chat": [
        {"presence_penalty": 0.5},
        {"reasoning_effort": "low"},
        {"tool_choice": "required"},
        {"extra_body": {"audio": {"voice": "x"}}},
    ],
    "completions": [{"echo": True}, {"best_of": 3}, {"presence_penalty": 0.5}],
    "responses": [
        {"background": True},
        {"previous_response_id": "r"},
        {"truncation": "auto"},
        {"top_logprobs": 2},
        {"include": ["message.output_text.logprobs"]},
        {"text": {"format": {"type": "json_object"}}},
        {"max_tool_calls": 2},
    ],
}


@each_way(True)
def test_what_is_not_served_is_a_400_that_names_it(client, endpoint, stream):
    for options in NOT_SERVED[endpoint]:
        (name,) = options.get("extra_body", options)
        with pytest.raises(openai.BadRequestError, match=f"`{name}=.* is not supported"):
            ask(client, endpoint, stream, **options)


@each_way(True)
def test_what_openai_does_not_have_is_a_422(client, endpoint, stream):
    with pytest.raises(openai.UnprocessableEntityError, match="nonsense"):
        ask(client, endpoint, stream, extra_body={"nonsense": 1})


@each_way(True)
@pytest.mark.parametrize("most", [0, 100_000])
def test_a_budget_that_is_none_or_too_large_is_a_400(client, endpoint, stream, most):
    with pytest.raises(openai.BadRequestError, match="from 1 to 4096"):
        ask(client, endpoint, stream, most=most)
