import json
import multiprocessing
import os
import shutil
import warnings

import numpy as np
import pytest
from tokenizers import AddedToken, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from hf_ensemble.vocabulary import store
from hf_ensemble.vocabulary.encoding import ByteEncoder
from hf_ensemble.vocabulary.store import cache_folder as folder_of_maps
from hf_ensemble.vocabulary.store import load_arrays, save_arrays, store_key, tokenizer_fingerprint
from hf_ensemble.vocabulary.token_bytes import TokenBytes
from hf_ensemble.vocabulary.union import UnionVocabulary
from tests import tiny

from .material import ids_of

ARRAYS = {"a": np.arange(5, dtype=np.int32), "b": np.zeros((2, 3), dtype=np.int64)}


def make():
    return tiny.byte_level_bpe(300, added=["<|eot|>"])


@pytest.fixture(params=["memory", "folder"])
def fresh(request, tmp_path):
    """Makes the same tokenizer again and again: in memory, or loaded from a folder."""
    if request.param == "memory":
        return make
    make().save_pretrained(tmp_path / "tokenizer")
    return lambda: PreTrainedTokenizerFast.from_pretrained(tmp_path / "tokenizer")


def encoder(tokenizer, cache=True, **options):
    return ByteEncoder(tokenizer, TokenBytes(tokenizer, cache=cache, **options))


def stored(folder):
    return sorted(path.name for path in folder.iterdir())


def union_arrays(union):
    maps = [*union.member_to_union, *union.union_to_member, *union.union_to_first]
    return [*maps, *union._continuation_bounds, *union._continuation_ids, union._source]


def assert_same(one, two):
    assert len(one) == len(two)
    for a, b in zip(one, two, strict=True):
        assert a.dtype == b.dtype
        assert np.array_equal(a, b)


# Keys


def test_the_same_tokenizer_has_the_same_key(fresh):
    assert tokenizer_fingerprint(fresh()) == tokenizer_fingerprint(fresh())


def add_token(tokenizer):
    tokenizer.add_tokens([AddedToken("<new>", special=False)])


def add_special_token(tokenizer):
    tokenizer.add_special_tokens({"additional_special_tokens": ["<new>"]})


def add_token_with_a_habit(tokenizer):
    tokenizer.add_tokens([AddedToken("<|eot|>", special=False, lstrip=True)])


def set_normalizer(tokenizer):
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()


def set_pre_tokenizer(tokenizer):
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)


def set_post_processor(tokenizer):
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|end|> $A", special_tokens=[("<|end|>", 0)]
    )


def set_eos(tokenizer):
    tokenizer.eos_token = "Ġthe"


@pytest.mark.parametrize(
    "change",
    [
        *(add_token, add_special_token, add_token_with_a_habit, set_normalizer, set_pre_tokenizer),
        *(set_post_processor, set_eos),
    ],
)
def test_a_change_of_the_tokenizer_changes_its_key(fresh, change):
    tokenizer, before = fresh(), tokenizer_fingerprint(fresh())
    change(tokenizer)
    assert tokenizer_fingerprint(tokenizer) != before


def set_truncation(tokenizer):
    tokenizer.backend_tokenizer.enable_truncation(max_length=2)


def set_padding(tokenizer):
    tokenizer.backend_tokenizer.enable_padding(length=900)


def call_with_padding_and_truncation(tokenizer):
    tokenizer(["a", "the cat"], padding="max_length", truncation=True, max_length=7)


def set_wrapper(tokenizer):
    tokenizer.padding_side = "right"
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.name_or_path = tokenizer.name_or_path or "another/name"


@pytest.mark.parametrize("change", [set_truncation, set_padding, call_with_padding_and_truncation, set_wrapper])
def test_what_a_user_sets_for_calls_changes_no_key(fresh, change):
    tokenizer, before = fresh(), tokenizer_fingerprint(fresh())
    change(tokenizer)
    assert tokenizer_fingerprint(tokenizer) == before


def test_a_copy_of_a_folder_has_the_same_key_and_another_file_another(tmp_path):
    make().save_pretrained(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    one, two = (PreTrainedTokenizerFast.from_pretrained(tmp_path / name) for name in ("one", "two"))
    assert tokenizer_fingerprint(one) == tokenizer_fingerprint(two)
    path = tmp_path / "two" / "tokenizer.json"
    spec = json.loads(path.read_text())
    merges = spec["model"]["merges"]
    merges[-1], merges[-2] = merges[-2], merges[-1]
    path.write_text(json.dumps(spec))
    swapped = PreTrainedTokenizerFast.from_pretrained(tmp_path / "two")
    assert tokenizer_fingerprint(swapped) != tokenizer_fingerprint(one)


def test_another_vocabulary_has_another_key():
    assert tokenizer_fingerprint(tiny.byte_level_bpe(300)) != tokenizer_fingerprint(tiny.byte_level_bpe(301))


def test_the_key_of_token_bytes_depends_on_rows_and_end_ids(fresh, cache_folder):
    tokenizer = fresh()
    (marker,) = ids_of(tokenizer, "<|eot|>")
    options = [{}, {"num_ids": 300}, {"num_ids": 320}, {"end_ids": [marker]}, {"num_ids": 320, "end_ids": [marker]}]
    found = [TokenBytes(tokenizer, **option) for option in options]
    assert len({tokens.fingerprint for tokens in found}) == len(options) == len(stored(cache_folder))
    for tokens, option in zip(found, options, strict=True):
        again = TokenBytes(tokenizer, **option)
        assert again.fingerprint == tokens.fingerprint
        assert again.entries == tokens.entries == TokenBytes(tokenizer, cache=False, **option).entries


def test_end_ids_that_change_nothing_share_a_key(cache_folder):
    tokenizer = make()
    newline = ids_of(tokenizer, "Ċ")
    plain = TokenBytes(tokenizer)
    assert TokenBytes(tokenizer, end_ids=newline).fingerprint == plain.fingerprint
    assert TokenBytes(tokenizer, end_ids=[tokenizer.eos_token_id], name="another").fingerprint == plain.fingerprint


def test_the_key_of_a_union_depends_on_its_members_and_their_order(cache_folder):
    tokenizer, other = make(), tiny.sentencepiece_bpe(400)
    (marker,) = ids_of(tokenizer, "<|eot|>")
    one, two = encoder(tokenizer), encoder(other)
    members = ([one], [one, two], [two, one], [one, one, two], [one, two, one], [encoder(tokenizer, num_ids=300), two])
    members = (*members, [encoder(tokenizer, end_ids=[marker]), two], [encoder(other, num_ids=420), one])
    sizes = []
    for encoders in members:
        union = UnionVocabulary(encoders)
        assert_same(union_arrays(union), union_arrays(UnionVocabulary(encoders, cache=False)))
        sizes.append(len([name for name in stored(cache_folder) if name.startswith("union")]))
    assert sizes == list(range(1, len(members) + 1))


def test_keys_are_told_apart_by_kind_and_by_every_part():
    assert len({store_key("a"), store_key("b"), store_key("a", 1), store_key("a", "1"), store_key("a", 1, 2)}) == 5
    assert store_key("a", [1, 2]) == store_key("a", [1, 2])
    assert store_key("a", [1, 2]) != store_key("a", [2, 1])


def test_the_key_changes_with_the_schema(monkeypatch):
    before = store_key("union", "x")
    monkeypatch.setattr(store, "_SCHEMA", store._SCHEMA + 1)
    assert store_key("union", "x") != before


def test_members_without_a_key_are_never_stored(cache_folder):
    one, two = make(), tiny.sentencepiece_bpe(400)
    for encoders in ([encoder(one, cache=False), encoder(two)], [encoder(two), encoder(one, cache=False)]):
        union = UnionVocabulary(encoders)
        assert_same(union_arrays(union), union_arrays(UnionVocabulary(encoders, cache=False)))
    both = [encoder(t, cache=False) for t in (one, two)]
    assert len(UnionVocabulary(both)) != len(UnionVocabulary(both[::-1]))
    assert not [name for name in stored(cache_folder) if name.startswith("union")]


# What is read is what was built


def test_what_is_loaded_is_what_was_built(fresh, cache_folder, monkeypatch):
    def build(cache):
        members = [fresh(), tiny.sentencepiece_bpe(400), tiny.smol_like()]
        return UnionVocabulary([encoder(t, cache=cache) for t in members], cache=cache)

    built, without = build(True), build(False)
    monkeypatch.setattr(UnionVocabulary, "_build", None)
    monkeypatch.setattr(TokenBytes, "_check_against_decoder", None)
    loaded = build(True)
    for union in (loaded, without):
        assert_same(union_arrays(union), union_arrays(built))
        assert (len(union), union.num_shared, union.primary_size) == (len(built), built.num_shared, built.primary_size)
        for one, two in zip(union.encoders, built.encoders, strict=True):
            assert one.token_bytes.entries == two.token_bytes.entries
            assert one.token_bytes.kinds.tolist() == two.token_bytes.kinds.tolist()
            assert one.token_bytes.num_ids == two.token_bytes.num_ids
            assert one.token_bytes.missing_bytes == two.token_bytes.missing_bytes
    assert [loaded.continuation(u, 2) for u in range(len(loaded))] == [
        built.continuation(u, 2) for u in range(len(built))
    ]


def test_the_count_of_tokens_without_a_row_is_stored(cache_folder):
    counts = [TokenBytes(make(), num_ids=250).num_rowless for _ in range(2)]
    assert counts[0] == counts[1] > 0


def test_without_a_cache_nothing_is_written(cache_folder):
    UnionVocabulary([encoder(make(), cache=False)], cache=False)
    assert not cache_folder.exists()


def test_arrays_that_do_not_lie_in_a_row_are_stored_as_they_are(cache_folder):
    array = np.arange(12, dtype=np.int32).reshape(3, 4)
    save_arrays("key", {"turned": array.T, "part": array[:, 1], "none": array[:0]})
    found = load_arrays("key")
    assert found["turned"].tolist() == array.T.tolist()
    assert found["part"].tolist() == array[:, 1].tolist()
    assert found["none"].shape == (0, 4)


def test_what_was_never_stored_is_not_found(cache_folder):
    assert load_arrays("key") is None


@pytest.mark.parametrize("value", [None, ""])
def test_maps_are_in_the_cache_of_hugging_face_by_default(value, monkeypatch, tmp_path):
    monkeypatch.setattr(store.constants, "HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_ENSEMBLE_CACHE")
    if value is not None:
        monkeypatch.setenv("HF_ENSEMBLE_CACHE", value)
    assert folder_of_maps() == tmp_path / "hf_ensemble"


# What goes wrong


@pytest.mark.parametrize("damage", ["empty", "garbage", "cut", "cut_header"])
def test_a_damaged_file_is_built_again_with_a_warning(damage, cache_folder):
    tokenizers = make(), tiny.sentencepiece_bpe(400)
    built = UnionVocabulary([encoder(t) for t in tokenizers])
    files = sorted(cache_folder.iterdir())
    assert len(files) == 3
    before = {path: path.read_bytes() for path in files}
    for path, data in before.items():
        wrong = {"empty": b"", "garbage": b"\xff" * 100, "cut": data[: len(data) // 2], "cut_header": data[:20]}
        path.write_bytes(wrong[damage])
    with pytest.warns(UserWarning, match="is damaged .* and will be rebuilt") as caught:
        again = UnionVocabulary([encoder(t) for t in tokenizers])
    assert len(caught) == 3
    assert_same(union_arrays(again), union_arrays(built))
    assert {path: path.read_bytes() for path in sorted(cache_folder.iterdir())} == before
    UnionVocabulary([encoder(t) for t in tokenizers])


@pytest.mark.parametrize("damage", ["flipped", "without a checksum", "other arrays"])
def test_what_is_not_as_it_was_written_is_built_again(damage, cache_folder):
    """A file that can be read, but is another: without a checksum a wrong map would be used."""
    expected = union_arrays(UnionVocabulary([encoder(make())], cache=False))
    UnionVocabulary([encoder(make())])
    for path in cache_folder.iterdir():
        if damage == "flipped":
            data = bytearray(path.read_bytes())
            data[-5] ^= 1
            path.write_bytes(data)
        else:
            arrays = store.load_file(path)
            store.save_file(
                {k: a for k, a in arrays.items() if k != "checksum"} if "without" in damage else ARRAYS, path
            )
    with pytest.warns(UserWarning, match="damaged .its checksum is wrong. and will be rebuilt"):
        assert_same(union_arrays(UnionVocabulary([encoder(make())])), expected)
    UnionVocabulary([encoder(make())])


def test_a_map_of_absurd_size_is_not_read(cache_folder, monkeypatch):
    save_arrays("key", ARRAYS)
    monkeypatch.setattr(store, "_MOST_BYTES", 10)
    monkeypatch.setattr(store, "load_file", None)
    with pytest.warns(UserWarning, match="damaged .it has .* bytes; the limit is 10. and will be rebuilt"):
        assert load_arrays("key") is None


def test_what_a_process_that_was_stopped_has_left_is_removed_later(cache_folder):
    cache_folder.mkdir()
    for name in (".key-0", ".key-1", ".other-0"):
        (cache_folder / name).write_bytes(b"unfinished")
        if name != ".key-1":  # which may be another process's that is writing now
            os.utime(cache_folder / name, (1, 1))
    save_arrays("key", ARRAYS)
    assert stored(cache_folder) == [".key-1", ".other-0", "key.safetensors"]


def test_a_folder_that_cannot_be_made_warns_and_names_the_remedy(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("HF_ENSEMBLE_CACHE", str(file / "maps"))
    with pytest.warns(
        UserWarning, match="vocabulary maps cannot be stored in .*Set HF_ENSEMBLE_CACHE to a writable folder"
    ):
        tokens = TokenBytes(make())
    assert tokens.entries == TokenBytes(make(), cache=False).entries
    assert file.read_text() == ""


@pytest.mark.parametrize("step", ["save_file", "replace"])
def test_a_save_that_fails_warns_and_leaves_nothing(step, cache_folder, monkeypatch):
    def fail(*arguments, **options):
        raise OSError("No space left on device")

    monkeypatch.setattr(*((store, step) if step == "save_file" else (store.os, step)), fail)
    with pytest.warns(UserWarning, match="vocabulary maps cannot be stored in .*No space left on device") as caught:
        union = UnionVocabulary([encoder(make()), encoder(tiny.sentencepiece_bpe(400))])
    assert len(caught) == 3
    assert len(union) > 300
    assert stored(cache_folder) == []


def test_a_save_that_is_interrupted_leaves_nothing_and_raises(cache_folder, monkeypatch):
    save_file = store.save_file

    def interrupt(arrays, path):
        save_file(arrays, path)
        raise KeyboardInterrupt

    monkeypatch.setattr(store, "save_file", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save_arrays("key", ARRAYS)
    assert stored(cache_folder) == []


def test_two_processes_that_build_at_once_both_are_right(cache_folder, monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(2), context.Queue()
    save_file = store.save_file
    tokenizers = make(), tiny.sentencepiece_bpe(400)

    def save_together(arrays, path):
        barrier.wait(timeout=60)
        save_file(arrays, path)
        barrier.wait(timeout=60)

    def build():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            results.put([array.tolist() for array in union_arrays(UnionVocabulary([encoder(t) for t in tokenizers]))])

    monkeypatch.setattr(store, "save_file", save_together)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # forking beside threads: nothing that runs in them is used
        processes = [context.Process(target=build) for _ in range(2)]
        for process in processes:
            process.start()
    found = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(timeout=60)
    monkeypatch.setattr(store, "save_file", save_file)
    assert [process.exitcode for process in processes] == [0, 0]
    built = UnionVocabulary([encoder(t, cache=False) for t in tokenizers], cache=False)
    expected = [array.tolist() for array in union_arrays(built)]
    assert found == [expected, expected]
    assert len(stored(cache_folder)) == 3
    assert_same(union_arrays(UnionVocabulary([encoder(t) for t in tokenizers])), union_arrays(built))


def test_a_reader_sees_the_whole_file_or_none(cache_folder, monkeypatch):
    save_file, seen = store.save_file, []

    def save_and_look(arrays, path):
        save_file(arrays, path)
        seen.append(load_arrays("key"))

    monkeypatch.setattr(store, "save_file", save_and_look)
    save_arrays("key", ARRAYS)
    assert seen == [None]
    assert load_arrays("key")["a"].tolist() == ARRAYS["a"].tolist()
