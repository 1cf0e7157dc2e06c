"""Bug-bank cases that need the real pair: SmolLM2-135M-Instruct and Gemma-3-270M. The others are in `bug_bank/`."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_ensemble import EnsembleForCausalLM, MemberConfig, MemberError, UnionVocabulary

pytestmark = [pytest.mark.real, pytest.mark.filterwarnings("ignore:the primary .* wrote the control token")]
each_method = pytest.mark.parametrize("method", ["gac", "unite"])
NAMES = ("smol", "gemma")
THAI, HEBREW = "เมืองหลวงของประเทศไทยคือ", "עיר הבירה של ישראל היא"


def ensemble_of(models, tokenizers, order=(0, 1)):
    return EnsembleForCausalLM.from_members(
        [models[n] for n in order],
        [tokenizers[n] for n in order],
        member_configs=[MemberConfig(name=NAMES[n]) for n in order],
    )


def text_of(ensemble, prompt, **options):
    inputs = ensemble.tokenizer(prompt, return_tensors="pt")
    ids = ensemble.generate(**inputs, **{"max_new_tokens": 5, "do_sample": False, **options})[0]
    return ensemble.tokenizer.decode(ids, skip_special_tokens=True)


@each_method
def test_gemma_gets_one_start_token_and_smollm2_none(ensemble, method):
    """A6: At the start only, at every step."""
    seen = [[], []]
    handles = [
        model.register_forward_pre_hook(
            lambda module, args, kwargs, ids=seen[n]: ids.extend(kwargs["input_ids"].flatten().tolist()),
            with_kwargs=True,
        )
        for n, model in enumerate(ensemble.members)
    ]
    try:
        text_of(ensemble, "The capital of France is", method=method)
        seen[1].clear()
        text_of(ensemble, "The capital of France is", method=method)
    finally:
        for handle in handles:
            handle.remove()
    assert seen[1][0] == 2
    assert 2 not in seen[1][1:]
    assert 1 not in seen[0]


def test_every_token_of_the_pair_has_a_key_of_its_own(ensemble, tokenizers):
    """A13: No two entries that only look alike when decoded by themselves are one."""
    union = ensemble.union_vocabulary
    assert isinstance(union, UnionVocabulary)
    vocab = tokenizers[0].get_vocab()
    e0b8, e0b9 = (union.member_to_union[0][vocab[spelled]] for spelled in ("à¸", "à¹"))
    assert (union.entry(e0b8), union.entry(e0b9)) == (b"\xe0\xb8", b"\xe0\xb9")
    beyond = [union.entry(u) for u in range(union.primary_size, len(union))]
    assert len(set(beyond)) == len(beyond)


@pytest.mark.parametrize(
    ("order", "prompt", "method"),
    [((0, 1), THAI, "unite"), ((0, 1), HEBREW, "gac"), ((1, 0), THAI, "gac"), ((1, 0), HEBREW, "unite")],
    ids=["smol first, thai, unite", "smol first, hebrew, gac", "gemma first, thai, gac", "gemma first, hebrew, unite"],
)
def test_scripts_in_pieces_come_out_whole(made, method, prompt, order):
    """A13: Nothing but the last, unfinished character is broken."""
    text = text_of(made(*order), prompt, method=method)
    assert text.startswith(prompt)
    assert "\ufffd" not in text.rstrip("\ufffd")


@each_method
def test_three_unequal_prompts_are_what_they_are_alone(ensemble, tokenizers, method):
    """B1: Padded on the right, as SmolLM2's tokenizer does by default."""
    prompts = ["The capital of France is", "1, 2, 3, 4,", "Once upon a time there was a king who"]
    alone = [text_of(ensemble, prompt, method=method) for prompt in prompts]
    assert tokenizers[0].padding_side == "right"
    batch = tokenizers[0](prompts, return_tensors="pt", padding=True)
    with pytest.warns(UserWarning, match="padded on the right"):
        ids = ensemble.generate(**batch, max_new_tokens=5, do_sample=False, method=method)
    assert tokenizers[0].batch_decode(ids, skip_special_tokens=True) == alone


@pytest.mark.parametrize(
    ("order", "method", "do_sample"),
    [((0, 1), "gac", False), ((1, 0), "unite", True)],
    ids=["smol first", "gemma first"],
)
def test_gemma_in_float16_is_an_error_that_names_it(demo_models, models, tokenizers, order, method, do_sample):
    """G1: It gives NaN on the CPU; the error has member, dtype and step, greedy and sampled."""
    half = AutoModelForCausalLM.from_pretrained(demo_models[1], dtype=torch.float16)
    with torch.no_grad():
        if half(**tokenizers[1]("The capital of France is", return_tensors="pt")).logits.isfinite().all():
            pytest.skip("this machine's float16 gives no NaN")
    ensemble = ensemble_of([models[0], half], tokenizers, order)
    with pytest.raises(MemberError, match=r"gemma.*step 1\b.*float16"):
        text_of(ensemble, "The capital of France is", method=method, do_sample=do_sample)


@pytest.mark.parametrize(("halved", "method"), [(0, "gac"), (1, "unite")], ids=NAMES)
def test_bfloat16_stands_beside_float32(models, tokenizers, halved, method):
    """G3: Either of them; mixed in float32, with a sum of 1."""
    mixed = list(models)
    mixed[halved] = copy.deepcopy(models[halved]).to(torch.bfloat16)
    ensemble = ensemble_of(mixed, tokenizers)
    inputs = ensemble.tokenizer("The capital of France is", return_tensors="pt")
    options = {"max_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    for logits in ensemble.generate(**inputs, method=method, **options).logits:
        assert logits.dtype == torch.float32
        assert logits.exp().sum().item() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(("member", "method"), [(0, "unite"), (1, "gac")], ids=NAMES)
def test_one_member_or_the_same_twice_is_that_model(made, models, tokenizers, method, member):
    """O1 and O2, and O3 for the first member."""
    prompt = "The answer is "
    inputs = tokenizers[member](prompt, return_tensors="pt")
    ids = models[member].generate(**inputs, max_new_tokens=5, do_sample=False)[0]
    expected = tokenizers[member].decode(ids, skip_special_tokens=True)
    assert text_of(made(member), prompt, method=method) == expected
    assert text_of(made(member, member), prompt, method=method) == expected
    assert text_of(made(member, 1 - member), prompt, method=method, weights=[1, 0]) == expected
