"""The options of `generate`: what works, works as in `transformers`; what cannot work says so at the call."""

import copy
import functools
import math
import threading
from collections import Counter
from contextlib import ExitStack
from itertools import pairwise

import pytest
import torch
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    TextIteratorStreamer,
    TextStreamer,
    WatermarkingConfig,
)

from hf_ensemble import ConfigurationError, GacConfig, MemberError, UniteConfig
from hf_ensemble.config import method_config
from tests import tiny
from tests.bug_bank.kit import methods_by_turns
from tests.contracts import (
    AVERAGING,
    CORE_RECIPES,
    METHODS,
    PROMPTS,
    Recorder,
    assert_same_output,
    changed_logits,
    from_call,
    large,
    make_ensemble,
    new_ids,
    padded,
    prompt_rows,
    reference_member,
    run,
    small,
)
from tests.reference import Reference

pytestmark = pytest.mark.filterwarnings("ignore:the primary .* wrote the control token")

each_method = pytest.mark.parametrize("method", AVERAGING)


@pytest.fixture
def ensemble():
    """Llama with a byte-level tokenizer, and Gemma-3 with a window of 8."""
    return CORE_RECIPES[0].ensemble


@pytest.fixture
def rows(ensemble):
    return prompt_rows(ensemble)[:1]


@pytest.fixture
def batch(ensemble):
    return padded(prompt_rows(ensemble), fill=lambda n: ensemble.tokenizer.pad_token_id)


def id_of(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == 1
    return ids[0]


def scripted(*scripts, tokenizers=None, **options):
    """An ensemble whose members give these probabilities, by text, step by step (the last for all that follow)."""
    tokenizers = tokenizers or [small(), large(), large()][: len(scripts)]
    models = []
    for script, tokenizer in zip(scripts, tokenizers, strict=True):
        steps = [
            {tokenizer.eos_token_id if text == "EOS" else id_of(tokenizer, text): p for text, p in step.items()}
            for step in script
        ]
        models.append(tiny.ScriptedModel(tokenizer, steps, prompt_length=1))
    return make_ensemble(models, tokenizers, **options)


def prompt_of(ensemble, text="a"):
    return {"input_ids": torch.tensor([[id_of(ensemble.tokenizer, text)]])}


def texts(ensemble, output, start=1):
    return [ensemble.tokenizer.decode(row[start:], skip_special_tokens=True) for row in output]


# --- Greedy and batches ---------------------------------------------------------------------------------------------


@each_method
def test_the_best_entry_of_the_mixture_is_written(method):
    ensemble = scripted([{"a": 0.6, "b": 0.4}], [{"b": 0.7, "c": 0.3}])
    output = ensemble.generate(**prompt_of(ensemble), max_new_tokens=3, method=method)
    assert texts(ensemble, output) == ["bbb"]


def test_an_entry_that_only_an_assistant_has_is_written_whole():
    ensemble = scripted([{"a": 0.6, "b": 0.4}], [{" capital": 0.9, "b": 0.1}, {"b": 1}], method="gac")
    output = ensemble.generate(**prompt_of(ensemble), max_new_tokens=12)
    assert texts(ensemble, output)[0].startswith(" capital")
    assert len(small()(" capital")["input_ids"]) > 1


def test_an_entry_that_does_not_fit_is_cut():
    ids = small()(" capital")["input_ids"]
    ensemble = scripted([{"b": 1}], [{" capital": 1}], method="gac", weights=[0.1, 0.9])
    for budget in range(1, 2 * len(ids)):
        output = ensemble.generate(**prompt_of(ensemble), max_new_tokens=budget)
        assert output[0, 1:].tolist() == (ids * 2)[:budget]


@each_method
def test_rows_that_have_ended_are_padded_while_others_go_on(method):
    """Only the row that starts with `b` ends, after two more ids."""
    end, pad = small().eos_token_id, small().pad_token_id
    a, b = (id_of(small(), text) for text in "ab")

    def script(context):
        return {end if context[0] == b and len(context) == 3 else a: 1.0}

    models = [tiny.ScriptedModel(small(), script) for _ in range(2)]
    ensemble = make_ensemble(models, [small()] * 2, method=method)
    output = ensemble.generate(torch.tensor([[a], [b], [a]]), max_new_tokens=6)
    assert output.tolist() == [[a] * 7, [b, a, a, end, pad, pad, pad], [a] * 7]
    assert all(len(call.input_ids) == 2 for call in models[1].calls[-2:])


@each_method
def test_the_batch_ends_when_every_row_has(method):
    ensemble = scripted([{"a": 1}, {"EOS": 1}], [{"a": 1}, {"EOS": 1}], method=method)
    output = ensemble.generate(torch.tensor([[id_of(small(), "a")]] * 2), max_new_tokens=20)
    assert output.shape == (2, 3)


# --- Lengths and ends -----------------------------------------------------------------------------------------------


@each_method
def test_lengths_are_those_asked_for(ensemble, rows, method):
    length = len(rows[0])
    options = {"method": method, "return_dict_in_generate": False, "output_logits": False, "eos_token_id": None}
    longest = run(ensemble, rows, max_new_tokens=5, **options)[0].tolist()
    assert len(longest) == length + 5
    by_length = run(ensemble, rows, max_new_tokens=None, max_length=length + 3, **options)[0].tolist()
    assert by_length == longest[: length + 3]


@each_method
def test_min_new_tokens_holds_back_the_end(method):
    ensemble = scripted([{"EOS": 0.9, "a": 0.1}], [{"EOS": 0.9, "a": 0.1}], method=method)
    output = ensemble.generate(**prompt_of(ensemble), max_new_tokens=8, min_new_tokens=3)
    assert output[0, 1:].tolist() == [id_of(small(), "a")] * 3 + [small().eos_token_id]


@each_method
def test_each_of_several_end_ids_ends_a_row(method):
    ensemble = scripted([{"a": 1}, {"b": 0.9, "c": 0.1}], [{"a": 1}, {"b": 0.9, "c": 0.1}], method=method)
    ends = [small().eos_token_id, id_of(small(), "b")]
    output = ensemble.generate(**prompt_of(ensemble), max_new_tokens=8, eos_token_id=ends)
    assert texts(ensemble, output) == ["ab"]
    ensemble.generation_config.eos_token_id = ends
    output = ensemble.generate(**prompt_of(ensemble), max_new_tokens=8)
    assert texts(ensemble, output) == ["ab"]


@each_method
def test_the_end_of_an_assistant_is_written_as_the_primarys_likelier_end_id(method):
    """EOS is matched by role; the assistant ends with `<|end|>` of its own, the primary may with `<|end|>` or `<|im|>`."""
    tokenizer = tiny.byte_level_bpe(400, specials=["<|im|>"])
    end, im = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im|>")
    primary = tiny.ScriptedModel(tokenizer, [{id_of(tokenizer, "a"): 0.7, im: 0.2, end: 0.1}])
    assistant = tiny.ScriptedModel(large(), [{large().eos_token_id: 1}])
    ensemble = make_ensemble([primary, assistant], [tokenizer, large()], method=method)
    ids = torch.tensor([[id_of(tokenizer, "a")]])
    output = ensemble.generate(ids, max_new_tokens=4, eos_token_id=[end, im])
    assert output[0, 1:].tolist() == [im]
    output = ensemble.generate(ids, max_new_tokens=4, eos_token_id=end)
    assert output[0, 1:].tolist() == [end]


@each_method
@pytest.mark.parametrize("source", ["call", "generation_config"])
def test_stop_strings_need_no_tokenizer(method, source):
    script = [{text: 1} for text in "abcab"]
    ensemble = scripted(script, script, method=method)
    options = {"stop_strings": ["ca"]}
    if source == "generation_config":
        ensemble.generation_config.stop_strings = ["ca"]
        options = {}
    output = ensemble.generate(**prompt_of(ensemble), max_new_tokens=8, **options)
    assert texts(ensemble, output) == ["abca"]


def test_a_stop_string_may_end_inside_an_entry_of_several_ids():
    first = small()(" capital")["input_ids"][0]
    ensemble = scripted([{"b": 1}], [{" capital": 1}], method="gac", weights=[0.1, 0.9])
    stop = small().decode([first])
    output = ensemble.generate(**prompt_of(ensemble), max_new_tokens=8, stop_strings=[stop])
    assert output[0, 1:].tolist() == [first]


# --- Sampling -------------------------------------------------------------------------------------------------------

NUM_DRAWS = 20_000
P0, P1 = {"a": 0.5, "b": 0.3, "c": 0.2}, {"a": 0.1, "b": 0.2, " capital": 0.7}


@functools.cache
def flat_ensemble():
    """Two models for scripts that are the same in every row and step."""
    models = [tiny.tiny_llama(tokenizer, num_hidden_layers=1) for tokenizer in (small(), large())]
    return make_ensemble(models, [small(), large()])


def mixture(method):
    """The fused distribution of `P0` and `P1` at equal weights, by entry (GaC) or by the primary's id (UniTE)."""
    if method == "gac":
        return {text: (P0.get(text, 0) + P1.get(text, 0)) / 2 for text in P0 | P1}
    # The primary's logit for ` capital` is that of the first id which writes it: next to nothing here.
    return {"a": 0.3, "b": 0.25, "c": 0.1, " capital": 0.35}


def tempered(probs, temperature):
    return normalized({key: p ** (1 / temperature) for key, p in probs.items()})


def best(probs, count):
    return normalized(dict(sorted(probs.items(), key=lambda item: -item[1])[:count]))


def normalized(probs):
    return {key: p / sum(probs.values()) for key, p in probs.items()}


SAMPLING = {
    "plain": ({}, lambda q: q),
    "temperature": ({"temperature": 0.5}, lambda q: tempered(q, 0.5)),
    "top_k": ({"top_k": 2}, lambda q: best(q, 2)),
    "top_p": ({"top_p": 0.62}, lambda q: best(q, 2)),
    "min_p": ({"min_p": 0.5}, lambda q: best(q, 3 if q["b"] / max(q.values()) >= 0.5 else 2)),
    "all": ({"temperature": 2.0, "top_k": 3, "top_p": 0.6}, lambda q: best(tempered(best(tempered(q, 2), 3), 1), 2)),
}


def sample(method, case, **options):
    ensemble = flat_ensemble()
    torch.manual_seed(1)
    with ExitStack() as stack:
        for model, tokenizer, probs in zip(ensemble.members, ensemble.tokenizers, (P0, P1), strict=True):
            row = tiny.ScriptedModel(tokenizer, [{id_of(tokenizer, text): p for text, p in probs.items()}]).row((0,))
            stack.enter_context(changed_logits(model, lambda logits, row=row: row.expand_as(logits).contiguous()))
        return ensemble.generate(
            **prompt_of(ensemble),
            method=method,
            do_sample=True,
            max_new_tokens=1,
            return_dict_in_generate=True,
            **{"top_k": 0, **SAMPLING[case][0], **options},
        )


def expected_by_id(method, case):
    expected = {small()(text)["input_ids"][0]: p for text, p in SAMPLING[case][1](mixture(method)).items()}
    assert sum(expected.values()) == pytest.approx(1)
    return expected


@each_method
@pytest.mark.parametrize("case", SAMPLING)
def test_warpers_follow_the_formula_after_fusion(method, case):
    probs = sample(method, case, output_scores=True).scores[0][0].softmax(-1)
    expected = expected_by_id(method, case)
    assert probs[list(expected)].tolist() == pytest.approx(list(expected.values()), abs=1e-4)
    assert probs.sum().item() == pytest.approx(1)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "case"), [("gac", "all"), ("unite", "plain")])
def test_draws_have_the_frequencies_of_the_formula(method, case):
    """Fails by chance with probability below 1e-2 a seed: a frequency's standard deviation is at most 0.36 %."""
    output = sample(method, case, num_return_sequences=NUM_DRAWS)
    counts, expected = Counter(output.sequences[:, 1].tolist()), expected_by_id(method, case)
    for i in counts.keys() | expected.keys():
        assert counts[i] / NUM_DRAWS == pytest.approx(expected.get(i, 0), abs=0.01)


@each_method
def test_the_seed_decides(ensemble, rows, method):
    def draw(seed):
        torch.manual_seed(seed)
        return run(ensemble, rows, method=method, do_sample=True, temperature=2.0).sequences[0].tolist()

    assert draw(1) == draw(1)
    assert len({tuple(draw(seed)) for seed in range(4)}) > 1


@each_method
def test_drawing_from_the_best_only_is_greedy(ensemble, batch, method):
    greedy = run(ensemble, batch, method=method)
    drawn = run(ensemble, batch, method=method, do_sample=True, top_k=1)
    assert drawn.sequences.tolist() == greedy.sequences.tolist()


@each_method
def test_returned_sequences_stand_together_by_prompt(ensemble, batch, method):
    torch.manual_seed(0)
    output = run(ensemble, batch, method=method, do_sample=True, num_return_sequences=2, temperature=3.0).sequences
    length = batch["input_ids"].shape[1]
    assert output[:, :length].tolist() == batch["input_ids"].repeat_interleave(2, dim=0).tolist()
    new = [tuple(row) for row in output[:, length:].tolist()]
    assert len(set(new)) > 3


def test_sequences_of_one_prompt_share_its_forward():
    ensemble = scripted([{"a": 1}], [{"a": 1}])
    ensemble.generate(**prompt_of(ensemble), max_new_tokens=1)
    calls = ensemble.members[1].calls
    calls.clear()
    ensemble.generate(**prompt_of(ensemble), max_new_tokens=2, do_sample=True, num_return_sequences=5)
    assert [len(call.input_ids) for call in calls] == [1, 5]


# --- Beams ----------------------------------------------------------------------------------------------------------


@pytest.mark.crossed
@each_method
@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_beams": 4, "length_penalty": 0.0}], ids=str)
def test_beam_scores_are_those_of_fresh_forwards(ensemble, rows, method, options):
    output = run(ensemble, rows, method=method, output_scores=True, num_return_sequences=2, **options)
    members = [reference_member(ensemble, 0), reference_member(ensemble, 1)]
    reference = Reference(members, method)
    assert output.sequences.shape[0] == 2
    assert output.sequences_scores[0] >= output.sequences_scores[1]
    for sequence, score in zip(output.sequences.tolist(), output.sequences_scores.tolist(), strict=True):
        new = sequence[len(rows[0]) :]
        ends = [at for at, i in enumerate(new) if i in members[0].eos_ids]
        new = new[: ends[0] + 1] if ends else new
        columns = reference.distributions_along(rows[0], new, range(len(new)))
        expected = sum(math.log(columns[t][i]) for t, i in enumerate(new))
        assert score == pytest.approx(expected / len(new) ** options.get("length_penalty", 1.0), abs=1e-3)


@each_method
def test_beams_find_what_greedy_search_misses(method):
    a, b, c = (id_of(small(), text) for text in "abc")

    def script(context):
        if len(context) == 1:
            return {a: 0.6, b: 0.4}
        return {a: 0.5, c: 0.5} if context[1] == a else {c: 0.99, a: 0.01}

    ensemble = make_ensemble([tiny.ScriptedModel(small(), script) for _ in range(2)], [small()] * 2, method=method)
    ids = torch.tensor([[a]])
    assert ensemble.generate(ids, max_new_tokens=2)[0, 1].item() == a
    output = ensemble.generate(
        ids, max_new_tokens=2, num_beams=3, return_dict_in_generate=True, output_scores=True, length_penalty=0.0
    )
    assert output.sequences[0, 1:].tolist() == [b, c]
    assert output.sequences_scores[0].item() == pytest.approx(math.log(0.4 * 0.99), abs=1e-4)


@each_method
def test_beams_of_a_row_alone_are_those_in_a_batch(ensemble, batch, method):
    together = run(ensemble, batch, method=method, num_beams=2)
    width = batch["input_ids"].shape[1]
    for row, ids in enumerate(prompt_rows(ensemble)):
        alone = run(ensemble, [ids], method=method, num_beams=2).sequences[0, len(ids) :].tolist()
        own = together.sequences[row, width:].tolist()
        assert own[: len(alone)] == alone


@each_method
def test_beams_of_the_same_model_twice_are_its_own(method):
    model, tokenizer = tiny.tiny_llama(small(), seed=3), small()
    bare = [tokenizer.pad_token_id]
    twice = make_ensemble([model, model], [tokenizer, tokenizer], method=method)
    ids = tokenizer("The cat sat", return_tensors="pt")
    options = {"num_beams": 3, "max_new_tokens": 3, "suppress_tokens": bare}
    if method == "unite":
        options |= {"max_new_tokens": 1}
    assert twice.generate(**ids, **options).tolist() == model.generate(**ids, **options).tolist()


@each_method
def test_beam_sampling_runs(ensemble, batch, method):
    torch.manual_seed(0)
    output = run(ensemble, batch, method=method, num_beams=2, do_sample=True, num_return_sequences=2)
    assert output.sequences.shape[0] == 6


# --- Processors, criteria and constraints ---------------------------------------------------------------------------


@each_method
def test_a_processor_sees_every_row_over_the_primarys_ids_at_every_step(ensemble, batch, method):
    seen = []

    def processor(input_ids, scores):
        seen.append((tuple(input_ids.shape), tuple(scores.shape)))
        return scores

    expected = run(ensemble, batch, method=method)
    found = run(ensemble, batch, method=method, logits_processor=[processor], eos_token_id=None)
    width, vocab_size = batch["input_ids"].shape[1], ensemble.config.get_text_config().vocab_size
    assert seen == [((3, width + step), (3, vocab_size)) for step in range(len(seen))]
    assert len(seen) == found.sequences.shape[1] - width
    if method == "unite":
        assert found.sequences[:, : expected.sequences.shape[1]].tolist() == expected.sequences.tolist()


@each_method
def test_a_processor_may_choose(ensemble, batch, method):
    forced = 100

    def processor(input_ids, scores):
        return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([forced]), 0.0)

    output = run(ensemble, batch, method=method, logits_processor=[processor], max_new_tokens=3)
    assert output.sequences[:, -3:].tolist() == [[forced] * 3] * 3


@each_method
def test_a_criterion_sees_every_row_at_every_step_and_ends_them_one_by_one(ensemble, batch, method):
    seen = []
    width = batch["input_ids"].shape[1]

    def criterion(input_ids, scores, **kwargs):
        seen.append(tuple(input_ids.shape))
        return torch.tensor([input_ids.shape[1] - width > row for row in range(3)])

    output = run(ensemble, batch, method=method, stopping_criteria=[criterion], pad_token_id=0)
    assert seen == [(3, width + step) for step in (1, 2, 3)]
    assert output.sequences.shape[1] == width + 3
    assert output.sequences[0, -2:].tolist() == [0, 0]


@each_method
def test_the_users_lists_are_left_as_they_are(ensemble, rows, method):
    processors, criteria = [lambda ids, scores: scores], [lambda ids, scores: torch.zeros(len(ids), dtype=torch.bool)]
    run(ensemble, rows, method=method, logits_processor=processors, stopping_criteria=criteria)
    assert len(processors) == len(criteria) == 1


def test_processors_and_criteria_may_be_any_iterables(ensemble, rows):
    def last(input_ids, scores):
        return scores.flip(-1)

    def never(input_ids, scores):
        return torch.zeros(len(input_ids), dtype=torch.bool)

    expected = run(ensemble, rows, logits_processor=[last], stopping_criteria=[never])
    found = run(ensemble, rows, logits_processor=iter([last]), stopping_criteria=iter([never]))
    assert found.sequences.tolist() == expected.sequences.tolist()


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"weights": [0, 1]}])
def test_the_stock_generate_may_run_in_a_processor(ensemble, rows, options):
    """It is the primary's there too, and the call around it goes on as if it had not been."""

    def stock():
        return GenerationMixin.generate(ensemble, torch.tensor(rows), do_sample=False, max_new_tokens=3).tolist()

    inside = []

    def processor(input_ids, scores):
        inside.append(stock())
        return scores

    found = run(ensemble, rows, logits_processor=[processor], **options)
    assert found.sequences.tolist() == run(ensemble, rows, **options).sequences.tolist()
    assert inside == [stock()] * len(inside) != []


@each_method
def test_a_prefix_function_keeps_to_what_it_allows(ensemble, batch, method):
    seen = []
    size = len(ensemble.tokenizer)

    def prefix_function(row, ids):
        seen.append((row, len(ids)))
        return list(range(row, size, 3))

    output = run(ensemble, batch, method=method, prefix_allowed_tokens_fn=prefix_function, max_new_tokens=3)
    width = batch["input_ids"].shape[1]
    assert seen == [(row, width + step) for step in range(3) for row in range(3)]
    pad = ensemble.tokenizer.pad_token_id
    for row, ids in enumerate(output.sequences[:, width:].tolist()):
        assert {i % 3 for i in ids if i != pad} <= {row}


@each_method
def test_a_processor_that_leaves_nothing_is_an_error_that_says_so(ensemble, rows, method):
    def processor(input_ids, scores):
        return torch.full_like(scores, -torch.inf)

    with pytest.raises(MemberError, match="nothing is left to choose from"):
        run(ensemble, rows, method=method, logits_processor=[processor])


def test_a_penalty_acts_as_on_the_model_itself():
    """GaC of a model with itself has the model's own logits, their sign included."""
    tokenizer = tiny.byte_level_bpe(400, pad="<|end|>")
    model = tiny.tiny_llama(tokenizer, seed=5)
    twice = make_ensemble([model, model], [tokenizer, tokenizer], method="gac")
    for options in ({"repetition_penalty": 1.8}, {"repetition_penalty": 0.5}, {"sequence_bias": [[[100], 4.0]]}):
        expected, found = (
            run(one, [tokenizer("The cat sat on the")["input_ids"]], output_scores=True, max_new_tokens=6, **options)
            for one in (model, twice)
        )
        assert found.sequences.tolist() == expected.sequences.tolist()
        for a, b in zip(found.scores, expected.scores, strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@each_method
def test_no_ngram_is_repeated(method):
    script = [{"a": 0.5, "b": 0.3, "c": 0.2}]
    ensemble = scripted(script, script, method=method)
    output = ensemble.generate(**prompt_of(ensemble), max_new_tokens=9, no_repeat_ngram_size=2)[0].tolist()
    pairs = list(pairwise(output))
    assert len(set(pairs)) == len(pairs)


@each_method
def test_bad_words_and_suppressed_ids_are_not_written(method):
    script = [{"a": 0.5, "b": 0.3, "c": 0.2}]
    ensemble = scripted(script, script, method=method)
    a, b = id_of(small(), "a"), id_of(small(), "b")
    output = ensemble.generate(**prompt_of(ensemble), max_new_tokens=3, bad_words_ids=[[a]], suppress_tokens=[b])
    assert texts(ensemble, output) == ["ccc"]


def test_a_ban_also_holds_for_entries_that_start_with_the_banned_id():
    """A processor acts on the primary's columns: ` capital` counts for the first id that writes it."""
    first = small()(" capital")["input_ids"][0]
    ensemble = scripted([{"b": 0.6, "c": 0.4}], [{" capital": 1}], method="gac")
    output = ensemble.generate(**prompt_of(ensemble), max_new_tokens=4, suppress_tokens=[first])
    assert first not in output[0].tolist()


# --- Streams --------------------------------------------------------------------------------------------------------


class Counting(TextStreamer):
    """Counts its calls, and may fail at one of them."""

    def __init__(self, tokenizer, fail_at=None, error=RuntimeError):
        super().__init__(tokenizer)
        self.num_puts = self.num_ends = 0
        self.fail_at, self.error = fail_at, error

    def put(self, value):
        self.num_puts += 1
        if self.num_puts == self.fail_at:
            raise self.error("the reader has gone")

    def end(self):
        self.num_ends += 1


@each_method
def test_a_stream_has_every_id_as_it_comes(ensemble, rows, method):
    streamer = Recorder(ensemble.tokenizer)
    output = run(ensemble, rows, method=method, streamer=streamer)
    assert streamer.ids == output.sequences[0].tolist()
    assert streamer.num_ends == 1


@each_method
def test_a_text_iterator_gives_the_final_text(ensemble, rows, method):
    streamer = TextIteratorStreamer(ensemble.tokenizer, skip_prompt=True, timeout=60)
    outputs = []
    thread = threading.Thread(target=lambda: outputs.append(run(ensemble, rows, method=method, streamer=streamer)))
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == ensemble.tokenizer.decode(new_ids(outputs[0]))


@each_method
def test_a_stream_is_ended_once_also_when_a_call_fails(ensemble, rows, method):
    streamer = Counting(ensemble.tokenizer)
    run(ensemble, rows, method=method, streamer=streamer)
    assert streamer.num_ends == 1
    failing = from_call(2, lambda logits: logits * torch.nan)
    for index in (0, 1):
        streamer = Counting(ensemble.tokenizer)
        with changed_logits(ensemble.members[index], failing), pytest.raises(MemberError):
            run(ensemble, rows, method=method, streamer=streamer)
        assert streamer.num_ends == 1
    for options in ({"guidance_scale": 2.0}, {"method": "none such"}, {"weights": [1]}, {"max_new_token": 3}):
        streamer = Counting(ensemble.tokenizer)
        with pytest.raises(ValueError):  # noqa: PT011
            run(ensemble, rows, **{"method": method, "streamer": streamer, **options})
        assert streamer.num_ends == 1


# --- What comes back ------------------------------------------------------------------------------------------------


@each_method
@pytest.mark.parametrize("do_sample", [False, True])
def test_scores_and_logits_stand_over_the_primarys_ids(ensemble, batch, method, do_sample):
    torch.manual_seed(0)
    output = run(ensemble, batch, method=method, output_scores=True, do_sample=do_sample, top_k=7)
    width, vocab_size = batch["input_ids"].shape[1], ensemble.config.get_text_config().vocab_size
    num_new = output.sequences.shape[1] - width
    assert len(output.scores) == len(output.logits) == num_new
    first_ends = [new_ids(output, row, [ensemble.tokenizer.eos_token_id]) for row in range(3)]
    for step, (scores, logits) in enumerate(zip(output.scores, output.logits, strict=True)):
        assert scores.shape == logits.shape == (3, vocab_size)
        for row in range(3):
            if step < len(first_ends[row]):
                assert logits[row].exp().sum().item() == pytest.approx(1, abs=1e-4)
                assert scores[row, output.sequences[row, width + step]] > -torch.inf
                assert (scores[row] > -torch.inf).sum() <= (vocab_size if not do_sample else 7 + 20)


@each_method
def test_transition_scores_are_the_log_probabilities_of_fresh_forwards(ensemble, rows, method):
    output = run(ensemble, rows, method=method, output_scores=True)
    found = ensemble.compute_transition_scores(output.sequences, output.scores, normalize_logits=True)[0].tolist()
    new = new_ids(output)
    reference = Reference([reference_member(ensemble, 0), reference_member(ensemble, 1)], method)
    state, queued = reference.prompt_state(rows[0]), []
    for i, score in zip(new, found, strict=True):
        if queued:
            assert score == pytest.approx(0)
            queued.pop(0)
            continue
        step = reference.distribution(state)
        assert score == pytest.approx(math.log(step.columns[i]), abs=1e-3)
        queued = reference.choose(step)[0][1:]
        state = reference.advance(state, reference.choose(step)[0])


def test_the_queued_ids_of_an_entry_have_score_zero():
    ids = small()(" capital")["input_ids"]
    ensemble = scripted([{"b": 1}], [{" capital": 1}], method="gac", weights=[0.25, 0.75])
    output = run(ensemble, prompt_of(ensemble), max_new_tokens=len(ids) + 1, output_scores=True)
    assert new_ids(output) == [*ids, ids[0]]
    for rows_of_steps in (output.scores, output.logits):
        for step, i in enumerate(new_ids(output)):
            probs = rows_of_steps[step][0].softmax(-1)
            assert probs[i].item() == pytest.approx(0.75 if step in (0, len(ids)) else 1, abs=1e-4)
            assert probs.sum().item() == pytest.approx(1)


@each_method
def test_scores_are_what_the_warpers_left_without_renormalizing(ensemble, rows, method):
    torch.manual_seed(0)
    plain = run(ensemble, rows, method=method, output_scores=True, do_sample=True, top_k=3, max_new_tokens=1)
    torch.manual_seed(0)
    warm = run(
        ensemble,
        rows,
        method=method,
        output_scores=True,
        do_sample=True,
        top_k=3,
        max_new_tokens=1,
        renormalize_logits=True,
    )
    kept = plain.scores[0][0] > -torch.inf
    assert warm.scores[0][0].logsumexp(-1).item() == pytest.approx(0, abs=1e-5)
    torch.testing.assert_close(warm.scores[0][0][kept], plain.scores[0][0][kept].log_softmax(-1), atol=1e-5, rtol=1e-4)


@each_method
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
def test_the_returned_cache_can_be_passed_again(ensemble, rows, method):
    first = run(ensemble, rows, method=method, max_new_tokens=4, eos_token_id=None)
    cache = first.past_key_values if "past_key_values" in first else first.cache
    rest = [first.sequences[0].tolist()]
    expected = run(ensemble, rest, method=method)
    for name in {"past_key_values", tiny.CACHE_NAME}:
        assert_same_output(run(ensemble, rest, method=method, **{name: copy.deepcopy(cache)}), expected)


@pytest.mark.crossed
@each_method
@pytest.mark.parametrize(
    "options",
    [{"use_cache": False}, {"cache_implementation": "static"}, {"prefill_chunk_size": 2}],
    ids=str,
)
def test_how_the_primary_caches_changes_nothing(ensemble, batch, rows, method, options):
    inputs = rows if "prefill_chunk_size" in options else batch
    assert_same_output(run(ensemble, inputs, method=method, **options), run(ensemble, inputs, method=method))


def test_without_a_dictionary_ids_come_back(ensemble, rows):
    output = run(ensemble, rows, return_dict_in_generate=False, output_logits=False)
    assert isinstance(output, torch.Tensor)
    assert output.dtype == torch.long


# --- Method, weights and dtypes -------------------------------------------------------------------------------------


def test_method_and_weights_hold_for_one_call(ensemble, rows):
    models, tokenizers = list(ensemble.members), ensemble.tokenizers
    before = copy.deepcopy(ensemble.config.to_dict())
    for method in ("gac", "unite", GacConfig(), UniteConfig(top_k=3)):
        made = make_ensemble(models, tokenizers, method=method, weights=[3, 1])
        assert_same_output(run(ensemble, rows, method=method, weights=[0.75, 0.25]), run(made, rows))
    assert ensemble.config.to_dict() == before


@each_method
def test_weights_may_be_whole_numbers_of_any_sum(ensemble, rows, method):
    expected = run(ensemble, rows, method=method, weights=[0.6, 0.4])
    assert_same_output(run(ensemble, rows, method=method, weights=(3, 2)), expected)


@each_method
def test_members_may_have_unlike_dtypes(ensemble, rows, method):
    other = copy.deepcopy(ensemble.members[1]).to(torch.bfloat16)
    mixed = make_ensemble([ensemble.members[0], other], ensemble.tokenizers, method=method)
    expected = run(ensemble, rows, method=method, max_new_tokens=1).logits[0]
    found = run(mixed, rows, max_new_tokens=1).logits[0]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.exp(), expected.exp(), atol=0.05, rtol=0.2)
    assert mixed.members[1].dtype == torch.bfloat16
    run(make_ensemble([other, ensemble.members[0]], ensemble.tokenizers[::-1], method=method), [[2, 432]])


# --- Inputs ---------------------------------------------------------------------------------------------------------


def test_forward_is_the_primarys(ensemble, rows):
    ids = torch.tensor(rows)
    with torch.no_grad():
        assert torch.equal(ensemble(input_ids=ids).logits, ensemble.members[0](input_ids=ids).logits)


@each_method
def test_the_users_inputs_and_configuration_are_left_as_they_are(ensemble, method):
    batch = padded(prompt_rows(ensemble), side="right", fill=lambda n: 7)
    given = GenerationConfig(max_new_tokens=3, do_sample=False, stop_strings=["zzz"])
    before = copy.deepcopy((batch, given.to_dict()))
    with pytest.warns(UserWarning, match="padded on the right"):
        ensemble.generate(**batch, generation_config=given, method=method)
    assert given.to_dict() == before[1]
    for name, tensor in batch.items():
        assert torch.equal(tensor, before[0][name])


@each_method
def test_an_empty_prompt_starts_from_the_first_token(ensemble, method):
    start = ensemble.tokenizer.bos_token_id
    expected = run(ensemble, [[start]], method=method)
    found = ensemble.generate(torch.zeros(1, 0).long(), max_new_tokens=len(expected.logits), method=method)
    assert found.tolist() == expected.sequences.tolist()


@pytest.mark.parametrize(
    ("inputs", "error", "match"),
    [
        ({"inputs": PROMPTS[0]}, TypeError, "ensemble.tokenizer"),
        ({"inputs": torch.zeros(3).long()}, ConfigurationError, "batch_size, length"),
        ({"inputs": torch.tensor([[10**6]])}, ConfigurationError, "1000000"),
        ({"inputs": torch.tensor([[-1]])}, ConfigurationError, "-1"),
        ({"inputs": torch.zeros(0, 3).long()}, ConfigurationError, "no row"),
        ({"inputs": torch.tensor([[9, 9]]), "attention_mask": torch.ones(1, 3)}, ConfigurationError, "attention_mask"),
    ],
    ids=["text", "one-dimensional", "too high", "negative", "no row", "mask of another shape"],
)
def test_inputs_that_do_not_fit_are_refused(ensemble, inputs, error, match):
    with pytest.raises(error, match=match):
        ensemble.generate(**inputs, max_new_tokens=2)


# --- What is refused ------------------------------------------------------------------------------------------------

REFUSED = {
    "guidance_scale": {"guidance_scale": 1.5},
    "inputs_embeds": {"inputs_embeds": torch.zeros(1, 3, 32)},
    "token_healing": {"token_healing": True},
    "cache_implementation": {"cache_implementation": "paged"},
    "watermarking_config": {"watermarking_config": WatermarkingConfig()},
    "labels": {"labels": torch.zeros(1, 3).long()},
    "max_new_token": {"max_new_token": 3},
    "num_beam": {"num_beam": 2},
    "custom_generate": {"custom_generate": lambda *args, **kwargs: None},
    "negative_prompt_ids": {"negative_prompt_ids": torch.zeros(1, 3).long()},
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 2},
    "assistant_early_exit": {"assistant_early_exit": 1},
    "penalty_alpha": {"penalty_alpha": 0.6, "top_k": 4},
    "dola_layers": {"dola_layers": "low"},
    "temperature": {"do_sample": True, "temperature": 0.0},
    "num_return_sequences": {"num_return_sequences": 3},
    "weights": {"weights": [1.0]},
    "one entry per member": {"weights": [0.2, 0.3, 0.5]},
    "at least 0": {"weights": [1.5, -0.5]},
    "all be 0": {"weights": [0, 0]},
    "finite": {"weights": [math.nan, 1]},
    "must be finite": {"weights": [math.inf, 1]},
    "deepen, eva, fuse, gac, mbr, mined, rerank, sweetspan, unite, vote": {"method": "average"},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_by_name(ensemble, rows, name):
    options = {"do_sample": False, "max_new_tokens": 2, **REFUSED[name]}
    with pytest.raises(ValueError, match=name):
        ensemble.generate(torch.tensor(rows), **options)


@pytest.mark.parametrize(
    "name", ["guidance_scale", "token_healing", "watermarking_config", "prompt_lookup_num_tokens"]
)
def test_what_cannot_work_is_refused_in_a_configuration_too(ensemble, rows, name):
    given = GenerationConfig(max_new_tokens=2, **REFUSED[name])
    with pytest.raises(ConfigurationError, match=name):
        ensemble.generate(torch.tensor(rows), generation_config=given)


def test_a_draft_model_is_refused(ensemble, rows):
    with pytest.raises(ConfigurationError, match="assistant_model"):
        ensemble.generate(torch.tensor(rows), max_new_tokens=2, assistant_model=ensemble.members[0])


def test_labels_are_refused_in_forward(ensemble, rows):
    with pytest.raises(ConfigurationError, match="labels"):
        ensemble(input_ids=torch.tensor(rows), labels=torch.tensor(rows))


@pytest.mark.parametrize("top_k", [0, -1, 2.5, True])
def test_top_k_of_the_method_has_to_be_a_positive_integer(top_k):
    with pytest.raises(ConfigurationError, match=f"top_k.*{top_k}"):
        UniteConfig(top_k=top_k)


def test_options_that_change_nothing_are_taken(ensemble, rows):
    expected = run(ensemble, rows)
    assert_same_output(run(ensemble, rows, guidance_scale=1.0, token_healing=False, num_return_sequences=1), expected)


# --- Failures and threads -------------------------------------------------------------------------------------------


def fail_at(number, error):
    calls = iter(range(10**6))

    def fail(input_ids, scores, **kwargs):
        if next(calls) == number - 1:
            raise error("stop here")
        return scores if scores is not None and torch.is_tensor(scores) and scores.ndim == 2 else None

    return fail


def failing_criterion(error):
    calls = iter(range(10**6))

    def criterion(input_ids, scores, **kwargs):
        if next(calls) == 2:
            raise error("stop here")
        return torch.zeros(len(input_ids), dtype=torch.bool)

    return criterion


@pytest.mark.crossed
@methods_by_turns(
    error=[RuntimeError, KeyboardInterrupt], place=["streamer", "criterion", "processor", "primary", "assistant"]
)
def test_a_call_after_a_failure_at_the_third_step_is_as_if_nothing_had_been(ensemble, rows, method, place, error):
    expected = run(ensemble, rows, method=method)

    def raise_it(logits):
        raise error("stop here")

    options = {
        "streamer": {"streamer": Counting(ensemble.tokenizer, fail_at=4, error=error)},
        "criterion": {"stopping_criteria": [failing_criterion(error)]},
        "processor": {"logits_processor": [fail_at(3, error)]},
    }.get(place, {})
    raised = MemberError if place in ("primary", "assistant") and error is RuntimeError else error
    if place in ("primary", "assistant"):
        index = ["primary", "assistant"].index(place)
        with changed_logits(ensemble.members[index], from_call(2, raise_it)), pytest.raises(raised):
            run(ensemble, rows, method=method)
    else:
        with pytest.raises(raised):
            run(ensemble, rows, method=method, **options)
    if place == "streamer":
        assert options["streamer"].num_ends == 1
    assert_same_output(run(ensemble, rows, method=method), expected)


def test_two_threads_may_use_one_ensemble_at_once(ensemble):
    rows = prompt_rows(ensemble)
    jobs = [(method, row) for method in METHODS for row in rows]
    expected = [run(ensemble, [row], method=method).sequences.tolist() for method, row in jobs]
    found = [None] * len(jobs)

    def work(start):
        for n in range(start, len(jobs), 2):
            method, row = jobs[n]
            found[n] = run(ensemble, [row], method=method).sequences.tolist()

    threads = [threading.Thread(target=work, args=(start,)) for start in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected


def test_a_copy_generates_the_same(ensemble, rows):
    expected = run(ensemble, rows, method="gac")
    twin = copy.deepcopy(ensemble)
    assert_same_output(run(twin, rows, method="gac"), expected)
    assert all(a is not b for a, b in zip(twin.members, ensemble.members, strict=True))


def test_a_saved_method_that_is_not_known_here_says_where_to_put_it():
    with pytest.raises(ConfigurationError, match=r"'unheard-of'. Known methods: .*hf_ensemble\.config\.METHODS"):
        method_config({"name": "unheard-of", "power": 2.0})


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"bad_words_ids": [[5]]}, {"weights": [1, 0]}], ids=str)
def test_what_acts_among_the_processors_is_a_processor(options, ensemble, monkeypatch):
    """The stock list reads the signature of what it calls at every step, which takes long for a plain function."""
    seen = []
    call = LogitsProcessorList.__call__

    def look(self, input_ids, scores, **kwargs):
        seen.extend(self)
        return call(self, input_ids, scores, **kwargs)

    monkeypatch.setattr(LogitsProcessorList, "__call__", look)
    recorded = {} if "num_beams" in options else {"output_decisions": True, "return_dict_in_generate": True}
    inputs = ensemble.tokenizer("The cat", return_tensors="pt")
    ensemble.generate(**inputs, max_new_tokens=2, method="unite", **recorded, **options)
    assert seen
    assert all(isinstance(item, LogitsProcessor) for item in seen)
