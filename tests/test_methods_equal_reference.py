"""Every other token-level method, gates, log space and weights by row against the plain references, on tiny members."""

import pytest

from hf_ensemble import (
    DeepenConfig,
    EnsembleForCausalLM,
    EvaConfig,
    GacConfig,
    MinedConfig,
    UniteConfig,
    packllm_weights,
)
from tests.following import follow_reference
from tests.reference import Reference, ReferenceMember
from tests.reference_alignment import ReferenceEva, ReferenceMined
from tests.reference_deepen import ReferenceDeepen
from tests.reference_weights import PackllmWeights
from tests.test_equals_reference import ENSEMBLES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:the primary .* wrote the control token"),
    pytest.mark.filterwarnings("ignore:reduction. 'mean' divides"),  # what the published code does
]

PROMPTS = ("The capital of France is", "สวัสดีครับ, 你好", "def f(x):\n\treturn x  + 1\n")
NUM_NEW = 5
THRESHOLD = 0.2
"""Of the tiny members, some are surer than this at some steps."""

_built: dict = {}


def members_of(name):
    if name not in _built:
        pairs = [make() for make in ENSEMBLES[name]]
        ensemble = EnsembleForCausalLM.from_members(*zip(*pairs, strict=True))
        _built[name] = ensemble, [ReferenceMember(model, tokenizer) for model, tokenizer in pairs]
    return _built[name]


def compare(name, reference, tolerance=1e-4, num_steps=NUM_NEW, **options):
    """Distributions, row by row in one batch, along the reference's own greedy texts, and the texts."""
    ensemble, _ = members_of(name)
    batch = ensemble.tokenizer(list(PROMPTS), return_tensors="pt", padding=True)
    output = ensemble.generate(
        **batch, max_new_tokens=num_steps, do_sample=False, return_dict_in_generate=True, output_logits=True, **options
    )
    length = batch.input_ids.shape[1]
    num_closed = 0
    for row, (ids, mask) in enumerate(zip(batch.input_ids.tolist(), batch.attention_mask.tolist(), strict=True)):
        prompt = [i for i, keep in zip(ids, mask, strict=True) if keep]
        found = output.sequences[row, length:].tolist()
        logits = [step[row] for step in output.logits]
        steps = follow_reference(reference, prompt, found, logits, num_steps, tolerance, margin=1e-3)
        num_closed += sum(step.is_closed for step in steps)
    return num_closed


@pytest.mark.parametrize("name", ["two", "three"])
@pytest.mark.parametrize(
    "options", [{}, {"weights": [1.5, -0.5]}, {"alpha": 0.3}, {"weights": [0, 1], "alpha": 0.2}], ids=str
)
def test_log_space(name, options):
    _, members = members_of(name)
    weights = options.get("weights")
    if weights is not None and name == "three":
        weights = [*weights, 0.25]
    alpha = options.get("alpha")
    reference = Reference(members, "gac", weights, space="log", alpha=alpha)
    compare(name, reference, method=GacConfig(space="log", alpha=alpha), weights=weights)


@pytest.mark.parametrize("name", ["two", "three"])
@pytest.mark.parametrize("gate", [0, 1])
@pytest.mark.parametrize(("method", "config"), [("gac", GacConfig), ("unite", UniteConfig)])
def test_gates(name, gate, method, config):
    _, members = members_of(name)
    reference = Reference(members, method, threshold=THRESHOLD, gate=gate)
    compare(name, reference, method=config(threshold=THRESHOLD, gate=gate))


def test_some_gates_are_closed_there_and_some_open():
    _, members = members_of("three")
    closed = [
        compare("three", Reference(members, "gac", threshold=t, gate=1), method=GacConfig(threshold=t, gate=1))
        for t in (0.0, THRESHOLD, 1.0)
    ]
    assert closed[0] > closed[1] > closed[2] == 0


def test_weights_by_step():
    _, members = members_of("two")

    def by_state(reference, state):
        return [1, len(state.primary_ids) - state.prompt_length]

    compare("two", Reference(members, "unite", by_state), method="unite", weights=lambda step, ids: [1, step])


@pytest.mark.parametrize("method", ["gac", "unite"])
def test_packllm_weights(method):
    ensemble, members = members_of("three_primary_unigram")
    batch = ensemble.tokenizer(list(PROMPTS), return_tensors="pt", padding=True)
    weights = packllm_weights(ensemble, **batch, temperature=0.5)
    compare("three_primary_unigram", Reference(members, method, PackllmWeights(0.5)), method=method, weights=weights)


DEEPEN = {
    "released": {},
    "paper": {"variant": "paper"},
    "drawn": {"num_anchors": 40, "anchor_seed": 3, "learning_rate": 0.3, "num_steps": 7},
    "agreement": {"skip_on_agreement": True},
    "support": {"support": 16},
}


@pytest.mark.parametrize("name", ["two", "three"])
@pytest.mark.parametrize("options", DEEPEN.values(), ids=DEEPEN)
def test_deepen(name, options):
    _, members = members_of(name)
    options = {"support": None, **options}
    compare(name, ReferenceDeepen(members, **options), num_steps=3, method=DeepenConfig(**options))


@pytest.mark.parametrize("name", ["two", "three", "wordpiece_assistant"])
def test_mined(name):
    _, members = members_of(name)
    compare(name, ReferenceMined(members), tolerance=1e-5, method=MinedConfig())


@pytest.mark.parametrize("name", ["two", "three", "three_primary_unigram"])
@pytest.mark.parametrize(
    "options", [{}, {"neighbours": 3, "min_similarity": 0.02, "top_k": 20, "filter_top_k": 2}], ids=["default", "few"]
)
def test_eva(name, options):
    _, members = members_of(name)
    compare(name, ReferenceEva(members, **options), tolerance=1e-5, method=EvaConfig(**options))
