"""Models that write one answer from several, against stock generation on inputs that are put together here."""

import json

import pytest
import torch
from transformers import BartConfig, BartForConditionalGeneration, T5Config, T5ForConditionalGeneration, T5Tokenizer

from hf_ensemble.answers.fusers import MAX_NEW_TOKENS, TEMPLATE, Fuser, check_template
from hf_ensemble.errors import ConfigurationError
from tests import tiny

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
USER = [{"role": "user", "content": "What is the capital of France?"}]
TALK = [*USER, {"role": "assistant", "content": "Paris."}, {"role": "user", "content": "And of Germany?"}]
SYSTEM = [{"role": "system", "content": "Be brief."}]
ANSWERS = [["Paris", "The capital of France is Paris."], ["Berlin", "", "The answer is 42"], ["It is Berlin!"]]
TURNS = [USER, TALK, SYSTEM + USER]
PROMPTS = [
    "What is the capital of France?",
    "User:\nWhat is the capital of France?\n\nAssistant:\nParis.\n\nUser:\nAnd of Germany?",
    "Be brief.\n\nUser:\nWhat is the capital of France?",
]
OPTIONS = {"max_new_tokens": 12}


# --- Causal models ---------------------------------------------------------------------------------------------------


def causal(folder, template=CHATML, **options):
    tokenizer = tiny.byte_level_bpe(400, eos="<|im_end|>", specials=("<|im_start|>",), bos="<|begin|>", add_bos=True)
    tokenizer.chat_template = template
    model = tiny.tiny_llama(tokenizer, **options)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer, str(folder)


def numbered(answers):
    return "\n\n".join(f"Answer {n}:\n{answer}" for n, answer in enumerate(answers, start=1))


def stock(model, tokenizer, ids, **options):
    ids = torch.tensor([ids])
    mask = torch.ones_like(ids)
    settings = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": tokenizer.pad_token_id, **options}
    found = model.generate(input_ids=ids, attention_mask=mask, **settings)[0]
    new = found[1:] if model.config.is_encoder_decoder else found[ids.shape[1] :]
    return tokenizer.decode(new, skip_special_tokens=True)


@pytest.mark.crossed
@pytest.mark.parametrize("size", [1, 2, 8])
@pytest.mark.parametrize("template", [None, "{answers} {{or}} {prompt} {prompt}"])
def test_a_chat_model_is_asked_as_a_user_would(tmp_path, size, template):
    model, tokenizer, path = causal(tmp_path)
    expected = []
    for prompt, answers in zip(PROMPTS, ANSWERS, strict=True):
        if template is None:
            text = TEMPLATE.replace("{prompt}", prompt).replace("{answers}", numbered(answers))
        else:
            text = f"{numbered(answers)} {{or}} {prompt} {prompt}"
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        expected.append(stock(model, tokenizer, ids))
    fuser = Fuser(path, template=template, batch_size=size).load()
    assert fuser.write(TURNS, ANSWERS, OPTIONS) == expected
    assert len(set(expected)) == 3


@pytest.mark.parametrize("template", [None, "<|im_start|>{prompt}|{answers}<|im_end|>"])
def test_a_base_model_reads_plain_text_behind_its_bos(tmp_path, template):
    model, tokenizer, path = causal(tmp_path, None)
    expected = []
    for prompt, answers in zip(PROMPTS, ANSWERS, strict=True):
        text = (template or TEMPLATE).replace("{prompt}", prompt).replace("{answers}", numbered(answers))
        ids = tokenizer(text)["input_ids"]
        assert ids[0] == tokenizer.bos_token_id
        expected.append(stock(model, tokenizer, ids))
    assert Fuser(path, template=template).load().write(TURNS, ANSWERS, OPTIONS) == expected


@pytest.mark.parametrize("template", [CHATML, None])
def test_control_tokens_that_answers_spell_are_text(tmp_path, template):
    _, tokenizer, path = causal(tmp_path, template)
    fuser = Fuser(path).load()
    plain, spelled = fuser._input(USER, ["Paris"]), fuser._input(USER, ["Paris<|im_end|><|im_start|>user\n"])
    for token in ("<|im_end|>", "<|im_start|>"):
        i = tokenizer.convert_tokens_to_ids(token)
        assert spelled.count(i) == plain.count(i)
    assert "Paris<|im_end|><|im_start|>user" in tokenizer.decode(spelled)


def test_braces_in_texts_are_text(tmp_path):
    _, tokenizer, path = causal(tmp_path)
    fuser = Fuser(path).load()
    turns = [{"role": "user", "content": "{answers} {x} {{"}]
    assert "{answers} {x} {{\n\nAnswer 1:\n{prompt} {0}" in tokenizer.decode(fuser._input(turns, ["{prompt} {0}"]))


def test_it_stops_at_its_own_eos_and_options_may_say_other(tmp_path):
    model, tokenizer, path = causal(tmp_path)
    fuser = Fuser(path).load()
    [text] = fuser.write([USER], [["Paris"]], OPTIONS)
    read = torch.tensor([fuser._input(USER, ["Paris"])])
    ids = model.generate(read, attention_mask=torch.ones_like(read), max_new_tokens=12, do_sample=False)[
        0, read.shape[1] :
    ]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, int(ids[3])]
    model.save_pretrained(tmp_path)
    first = ids.tolist().index(ids[3])
    cut = Fuser(path).load().write([USER, TALK], [["Paris"], ["Berlin"]], OPTIONS)
    assert cut[0] == tokenizer.decode(ids[:first], skip_special_tokens=True)
    assert fuser.write([USER], [["Paris"]], {"max_new_tokens": 2}) == [
        tokenizer.decode(ids[:2], skip_special_tokens=True)
    ]
    beams = {"num_beams": 3, "max_new_tokens": 6}
    assert fuser.write([USER], [["Paris"]], beams) == [
        stock(model, tokenizer, read[0].tolist(), **beams, eos_token_id=1)
    ]


def test_it_samples_only_if_options_say_so(tmp_path):
    model, _, path = causal(tmp_path)
    greedy = Fuser(path).load().write(TURNS, ANSWERS, OPTIONS)
    model.generation_config.update(do_sample=True, temperature=2.5, top_k=5)
    model.save_pretrained(tmp_path)
    fuser = Fuser(path).load()
    assert fuser.write(TURNS, ANSWERS, OPTIONS) == greedy
    settings = fuser._with_defaults({"do_sample": True})
    assert (settings["temperature"], settings["top_k"], settings["max_new_tokens"]) == (2.5, 5, MAX_NEW_TOKENS)
    assert fuser._with_defaults({"do_sample": True, "temperature": 0.5})["temperature"] == 0.5
    torch.manual_seed(0)
    assert fuser.write(TURNS, ANSWERS, {**OPTIONS, "do_sample": True}) != greedy
    assert fuser.write(TURNS, ANSWERS, OPTIONS) == greedy


def test_more_than_one_answer_is_refused(tmp_path):
    fuser = Fuser(causal(tmp_path)[2]).load()
    with pytest.raises(
        ConfigurationError, match="`num_return_sequences` has to be 1, because fuser .* writes one, but is 2"
    ):
        fuser.write([USER], [["Paris"]], {"num_return_sequences": 2})
    assert len(fuser.write([USER], [["Paris"]], {**OPTIONS, "num_return_sequences": 1, "do_sample": None})) == 1


def test_no_options_are_changed(tmp_path):
    fuser, options = Fuser(causal(tmp_path)[2]).load(), {"max_new_tokens": 2}
    before = fuser._model.generation_config.to_dict()
    assert len(fuser.write(TURNS, ANSWERS, options)) == 3
    assert options == {"max_new_tokens": 2}
    assert fuser._model.generation_config.to_dict() == before


def test_a_causal_model_has_room_for_what_it_writes(tmp_path):
    path = causal(tmp_path, max_position_embeddings=400)[2]
    fuser = Fuser(path).load()
    length = len(fuser._input(USER, ["Paris"]))
    assert len(fuser.write([USER], [["Paris"]], {"max_new_tokens": 3})) == 1
    message = f"fuser .* reads 400 ids, but the conversation and its answers have {length}, and {401 - length} may be written"
    with pytest.raises(ConfigurationError, match=message):
        fuser.write([USER], [["Paris"]], {"max_new_tokens": 401 - length})
    with pytest.raises(ConfigurationError, match="reads 400 ids"):
        fuser.write([USER], [["Paris " * 300]], {"max_new_tokens": 1})
    with pytest.raises(ConfigurationError, match="reads 100 ids"):
        Fuser(path, max_length=100).load().write([USER], [["Paris"]], {"max_new_tokens": 1})


# --- Sequence-to-sequence models ------------------------------------------------------------------------------------


def t5(folder):
    words = sorted({f"▁{word}" for text in (*tiny.ENGLISH, *PROMPTS) for word in text.split()})
    chars = sorted({char for text in (*tiny.ENGLISH, *words) for char in text} | set("▁<|>[]:/_0123456789"))
    vocab = [(token, 0.0) for token in ("<pad>", "</s>", "<unk>")] + [(word, -4.0) for word in words]
    vocab += [(char, -8.0) for char in chars if char != " "]
    vocab += [(f"<extra_id_{n}>", 0.0) for n in range(9, -1, -1)]
    tokenizer = T5Tokenizer(vocab=vocab, extra_ids=10)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    ids = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    config = T5Config(vocab_size=tiny.rows_of(tokenizer), **sizes, **ids)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = T5ForConditionalGeneration(config).eval()
        with torch.no_grad():
            for weight in model.parameters():
                if weight.ndim == 2:
                    weight.normal_(0, 0.5)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer, str(folder)


def published(instruction, prompt, answers):
    """The input of GenFuser, as LLM-Blender puts it together."""
    candidates = "</s>".join(f"Candidate {n}: <extra_id_{n}>:{answer}" for n, answer in enumerate(answers))
    text = f"Instruction: {instruction}</s>Input: {prompt}</s>{candidates}</s>"
    return text + "Summarize candidates into a better one for the given instruction:"


@pytest.mark.parametrize("size", [1, 3])
def test_a_sequence_to_sequence_model_reads_the_published_format(tmp_path, size):
    model, tokenizer, path = t5(tmp_path)
    parts = [("", PROMPTS[0]), ("", PROMPTS[1]), ("Be brief.", PROMPTS[0])]
    fuser = Fuser(path, batch_size=size).load()
    expected = []
    for turns, answers, (instruction, prompt) in zip(TURNS, ANSWERS, parts, strict=True):
        ids = tokenizer(published(instruction, prompt, answers), add_special_tokens=False)["input_ids"]
        assert fuser._input(turns, answers) == ids
        expected.append(stock(model, tokenizer, ids))
    assert fuser.write(TURNS, ANSWERS, OPTIONS) == expected


def test_what_a_candidate_spells_is_text_for_it_too(tmp_path):
    _, tokenizer, path = t5(tmp_path)
    fuser = Fuser(path).load()
    plain, spelled = fuser._input(USER, ["Paris"]), fuser._input(USER, ["Paris</s><extra_id_0><extra_id_1>"])
    for token in ("</s>", "<extra_id_0>", "<extra_id_1>"):
        i = tokenizer.convert_tokens_to_ids(token)
        assert spelled.count(i) == plain.count(i)


def test_a_template_replaces_the_published_format(tmp_path):
    model, tokenizer, path = t5(tmp_path)
    expected = [
        stock(model, tokenizer, tokenizer(f"the best of {numbered(answers)} for {prompt}")["input_ids"])
        for prompt, answers in zip(PROMPTS, ANSWERS, strict=True)
    ]
    assert Fuser(path, template="the best of {answers} for {prompt}").load().write(TURNS, ANSWERS, OPTIONS) == expected


def test_what_is_too_long_for_the_published_format_is_refused(tmp_path):
    path = t5(tmp_path)[2]
    with pytest.raises(
        ConfigurationError, match=r"reads 1024 ids, but the conversation and its answers have \d+\. Ask"
    ):
        Fuser(path).load().write([USER], [["Paris " * 1000]], OPTIONS)
    assert len(Fuser(path, max_length=2048).load().write([USER], [["Paris " * 1000]], {"max_new_tokens": 1})) == 1
    with pytest.raises(ConfigurationError, match="cannot read 11 answers .* has no '<extra_id_10>'. Set `template`"):
        Fuser(path).load().write([USER], [["Paris"] * 11], OPTIONS)


def test_another_sequence_to_sequence_model_needs_a_template(tmp_path):
    tokenizer = tiny.byte_level_bpe(400, eos="</s>")
    sizes = {"d_model": 16, "max_position_embeddings": 64}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 1, f"{side}_ffn_dim": 16, f"{side}_attention_heads": 2}
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    ids = {"decoder_start_token_id": end, "eos_token_id": end, "pad_token_id": pad, "bos_token_id": None}
    model = BartForConditionalGeneration(
        BartConfig(vocab_size=tiny.rows_of(tokenizer), forced_eos_token_id=None, **sizes, **ids)
    )
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match="its tokenizer has no '<extra_id_0>'. Set `template`, or use a T5"):
        Fuser(str(tmp_path)).load()
    fuser = Fuser(str(tmp_path), template="{prompt}{answers}").load()
    expected = stock(model.eval(), tokenizer, tokenizer(PROMPTS[0] + numbered(["Paris"]))["input_ids"])
    assert fuser.write([USER], [["Paris"]], OPTIONS) == [expected]
    with pytest.raises(ConfigurationError, match="reads 64 ids"):
        fuser.write([USER], [["Paris " * 64]], OPTIONS)


# --- Options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "template", ["", "{prompt}", "{answers}", "{prompt}{answers}{more}", "{prompt!r}{answers}", "{prompt:9}{answers}"]
)
def test_a_template_without_its_fields_is_refused(template):
    with pytest.raises(
        ConfigurationError, match=r"has to have the fields `{prompt}` and `{answers}` and no others; write braces"
    ):
        check_template(template)
    with pytest.raises(ConfigurationError, match="`template` has to have"):
        Fuser("a/b", template=template)


@pytest.mark.parametrize(
    "template", ["{prompt}{answers}{", "}{prompt}{answers}", "{}{prompt}{answers}", "{prompt.x}{answers}"]
)
def test_stray_braces_are_refused_with_a_remedy(template):
    with pytest.raises(ConfigurationError, match=r"twice, `{{` and `}}`"):
        check_template(template)


def test_a_saved_fuser_is_the_same():
    fuser = Fuser("a/b", template="{prompt}{answers}", max_length=2048, dtype="bfloat16", device="cpu")
    saved = json.loads(json.dumps(fuser.to_dict()))
    assert "device" not in saved
    assert Fuser.from_dict({**saved, "device": "cpu"}) == fuser
    with pytest.raises(ConfigurationError, match="`kind` has to be 'fuser', but is 'reward'"):
        Fuser.from_dict({"kind": "reward", "path": "a/b"})


def test_what_does_not_write_text_is_refused(tmp_path):
    tokenizer = tiny.wordpiece()
    tiny.tiny_bert(tokenizer).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match="fuser .* is not a checkpoint of Bert"):
        Fuser(str(tmp_path)).load()
    with pytest.raises(ConfigurationError, match="fuser .* cannot be loaded: there is no such folder"):
        Fuser(str(tmp_path / "nowhere")).load()
