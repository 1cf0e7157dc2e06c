"""Tables of stop strings are those of `transformers`, made once, and never those of a tokenizer that has changed."""

import gc
import weakref

import pytest
import torch
from tokenizers import decoders
from tokenizers.models import BPE
from transformers import StopStringCriteria

from hf_ensemble.modes import stock_loop, stop_strings
from hf_ensemble.modes.stop_strings import stop_string_criteria
from tests import tiny
from tests.contracts import CORE_RECIPES, prompt_rows, run

STOPS = ["\n", "the", " king"]


@pytest.fixture
def made(monkeypatch):
    """The stop strings whose tables were made."""
    calls = []

    class Counted(StopStringCriteria):
        def __init__(self, tokenizer, stop_strings):
            calls.append(stop_strings)
            super().__init__(tokenizer, stop_strings)

    monkeypatch.setattr(stop_strings, "StopStringCriteria", Counted)
    return calls


def assert_as_stock(found, tokenizer, stops):
    stock = StopStringCriteria(tokenizer, stops)
    assert found.stop_strings == stock.stop_strings
    assert torch.equal(found.embedding_vec, stock.embedding_vec)
    assert torch.equal(found.target_lens, stock.target_lens)
    text = tokenizer("Once upon a time the king\nslept", add_special_tokens=False, return_tensors="pt")["input_ids"]
    for end in range(1, text.shape[1] + 1):
        assert found(text[:, :end], None).tolist() == stock(text[:, :end], None).tolist()


@pytest.mark.parametrize("make", [tiny.smol_like, tiny.gemma_like, tiny.qwen_like])
@pytest.mark.parametrize("stops", [STOPS, "\n", ["Question:"]], ids=str)
def test_criteria_are_those_of_transformers_and_made_once(make, stops, made):
    tokenizer = make()
    for _ in range(2):
        assert_as_stock(stop_string_criteria(stops, tokenizer), tokenizer, stops)
    assert made == [stops]


def _add(tokenizer):
    tokenizer.add_tokens(["the king\n"])


def _decode_otherwise(tokenizer):
    tokenizer.backend_tokenizer.decoder = decoders.Replace("k", "\n")


def _another_vocabulary(tokenizer):
    """Of the same size: two tokens change places."""
    vocab = tokenizer.backend_tokenizer.get_vocab(with_added_tokens=False)
    one, other = sorted(vocab, key=vocab.get)[-2:]
    vocab[one], vocab[other] = vocab[other], vocab[one]
    tokenizer.backend_tokenizer.model = BPE(vocab, [])


def _another_backend(tokenizer):
    tokenizer._tokenizer = tiny.gemma_like().backend_tokenizer


@pytest.mark.parametrize("change", [_add, _decode_otherwise, _another_vocabulary, _another_backend])
def test_a_changed_tokenizer_gets_new_tables(change, made):
    tokenizer = tiny.smol_like()
    stop_string_criteria(STOPS, tokenizer)
    change(tokenizer)
    assert_as_stock(stop_string_criteria(STOPS, tokenizer), tokenizer, STOPS)
    assert len(made) == 2


def test_tokenizers_of_one_kind_have_tables_of_their_own_and_are_let_go(made):
    one, other = tiny.smol_like(), tiny.smol_like()
    stop_string_criteria(STOPS, one)
    stop_string_criteria(STOPS, other)
    assert len(made) == 2
    gone = weakref.ref(other)
    del other
    gc.collect()
    assert gone() is None
    assert one in stop_strings._made


def test_the_last_few_sets_of_stop_strings_are_kept(made):
    tokenizer = tiny.smol_like()
    names = [["\n", "x" * n] for n in range(1, 10)]
    for name in (*names, names[-1], names[0]):
        stop_string_criteria(name, tokenizer)
    assert made == [*names, names[0]]


def test_a_tokenizer_without_a_backend_gets_new_tables_each_time(made):
    class Slow:
        def __init__(self, tokenizer):
            self._tokenizer = tokenizer

        def __getattr__(self, name):
            if name in ("backend_tokenizer", "_tokenizer"):
                raise AttributeError(name)
            return getattr(self._tokenizer, name)

        def __call__(self, *args, **kwargs):
            return self.__dict__["_tokenizer"](*args, **kwargs)

    slow = Slow(tiny.smol_like())
    for _ in range(2):
        stop_string_criteria(STOPS, slow)
    assert len(made) == 2


@pytest.mark.parametrize("method", ["gac", "unite", "sweetspan", "primary"])
def test_generate_makes_tables_once_and_changes_no_config(method, made, monkeypatch):
    ensemble = CORE_RECIPES[0].ensemble
    rows = prompt_rows(ensemble)[:1]
    options = {"max_new_tokens": 6, "stop_strings": ["e", "a", method]}
    options |= {"method": "gac", "weights": [1, 0]} if method == "primary" else {"method": method}
    first, second = (run(ensemble, rows, **options) for _ in range(2))
    assert len(made) == 1
    assert torch.equal(first.sequences, second.sequences)
    assert ensemble.generation_config.stop_strings is None
    monkeypatch.setattr(
        stock_loop, "stop_string_criteria", lambda stops, tokenizer: StopStringCriteria(tokenizer, stops)
    )
    assert torch.equal(run(ensemble, rows, **options).sequences, first.sequences)


def test_a_criterion_of_the_users_takes_the_place_of_ours():
    ensemble = CORE_RECIPES[0].ensemble
    rows = prompt_rows(ensemble)[:1]
    full = run(ensemble, rows, max_new_tokens=6, stop_strings=["zzz"]).sequences
    own = StopStringCriteria(ensemble.tokenizer, ["zzz"])
    stop = ensemble.tokenizer.decode(full[0, len(rows[0])])
    options = {"max_new_tokens": 6, "stop_strings": [stop]}
    assert run(ensemble, rows, **options).sequences.shape[1] == len(rows[0]) + 1
    assert torch.equal(run(ensemble, rows, **options, stopping_criteria=[own]).sequences, full)
