"""What whole answers cannot be combined with: refused before any member runs, by an error that says what to do."""

import functools
import re
from contextlib import contextmanager

import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    MaxLengthCriteria,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TextStreamer,
)

from hf_ensemble import FuseConfig, MbrConfig, MemberError, RerankConfig, VoteConfig
from hf_ensemble.errors import ConfigurationError
from tests import tiny
from tests.bug_bank import kit
from tests.contracts import changed_logits, from_call, make_ensemble

pytestmark = [kit.control_tokens_may_be_chosen]

PROMPT = "The cat"
PROMPTS = [PROMPT, "The capital of France is"]


@functools.cache
def random_ensemble():
    tokenizers = [kit.tokenizer_of(name) for name in ("smol", "gemma", "qwen")]
    makes = tiny.tiny_llama, tiny.tiny_gemma3, tiny.tiny_gpt2
    return make_ensemble([make(tokenizer) for make, tokenizer in zip(makes, tokenizers, strict=True)], tokenizers)


def call(prompt=PROMPT, method="vote", ensemble=None, **options):
    ensemble = ensemble or random_ensemble()
    inputs = ensemble.tokenizer(prompt, return_tensors="pt", padding=not isinstance(prompt, str))
    return ensemble.generate(**inputs, method=method, **{"max_new_tokens": 6, "do_sample": False, **options})


@contextmanager
def running_nobody(ensemble):
    """No member's forward is called."""
    num_calls = [0]

    def count(*_):
        num_calls[0] += 1

    handles = [model.register_forward_pre_hook(count) for model in ensemble.members]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    assert num_calls == [0]


def refused(match, *args, ensemble=None, **options):
    """A call is refused with this message, and no member has run."""
    ensemble = ensemble or random_ensemble()
    with running_nobody(ensemble), pytest.raises(ConfigurationError, match=match):
        call(*args, ensemble=ensemble, **options)


# --- Options of generate --------------------------------------------------------------------------------------------

SEVERAL = VoteConfig(num_candidates=3)


@pytest.mark.parametrize("make", [VoteConfig, MbrConfig, RerankConfig])
def test_several_candidates_are_sampled(make):
    refused(r"do_sample=False.*'\w+'.*num_candidates=3.*samples.*do_sample=True", method=make(num_candidates=3))
    refused("num_beams=2.*num_candidates=3", method=make(num_candidates=3), do_sample=True, num_beams=2)
    unsaid = "do_sample=False.*num_candidates=3.*do_sample=True"
    refused(unsaid, method=make(num_candidates=3), do_sample=None)
    refused(unsaid, method=make(num_candidates=3, generate_options={"do_sample": True}))


def test_sampled_beams():
    """Stock beam search draws by torch's generator for all rows together, so that no seed is a candidate's own."""
    for method in ("vote", VoteConfig(methods=("gac",))):
        refused("`num_beams=2`.*'vote'", method=method, do_sample=True, num_beams=2)
        refused("`num_beams=2`.*'vote'", method=method, do_sample=True, num_beams=2, seed=1)


def test_what_holds_ids_of_one_tokenizer():
    """Allowed where only the primary writes."""
    ids = {
        "bad_words_ids": [[5]],
        "sequence_bias": [[[5], -1.0]],
        "suppress_tokens": [5],
        "begin_suppress_tokens": [5],
        "forced_bos_token_id": 5,
        "forced_eos_token_id": 5,
    }
    for name, value in ids.items():
        refused(f"`{name}`.*'vote' unless only the primary writes.*its own ids", **{name: value})
        refused(f"`{name}`", weights=((1, 0, 0), (0, 1, 0)), prompt=PROMPTS, **{name: value})
        refused(f"`{name}`", weights=(0, 1, 0), **{name: value})
        found = call(weights=(1, 0, 0), **{name: value})
        assert found.tolist() == call(weights=(1, 0, 0), method="gac", **{name: value}).tolist()
    generation_config = GenerationConfig(bad_words_ids=[[5]], max_new_tokens=3, do_sample=False)
    refused("`bad_words_ids`", generation_config=generation_config)


@pytest.mark.parametrize("name", ["forced_bos_token_id", "forced_eos_token_id"])
def test_an_id_of_0_is_one_too(name):
    refused(f"`{name}`", **{name: 0})


class Nothing(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores


def test_functions_over_the_primarys_ids():
    """Allowed where only the primary writes."""
    tokenizer = random_ensemble().tokenizer
    functions = {
        "logits_processor": [Nothing()],
        "stopping_criteria": [StopStringCriteria(tokenizer, ["a"])],
        "prefix_allowed_tokens_fn": lambda row, ids: [5, 6, 7],
    }
    for name, value in functions.items():
        refused(f"`{name}`.*unless only the primary writes.*its own ids", **{name: value})
        refused(f"`{name}`", weights=(0, 1, 1), **{name: value})
        found = call(weights=(1, 0, 0), max_new_tokens=12, **{name: value})
        assert found.tolist() == call(weights=(1, 0, 0), method="gac", max_new_tokens=12, **{name: value}).tolist()
    for options in (
        {"logits_processor": [TemperatureLogitsWarper(2.0)]},
        {"stopping_criteria": [MaxLengthCriteria(9)]},
    ):
        refused("unless only the primary writes", **options)
    call(logits_processor=[], stopping_criteria=[])


@pytest.mark.parametrize("name", ["output_scores", "output_logits", "output_attentions", "output_hidden_states"])
def test_outputs_of_tokens(name):
    for method in ("vote", "mbr", "rerank"):
        refused(f"`{name}`.*'{method}'.*answers", method=method, return_dict_in_generate=True, **{name: True})


def test_decisions_are_not_recorded():
    refused("`output_decisions`.*'vote'.*answers", return_dict_in_generate=True, output_decisions=True)


def test_more_returned_than_written():
    refused(r"num_return_sequences=4.*3 were written for row 0.*fewer", num_beams=4, num_return_sequences=4)
    sampled = {"do_sample": True, "num_return_sequences": 4}
    refused("num_return_sequences=4.*3 were written for row 0", **sampled)
    refused("2 were written for row 0", weights=(1, 1, 0), do_sample=True, num_return_sequences=3)
    refused(
        "1 were written for row 1", PROMPTS, weights=((1, 1, 1), (0, 1, 0)), do_sample=True, num_return_sequences=2
    )
    refused("9 were written", method=SEVERAL, do_sample=True, num_return_sequences=10)
    refused("5 were written", method=VoteConfig(methods=("gac", "unite")), do_sample=True, num_return_sequences=6)
    assert len(call(do_sample=True, num_return_sequences=3)) == 3


def test_fuse_returns_one(tmp_path):
    config = FuseConfig(str(tmp_path / "nowhere"))
    refused("num_return_sequences=2.*'fuse'.*one answer", method=config, do_sample=True, num_return_sequences=2)


class Streamer(TextStreamer):
    def __init__(self, tokenizer):
        super().__init__(tokenizer)
        self.num_puts = self.num_ends = 0

    def put(self, value):
        self.num_puts += 1

    def end(self):
        self.num_ends += 1


@pytest.mark.parametrize(
    ("prompt", "options"),
    [(PROMPTS, {}), (PROMPT, {"do_sample": True, "num_return_sequences": 2})],
    ids=["two_rows", "two_returned"],
)
def test_a_streamer_takes_one_row(prompt, options):
    """It is told the end all the same."""
    streamer = Streamer(random_ensemble().tokenizer)
    refused("`streamer` takes one row.*one prompt", prompt, streamer=streamer, **options)
    assert (streamer.num_puts, streamer.num_ends) == (0, 1)


def test_weights_that_are_a_function():
    refused("`weights` that are a function.*'vote'.*whole answer", weights=lambda step, ids: (1, 1, 1))


def test_a_seed_is_for_whole_answers():
    for method in ("gac", "unite", "sweetspan"):
        refused(f"`seed=3`.*'{method}'.*torch.manual_seed", method=method, seed=3, do_sample=method != "sweetspan")
    for seed in (-1, 2**63, 1.5, "7", True):
        refused(f"`seed={re.escape(repr(seed))}`.*integer from 0 to", seed=seed)
        refused(f"`seed={re.escape(repr(seed))}`", method=SEVERAL, do_sample=True, seed=seed)


@pytest.mark.parametrize("name", ["ngram", "member-1"])
def test_speculation(name):
    refused(f"speculation='{name}'.*'vote'", speculation=name)
    with pytest.raises(ConfigurationError, match="'auto', 'ngram' or the name of a member"):
        call(speculation="nobody")


def test_automatic_speculation_decodes_without_drafts():
    assert call(speculation="auto").tolist() == call().tolist()


def test_inputs_of_the_primary_only():
    ensemble = random_ensemble()
    length = len(ensemble.tokenizer(PROMPT)["input_ids"])
    refused("`position_ids`.*reads the prompt by itself", position_ids=torch.arange(length)[None])


@pytest.mark.parametrize("weights", [(1, 1), ((1, 1, 1),) * 3, (0, 0, 0), (1, -1, 1)])
def test_weights_that_do_not_fit(weights):
    refused("`weights`", PROMPTS, weights=weights)


def test_a_prompt_that_ends_inside_a_character():
    """Members without byte tokens cannot go on; whoever is asked is named, and none has run."""
    ensemble = no_bytes_ensemble()
    primary = kit.spelling(ensemble.tokenizers[0])
    ids = torch.tensor([[*ensemble.tokenizer(PROMPT)["input_ids"], primary.canonical_id(b"\xe0")]])
    match = "row 0 ends inside a character.*member-1.*whole character"
    with running_nobody(ensemble), pytest.raises(ConfigurationError, match=match):
        ensemble.generate(ids, method="vote", max_new_tokens=4)


@functools.cache
def no_bytes_ensemble():
    tokenizers = [kit.tokenizer_of("small"), tiny.sentencepiece_bpe(byte_fallback=False)]
    return make_ensemble([tiny.tiny_llama(tokenizer) for tokenizer in tokenizers], tokenizers)


def test_methods_that_cannot_write_here():
    """What a method refuses for itself is refused for its candidates, before anybody writes."""
    rows = ((1, 1, 1), (1, 2, 1))
    refused(
        "'sweetspan'.*weights|weights.*'sweetspan'", PROMPTS, method=VoteConfig(methods=("sweetspan",)), weights=rows
    )
    refused("`num_beams`.*'sweetspan'", method=VoteConfig(methods=("sweetspan",)), num_beams=2)


# --- Options of the methods -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [VoteConfig, MbrConfig, RerankConfig, functools.partial(FuseConfig, "a/b")])
def test_options_that_all_have(make):
    for count in (0, -1, 1.5, "3", True, None):
        with pytest.raises(ConfigurationError, match=f"`num_candidates`.*positive integer.*{re.escape(repr(count))}"):
            make(num_candidates=count)
    for methods in ("gac", None, 3):
        with pytest.raises(ConfigurationError, match="`methods`.*list of methods"):
            make(methods=methods)
    for methods in (("nothing",), (3,)):
        with pytest.raises(ConfigurationError, match="unknown method.*Known methods"):
            make(methods=methods)
    for method in ("vote", "mbr", "rerank", VoteConfig(), MbrConfig(), RerankConfig(), FuseConfig("a/b")):
        with pytest.raises(ConfigurationError, match="`methods` contains '.*token- or span-level"):
            make(methods=("gac", method))
    for options in (["do_sample"], "do_sample", None, {1: 2}):
        with pytest.raises(ConfigurationError, match="`generate_options`.*dictionary"):
            make(generate_options=options)


@pytest.mark.parametrize("extract", [3, b"a", ["a"], re.compile(b"a"), True])
def test_an_extractor_is_a_regular_expression_or_a_function(extract):
    with pytest.raises(ConfigurationError, match="`extract` has to be.*regular expression"):
        VoteConfig(extract=extract)


def test_a_regular_expression_that_is_none():
    with pytest.raises(ConfigurationError, match=r"`extract`.*regular expression.*'\(a'.*unterminated"):
        VoteConfig(extract="(a")


@pytest.mark.parametrize("utility", ["bleu", 3, None, "chrF"])
def test_a_utility_is_chrf_or_a_function(utility):
    with pytest.raises(ConfigurationError, match="`utility`.*'chrf' or a function"):
        MbrConfig(utility=utility)


def test_only_chrf_can_be_aggregated():
    with pytest.raises(ConfigurationError, match="`aggregate`.*True or False.*1"):
        MbrConfig(aggregate=1)
    with pytest.raises(ConfigurationError, match='`aggregate=True` needs `utility="chrf"`'):
        MbrConfig(utility=lambda a, b: [], aggregate=True)


@pytest.mark.parametrize("score", ["reward", 3, None, "some/model"])
def test_a_score_is_one_of_four(score):
    with pytest.raises(ConfigurationError, match="`score`.*'likelihood'.*`RewardModel`.*`PairRanker`.*function"):
        RerankConfig(score=score)


def test_options_of_a_fuser():
    with pytest.raises(ConfigurationError, match="'fuse' needs .*`model`"):
        call(method="fuse")
    for model in ("", None, 3):
        with pytest.raises(ConfigurationError, match="`model`.*Hub id"):
            FuseConfig(model)
    assert FuseConfig("a/b", ranker="vote").ranker == VoteConfig()
    for ranker in (3, None, FuseConfig("a/b")):
        with pytest.raises(ConfigurationError, match="`ranker`.*`RerankConfig`, `VoteConfig` or `MbrConfig`"):
            FuseConfig("a/b", ranker=ranker)
    for ranker in (VoteConfig(num_candidates=2), MbrConfig(methods=("gac",)), VoteConfig(generate_options={"a": 1})):
        with pytest.raises(ConfigurationError, match="`ranker` only ranks.*pass.*to the `FuseConfig`"):
            FuseConfig("a/b", ranker=ranker)
    for top in (0, "3", 1.5):
        with pytest.raises(ConfigurationError, match="`top`.*positive integer"):
            FuseConfig("a/b", top=top)
    with pytest.raises(ConfigurationError, match="`template`.*{prompt}.*{answers}"):
        FuseConfig("a/b", template="{prompt}")


def test_unknown_options_by_name():
    with pytest.raises(ConfigurationError, match="method 'vote' has no option 'extracts'.*extract"):
        call(method={"name": "vote", "extracts": "a"})
    with pytest.raises(ConfigurationError, match="unknown method 'majority'.*vote"):
        call(method="majority")


def test_a_method_that_does_not_fit_the_members():
    """A gate that is no member, in the ensemble's configuration or in a call."""
    config = VoteConfig(methods=({"name": "gac", "threshold": 0.5, "gate": 3},))
    refused("`gate` is 3.*0 to 2", method=config)


# --- Functions of the user's ----------------------------------------------------------------------------------------


def breaks(*args):
    raise KeyError("broken")


def test_an_extractor_that_fails():
    with pytest.raises(ConfigurationError, match=r"`extract` \(.*:breaks\) raised KeyError: 'broken', for '"):
        call(method=VoteConfig(extract=breaks))
    for value in (3, b"a", ["a"], True, ("a",)):
        with pytest.raises(ConfigurationError, match="`extract`.*return a string or None, but returned"):
            call(method=VoteConfig(extract=lambda text, value=value: value))


BAD_NUMBERS = {
    "nan": lambda a, b: [float("nan")] * len(a),
    "inf": lambda a, b: [1.0] * (len(a) - 1) + [float("inf")],
    "too_few": lambda a, b: [1.0] * (len(a) - 1),
    "too_many": lambda a, b: [1.0] * (len(a) + 1),
    "a_string": lambda a, b: "1" * len(a),
    "strings": lambda a, b: ["high"] * len(a),
    "one_number": lambda a, b: 1.0,
    "nothing": lambda a, b: None,
    "a_table": lambda a, b: torch.zeros(len(a), 2),
}


@pytest.mark.parametrize("case", BAD_NUMBERS)
def test_a_utility_or_score_that_gives_no_numbers(case):
    count = {"mbr": 9, "rerank": 3}
    for option, config in (
        ("utility", MbrConfig(utility=BAD_NUMBERS[case])),
        ("score", RerankConfig(BAD_NUMBERS[case])),
    ):
        rule = "finite numbers" if case in ("nan", "inf") else f"{count[config.name]} numbers"
        with pytest.raises(ConfigurationError, match=f"`{option}` .*has to return {rule}, but returned"):
            call(method=config)


def test_a_utility_or_score_that_fails():
    for option, config in (("utility", MbrConfig(utility=breaks)), ("score", RerankConfig(breaks))):
        with pytest.raises(ConfigurationError, match=rf"`{option}` \(.*:breaks\) raised KeyError: 'broken'"):
            call(method=config)


def test_what_functions_are_given():
    """A utility all pairs, candidates first; a score the prompt and the answer, for all rows at once."""
    seen = []

    def note(first, second):
        seen.append((first, second))
        return [float(n) for n in range(len(first))]

    ensemble = random_ensemble()
    output = call(PROMPTS, RerankConfig(note), return_dict_in_generate=True)
    [(prompts, answers)] = seen
    texts = [[answer.text for answer in row] for row in output.answers]
    assert answers == [text for row in texts for text in row]
    assert prompts == [prompt for prompt, row in zip(PROMPTS, texts, strict=True) for _ in row]
    assert [answer.scores["note"] for row in output.answers for answer in row] == list(range(len(answers)))
    seen.clear()
    output = call(PROMPT, MbrConfig(utility=note), ensemble=ensemble, return_dict_in_generate=True)
    texts = [answer.text for answer in output.answers[0]]
    [(hypotheses, references)] = seen
    assert list(zip(hypotheses, references, strict=True)) == [(h, r) for h in texts for r in texts]


# --- Members that fail ----------------------------------------------------------------------------------------------


def fail(logits):
    raise ValueError("out of order")


@pytest.mark.crossed
@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 2}, {"method": SEVERAL, "do_sample": True}],
    ids=["greedy", "beams", "samples"],
)
def test_a_member_that_raises_is_named(index, options):
    """At its third step; nobody else's answers are returned instead."""
    call(**options)
    for number in (0, 2):
        with (
            changed_logits(random_ensemble().members[index], from_call(number, fail)),
            pytest.raises(MemberError, match=f"member-{index}.*out of order"),
        ):
            call(PROMPTS, **options)


@pytest.mark.crossed
@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"method": SEVERAL, "do_sample": True}], ids=str)
def test_a_member_that_gives_nan_is_named(index, options):
    """In any column, in one row of several, at once or later; and infinite logits."""

    def spoilt(value, row=slice(None)):
        def change(logits):
            logits = logits.clone()
            logits[row, ..., logits.shape[-1] // 2] = value
            return logits

        return change

    for number, change in ((0, spoilt(torch.nan)), (2, spoilt(torch.nan, -1)), (1, spoilt(torch.inf))):
        with (
            changed_logits(random_ensemble().members[index], from_call(number, change)),
            pytest.raises(MemberError, match=f"member-{index}"),
        ):
            call(PROMPTS, **options)


def test_a_member_that_fails_when_it_scores_is_named():
    """Reranking by likelihood runs everybody on all answers."""
    ensemble = random_ensemble()
    steps = 6
    for change, match in ((fail, "member-1.*out of order"), (lambda logits: logits * torch.nan, "member-1.*NaN")):
        num_forwards = [0]

        def count(*_, num_forwards=num_forwards):
            num_forwards[0] += 1

        handle = ensemble.members[1].register_forward_pre_hook(count)
        call(PROMPT, ensemble=ensemble, max_new_tokens=steps)
        handle.remove()
        with (
            changed_logits(ensemble.members[1], from_call(num_forwards[0], change)),
            pytest.raises(MemberError, match=match),
        ):
            call(PROMPT, "rerank", ensemble=ensemble, max_new_tokens=steps)


def test_a_member_of_weight_0_is_no_reason_to_fail():
    for options in ({}, {"method": "rerank"}, {"method": VoteConfig(methods=("gac",))}):
        with changed_logits(random_ensemble().members[1], fail):
            call(weights=(1, 0, 1), **options)


def test_texts_are_not_scored_by_votes():
    for method in ("vote", "mbr"):
        with pytest.raises(ConfigurationError, match=f"'{method}'.*has no likelihoods.*RerankConfig"):
            random_ensemble().score(["The"], [" cat"], method=method)
    with pytest.raises(ConfigurationError, match="has no likelihoods"):
        random_ensemble().score(["The"], [" cat"], method=RerankConfig(breaks))
    found = random_ensemble().score(["The"], [" cat"], method="rerank")
    expected = random_ensemble().score(["The"], [" cat"], method="sweetspan")
    assert found.log_probs == pytest.approx(expected.log_probs)
