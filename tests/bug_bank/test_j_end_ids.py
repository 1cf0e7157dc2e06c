"""Bug bank, section J: ids that end a text, but for which a model has no row.

| case | where |
| --- | --- |
| J15 | here: token by token, by spans, with drafts, in beams, alone, recorded, scored, as a processor, as a criterion |
"""

import functools

import pytest
import torch

from hf_ensemble import (
    EnsembleLogitsProcessor,
    GacConfig,
    MemberConfig,
    SpanStoppingCriteria,
)
from tests import tiny
from tests.contracts import make_ensemble

from .kit import TOKEN_METHODS, id_of, methods_by_turns, tokenizer_of, writer

NAMES = ("small", "large")
WHOLES = ("a one two three.", "The cat sat on the mat, and the rat.")
FAR = 10**6
SAMPLED = {"do_sample": True, "top_k": 0, "min_new_tokens": 1}
WAYS = {
    "greedy": {},
    "sampled": SAMPLED,
    "not before": {"min_new_tokens": 4},
    "hurried": {"exponential_decay_length_penalty": (1, 1.5)},
    "in beams": {"num_beams": 2},
    "with drafts": {"speculation": "ngram"},
    "with a member's drafts": {"speculation": "member-1"},
    "primary alone": {"weights": [1, 0]},
    "assistant alone": {"weights": [0, 1], "min_new_tokens": 1},
    "recorded": {"output_decisions": True, "return_dict_in_generate": True},
}
SPAN_WAYS = [way for way in WAYS if way not in {"hurried", "in beams", "with drafts", "with a member's drafts"}]


def outside(model) -> list[int]:
    """A negative id, the first beyond the vocabulary, which another member may have, and one that nobody has."""
    return [-1, model.config.vocab_size, FAR]


@functools.cache
def ensemble_of(are_listed: bool):
    """Members whose generation configs list such ids among those that end a text, or the same without."""
    models = []
    for name in NAMES:
        tokenizer = tokenizer_of(name)
        models.append(tiny.ScriptedModel(tokenizer, writer(tokenizer, *WHOLES)))
        ends = [tokenizer.eos_token_id]
        models[-1].generation_config.eos_token_id = [*outside(models[-1]), *ends] if are_listed else ends
    return make_ensemble(models, [tokenizer_of(name) for name in NAMES])


def generated(ensemble, **options):
    """Ids of two rows, of which one ends first."""
    inputs = ensemble.tokenizer(["a", "The cat"], return_tensors="pt", padding=True)
    torch.manual_seed(0)
    output = ensemble.generate(**inputs, max_new_tokens=24, **options)
    return (output if isinstance(output, torch.Tensor) else output.sequences).tolist()


def as_if_not_there(method, way, source):
    plain, ensemble = ensemble_of(False), ensemble_of(source == "members")
    ends = {"eos_token_id": [*outside(plain.primary), plain.tokenizer.eos_token_id]} if source == "call" else {}
    expected = generated(plain, method=method, **WAYS[way])
    assert generated(ensemble, method=method, **WAYS[way], **ends) == expected
    assert any(plain.tokenizer.eos_token_id in row[-8:] for row in expected)


@pytest.mark.crossed
@methods_by_turns(TOKEN_METHODS, way=tuple(WAYS), source=("members", "call"))
def test_an_end_id_without_a_row_is_as_if_it_were_not_there(method, way, source):
    as_if_not_there(method, way, source)


@pytest.mark.crossed
@pytest.mark.parametrize("source", ["members", "call"])
@pytest.mark.parametrize("way", SPAN_WAYS)
def test_an_end_id_without_a_row_is_as_if_it_were_not_there_for_spans(way, source):
    """J15: sampled with `min_new_tokens=1`, it was an index."""
    as_if_not_there("sweetspan", way, source)


@pytest.mark.parametrize("method", ["unite", "sweetspan", GacConfig(space="log")], ids=str)
def test_where_no_end_id_has_a_row_nothing_ends_a_text(method):
    models, tokenizers = [], [tokenizer_of(name) for name in NAMES]
    for tokenizer in tokenizers:
        models.append(tiny.ScriptedModel(tokenizer, [{id_of(tokenizer, "a"): 0.6, id_of(tokenizer, " "): 0.4}]))
        models[-1].generation_config.eos_token_id = FAR
    with pytest.warns(UserWarning, match="its tokenizer's EOS token"):
        ensemble = make_ensemble(models, tokenizers, method=method)
    assert ensemble.generation_config.eos_token_id is None
    for options in ({}, SAMPLED):
        rows = generated(ensemble, **options)
        assert len(rows[0]) == len(rows[1]) > 24
        assert all(0 <= i < models[0].config.vocab_size for row in rows for i in row)


@pytest.mark.parametrize("method", [*TOKEN_METHODS, "sweetspan"])
def test_scores_do_not_see_an_end_id_without_a_row(method):
    pairs = (["a", "The cat"], [" one two", " sat"])
    found, expected = (ensemble_of(are_listed).score(*pairs, method=method) for are_listed in (True, False))
    assert found.log_probs == pytest.approx(expected.log_probs)


def test_a_processor_does_not_see_an_end_id_without_a_row():
    rows = []
    for are_listed in (True, False):
        ensemble = ensemble_of(are_listed)
        processor = EnsembleLogitsProcessor(list(ensemble.members), ensemble.tokenizers, method="gac")
        inputs = ensemble.tokenizer("a", return_tensors="pt")
        ends = ensemble.tokenizer.eos_token_id
        options = {"logits_processor": [processor], "max_new_tokens": 24, "eos_token_id": ends}
        rows.append(ensemble.primary.generate(**inputs, **options).tolist())
    assert rows[0] == rows[1]


def test_a_member_lists_only_end_ids_that_it_has():
    ensemble = ensemble_of(True)
    assert [member.eos_token_ids for member in ensemble._members] == [[t.eos_token_id] for t in ensemble.tokenizers]
    found = ensemble.compatibility().members
    assert [one.eos_tokens for one in found] == [(t.eos_token,) for t in ensemble.tokenizers]
    tokenizer = tokenizer_of("small")
    extra = MemberConfig(eos_token_id=[FAR, tokenizer.eos_token_id])
    alone = type(ensemble).from_members([tiny.ScriptedModel(tokenizer)], [tokenizer], member_configs=[extra])
    assert alone.generation_config.eos_token_id == [tokenizer.eos_token_id]


def test_a_criterion_does_not_mind_end_ids_without_a_row():
    tokenizer = tokenizer_of("small")
    criterion = SpanStoppingCriteria(tokenizer, eos_token_id=[-1, FAR, tokenizer.eos_token_id], start=0)
    ids = tokenizer("a one", return_tensors="pt")["input_ids"]
    ended = torch.cat([ids, torch.tensor([[tokenizer.eos_token_id]])], dim=-1)
    assert criterion(ids, None).tolist() == [False]
    assert criterion(ended, None).tolist() == [True]


# --- The ids that texts start from ----------------------------------------------------------------------------------


def rowless(**tokens):
    """A tokenizer with control tokens that were added to it, and a model that was not resized for them."""
    tokenizer = tiny.byte_level_bpe()
    model = tiny.ScriptedModel(tokenizer, writer(tokenizer_of("small"), *WHOLES))
    tokenizer.add_special_tokens(tokens)
    return model, tokenizer


def test_a_text_never_starts_from_an_id_without_a_row():
    small = tokenizer_of("small")
    model, tokenizer = rowless(bos_token="<|new|>")
    assert tokenizer.bos_token_id >= model.config.vocab_size
    plain = tiny.ScriptedModel(small, writer(small, *WHOLES))
    empty = torch.empty(1, 0, dtype=torch.long)
    for pair in ([(model, tokenizer), (plain, small)], [(plain, small), (model, tokenizer)]):
        ensemble = make_ensemble(*map(list, zip(*pair, strict=True)))
        output = ensemble.generate(empty, max_new_tokens=2)
        assert output[0, 0] == small.eos_token_id
        assert generated(ensemble) == generated(make_ensemble([plain, plain], [small, small]))
