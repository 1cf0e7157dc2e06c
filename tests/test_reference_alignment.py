"""Hand-computed values for the references of MinED and EVA."""

import math

import pytest
import torch

from tests import tiny
from tests.reference import EOS, Reference, ReferenceMember
from tests.reference_alignment import ReferenceEva, ReferenceMined, edit_distance, nearest

pytestmark = pytest.mark.slow


def member(tokenizer, probs=None, **options):
    """A member that always says the same; probabilities by piece."""
    vocab = tokenizer.get_vocab()
    row = torch.full((tiny.rows_of(tokenizer),), -math.inf)
    for name, prob in (probs or {"a": 1.0}).items():
        row[vocab[name]] = math.log(prob)
    return ReferenceMember(tiny.ScriptedModel(tokenizer, [row], **options), tokenizer)


def placed(tokenizer, probs, degrees):
    """A member whose output embeddings lie in a plane, in the directions given by piece, all others being zero."""
    own = member(tokenizer, probs, hidden_size=2)
    with torch.no_grad():
        own.model.lm_head.weight.zero_()
        for name, degree in degrees.items():
            angle = math.radians(degree)
            length = 1 + degree / 100
            direction = torch.tensor([math.cos(angle), math.sin(angle)])
            own.model.lm_head.weight[tokenizer.get_vocab()[name]] = length * direction
    return own


def step_of(reference, ids=(2,)):
    return reference.distribution(reference.prompt_state(ids))


def present(probs):
    return {key: prob for key, prob in probs.items() if prob}


# MinED


@pytest.mark.parametrize(
    ("a", "b", "distance"),
    [("", "", 0), ("", "abc", 3), ("abc", "abc", 0), ("kitten", "sitting", 3), ("flaw", "lawn", 2), ("ab", "ba", 2),
     ("get", "gets", 1), (b"\xe4\xb8", b"\xe4\xb9\xad", 2), ("中", "国", 1)],
)  # fmt: skip
def test_edit_distance(a, b, distance):
    assert edit_distance(a, b) == edit_distance(b, a) == distance


def test_the_nearest_entry():
    assert nearest(b"gets", [b"got", b"get", b"ges"]) == b"get"  # a tie of two
    assert nearest(b"gets", [b"got", b"ges", b"get"]) == b"ges"
    assert nearest(b"gets", [b"get", b"gets"]) == b"gets"
    assert nearest(b" x", [b"longer", b"x"]) == b"x"


def test_characters_count_unless_an_entry_is_none():
    # One character or one byte to change, three bytes apart in either case.
    assert nearest("国".encode(), [b"xy", "中".encode()]) == "中".encode()
    # By bytes: 1 to the first two bytes of the character, 3 to `x`, 2 to `\xe5`.
    assert nearest("国".encode()[:2], [b"x", b"\xe5", "国".encode(), b"\xe5\x9c\xff"]) == b"\xe5"
    assert nearest("国".encode()[:2], [b"x", "国".encode(), b"\xe5\x9c\xff"]) == "国".encode()
    # A broken target is compared by bytes with a whole character: 1, as far as `x` by characters.
    assert nearest("国".encode(), [b"\xe5\x9b", b"x"]) == b"\xe5\x9b"
    assert nearest("国".encode(), [b"x", b"\xe5\x9b"]) == b"x"


def test_mass_is_moved_to_the_nearest_entry_and_averaged():
    primary = tiny.pieces("a", "get", "got", "<0xC3>", "<0x61>", specials=["<other>"])
    other = tiny.pieces("gets", "a", "gut", "<0xC4>", "got", specials=["<marker>"])
    first = member(primary, {"a": 0.3, "<0x61>": 0.1, "get": 0.4, "<other>": 0.2})
    second = member(
        other, {"gets": 0.1, "a": 0.1, "gut": 0.1, "<0xC4>": 0.05, "got": 0.05, "</s>": 0.1, "<marker>": 0.5}
    )
    reference = ReferenceMined([first, second])
    # `gut` is as far from `get` as from `got`; `\xc4` is one byte from `a` and from `\xc3`, and `a` comes first.
    assert reference.maps[0] == {
        b"gets": {b"get": 1}, b"a": {b"a": 1}, b"gut": {b"get": 1}, b"\xc4": {b"a": 1}, b"got": {b"got": 1},
    }  # fmt: skip
    step = step_of(reference)
    assert present(step.members[1]) == pytest.approx({b"get": 0.4, b"a": 0.3, b"got": 0.1, EOS: 0.2})
    assert present(step.fused) == pytest.approx(
        {b"get": 0.4, b"a": 0.35, b"got": 0.05, EOS: 0.1, ("control", primary.get_vocab()["<other>"]): 0.1}
    )
    assert step.columns[primary.get_vocab()["get"]] == step.fused[b"get"]
    assert sum(step.columns.values()) == pytest.approx(1)
    weighted = step_of(ReferenceMined([first, second], weights=[0.9, 0.1]))
    assert weighted.fused[b"get"] == pytest.approx(0.4)
    assert weighted.fused[b"a"] == pytest.approx(0.9 * 0.4 + 0.1 * 0.3)


def test_ties_are_broken_by_canonical_ids():
    primary = tiny.pieces("x", "<0x62>", "a", "b")
    # `b` stands at id 5, not at 3, so `a` comes first.
    assert member(primary, {"a": 1.0}).canonical_id(b"b") == 5
    assert ReferenceMined([member(primary), member(tiny.pieces("c", "a"))]).maps[0][b"c"] == {b"x": 1}
    primary = tiny.pieces("xyz", "<0x62>", "a", "b")
    assert ReferenceMined([member(primary), member(tiny.pieces("c", "a"))]).maps[0][b"c"] == {b"a": 1}


def test_end_of_text_without_an_end_id_is_dropped():
    primary = tiny.pieces("a", "b")
    first = ReferenceMember(tiny.ScriptedModel(primary, [torch.tensor([0.0, 0, 0.5, 0.5]).log()]), primary, [])
    second = member(primary, {"a": 0.2, "</s>": 0.8})
    step = step_of(ReferenceMined([first, second]))
    assert EOS not in step.members[1]
    # 0.25 and 0.1 of 0.6 that are left: the average of {a: 0.5, b: 0.5} and {a: 0.2}.
    assert step.fused[b"a"] == pytest.approx(0.35 / 0.6)


def test_nobody_writes_what_the_primary_has_not():
    primary, other = tiny.pieces("a", "b"), tiny.pieces("ab", "abab")
    reference = ReferenceMined([member(primary), member(other, {"abab": 1.0})], weights=[0, 1])
    assert reference.greedy([2], 2)[0] == [2, 2]
    state = reference.advance(reference.prompt_state([2]), b"b")
    assert reference.contexts(state)[1] == [2]
    appended = ReferenceMined([member(primary), member(tiny.pieces("a", "b", "ab"))], resync="append")
    assert appended.contexts(appended.advance(appended.prompt_state([2]), b"b"))[1] == [2, 3]


# EVA

CROSS = {"a": 0, "b": 90, "c": 180, "d": 270}
TURNED = {"a": 90, "b": 180, "c": 270, "x": 0}
OCTAGON = {name: 45 * at for at, name in enumerate("abcdefgh")}
TURNED_OCTAGON = {**{name: 45 * at + 30 for at, name in enumerate("abcdefg")}, "x": 45 * 7 + 30}


@pytest.fixture(scope="module")
def cross():
    return tiny.pieces("a", "b", "c", "d")


@pytest.fixture(scope="module")
def turned():
    return tiny.pieces("x", "a", "b", "c")


def test_common_entries_stay_and_others_go_to_their_neighbours(cross, turned):
    first, second = placed(cross, {"a": 1.0}, CROSS), placed(turned, {"a": 1.0}, TURNED)
    own = {b"a": {b"a": 1}, b"b": {b"b": 1}, b"c": {b"c": 1}}
    # x lies on d. All 4 entries are its neighbourhood, with a mean cosine of 0: CSLS 2 to d, 0 and less to the rest.
    assert ReferenceEva([first, second]).maps == [{b"x": {b"d": 1}, **own}]
    # With a neighbourhood of two, 2 - 1/2 - 1/2; the neighbours have 0 - 1/2 - 1/2.
    assert ReferenceEva([first, second], neighbours=2, min_similarity=0.99).maps == [{b"x": {b"d": 1}, **own}]
    assert ReferenceEva([first, second], neighbours=2, min_similarity=1.01).maps == [{b"x": {}, **own}]
    # With a neighbourhood of one, 2 - 1 - 1.
    assert ReferenceEva([first, second], neighbours=1).maps == [{b"x": {}, **own}]


def test_rows_are_proportional_to_the_similarities():
    first = placed(tiny.pieces(*OCTAGON), {"a": 1.0}, OCTAGON)
    second = placed(tiny.pieces(*TURNED_OCTAGON), {"a": 1.0}, TURNED_OCTAGON)
    # CSLS to h, g and a: 2 and twice the square root of 2. Those at right angles have 0 and are dropped.
    near = 2 + 2 * math.sqrt(2)
    expected = {b"h": 2 / near, b"g": math.sqrt(2) / near, b"a": math.sqrt(2) / near}
    assert ReferenceEva([first, second]).maps[0][b"x"] == pytest.approx(expected, rel=1e-5)
    for row in ReferenceEva([first, second], min_similarity=-1).maps[0].values():
        assert sum(row.values()) == pytest.approx(1)
    # Less the means of the best three: 2 - 1.609 to h, less than 0 to g and a.
    mean = (1 + 2 * math.sqrt(0.5)) / 3
    assert 2 * math.sqrt(0.5) - 2 * mean < 0.1 < 2 - 2 * mean
    assert ReferenceEva([first, second], neighbours=3).maps[0][b"x"] == {b"h": 1}


def test_embeddings_are_centred_between_two_normalizations():
    # Directions of 0 and 90 degrees: their mean is half of each, what is left are two opposite directions.
    tokenizer, other = tiny.pieces("a", "b"), tiny.pieces("a", "b", "x")
    first = placed(tokenizer, {"a": 1.0}, {"a": 0, "b": 90})
    # The same, and x at 0 degrees as well: mean (2/3, 1/3).
    second = placed(other, {"a": 1.0}, {"a": 0, "b": 90, "x": 0})
    row = ReferenceEva([first, second]).maps[0][b"x"]
    # x lies on the second's a, at 45 degrees below; b opposite. After the map they lie on the first's.
    assert row == {b"a": 1}


def test_members_of_other_width_are_padded_with_zeros(cross, turned):
    first = placed(cross, {"a": 1.0}, CROSS)
    second = placed(turned, {"a": 1.0}, TURNED)
    wide = member(turned, {"a": 1.0}, hidden_size=5)
    with torch.no_grad():
        wide.model.lm_head.weight.zero_()
        wide.model.lm_head.weight[:, 3] = second.model.lm_head.weight[:, 0]
        wide.model.lm_head.weight[:, 1] = second.model.lm_head.weight[:, 1]
    assert ReferenceEva([first, wide]).maps[0][b"x"] == pytest.approx({b"d": 1})
    maps = ReferenceEva([wide, first]).maps[0]
    assert maps[b"d"] == pytest.approx({b"x": 1})
    assert maps[b"a"] == {b"a": 1}


def test_entries_without_an_embedding_are_left_out_but_common_ones_stay(cross, turned):
    first = placed(cross, {"a": 1.0}, {"a": 0, "b": 90, "d": 270})
    second = placed(turned, {"x": 0.5, "c": 0.3, "a": 0.2}, {"a": 90, "b": 180, "c": 270})
    reference = ReferenceEva([first, second])
    assert reference.maps[0].keys() == {b"a", b"b", b"c"}
    assert reference.maps[0][b"c"] == {b"c": 1}
    # x has nowhere to go.
    assert present(reference._move(1, {b"x": 0.5, b"c": 0.3, b"a": 0.2})) == pytest.approx({b"c": 0.3, b"a": 0.2})


def test_the_best_of_each_member_are_moved_and_averaged(cross, turned):
    first = placed(cross, {"a": 0.5, "b": 0.3, "c": 0.15, "d": 0.05}, CROSS)
    second = placed(turned, {"a": 0.5, "x": 0.3, "</s>": 0.2}, TURNED)
    step = step_of(ReferenceEva([first, second]))
    assert present(step.fused) == pytest.approx({b"a": 0.5, b"b": 0.15, b"c": 0.075, b"d": 0.175, EOS: 0.1})
    cut = step_of(ReferenceEva([first, second], top_k=2))
    assert present(cut.fused) == pytest.approx({b"a": 5 / 8, b"b": 0.5 * 3 / 8, b"d": 0.5 * 3 / 8})
    assert step.weights == [0.5, 0.5]


def test_a_member_whose_best_is_nobody_elses_sits_out(cross):
    def of(**probs):
        return placed(cross, probs, CROSS)

    members = [of(a=0.6, b=0.4), of(b=0.5, a=0.3, c=0.2), of(d=0.9, a=0.1)]
    step = step_of(ReferenceEva(members))
    # d has no probability with the others, a and b have.
    assert step.members[2] is None
    assert step.weights == [0.5, 0.5, 0]
    assert present(step.fused) == pytest.approx({b"a": 0.45, b"b": 0.45, b"c": 0.1})
    # Among the best one: a, b and d are all alone, and nobody sits out.
    step = step_of(ReferenceEva(members, filter_top_k=1))
    assert step.weights == pytest.approx([1 / 3] * 3)
    # Of two members one may be alone, and it may be the primary.
    step = step_of(ReferenceEva([of(c=0.6, a=0.4), of(a=0.7, b=0.3)], weights=[0.9, 0.1]))
    assert step.weights == [0, 1]
    assert present(step.fused) == pytest.approx({b"a": 0.7, b"b": 0.3})
    # A member of weight 0 has no say: without the first nobody has b beside the second.
    assert step_of(ReferenceEva(members, weights=[0, 1, 1])).weights == [0, 0.5, 0.5]


def test_the_filter_ranks_equals_by_id(cross):
    first = placed(cross, {"a": 0.25, "b": 0.25, "c": 0.25, "d": 0.25}, CROSS)
    second = placed(cross, {"c": 0.9, "a": 0.1}, CROSS)
    # a is the best of the first and among the best two of the second; c is not among a, b.
    assert step_of(ReferenceEva([first, second], filter_top_k=2)).weights == [1, 0]
    assert step_of(ReferenceEva([first, second], filter_top_k=3)).weights == [0.5, 0.5]


@pytest.mark.parametrize("make", [ReferenceMined, ReferenceEva])
def test_whole_models(make):
    tokenizers = tiny.smol_like(), tiny.gemma_like(vocab_size=600)
    models = tiny.tiny_llama(tokenizers[0]), tiny.tiny_gemma3(tokenizers[1])
    members = [ReferenceMember(m, t) for m, t in zip(models, tokenizers, strict=True)]
    prompt = tokenizers[0]("The capital of")["input_ids"]
    reference = make(members)
    ids, margins = reference.greedy(prompt, 3)
    assert len(ids) == len(margins) == 3
    found = reference.distributions_along(prompt, ids, range(3))
    assert [max(columns, key=columns.get) for columns in found.values()] == ids
    for columns in found.values():
        assert sum(columns.values()) == pytest.approx(1)
    for row in reference.maps[0].values():
        assert not row or sum(row.values()) == pytest.approx(1)
    # Twice the same model is that model but for its control tokens, and so is a gate that is closed on it.
    own = Reference(members[:1]).distributions_along(prompt, ids, [0])[0]
    same = make([members[0]] * 2).distributions_along(prompt, ids, [0])[0]
    reference.threshold = 0.0
    closed = reference.distributions_along(prompt, ids, [0])[0]
    for columns in (same, closed):
        kept = {i: prob for i, prob in own.items() if i in columns}
        total = sum(kept.values())
        assert columns == pytest.approx({i: prob / total for i, prob in kept.items()}, abs=1e-4)
