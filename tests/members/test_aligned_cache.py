"""Caches of encoder-decoder models: each row says what its logits depend on, whatever moved, branched or waited."""

import random
from collections.abc import Sequence

import pytest
import torch

from hf_ensemble.members.aligned_cache import AlignedRows
from hf_ensemble.members.encoder_decoder_model import EncoderDecoderModel
from hf_ensemble.members.source import SourceStart
from tests.tiny_encoder_decoders import nllb_like, t5_like, tiny_nllb, tiny_t5

SOURCES = ("The capital of France", "The train from London to Paris takes about two hours.", "No.")


class Kit:
    """A model whose encoder counts the rows that it reads, and sources for it."""

    def __init__(self, tokenizer, model):
        self.model = model
        self.own = EncoderDecoderModel(model, "specialist")
        self.encoded: list[int] = []
        encode = self.own.run_encoder
        self.own.run_encoder = lambda sources: [self.encoded.append(len(sources)), encode(sources)][1]
        start = model.config.decoder_start_token_id
        self.starts = [SourceStart(start, tokenizer(text)["input_ids"]) for text in SOURCES]

    def rows(self, count: int, mode: str = "aligned") -> AlignedRows:
        return AlignedRows(self.own, count, mode)

    def expected(self, text: Sequence[int], count: int = 1) -> torch.Tensor:
        """What the model says by itself, without any cache, of shape `(count, vocab_size)`."""
        return self.model(
            input_ids=torch.tensor([text[0].source]), decoder_input_ids=torch.tensor([list(map(int, text))])
        ).logits[0, -count:]

    def check(self, rows: AlignedRows, texts: Sequence[Sequence[int]], wanted: Sequence[int]) -> None:
        given = [text if count else held for text, count, held in zip(texts, wanted, rows.cached, strict=True)]
        logits = rows.forward(given, wanted)
        for row, (text, count) in enumerate(zip(texts, wanted, strict=True)):
            if count:
                torch.testing.assert_close(logits[row, -count:], self.expected(text, count), rtol=0, atol=5e-5)


@pytest.fixture(scope="module", params=["nllb", "t5"])
def kit(request):
    tokenizer, make = {"nllb": (nllb_like(), tiny_nllb), "t5": (t5_like(), tiny_t5)}[request.param]
    return Kit(tokenizer, make(tokenizer))


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def test_rows_grow_roll_back_and_differ_in_length(kit):
    a, b, c = kit.starts
    rows = kit.rows(3)
    kit.check(rows, [[a, 9, 10], [b], [c, 11]], [1, 1, 1])
    kit.check(rows, [[a, 9, 10, 12], [b, 13], [c, 11, 14, 15, 16]], [1, 1, 3])
    kit.check(rows, [[a, 9, 17], [b, 13, 18, 19], [c, 11]], [2, 1, 1])
    kit.check(rows, [[a, 9, 17], [b, 13, 18, 19], [c, 11]], [1, 1, 1])


def test_the_encoder_reads_each_source_once(kit):
    a, b, _ = kit.starts
    kit.encoded.clear()
    rows = kit.rows(3)
    kit.check(rows, [[a, 9], [b, 9], [a, 10]], [1, 1, 1])
    rows.select([1, 0, 2, 0])
    fork = rows.fork([2, 2])
    kit.check(fork, [[a, 10, 11], [a, 12]], [1, 1])
    rows.adopt(fork, [None, 1, None, 0])
    kit.check(rows, [[b, 9, 10], [a, 12, 13], [a, 10, 14], [a, 10, 11, 15]], [1, 1, 1, 1])
    assert kit.encoded == [2]


def test_a_row_that_takes_another_source_begins_anew(kit):
    a, b, c = kit.starts
    rows = kit.rows(2)
    kit.check(rows, [[a, 9, 10], [b, 9, 10]], [1, 1])
    kit.check(rows, [[c, 9, 10], [b, 9, 10]], [1, 1])
    kit.check(rows, [[a, 9, 10], [c, 9, 10, 11]], [1, 1])


def test_a_fork_leaves_what_it_continues_as_it_was(kit):
    a, b, _ = kit.starts
    rows = kit.rows(2)
    kit.check(rows, [[a, 9, 10, 11], [b, 9, 10, 11]], [1, 1])
    fork = rows.fork([0, 1])
    kit.check(fork, [[a, 9, 12, 13, 14], [b, 15, 16]], [1, 1])
    kit.check(rows, [[a, 9, 10, 11, 12], [b, 9, 10, 11, 12]], [2, 2])
    kit.check(fork, [[a, 9, 12, 13, 14, 15], [b, 15, 16, 17]], [3, 2])


def test_waiting_rows_stay_where_they_are(kit):
    a, b, c = kit.starts
    rows = kit.rows(3)
    kit.check(rows, [[a, 9], [b, 9], [c, 9]], [1, 1, 1])
    for text in ([a, 9, 10], [a, 9, 10, 11], [a, 9, 10, 12, 13]):
        kit.check(rows, [text, [b, 9], [c, 9]], [1, 0, 0])
    assert rows.cached[1] == [b, 9]
    kit.check(rows, [[a, 9, 10, 12, 13, 14], [b, 9, 10, 11], [c, 9]], [1, 2, 0])
    kit.check(rows, [[a, 9, 10, 12, 13, 14], [b, 9, 10, 11], [c, 9, 15]], [1, 1, 1])


def test_without_a_cache_the_logits_are_the_same_and_the_encoder_still_runs_once(kit):
    a, b, _ = kit.starts
    kit.encoded.clear()
    rows = kit.rows(2, "recompute")
    kit.check(rows, [[a, 9, 10], [b]], [1, 1])
    kit.check(rows, [[a, 9, 11], [b, 12]], [2, 1])
    assert kit.encoded == [2]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_anything_may_happen_to_rows(kit, seed):
    rng = random.Random(seed)

    def new(least, most):
        return [rng.randrange(4, 150) for _ in range(rng.randint(least, most))]

    texts = [[kit.starts[n % 3], *new(1, 5)] for n in range(4)]
    rows = kit.rows(4)
    for _ in range(60):
        kind = rng.random()
        if kind < 0.15:
            places = [rng.randrange(len(texts)) for _ in range(rng.randint(2, 5))]
            rows.select(places)
            texts = [list(texts[place]) for place in places]
        elif kind < 0.35:
            places = [rng.randrange(len(texts)) for _ in range(3)]
            fork, branches = rows.fork(places), [texts[place] + new(2, 2) for place in places]
            kit.check(fork, branches, [2, 2, 2])
            if rng.random() < 0.6:
                rows.adopt(fork, [1, *[None] * (len(texts) - 1)])
                texts[0] = branches[1]
        texts = [text[: max(1, len(text) - rng.choice([0, 0, 1, 2]))] + new(0, 2) for text in texts]
        wanted = [min(rng.choice([0, 1, 1, 2]), len(text)) for text in texts]
        if any(wanted):
            kit.check(rows, texts, wanted)
