import math
import random

import pytest
import torch

from hf_ensemble.mixing import Duplicates, fold, merge_duplicates, put_eos, top_entries, top_entries_of_each

INF = math.inf


def logsumexp(values):
    highest = max(values)
    return highest if highest == -INF else highest + math.log(sum(math.exp(value - highest) for value in values))


def duplicates_of(groups):
    """`groups`: for each canonical id the other ids of its entry."""
    pairs = [(i, place) for place, others in enumerate(groups.values()) for i in others]
    return Duplicates(
        ids=torch.tensor([i for i, _ in pairs], dtype=torch.long),
        canonical_ids=torch.tensor(list(groups), dtype=torch.long),
        position=torch.tensor([place for _, place in pairs], dtype=torch.long),
    )


def merged_by_hand(rows, groups):
    rows = [list(row) for row in rows]
    for row in rows:
        for canonical, others in groups.items():
            row[canonical] = logsumexp([row[canonical], *(row[i] for i in others)])
            for i in others:
                row[i] = -INF
    return torch.tensor(rows)


def top_by_hand(row, k):
    return sorted(range(len(row)), key=lambda i: (-row[i], i))[:k]


def folded_by_hand(rows, first_ids, width):
    folded = []
    for row in rows:
        columns = [[value] for value in row[:width]]
        for value, column in zip(row[width:], first_ids, strict=True):
            columns[column].append(value)
        folded.append([logsumexp(values) for values in columns])
    return torch.tensor(folded)


def random_rows(num_rows, width, seed=0, scale=3.0):
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed)) * scale


# merge_duplicates


@pytest.mark.parametrize("groups", [{2: [0]}, {1: [4, 5], 3: [0]}, {6: [0, 1, 2, 3, 4, 5]}])
def test_ids_of_one_entry_are_merged_on_its_canonical_id(groups):
    logits = random_rows(4, 8)
    before = logits.clone()
    merged = merge_duplicates(logits, duplicates_of(groups))
    torch.testing.assert_close(merged, merged_by_hand(logits.tolist(), groups))
    assert torch.equal(logits, before)


def test_merging_keeps_the_sum_of_probabilities():
    logits = random_rows(3, 10)
    merged = merge_duplicates(logits, duplicates_of({3: [1, 2], 9: [0]}))
    torch.testing.assert_close(merged.logsumexp(-1), logits.logsumexp(-1))


def test_untouched_ids_keep_their_logits_exactly():
    logits = random_rows(3, 10)
    merged = merge_duplicates(logits, duplicates_of({3: [1, 2]}))
    kept = [0, 4, 5, 6, 7, 8, 9]
    assert torch.equal(merged[:, kept], logits[:, kept])


def test_without_duplicates_the_logits_themselves_come_back():
    logits = random_rows(2, 4)
    assert merge_duplicates(logits, duplicates_of({})) is logits


def test_ids_that_are_ruled_out_merge_to_what_is_left():
    logits = torch.tensor([[-INF, 1.0, -INF, -INF, 0.0], [2.0, -INF, -INF, -INF, -INF], [-INF] * 5])
    groups = {1: [0], 2: [3]}
    merged = merge_duplicates(logits, duplicates_of(groups))
    torch.testing.assert_close(merged, merged_by_hand(logits.tolist(), groups))
    assert not merged.isnan().any()


def test_an_entry_far_below_another_keeps_its_logit():
    groups = {0: [1], 2: [3]}
    logits = torch.tensor([[150.0, 149.0, -150.0, -151.0]])
    torch.testing.assert_close(
        merge_duplicates(logits, duplicates_of(groups)), merged_by_hand(logits.tolist(), groups)
    )


def test_rows_are_merged_alone():
    logits = torch.cat([random_rows(1, 6), random_rows(1, 6, seed=1) - 200])
    duplicates = duplicates_of({2: [0, 5]})
    both = merge_duplicates(logits, duplicates)
    assert torch.equal(both, torch.cat([merge_duplicates(row, duplicates) for row in logits.split(1)]))


# top_entries


@pytest.mark.parametrize("k", [1, 3, 7])
def test_the_best_entries_are_found(k):
    logits = random_rows(5, 7)
    values, ids = top_entries(logits, k)
    assert values.shape == ids.shape == (5, k)
    assert torch.equal(values, logits.gather(-1, ids))
    assert ids.tolist() == [top_by_hand(row, k) for row in logits.tolist()]


def test_of_those_tied_for_the_last_place_the_lowest_ids_are_taken():
    logits = torch.tensor([[1.0, 5.0, 3.0, 3.0, 0.0, 3.0, 3.0], [2.0] * 7, [0.0, 9.0, 8.0, 7.0, 6.0, 5.0, 4.0]])
    values, ids = top_entries(logits, 3)
    assert [sorted(row) for row in ids.tolist()] == [[1, 2, 3], [0, 1, 2], [1, 2, 3]]
    assert torch.equal(values, logits.gather(-1, ids))


@pytest.mark.parametrize("seed", range(20))
def test_ties_in_many_rows_go_to_the_lowest_ids(seed):
    rng = random.Random(seed)
    rows = [[float(rng.choice((0, 1, 2, -INF))) for _ in range(50)] for _ in range(6)]
    k = rng.randint(1, 50)
    values, ids = top_entries(torch.tensor(rows), k)
    assert torch.equal(values, torch.tensor(rows).gather(-1, ids))
    assert [sorted(row) for row in ids.tolist()] == [sorted(top_by_hand(row, k)) for row in rows]


def test_values_come_best_first():
    values, _ = top_entries(torch.tensor([[0.0, 2.0, 2.0, 1.0, 2.0, 0.0]]), 4)
    assert values.tolist() == [[2.0, 2.0, 2.0, 1.0]]


def test_all_entries_may_be_asked_for():
    logits = torch.tensor([[1.0, 1.0, -INF, 2.0]])
    values, ids = top_entries(logits, 4)
    assert sorted(ids[0].tolist()) == [0, 1, 2, 3]
    assert torch.equal(values, logits.gather(-1, ids))


def test_rows_with_fewer_real_entries_than_asked_for_are_filled_with_the_lowest_ids():
    _, ids = top_entries(torch.tensor([[-INF, -INF, -INF, 0.0, -INF]]), 3)
    assert sorted(ids[0].tolist()) == [0, 1, 3]


@pytest.mark.parametrize("k", [1, 2, 10, 300, 1000])
def test_members_of_any_widths_are_searched_at_once(k):
    rows = [random_rows(2, width, seed=width).round() for width in (3, 127, 128, 129, 256, 1000)]
    values, ids = top_entries_of_each(rows, k)
    for row, of_member, found in zip(rows, values, ids, strict=True):
        width = min(k, row.shape[-1])
        assert found[:, :width].tolist() == [top_by_hand(one, width) for one in row.tolist()]
        assert torch.equal(of_member[:, :width], row.gather(-1, found[:, :width]))
        assert (of_member[:, width:] == -INF).all()


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("width", [127, 128, 129, 256])
@pytest.mark.parametrize("k", [1, 10, 200])
def test_ids_of_nan_are_ids_of_the_member(k, width, sign):
    """The sign of NaN depends on the processor and on how it came about."""
    nan = torch.tensor(math.copysign(math.nan, sign))
    values, ids = top_entries_of_each([nan.expand(1, width), random_rows(1, 3000)], k)
    assert ids[0].max() < width
    assert values[0, 0, 0].isnan()


# fold


@pytest.mark.parametrize("first_ids", [[0, 0, 0], [2, 1, 2], [3, 0, 1]])
def test_columns_are_folded_onto_the_id_that_they_are_written_with(first_ids):
    rows = random_rows(4, 7).log_softmax(-1)
    before = rows.clone()
    folded = fold(rows, torch.tensor(first_ids), 4)
    torch.testing.assert_close(folded, folded_by_hand(rows.tolist(), first_ids, 4))
    torch.testing.assert_close(folded.exp().sum(-1), torch.ones(4))
    assert torch.equal(rows, before)


def test_a_row_without_further_columns_comes_back_as_it_is():
    rows = random_rows(2, 4)
    assert fold(rows, torch.tensor([], dtype=torch.long), 4) is rows


def test_ruled_out_columns_stay_so_unless_something_is_moved_onto_them():
    rows = torch.tensor([[-INF, 0.0, -INF, -INF, -1.0], [-INF] * 5])
    folded = fold(rows, torch.tensor([0, 2]), 3)
    torch.testing.assert_close(folded, torch.tensor([[-INF, 0.0, -1.0], [-INF] * 3]))
    assert not folded.isnan().any()


def test_columns_far_below_the_best_keep_their_values():
    rows = torch.tensor([[0.0, -90.0, -150.0, -300.0, -301.0]])
    torch.testing.assert_close(fold(rows, torch.tensor([3]), 4), folded_by_hand(rows.tolist(), [3], 4))


def test_scores_above_zero_are_folded_too():
    rows = random_rows(3, 6, scale=30.0) + 40.0
    torch.testing.assert_close(fold(rows, torch.tensor([1, 1]), 4), folded_by_hand(rows.tolist(), [1, 1], 4))


# put_eos


def test_the_mass_of_eos_is_written_at_the_end_id_with_the_highest_logit():
    probs = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]])
    logits = torch.tensor([[0.0, 5.0, 9.0, 2.0], [0.0, 1.0, 9.0, 2.0]])
    written = put_eos(probs, torch.tensor([0.25, 0.5]), logits, torch.tensor([1, 3]))
    assert written is probs
    torch.testing.assert_close(probs, torch.tensor([[0.1, 0.25, 0.3, 0.0], [0.4, 0.0, 0.2, 0.5]]))


def test_the_columns_may_be_wider_than_the_primary():
    probs = torch.full((1, 5), 0.2)
    put_eos(probs, torch.tensor([0.7]), torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([0]))
    torch.testing.assert_close(probs, torch.tensor([[0.7, 0.2, 0.2, 0.2, 0.2]]))


@pytest.mark.parametrize("seed", range(5))
def test_eos_is_written_as_by_a_plain_loop(seed):
    rng = random.Random(seed)
    probs, logits = random_rows(6, 12, seed).softmax(-1), random_rows(6, 9, seed + 100)
    eos_ids, mass = rng.sample(range(9), 3), torch.rand(6, generator=torch.Generator().manual_seed(seed))
    expected = probs.tolist()
    for row, row_logits, row_mass in zip(expected, logits.tolist(), mass.tolist(), strict=True):
        for i in eos_ids:
            row[i] = 0.0
        row[max(eos_ids, key=lambda i: row_logits[i])] = row_mass
    torch.testing.assert_close(put_eos(probs, mass, logits, torch.tensor(eos_ids)), torch.tensor(expected))


def test_tied_end_ids_go_to_the_first():
    probs = put_eos(torch.zeros(1, 4), torch.tensor([1.0]), torch.zeros(1, 4), torch.tensor([1, 3]))
    assert probs.tolist() == [[0.0, 1.0, 0.0, 0.0]]
