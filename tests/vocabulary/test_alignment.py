"""Maps from an assistant's entries to the primary's, beside plain computations of the same."""

import functools

import numpy as np
import pytest
import torch

from hf_ensemble import UnionVocabulary, VocabularyError
from hf_ensemble.vocabulary import alignment
from tests import tiny

PAIRS = {
    "smol + gemma": (tiny.smol_like, tiny.gemma_like),
    "gemma + smol": (tiny.gemma_like, tiny.smol_like),
    "wordpiece + unigram": (tiny.wordpiece, tiny.unigram),
    "byte-level + qwen": (tiny.byte_level_bpe, functools.partial(tiny.qwen_like, vocab_size=350)),
}
each_pair = pytest.mark.parametrize("pair", PAIRS)


@functools.cache
def union_of(pair):
    return UnionVocabulary.from_tokenizers([make() for make in PAIRS[pair]])


def entries_of(union, member):
    """What each canonical id writes."""
    entries = dict(enumerate(union.encoders[member].token_bytes.entries))
    return {i: entries[i] for i in sorted(union.encoders[member].id_of.values())}


def levenshtein(a, b):
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        last, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (x != y))
    return row[-1]


def text_or_bytes(*entries):
    try:
        return [entry.decode() for entry in entries]
    except UnicodeDecodeError:
        return entries


# --- By spelling ----------------------------------------------------------------------------------------------------


@each_pair
def test_the_nearest_entry_is_that_of_a_plain_search(pair):
    union = union_of(pair)
    primary, member = entries_of(union, 0), entries_of(union, 1)
    nearest = alignment.load_or_build_nearest(union, 1)
    known = {entry: i for i, entry in primary.items()}
    missing = [i for i in member if member[i] not in known]
    assert [nearest[i] for i in member if i not in missing] == [known[member[i]] for i in member if i not in missing]
    invalid = [i for i in missing if b"\xff" in member[i] or text_or_bytes(member[i])[0] == member[i]]
    for i in [*missing[:: max(1, len(missing) // 25)], *invalid[:5]]:
        distances = {j: levenshtein(*text_or_bytes(member[i], entry)) for j, entry in primary.items()}
        assert nearest[i] == min(distances, key=lambda j: (distances[j], j))


@each_pair
def test_ids_of_one_entry_go_together_and_ids_without_text_nowhere(pair):
    union = union_of(pair)
    nearest = alignment.load_or_build_nearest(union, 1)
    token_bytes = union.encoders[1].token_bytes
    for i, entry in enumerate(token_bytes.entries):
        assert nearest[i] == (nearest[union.encoders[1].id_of[entry]] if entry else -1)


@pytest.mark.parametrize(
    ("entry", "choices", "place"),
    [
        (b"get", [b"got", b"gets", b"ge"], 0),
        (b"get", [b"xyz", b"gets", b"got"], 1),
        (b"abc", [b"abcd", b"abc"], 1),
        ("日本".encode(), [b"xyz", b"ab", b"a"], 1),
        # A character of three bytes is one edit from any other; a fragment of it is one byte away, on bytes.
        ("日".encode(), [b"xy", "日".encode()[:2], b"z"], 1),
        ("日".encode()[:2], ["日".encode(), b"\xe6"], 0),
        ("é".encode()[:1], [b"a", "é".encode()], 0),
        # Lengths in bytes count where either is no text, so these two are three edits apart, not one.
        ("日".encode(), [b"\xff\xfe\xfd", b"q"], 1),
        (b"a" * 300, [b"b", b"a" * 290, b"a" * 301], 2),
        (b"\x00", [b"a\x00", b"b"], 0),
    ],
)
def test_nearest_of_a_few(entry, choices, place):
    assert alignment._nearest_entries([entry], choices).tolist() == [place]


def test_blocks_do_not_matter(monkeypatch):
    union = union_of("smol + gemma")
    whole = alignment._build_nearest(union, 1)
    monkeypatch.setattr(alignment, "_MAX_DISTANCES", 100)
    assert np.array_equal(alignment._build_nearest(union, 1), whole)


def test_maps_are_built_once(monkeypatch):
    union = union_of("smol + gemma")
    weights = embeddings_of(union)
    expected = alignment.load_or_build_nearest(union, 1), *similar(union, weights)
    for name in ("_build_nearest", "_build_similar"):
        monkeypatch.setattr(alignment, name, None)
    found = alignment.load_or_build_nearest(union, 1), *similar(union, weights)
    for a, b in zip(found, expected, strict=True):
        assert np.array_equal(a, b)
    for changed in ((weights[0] * 2, weights[1]), (weights[0], weights[1].bfloat16())):
        with pytest.raises(TypeError, match="not callable"):
            similar(union, changed)
    with pytest.raises(TypeError, match="not callable"):
        similar(union, weights, neighbours=3)


# --- By embeddings --------------------------------------------------------------------------------------------------


def embeddings_of(union, widths=(16, 12)):
    """Both spaces are views of the same points where entries are the same."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(len(union), 24, generator=generator)
    weights = []
    for member, width in enumerate(widths):
        at = torch.from_numpy(union.member_to_union[member]).clamp_min(0).long()
        noise = 0.1 * torch.randn(len(at), width, generator=generator)
        weights.append(hidden[at] @ torch.randn(24, width, generator=generator) + noise + 0.5)
    return tuple(weights)


def similar(union, weights, neighbours=10, min_similarity=0.1):
    return alignment.load_or_build_similar(union, 1, weights, neighbours, min_similarity, torch.device("cpu"))


def plain_similar(union, weights, neighbours, min_similarity, dead=((), ())):
    """Counterparts and shares of each of the assistant's entries, with the whole matrix in float64."""
    spaces, entries = [], []
    width = max(weight.shape[1] for weight in weights)
    for member, weight in enumerate(weights):
        of_member = {i: entry for i, entry in entries_of(union, member).items() if i not in dead[member]}
        rows = weight[list(of_member)].double().numpy()
        rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        rows = rows - rows.mean(0)
        rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        spaces.append(np.pad(rows, ((0, 0), (0, width - rows.shape[1]))))
        entries.append(of_member)
    ids, member_ids = list(entries[0]), list(entries[1])
    place = {entry: n for n, entry in enumerate(entries[0].values())}
    shared = [(n, place[entry]) for n, entry in enumerate(entries[1].values()) if entry in place]
    left, right = np.array(shared).T
    u, _, vh = np.linalg.svd(spaces[1][left].T @ spaces[0][right])
    cosines = spaces[1] @ u @ vh @ spaces[0].T
    r_member = np.sort(cosines, axis=1)[:, -neighbours:].mean(1, keepdims=True)
    r_primary = np.sort(cosines, axis=0)[-neighbours:].mean(0, keepdims=True)
    csls = 2 * cosines - r_member - r_primary
    known = {entry: i for i, entry in entries_of(union, 0).items()}
    found = {i: {known[entry]: 1.0} for i, entry in entries_of(union, 1).items() if entry in known}
    for i, row in zip(member_ids, csls, strict=True):
        if i not in found:
            best = [n for n in np.argsort(-row, kind="stable")[:neighbours] if row[n] >= min_similarity]
            found[i] = {ids[n]: row[n] / sum(row[best]) for n in best}
    return found


def as_dictionaries(ids, shares):
    return {
        i: {int(j): float(share) for j, share in zip(*row, strict=True) if j >= 0}
        for i, row in enumerate(zip(ids, shares, strict=True))
    }


@pytest.mark.crossed
@each_pair
@pytest.mark.parametrize("widths", [(16, 16), (16, 12), (12, 16)], ids=str)
def test_counterparts_are_those_of_the_whole_matrix(pair, widths):
    union = union_of(pair)
    weights = embeddings_of(union, widths)
    for neighbours, least in ((10, 0.1), (2, 0.01)):
        found = as_dictionaries(*similar(union, weights, neighbours, least))
        expected = plain_similar(union, weights, neighbours, least)
        for i, row in found.items():
            assert list(row) == list(expected.get(i, {}))
            assert row == pytest.approx(expected.get(i, {}), abs=1e-5)


def test_blocks_of_similarities_do_not_matter(monkeypatch):
    union = union_of("smol + gemma")
    weights = embeddings_of(union)
    arguments = (union, 1, weights, 10, 0.1, torch.device("cpu"))
    whole = alignment._build_similar(*arguments)
    monkeypatch.setattr(alignment, "_MAX_SIMILARITIES", 5000)
    in_blocks = alignment._build_similar(*arguments)
    assert np.array_equal(in_blocks["ids"], whole["ids"])
    assert np.allclose(in_blocks["shares"], whole["shares"], atol=1e-5)


def test_of_equal_embeddings_the_lowest_ids_are_kept():
    union = union_of("smol + gemma")
    weights = embeddings_of(union)
    ids = list(entries_of(union, 0))
    lower, higher = ids[::2], ids[1::2]
    weights[0][higher] = weights[0][lower[: len(higher)]]
    own = union.union_to_member[1]
    missing = [i for i in entries_of(union, 1) if i not in {int(own[i]) for i in ids}]
    for count in (1, 3):
        found, _ = similar(union, weights, count, 0.01)
        for row in found[missing].tolist():
            twins = [ids.index(i) // 2 for i in row if i >= 0]
            assert [i for i in row if i >= 0] == [ids[2 * n + twins[:k].count(n)] for k, n in enumerate(twins)]


def test_all_zero_embeddings_take_no_part():
    union = union_of("smol + gemma")
    weights = embeddings_of(union)
    own = union.union_to_member[1]
    common = [i for i in entries_of(union, 0) if own[i] >= 0]
    dead = ([common[0], common[-1]], [int(own[common[1]]), int(own[own >= 0][-1])])
    for weight, ids in zip(weights, dead, strict=True):
        weight[ids] = 0
    found, expected = as_dictionaries(*similar(union, weights)), plain_similar(union, weights, 10, 0.1, dead)
    assert found[dead[1][0]] == {common[1]: 1.0}
    assert found[dead[1][1]] == {}
    for i, row in found.items():
        assert row == pytest.approx(expected.get(i, {}), abs=1e-5)


def test_members_without_a_common_entry_are_an_error():
    union = union_of("smol + gemma")
    weights = embeddings_of(union)
    own = union.union_to_member[1][: union.primary_size]
    weights[1][own[own >= 0]] = 0
    with pytest.raises(VocabularyError, match="none in common"):
        similar(union, weights)


def test_of_members_with_the_same_vocabulary_no_embeddings_are_needed():
    union = UnionVocabulary.from_tokenizers([tiny.smol_like()] * 2)
    rows = union.primary_size
    ids, shares = similar(union, (torch.zeros(rows, 4), torch.zeros(rows, 6)))
    known = sorted(union.encoders[0].id_of.values())
    assert ids[known, 0].tolist() == known
    assert shares.sum() == len(known)
