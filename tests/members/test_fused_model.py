"""Models that run their short steps through few kernels: here with kernels of plain PyTorch, and ours where Triton runs."""

import gc
import importlib
import types
import weakref
from collections import Counter

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from hf_ensemble import MemberError
from hf_ensemble.members import fused_model as fusing
from hf_ensemble.members import static_buffers
from hf_ensemble.members.local import LocalMember
from hf_ensemble.members.state import MemberState, PlainContext
from hf_ensemble.methods.base import versions_of
from tests import contracts, tiny
from tests.triton import DEVICE, needs_triton

SIZES = {
    "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip


def half_turned(states):
    left, right = states.chunk(2, -1)
    return torch.cat([-right, left], -1)


def rms_norm(states, weight, epsilon, adds_one):
    states = states * (states.pow(2).mean(-1, keepdim=True) + epsilon).rsqrt()
    return states * (1 + weight if adds_one else weight)


def rotate_and_keep(query, key, value, cos, sin, keys, values, slots):
    cos, sin = cos[:, :, None], sin[:, :, None]
    query, key = (states * cos + half_turned(states) * sin for states in (query, key))
    for row, of_row in enumerate(slots.tolist()):
        for new, slot in enumerate(of_row):
            keys[row, :, slot], values[row, :, slot] = key[row, new], value[row, new]
    return query


def attend(query, keys, values, positions, scale, window):
    group = query.shape[2] // keys.shape[1]
    keys, values = (states.repeat_interleave(group, 1) for states in (keys, values))
    slots = torch.arange(keys.shape[2], device=keys.device)
    seen = slots <= positions[..., None]
    if window is not None:
        seen &= slots > positions[..., None] - window
    scores = torch.einsum("rnhw,rhsw->rhns", query, keys) * scale
    shares = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
    return torch.einsum("rhns,rhsw->rnhw", shares, values)


def product(states, weight, bias, scale=None):
    assert weight.is_contiguous()
    if scale is not None:
        assert weight.dtype == torch.int8
        weight = weight * scale[:, None]
    return torch.nn.functional.linear(states, weight, bias)


PLAIN = types.SimpleNamespace(
    rms_norm=rms_norm,
    product=product,
    rotate_and_keep=rotate_and_keep,
    attend=attend,
    MOST_VECTORS=32,
)


def qwen(model_class, config_class, vocab, seed):
    torch.manual_seed(seed)
    return model_class(config_class(vocab_size=len(vocab), **SIZES)).eval()


KINDS = {
    "llama": lambda vocab: tiny.tiny_llama(vocab, seed=3, head_dim=16),
    "gemma3": lambda vocab: tiny.tiny_gemma3(vocab, seed=3, head_dim=16),
    "mistral": lambda vocab: tiny.tiny_mistral(vocab, seed=3, head_dim=16),
    "qwen2": lambda vocab: qwen(Qwen2ForCausalLM, Qwen2Config, vocab, 3),
    "qwen3": lambda vocab: qwen(Qwen3ForCausalLM, Qwen3Config, vocab, 3),
}


def ours():
    return importlib.import_module("hf_ensemble.members.kernels")


@pytest.fixture(params=["plain", pytest.param("triton", marks=needs_triton)])
def kernels(request, monkeypatch):
    """The device of the members, the calls of `attend`, and for each product the matrix's dtype and the vectors."""
    used = PLAIN if request.param == "plain" else ours()
    calls, products = [], []

    def product(states, weight, *args):
        products.append((weight.dtype, states.numel() // states.shape[-1]))
        return used.product(states, weight, *args)

    def attend(*args):
        calls.append(args)
        return used.attend(*args)

    counting = types.SimpleNamespace(
        rms_norm=used.rms_norm, product=product, rotate_and_keep=used.rotate_and_keep, attend=attend,
        MOST_VECTORS=used.MOST_VECTORS,
    )  # fmt: skip
    monkeypatch.setattr(fusing, "_kernels", lambda device: counting)
    return types.SimpleNamespace(calls=calls, products=products, device="cpu" if request.param == "plain" else DEVICE)


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(fusing, "_kernels", lambda device: PLAIN)


def follow(member, mode, steps):
    state = MemberState(member, [PlainContext([]), PlainContext([])], mode)
    found = []
    with torch.no_grad():
        for ids, num_last in steps:
            for context, row in zip(state.contexts, ids, strict=True):
                context.ids = list(row)
            found.append(state.logits(num_last).clone())
    return found


STEPS = [  # a prompt, a token each, several in one row, a step back and another way, one row alone
    (([5, 6, 7, 8, 9, 10], [11, 12]), 1),
    (([5, 6, 7, 8, 9, 10, 13], [11, 12, 14]), 1),
    (([5, 6, 7, 8, 9, 10, 13, 15, 16, 17], [11, 12, 14, 18]), 2),
    (([5, 6, 7, 19], [11, 12, 14, 18, 20]), 1),
    (([5, 6, 7, 19, *range(21, 45)], [11, 12, 14, 18, 20, 21]), 1),
    (([5, 6, 7, 19, *range(21, 45), *[8, 9] * 80], [11, 12, 14, 18, 20, 21, 22]), 1),
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_fused_steps_give_the_logits_of_the_model(kind, kernels):
    member = LocalMember(KINDS[kind](contracts.small()).to(kernels.device), contracts.small())
    found = follow(member, "fused", STEPS)
    # A prompt of six takes a step of eight, 24 more one of 32, 160 more one of 256.
    assert [args[0].shape[1] for args in kernels.calls[:: member.config.num_hidden_layers]] == [8, 1, 4, 1, 32, 256]
    for one, expected in zip(found, follow(member, "recompute", STEPS), strict=True):
        torch.testing.assert_close(one, expected, atol=2e-4, rtol=1e-3)


def test_long_texts_are_read_in_several_fused_steps(kernels, monkeypatch):
    monkeypatch.setattr(static_buffers, "_MOST_CAPTURED", 16)
    member = LocalMember(KINDS["gemma3"](contracts.small()).to(kernels.device), contracts.small())
    found = follow(member, "fused", STEPS)
    widths = [args[0].shape[1] for args in kernels.calls[:: member.config.num_hidden_layers]]
    if kernels.device == "cpu":
        assert widths == [8, 1, 4, 1, *[8] * 3, *[8] * 20]
    else:  # captured steps call nothing
        assert set(widths) == {8, 4, 1}
    for one, expected in zip(found, follow(member, "recompute", STEPS), strict=True):
        torch.testing.assert_close(one, expected, atol=2e-4, rtol=1e-3)


def test_the_model_stays_as_it_is_and_shares_its_weights(on_cpu):
    model = tiny.tiny_llama(contracts.small(), seed=1, head_dim=16)
    before = {name: (type(part), sorted(vars(part))) for name, part in model.named_modules()}
    twin = fusing.fused_model(LocalMember(model, contracts.small()))
    assert {name: (type(part), sorted(vars(part))) for name, part in model.named_modules()} == before
    shared = dict(model.named_parameters())
    assert {name for name, weight in twin.named_parameters() if weight is shared[name]} == set(shared)


def test_hooks_of_the_model_run_in_fused_steps(on_cpu):
    member = LocalMember(tiny.tiny_llama(contracts.small(), seed=1, head_dim=16), contracts.small())
    member.model.model.layers[1].register_forward_hook(lambda module, args, output: output * 2)
    for found, expected in zip(follow(member, "fused", STEPS), follow(member, "recompute", STEPS), strict=True):
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-3)


def test_weights_that_are_not_contiguous_are_read_right(kernels):
    member = LocalMember(KINDS["llama"](contracts.small()).to(kernels.device), contracts.small())
    head = member.model.lm_head
    head.weight = torch.nn.Parameter(head.weight.detach().T.contiguous().T)
    state = MemberState(member, [PlainContext([5])], "fused")
    with torch.no_grad():
        found, expected = state.logits(), member.model(torch.tensor([[5]], device=kernels.device)).logits[:, -1]
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-3)


class Int8Tensor(torch.nn.Parameter):
    """A stand-in for torchao's class, which is recognised by its name."""

    act_quant_kwargs = None

    def __new__(cls, weight, dims=-1):
        scale = weight.detach().abs().amax(dims, keepdim=True) / 127
        numbers = (weight.detach() / scale).round().to(torch.int8)
        made = super().__new__(cls, numbers * scale, requires_grad=False)
        made.qdata, made.scale = numbers, scale
        return made


def test_weights_of_torchao_in_int8_are_multiplied_as_they_are(kernels):
    model = KINDS["llama"](contracts.small()).to(kernels.device)
    for part in model.modules():
        if type(part) is torch.nn.Linear and part is not model.lm_head:
            part.weight = Int8Tensor(part.weight)
    model.model.layers[0].mlp.up_proj.weight.act_quant_kwargs = "activations in int8 too"
    member = LocalMember(model, contracts.small())
    found = follow(member, "fused", STEPS)
    for one, expected in zip(found, follow(member, "recompute", STEPS), strict=True):
        torch.testing.assert_close(one, expected, atol=2e-4, rtol=1e-3)
    counts = Counter(count for dtype, count in kernels.products if dtype == torch.int8)
    # Each of two rows has 8, 1, 4, 1, 32 and 256 ids; a layer has seven matrices.
    num_int8 = 7 * model.config.num_hidden_layers - 1
    assert counts == {16: num_int8, 2: 2 * num_int8, 8: num_int8}


@pytest.mark.parametrize("dims", [-1, 0, (0, 1)], ids=["rows", "columns", "whole"])
def test_int8_weights_that_are_loaded_in_place_are_read_anew(dims, kernels):
    model = KINDS["llama"](contracts.small()).to(kernels.device)
    weights = [Int8Tensor(layer.self_attn.v_proj.weight, dims) for layer in model.model.layers]
    assert weights[0].shape[0] == weights[0].shape[1]
    for layer, weight in zip(model.model.layers, weights, strict=True):
        layer.self_attn.v_proj.weight = weight
    member = LocalMember(model, contracts.small())
    for _ in range(2):
        found = follow(member, "fused", STEPS)
        for one, expected in zip(found, follow(member, "recompute", STEPS), strict=True):
            torch.testing.assert_close(one, expected, atol=2e-4, rtol=1e-3)
        for weight in weights:
            weight.scale.mul_(-3)
            weight.data.mul_(-3)


def test_replaced_weights_are_noticed_though_they_only_pack_others():
    """Such tensors have no address: kernels and graphs would go on reading the old numbers."""
    member = LocalMember(KINDS["llama"](contracts.small()), contracts.small())
    linear = member.model.model.layers[0].mlp.up_proj
    plain = linear.weight.detach()
    seen = []
    for part in (plain.clone(), plain.clone()):
        linear.weight = torch.nn.Parameter(TwoTensor(part, part), requires_grad=False)
        seen += member.fingerprint(), member.fingerprint()
    linear.weight.b = plain.clone()
    seen.append(member.fingerprint())
    assert seen[0] == seen[1] != seen[2] == seen[3] != seen[4]
    packed = TwoTensor(plain.clone(), plain), TwoTensor(plain.clone(), plain)
    assert versions_of(packed[:1]) == versions_of(packed[:1]) != versions_of(packed[1:])


def test_a_fused_model_leaves_nothing_for_the_garbage_collector(on_cpu):
    """Its weights, which take a GPU's memory, go with the last user."""
    twin = fusing.fused_model(LocalMember(tiny.tiny_llama(contracts.small(), head_dim=16), contracts.small()))
    gc.collect()
    gc.disable()
    try:
        parts = [weakref.ref(part) for part in twin.modules()]
        del twin
        assert [type(part()).__name__ for part in parts if part() is not None] == []
    finally:
        gc.enable()


def in_training(model):
    model.train()


def in_two_dtypes(model):
    model.model.norm.bfloat16()


def replaced(model):
    model.model.layers[0].mlp.forward = lambda states: states


@pytest.mark.parametrize(
    ("change", "reason"),
    [(in_training, "training mode"), (in_two_dtypes, "bfloat16"), (replaced, "layers.0.mlp' has been replaced")],
)
def test_what_cannot_be_fused_says_why(change, reason, on_cpu):
    model = tiny.tiny_llama(contracts.small(), seed=1, head_dim=16)
    change(model)
    with pytest.raises(MemberError, match=reason):
        fusing.fused_model(LocalMember(model, contracts.small()))


def test_other_kinds_of_models_are_not_fused(on_cpu):
    with pytest.raises(MemberError, match="not all of its layers"):
        fusing.fused_model(LocalMember(tiny.tiny_gpt2(contracts.small()), contracts.small()))
    with pytest.raises(MemberError, match="power of two"):
        model = tiny.tiny_llama(contracts.small(), head_dim=12)
        fusing.fused_model(LocalMember(model, contracts.small()))


def test_a_model_on_a_cpu_is_not_fused():
    member = LocalMember(tiny.tiny_llama(contracts.small()), contracts.small())
    assert member.cache_mode == "repack"
    with pytest.raises(MemberError, match="on cpu"):
        fusing.fused_model(member)


# Our kernels against the plain ones


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


@needs_triton
@pytest.mark.parametrize("adds_one", [False, True])
@pytest.mark.parametrize("width", [16, 48, 4096])
def test_norms(width, adds_one):
    states, weight = drawn(3, 2, width), drawn(width)
    found = ours().rms_norm(states, weight, 1e-6, adds_one)
    torch.testing.assert_close(found, rms_norm(states, weight, 1e-6, adds_one))


@needs_triton
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("width", [16, 512, 1200, 4096])
def test_products_with_one_vector(width, has_bias):
    states, weight, bias = drawn(1, 1, width), drawn(7, width), drawn(7) if has_bias else None
    found = ours().product(states, weight, bias)
    torch.testing.assert_close(
        found,
        torch.nn.functional.linear(states.double(), weight.double(), None if bias is None else bias.double()).float(),
        atol=1e-4,
        rtol=1e-4,
    )


@needs_triton
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_vectors", [1, 3, 32])
@pytest.mark.parametrize(("num_out", "width"), [(7, 48), (40, 512), (33, 1200)])
def test_products_with_a_matrix_in_int8(num_out, width, num_vectors, has_bias):
    generator = torch.Generator().manual_seed(width)
    weight = torch.randint(-127, 128, (num_out, width), generator=generator, dtype=torch.int8).to(DEVICE)
    states, scale = drawn(1, num_vectors, width), drawn(num_out).abs() / 100
    bias = drawn(num_out) if has_bias else None
    found = ours().product(states, weight, bias, scale)
    torch.testing.assert_close(found, product(states, weight, bias, scale), atol=1e-3, rtol=1e-4)


@needs_triton
@pytest.mark.parametrize("window", [None, 5, 100])
@pytest.mark.parametrize(
    ("num_rows", "num_new", "num_heads", "num_kept", "width", "capacity"),
    [
        (2, 1, 4, 2, 16, 192),
        (3, 4, 6, 2, 32, 128),
        (1, 16, 8, 1, 16, 320),
        (2, 2, 3, 3, 256, 128),
        (1, 1, 2, 1, 16, 8384),
    ],
)
def test_attention(num_rows, num_new, num_heads, num_kept, width, capacity, window):
    query = drawn(num_rows, num_new, num_heads, width)
    keys = drawn(num_rows, num_kept, capacity, width)
    values = keys.roll(1, -1)
    ends = torch.randint(num_new, capacity, (num_rows, 1), generator=torch.Generator().manual_seed(capacity))
    positions = (ends - num_new + torch.arange(num_new)).to(DEVICE)
    found = ours().attend(query, keys, values, positions, 0.3, window)
    torch.testing.assert_close(found, attend(query, keys, values, positions, 0.3, window), atol=1e-4, rtol=1e-4)


@needs_triton
def test_what_is_not_a_number_is_not_hidden():
    query, keys, values = drawn(1, 1, 2, 16), drawn(1, 1, 192, 16), drawn(1, 1, 192, 16)
    keys[0, 0, 3] = torch.nan
    assert ours().attend(query, keys, values, torch.tensor([[150]], device=DEVICE), 0.3, None).isnan().all()
    assert ours().attend(query, keys, values, torch.tensor([[2]], device=DEVICE), 0.3, None).isfinite().all()


@needs_triton
def test_rotation_and_slots():
    query, key, value = drawn(2, 3, 4, 16), drawn(2, 3, 2, 16), drawn(2, 3, 2, 16) + 1
    angles = drawn(1, 3, 8)
    cos, sin = (torch.cat([part, part], -1) for part in (angles.cos(), angles.sin()))
    slots = torch.tensor([[3, 4, 5], [63, 63, 0]], device=DEVICE)
    held = [torch.zeros(2, 2, 64, 16, device=DEVICE) for _ in range(4)]
    found = ours().rotate_and_keep(query, key, value, cos, sin, *held[:2], slots)
    torch.testing.assert_close(found, rotate_and_keep(query, key, value, cos, sin, *held[2:], slots))
    for one, other in zip(held[:2], held[2:], strict=True):
        torch.testing.assert_close(one[:, :, :63], other[:, :, :63])
