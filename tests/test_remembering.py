"""Which conversation is behind the primary's ids, if its template writes nothing but content, as a plain text does."""

import copy
import json
import pickle
import threading

import pytest
import torch
from transformers import AutoTokenizer, pipeline

from hf_ensemble import EnsembleForCausalLM, RerankConfig
from hf_ensemble.chat import memory
from hf_ensemble.chat.conversation import read_conversations
from tests import tiny
from tests.bug_bank.kit import contexts_of, control_tokens_may_be_chosen, ready, spelling

pytestmark = control_tokens_may_be_chosen

CONTENT_ONLY = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
MARKED = "<user>{{ messages[0]['content'] }}</user>"


def tokenizers():
    pair = tiny.smol_like(), tiny.gemma_like()
    pair[0].chat_template, pair[1].chat_template = CONTENT_ONLY, MARKED
    return pair


def new_ensemble() -> EnsembleForCausalLM:
    pair = tokenizers()
    return ready(EnsembleForCausalLM.from_members([tiny.ScriptedModel(one) for one in pair], pair))


@pytest.fixture(scope="module")
def shared() -> EnsembleForCausalLM:
    return new_ensemble()


@pytest.fixture(scope="module")
def other() -> EnsembleForCausalLM:
    return new_ensemble()


@pytest.fixture
def ensemble(shared):
    for model in shared.members:
        model.calls.clear()
    return shared


def turn(text):
    return [{"role": "user", "content": text}]


def render(tokenizer, text, **options):
    return tokenizer.apply_chat_template(turn(text), return_tensors="pt", **options)


def encode(tokenizer, text, **options):
    return tokenizer(text, return_tensors="pt", **options)


def shown(ensemble, inputs, **options) -> list[str]:
    """What the other member reads, in the order of the rows."""
    ensemble.members[1].calls.clear()
    ensemble.generate(**inputs, **{"max_new_tokens": 1, "do_sample": False, **options})
    return first_texts(ensemble)


def first_texts(ensemble) -> list[str]:
    write = spelling(ensemble.tokenizers[1]).text_of_prompt
    return [write(context).decode(errors="replace") for context in dict.fromkeys(contexts_of(ensemble, 1))]


def joined(*rows):
    return {name: torch.cat([row[name] for row in rows]) for name in ("input_ids", "attention_mask")}


# --- One ensemble ---------------------------------------------------------------------------------------------------


def test_the_last_use_of_ids_counts(ensemble):
    tokenizer = ensemble.tokenizer
    assert render(tokenizer, "Hi")["input_ids"].tolist() == encode(tokenizer, "Hi")["input_ids"].tolist()
    for _ in range(2):
        assert shown(ensemble, encode(tokenizer, "Hi")) == ["Hi"]
        inputs = render(tokenizer, "Hi")
        assert shown(ensemble, inputs) == ["<user>Hi</user>"]
        assert shown(ensemble, inputs) == ["<user>Hi</user>"]


@pytest.mark.parametrize(
    "tokenize",
    [
        lambda tokenizer: tokenizer("Hi"),
        lambda tokenizer: tokenizer.encode("Hi"),
        lambda tokenizer: tokenizer(["Longer than that", "Hi"], padding=True, return_tensors="pt"),
        lambda tokenizer: tokenizer("Hi", padding="max_length", max_length=9, padding_side="right"),
        lambda tokenizer: tokenizer("Hi", return_attention_mask=False),
        lambda tokenizer: tokenizer("Hi", "", return_overflowing_tokens=True),
    ],
    ids=["one", "encode", "batch", "padded", "no mask", "overflow"],
)
def test_every_way_to_tokenize_is_a_use(ensemble, tokenize):
    inputs = render(ensemble.tokenizer, "Hi")
    tokenize(ensemble.tokenizer)
    assert shown(ensemble, inputs) == ["Hi"]


def test_rows_of_a_batch_are_read_by_their_own_ids(ensemble):
    """Also rows with the same ids: these are one prompt."""
    tokenizer = ensemble.tokenizer
    conversation, plain = render(tokenizer, "Hi"), encode(tokenizer, "Oh")
    assert conversation["input_ids"].shape == plain["input_ids"].shape
    assert shown(ensemble, joined(conversation, plain)) == ["<user>Hi</user>", "Oh"]
    assert shown(ensemble, joined(render(tokenizer, "Hi"), encode(tokenizer, "Hi"))) == ["Hi"]
    assert shown(ensemble, joined(encode(tokenizer, "Hi"), render(tokenizer, "Hi"))) == ["<user>Hi</user>"]


def test_a_rendered_text_stays_the_conversation(ensemble):
    """However often it is tokenized, and whatever else is rendered to its ids."""
    tokenizer = ensemble.tokenizer
    text = tokenizer.apply_chat_template(turn("As text"), tokenize=False)
    render(tokenizer, "As text")
    for _ in range(2):
        assert shown(ensemble, encode(tokenizer, text)) == ["<user>As text</user>"]
    assert shown(ensemble, {}, member_prompts=[text, None]) == ["<user>As text</user>"]


def test_a_mask_of_the_answers_changes_nothing(ensemble):
    """For training: it is the stock tokenizer's, which tokenizes the rendered text."""
    inputs = render(ensemble.tokenizer, "Hi")
    template = "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}"
    masked = ensemble.tokenizer.apply_chat_template(
        turn("Hi"), chat_template=template, return_assistant_tokens_mask=True, return_dict=True
    )
    assert masked["input_ids"] == inputs["input_ids"][0].tolist()
    assert masked["assistant_masks"] == [1] * len(masked["input_ids"])
    assert shown(ensemble, inputs) == ["<user>Hi</user>"]


def test_texts_that_the_ensemble_tokenizes_itself_are_uses_too(ensemble):
    render(ensemble.tokenizer, "Hi")
    assert shown(ensemble, {}, member_prompts=["Hi", None]) == ["Hi"]
    inputs = render(ensemble.tokenizer, "Hi")
    assert scored(ensemble, inputs["input_ids"].tolist(), [[5]]).startswith("<user>Hi</user>")
    assert scored(ensemble, ["Hi"], [" there"]).startswith("Hi")
    text = ensemble.apply_chat_template(turn("As a prompt"), tokenize=False)
    assert scored(ensemble, [text], [" there"]).startswith("<user>As a prompt</user>")


def scored(ensemble, prompts, continuations):
    ensemble.members[1].calls.clear()
    ensemble.score(prompts, continuations, method="gac")
    return first_texts(ensemble)[0]


def test_whole_answers_know_their_question(ensemble):
    """A function that ranks answers gets the turns of the conversation, or the text as one user turn."""
    asked = []

    def rank(prompts, answers):
        asked.extend(prompts[:1])
        return [0.0] * len(answers)

    method = RerankConfig(score=rank)
    talk = [*turn("Hi"), {"role": "assistant", "content": " there"}, *turn(" you")]
    inputs = ensemble.tokenizer.apply_chat_template(talk, return_tensors="pt")
    options = {"method": method, "do_sample": True, "seed": 1, "max_new_tokens": 1}
    ensemble.generate(**inputs, **options)
    ensemble.generate(**encode(ensemble.tokenizer, "Hi there you"), **options)
    assert asked == [talk, "Hi there you"]


def test_a_call_reads_its_prompts_the_same_throughout():
    """Whatever other threads tokenize meanwhile, and although several methods write in turn."""
    ensemble = new_ensemble()

    def script(context):
        ensemble.tokenizer("Hi")
        return torch.zeros(ensemble.config.vocab_size)

    ensemble.members[0].script = script
    methods = RerankConfig(score=lambda prompts, answers: [0.0] * len(answers), methods=("gac", "sweetspan"))
    texts = shown(ensemble, render(ensemble.tokenizer, "Hi"), method=methods)
    assert texts
    assert all(text.startswith("<user>Hi</user>") for text in texts)
    assert shown(ensemble, render(ensemble.tokenizer, "Hi"), method="gac") == ["<user>Hi</user>"]


def test_the_pipeline_takes_both_kinds_one_after_the_other(ensemble):
    pipe = pipeline("text-generation", model=ensemble, tokenizer=ensemble.tokenizer)
    for prompt, expected in [("Hi", "Hi"), (turn("Hi"), "<user>Hi</user>"), ("Hi", "Hi")] * 2:
        ensemble.members[1].calls.clear()
        pipe(prompt, max_new_tokens=1, do_sample=False)
        assert first_texts(ensemble) == [expected]


# --- Several ensembles ----------------------------------------------------------------------------------------------


def test_an_ensemble_does_not_read_the_conversations_of_another(ensemble, other):
    conversation, plain = render(ensemble.tokenizer, "Hi"), encode(other.tokenizer, "Hi")
    assert shown(ensemble, conversation) == ["<user>Hi</user>"]
    conversation = render(ensemble.tokenizer, "Hi")
    assert shown(other, plain) == ["Hi"]
    assert shown(other, conversation) == ["Hi"]
    assert shown(ensemble, conversation) == ["<user>Hi</user>"]


def test_threads_of_two_ensembles_are_each_alone(ensemble, other):
    """One reads conversations and the other plain texts, with the same ids."""
    found = {"conversations": set(), "texts": set()}

    def converse():
        for _ in range(15):
            found["conversations"].update(shown(ensemble, render(ensemble.tokenizer, "Hi")))

    def write():
        for _ in range(15):
            found["texts"].update(shown(other, encode(other.tokenizer, "Hi")))

    threads = [threading.Thread(target=work) for work in (converse, write)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {"conversations": {"<user>Hi</user>"}, "texts": {"Hi"}}


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copies_belong_to_the_same_ensemble(ensemble, copied):
    twin = copied(ensemble.tokenizer)
    assert shown(ensemble, render(twin, "Hi")) == ["<user>Hi</user>"]
    render(ensemble.tokenizer, "Hi")
    assert shown(ensemble, encode(twin, "Hi")) == ["Hi"]
    model = ready(copied(ensemble))
    assert shown(model, render(ensemble.tokenizer, "Hi")) == ["<user>Hi</user>"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Two ensembles with the same primary: their folders, and the one that was saved to the first."""
    home = tmp_path_factory.mktemp("saved")
    for name, tokenizer in zip(("a", "b"), tokenizers(), strict=True):
        tiny.tiny_llama(tokenizer, num_hidden_layers=1).save_pretrained(home / name)
        tokenizer.save_pretrained(home / name)
    made = [EnsembleForCausalLM.from_pretrained([str(home / "a"), str(home / "b")]) for _ in range(2)]
    for name, one in zip(("first", "second"), made, strict=True):
        one.save_pretrained(home / name)
    return home / "first", home / "second", made[0]


@pytest.fixture
def read_by(monkeypatch):
    """What the second member of an ensemble reads."""

    def read(ensemble, run):
        view, texts = ensemble.member_views[1], []
        original = view.read

        def spy(prompt, resync):
            context = original(prompt, resync)
            texts.append(spelling(ensemble.tokenizers[1]).text_of_prompt(context.ids).decode())
            return context

        with monkeypatch.context() as patch:
            patch.setattr(view, "read", spy)
            run()
        return texts

    return read


@pytest.mark.filterwarnings("ignore:the primary .* wrote the control token")
def test_a_tokenizer_of_a_saved_ensemble_belongs_to_that_ensemble(saved, read_by):
    """Loaded by itself, as the pipeline does: to the ensemble that was saved, and to all that are loaded from it."""
    first, second, original = saved
    loaded = EnsembleForCausalLM.from_pretrained(first)
    tokenizer = AutoTokenizer.from_pretrained(first)

    def read(ensemble, inputs):
        return read_by(ensemble, lambda: ensemble.generate(**inputs, max_new_tokens=1, do_sample=False))

    for ensemble in (original, loaded):
        assert read(ensemble, render(tokenizer, "Hi")) == ["<user>Hi</user>"]
        assert read(ensemble, encode(tokenizer, "Hi")) == ["Hi"]
        render(tokenizer, "Hi")
        assert read(ensemble, encode(ensemble.tokenizer, "Hi")) == ["Hi"]
        render(ensemble.tokenizer, "Hi")
        assert read(ensemble, encode(tokenizer, "Hi")) == ["Hi"]
    stranger = EnsembleForCausalLM.from_pretrained(second)
    assert read(stranger, render(tokenizer, "Hi")) == ["Hi"]
    assert read(stranger, render(AutoTokenizer.from_pretrained(second), "Hi")) == ["<user>Hi</user>"]


@pytest.mark.filterwarnings("ignore:the primary .* wrote the control token")
def test_pipelines_of_saved_ensembles_are_each_alone(saved, read_by):
    pipes = [pipeline("text-generation", model=str(folder)) for folder in saved[:2]]
    options = {"max_new_tokens": 1, "do_sample": False}
    plain = pipes[1].tokenizer("Hi", return_tensors="pt")
    assert read_by(pipes[0].model, lambda: pipes[0](turn("Hi"), **options)) == ["<user>Hi</user>"]
    assert read_by(pipes[1].model, lambda: pipes[1].model.generate(**plain, **options)) == ["Hi"]
    for pipe in pipes:
        for prompt, expected in [(turn("Hi"), "<user>Hi</user>"), ("Hi", "Hi"), (turn("Hi"), "<user>Hi</user>")]:
            assert read_by(pipe.model, lambda pipe=pipe, prompt=prompt: pipe(prompt, **options)) == [expected]


@pytest.mark.filterwarnings("ignore:the primary .* wrote the control token")
def test_an_ensemble_saved_before_ids_were_is_still_read(saved, tmp_path, read_by):
    """Such folders do not say to which ensemble a tokenizer belongs."""
    folder = tmp_path / "older"
    saved[2].save_pretrained(folder)
    for name, within in (("config.json", None), ("tokenizer_config.json", "ensemble_chat")):
        values = json.loads((folder / name).read_text())
        del (values if within is None else values[within])["chat_id"]
        (folder / name).write_text(json.dumps(values))
    ensemble, tokenizer = EnsembleForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)

    def run():
        ensemble.generate(**render(tokenizer, "Hi"), max_new_tokens=1, do_sample=False)

    assert read_by(ensemble, run) == ["<user>Hi</user>"]


# --- The memory -----------------------------------------------------------------------------------------------------


@pytest.fixture
def empty_memory(monkeypatch):
    monkeypatch.setattr(memory, "_conversations", type(memory._conversations)())
    monkeypatch.setattr(memory, "_num_ids", 0)


def test_the_memory_is_bounded_and_keeps_what_is_used(monkeypatch, empty_memory):
    monkeypatch.setattr(memory, "MAX_IDS", 5 * 64)
    (conversation,), _ = read_conversations(turn("Hi"), None)
    for n in range(10, 15):
        memory.remember("a", [n], conversation)
    assert memory.recall("a", [10]) is conversation
    memory.remember("a", [15], conversation)
    assert memory.recall("a", [11]) is None
    assert memory.recall("a", [10]) is conversation
    assert memory.recall("b", [10]) is None
    memory.remember("a", [1] * 1000, conversation)
    assert memory.recall("a", [1] * 1000) is conversation
    assert len(memory._conversations) == 1
    memory.forget("a", [[1] * 1000, [2]])
    assert (len(memory._conversations), memory._num_ids) == (0, 0)


def test_tokenizing_reads_no_ids_while_nothing_is_remembered(monkeypatch, empty_memory, ensemble):
    monkeypatch.setattr(memory, "_key", None)
    assert ensemble.tokenizer("Hi")["input_ids"]
