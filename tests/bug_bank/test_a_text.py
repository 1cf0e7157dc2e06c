"""Bug bank, section A: text and tokenizer fidelity.

| case | where |
| --- | --- |
| A2 | here; `vocabulary/test_encoding.py` (the space sign of a user) |
| A4 | here; `vocabulary/test_encoding.py` (canonical ids, literal byte tokens) |
| A5 | here; `vocabulary/test_encoding.py` (no space is inserted) |
| A6 | here for (a) and (c); `test_conversations.py` for (b) |
| A7 | here |
| A8 | here; `vocabulary/test_encoding.py` (normalizers) |
| A9 | here; `vocabulary/test_token_bytes.py` (padded rows, holes) |
| A10 | here; `vocabulary/test_token_bytes.py` (added tokens) |
| A11 | here; `vocabulary/test_context.py` (nothing is lost or doubled at the end of a prompt) |
| A12 | here |
| A13 | here; `vocabulary/test_token_bytes.py` (fragments); real pair in `real/test_bug_bank_real.py` |
"""

import functools

import pytest
import torch
from transformers import pipeline

from hf_ensemble import UnionVocabulary, UniteConfig
from hf_ensemble.config import method_config
from tests import tiny
from tests.contracts import Recorder, changed_logits, make_ensemble
from tests.vocabulary.material import byte_level_tokenizer

from .kit import (
    contexts_of,
    control_tokens_may_be_chosen,
    duet,
    each_averaging_method,
    each_method,
    ensemble_of,
    id_of,
    members_may_be_lossy,
    methods_by_turns,
    output_ids,
    ready,
    spelling,
    text_of,
    texts_of,
    texts_shown_to,
    tokenizer_of,
    writer,
)

PAIRS = (("smol", "gemma"), ("gemma", "smol"))
each_pair = pytest.mark.parametrize("names", PAIRS, ids=" + ".join)


# --- A2 -------------------------------------------------------------------------------------------------------------

SPACE_SIGNS = ("bars: ▁▂▃▅ a▁b", "▁", "▁▁▁ x", "end▁")


@each_method
@members_may_be_lossy
def test_a_space_sign_in_the_prompt_stays_one_in_the_output(method):
    """A2: "▁" in a user's text is no space, whatever another member makes of it."""
    smol, wholes = tokenizer_of("smol"), [prompt + " ok" for prompt in SPACE_SIGNS]
    ensemble = ensemble_of((smol, writer(smol, *wholes)), (tokenizer_of("gemma"), ()), method=method)
    assert texts_of(ensemble, SPACE_SIGNS) == wholes


@each_method
@members_may_be_lossy
def test_a_primary_that_reads_the_space_sign_as_a_space_gives_the_prompt_back_as_it_came(method):
    """A2: The prompt's ids and the pipeline's text are the input's; nobody writes his own reading into them."""
    gemma = tokenizer_of("gemma")
    ensemble = ensemble_of((gemma, [{id_of(gemma, "a"): 1.0}]), (tokenizer_of("smol"), ()), method=method)
    generate = pipeline("text-generation", model=ensemble, tokenizer=ensemble.tokenizer)
    for prompt in SPACE_SIGNS:
        ids = gemma(prompt)["input_ids"]
        assert output_ids(ensemble, prompt, max_new_tokens=2)[0] == [*ids, *[id_of(gemma, "a")] * 2]
        assert generate(prompt, max_new_tokens=2, do_sample=False)[0]["generated_text"] == prompt + "aa"


@each_method
@members_may_be_lossy
@pytest.mark.parametrize("index", [0, 1])
@each_pair
def test_a_space_sign_that_is_generated_survives(method, names, index):
    """A2: Whoever proposes it."""
    if (method, index, names[index]) == ("unite", 1, "gemma"):
        pytest.skip("encoded as a whole, its context holds one id where it wrote three: this script loses its place")
    tokenizers = [tokenizer_of(name) for name in names]
    scripts = [(), ()]
    scripts[index] = [{i: 1.0} for i in spelling(tokenizers[index]).encode("▁x▁▁".encode())]
    weights = [0.2, 0.2]
    weights[index] = 0.8
    # The script goes by the length of the context in the member's own ids.
    ensemble = ensemble_of(*zip(tokenizers, scripts, strict=True), method=method, weights=weights)
    for model, tokenizer in zip(ensemble.members, tokenizers, strict=True):
        model.prompt_length = len(spelling(tokenizer).prompt_prefix) + 1
    found = text_of(ensemble, "a", max_new_tokens=len(scripts[index]))
    assert found == "a▁x▁▁"


# --- A4 -------------------------------------------------------------------------------------------------------------


@pytest.mark.crossed
@each_averaging_method
@pytest.mark.parametrize("other", ["gemma", "smol", "wordpiece"])
@pytest.mark.parametrize("index", [0, 1])
def test_two_ids_of_one_surface_are_pooled_and_win(method, index, other):
    """A4: 0.30 on the newline, 0.30 on its byte token, 0.40 on a word: the newline is written."""
    gemma, other = tokenizer_of("gemma"), tokenizer_of(other)
    newline, byte = spelling(gemma).entries[b"\n"]
    members = [(gemma, [{newline: 0.3, byte: 0.3, id_of(gemma, " the"): 0.4}]), (other, ())]
    if index == 1:
        if b"\n" not in spelling(other).entries:
            pytest.skip("the primary cannot write a newline")
        members.reverse()
    ensemble = ensemble_of(*members, method=method)
    ids = output_ids(ensemble, "a", max_new_tokens=1)[0]
    assert spelling(ensemble.tokenizers[0]).token_bytes[ids[-1]] == b"\n"


LITERALS = ("/n", "<0x0A>", "\\n", "a/nb<0x0A><0xE4>\\n", "<0x09>/t")


@each_method
@each_pair
def test_a_literal_slash_n_or_byte_token_is_never_a_newline(method, names):
    """A4: Neither in the prompt nor in what is generated, in the output or in what another member is shown."""
    prompts = [f"Say {text}:" for text in LITERALS]
    wholes = [f"{prompt} {text}." for prompt, text in zip(prompts, LITERALS, strict=True)]
    ensemble = duet(names, *wholes, method=method)
    assert texts_of(ensemble, prompts) == wholes
    for index in (0, 1):
        shown = [text.removeprefix("<bos>") for text in texts_shown_to(ensemble, index)]
        assert {*prompts} <= {*shown}
        assert not any("\n" in text or "\t" in text for text in shown)


# --- A5 -------------------------------------------------------------------------------------------------------------

SEAMS = (
    ("The capital of France is", " Paris"),
    ("The capital of Germany is ", "Berlin"),
    ("The answer is\n", "Paris"),
    ("Once upon  ", " Paris"),
)


@methods_by_turns(other=["metaspace", "llama2", "unigram"], is_primary=[True, False])
def test_the_space_before_the_first_new_word_is_there_once(method, other, is_primary):
    """A5: One space after a bare prompt, none after one that ends in white space; streamed and final."""
    names = (other, "smol") if is_primary else ("smol", other)
    prompts, wholes = [prompt for prompt, _ in SEAMS], [prompt + text for prompt, text in SEAMS]
    ensemble = duet(names, *wholes, method=method)
    tokenizer = ensemble.tokenizer
    assert texts_of(ensemble, prompts) == wholes
    streamer = Recorder(tokenizer)
    ids = output_ids(ensemble, prompts[0], streamer=streamer)[0]
    assert tokenizer.decode(ids, skip_special_tokens=True) == wholes[0]
    if not is_primary:
        assert streamer.text.removesuffix(tokenizer.eos_token) == SEAMS[0][1]


@each_method
@each_pair
def test_spaces_between_all_words_are_kept(method, names):
    """A5: No space is lost or doubled between the words of a longer text."""
    whole = "Once upon a time there was a king who had three daughters."
    assert text_of(duet(names, whole, method=method), "Once") == whole


# --- A6 -------------------------------------------------------------------------------------------------------------


@methods_by_turns(names=[*PAIRS, ("with_bos", "gemma"), ("gemma", "with_bos")])
def test_each_member_has_its_own_start_token_once_at_the_start(method, names):
    """A6: Recorded over more than twenty steps, however often the text is encoded again."""
    prompt = "Once upon a time"
    whole = prompt + " there was a king who had three daughters. " + "今天天气很好。"
    ensemble = duet(names, whole, method=method)
    assert text_of(ensemble, prompt) == whole
    for index, tokenizer in enumerate(ensemble.tokenizers):
        prefix = spelling(tokenizer).prompt_prefix
        assert len(prefix) == (0 if names[index] == "smol" else 1)
        contexts = contexts_of(ensemble, index)
        assert len(contexts) > 20
        for context in contexts:
            assert list(context[: len(prefix)]) == prefix
            assert spelling(tokenizer).control.isdisjoint(context[len(prefix) :])


@each_method
def test_a_start_token_in_the_primarys_ids_is_no_text_for_others(method):
    """A6: Given twice by the user, or by a primary without such a rule, it is dropped for the others."""
    ensemble = duet(("with_bos", "smol"), "Once upon", method=method)
    ids = ensemble.tokenizer("<|start|><|start|>Once", return_tensors="pt", add_special_tokens=False)
    with pytest.warns(UserWarning, match="control tokens of the primary"):
        ensemble.generate(**ids, max_new_tokens=1)
    assert texts_shown_to(ensemble, 1) == ["Once"]
    ensemble = duet(("smol", "gemma"), "Once upon", method=method)
    ids = ensemble.tokenizer("<|im_start|>Once", return_tensors="pt")
    ensemble.generate(**ids, max_new_tokens=1)
    assert texts_shown_to(ensemble, 1) == ["<bos>Once"]


# --- A7 -------------------------------------------------------------------------------------------------------------


@each_method
@members_may_be_lossy
def test_spaces_before_punctuation_reach_the_other_members(method):
    """A7: A WordPiece tokenizer with clean-up on, as primary: what the other is shown is what its ids write."""
    prompt, new = "the cat , the dog .", " , isn ' t ? 42"
    ensemble = duet(("wordpiece", "smol"), prompt + new, method=method)
    assert text_of(ensemble, prompt) == prompt + new
    shown = texts_shown_to(ensemble, 1)
    assert shown[0] == prompt
    assert shown[-1] == prompt + new


@each_method
@members_may_be_lossy
@pytest.mark.parametrize("prompt", ["x ? y , z .", "King , Gertrude ."])
def test_spaces_before_punctuation_stay_in_the_prompt_and_in_what_is_generated(method, prompt):
    """A7: The same with the WordPiece member as assistant."""
    smol = tokenizer_of("smol")
    ensemble = ensemble_of((smol, writer(smol, prompt + " , x .")), (tokenizer_of("wordpiece"), ()), method=method)
    assert text_of(ensemble, prompt) == prompt + " , x ."
    shown = texts_shown_to(ensemble, 1)
    assert shown[0] == " " + prompt.lower()
    if method == "unite":
        # A space alone is nothing to WordPiece, so what is appended piece by piece loses it.
        assert shown[-1] == " " + prompt.lower() + " , x ."


@members_may_be_lossy
def test_a_space_and_its_punctuation_are_written_as_one_entry():
    """A7: An assistant of WordPiece proposes ` ,`, which the primary writes with two ids."""
    smol, wordpiece = tokenizer_of("smol"), tokenizer_of("wordpiece")
    script = [{id_of(wordpiece, " ,"): 1.0}]
    ensemble = ensemble_of((smol, ()), (wordpiece, script), method="gac", weights=[0.1, 0.9])
    assert text_of(ensemble, "King", max_new_tokens=4) == "King , ,"


# --- A8 -------------------------------------------------------------------------------------------------------------

REWRITTEN = {
    "nfkc": ("ﬁle ＡＢ ½ x²", " ﬁ½² ＡＢ.", "file AB 1⁄2 x2", " fi1⁄22 AB."),
    "lowercase": ("The King SAID", " Hello TO Me.", "the king said", " hello to me."),
}


@each_method
@members_may_be_lossy
@pytest.mark.parametrize("name", REWRITTEN)
def test_a_member_that_rewrites_text_never_writes_its_view_back(method, name):
    """A8: The output keeps the user's and the generated characters; the member's own view does not drift."""
    prompt, new, prompt_seen, new_seen = REWRITTEN[name]
    smol = tokenizer_of("smol")
    ensemble = ensemble_of((smol, writer(smol, prompt + new)), (tokenizer_of(name), ()), method=method)
    assert text_of(ensemble, prompt) == prompt + new
    # What is appended is exact where the member can write it.
    assert texts_shown_to(ensemble, 1)[-1] == prompt_seen + (new if method == "gac" else new_seen)


@each_method
@members_may_be_lossy
@pytest.mark.parametrize("name", REWRITTEN)
def test_a_primary_that_rewrites_text_can_still_be_made_to_write_it_exactly(method, name):
    """A8: The prompt's ids are as given, and what the other member proposes is spelled without the normalizer."""
    new = REWRITTEN[name][1]
    tokenizer, smol = tokenizer_of(name), tokenizer_of("smol")
    ensemble = ensemble_of((tokenizer, ()), (smol, writer(smol, "a" + new)), method=method, weights=[0.1, 0.9])
    assert text_of(ensemble, "a") == "a" + new


@each_method
@pytest.mark.parametrize("name", REWRITTEN)
def test_a_lossy_member_is_warned_of_once(method, name):
    """A8: Section 2 of the semantics: a member's lossy view of the text comes with one warning, which names it."""
    prompt, new, *_ = REWRITTEN[name]
    smol = tokenizer_of("smol")
    ensemble = ensemble_of((smol, writer(smol, prompt + new)), (tokenizer_of(name), ()), method=method)
    with pytest.warns(UserWarning) as caught:
        text_of(ensemble, prompt)
    assert sum("member-1" in str(warning.message) for warning in caught) == 1


# --- A9 -------------------------------------------------------------------------------------------------------------

WAYS = (
    {},
    {"do_sample": True, "top_k": 0},
    {"do_sample": True, "top_k": 3},
    {"num_beams": 2},
    {"repetition_penalty": 1.1},
    {"min_new_tokens": 2},
)


def with_rows_without_token(index, kind, method, script):
    """Two members of one vocabulary, one of which gives most of its mass to ids without a token."""
    plain = tokenizer_of("small")
    holey = tokenizer_of("holes") if kind == "hole" else plain
    extra = 7 if kind == "padding" else 0
    dead = [300, 301] if kind == "hole" else [tiny.rows_of(plain) + n for n in range(2)]
    ensemble = _rows_without_token(index, holey, extra)
    for model, tokenizer in zip(ensemble.members, ensemble.tokenizers, strict=True):
        model.script = [{id_of(tokenizer, text): p for text, p in script.items()}]
    ensemble.members[index].script[0].update(dict.fromkeys(dead, 0.45))
    ensemble.config.method = method_config(method)
    return ensemble, dead


@functools.cache
def _rows_without_token(index, tokenizer, extra_rows):
    members = [(tiny.ScriptedModel(tokenizer, extra_rows=extra_rows), tokenizer)]
    members.insert(1 - index, (tiny.ScriptedModel(tokenizer_of("small")), tokenizer_of("small")))
    return ready(make_ensemble(*zip(*members, strict=True)))


@pytest.mark.crossed
@each_averaging_method
@pytest.mark.parametrize("kind", ["padding", "hole"])
@pytest.mark.parametrize("index", [0, 1])
def test_ids_without_a_token_are_never_chosen(method, kind, index):
    """A9: Padded rows and holes that win the argmax are masked before anything else."""
    torch.manual_seed(0)
    ensemble, _ = with_rows_without_token(index, kind, method, {"a": 0.09, "b": 0.01})
    a, b, end = (*(id_of(ensemble.tokenizers[0], text) for text in "ab"), ensemble.tokenizer.eos_token_id)
    for options in WAYS:
        ids = output_ids(ensemble, "a", max_new_tokens=3, **options)[0]
        assert set(ids) <= {a, b, end}, options


@each_averaging_method
@pytest.mark.parametrize("kind", ["padding", "hole"])
@pytest.mark.parametrize("index", [0, 1])
def test_ids_without_a_token_take_no_mass(method, kind, index):
    """A9: The distribution is the one without them, and their columns are -inf."""
    ensemble, dead = with_rows_without_token(index, kind, method, {"a": 0.075, "b": 0.025})
    output = ensemble.generate(
        **ensemble.tokenizer("a", return_tensors="pt"),
        max_new_tokens=1,
        return_dict_in_generate=True,
        output_logits=True,
    )
    tokenizer, row = ensemble.tokenizers[0], output.logits[0][0]
    assert [row[id_of(tokenizer, text)].exp().item() for text in "ab"] == pytest.approx([0.75, 0.25], abs=1e-5)
    if index == 0:
        assert len(row) == tiny.rows_of(tokenizer) + 7 * (kind == "padding")
        assert row[dead].tolist() == [-torch.inf] * 2


@pytest.mark.parametrize("kind", ["padding", "hole"])
@pytest.mark.parametrize("index", [0, 1])
def test_the_best_k_are_k_real_candidates(kind, index):
    """A9: Dead ids do not count among the k that a member proposes."""
    ensemble, _ = with_rows_without_token(index, kind, UniteConfig(top_k=2), {"a": 0.06, "b": 0.04})
    output = ensemble.generate(
        **ensemble.tokenizer("a", return_tensors="pt"),
        max_new_tokens=1,
        return_dict_in_generate=True,
        output_logits=True,
    )
    found = (output.logits[0][0] > -torch.inf).nonzero()[:, 0].tolist()
    assert found == sorted(id_of(ensemble.tokenizers[0], text) for text in "ab")


@each_averaging_method
def test_a_really_resized_model_gives_the_text_of_the_unresized_one(method):
    """A9: After `resize_token_embeddings`, with a padding row that would win every step."""
    tokenizer = tokenizer_of("smol")
    plain, resized = (tiny.tiny_llama(tokenizer, seed=3) for _ in range(2))
    resized.resize_token_embeddings(len(tokenizer) + 64, mean_resizing=False)
    other, gemma = tiny.tiny_gemma3(tokenizer_of("gemma"), seed=4), tokenizer_of("gemma")
    with changed_logits(resized, lambda logits: logits.index_fill(-1, torch.tensor([len(tokenizer) + 5]), 1e3)):
        found, expected = (
            output_ids(make_ensemble([model, other], [tokenizer, gemma], method=method), "The cat", max_new_tokens=6)
            for model in (resized, plain)
        )
    assert found == expected


# --- A10 ------------------------------------------------------------------------------------------------------------


@each_method
def test_added_tokens_are_their_literal_text(method):
    """A10: Proposed by the second member; the tokenizer's own decoder would make a carriage return of `č`."""
    smol, odd = tokenizer_of("smol"), tokenizer_of("odd_added")
    prompts = ["a", "b", "c", "d"]
    wholes = ["ačaj", "bĠra", "c<tool_call>", "d čajĠra<tool_call> čaj"]
    ensemble = ensemble_of((smol, ()), (odd, writer(odd, *wholes)), method=method, weights=[0.1, 0.9])
    assert texts_of(ensemble, prompts) == wholes


@each_method
@each_pair
def test_text_that_looks_like_the_gpt2_alphabet_is_text(method, names):
    """A10: In prompt and output, beside members that know no such token, and shown as it is."""
    text = "čaj Ġračaj"
    ensemble = duet((*names, "odd_added"), f"{text}: {text}!", method=method)
    assert text_of(ensemble, text) == f"{text}: {text}!"
    for index in range(3):
        assert texts_shown_to(ensemble, index)[-1].removeprefix("<bos>") == f"{text}: {text}!"


# --- A11 and A12 ----------------------------------------------------------------------------------------------------


MERGED = (
    ("The answer is ", "42."),
    ("The question is ", " 42."),
    ("see http:", "//example.org"),
    ("Hello\n", "\n\nWorld"),
    ("Hey\n\n", "\n"),
    ("a ", "  b"),
    ("b\t", "\tb"),
    ("the cap", "ital"),
    ("ภาษาไ", "ทย"),
    ("x\r", "\n"),
)


@each_method
@each_pair
def test_prompt_and_continuation_meet_without_loss(method, names):
    """A11: Where a tokenizer would have merged across the seam, the text is prompt + continuation all the same."""
    wholes = [prompt + new for prompt, new in MERGED]
    ensemble = duet(names, *wholes, method=method)
    assert texts_of(ensemble, [prompt for prompt, _ in MERGED]) == wholes
    if method == "unite":
        # Encoded as a whole, as the assistant itself would.
        contexts = {tuple(context) for context in contexts_of(ensemble, 1)}
        assert {tuple(ensemble.tokenizers[1](whole)["input_ids"]) for whole in wholes} <= contexts


@methods_by_turns(name=["smol", "gemma"])
@control_tokens_may_be_chosen
def test_one_member_or_all_weight_on_it_is_that_member_at_every_seam(method, name):
    """A11: O1, trailing space included."""
    tokenizer = tokenizer_of(name)
    model = tiny.tiny_llama(tokenizer, seed=1)
    one = make_ensemble([model], [tokenizer], method=method)
    two = make_ensemble([model, tiny.tiny_llama(tokenizer, seed=2)], [tokenizer] * 2, method=method, weights=[1, 0])
    for prompt in ("The answer is ", "see http:", "Hello\n", "a "):
        expected = model.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=4).tolist()
        assert output_ids(one, prompt, max_new_tokens=4) == expected
        assert output_ids(two, prompt, max_new_tokens=4) == expected


WHITE_SPACE = "def f(x):\n\n\n\tif x:\r\n        return\t\t1\n\n\t\t\t# \n \n   \r\n\n\n\n\nend"


@pytest.mark.crossed
@each_method
@pytest.mark.parametrize("names", [*PAIRS, ("unigram", "qwen")], ids=" + ".join)
def test_white_space_comes_out_exactly(method, names):
    """A12: Runs of newlines and tabs are added tokens for one member and something else for the other."""
    ensemble = duet(names, WHITE_SPACE, method=method)
    assert text_of(ensemble, "def f(x):", max_new_tokens=100) == WHITE_SPACE


@each_method
@pytest.mark.parametrize("token", ["\n\n", "\n\n\n", "\t\t", "<table>"])
@pytest.mark.parametrize("is_primary", [True, False])
def test_added_tokens_that_are_not_special_are_candidates(method, token, is_primary):
    """A12: They are proposed, written and read back as what they are."""
    gemma, smol = tokenizer_of("gemma"), tokenizer_of("smol")
    proposer = (gemma, [{gemma.convert_tokens_to_ids(token): 1.0}])
    members = [proposer, (smol, ())] if is_primary else [(smol, ()), proposer]
    ensemble = ensemble_of(*members, method="gac", weights=[0.8, 0.2] if is_primary else [0.2, 0.8])
    length = 1 if is_primary else len(spelling(smol).encode(token.encode()))
    if method == "unite":
        length = 1
    found = text_of(ensemble, "a", method=method, max_new_tokens=length)
    assert found == "a" + token if method == "gac" or is_primary else ("a" + token).startswith(found) and found != "a"


# --- A13 ------------------------------------------------------------------------------------------------------------


@each_pair
def test_every_entry_of_the_union_is_a_byte_string_of_its_own(names):
    """A13: Also fragments of characters, which decode to the same replacement character by themselves."""
    tokenizers = [tokenizer_of(name) for name in names]
    union = UnionVocabulary.from_tokenizers(tokenizers)
    entries = [union.entry(u) for u in range(len(union))]
    texts = [entry for entry in entries if entry]
    distinct = set()
    for tokenizer in tokenizers:
        distinct |= set(spelling(tokenizer).token_bytes.values())
    assert set(texts) == distinct
    beyond = texts[len([entry for entry in entries[: union.primary_size] if entry]) :]
    assert len(set(beyond)) == len(beyond)
    fragments = [entry for entry in texts if "\ufffd" in entry.decode(errors="replace")]
    assert len(fragments) > len({entry.decode(errors="replace") for entry in fragments})
    for m, tokenizer in enumerate(tokenizers):
        for i, entry in spelling(tokenizer).token_bytes.items():
            assert union.entry(union.member_to_union[m][i]) == entry


def test_fragments_of_any_shape_keep_all_their_parts():
    """A13: A space with part of a character, a character with part of another, only continuation bytes."""
    shapes = [
        b" \xe0",
        b" \xe0\xb8",
        b"\xe0\xb8\x81\xe0",
        b"\xb8\x81",
        b"a\xf0\x9f",
        b"\x80\x80 b",
        b"\xff\xfe",
        b"\xc3(",
    ]
    alphabet = tiny.byte_alphabet()
    spelled = ["".join(alphabet[b] for b in shape) for shape in shapes]
    vocab = {token: i for i, token in enumerate([*alphabet, *spelled])}
    odd = byte_level_tokenizer(vocab)
    union = UnionVocabulary.from_tokenizers([tokenizer_of("gemma"), odd], cache=False)
    for shape, token in zip(shapes, spelled, strict=True):
        assert union.entry(union.member_to_union[1][vocab[token]]) == shape


@methods_by_turns(names=[*PAIRS, ("smol", "unigram"), ("unigram", "qwen")])
def test_characters_in_pieces_come_out_whole(method, names):
    """A13: Thai, Hebrew, Chinese and emoji, of which one member writes characters and the other bytes."""
    wholes = [tiny.THAI[0][:16], tiny.HEBREW[1][:16], tiny.CHINESE[1], "I 😀👩‍💻👍🏽!"]
    assert texts_of(duet(names, *wholes, method=method), [whole[:3] for whole in wholes]) == wholes


@each_averaging_method
def test_a_fragment_pools_with_the_same_fragment_only(method):
    """A13: E0 B8 and E0 B9, alone both a replacement character, are two candidates: 0.4 + 0.1 loses against 0.5 + 0.3."""
    alphabet = tiny.byte_alphabet()
    tokenizers, models = [], []
    for order, shares in (((0xB8, 0xB9), (0.55, 0.45)), ((0xB9, 0xB8), (0.6, 0.4))):
        pairs = [alphabet[0xE0] + alphabet[second] for second in order]
        vocab = {token: i for i, token in enumerate(["<|end|>", *alphabet, *pairs])}
        tokenizers.append(byte_level_tokenizer(vocab, eos="<|end|>"))
        models.append(tiny.ScriptedModel(tokenizers[-1], [{vocab[p]: s for p, s in zip(pairs, shares, strict=True)}]))
    ensemble = make_ensemble(models, tokenizers, method=method)
    output = ensemble.generate(
        torch.tensor([[40]]), max_new_tokens=1, return_dict_in_generate=True, output_logits=True
    )
    by_bytes = spelling(tokenizers[0]).entries
    found = [output.logits[0][0, by_bytes[fragment][0]].exp().item() for fragment in (b"\xe0\xb8", b"\xe0\xb9")]
    assert found == pytest.approx([(0.55 + 0.4) / 2, (0.45 + 0.6) / 2], abs=1e-4)
    assert output.sequences[0, -1].item() == by_bytes[b"\xe0\xb9"][0]
