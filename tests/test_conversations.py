"""Conversations and prompts per member: what every member reads, and that nobody can tell members apart."""

import copy
import functools
import json
import os
import pickle
import threading
import warnings
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast, pipeline

from hf_ensemble import ConfigurationError, EnsembleForCausalLM, MemberConfig, UniteConfig
from hf_ensemble.chat.conversation import read_conversations
from hf_ensemble.chat.rendering import ChatRenderer
from hf_ensemble.chat.tokenizer import ensemble_tokenizer
from hf_ensemble.choosing.prompt_weights import packllm_weights
from hf_ensemble.vocabulary.rendered import RenderedEncoder
from hf_ensemble.vocabulary.token_bytes import TokenBytes
from tests import tiny
from tests.bug_bank.kit import contexts_of, control_tokens_may_be_chosen, ready, spelling

pytestmark = [
    control_tokens_may_be_chosen,
    pytest.mark.filterwarnings("ignore:member .* does not read the text exactly"),
]

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TURNS = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system turns') }}{% endif %}"
    "{{ '<turn>' + m['role'] + '\n' + (m['content'] | trim) + '</turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<turn>model\n' }}{% endif %}"
)
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "The capital of France?"}]
METHODS = ["gac", "unite", "deepen", "sweetspan", UniteConfig(threshold=0.5, gate=1)]
NAMES = ["gac", "unite", "deepen", "sweetspan", "gated"]
each_method = pytest.mark.parametrize("method", METHODS, ids=NAMES)
each_kind_of_method = pytest.mark.parametrize(
    "method",
    [
        pytest.param(method, id=name, marks=[pytest.mark.slow] * (name in ("unite", "deepen")))
        for method, name in zip(METHODS, NAMES, strict=True)
    ],
)
"""Quick are a method that mixes, one that proposes, and one where a member sits out."""


def with_template(tokenizer, template):
    tokenizer.chat_template = template
    return tokenizer


SMOL = with_template(tiny.smol_like(), CHATML)
TURN = with_template(tiny.gemma_like(specials=("<turn>", "</turn>")), TURNS)
BASE = tiny.gemma_like()
LLAMA2 = with_template(tiny.sentencepiece_bpe(style="llama2", specials=("<turn>", "</turn>")), TURNS)
UNIGRAM = with_template(tiny.unigram(), TURNS.replace("<turn>", "<s>").replace("</turn>", "</s>"))
WORDPIECE = with_template(
    tiny.wordpiece(), "{% for m in messages %}{{ '[CLS]' + m['content'] + '[SEP]' }}{% endfor %}"
)
HOLES = with_template(
    tiny.byte_level_bpe(holes=(300, 301), bos="<|im_start|>", eos="<|im_end|>", pad=None, added=["<think>"]), CHATML
)
TEMPLATED = {"smol": SMOL, "turn": TURN, "llama2": LLAMA2, "unigram": UNIGRAM, "wordpiece": WORDPIECE, "holes": HOLES}
each_tokenizer = pytest.mark.parametrize("name", TEMPLATED)


def scripted_with(configs, *tokenizers) -> EnsembleForCausalLM:
    models = [tiny.ScriptedModel(tokenizer) for tokenizer in tokenizers]
    for n, config in enumerate(configs):
        config.name = f"member-{n}"
    return ready(EnsembleForCausalLM.from_members(models, tokenizers, member_configs=configs))


@functools.cache
def scripted(*tokenizers) -> EnsembleForCausalLM:
    return scripted_with([MemberConfig() for _ in tokenizers], *tokenizers)


@functools.cache
def llamas(*tokenizers) -> EnsembleForCausalLM:
    models = [tiny.tiny_llama(tokenizer, seed=n, num_hidden_layers=1) for n, tokenizer in enumerate(tokenizers)]
    return EnsembleForCausalLM.from_members(models, tokenizers)


def stock(tokenizer, messages, **options) -> list[int]:
    options = {"add_generation_prompt": True, **options}
    return PreTrainedTokenizerBase.apply_chat_template(tokenizer, messages, **options)["input_ids"]


def rendered(ensemble, messages=MESSAGES, **options):
    options = {"add_generation_prompt": True, "return_tensors": "pt", **options}
    return ensemble.apply_chat_template(messages, **options)


def generate(ensemble, inputs, **options):
    return ensemble.generate(**inputs, **{"max_new_tokens": 6, "do_sample": False, **options})


def first_context(ensemble, index, inputs, **options) -> list[int]:
    ensemble.members[index].calls.clear()
    generate(ensemble, inputs, max_new_tokens=1, **options)
    return list(contexts_of(ensemble, index)[0])


def tokenizer_like(tokenizer, name="x", **options):
    return ensemble_tokenizer(tokenizer, TokenBytes(tokenizer).control, name, **options)


def controls(tokenizer, ids) -> list[int]:
    return [i for i in ids if i in spelling(tokenizer).control]


def text_written(tokenizer, ids) -> str:
    return spelling(tokenizer).text_of_prompt(ids).decode(errors="replace")


# --- What each member reads -----------------------------------------------------------------------------------------


@each_method
def test_every_member_reads_the_conversation_in_its_own_template(method):
    """A6 (b), B3, E12: As its own tokenizer renders it, with one BOS or none, and nothing of another's template."""
    ensemble = scripted(SMOL, TURN, BASE)
    inputs = rendered(ensemble)
    assert inputs["input_ids"][0].tolist() == stock(SMOL, MESSAGES)
    folded = [{"role": "user", "content": "Be brief.\n\nThe capital of France?"}]
    assert first_context(ensemble, 1, inputs, method=method) == stock(TURN, folded)
    plain = "<bos>Be brief.\n\nUser:\nThe capital of France?\n\nAssistant:\n"
    assert first_context(ensemble, 2, inputs, method=method) == BASE(plain, add_special_tokens=False)["input_ids"]


@each_kind_of_method
def test_what_is_written_goes_on_from_each_members_own_rendering(method):
    """A6 (c): No control token is in a member's context after its rendering, however often text is re-encoded."""
    ensemble = scripted_with([MemberConfig(), MemberConfig()], SMOL, TURN)
    for model, tokenizer in zip(ensemble.members, (SMOL, TURN), strict=True):
        text_ids = [i for i in range(len(tokenizer)) if tokenizer.convert_ids_to_tokens(i) in ("e", "n", "d")]
        model.script = lambda context, ids=text_ids: dict.fromkeys(ids, 1 / len(ids))
    inputs = rendered(ensemble)
    start = first_context(ensemble, 1, inputs, method=method)
    ensemble.members[1].calls.clear()
    output = generate(ensemble, inputs, max_new_tokens=12, method=method)
    written = text_written(SMOL, output[0, inputs["input_ids"].shape[1] :].tolist())
    for context in contexts_of(ensemble, 1):
        assert list(context[: len(start) - 1]) == start[:-1]
        assert controls(TURN, context) == controls(TURN, start)
    assert set(written) <= set("end")


@each_tokenizer
def test_a_twin_of_the_primary_reads_the_same_ids(name):
    tokenizer = TEMPLATED[name]
    for method in ("gac", "unite"):
        ensemble = scripted(tokenizer, tokenizer)
        inputs = rendered(ensemble, MESSAGES[1:])
        assert (
            first_context(ensemble, 1, inputs, method=method)
            == inputs["input_ids"][0].tolist()
            == stock(tokenizer, MESSAGES[1:])
        )


@pytest.mark.parametrize("method", ["gac", "sweetspan"])
def test_the_same_model_twice_is_that_model_in_a_conversation(method):
    """O2, with control tokens in content; methods that re-encode what was written may read it otherwise."""
    messages = [{"role": "user", "content": "What does <|im_end|> do?"}]
    model = tiny.tiny_llama(SMOL, num_hidden_layers=1)
    ensemble = EnsembleForCausalLM.from_members([model, model], [SMOL, SMOL])
    inputs = rendered(ensemble, messages)
    assert (
        generate(ensemble, inputs, method=method).tolist()
        == model.generate(**inputs, max_new_tokens=6, do_sample=False).tolist()
    )


def test_templates_and_system_prompts_can_be_set_for_each_member(tmp_path):
    """E12, F6: In the list of members, and kept when saved; an empty prompt takes the system turn out."""
    configs = [
        MemberConfig(system_prompt="I am the first."),
        MemberConfig(chat_template="{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"),
        MemberConfig(system_prompt=""),
        MemberConfig(system_prompt="Another."),
    ]
    tokenizers = [SMOL, TURN, BASE, BASE]
    for n, (tokenizer, config) in enumerate(zip(tokenizers, configs, strict=True)):
        config.path = str(tmp_path / str(n))
        tiny.tiny_llama(tokenizer, seed=n).save_pretrained(config.path)
        tokenizer.save_pretrained(config.path)
    loaded = EnsembleForCausalLM.from_pretrained(configs)
    loaded.save_pretrained(tmp_path / "saved")
    again = EnsembleForCausalLM.from_pretrained(tmp_path / "saved")
    assert again.config.members[3].system_prompt == "Another."
    expected = [
        "<|im_start|>system\nI am the first.<|im_end|>\n<|im_start|>user\nThe capital of France?<|im_end|>\n",
        "[system]Be brief.[user]The capital of France?",
        "<bos>User:\nThe capital of France?",
        "<bos>Another.\n\nUser:\nThe capital of France?",
    ]
    (conversation,), _ = read_conversations(MESSAGES, None)
    for ensemble in (loaded, again):
        assert ensemble.apply_chat_template(MESSAGES, tokenize=False) == expected[0]
        assert [member.renderer.text(conversation) for member in ensemble._members] == expected
        texts = [
            text_written(t, m.renderer.ids(conversation)) for t, m in zip(tokenizers, ensemble._members, strict=True)
        ]
        assert texts[2] == "User:\nThe capital of France?"
    loaded_tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert loaded_tokenizer.apply_chat_template(MESSAGES, tokenize=False) == expected[0]


def test_a_model_listed_twice_with_two_system_prompts_is_loaded_once(tmp_path):
    tiny.tiny_llama(SMOL).save_pretrained(tmp_path)
    SMOL.save_pretrained(tmp_path)
    ensemble = EnsembleForCausalLM.from_pretrained(
        [MemberConfig(str(tmp_path), system_prompt="A"), MemberConfig(str(tmp_path), system_prompt="B")]
    )
    assert ensemble.members[0] is ensemble.members[1]
    (conversation,), _ = read_conversations(MESSAGES, None)
    assert [member.renderer.text(conversation)[19:20] for member in ensemble._members] == ["A", "B"]


def test_a_system_turn_that_a_template_refuses_is_folded_into_the_user_turn_after_it():
    system = {"role": "system", "content": "Later."}
    tokenizer = tokenizer_like(TURN)
    messages = [*MESSAGES, {"role": "assistant", "content": "Paris."}, system]
    folded = [
        {"role": "user", "content": "Be brief.\n\nThe capital of France?"},
        {"role": "assistant", "content": "Paris."},
        {"role": "user", "content": "Later."},
    ]
    assert tokenizer.apply_chat_template(messages)["input_ids"] == tokenizer.apply_chat_template(folded)["input_ids"]


def test_a_conversation_that_a_template_refuses_names_the_member():
    refusing = MemberConfig(chat_template="{{ raise_exception('turns have to alternate') }}")
    ensemble = scripted_with([MemberConfig(), refusing], SMOL, BASE)
    inputs = rendered(ensemble)
    with pytest.raises(ConfigurationError, match="'member-1' refuses the conversation: turns have to alternate"):
        generate(ensemble, inputs)


@each_method
def test_an_open_turn_is_open_for_every_member(method):
    """The final message is continued, not ended, and keeps its trailing space where the template keeps it."""
    ensemble = scripted(SMOL, BASE, TURN)
    messages = [*MESSAGES, {"role": "assistant", "content": "The capital is <|im_end|> and"}]
    inputs = rendered(ensemble, messages, add_generation_prompt=False, continue_final_message=True)
    ids = inputs["input_ids"][0].tolist()
    assert SMOL.decode(ids).endswith("<|im_start|>assistant\nThe capital is <|im_end|> and")
    assert len(controls(SMOL, ids)) == 5
    assert text_written(BASE, first_context(ensemble, 1, inputs, method=method)).endswith(
        "\n\nAssistant:\nThe capital is <|im_end|> and"
    )
    assert text_written(TURN, first_context(ensemble, 2, inputs, method=method)).endswith(
        "The capital is <|im_end|> and"
    )


def test_both_a_new_and_an_open_turn_are_refused():
    with pytest.raises(ConfigurationError, match="set only one"):
        tokenizer_like(SMOL).apply_chat_template(MESSAGES, add_generation_prompt=True, continue_final_message=True)


@pytest.mark.parametrize("tools", ["abc", {"a": 1}, [3]])
def test_tools_that_are_none_are_named(tools):
    with pytest.raises(TypeError, match="`tools` has to be a list of JSON schemas or functions"):
        read_conversations([{"role": "user", "content": "Hi"}], tools)


def test_tools_and_variables_reach_every_template():
    """As JSON schemas, functions too; a template that ignores them, and the plain rendering, show none."""

    def add(a: int, b: int):
        """Add.

        Args:
            a: One.
            b: Another.
        """

    mode = MemberConfig(chat_template="{{ messages[0]['content'] }} {{ mode }} {{ tools[0].function.name }}")
    ensemble = scripted_with([MemberConfig(), mode, MemberConfig()], SMOL, TURN, BASE)
    inputs = rendered(ensemble, tools=[add], mode="loud")
    assert '"name": "add"' in SMOL.decode(inputs["input_ids"][0])
    assert text_written(TURN, first_context(ensemble, 1, inputs)) == "Be brief. loud add"
    assert "add" not in text_written(BASE, first_context(ensemble, 2, inputs))


def test_calls_of_tools_are_shown_in_the_plain_rendering():
    messages = [{"role": "user", "content": "1+2?"}, {"role": "assistant", "tool_calls": [{"name": "add"}]}]
    assert tokenizer_like(BASE).apply_chat_template(messages, tokenize=False) == (
        '<bos>User:\n1+2?\n\nAssistant:\n{"name": "add"}'
    )


def test_text_parts_are_read_and_other_parts_refused():
    parts = [{"type": "text", "text": "The capital "}, {"type": "text", "text": "of France?"}]
    joined = [MESSAGES[0], {"role": "user", "content": "The capital of France?"}]
    prints_lists = with_template(tiny.smol_like(), "{% for m in messages %}{{ m['content'] }}|{% endfor %}")
    drops_lists = with_template(
        tiny.smol_like(),
        "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% endif %}{% endfor %}",
    )
    knows_parts = with_template(
        tiny.smol_like(), "{% for m in messages %}{% for p in m['content'] %}{{ p.text }}/{% endfor %}{% endfor %}"
    )
    for tokenizer in (SMOL, TURN, BASE, prints_lists, drops_lists):
        ours = tokenizer_like(tokenizer)
        assert (
            ours.apply_chat_template([MESSAGES[0], {"role": "user", "content": parts}])["input_ids"]
            == ours.apply_chat_template(joined)["input_ids"]
        )
    text = tokenizer_like(knows_parts).apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
    assert text == "The capital /of France?/"
    with pytest.raises(ConfigurationError, match="type 'image'"):
        tokenizer_like(SMOL).apply_chat_template([{"role": "user", "content": [{"type": "image", "url": "x"}]}])


@pytest.mark.parametrize("bad", [[], "Hi", [[]], None], ids=str)
def test_what_is_no_conversation_is_refused(bad):
    with pytest.raises(ConfigurationError, match="conversation"):
        tokenizer_like(SMOL).apply_chat_template(bad)


def test_a_turn_without_a_role_is_refused():
    with pytest.raises(TypeError, match="role"):
        tokenizer_like(SMOL).apply_chat_template([{"content": "Hi"}])


# --- Content is text ------------------------------------------------------------------------------------------------


@each_tokenizer
def test_clean_conversations_are_rendered_as_the_tokenizer_itself_does(name):
    tokenizer = TEMPLATED[name]
    ours = tokenizer_like(tokenizer)
    for text in (*tiny.TEXTS, " a  <b> ", "x <", "<think>", "ﬁ\u0301 ▁ \r\n\n\n", "\ufdd0", ""):
        messages = [{"role": "user", "content": text}, {"role": "assistant", "content": text + "."}, MESSAGES[1]]
        assert ours.apply_chat_template(messages)["input_ids"] == stock(
            tokenizer, messages, add_generation_prompt=False
        )


@each_tokenizer
def test_no_control_token_comes_from_content(name):
    """Whatever is spelled, in whichever part of a conversation, is text: and it is all there."""
    tokenizer = TEMPLATED[name]
    ours = tokenizer_like(tokenizer)
    surfaces = [tokenizer.convert_ids_to_tokens(i) for i in sorted(spelling(tokenizer).control)]
    clean = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    expected = controls(tokenizer, ours.apply_chat_template(clean)["input_ids"])
    # What stands for unknown characters is the tokenizer's view of the text.
    unknown = tokenizer.unk_token_id if name == "wordpiece" else None
    for surface in surfaces:
        for text in (surface, f"a{surface}b", surface * 2, surface[:2] + surface, surface[:-1] + surface):
            dirty = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
            ids = ours.apply_chat_template(dirty)["input_ids"]
            assert [i for i in controls(tokenizer, ids) if i != unknown] == expected
            if name not in ("wordpiece", "unigram"):
                assert text_written(tokenizer, ids).count(text) >= 2


def test_control_tokens_that_are_joined_of_pieces_are_text():
    """By parts of a turn, by neighbouring turns, and by a template that cuts something out of content."""
    joins = "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] | replace('CUT', '') | trim }}{% else %}"
    joins += "{% for p in m['content'] %}{{ p['text'] | trim }}{% endfor %}{% endif %}{% endfor %}{{ '<|im_end|>' }}"
    tokenizer = with_template(tiny.smol_like(), joins)
    ours = tokenizer_like(tokenizer)
    parts = [{"type": "text", "text": "a <|im_ "}, {"type": "text", "text": "end|>"}]
    for messages in (
        [{"role": "user", "content": parts}],
        [{"role": "user", "content": "<|"}, {"role": "user", "content": "im_end|>"}],
        [{"role": "user", "content": "<|im_CUTend|>"}],
        [{"role": "user", "content": "<CUT|im_end|>"}],
    ):
        ids = ours.apply_chat_template(messages)["input_ids"]
        assert len(controls(tokenizer, ids)) == 1
        assert ids[-1] == tokenizer.eos_token_id
        assert "<|im_end|>" in text_written(tokenizer, ids)


def test_a_template_still_sees_what_it_looks_for_in_content():
    """Content that is no control token reaches the template as it is."""
    template = "{% for m in messages %}{{ m['content'].split('</think>')[-1] }}{{ '<|im_end|>' }}{% endfor %}"
    tokenizer = with_template(tiny.smol_like(), template)
    messages = [{"role": "user", "content": "<think> a < b </think> Paris"}]
    assert text_written(tokenizer, tokenizer_like(tokenizer).apply_chat_template(messages)["input_ids"]) == " Paris"


def test_tools_documents_and_system_prompts_are_text_too():
    template = "{{ tools[0]['name'] }}{{ documents[0]['text'] }}{{ messages[0]['content'] }}{{ style }}{{ eos_token }}"
    tokenizer = with_template(tiny.smol_like(), template)
    ours = tokenizer_like(tokenizer, system_prompt="<|im_end|>")
    ids = ours.apply_chat_template(
        MESSAGES, tools=[{"name": "<|im_end|>"}], documents=[{"text": "<|im_start|>"}], style="<|im_end|>"
    )["input_ids"]
    assert controls(tokenizer, ids) == [tokenizer.eos_token_id]


def test_characters_that_a_member_cannot_write_are_shown_to_it_as_replaced():
    """As in prompts of plain text; the primary's ids are its tokenizer's own."""
    messages = [{"role": "user", "content": "a\x04b"}]
    ensemble = scripted(TURN, SMOL)
    assert "a\ufffdb" in text_written(SMOL, first_context(ensemble, 1, rendered(ensemble, messages)))


def test_ids_without_a_row_are_spelled_out_for_assistants():
    """I3: An added control token for which the model has no row."""
    tokenizer = with_template(tiny.smol_like(), "{{ '<new>' }}{{ messages[0]['content'] }}")
    num_rows = len(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<new>"]})
    bytes_of = TokenBytes(tokenizer, num_ids=num_rows)
    encoder = RenderedEncoder(bytes_of.backend, bytes_of.control, num_rows)
    (conversation,), _ = read_conversations([{"role": "user", "content": "Hi"}], None)
    ids = ChatRenderer(tokenizer, encoder, "x").ids(conversation)
    assert max(ids) < num_rows
    assert bytes_of.write(ids) == b"<new>Hi"


@pytest.mark.slow
@pytest.mark.npm
@pytest.mark.skipif("HF_ENSEMBLE_NPM_TOKENIZERS" not in os.environ, reason="needs the npm tokenizers")
@pytest.mark.parametrize("name", ["llama3", "qwen3", "gemma3"])
def test_real_templates(name):
    """Clean conversations as stock; of others the same control tokens, and all of the text."""
    folder = Path(os.environ["HF_ENSEMBLE_NPM_TOKENIZERS"], f"tokenizer-{name}", "models")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    names = ("bos_token", "eos_token", "pad_token", "unk_token", "chat_template")
    options = {k: v["content"] if isinstance(v, dict) else v for k, v in config.items() if k in names}
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **options)
    ours = ensemble_tokenizer(tokenizer, [], name)
    for text in (*tiny.TEXTS, "  a\n\n\n <think>\nhm\n</think>\n b ", "<b>▁ﬁ<"):
        messages = [*MESSAGES, {"role": "assistant", "content": text}, {"role": "user", "content": text}]
        for part in (messages, messages[1:], messages[:2]):
            assert ours.apply_chat_template(part, add_generation_prompt=True)["input_ids"] == stock(tokenizer, part)
    control = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special} | set(
        tokenizer.all_special_ids
    )
    expected = [i for i in stock(tokenizer, MESSAGES) if i in control]
    for i in sorted(control)[:40]:
        text = f"a{tokenizer.convert_ids_to_tokens(i)}b"
        messages = [MESSAGES[0], {"role": "user", "content": text}]
        ids = ours.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert [i for i in ids if i in control] == expected
        assert text in tokenizer.decode(ids)


# --- The tokenizer --------------------------------------------------------------------------------------------------


def test_the_arguments_are_those_of_the_tokenizers():
    ours = tokenizer_like(SMOL)
    batch = [MESSAGES, MESSAGES[1:]]
    left = copy.copy(SMOL)
    left.padding_side = "left"
    for options in (
        {},
        {"return_dict": False},
        {"tokenize": False},
        {"return_tensors": "pt"},
        {"return_tensors": "np", "return_dict": False},
        {"padding": "max_length", "max_length": 80},
        {"truncation": True, "max_length": 10},
        {"padding": True, "tokenizer_kwargs": {"pad_to_multiple_of": 16}},
    ):
        expected = PreTrainedTokenizerBase.apply_chat_template(left, MESSAGES, **options)
        assert as_lists(ours.apply_chat_template(MESSAGES, **options)) == as_lists(expected)
        if "return_tensors" not in options:
            expected = PreTrainedTokenizerBase.apply_chat_template(left, batch, **options)
            assert as_lists(ours.apply_chat_template(batch, **options)) == as_lists(expected)
    expected = PreTrainedTokenizerBase.apply_chat_template(left, batch, padding=True, return_tensors="pt")
    assert as_lists(ours.apply_chat_template(batch, padding=True, return_tensors="pt")) == as_lists(expected)
    with pytest.raises(ConfigurationError, match="return_offsets_mapping"):
        ours.apply_chat_template(MESSAGES, tokenizer_kwargs={"return_offsets_mapping": True})


def as_lists(value):
    if hasattr(value, "items"):
        return {key: as_lists(item) for key, item in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


def test_the_users_tokenizer_stays_as_it_is():
    ensemble = scripted_with([MemberConfig(chat_template="x", system_prompt="y"), MemberConfig()], SMOL, TURN)
    before = dict(SMOL.init_kwargs), SMOL.padding_side, SMOL.chat_template, SMOL.backend_tokenizer.to_str()
    rendered(ensemble, [MESSAGES, MESSAGES[1:]], padding=True)
    assert (SMOL.padding_side, SMOL.chat_template) == ("right", CHATML)
    assert type(SMOL) is PreTrainedTokenizerFast
    assert before == (dict(SMOL.init_kwargs), SMOL.padding_side, SMOL.chat_template, SMOL.backend_tokenizer.to_str())


def test_copies_remember_too():
    """Also of a tokenizer of another class than the plain one."""

    original = with_template(tiny.smol_like(), CHATML)
    original.__class__ = OwnTokenizer
    for tokenizer in (SMOL, original):
        ours = tokenizer_like(tokenizer)
        ids = ours.apply_chat_template(MESSAGES)["input_ids"]
        copies = [copy.copy(ours), copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))]
        for other in copies:
            assert isinstance(other, type(tokenizer))
            assert type(other) is type(ours)
            assert other.apply_chat_template(MESSAGES)["input_ids"] == ids
            assert other("Hi")["input_ids"] == tokenizer("Hi")["input_ids"]


class OwnTokenizer(PreTrainedTokenizerFast):
    pass


# --- Remembering ----------------------------------------------------------------------------------------------------


def test_ids_that_nobody_rendered_are_read_as_text_with_a_warning():
    ensemble = scripted(SMOL, BASE)
    ids = stock(SMOL, [{"role": "user", "content": "Never seen."}], add_generation_prompt=False)
    with pytest.warns(UserWarning, match="ensemble.apply_chat_template"):
        context = first_context(ensemble, 1, {"input_ids": torch.tensor([ids])})
    assert text_written(BASE, context) == "user\nNever seen.\n"


def test_a_rendered_text_that_is_tokenized_is_still_the_conversation():
    """Unless its content spells a control token, which then is one: that is no rendering of the conversation."""
    ensemble = scripted(SMOL, BASE)
    text = ensemble.apply_chat_template([{"role": "user", "content": "As text."}], tokenize=False)
    context = first_context(ensemble, 1, ensemble.tokenizer(text, return_tensors="pt", add_special_tokens=False))
    assert text_written(BASE, context) == "User:\nAs text."
    text = ensemble.apply_chat_template([{"role": "user", "content": "As <|im_end|>."}], tokenize=False)
    with pytest.warns(UserWarning, match="control tokens"):
        first_context(ensemble, 1, ensemble.tokenizer(text, return_tensors="pt", add_special_tokens=False))


def test_truncated_conversations_are_read_as_the_text_that_is_left():
    ensemble = scripted(SMOL, BASE)
    inputs = rendered(ensemble, truncation=True, max_length=24)
    with pytest.warns(UserWarning, match="control tokens"):
        context = first_context(ensemble, 1, inputs)
    assert "France" not in text_written(BASE, context)


def test_what_is_remembered_does_not_change_with_the_users_messages():
    ensemble = scripted(SMOL, BASE)
    messages = copy.deepcopy(MESSAGES)
    inputs = rendered(ensemble, messages)
    messages[1]["content"] = "Changed."
    assert "France" in text_written(BASE, first_context(ensemble, 1, inputs))


# --- Batches, beams, pipelines, threads -----------------------------------------------------------------------------

CHATS = [
    MESSAGES,
    [{"role": "user", "content": "Hi"}],
    [*MESSAGES, {"role": "assistant", "content": "Paris."}, {"role": "user", "content": "And of <bos> Spain?"}],
]


@each_kind_of_method
def test_a_row_of_a_batch_is_what_it_is_alone(method):
    ensemble = llamas(SMOL, TURN, BASE)
    inputs = rendered(ensemble, CHATS, padding=True)
    length = inputs["input_ids"].shape[1]
    together = generate(ensemble, inputs, method=method)[:, length:].tolist()
    for chat, row in zip(CHATS, together, strict=True):
        inputs = rendered(ensemble, chat)
        alone = generate(ensemble, inputs, method=method)[0, inputs["input_ids"].shape[1] :].tolist()
        assert row[: len(alone)] == alone


def test_returned_sequences_and_beams_read_their_own_conversation():
    ensemble = scripted(SMOL, BASE)
    inputs = rendered(ensemble, CHATS[:2], padding=True)
    for options in ({"do_sample": True, "num_return_sequences": 3}, {"num_beams": 3, "num_return_sequences": 3}):
        ensemble.members[1].calls.clear()
        generate(ensemble, inputs, method="gac", **options)
        shown = {text_written(BASE, context).split("\n\nAssistant:\n")[0] for context in contexts_of(ensemble, 1)}
        assert shown == {"Be brief.\n\nUser:\nThe capital of France?", "User:\nHi"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    for n, tokenizer in enumerate((SMOL, BASE)):
        tiny.tiny_llama(tokenizer, seed=n).save_pretrained(folder / str(n))
        tokenizer.save_pretrained(folder / str(n))
    ensemble = EnsembleForCausalLM.from_pretrained([str(folder / "0"), str(folder / "1")])
    ensemble.save_pretrained(folder / "ensemble")
    return folder / "ensemble"


@pytest.mark.parametrize("source", ["object", "folder"])
def test_the_stock_pipeline_takes_conversations(saved, source):
    """E5, E6: From an object and from a saved folder, singly, in batches, several sequences, and continued."""
    ensemble = EnsembleForCausalLM.from_pretrained(saved)
    model = {"model": ensemble, "tokenizer": ensemble.tokenizer} if source == "object" else {"model": str(saved)}
    pipe = pipeline("text-generation", **model)
    options = {"max_new_tokens": 4, "do_sample": False}
    answers = []
    for chat in CHATS:
        inputs = rendered(ensemble, chat)
        new = generate(ensemble, inputs, max_new_tokens=4)[0, inputs["input_ids"].shape[1] :]
        answers.append(ensemble.tokenizer.decode(new, skip_special_tokens=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = pipe(CHATS[0], **options)
        batch = pipe(CHATS, batch_size=2, **options)
        several = pipe(CHATS[0], max_new_tokens=4, do_sample=True, num_return_sequences=2, return_full_text=False)
        longer = pipe([*CHATS[0], {"role": "assistant", "content": "It is <|im_end|>"}], **options)
    assert first == [{"generated_text": [*CHATS[0], {"role": "assistant", "content": answers[0]}]}]
    assert [rows[0]["generated_text"][-1]["content"] for rows in batch] == answers
    assert len(several) == 2
    assert longer[0]["generated_text"][-1]["content"].startswith("It is <|im_end|>")
    # The next turn, with what was generated as content.
    follow_up = [*first[0]["generated_text"], {"role": "user", "content": "And then?"}]
    assert pipe(follow_up, **options)[0]["generated_text"][:-1] == follow_up


def test_two_threads_are_each_alone():
    """H6: Ten rounds of different conversations in one ensemble."""
    ensemble = llamas(SMOL, TURN, BASE)

    def answer(chat, count):
        return generate(ensemble, rendered(ensemble, chat), max_new_tokens=count).tolist()

    jobs = [(CHATS[0], 3), (CHATS[2], 4)]
    expected = [answer(*job) for job in jobs]
    found: list[list] = [[], []]

    def work(n):
        for _ in range(10):
            found[n].append(answer(*jobs[n]))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert found == [[expected[0]] * 10, [expected[1]] * 10]


# --- Prompts per member ---------------------------------------------------------------------------------------------


@each_method
def test_members_can_have_prompts_of_their_own(method):
    ensemble = scripted(SMOL, BASE, TURN)
    inputs = ensemble.tokenizer("Shared.", return_tensors="pt")
    options = {"member_prompts": [None, "Translate: <eos>", None]}
    assert text_written(BASE, first_context(ensemble, 1, inputs, **options, method=method)) == "Translate: <eos>"
    assert controls(BASE, first_context(ensemble, 1, inputs, **options, method=method)) == [BASE.bos_token_id]
    assert text_written(TURN, first_context(ensemble, 2, inputs, **options, method=method)) == "Shared."


@each_kind_of_method
def test_rows_can_have_prompts_of_their_own(method):
    """Also rows with the same ids; a row alone is the row in the batch."""
    ensemble = llamas(SMOL, BASE)
    inputs = ensemble.tokenizer(["Shared.", "Shared.", "Another one."], return_tensors="pt", padding=True)
    own = ["A: ", "The quick brown fox", None]
    together = generate(ensemble, inputs, member_prompts=[None, own], method=method)
    for n, text in enumerate(own):
        row = {key: value[n : n + 1] for key, value in inputs.items()}
        alone = generate(ensemble, row, member_prompts=[None, text], method=method)
        assert together[n].tolist()[: alone.shape[1]] == alone[0].tolist()


def test_own_prompts_go_with_returned_sequences_and_beams():
    ensemble = scripted(SMOL, BASE)
    inputs = ensemble.tokenizer(["Same.", "Same."], return_tensors="pt")
    for options in ({"do_sample": True, "num_return_sequences": 2}, {"num_beams": 2, "num_return_sequences": 2}):
        ensemble.members[1].calls.clear()
        generate(ensemble, inputs, method="gac", member_prompts=[None, ["One", "Two"]], max_new_tokens=1, **options)
        assert {text_written(BASE, context)[:3] for context in contexts_of(ensemble, 1)} == {"One", "Two"}


def test_the_primarys_prompt_may_be_given_as_text():
    ensemble = llamas(SMOL, BASE)
    inputs = ensemble.tokenizer(["Hi there", "Hi"], return_tensors="pt", padding=True)
    expected = generate(ensemble, inputs, member_prompts=[None, "Go: "]).tolist()
    assert generate(ensemble, {}, member_prompts=[["Hi there", "Hi"], "Go: "]).tolist() == expected
    alone = generate(ensemble, ensemble.tokenizer("Hi", return_tensors="pt"), member_prompts=[None, "Go: "])
    assert generate(ensemble, {}, member_prompts=["Hi", "Go: "]).tolist() == alone.tolist()


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ("text", "one entry for each of the 2 members"),
        ([None], "one entry for each of the 2 members"),
        ([None, ["a", "b"]], "each of the 1 rows"),
        ([None, 3], "a text, None"),
        (["Hi", None], "the primary reads `input_ids`"),
    ],
    ids=str,
)
def test_own_prompts_that_do_not_fit_are_refused(own, message):
    ensemble = llamas(SMOL, BASE)
    with pytest.raises(ConfigurationError, match=message):
        generate(ensemble, ensemble.tokenizer("Hi", return_tensors="pt"), member_prompts=own)


def test_packllm_reads_what_each_member_reads():
    ensemble = llamas(SMOL, BASE)
    inputs = ensemble.tokenizer("The capital of France is Paris.", return_tensors="pt")
    same = packllm_weights(ensemble, **inputs)
    own = packllm_weights(ensemble, **inputs, member_prompts=[None, "Zebras zigzag"])
    assert not torch.allclose(same, own)
    assert packllm_weights(ensemble, **rendered(ensemble)).shape == (1, 2)
