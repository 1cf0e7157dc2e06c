"""What must hold for every way of choosing among whole answers, and any members."""

import functools
import json
import re
import threading
import warnings

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, TextIteratorStreamer, pipeline

from hf_ensemble import (
    EnsembleForCausalLM,
    FuseConfig,
    GacConfig,
    MbrConfig,
    MemberConfig,
    RerankConfig,
    SweetSpanConfig,
    VoteConfig,
)
from hf_ensemble.answers.fusers import Fuser
from hf_ensemble.answers.judges import RewardModel
from hf_ensemble.errors import ConfigurationError
from tests import tiny
from tests.answers import functions
from tests.bug_bank import kit
from tests.contracts import PROMPTS, Recorder, make_ensemble, padded, prompt_rows, state_of

pytestmark = [kit.control_tokens_may_be_chosen]

CONFIGS = {
    "vote": VoteConfig(),
    "mbr": MbrConfig(),
    "aggregated": MbrConfig(aggregate=True),
    "rerank": RerankConfig(),
    "with_methods": VoteConfig(methods=("gac", "sweetspan"), extract=r"[a-z]"),
}
each_config = pytest.mark.parametrize(
    "config",
    [pytest.param(c, id=name, marks=[pytest.mark.slow] * (name == "with_methods")) for name, c in CONFIGS.items()],
)
choosing = pytest.mark.parametrize("config", list(CONFIGS.values())[:4], ids=list(CONFIGS)[:4])
NUM_NEW = 8


@functools.cache
def member(name, seed=0):
    tokenizer = kit.tokenizer_of(name)
    make = {"gemma": tiny.tiny_gemma3, "qwen": tiny.tiny_gpt2}.get(name, tiny.tiny_llama)
    return make(tokenizer, seed=seed), tokenizer


@functools.cache
def ensemble_of(*names):
    return make_ensemble(*zip(*map(member, names), strict=True))


def run(model, prompts=PROMPTS, **options):
    tokenizer = getattr(model, "tokenizer", None) or kit.tokenizer_of("smol")
    rows = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return model.generate(
        **padded(rows, fill=lambda n: pad), **{"max_new_tokens": NUM_NEW, "do_sample": False, **options}
    )


def texts(ensemble, sequences, prompts=PROMPTS):
    """What was written to each prompt."""
    width = max(len(ids) for ids in ensemble.tokenizer(list(prompts))["input_ids"])
    return ensemble.tokenizer.batch_decode(sequences[:, width:], skip_special_tokens=True)


# --- Members --------------------------------------------------------------------------------------------------------


@choosing
def test_an_ensemble_of_one_is_that_member(config):
    model, _ = member("smol")
    one = ensemble_of("smol")
    assert run(one, method=config).tolist() == run(model, pad_token_id=one.tokenizer.pad_token_id).tolist()
    beams = run(model, num_beams=2, pad_token_id=one.tokenizer.pad_token_id)
    assert run(one, method=config, num_beams=2).tolist() == beams.tolist()


@choosing
def test_the_same_model_twice_is_that_model(config):
    """Neither tie nor likelihood prefers the other one."""
    once, twice = ensemble_of("smol"), ensemble_of("smol", "smol")
    answers = [prompt + answer for prompt, answer in zip(PROMPTS, (" Paris.", " sat.", ""), strict=True)]
    for pair in (twice, kit.duet(("smol", "smol"), *answers)):
        expected = run(once if pair is twice else kit.duet(("smol",), *answers), method=config)
        if pair is not twice:
            pair = kit.duet(("smol", "smol"), *answers)
        elif isinstance(config, RerankConfig):
            continue  # a text of random ids may be likelier when it is cut another way
        assert run(pair, method=config).tolist() == expected.tolist()


@pytest.mark.crossed
@choosing
@pytest.mark.parametrize("names", [("smol", "gemma"), ("gemma", "smol")], ids="+".join)
def test_all_weight_on_one_member_is_its_text(config, names):
    ensemble = ensemble_of(*names)
    alone = [ensemble.alone(index) for index in range(2)]
    assert run(ensemble, method=config, weights=(1, 0)).tolist() == run(alone[0], method="gac").tolist()
    answers = [prompt + answer for prompt, answer in zip(PROMPTS, (" Paris.", " sat on the mat", ""), strict=True)]
    scripted = kit.duet(names, *answers)
    found = texts(scripted, run(scripted, method=config, weights=(0, 1), max_new_tokens=30))
    assert found == [" Paris.", " sat on the mat", ""]
    primary = scripted.members[0]
    primary.calls.clear()
    run(scripted, method=config, weights=(0, 1))
    assert not primary.calls


def test_the_order_of_assistants_is_irrelevant_without_ties():
    answers = {"smol": " Berlin", "gemma": " Paris", "qwen": " Paris"}
    found = []
    for names in (("smol", "gemma", "qwen"), ("smol", "qwen", "gemma")):
        tokenizers = [kit.tokenizer_of(name) for name in names]
        scripts = [kit.writer(t, PROMPTS[0] + answers[name]) for name, t in zip(names, tokenizers, strict=True)]
        ensemble = kit.ensemble_of(*zip(tokenizers, scripts, strict=True))
        found.append([run(ensemble, PROMPTS[:1], method=config).tolist() for config in (VoteConfig(), MbrConfig())])
    assert found[0] == found[1]


# --- Calls ----------------------------------------------------------------------------------------------------------


@each_config
def test_a_row_alone_is_the_row_in_a_batch(config):
    ensemble = ensemble_of("smol", "gemma")
    together = run(ensemble, method=config)
    ends = ensemble.tokenizer.eos_token_id
    width = max(map(len, prompt_rows(ensemble)))
    for number, (prompt, row) in enumerate(zip(PROMPTS, prompt_rows(ensemble), strict=True)):
        own = run(ensemble, [prompt], method=config)[0, len(row) :].tolist()
        new = together[number, width:].tolist()
        assert new[: len(own)] == own
        assert set(new[len(own) :]) <= {ends}


@choosing
def test_prompts_padded_on_the_right_are_read_all_the_same(config):
    ensemble = ensemble_of("smol", "gemma")
    rows = prompt_rows(ensemble)
    expected = run(ensemble, method=config)
    with pytest.warns(UserWarning, match="padded on the right"):
        found = ensemble.generate(
            **padded(rows, side="right", fill=lambda n: ensemble.tokenizer.pad_token_id),
            method=config,
            max_new_tokens=NUM_NEW,
            do_sample=False,
        )
    width = max(map(len, rows))
    assert found[:, width:].tolist() == expected[:, width:].tolist()


@each_config
def test_a_call_leaves_nothing_behind(config):
    """Neither in the next result nor in anybody's configuration, tokenizer, training mode or generator."""
    ensemble = make_ensemble(*zip(member("smol"), member("gemma", 1), strict=True))
    ensemble.members[1].train()
    try:
        before = state_of(ensemble)
        first = run(ensemble, method=config)
        run(ensemble, PROMPTS[1:2], method=config, do_sample=True, seed=1, max_new_tokens=3)
        second = run(ensemble, method=config)
        after = state_of(ensemble)
    finally:
        ensemble.members[1].eval()
    for name, value in before.items():
        assert after[name] == value, name
    assert first.tolist() == second.tolist()


@pytest.mark.slow
def test_a_method_of_the_call_is_that_of_the_ensemble():
    """By name, as a configuration, as it is saved, or of the ensemble; and `generate_options` where the call is silent."""
    pair = [*zip(member("smol"), member("gemma"), strict=True)]
    config = MbrConfig(num_candidates=2, generate_options={"do_sample": True, "temperature": 0.5, "max_new_tokens": 4})
    ensemble, plain = make_ensemble(*pair, method=config), ensemble_of("smol", "gemma")
    inputs = plain.tokenizer(PROMPTS[0], return_tensors="pt")
    said = {"do_sample": True, "temperature": 0.5, "max_new_tokens": 4}
    expected = plain.generate(**inputs, method=MbrConfig(num_candidates=2), seed=5, **said).tolist()
    assert ensemble.generate(**inputs, seed=5).tolist() == expected
    assert plain.generate(**inputs, seed=5, method=config).tolist() == expected
    assert plain.generate(**inputs, seed=5, method=config.to_dict()).tolist() == expected
    given = GenerationConfig(temperature=0.5, max_new_tokens=4)
    assert ensemble.generate(**inputs, seed=5, generation_config=given).tolist() == expected
    other = plain.generate(**inputs, method=MbrConfig(num_candidates=2), seed=5, **{**said, "max_new_tokens": 6})
    assert ensemble.generate(**inputs, seed=5, max_new_tokens=6).tolist() == other.tolist()
    given = GenerationConfig(max_new_tokens=6)
    assert ensemble.generate(**inputs, seed=5, generation_config=given).tolist() == other.tolist()
    assert plain.generate(**inputs, method="mbr").tolist() == plain.generate(**inputs, method=MbrConfig()).tolist()


def test_the_number_of_sequences_may_stand_anywhere():
    """In the call, its generation config, the ensemble's, or the method's options; greedily too."""
    ensemble = make_ensemble(*zip(member("smol"), member("gemma"), strict=True), method="vote")
    inputs = ensemble.tokenizer(PROMPTS[0], return_tensors="pt")
    expected = ensemble.generate(**inputs, max_new_tokens=4, num_return_sequences=2).tolist()
    assert len(expected) == 2
    config = VoteConfig(generate_options={"num_return_sequences": 2})
    assert ensemble.generate(**inputs, max_new_tokens=4, method=config).tolist() == expected
    assert len(ensemble.generate(**inputs, max_new_tokens=4, method=config, num_return_sequences=1)) == 1
    given = GenerationConfig(max_new_tokens=4)
    given.num_return_sequences = 2
    assert ensemble.generate(**inputs, generation_config=given).tolist() == expected
    ensemble.generation_config.num_return_sequences = 2
    assert ensemble.generate(**inputs, max_new_tokens=4).tolist() == expected


def test_a_score_reads_the_turns_of_a_conversation():
    """Of more than one; a single turn of the user is its text."""
    tokenizers = tiny.smol_like(), tiny.gemma_like(specials=("<turn>", "</turn>"))
    for tokenizer, sign in zip(tokenizers, ("<|im_start|>", "<turn>"), strict=True):
        tokenizer.chat_template = "{% for m in messages %}{{ '" + sign + "' + m['content'] + '\n' }}{% endfor %}"
    ensemble = make_ensemble([tiny.tiny_llama(tokenizer) for tokenizer in tokenizers], tokenizers)
    turns = [[{"role": "user", "content": "Who?"}]]
    turns.append([*turns[0], {"role": "assistant", "content": "The cat."}, {"role": "user", "content": "And who?"}])
    seen = []

    def score(prompts, answers):
        seen.extend(prompts)
        return [0.0] * len(answers)

    inputs = ensemble.apply_chat_template(turns, return_tensors="pt", return_dict=True, padding=True)
    ensemble.generate(**inputs, method=RerankConfig(score), max_new_tokens=3)
    assert seen == ["Who?", "Who?", turns[1], turns[1]]


def test_lengths_are_those_of_stock_generation():
    ensemble = ensemble_of("smol", "gemma")
    inputs = ensemble.tokenizer(PROMPTS[0], return_tensors="pt")
    length = inputs["input_ids"].shape[1]
    expected = ensemble.generate(**inputs, method="vote", max_new_tokens=5).tolist()
    assert ensemble.generate(**inputs, method="vote", max_length=length + 5).tolist() == expected
    given = GenerationConfig(max_length=length + 5)
    assert ensemble.generate(**inputs, method="vote", generation_config=given).tolist() == expected
    default = ensemble.generate(**inputs, method="vote").tolist()
    assert default == ensemble.generate(**inputs, method="vote", max_new_tokens=20).tolist()
    long = ensemble.generate(**inputs, method="vote", max_new_tokens=9, min_new_tokens=7).tolist()
    assert ensemble.generate(**inputs, method="vote", max_new_tokens=9, min_length=length + 7).tolist() == long
    for too_short in (length, length - 1):
        with pytest.raises((ConfigurationError, ValueError), match="max_length"):
            ensemble.generate(**inputs, method="vote", max_length=too_short)


@pytest.mark.parametrize("options", [{"use_cache": False}, {"cache_implementation": "static"}], ids=str)
def test_caches_change_nothing(options):
    ensemble = ensemble_of("smol", "gemma")
    for config in (VoteConfig(), RerankConfig()):
        assert run(ensemble, method=config, **options).tolist() == run(ensemble, method=config).tolist()


def test_no_prompt_starts_from_what_a_text_starts_from():
    ensemble = ensemble_of("gemma", "smol")
    start = torch.tensor([ensemble.tokenizer("")["input_ids"]])
    expected = ensemble.generate(start, method="vote", max_new_tokens=4)
    assert ensemble.generate(method="vote", max_new_tokens=4).tolist() == expected.tolist()


def test_a_member_without_positions_left_has_not_ended():
    smol, gemma = member("smol"), kit.tokenizer_of("gemma")
    ensemble = make_ensemble([smol[0], tiny.tiny_gpt2(gemma, n_positions=12)], [smol[1], gemma])
    with pytest.warns(UserWarning, match="member-1"):
        output = run(ensemble, [PROMPTS[1]], method="vote", max_new_tokens=30, return_dict_in_generate=True)
    [writer] = [one for answer in output.answers[0] for one in answer.writers if one.member == 1]
    assert writer.ended_by is None
    assert writer.num_tokens < 12


@pytest.mark.slow
def test_calls_at_the_same_time_are_each_alone():
    ensemble = ensemble_of("smol", "gemma")
    calls = [(prompt, config) for prompt in PROMPTS for config in (VoteConfig(), RerankConfig())]
    expected = [run(ensemble, [prompt], method=config).tolist() for prompt, config in calls]
    found = {}

    def work(number):
        prompt, config = calls[number]
        found[number] = run(ensemble, [prompt], method=config).tolist()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[number] for number in range(len(calls))] == expected


# --- Streams and pipelines ------------------------------------------------------------------------------------------


@each_config
def test_the_streamed_text_is_the_final_text(config):
    """In one go at the end, but id by id."""
    ensemble = ensemble_of("smol", "gemma")
    streamer = Recorder(ensemble.tokenizer)
    output = run(ensemble, PROMPTS[:1], method=config, streamer=streamer)
    length = len(ensemble.tokenizer(PROMPTS[0])["input_ids"])
    assert streamer.ids == output[0].tolist()
    assert streamer.text == ensemble.tokenizer.decode(output[0, length:])
    assert streamer.num_ends == 1


def test_a_thread_can_read_the_stream():
    whole = PROMPTS[0] + " 今天天气很好。 😀 and so on"
    ensemble = kit.duet(("smol", "gemma"), whole)
    streamer = TextIteratorStreamer(ensemble.tokenizer, skip_prompt=True, skip_special_tokens=True, timeout=60)
    inputs = ensemble.tokenizer(PROMPTS[0], return_tensors="pt")
    options = {**inputs, "streamer": streamer, "max_new_tokens": 60, "method": "vote"}
    thread = threading.Thread(target=ensemble.generate, kwargs=options)
    thread.start()
    pieces = list(streamer)
    thread.join(60)
    assert PROMPTS[0] + "".join(pieces) == whole
    assert all("\ufffd" not in piece for piece in pieces)


# --- A model that fuses ---------------------------------------------------------------------------------------------


def test_what_a_fuser_writes_is_returned_as_it_is(paths):
    """Of the best candidates by the ranker, in the primary's ids, without an EOS."""
    ensemble = ensemble_of("smol", "gemma")
    config = FuseConfig(paths[0], ranker=VoteConfig(), top=1)
    ranked = run(ensemble, method="vote", return_dict_in_generate=True)
    best = [[min(answers, key=lambda one: one.rank).text] for answers in ranked.answers]
    turns = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    expected = Fuser(paths[0]).load().write(turns, best, {"max_new_tokens": NUM_NEW})
    output = run(ensemble, method=config, return_dict_in_generate=True)
    assert list(output.answers.written) == expected
    assert texts(ensemble, output.sequences) == expected
    assert [[one.rank for one in row] for row in output.answers] == [
        [one.rank for one in row] for row in ranked.answers
    ]
    assert all(one.places == () for row in output.answers for one in row)
    assert run(ensemble, method=config).tolist() == output.sequences.tolist()


# --- Saved and loaded -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return tiny.save_pair(tmp_path_factory.mktemp("members"), "first", "second")


def saved_and_loaded(paths, folder, config, **options):
    ensemble = EnsembleForCausalLM.from_pretrained(paths, method=config)
    ensemble.save_pretrained(folder)
    return ensemble, EnsembleForCausalLM.from_pretrained(folder, **options)


SAVED = {
    "vote": VoteConfig(),
    "nested": VoteConfig(
        methods=(GacConfig(threshold=0.5, gate=1), SweetSpanConfig(span_length=2), "unite"), num_candidates=1
    ),
    "pattern": VoteConfig(extract=r"(\w)\w*"),
    "compiled": VoteConfig(extract=re.compile(r"[A-Z]", re.IGNORECASE)),
    "aggregated": MbrConfig(aggregate=True),
    "rerank": RerankConfig(),
    "sampling": VoteConfig(num_candidates=2, generate_options={"do_sample": True, "temperature": 0.7}),
}


QUICK = "vote", "nested", "pattern"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in SAVED]
)
def test_saved_and_loaded_is_the_same(name, paths, tmp_path):
    config = SAVED[name]
    ensemble, again = saved_and_loaded(paths, tmp_path / "ensemble", config)
    assert again.config.method == config
    assert json.loads((tmp_path / "ensemble" / "config.json").read_text())["method"]["name"] == config.name
    options = {"max_new_tokens": NUM_NEW, "seed": 3}
    inputs = ensemble.tokenizer(PROMPTS[0], return_tensors="pt")
    expected = ensemble.generate(**inputs, **options).tolist()
    assert again.generate(**inputs, **options).tolist() == expected
    auto = AutoModelForCausalLM.from_pretrained(tmp_path / "ensemble")
    assert isinstance(auto, EnsembleForCausalLM)
    assert auto.generate(**inputs, **options).tolist() == expected
    again.save_pretrained(tmp_path / "again")
    assert EnsembleForCausalLM.from_pretrained(tmp_path / "again").config.method == config


@pytest.mark.slow
def test_members_are_saved_with_the_ensemble(paths, tmp_path):
    config = VoteConfig(extract=r"\w+", methods=("gac",))
    ensemble = make_ensemble(*zip(member("smol"), member("gemma"), strict=True), method=config)
    ensemble.save_pretrained(tmp_path / "all", include_members=True)
    again = EnsembleForCausalLM.from_pretrained(tmp_path / "all")
    assert again.config.method == config
    assert run(again).tolist() == run(ensemble).tolist()


FUNCTIONS = {
    "vote": VoteConfig(extract=functions.first_word),
    "mbr": MbrConfig(utility=functions.same_length),
    "rerank": RerankConfig(functions.shortest),
    "fuse": FuseConfig("a/b", ranker=VoteConfig(extract=functions.first_word)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(FUNCTIONS)[:3])
def test_a_function_is_imported_only_for_those_who_trust_it(name, paths, tmp_path):
    config = FUNCTIONS[name]
    ensemble, trusting = saved_and_loaded(paths, tmp_path / "ensemble", config, trust_remote_code=True)
    assert trusting.config.method == config
    options = {"max_new_tokens": NUM_NEW, "do_sample": False}
    inputs = ensemble.tokenizer(PROMPTS[0], return_tensors="pt")
    expected = ensemble.generate(**inputs, **options).tolist()
    assert trusting.generate(**inputs, **options).tolist() == expected
    trusting.save_pretrained(tmp_path / "again")

    with pytest.raises(ConfigurationError, match=r"tests\.answers\.functions:.*trust_remote_code=True"):
        EnsembleForCausalLM.from_pretrained(tmp_path / "ensemble").generate(**inputs, **options)
    other = EnsembleForCausalLM.from_pretrained(tmp_path / "ensemble", method="vote")
    assert (
        other.generate(**inputs, **options).tolist() == ensemble.generate(**inputs, method="vote", **options).tolist()
    )


def test_a_function_of_a_ranker_is_one_too(paths, tmp_path):
    _, trusting = saved_and_loaded(paths, tmp_path / "ensemble", FUNCTIONS["fuse"], trust_remote_code=True)
    assert trusting.config.method == FUNCTIONS["fuse"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "function", [lambda text: text, functools.partial(functions.first_word)], ids=["lambda", "partial"]
)
def test_a_function_without_an_import_path_is_not_saved(function, paths, tmp_path):
    ensemble = EnsembleForCausalLM.from_pretrained(paths, method=VoteConfig(extract=function))
    run(ensemble, PROMPTS[:1])
    with pytest.raises(ConfigurationError, match="`extract`.*cannot be imported.*top level of a module"):
        ensemble.save_pretrained(tmp_path / "ensemble")
    assert not (tmp_path / "ensemble" / "config.json").exists()


@pytest.mark.slow
def test_a_function_that_is_gone_is_named(paths, tmp_path):
    saved_and_loaded(paths, tmp_path / "ensemble", FUNCTIONS["vote"], trust_remote_code=True)
    file = tmp_path / "ensemble" / "config.json"
    file.write_text(file.read_text().replace("first_word", "last_word"))
    with pytest.raises(ConfigurationError, match="functions:last_word.*cannot be imported"):
        EnsembleForCausalLM.from_pretrained(tmp_path / "ensemble", trust_remote_code=True)


@pytest.mark.slow
def test_judges_are_saved_by_their_places(paths, tmp_path):
    configs = (
        RerankConfig(RewardModel("a/judge")),
        FuseConfig("a/b", ranker=MbrConfig(), top=2),
        FuseConfig(Fuser("a/b")),
    )
    for number, config in enumerate(configs):
        _, again = saved_and_loaded(paths, tmp_path / str(number), config)
        assert again.config.method == config


@pytest.mark.slow
def test_a_pipeline_runs_a_saved_ensemble(paths, tmp_path):
    for name in ("vote", "nested"):
        ensemble, _ = saved_and_loaded(paths, tmp_path / name, SAVED[name])
        text_pipeline = pipeline("text-generation", model=str(tmp_path / name))
        options = {"max_new_tokens": NUM_NEW, "do_sample": False}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="the primary .* wrote the control token")
            found = text_pipeline(PROMPTS[0], return_tensors=True, **options)
            batch = text_pipeline(list(PROMPTS), batch_size=3, return_full_text=False, **options)
        inputs = ensemble.tokenizer(PROMPTS[0], return_tensors="pt")
        assert found[0]["generated_token_ids"] == ensemble.generate(**inputs, **options)[0].tolist()
        assert [one[0]["generated_text"] for one in batch] == texts(ensemble, run(ensemble))
    assert AutoTokenizer.from_pretrained(tmp_path / "vote").vocab_size == ensemble.tokenizer.vocab_size


def test_names_of_members_are_in_the_record(paths):
    items = [MemberConfig(path, name=name) for path, name in zip(paths, ("a", "a"), strict=True)]
    ensemble = EnsembleForCausalLM.from_pretrained(items, method="vote")
    output = run(ensemble, PROMPTS[:1], return_dict_in_generate=True)
    assert [writer.name for answer in output.answers[0] for writer in answer.writers] == ["a (1)", "a (2)"]
