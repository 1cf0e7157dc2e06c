"""Encoder-decoder members beside SmolLM2: what they write together is what the plain reference writes."""

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.demo_models import demo_model_paths
from hf_ensemble import EnsembleForCausalLM, MemberConfig
from tests.reference import Reference, ReferenceMember
from tests.reference_encoder_decoder import ReferenceEncoderDecoder
from tests.tiny_encoder_decoders import nllb_like, t5_like, tiny_nllb, tiny_t5

pytestmark = [pytest.mark.real, pytest.mark.slow]

PROMPTS = ("Translate into German: The king had three daughters.\n", "The capital of France is")
SOURCES = ("The king had three daughters.", "The train from London to Paris takes about two hours.")
NUM_NEW = 5


def test_batches_beside_smollm2_equal_the_reference():
    folder = demo_model_paths()[0]
    smol, nllb, t5 = AutoTokenizer.from_pretrained(folder), nllb_like(), t5_like()
    models = [
        AutoModelForCausalLM.from_pretrained(folder, dtype="float32"),
        tiny_nllb(nllb, seed=2),
        tiny_t5(t5, seed=3),
    ]
    members = [
        ReferenceMember(models[0], smol),
        ReferenceEncoderDecoder(models[1], nllb, "deu_Latn"),
        ReferenceEncoderDecoder(models[2], t5),
    ]
    names = [MemberConfig(name=name) for name in ("smol", "nllb", "t5")]
    ensemble = EnsembleForCausalLM.from_members(models, [smol, nllb, t5], member_configs=names)
    weights = [0.6, 0.2, 0.2]  # the specialists have learned nothing
    batch = ensemble.tokenizer(list(PROMPTS), return_tensors="pt", padding=True)
    own = [None, list(SOURCES), list(SOURCES)]
    for method in ("unite", "gac"):
        options = {"method": method, "weights": weights, "max_new_tokens": NUM_NEW, "do_sample": False}
        found = ensemble.generate(**batch, member_prompts=own, **options)[:, batch.input_ids.shape[1] :].tolist()
        assert found[0] != found[1]
        for row, source in enumerate(SOURCES):
            for member in members[1:]:
                member.source = source
            reference = Reference(members, method, weights=weights)
            expected, margins = reference.greedy(smol(PROMPTS[row])["input_ids"], NUM_NEW)
            assert min(margins) > 1e-4
            assert found[row] == expected
