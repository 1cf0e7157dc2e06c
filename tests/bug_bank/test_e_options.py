"""Bug bank, section E: generation config and API conformity.

| case | where |
| --- | --- |
| E1 | here |
| E2 | here |
| E3 | here |
| E4 | here; `test_generate.py` (what cannot work is refused by name) |
| E5 | here for plain text; `test_conversations.py` for conversations |
| E6 | here for plain text; `test_conversations.py` for conversations |
| E7 | here; `test_generate.py` (returned sequences stand together by prompt) |
| E8 | here; `test_generate.py` (a penalty acts as on the model itself) |
| E10 | here; `test_generate.py` (streams); `test_streaming.py` (spans, event loops, failures) |
| E11 | refused when building: `test_member.py`, and `test_i_errors.py` from a path |
| E12 | `test_conversations.py` |
| E13 | here; `test_generate.py` (warpers and frequencies) |
| E14 | here |
"""

import copy
import logging

import pytest
import torch
from transformers import GenerationConfig, TextStreamer, pipeline

from hf_ensemble import ConfigurationError, EnsembleForCausalLM, GacConfig, UniteConfig
from tests import tiny
from tests.contracts import CORE_RECIPES, PROMPTS, Recorder, make_ensemble, new_ids, padded, prompt_rows, run

from .kit import (
    control_tokens_may_be_chosen,
    duet,
    each_method,
    ensemble_of,
    gac_and_slowly_unite,
    id_of,
    members_may_be_lossy,
    methods_by_turns,
    output_ids,
    spelling,
    tokenizer_of,
    writer,
)

pytestmark = control_tokens_may_be_chosen


def pair(seed=0):
    """Two fresh tiny models, so that their generation configs may be changed, and their tokenizers."""
    tokenizers = [tokenizer_of("smol"), tokenizer_of("gemma")]
    return [tiny.tiny_llama(t, seed=seed + n) for n, t in enumerate(tokenizers)], tokenizers


def settings(model, **options):
    model.generation_config = GenerationConfig(**{**model.generation_config.to_dict(), **options})


# --- E1 and E2 ------------------------------------------------------------------------------------------------------


@methods_by_turns(way=["argument", "config"])
def test_an_explicit_greedy_wins_over_a_members_sampling_default(method, way):
    """E1: Six calls are alike, and like the greedy text of members without such defaults."""
    models, tokenizers = pair()
    expected = output_ids(make_ensemble(models, tokenizers, method=method), "The cat", max_new_tokens=5)
    for model in models:
        settings(model, do_sample=True, top_k=64, top_p=0.95, temperature=5.0)
    ensemble = make_ensemble(models, tokenizers, method=method)
    given = {"do_sample": False, "max_new_tokens": 5}
    if way == "config":
        given = {"generation_config": GenerationConfig(eos_token_id=2, pad_token_id=2, **given)}
    ids = tokenizers[0]("The cat", return_tensors="pt")
    for seed in range(6):
        torch.manual_seed(seed)
        assert ensemble.generate(**ids, **given).tolist() == expected


@gac_and_slowly_unite
def test_without_a_word_about_it_the_primarys_default_holds_and_the_others_does_not(method):
    """E1: The ensemble starts from a copy of the primary's generation config."""
    for sampler in (0, 1):
        models, tokenizers = pair()
        settings(models[sampler], do_sample=True, temperature=8.0, top_k=0)
        ensemble = make_ensemble(models, tokenizers, method=method)
        ids = tokenizers[0]("The cat", return_tensors="pt")
        texts = set()
        for seed in range(4):
            torch.manual_seed(seed)
            texts.add(tuple(ensemble.generate(**ids, max_new_tokens=5, eos_token_id=None)[0].tolist()))
        assert (len(texts) > 1) == (sampler == 0)
        assert ensemble.generation_config is not models[0].generation_config


@gac_and_slowly_unite
def test_of_an_assistant_only_the_end_ids_are_used(method):
    """E2: Its temperature, penalties, lengths and bans do not act; a stray `max_length` does not cut the ensemble."""
    models, tokenizers = pair()
    expected = output_ids(make_ensemble(models, tokenizers, method=method), "The cat", max_new_tokens=24)
    settings(
        models[1],
        temperature=0.3,
        do_sample=True,
        max_length=20,
        min_length=15,
        repetition_penalty=3.0,
        no_repeat_ngram_size=1,
        suppress_tokens=list(range(100)),
        num_beams=2,
        stop_strings=["e"],
        num_return_sequences=2,
    )
    found = output_ids(make_ensemble(models, tokenizers, method=method), "The cat", max_new_tokens=24)
    assert found == expected


@gac_and_slowly_unite
def test_the_primarys_penalty_is_applied_once(method):
    """E2: A default of the primary acts as the same option in the call, and the call wins over it."""
    models, tokenizers = pair(seed=5)
    plain = make_ensemble(models, tokenizers, method=method)
    options = {"max_new_tokens": 8, "return_dict_in_generate": True, "output_scores": True}
    ids = tokenizers[0]("The cat sat on the", return_tensors="pt")
    expected = plain.generate(**ids, repetition_penalty=1.4, **options)
    models = copy.deepcopy(models)
    settings(models[0], repetition_penalty=1.4)
    ensemble = make_ensemble(models, tokenizers, method=method)
    found = ensemble.generate(**ids, **options)
    assert found.sequences.tolist() == expected.sequences.tolist()
    torch.testing.assert_close(torch.stack(found.scores), torch.stack(expected.scores))
    found, expected = ensemble.generate(**ids, repetition_penalty=1.0, **options), plain.generate(**ids, **options)
    assert found.sequences.tolist() == expected.sequences.tolist()


# --- E3 and E4 ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flaw", [{"temperature": 0.7}, {"top_p": 0.8}, {"top_k": 3}, {"num_beams": 1, "early_stopping": True}]
)
def test_a_generation_config_that_cannot_be_saved_fails_before_anything_is_written(flaw, tmp_path):
    """E3: Either it can be saved and comes back, or the folder is as it was and the error says what to change."""
    models, tokenizers = pair()
    for n, (model, tokenizer) in enumerate(zip(models, tokenizers, strict=True)):
        model.save_pretrained(tmp_path / f"member-{n}")
        tokenizer.save_pretrained(tmp_path / f"member-{n}")
    ensemble = EnsembleForCausalLM.from_pretrained([tmp_path / "member-0", tmp_path / "member-1"])
    for name, value in {"do_sample": False, **flaw}.items():
        setattr(ensemble.generation_config, name, value)
    target = tmp_path / "ensemble"
    try:
        ensemble.save_pretrained(target)
    except ConfigurationError as error:
        assert "generation config" in str(error)  # noqa: PT017
        assert not target.exists()
    else:
        loaded = EnsembleForCausalLM.from_pretrained(target)
        assert loaded.generation_config.to_dict() == ensemble.generation_config.to_dict()
    ensemble.generation_config = GenerationConfig(do_sample=True, **{k: v for k, v in flaw.items() if k[0] == "t"})
    ensemble.save_pretrained(target)
    assert EnsembleForCausalLM.from_pretrained(target).generation_config.do_sample is True


@methods_by_turns(name=["smol", "wordpiece"])
def test_token_type_ids_are_tolerated(method, name):
    """E4: A tokenizer's output, unpacked into the call."""
    tokenizer = tokenizer_of(name)
    models = [tiny.tiny_llama(tokenizer, seed=1), tiny.tiny_llama(tokenizer, seed=2)]
    ensemble = make_ensemble(models, [tokenizer] * 2, method=method)
    plain = tokenizer("the cat", return_tensors="pt", return_token_type_ids=False)
    typed = tokenizer("the cat", return_tensors="pt", return_token_type_ids=True)
    assert "token_type_ids" in typed
    for weights in (None, [1, 0]):
        options = {"max_new_tokens": 3, "weights": weights}
        assert ensemble.generate(**typed, **options).tolist() == ensemble.generate(**plain, **options).tolist()


@pytest.mark.parametrize("name", ["max_new_token", "temprature", "topk", "weight", "methods", "do_smaple"])
@pytest.mark.parametrize("weights", [None, [1, 0]])
def test_a_misspelled_option_is_refused_by_name(name, weights):
    """E4: Also where the primary runs alone."""
    ensemble = CORE_RECIPES[0].ensemble
    with pytest.raises(ValueError, match=name):
        ensemble.generate(torch.tensor([[5]]), max_new_tokens=2, weights=weights, **{name: 1})


# --- E5 and E6 ------------------------------------------------------------------------------------------------------


class Keep(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


@pytest.fixture
def logged():
    handler = Keep()
    logging.getLogger("transformers").addHandler(handler)
    yield handler.messages
    logging.getLogger("transformers").removeHandler(handler)


def as_object(ensemble, folder):
    return {"model": ensemble, "tokenizer": ensemble.tokenizer}


def as_folder(ensemble, folder):
    paths = []
    for n, (model, tokenizer) in enumerate(zip(ensemble.members, ensemble.tokenizers, strict=True)):
        paths.append(folder / f"member-{n}")
        model.save_pretrained(paths[-1])
        tokenizer.save_pretrained(paths[-1])
    EnsembleForCausalLM.from_pretrained(paths, method="gac").save_pretrained(folder / "ensemble")
    return {"model": str(folder / "ensemble")}


@pytest.mark.parametrize("given", [as_object, as_folder])
def test_the_pipeline_takes_an_ensemble_without_a_word(given, logged, tmp_path):
    """E5: As an object and from a folder: text, a list, batches, several sequences; nothing is said to be unsupported."""
    ensemble = CORE_RECIPES[0].ensemble
    generate = pipeline("text-generation", **given(ensemble, tmp_path))
    options = {"max_new_tokens": 4, "do_sample": False} | ({"method": "gac"} if given is as_object else {})
    alone = [generate(prompt, **options)[0]["generated_text"] for prompt in PROMPTS]
    assert all(text.startswith(prompt) and text != prompt for text, prompt in zip(alone, PROMPTS, strict=True))
    for batch_size in (1, 2, 3):
        found = generate(list(PROMPTS), batch_size=batch_size, **options)
        assert [one[0]["generated_text"] for one in found] == alone
    torch.manual_seed(0)
    options |= {"do_sample": True, "temperature": 5.0, "num_return_sequences": 2}
    found = generate(list(PROMPTS[:2]), batch_size=2, **options)
    assert [len(one) for one in found] == [2, 2]
    for one, prompt in zip(found, PROMPTS, strict=False):
        assert all(text["generated_text"].startswith(prompt) for text in one)
        assert one[0] != one[1]
    assert not [m for m in logged if "support" in m.lower()]


CUTS = {"King , Gertrude": " , and", "ﬁle ": "ﬁ x", "ends ": "here", "a\n": "\n b", "½": " x²", "今天": "天气"}


@methods_by_turns(names=[("smol", "gemma"), ("gemma", "smol"), ("nfkc", "gemma")])
@members_may_be_lossy
def test_only_the_new_text_is_exactly_that(method, names):
    """E6: And the full text is the input and the new text; what the primary makes of the input does not matter."""
    first, second = (tokenizer_of(name) for name in names)
    # Its view of each prompt, as far as it has one of its own.
    seen = {prompt: spelling(first).text_of_prompt(first(prompt)["input_ids"]).decode() for prompt in CUTS}
    wholes = [seen[prompt] + new for prompt, new in CUTS.items()]
    ensemble = ensemble_of((first, writer(first, *wholes)), (second, writer(second, *wholes)), method=method)
    generate = pipeline("text-generation", model=ensemble, tokenizer=ensemble.tokenizer)
    options = {"max_new_tokens": 30, "do_sample": False}
    for prompt, new in CUTS.items():
        assert generate(prompt, return_full_text=False, **options)[0]["generated_text"] == new
    found = generate(list(CUTS), batch_size=3, **options)
    assert [one[0]["generated_text"] for one in found] == [prompt + new for prompt, new in CUTS.items()]


@each_method
def test_the_new_text_after_a_special_token_in_the_prompt_is_exactly_that(method):
    """E6: What the user spelled as a marker is the primary's control token; the cut is right all the same."""
    ensemble = duet(("smol", "gemma"), "Hi there you", method=method)
    generate = pipeline("text-generation", model=ensemble, tokenizer=ensemble.tokenizer)
    prompt = "Hi<|im_end|> there"
    options = {"max_new_tokens": 30, "do_sample": False}
    with pytest.warns(UserWarning, match="control tokens of the primary"):
        assert generate(prompt, return_full_text=False, **options)[0]["generated_text"] == " you"
        assert generate(prompt, **options)[0]["generated_text"] == prompt + " you"


# --- E7 and E8 ------------------------------------------------------------------------------------------------------


@each_method
def test_several_sequences_of_several_prompts_come_with_their_scores(method):
    """E7: Two prompts by three: six rows in order, scores of (6, V), and each chosen id's score is there."""
    ensemble = CORE_RECIPES[0].ensemble
    rows = prompt_rows(ensemble)[:2]
    batch = padded(rows, fill=lambda n: 2)
    torch.manual_seed(0)
    output = run(
        ensemble, batch, method=method, do_sample=True, num_return_sequences=3, output_scores=True, temperature=2.0
    )
    width, vocab_size = batch["input_ids"].shape[1], ensemble.config.get_text_config().vocab_size
    assert output.sequences[:, :width].tolist() == [batch["input_ids"][row // 3].tolist() for row in range(6)]
    assert {tuple(scores.shape) for scores in output.scores} == {(6, vocab_size)}
    assert len(output.scores) == output.sequences.shape[1] - width
    found = ensemble.compute_transition_scores(output.sequences, output.scores, normalize_logits=True)
    end = ensemble.tokenizer.eos_token_id
    for row in range(6):
        for step, i in enumerate(new_ids(output, row, [end])):
            assert -20 < found[row, step] <= 0
            assert found[row, step] == pytest.approx(output.scores[step][row].log_softmax(-1)[i].item(), abs=1e-5)
    alone = run(ensemble, rows[:1], method=method, output_logits=True, max_new_tokens=1)
    for row in range(3):
        torch.testing.assert_close(output.logits[0][row].exp(), alone.logits[0][0].exp(), atol=1e-5, rtol=1e-3)


@each_method
@pytest.mark.parametrize("names", [("smol", "gemma"), ("small", "gemma")], ids=" + ".join)
def test_a_repetition_penalty_does_not_see_padding(method, names):
    """E8: O5 with a penalty on, pad = EOS (and not): a row ends where it ends alone."""
    first, second = (tokenizer_of(name) for name in names)
    a, b, c, end = (*(id_of(first, text) for text in "abc"), first.eos_token_id)
    # The end is the best, unless it is penalised: then `c` is, which no prompt holds.
    row = torch.full((tiny.rows_of(first),), -40.0)
    row[[a, b, c, end]] = torch.tensor([0.5, 0.5, 3.6, 4.0])
    ensemble = ensemble_of((first, [row]), (second, ()), method=method, weights=[0.95, 0.05])
    rows = [[a, b], [b, a, a, b, a, b, a]]
    options = {"method": method, "repetition_penalty": 1.3, "max_new_tokens": 5, "pad_token_id": end}
    alone = [run(ensemble, [row], **options) for row in rows]
    together = run(ensemble, padded(rows, fill=lambda n: end), **options)
    for n, output in enumerate(alone):
        assert new_ids(output, 0, [end]) == [end]
        assert new_ids(together, n, [end]) == [end]


def test_a_repetition_penalty_of_spans_does_not_see_padding():
    """E8: O5; every member proposes in its own ids, without padding, row by row."""
    tokenizers = [tiny.smol_like(), tiny.gemma_like()]
    ensemble = make_ensemble([tiny.tiny_llama(t, seed=n) for n, t in enumerate(tokenizers)], tokenizers)
    options = {"method": "sweetspan", "repetition_penalty": 1.5, "max_new_tokens": 6, "do_sample": False}
    rows = [ensemble.tokenizer(prompt)["input_ids"] for prompt in ("The", "The capital of France is")]
    batch = ensemble.generate(**padded(rows, fill=lambda _: ensemble.tokenizer.pad_token_id), **options)
    width = max(map(len, rows))
    for row, ids in enumerate(rows):
        alone = ensemble.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist()
        assert batch[row, width:].tolist()[: len(alone)] == alone


@each_method
def test_a_repetition_penalty_is_not_weakened_by_other_cuts_of_a_word(method):
    """E8: In the primary's ids alone: ` capital` in the prompt counts, whatever ids the other has for it."""
    large, gemma = tokenizer_of("large"), tokenizer_of("gemma")
    capital, a = id_of(large, " capital"), id_of(large, " a")
    row = torch.full((tiny.rows_of(large),), -40.0)
    row[[capital, a]] = torch.tensor([3.3, 3.0])
    other = dict.fromkeys((spelling(gemma).encode(b" capital")[0], id_of(gemma, " a")), 0.5)
    ensemble = ensemble_of((large, [row]), (gemma, [other]), method=method, weights=[0.9, 0.1])
    for penalty, expected in ((1.0, capital), (1.3, a)):
        ids = output_ids(ensemble, "The capital", max_new_tokens=1, repetition_penalty=penalty)[0]
        assert ids[-1] == expected


# --- E10 ------------------------------------------------------------------------------------------------------------


class Silent(Recorder):
    def __init__(self, tokenizer, skip_prompt):
        super().__init__(tokenizer)
        self.skip_prompt = skip_prompt
        self.decode_kwargs = {"skip_special_tokens": True}
        self.ends = 0

    def end(self):
        self.ends += 1
        super().end()


@methods_by_turns(names=[("smol", "gemma"), ("gemma", "smol"), ("unigram", "smol")], skip_prompt=[True, False])
def test_streamed_characters_in_pieces_are_the_final_text(method, names, skip_prompt):
    """E10: O7 for Chinese, emoji and Thai; the prompt is sent once, and the end is told once."""
    whole = "Say 今天天气很好。😀 👍🏽 ไทย\nend"
    ensemble = duet(names, whole, method=method)
    streamer = Silent(ensemble.tokenizer, skip_prompt)
    ids = output_ids(ensemble, "Say ", streamer=streamer)[0]
    assert streamer.ids == ids
    assert streamer.ends == streamer.num_ends == 1
    if names[0] != "unigram" or not skip_prompt:
        assert streamer.text == (whole.removeprefix("Say ") if skip_prompt else whole)


@each_method
def test_a_stream_of_no_new_text_is_ended_once(method):
    """E10: Where the end comes first."""
    ensemble = duet(("smol", "gemma"), "Say", method=method)
    streamer = Silent(ensemble.tokenizer, True)
    ids = output_ids(ensemble, "Say", streamer=streamer)[0]
    assert streamer.ids == ids == [*ensemble.tokenizer("Say")["input_ids"], 2]
    assert (streamer.text, streamer.ends) == ("", 1)


@each_method
@pytest.mark.parametrize(
    "options", [{"batch": 2}, {"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}], ids=str
)
def test_streams_of_several_rows_are_refused_as_in_transformers(method, options):
    """E10: With the same kind of error as one model alone raises, and the stream is ended."""
    ensemble = CORE_RECIPES[0].ensemble
    options = dict(options)
    rows = prompt_rows(ensemble)[:1] * options.pop("batch", 1)
    for model in (ensemble.members[0], ensemble):
        extra = {"method": method} if model is ensemble else {}
        with pytest.raises(ValueError, match="streamer|TextStreamer"):
            model.generate(
                torch.tensor(rows), streamer=TextStreamer(ensemble.tokenizer), max_new_tokens=2, **options, **extra
            )


# --- E13 and E14 ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    [pytest.param(GacConfig(), id="gac"), pytest.param(UniteConfig(top_k=2), id="unite", marks=pytest.mark.slow)],
)
def test_temperature_acts_after_mixing(method):
    """E13: (0.7 p + 0.3 q)^2 over its sum at temperature 0.5, not the mixture of sharpened members."""
    small = tokenizer_of("small")
    a, b = id_of(small, "a"), id_of(small, "b")
    ensemble = ensemble_of((small, [{a: 0.9, b: 0.1}]), (small, [{a: 0.2, b: 0.8}]), method=method, weights=[0.7, 0.3])
    mixed = torch.tensor([0.7 * 0.9 + 0.3 * 0.2, 0.7 * 0.1 + 0.3 * 0.8])
    ids, options = torch.tensor([[a]]), {"do_sample": True, "max_new_tokens": 1, "temperature": 0.5, "top_k": 0}
    output = ensemble.generate(ids, return_dict_in_generate=True, output_scores=True, **options)
    expected = mixed**2 / (mixed**2).sum()
    torch.testing.assert_close(output.scores[0][0].softmax(-1)[[a, b]], expected, atol=1e-5, rtol=1e-4)
    torch.manual_seed(3)
    drawn = ensemble.generate(ids, num_return_sequences=1000, **options)[:, 1]
    assert (drawn == a).float().mean().item() == pytest.approx(expected[0].item(), abs=0.05)
    torch.manual_seed(3)
    assert ensemble.generate(ids, num_return_sequences=1000, **options)[:, 1].tolist() == drawn.tolist()
    # Rows draw independently: neighbours agree as often as two draws of chance.
    agree = (drawn[1:] == drawn[:-1]).float().mean().item()
    assert agree == pytest.approx((expected**2).sum().item(), abs=0.06)


@pytest.mark.parametrize("method", [GacConfig(), UniteConfig(top_k=3)], ids=["gac", "unite"])
@pytest.mark.parametrize(("options", "kept"), [({"top_k": 2}, "ab"), ({"top_p": 0.75}, "ab"), ({"top_p": 0.4}, "a")])
def test_filters_act_on_the_mixture(method, options, kept):
    """E13: `c` is best for one member and falls out; `b` is nobody's best and stays."""
    small = tokenizer_of("small")
    a, b, c = (id_of(small, text) for text in "abc")
    members = [(small, [{a: 0.6, b: 0.35, c: 0.05}]), (small, [{c: 0.4, b: 0.35, a: 0.25}])]
    ensemble = ensemble_of(*members, method=method)
    options = {"top_k": 0, "do_sample": True, "max_new_tokens": 1, **options}
    output = ensemble.generate(torch.tensor([[a]]), return_dict_in_generate=True, output_scores=True, **options)
    assert (output.scores[0][0] > -torch.inf).nonzero()[:, 0].tolist() == [id_of(small, text) for text in kept]


@each_method
@pytest.mark.parametrize("count", [2, 3, 4])
def test_default_weights_are_equal_and_sum_to_one(method, count):
    """E14: Also the first member's, in what is mixed as in what is asked for explicitly."""
    small = tokenizer_of("small")
    words = [id_of(small, text) for text in "abcd"][:count]
    ensemble = ensemble_of(*((small, [{word: 1.0}]) for word in words), method=method)
    options = {"max_new_tokens": 1, "return_dict_in_generate": True, "output_logits": True}
    for weights in (None, [1] * count, [0.25] * count):
        probs = ensemble.generate(torch.tensor([[words[0]]]), weights=weights, **options).logits[0][0].exp()
        assert probs[words].tolist() == pytest.approx([1 / count] * count, abs=1e-5)
        assert probs.sum().item() == pytest.approx(1, abs=1e-5)
