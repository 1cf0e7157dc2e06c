"""Models that judge answers, against what was published of them, read here by code of its own."""

import itertools
import json
import math
import warnings

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import processors
from torch import nn
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    DebertaV2Config,
    DebertaV2Tokenizer,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from hf_ensemble.answers.base import best_first
from hf_ensemble.answers.judges import PairRanker, RewardModel, judge_of
from hf_ensemble.errors import ConfigurationError
from tests import reference_answers, tiny

with warnings.catch_warnings():
    # Of torch, for the oldest transformers.
    warnings.simplefilter("ignore", DeprecationWarning)
    from transformers import DebertaV2Model

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
USER = [{"role": "user", "content": "What is the capital of France?"}]
TALK = [
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": "And of Germany?"},
]
SYSTEM = [{"role": "system", "content": "Be brief."}]
ANSWERS = ["Paris", "The capital of France is Paris, and the capital of Germany is Berlin.", "", "Berlin!", " 42 "]
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
close = {"rel": 1e-4, "abs": 1e-5}


# --- Reward models ---------------------------------------------------------------------------------------------------


def chat_tokenizer(**options):
    tokenizer = tiny.byte_level_bpe(400, eos="<|im_end|>", specials=("<|im_start|>",), **options)
    tokenizer.chat_template = CHATML
    return tokenizer


def seeded(make):
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = make().eval()
        with torch.no_grad():
            for weight in model.parameters():
                if weight.ndim == 2:
                    weight.normal_(0, 0.4)
    return model


def saved(folder, model, tokenizer):
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return str(folder)


def reward_llama(folder, tokenizer=None, num_labels=1, **options):
    tokenizer = chat_tokenizer() if tokenizer is None else tokenizer
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    sizes = {"vocab_size": tiny.rows_of(tokenizer), "num_labels": num_labels, **SIZES, **ids}
    config = LlamaConfig(**{**sizes, **options})
    model = seeded(lambda: LlamaForSequenceClassification(config))
    return model, tokenizer, saved(folder, model, tokenizer)


def alone(model, ids, **inputs):
    """The score of one row at its last id, whatever that is."""
    hidden = model.model(input_ids=torch.tensor([ids]), **inputs).last_hidden_state
    return model.score(hidden)[0, -1, 0].item()


def turn(answer):
    return {"role": "assistant", "content": answer}


def templated(tokenizer, turns, answer):
    return tokenizer.apply_chat_template([*turns, turn(answer)], return_dict=False)


@torch.no_grad()
@pytest.mark.parametrize("turns", [USER, TALK, SYSTEM + USER], ids=["one", "several", "system"])
def test_a_reward_model_reads_its_own_template_and_no_score_depends_on_the_batch(tmp_path, turns):
    model, tokenizer, path = reward_llama(tmp_path)
    expected = [alone(model, templated(tokenizer, turns, answer)) for answer in ANSWERS]
    judges = [RewardModel(path, batch_size=size).load() for size in (1, 2, 8)]
    for judge in judges:
        assert judge.scores(turns, ANSWERS) == pytest.approx(expected, **close)
    assert judges[2].scores(turns, ANSWERS[1:2]) == pytest.approx(expected[1:2], **close)
    assert len(set(expected)) == len(ANSWERS)


@torch.no_grad()
def test_a_true_end_counts_where_the_padding_is_the_end(tmp_path):
    """The stock head would take the id before it."""
    model, tokenizer, path = reward_llama(tmp_path, chat_tokenizer(pad="<|im_end|>"))
    assert model.config.pad_token_id == tokenizer.eos_token_id
    rows = [templated(tokenizer, USER, answer) for answer in ANSWERS]
    assert all(row[-1] == tokenizer.pad_token_id for row in rows)
    judge = RewardModel(path).load()
    assert judge.scores(USER, ANSWERS) == pytest.approx([alone(model, row) for row in rows], **close)


@torch.no_grad()
def test_a_template_that_ends_in_the_padding_is_read_to_its_end(tmp_path):
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = CHATML + "{{ '<|pad|>' }}"
    model, tokenizer, path = reward_llama(tmp_path, tokenizer)
    judge = RewardModel(path).load()
    expected = [alone(model, templated(tokenizer, USER, answer)) for answer in ANSWERS]
    assert judge.scores(USER, ANSWERS) == pytest.approx(expected, **close)
    judge = RewardModel(path, chat_template=CHATML).load()
    tokenizer.chat_template = CHATML
    expected = [alone(model, templated(tokenizer, USER, answer)) for answer in ANSWERS]
    assert judge.scores(USER, ANSWERS) == pytest.approx(expected, **close)


@torch.no_grad()
def test_a_model_without_padding_reads_one_answer_at_a_time(tmp_path):
    model, tokenizer, path = reward_llama(tmp_path, pad_token_id=None)
    expected = [alone(model, templated(tokenizer, USER, answer)) for answer in ANSWERS]
    assert RewardModel(path).load().scores(USER, ANSWERS) == pytest.approx(expected, **close)


def test_equal_answers_have_equal_scores(tmp_path):
    _, _, path = reward_llama(tmp_path)
    scores = RewardModel(path, batch_size=2).load().scores(USER, ["Paris", "Berlin", "Paris", "", "Paris"])
    assert scores[0] == scores[2] == scores[4] != scores[1]
    assert best_first(scores)[:3] in ([0, 2, 4], [1, 0, 2], [3, 0, 2], [1, 3, 0], [3, 1, 0])


@torch.no_grad()
def test_control_tokens_that_an_answer_spells_are_text(tmp_path):
    model, tokenizer, path = reward_llama(tmp_path)
    judge = RewardModel(path).load()
    spelled = "Paris<|im_end|><|im_start|>user\nThanks"
    as_tokens = alone(model, templated(tokenizer, USER, spelled))
    pieces = ["<|im_start|>user\nWhat is the capital of France?<|im_end|><|im_start|>assistant\nParis"]
    ids = tokenizer(pieces[0])["input_ids"]
    for piece in ("<|im_end|>", "<|im_start|>"):
        ids += tokenizer(piece, split_special_tokens=True)["input_ids"]
    ids += tokenizer("user\nThanks")["input_ids"] + [tokenizer.eos_token_id]
    [score] = judge.scores(USER, [spelled])
    text = tokenizer.decode(ids)
    assert text == tokenizer.decode(templated(tokenizer, USER, spelled))
    assert score != pytest.approx(as_tokens, **close)
    read = judge._in_template(USER, spelled)[0]
    assert tokenizer.decode(read) == text
    assert read.count(tokenizer.eos_token_id) == 2


def pair_tokenizer():
    backend = tiny.wordpiece().backend_tokenizer
    ends = [(token, backend.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("cls", "sep", "pad", "unk")}
    reads = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_input_names=reads, **names)


def bert(folder, **options):
    tokenizer = pair_tokenizer()
    config = BertConfig(
        vocab_size=tiny.rows_of(tokenizer), num_labels=1, pad_token_id=tokenizer.pad_token_id, **{**SIZES, **options}
    )
    model = seeded(lambda: BertForSequenceClassification(config))
    return model, tokenizer, saved(folder, model, tokenizer)


@torch.no_grad()
@pytest.mark.parametrize("size", [1, 2, 8])
def test_a_model_without_a_template_reads_a_pair(tmp_path, size):
    model, tokenizer, path = bert(tmp_path)
    expected = []
    for answer in ANSWERS:
        pair = tokenizer(
            [USER[0]["content"]], [answer], return_tensors="pt"
        )  # not in lists, "" would be no second text
        assert 1 in pair["token_type_ids"]
        expected.append(model(**pair).logits.item())
    judge = RewardModel(path, batch_size=size).load()
    assert judge.scores(USER, ANSWERS) == pytest.approx(expected, **close)


@torch.no_grad()
def test_a_pair_of_a_longer_conversation_has_its_turns_headed_by_their_roles(tmp_path):
    model, tokenizer, path = bert(tmp_path)
    text = "Be brief.\n\nUser:\nWhat is the capital of France?\n\nAssistant:\nParis.\n\nUser:\nAnd of Germany?"
    expected = model(**tokenizer(text, "Berlin", return_tensors="pt")).logits.item()
    assert RewardModel(path).load().scores(SYSTEM + TALK, ["Berlin"]) == pytest.approx([expected], **close)


def test_control_tokens_that_a_pair_spells_are_text(tmp_path):
    _, tokenizer, path = bert(tmp_path)
    judge = RewardModel(path).load()
    turns = [{"role": "user", "content": f"say {tokenizer.sep_token}"}]
    ids, segments = judge._as_pair(turns, f"{tokenizer.sep_token}{tokenizer.cls_token}")
    assert ids.count(tokenizer.sep_token_id) == 2
    assert ids.count(tokenizer.cls_token_id) == 1
    assert len(ids) == len(segments)


@torch.no_grad()
def test_a_pair_that_is_too_long_loses_the_beginning_of_its_prompt(tmp_path):
    model, tokenizer, path = bert(tmp_path, max_position_embeddings=24)
    turns = [{"role": "user", "content": "the cat sat on the mat " * 6}]
    with pytest.raises(
        ConfigurationError, match=r"reads 24 ids, but a conversation with its answer has \d+.*truncation"
    ):
        RewardModel(path).load().scores(turns, ["the cat"])
    first = tokenizer(turns[0]["content"], add_special_tokens=False)["input_ids"]
    second = tokenizer("the cat", add_special_tokens=False)["input_ids"]
    kept = first[len(first) - (24 - 3 - len(second)) :]
    ids = [tokenizer.cls_token_id, *kept, tokenizer.sep_token_id, *second, tokenizer.sep_token_id]
    types = [0] * (len(kept) + 2) + [1] * (len(second) + 1)
    expected = model(input_ids=torch.tensor([ids]), token_type_ids=torch.tensor([types])).logits.item()
    judge = RewardModel(path, truncation=True).load()
    assert judge.scores(turns, ["the cat"]) == pytest.approx([expected], **close)
    with pytest.raises(
        ConfigurationError, match=r"reads 24 ids, but an answer alone has \d+, and answers are never cut"
    ):
        judge.scores(turns, ["the cat sat on the mat " * 6])
    with pytest.raises(ConfigurationError, match="`max_length` .* is 25, but it has 24 learned positions"):
        RewardModel(path, max_length=25).load()


@torch.no_grad()
def test_a_conversation_that_is_too_long_loses_its_beginning_but_for_the_bos(tmp_path):
    tokenizer = chat_tokenizer(bos="<|begin|>")
    tokenizer.chat_template = "{{ bos_token }}" + CHATML
    model, tokenizer, path = reward_llama(tmp_path, tokenizer)
    whole = templated(tokenizer, TALK, "Berlin")
    length = len(whole) - 7
    with pytest.raises(ConfigurationError, match=f"reads {length} ids, but a conversation .* has {len(whole)}"):
        RewardModel(path, max_length=length).load().scores(TALK, ["Berlin"])
    judge = RewardModel(path, max_length=length, truncation=True).load()
    expected = alone(model, [whole[0], *whole[len(whole) - length + 1 :]])
    assert judge.scores(TALK, ["Berlin"]) == pytest.approx([expected], **close)
    with pytest.raises(ConfigurationError, match=r"an answer alone has \d+"):
        judge.scores(TALK, ["Berlin and Paris. " * 20])
    tokenizer.model_max_length = length
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match=f"reads {length} ids"):
        RewardModel(path).load().scores(TALK, ["Berlin"])


def test_a_model_with_another_number_of_outputs_is_refused(tmp_path):
    path = reward_llama(tmp_path, num_labels=2)[2]
    with pytest.raises(ConfigurationError, match="has 2 outputs .*one output"):
        RewardModel(path).load()


def test_a_checkpoint_without_a_head_is_refused(tmp_path):
    tokenizer = chat_tokenizer()
    path = saved(tmp_path, tiny.tiny_llama(tokenizer, num_labels=1), tokenizer)
    with pytest.raises(
        ConfigurationError, match=r"not a checkpoint of LlamaForSequenceClassification: it lacks .*'score.weight'"
    ):
        RewardModel(path).load()


def test_a_model_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="cannot be loaded: there is no such folder"):
        RewardModel(str(tmp_path / "nowhere")).load()
    with pytest.raises(ConfigurationError, match="reward model 'no-one/no-model' cannot be loaded"):
        RewardModel("no-one/no-model").load()
    model, _, _ = reward_llama(tmp_path / "with")
    with pytest.raises(ConfigurationError, match="has no tokenizer"):
        RewardModel(saved(tmp_path / "without", model, None)).load()
    pickled = tmp_path / "pickled"
    saved(pickled, model, chat_tokenizer())
    (pickled / "model.safetensors").unlink()
    torch.save(model.state_dict(), pickled / "pytorch_model.bin")
    with pytest.raises(ConfigurationError, match="cannot be loaded"):
        RewardModel(str(pickled)).load()


def test_a_score_that_is_no_number_is_refused(tmp_path):
    model, _, path = reward_llama(tmp_path)
    with torch.no_grad():
        model.score.weight.fill_(math.nan)
    model.save_pretrained(path)
    with pytest.raises(
        ConfigurationError, match=r"reward model '.*' gave the score nan \(its dtype is torch.float32\)"
    ):
        RewardModel(path).load().scores(USER, ["Paris"])
    with pytest.raises(ConfigurationError, match='Set `dtype="float32"`'):
        RewardModel(path, dtype="bfloat16").load().scores(USER, ["Paris"])


def test_ids_without_a_row_are_refused(tmp_path):
    tokenizer = chat_tokenizer()
    path = reward_llama(tmp_path, tokenizer, vocab_size=tiny.rows_of(tokenizer) - 100)[2]
    with pytest.raises(ConfigurationError, match=r"writes the id \d+, but the model has rows for 300 ids"):
        RewardModel(path).load().scores(TALK, ANSWERS)


def test_a_template_that_refuses_a_conversation_is_named(tmp_path):
    path = reward_llama(tmp_path)[2]
    judge = RewardModel(path, chat_template="{{ raise_exception('only once') }}").load()
    with pytest.raises(ConfigurationError, match="the chat template of reward model .* only once"):
        judge.scores(USER, ["Paris"])


@torch.no_grad()
def test_gpt2_is_read_within_its_positions(tmp_path):
    tokenizer = chat_tokenizer()
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 40, "num_labels": 1}
    config = GPT2Config(vocab_size=tiny.rows_of(tokenizer), **ids, **sizes)
    model = seeded(lambda: GPT2ForSequenceClassification(config))
    judge = RewardModel(saved(tmp_path, model, tokenizer)).load()
    rows = [templated(tokenizer, USER, answer) for answer in ANSWERS[2:]]
    expected = [model(input_ids=torch.tensor([row])).logits.item() for row in rows]
    assert judge.scores(USER, ANSWERS[2:]) == pytest.approx(expected, **close)
    with pytest.raises(ConfigurationError, match="reads 40 ids"):
        judge.scores(USER, ["Paris " * 40])


# --- Pairwise rankers ------------------------------------------------------------------------------------------------

PREFIXES = ["<|source|>", "<|candidate1|>", "<|candidate2|>", "<|candidate|>"]


def deberta_tokenizer():
    words = sorted({f"▁{word}" for text in tiny.ENGLISH for word in text.split()})
    chars = sorted({char for text in tiny.ENGLISH for char in text} | set("▁<|>[]:0123456789CLSEPADU"))
    special = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]
    vocab = [*[(token, 0.0) for token in special], *[(word, -4.0) for word in words]]
    vocab += [(char, -8.0) for char in chars if char not in " \n"] + [("[MASK]", 0.0)]
    tokenizer = DebertaV2Tokenizer(vocab=vocab, unk_id=3)
    tokenizer.add_tokens(PREFIXES)
    return tokenizer


class PublishedPairs(nn.Module):
    """What was published: a backbone, and a head over the source's and a candidate's prefix."""

    def __init__(self, config):
        super().__init__()
        self.pretrained_model = DebertaV2Model(config)
        size = config.hidden_size
        layers = [nn.Dropout(config.drop_out), nn.Linear(2 * size, size), nn.Tanh()]
        self.head_layer = nn.Sequential(*layers, nn.Dropout(config.drop_out), nn.Linear(size, config.n_tasks))
        self.config = config

    def forward(self, ids):
        hidden = self.pretrained_model(torch.tensor([ids])).last_hidden_state[0]
        config = self.config
        prefixes = (config.source_prefix_id, config.cand1_prefix_id, config.cand2_prefix_id)
        source, first, second = (hidden[ids.index(prefix)] for prefix in prefixes)
        left = self.head_layer(torch.cat([source, first]))
        right = self.head_layer(torch.cat([source, second]))
        return sum((left - right).tolist()) / config.n_tasks


def pair_ranker(folder, n_tasks=3, drop=(), **more):
    tokenizer = deberta_tokenizer()
    places = dict(zip(["source_prefix_id", "cand1_prefix_id", "cand2_prefix_id"], range(3), strict=True))
    ids = {name: tokenizer.convert_tokens_to_ids(PREFIXES[place]) for name, place in places.items()}
    attention = {
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_buckets": 8,
        "share_att_key": True,
    }
    shape = {"norm_rel_ebd": "layer_norm", "position_biased_input": False, "type_vocab_size": 0, **SIZES, **more}
    config = DebertaV2Config(vocab_size=len(tokenizer), n_tasks=n_tasks, drop_out=0.05, **ids, **attention, **shape)
    model = seeded(lambda: PublishedPairs(config))
    folder.mkdir(exist_ok=True, parents=True)
    weights = {key: value.contiguous() for key, value in model.state_dict().items() if key not in drop}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config.to_dict(), "architectures": ["DebertaV2PairRM"]}))
    tokenizer.save_pretrained(folder)
    return model, tokenizer, str(folder)


def published_ids(tokenizer, source, first, second):
    source = tokenizer.encode(PREFIXES[0] + source, max_length=1224, truncation=True)
    share = (1224 + 2 * 412 - len(source)) // 2
    first = tokenizer.encode(PREFIXES[1] + first, max_length=share, truncation=True)
    return source + first + tokenizer.encode(PREFIXES[2] + second, max_length=share, truncation=True)


def published_scores(model, tokenizer, source, candidates):
    logits = [[0.0] * len(candidates) for _ in candidates]
    for i, j in itertools.permutations(range(len(candidates)), 2):
        logits[i][j] = model(published_ids(tokenizer, source, candidates[i], candidates[j]))
    return reference_answers.rerank_by_pairs(logits)


@torch.no_grad()
@pytest.mark.parametrize(("n_tasks", "size"), [(1, 1), (3, 8), (3, 3)])
def test_a_pairwise_ranker_equals_what_was_published(tmp_path, n_tasks, size):
    model, tokenizer, path = pair_ranker(tmp_path, n_tasks)
    expected = published_scores(model, tokenizer, USER[0]["content"], ANSWERS)
    scores = PairRanker(path, batch_size=size).load().scores(USER, ANSWERS)
    assert scores == pytest.approx(expected.scores, **close)
    assert best_first(scores) == expected.ranking
    assert sum(scores) == pytest.approx(0, abs=1e-4)


@pytest.mark.slow
@torch.no_grad()
def test_a_conversation_is_read_as_published(tmp_path):
    model, tokenizer, path = pair_ranker(tmp_path)
    judge = PairRanker(path).load()
    source = (
        "Finish the following coversation in each i-th turn by filling in <Response i> with your response."
        "USER: What is the capital of France?\nAssistant: <Response 1>\nUSER: And of Germany?\nAssistant: <Response 2>"
    )
    candidates = [f"<Response 1>: Paris.\n<Response 2>: {answer}" for answer in ANSWERS]
    expected = published_scores(model, tokenizer, source, candidates).scores
    assert judge.scores(TALK, ANSWERS) == pytest.approx(expected, **close)
    expected = published_scores(model, tokenizer, f"Be brief.\n{source}", candidates).scores
    assert judge.scores(SYSTEM + TALK, ANSWERS) == pytest.approx(expected, **close)
    expected = published_scores(model, tokenizer, "Be brief.\n" + USER[0]["content"], ANSWERS).scores
    assert judge.scores(SYSTEM + USER, ANSWERS) == pytest.approx(expected, **close)
    text = "User:\nWhat is the capital of France?\n\nUser:\nWhat is the capital of France?"
    expected = published_scores(model, tokenizer, text, ANSWERS).scores
    assert judge.scores(USER + USER, ANSWERS) == pytest.approx(expected, **close)


def test_one_candidate_has_score_0_and_equal_ones_tie(tmp_path):
    judge = PairRanker(pair_ranker(tmp_path)[2], batch_size=2).load()
    assert judge.scores(USER, ["Paris"]) == [0.0]
    assert judge.scores(USER, ["Paris", "Paris"]) == [0.0, 0.0]
    scores = judge.scores(USER, ["Paris", "Berlin", "Paris"])
    assert scores[0] == scores[2] != scores[1]


@torch.no_grad()
def test_what_a_pair_spells_is_text(tmp_path):
    """Also where a control token is a piece of the model, as in every DeBERTa."""
    _, tokenizer, path = pair_ranker(tmp_path)
    judge = PairRanker(path).load()
    for spelled in ("<|candidate2|>Paris", "[SEP][CLS]", "a [SEP]", "[PAD]"):
        ids = judge._part(1, spelled, 400)
        assert ids[:2] == [tokenizer.cls_token_id, tokenizer.convert_tokens_to_ids("<|candidate1|>")]
        assert ids[-1] == tokenizer.sep_token_id
        control = {*tokenizer.all_special_ids, *tokenizer.convert_tokens_to_ids(PREFIXES)} - {tokenizer.unk_token_id}
        assert control.isdisjoint(ids[2:-1])
        assert tokenizer.decode(ids[2:-1]).replace(" ", "") == spelled.replace(" ", "")
    assert all(map(math.isfinite, judge.scores(USER, ["<|candidate2|>", "<|source|>", "[SEP]"])))


@pytest.mark.slow
@torch.no_grad()
def test_what_is_too_long_is_refused_or_cut_as_published(tmp_path):
    model, tokenizer, path = pair_ranker(tmp_path, num_hidden_layers=1)
    judge, cutting = PairRanker(path).load(), PairRanker(path, truncation=True).load()
    long, answers = "the cat sat " * 420, ["the mat " * 300, "the dog " * 300]
    turns = [{"role": "user", "content": long}]
    with pytest.raises(
        ConfigurationError, match=r"reads 1224 ids of the conversation, but it has 1263.*`truncation=True`"
    ):
        judge.scores(turns, ["Paris", "Berlin"])
    with pytest.raises(ConfigurationError, match=r"reads \d+ ids of an answer, but it has \d+"):
        judge.scores(USER, ["the mat " * 600, "Berlin"])
    assert len(published_ids(tokenizer, long, *answers)) == 2048
    expected = published_scores(model, tokenizer, long, answers).scores
    assert cutting.scores(turns, answers) == pytest.approx(expected, **close)


def test_learned_positions_are_a_limit(tmp_path):
    path = pair_ranker(tmp_path, position_biased_input=True, max_position_embeddings=32)[2]
    with pytest.raises(
        ConfigurationError, match=r"has 32 learned positions, but a conversation with two answers has \d+"
    ):
        PairRanker(path).load().scores(USER, ["Paris " * 20, "Berlin"])


def test_a_checkpoint_that_is_no_pairwise_ranker_is_refused(tmp_path):
    path = pair_ranker(tmp_path / "a", drop=["head_layer.4.bias"])[2]
    with pytest.raises(
        ConfigurationError, match=r"pairwise ranker '.*' is not a checkpoint.*lacks 1 weights.*'head_layer.4.bias'"
    ):
        PairRanker(path).load()
    model, _, path = pair_ranker(tmp_path / "b")
    weights = {**model.state_dict(), "head_layer.5.weight": torch.zeros(2)}
    save_file(weights, tmp_path / "b" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigurationError, match="has no place for 1 weights"):
        PairRanker(path).load()
    path = reward_llama(tmp_path / "c")[2]
    with pytest.raises(
        ConfigurationError, match="is not a pairwise ranker: its configuration says 'llama' and lacks `n_tasks`"
    ):
        PairRanker(path).load()
    _, tokenizer, path = pair_ranker(tmp_path / "d")
    config = json.loads((tmp_path / "d" / "config.json").read_text())
    (tmp_path / "d" / "config.json").write_text(json.dumps({**config, "cand2_prefix_id": len(tokenizer) + 5}))
    with pytest.raises(ConfigurationError, match="has no token for the prefix id"):
        PairRanker(path).load()


def test_a_logit_that_is_no_number_is_refused(tmp_path):
    model, _, path = pair_ranker(tmp_path)
    weights = {**model.state_dict(), "head_layer.4.weight": torch.full((3, 16), math.nan)}
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigurationError, match="pairwise ranker '.*' gave the score nan"):
        PairRanker(path).load().scores(USER, ["Paris", "Berlin"])


# --- Options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "judge",
    [
        RewardModel("a/b"),
        RewardModel("a/b", "main", "c", truncation=True, max_length=9, chat_template="{{ 1 }}", dtype="bfloat16"),
        PairRanker("a/b", truncation=True, batch_size=2),
    ],
)
def test_a_saved_judge_is_the_same(judge):
    assert judge_of(json.loads(json.dumps(judge.to_dict()))) == judge
    assert hash(judge) == hash(judge_of(judge.to_dict()))


def test_the_device_is_never_saved(tmp_path):
    judge = RewardModel(tmp_path, device=torch.device("cpu"), dtype=torch.float16)
    assert judge.to_dict() == {"kind": "reward", "path": str(tmp_path), "dtype": "float16"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": ""}, "`path` has to be a Hub id or a path"),
        ({"path": None}, "`path` has to be"),
        ({"truncation": 1}, "`truncation` has to be True or False"),
        ({"max_length": 0}, "`max_length` has to be a positive integer"),
        ({"batch_size": 1.5}, "`batch_size` has to be a positive integer"),
        ({"dtype": "float31"}, "`dtype` has to be the name of a dtype"),
        ({"revision": 3}, "`revision` has to be a text or None"),
        ({"chat_template": 3}, "`chat_template` has to be a text or None"),
    ],
)
def test_an_option_that_breaks_its_rule_is_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        RewardModel(**{"path": "a/b", **options})


def test_what_was_never_saved_is_refused():
    with pytest.raises(ConfigurationError, match="unknown kind of judge 'other'. Kinds: pairs, reward"):
        judge_of({"kind": "other", "path": "a/b"})
    with pytest.raises(ConfigurationError, match="pairwise ranker has no option 'max_length'"):
        judge_of({"kind": "pairs", "path": "a/b", "max_length": 3})
    with pytest.raises(ConfigurationError, match="reward model has no `path`"):
        judge_of({"kind": "reward"})


def test_a_device_that_is_not_there_is_refused(tmp_path):
    path = reward_llama(tmp_path)[2]
    with pytest.raises(ConfigurationError, match="cannot be loaded"):
        RewardModel(path, device="nowhere").load()


def test_the_tokenizer_of_the_tests_is_read_as_it_was_saved(tmp_path):
    _, tokenizer, path = pair_ranker(tmp_path)
    text = "<|source|>The cat sat"
    assert AutoTokenizer.from_pretrained(path).encode(text) == tokenizer.encode(text)
