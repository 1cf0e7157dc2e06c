"""Members behind a server, beside the same members in this process."""

import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import TextIteratorStreamer, pipeline

from hf_ensemble import (
    ConfigurationError,
    EnsembleForCausalLM,
    MemberConfig,
    MemberError,
    SweetSpanConfig,
    UniteConfig,
    VocabularyError,
    VoteConfig,
    packllm_weights,
)
from hf_ensemble.cli import main
from hf_ensemble.decoding import few_entries
from hf_ensemble.members.served import http_client
from tests import tiny
from tests.completions_server import changes, drops, is_slow, refuses, serving

pytestmark = pytest.mark.filterwarnings("ignore:the primary .* wrote the control token")

PROMPTS = ["The capital of France is", "The cat", "Once upon a time there was a king"]
NAMES = ("smol", "gemma")


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(http_client, "_FIRST_PAUSE", 0.001)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two saved models with their tokenizers."""
    root = tmp_path_factory.mktemp("served")
    makers = ((tiny.smol_like, tiny.tiny_llama), (tiny.gemma_like, tiny.tiny_gemma3))
    for seed, (name, (tokenizer, model)) in enumerate(zip(NAMES, makers, strict=True), start=1):
        made = tokenizer()
        made.save_pretrained(root / name)
        model(made, seed=seed).save_pretrained(root / name)
    return [root / name for name in NAMES]


@pytest.fixture(scope="module")
def local(folders):
    return EnsembleForCausalLM.from_pretrained(folders, method="unite")


@pytest.fixture(scope="module")
def servers(local):
    with (
        serving(local.members[0], local.tokenizers[0], name="smol") as smol,
        serving(local.members[1], local.tokenizers[1], name="gemma") as gemma,
    ):
        yield smol, gemma


@pytest.fixture(autouse=True)
def fresh(request):
    if "servers" in request.fixturenames:
        for server in request.getfixturevalue("servers"):
            server.faults, server.asked = [], []


def items_of(folders, servers, served, **options):
    return [
        MemberConfig(url=servers[n].url, model=NAMES[n], tokenizer=folders[n], **options)
        if n in served
        else MemberConfig(folders[n])
        for n in range(2)
    ]


@pytest.fixture(scope="module")
def made(folders, servers):
    """Ensembles of which these members are served."""
    known = {}

    def make(*served):
        if served not in known:
            known[served] = EnsembleForCausalLM.from_pretrained(items_of(folders, servers, served))
        return known[served]

    yield make
    for ensemble in known.values():
        ensemble.close()


def run(ensemble, prompts=PROMPTS, **options):
    inputs = ensemble.tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
    torch.manual_seed(0)
    return ensemble.generate(**inputs, **{"max_new_tokens": 10, "do_sample": False, **options})


WHO = {"assistant": (1,), "primary": (0,), "both": (0, 1)}
SERVED = pytest.mark.parametrize("served", [pytest.param(WHO[who], id=who) for who in WHO])


def cases(calls, *quick):
    """All calls, whoever is served; but few of them where slow tests do not run, and in CI those with both."""
    further = [pytest.mark.slow, pytest.mark.further]
    marks = {f"{call}-{who}": [pytest.mark.slow] if who == "both" else further for call in calls for who in WHO}
    return pytest.mark.parametrize(
        ("served", "call"),
        [
            pytest.param(
                served, call, id=f"{call}-{who}", marks=[] if f"{call}-{who}" in quick else marks[f"{call}-{who}"]
            )
            for who, served in WHO.items()
            for call in calls
        ],
    )


CALLS = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 0.9, "top_k": 0},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "several": {"do_sample": True, "num_return_sequences": 2},
    "stop strings": {"stop_strings": ["e"]},
    "weights": {"weights": [0.3, 0.7]},
    "assistant alone": {"weights": [0, 1]},
    "auto": {"speculation": "auto"},
    "scores": {"return_dict_in_generate": True, "output_scores": True, "output_logits": True},
}


@cases(CALLS, "greedy-both", "sampled-assistant")
def test_texts_are_those_of_members_in_this_process(local, made, served, call):
    options = CALLS[call]
    expected, found = run(local, **options), run(made(*served), **options)
    if call != "scores":
        assert torch.equal(found, expected)
        return
    assert torch.equal(found.sequences, expected.sequences)
    for name in ("scores", "logits"):
        for a, b in zip(found[name], expected[name], strict=True):
            torch.testing.assert_close(a.log_softmax(-1), b.log_softmax(-1), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@SERVED
def test_two_requests_a_row_and_step_at_most(made, servers, served):
    ensemble = made(*served)
    for server in servers:
        server.asked = []
    output = run(ensemble, return_dict_in_generate=True)
    for n in range(2):
        share = output.share_in_one_request[n]
        if n not in served:
            assert share is None
            continue
        bodies = servers[n].completions
        first = [body for body in bodies if "logprob_token_ids" not in body]
        assert [body["logprobs"] for body in first] == [20] * len(first)
        assert len(first) > 10
        assert share == pytest.approx(1 - (len(bodies) - len(first)) / len(first))


def test_the_same_model_twice_takes_one_request_a_step(folders, servers):
    items = items_of(folders, servers, (0,))
    with_itself = EnsembleForCausalLM.from_pretrained([MemberConfig(folders[0]), items[0]])
    alone = with_itself.alone(0)
    output = run(with_itself, max_new_tokens=1, return_dict_in_generate=True)
    assert output.share_in_one_request == (None, 1.0)
    assert torch.equal(output.sequences, run(alone, max_new_tokens=1))


def only(*ids):
    """Constraints that leave these ids, whatever is proposed, in every other step."""
    return {"prefix_allowed_tokens_fn": lambda _, given: list(ids) if len(given) % 2 else list(range(400))}


CONSTRAINTS = {
    "few ids": only(7, 70, 170, 250),
    "one id": only(70),
    "beams": {**only(7, 70, 170, 250), "num_beams": 2},
    "scores": {**only(7, 70, 170, 250), **CALLS["scores"]},
    "bans": {"suppress_tokens": list(range(5, 390))},
    "must go on": {"min_new_tokens": 8},
    "raised": {"sequence_bias": [[[70], 3.0], [[71], 30.0]]},
    "decays": {"exponential_decay_length_penalty": (3, 1.5), "num_beams": 2},
}


@pytest.mark.slow
@cases(CONSTRAINTS, "few ids-both", "raised-assistant")
def test_what_constraints_leave_is_asked_for(local, made, servers, served, call):
    options = CONSTRAINTS[call]
    expected, found = run(local, **options), run(made(*served), **options)
    if call != "scores":
        assert torch.equal(found, expected)
        return
    assert torch.equal(found.sequences, expected.sequences)
    for a, b in zip(found.scores, expected.scores, strict=True):
        assert torch.equal(a > -torch.inf, b > -torch.inf)
        torch.testing.assert_close(a.softmax(-1), b.softmax(-1), rtol=0.01, atol=0.002)


def test_constraints_that_nobody_can_follow_are_an_error(made, monkeypatch):
    ensemble = made(1)
    penalty = {"repetition_penalty": 1.5, **only(7, 70, 170, 250)}
    with pytest.raises(
        MemberError, match="allow none of the proposed entries in row 0 at step 4, and change the scores"
    ):
        run(ensemble, PROMPTS[:1], **penalty)
    monkeypatch.setattr(few_entries, "MAX_ALLOWED", 3)
    with pytest.raises(
        MemberError, match="at step 4, but 5 other ids of member 'gemma', which can be asked about 3 at most"
    ):
        run(ensemble, PROMPTS[:1], **only(7, 70, 170, 250))


SPANS = {
    "perplexity": {},
    "bits per byte": {"method": SweetSpanConfig(span_length=2, score="bits_per_byte")},
    "long": {"method": SweetSpanConfig(span_length=3, max_span_tokens=5)},
    "must go on": {"min_new_tokens": 6},
    "penalty": {"repetition_penalty": 1.3},
}


@pytest.mark.slow
@cases(SPANS, "perplexity-both")
def test_spans_are_those_of_members_in_this_process(local, made, served, call):
    options = {"method": "sweetspan", "return_dict_in_generate": True, **SPANS[call]}
    expected, found = run(local, **options), run(made(*served), **options)
    assert torch.equal(found.sequences, expected.sequences)
    for ours, theirs in zip(found.rounds, expected.rounds, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert one.winner == other.winner
            for a, b in zip(one.candidates, other.candidates, strict=True):
                assert (a.data, a.has_eos, a.proposers) == (b.data, b.has_eos, b.proposers)
                assert a.scores == (b.scores and pytest.approx(b.scores, rel=1e-4))


ANSWERS = {
    "vote": {"method": "vote"},
    "rerank": {"method": "rerank"},
    "stop strings": {"method": "rerank", "stop_strings": ["e"]},
    "must go on": {"method": "rerank", "min_new_tokens": 5},
    "with a method": {"method": VoteConfig(methods=("unite",))},
}


@cases(ANSWERS, "rerank-both")
def test_answers_are_those_of_members_in_this_process(local, made, served, call):
    options = {"return_dict_in_generate": True, **ANSWERS[call]}
    expected, found = run(local, **options), run(made(*served), **options)
    assert torch.equal(found.sequences, expected.sequences)
    for ours, theirs in zip(found.answers.rows, expected.answers.rows, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert (a.text, a.ended, a.rank) == (b.text, b.ended, b.rank)
            assert a.scores == pytest.approx(b.scores, rel=1e-4)


@pytest.mark.slow
@SERVED
def test_sampled_answers_follow_the_seed(made, served):
    options = {"method": VoteConfig(num_candidates=3), "do_sample": True, "return_dict_in_generate": True}
    first, again, other = (run(made(*served), seed=seed, **options) for seed in (7, 7, 8))
    texts = [[[answer.text for answer in row] for row in output.answers.rows] for output in (first, again, other)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.slow
@SERVED
def test_likelihoods_are_those_of_members_in_this_process(local, made, served):
    texts = ["The capital", "Once upon"], [" of France", " a time there was"]
    expected, found = (one.score(*texts, method="sweetspan") for one in (local, made(*served)))
    torch.testing.assert_close(found.log_probs, expected.log_probs, rtol=1e-4, atol=1e-4)
    assert torch.equal(found.is_greedy, expected.is_greedy)


# --- What is refused, and what fails --------------------------------------------------------------------------------


REFUSED = {
    "gac": ({"method": "gac"}, "method 'gac' asks member 'gemma' for whole rows of logits.*a model behind a server"),
    "deepen": ({"method": "deepen"}, "method 'deepen' asks member 'gemma' for "),
    "eva": ({"method": "eva"}, "method 'eva' asks member 'gemma' for "),
    "mined": ({"method": "mined"}, "method 'mined' asks member 'gemma' for whole rows"),
    "gate": ({"method": UniteConfig(threshold=0.5, gate=1)}, "asks member 'gemma' for a decision alone, as the gate"),
    "drafts": ({"speculation": "ngram"}, "`speculation='ngram'` cannot be used with member 'gemma'"),
    "drafter": ({"speculation": "gemma"}, "cannot be used with member 'gemma'"),
    "many": (
        {"method": UniteConfig(top_k=65)},
        "method 'unite' asks member 'gemma' for 65 best entries, but its server at .* lists 64. Start it with "
        "`--max-logprobs 75`, or lower `top_k`",
    ),
    "beams of answers": ({"method": "vote", "num_beams": 2}, "does not support `num_beams=2`"),
    "typical answers": (
        {"method": "vote", "do_sample": True, "typical_p": 0.5},
        "'gemma' writes at its server, which does not support `typical_p=0.5`",
    ),
    "typical spans": (
        {"method": "sweetspan", "do_sample": True, "typical_p": 0.5},
        "'gemma' writes its spans at its server, which does not support the logits processor TypicalLogitsWarper",
    ),
}


@pytest.mark.parametrize("asked", REFUSED)
def test_what_a_server_cannot_give_is_refused_before_anything_runs(made, servers, asked):
    options, message = REFUSED[asked]
    with pytest.raises(ConfigurationError, match=message):
        run(made(1), **options)
    assert not [body for server in servers for body in server.completions]


def test_what_else_a_server_cannot_give_is_refused(made):
    ensemble = made(0)
    with pytest.raises(ConfigurationError, match="`score` with method 'unite' asks member 'smol' for whole rows"):
        ensemble.score(["The"], [" cat"])
    with pytest.raises(ConfigurationError, match="`packllm_weights` asks member 'smol' for how well"):
        packllm_weights(ensemble, torch.tensor([[3, 4]]))
    with pytest.raises(ConfigurationError, match="the primary 'smol' is a model behind a server"):
        ensemble(torch.tensor([[3, 4]]))
    with pytest.raises(ConfigurationError, match="`output_hidden_states`.*the primary 'smol'"):
        run(ensemble, output_hidden_states=True, return_dict_in_generate=True)
    with pytest.raises(ConfigurationError, match="`stopping_criteria` cannot be used if the primary 'smol' writes"):
        run(ensemble, method="vote", weights=[1, 0], stopping_criteria=[lambda ids, scores: False])


FAULTS = {
    "dies": ([drops] * 5, "the connection failed"),
    "refuses": ([refuses(500)] * 5, "it answers 500"),
    "nan": (
        [changes(lambda c: c["logprobs"]["token_logprobs"].__setitem__(0, float("nan")))],
        "contains nan in place",
    ),
    "redirects": ([refuses(307, Location="http://elsewhere/v1")], "redirects to http://elsewhere/v1"),
    "another model": ([lambda _, answer: answer | {"model": "new"}], "it answered for the model 'new', not 'gemma'"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_that_fails_is_named_with_the_step_and_what_was_written(made, servers, fault):
    faults, message = FAULTS[fault]
    ensemble = made(1)
    expected = run(ensemble, PROMPTS[:1])
    num_steps = 3
    asked = servers[1].asked[:]
    # After so many requests for best entries as there are whole steps before.
    first = [n for n, one in enumerate(asked) if "logprob_token_ids" not in one.body]
    servers[1].faults = [None] * first[num_steps] + faults
    with pytest.raises(
        MemberError, match=f"member 'gemma' at {servers[1].url} failed in row 0 at step 4: .*{message}"
    ) as caught:
        run(ensemble, PROMPTS[:1])
    written = ensemble.tokenizer.decode(expected[0, -10:][:num_steps])
    assert caught.value.written == (written,)
    assert repr(written) in str(caught.value)


def test_too_few_texts_among_what_is_listed_are_an_error(folders, local):
    with serving(local.members[1], local.tokenizers[1], name="gemma", max_logprobs=10) as server:
        item = MemberConfig(url=server.url, model="gemma", tokenizer=folders[1])
        ensemble = EnsembleForCausalLM.from_pretrained([folders[0], item])
        control = local.tokenizers[1].pad_token_id
        best = changes(
            lambda c: c["logprobs"]["top_logprobs"][0].update({f"token_id:{control}": -0.01}) or _without_last(c)
        )
        server.faults = [best]
        with pytest.raises(MemberError, match="at step 1: it lists 10 ids, which are 9 entries, but `top_k=10` needs"):
            run(ensemble, PROMPTS[:1])


def _without_last(choice):
    entries = choice["logprobs"]["top_logprobs"][0]
    entries.pop(min(entries, key=entries.get))


@pytest.mark.slow
def test_429_three_times_and_a_slow_server_change_nothing(made, servers):
    ensemble = made(1)
    expected = run(ensemble)
    servers[1].faults = [None, refuses(429), refuses(429), refuses(429), is_slow(0.1), drops]
    assert torch.equal(run(ensemble), expected)


@pytest.mark.slow
def test_a_slow_server_is_an_error(folders, servers):
    ensemble = EnsembleForCausalLM.from_pretrained(items_of(folders, servers, (1,), timeout=0.5))
    servers[1].faults = [None, is_slow(2.0)]
    with pytest.raises(MemberError, match="no answer came within 0.5 seconds"):
        run(ensemble, PROMPTS[:1])


def test_rows_end_where_the_server_has_no_positions_left(folders, local):
    with serving(local.members[1], local.tokenizers[1], name="gemma", max_model_len=20) as server:
        items = [MemberConfig(folders[0]), MemberConfig(url=server.url, model="gemma", tokenizer=folders[1])]
        ensemble = EnsembleForCausalLM.from_pretrained(items)
        with pytest.warns(UserWarning, match="member 'gemma' has positions for 19 ids only"):
            output = run(ensemble, PROMPTS[1:2], max_new_tokens=40)
        assert output.shape[1] < 40
        with pytest.raises(ConfigurationError, match="member 'gemma' has positions for 19 ids, but the prompt takes"):
            run(ensemble, [PROMPTS[2] * 3])


# --- Making, saving, loading ----------------------------------------------------------------------------------------


def test_only_tokenizers_are_loaded_where_all_are_served(made):
    ensemble = made(0, 1)
    assert [list(model.parameters()) for model in ensemble.members] == [[], []]
    assert ensemble.device == torch.device("cpu")
    assert ensemble.config.vocab_size == len(ensemble.tokenizer)


@pytest.mark.slow
def test_a_saved_ensemble_reaches_servers_only_where_that_is_allowed(made, servers, tmp_path, monkeypatch):
    ensemble = made(0, 1)
    expected = run(ensemble)
    ensemble.save_pretrained(tmp_path)
    for server in servers:
        server.asked = []
    with pytest.raises(ConfigurationError, match="is behind the server .*pass `allow_remote=True`"):
        EnsembleForCausalLM.from_pretrained(tmp_path)
    assert not servers[0].asked
    assert not servers[1].asked
    again = EnsembleForCausalLM.from_pretrained(tmp_path, allow_remote=True)
    assert torch.equal(run(again), expected)
    assert again.config.members == ensemble.config.members


def test_a_key_is_sent_and_not_saved(folders, local, tmp_path, monkeypatch):
    monkeypatch.setenv("SERVED_KEY", "sk-secret")
    with serving(local.members[1], local.tokenizers[1], name="gemma", key="sk-secret") as server:
        item = MemberConfig(url=server.url, model="gemma", tokenizer=folders[1], api_key_env="SERVED_KEY")
        ensemble = EnsembleForCausalLM.from_pretrained([folders[0], item])
        run(ensemble, PROMPTS[:1], max_new_tokens=2)
        ensemble.save_pretrained(tmp_path)
        everything = "".join(path.read_text() for path in tmp_path.iterdir() if path.is_file())
        assert "SERVED_KEY" in everything
        assert "sk-secret" not in everything + repr(item) + repr(ensemble.config) + repr(
            vars(ensemble.member_views[1])
        )
        server.asked = []
        with pytest.raises(
            ConfigurationError,
            match=r"asks for the key in \$SERVED_KEY to be sent to .*pass `api_key_env='SERVED_KEY'`",
        ):
            EnsembleForCausalLM.from_pretrained(tmp_path, allow_remote=True)
        with pytest.raises(ConfigurationError, match="for members with a `url`, but is 'SERVED_KEY' for member 0"):
            EnsembleForCausalLM.from_pretrained(tmp_path, allow_remote=True, api_key_env=["SERVED_KEY", None])
        assert not server.asked
        again = EnsembleForCausalLM.from_pretrained(tmp_path, allow_remote=True, api_key_env="SERVED_KEY")
        assert torch.equal(run(again, PROMPTS[:1]), run(ensemble, PROMPTS[:1]))
        monkeypatch.delenv("SERVED_KEY")
        with pytest.raises(ConfigurationError, match="in the environment variable 'SERVED_KEY' is missing"):
            run(ensemble, PROMPTS[:1])


@pytest.mark.slow
def test_without_a_configuration_the_tokenizer_tells(folders, local, tmp_path):
    local.tokenizers[1].save_pretrained(tmp_path)
    with serving(local.members[1], local.tokenizers[1], name="gemma") as server:
        item = MemberConfig(url=server.url, model="gemma", tokenizer=tmp_path)
        with pytest.warns(UserWarning, match=r"no `config.json` .*it has \d+ ids.*eos_token_id=..., vocab_size="):
            ensemble = EnsembleForCausalLM.from_pretrained([folders[0], item])
        assert torch.equal(run(ensemble), run(local))


def test_another_tokenizer_is_refused(folders, servers):
    item = MemberConfig(url=servers[1].url, model="gemma", tokenizer=folders[0])
    with pytest.raises(ConfigurationError, match="the tokenizer of member 'gemma' does not fit"):
        EnsembleForCausalLM.from_pretrained([folders[0], item])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "gemma"}, "`model` is only for members behind a server: give its `url` too"),
        ({"url": "http://host/v1"}, "needs `model`"),
        ({"url": "http://host/v1", "model": "m", "path": "p"}, "has the `url` 'http://host/v1' and also `path`"),
        ({"url": "http://me:pw@host/v1", "model": "m"}, r"\(http://host/v1\) contains a user or a query"),
        ({"url": "http://host/v1", "model": "m", "timeout": 0}, "`timeout` has to be a number of seconds above 0"),
        ({"url": "http://host/v1", "model": "m", "vocab_size": 0}, "vocab_size"),
        ({"url": "http://host/v1", "model": "m", "ray": {}}, "has the `url` 'http://host/v1' and also `ray`"),
        ({"url": "http://host/v1", "model": "m", "api_key_env": "sk-1"}, "name of an environment variable.*not shown"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        MemberConfig(**options)


def test_a_conversation_is_read_in_every_members_own_template(local, made):
    template = "{% for turn in messages %}<{{ turn.role }}>{{ turn.content }}{% endfor %}"
    turns = [{"role": "user", "content": "The cat"}]
    texts = []
    for ensemble in (local, made(0, 1)):
        inputs = ensemble.apply_chat_template(turns, chat_template=template, return_tensors="pt", return_dict=True)
        texts.append(ensemble.generate(**inputs, max_new_tokens=6, do_sample=False))
    assert torch.equal(*texts)


@pytest.mark.slow
def test_streamed_text_is_the_final_text(made):
    ensemble = made(0, 1)
    streamer = TextIteratorStreamer(ensemble.tokenizer, skip_prompt=True)
    output = run(ensemble, PROMPTS[:1], streamer=streamer)
    assert "".join(streamer) == ensemble.tokenizer.decode(output[0, -10:])


def test_decisions_tell_what_was_listed(local, made):
    found, expected = (
        run(one, PROMPTS[:1], output_decisions=True, return_dict_in_generate=True).decisions
        for one in (made(0, 1), local)
    )
    for ours, theirs in zip(found, expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert one.text == other.text
            for a, b in zip(one.members, other.members, strict=True):
                assert [entry.text for entry in a.best] == [entry.text for entry in b.best]
                assert a.probability == pytest.approx(b.probability, abs=0.005)
                assert [entry.probability for entry in a.best] == pytest.approx(
                    [entry.probability for entry in b.best], abs=0.005
                )


def test_a_gate_of_this_process_closes_before_servers_are_asked(local, made, servers):
    options = {"method": UniteConfig(threshold=0.01), "return_dict_in_generate": True}
    served = made(1)
    servers[1].asked = []  # what it was tried with
    expected, found = (run(one, PROMPTS[:1], **options) for one in (local, served))
    assert torch.equal(found.sequences, expected.sequences)
    num_open = round(found.share_ensembled[0] * 10)
    assert 0 <= num_open < 10
    assert len([body for body in servers[1].completions if "logprob_token_ids" not in body]) == num_open


def test_a_member_alone_writes_by_its_best_entries(local, made):
    assert torch.equal(run(made(0, 1).alone(0)), run(local.alone(0)))


@pytest.mark.slow
def test_more_rows_than_connections(local, made):
    prompts = [f"{PROMPTS[0]} {n}" for n in range(http_client.MAX_AT_ONCE + 3)]
    assert torch.equal(run(made(0), prompts, max_new_tokens=2), run(local, prompts, max_new_tokens=2))


@pytest.mark.slow
def test_an_interrupted_call_leaves_nothing_that_harms_the_next(made, servers, request):
    # What runs in the background of a shell ignores it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    ensemble = made(1)
    expected = run(ensemble, PROMPTS[:1])

    def interrupts(handler, answer):
        signal.raise_signal(signal.SIGINT)
        time.sleep(0.2)
        return answer

    servers[1].faults = [None, interrupts]
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run(ensemble, PROMPTS[:1])
    assert time.monotonic() - start < 5
    assert torch.equal(run(ensemble, PROMPTS[:1]), expected)


def test_the_command_line_reaches_servers_of_a_saved_ensemble_if_told(made, tmp_path, capsys):
    made(0, 1).save_pretrained(tmp_path)
    arguments = ["generate", "The cat", "--members", str(tmp_path), "--max-new-tokens", "4"]
    assert main(arguments) == 1
    assert "pass `allow_remote=True`" in capsys.readouterr().err
    assert main([*arguments, "--allow-remote"]) == 0
    ids = run(made(0, 1), ["The cat"], max_new_tokens=4)[0, -4:]
    text = made(0, 1).tokenizer.decode(ids, skip_special_tokens=True)
    assert text in capsys.readouterr().out


def test_the_stock_pipeline_takes_them(made):
    ensemble = made(0, 1)
    writer = pipeline("text-generation", model=ensemble, tokenizer=ensemble.tokenizer)
    written = writer(PROMPTS[:1], max_new_tokens=4, do_sample=False, return_full_text=False)[0][0]["generated_text"]
    assert written == ensemble.tokenizer.decode(run(ensemble, PROMPTS[:1], max_new_tokens=4)[0, -4:])


def test_a_member_without_a_tokenizer_is_refused(folders, servers):
    with pytest.raises(VocabularyError, match="'smol' is behind a server, which does not provide a tokenizer. Set"):
        EnsembleForCausalLM.from_pretrained([MemberConfig(url=servers[0].url, model="smol"), folders[1]])


@pytest.mark.slow
def test_calls_from_several_threads_are_independent(made):
    ensemble = made(0, 1)
    expected = [run(ensemble, [prompt]) for prompt in PROMPTS]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda prompt: run(ensemble, [prompt]), PROMPTS))
    assert all(map(torch.equal, found, expected))


def test_a_check_leaves_out_what_a_server_cannot_be_asked(made):
    report = made(1).check()
    assert [one.steps == "elsewhere" for one in report.members] == [False, True]
    assert not any(one.check == "long text" for one in report.findings)
