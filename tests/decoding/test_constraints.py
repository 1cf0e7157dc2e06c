"""Constrained decoding as libraries do it: the fused law keeps to it, with drafts and without; spans refuse it."""

import functools
import itertools
import json
import re

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from hf_ensemble import ConfigurationError
from tests.serving.conftest import tiny_ensemble

pytestmark = pytest.mark.filterwarnings("ignore:the primary .* wrote the control token")

PROMPT = 'A cat: {"name": "a", "kind": "dog"} {"name": "a", "kind": "cat"}'
OPTIONS = {"greedy": {"do_sample": False}, "sampled": {"do_sample": True}}
DRAFTS = {"alone": {}, "drafts": {"speculation": "ngram"}}


def each_way(function):
    """Every method of the tests, with drafts and without, greedy and sampled; two of these are quick."""
    quick = [("unite", "drafts", "greedy"), ("gac", "alone", "greedy")]
    ways = [
        pytest.param(*way, marks=[pytest.mark.slow] * (way not in quick))
        for way in itertools.product(("unite", "gac"), DRAFTS, OPTIONS)
    ]
    return pytest.mark.parametrize(("method", "drafts", "options"), ways)(function)


made = functools.cache(tiny_ensemble)


def write(ensemble, **options):
    inputs = ensemble.tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    torch.manual_seed(0)
    ids = ensemble.generate(**inputs, **{"max_new_tokens": 60, **options})[0, inputs["input_ids"].shape[1] :]
    return ensemble.tokenizer.decode(ids, skip_special_tokens=True)


class OneOf(LogitsProcessor):
    """Remembers where it is, as a grammar's matcher does: it must be told every id, once, in order."""

    def __init__(self, texts, end):
        self._texts, self._end, self._written, self._length = texts, end, [], None

    def __call__(self, input_ids, scores):
        if self._length is not None:
            assert input_ids.shape[1] == self._length + 1
            self._written.append(int(input_ids[0, -1]))
        self._length = input_ids.shape[1]
        place = len(self._written)
        allowed = {
            text[place] if place < len(text) else self._end for text in self._texts if text[:place] == self._written
        }
        kept = torch.full_like(scores, -torch.inf)
        kept[:, list(allowed)] = scores[:, list(allowed)]
        return kept


def texts_of(ensemble):
    return [
        ensemble.tokenizer(text, add_special_tokens=False)["input_ids"] for text in (' {"name": "dog"}', " The cat")
    ]


@each_way
def test_a_matcher_is_kept_to(method, drafts, options):
    ensemble = made(method=method)
    matcher = OneOf(texts_of(ensemble), ensemble.tokenizer.eos_token_id)
    text = write(ensemble, logits_processor=LogitsProcessorList([matcher]), **OPTIONS[options], **DRAFTS[drafts])
    assert text in (' {"name": "dog"}', " The cat")


@each_way
def test_a_prefix_function_is_kept_to(method, drafts, options):
    ensemble = made(method=method)
    texts, start = texts_of(ensemble), len(ensemble.tokenizer(PROMPT)["input_ids"])

    def allowed(batch_id, ids):
        written = ids[start:].tolist()
        more = [text[len(written) : len(written) + 1] for text in texts if text[: len(written)] == written]
        return sorted({one[0] if one else ensemble.tokenizer.eos_token_id for one in more})

    text = write(ensemble, prefix_allowed_tokens_fn=allowed, **OPTIONS[options], **DRAFTS[drafts])
    assert text in (' {"name": "dog"}', " The cat")


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": "^[a-z]{1,4}$"}, "kind": {"enum": ["cat", "dog"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}


def fits(text):
    found = json.loads(text)
    return list(found) == ["name", "kind"] and bool(re.fullmatch("[a-z]{1,4}", found["name"]))


@each_way
def test_xgrammar_is_kept_to(method, drafts, options):
    xgrammar = pytest.importorskip("xgrammar")
    ensemble = made(method=method)
    # As its documentation says it, for any model.
    info = xgrammar.TokenizerInfo.from_huggingface(ensemble.tokenizer, vocab_size=ensemble.config.vocab_size)
    grammar = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(SCHEMA), any_whitespace=False)
    processor = xgrammar.contrib.hf.LogitsProcessor(grammar)
    text = write(ensemble, logits_processor=LogitsProcessorList([processor]), **OPTIONS[options], **DRAFTS[drafts])
    assert fits(text)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.parametrize(("method", "drafts"), [*itertools.product(("unite", "gac"), DRAFTS)])
def test_outlines_is_kept_to(method, drafts):
    outlines = pytest.importorskip("outlines")
    ensemble = made(method=method)
    model = outlines.from_transformers(ensemble, ensemble.tokenizer)
    asked = {"max_new_tokens": 60, "do_sample": False, **DRAFTS[drafts]}
    assert fits(model(PROMPT, outlines.types.JsonSchema(SCHEMA), **asked))
    assert re.fullmatch("[0-9]{3}", model(PROMPT, outlines.types.Regex("[0-9]{3}"), **asked))


@pytest.mark.parametrize(
    "constraint",
    [
        {"logits_processor": LogitsProcessorList([OneOf([[5]], 0)])},
        {"prefix_allowed_tokens_fn": lambda batch_id, ids: [5]},
    ],
    ids=["processor", "prefix function"],
)
def test_spans_refuse_constraints_with_the_reason(constraint):
    with pytest.raises(ConfigurationError, match="knows the primary's ids only"):
        write(made(method="sweetspan"), **constraint)
