"""Who decides a token: gates, one member drawn a token, and weights that differ by row and step."""

import math

import pytest
import torch

from hf_ensemble import ConfigurationError, EnsembleLogitsProcessor, GacConfig, MemberError, UniteConfig
from tests import tiny
from tests.contracts import (
    CORE_RECIPES,
    RECIPES,
    assert_same_choices,
    assert_same_output,
    changed_logits,
    make_ensemble,
    new_ids,
    padded,
    prompt_rows,
    run,
)
from tests.real.compare_reference import Replay

pytestmark = pytest.mark.filterwarnings("ignore:the primary .* wrote the control token")

METHODS = {"gac": GacConfig, "unite": UniteConfig}
each_method = pytest.mark.parametrize("gated", METHODS.values(), ids=METHODS)
BY_TURNS = [
    pytest.param(
        recipe,
        (n + turn) % 2,
        METHODS[("gac", "unite")[(n // 2 + turn) % 2]],
        id=f"{recipe}, {turn}",
        marks=[pytest.mark.slow, pytest.mark.further] * (turn or n == 1 or n > 3),
    )
    for n, recipe in enumerate(RECIPES)
    for turn in (0, 1)
]
"""Every recipe with both members as the gate and both methods, but not with all combinations of these; quick are once
each kind of cache."""
TEXT = " the king of France had a cat, and the cat had 3 lives: naïve ones."


def batch_of(ensemble):
    return padded(prompt_rows(ensemble), fill=lambda n: ensemble.tokenizer.pad_token_id or 0)


def only(ensemble, member):
    """Weights that leave everything to one member, without leaving the call to the primary's own loop."""
    return lambda step, ids: [float(index == member) for index in range(len(ensemble.members))]


def along(ensemble, rows, num_new=14, **options):
    """Distributions along a text that is written whatever the scores."""
    ids = ensemble.tokenizer(TEXT, add_special_tokens=False)["input_ids"][:num_new]
    prompt_length = rows["input_ids"].shape[1]
    replay = Replay(ids, prompt_length)
    return run(
        ensemble, rows, max_new_tokens=len(ids), logits_processor=[replay], eos_token_id=[], pad_token_id=0, **options
    )


def assert_same_distributions(found, expected):
    """The texts are the same, and the probabilities at every step of every row."""
    assert torch.equal(found.sequences, expected.sequences)
    for a, b in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(a.exp(), b.exp(), atol=1e-5, rtol=1e-3)


def sharpened(model, factor):
    """A model that is sure of some things."""
    return changed_logits(model, lambda logits: logits * factor)


# --- The gate -------------------------------------------------------------------------------------------------------


@each_method
@pytest.mark.parametrize("gate", [0, 1])
def test_at_threshold_0_the_gate_decides_alone(gated, gate):
    ensemble = CORE_RECIPES[1].ensemble
    rows = batch_of(ensemble)
    found = run(ensemble, rows, method=gated(threshold=0, gate=gate))
    assert found.share_ensembled == [0.0] * 3
    assert found.num_forwards[1 - gate] == 0
    expected = run(ensemble, rows, method=gated(), weights=only(ensemble, gate))
    assert_same_distributions(found, expected)


@each_method
@pytest.mark.parametrize("gate", [0, 1])
def test_at_threshold_1_all_decide_always(gated, gate):
    ensemble = CORE_RECIPES[0].ensemble
    rows = batch_of(ensemble)
    found = run(ensemble, rows, method=gated(threshold=1, gate=gate))
    assert found.share_ensembled == [1.0] * 3
    expected = run(ensemble, rows, method=gated())
    assert_same_distributions(found, expected)


@pytest.mark.parametrize(("recipe", "gate", "gated"), BY_TURNS)
def test_a_step_skipped_and_caught_up_is_as_if_never_skipped(recipe, gate, gated):
    """Row by row, past the sliding window of 8 too: open steps are the ensemble's, closed ones the gate's."""
    ensemble = recipe.ensemble
    rows = batch_of(ensemble)
    with sharpened(ensemble.members[gate], 8.0):
        expected_open = along(ensemble, rows, method=gated())
        expected_closed = along(ensemble, rows, method=gated(), weights=only(ensemble, gate))
        sureness = torch.stack([step.exp().amax(-1) for step in expected_closed.logits])
        threshold = sureness.median().item() + 1e-6
        found = along(ensemble, rows, method=gated(threshold=threshold, gate=gate))
    num_open = torch.zeros(len(found.logits[0]))
    for step, logits in enumerate(found.logits):
        for row, share in enumerate(logits.exp()):
            options = [other.logits[step][row].exp() for other in (expected_open, expected_closed)]
            distances = [(share - option).abs().max().item() for option in options]
            assert min(distances) < 1e-4, (step, row, distances)
            num_open[row] += distances[0] < distances[1]
    assert 0 < num_open.sum() < num_open.numel() * len(found.logits)


def test_the_shares_and_forwards_are_counted():
    """Of a member that is not the gate: one forward a step in which some row needs it, whatever it has missed."""
    ensemble = CORE_RECIPES[0].ensemble
    row = prompt_rows(ensemble)[:1]
    with sharpened(ensemble.members[0], 8.0):
        rows = {"input_ids": torch.tensor(row), "attention_mask": torch.ones(1, len(row[0])).long()}
        alone = along(ensemble, rows, method="gac", weights=only(ensemble, 0))
        threshold = torch.stack([step.exp().max() for step in alone.logits]).median().item() + 1e-6
        found = along(ensemble, rows, method=GacConfig(threshold=threshold))
    num_steps = len(found.logits)
    num_open = round(found.share_ensembled[0] * num_steps)
    assert 0 < num_open < num_steps
    assert found.num_forwards == (num_steps, num_open)


def test_a_gate_of_weight_0_hands_over():
    """Where the small model is sure it writes, else the large one writes alone."""
    ensemble = CORE_RECIPES[0].ensemble
    rows = batch_of(ensemble)
    with sharpened(ensemble.members[0], 8.0):
        large = along(ensemble, rows, weights=[0, 1], method="gac")
        small = along(ensemble, rows, weights=only(ensemble, 0), method="gac")
        threshold = torch.stack([step.exp().amax(-1) for step in small.logits]).median().item()
        found = along(ensemble, rows, weights=[0, 1], method=GacConfig(threshold=threshold))
    kinds = set()
    for step, logits in enumerate(found.logits):
        for row in range(3):
            near = [
                (logits[row].exp() - other.logits[step][row].exp()).abs().max().item() < 1e-4
                for other in (small, large)
            ]
            assert any(near)
            kinds.add(near.index(True))
    assert kinds == {0, 1}


def test_a_primary_that_is_not_the_gate_runs_only_where_it_is_needed():
    ensemble = CORE_RECIPES[1].ensemble
    rows = prompt_rows(ensemble)[:1]
    found = run(ensemble, rows, method=GacConfig(threshold=0, gate=1))
    assert found.num_forwards[0] == 0
    # What only its own pass through the decoding loop can give makes it run.
    seen = run(ensemble, rows, method=GacConfig(threshold=0, gate=1), output_hidden_states=True)
    assert len(seen.hidden_states) == seen.num_forwards[0] == 6
    assert_same_output(found, seen)


def test_a_primary_without_weight_does_not_run():
    ensemble = CORE_RECIPES[1].ensemble
    with changed_logits(ensemble.members[0], lambda logits: logits * torch.nan):
        found = run(ensemble, prompt_rows(ensemble)[:1], weights=[0, 1], method="gac")
    assert found.num_forwards[0] == 0


@pytest.mark.parametrize("gate", [0, 1])
def test_a_gate_that_gives_nan_is_named(gate):
    ensemble = CORE_RECIPES[0].ensemble
    rows = prompt_rows(ensemble)[:1]
    run(ensemble, rows)
    with (
        changed_logits(ensemble.members[gate], lambda logits: logits * torch.nan),
        pytest.raises(MemberError, match=f"member-{gate}.*row 0 at step 1"),
    ):
        run(ensemble, rows, method=GacConfig(threshold=0.5, gate=gate), weights=[gate, 1 - gate])


def test_what_a_member_says_of_a_row_that_does_not_need_it_does_not_count():
    ensemble = CORE_RECIPES[0].ensemble
    rows = batch_of(ensemble)
    with sharpened(ensemble.members[0], 8.0):
        expected = run(ensemble, rows, method=GacConfig(threshold=0))
        with changed_logits(ensemble.members[1], lambda logits: logits * torch.nan):
            found = run(ensemble, rows, method=GacConfig(threshold=0))
    assert torch.equal(found.sequences, expected.sequences)


def test_minimum_lengths_and_end_ids_hold_in_closed_steps_too():
    ensemble = CORE_RECIPES[0].ensemble
    eos = ensemble.generation_config.eos_token_id
    eos = eos[0] if isinstance(eos, list) else eos

    def ends(logits):
        return logits.index_fill(-1, torch.tensor([eos]), 50.0)

    with changed_logits(ensemble.members[0], ends):
        found = run(
            ensemble, prompt_rows(ensemble)[:1], method=GacConfig(threshold=0.5), max_new_tokens=12, min_new_tokens=8
        )
    assert len(new_ids(found, end_ids=[eos])) == 9


@pytest.mark.parametrize("num_beams", [2, 3])
def test_beams_pass_the_gate(num_beams):
    ensemble = CORE_RECIPES[0].ensemble
    rows = prompt_rows(ensemble)[:1]
    expected = run(ensemble, rows, num_beams=num_beams, method="unite")
    found = run(ensemble, rows, num_beams=num_beams, method=UniteConfig(threshold=1, gate=1))
    assert torch.equal(found.sequences, expected.sequences)


def test_the_plain_processor_has_the_gate_too():
    ensemble = CORE_RECIPES[0].ensemble
    rows = batch_of(ensemble)
    method = GacConfig(threshold=0, gate=1)
    processor = EnsembleLogitsProcessor(list(ensemble.members), ensemble.tokenizers, method=method, weights=[1, 1])
    expected = EnsembleLogitsProcessor(list(ensemble.members), ensemble.tokenizers, method="gac", weights=[0, 1])
    texts = [run(ensemble.members[0], rows, logits_processor=[item]).sequences for item in (processor, expected)]
    assert torch.equal(*texts)


# --- Mixture sampling -----------------------------------------------------------------------------------------------

PLAIN = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0}
MIXTURE = GacConfig(strategy="mixture_sampling")


@pytest.fixture(scope="module")
def twins():
    """Two models with one vocabulary, sure of different things."""
    tokenizer = tiny.byte_level_bpe(300)
    models = [tiny.tiny_llama(tokenizer, seed=seed) for seed in (1, 2)]
    with torch.no_grad():
        for model in models:
            model.lm_head.weight.mul_(5.0)
    return make_ensemble(models, [tokenizer] * 2)


@pytest.mark.slow
def test_mixture_sampling_has_the_law_of_the_mixture(twins):
    """Of 20,000 texts of two tokens: the first, and the second after each first. Chi-square, 1 in 1,000 false alarms."""
    weights = torch.tensor([0.3, 0.7])
    prompt = twins.tokenizer("The", return_tensors="pt").input_ids
    torch.manual_seed(0)
    draws = []
    for _ in range(10):
        output = twins.generate(
            prompt, max_new_tokens=2, num_return_sequences=2000, method=MIXTURE, weights=weights.tolist(), **PLAIN,
            eos_token_id=[],
        )  # fmt: skip
        draws.append(output[:, prompt.shape[1] :])
    draws = torch.cat(draws)
    with torch.no_grad():
        size = twins.members[0].config.vocab_size
        first = torch.stack([model(prompt).logits[0, -1].softmax(-1) for model in twins.members])
        after = torch.cat([prompt.expand(size, -1), torch.arange(size)[:, None]], dim=1)
        second = torch.stack([model(after).logits[:, -1].softmax(-1) for model in twins.members])
    q_first = weights @ first
    joint = q_first[:, None] * torch.einsum("m,mab->ab", weights, second)
    for found, law in ((draws[:, 0], q_first), (draws[:, 0] * size + draws[:, 1], joint.flatten())):
        expected = law.double() * len(draws)
        counts = torch.bincount(found, minlength=len(law)).double()
        usual = expected >= 5
        cells = torch.cat([counts[usual], counts[~usual].sum()[None]])
        means = torch.cat([expected[usual], expected[~usual].sum()[None]])
        statistic = ((cells - means) ** 2 / means.clamp_min(1e-9)).sum().item()
        freedom = len(cells) - 1
        assert freedom >= 5
        # Wilson and Hilferty's approximation of the 99.9 % quantile.
        limit = freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3
        assert statistic < limit, (statistic, freedom)


def test_mixture_sampling_runs_one_member_a_token(twins):
    prompt = twins.tokenizer("The cat", return_tensors="pt").input_ids
    torch.manual_seed(1)
    output = twins.generate(
        prompt, max_new_tokens=20, method=MIXTURE, return_dict_in_generate=True, **PLAIN, eos_token_id=[]
    )
    assert sum(output.num_forwards) == 20
    assert min(output.num_forwards) > 2


def test_what_the_drawn_member_writes_is_what_it_would_write_alone(twins):
    """In a batch: the law of every row's step is one member's own, with what it has missed caught up."""
    ensemble = twins
    rows = batch_of(ensemble)
    torch.manual_seed(3)
    found = run(ensemble, rows, method=MIXTURE, max_new_tokens=8, **PLAIN, eos_token_id=[])
    ids = found.sequences
    kinds = set()
    for weights in (only(ensemble, 0), only(ensemble, 1)):
        replayed = along_ids(ensemble, rows, ids, weights)
        for step, logits in enumerate(found.logits):
            for row in range(3):
                if (logits[row].exp() - replayed[step][row].exp()).abs().max() < 1e-4:
                    kinds.add((step, row))
    assert len(kinds) == 3 * len(found.logits)


def along_ids(ensemble, rows, ids, weights):
    """The distributions at every step if the members had written these ids."""

    class ReplayRows(Replay):
        def __call__(self, input_ids, scores):
            forced = torch.full_like(scores, -torch.inf)
            return forced.scatter(1, ids[:, input_ids.shape[1], None], 0.0)

    length = ids.shape[1] - rows["input_ids"].shape[1]
    output = run(
        ensemble, rows, method="gac", weights=weights, max_new_tokens=length, eos_token_id=[],
        logits_processor=[ReplayRows([], 0)],
    )  # fmt: skip
    return output.logits


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"do_sample": False}, "greedy decoding"),
        ({"num_beams": 2}, "beam search"),
        ({"top_k": 5}, "TopKLogitsWarper"),
        ({"temperature": 0.5}, "TemperatureLogitsWarper"),
        ({"repetition_penalty": 1.2}, "RepetitionPenaltyLogitsProcessor"),
    ],
)
def test_mixture_sampling_refuses_what_would_change_its_law(twins, options, message):
    prompt = twins.tokenizer("The", return_tensors="pt").input_ids
    with pytest.raises(ConfigurationError, match=message):
        twins.generate(prompt, method=MIXTURE, max_new_tokens=2, **{**PLAIN, **options})


def test_the_plain_processor_cannot_draw(twins):
    with pytest.raises(ConfigurationError, match="how the token is chosen"):
        EnsembleLogitsProcessor(list(twins.members), twins.tokenizers, method=MIXTURE)


# --- Weights --------------------------------------------------------------------------------------------------------

ROW_WEIGHTS = [[1, 1], [1, 3], [4, 1]]


@pytest.mark.parametrize(
    ("form", "method"),
    [
        (list, "gac"),
        (torch.tensor, "unite"),
        pytest.param(list, "unite", marks=pytest.mark.slow),
        pytest.param(torch.tensor, "gac", marks=pytest.mark.slow),
    ],
)
def test_every_row_has_its_own_weights(method, form):
    ensemble = CORE_RECIPES[0].ensemble
    found = run(ensemble, batch_of(ensemble), method=method, weights=form(ROW_WEIGHTS))
    for row, (ids, weights) in enumerate(zip(prompt_rows(ensemble), ROW_WEIGHTS, strict=True)):
        alone = run(ensemble, [ids], method=method, weights=weights)
        assert_same_choices(new_ids(found, row, [2]), new_ids(alone, 0, [2]), [step[0] for step in alone.logits])
        torch.testing.assert_close(found.logits[0][row].exp(), alone.logits[0][0].exp(), atol=1e-4, rtol=1e-3)


def test_rows_of_weights_go_with_their_prompts():
    """Also where one prompt gives several sequences."""
    ensemble = CORE_RECIPES[0].ensemble
    found = run(
        ensemble, batch_of(ensemble), method="gac", weights=ROW_WEIGHTS, num_return_sequences=2, do_sample=True,
        max_new_tokens=1,
    )  # fmt: skip
    once = run(ensemble, batch_of(ensemble), method="gac", weights=ROW_WEIGHTS, max_new_tokens=1)
    torch.testing.assert_close(found.logits[0], once.logits[0].repeat_interleave(2, 0), atol=1e-5, rtol=1e-4)


def test_weights_may_be_a_function_of_the_step():
    """A member that has none at a step does not run then."""
    ensemble = CORE_RECIPES[0].ensemble
    rows = {"input_ids": torch.tensor(prompt_rows(ensemble)[:1]), "attention_mask": None}
    seen = []

    def weights(step, input_ids):
        seen.append((step, input_ids.shape[1] - rows["input_ids"].shape[1]))
        return [1, 0] if step < 3 else torch.tensor([[0.25, 0.75]])

    found = along(ensemble, rows, num_new=6, method="gac", weights=weights)
    assert seen == [(n, n) for n in range(6)]
    assert found.num_forwards == (6, 3)
    parts = [
        along(ensemble, rows, num_new=6, method="gac", weights=fixed) for fixed in (only(ensemble, 0), [0.25, 0.75])
    ]
    for step, logits in enumerate(found.logits):
        expected = parts[step >= 3].logits[step].exp()
        torch.testing.assert_close(logits.exp(), expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (0.5, "one entry per member, but is 0.5"),
        ([[1, 1], [1, 2]], "one row per prompt: got 2 rows for 3 prompts"),
        (torch.ones(3, 3), "one entry per member: got 3 for 2 members"),
        ([[1, 1], [1, -1], [1, 1]], "at least 0, but are \\[1.0, -1.0\\]"),
        (lambda step, ids: [1, math.nan], "finite.*at step 1"),
        (lambda step, ids: [1, 1, 1], "got 3 for 2 members.*at step 1"),
        (lambda step, ids: None, "the function gave None"),
        ([[1, 0]] * 5, "one row per prompt: got 5 rows for 3 prompts"),
        ([[0.5, 0.5], 0.5], "one number per member"),
        ([None, 1], "one number per member"),
        ("11", "one number per member"),
        ({0: 1, 1: 1}, "one number per member"),
        (torch.ones(1, 3, 2), "one number per member"),
    ],
)
def test_bad_weights_are_refused(weights, message):
    ensemble = CORE_RECIPES[0].ensemble
    with pytest.raises(ConfigurationError, match=message):
        run(ensemble, batch_of(ensemble), weights=weights)


@pytest.mark.parametrize("weights", [[[0.5, 0.5], [1, 0]], lambda step, ids: [1, 1]])
def test_an_ensemble_keeps_one_list_of_weights_only(weights, tmp_path):
    members = CORE_RECIPES[0].ensemble
    with pytest.raises(ConfigurationError, match="Only `generate` takes"):
        make_ensemble(list(members.members), members.tokenizers, weights=weights)
    ensemble = make_ensemble(list(members.members), members.tokenizers)
    for item in ensemble.config.members:
        item.path = "somewhere/model"
    ensemble.config.weights = weights
    with pytest.raises(ConfigurationError, match="Only `generate` takes"):
        ensemble.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_the_plain_processor_takes_weights_by_row_with_several_sequences():
    ensemble = CORE_RECIPES[0].ensemble
    processor = EnsembleLogitsProcessor(list(ensemble.members), ensemble.tokenizers, method="gac", weights=ROW_WEIGHTS)
    options = {"num_return_sequences": 2, "do_sample": True, "max_new_tokens": 1, "output_scores": True}
    found = run(ensemble.members[0], batch_of(ensemble), logits_processor=[processor], **options).scores[0]
    assert torch.equal(found[0::2], found[1::2])
    assert not torch.equal(found[0], found[2])


def test_spans_take_no_weights_by_row():
    ensemble = CORE_RECIPES[0].ensemble
    with pytest.raises(ConfigurationError, match="'sweetspan' does not mix by weights"):
        run(ensemble, batch_of(ensemble), method="sweetspan", weights=ROW_WEIGHTS)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GacConfig(threshold=1.5), "`threshold` has to be a probability.*1.5"),
        (lambda: UniteConfig(threshold=-0.1), "`threshold` has to be a probability.*-0.1"),
        (lambda: UniteConfig(threshold=True), "`threshold` has to be a probability.*True"),
        (lambda: GacConfig(threshold=0.5, gate=-1), "`gate` has to be the number of a member.*-1"),
        (lambda: GacConfig(gate=1), "`gate` is 1, but has no effect without a `threshold`"),
        (lambda: GacConfig(space="cubic"), "`space` has to be 'linear' or 'log', but is 'cubic'"),
        (lambda: GacConfig(alpha=0.1), "`alpha` is 0.1, but has no effect without"),
        (lambda: GacConfig(space="log", alpha=2), "`alpha` has to be a number from 0 to 1.*2"),
        (lambda: GacConfig(strategy="dice"), "`strategy` has to be 'mixture_sampling'.*'dice'"),
        (lambda: GacConfig(strategy="mixture_sampling", threshold=0.5), "cannot be combined with a `threshold`"),
        (lambda: GacConfig(strategy="mixture_sampling", space="log"), 'cannot be combined with `space="log"`'),
    ],
)
def test_bad_options_are_refused(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_a_gate_that_is_no_member_is_refused_before_anything_runs():
    ensemble = CORE_RECIPES[0].ensemble
    method = GacConfig(threshold=0.5, gate=2)
    with pytest.raises(ConfigurationError, match="`gate` is 2, but the ensemble's members are numbered from 0 to 1"):
        run(ensemble, prompt_rows(ensemble)[:1], method=method)
    with pytest.raises(ConfigurationError, match="`gate` is 2"):
        EnsembleLogitsProcessor(list(ensemble.members), ensemble.tokenizers, method=method)
    with pytest.raises(ConfigurationError, match="`gate` is 2"):
        make_ensemble(list(ensemble.members), ensemble.tokenizers, method=method)
