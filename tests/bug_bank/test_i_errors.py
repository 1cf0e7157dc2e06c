"""Bug bank, section I: bad input and errors.

| case | where |
| --- | --- |
| I1 | here; `test_generate.py` (an empty prompt starts from the first token) |
| I2 | here in each member's own count; `test_member.py` (learned positions) |
| I3 | here; `test_generate.py` (inputs that do not fit); `vocabulary/test_encoding.py` (tokens without a row) |
| I4 | here; `test_generate.py` (a stream is ended once also when a call fails) |
| I6 | here |
| I7 | here; `test_member.py` (what can be a member) |
| I8 | here at construction; `test_generate.py` (what cannot work is refused) |
| I9 | here; `test_generate.py` (a call after a failure) |
"""

import math
import shutil
import threading

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, TextIteratorStreamer, pipeline

from hf_ensemble import ConfigurationError, EnsembleForCausalLM, GacConfig, MemberError, UniteConfig
from tests import tiny
from tests.contracts import (
    CORE_RECIPES,
    Recorder,
    assert_same_output,
    changed_logits,
    from_call,
    make_ensemble,
    new_ids,
    padded,
    prompt_rows,
    run,
    state_of,
)

from .kit import (
    contexts_of,
    control_tokens_may_be_chosen,
    duet,
    each_method,
    ensemble_of,
    id_of,
    methods_by_turns,
    output_ids,
    ready,
    spelling,
    texts_of,
    texts_shown_to,
    tokenizer_of,
    writer,
)

pytestmark = control_tokens_may_be_chosen
each_pair = pytest.mark.parametrize("names", [("smol", "gemma"), ("gemma", "smol")], ids=" + ".join)

# --- I1 -------------------------------------------------------------------------------------------------------------


@pytest.mark.crossed
@each_method
@each_pair
@pytest.mark.parametrize("prompt", ["", " ", "\n", "\n\n ", "\t"])
def test_an_empty_prompt_or_one_of_white_space_is_continued(method, names, prompt):
    """I1: Each member starts from its BOS (SmolLM2's kind too, which adds none by itself) and the text as it is."""
    ensemble = duet(names, prompt + "One two", method=method)
    inputs = ensemble.tokenizer(prompt, return_tensors="pt")
    ids = ensemble.generate(**inputs, max_new_tokens=30)[0].tolist()
    assert spelling(ensemble.tokenizers[0]).text_of_prompt(ids).decode() == prompt + "One two"
    starts = {"smol": "" if prompt else "<|im_start|>", "gemma": "<bos>"}
    for index, name in enumerate(names):
        assert texts_shown_to(ensemble, index)[0] == starts[name] + prompt


@each_method
@each_pair
def test_an_empty_row_does_not_harm_the_others(method, names):
    """I1: A batch of nothing, white space and text."""
    ensemble = duet(names, "One two", " four", "Hello there", method=method)
    assert texts_of(ensemble, ["", "Hello", " "]) == ["One two", "Hello there", " four"]
    assert texts_of(ensemble, ["", ""]) == ["One two"] * 2


@each_method
def test_a_pipeline_takes_an_empty_prompt(method):
    """I1: By itself: the pipeline's own batching cannot pad a row without ids, with any model."""
    ensemble = duet(("smol", "gemma"), "One two", method=method)
    generate = pipeline("text-generation", model=ensemble, tokenizer=ensemble.tokenizer)
    options = {"max_new_tokens": 9, "do_sample": False}
    assert generate("", **options)[0]["generated_text"] == "One two"
    assert generate([""], return_full_text=False, **options)[0][0]["generated_text"] == "One two"


@pytest.mark.parametrize("index", [0, 1])
@each_method
def test_an_empty_prompt_without_anything_to_start_from_names_the_member(method, index):
    """I1: A tokenizer that has neither BOS nor EOS."""
    tokenizers = [tokenizer_of("gemma"), tokenizer_of("gemma")]
    tokenizers[index] = tokenizer_of("bare")
    ensemble = make_ensemble([tiny.ScriptedModel(t) for t in tokenizers], tokenizers, method=method)
    empty = torch.zeros(1, 0).long() if index == 0 else tokenizers[0]("", return_tensors="pt")["input_ids"]
    with pytest.raises(ConfigurationError, match=f"empty.*member-{index}|member-{index}.*empty"):
        ensemble.generate(empty, max_new_tokens=2)


@pytest.mark.parametrize("given", [[], [[]], [[1, 2]], "text", ["text"], 3, torch.tensor([])], ids=str)
@pytest.mark.parametrize("weights", [None, [1, 0]])
def test_what_is_no_tensor_of_ids_is_refused_plainly(given, weights):
    """I1: Lists, text, numbers, and a tensor without a row."""
    ensemble = CORE_RECIPES[0].ensemble
    with pytest.raises((TypeError, ValueError), match="input_ids"):
        ensemble.generate(given, max_new_tokens=2, weights=weights)


@each_method
def test_no_prompt_at_all_is_the_start_token_or_a_plain_error(method):
    """I1: `generate()` and `generate(None)`, as for one model: the text from BOS."""
    ensemble = CORE_RECIPES[1].ensemble
    expected = run(ensemble, [[ensemble.tokenizer.bos_token_id]], method=method).sequences.tolist()
    for given in ({}, {"inputs": None}, {"input_ids": None}):
        try:
            found = ensemble.generate(**given, max_new_tokens=6, do_sample=False, method=method).tolist()
        except (TypeError, ValueError) as error:
            assert "input" in str(error)  # noqa: PT017
        else:
            assert found == expected


# --- I2 and I3 ------------------------------------------------------------------------------------------------------


@each_method
def test_positions_are_counted_in_each_members_own_ids(method):
    """I2: A prompt of few ids for the primary and too many for the other, and the reverse, before any forward."""
    few, many = tokenizer_of("large"), tiny.byte_level_bpe(270)
    text = "The capital of France is Paris, and the capital of Germany is Berlin."
    count = len(many(text)["input_ids"])
    assert len(few(text)["input_ids"]) < 30 < count
    for order in ((0, 1), (1, 0)):
        tokenizers = [(few, many)[n] for n in order]
        models = [tiny.tiny_gpt2(t, n_positions=30) for t in tokenizers]
        ensemble = make_ensemble(models, tokenizers, method=method)
        output_ids(ensemble, "The", max_new_tokens=1)
        ran = []
        for model in models:
            model.register_forward_pre_hook(lambda module, args, ran=ran: ran.append(module))
        with pytest.raises(ConfigurationError, match=rf"member-{order.index(1)}.* 30 .*{count}"):
            output_ids(ensemble, text, max_new_tokens=2)
        assert not ran


ADDED = ["<tool>", "</tool>", " wow", "ééé"]


@each_method
def test_an_assistants_tokens_without_a_row_are_spelled_out(method):
    """I3: Four added tokens, no rows for them, all in the prompt and in what is written."""
    tokenizer = tiny.byte_level_bpe(400, added=ADDED)
    model = tiny.ScriptedModel(len(tokenizer) - 4)
    model.script = writer(tokenizer, "".join(ADDED) + ":" + "".join(ADDED))
    smol = tokenizer_of("smol")
    whole = "".join(ADDED) + ":" + "".join(ADDED)
    members = [tiny.ScriptedModel(smol, writer(smol, whole)), model]
    ensemble = ready(make_ensemble(members, [smol, tokenizer], method=method))
    model.script = ()
    assert texts_of(ensemble, ["".join(ADDED) + ":"]) == [whole]
    contexts = contexts_of(ensemble, 1)
    assert max(max(context) for context in contexts) < len(tokenizer) - 4
    assert texts_shown_to(ensemble, 1)[0] == "".join(ADDED) + ":"


@each_method
def test_a_primarys_tokens_without_a_row_are_refused_with_their_range(method):
    """I3: Its own ids in the prompt: nothing but a clear error can be given, before any forward."""
    tokenizer = tiny.byte_level_bpe(400, added=ADDED)
    rows = len(tokenizer) - 4
    model = tiny.tiny_llama(rows)
    ensemble = make_ensemble([model, tiny.tiny_llama(tokenizer)], [tokenizer] * 2, method=method)
    for text in ADDED:
        with pytest.raises(ConfigurationError, match=rf"member-0.*{rows - 1}"):
            output_ids(ensemble, f"Say {text}", max_new_tokens=2)
    with pytest.raises(ConfigurationError, match="member-0"):
        ensemble.generate(**tokenizer_of("gemma")("שלום לכולם", return_tensors="pt"), max_new_tokens=2)


# --- I4 -------------------------------------------------------------------------------------------------------------


class Failing:
    """A processor that fails at its third call."""

    calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        if self.calls == 3:
            raise RuntimeError("the processor broke")
        return scores


@each_method
@pytest.mark.parametrize("failure", ["argument", "input", "member", "processor"])
def test_a_reader_without_a_timeout_is_let_go_when_generation_fails(method, failure):
    """I4: The loop over the stream ends and the error is the thread's."""
    ensemble = CORE_RECIPES[0].ensemble
    rows = prompt_rows(ensemble)[:1]
    streamer = TextIteratorStreamer(ensemble.tokenizer, skip_prompt=True)
    errors = []
    options = {"argument": {"max_new_token": 3}, "processor": {"logits_processor": [Failing()]}}.get(failure, {})
    given = [[10**6]] if failure == "input" else rows

    def fail(logits):
        raise ValueError("the member broke")

    def work():
        try:
            run(ensemble, given, method=method, streamer=streamer, **options)
        except Exception as error:
            errors.append(error)

    change = from_call(2, fail) if failure == "member" else lambda logits: logits
    with changed_logits(ensemble.members[1], change):
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        reader = threading.Thread(target=lambda: list(streamer), daemon=True)
        reader.start()
        reader.join(30)
        thread.join(30)
    assert not reader.is_alive()
    assert not thread.is_alive()
    expected = {"member": MemberError, "processor": RuntimeError}.get(failure, ValueError)
    assert [isinstance(error, expected) for error in errors] == [True]


@each_method
def test_a_reader_that_stops_reading_blocks_nothing(method):
    """I4: Generation runs to its end, and the next call is right."""
    ensemble = CORE_RECIPES[0].ensemble
    rows = prompt_rows(ensemble)[:1]
    streamer = TextIteratorStreamer(ensemble.tokenizer, skip_prompt=True)
    found = []
    thread = threading.Thread(target=lambda: found.append(run(ensemble, rows, method=method, streamer=streamer)))
    thread.start()
    next(streamer)
    thread.join(30)
    assert not thread.is_alive()
    assert_same_output(found[0], run(ensemble, rows, method=method))


# --- I6 -------------------------------------------------------------------------------------------------------------


@methods_by_turns(index=[0, 1])
def test_a_member_without_pad_and_end_works_in_a_batch(method, index):
    """I6: Any id under a mask of 0; neither the model nor the tokenizer is changed."""
    tokenizers = [tokenizer_of("gemma"), tokenizer_of("gemma")]
    tokenizers[index] = bare = tokenizer_of("bare")
    models = [tiny.tiny_llama(t, seed=n) for n, t in enumerate(tokenizers)]
    ensemble = make_ensemble(models, tokenizers, method=method)
    rows = prompt_rows(ensemble)[:2]
    before = (bare.backend_tokenizer.to_str(), bare.special_tokens_map, models[index].config.to_dict())
    alone = [run(ensemble, [row], max_new_tokens=4) for row in rows]
    together = run(ensemble, padded(rows, fill=lambda n: n), max_new_tokens=4)
    for row, output in enumerate(alone):
        ends = [1] if index == 1 else []
        assert new_ids(together, row, ends) == new_ids(output, 0, ends)
    assert (bare.backend_tokenizer.to_str(), bare.special_tokens_map, models[index].config.to_dict()) == before
    assert models[index].get_input_embeddings().weight.shape[0] == tiny.rows_of(bare)


# --- I7 -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of members that can and that cannot be such, by kind."""
    base, tokenizer = tmp_path_factory.mktemp("members"), tokenizer_of("small")
    models = {
        "good": tiny.tiny_llama(tokenizer, num_hidden_layers=1),
        "encoder-only": tiny.tiny_bert(tokenizer, num_hidden_layers=1),
        "headless": tiny.tiny_llama(tokenizer, num_hidden_layers=1).model,
        "encoder-decoder": tiny.tiny_m2m100(tokenizer),
    }
    for name, model in models.items():
        model.save_pretrained(base / name)
        tokenizer.save_pretrained(base / name)
    shutil.copytree(base / "good", base / "weightless", ignore=shutil.ignore_patterns("*.safetensors"))
    shutil.copytree(base / "good", base / "without-config", ignore=shutil.ignore_patterns("config.json"))
    (base / "empty").mkdir()
    make = EnsembleForCausalLM.from_pretrained([base / "good"])
    make.save_pretrained(base / "an-ensemble")
    return base


BAD = (
    "encoder-only",
    "headless",
    "encoder-decoder",
    "weightless",
    "without-config",
    "empty",
    "missing",
    "an-ensemble",
)


# One with an encoder can be an assistant.
@pytest.mark.parametrize(
    ("place", "name"), [(n, name) for n in range(3) for name in BAD if n == 0 or name != "encoder-decoder"]
)
def test_what_cannot_be_a_member_is_named_before_any_weight_is_read(folders, monkeypatch, name, place):
    """I7 and E11: Wherever it stands in the list."""

    def refuse(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", refuse)
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", refuse)
    items = [str(folders / "good")] * 3
    items[place] = str(folders / name)
    with pytest.raises(ConfigurationError, match=name):
        EnsembleForCausalLM.from_pretrained(items)


@pytest.mark.parametrize("items", [[], ()], ids=str)
def test_an_empty_list_is_refused(items):
    """I7: In a line that says what is needed."""
    with pytest.raises(ConfigurationError, match="at least one member"):
        EnsembleForCausalLM.from_pretrained(items)


def test_one_string_is_a_saved_ensemble_or_an_ensemble_of_one(folders):
    """I7: As documented; and the same name twice is the same model twice."""
    one = EnsembleForCausalLM.from_pretrained(str(folders / "good"))
    saved = EnsembleForCausalLM.from_pretrained(str(folders / "an-ensemble"))
    assert len(one.members) == len(saved.members) == 1
    assert output_ids(one, "The cat", max_new_tokens=3) == output_ids(saved, "The cat", max_new_tokens=3)
    with pytest.raises(ConfigurationError, match="missing"):
        EnsembleForCausalLM.from_pretrained(str(folders / "missing"))
    with pytest.raises(ConfigurationError, match="headless"):
        EnsembleForCausalLM.from_pretrained(str(folders / "headless"))


# --- I8 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"weights": [1.0]}, "one entry per member"),
        ({"weights": [1.0, 2.0, 3.0]}, "one entry per member"),
        ({"weights": [1.5, -0.5]}, "at least 0"),
        ({"weights": [0, 0]}, "all be 0"),
        ({"weights": [math.nan, 1]}, "finite"),
        ({"method": "average"}, "gac.*unite"),
        ({"method": {"name": "unite", "k": 3}}, "'k'"),
        ({"method": {"name": "unite", "top_k": 0}}, "top_k"),
        ({"method": {"name": "gac", "top_k": 3}}, "top_k"),
        ({"dtype": ["float32"]}, "one entry per member"),
        ({"tokenizers": [None]}, "one entry per member"),
        ({"device_map": ["cpu", "cpu", "cpu"]}, "one entry per member"),
    ],
    ids=str,
)
def test_bad_settings_are_refused_before_any_weight_is_read(folders, monkeypatch, options, match):
    """I8: At construction, with the rule and the value."""

    def refuse(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", refuse)
    with pytest.raises(ConfigurationError, match=match):
        EnsembleForCausalLM.from_pretrained([folders / "good"] * 2, **options)


@pytest.mark.parametrize("weights", [[1, 3], [10, 30], (0.25, 0.75), torch.tensor([1.0, 3.0]), [True, 3]], ids=str)
def test_weights_of_any_sum_are_scaled(weights):
    """I8: Whole numbers, tuples and tensors too, at construction and in a call."""
    small = tokenizer_of("small")
    a, b = id_of(small, "a"), id_of(small, "b")
    models = [tiny.ScriptedModel(small, [{i: 1.0}]) for i in (a, b)]
    ensemble = make_ensemble(models, [small] * 2, method="gac", weights=weights)
    assert ensemble.config.weights == [0.25, 0.75]
    for given in (None, weights):
        probs = run(ensemble, [[a]], max_new_tokens=1, weights=given).logits[0][0].exp()
        assert probs[[a, b]].tolist() == pytest.approx([0.25, 0.75], abs=1e-5)


@pytest.mark.parametrize("do_sample", [False, True])
def test_more_candidates_than_there_are_entries_are_all_of_them(do_sample):
    """I8: For UniTE's own k and for the filter of the call; beyond every vocabulary it is the whole mixture."""
    small = tokenizer_of("small")
    a, b = id_of(small, "a"), id_of(small, "b")
    tokenizers = [small, tokenizer_of("gemma")]
    ensemble = ensemble_of((small, [{a: 0.6, b: 0.4}]), (tokenizers[1], ()))
    for method in (UniteConfig(top_k=10**6), UniteConfig(top_k=len(small) + 1), GacConfig()):
        output = run(ensemble, [[a]], method=method, max_new_tokens=1, do_sample=do_sample, top_k=10**6)
        assert output.logits[0].exp().sum().item() == pytest.approx(1, abs=1e-5)
        assert output.logits[0][0].argmax() == a


# --- I9 -------------------------------------------------------------------------------------------------------------


@methods_by_turns(place=["processor", "criterion", "streamer", "primary", "assistant", "prefix function"])
def test_nothing_is_changed_by_a_call_that_fails(method, place):
    """I9: Training and grad mode, tokenizers, configurations and the random state, whatever fails at step 3."""
    ensemble = CORE_RECIPES[0].ensemble
    rows = prompt_rows(ensemble)[:1]
    run(ensemble, rows, method=method)

    class Breaking(Recorder):
        def put(self, value):
            super().put(value)
            if len(self.ids) > len(rows[0]) + 2:
                raise RuntimeError("the reader broke")

    def criterion(ids, scores, **kwargs):
        if ids.shape[1] == len(rows[0]) + 3:
            raise RuntimeError("the criterion broke")
        return torch.zeros(len(ids), dtype=torch.bool)

    def allowed(row, ids):
        if len(ids) == len(rows[0]) + 2:
            raise RuntimeError("the function broke")
        return list(range(3, 300))

    def fail(logits):
        raise RuntimeError("the member broke")

    options = {
        "processor": lambda: {"logits_processor": [Failing()]},
        "criterion": lambda: {"stopping_criteria": [criterion]},
        "streamer": lambda: {"streamer": Breaking(ensemble.tokenizer)},
        "prefix function": lambda: {"prefix_allowed_tokens_fn": allowed},
    }.get(place, dict)
    before = state_of(ensemble)
    for _ in range(2):
        broken = {"primary": 0, "assistant": 1}.get(place)
        change = (lambda logits: logits) if broken is None else from_call(2, fail)
        with (
            torch.enable_grad(),
            changed_logits(ensemble.members[broken or 0], change),
            pytest.raises(RuntimeError, match="broke"),
        ):
            run(ensemble, rows, method=method, eos_token_id=None, **options())
    after = state_of(ensemble)
    for name, value in before.items():
        assert after[name] == value, name
