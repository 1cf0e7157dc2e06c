"""A member runs out of memory in the middle of a text, in a call and in a server's batch."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from cache_faults import PROMPT
from requests_at_random import COMPLETIONS, MODEL, Request
from server_process import ServerProcess
from soak_client import Client

from hf_ensemble import EnsembleForCausalLM, MemberError

STEP = 50


class RunsOut:
    """A hook of a model's forward that lets memory run out once.

    Args:
        model: The model.
        after: Of how many forward passes it is the last.
    """

    def __init__(self, model: Any, after: int):
        self._left = after
        model.register_forward_pre_hook(self)

    def __call__(self, model: Any, args: Any) -> None:
        self._left -= 1
        if self._left:
            return
        if model.device.type == "cuda":
            torch.empty(1 << 46, device=model.device)  # more than any GPU has
        raise torch.OutOfMemoryError("out of memory, planted")


def _ensemble(members: list[str], device: str) -> EnsembleForCausalLM:
    ensemble = EnsembleForCausalLM.from_pretrained(members, device_map=device)
    ensemble.generation_config.eos_token_id = None  # no text ends early
    if device == "cuda":
        for member in ensemble.member_views:
            member.cache_mode = "repack"  # captured steps run no hook, and take no memory of their own
    return ensemble


def in_call(members: list[str], device: str) -> str:
    """In a call of `generate`: the error names the member and has what was written; the next call is right."""
    ensemble = _ensemble(members, device)
    inputs = ensemble.tokenizer(PROMPT, return_tensors="pt").to(device)
    options: dict[str, Any] = {"max_new_tokens": 60, "do_sample": False}
    expected = ensemble.generate(**inputs, **options).tolist()
    RunsOut(ensemble.members[1], STEP)
    try:
        ensemble.generate(**inputs, **options)
    except MemberError as error:
        text, written = str(error), error.written[0]
    else:
        raise AssertionError("memory ran out, but the call raised no error")
    if "'two'" not in text or not written:
        raise AssertionError(f"{text!r} names no member, or nothing that was written")
    if ensemble.generate(**inputs, **options).tolist() != expected:
        raise AssertionError("the next call writes another text")
    return f"MemberError: {text} The next call is right."


def in_server(members: list[str], device: str) -> str:
    """In a batch of two requests: both are told, and the next is right."""
    ensemble = _ensemble(members, device)
    fields = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": 60}
    fields["generation_config"] = json.dumps({"max_new_tokens": 60, "eos_token_id": []})
    inputs = ensemble.tokenizer(PROMPT, return_tensors="pt").to(device)
    ids = ensemble.generate(**inputs, max_new_tokens=60, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    expected = ensemble.tokenizer.decode(ids, skip_special_tokens=True)
    RunsOut(ensemble.members[1], STEP)
    server = ServerProcess(ensemble, MODEL)
    try:
        request = Request("good", COMPLETIONS, json.dumps(fields).encode(), fields=fields)
        clients = [Client(server.port, 60.0) for _ in range(2)]
        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(lambda client: client.send(request), clients))
        again = clients[0].send(request)
        for client in clients:
            client.close()
    finally:
        server.end()
    if {outcome.status for outcome in found} != {500} or not all("'two'" in outcome.reason for outcome in found):
        raise AssertionError(f"answers: {found}")
    if again.texts != [expected]:
        raise AssertionError(f"the next request writes another text: {again}")
    return f"500 for both: {found[0].reason} The next request is right."
