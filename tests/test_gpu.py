"""The same texts on a GPU as on the CPU, with members together or apart, captured or not."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hf_ensemble import DeepenConfig, EnsembleForCausalLM, MbrConfig, MemberError, VoteConfig
from hf_ensemble.methods.base import CapturedMix
from hf_ensemble.modes.writing import Writing
from hf_ensemble.vocabulary import relative
from tests import tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:the primary .* wrote the control token"),
]

PROMPTS = ["The capital of France is", "今天天气很好", "def f(x):\n\treturn x"]


def make(method, devices):
    tokenizers = [tiny.smol_like(), tiny.gemma_like()]
    models = [tiny.tiny_llama(tokenizers[0], seed=1), tiny.tiny_gemma3(tokenizers[1], seed=2)]
    models = [model.to(device) for model, device in zip(models, devices, strict=True)]
    return EnsembleForCausalLM.from_members(models, tokenizers, method=method)


def generate(ensemble, **options):
    inputs = ensemble.tokenizer(PROMPTS, return_tensors="pt", padding=True).to(ensemble.device)
    return ensemble.generate(**inputs, max_new_tokens=16, **options).tolist()


@pytest.mark.parametrize("devices", [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")])
@pytest.mark.parametrize("method", ["gac", "unite", DeepenConfig(support=16)], ids=str)
def test_text_is_the_same_on_every_placement(method, devices):
    expected = make(method, ("cpu", "cpu"))
    found = make(method, devices)
    assert generate(found, do_sample=False) == generate(expected, do_sample=False)
    assert generate(found, do_sample=False, num_beams=3) == generate(expected, do_sample=False, num_beams=3)


@pytest.mark.parametrize("method", ["gac", "unite", DeepenConfig(support=16), "mined", "eva", "sweetspan"], ids=str)
def test_captured_steps_hold_what_must_hold(method):
    """The design's invariants, against a cache that grows and runs uncaptured on the same GPU."""
    ensemble = make(method, ("cuda", "cuda"))
    found = generate(ensemble, do_sample=False)
    assert [member.cache_mode for member in ensemble._members] == ["static", "static"]
    assert any(buffers._steps for member in ensemble._members for buffers in member.buffer_pool._free)
    assert generate(ensemble, do_sample=False) == found
    uncaptured = make(method, ("cuda", "cuda"))
    for member in uncaptured._members:
        member.cache_mode = "repack"
    assert generate(uncaptured, do_sample=False) == found
    assert generate(ensemble, do_sample=False, use_cache=False) == found
    for row, prompt in enumerate(PROMPTS):
        inputs = ensemble.tokenizer(prompt, return_tensors="pt").to("cuda")
        streamer = TokenStreamer()
        alone = ensemble.generate(**inputs, max_new_tokens=16, do_sample=False, streamer=streamer)[0].tolist()
        new = alone[inputs.input_ids.shape[1] :]
        assert found[row][-16:][: len(new)] == new  # the batch pads a row that has ended
        assert streamer.ids == alone
    with torch.no_grad():
        ensemble.members[1].get_input_embeddings().weight[5:].fill_(torch.nan)
    with pytest.raises(MemberError, match=ensemble._members[1].name):
        generate(ensemble, do_sample=False)


def test_members_in_int8_of_torchao_are_captured_and_write_the_same_text():
    quantization = pytest.importorskip("torchao.quantization")
    captured, uncaptured = (make("gac", ("cuda", "cuda")) for _ in range(2))
    for member in (*captured._members, *uncaptured._members):
        quantization.quantize_(member.model, quantization.Int8WeightOnlyConfig(version=2))
    for member in uncaptured._members:
        member.cache_mode = "repack"
    assert generate(captured, do_sample=False) == generate(uncaptured, do_sample=False)
    assert any(buffers._steps for member in captured._members for buffers in member.buffer_pool._free)


class TokenStreamer:
    """Keeps the ids."""

    def __init__(self):
        self.ids = []

    def put(self, value):
        self.ids += value.flatten().tolist()

    def end(self):
        return


ENDS = {"eos_token_id": list(range(0, 600, 7))}


def every_row_in_turn(input_ids, scores):
    """A criterion that waits for the GPU."""
    return torch.tensor([i % 5 == row for row, i in enumerate(input_ids[:, -1].tolist())], device=input_ids.device)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"do_sample": True, "top_k": 20},
        {"repetition_penalty": 1.4},
        ENDS,
        {**ENDS, "do_sample": True, "num_return_sequences": 8},
        {"stop_strings": ["e", "the"]},
        {"stopping_criteria": [every_row_in_turn]},
    ],
    ids=lambda options: "-".join(options),
)
def test_a_primary_alone_runs_captured_and_writes_its_own_text(options):
    ensemble = make("unite", ("cuda", "cuda"))
    inputs = ensemble.tokenizer(PROMPTS, return_tensors="pt", padding=True).to("cuda")
    found = []
    for model, own in ((ensemble, {"weights": [1, 0]}), (ensemble.members[0], {})):
        torch.manual_seed(3)
        settings = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, **options, **own}
        found.append(model.generate(**inputs, **settings, tokenizer=ensemble.tokenizer).tolist())
    assert found[0] == found[1]
    assert any(buffers._steps for buffers in ensemble._members[0].buffer_pool._free)


@pytest.mark.parametrize("weights", [[1, 0], [0.5, 0.5]], ids=str)
def test_streams_of_a_row_are_its_text_while_steps_run_ahead(weights):
    ensemble = make("unite", ("cuda", "cuda"))
    inputs = ensemble.tokenizer(PROMPTS[0], return_tensors="pt").to("cuda")
    for _ in range(3):
        streamer = TokenStreamer()
        settings = {"max_new_tokens": 24, "do_sample": False, "weights": weights, "streamer": streamer}
        assert ensemble.generate(**inputs, **settings)[0].tolist() == streamer.ids


def test_a_row_may_end_while_a_step_runs_ahead():
    ensemble, expected = make("gac", ("cuda", "cuda")), make("gac", ("cpu", "cpu"))
    ends = list(range(0, 600, 7))
    for _ in range(3):
        found = generate(ensemble, do_sample=False, eos_token_id=ends, pad_token_id=0)
        assert found == generate(expected, do_sample=False, eos_token_id=ends, pad_token_id=0)


def test_calls_at_the_same_time_do_not_meet():
    ensemble = make("unite", ("cuda", "cuda"))
    expected = generate(ensemble, do_sample=False)
    with ThreadPoolExecutor(3) as pool:
        for found in pool.map(lambda _: generate(ensemble, do_sample=False), range(6)):
            assert found == expected


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("method", ["gac", "unite", DeepenConfig(support=16), "sweetspan"], ids=str)
def test_members_may_have_a_device_each_or_be_spread_over_both(method, tmp_path):
    expected = generate(make(method, ("cpu", "cpu")), do_sample=False)
    apart = make(method, ("cuda:1", "cuda:0"))
    assert generate(apart, do_sample=False) == expected
    assert [member.cache_mode for member in apart._members] == ["static", "static"]
    for n, member in enumerate(apart._members):
        member.model.save_pretrained(tmp_path / str(n))
        member.tokenizer.save_pretrained(tmp_path / str(n))
    layers = {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": 1, "model.norm": 1, "lm_head": 1}
    spread = EnsembleForCausalLM.from_pretrained(
        [tmp_path / "0", tmp_path / "1"], method=method, device_map=["cuda:0", {**layers, "model.rotary_emb": 0}]
    )
    with pytest.warns(UserWarning, match="not captured as CUDA graphs.*spread over"):
        assert generate(spread, do_sample=False) == expected


@pytest.mark.parametrize("method", ["gac", "unite"])
def test_captured_mixing_equals_uncaptured_with_ties_and_changing_inputs(method):
    ensemble = make(method, ("cuda", "cuda"))
    plain = ensemble._kept.method(ensemble.config.method, list(ensemble._members[0].eos_token_ids))
    captured = CapturedMix(plain)
    for step in range(6):
        torch.manual_seed(step)
        logits = [torch.randn(3, m.config.vocab_size, device="cuda").mul(2).round() for m in ensemble.members]
        weights = torch.tensor([[0.5, 0.5], [0.0, 1.0], [0.9, 0.1]], device="cuda")
        found, expected = captured(logits, weights), plain.mix(logits, weights)
        torch.testing.assert_close(found.logprobs, expected.logprobs)
        torch.testing.assert_close(found.normalizers, expected.normalizers)
    assert len(captured._captured._graphs) == 1


def deepen_on_gpu(**options):
    """The same method twice, with and without graphs, and logits of a step."""
    ensemble = make(DeepenConfig(**options), ("cuda", "cuda"))
    eos_ids = list(ensemble._members[0].eos_token_ids)
    captured = ensemble._kept.method(ensemble.config.method, eos_ids)
    ensemble._kept.methods.clear()
    plain = ensemble._kept.method(ensemble.config.method, eos_ids)
    plain._drop_graphs = lambda: None
    plain._captured_look, plain._captured_fuse = plain._look, plain._fuse

    def logits(step, batch_size):
        generator = torch.Generator("cuda").manual_seed(step)
        sizes = [member.config.vocab_size for member in ensemble.members]
        rows = [3 * torch.randn(batch_size, size, generator=generator, device="cuda") for size in sizes]
        rows[0][step % batch_size, eos_ids[0]] += 30.0 * (step % 2)
        return rows

    return captured, plain, logits


@pytest.mark.parametrize("variant", ["released", "paper"])
@pytest.mark.parametrize("num_rows", [35, 70, 1000])
def test_captured_deepen_equals_uncaptured_in_batches_and_across_evictions(variant, num_rows, monkeypatch):
    row = 4 * deepen_on_gpu()[0]._rows[0]._width
    monkeypatch.setattr(relative, "_CACHE_BYTES", num_rows * row)
    captured, plain, logits_of = deepen_on_gpu(variant=variant, support=16)
    assert captured._rows_at_once is None
    weights = torch.tensor([[0.5, 0.5], [1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.3, 0.7]], device="cuda")
    for step in range(24):
        logits = logits_of(step // 2, len(weights))
        if step % 5 == 0:
            logits[1][1] = torch.nan
        found, expected = captured.mix(logits, weights), plain.mix(logits, weights)
        torch.testing.assert_close(found.logprobs, expected.logprobs, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found.normalizers, expected.normalizers, equal_nan=True)
        for at in range(len(weights)):
            alone = captured.mix([one[[at]] for one in logits], weights[[at]])
            torch.testing.assert_close(alone.logprobs[0], expected.logprobs[at], atol=1e-4, rtol=1e-4)
        only = captured.mix([logits[0], None], weights), plain.mix([logits[0], None], weights)
        torch.testing.assert_close(only[0].logprobs, only[1].logprobs, atol=1e-5, rtol=1e-5)
        if step == 12:
            captured.forget()
            assert not captured._captured_fuse._graphs
    assert captured._captured_fuse._graphs
    assert captured._captured_fuse._can_capture


def test_captured_deepen_is_shared_by_threads_with_streams_of_their_own(monkeypatch):
    row = 4 * deepen_on_gpu()[0]._rows[0]._width
    monkeypatch.setattr(relative, "_CACHE_BYTES", 20 * row)
    captured, plain, logits_of = deepen_on_gpu(support=16)
    weights = torch.tensor([[0.5, 0.5]], device="cuda")
    expected = [plain.mix(logits_of(2 * step, 1), weights).logprobs for step in range(40)]
    torch.cuda.synchronize()

    def run(start):
        with torch.cuda.stream(torch.cuda.Stream()):
            steps = [*range(start, 40), *range(start)]
            found = {step: captured.mix(logits_of(2 * step, 1), weights).logprobs for step in steps}
            torch.cuda.current_stream().synchronize()
        return found

    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(run, (0, 10, 20, 30)):
            for step, logprobs in found.items():
                torch.testing.assert_close(logprobs, expected[step], atol=1e-5, rtol=1e-5)
    assert captured._captured_fuse._graphs


@pytest.mark.parametrize("num_keys", [5, 304, 307])
@pytest.mark.parametrize("copies_anchors", [True, False])
def test_half_precision_rows_of_deepen_are_those_of_float32(num_keys, copies_anchors, monkeypatch):
    monkeypatch.setattr(relative, "_COPY_BYTES", 2**20 * copies_anchors)
    embeddings = torch.randn(num_keys, 64, device="cuda", generator=torch.Generator("cuda").manual_seed(0)).bfloat16()
    anchors, ids = torch.arange(num_keys - 1, device="cuda"), torch.tensor([4, 0, 3], device="cuda")
    half = relative.RelativeRows(embeddings, anchors, 100.0).form(ids)
    full = relative.RelativeRows(embeddings.cpu().float(), anchors.cpu(), 100.0).form(ids.cpu())
    torch.testing.assert_close(half.cpu(), full, atol=1e-6, rtol=1e-3)


# --- Whole answers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")])
@pytest.mark.parametrize("method", ["vote", "mbr", "rerank"])
def test_answers_are_chosen_alike_on_every_placement(method, devices):
    """Members on different devices write at the same time."""
    expected, found = make(method, ("cpu", "cpu")), make(method, devices)
    assert generate(found, do_sample=False) == generate(expected, do_sample=False)
    assert generate(found, do_sample=False, num_beams=3) == generate(expected, do_sample=False, num_beams=3)


@pytest.mark.parametrize(
    "method", [VoteConfig(num_candidates=4), MbrConfig(num_candidates=3, methods=("gac",))], ids=str
)
@pytest.mark.parametrize("devices", [("cuda", "cuda"), ("cuda", "cpu")])
def test_samples_of_a_row_alone_are_those_in_a_batch(method, devices):
    ensemble = make(method, devices)
    options = {"do_sample": True, "seed": 5, "max_new_tokens": 12, "return_dict_in_generate": True}
    inputs = ensemble.tokenizer(PROMPTS, return_tensors="pt", padding=True).to(ensemble.device)
    state = torch.cuda.get_rng_state()
    together = ensemble.generate(**inputs, **options).answers
    assert torch.equal(torch.cuda.get_rng_state(), state)
    for prompt, row in zip(PROMPTS, together, strict=True):
        inputs = ensemble.tokenizer(prompt, return_tensors="pt").to(ensemble.device)
        (alone,) = ensemble.generate(**inputs, **options).answers
        assert [answer.data for answer in alone] == [answer.data for answer in row]
        assert [answer.rank for answer in alone] == [answer.rank for answer in row]


def test_rows_are_written_in_parts_where_memory_does_not_do_for_all(monkeypatch):
    ensemble = make(VoteConfig(num_candidates=4), ("cuda", "cuda"))
    options = {"do_sample": True, "seed": 5}
    expected = generate(ensemble, **options)
    run, sizes = Writing._run, []

    def run_few(self, mode, model, ids, *rest):
        sizes.append(len(ids))
        if len(ids) > 3:
            raise torch.OutOfMemoryError("out of memory")
        return run(self, mode, model, ids, *rest)

    monkeypatch.setattr(Writing, "_run", run_few)
    assert generate(ensemble, **options) == expected
    assert sizes == [12, 6, 3, 3, 6, 3, 3] * 2
