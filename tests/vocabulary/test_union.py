import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_ensemble.errors import VocabularyError
from hf_ensemble.vocabulary.token_bytes import CONTROL, TEXT
from hf_ensemble.vocabulary.union import UnionVocabulary
from tests import tiny

from .material import byte_level_tokenizer, encoder_of, family, family_encoder, ids_of, piece_tokenizer, quick

TRIO = ("byte_level", "sentencepiece", "wordpiece")
QUARTET = ("sentencepiece", "byte_level_missing_bytes", "unigram_no_bytes", "byte_level_nfc")


def union_of(*tokenizers, **options):
    return UnionVocabulary([encoder_of(tokenizer, **options) for tokenizer in tokenizers], cache=False)


def pieces(*names, **roles):
    """A tokenizer with exactly these tokens, and no byte tokens."""
    return piece_tokenizer("<unk>", *names, **roles)


def naive_maps(encoders):
    """The maps, built with a dictionary from bytes to union ids, one entry at a time."""
    primary = encoders[0]
    num_primary = primary.token_bytes.num_ids
    column = {entry: primary.id_of[entry] for entry in primary.token_bytes.entries if entry}
    union = [primary.token_bytes.entries[i] for i in range(num_primary)]
    for encoder in encoders[1:]:
        for i, entry in enumerate(encoder.token_bytes.entries):
            if entry and encoder.id_of[entry] == i and entry not in column:
                column[entry] = len(union)
                union.append(entry)
    to_union, to_member, to_first = [], [], []
    for m, encoder in enumerate(encoders):
        kinds, entries = encoder.token_bytes.kinds.tolist(), encoder.token_bytes.entries
        own_column = CONTROL if m == 0 else None
        to_union.append([column[e] if e else i if kinds[i] == own_column else -1 for i, e in enumerate(entries)])
        own, first = [], []
        for u, entry in enumerate(union):
            ids = encoder.encode(entry) if entry and column[entry] == u else None
            is_control = m == 0 and u < num_primary and kinds[u] == CONTROL
            own.append(u if is_control else encoder.id_of.get(entry, -1) if ids else -1)
            first.append(u if is_control else ids[0] if ids else -1)
        to_member.append(own)
        to_first.append(first)
    return union, to_union, to_member, to_first


def check_against_naive(union):
    entries, to_union, to_member, to_first = naive_maps(union.encoders)
    assert len(union) == len(entries)
    assert [union.entry(u) for u in range(len(union))] == entries
    for m in range(len(union.encoders)):
        assert union.member_to_union[m].tolist() == to_union[m]
        assert union.union_to_member[m].tolist() == to_member[m]
        assert union.union_to_first[m].tolist() == to_first[m]
    assert union.num_shared == sum(all(ids[u] >= 0 for ids in to_member) for u in range(len(entries)))


# By hand


def test_the_primary_comes_first_and_an_assistant_adds_what_is_new_in_the_order_of_its_ids():
    union = union_of(pieces("a", "b", "▁", "c"), piece_tokenizer("x", "<unk>", "b", "a", "xy", "<s>", bos="<s>"))
    assert [union.entry(u) for u in range(len(union))] == [b"", b"a", b"b", b" ", b"c", b"x", b"xy"]
    assert union.primary_size == 5
    assert union.num_shared == 2
    assert [ids.tolist() for ids in union.member_to_union] == [[0, 1, 2, 3, 4], [5, -1, 2, 1, 6, -1]]
    assert [ids.tolist() for ids in union.union_to_member] == [[0, 1, 2, 3, 4, -1, -1], [-1, 3, 2, -1, -1, 0, 4]]
    assert [ids.tolist() for ids in union.union_to_first] == [[0, 1, 2, 3, 4, -1, -1], [-1, 3, 2, -1, -1, 0, 4]]


def test_an_entry_may_take_several_ids_of_a_member():
    union = union_of(pieces("a", "b", "▁"), pieces("b", "aba", "▁ab"))
    assert [union.entry(u) for u in range(4, 6)] == [b"aba", b" ab"]
    assert [union.continuation(u, 0) for u in range(6)] == [[0], [1], [2], [3], [1, 2, 1], [3, 1, 2]]
    assert [union.continuation(u, 1) for u in range(6)] == [None, None, [1], None, [2], [3]]
    assert union.union_to_first[0].tolist() == [0, 1, 2, 3, 1, 3]
    assert union.union_to_first[1].tolist() == [-1, -1, 1, -1, 2, 3]


def test_three_members_by_hand():
    union = union_of(pieces("a", "b"), pieces("c", "a", "bc"), pieces("d", "bc", "c", "cab"))
    assert [union.entry(u) for u in range(3, len(union))] == [b"c", b"bc", b"d", b"cab"]
    assert union.num_shared == 0
    assert [ids.tolist() for ids in union.member_to_union] == [[0, 1, 2], [-1, 3, 1, 4], [-1, 5, 4, 3, 6]]
    assert [union.continuation(6, m) for m in range(3)] == [None, None, [4]]
    assert [union.continuation(4, m) for m in range(3)] == [None, [3], [2]]


def test_four_members_by_hand():
    union = union_of(pieces("a"), pieces("b", "a"), pieces("a", "b", "c"), pieces("d", "c", "b", "a"))
    assert [union.entry(u) for u in range(len(union))] == [b"", b"a", b"b", b"c", b"d"]
    assert union.num_shared == 1
    assert [ids.tolist() for ids in union.union_to_member] == [
        *([0, 1, -1, -1, -1], [-1, 2, 1, -1, -1], [-1, 1, 2, 3, -1], [-1, 4, 3, 2, 1])
    ]


def test_entries_of_an_assistant_are_ordered_by_canonical_id_and_every_id_of_one_has_its_column():
    alphabet = {char: i + 1 for i, char in enumerate("qz")}
    assistant = piece_tokenizer("<unk>", "<0x0A>", "q", "\n", "z")
    assert encoder_of(assistant).id_of[b"\n"] == 3
    union = union_of(byte_level_tokenizer({"Ċ": 0, **alphabet}), assistant)
    assert union.member_to_union[1].tolist() == [-1, 0, 1, 0, 2]
    union = union_of(pieces("a"), assistant)
    assert [union.entry(u) for u in range(2, len(union))] == [b"q", b"\n", b"z"]
    assert union.member_to_union[1].tolist() == [-1, 3, 2, 3, 4]
    assert union.union_to_member[1].tolist() == [-1, -1, 2, 3, 4]


def test_ids_of_the_primary_with_the_same_bytes_have_the_column_of_the_canonical_one():
    union = union_of(piece_tokenizer("<unk>", "<0x0A>", "\n"), pieces("\n"))
    assert len(union) == 3
    assert union.member_to_union[0].tolist() == [0, 2, 2]
    assert union.union_to_member[0].tolist() == [0, -1, 2]
    assert union.union_to_member[1].tolist() == [-1, -1, 1]
    assert union.num_shared == 1


def test_spelling_is_not_compared_but_bytes_are():
    byte_level = byte_level_tokenizer({"Ġthe": 0, "Ċ": 1, "Ã¤": 2, "Ã": 3})
    union = union_of(byte_level, piece_tokenizer("ä", "\n", "▁the", "<0xC3>", "Ġthe"))
    assert union.member_to_union[1].tolist() == [2, 1, 0, 3, 4]
    assert union.entry(4) == "Ġthe".encode()


# Members that are alike, and members that are not


@pytest.mark.parametrize("num_members", [1, 2, 3, 4])
def test_identical_members_share_everything(num_members):
    encoder = family_encoder("sentencepiece")
    union = UnionVocabulary([encoder] * num_members, cache=False)
    assert len(union) == encoder.token_bytes.num_ids
    num_control = int((encoder.token_bytes.kinds == CONTROL).sum())
    assert union.num_shared == len(encoder.id_of) + (num_control if num_members == 1 else 0)
    for ids in union.union_to_first[1:]:
        assert (ids == union.union_to_member[1]).all()
        assert ((ids >= 0) == (union.union_to_member[1] >= 0)).all()


def test_disjoint_members_share_nothing():
    latin, hebrew = tiny.disjoint_pair()
    union = union_of(latin, hebrew)
    num_text = int((encoder_of(hebrew).token_bytes.kinds == TEXT).sum())
    assert union.num_shared == 0
    assert len(union) == len(latin) + num_text
    assert (union.union_to_first[0][len(latin) :] == -1).all()
    assert (union.union_to_first[1][: len(latin)] == -1).all()


def test_the_order_of_the_assistants_changes_columns_but_no_entry():
    one, two = (
        UnionVocabulary([family_encoder(name) for name in names], cache=False)
        for names in (TRIO, (TRIO[0], *TRIO[:0:-1]))
    )
    assert len(one) == len(two)
    assert one.num_shared == two.num_shared
    assert sorted(map(one.entry, range(len(one)))) == sorted(map(two.entry, range(len(two))))
    assert [one.entry(u) for u in range(len(one))] != [two.entry(u) for u in range(len(two))]


def test_there_is_no_union_of_nothing():
    with pytest.raises(VocabularyError, match="at least one tokenizer: got 0"):
        UnionVocabulary([])


# Against a naive build


@pytest.mark.parametrize("names", [TRIO, QUARTET, ("byte_level_odd_added", "sentencepiece_llama2")], ids=len)
def test_maps_are_those_of_a_naive_build(names):
    check_against_naive(UnionVocabulary([family_encoder(name) for name in names], cache=False))


@pytest.mark.parametrize("make", [tiny.byte_level_bpe, tiny.sentencepiece_bpe])
def test_maps_with_holes_padded_rows_and_missing_rows_are_those_of_a_naive_build(make):
    holes = make(holes=[7, 300])
    padded = encoder_of(holes, num_ids=len(holes) + 20)
    cut = encoder_of(family("byte_level"), num_ids=350)
    check_against_naive(UnionVocabulary([padded, family_encoder("unigram"), cut], cache=False))
    check_against_naive(UnionVocabulary([cut, padded], cache=False))


words = st.lists(st.text("ab▁ä", min_size=1, max_size=3), max_size=5, unique=True)


@quick
@given(vocabularies=st.lists(words, min_size=1, max_size=4))
def test_maps_of_any_vocabularies_are_those_of_a_naive_build(vocabularies):
    check_against_naive(union_of(*(pieces(*(vocabulary or ["a"])) for vocabulary in vocabularies)))


@pytest.mark.parametrize("names", [TRIO, QUARTET], ids=len)
def test_a_continuation_writes_its_entry(names):
    encoders = [family_encoder(name) for name in names]
    union = UnionVocabulary(encoders, cache=False)
    for m, encoder in enumerate(encoders):
        for u in range(len(union)):
            ids = union.continuation(u, m)
            first = int(union.union_to_first[m][u])
            assert first == (ids[0] if ids else -1)
            if ids is not None and union.entry(u):
                assert encoder.token_bytes.write(ids) == union.entry(u)
                assert ids == encoder.encode(union.entry(u))


def test_a_union_round_trip_is_the_identity_on_entries():
    union = UnionVocabulary([family_encoder(name) for name in QUARTET], cache=False)
    for encoder, to_union, to_member in zip(union.encoders, union.member_to_union, union.union_to_member, strict=True):
        canonical = np.array(sorted(encoder.id_of.values()))
        assert (to_member[to_union[canonical]] == canonical).all()
        assert len(set(to_union[canonical].tolist())) == len(canonical)


# Columns without bytes


def test_control_tokens_of_the_primary_have_columns_and_those_of_assistants_have_none():
    union = union_of(pieces("a", "</s>", eos="</s>"), pieces("</s>", "<s>", "a", eos="</s>", bos="<s>"))
    assert len(union) == 3
    assert union.member_to_union[0].tolist() == [0, 1, 2]
    assert union.member_to_union[1].tolist() == [-1, -1, -1, 1]
    assert union.union_to_member[1].tolist() == [-1, 3, -1]
    assert union.continuation(2, 0) == [2]
    assert union.continuation(2, 1) is None
    assert union.entry(2) == b""


def test_an_entry_that_spells_a_control_token_of_the_primary_is_another_entry():
    union = union_of(pieces("a", "</s>", eos="</s>"), pieces("</s>", "a"))
    assert union.entry(3) == b"</s>"
    assert union.member_to_union[1].tolist() == [-1, 3, 1]
    assert union.union_to_first[0].tolist() == [0, 1, 2, -1]


def test_an_end_marker_has_a_column_of_the_primary_and_its_bytes_are_no_entry():
    tokenizer = tiny.byte_level_bpe(added=["<|eot|>"])
    (marker,) = ids_of(tokenizer, "<|eot|>")
    primary, plain = encoder_of(tokenizer, end_ids=[marker]), encoder_of(tokenizer)
    union = UnionVocabulary([primary, plain], cache=False)
    assert union.entry(marker) == b""
    assert union.member_to_union[0][marker] == union.union_to_member[0][marker] == marker
    assert len(union) == len(tokenizer) + 1
    assert union.entry(len(tokenizer)) == b"<|eot|>"
    assert union.continuation(len(tokenizer), 0) == primary.encode(b"<|eot|>")
    assert union.member_to_union[1][marker] == len(tokenizer)
    union = UnionVocabulary([plain, primary], cache=False)
    assert len(union) == len(tokenizer)
    assert union.member_to_union[1][marker] == -1


def test_an_end_id_that_writes_a_newline_is_an_ordinary_entry():
    newline = encoder_of(family("sentencepiece")).encode(b"\n")
    union = union_of(family("byte_level"), family("sentencepiece"), end_ids=newline)
    assert union.entry(int(union.member_to_union[1][newline[0]])) == b"\n"


def test_ids_without_a_token_take_no_part():
    tokenizer = tiny.byte_level_bpe(holes=[7, 300])
    encoder = encoder_of(tokenizer, num_ids=500)
    union = UnionVocabulary([encoder, family_encoder("sentencepiece")], cache=False)
    idle = [7, 300, *range(len(encoder.token_bytes.backend.get_vocab()) + 2, 500)]
    assert union.primary_size == 500
    for maps in (union.member_to_union[0], union.union_to_member[0], union.union_to_first[0], union.union_to_first[1]):
        assert (maps[idle] == -1).all()
    assert all(union.entry(u) == b"" and union.continuation(u, 0) is None for u in idle)


def test_entries_that_the_primary_cannot_write_have_no_first_id():
    primary, assistant = family_encoder("byte_level_missing_bytes"), family_encoder("byte_level")
    union = UnionVocabulary([primary, assistant], cache=False)
    cannot = np.flatnonzero(union.union_to_first[0] < 0)
    assert {union.entry(u) for u in cannot.tolist()} == {bytes([b]) for b in primary.token_bytes.missing_bytes}
    assert (cannot >= union.primary_size).all()
    assert all(union.continuation(u, 0) is None for u in cannot.tolist())


def test_from_tokenizers_builds_the_same(cache_folder):
    tokenizers = [family(name) for name in TRIO]
    union, expected = UnionVocabulary.from_tokenizers(tokenizers, cache=False), union_of(*tokenizers)
    assert not cache_folder.exists()
    for found, wanted in zip(union.union_to_first, expected.union_to_first, strict=True):
        assert (found == wanted).all()
