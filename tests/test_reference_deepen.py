"""Hand-computed values for the reference of DeePEn."""

import math

import pytest
import torch

from tests import tiny
from tests.reference import EOS, Reference, ReferenceMember
from tests.reference_deepen import ReferenceDeepen

pytestmark = pytest.mark.slow

A, B, C = 2, 3, 4
RATES = [0.15 / 4 + 0.15 * 3 / 4 * (1 + math.cos(math.pi * t / 10)) / 2 for t in range(5)]
"""0.15 at first, on the way to 0.0375 after ten steps."""
DECAY = math.prod(1 - 0.01 * rate for rate in RATES)
CROSS = {"a": (1, 0), "b": (0, 1), "c": (-1, 0), "</s>": (0, -1)}


def member(tokenizer, probs, embeddings=CROSS, **options):
    """A member that always says the same; `</s>` and tokens without an embedding have `(1, 1)`."""
    vocab = tokenizer.get_vocab()
    row = torch.full((tiny.rows_of(tokenizer),), -math.inf)
    for name, prob in probs.items():
        row[vocab[name]] = math.log(prob) if prob else -math.inf
    model = tiny.ScriptedModel(tokenizer, [row], hidden_size=2)
    with torch.no_grad():
        model.embed_tokens.weight.fill_(1.0)
        for name, embedding in embeddings.items():
            if name in vocab:
                model.embed_tokens.weight[vocab[name]] = torch.tensor(embedding, dtype=torch.float32)
    return ReferenceMember(model, tokenizer, **options)


def step_of(reference, prompt=(A,)):
    return reference.distribution(reference.prompt_state(prompt))


def softmax(values):
    total = sum(math.exp(value) for value in values)
    return [math.exp(value) / total for value in values]


@pytest.fixture(scope="module")
def letters():
    return tiny.pieces("a", "b", "c")


@pytest.fixture(scope="module")
def two_letters():
    return tiny.pieces("a", "b")


def test_anchors_are_common_text_entries(letters):
    other = tiny.pieces("b", "x", "a", "c")
    first, second = member(letters, {"a": 1.0}), member(other, {"a": 1.0})
    assert ReferenceDeepen([first, second]).anchors == [b"a", b"b", b"c"]
    assert ReferenceDeepen([second, first]).anchors == [b"b", b"a", b"c"]
    order = torch.randperm(3, generator=torch.Generator().manual_seed(7)).tolist()
    drawn = ReferenceDeepen([first, second], num_anchors=2, anchor_seed=7).anchors
    assert drawn == [[b"a", b"b", b"c"][at] for at in order[:2]]
    dead = member(other, {"a": 1.0}, {**CROSS, "b": (0, 0)})
    assert ReferenceDeepen([first, dead]).anchors == [b"a", b"c"]
    with pytest.raises(ValueError, match="common"):
        ReferenceDeepen([first, member(tiny.pieces("x"), {"x": 1.0})])


def test_rows_are_similarities_to_the_anchors(two_letters):
    # At 45 degrees from a, and as long as you like.
    own = member(two_letters, {"a": 1.0}, {"a": (1, 0), "b": (3, 3)})
    cos = math.sqrt(0.5)
    paper = ReferenceDeepen([own, own], variant="paper").relative(0, [A, B])
    assert paper.tolist() == [pytest.approx(softmax([1, cos])), pytest.approx(softmax([cos, 1]))]
    released = ReferenceDeepen([own, own]).relative(0, [A])
    norm = math.sqrt(1.5)
    assert released.tolist() == [pytest.approx(softmax([100 / norm, 100 * cos / norm]))]


def test_identical_members_give_what_they_are_but_for_weight_decay(letters):
    probs = {"a": 0.5, "b": 0.3, "c": 0.15, "</s>": 0.05}
    own = member(letters, probs)
    decayed = {name: prob ** (1 - 0.15 * 0.01) for name, prob in probs.items()}
    total = sum(decayed.values())
    expected = {
        EOS if name == "</s>" else name.encode(): pytest.approx(value / total, rel=1e-6)
        for name, value in decayed.items()
    }
    step = step_of(ReferenceDeepen([own, own], num_steps=1))
    assert {key: prob for key, prob in step.fused.items() if prob} == expected
    assert step.fused[b"a"] < 0.5 - 1e-4
    # With few anchors the second step makes much of the difference that the decay made.
    step = step_of(ReferenceDeepen([own, own]))
    assert step.fused[b"a"] == pytest.approx(0.4585, abs=1e-3)


def one_step_by_hand(probs, relative, target):
    """One AdamW step on the logits, from their first and second moments."""
    found = [sum(p * row[a] for p, row in zip(probs, relative, strict=True)) for a in range(len(target))]
    by_prob = [-sum(t * r / f for t, r, f in zip(target, row, found, strict=True)) / len(target) for row in relative]
    mean = sum(p * g for p, g in zip(probs, by_prob, strict=True))
    moved = []
    for prob, grad in zip(probs, by_prob, strict=True):
        grad = prob * (grad - mean)
        first, second = 0.1 * grad / (1 - 0.9), 0.001 * grad**2 / (1 - 0.999)
        moved.append(math.log(prob) * (1 - 0.15 * 0.01) - 0.15 * first / (math.sqrt(second) + 1e-8))
    return softmax(moved)


def test_one_step_of_the_released_search(two_letters):
    embeddings = {"a": (1, 0), "b": (1, 0.1)}
    first = member(two_letters, {"a": 0.7, "b": 0.3}, embeddings)
    second = member(two_letters, {"a": 0.2, "b": 0.8}, embeddings)
    reference = ReferenceDeepen([first, second], num_steps=1)
    cos = 1 / math.sqrt(1.01)
    norm = math.sqrt(1 + cos**2)
    near, far = softmax([100 / norm, 100 * cos / norm])
    relative = [[near, far], [far, near]]
    target = [0.45 * near + 0.55 * far, 0.45 * far + 0.55 * near]
    expected = one_step_by_hand([0.7, 0.3], relative, target)
    step = step_of(reference)
    assert step.fused[b"a"] == pytest.approx(expected[0], rel=1e-6)
    # A first step of Adam is the rate in the direction of the gradient.
    odds = math.log(step.fused[b"a"] / step.fused[b"b"])
    assert odds == pytest.approx(math.log(7 / 3) * 0.9985 - 0.30, abs=1e-4)


def test_the_rates_are_annealed(two_letters):
    first = member(two_letters, {"a": 0.7, "b": 0.3}, CROSS)
    second = member(two_letters, {"a": 0.001, "b": 0.999}, CROSS)
    step = step_of(ReferenceDeepen([first, second], weights=[0.01, 0.99]))
    odds, both = math.log(7 / 3), 0.0
    # Nearly the same gradient each time, so each step is nearly its rate.
    for rate in RATES:
        odds, both = odds * (1 - 0.01 * rate), both + 2 * rate
    assert math.log(step.fused[b"a"] / step.fused[b"b"]) == pytest.approx(odds - both, abs=0.05)


def test_tokens_without_mass_are_damped(letters):
    first = member(letters, {"a": 0.7, "b": 0.3 - 1e-12, "c": 1e-12})
    second = member(letters, {"a": 0.2, "b": 0.8})
    step = step_of(ReferenceDeepen([first, second], num_steps=1))
    # Only a has moved, by the rate: the gradient of c is far below eps.
    odds = math.log(step.fused[b"c"] / step.fused[b"a"])
    assert odds == pytest.approx(math.log(1e-12 / 0.7) * 0.9985 + 0.15, abs=1e-3)


def test_weights_are_those_of_the_relative_representations(two_letters):
    first = member(two_letters, {"a": 0.7, "b": 0.3}, CROSS)
    second = member(two_letters, {"a": 0.1, "b": 0.9}, CROSS)
    alone = step_of(ReferenceDeepen([first, second], weights=[1, 0], num_steps=1))
    assert alone.contexts[1] is None
    assert alone.fused[b"a"] == pytest.approx(0.7**0.9985 / (0.7**0.9985 + 0.3**0.9985), rel=1e-6)
    other = step_of(ReferenceDeepen([first, second], weights=[0, 1]))
    assert other.contexts[0] is not None
    assert other.fused[b"a"] < 0.5


def test_nothing_is_fused_where_the_primary_ends(letters):
    ends = {"a": 0.3, "b": 0.2, "</s>": 0.5}
    first = member(letters, ends)
    second = member(letters, {"a": 0.1, "b": 0.9})
    for variant in ("released", "paper"):
        step = step_of(ReferenceDeepen([first, second], variant=variant))
        assert step.fused == pytest.approx({b"a": 0.3, b"b": 0.2, b"c": 0, EOS: 0.5, ("control", 1): 0})
        assert step_of(ReferenceDeepen([second, first], variant=variant)).fused[b"b"] < 0.85


def test_several_end_ids_count_together():
    tokenizer = tiny.pieces("a", "b", specials=["<end>"])
    first = member(tokenizer, {"a": 0.4, "</s>": 0.3, "<end>": 0.3}, eos_ids=[0, 4])
    second = member(tokenizer, {"b": 1.0})
    step = step_of(ReferenceDeepen([first, second]))
    assert step.fused[EOS] == pytest.approx(0.6)


def test_agreement_can_be_left_alone(two_letters):
    first, second = (member(two_letters, {"a": p, "b": 1 - p}, CROSS) for p in (0.7, 0.9))
    assert step_of(ReferenceDeepen([first, second], skip_on_agreement=True)).fused[b"a"] == pytest.approx(0.7)
    assert step_of(ReferenceDeepen([first, second])).fused[b"a"] > 0.71
    other = member(two_letters, {"a": 0.4, "b": 0.6}, CROSS)
    fused = step_of(ReferenceDeepen([first, other])).fused
    assert step_of(ReferenceDeepen([first, other], skip_on_agreement=True)).fused == fused
    assert fused[b"a"] < 0.69


def test_one_step_of_the_paper_by_hand(two_letters):
    first = member(two_letters, {"a": 0.9, "b": 0.1}, CROSS)
    second = member(two_letters, {"a": 0.1, "b": 0.9}, CROSS)
    near, far = softmax([1, 0])
    found = [0.9 * near + 0.1 * far, 0.9 * far + 0.1 * near]
    grads = [-(0.5 * near / found[0] + 0.5 * far / found[1]), -(0.5 * far / found[0] + 0.5 * near / found[1])]
    assert 0.9 * grads[0] + 0.1 * grads[1] == pytest.approx(-0.5 - 0.5)
    moved = [0.9 - 0.15 * grads[0], 0.1 - 0.15 * grads[1]]
    step = step_of(ReferenceDeepen([first, second], variant="paper", num_steps=1))
    assert step.fused[b"a"] / step.fused[b"b"] == pytest.approx(moved[0] / moved[1])
    assert step.fused[EOS] > 0.05  # the gradient lifts what had nothing as well


def test_the_result_of_the_paper_is_nearly_flat():
    names = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    tokenizer = tiny.pieces(*names)
    angles = {name: (math.cos(at / 9), math.sin(at / 9)) for at, name in enumerate(names)}
    first = member(tokenizer, {"a": 0.9, "b": 0.1}, angles)
    second = member(tokenizer, {"a": 0.6, "b": 0.4}, angles)
    step = step_of(ReferenceDeepen([first, second], variant="paper"))
    texts = [prob for key, prob in step.fused.items() if isinstance(key, bytes)]
    assert max(texts) < 0.2
    assert min(texts) > 0.02
    assert max(step.fused, key=step.fused.get) == b"a"


def test_the_support_is_the_best_ids(letters):
    first = member(letters, {"a": 0.5, "b": 0.3, "c": 0.2})
    second = member(letters, {"a": 0.1, "b": 0.3, "c": 0.6})
    reference = ReferenceDeepen([first, second], support=2)
    assert reference._supported(0, [-math.inf, -math.inf, 0.0, 0.0, 0.0]) == [A, B]
    step = step_of(reference)
    # c is outside the primary's support: its logit decays and nothing else.
    # Within it the search is that between 5/8, 3/8 and the second's 1/3 b, 2/3 c.
    relative = reference.relative(0, [A, B])
    target = 0.5 * torch.tensor([5 / 8, 3 / 8], dtype=torch.float64) @ relative
    target += 0.5 * torch.tensor([1 / 3, 2 / 3], dtype=torch.float64) @ reference.relative(1, [B, C])
    logits = torch.tensor([0.5, 0.3], dtype=torch.float64).log()
    pair = reference._search_logits(logits, torch.tensor([0, 1]), relative, target)
    assert step.fused[b"a"] / step.fused[b"b"] == pytest.approx((pair[0] / pair[1]).item(), rel=1e-5)
    assert step.fused[b"b"] > step.fused[b"a"] * 0.6
    full = step_of(ReferenceDeepen([first, second], support=5)).fused
    assert full == pytest.approx(step_of(ReferenceDeepen([first, second])).fused)


def test_ids_outside_the_support_keep_their_decayed_logits(letters):
    own = member(letters, {"a": 0.5, "b": 0.3, "c": 0.2})
    other = member(letters, {"a": 0.1, "b": 0.3, "c": 0.6})
    reference = ReferenceDeepen([own, other], support=2)
    logits = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    target = torch.tensor([0.1, 0.8, 0.1], dtype=torch.float64)
    supported, relative = torch.tensor([0, 1]), reference.relative(0, [A, B])
    pair = reference._search_logits(logits[:2], supported, relative, target)
    all_three = reference._search_logits(logits, supported, relative, target)
    assert (all_three[0] / all_three[1]).item() == pytest.approx((pair[0] / pair[1]).item())
    # What is outside only decays; nothing else says how large it is beside the others.
    shifted = reference._search_logits(logits + 5, supported, relative, target)
    assert shifted.tolist() == pytest.approx(all_three.tolist())
    step = step_of(ReferenceDeepen([own, own], support=2, num_steps=1))
    assert step.fused[b"c"] / step.fused[b"a"] == pytest.approx((0.2 / 0.5) ** 0.9985, rel=1e-6)
    step = step_of(ReferenceDeepen([own, own], support=1))
    assert step.fused[b"c"] / step.fused[b"b"] == pytest.approx((0.2 / 0.3) ** DECAY, rel=1e-6)
    paper = step_of(ReferenceDeepen([own, own], variant="paper", support=2))
    assert paper.fused[b"c"] == pytest.approx(0.2)


def test_dead_rows_and_control_tokens_take_no_part():
    tokenizer = tiny.pieces("a", "b", "dead", specials=["<other>"])
    embeddings = {**CROSS, "dead": (0, 0)}
    first = member(tokenizer, {"a": 0.5, "b": 0.5}, embeddings)
    own = {"a": 0.2, "b": 0.3, "dead": 0.2, "<other>": 0.3}
    second = member(tokenizer, own, embeddings)
    bare = member(tokenizer, {"a": 0.4, "b": 0.6}, embeddings)
    step = step_of(ReferenceDeepen([first, second]))
    assert step.fused == pytest.approx(step_of(ReferenceDeepen([first, bare])).fused)
    step = step_of(ReferenceDeepen([member(tokenizer, own, embeddings), first]))
    assert b"dead" not in step.fused
    assert step.fused["control", 5] > 0


def test_contexts_are_retokenized():
    tokenizer = tiny.pieces("a", "b", "ab")
    first = member(tiny.pieces("a", "b"), {"b": 1.0}, CROSS)
    reference = ReferenceDeepen([first, member(tokenizer, {"a": 1.0}, CROSS)])
    state = reference.advance(reference.prompt_state([A]), b"b")
    assert reference.contexts(state) == [[A, B], [4]]


def test_whole_models_and_a_closed_gate():
    tokenizer = tiny.smol_like()
    other = tiny.gemma_like()
    llama, gemma = tiny.tiny_llama(tokenizer), tiny.tiny_gemma3(other)
    members = [ReferenceMember(llama, tokenizer), ReferenceMember(gemma, other)]
    prompt = tokenizer("The capital of")["input_ids"]
    reference = ReferenceDeepen(members)
    ids, margins = reference.greedy(prompt, 3)
    assert len(ids) == len(margins) == 3
    columns = reference.distributions_along(prompt, ids, [0])[0]
    assert sum(columns.values()) == pytest.approx(1)
    own = Reference(members[:1]).distributions_along(prompt, ids, [0])[0]
    assert max(abs(columns[i] - own[i]) for i in own) > 1e-3
    closed = ReferenceDeepen(members, threshold=0.0).distributions_along(prompt, ids, [0])[0]
    assert closed == pytest.approx(own, abs=0.02)
    assert ReferenceDeepen(members, support=20).greedy(prompt, 2)[0]
