"""From every entry of an assistant to entries of the primary: by spelling (MinED) or by embeddings (EVA)."""

import hashlib
import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm

from ..errors import VocabularyError
from ..mixing import top_entries
from .store import load_or_build, store_key
from .token_bytes import TEXT, text_or_none
from .union import UnionVocabulary

_MAX_DISTANCES, _MAX_SIMILARITIES = 1 << 24, 1 << 26
"""Largest number held at once."""


def load_or_build_nearest(union: UnionVocabulary, member: int) -> np.ndarray:
    """Find the primary's entry with the most similar spelling for each of an assistant's: the map of MinED.

    The distance is Levenshtein's with unit costs, over characters, or over bytes if either entry is not valid UTF-8.
    An entry that the primary has too is its own nearest; ties go to the lowest id. The map is read from disk if it was
    built before. Building takes a minute or two for large vocabularies, and shows its progress.

    Args:
        union: The members' union vocabulary.
        member: Index of the assistant.

    Returns:
        The primary's id for each id of the assistant, of shape `(member_vocab_size,)`; -1 if it takes no part.
    """
    key = _pair_key("mined", union, member)
    return load_or_build(key, lambda: {"nearest": _build_nearest(union, member)})["nearest"]


def load_or_build_similar(
    union: UnionVocabulary,
    member: int,
    output_embeddings: tuple[Tensor, Tensor],
    neighbours: int,
    min_similarity: float,
    device: torch.device,
) -> tuple[np.ndarray, np.ndarray]:
    """Find the primary's entries with the most similar output embeddings for each of an assistant's: the map of EVA.

    Both spaces are normalised (rows to length 1, centred, to length 1 again; the narrower padded with zeros) and the
    assistant's is turned onto the primary's by the orthogonal map that fits their common entries best. Entries are
    compared by cross-domain similarity local scaling, `2 cos(x, y) - r(x) - r(y)` with r the mean cosine to the
    nearest `neighbours` entries of the other space. All-zero embeddings take no part. Memory grows with the sum of
    the vocabularies.

    Args:
        union: The members' union vocabulary.
        member: Index of the assistant.
        output_embeddings: Output embeddings of the primary and the assistant, of shape `(vocab_size, hidden_size)`.
        neighbours: Number of neighbours in r, and largest number of entries kept for one of the assistant's.
        min_similarity: Smallest similarity that is kept; positive.
        device: Device of the computation.

    Returns:
        The primary's ids for each id of the assistant, best first and -1 for none, and the share of each, which sum to
        1; both of shape `(member_vocab_size, neighbours)`. An entry that the primary has too is its own only
        counterpart. Only canonical ids have counterparts.

    Raises:
        VocabularyError: If the two have no entry in common.
    """
    digests = [_digest(weight) for weight in output_embeddings]
    key = _pair_key("eva", union, member, digests, neighbours, min_similarity)
    options = (neighbours, min_similarity, device)
    # Stored maps must not depend on the caller's autocast.
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        arrays = load_or_build(key, lambda: _build_similar(union, member, output_embeddings, *options))
    return arrays["ids"], arrays["shares"]


def _pair_key(kind: str, union: UnionVocabulary, member: int, *parts: object) -> str | None:
    fingerprints = [union.encoders[index].token_bytes.fingerprint for index in (0, member)]
    return store_key(kind, fingerprints, *parts) if all(fingerprints) else None


def _primary_entries(union: UnionVocabulary) -> np.ndarray:
    """Canonical ids of the primary's entries, ascending."""
    is_text = union.encoders[0].token_bytes.kinds == TEXT
    return np.flatnonzero(is_text & (union.member_to_union[0] == np.arange(union.primary_size)))


def _missing_entries(union: UnionVocabulary, member: int) -> np.ndarray:
    """Canonical ids of the member's entries that the primary lacks, in the order of their union ids."""
    own = union.union_to_member[member][union.primary_size :]
    return own[own >= 0]


# --- By spelling ----------------------------------------------------------------------------------------------------


def _build_nearest(union: UnionVocabulary, member: int) -> np.ndarray:
    primary_ids = _primary_entries(union)
    missing = _missing_entries(union, member)
    to_union = union.member_to_union[member]
    nearest = np.arange(len(union), dtype=np.int32)
    if len(missing):
        primary_entry, entry = union.encoders[0].token_bytes.entry, union.encoders[member].token_bytes.entry
        found = _nearest_entries([entry(i) for i in missing], [primary_entry(i) for i in primary_ids])
        nearest[to_union[missing]] = primary_ids[found]
    return np.where(to_union < 0, -1, nearest[to_union]).astype(np.int32)


def _nearest_entries(entries: Sequence[bytes], choices: Sequence[bytes]) -> np.ndarray:
    """The index of the nearest of `choices` to each of `entries`; ties go to the first."""
    is_text, choice_is_text = (
        np.array([text_or_none(one) is not None for one in some]) for some in (entries, choices)
    )
    best = np.full(len(entries), np.iinfo(np.int64).max)

    def compare(queries: np.ndarray, among: np.ndarray, encoding: str) -> None:
        rows, columns = np.flatnonzero(queries), np.flatnonzero(among)
        if not len(rows) or not len(columns):
            return
        texts = [choices[n].decode(encoding) for n in columns.tolist()]
        # Characters that no choice has are interchangeable, which leaves far fewer texts to compare.
        known = set().union(*texts)
        unlike = next(chr(code) for code in itertools.count() if chr(code) not in known)
        read = (entries[n].decode(encoding) for n in rows.tolist())
        spelled = ["".join(char if char in known else unlike for char in text) for text in read]
        unique = {text: n for n, text in enumerate(dict.fromkeys(spelled))}
        distances, at = np.divmod(_nearest_texts(list(unique), texts), len(texts))
        found = distances * len(choices) + columns[at]
        best[rows] = np.minimum(best[rows], found[[unique[text] for text in spelled]])

    compare(is_text, choice_is_text, "utf-8")
    # One character per byte.
    compare(is_text, ~choice_is_text, "latin-1")
    compare(~is_text, np.ones_like(choice_is_text), "latin-1")
    return best % len(choices)


def _nearest_texts(queries: Sequence[str], choices: Sequence[str]) -> np.ndarray:
    """The nearest choice to each query, as its Levenshtein distance times `len(choices)`, plus its index.

    So the smallest value is the first of the nearest.
    """
    from rapidfuzz.distance import Levenshtein
    from rapidfuzz.process import cdist

    query_lengths = np.array(list(map(len, queries)))
    choice_lengths = np.array(list(map(len, choices)))
    best = np.full(len(queries), np.iinfo(np.int64).max)
    with tqdm(total=len(queries), desc="MinED: nearest entries", unit="entry", disable=None) as progress:
        for length in np.unique(query_lengths).tolist():
            still_open = np.flatnonzero(query_lengths == length)
            # Texts whose lengths differ by `band` are at least that far apart.
            for band in range(max(length, int(choice_lengths.max())) + 1):
                among = np.flatnonzero(np.abs(choice_lengths - length) == band)
                among_texts = [choices[n] for n in among.tolist()]
                num_rows = max(1, _MAX_DISTANCES // max(1, len(among)))
                for start in range(0, len(still_open) if among_texts else 0, num_rows):
                    rows = still_open[start : start + num_rows]
                    texts = [queries[n] for n in rows.tolist()]
                    distances = cdist(texts, among_texts, scorer=Levenshtein.distance, dtype=np.uint16, workers=-1)
                    found = distances.min(axis=1).astype(np.int64) * len(choices) + among[distances.argmin(axis=1)]
                    best[rows] = np.minimum(best[rows], found)
                is_open = best[still_open] // len(choices) > band
                progress.update(int((~is_open).sum()))
                still_open = still_open[is_open]
                if not len(still_open):
                    break
            progress.update(len(still_open))
    return best


# --- By embeddings --------------------------------------------------------------------------------------------------


def _digest(weight: Tensor) -> str:
    digest = hashlib.sha256(f"{weight.dtype} {tuple(weight.shape)}".encode())
    for rows in weight.detach().split(4096):
        digest.update(rows.contiguous().cpu().view(torch.uint8).numpy())
    return digest.hexdigest()


def _build_similar(
    union: UnionVocabulary,
    member: int,
    output_embeddings: tuple[Tensor, Tensor],
    neighbours: int,
    min_similarity: float,
    device: torch.device,
) -> dict[str, np.ndarray]:
    own = union.union_to_member[member]
    primary_ids, missing = _primary_entries(union), _missing_entries(union, member)
    common = primary_ids[own[primary_ids] >= 0]
    num_ids = union.encoders[member].token_bytes.num_ids
    ids = np.full((num_ids, neighbours), -1, dtype=np.int32)
    shares = np.zeros((num_ids, neighbours), dtype=np.float32)
    ids[own[common], 0], shares[own[common], 0] = common, 1.0
    arrays = {"ids": ids, "shares": shares}
    if not len(missing):
        return arrays

    is_alive, member_is_alive = ((weight != 0).any(-1).cpu().numpy() for weight in output_embeddings)
    common = common[member_is_alive[own[common]]]
    is_anchor = is_alive[common]
    if not is_anchor.any():
        names = [union.encoders[index].token_bytes.name for index in (0, member)]
        raise VocabularyError(
            f"EVA aligns two members by the entries that both have, but {names[0]!r} and {names[1]!r} have none in "
            "common. Use another method."
        )
    missing = missing[member_is_alive[missing]]
    primary_ids = primary_ids[is_alive[primary_ids]]
    member_ids = np.concatenate([missing, own[common]])
    width = max(weight.shape[1] for weight in output_embeddings)
    space = _unit_space(output_embeddings[0], primary_ids, width, device)
    member_space = _unit_space(output_embeddings[1], member_ids, width, device)
    anchors = space[np.searchsorted(primary_ids, common[is_anchor])]
    covariance = member_space[len(missing) + np.flatnonzero(is_anchor)].T @ anchors
    left, _, right = torch.linalg.svd(covariance.double().cpu())
    member_space = member_space @ (left @ right).to(member_space)

    num_rows = max(1, _MAX_SIMILARITIES // len(member_ids))
    num_member_rows = max(1, _MAX_SIMILARITIES // len(primary_ids))
    with tqdm(total=len(space) + len(missing), desc="EVA: similar entries", unit="entry", disable=None) as progress:
        blocks = []
        for rows in space.split(num_rows):
            blocks.append(_mean_of_best(rows @ member_space.T, neighbours)[:, 0])
            progress.update(len(rows))
        nearness = torch.cat(blocks)
        for start in range(0, len(missing), num_member_rows):
            of_block = missing[start : start + num_member_rows]
            similarities = member_space[start : start + len(of_block)] @ space.T
            member_nearness = _mean_of_best(similarities, neighbours)
            similarities.mul_(2).sub_(member_nearness).sub_(nearness)
            best = top_entries(similarities, min(neighbours, len(space)))
            values, places = (found.cpu().numpy() for found in best)
            ids[of_block, : values.shape[1]] = np.where(values >= min_similarity, primary_ids[places], -1)
            shares[of_block, : values.shape[1]] = np.where(values >= min_similarity, values, 0.0)
            progress.update(len(of_block))
    shares[missing] /= np.maximum(shares[missing].sum(-1, keepdims=True), np.finfo(np.float32).tiny)
    return arrays


def _unit_space(weight: Tensor, ids: np.ndarray, width: int, device: torch.device) -> Tensor:
    rows = weight[torch.as_tensor(ids, device=weight.device)].to(device, torch.float32)
    rows = functional.normalize(rows, dim=-1)
    rows = functional.normalize(rows - rows.mean(0), dim=-1)
    return functional.pad(rows, (0, width - rows.shape[1]))


def _mean_of_best(similarities: Tensor, count: int) -> Tensor:
    return similarities.topk(min(count, similarities.shape[1])).values.mean(-1, keepdim=True)
