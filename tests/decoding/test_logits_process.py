"""The ensemble as a plain logits processor beside a model's own `generate`."""

import functools

import pytest
import torch
from transformers import LogitsProcessorList

from hf_ensemble import ConfigurationError, EnsembleLogitsProcessor, MemberError
from tests import contracts
from tests.contracts import METHODS, Recipe, cases, changed_logits, padded, run

RECIPES = (
    contracts.CORE_RECIPES[0],
    contracts.CORE_RECIPES[1],
    Recipe((("mistral", "byte-level"), ("lfm2", "gemma"))),
)

each_case = pytest.mark.parametrize(("ensemble", "method"), cases(RECIPES, METHODS), indirect=["ensemble"])
each_recipe = pytest.mark.parametrize("ensemble", RECIPES, ids=str, indirect=True)

WAYS = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 1.5},
    "top-k": {"do_sample": True, "top_k": 5, "num_return_sequences": 2},
    "beams": {"num_beams": 3},
    "drawn beams": {"num_beams": 2, "do_sample": True},
}


def cases_in(ways):
    """All cases in all ways; quick are GaC on the first recipe in each, and the other quick cases in every other way."""
    params = [
        pytest.param(
            *case.values, way, id=f"{way}-{case.id}", marks=[*case.marks, *[pytest.mark.slow] * (n and (n + k) % 2)]
        )
        for k, way in enumerate(ways)
        for n, case in enumerate(cases(RECIPES, METHODS))
    ]
    return pytest.mark.parametrize(("ensemble", "method", "way"), params, indirect=["ensemble"])


def unchanged(input_ids, scores):
    """With a processor of the user's, the ensemble decides over the primary's columns."""
    return scores


@functools.cache
def make_processor(ensemble, method, weights, pad_token_id):
    members = list(ensemble.members)
    return EnsembleLogitsProcessor(members, ensemble.tokenizers, method, weights, pad_token_id)


def processor_of(ensemble, method, weights=None, pad_token_id=None):
    """As if new: making one tries out every member's cache."""
    processor = make_processor(ensemble, method, weights, pad_token_id)
    processor.reset()
    return processor


@pytest.fixture
def ensemble(request):
    return request.param.ensemble


def prompt_rows(ensemble):
    """Immutable."""
    return tuple(map(tuple, contracts.prompt_rows(ensemble)))


def beside(ensemble, processors, inputs, **options):
    torch.manual_seed(3)
    processors = LogitsProcessorList(processors)
    return run(ensemble.members[0], inputs, logits_processor=processors, output_scores=True, **options)


@functools.cache
def folded(ensemble, method, rows, pad_token_id=None, **options):
    """What the ensemble itself writes after rows, padded with the id where there is one; the same object every time."""
    inputs = rows
    if pad_token_id is not None:
        inputs, options["pad_token_id"] = padded(rows, fill=lambda n: pad_token_id), pad_token_id
    torch.manual_seed(3)
    return run(ensemble, inputs, method=method, logits_processor=[unchanged], output_scores=True, **options)


@cases_in(WAYS)
def test_it_writes_what_the_ensemble_writes(ensemble, method, way):
    rows = prompt_rows(ensemble)[:1]
    found = beside(ensemble, [processor_of(ensemble, method)], rows, **WAYS[way])
    expected = folded(ensemble, method, rows, **WAYS[way])
    assert found.sequences.tolist() == expected.sequences.tolist()
    if "num_beams" in WAYS[way]:
        torch.testing.assert_close(found.sequences_scores, expected.sequences_scores, atol=1e-4, rtol=1e-4)
    for a, b in zip(found.scores, expected.scores, strict=True):
        torch.testing.assert_close(a.softmax(-1), b.softmax(-1), atol=1e-5, rtol=1e-3)


@each_recipe
def test_under_unite_it_is_the_ensemble_without_any_folding(ensemble):
    rows = prompt_rows(ensemble)[:1]
    found = beside(ensemble, [processor_of(ensemble, "unite")], rows)
    assert found.sequences.tolist() == run(ensemble, rows, method="unite").sequences.tolist()


@cases_in(["greedy", "beams"])
def test_a_batch_with_padding_is_the_ensembles(ensemble, method, way):
    """The leading run of pad ids is padding; here the end id pads, as for many models."""
    pad = ensemble.tokenizer.pad_token_id
    batch = padded(prompt_rows(ensemble), fill=lambda n: pad)
    found = beside(ensemble, [processor_of(ensemble, method, pad_token_id=pad)], batch, pad_token_id=pad, **WAYS[way])
    expected = folded(ensemble, method, prompt_rows(ensemble), pad, **WAYS[way])
    assert found.sequences.tolist() == expected.sequences.tolist()


@each_case
def test_a_column_that_arrives_at_minus_infinity_leaves_so(ensemble, method):
    rows = prompt_rows(ensemble)[:1]
    free = beside(ensemble, [processor_of(ensemble, method)], rows)
    banned = sorted(set(free.sequences[0, len(rows[0]) :].tolist()))

    def ban(input_ids, scores):
        return scores.index_fill(1, torch.tensor(banned), -torch.inf)

    found = beside(ensemble, [ban, processor_of(ensemble, method)], rows)
    for scores in found.scores:
        assert (scores[:, banned] == -torch.inf).all()
    assert set(banned).isdisjoint(found.sequences[0, len(rows[0]) :].tolist())


@each_case
def test_all_weight_on_the_primary_is_the_primary(ensemble, method):
    rows = prompt_rows(ensemble)[:1]
    found = beside(ensemble, [processor_of(ensemble, method, weights=(1, 0))], rows)
    expected = run(ensemble.members[0], rows, suppress_tokens=sorted(not_proposed(ensemble)))
    assert found.sequences.tolist() == expected.sequences.tolist()


def not_proposed(ensemble):
    """Ids without a token, and ids that write the same as a better one."""
    member = contracts.reference_member(ensemble, 0)
    canonical = {member.canonical_id(entry) for entry in member.entries}
    return set(range(member.num_rows)) - canonical - member.control


@each_case
def test_weights_are_those_of_the_ensemble(ensemble, method):
    rows = prompt_rows(ensemble)[:1]
    found = beside(ensemble, [processor_of(ensemble, method, weights=(1, 3))], rows)
    expected = folded(ensemble, method, rows, weights=(0.25, 0.75))
    assert found.sequences.tolist() == expected.sequences.tolist()


@each_case
def test_one_processor_serves_one_call_after_another(ensemble, method):
    processor = processor_of(ensemble, method)
    rows = prompt_rows(ensemble)
    for row in (rows[0], rows[0], rows[1]):
        expected = folded(ensemble, method, (row,))
        assert beside(ensemble, [processor], [row]).sequences.tolist() == expected.sequences.tolist()


@each_case
def test_a_call_that_continues_the_last_one_is_right_after_a_reset(ensemble, method):
    processor = processor_of(ensemble, method)
    row = prompt_rows(ensemble)[0]
    first = beside(ensemble, [processor], [row], max_new_tokens=2).sequences[0].tolist()
    processor.reset()
    expected = folded(ensemble, method, (tuple(first),))
    assert beside(ensemble, [processor], [first]).sequences.tolist() == expected.sequences.tolist()


@each_case
def test_it_leaves_the_scores_it_is_given_as_they_are(ensemble, method):
    ids = torch.tensor(prompt_rows(ensemble)[:1])
    with torch.no_grad():
        scores = ensemble.members[0](input_ids=ids).logits[:, -1]
    before = scores.clone()
    out = processor_of(ensemble, method)(ids, scores)
    assert torch.equal(scores, before)
    assert out.shape == scores.shape


@each_case
@pytest.mark.parametrize("index", [0, 1])
def test_a_member_that_gives_nan_is_named(ensemble, method, index):
    processor = processor_of(ensemble, method)
    rows = prompt_rows(ensemble)[:1]
    beside(ensemble, [processor], rows, max_new_tokens=1)
    name = type(ensemble.members[index]).__name__
    with (
        changed_logits(ensemble.members[index], lambda logits: logits * torch.nan),
        pytest.raises(MemberError, match=name),
    ):
        beside(ensemble, [processor], rows)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"weights": [1]}, "weights"),
        ({"weights": [1, -1]}, "weights"),
        ({"method": "average"}, "deepen, eva, fuse, gac, mbr, mined, rerank, sweetspan, unite, vote"),
        ({"tokenizers": []}, "tokenizers"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(options, match):
    ensemble = RECIPES[0].ensemble
    given = {"models": list(ensemble.members), "tokenizers": ensemble.tokenizers, **options}
    with pytest.raises(ConfigurationError, match=match):
        EnsembleLogitsProcessor(**given)
