"""Bug bank, section D: stopping and EOS.

| case | where |
| --- | --- |
| D2 | here; `test_generate.py` (min_new_tokens); gated steps and spans wait |
| D3 | here |
| D5 | here |
| D6 | here; `test_generate.py` (lengths are those asked for); spans wait |
| D7 | here; `test_generate.py` (stop strings need no tokenizer) |
"""

import pytest
import torch
from transformers import StoppingCriteria

from hf_ensemble import EnsembleForCausalLM, MemberConfig
from tests import tiny
from tests.contracts import make_ensemble

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
    text_of,
    texts_shown_to,
    tokenizer_of,
    writer,
)

# --- D2 -------------------------------------------------------------------------------------------------------------


@pytest.mark.crossed
@each_method
@pytest.mark.parametrize("names", [("small", "large"), ("smol", "gemma"), ("gemma", "smol")], ids=" + ".join)
@pytest.mark.parametrize(
    "options", [{"min_new_tokens": 8}, {"min_length": 9}, {"min_new_tokens": 8, "do_sample": True}]
)
def test_a_minimum_length_holds_back_the_ends_of_all_members(method, names, options):
    """D2: Ends of 0.3 and 0.95 from the first step on, for the primary one of two end ids: eight ids come before."""
    first, second = (tokenizer_of(name) for name in names)
    ends = [first.eos_token_id, next(i for i in sorted(spelling(first).control) if i != first.eos_token_id)]
    script = {ends[0]: 0.1, ends[1]: 0.2, id_of(first, "a"): 0.7}
    members = [(first, [script]), (second, [{second.eos_token_id: 0.95, id_of(second, "a"): 0.05}])]
    ensemble = ensemble_of(*members, method=method)
    ids = torch.tensor([[id_of(first, "a")]])
    torch.manual_seed(0)
    # A sampled end may be late; in this many more ids it comes.
    output = ensemble.generate(ids, max_new_tokens=60, eos_token_id=ends, **options)[0].tolist()
    assert output[:9] == [id_of(first, "a")] * 9
    assert output[-1] in ends
    if "do_sample" not in options:
        assert len(output) == 10


# --- D3 -------------------------------------------------------------------------------------------------------------


@each_method
def test_no_row_ends_at_once_because_padding_is_the_end_token(method):
    """D3: Pad = EOS, in a padded batch: every row gets what it gets alone."""
    ensemble = duet(("smol", "gemma"), "One two", "Three four five six seven eight nine", method=method)
    assert ensemble.tokenizer.pad_token_id == ensemble.tokenizer.eos_token_id
    together = output_ids(ensemble, ["One", "Three four five six seven eight"])
    primary = spelling(ensemble.tokenizers[0])
    assert [primary.text_of_prompt(ids).decode() for ids in together] == [
        "One two",
        "Three four five six seven eight nine",
    ]


@each_method
def test_an_end_token_inside_the_prompt_is_read_by_the_primary_and_ends_nothing(method):
    """D3: As in a conversation; also right behind padding of the same id. The others read the text without it."""
    smol = tokenizer_of("smol")
    end = smol.eos_token_id
    ensemble = duet(("smol", "gemma"), "Hi there you", "Oh there you all", method=method)
    rows = [[*smol("Hi")["input_ids"], end, *smol(" there")["input_ids"]], [end, *smol("Oh there you")["input_ids"]]]
    width = max(map(len, rows)) + 1
    ids = torch.tensor([[end] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    with pytest.warns(UserWarning, match=r"control tokens of the primary.*im_end") as caught:
        output = ensemble.generate(ids, attention_mask=mask, max_new_tokens=9)
    assert len(caught) == 1
    texts = [spelling(smol).text_of_prompt(row).decode() for row in output.tolist()]
    assert texts == ["Hi there you", "Oh there you all"]
    contexts = contexts_of(ensemble, 0)
    assert [list(context[: len(row)]) for context, row in zip(contexts, rows, strict=False)] == rows
    assert texts_shown_to(ensemble, 1)[:2] == ["<bos>Hi there", "<bos>Oh there you"]


@each_method
@pytest.mark.parametrize("where", ["call", "generation_config"])
def test_a_pad_id_in_the_list_of_end_ids_ends_rows_and_pads_them(method, where):
    """D3: Ends [2, 11, 12] of which 12 also pads: what is padding in the prompt says the mask."""
    tokenizer = tiny.byte_level_bpe(400, specials=["<|turn|>"])
    pad = tokenizer.pad_token_id
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|turn|>"), pad]
    a = id_of(tokenizer, "a")

    def script(context):
        return {ends[1] if len(context) == 4 else pad if len(context) == 6 else a: 1.0}

    models = [tiny.ScriptedModel(tokenizer, script) for _ in range(2)]
    ensemble = make_ensemble(models, [tokenizer] * 2, method=method)
    options = {"eos_token_id": ends} if where == "call" else {}
    if where == "generation_config":
        ensemble.generation_config.eos_token_id = ends
        ensemble.generation_config.pad_token_id = pad
    ids = torch.tensor([[pad, pad, a], [a, a, a], [pad, a, a]])
    output = ensemble.generate(ids, attention_mask=(ids != pad).long(), max_new_tokens=6, **options)[:, 3:]
    assert output.tolist() == [[a, a, a, ends[1]], [a, ends[1], pad, pad], [a, a, ends[1], pad]]
    output = ensemble.generate(torch.tensor([[a] * 5]), max_new_tokens=6, **options)[0, 5:]
    assert output.tolist() == [a, pad]


# --- D5 -------------------------------------------------------------------------------------------------------------


def ends_with_another_token(method, index=0, member_configs=None):
    """The member at `index` writes ` x`, then `<|endoftext|>` (id 0), which is no end id of its own, then ` y`s."""
    smol, gemma = tokenizer_of("smol"), tokenizer_of("gemma")
    x, y = id_of(smol, " x") if b" x" in spelling(smol).entries else id_of(smol, "x"), id_of(smol, "y")
    script = [{x: 1.0}, {0: 1.0}, {y: 1.0}]
    members = [(smol, script), (gemma, ())]
    if index:
        members.reverse()
    models = [tiny.ScriptedModel(tokenizer, one) for tokenizer, one in members]
    configs = [MemberConfig(name=f"member-{n}") for n in range(2)]
    if member_configs is not None:
        configs[index] = MemberConfig(name=f"member-{index}", **member_configs)
    weights = [0.8, 0.2] if index == 0 else [0.2, 0.8]
    ensemble = EnsembleForCausalLM.from_members(
        models, [tokenizer for tokenizer, _ in members], method, weights, member_configs=configs
    )
    return ready(ensemble), x, y


@each_method
def test_a_control_token_that_ends_nothing_is_no_text_and_is_warned_of_once(method):
    """D5: It is written, once with a warning that says how to make it an end; the others do not move."""
    ensemble, x, y = ends_with_another_token(method)
    with pytest.warns(UserWarning, match=r"control token.*endoftext.*eos_token_id") as caught:
        ids = output_ids(ensemble, "a", max_new_tokens=4)[0]
    assert ids[1:] == [x, 0, y, y]
    assert len(caught) == 1
    shown = texts_shown_to(ensemble, 1)
    assert not any("endoftext" in text for text in shown)
    assert shown.index("<bos>ax") == 1


@each_method
def test_the_user_can_make_it_an_end_id_in_the_call(method):
    """D5: `eos_token_id` of the call."""
    ensemble, x, _ = ends_with_another_token(method)
    ids = output_ids(ensemble, "a", max_new_tokens=4, eos_token_id=[2, 0])[0]
    assert ids[1:] == [x, 0]


@each_method
def test_the_user_can_make_it_an_end_id_of_the_primary(method):
    """D5: `MemberConfig(eos_token_id=...)`: ids that the user adds for a member, the primary included."""
    ensemble, x, _ = ends_with_another_token(method, member_configs={"eos_token_id": [0]})
    ids = output_ids(ensemble, "a", max_new_tokens=4)[0]
    assert ids[1:] == [x, 0]


@each_method
def test_the_user_can_make_it_an_end_id_of_an_assistant(method):
    """D5: Its mass is then that of the end, written as the primary's; without, it is left out."""
    ensemble, _, _ = ends_with_another_token(method, 1, {"eos_token_id": [0]})
    ids = output_ids(ensemble, "a", max_new_tokens=6)[0]
    assert ids[-1] == ensemble.tokenizer.eos_token_id
    assert len(ids) < 8
    ensemble, _, _ = ends_with_another_token(method, 1)
    ids = output_ids(ensemble, "a", max_new_tokens=6)[0]
    assert ensemble.tokenizer.eos_token_id not in ids
    assert len(ids) == 8


@pytest.mark.parametrize("index", [0, 1])
@each_method
def test_configuration_and_tokenizer_that_disagree_on_the_end_are_warned_of_once(method, index):
    """D5: The configuration holds; one warning names the member and both ids."""
    small, large = tokenizer_of("small"), tokenizer_of("large")
    models = [tiny.ScriptedModel(t, [{id_of(t, "a"): 1.0}, {id_of(t, "b"): 1.0}]) for t in (small, large)]
    odd = id_of((small, large)[index], "b")
    models[index].generation_config.eos_token_id = odd
    with pytest.warns(UserWarning, match=rf"member-{index}.*{odd}.*is {large.eos_token_id}") as caught:
        ensemble = make_ensemble(models, [small, large], method=method)
        ids = output_ids(ensemble, "a", max_new_tokens=5)[0]
    assert len(caught) == 1
    text = spelling(small).text_of_prompt(ids).decode()
    # An end id that writes text is an ordinary entry, and ends a row where the primary writes it.
    assert text == ("aab" if index == 0 else "aabbbb")


@each_method
def test_the_tokenizers_end_is_used_where_no_configuration_names_one(method):
    """D5: Generation config, model config, tokenizer, in that order: for the primary as for the others."""
    small = tokenizer_of("small")
    for bare in ((0,), (1,), (0, 1)):
        models = [
            tiny.ScriptedModel(tiny.rows_of(small) if n in bare else small, writer(small, "One two")) for n in range(2)
        ]
        assert all(models[n].generation_config.eos_token_id is None for n in bare)
        ensemble = make_ensemble(models, [small] * 2, method=method)
        ids = output_ids(ensemble, "One", max_new_tokens=20)[0]
        assert ids[-1] == small.eos_token_id
        assert ids.count(small.eos_token_id) == 1


# --- D6 and D7 ------------------------------------------------------------------------------------------------------


@methods_by_turns(count=[1, 2, 5, 8], names=[("smol", "gemma"), ("gemma", "smol")])
def test_the_budget_counts_the_primarys_ids_exactly(method, count, names):
    """D6: Thai, of which one id of one member is many of the other: never more, never fewer."""
    tokenizers = [tokenizer_of(name) for name in names]
    whole = tiny.THAI[2]
    members = [(t, writer(t, whole)) for t in tokenizers]
    for weights in (None, [0.1, 0.9]):
        ensemble = ensemble_of(*members, method=method, weights=weights)
        prompt = whole[:2]
        length = len(tokenizers[0](prompt)["input_ids"])
        assert len(output_ids(ensemble, prompt, max_new_tokens=count)[0]) == length + count
        assert len(output_ids(ensemble, prompt, max_new_tokens=None, max_length=length + count)[0]) == length + count


@each_method
@control_tokens_may_be_chosen
def test_without_a_length_the_default_is_that_of_transformers(method):
    """D6: Neither asked for: as many ids as the primary alone writes, with the warning that `transformers` logs."""
    smol, gemma = tokenizer_of("smol"), tokenizer_of("gemma")
    model = tiny.tiny_llama(smol, seed=1)
    ensemble = make_ensemble([model, tiny.tiny_llama(gemma, seed=2)], [smol, gemma], method=method)
    ids = smol("The cat", return_tensors="pt")
    lengths, said = [], []
    for one in (model, ensemble):
        with pytest.warns(UserWarning, match="max_length") as caught:
            lengths.append(one.generate(**ids, eos_token_id=None).shape[1])
        said.append([str(warning.message) for warning in caught if "max_length" in str(warning.message)])
    assert lengths[0] == lengths[1]
    assert said[0] == said[1]


@methods_by_turns(names=[("smol", "gemma"), ("gemma", "smol")], stop=["king", "s a ki", "今天"])
def test_stop_strings_of_the_configuration_stop_wherever_they_are_cut(method, names, stop):
    """D7: No tokenizer passed, in a batch: across words, inside entries, and in characters that come in pieces."""
    whole = "There was a king. 今天天气很好。"
    ensemble = duet(names, whole, "a", method=method)
    ensemble.generation_config.stop_strings = [stop]
    try:
        found = text_of(ensemble, "There")
    finally:
        ensemble.generation_config.stop_strings = None
    assert whole.startswith(found)
    assert stop in found
    assert found.index(stop) + len(stop) > len(found) - 3


class EndsAfter(StoppingCriteria):
    """Ends each row after its number of new ids."""

    def __init__(self, prompt_length, counts):
        self.prompt_length, self.counts = prompt_length, torch.tensor(counts)

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.shape[1] - self.prompt_length >= self.counts


@pytest.mark.parametrize("method", ["gac", "unite", "deepen"])
def test_without_end_ids_rows_write_on_until_all_are_done(method):
    """As in the stock loop: what ends a row by another rule than an end id leaves no padding there."""
    smol, gemma = tiny.smol_like(), tiny.gemma_like()
    ensemble = make_ensemble([tiny.tiny_llama(smol), tiny.tiny_gemma3(gemma)], [smol, gemma], method=method)
    inputs = ensemble.tokenizer(["The cat", "A king"], return_tensors="pt")
    assert inputs.attention_mask.all()
    options = {"eos_token_id": None, "pad_token_id": 0, "do_sample": False}
    whole = ensemble.generate(**inputs, **options, max_new_tokens=8)
    for counts in ([3, 8], [8, 3]):
        ends = [EndsAfter(inputs.input_ids.shape[1], counts)]
        found = ensemble.generate(**inputs, **options, max_new_tokens=12, stopping_criteria=ends)
        assert torch.equal(found, whole)
