"""Every field of OpenAI's, asked for with the real client: each text is that of a call of its own."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.serving.conftest import MESSAGES, alone, text_alone

openai = pytest.importorskip("openai")

pytestmark = pytest.mark.filterwarnings("ignore:the primary .* wrote the control token")


def content(answer):
    return [choice.message.content for choice in answer.choices]


def streamed(chunks, count=1):
    texts = [""] * count
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += (choice.delta.content if hasattr(choice, "delta") else choice.text) or ""
    return texts


def test_many_at_once_get_what_each_gets_alone(ask, ensemble):
    words = ["The cat", "A dog runs", "Once upon a time", "Water boils", "def add(a", "Größe", "The cat", "12 months"]
    asked = [[{"role": "user", "content": word}] for word in words]
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(lambda n: ask(asked[n], max_tokens=6 + n), range(len(asked))))
    for n, answer in enumerate(answers):
        assert content(answer) == [text_alone(ensemble, asked[n], max_new_tokens=6 + n)]


def test_a_seed_gives_the_same_text_whoever_else_asks(ask):
    def hot(seed):
        return content(ask(max_tokens=8, temperature=1.5, seed=seed))[0]

    first = [hot(seed) for seed in range(4)]
    assert len(set(first)) == 4
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(hot, [0, 1, 2, 3, 3, 2, 1, 0])) == [*first, *first[::-1]]


def test_n_gives_as_many_answers_and_the_first_is_that_of_one(ask):
    options = {"max_tokens": 8, "temperature": 1.5, "seed": 5}
    answers = content(ask(n=3, **options))
    assert len(set(answers)) == 3
    assert content(ask(**options)) == answers[:1]
    assert streamed(ask(n=3, stream=True, **options), 3) == answers
    counts = [ask(n=n, **options).usage.completion_tokens for n in (1, 3)]
    assert counts[0] < counts[1] <= 24


def test_n_without_sampling_gives_equal_answers(ask):
    first, second = content(ask(n=2, max_tokens=4))
    assert first == second


@pytest.mark.parametrize("number", [0, 3])
def test_logprobs_are_those_of_the_fused_law(ask, ensemble, number):
    ids, output = alone(ensemble, MESSAGES, max_new_tokens=6)
    (choice,) = ask(max_tokens=6, logprobs=True, top_logprobs=number).choices
    write = ensemble.member_views[0].encoder.token_bytes.write
    assert [bytes(token.bytes) for token in choice.logprobs.content] == [write([i]) for i in ids]
    for token, i, logits in zip(choice.logprobs.content, ids, output.logits, strict=True):
        law = logits[0].log_softmax(-1)
        assert token.logprob == pytest.approx(float(law[i]), abs=1e-4)
        assert len(token.top_logprobs) == number
        best = [one.logprob for one in token.top_logprobs]
        assert best == pytest.approx([max(-9999.0, value) for value in law.topk(number).values.tolist()], abs=1e-4)
    chunks = list(ask(max_tokens=6, logprobs=True, top_logprobs=number, stream=True))
    tokens = [token for chunk in chunks if chunk.choices[0].logprobs for token in chunk.choices[0].logprobs.content]
    assert [token.token for token in tokens] == [token.token for token in choice.logprobs.content]


def test_logprobs_of_completions(complete, ensemble):
    ids, output = alone(ensemble, "The cat", max_new_tokens=5)
    (choice,) = complete(max_tokens=5, logprobs=2).choices
    write = ensemble.member_views[0].encoder.token_bytes.write
    assert choice.logprobs.tokens == [write([i]).decode("utf-8", "replace") for i in ids if write([i])]
    law = output.logits[0][0].log_softmax(-1)
    assert choice.logprobs.token_logprobs[0] == pytest.approx(float(law[ids[0]]), abs=1e-4)
    assert max(choice.logprobs.top_logprobs[0].values()) == pytest.approx(float(law.max()), abs=1e-4)
    assert choice.logprobs.text_offset[0] == 0


def test_a_stop_string_is_cut_from_the_answer_streamed_or_not(ask, ensemble):
    whole = text_alone(ensemble, MESSAGES, max_new_tokens=16)
    stop = whole[4:7]
    expected = whole[: whole.index(stop)]
    assert content(ask(max_tokens=16, stop=stop)) == [expected]
    assert streamed(ask(max_tokens=16, stop=["never", stop], stream=True)) == [expected]
    choice = ask(max_tokens=16, stop=stop, logprobs=True).choices[0]
    assert choice.finish_reason == "stop"
    assert sum(len(token.bytes) for token in choice.logprobs.content) >= len(expected.encode())


def test_prompts_may_be_several_texts_or_ids(complete, ensemble):
    texts = ["The cat", "A dog runs"]
    ids = ensemble.tokenizer(texts)["input_ids"]
    expected = [text_alone(ensemble, text, max_new_tokens=6) for text in texts]
    for prompt, found in (texts, expected), (ids, expected), (ids[0], expected[:1]), (texts[1], expected[1:]):
        answer = complete(prompt, max_tokens=6)
        assert [choice.text for choice in answer.choices] == found
        assert [choice.index for choice in answer.choices] == list(range(len(found)))
    assert streamed(complete(texts, max_tokens=6, stream=True), 2) == expected
    assert complete(texts, max_tokens=6).usage.prompt_tokens == sum(map(len, ids))
    assert len(complete(texts, max_tokens=2, n=2, temperature=1).choices) == 4


@pytest.mark.parametrize("prompt", [[], [[]], ["a", 3], 7, [True]], ids=str)
def test_a_prompt_of_another_kind_is_refused(complete, prompt):
    with pytest.raises(openai.BadRequestError, match="`prompt` has to be"):
        complete(prompt)


def test_ids_that_the_primary_lacks_are_refused(complete):
    with pytest.raises(openai.BadRequestError, match="99999"):
        complete([5, 99999])


def test_a_stream_tells_its_usage_where_it_is_asked_to(ask, complete):
    for chunks in (
        list(ask(max_tokens=4, stream=True, stream_options={"include_usage": True})),
        list(complete(max_tokens=4, stream=True, stream_options={"include_usage": True})),
    ):
        assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        assert chunks[-1].choices == []
        assert chunks[-1].usage.completion_tokens == 4
    assert all(chunk.usage is None for chunk in ask(max_tokens=4, stream=True))


def test_a_text_that_ends_by_itself_says_stop(ask, ensemble):
    ids, _ = alone(ensemble, MESSAGES, max_new_tokens=4)
    config = json.dumps({"eos_token_id": ids[2], "max_new_tokens": 9})
    ids = ids[: ids.index(ids[2]) + 1]
    (choice,) = ask(extra_body={"generation_config": config}).choices
    assert choice.finish_reason == "stop"
    assert choice.message.content == ensemble.tokenizer.decode(ids, skip_special_tokens=True)


def test_a_logit_bias_and_a_penalty_are_a_requests_own(ask, complete, ensemble):
    best = alone(ensemble, MESSAGES, max_new_tokens=1)[0][0]
    biased = text_alone(ensemble, MESSAGES, max_new_tokens=4, sequence_bias={(best,): -100.0})
    penalty = text_alone(ensemble, MESSAGES, max_new_tokens=4, repetition_penalty=1.5)
    plain = text_alone(ensemble, MESSAGES, max_new_tokens=4)

    def asked(options):
        return content(ask(max_tokens=4, **options))[0]

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(asked, [{"logit_bias": {str(best): -100}}, {"frequency_penalty": 0.5}, {}]))
    assert found == [biased, penalty, plain]
    first = alone(ensemble, "The cat", max_new_tokens=1)[0][0]
    expected = text_alone(ensemble, "The cat", max_new_tokens=4, sequence_bias={(first,): -100.0})
    assert complete(max_tokens=4, logit_bias={str(first): -100}).choices[0].text == expected


def test_a_bias_raises_an_id_that_no_member_proposes(complete, ensemble):
    """UniTE proposes ten ids a member; the least likely one is none of them."""
    _, output = alone(ensemble, "The cat", max_new_tokens=1)
    assert output.logits[0][0, 70] == -torch.inf
    answer = complete(max_tokens=3, logit_bias={"70": 100})
    assert answer.choices[0].text == ensemble.tokenizer.decode([70] * 3)


REFUSED = {
    "presence_penalty": 0.5,
    "reasoning_effort": "low",
    "modalities": ["audio"],
    "store": True,
    "prediction": {"type": "content", "content": "x"},
    "tool_choice": "required",
    "web_search_options": {},
    "stream_options": {"include_usage": True},
    "n": 0,
    "top_logprobs": 3,
    "max_tokens": 100000,
    "stop": [""],
    "seed": 1.5,
    "temperature": -1,
    "top_p": 7,
    "logit_bias": {"999999999999": 1},
    "stream": "perhaps",
    "messages": [{"role": "user"}],
    "response_format": {"type": "xml"},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served_is_refused_by_name(ask, name):
    with pytest.raises(
        openai.BadRequestError, match=r"`messages\[0\]` has no `content`" if name == "messages" else name
    ):
        ask(**{"max_tokens": 2, name: REFUSED[name]})


def test_more_log_probabilities_than_there_may_be_are_refused(complete):
    with pytest.raises(openai.BadRequestError, match="`logprobs` has to be a whole number from 0 to 20"):
        complete(max_tokens=2, logprobs=99)


def test_what_says_nothing_is_taken(ask):
    options = {"presence_penalty": 0, "user": "me", "n": 1, "logprobs": False, "store": False, "stop": None}
    assert content(ask(max_tokens=3, **options)) == content(ask(max_tokens=3))
