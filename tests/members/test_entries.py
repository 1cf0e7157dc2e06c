"""Members that send few entries: the ensemble is that of the same members with whole rows."""

import pytest
import torch
from transformers import TemperatureLogitsWarper

from hf_ensemble import (
    ConfigurationError,
    EnsembleForCausalLM,
    GacConfig,
    MemberError,
    UniteConfig,
    packllm_weights,
)
from hf_ensemble.members.entries import Entries
from hf_ensemble.methods.base import TokenMethod
from hf_ensemble.offers import ALL_OFFERS, Offer
from tests import tiny
from tests.contracts import changed_logits, padded
from tests.far_members import FarMember, far_ensemble

pytestmark = pytest.mark.filterwarnings("ignore:the primary .* wrote the control token")

slow = pytest.mark.slow

PROMPTS = ["The capital of France is", "The cat", "Once upon a time there was a king"]
TOKENIZERS = {
    "smol+gemma": (tiny.smol_like, tiny.gemma_like),
    "gemma+smol": (tiny.gemma_like, tiny.smol_like),
    "smol+odd": (tiny.smol_like, tiny.odd_added_bpe),
    "unigram+smol": (tiny.unigram, tiny.smol_like),
}
CALLS = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 0.9, "top_k": 0},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "penalty": {"repetition_penalty": 1.3},
    "must go on": {"min_new_tokens": 6},
    "scores": {"return_dict_in_generate": True, "output_scores": True, "output_logits": True},
    "decisions": {"return_dict_in_generate": True, "output_decisions": True},
    "drafts": {"speculation": "member 1"},
    "gate": {"method": UniteConfig(threshold=0.02, gate=1)},
    "gac": {"method": "gac"},
    "deepen": {"method": "deepen"},
    "spans": {"method": "sweetspan"},
    "vote": {"method": "vote"},
    "rerank": {"method": "rerank", "seed": 3},
    "primary alone": {"weights": [1, 0], "num_return_sequences": 2, "do_sample": True},
    "assistant alone": {"weights": [0, 1]},
    "weights by step": {"weights": lambda step, ids: [0.3, 0.7] if step % 2 else [0.6, 0.4]},
}

QUICK = ("greedy", "beams", "scores")


def both(names, far, **options):
    tokenizers = [make() for make in TOKENIZERS[names]]
    models = [tiny.tiny_llama(tokenizers[0], seed=1), tiny.tiny_gemma3(tokenizers[1], seed=2)]
    return EnsembleForCausalLM.from_members(models, tokenizers, **options), far_ensemble(
        models, tokenizers, far, **{"method": "unite", **options}
    )


def run(ensemble, options):
    inputs = ensemble.tokenizer(PROMPTS, return_tensors="pt", padding=True, return_token_type_ids=False)
    torch.manual_seed(0)
    return ensemble.generate(**inputs, **{"max_new_tokens": 10, "do_sample": False, **options})


@pytest.mark.parametrize(
    "far",
    [
        pytest.param((1,), id="assistant", marks=slow),
        pytest.param((0,), id="primary", marks=slow),
        pytest.param((0, 1), id="both"),
    ],
)
@pytest.mark.parametrize("call", [pytest.param(one, marks=() if one in QUICK else slow) for one in CALLS])
def test_texts_are_those_of_whole_rows(call, far):
    local, ensemble = both("smol+gemma", far)
    if call == "drafts":
        local.member_views[1].name = "member 1"
    if call == "vote":
        # Candidates carry the members' names, on which seeds depend.
        for n, view in enumerate(local.member_views):
            view.name = f"member {n}"
    expected, found = run(local, CALLS[call]), run(ensemble, CALLS[call])
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
        return
    assert torch.equal(found.sequences, expected.sequences)
    for name in ("scores", "logits"):
        for a, b in zip(found.get(name) or (), expected.get(name) or (), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    if "decisions" in expected:
        texts = [[decision.text for decision in row] for row in expected.decisions]
        assert [[decision.text for decision in row] for row in found.decisions] == texts


@pytest.mark.parametrize("names", TOKENIZERS)
@pytest.mark.parametrize("top_k", [1, pytest.param(3, marks=slow), pytest.param(400, marks=slow)])
def test_all_kinds_of_tokenizers_and_depths(names, top_k):
    local, ensemble = both(names, (0, 1), method=UniteConfig(top_k=top_k))
    options = {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 6}
    expected, found = run(local, options), run(ensemble, options)
    assert torch.equal(found.sequences, expected.sequences)
    new = expected.sequences[:, -len(expected.logits) :]
    goes_on = (new != ensemble.generation_config.eos_token_id[0]).cumprod(-1).bool()
    for step, (a, b) in enumerate(zip(found.logits, expected.logits, strict=True)):
        is_live = goes_on[:, step - 1] if step else [True] * len(a)
        torch.testing.assert_close(a[is_live], b[is_live], rtol=1e-5, atol=1e-5)


def test_few_ids_travel_in_two_requests_at_most():
    _, ensemble = both("smol+gemma", (0, 1))
    run(ensemble, {})
    for member in ensemble.member_views:
        assert isinstance(member, FarMember)
        assert max(member.num_requests) == 2
        assert 10 <= max(member.num_ids_sent) <= 40
    assert len(ensemble.member_views[0].num_requests) == 10


def test_one_request_where_the_first_answer_holds_all():
    tokenizer = tiny.smol_like()
    model = tiny.tiny_llama(tokenizer)
    ensemble = far_ensemble([model, model], [tokenizer, tokenizer], (1,), method="unite")
    run(ensemble, {})
    # Later the primary's own ids differ from what a text is encoded as again.
    assert ensemble.member_views[1].num_requests[0] == 1


def test_without_a_normalizer_processors_see_that_of_the_others(monkeypatch):
    _, ensemble = both("smol+gemma", (1,), weights=[0.3, 0.7])
    monkeypatch.setattr(FarMember, "knows_normalizer", False)
    seen = []

    def keep(input_ids, scores):
        seen.append(scores.clone())
        return scores

    options = {"max_new_tokens": 1, "return_dict_in_generate": True, "output_logits": True}

    # A processor asks for whole rows, a warper does not: what it sees has the level of the one who knows it.
    class Seen(TemperatureLogitsWarper):
        def __init__(self):
            super().__init__(1.0)

        def __call__(self, input_ids, scores):
            return keep(input_ids, scores)

    Seen.__name__ = "TemperatureLogitsWarper"
    output = run(ensemble, {**options, "logits_processor": [Seen()]})
    primary = ensemble.member_views[0].model
    inputs = ensemble.tokenizer(PROMPTS, return_tensors="pt", padding=True, return_token_type_ids=False)
    level = primary(**inputs).logits[:, -1].logsumexp(-1, keepdim=True)
    best = output.logits[0].argmax(-1, keepdim=True)
    torch.testing.assert_close(seen[0].gather(1, best), output.logits[0].gather(1, best) + level)


def test_a_step_started_ahead_does_not_count_for_a_later_one():
    """The member cannot read the first byte of "é", so the step that was started after it is not used."""
    tokenizers = [tiny.smol_like(), tiny.unigram(byte_fallback=False)]
    models = [tiny.tiny_llama(tokenizers[0], seed=1), tiny.tiny_gemma3(tokenizers[1], seed=2)]
    ids = tokenizers[0].convert_tokens_to_ids(["a", "Ã", "©", "c", "c"])

    def logits(far):
        ensemble = far_ensemble(models, tokenizers, far, method="unite")
        steps = iter(ids)

        def raised(logits):
            return logits + 50.0 * torch.nn.functional.one_hot(torch.tensor(next(steps)), logits.shape[-1])

        options = {"max_new_tokens": len(ids), "return_dict_in_generate": True, "output_logits": True}
        inputs = ensemble.tokenizer("The cat", return_tensors="pt")
        with (
            changed_logits(models[0], raised),
            pytest.warns(UserWarning, match="'member 1' does not read the text exactly"),
        ):
            output = ensemble.generate(**inputs, **options, do_sample=False)
        assert output.sequences[0, -len(ids) :].tolist() == ids
        return output.logits

    for found, expected in zip(logits((1,)), logits(()), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_far_member_that_gives_nan_is_named(value, monkeypatch):
    _, ensemble = both("smol+gemma", (1,))
    broken = changed_logits(ensemble.members[1], lambda logits: torch.full_like(logits, value))
    with broken, pytest.raises(MemberError, match="member 1"):
        run(ensemble, {})


@pytest.mark.parametrize(
    ("missing", "options", "message"),
    [
        (
            Offer.ROWS,
            {"method": "gac"},
            r"method 'gac' asks member 'member 1' for whole rows of logits.*far away.*unite",
        ),
        (Offer.EMBEDDINGS, {"method": "deepen"}, "method 'deepen' asks member 'member 1' for its embeddings"),
        (Offer.SPANS, {"method": "sweetspan"}, "method 'sweetspan' asks member 'member 1' for spans"),
        (Offer.ANSWERS, {"method": "vote"}, "method 'vote' asks member 'member 1' for whole answers"),
        (Offer.LIKELIHOODS, {"method": "rerank"}, "method 'rerank' asks member 'member 1' for the likelihood"),
        (
            Offer.GATE,
            {"method": GacConfig(threshold=0.5, gate=1)},
            "method 'gac' asks member 'member 1' for a decision",
        ),
        (Offer.DRAFTS, {"speculation": "ngram"}, "`speculation='ngram'` cannot be used with member 'member 1'"),
    ],
    ids=lambda value: value.name if isinstance(value, Offer) else "",
)
def test_what_a_member_cannot_give_is_refused(missing, options, message, monkeypatch):
    _, ensemble = both("smol+gemma", (1,))
    monkeypatch.setattr(FarMember, "offers", ALL_OFFERS - {missing})
    with pytest.raises(ConfigurationError, match=message):
        run(ensemble, options)
    run(ensemble, {"max_new_tokens": 1})  # nothing else is in the way


def test_a_primary_and_a_score_and_a_prompt_loss_are_refused_likewise(monkeypatch):
    _, ensemble = both("smol+gemma", (0,))
    monkeypatch.setattr(FarMember, "offers", ALL_OFFERS - {Offer.ROWS, Offer.PROMPT_LOSS})
    with pytest.raises(ConfigurationError, match="`score` with method 'unite' asks member 'member 0' for whole rows"):
        ensemble.score(["The"], [" cat"])
    with pytest.raises(ConfigurationError, match="`packllm_weights` asks member 'member 0' for how well"):
        packllm_weights(ensemble, torch.tensor([[3, 4]]))
    monkeypatch.setattr(FarMember, "offers", ALL_OFFERS - {Offer.PRIMARY})
    with pytest.raises(ConfigurationError, match="Put another member first"):
        run(ensemble, {})


@pytest.mark.parametrize(
    "options",
    [
        {"output_attentions": True, "return_dict_in_generate": True},
        {"output_hidden_states": True, "return_dict_in_generate": True},
        {"cache_implementation": "static"},
        {"prefill_chunk_size": 2},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_only_a_primary_of_this_process_gives_is_refused(options):
    _, ensemble = both("smol+gemma", (0,))
    name = next(iter(options))
    with pytest.raises(ConfigurationError, match=f"`{name}.*the primary 'member 0', which is a member far away"):
        run(ensemble, options)


def test_entries_stand_at_their_ids():
    entries = Entries(torch.tensor([[2, -1], [0, 3]]), torch.tensor([[1.5, -torch.inf], [0.5, -2.0]]))
    expected = torch.tensor([[-torch.inf, -torch.inf, 1.5, -torch.inf], [0.5, -torch.inf, -torch.inf, -2.0]])
    assert torch.equal(entries.spread(4), expected)
    more = entries.beside(Entries(torch.tensor([[0], [-1]]), torch.tensor([[3.0], [-torch.inf]])))
    assert more.spread(4)[0].tolist() == [3.0, -torch.inf, 1.5, -torch.inf]
    assert torch.equal(more.spread(4)[1], expected[1])


def test_methods_that_read_whole_rows_ask_for_no_entries():
    assert TokenMethod.num_entries is None


def test_rows_that_wait_are_no_padding():
    """A row whose weight is on another member waits, and catches up when it is needed."""
    local, ensemble = both("smol+gemma", (0, 1))
    weights = [[1.0, 0.0], [0.5, 0.5], [0.0, 1.0]]
    rows = [ensemble.tokenizer(text)["input_ids"] for text in PROMPTS]
    inputs = padded(rows, fill=lambda n: 0)
    options = {"max_new_tokens": 8, "do_sample": False, "weights": weights}
    assert torch.equal(ensemble.generate(**inputs, **options), local.generate(**inputs, **options))
