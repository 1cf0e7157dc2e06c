"""Bug bank, section H: devices and memory.

| case | where |
| --- | --- |
| H1 | waits: needs several GPUs |
| H2 | here, on the CPU |
| H3 | `test_gpu.py` |
| H5 | `vocabulary/test_context.py` (a long text costs the same at every step); timings are in the benchmarks |
| H6 | here; `test_generate.py` (two threads); `test_conversations.py`, `test_streaming.py` |
"""

import threading

import pytest
import torch
from transformers import pipeline

from hf_ensemble import ConfigurationError
from tests import tiny
from tests.contracts import make_ensemble

from .kit import control_tokens_may_be_chosen, duet, methods_by_turns, output_ids, tokenizer_of

pytestmark = control_tokens_may_be_chosen

CASTS = {
    "to(bfloat16)": lambda ensemble: ensemble.to(torch.bfloat16),
    "to(dtype=)": lambda ensemble: ensemble.to(dtype=torch.bfloat16),
    "to(device, dtype)": lambda ensemble: ensemble.to("cpu", torch.bfloat16),
    "bfloat16()": lambda ensemble: ensemble.bfloat16(),
}


def fresh():
    tokenizers = [tokenizer_of("smol"), tokenizer_of("gemma")]
    return make_ensemble([tiny.tiny_llama(t, seed=n) for n, t in enumerate(tokenizers)], tokenizers)


def dtypes_of(ensemble):
    return [{p.dtype for p in model.parameters()} for model in ensemble.members]


@methods_by_turns(cast=list(CASTS))
def test_every_member_is_cast_and_still_works(method, cast):
    """H2: What comes back is the ensemble itself, and it still decodes."""
    ensemble = fresh()
    output_ids(ensemble, "The cat", max_new_tokens=2)
    assert CASTS[cast](ensemble) is ensemble
    assert dtypes_of(ensemble) == [{torch.bfloat16}] * 2
    assert ensemble.dtype == torch.bfloat16
    assert len(output_ids(ensemble, "The cat", max_new_tokens=2, method=method, eos_token_id=None)[0]) >= 4
    ensemble.float()
    assert dtypes_of(ensemble) == [{torch.float32}] * 2


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("special", ["quantised", "spread"])
@pytest.mark.parametrize("cast", [*CASTS, "half()", "double()", "to(cpu)"])
def test_a_member_that_cannot_be_moved_is_named_and_nothing_is_half_moved(cast, special, index):
    """H2: By every way to move or cast a module."""
    ensemble = fresh()
    member = ensemble.members[index]
    if special == "quantised":
        member.is_quantized = True
    else:
        member.hf_device_map = {"model.layers.0": 0, "lm_head": "cpu"}

    def refuse(*args, **kwargs):
        raise ValueError("`.to` is not supported here")

    member.to = refuse
    more = {"half()": lambda e: e.half(), "double()": lambda e: e.double(), "to(cpu)": lambda e: e.to("cpu")}
    with pytest.raises(ConfigurationError, match=f"member-{index}"):
        {**CASTS, **more}[cast](ensemble)
    assert dtypes_of(ensemble) == [{torch.float32}] * 2


def test_device_and_dtype_of_a_mixed_ensemble_are_the_primarys():
    """H2: Also after the pipeline has placed it."""
    ensemble = fresh()
    ensemble.members[1].to(torch.bfloat16)
    assert (ensemble.device, ensemble.dtype) == (torch.device("cpu"), torch.float32)
    placed = pipeline("text-generation", model=ensemble, tokenizer=ensemble.tokenizer, device="cpu").model
    assert dtypes_of(placed) == [{torch.float32}, {torch.bfloat16}]


def test_two_requests_at_once_with_stop_strings_of_their_own_are_as_one_by_one():
    """H6: Other prompts, lengths, methods and stop strings, several rounds."""
    first = "Once upon a time there was a king who had three daughters."
    second = "The train from London to Paris takes about two hours."
    ensemble = duet(("smol", "gemma"), first, second)
    jobs = [
        ("Once", {"method": "gac", "stop_strings": ["king"]}),
        ("The train", {"method": "unite", "stop_strings": ["Par", "zzz"]}),
        ("Once upon", {"method": "unite", "max_new_tokens": 7}),
        ("The", {"method": "gac", "stop_strings": ["hours"]}),
    ]
    expected = [output_ids(ensemble, prompt, **options) for prompt, options in jobs]
    found, errors = {}, []

    def work(start):
        try:
            for turn in range(4):
                for n in range(start, len(jobs), 2):
                    prompt, options = jobs[n]
                    found[turn, n] = output_ids(ensemble, prompt, **options)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(start,)) for start in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert all(ids == expected[n] for (_, n), ids in found.items())
    assert len(found) == 16
