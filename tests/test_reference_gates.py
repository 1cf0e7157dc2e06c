"""Hand-computed values for gates, log space and weights by step."""

import math

import pytest
import torch

from tests import tiny
from tests.reference import EOS, Reference, ReferenceMember
from tests.reference_weights import PackllmWeights, nats_per_byte, weights_from_scores

pytestmark = pytest.mark.slow

A, B, C = 2, 3, 4


def member(tokenizer, *rows, **options):
    return ReferenceMember(tiny.ScriptedModel(tokenizer, list(rows), **options), tokenizer)


def logprobs(tokenizer, **probs):
    """A row that is `-inf` where nothing is listed; `eos` is the end."""
    row = torch.full((tiny.rows_of(tokenizer),), -math.inf)
    for name, prob in probs.items():
        row[tokenizer.eos_token_id if name == "eos" else tokenizer.get_vocab()[name]] = math.log(prob)
    return row


def step_of(reference, prompt=(A,)):
    return reference.distribution(reference.prompt_state(prompt))


@pytest.fixture(scope="module")
def letters():
    return tiny.pieces("a", "b", "c")


@pytest.fixture(scope="module")
def words():
    """`bc` is one entry, `c` none."""
    return tiny.pieces("a", "b", "bc")


# Gates


def test_a_closed_gate_is_its_member_alone_and_runs_nobody_else(letters):
    primary = member(letters, logprobs(letters, a=0.8, b=0.2))
    other = member(letters, logprobs(letters, b=1.0))
    step = step_of(Reference([primary, other], threshold=0.7))
    assert step.is_closed
    assert step.contexts == [[A], None]
    assert step.weights == [1, 0]
    assert step.fused[b"a"] == pytest.approx(0.8)
    assert not other.model.calls


def test_an_open_gate_changes_nothing(letters):
    primary = member(letters, logprobs(letters, a=0.5, b=0.25, c=0.25))
    other = member(letters, logprobs(letters, b=1.0))
    step = step_of(Reference([primary, other], threshold=0.51))
    assert not step.is_closed
    assert step.fused == step_of(Reference([primary, other])).fused
    assert step.fused[b"b"] == pytest.approx(0.5 * 0.25 + 0.5)


def test_the_gate_reads_entries_not_ids():
    tokenizer = tiny.pieces("a", "<0x61>", "b")
    assert tokenizer.get_vocab()["<0x61>"] == 3
    primary = member(tokenizer, torch.tensor([0, 0, 0.4, 0.4, 0.2]).log())
    assert step_of(Reference([primary, primary], threshold=0.7)).is_closed
    ends = tiny.pieces("a", specials=["<end>"])
    primary = ReferenceMember(tiny.ScriptedModel(ends, [torch.tensor([0.4, 0, 0.2, 0.4]).log()]), ends, [0, 3])
    assert step_of(Reference([primary, primary], threshold=0.7)).is_closed


def test_the_gate_of_an_assistant_reads_what_is_left_of_its_distribution(letters):
    other = tiny.pieces("a", "b", specials=["<other>"])
    gate = member(other, torch.tensor([0, 0, 0.45, 0.05, 0.5]).log())
    primary = member(letters, logprobs(letters, c=1.0))
    step = step_of(Reference([primary, gate], threshold=0.8, gate=1))
    assert step.is_closed
    assert step.fused[b"a"] == pytest.approx(0.9)
    assert step.contexts[0] is None


def test_a_gate_of_weight_0_hands_over_where_it_is_open(letters):
    rows = [logprobs(letters, a=0.9, b=0.1), logprobs(letters, a=0.5, b=0.5)]
    small, large = member(letters, *rows), member(letters, logprobs(letters, c=0.9, eos=0.1))
    reference = Reference([small, large], weights=[0, 1], threshold=0.7)
    state = reference.prompt_state([A])
    assert reference.distribution(state).fused[b"a"] == pytest.approx(0.9)
    step = reference.distribution(reference.advance(state, b"a"))
    assert step.fused == pytest.approx({b"c": 0.9, EOS: 0.1, b"a": 0, b"b": 0})
    assert step.contexts[0] is None
    assert reference.greedy([A], 3)[0] == [A, C, C]


def test_a_gate_whose_member_sits_out_is_open(letters):
    byte_tokens = tiny.pieces("a", "<0xC3>", "<0xA9>")
    primary = member(byte_tokens, torch.tensor([0, 0, 0, 0, 1.0]).log())
    gate = member(letters, logprobs(letters, a=1.0))
    reference = Reference([primary, gate], threshold=0.5, gate=1)
    state = reference.prompt_state([A])
    assert reference.distribution(state).is_closed
    begun = reference.advance(state, b"\xc3")
    assert reference.contexts(begun)[1] is None
    step = reference.distribution(begun)
    assert not step.is_closed
    assert step.fused[b"\xa9"] == 1


def test_unite_behind_a_closed_gate_is_cut_to_its_best(letters):
    primary = member(letters, logprobs(letters, a=0.6, b=0.3, c=0.1))
    step = step_of(Reference([primary, primary], "unite", top_k=2, threshold=0.5))
    assert step.fused == pytest.approx({b"a": 2 / 3, b"b": 1 / 3})


# Log space


def test_log_space_is_a_product(letters):
    first = member(letters, logprobs(letters, a=0.8, b=0.2))
    second = member(letters, logprobs(letters, a=0.2, b=0.8))
    step = step_of(Reference([first, second], space="log"))
    assert step.fused[b"a"] == pytest.approx(0.5)
    assert step.weights == [0.5, 0.5]
    step = step_of(Reference([first, second], space="log", weights=[1, 0.5]))
    a, b = 0.8 * 0.2**0.5, 0.2 * 0.8**0.5
    assert step.fused[b"a"] == pytest.approx(a / (a + b))
    assert step.weights == [1, 0.5]


def test_a_missing_entry_takes_the_log_probability_of_its_first_id(letters, words):
    primary = member(letters, logprobs(letters, a=0.5, b=0.3, c=0.2))
    other = member(words, logprobs(words, a=0.1, b=0.4, bc=0.5))
    step = step_of(Reference([primary, other], space="log", weights=[1, 1]))
    # `other` writes "c" not at all, `primary` writes "bc" as "b", "c"
    values = {b"a": 0.5 * 0.1, b"b": 0.3 * 0.4, b"bc": 0.3 * 0.5, b"c": 0, EOS: 0}
    assert step.fused == pytest.approx({key: value / sum(values.values()) for key, value in values.items()})
    assert step.columns[B] == pytest.approx(0.27 / 0.32)
    reference = Reference([primary, other], space="log", weights=[1, 1])
    assert reference.choose(step)[0] == [B, C]


def test_the_first_id_counts_alone(words):
    primary = tiny.pieces("a", "<0x62>", "b", "c")
    first = member(primary, torch.tensor([0, 0, 0.4, 0.3, 0.2, 0.1]).log())
    second = member(words, logprobs(words, a=0.5, bc=0.5))
    assert first.encode(b"b") == [4]
    step = step_of(Reference([first, second], space="log", weights=[1, 1]))
    assert step.fused[b"bc"] == pytest.approx(0.2 * 0.5 / (0.4 * 0.5 + 0.2 * 0.5))


def test_negative_weights_divide_and_their_infinities_count_nothing(letters):
    expert = member(letters, logprobs(letters, a=0.5, b=0.4, c=0.1))
    amateur = member(letters, logprobs(letters, a=0.8, b=0.2))
    step = step_of(Reference([expert, amateur], space="log", weights=[1, -1]))
    values = {b"a": 0.5 / 0.8, b"b": 0.4 / 0.2, b"c": 0.1, EOS: 0}
    assert step.fused == pytest.approx({key: value / sum(values.values()) for key, value in values.items()})


def test_alpha_drops_what_the_primary_finds_implausible(letters):
    expert = member(letters, logprobs(letters, a=0.5, b=0.4, c=0.1))
    amateur = member(letters, logprobs(letters, a=0.4, b=0.59, c=0.01))
    fused = {}
    for alpha in (0.19, 0.21, 0.9):
        step = step_of(Reference([expert, amateur], space="log", weights=[1, -1], alpha=alpha))
        fused[alpha] = step.fused
    assert fused[0.19].keys() == {b"a", b"b", b"c"}
    assert max(fused[0.19], key=fused[0.19].get) == b"c"
    assert fused[0.21].keys() == {b"a", b"b"}
    assert fused[0.9] == {b"a": 1}


def test_alpha_reads_a_primary_of_weight_0(letters):
    primary = member(letters, logprobs(letters, a=0.9, b=0.1))
    other = member(letters, logprobs(letters, a=0.1, b=0.9))
    assert step_of(Reference([primary, other], space="log", weights=[0, 1], alpha=0.5)).fused == {b"a": 1}


def test_log_space_drops_the_control_tokens_of_the_primary():
    tokenizer = tiny.pieces("a", "b", specials=["<other>"])
    own = member(tokenizer, torch.tensor([0.1, 0, 0.2, 0.2, 0.5]).log())
    step = step_of(Reference([own, own], space="log"))
    assert step.fused == pytest.approx({EOS: 0.2, b"a": 0.4, b"b": 0.4})


def test_log_space_drops_what_the_primary_cannot_write(letters):
    other = tiny.pieces("a", "b", "z")
    primary = member(letters, logprobs(letters, a=0.5, b=0.5))
    amateur = member(other, logprobs(other, z=0.8, a=0.1, b=0.1))
    step = step_of(Reference([primary, amateur], space="log", weights=[1, -1]))
    assert step.fused == pytest.approx({b"a": 0.5, b"b": 0.5, b"c": 0, EOS: 0})
    with pytest.raises(ValueError, match="No entry that the primary can write"):
        step_of(Reference([primary, member(other, logprobs(other, z=1.0))], space="log"))


def test_weights_keep_their_sum_in_log_space_when_a_member_sits_out(letters):
    byte_tokens = tiny.pieces("a", "<0xC3>", "<0xA9>")
    primary = member(byte_tokens, torch.tensor([0, 0, 0.2, 0.0, 0.8]).log())
    waiting = member(letters, logprobs(letters, a=1.0))
    for weights, expected in ([0.5, 0.5], 0.8), ([1, -1], 0.8), ([2, -1], 0.64 / 0.68):
        reference = Reference([primary, waiting], space="log", weights=weights)
        step = reference.distribution(reference.advance(reference.prompt_state([A]), b"\xc3"))
        assert step.fused[b"\xa9"] == pytest.approx(expected)


# Weights


def test_weights_from_scores():
    assert weights_from_scores([0.75, 0.5], chance=0.25) == pytest.approx([2 / 3, 1 / 3])
    assert weights_from_scores([0.75, 0.25, 0.1], chance=0.25) == [1, 0, 0]
    with pytest.raises(ValueError, match="above"):
        weights_from_scores([0.2, 0.25], chance=0.25)


def test_weights_may_change_by_step(letters):
    first = member(letters, logprobs(letters, a=1.0))
    second = member(letters, logprobs(letters, b=1.0))
    reference = Reference([first, second], weights=lambda _, state: [1, len(state.primary_ids) - 1])
    state = reference.prompt_state([A])
    assert reference.distribution(state).fused[b"a"] == 1
    assert reference.distribution(reference.advance(state, b"a")).fused[b"a"] == 0.5


def test_packllm_weighs_by_the_prompt_alone(letters, words):
    # "abc": the first member scores b and c (2 bytes), the second bc as one (2 bytes), each after a
    first = member(letters, logprobs(letters, b=0.5, c=0.5), logprobs(letters, c=0.25, a=0.75))
    second = member(words, logprobs(words, bc=0.5, a=0.5))
    assert nats_per_byte(first, [A, B, C]) == pytest.approx(-math.log(0.5 * 0.25) / 2)
    assert nats_per_byte(second, [A, 4]) == pytest.approx(-math.log(0.5) / 2)
    reference = Reference([first, second], weights=PackllmWeights())
    # 3 bytes in 3 tokens: b = 1
    first_share, second_share = (0.5 * 0.25) ** 0.5, 0.5**0.5
    expected = [first_share / (first_share + second_share), second_share / (first_share + second_share)]
    state = reference.prompt_state([A, B, C])
    assert reference.distribution(state).weights == pytest.approx(expected)
    assert reference.distribution(reference.advance(state, b"a")).weights == pytest.approx(expected)
    cold = Reference([first, second], weights=PackllmWeights(temperature=0.5))
    assert cold.distribution(state).weights == pytest.approx([0.2, 0.8])


def test_packllm_counts_in_the_tokens_of_the_primary(letters, words):
    first = member(words, logprobs(words, bc=0.5, a=0.5))
    second = member(letters, logprobs(letters, b=0.5, c=0.5), logprobs(letters, c=0.25, a=0.75))
    # 3 bytes in 2 tokens: b = 1.5
    step = step_of(Reference([first, second], weights=PackllmWeights()), prompt=[A, 4])
    first_share, second_share = 0.5**0.75, (0.5 * 0.25) ** 0.75
    assert step.weights == pytest.approx([first_share / (first_share + second_share), step.weights[1]])


def test_packllm_needs_two_tokens(letters):
    own = member(letters)
    with pytest.raises(ValueError, match="scores no byte"):
        step_of(Reference([own, own], weights=PackllmWeights()))
