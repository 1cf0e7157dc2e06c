"""Rows that join a running batch and leave it: each writes what a call of its own writes."""

import copy

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from hf_ensemble import ConfigurationError, EnsembleForCausalLM, GacConfig, MemberError, UniteConfig
from hf_ensemble.decoding.running_batch import RunningBatch
from hf_ensemble.modes.shared import new_row
from tests import tiny
from tests.far_members import far_ensemble

pytestmark = pytest.mark.filterwarnings("ignore:the primary .* wrote the control token")

slow = pytest.mark.slow

PROMPTS = [
    "The capital of France is",
    "The cat",
    "Once upon a time there was a king",
    "Größe, Straße",
    "def add(a, b):\n",
    "The cat",
]
JOINING = {0: [0, 1], 2: [2], 3: [3, 4], 7: [5]}
"""Which rows join before which step."""
LENGTHS = [6, 14, 9, 3, 12, 5]


def make(model=tiny.tiny_gemma3, far=(), **options):
    tokenizers = [tiny.smol_like(), tiny.gemma_like()]
    models = [tiny.tiny_llama(tokenizers[0], seed=1), model(tokenizers[1], seed=2)]
    if far:
        return far_ensemble(models, tokenizers, far, **{"method": "unite", **options})
    return EnsembleForCausalLM.from_members(models, tokenizers, **options)


def config_of(ensemble, **options):
    config = copy.deepcopy(ensemble.generation_config)
    config.update(**{"do_sample": False, **options})
    return config


class Asked:
    """A row with its options, and what is written in it."""

    def __init__(self, ensemble, prompt, seed=0, num_best=None, logits_processor=(), **options):
        self.inputs = ensemble.tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        self.options, self.processors = options, logits_processor
        self.steps = []
        self.row = new_row(
            ensemble,
            self.inputs,
            config_of(ensemble, **options),
            seed,
            logits_processor=logits_processor,
            num_best=num_best,
            take=self.steps.append,
        )

    @property
    def ids(self):
        return [step.id for step in self.steps]

    def alone(self, ensemble):
        output = ensemble.generate(
            **self.inputs,
            generation_config=config_of(ensemble, **self.options),
            logits_processor=LogitsProcessorList(self.processors),
            tokenizer=ensemble.tokenizer,
        )
        return output[0, self.inputs["input_ids"].shape[1] :].tolist()


def run(asked, joining=JOINING, leaving=None):
    """Let rows join before their steps, and leave before others; returns how many rows each step had."""
    batch, counts, step = None, [], 0
    while batch is None or batch.rows or step <= max(joining):
        rows = [asked[n].row for n in joining.get(step, ())]
        if batch is not None and batch.rows:
            batch.leave([asked[n].row for n in (leaving or {}).get(step, ())])
        if rows:
            is_new = batch is None or not batch.rows
            decoder = RunningBatch.begun(rows, not is_new)
            if is_new:
                batch = RunningBatch(rows, decoder)
            else:
                batch.join(rows, decoder)
        if batch.rows:
            batch.step()
        counts.append(len(batch.rows))
        step += 1
    return counts


ENSEMBLES = {
    "unite": (make, {}),
    "gac": (make, {"method": "gac"}),
    "mamba": (lambda **options: make(tiny.tiny_mamba2, **options), {}),
    "gate": (make, {"method": UniteConfig(threshold=0.02, gate=1)}),
    "primary alone": (make, {"weights": [1, 0]}),
    "assistant alone": (make, {"weights": [0, 1], "method": "gac"}),
    "eva": (make, {"method": "eva"}),
    "mined": (make, {"method": "mined"}),
    "deepen": (make, {"method": "deepen"}),
    "gac gate": (make, {"method": GacConfig(threshold=0.02, gate=1)}),
    "far assistant": (lambda **options: make(far=[1], **options), {}),
    "far primary": (lambda **options: make(far=[0], **options), {}),
}


@pytest.mark.parametrize("name", [*list(ENSEMBLES)[:2], *(pytest.param(n, marks=slow) for n in list(ENSEMBLES)[2:])])
def test_rows_that_join_and_leave_write_what_they_write_alone(name):
    made, options = ENSEMBLES[name]
    ensemble = made(**options)
    asked = [Asked(ensemble, prompt, max_new_tokens=n) for prompt, n in zip(PROMPTS, LENGTHS, strict=True)]
    counts = run(asked)
    assert max(counts) > 2
    for one in asked:
        assert one.ids == one.alone(ensemble)
        assert [step.ends for step in one.steps] == [False] * (len(one.steps) - 1) + [True]


@pytest.mark.parametrize("mode", ["static", pytest.param("recompute", marks=slow)])
def test_every_kind_of_cache_takes_rows_in(mode):
    ensemble = make()
    for member in ensemble.member_views:
        member.cache_mode = mode
    asked = [Asked(ensemble, prompt, max_new_tokens=n) for prompt, n in zip(PROMPTS, LENGTHS, strict=True)]
    run(asked)
    for one in asked:
        assert one.ids == one.alone(ensemble)


OPTIONS = [
    {"repetition_penalty": 1.4},
    {"sequence_bias": {(70,): 2.5}},
    {"min_new_tokens": 8, "no_repeat_ngram_size": 2},
    {"bad_words_ids": [[80], [90]]},
    {"exponential_decay_length_penalty": (3, 1.6)},
    {"suppress_tokens": list(range(40, 90))},
]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["unite", pytest.param("gac", marks=slow)])
def test_every_row_has_its_own_options(method):
    ensemble = make(method=method)
    asked = [
        Asked(ensemble, prompt, max_new_tokens=10, **options) for prompt, options in zip(PROMPTS, OPTIONS, strict=True)
    ]
    run(asked)
    for one in asked:
        assert one.ids == one.alone(ensemble)


SAMPLING = [
    {"temperature": 1.3, "top_k": 0},
    {"temperature": 0.7, "top_p": 0.9},
    {"do_sample": False},
    {"temperature": 1.3, "top_k": 0},
    {"min_p": 0.05},
    {"do_sample": False},
]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["gac", pytest.param("unite", marks=slow)])
def test_what_a_seed_draws_does_not_depend_on_who_is_there(method):
    ensemble = make(method=method)

    def ask():
        return [
            Asked(ensemble, prompt, seed, max_new_tokens=10, **{"do_sample": True, **options})
            for seed, (prompt, options) in enumerate(zip(PROMPTS, SAMPLING, strict=True))
        ]

    together = ask()
    run(together)
    for n, one in enumerate(ask()):
        run([one], {0: [0]})
        assert one.ids == together[n].ids
    other = Asked(ensemble, PROMPTS[0], 77, max_new_tokens=10, do_sample=True, **SAMPLING[0])
    run([other], {0: [0]})
    assert other.ids != together[0].ids
    assert together[5].ids == together[5].alone(ensemble)


@slow
def test_the_law_of_what_is_drawn_is_that_of_generate():
    ensemble = make()
    asked = [
        Asked(ensemble, PROMPTS[n % 2], seed, max_new_tokens=1, do_sample=True, top_k=0, num_best=0)
        for seed, n in enumerate(range(800))
    ]
    run(asked, {0: range(400), 1: range(400, 800)})
    for n in range(2):
        output = ensemble.generate(
            **asked[n].inputs, max_new_tokens=1, do_sample=False, return_dict_in_generate=True, output_logits=True
        )
        law = output.logits[0][0].softmax(-1)
        drawn = torch.bincount(torch.tensor([one.ids[0] for one in asked[n::2]]), minlength=len(law)) / 400
        # Of 400 draws each share has a deviation of at most 0.025; this is four of them.
        assert float((drawn - law).abs().max()) < 0.1
        assert float(law.max()) > 0.005


def test_given_up_rows_leave_at_the_next_step_and_the_others_go_on():
    ensemble = make()
    asked = [Asked(ensemble, prompt, max_new_tokens=12) for prompt in PROMPTS[:4]]
    counts = run(asked, {0: [0, 1, 2], 5: [3]}, leaving={3: [1], 6: [0]})
    assert counts[:7] == [3, 3, 3, 2, 2, 3, 2]
    assert [len(one.ids) for one in asked] == [6, 3, 12, 12]
    for one in asked:
        assert one.ids == one.alone(ensemble)[: len(one.ids)]


@slow
def test_a_batch_starts_again_when_it_was_empty():
    ensemble = make()
    asked = [Asked(ensemble, prompt, max_new_tokens=3) for prompt in PROMPTS[:2]]
    run(asked, {0: [0], 6: [1]})
    for one in asked:
        assert one.ids == one.alone(ensemble)


@pytest.mark.parametrize("method", ["gac", pytest.param("unite", marks=slow)])
@pytest.mark.parametrize("options", [{}, pytest.param({"repetition_penalty": 1.4}, marks=slow)])
def test_log_probabilities_are_those_of_generate(method, options):
    ensemble = make(method=method)
    asked = [Asked(ensemble, p, max_new_tokens=8, num_best=n, **options) for n, p in enumerate(PROMPTS[:4])]
    run(asked, {0: [0, 1], 2: [2, 3]})
    for n, one in enumerate(asked):
        output = ensemble.generate(
            **one.inputs,
            **{"max_new_tokens": 8, "do_sample": False, **options},
            return_dict_in_generate=True,
            output_logits=True,
        )
        assert len(output.logits) == len(one.steps)
        for step, logits in zip(one.steps, output.logits, strict=True):
            law = logits[0].log_softmax(-1)
            assert step.log_prob == pytest.approx(float(law[step.id]), abs=1e-4)
            assert len(step.best) == n
            assert [value for _, value in step.best] == pytest.approx(law.topk(n).values.tolist(), abs=1e-4)


class BansAll(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return torch.full_like(scores, -torch.inf)


class Breaks(LogitsProcessor):
    def __call__(self, input_ids, scores):
        raise RuntimeError("broken")


def test_what_befalls_a_row_is_nobody_elses():
    ensemble = make()
    penalty = {"repetition_penalty": 1.4}
    asked = [
        Asked(ensemble, PROMPTS[0], max_new_tokens=6, **penalty),
        Asked(ensemble, PROMPTS[1], max_new_tokens=6, logits_processor=[BansAll()]),
        Asked(ensemble, PROMPTS[2], max_new_tokens=6, logits_processor=[Breaks()]),
        Asked(ensemble, PROMPTS[3], max_new_tokens=6, **penalty),
    ]
    run(asked, {0: [0, 1, 2, 3]})
    for one in asked[0], asked[3]:
        assert one.ids == one.alone(ensemble)
    for one, words in (asked[1], "no candidate|nothing|filtered"), (asked[2], "broken"):
        (step,) = one.steps
        assert step.ends
        assert isinstance(step.error, MemberError)
        with pytest.raises(MemberError, match=words):
            raise step.error


def test_equal_prompts_are_read_once():
    ensemble = make()
    asked = [Asked(ensemble, PROMPTS[0], seed, max_new_tokens=4, do_sample=True) for seed in range(3)]
    rows = [one.row for one in asked]
    batch = RunningBatch(rows, RunningBatch.begun(rows, False))
    states = batch.decoder.rows.states
    assert all(len(state.contexts) == 1 for state in states.values())
    while batch.rows:
        batch.step()
    for seed, one in enumerate(asked):
        again = Asked(ensemble, PROMPTS[0], seed, max_new_tokens=4, do_sample=True)
        run([again], {0: [0]})
        assert again.ids == one.ids


@slow
def test_a_row_ends_where_a_member_has_no_position_left():
    tokenizers = [tiny.smol_like(), tiny.smol_like()]
    models = [tiny.tiny_llama(tokenizers[0], seed=1), tiny.tiny_gpt2(tokenizers[1], n_positions=24, seed=2)]
    ensemble = EnsembleForCausalLM.from_members(models, tokenizers)
    asked = [Asked(ensemble, prompt, max_new_tokens=40) for prompt in PROMPTS[:3]]
    with pytest.warns(UserWarning, match="has positions for 24"):
        run(asked, {0: [0], 4: [1, 2]})
    with pytest.warns(UserWarning, match="has positions for 24"):
        for one in asked:
            assert one.ids == one.alone(ensemble)


def test_what_cannot_share_a_batch_is_refused():
    with pytest.raises(ConfigurationError, match="a shared batch"):
        Asked(make(), PROMPTS[0], num_beams=3)
    with pytest.raises(ConfigurationError, match="method 'sweetspan'"):
        Asked(make(method="sweetspan"), PROMPTS[0])
