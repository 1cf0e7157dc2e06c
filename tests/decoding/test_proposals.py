"""Ids outside the proposals: constraints, biases and label lists on methods that propose few entries."""

import functools
import itertools
import math

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from hf_ensemble import EnsembleLogitsProcessor, EvaConfig, GacConfig, MemberError, UniteConfig
from tests import tiny
from tests.contracts import make_ensemble, reference_member
from tests.reference import Reference
from tests.reference_alignment import ReferenceEva

PROMPT = "The capital of France is"
METHODS = {
    "unite": UniteConfig(top_k=3),
    "eva": EvaConfig(top_k=3, neighbours=2, min_similarity=0.01),
    "alpha": GacConfig(space="log", alpha=0.9),
}
WEIGHTS = [0.7, 0.3]


@functools.cache
def ensemble():
    tokenizers = [tiny.byte_level_bpe(400), tiny.gemma_like()]
    return make_ensemble([tiny.tiny_llama(tokenizers[0], seed=3), tiny.tiny_gemma3(tokenizers[1], seed=4)], tokenizers)


@functools.cache
def references(name):
    """What is proposed, and the mean of whole distributions of members that read the same."""
    members = [reference_member(ensemble(), index) for index in range(2)]
    if name == "unite":
        proposals = Reference(members, "unite", WEIGHTS, top_k=3)
    elif name == "eva":
        proposals = ReferenceEva(members, WEIGHTS, top_k=3, neighbours=2, min_similarity=0.01)
    else:
        proposals = Reference(members, "gac", WEIGHTS, space="log", alpha=0.9)
    return proposals, Reference(members, "gac", WEIGHTS, resync=proposals.resync)


class Plain:
    """The rule, read plainly: one row, no caches; everything in dictionaries of the primary's ids."""

    def __init__(self, name, prompt):
        self.proposals, self.whole = references(name)
        self.state = self.proposals.prompt_state(prompt)

    def step(self, allowed=None, raised=(), bias=None):
        """Each id that may be chosen, with its score in natural logarithms."""
        proposed = {i: p for i, p in self.proposals.distribution(self.state).columns.items() if p > 0}
        whole = self.whole.distribution(self.state).columns
        may = set(range(400)) if allowed is None else set(allowed)
        scores = {i: math.log(p) for i, p in proposed.items() if i in may}
        if scores:
            entering = {i for i in raised if i not in proposed and whole.get(i)}
            scores |= {i: math.log(whole[i]) for i in entering & may}
            total = 1 + sum(whole[i] for i in entering & may)
            scores = {i: score - math.log(total) for i, score in scores.items()}
        else:
            scores = {i: math.log(whole[i]) for i in may if whole.get(i)}
        return {i: score + (bias or {}).get(i, 0.0) for i, score in scores.items()}

    def write(self, i):
        self.state = self.proposals.advance(self.state, [i])


def prompt_ids(text=PROMPT):
    return ensemble().tokenizer(text)["input_ids"]


def generate(name, rows=None, **options):
    rows = [prompt_ids()] if rows is None else rows
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, **options}
    return ensemble().generate(
        ids, attention_mask=mask, method=METHODS[name], weights=WEIGHTS, return_dict_in_generate=True, **options
    )


def new_ids(output, row=0):
    return output.sequences[row, -4:].tolist()


def expected_ids(name, prompt=None, steps=4, allowed=None, raised=lambda ids: (), bias=None):
    """The greedy text; `allowed` is a list of ids or a function of the new ids."""
    plain, written = Plain(name, prompt or prompt_ids()), []
    for _ in range(steps):
        may = allowed(written) if callable(allowed) else allowed
        scores = plain.step(may, raised([*(prompt or prompt_ids()), *written]), bias)
        written.append(max(scores, key=lambda i: (scores[i], -i)))
        plain.write(written[-1])
    return written


@functools.cache
def unlikely():
    """Ids of text that no method proposes after the prompt, nor later: the least likely of the first step."""
    whole = references("unite")[1]
    columns = whole.distribution(whole.prompt_state(prompt_ids())).columns
    text = [i for i in columns if ensemble()._members[0].encoder.token_bytes.entry(i).isalpha()]
    return sorted(text, key=columns.get)[:3]


@pytest.mark.parametrize("name", METHODS)
class TestEveryMethod:
    def test_a_list_without_proposals_is_chosen_from_by_the_whole_distributions(self, name):
        output = generate(name, prefix_allowed_tokens_fn=lambda row, ids: unlikely())
        assert new_ids(output) == expected_ids(name, allowed=unlikely())

    def test_of_a_list_with_some_proposals_only_these_are_chosen(self, name):
        def allowed(written):
            proposed = Plain(name, prompt_ids())
            for i in written:
                proposed.write(i)
            worst = min(columns := proposed.step(), key=columns.get)
            return [*unlikely(), worst] if len(written) % 2 == 0 else unlikely()

        length = len(prompt_ids())
        output = generate(name, prefix_allowed_tokens_fn=lambda row, ids: allowed(ids[length:].tolist()))
        assert new_ids(output) == expected_ids(name, allowed=allowed)

    def test_drafts_change_nothing(self, name):
        options = {"prefix_allowed_tokens_fn": lambda row, ids: unlikely()[:2], "max_new_tokens": 9}
        assert generate(name, speculation="ngram", **options).sequences.tolist() == (
            generate(name, **options).sequences.tolist()
        )

    @pytest.mark.slow
    def test_beams_hold_allowed_ids_only_and_have_the_sum_of_their_scores(self, name):
        output = generate(
            name,
            prefix_allowed_tokens_fn=lambda row, ids: unlikely(),
            num_beams=3,
            num_return_sequences=3,
            output_scores=True,
            length_penalty=0.0,
        )
        best = {(): 0.0}
        for length in range(4):
            for ids in itertools.product(unlikely(), repeat=length):
                plain = Plain(name, prompt_ids())
                for i in ids:
                    plain.write(i)
                scores = plain.step(unlikely())
                best |= {(*ids, i): best[ids] + scores.get(i, -math.inf) for i in unlikely()}
        for row, score in zip(output.sequences.tolist(), output.sequences_scores.tolist(), strict=True):
            assert score == pytest.approx(best[tuple(row[-4:])], abs=1e-3)

    def test_a_biased_id_enters_beside_the_proposals(self, name):
        i = unlikely()[0]
        bias = {i: 12.0}
        output = generate(name, sequence_bias=[[[i], 12.0]])
        assert new_ids(output) == expected_ids(name, raised=lambda ids: [i], bias=bias)
        assert i in new_ids(output)

    def test_logits_show_what_was_decided_on(self, name):
        output = generate(
            name, prefix_allowed_tokens_fn=lambda row, ids: unlikely(), output_logits=True, output_scores=True
        )
        plain = Plain(name, prompt_ids())
        for step, i in enumerate(new_ids(output)):
            whole = plain.whole.distribution(plain.state).columns
            for column, prob in whole.items():
                if prob > 1e-6:
                    assert output.logits[step][0, column] == pytest.approx(math.log(prob), abs=2e-3)
            assert set((output.scores[step][0] > -torch.inf).nonzero()[:, 0].tolist()) == set(unlikely())
            plain.write(i)


@pytest.mark.parametrize("name", METHODS)
def test_rows_of_a_batch_fall_back_one_by_one(name):
    rows = [prompt_ids(), prompt_ids("Once upon a time there was")]
    free = list(range(400))
    output = generate(name, rows, prefix_allowed_tokens_fn=lambda row, ids: free if row else unlikely())
    assert new_ids(output) == expected_ids(name, allowed=unlikely())
    assert new_ids(output, 1) == expected_ids(name, rows[1])


def test_a_bias_on_a_sequence_raises_its_last_id_only_where_the_rest_stands():
    first = expected_ids("unite", steps=1)[0]
    last = unlikely()[0]
    output = generate("unite", sequence_bias=[[[first, last], 30.0]])
    assert new_ids(output)[:2] == [first, last]
    output = generate("unite", sequence_bias=[[[unlikely()[1], last], 30.0]])
    assert new_ids(output) == expected_ids("unite")


def test_a_bias_below_zero_raises_nothing():
    output = generate("unite", sequence_bias=[[[unlikely()[0]], -1.0]], output_logits=True)
    assert new_ids(output) == expected_ids("unite")
    assert output.logits[0][0, unlikely()[0]] == -torch.inf


def test_the_end_comes_in_once_its_decay_has_begun():
    end = unlikely()[0]
    output = generate(
        "unite", eos_token_id=end, exponential_decay_length_penalty=(2, 40.0), max_new_tokens=8, pad_token_id=0
    )
    written = output.sequences[0, len(prompt_ids()) :].tolist()
    assert 3 <= len(written) < 8
    assert written[-1] == end


def test_sampling_draws_from_the_allowed_by_the_whole_distributions():
    allowed = unlikely()[:2]
    output = generate(
        "unite",
        prefix_allowed_tokens_fn=lambda row, ids: allowed,
        do_sample=True,
        top_k=0,
        num_return_sequences=2000,
        max_new_tokens=1,
    )
    whole = references("unite")[1]
    columns = whole.distribution(whole.prompt_state(prompt_ids())).columns
    share = columns[allowed[0]] / (columns[allowed[0]] + columns[allowed[1]])
    drawn = (output.sequences[:, -1] == allowed[0]).float().mean().item()
    assert abs(drawn - share) < 4.5 * math.sqrt(share * (1 - share) / 2000)  # fails by chance once in 100,000 runs


class Only(LogitsProcessor):
    """A user's own: leaves some ids, counts its calls."""

    def __init__(self, ids):
        self.ids, self.num_calls = list(ids), 0

    def __call__(self, input_ids, scores):
        self.num_calls += 1
        kept = torch.full_like(scores, -torch.inf)
        kept[:, self.ids] = scores[:, self.ids]
        return kept


def test_a_users_own_processor_is_called_once_a_step():
    only = Only(unlikely())
    output = generate("unite", logits_processor=LogitsProcessorList([only]))
    assert new_ids(output) == expected_ids("unite", allowed=unlikely())
    assert only.num_calls == 4


def test_warpers_act_on_what_is_left():
    options = {"do_sample": True, "top_k": 1, "temperature": 3.0}
    output = generate("unite", prefix_allowed_tokens_fn=lambda row, ids: unlikely(), **options)
    assert new_ids(output) == expected_ids("unite", allowed=unlikely())


def test_without_constraints_the_whole_distributions_are_not_computed(monkeypatch):
    def fail(*_):
        raise AssertionError

    monkeypatch.setattr("hf_ensemble.methods.gac.Gac.mix", fail)
    assert new_ids(generate("unite", do_sample=True, top_k=1, temperature=0.5)) == expected_ids("unite")


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}])
def test_where_nothing_is_allowed_the_error_says_so(options):
    with pytest.raises(MemberError, match=r"nothing is left to choose from in row 0 at step 1"):
        generate("unite", logits_processor=LogitsProcessorList([Only([])]), **options)


@pytest.mark.parametrize("weights", [WEIGHTS, [0.0, 1.0]])
def test_as_a_plain_processor_it_chooses_from_what_reaches_it(weights):
    models, tokenizers = list(ensemble().members), ensemble().tokenizers
    processor = EnsembleLogitsProcessor(models, tokenizers, UniteConfig(top_k=3), weights)
    ids = models[0].generate(
        torch.tensor([prompt_ids()]),
        attention_mask=torch.ones(1, len(prompt_ids())).long(),
        prefix_allowed_tokens_fn=lambda row, ids: unlikely(),
        logits_processor=LogitsProcessorList([processor]),
        max_new_tokens=1,
        do_sample=False,
        pad_token_id=0,
    )
    # The primary's own distribution arrives cut to what is allowed, so that it proposes nothing else.
    members = [reference_member(ensemble(), index) for index in range(2)]
    state = (whole := Reference(members, "gac", weights, resync="retokenize")).prompt_state(prompt_ids())
    if weights[0] == 0:
        columns = whole.distribution(state).columns
        assert ids[0, -1].item() == max(unlikely(), key=columns.get)
    else:
        assert ids[0, -1].item() in unlikely()


def test_a_label_list_of_the_default_method_chooses_what_the_members_prefer():
    """The shape of label classification: only the ids of two words are allowed, neither of which is proposed."""
    words = unlikely()[:2]
    output = generate("unite", prefix_allowed_tokens_fn=lambda row, ids: words, max_new_tokens=1)
    whole = references("unite")[1]
    columns = whole.distribution(whole.prompt_state(prompt_ids())).columns
    assert output.sequences[0, -1].item() == max(words, key=columns.get)


@pytest.mark.crossed
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"speculation": "ngram"}], ids=str)
def test_bans_that_are_made_finite_hold_too(name, options):
    allowed = {"prefix_allowed_tokens_fn": lambda row, ids: unlikely()}
    output = generate(name, **allowed, remove_invalid_values=True, **options)
    assert new_ids(output) == new_ids(generate(name, **allowed, **options))


@pytest.mark.parametrize("ban", [-1e4, -1e9, torch.finfo(torch.float32).min])
def test_a_ban_may_be_any_very_low_number(ban):
    def soft(input_ids, scores):
        kept = torch.full_like(scores, ban)
        kept[:, unlikely()] = scores[:, unlikely()]
        return kept

    output = generate("unite", logits_processor=LogitsProcessorList([soft]))
    assert new_ids(output) == expected_ids("unite", allowed=unlikely())


@pytest.mark.parametrize("method", ["gac", UniteConfig(top_k=3)], ids=str)
def test_beside_a_plain_model_bans_that_are_made_finite_hold_too(method):
    models, tokenizers = list(ensemble().members), ensemble().tokenizers
    processor = EnsembleLogitsProcessor(models, tokenizers, method, WEIGHTS)
    ids = models[0].generate(
        torch.tensor([prompt_ids()]),
        prefix_allowed_tokens_fn=lambda row, ids: unlikely(),
        remove_invalid_values=True,
        logits_processor=LogitsProcessorList([processor]),
        max_new_tokens=4,
        do_sample=False,
        pad_token_id=0,
    )
    assert set(ids[0, -4:].tolist()) <= set(unlikely())
