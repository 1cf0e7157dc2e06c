"""Bug bank, section H: devices and memory.

| case | where |
| --- | --- |
| H1 | here, with the memory query replaced |
| H2 | here, on the CPU |
| H3 | `test_gpu.py` |
| H5 | `vocabulary/test_context.py` (a long text costs the same at every step); timings are in the benchmarks |
| H6 | here; `test_generate.py` (two threads); `test_conversations.py`, `test_streaming.py` |
"""

import threading

import pytest
import torch
from transformers import AutoModelForCausalLM, pipeline

from hf_ensemble import ConfigurationError, EnsembleForCausalLM, MemberConfig
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


@pytest.mark.crossed
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


# --- H1: where members are placed -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    paths = []
    for n, name in enumerate(("smol", "gemma")):
        paths.append(folder / f"member-{n}")
        tiny.tiny_llama(tokenizer_of(name), seed=n, num_hidden_layers=1).save_pretrained(paths[-1])
        tokenizer_of(name).save_pretrained(paths[-1])
    return paths


def sizes_of(paths):
    models = [AutoModelForCausalLM.from_pretrained(path) for path in paths]
    return [sum(p.numel() * p.element_size() for p in model.parameters()) for model in models]


@pytest.fixture
def plans(monkeypatch):
    """Every member is loaded on the CPU; what it would have been loaded with is kept."""
    load = AutoModelForCausalLM.from_pretrained.__func__
    seen = []

    def watch(cls, path, *args, **kwargs):
        seen.append({key: kwargs.pop(key, None) for key in ("device_map", "max_memory")})
        return load(cls, path, *args, **kwargs)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", classmethod(watch))
    return seen


def test_each_member_is_planned_when_those_before_it_are_placed(pair, monkeypatch):
    """H1: The plan of a second member asks for free memory after the first was loaded, and is told the truth."""
    first, second = sizes_of(pair)
    # A plan leaves room for buffers and for the largest layer.
    free = {"cpu": 8 * (first + second)}
    asked = []

    def query(max_memory=None):
        asked.append((len(loaded), free["cpu"]))
        return dict(free) if max_memory is None else dict(max_memory)

    loaded = []
    load = AutoModelForCausalLM.from_pretrained.__func__

    def watch(cls, path, *args, **kwargs):
        found = load(cls, path, *args, **kwargs)
        model = found[0] if kwargs.get("output_loading_info") else found
        loaded.append(model)
        free["cpu"] -= sum(p.numel() * p.element_size() for p in model.parameters())
        return found

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", classmethod(watch))
    for module in ("hf_ensemble.hub.placement.free_memory", "transformers.integrations.accelerate.get_max_memory"):
        monkeypatch.setattr(module, query)
    monkeypatch.setattr("transformers.integrations.accelerate.accelerate_max_memory", query)
    ensemble = EnsembleForCausalLM.from_pretrained(pair, device_map="auto")
    assert set(asked) == {(0, 8 * (first + second)), (1, 7 * first + 8 * second)}
    assert {p.device.type for p in ensemble.parameters()} == {"cpu"}


def test_memory_that_is_allowed_is_for_all_members_together(pair, plans):
    """H1: A second member may take what the first has left."""
    first, second = sizes_of(pair)
    plans.clear()
    ensemble = EnsembleForCausalLM.from_pretrained(pair, device_map="auto", max_memory={"cpu": first + second + 99})
    buffers = sum(buffer.nbytes for buffer in ensemble.members[0].buffers())
    assert [plan["max_memory"]["cpu"] for plan in plans] == [first + second + 99, second + 99 - buffers]
    plans.clear()
    EnsembleForCausalLM.from_pretrained([pair[0]] * 2, device_map="auto", max_memory={"cpu": first})
    assert len(plans) == 1


def test_places_of_single_members_are_kept(pair, plans):
    """H1: Over one for all."""
    items = [MemberConfig(path=str(pair[0]), device_map={"": "cpu"}), pair[1]]
    EnsembleForCausalLM.from_pretrained(items, device_map="auto")
    assert [plan["device_map"] for plan in plans] == [{"": "cpu"}, "auto"]
    plans.clear()
    EnsembleForCausalLM.from_pretrained(items, device_map=["auto", "cpu"])
    assert [plan["device_map"] for plan in plans] == ["auto", "cpu"]


@pytest.mark.parametrize(
    ("device_map", "gpu", "fits"),
    [
        ("auto", 1.0, True),
        ("auto", 0.9, False),
        ("sequential", 0.9, False),
        (0, 1.0, True),
        (0, 0.9, False),
        ("cuda:0", 0.9, False),
        ({"": 0}, 0.9, False),
        (["auto", "cpu"], 0.7, True),
        ([0, "cpu"], 0.1, False),
        ({"model": 0, "lm_head": "cpu"}, 0.1, True),
        (None, 0.1, True),
    ],
    ids=str,
)
def test_what_cannot_fit_is_said_before_loading(device_map, gpu, fits, pair, plans, monkeypatch):
    """H1: With the sizes; over all devices for a plan, on one for members that are sent there as a whole."""
    total = sum(sizes_of(pair))
    plans.clear()
    room = {0: round(gpu * total), "cpu": total if isinstance(device_map, list) and fits else 0}
    monkeypatch.setattr("hf_ensemble.hub.placement.free_memory", lambda max_memory=None: dict(room))
    if fits:
        EnsembleForCausalLM.from_pretrained(pair, device_map=device_map)
        assert len(plans) == 2
    else:
        with pytest.raises(ConfigurationError, match=r"do not fit.*member-0.*GB.*GB free"):
            EnsembleForCausalLM.from_pretrained(pair, device_map=device_map)
        assert not plans


def test_a_smaller_dtype_may_make_it_fit(pair, plans, monkeypatch):
    """H1: Half the size."""
    total = sum(sizes_of(pair))
    monkeypatch.setattr("hf_ensemble.hub.placement.free_memory", lambda max_memory=None: {"cpu": total // 2})
    EnsembleForCausalLM.from_pretrained(pair, device_map="auto", dtype="bfloat16")
    with pytest.raises(ConfigurationError, match="do not fit"):
        EnsembleForCausalLM.from_pretrained(pair, device_map="auto", dtype="float32")


# --- H2: the pipeline -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("special", ["quantised", "spread"])
def test_the_pipeline_moves_nothing_that_cannot_be_moved(special, index):
    """H2: Where the ensemble is already, it is left alone; elsewhere, the member is named."""
    ensemble = fresh()
    if special == "quantised":
        ensemble.members[index].is_quantized = True
    else:
        ensemble.members[index].hf_device_map = {"model": "cpu", "lm_head": 0}
    pipeline("text-generation", model=ensemble, tokenizer=ensemble.tokenizer, device="cpu")
    with pytest.raises(ConfigurationError, match=f"member-{index}"):
        pipeline("text-generation", model=ensemble, tokenizer=ensemble.tokenizer, device="meta")
    assert {p.device.type for p in ensemble.parameters()} == {"cpu"}
    assert dtypes_of(ensemble) == [{torch.float32}] * 2
