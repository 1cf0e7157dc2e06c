"""The server, asked by the client that it is made for."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from hf_ensemble import ConfigurationError, EnsembleForCausalLM

openai = pytest.importorskip("openai")
uvicorn = pytest.importorskip("uvicorn")

# Random members write anything.
pytestmark = pytest.mark.filterwarnings("ignore:the primary .* wrote the control token")

MESSAGES = [{"role": "user", "content": "The cat"}]


@pytest.fixture(scope="module")
def ensemble(member_folder):
    return EnsembleForCausalLM.from_pretrained([member_folder / "chat-a", member_folder / "model-b"])


@pytest.fixture(scope="module")
def client(ensemble):
    from hf_ensemble.serving import build_app

    server = uvicorn.Server(uvicorn.Config(build_app(ensemble, "both"), port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client
    server.should_exit = True
    thread.join()


def expected(ensemble, messages=MESSAGES, **options):
    inputs = ensemble.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids = ensemble.generate(**inputs, do_sample=False, **options)
    return ensemble.tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def ask(client, **options):
    return client.chat.completions.create(model="both", messages=MESSAGES, **options)


def text_of(stream):
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream)


def whole_characters(text):
    """The stock stream does not write the bytes of a character that the text ends within."""
    return text.rstrip("\ufffd")


def test_the_ensemble_is_the_only_model(client):
    assert [model.id for model in client.models.list()] == ["both"]
    with pytest.raises(openai.NotFoundError, match="'other'"):
        client.chat.completions.create(model="other", messages=MESSAGES)


def test_an_answer_is_what_generate_writes(client, ensemble):
    answer = ask(client, max_tokens=8)
    assert answer.choices[0].message.content == expected(ensemble, max_new_tokens=8)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 8
    assert answer.model == "both"


def test_a_streamed_answer_is_the_same(client, ensemble):
    chunks = list(ask(client, max_tokens=8, stream=True))
    assert whole_characters(text_of(chunks)) == whole_characters(expected(ensemble, max_new_tokens=8))
    assert chunks[-1].choices[0].finish_reason == "length"
    assert sum(bool(chunk.choices[0].delta.content) for chunk in chunks) > 1


def test_stop_strings_end_an_answer_and_are_no_part_of_it(client, ensemble):
    whole = expected(ensemble, max_new_tokens=12)
    stop = next(character for character in whole[1:] if character.isalpha())
    answer = ask(client, max_tokens=12, stop=[stop])
    assert answer.choices[0].message.content == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    chunks = list(ask(client, max_tokens=12, stop=[stop, "zzz"], stream=True))
    assert text_of(chunks) == whole[: whole.index(stop)]
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_a_temperature_samples_and_a_seed_repeats(client, ensemble):
    hot = [ask(client, max_tokens=8, temperature=1.5, seed=seed).choices[0].message.content for seed in (1, 1, 2)]
    assert hot[0] == hot[1] != hot[2]
    assert ask(client, max_tokens=8, temperature=0).choices[0].message.content == expected(ensemble, max_new_tokens=8)


def test_two_requests_at_once_do_not_meet(client, ensemble):
    def content(words):
        messages = [{"role": "user", "content": words}]
        stream = client.chat.completions.create(model="both", messages=messages, max_tokens=8, stream=True)
        return text_of(stream)

    questions = ["The cat", "A dog runs"]
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(content, questions))
    for question, answer in zip(questions, answers, strict=True):
        alone = expected(ensemble, [{"role": "user", "content": question}], max_new_tokens=8)
        assert whole_characters(answer) == whole_characters(alone)


@pytest.mark.parametrize("stream", [False, True])
def test_what_an_ensemble_refuses_is_said_before_the_answer_begins(client, stream):
    with pytest.raises(openai.BadRequestError, match="guidance_scale.* cannot be used with an ensemble"):
        ask(client, stream=stream, extra_body={"generation_config": '{"guidance_scale": 2.0, "max_new_tokens": 4}'})
    assert ask(client, max_tokens=2).choices[0].message.content is not None


def test_bad_requests_are_answered_with_a_reason(client):
    with pytest.raises(openai.UnprocessableEntityError, match="nonsense"):
        ask(client, extra_body={"nonsense": 1})
    with pytest.raises(openai.BadRequestError, match="no 'text'"):
        client.chat.completions.create(model="both", messages=[{"role": "user", "content": [{"type": "text"}]}])
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        ask(client, max_tokens=0)


def test_a_failing_member_is_an_error_within_the_stream(client, ensemble, monkeypatch):
    from hf_ensemble import MemberError
    from hf_ensemble.decoding.running_batch import RunningBatch

    step, numbers = RunningBatch.step, iter(range(100))

    def breaks(self):
        if next(numbers) % 3 == 2:
            raise MemberError('member "x" gave\nNaN')
        step(self)

    monkeypatch.setattr(RunningBatch, "step", breaks)
    stream = ask(client, stream=True)
    assert next(iter(stream)).choices[0].delta.role == "assistant"
    with pytest.raises(openai.APIError, match='member "x" gave\nNaN'):
        list(stream)
    with pytest.raises(openai.InternalServerError, match="NaN"):
        ask(client)
    events = list(client.responses.create(model="both", input="The cat", stream=True))
    assert "member 'x' gave NaN" in str(events)


def test_other_endpoints(client, ensemble):
    response = client.responses.create(model="both", input="The cat", max_output_tokens=8)
    assert response.output_text == expected(ensemble, max_new_tokens=8)
    events = list(client.responses.create(model="both", input="The cat", max_output_tokens=8, stream=True))
    assert events[-1].type == "response.completed"
    inputs = ensemble.tokenizer("The cat", return_tensors="pt")
    ids = ensemble.generate(**inputs, max_new_tokens=8)[0, inputs["input_ids"].shape[1] :]
    completion = client.completions.create(model="both", prompt="The cat", max_tokens=8)
    assert completion.choices[0].text == ensemble.tokenizer.decode(ids, skip_special_tokens=True)


def test_the_model_outlives_a_reset(client):
    client.post("../reset", cast_to=object)
    assert ask(client, max_tokens=2).choices[0].message.content is not None


def test_an_address_in_use_is_an_error(ensemble):
    import socket

    from hf_ensemble.serving import serve

    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="Choose another"):
        serve(ensemble, "127.0.0.1", taken.getsockname()[1])


@pytest.mark.parametrize("port", [-1, 2**16])
def test_no_such_port_is_an_error(ensemble, port):
    from hf_ensemble.serving import serve

    with pytest.raises(ConfigurationError, match="from 0 to 65535"):
        serve(ensemble, "127.0.0.1", port)


def test_a_bias_may_be_a_whole_number(ensemble, client):
    inputs = ensemble.tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_tensors="pt")
    best = int(ensemble.generate(**inputs, max_new_tokens=1)[0, -1])
    biased = expected(ensemble, max_new_tokens=4, sequence_bias={(best,): -100.0})
    assert ask(client, max_tokens=4, logit_bias={str(best): -100}).choices[0].message.content == biased
    assert biased != expected(ensemble, max_new_tokens=4)
