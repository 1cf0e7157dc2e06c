"""Members in actors give what the same members give in one process: every method, way of decoding, and score."""

import os

import pytest
import torch

from hf_ensemble import EvaConfig, GacConfig, RerankConfig, UniteConfig
from hf_ensemble.members.ray.member import RayMember
from tests.ray.conftest import parent_of, process_of, traffic_of

PROMPTS = ["The capital of France is", "The cat", "Once upon a time there was a king who"]
METHODS = ("unite", "gac", "mined", "eva", "deepen", "sweetspan")


def both(here, there, prompts=PROMPTS, **options):
    """What both write, in one batch."""
    inputs = here.tokenizer(prompts, padding=True, return_tensors="pt")
    options = {"max_new_tokens": 10, "eos_token_id": [], "pad_token_id": 0, **options}
    found = []
    for ensemble in (here, there):
        torch.manual_seed(0)
        found.append(ensemble.generate(**inputs, **options))
    return found


def assert_same(here, there, **options):
    expected, found = both(here, there, **options)
    assert torch.equal(expected, found)
    assert len(set(map(tuple, expected.tolist()))) > 1


def test_members_are_in_processes_of_different_nodes(there):
    assert all(isinstance(member, RayMember) for member in there.member_views)
    parents = {parent_of(process_of(member)) for member in there.member_views}
    assert len(parents) == 2
    assert os.getpid() not in parents


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.filterwarnings("ignore:the primary 'smol' wrote the control token")
def test_greedy_texts_are_the_same(method, here, there):
    assert_same(here, there, method=method)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.filterwarnings("ignore:the primary 'smol' wrote the control token")
def test_sampled_texts_are_the_same(method, here, there):
    assert_same(here, there, method=method, do_sample=True, top_k=0, num_return_sequences=2)


@pytest.mark.parametrize("method", ["unite", "gac", "mined", "eva", "deepen"])
@pytest.mark.filterwarnings("ignore:the primary 'smol' wrote the control token")
def test_beams_are_the_same(method, here, there):
    assert_same(here, there, method=method, num_beams=3)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        (UniteConfig(threshold=0.3, gate=1), {}),
        (UniteConfig(threshold=0.3), {"weights": [0.3, 0.7]}),
        (GacConfig(threshold=0.1, gate=1), {"weights": [1.0, 0.0]}),
        (EvaConfig(top_k=40), {"weights": [0.0, 1.0]}),
        ("unite", {"weights": [1.0, 0.0]}),
        ("unite", {"weights": [0.0, 1.0]}),
        ("unite", {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2}),
        ("unite", {"weights": lambda step, ids: [[0.1, 0.9], [0.9, 0.1], [0.5, 0.5]]}),
        ("gac", {"speculation": "ngram"}),
        ("unite", {"speculation": "gemma"}),
        ("unite", {"speculation": "auto", "do_sample": True}),
        ("vote", {}),
        (RerankConfig(num_candidates=2), {"do_sample": True, "seed": 3}),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:the primary 'smol' wrote the control token")
def test_other_ways_of_writing_are_the_same(method, options, here, there):
    assert_same(here, there, method=method, **options)


def test_a_row_alone_is_the_row_in_a_batch(there):
    batch = both(there, there, method="unite")[1]
    for row, prompt in enumerate(PROMPTS):
        alone = both(there, there, [prompt], method="unite")[1]
        assert torch.equal(alone[0, -10:], batch[row, -10:])


def test_scores_and_decisions_are_the_same(here, there):
    options = {"return_dict_in_generate": True, "output_scores": True, "output_decisions": True}
    expected, found = both(here, there, method="unite", **options)
    for a, b in zip(expected.scores, found.scores, strict=True):
        torch.testing.assert_close(a, b)
    assert str(expected.decisions) == str(found.decisions)
    texts = ["The capital of France is", "Water boils at"], [" Paris, and", " 100 degrees"]
    for method in ("unite", "gac", "sweetspan"):
        a, b = (ensemble.score(*texts, method=method) for ensemble in (here, there))
        assert str(a) == str(b)


def test_at_most_four_kibibytes_of_a_row_travel_a_step_and_no_text_twice(here, there):
    """Payload both ways; the prompt's ids are counted apart, since they travel once."""
    inputs = here.tokenizer(PROMPTS, padding=True, return_tensors="pt")
    for of_member in traffic_of(there, inputs, (10, 30)):
        sent, received, trips = (count / 20 for count in of_member)
        assert sent + received <= 4096 * len(PROMPTS)
        # Two ids of a row at most are new, on average, beside the row's own numbers: no context is sent again.
        assert sent / len(PROMPTS) < 400
        assert trips <= 2


@pytest.mark.parametrize("options", [{"method": "unite"}, {"method": "gac"}, {"method": "sweetspan"}], ids=str)
@pytest.mark.filterwarnings("ignore:the primary 'smol' wrote the control token")
def test_all_members_begin_before_one_is_waited_for_and_a_batch_is_one_call(options, here, there, monkeypatch):
    """Whoever is asked to run is asked before the first answer is waited for."""
    both(there, there, **options)  # what is found out once has been
    running, events = set(), []
    for number, member in enumerate(there.member_views):
        link = member.link
        ask, wait = link.ask, link.wait

        def asking(what, *arguments, ask=ask, number=number):
            running.add(number)
            events.append(what)
            return ask(what, *arguments)

        def waiting(asked, wait=wait, number=number):
            events.append(len(running))
            running.discard(number)
            return wait(asked)

        monkeypatch.setattr(link, "ask", asking)
        monkeypatch.setattr(link, "wait", waiting)
    both(there, there, **options)
    num_runs = events.count("forward") + events.count("best")
    if options["method"] == "sweetspan":
        # A member may be through with its span before the other, and one of them may have nothing to score.
        assert events.count(2) > 0.6 * events.count(1) > 0
    else:
        assert num_runs == 2 * 2 * 10  # two members, two calls, ten tokens, whatever the number of rows
        assert [event for event in events if event in (1, 2)][:2] == [2, 1]
        assert events.count(2) >= num_runs / 2


def test_embeddings_travel_once(there, monkeypatch):
    member = there.member_views[1]
    assert member.input_embeddings().weight.shape[0] == member.vocab_size
    monkeypatch.setattr(member.link, "ask", None)
    assert member.input_embeddings() is member.input_embeddings()
