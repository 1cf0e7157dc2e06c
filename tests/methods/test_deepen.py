"""DeePEn against full matrices, `torch.autograd` and `torch.optim`; what it leaves alone; what it refuses."""

import dataclasses
import itertools
import math

import pytest
import torch
from torch import nn

from hf_ensemble import AnchorTokens, ConfigurationError, DeepenConfig, MemberError, UnionVocabulary, VocabularyError
from hf_ensemble.methods import deepen as deepen_module
from hf_ensemble.methods.deepen import Deepen
from hf_ensemble.vocabulary import relative
from hf_ensemble.vocabulary.encoding import ByteEncoder
from hf_ensemble.vocabulary.relative import RelativeRows
from hf_ensemble.vocabulary.token_bytes import TokenBytes
from tests import tiny
from tests.contracts import CORE_RECIPES, changed_logits, make_ensemble, prompt_rows, run
from tests.reference import ReferenceMember

CONFIGS = [DeepenConfig(support=None), DeepenConfig(variant="paper", support=None)]
each_variant = pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.variant)


class Case:
    """Members without models: tokenizers, embeddings, and logits for a batch."""

    def __init__(self, tokenizers, batch_size=4, widths=(12, 20, 7), seed=0, spread=3.0, device="cpu"):
        generator = torch.Generator().manual_seed(seed)
        self.tokenizers = tokenizers
        self.device = torch.device(device)
        self.members = [ReferenceMember(tiny.ScriptedModel(t), t) for t in tokenizers]
        sizes = [tiny.rows_of(tokenizer) for tokenizer in tokenizers]
        self.embeddings = [
            nn.Embedding(size, width, _weight=torch.randn(size, width, generator=generator).to(device))
            for size, width in zip(sizes, widths, strict=False)
        ]
        self.logits = [spread * torch.randn(batch_size, size, generator=generator).to(device) for size in sizes]
        self.weights = torch.rand(batch_size, len(sizes), generator=generator).to(device) + 0.1
        self.weights /= self.weights.sum(-1, keepdim=True)
        self.union = UnionVocabulary.from_tokenizers(tokenizers, cache=False)
        self.eos_ids = [sorted(member.eos_ids) for member in self.members]

    def method(self, config) -> Deepen:
        return Deepen(self.union, self.eos_ids, self.device, self.embeddings, config)

    def mix(self, config):
        with torch.no_grad():
            return self.method(config).mix(self.logits, self.weights).logprobs.exp()


@pytest.fixture(scope="module")
def two():
    return Case([tiny.smol_like(), tiny.gemma_like()])


@pytest.fixture(scope="module")
def three():
    return Case([tiny.gemma_like(), tiny.byte_level_bpe(500), tiny.unigram()], seed=1)


def full_matrices(case, config) -> list[torch.Tensor]:
    keys = set.intersection(*({*member.entries} for member in case.members))
    keys = [key for i, key in sorted(case.members[0].token_bytes.items()) if key in keys]
    keys = list(dict.fromkeys(keys))
    matrices = []
    for member, embedding in zip(case.members, case.embeddings, strict=True):
        unit = nn.functional.normalize(embedding.weight.detach().double(), dim=-1)
        similarities = unit @ unit[[member.canonical_id(key) for key in keys]].T
        if config.variant == "released":
            similarities = 100 * nn.functional.normalize(similarities, dim=-1)
        matrices.append(similarities.softmax(-1))
    return matrices


def plainly(case, config) -> torch.Tensor:
    """Row by row, with full matrices in float64, automatic gradients and the optimizer of the published code."""
    matrices = full_matrices(case, config)
    rows = []
    for row in range(len(case.weights)):
        probs, target = [], 0
        for index, member in enumerate(case.members):
            ids = [*member.token_bytes, *(member.control if index == 0 else member.control_eos)]
            logits = torch.full((tiny.rows_of(member.tokenizer),), -torch.inf, dtype=torch.float64)
            logits[ids] = case.logits[index][row, ids].double()
            probs.append(logits.softmax(-1))
            if case.weights[row, index] > 0:
                target = target + case.weights[row, index].double() * (probs[-1] @ matrices[index])
        result = probs[0]
        own = case.weights[row, 0] == 1 or int(probs[0].argmax()) in case.members[0].control_eos
        if not own and config.variant == "released":
            logits = probs[0].log().clamp_min(-1e5).requires_grad_()
            optimizer = torch.optim.AdamW([logits], lr=config.learning_rate, weight_decay=0.01)
            annealing = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10, config.learning_rate / 4)
            for _ in range(config.num_steps):
                loss = nn.functional.kl_div((logits.softmax(-1) @ matrices[0]).log(), target, reduction="sum") / len(
                    target
                )
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                annealing.step()
            result = logits.detach().softmax(-1)
        elif not own:
            result = probs[0].clone()
            for _ in range(config.num_steps):
                result.requires_grad_()
                loss = nn.functional.kl_div((result @ matrices[0]).log(), target, reduction="sum")
                (gradient,) = torch.autograd.grad(loss, result)
                result = (result - config.learning_rate * gradient).detach()
            result = (result * (probs[0] > 0)).clamp_min(0)
            result /= result.sum()
        rows.append(result)
    return torch.stack(rows)


def pooled(case, by_id: torch.Tensor) -> torch.Tensor:
    """Probabilities of ids as those of entries, EOS at its best id."""
    member = case.members[0]
    entries = torch.zeros_like(by_id)
    for key, ids in member.entries.items():
        entries[:, member.canonical_id(key)] = by_id[:, ids].sum(-1)
    for i in member.control - {*member.control_eos}:
        entries[:, i] = by_id[:, i]
    if member.control_eos:
        best = case.logits[0][:, member.control_eos].argmax(-1)
        at = torch.tensor(member.control_eos)[best]
        entries[range(len(at)), at] = by_id[:, member.control_eos].sum(-1)
    return entries


@each_variant
@pytest.mark.parametrize("name", ["two", "three"])
def test_equals_full_matrices_with_automatic_gradients(name, config, request):
    case = request.getfixturevalue(name)
    found = case.mix(config)
    torch.testing.assert_close(found, pooled(case, plainly(case, config)).float(), atol=1e-4, rtol=1e-3)
    if config.variant == "released":
        own = pooled(case, torch.stack([row.softmax(-1) for row in case.logits[0]]))
        assert (found - own).abs().max() > 0.05


@pytest.mark.parametrize("options", [{"num_anchors": 1, "support": None}, {"support": 1}], ids=str)
def test_rounding_moves_nothing_where_the_search_cannot(two, options):
    """One anchor to which every token is equally similar, or one token that has all the probability."""
    config = DeepenConfig(num_steps=9, **options)
    method = two.method(config)
    logits = method.masked(two.logits[0], 0).double()
    assert not set(logits.argmax(-1).tolist()) & set(two.eos_ids[0])
    decay = math.prod(1 - 0.01 * method._rate(step) for step in range(9))
    expected = pooled(two, (logits * decay).softmax(-1))
    torch.testing.assert_close(two.mix(config).double(), expected, atol=1e-6, rtol=1e-4)


@each_variant
@pytest.mark.parametrize("spread", [0.3, 12.0])
def test_equals_them_for_flat_and_for_sharp_distributions(config, spread):
    case = Case([tiny.smol_like(), tiny.gemma_like()], spread=spread, seed=2)
    config = dataclasses.replace(config, num_steps=9, learning_rate=0.3)
    torch.testing.assert_close(case.mix(config), pooled(case, plainly(case, config)).float(), atol=1e-4, rtol=1e-3)


def test_a_member_that_sits_a_row_out_has_no_part_in_it(three):
    case = Case(three.tokenizers, seed=3)
    case.weights = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.0, 0.8], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    case.logits[2][[0, 2]] = torch.nan
    config = CONFIGS[0]
    with torch.no_grad():
        found = case.method(config).mix(case.logits, case.weights).logprobs.exp()
    torch.testing.assert_close(found, pooled(case, plainly(case, config)).float(), atol=1e-4, rtol=1e-3)
    case.weights[:, 2] = 0
    case.weights /= case.weights.sum(-1, keepdim=True).clamp_min(1e-9)
    with torch.no_grad():
        without = case.method(config).mix([*case.logits[:2], None], case.weights).logprobs.exp()
    torch.testing.assert_close(without[[0, 2, 3]], found[[0, 2, 3]])
    with_logits, without = (
        case.method(DeepenConfig(support=20)).mix([*case.logits[:2], last], case.weights).logprobs
        for last in (case.logits[2], None)
    )
    torch.testing.assert_close(with_logits, without)


def test_where_the_primarys_best_token_is_eos_its_distribution_stands(two):
    case = Case(two.tokenizers, seed=4)
    case.logits[0][1, case.eos_ids[0][0]] = 30.0
    found = case.mix(DeepenConfig())
    own = pooled(case, case.logits[0].softmax(-1))
    torch.testing.assert_close(found[1], own[1], atol=1e-5, rtol=1e-4)
    assert (found[0] - own[0]).abs().max() > 0.01


def test_skipping_on_agreement_leaves_the_primarys_distribution_where_the_best_entries_are_the_same(two):
    case = Case(two.tokenizers, seed=5)
    key = b" the"
    for member, logits in zip(case.members, case.logits, strict=True):
        logits[2, member.canonical_id(key)] = 30.0
    plain, skipping = case.mix(DeepenConfig()), case.mix(DeepenConfig(skip_on_agreement=True))
    own = pooled(case, case.logits[0].softmax(-1))
    torch.testing.assert_close(skipping[2], own[2], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(skipping[[0, 1, 3]], plain[[0, 1, 3]])


@pytest.mark.parametrize("variant", ["released", "paper"])
def test_ids_outside_of_the_support_keep_their_order_and_decayed_logits(two, variant):
    config = DeepenConfig(variant=variant, support=20)
    found = two.mix(config).log()
    order = two.logits[0].argsort(-1, descending=True)
    plain = [i for i in order[0].tolist() if i in two.members[0].token_bytes]
    outside = [i for i in plain if i not in order[0, :40] and found[0, i] > -torch.inf][:50]
    assert found[0, outside].diff().le(1e-6).all()
    if variant == "released":
        rates = [0.0375 + 0.1125 * (1 + torch.cos(torch.tensor(torch.pi * t / 10)).item()) / 2 for t in range(5)]
        decay = torch.tensor([1 - 0.01 * rate for rate in rates]).prod()
        expected = two.logits[0][0, outside] * decay
        torch.testing.assert_close(found[0, outside].diff(), expected.diff(), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("variant", ["released", "paper"])
def test_a_support_of_all_ids_is_exact_and_a_large_one_is_near(two, variant):
    exact = two.mix(DeepenConfig(variant=variant, support=None))
    everything = two.mix(DeepenConfig(variant=variant, support=10_000))
    torch.testing.assert_close(everything, exact)
    large = two.mix(DeepenConfig(variant=variant, support=390))
    assert (large - exact).abs().sum(-1).max() < 0.1


@pytest.mark.parametrize("support", [None, 30])
def test_neither_the_bound_of_kept_rows_nor_their_way_of_forming_changes_anything(two, monkeypatch, support):
    config = DeepenConfig(support=support)
    expected = two.mix(config)
    row = 4 * two.method(config)._num_anchors
    bounds = itertools.product((row * 33, row * 64), (0, 2**20), (row, 2**20), (row, 2**20))
    if support is None:
        bounds = ((row * 64, 0, 2**20, 2**20), (row * 200, 2**20, row * 9, row * 2))
    for cache, copy, scratch, block in bounds:
        monkeypatch.setattr(relative, "_CACHE_BYTES", cache)
        monkeypatch.setattr(relative, "_COPY_BYTES", copy)
        monkeypatch.setattr(relative, "_SCRATCH_BYTES", scratch)
        monkeypatch.setattr(relative, "_BLOCK_BYTES", block)
        method = two.method(config)
        for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2]):
            with torch.no_grad():
                found = method.mix([logits[order] for logits in two.logits], two.weights[order]).logprobs.exp()
            torch.testing.assert_close(found, expected[order], atol=1e-5, rtol=1e-3)
            assert all(int((rows._slot_of >= 0).sum()) <= rows.capacity for rows in method._rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_embeddings_are_compared_in_float32(dtype, monkeypatch):
    monkeypatch.setattr(relative, "_CONVERTED_ROWS", 50)
    generator = torch.Generator().manual_seed(0)
    embeddings = torch.randn(300, 64, generator=generator).to(dtype)
    anchors = torch.arange(20, 200)
    ids = torch.tensor([5, 250, 100])
    for sharpness in (None, 100.0):
        half = RelativeRows(embeddings, anchors, sharpness).form(ids)
        full = RelativeRows(embeddings.float(), anchors, sharpness).form(ids)
        torch.testing.assert_close(half, full, atol=1e-7, rtol=1e-4)


def test_embeddings_that_change_are_read_again(two):
    case = Case(two.tokenizers, seed=6)
    method = case.method(DeepenConfig())
    with torch.no_grad():
        method.mix(case.logits, case.weights)
        case.embeddings[1].weight.mul_(torch.randn_like(case.embeddings[1].weight))
        found = method.mix(case.logits, case.weights).logprobs.exp()
    torch.testing.assert_close(found, case.mix(DeepenConfig()))
    method.forget()
    assert all(rows._kept is None for rows in method._rows)
    with torch.no_grad():
        torch.testing.assert_close(method.mix(case.logits, case.weights).logprobs.exp(), found)


@pytest.mark.parametrize("variant", ["released", "paper"])
def test_embeddings_of_zeros_take_no_part(two, variant):
    """Neither as anchors nor as tokens, whichever member has them."""
    case = Case(two.tokenizers, seed=7)
    common = [key for key in case.members[0].entries if key in case.members[1].entries]
    config = DeepenConfig(variant=variant, support=None)
    dead = [member.canonical_id(key) for member, key in zip(case.members, common, strict=False)]
    with torch.no_grad():
        for embedding, i in zip(case.embeddings, dead, strict=True):
            embedding.weight[i] = 0
    found = case.mix(config)
    assert found.isfinite().all()
    assert found.sum(-1).tolist() == pytest.approx([1] * len(found), abs=1e-5)
    assert found[:, dead[0]].tolist() == [0] * len(found)
    for logits, i in zip(case.logits, dead, strict=True):
        logits[:, i] = -50.0
    torch.testing.assert_close(case.mix(config), found)
    assert case.method(config)._num_anchors == len(common) - 2


@each_variant
def test_columns_without_a_token_change_nothing(two, config):
    """Padded embeddings: whatever stands in them, in either member."""
    padded = Case(two.tokenizers, seed=0)
    for index, embedding in enumerate(two.embeddings):
        weight = torch.cat([embedding.weight.detach(), 5 * torch.ones(9, embedding.weight.shape[1])])
        padded.embeddings[index] = nn.Embedding(*weight.shape, _weight=weight)
        padded.logits[index] = torch.cat([two.logits[index], torch.full((4, 9), 20.0)], dim=-1)
    encoders = [
        ByteEncoder(tokenizer, TokenBytes(tokenizer, num_ids=logits.shape[1], cache=False))
        for tokenizer, logits in zip(padded.tokenizers, padded.logits, strict=True)
    ]
    padded.union = UnionVocabulary(encoders, cache=False)
    found = padded.mix(config)
    assert found[:, -9:].tolist() == [[0] * 9] * 4
    torch.testing.assert_close(found[:, :-9], two.mix(config), atol=1e-6, rtol=1e-4)


def test_no_living_anchor_and_no_common_entry_are_errors_when_it_is_built(two):
    case = Case(two.tokenizers, seed=8)
    with torch.no_grad():
        case.embeddings[1].weight.zero_()
    with pytest.raises(VocabularyError, match="non-zero"):
        case.method(DeepenConfig())
    with pytest.raises(VocabularyError, match="no entry in common"):
        AnchorTokens.from_tokenizers(tiny.disjoint_pair(), cache=False)


@pytest.mark.parametrize("num_anchors", [1, 2, 5])
@pytest.mark.parametrize("variant", ["released", "paper"])
@pytest.mark.parametrize("support", [None, 8])
def test_few_anchors_give_finite_numbers(two, num_anchors, variant, support):
    found = two.mix(DeepenConfig(variant=variant, num_anchors=num_anchors, support=support))
    assert found.isfinite().all()
    assert found.sum(-1).tolist() == pytest.approx([1] * len(found), abs=1e-5)


def test_embeddings_that_cannot_be_read_are_refused(two):
    case = Case(two.tokenizers)
    wrong = {
        "offloaded": torch.empty(case.embeddings[1].weight.shape, device="meta"),
        "int8": torch.zeros(case.embeddings[1].weight.shape, dtype=torch.int8),
        r"\(10, 4\)": torch.zeros(10, 4),
    }
    for match, weight in wrong.items():
        module = nn.Module()
        module.weight = weight
        case.embeddings[1] = module
        with pytest.raises(ConfigurationError, match=rf"member 1.*{match}"):
            case.method(DeepenConfig())


def test_anchors_are_the_common_entries_in_the_primarys_order_or_drawn_from_them(three):
    anchors = AnchorTokens(three.union)
    keys = [three.union.entry(i) for i in anchors.union_ids.tolist()]
    expected = set.intersection(*({*member.entries} for member in three.members))
    assert set(keys) == expected
    assert len(keys) == len(expected) == len(anchors) == anchors.num_common
    for member, ids in zip(three.members, anchors.ids, strict=True):
        assert [member.canonical_id(key) for key in keys] == ids.tolist()
    assert anchors.ids[0].tolist() == sorted(anchors.ids[0].tolist())
    state = torch.get_rng_state()
    drawn = [AnchorTokens(three.union, 40, seed) for seed in (0, 0, 1)]
    assert torch.equal(torch.get_rng_state(), state)
    order = torch.randperm(len(anchors), generator=torch.Generator().manual_seed(0))[:40]
    assert {*drawn[0].union_ids.tolist()} == {*anchors.union_ids[order.numpy()].tolist()}
    assert drawn[0].union_ids.tolist() == drawn[1].union_ids.tolist() != drawn[2].union_ids.tolist()
    assert len(AnchorTokens(three.union, 10**6)) == len(anchors)


def test_a_single_tokenizers_control_tokens_are_no_anchors(three):
    union = UnionVocabulary.from_tokenizers(three.tokenizers[:1], cache=False)
    assert {*AnchorTokens(union).ids[0].tolist()}.isdisjoint(three.members[0].control)


@pytest.mark.parametrize(
    "options",
    [{"variant": "other"}, {"num_anchors": 0}, {"num_anchors": 2.5}, {"anchor_seed": "a"}, {"learning_rate": 0},
     {"learning_rate": float("nan")}, {"learning_rate": 2}, {"num_steps": 0}, {"num_steps": None}, {"support": 0},
     {"support": True}, {"skip_on_agreement": 1}],
    ids=str,
)  # fmt: skip
def test_options_are_checked(options):
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        DeepenConfig(**options)


@pytest.mark.parametrize("config", [DeepenConfig(variant="paper"), DeepenConfig(skip_on_agreement=True)], ids=str)
def test_options_for_greedy_decoding_refuse_sampling_and_beams(config):
    ensemble = CORE_RECIPES[0].ensemble
    rows = prompt_rows(ensemble)[:1]
    for options in ({"do_sample": True}, {"num_beams": 2}):
        with pytest.raises(ConfigurationError, match=rf"{next(iter(options))}.*deepen"):
            run(ensemble, rows, method=config, **options)
        # With all weight on the primary, its own `generate` runs.
        run(ensemble, rows, method=config, weights=[1, 0], max_new_tokens=1, **options)
    assert run(ensemble, rows, method=config).num_new > 0


def test_a_primary_of_weight_0_is_still_where_the_search_starts():
    ensemble = CORE_RECIPES[0].ensemble
    rows = prompt_rows(ensemble)[:1]
    output = run(ensemble, rows, method="deepen", weights=[0, 1])
    assert output.logits[0].exp().sum().item() == pytest.approx(1, abs=1e-5)
    with (
        changed_logits(ensemble.members[0], lambda logits: logits * torch.nan),
        pytest.raises(MemberError, match="member-0"),
    ):
        run(ensemble, rows, method="deepen", weights=[0, 1])


def test_only_the_method_in_use_holds_rows():
    recipe = CORE_RECIPES[0]
    models, tokenizers = recipe.ensemble.members, recipe.ensemble.tokenizers
    ensemble = make_ensemble(models, tokenizers)
    rows = prompt_rows(ensemble)[:1]
    for method in (DeepenConfig(num_anchors=20), DeepenConfig(), "gac"):
        run(ensemble, rows, method=method, max_new_tokens=2, eos_token_id=None)
    methods = [method for method in ensemble._kept.methods.values() if isinstance(method, Deepen)]
    assert len(methods) == 2
    assert all(rows._kept is None for method in methods for rows in method._rows)
    run(ensemble, rows, method="deepen", max_new_tokens=2, eos_token_id=None)
    assert [rows._kept is None for method in methods for rows in method._rows] == [True, True, False, False]


def test_the_rate_is_annealed_as_the_optimizers_schedule_does(two):
    config = DeepenConfig(num_steps=14, learning_rate=0.2)
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=0.2)
    annealing = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, deepen_module._ANNEALING_STEPS, 0.05)
    for step in range(config.num_steps):
        assert two.method(config)._rate(step) == pytest.approx(annealing.get_last_lr()[0], abs=1e-9)
        optimizer.step()
        annealing.step()
