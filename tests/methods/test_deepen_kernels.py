"""DeePEn's rows where kernels read them in place: here with kernels of plain PyTorch, and ours where Triton runs."""

import importlib
import types

import pytest
import torch

from hf_ensemble import DeepenConfig
from hf_ensemble.methods.deepen import Deepen
from hf_ensemble.vocabulary import relative
from tests import tiny
from tests.methods.test_deepen import Case
from tests.triton import DEVICE, needs_triton


def keep_rows(products, columns, anchor_scales, own_scales, sharpness, kept, scales, slots):
    similar = products[:, columns] * anchor_scales
    similar *= (
        sharpness / similar.norm(dim=-1, keepdim=True).clamp_min(1e-30) if own_scales is None else own_scales[:, None]
    )
    shares = (similar - similar.amax(-1, keepdim=True)).exp() * 2**15
    kept[slots, : len(columns)] = shares.to(kept.dtype)
    scales[slots] = 1 / kept[slots].float().sum(-1)


def combine(kept, slots, weights, num_anchors):
    return weights @ kept[slots, :num_anchors].float()


def compare(kept, slots, weights):
    return weights @ kept[slots, : weights.shape[1]].float().T


PLAIN = types.SimpleNamespace(WIDTH_OF_BLOCKS=512, keep_rows=keep_rows, combine=combine, compare=compare)


@pytest.fixture(params=["plain", pytest.param("triton", marks=needs_triton)])
def device(request, monkeypatch):
    """The device of the members, whose rows these kernels keep and read."""
    is_plain = request.param == "plain"
    used = PLAIN if is_plain else importlib.import_module("hf_ensemble.vocabulary.relative_kernels")
    monkeypatch.setattr(relative, "_kernels", lambda device: used)
    return "cpu" if is_plain else DEVICE


def pair(device, batch_size=4):
    return Case([tiny.smol_like(), tiny.gemma_like()], batch_size, device=device)


def keep_at_most(num_rows, monkeypatch):
    monkeypatch.setattr(relative, "_CACHE_BYTES", num_rows * 4 * PLAIN.WIDTH_OF_BLOCKS)


@pytest.mark.parametrize("variant", ["released", "paper"])
@pytest.mark.parametrize(("num_rows", "support"), [(33, 30), (70, 30), (1000, 30), (1000, None)])
def test_rows_that_batches_share_change_nothing(num_rows, support, variant, device, monkeypatch):
    config = DeepenConfig(variant=variant, support=support)
    with monkeypatch.context() as patched:
        patched.setattr(relative, "_kernels", lambda device: None)
        expected = pair("cpu", batch_size=6).mix(config)
    case = pair(device, batch_size=6)
    keep_at_most(num_rows, monkeypatch)
    method = case.method(config)
    for order in ([0, 1, 2, 3, 4, 5], [3, 1, 0], [2], [2, 2, 2, 5], [4, 5]):
        with torch.no_grad():
            found = method.mix([logits[order] for logits in case.logits], case.weights[order]).logprobs.exp()
        torch.testing.assert_close(found.cpu(), expected[order], atol=1e-5, rtol=1e-3)
        for rows in method._rows:
            kept = (rows._slot_of >= 0).nonzero()[:, 0]
            assert len(kept) <= rows.capacity
            assert rows._id_at[rows._slot_of[kept]].tolist() == kept.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_few_anchors_tiny_entries_count(dtype, device, monkeypatch):
    """Each token of the support may be near one anchor and far from all others."""
    config = DeepenConfig(num_anchors=5, support=3, num_steps=9)
    cases = [pair(on, batch_size=9) for on in ("cpu", device)]
    for case in cases:
        case.embeddings = [embedding.to(dtype) for embedding in case.embeddings]
    found = cases[1].mix(config)
    monkeypatch.setattr(relative, "_kernels", lambda device: None)
    torch.testing.assert_close(found.cpu(), cases[0].mix(config), atol=1e-5, rtol=1e-3)


def test_a_batch_whose_ids_fit_is_searched_at_once_and_a_larger_one_in_few_parts(device, monkeypatch):
    case, search, sizes = pair(device, batch_size=6), Deepen._search_logits, []
    monkeypatch.setattr(Deepen, "_search_logits", lambda *args: sizes.append(len(args[1])) or search(*args))
    keep_at_most(1000, monkeypatch)
    case.mix(DeepenConfig(support=40))
    assert sizes == [6]
    sizes.clear()
    keep_at_most(120, monkeypatch)
    case.mix(DeepenConfig(support=40))
    assert sum(sizes) == 6
    assert 1 < len(sizes) <= 4


def test_a_row_of_nan_spoils_no_other_row_of_the_batch(device):
    case = pair(device)
    case.weights = case.weights.new_tensor([[0.5, 0.5], [1.0, 0.0], [0.0, 1.0], [0.3, 0.7]])
    case.logits[1][1] = torch.nan
    config = DeepenConfig(support=20)
    with torch.no_grad():
        found = case.method(config).mix(case.logits, case.weights).logprobs
        alone = [
            case.method(config).mix([one[[n]] for one in case.logits], case.weights[[n]]).logprobs for n in range(4)
        ]
    torch.testing.assert_close(found, torch.cat(alone), atol=1e-5, rtol=1e-4)
    assert found.exp().sum(-1).tolist() == pytest.approx([1] * 4, abs=1e-5)


def test_rows_unused_for_longest_are_dropped_first(device, monkeypatch):
    keep_at_most(4, monkeypatch)
    embeddings = torch.randn(40, 16, generator=torch.Generator().manual_seed(0)).to(device)
    rows = relative.RelativeRows(embeddings, torch.arange(30, device=device), 100.0)
    for ids in ([1, 2, 3, 4], [2, 3], [5, 6], [2, 7]):
        wanted = torch.tensor(ids, device=device)
        rows.keep(wanted, int(rows.is_missing(wanted).sum()))
    kept = (rows._slot_of >= 0).nonzero()[:, 0]
    assert kept.tolist() == [2, 5, 6, 7]
    found = rows.take(kept).combine(torch.eye(4, device=device))
    torch.testing.assert_close(found, rows.form(kept), atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize("copies_anchors", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sharpness", [None, 100.0])
def test_kept_rows_are_those_that_are_formed(sharpness, dtype, copies_anchors, device, monkeypatch):
    """In 16 bits if the embeddings are: with eleven bits of precision, and a floor far below what counts."""
    monkeypatch.setattr(relative, "_COPY_BYTES", 2**20 * copies_anchors)
    monkeypatch.setattr(relative, "_LEAST_HALVED", 700)
    generator = torch.Generator().manual_seed(1)
    embeddings = torch.randn(900, 24, generator=generator).to(device, dtype)
    embeddings[7] = 0
    anchors = torch.randperm(900, generator=generator)[:700].to(device)
    ids = torch.tensor([7, 11, 650, 3, 899], device=device)
    rows = relative.RelativeRows(embeddings, anchors, sharpness)
    rows.keep(ids, len(ids))
    assert rows._kept.dtype == (torch.float32 if dtype == torch.float32 or sharpness is None else torch.float16)
    expected = rows.form(ids)
    tolerance = {"atol": 1e-9, "rtol": 2e-3 if rows._kept.dtype == torch.float16 else 1e-4}
    probs = torch.rand(3, 4, generator=generator).to(device)
    places = torch.tensor([[0, 1, 2, 3], [4, 2, 1, 0], [2, 3, 0, 1]], device=device)
    taken = rows.take(ids, places)
    torch.testing.assert_close(
        taken.combine(probs), torch.stack([p @ expected[at] for p, at in zip(probs, places, strict=True)]), **tolerance
    )
    weights = torch.rand(3, 700, generator=generator).to(device)
    found = torch.stack([expected[at] @ w for w, at in zip(weights, places, strict=True)])
    torch.testing.assert_close(taken.compare(weights), found, **tolerance)
    alone = rows.take(ids)
    torch.testing.assert_close(alone.combine(torch.eye(5, device=device)), expected, **tolerance)
    torch.testing.assert_close(alone.compare(weights[:1]), weights[:1] @ expected.T, **tolerance)
