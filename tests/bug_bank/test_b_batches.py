"""Bug bank, section B: batching and padding.

| case | where |
| --- | --- |
| B1 | here; `contracts.py` (a row alone is the row in a batch); real pair in `real/test_bug_bank_real.py` |
| B3 | here |
| B4 | here; `contracts.py` fills the padding with any ids |
| B5 | here; `test_generate.py` (rows that have ended); the part about spans waits for spans |
| B6 | here |
| B8 | here; `test_generate.py` (processors, prefix functions) |
"""

import copy

import pytest
import torch
from transformers import pipeline

from tests import tiny
from tests.contracts import CORE_RECIPES, PROMPTS, make_ensemble, new_ids, padded, prompt_rows, run

from .kit import (
    control_tokens_may_be_chosen,
    duet,
    each_method,
    ensemble_of,
    id_of,
    methods_by_turns,
    output_ids,
    spelling,
    texts_of,
    texts_shown_to,
    tokenizer_of,
)

pytestmark = control_tokens_may_be_chosen
each_pair = pytest.mark.parametrize("names", [("smol", "gemma"), ("gemma", "smol")], ids=" + ".join)


def rows_alone(ensemble, method, **options):
    return [run(ensemble, [row], method=method, **options) for row in prompt_rows(ensemble)]


# --- B1, B3 and B4 --------------------------------------------------------------------------------------------------


@each_method
def test_a_list_of_strings_is_padded_on_the_left_whatever_the_member_prefers(method):
    """B1: The primary pads on the right by default; the ensemble's tokenizer does not, and the user's own stays."""
    ensemble = CORE_RECIPES[0].ensemble
    own = ensemble.tokenizers[0]
    assert own.padding_side == "right"
    alone = [output_ids(ensemble, prompt, max_new_tokens=5, method=method)[0] for prompt in PROMPTS]
    together = output_ids(ensemble, PROMPTS, max_new_tokens=5, method=method)
    generate = pipeline("text-generation", model=ensemble, tokenizer=ensemble.tokenizer, batch_size=3)
    options = {"max_new_tokens": 5, "do_sample": False, "return_full_text": False, "method": method}
    from_pipeline = generate(list(PROMPTS), **options)
    for row, prompt in enumerate(PROMPTS):
        new = alone[row][len(own(prompt)["input_ids"]) :]
        assert together[row][-5:][: len(new)] == new
        assert from_pipeline[row][0]["generated_text"] == own.decode(new, skip_special_tokens=True)
    assert own.padding_side == "right"


@each_method
@pytest.mark.parametrize(("recipe", "weights"), [(CORE_RECIPES[0], None), (CORE_RECIPES[2], [1, 0])], ids=str)
def test_ids_padded_by_the_members_own_tokenizer_are_repacked(method, weights, recipe):
    """B1: Also where the primary runs alone, and where padding stands on both sides or in the middle of a row."""
    ensemble = recipe.ensemble
    weights = weights and [*weights, *[0] * (len(ensemble.members) - 2)]
    alone = rows_alone(ensemble, method, weights=weights, max_new_tokens=4)
    rows = prompt_rows(ensemble)
    width = max(map(len, rows)) + 2
    ids, mask = [], []
    for n, row in enumerate(rows):
        cuts = {0: [0, len(row)], 1: [1, width - len(row)], 2: [len(row), 1]}[n]
        before, middle = (1, 1) if n == 0 else (0, cuts[1]) if n == 1 else (0, 0)
        after = width - len(row) - before - middle
        head, tail = row[:1], row[1:]
        ids.append([7] * before + head + [8] * middle + tail + [9] * after)
        mask.append([0] * before + [1] + [0] * middle + [1] * len(tail) + [0] * after)
    batch = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
    with pytest.warns(UserWarning, match="padded on the right"):
        together = run(ensemble, batch, method=method, weights=weights, max_new_tokens=4)
    end = [ensemble.tokenizer.eos_token_id]
    for row, output in enumerate(alone):
        assert new_ids(together, row, end) == new_ids(output, 0, end)


@each_method
@pytest.mark.parametrize("names", [("smol", "gemma"), ("gemma", "smol"), ("smol", "with_bos")], ids=" + ".join)
def test_padding_and_markers_of_one_member_are_no_text_for_another(method, names):
    """B3: What the other member reads is its own BOS and the prompt, in a padded batch with pad = EOS."""
    prompts = ["One", "Two and more", "The third is the longest of them"]
    ensemble = duet(names, *(prompt + " x" for prompt in prompts), method=method)
    assert texts_of(ensemble, prompts) == [prompt + " x" for prompt in prompts]
    for index in (0, 1):
        bos = {"gemma": "<bos>", "with_bos": "<|start|>", "smol": ""}[names[index]]
        shown = set(texts_shown_to(ensemble, index))
        assert {bos + prompt for prompt in prompts} <= shown
        assert {text for text in shown if "<" in text.removeprefix(bos) or "|" in text.removeprefix(bos)} == set()


@methods_by_turns(side=["left", "right"], names=[("smol", "gemma"), ("gemma", "smol")])
def test_what_stands_under_a_mask_of_zero_changes_nothing(method, side, names):
    """B4: The pad id replaced by words, BOS, EOS or the unknown token; distributions are the same too."""
    tokenizers = [tokenizer_of(name) for name in names]
    models = [tiny.tiny_llama(t, seed=seed) for seed, t in enumerate(tokenizers)]
    ensemble = make_ensemble(models, tokenizers, method=method)
    outputs = []
    rows = prompt_rows(ensemble)
    for fill in (ensemble.tokenizer.pad_token_id, id_of(tokenizers[0], "a"), 0, 1, 2, 3, len(tokenizers[0]) - 1):
        batch = padded(rows, side=side, fill=lambda n, fill=fill: fill)
        if side == "right":
            with pytest.warns(UserWarning, match="padded on the right"):
                outputs.append(run(ensemble, batch, max_new_tokens=3))
        else:
            outputs.append(run(ensemble, batch, max_new_tokens=3))
    for output in outputs[1:]:
        assert output.sequences[:, -3:].tolist() == outputs[0].sequences[:, -3:].tolist()
        torch.testing.assert_close(torch.stack(output.logits), torch.stack(outputs[0].logits))


@each_method
def test_without_a_mask_leading_padding_is_seen_as_such(method):
    """B4: As `transformers` does where the pad id is no end id."""
    ensemble = CORE_RECIPES[1].ensemble
    batch = padded(prompt_rows(ensemble), fill=lambda n: ensemble.tokenizer.pad_token_id)
    expected = run(ensemble, batch, method=method)
    found = run(ensemble, {"input_ids": batch["input_ids"]}, method=method)
    assert found.sequences.tolist() == expected.sequences.tolist()


# --- B5 -------------------------------------------------------------------------------------------------------------


@pytest.mark.crossed
@each_method
@pytest.mark.parametrize("names", [("small", "gemma"), ("gemma", "smol")], ids=" + ".join)
def test_rows_of_unlike_progress_do_not_touch_each_other(method, names):
    """B5: One row ends at once, one after two ids, one late; one takes one id here and six there, one the reverse."""
    wholes = {
        "One": "",
        "Two": "!",
        "Three": " capital of Frank",
        "Four, a long prompt": tiny.THAI[2][:8],
        "Five": "\n\n\n\t\t\t\t",
        "Six": " is Berlin",
    }
    counts = [[len(spelling(tokenizer_of(name)).encode(new.encode())) for name in names] for new in wholes.values()]
    assert {(a > b) - (a < b) for a, b in counts} == {-1, 0, 1}
    ensemble = duet(names, *(prompt + new for prompt, new in wholes.items()), method=method)
    prompts, texts = list(wholes), [prompt + new for prompt, new in wholes.items()]
    together = output_ids(ensemble, prompts, max_new_tokens=90)
    assert texts_of(ensemble, prompts, max_new_tokens=90) == texts
    tokenizer = ensemble.tokenizer
    width = max(len(tokenizer(prompt)["input_ids"]) for prompt in prompts)
    for row, prompt in enumerate(prompts):
        alone = output_ids(ensemble, prompt, max_new_tokens=90)[0][len(tokenizer(prompt)["input_ids"]) :]
        new = together[row][width:]
        assert new[: len(alone)] == alone
        assert set(new[len(alone) :]) <= {tokenizer.pad_token_id}
    assert {len(ids) for ids in together} == {len(together[0])}


@each_method
def test_a_member_is_not_asked_about_rows_that_have_ended(method):
    """B5: Not even in the step after: the other row alone goes on."""
    small = tokenizer_of("small")
    ensemble = duet(("small", "small"), "One", "Two is a longer text", method=method)
    output_ids(ensemble, ["One", "Two"])
    assert [len(call.contexts) for call in ensemble.members[1].calls][:3] == [2, 1, 1]
    assert small.pad_token_id != small.eos_token_id


# --- B6 -------------------------------------------------------------------------------------------------------------


@methods_by_turns(index=[0, 1])
def test_a_mixture_of_experts_saved_from_training_is_as_good_as_any(method, index):
    """B6: Router logits switched on in its configuration, which stays as it is; a left-padded batch of two."""
    tokenizers = [tokenizer_of("smol"), tokenizer_of("gemma")]
    if index == 1:
        tokenizers.reverse()
    plain, other = tiny.tiny_mixtral(tokenizers[index], seed=1), tiny.tiny_llama(tokenizers[1 - index], seed=2)
    trained = copy.deepcopy(plain)
    trained.config.output_router_logits = True
    before = copy.deepcopy(trained.config.to_dict())
    outputs = []
    for model in (plain, trained):
        members = [model, other] if index == 0 else [other, model]
        ensemble = make_ensemble(members, tokenizers, method=method)
        batch = padded(prompt_rows(ensemble)[:2], fill=lambda n: 5)
        outputs.append([run(ensemble, batch, weights=weights).sequences.tolist() for weights in (None, [1, 0])])
    assert outputs[0] == outputs[1]
    assert trained.config.to_dict() == before


# --- B8 -------------------------------------------------------------------------------------------------------------


class Countdown:
    """A constraint with state per row: row n has to write its n-th text, id by id, then anything."""

    def __init__(self, wanted):
        self.wanted = wanted
        self.rows = [0] * len(wanted)

    def __call__(self, input_ids, scores):
        assert input_ids.shape[0] == scores.shape[0] == len(self.wanted)
        scores = scores.clone()
        for row, at in enumerate(self.rows):
            if at < len(self.wanted[row]):
                kept = scores[row, self.wanted[row][at]].item()
                scores[row] = -torch.inf
                scores[row, self.wanted[row][at]] = kept
            self.rows[row] += 1
        return scores


@pytest.mark.crossed
@each_method
@pytest.mark.parametrize("do_sample", [False, True])
def test_constraints_with_state_hold_in_every_row_and_every_call(method, do_sample):
    """B8: Over the primary's ids, one row of scores a sequence, three calls in a row alike."""
    ensemble = CORE_RECIPES[0].ensemble
    tokenizer = ensemble.tokenizer
    batch = padded(prompt_rows(ensemble), fill=lambda n: 0)
    wanted = [tokenizer(text)["input_ids"][:4] for text in (" Paris, and", "42", "今天天气")]
    first = None
    for _ in range(3):
        torch.manual_seed(0)
        options = {"method": "gac", "do_sample": do_sample, "eos_token_id": None} | {"method": method}
        if method == "unite":
            # Only what is among the best can be written.
            options["method"] = {"name": "unite", "top_k": len(tokenizer)}
        output = run(ensemble, batch, logits_processor=[Countdown(wanted)], max_new_tokens=6, top_k=0, **options)
        new = output.sequences[:, -6:].tolist()
        for row, ids in enumerate(wanted):
            assert new[row][: len(ids)] == ids
        first = first or new
        assert new == first


@each_method
def test_a_prefix_function_with_state_holds_in_every_row_and_every_call(method):
    """B8: The same for `prefix_allowed_tokens_fn`, which sees the primary's ids of its row."""
    small = tokenizer_of("small")
    ids = [id_of(small, text) for text in "abcdef"]
    ensemble = ensemble_of(*((small, [dict.fromkeys(ids, 1 / 6)]) for _ in range(2)), method=method)
    for _ in range(3):
        position = [0, 0, 0]

        def allowed(row, seen, position=position):
            assert len(seen) == 1 + position[row]
            position[row] += 1
            return [ids[(row + position[row]) % 6]]

        output = ensemble.generate(
            torch.tensor([[ids[0]]] * 3), max_new_tokens=4, prefix_allowed_tokens_fn=allowed, do_sample=False
        )
        assert output[:, 1:].tolist() == [[ids[(row + step) % 6] for step in range(1, 5)] for row in range(3)]
