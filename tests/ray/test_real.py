"""The two real models in an actor each, on two nodes: the texts of the same models in this process."""

import pytest
import torch

from examples.demo_models import demo_model_paths
from hf_ensemble import DeepenConfig, EnsembleForCausalLM, MemberConfig, RerankConfig, UniteConfig, packllm_weights
from tests.contracts import assert_same_choices
from tests.ray.conftest import FAR, NEAR, traffic_of

pytestmark = pytest.mark.real

PROMPTS = ["The capital of France is", "Water boils at 100 degrees; ice melts", "Die Hauptstadt von"]
NUM_NEW = 4


@pytest.fixture(scope="module")
def pair(cluster):
    """The two ensembles, in float32."""
    paths = list(map(str, demo_model_paths()))
    items = [MemberConfig(path=path, ray=ray) for path, ray in zip(paths, (NEAR, FAR), strict=True)]
    with EnsembleForCausalLM.from_pretrained(items, dtype="float32") as there:
        yield EnsembleForCausalLM.from_pretrained(paths, dtype="float32"), there


@pytest.mark.parametrize(
    "options",
    [
        {"method": "unite"},
        {"method": "gac"},
        {"method": "mined"},
        {"method": "eva"},
        {"method": DeepenConfig(num_anchors=500, support=64)},
        {"method": "sweetspan"},
        {"method": "sweetspan", "do_sample": True},
        {"method": "vote"},
        {"method": RerankConfig(num_candidates=2), "do_sample": True, "seed": 1},
        {"method": UniteConfig(threshold=0.5, gate=1)},
        {"method": "unite", "do_sample": True, "top_k": 0},
        {"method": "gac", "do_sample": True},
        {"method": "unite", "num_beams": 2},
        {"method": "unite", "speculation": "ngram"},
        {"method": "gac", "speculation": "SmolLM2-135M-Instruct"},
    ],
    ids=str,
)
def test_texts_are_those_of_one_process(options, pair):
    here, there = pair
    inputs = here.tokenizer(PROMPTS, padding=True, return_tensors="pt")
    texts = options["method"] in ("sweetspan", "vote") or isinstance(options["method"], RerankConfig)
    asked = {} if texts else {"output_logits": True}
    asked |= {"max_new_tokens": NUM_NEW, "eos_token_id": [], "pad_token_id": 0, "return_dict_in_generate": True}
    found = []
    for ensemble in (here, there):
        torch.manual_seed(0)
        found.append(ensemble.generate(**inputs, **asked, **{"do_sample": False, **options}))
    start, expected = inputs.input_ids.shape[1], found[0]
    for row, ids in enumerate(found[1].sequences):
        logits = None if texts or "num_beams" in options else [step[row] for step in expected.logits]
        assert_same_choices(ids[start:].tolist(), expected.sequences[row, start:].tolist(), logits)


def test_weights_by_prompts_and_scores_are_those_of_one_process(pair):
    inputs = pair[0].tokenizer(PROMPTS, padding=True, return_tensors="pt")
    expected, found = (packllm_weights(ensemble, **inputs) for ensemble in pair)
    torch.testing.assert_close(found, expected)
    for method in ("unite", "sweetspan"):
        expected, found = (one.score(PROMPTS[:2], [" Paris", " at 0"], method=method).log_probs for one in pair)
        torch.testing.assert_close(found, expected)


def test_unite_sends_and_gets_at_most_four_kibibytes_of_a_row_a_step(pair):
    """Of vocabularies of 49,152 and 262,144 ids; the prompt's ids, which travel once, are in the first step."""
    there = pair[1]
    inputs = there.tokenizer(PROMPTS, padding=True, return_tensors="pt")
    of_rows = [(sent + received) / 12 / len(PROMPTS) for sent, received, _ in traffic_of(there, inputs, (1, 13))]
    print(of_rows)
    assert all(32 < count <= 4096 for count in of_rows)
