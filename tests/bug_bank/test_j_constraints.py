"""J2: grammars hold for the default method as for GaC. J16: padding of rows that have ended is nothing to warn of."""

import json
import warnings

import pytest
import regex
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from hf_ensemble import EnsembleLogitsProcessor
from tests import tiny
from tests.contracts import make_ensemble

SCHEMA = regex.compile(r'\{"name": "[a-zA-Z ]{1,6}", "age": [1-9][0-9]?\}')


class Grammar(LogitsProcessor):
    """As grammar libraries do it: leaves the ids that go on with something that fits, and the end once it fits."""

    def __init__(self, token_bytes, prompt_length, end):
        self._texts = {i: token_bytes.entry(i).decode("utf-8", "replace") for i in range(token_bytes.num_ids)}
        self._token_bytes, self._start, self._end = token_bytes, prompt_length, end

    def __call__(self, input_ids, scores):
        kept = torch.full_like(scores, -torch.inf)
        for row, ids in enumerate(input_ids[:, self._start :].tolist()):
            text = self._token_bytes.write(ids).decode("utf-8", "replace")
            allowed = [i for i, more in self._texts.items() if more and SCHEMA.fullmatch(text + more, partial=True)]
            allowed += [self._end] if SCHEMA.fullmatch(text) else []
            kept[row, allowed] = scores[row, allowed]
        return kept


@pytest.mark.crossed
@pytest.mark.parametrize("options", [{}, {"do_sample": True}, {"speculation": "ngram"}, {"num_beams": 2}], ids=str)
@pytest.mark.parametrize("method", ["unite", "gac", "eva"])
def test_a_grammar_is_kept_to(method, options):
    tokenizers = [tiny.byte_level_bpe(400), tiny.gemma_like()]
    ensemble = make_ensemble(
        [tiny.tiny_llama(tokenizers[0], seed=3), tiny.tiny_gemma3(tokenizers[1], seed=4)], tokenizers, method=method
    )
    inputs = ensemble.tokenizer("Answer in JSON:", return_tensors="pt")
    start, end = inputs.input_ids.shape[1], ensemble.tokenizer.eos_token_id
    grammar = Grammar(ensemble.member_views[0].encoder.token_bytes, start, end)
    torch.manual_seed(0)
    ids = ensemble.generate(
        **inputs, max_new_tokens=60, logits_processor=LogitsProcessorList([grammar]), **{"do_sample": False, **options}
    )
    written = ids[0, start:].tolist()
    assert end in written
    found = json.loads(ensemble.tokenizer.decode(written, skip_special_tokens=True))
    assert set(found) == {"name", "age"}


def test_padding_after_an_end_is_nothing_that_the_primary_wrote():
    tokenizer = tiny.byte_level_bpe(400, pad="<pad>")
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    end, word = tokenizer.eos_token_id, tokenizer("a")["input_ids"][0]
    # One row ends at once, the other goes on.
    script = [{word: 0.6, end: 0.4}]
    models = [tiny.ScriptedModel(tokenizer, script) for _ in range(2)]
    processor = EnsembleLogitsProcessor(models, [tokenizer] * 2)

    def first_row_ends(input_ids, scores):
        forced = torch.full_like(scores, -torch.inf)
        forced[0, end], forced[1:, word] = 0.0, 0.0
        return forced

    ids = torch.tensor([[word, word], [word, word]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        output = models[0].generate(
            ids,
            attention_mask=torch.ones_like(ids),
            logits_processor=LogitsProcessorList([processor, first_row_ends]),
            max_new_tokens=4,
            do_sample=False,
        )
    assert output[0, 2:].tolist() == [end, *[tokenizer.pad_token_id] * 3]
