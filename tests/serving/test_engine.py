"""The server as a service: limits, keys, who has gone, metrics, and other ways of deciding."""

import copy
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hf_ensemble import ConfigurationError
from tests.serving.conftest import MESSAGES, alone, client_of, inputs_of, served, text_alone, tiny_ensemble

openai = pytest.importorskip("openai")

from hf_ensemble.decoding.running_batch import RunningBatch  # noqa: E402
from hf_ensemble.serving import Limits, build_app  # noqa: E402
from hf_ensemble.serving.engine import Engine, Job  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:the primary .* wrote the control token")


def ask(client, messages=MESSAGES, **options):
    return client.chat.completions.create(model="both", messages=messages, **options)


@pytest.fixture
def slowly(monkeypatch):
    """Let every step take a while; gives the sizes of the batches."""
    step, sizes = RunningBatch.step, []

    def slow(self):
        sizes.append(len(self.rows))
        time.sleep(0.05)
        step(self)

    monkeypatch.setattr(RunningBatch, "step", slow)
    return sizes


def get(address, path, **headers):
    request = urllib.request.Request(address + path, headers=headers)
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.read().decode()


def post(address, path, body, **headers):
    request = urllib.request.Request(
        address + path, data=body, headers={"Content-Type": "application/json", **headers}
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode(), answer.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), error.headers


def until(is_so, seconds=20):
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.slow
def test_a_request_joins_those_that_run_and_a_full_queue_refuses(ensemble, slowly):
    with served(ensemble, limits=Limits(max_batch=2, max_waiting=1)) as (app, address), client_of(address) as client:
        engine = app.state.engine
        with ThreadPoolExecutor(3) as pool:
            running = [pool.submit(ask, client, max_tokens=30) for _ in range(2)]
            until(lambda: 2 in slowly)
            waiting = pool.submit(ask, client, max_tokens=2)
            until(lambda: engine.num_waiting == 1)
            with pytest.raises(openai.InternalServerError, match="are waiting already") as caught:
                ask(client, max_tokens=2)
            assert caught.value.status_code == 503
            assert int(caught.value.response.headers["retry-after"]) >= 1
            texts = [job.result().choices[0].message.content for job in running]
            assert texts == [text_alone(ensemble, MESSAGES, max_new_tokens=30)] * 2
            assert waiting.result().usage.completion_tokens == 2
        assert max(slowly) == 2
        assert ask(client, max_tokens=2).usage.completion_tokens == 2


LONG = {
    "chat/completions": {"messages": MESSAGES, "max_tokens": 2000},
    "responses": {"input": "The cat", "max_output_tokens": 2000},
}


@pytest.mark.parametrize(
    ("endpoint", "stream"),
    [
        ("chat/completions", False),
        pytest.param("chat/completions", True, marks=pytest.mark.slow),
        pytest.param("responses", False, marks=pytest.mark.slow),
        pytest.param("responses", True, marks=pytest.mark.slow),
    ],
)
def test_a_client_that_goes_away_frees_its_place(ensemble, slowly, endpoint, stream):
    with served(ensemble) as (app, address), client_of(address) as client:
        body = json.dumps({"model": "both", "stream": stream, **LONG[endpoint]})
        connection = http.client.HTTPConnection(address.removeprefix("http://"))
        connection.request("POST", f"/v1/{endpoint}", body, {"Content-Type": "application/json"})
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(ask, client, max_tokens=40)
            until(lambda: 2 in slowly)
            connection.sock.close()
            count = len(slowly)
            until(lambda: slowly[-1] == 1)
            # Of 50 ms each: how long it takes until the server knows. Then it is the next step.
            assert len(slowly) - count < 25
            assert other.result().choices[0].message.content == text_alone(ensemble, MESSAGES, max_new_tokens=40)
        assert app.state.engine.metrics.value("texts_given_up_total") == 1
        until(lambda: app.state.engine.num_running == 0)


def test_a_text_that_is_given_up_writes_nothing_more_and_the_next_one_takes_its_place(ensemble, monkeypatch):
    sizes, told, jobs, step = [], {name: [] for name in "abc"}, {}, RunningBatch.step

    def counted(self):
        sizes.append(len(self.rows))
        step(self)

    def job(name, count):
        def tell(written):
            told[name].append((len(sizes), written))
            if name == "a" and len(told["a"]) == 3:
                jobs["a"].give_up()

        config = copy.deepcopy(ensemble.generation_config)
        config.update(do_sample=False, max_new_tokens=count)
        return Job(dict(inputs_of(ensemble, "The cat")), config, 0, tell)

    monkeypatch.setattr(RunningBatch, "step", counted)
    engine = Engine(ensemble, Limits(max_batch=2))
    jobs |= {"a": job("a", 40), "b": job("b", 9), "c": job("c", 2)}
    engine.submit(list(jobs.values()))
    until(lambda: told["b"] and told["b"][-1][1].ends)
    engine.close()
    assert [at for at, _ in told["a"]] == [1, 2, 3]
    assert [at for at, _ in told["c"]] == [4, 5]
    assert [written.ends for _, written in told["c"]] == [False, True]
    assert sizes == [2, 2, 2, 2, 2, 1, 1, 1, 1]
    expected = alone(ensemble, "The cat", max_new_tokens=9)[0]
    assert [written.id for _, written in told["b"]] == expected
    assert [written.id for _, written in told["a"]] == expected[:3]


class Panic(BaseException):
    """What code in Rust raises that panics."""


def test_whatever_a_step_raises_the_next_request_is_answered(ensemble, monkeypatch):
    step, errors = RunningBatch.step, [Panic("a regular expression"), torch.OutOfMemoryError("planted")]

    def fail(self):
        if errors:
            raise errors.pop(0)
        step(self)

    monkeypatch.setattr(RunningBatch, "step", fail)
    with served(ensemble) as (_, address), client_of(address) as client:
        for message in ("Panic: a regular expression", "OutOfMemoryError: planted"):
            with pytest.raises(openai.InternalServerError, match=f"MemberError: a step failed: {message}"):
                ask(client, max_tokens=3)
        assert ask(client, max_tokens=3).choices[0].message.content == text_alone(ensemble, MESSAGES, max_new_tokens=3)


@pytest.mark.slow
def test_a_request_that_takes_too_long_is_ended(ensemble, slowly):
    limits = Limits(max_seconds=0.4)
    with served(ensemble, limits=limits) as (_, address), client_of(address) as client:
        with pytest.raises(openai.InternalServerError, match="took longer than .* limit of 0.4 s") as caught:
            ask(client, max_tokens=500)
        assert caught.value.status_code == 504
        stream = ask(client, max_tokens=500, stream=True)
        with pytest.raises(openai.APIError, match="took longer than .* limit of 0.4 s"):
            list(stream)
        assert ask(client, max_tokens=1).usage.completion_tokens == 1


def test_bodies_and_numbers_have_bounds(ensemble):
    limits = Limits(max_body_bytes=2000, max_new_tokens=7)
    with served(ensemble, limits=limits) as (_, address), client_of(address) as client:
        assert post(address, "/v1/completions", b" " * 2001)[0] == 413
        # A large one too is answered, not cut off while it is sent.
        status, text, _ = post(address, "/v1/completions", b" " * 3_000_000)
        assert (status, json.loads(text)["error"]["code"]) == (413, "request_too_large")
        chunked = (b" " * 1000 for _ in range(3))
        assert post(address, "/v1/completions", chunked)[0] == 413
        with pytest.raises(openai.BadRequestError, match="from 1 to 7"):
            ask(client, max_tokens=8)
        with pytest.raises(openai.BadRequestError, match="at most 7"):
            ask(client, extra_body={"generation_config": '{"max_new_tokens": 8}'})
        assert ask(client).usage.completion_tokens <= 7
        for body in (b"{", b"[]", b'{"model": "both"}', b'{"messages": 3}'):
            status, text, _ = post(address, "/v1/chat/completions", body)
            assert status in (400, 422)
            assert json.loads(text)["error"]["message"]


@pytest.mark.filterwarnings("ignore:row .* ends after")
def test_a_prompt_that_is_too_long_is_refused_with_the_limit():
    from hf_ensemble import EnsembleForCausalLM
    from tests import tiny

    tokenizers = [tiny.smol_like(), tiny.smol_like()]
    models = [tiny.tiny_llama(tokenizers[0], seed=1), tiny.tiny_gpt2(tokenizers[1], n_positions=24, seed=2)]
    ensemble = EnsembleForCausalLM.from_members(models, tokenizers)
    with served(ensemble) as (_, address), client_of(address) as client:
        with pytest.raises(openai.BadRequestError, match="positions for 24 ids"):
            client.completions.create(model="both", prompt=[70] * 25, max_tokens=2)
        answer = client.completions.create(model="both", prompt=[70] * 20, max_tokens=40)
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.completion_tokens < 10


def test_a_key_is_needed_where_there_is_one(ensemble):
    with served(ensemble, api_key="secret") as (_, address):
        with client_of(address, api_key="wrong") as client, pytest.raises(openai.AuthenticationError, match="a key"):
            ask(client, max_tokens=1)
        for path in ("/v1/models", "/metrics"):
            with pytest.raises(urllib.error.HTTPError, match="401"):
                get(address, path)
        assert "ok" in get(address, "/health")
        with client_of(address, api_key="secret") as client:
            assert ask(client, max_tokens=1).usage.completion_tokens == 1
        assert "401" in get(address, "/metrics", Authorization="Bearer secret")
    with pytest.raises(ConfigurationError, match="api_key"):
        build_app(ensemble, api_key="")


def test_metrics_count_what_was_done(ensemble):
    with served(ensemble) as (app, address), client_of(address) as client:
        for _ in range(2):
            answer = ask(client, max_tokens=4)
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="x", messages=MESSAGES)
        until(lambda: app.state.engine.num_running == 0)
        lines = dict(line.rsplit(" ", 1) for line in get(address, "/metrics").splitlines() if not line.startswith("#"))
        assert lines['hf_ensemble_requests_total{endpoint="/v1/chat/completions",status="200"}'] == "2"
        assert lines['hf_ensemble_requests_total{endpoint="/v1/chat/completions",status="404"}'] == "1"
        assert lines["hf_ensemble_prompt_tokens_total"] == str(2 * answer.usage.prompt_tokens)
        assert lines["hf_ensemble_generated_tokens_total"] == "8"
        assert lines["hf_ensemble_texts_running"] == lines["hf_ensemble_texts_waiting"] == "0"
        assert float(lines["hf_ensemble_milliseconds_per_token"]) > 0
        for member in ensemble.member_views:
            assert float(lines[f'hf_ensemble_member_forward_passes_total{{member="{member.name}"}}']) >= 8
            assert float(lines[f'hf_ensemble_member_seconds_total{{member="{member.name}"}}']) > 0


def test_the_thread_ends_with_the_application(ensemble):
    with served(ensemble) as (_, address), client_of(address) as client:
        ask(client, max_tokens=1)
        assert any(thread.name == "hf_ensemble" for thread in threading.enumerate())
    assert not any(thread.name == "hf_ensemble" for thread in threading.enumerate())


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sweetspan", "vote"])
def test_methods_that_share_no_batch_are_calls_of_their_own(method):
    ensemble = tiny_ensemble(method=method)
    with served(ensemble) as (_, address), client_of(address) as client:
        expected = text_alone_of(ensemble, max_new_tokens=6)
        with ThreadPoolExecutor(2) as pool:
            answers = list(pool.map(lambda _: ask(client, max_tokens=6), range(2)))
        assert [answer.choices[0].message.content for answer in answers] == [expected] * 2
        chunks = ask(client, max_tokens=6, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
        with pytest.raises(openai.BadRequestError, match=f"`logprobs`.*{method}"):
            ask(client, max_tokens=2, logprobs=True)


def text_alone_of(ensemble, **options):
    inputs = ensemble.tokenizer.apply_chat_template(
        MESSAGES, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids = ensemble.generate(**inputs, do_sample=False, **options)[0, inputs["input_ids"].shape[1] :]
    return ensemble.tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.slow
def test_beams_are_a_call_of_their_own(ensemble):
    expected = text_alone_of(ensemble, max_new_tokens=5, num_beams=2)
    with served(ensemble) as (_, address), client_of(address) as client:
        config = json.dumps({"num_beams": 2, "max_new_tokens": 5})
        assert ask(client, extra_body={"generation_config": config}).choices[0].message.content == expected


SERVER = """
import sys
from hf_ensemble.serving import serve
from tests.serving.conftest import tiny_ensemble
from hf_ensemble.decoding.running_batch import RunningBatch
import time
step = RunningBatch.step
def slow(self):
    time.sleep(0.05)
    step(self)
RunningBatch.step = slow
try:
    serve(tiny_ensemble(), "127.0.0.1", 0, name="both", log_level="error")
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_a_signal_ends_the_server_cleanly_while_it_answers(number, code):
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        # What runs in the background of a shell ignores it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        address = process.stdout.readline().split()[-1].removesuffix("/v1")
        with client_of(address) as client:
            stream = ask(client, max_tokens=2000, stream=True)
            next(iter(stream))
            began = time.monotonic()
            process.send_signal(number)
            with pytest.raises(openai.APIError, match="the server is shutting down"):
                list(stream)
            assert time.monotonic() - began < 10
        assert process.wait(timeout=60) == code
        errors = process.stderr.read()
        assert "terminate called" not in errors
        assert "Traceback" not in errors
    finally:
        process.kill()
        process.communicate()


def test_a_server_that_others_reach_without_a_key_is_warned_of(ensemble, monkeypatch):
    from hf_ensemble.serving import app, serve

    monkeypatch.setattr(app.uvicorn.Server, "run", lambda self, sockets: None)
    with pytest.warns(UserWarning, match="it needs no key"):
        serve(ensemble, "0.0.0.0", 0)
    serve(ensemble, "127.0.0.1", 0)
    serve(ensemble, "0.0.0.0", 0, api_key="secret")
