"""DeePEn's rows where kernels read them in place: here with kernels of plain PyTorch, and ours where Triton runs."""

import importlib
import os
import types

import pytest
import torch

from hf_ensemble import DeepenConfig
from hf_ensemble.vocabulary import relative
from tests import tiny
from tests.methods.test_deepen import Case

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_triton = pytest.mark.skipif(
    not (torch.cuda.is_available() or IS_INTERPRETED), reason="needs a CUDA device, or Triton's interpreter"
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def ours():
    return importlib.import_module("hf_ensemble.vocabulary.relative_kernels")


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
def kernels(request, monkeypatch):
    used = PLAIN if request.param == "plain" else ours()
    monkeypatch.setattr(relative, "_kernels", lambda device: used)
    return types.SimpleNamespace(device="cpu" if request.param == "plain" else DEVICE)


def on(device, case):
    case.device = torch.device(device)
    case.embeddings = [embedding.to(device) for embedding in case.embeddings]
    case.logits = [logits.to(device) for logits in case.logits]
    case.weights = case.weights.to(device)
    return case


@pytest.mark.parametrize("variant", ["released", "paper"])
@pytest.mark.parametrize(("num_rows", "support"), [(33, 30), (70, 30), (1000, 30), (1000, None)])
def test_rows_that_batches_share_change_nothing(num_rows, support, variant, kernels, monkeypatch):
    config = DeepenConfig(variant=variant, support=support)
    with monkeypatch.context() as patched:
        patched.setattr(relative, "_kernels", lambda device: None)
        expected = Case([tiny.smol_like(), tiny.gemma_like()], batch_size=6).mix(config)
    case = on(kernels.device, Case([tiny.smol_like(), tiny.gemma_like()], batch_size=6))
    monkeypatch.setattr(relative, "_CACHE_BYTES", num_rows * 4 * 512)
    method = case.method(config)
    for order in ([0, 1, 2, 3, 4, 5], [3, 1, 0], [2], [2, 2, 2, 5], [4, 5]):
        with torch.no_grad():
            found = method.mix([logits[order] for logits in case.logits], case.weights[order]).logprobs.exp()
        torch.testing.assert_close(found.cpu(), expected[order], atol=1e-5, rtol=1e-3)
        for rows in method._rows:
            kept = (rows._slot_of >= 0).nonzero()[:, 0]
            assert len(kept) <= rows.capacity
            assert rows._id_at[rows._slot_of[kept]].tolist() == kept.tolist()


def test_a_batch_whose_ids_fit_is_searched_at_once_and_a_larger_one_in_few_parts(kernels, monkeypatch):
    case = on(kernels.device, Case([tiny.smol_like(), tiny.gemma_like()], batch_size=6))
    sizes = []
    for num_rows, expected in ((1000, [6]), (120, [2, 2, 2])):
        monkeypatch.setattr(relative, "_CACHE_BYTES", num_rows * 4 * 512)
        method, searched = case.method(DeepenConfig(support=40)), []
        search = method._search_logits
        method._search_logits = lambda *args, search=search, done=searched: done.append(len(args[0])) or search(*args)
        with torch.no_grad():
            method.mix(case.logits, case.weights)
        sizes.append((searched, expected))
    assert sizes[0][0] == sizes[0][1]
    assert sum(sizes[1][0]) == 6
    assert 1 < len(sizes[1][0]) <= 4


def test_a_row_of_a_batch_without_numbers_spoils_no_other(kernels):
    case = on(kernels.device, Case([tiny.smol_like(), tiny.gemma_like()]))
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


def test_rows_unused_for_longest_are_dropped_first(kernels):
    embeddings = torch.randn(40, 16, generator=torch.Generator().manual_seed(0)).to(kernels.device)
    rows = relative.RelativeRows(embeddings, torch.arange(30, device=kernels.device), 100.0)
    rows.capacity = 4
    rows._id_at, rows._used_at = rows._id_at[:5].fill_(40), rows._used_at[:5]
    rows.reserve()
    for ids in ([1, 2, 3, 4], [2, 3], [5, 6], [2, 7]):
        wanted = torch.tensor(ids, device=kernels.device)
        rows.keep(wanted, int(rows.is_missing(wanted).sum()))
    kept = (rows._slot_of >= 0).nonzero()[:, 0].tolist()
    assert kept == [2, 5, 6, 7]
    probs = torch.eye(4, device=kernels.device)
    found = rows.take(torch.tensor(kept, device=kernels.device)).combine(probs)
    torch.testing.assert_close(found, rows.form(torch.tensor(kept, device=kernels.device)), atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize("copies_anchors", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sharpness", [None, 100.0])
def test_kept_rows_are_those_that_are_formed(sharpness, dtype, copies_anchors, kernels, monkeypatch):
    """In 16 bits if the embeddings are: with eleven bits of precision, and a floor far below what counts."""
    monkeypatch.setattr(relative, "_COPY_BYTES", 2**20 * copies_anchors)
    generator = torch.Generator().manual_seed(1)
    embeddings = torch.randn(900, 24, generator=generator).to(kernels.device, dtype)
    embeddings[7] = 0
    anchors = torch.randperm(900, generator=generator)[:700].to(kernels.device)
    ids = torch.tensor([7, 11, 650, 3, 899], device=kernels.device)
    rows = relative.RelativeRows(embeddings, anchors, sharpness)
    rows.reserve()
    rows.keep(ids, len(ids))
    assert rows._kept.dtype == (torch.float32 if dtype == torch.float32 or sharpness is None else torch.float16)
    expected = rows.form(ids)
    tolerance = {"atol": 1e-9, "rtol": 2e-3 if rows._kept.dtype == torch.float16 else 1e-4}
    probs = torch.rand(3, 4, generator=generator).to(kernels.device)
    places = torch.tensor([[0, 1, 2, 3], [4, 2, 1, 0], [2, 3, 0, 1]], device=kernels.device)
    taken = rows.take(ids, places)
    torch.testing.assert_close(
        taken.combine(probs), torch.stack([p @ expected[at] for p, at in zip(probs, places, strict=True)]), **tolerance
    )
    weights = torch.rand(3, 700, generator=generator).to(kernels.device)
    found = torch.stack([expected[at] @ w for w, at in zip(weights, places, strict=True)])
    torch.testing.assert_close(taken.compare(weights), found, **tolerance)
    alone = rows.take(ids)
    torch.testing.assert_close(alone.combine(torch.eye(5, device=kernels.device)), expected, **tolerance)
    torch.testing.assert_close(alone.compare(weights[:1]), weights[:1] @ expected.T, **tolerance)
