"""Bug bank, section G: numerics and dtypes.

| case | where |
| --- | --- |
| G1 | here; `contracts.py` (a member that gives NaN is named); Gemma in float16 in `real/test_bug_bank_real.py` |
| G3 | here; real pair in `real/test_bug_bank_real.py` |
| G4 | `methods/test_deepen.py` |
| G6 | here; `test_generate.py` (a processor that leaves nothing) |
| G7 | here for tokenizers; GGUF waits |
"""

import functools

import pytest
import torch

from hf_ensemble import (
    EnsembleForCausalLM,
    EnsembleLogitsProcessor,
    MemberConfig,
    MemberError,
    UniteConfig,
    VocabularyError,
)
from tests import tiny
from tests.contracts import CORE_RECIPES, changed_logits, make_ensemble, padded, prompt_rows, run

from .kit import (
    TOKEN_METHODS,
    control_tokens_may_be_chosen,
    each_averaging_method,
    each_token_method,
    ensemble_of,
    id_of,
    methods_by_turns,
    output_ids,
    ready,
    tokenizer_of,
)

pytestmark = control_tokens_may_be_chosen

DECODING = ({}, {"do_sample": True}, {"do_sample": True, "top_k": 3, "top_p": 0.5}, {"num_beams": 2})
DECODING += ({"num_beams": 2, "do_sample": True}, {"repetition_penalty": 1.2}, {"use_cache": False})
each_way = pytest.mark.parametrize("options", DECODING, ids=str)
# What is not a number is found in a member's logits, before any method sees them.
by_turns = functools.partial(methods_by_turns, TOKEN_METHODS)


# --- G1 -------------------------------------------------------------------------------------------------------------


def broken(index, step, value=torch.nan, dtype=torch.float16):
    """Two scripted members, one of which gives something else than numbers from a step on, and its dtype."""
    tokenizers = [tokenizer_of("small"), tokenizer_of("large")]
    scripts = []
    for n, tokenizer in enumerate(tokenizers):
        good = tiny.ScriptedModel(tokenizer, [{id_of(tokenizer, text): 0.5 for text in "ab"}]).row((0,))
        bad = good.clone()
        bad[len(bad) // 2] = value
        start = id_of(tokenizer, "a")
        # Not where a member only tries out its cache, with other ids.
        breaks = n == index
        scripts.append(
            lambda context, good=good, bad=bad, start=start, breaks=breaks: (
                bad if breaks and context[0] == start and len(context) >= step else good
            )
        )
    models = [tiny.ScriptedModel(t, script) for t, script in zip(tokenizers, scripts, strict=True)]
    ensemble = make_ensemble(models, tokenizers)
    models[index].to(dtype)
    return ensemble


@by_turns(options=DECODING, index=(0, 1))
def test_a_member_that_gives_nan_is_named_with_its_dtype_and_step(method, options, index):
    """G1: In every way of decoding; never text from NaN, never a bare error about probabilities."""
    ensemble = broken(index, step=3)
    torch.manual_seed(0)
    with pytest.raises(MemberError, match=rf"member-{index}.*\b3\b.*float16|member-{index}.*float16.*\b3\b"):
        output_ids(ensemble, "a", method=method, max_new_tokens=6, **options)


@by_turns(value=(torch.nan, torch.inf), index=(0, 1), do_sample=(False, True))
def test_not_a_number_in_the_first_step_is_named(method, value, index, do_sample):
    """G1: Where the prompt itself is too much for the dtype; one column is enough."""
    ensemble = broken(index, step=1, value=value, dtype=torch.bfloat16)
    with pytest.raises(MemberError, match=rf"member-{index}.*\b1\b.*bfloat16"):
        output_ids(ensemble, "a", method=method, max_new_tokens=3, do_sample=do_sample)


@by_turns(do_sample=(False, True), index=(0, 1))
def test_beside_another_models_generate_it_is_named_too(method, do_sample, index):
    """G1: By the plain processor."""
    ensemble = broken(index, step=2)
    models = list(ensemble.members)
    models[index].name_or_path = models[index].config._name_or_path = "the/broken-one"
    processor = EnsembleLogitsProcessor(models, ensemble.tokenizers, method=method)
    ids = ensemble.tokenizer("a", return_tensors="pt")
    with pytest.raises(MemberError, match="broken-one.*float16"):
        models[0].generate(**ids, logits_processor=[processor], max_new_tokens=4, do_sample=do_sample)


@each_token_method
@pytest.mark.parametrize(("do_sample", "index"), [(False, 0), (True, 1)])
def test_what_a_member_gives_for_a_row_that_has_ended_does_not_matter(method, do_sample, index):
    """G1: Rows that have ended are run on with padding; NaN there is nobody's text."""
    small = tokenizer_of("small")
    a, b, end = id_of(small, "a"), id_of(small, "b"), small.eos_token_id

    def script(context):
        if context[0] != b:
            return {a: 1.0}
        return {end: 1.0} if len(context) == 2 else {a: 1.0}

    def breaks(context):
        row = torch.full((tiny.rows_of(small),), -40.0)
        row[list(script(context))] = 0.0
        return row * torch.nan if context[0] == b and len(context) > 2 else row

    scripts = [script, script]
    scripts[index] = breaks
    ensemble = ready(make_ensemble([tiny.ScriptedModel(small, one) for one in scripts], [small] * 2, method=method))
    output = ensemble.generate(torch.tensor([[b], [a]]), max_new_tokens=5, do_sample=do_sample, top_k=0)
    pad = small.pad_token_id
    assert output.tolist() == [[b, a, end, pad, pad, pad], [a] * 6]


@each_token_method
def test_a_member_whose_logits_are_all_ruled_out_is_named(method):
    """G1: Nothing but -inf is no distribution either."""
    for index in (0, 1):
        ensemble = broken(index, step=1, dtype=torch.float32)
        with (
            changed_logits(ensemble.members[index], lambda logits: torch.full_like(logits, -torch.inf)),
            pytest.raises(MemberError, match=f"member-{index}"),
        ):
            output_ids(ensemble, "a", method=method, max_new_tokens=2)


# --- G3 -------------------------------------------------------------------------------------------------------------


@functools.cache
def ensemble_of_dtypes(dtypes):
    tokenizers = [tokenizer_of("smol"), tokenizer_of("gemma")]
    models = [
        tiny.tiny_llama(t, seed=seed).to(getattr(torch, dtype))
        for seed, (t, dtype) in enumerate(zip(tokenizers, dtypes, strict=True))
    ]
    return make_ensemble(models, tokenizers)


@functools.cache
def ensembles_in_every_order():
    """Of one primary and three assistants."""
    names = ("gemma", "unigram", "large")
    models = [tiny.tiny_llama(tokenizer_of(name), seed=n, num_hidden_layers=1) for n, name in enumerate(names)]
    models[1].to(torch.bfloat16)
    primary, smol = tiny.tiny_llama(tokenizer_of("smol"), seed=9), tokenizer_of("smol")
    return [
        make_ensemble([primary, *(models[n] for n in order)], [smol, *(tokenizer_of(names[n]) for n in order)])
        for order in ((0, 1, 2), (1, 2, 0), (2, 0, 1))
    ]


@pytest.mark.crossed
@each_token_method
@pytest.mark.parametrize(
    "dtypes", [("bfloat16", "float32"), ("float32", "bfloat16"), ("float16", "bfloat16")], ids=" + ".join
)
def test_members_of_unlike_dtypes_are_mixed_in_float32(method, dtypes):
    """G3: The mixture sums to 1 within 1e-5, in a batch, and is what the members' rounded logits say."""
    ensemble = ensemble_of_dtypes(dtypes)
    rows = padded(prompt_rows(ensemble), fill=lambda n: 2)
    output = run(ensemble, rows, method=method, max_new_tokens=3, eos_token_id=None)
    for logits in output.logits:
        assert logits.dtype == torch.float32
        assert logits.exp().sum(-1).tolist() == pytest.approx([1] * 3, abs=1e-5)
    assert [str(model.dtype).removeprefix("torch.") for model in ensemble.members] == list(dtypes)


@each_token_method
def test_the_order_of_equally_weighted_assistants_does_not_matter(method):
    """G3: Distributions over the primary's ids, and the text, for three assistants that each stand everywhere."""
    expected = None
    for ensemble in ensembles_in_every_order():
        output = run(ensemble, prompt_rows(ensemble)[:1], method=method, max_new_tokens=3)
        expected = expected or output
        assert output.sequences.tolist() == expected.sequences.tolist()
        for a, b in zip(output.logits, expected.logits, strict=True):
            torch.testing.assert_close(a.exp(), b.exp(), atol=1e-6, rtol=1e-4)


@each_averaging_method
def test_ties_go_to_the_lowest_of_the_primarys_ids(method):
    """G3: Documented, and the same whoever of the members proposes which."""
    small = tokenizer_of("small")
    low, high = sorted(id_of(small, text) for text in "xy")
    for scripts in (({low: 1.0}, {high: 1.0}), ({high: 1.0}, {low: 1.0}), ({low: 0.5, high: 0.5},) * 2):
        ensemble = ensemble_of(*((small, [script]) for script in scripts), method=method)
        assert output_ids(ensemble, "a", max_new_tokens=1)[0][-1] == low


# --- G6 -------------------------------------------------------------------------------------------------------------

ABC = ({"a": 0.7, "b": 0.2, "c": 0.1}, {"a": 0.6, "b": 0.3, "c": 0.1})


def abc(method, *scripts):
    small = tokenizer_of("small")
    members = [(small, [{id_of(small, text): p for text, p in script.items()}]) for script in scripts or ABC]
    return ensemble_of(*members, method=method), {text: id_of(small, text) for text in "abcde"}


@pytest.mark.parametrize("method", ["gac", "unite", UniteConfig(top_k=1), UniteConfig(top_k=2)], ids=str)
@pytest.mark.parametrize("do_sample", [False, True])
def test_banning_the_best_leaves_the_next_best(method, do_sample):
    """G6: A ban on the winner, on the only shared candidate, with a filter of one on top: no NaN."""
    ensemble, ids = abc(method)
    options = {"suppress_tokens": [ids["a"]], "do_sample": do_sample, "max_new_tokens": 2}
    options |= {"top_k": 1} if do_sample else {}
    assert output_ids(ensemble, "d", **options)[0][1:] == [ids["b"]] * 2


@pytest.mark.crossed
@each_averaging_method
@pytest.mark.parametrize("options", [{"top_p": 1e-6}, {"top_p": 0.0}, {"min_p": 1.0}, {"top_k": 1}, {"temperature": 1e-4}, {"typical_p": 1e-6}, {"epsilon_cutoff": 0.99}], ids=str)  # fmt: skip
def test_filters_at_their_limits_leave_one_candidate(method, options):
    """G6: The strictest values of every filter."""
    ensemble, ids = abc(method, {"a": 0.9, "b": 0.1}, {"a": 0.9, "b": 0.1})
    options = {"top_k": 0, "do_sample": True, "max_new_tokens": 3, **options}
    found = output_ids(ensemble, "d", **options)[0][1:]
    assert found == [ids["b" if "typical_p" in options else "a"]] * 3 or "typical_p" in options


@pytest.mark.crossed
@pytest.mark.parametrize("method", ["gac", UniteConfig(top_k=1)], ids=str)
@pytest.mark.parametrize("way", ["prefix function", "processor"])
@each_way
def test_an_allowed_list_outside_of_what_is_proposed_is_followed(method, way, options):
    """G6: No NaN, no error about probabilities: what the members give these ids counts, however little."""
    ensemble, ids = abc(method)
    allowed = [ids["d"], ids["e"]]
    torch.manual_seed(0)
    options = {"max_new_tokens": 3, "eos_token_id": None, **options}
    if way == "processor":
        options["logits_processor"] = [
            lambda seen, scores: torch.full_like(scores, -torch.inf).index_copy(
                1, torch.tensor(allowed), scores[:, allowed]
            )
        ]
    else:
        options["prefix_allowed_tokens_fn"] = lambda row, seen: allowed
    assert set(output_ids(ensemble, "d", **options)[0]) <= {*allowed, ids["d"]}


@each_token_method
def test_one_row_without_a_candidate_is_named_by_row_and_step(method):
    """G6: In a batch whose other rows are well."""
    ensemble, ids = abc(method)

    def processor(input_ids, scores):
        scores = scores.clone()
        if input_ids.shape[1] == 3:
            scores[1] = -torch.inf
        return scores

    for do_sample in (False, True):
        with pytest.raises(MemberError, match="row 1 at step 3"):
            ensemble.generate(
                torch.tensor([[ids["d"]]] * 3), max_new_tokens=5, logits_processor=[processor], do_sample=do_sample
            )


@each_token_method
def test_a_row_that_has_ended_may_be_without_a_candidate(method):
    """G6: Nobody chooses there any more."""
    ensemble = CORE_RECIPES[0].ensemble
    rows = prompt_rows(ensemble)[1:2] * 2

    def criterion(input_ids, scores, **kwargs):
        return torch.tensor([True, False])

    def processor(input_ids, scores):
        return scores.index_fill(0, torch.tensor([0]), -torch.inf) if input_ids.shape[1] > len(rows[0]) else scores

    for do_sample in (False, True):
        output = run(
            ensemble,
            rows,
            method=method,
            stopping_criteria=[criterion],
            logits_processor=[processor],
            do_sample=do_sample,
            max_new_tokens=4,
        )
        assert output.sequences[0, len(rows[0]) + 1 :].tolist() == [2] * (output.sequences.shape[1] - len(rows[0]) - 1)


# --- G7 -------------------------------------------------------------------------------------------------------------


def test_a_folder_without_a_tokenizer_is_named_with_the_argument_to_set(tmp_path):
    """G7: And that argument then works, for a path and for an object."""
    paths = []
    for n, name in enumerate(("smol", "gemma")):
        paths.append(tmp_path / f"member-{n}")
        tiny.tiny_llama(tokenizer_of(name), seed=n, num_hidden_layers=1).save_pretrained(paths[-1])
    tokenizer_of("smol").save_pretrained(paths[0])
    with pytest.raises(VocabularyError, match=r"(?s)member-1.*tokenizers="):
        EnsembleForCausalLM.from_pretrained(paths)
    tokenizer_of("gemma").save_pretrained(tmp_path / "tokenizer")
    texts = []
    for given in (str(tmp_path / "tokenizer"), tokenizer_of("gemma")):
        ensemble = EnsembleForCausalLM.from_pretrained(paths, tokenizers=[None, given])
        texts.append(output_ids(ensemble, "The cat", max_new_tokens=3))
    items = [paths[0], MemberConfig(path=str(paths[1]), tokenizer=str(tmp_path / "tokenizer"))]
    texts.append(output_ids(EnsembleForCausalLM.from_pretrained(items), "The cat", max_new_tokens=3))
    assert texts[0] == texts[1] == texts[2]


@each_averaging_method
def test_huge_logits_do_not_overflow_in_the_mixture(method):
    """G1: Finite logits of half precision's whole range are a distribution, not an error."""
    small = tokenizer_of("small")
    a, b = id_of(small, "a"), id_of(small, "b")
    row = torch.full((tiny.rows_of(small),), -60_000.0)
    row[[a, b]] = torch.tensor([60_000.0, 59_999.0])
    ensemble = ensemble_of((small, [row]), (small, [{b: 0.6, a: 0.4}]), method=method)
    output = run(ensemble, [[a]], max_new_tokens=1)
    p = 1 / (1 + torch.tensor(-1.0).exp().item())
    found = output.logits[0][0].exp()[[a, b]].tolist()
    assert found == pytest.approx([(p + 0.4) / 2, (1 - p + 0.6) / 2], abs=1e-2)
