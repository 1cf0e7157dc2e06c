"""Calls that are interrupted, streamed, made at the same time, or weighted by what members say of the prompt."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import TextStreamer

from hf_ensemble import EnsembleForCausalLM, MemberConfig, packllm_weights
from tests.ray.conftest import FAR, end, process_of, wait_until_ended

PROMPTS = ["The capital of France is", "The cat"]


def write(ensemble, prompts=PROMPTS, **options):
    inputs = ensemble.tokenizer(prompts, padding=True, return_tensors="pt")
    options = {"max_new_tokens": 6, "eos_token_id": [], "pad_token_id": 0, **options}
    return ensemble.generate(**inputs, **options)


@pytest.mark.filterwarnings("ignore:the primary 'smol' wrote the control token")
def test_calls_of_several_threads_at_once_write_what_each_writes_alone(there):
    calls = [
        {"method": method, "prompts": prompts}
        for method in ("unite", "eva", "sweetspan")
        for prompts in (PROMPTS, PROMPTS[:1])
    ]
    expected = [write(there, **call) for call in calls]
    there._kept.methods.clear()  # so that the actors learn them anew, all at once
    with ThreadPoolExecutor(len(calls)) as threads:
        found = list(threads.map(lambda call: write(there, **call), calls))
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("num_waits", [1, 2, 5])
def test_a_call_that_is_interrupted_leaves_the_members_as_they_were(num_waits, there, monkeypatch):
    expected = write(there)
    link = there.member_views[1].link
    wait, waits = link.wait, []

    def interrupted(asked):
        waits.append(None)
        if len(waits) == num_waits:
            raise KeyboardInterrupt
        return wait(asked)

    monkeypatch.setattr(link, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(there)
    monkeypatch.undo()
    assert torch.equal(write(there), expected)


def test_a_stream_says_what_is_written(there, capsys):
    streamer = TextStreamer(there.tokenizer, skip_prompt=True)
    ids = write(there, PROMPTS[:1], streamer=streamer)
    written = there.tokenizer.decode(ids[0, -6:])
    assert capsys.readouterr().out.strip() == written.strip()


def test_weights_by_what_members_say_of_the_prompt_are_the_same(here, there):
    inputs = here.tokenizer(PROMPTS, padding=True, return_tensors="pt")
    expected, found = (packllm_weights(ensemble, **inputs) for ensemble in (here, there))
    torch.testing.assert_close(found, expected)


@pytest.mark.slow
def test_a_member_listed_twice_has_one_actor_and_odd_names_are_names(cluster, folders):
    item = MemberConfig(path=folders[1], ray=FAR, name='it\'s {0} a "name"')
    with EnsembleForCausalLM.from_pretrained([item, item]) as ensemble:
        one, other = ensemble.member_views
        assert one is other
        expected = write(ensemble)
        end(process_of(one))
        wait_until_ended(process_of(one))
        ensemble.restart_member(item.name)
        assert torch.equal(write(ensemble), expected)
