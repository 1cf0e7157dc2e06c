"""Bug bank, section C: caches.

| case | where |
| --- | --- |
| C3 | `test_member.py` (pure roll-backs, all rows replaced, random roll-backs); here an empty prompt |
| C4 | here; `contracts.py` on recipes with Mamba, Mamba-2, Jamba, Falcon-H1 and LFM2; spans wait |
| C5 | here; `test_generate.py` (beam scores are those of fresh forwards) |
| C6 | here; `contracts.py` (a call leaves nothing behind); `test_generate.py` (a call after a failure) |
| C7 | here; `test_generate.py` (the returned cache can be passed again) |
| C8 | the whole suite runs on the oldest and the newest `transformers`, with warnings as errors |
"""

import copy
import math

import pytest
import torch

from tests import tiny
from tests.contracts import (
    AVERAGING,
    CORE_RECIPES,
    Recipe,
    assert_same_choices,
    assert_same_output,
    make_ensemble,
    new_ids,
    prompt_rows,
    reference_member,
    run,
    state_of,
)
from tests.reference import Reference

from .kit import control_tokens_may_be_chosen, each_method, methods_by_turns, tokenizer_of

pytestmark = control_tokens_may_be_chosen

RECURRENT = (Recipe((("llama", "smol"), ("mamba", "gemma"))), Recipe((("mamba", "gemma"), ("llama", "smol"))))


@each_method
@pytest.mark.parametrize("recipe", [CORE_RECIPES[0], RECURRENT[0]], ids=str)
def test_an_empty_prompt_grows_like_any_other(method, recipe):
    """C3: One start token only, then ids one by one: each step as with fresh forwards."""
    ensemble = recipe.ensemble
    start = [ensemble.tokenizer.bos_token_id]
    found = ensemble.generate(torch.zeros(1, 0).long(), max_new_tokens=4, method=method)[0].tolist()
    expected, margins = Reference([reference_member(ensemble, m) for m in (0, 1)], method).greedy(start, 4)
    if min(margins) > 1e-4:
        assert found[: 1 + len(expected)] == [*start, *expected]


@methods_by_turns(recipe=RECURRENT)
def test_a_recurrent_member_gives_the_text_of_fresh_forwards(method, recipe):
    """C4: Over thirty ids, as primary and as assistant."""
    ensemble = recipe.ensemble
    row = prompt_rows(ensemble)[0]
    output = run(ensemble, [row], method=method, max_new_tokens=30)
    reference = Reference([reference_member(ensemble, m) for m in (0, 1)], method)
    expected, _ = reference.greedy(row, 30)
    assert_same_choices(new_ids(output), expected, [logits[0] for logits in output.logits])


@each_method
@pytest.mark.parametrize("recipe", [Recipe((("jamba", "byte-level"), ("lfm2", "gemma")))], ids=str)
def test_beams_are_moved_in_every_members_cache(method, recipe):
    """C5: Each of three hypotheses of twelve ids has the score of fresh forwards; recurrent members too."""
    ensemble = recipe.ensemble
    row = prompt_rows(ensemble)[1]
    options = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 12, "output_scores": True}
    output = run(ensemble, [row], method=method, length_penalty=0.0, **options)
    members = [reference_member(ensemble, m) for m in (0, 1)]
    reference = Reference(members, method)
    assert len({tuple(ids) for ids in output.sequences.tolist()}) == 3
    for ids, score in zip(output.sequences.tolist(), output.sequences_scores.tolist(), strict=True):
        new = ids[len(row) :]
        end = next((at + 1 for at, i in enumerate(new) if i in members[0].eos_ids), len(new))
        columns = reference.distributions_along(row, new[:end], range(end))
        assert score == pytest.approx(sum(math.log(columns[t][new[t]]) for t in range(end)), abs=1e-3)


@methods_by_turns(recipe=[CORE_RECIPES[2], RECURRENT[0]])
def test_a_call_between_two_alike_leaves_no_trace(method, recipe):
    """C6: A, B, A, where B is another method, batch, length and way of decoding, or fails half-way."""
    ensemble = recipe.ensemble
    rows = prompt_rows(ensemble)
    expected = run(ensemble, rows[:1], method=method)
    before = state_of(ensemble)

    def stop(ids, scores):
        if ids.shape[1] >= len(rows[2]) + 2:
            raise KeyboardInterrupt
        return scores

    run(ensemble, rows[1:2], method=AVERAGING[AVERAGING.index(method) - 1], max_new_tokens=3, num_beams=2)
    assert_same_output(run(ensemble, rows[:1], method=method), expected)
    with pytest.raises(KeyboardInterrupt):
        run(ensemble, rows[2:], method=method, logits_processor=[stop])
    assert_same_output(run(ensemble, rows[:1], method=method), expected)
    after = state_of(ensemble)
    for name, value in before.items():
        assert after[name] == value, name


# --- C7 -------------------------------------------------------------------------------------------------------------


def cache_of(output):
    return output.past_key_values if "past_key_values" in output else output.cache


@each_method
def test_a_conversation_goes_on_with_the_returned_cache(method):
    """C7: The cache of the last call and a longer prompt give what no cache gives."""
    ensemble = CORE_RECIPES[0].ensemble
    first = run(ensemble, prompt_rows(ensemble)[:1], method=method, max_new_tokens=4, eos_token_id=None)
    longer = [first.sequences[0].tolist() + ensemble.tokenizer(" and then?")["input_ids"]]
    expected = run(ensemble, longer, method=method)
    assert_same_output(run(ensemble, longer, method=method, **{tiny.CACHE_NAME: cache_of(first)}), expected)


@each_method
def test_the_primarys_own_cache_of_the_prompt_may_be_passed(method):
    """C7: What the primary cached by itself is the primary's, so it works as well."""
    ensemble = CORE_RECIPES[0].ensemble
    row = prompt_rows(ensemble)[0]
    with torch.no_grad():
        filled = ensemble.members[0](input_ids=torch.tensor([row[:-2]]), use_cache=True)
    cache = cache_of(filled)
    found = run(ensemble, [row], method=method, **{tiny.CACHE_NAME: copy.deepcopy(cache)})
    assert_same_output(found, run(ensemble, [row], method=method))


@each_method
@pytest.mark.parametrize("length", ["short", "long"])
def test_a_mask_that_does_not_fit_the_primarys_ids_is_refused(method, length):
    """C7: One that fits another member's count of ids, or only the new part, is refused with both shapes."""
    ensemble = CORE_RECIPES[0].ensemble
    row = prompt_rows(ensemble)[0]
    other = len(row) - 2 if length == "short" else len(row) + 3
    mask = torch.ones(1, other).long()
    with pytest.raises(ValueError, match=rf"attention_mask.*1, {other}.*1, {len(row)}"):
        ensemble.generate(torch.tensor([row]), attention_mask=mask, max_new_tokens=2, method=method)


@each_method
def test_a_cache_of_another_model_is_refused(method):
    """C7: A cache that cannot be the primary's (other layers, other heads) is refused with a reason."""
    smol, gemma = tokenizer_of("smol"), tokenizer_of("gemma")
    primary = tiny.tiny_llama(smol, seed=1)
    other = tiny.tiny_llama(gemma, seed=2, num_hidden_layers=3, num_key_value_heads=4)
    ensemble = make_ensemble([primary, other], [smol, gemma], method=method)
    row = prompt_rows(ensemble)[0]
    with torch.no_grad():
        cache = cache_of(other(input_ids=gemma("The capital", return_tensors="pt")["input_ids"], use_cache=True))
    with pytest.raises((ValueError, RuntimeError)):
        run(ensemble, [row], **{tiny.CACHE_NAME: cache})
