"""Requests to a server of completions: what is sent, what is read, and what happens when something is wrong."""

import asyncio
import copy
import io
import json
import logging
import math
import pickle
import threading
import time
import traceback

import pytest
import torch

from hf_ensemble.address import shown
from hf_ensemble.errors import ConfigurationError, MemberError
from hf_ensemble.members.served import http_client
from hf_ensemble.members.served.completions import Completions
from hf_ensemble.members.served.http_client import HttpClient
from hf_ensemble.members.served.start_check import check_server
from hf_ensemble.members.served.threads import Threads, collected
from hf_ensemble.vocabulary.token_bytes import TokenBytes
from tests.completions_server import changes, drops, is_slow, refuses, serving
from tests.tiny import byte_level_bpe, sentencepiece_bpe, tiny_llama

KEY = "sk-very-secret"
WHERE = "in row 0 at step 1"


@pytest.fixture(scope="module")
def tokenizer():
    return byte_level_bpe(400)


@pytest.fixture(scope="module")
def model(tokenizer):
    return tiny_llama(len(tokenizer))


@pytest.fixture
def server(model, tokenizer):
    with serving(model, tokenizer) as running:
        yield running


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(http_client, "_FIRST_PAUSE", 0.001)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def completions(server, **options):
    return Completions(HttpClient("remote", server.url, **options), server.name, server.model.config.vocab_size)


@pytest.fixture
def served(server):
    found = completions(server)
    yield found
    found.client.close()


def expected(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].log_softmax(-1)


# --- What is asked and read -----------------------------------------------------------------------------------------


def test_best_entries_are_those_of_the_model(served, model):
    best = served.best([5, 6, 7], 12, WHERE)
    values, ids = expected(model, [5, 6, 7])[-1].topk(12)
    assert list(best) == ids.tolist()
    assert list(best.values()) == pytest.approx(values.tolist(), abs=1e-5)


def test_asked_ids_have_their_own_log_probabilities(served, server, model):
    found = served.log_probs_of([5, 6, 7], [9, 0, 4], WHERE)
    row = expected(model, [5, 6, 7])[-1]
    assert {i: found[i] for i in (9, 0, 4)} == pytest.approx({i: row[i].item() for i in (9, 0, 4)}, abs=1e-5)
    # Or a batch with somebody's longer list would give id 0 nothing.
    assert server.completions[-1]["logprob_token_ids"] == [9, 0, 4] + [0] * 125


def test_a_text_is_read_with_what_may_follow(served, model):
    ids = [5, 6, 7, 8]
    reading = served.read(ids, 2, [9, 1], WHERE)
    rows = expected(model, ids)
    assert [one.log_prob for one in reading.ids] == pytest.approx([rows[1, 7].item(), rows[2, 8].item()], abs=1e-5)
    assert [one.is_best for one in reading.ids] == [bool(rows[1].argmax() == 7), bool(rows[2].argmax() == 8)]
    assert reading.next_id == rows[3].argmax()
    assert reading.others[9] == pytest.approx(rows[3, 9].item(), abs=1e-5)


def test_streamed_and_whole_texts_are_the_same(served, model):
    whole, reason = served.write([5, 6], {"max_tokens": 6}, WHERE)
    with served.stream([5, 6], {"max_tokens": 6}, [3], WHERE) as parts:
        streamed = list(parts)
    assert [one.id for one in whole] == [one.id for one in streamed]
    assert reason == "length"
    ids = [5, 6]
    for one in streamed:
        row = expected(model, ids)[-1]
        assert one.id == row.argmax()
        assert one.log_prob == pytest.approx(row.max().item(), abs=1e-5)
        assert one.others[3] == pytest.approx(row[3].item(), abs=1e-5)
        ids.append(one.id)


def test_a_stream_that_is_left_ends_and_the_next_request_works(served):
    with served.stream([5, 6], {"max_tokens": 200}, (), WHERE) as parts:
        next(parts)
    assert served.best([5, 6], 1, WHERE)


def test_every_request_says_how_to_choose(served, server):
    served.best([5], 3, WHERE)
    served.read([5, 6], 1, (), WHERE)
    served.write([5], {"max_tokens": 1}, WHERE)
    with served.stream([5], {"max_tokens": 1}, (), WHERE) as parts:
        list(parts)
    assert len(server.completions) == 4
    for body in server.completions:
        assert (body["temperature"], body["top_p"], body["top_k"], body["min_p"]) == (0, 1, 0, 0)
        assert (body["presence_penalty"], body["frequency_penalty"], body["repetition_penalty"]) == (0, 0, 1)


def test_requests_run_side_by_side(served, server):
    server.faults = [is_slow(0.3)] * 4
    texts = [[5, n] for n in range(4)]
    start = time.perf_counter()
    found = served.client.side_by_side(lambda ids: served.best(ids, 2, WHERE), texts)
    assert time.perf_counter() - start < 0.9
    server.faults = []
    assert found == [served.best(ids, 2, WHERE) for ids in texts]


def test_threads_do_not_keep_the_process_alive(served):
    served.client.side_by_side(lambda _: None, range(3))
    own = [thread for thread in threading.enumerate() if thread.name.startswith("hf_ensemble-served")]
    assert own
    assert all(thread.daemon for thread in own)


def test_no_more_threads_than_said_and_the_first_error_ends_what_has_not_begun():
    threads, running, most = Threads(2), [], []
    lock = threading.Lock()

    def work(number):
        with lock:
            running.append(number)
            most.append(len(running))
        time.sleep(0.02)
        with lock:
            running.remove(number)
        if number == 1:
            raise ValueError("one")
        return number

    assert collected([threads.submit(work, number) for number in (0, 2, 3, 4)]) == [0, 2, 3, 4]
    assert max(most) == 2
    futures = [threads.submit(work, number) for number in range(20)]
    with pytest.raises(ValueError, match="one"):
        collected(futures)
    assert futures[-1].cancelled()
    threads.close()
    assert threads.submit(work, 0) is None


def test_it_works_inside_a_running_event_loop(served):
    async def ask():
        return served.best([5, 6], 2, WHERE)

    assert asyncio.run(ask()) == served.best([5, 6], 2, WHERE)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_opens_connections_of_its_own(served, copied):
    served.best([5, 6], 2, WHERE)
    twin = copied(served)
    assert twin.best([5, 6], 2, WHERE) == served.best([5, 6], 2, WHERE)
    twin.client.close()


def test_connections_are_reused(served, server, monkeypatch):
    opened = []
    from tests import completions_server

    original = completions_server._Handler.setup
    monkeypatch.setattr(completions_server._Handler, "setup", lambda self: (opened.append(1), original(self)))
    for n in range(5):
        served.best([5, n], 2, WHERE)
    assert len(opened) <= 1


# --- What fails in passing, and what does not -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "faults",
    [
        [refuses(429)] * 3,
        [refuses(429, Retry_After="0.01")],
        [refuses(429, Retry_After="Sun, 29 Nov 2020 15:00:00 GMT")],
        [refuses(500), refuses(502), refuses(503), refuses(504)],
        [drops, drops],
        [changes(lambda choice: choice["logprobs"]["top_logprobs"][0].clear())] * 2,
    ],
    ids=["429 three times", "seconds", "date", "5xx", "dropped", "mixed up"],
)
def test_what_passes_is_asked_again(served, server, faults):
    wanted = served.best([5, 6], 3, WHERE)
    server.faults = list(faults)
    assert served.best([5, 6], 3, WHERE) == wanted
    assert len(server.completions) == len(faults) + 2


def test_retry_after_is_waited_for(served, server, monkeypatch):
    pauses = []
    monkeypatch.setattr(http_client.time, "sleep", pauses.append)
    server.faults = [refuses(503, Retry_After="7")]
    served.best([5, 6], 3, WHERE)
    assert pauses == [7.0]


def test_pauses_grow(served, server, monkeypatch):
    pauses = []
    monkeypatch.setattr(http_client.time, "sleep", pauses.append)
    server.faults = [drops] * 10
    with pytest.raises(
        MemberError,
        match=r"member 'remote' at http://127.0.0.1:\d+/v1 failed in row 0 at step 1: the connection failed .* 5 times",
    ):
        served.best([5, 6], 3, WHERE)
    assert pauses == [0.001, 0.002, 0.004, 0.008]
    assert len(server.completions) == 5


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (refuses(400, "no such thing"), "it answers 400: no such thing"),
        (refuses(401, "who are you"), r"401: who are you \(no key was sent: name its environment variable"),
        (refuses(503, Retry_After="3600"), "it answers 503"),
        (
            refuses(307, Location="http://user:pass@other/v1?token=abc"),
            r"redirects to http://other/v1 \(307\), which is not",
        ),
        (
            changes(lambda c: c["logprobs"]["top_logprobs"][0].update({"token_id:5": math.nan})),
            "contains nan in place",
        ),
        (
            changes(lambda c: c["logprobs"]["top_logprobs"][0].update({"token_id:400000": -1.0})),
            "contains id 400000, but the ids",
        ),
        (
            changes(lambda c: c["logprobs"]["top_logprobs"][0].update({"token_id:-1": -1.0})),
            "contains id -1, but the ids",
        ),
        (
            changes(lambda c: c["logprobs"]["top_logprobs"][0].update({" Paris": -1.0})),
            "' Paris' in place of an id",
        ),
        (changes(lambda c: c.pop("token_ids")), "lacks `token_ids`. The server has to be vLLM 0.32"),
        (changes(lambda c: c.pop("logprobs")), "lacks `token_logprobs`"),
    ],
)
def test_what_will_not_pass_is_an_error_at_once(served, server, fault, message):
    server.faults = [fault]
    with pytest.raises(MemberError, match=message) as caught:
        served.best([5, 6], 3, WHERE)
    assert len(server.completions) == 1
    text = "".join(traceback.format_exception(caught.value))
    assert "remote" in text
    assert WHERE in text
    assert "user:pass" not in text
    assert "abc" not in text


def another_model(handler, answer):
    return answer | {"model": "other"}


@pytest.mark.parametrize(
    ("answer", "message"),
    [(another_model, "answered for the model 'other', not 'tiny'"), (lambda *_: {"choices": []}, "the one entry in")],
)
def test_an_answer_of_another_kind_is_an_error(served, server, answer, message):
    server.faults = [answer]
    with pytest.raises(MemberError, match=message):
        served.best([5, 6], 3, WHERE)


def test_too_few_entries_are_an_error_when_they_stay_few(served, server):
    server.faults = [changes(lambda choice: choice["logprobs"]["top_logprobs"][0].popitem())] * 5
    with pytest.raises(MemberError, match="it returned 2 of the 3 best ids that were requested"):
        served.best([5, 6], 3, WHERE)


def test_missing_asked_ids_are_an_error(served, server):
    server.faults = [changes(lambda choice: choice["logprobs"]["top_logprobs"][0].pop("token_id:9"))]
    with pytest.raises(MemberError, match="no log-probability of the requested id 9"):
        served.log_probs_of([5, 6], [9, 4], WHERE)


def test_a_missing_id_of_the_prompt_is_an_error(served, server):
    server.faults = [changes(lambda choice: choice["prompt_logprobs"][1].clear())]
    with pytest.raises(MemberError, match="no log-probability of id 6 of the prompt"):
        served.read([5, 6], 1, (), WHERE)


def test_a_slow_server_is_an_error_and_not_asked_again(server):
    served = completions(server, timeout=0.1)
    server.faults = [is_slow(0.6)]
    with pytest.raises(MemberError, match="no answer came within 0.1 seconds. Check whether"):
        served.best([5, 6], 3, WHERE)
    assert len(server.completions) == 1


def test_a_stream_that_breaks_off_is_an_error(served, server):
    server.faults = [drops]
    with (
        pytest.raises(MemberError, match="its answer broke off"),
        served.stream([5], {"max_tokens": 9}, (), WHERE) as parts,
    ):
        list(parts)


def test_a_stream_is_asked_again_before_it_begins(served, server):
    server.faults = [refuses(429), refuses(500)]
    with served.stream([5], {"max_tokens": 4}, (), WHERE) as parts:
        assert len(list(parts)) == 4


def test_no_server_is_an_error():
    served = Completions(HttpClient("remote", "http://127.0.0.1:9/v1"), "tiny")
    with pytest.raises(MemberError, match="at http://127.0.0.1:9/v1 failed .* the connection failed"):
        served.best([5, 6], 3, WHERE)


def told(error):
    """All that a traceback can tell, local variables of everybody but the test included."""
    trace = error.__traceback__
    while trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    found = traceback.TracebackException(type(error), error, trace, capture_locals=True)
    return "".join(found.format())


@pytest.fixture
def logged():
    """All that anybody logs."""
    root, text = logging.getLogger(), io.StringIO()
    handler, level = logging.StreamHandler(text), root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield text
    root.removeHandler(handler)
    root.setLevel(level)


# --- Keys and addresses ---------------------------------------------------------------------------------------------


def test_the_key_is_sent_and_shown_nowhere(model, tokenizer, monkeypatch, logged):
    monkeypatch.setenv("SERVED_KEY", KEY)
    with serving(model, tokenizer, key=KEY) as server:
        served = completions(server, api_key_env="SERVED_KEY")
        assert served.best([5, 6], 3, WHERE)
        assert server.asked[-1].authorization == f"Bearer {KEY}"
        server.faults = [refuses(400, f"what is Bearer {KEY}?"), refuses(500, KEY), drops]
        texts = [repr(served.client), repr(vars(served.client)), pickle.dumps(served).decode("latin-1")]
        for _ in range(2):
            try:
                served.best([5, 6], 3, WHERE)
            except MemberError as error:
                texts.append(told(error))
        server.key = "another"
        with pytest.raises(
            MemberError, match=r"401: Unauthorized: Bearer \[key\] \(the key in \$SERVED_KEY was sent\)"
        ) as caught:
            served.best([5, 6], 3, WHERE)
        texts.append(told(caught.value))
        assert "[key]" in "".join(texts)
        assert KEY not in "".join(texts)
        assert "POST" in logged.getvalue()
        assert KEY not in logged.getvalue()


def test_the_key_does_not_follow_a_redirect(model, tokenizer, monkeypatch):
    monkeypatch.setenv("SERVED_KEY", KEY)
    with serving(model, tokenizer) as elsewhere, serving(model, tokenizer) as server:
        served = completions(server, api_key_env="SERVED_KEY")
        server.faults = [refuses(308, Location=elsewhere.url + "/completions")]
        with pytest.raises(MemberError, match="which is not followed"):
            served.best([5, 6], 3, WHERE)
        assert not elsewhere.asked


@pytest.mark.parametrize(
    ("key", "message"), [("", "is missing"), ("two words", "a header cannot carry"), ("ä", "a header cannot carry")]
)
def test_a_key_that_cannot_be_sent_is_refused(server, monkeypatch, key, message):
    monkeypatch.setenv("SERVED_KEY", key)
    with pytest.raises(ConfigurationError, match=f"in the environment variable 'SERVED_KEY' .*{message}") as caught:
        completions(server, api_key_env="SERVED_KEY").best([5, 6], 3, WHERE)
    assert not key or key not in told(caught.value)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("host:8000/v1", "has to look like 'http://host:8000/v1'"),
        ("ftp://host/v1", "has to look like"),
        ("http://host:port/v1", "has to look like"),
        ("http://me:secret@host/v1", r"\(http://host/v1\) contains a user or a query"),
        ("http://host/v1?key=secret", r"\(http://host/v1\) contains a user or a query"),
    ],
)
def test_urls_that_are_none_or_hold_secrets_are_refused(url, message):
    with pytest.raises(ConfigurationError, match=message) as caught:
        HttpClient("remote", url)
    assert "secret" not in str(caught.value)


def test_an_address_is_shown_without_what_is_secret():
    assert shown("http://a:b@c@host:80/v1/x?key=1#y") == "http://host:80/v1/x"


# --- Before an ensemble relies on it --------------------------------------------------------------------------------


def token_bytes(tokenizer):
    return TokenBytes(tokenizer, num_ids=len(tokenizer), end_ids=[tokenizer.eos_token_id], name="remote")


@pytest.mark.parametrize("limit", [1, 5, 20, 64, 399])
def test_the_check_finds_the_limits(model, tokenizer, limit):
    with serving(model, tokenizer, max_logprobs=limit) as server:
        found = check_server(completions(server), tokenizer, token_bytes(tokenizer))
        assert (found.max_positions, found.max_listed) == (255, limit)
        assert len(server.asked) < 18


@pytest.mark.parametrize("path", ["", "/v1/completions"])
def test_a_url_that_ends_elsewhere_is_refused(server, tokenizer, path):
    client = HttpClient("far", server.url.removesuffix("/v1") + path)
    with pytest.raises(ConfigurationError, match="it answers 404: Not Found. `url` has to end .* usually in '/v1'"):
        check_server(Completions(client, "tiny"), tokenizer, token_bytes(tokenizer))


def test_a_model_that_is_not_there_is_refused(served, tokenizer):
    served.model = "large"
    with pytest.raises(ConfigurationError, match="has no model 'large'. It has: 'tiny'"):
        check_server(served, tokenizer, token_bytes(tokenizer))


@pytest.mark.parametrize(
    "other", [byte_level_bpe(600), byte_level_bpe(400, specials=["<|x|>"]), sentencepiece_bpe(400)]
)
def test_another_tokenizer_is_refused(server, other):
    served = Completions(HttpClient("remote", server.url), server.name)
    with pytest.raises(
        ConfigurationError, match="the tokenizer of member 'remote' does not fit: .*MemberConfig.tokenizer"
    ):
        check_server(served, other, token_bytes(other))


def test_logits_in_the_place_of_log_probabilities_are_refused(served, server, tokenizer):
    server.faults = [
        changes(
            lambda choice: choice["prompt_logprobs"][3].update(
                {k: v | {"logprob": 3.5} for k, v in choice["prompt_logprobs"][3].items()}
            )
        )
    ]
    with pytest.raises(ConfigurationError, match="returns 3.5 in place of a log-probability. .*raw_logprobs"):
        check_server(served, tokenizer, token_bytes(tokenizer))


def test_what_a_server_is_sent_is_json_of_plain_numbers(served, server):
    served.best(torch.tensor([5, 6]).tolist(), 2, WHERE)
    assert json.dumps(server.completions[-1]["prompt"]) == "[5, 6]"
