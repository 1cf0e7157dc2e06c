"""Every member scores a text: against one plain forward pass of its model, row by row, and what is refused."""

import math

import pytest
import torch

from hf_ensemble import ConfigurationError, MemberError
from hf_ensemble.decoding import teacher_forcing
from hf_ensemble.members.local import LocalMember
from hf_ensemble.scoring.by_member import score_by_member
from hf_ensemble.scoring.pairs import Pair, own_pair
from hf_ensemble.vocabulary.context import MemberContext
from tests import tiny
from tests.contracts import CACHE_MODES, model_of, tokenizer_of

TEXTS = [
    ("The capital of France is", " Paris, and the capital"),
    ("The cat", " sat"),
    ("The cat", ""),
    ("A", " 漢字 ok"),
]
KINDS = [("llama", "smol"), ("gemma3", "gemma"), ("gpt2", "byte-level"), ("mamba2", "qwen")]


def member_of(architecture, tokenizer):
    member = LocalMember(model_of(architecture, tokenizer), tokenizer_of(tokenizer), name=architecture)
    member.cache_mode = CACHE_MODES[member.model.config.model_type]
    return member


def scripted(row, tokenizer="smol"):
    """A member that gives the same logits whatever it reads."""
    model = tiny.ScriptedModel(tokenizer_of(tokenizer), lambda _: row)
    member = LocalMember(model, tokenizer_of(tokenizer), name="scripted")
    member.cache_mode = CACHE_MODES["scripted"]
    return member


def own_pairs_of(member, texts=TEXTS):
    pairs = []
    for before, text in texts:
        prompt = MemberContext(member.encoder, "append", before.encode())
        pairs.append(own_pair(member, prompt, before.encode(), text.encode()))
    return pairs


def plain(member, pair, over_all_ids=False):
    """The log-probability of each id, by one call of the model without a cache."""
    ids = torch.tensor([[*pair.prompt, *pair.continuation]])
    with torch.no_grad():
        logits = member.model(ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0].double()
    if not over_all_ids:
        names = member.tokenizer.convert_ids_to_tokens(range(len(member.tokenizer)))
        real = [i for i in range(logits.shape[-1]) if i < len(names) and names[i] is not None]
        masked = torch.full_like(logits, -torch.inf)
        masked[:, real] = logits[:, real]
        logits = masked
    logprobs = logits.log_softmax(-1)
    return [logprobs[len(pair.prompt) + n - 1, i].item() for n, i in enumerate(pair.continuation)]


@pytest.mark.parametrize("over_all_ids", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind[0])
def test_every_id_of_every_row_is_what_a_plain_call_gives(kind, over_all_ids):
    member = member_of(*kind)
    pairs = own_pairs_of(member)
    for pair, score in zip(pairs, score_by_member([member], {0: pairs}, None, over_all_ids)[0], strict=True):
        assert score.log_probs.tolist() == pytest.approx(plain(member, pair, over_all_ids), abs=1e-4)
        assert score.log_probs.dtype == torch.float64
        assert score.log_prob == pytest.approx(score.log_probs.sum().item())
        assert score.num_tokens == len(pair.continuation)


def test_members_score_in_ids_of_their_own_and_agree_on_the_bytes():
    members = [member_of(*kind) for kind in KINDS[:3]]
    texts = {index: own_pairs_of(members[index]) for index in (0, 2)}
    scores = score_by_member(members, texts)
    assert list(scores) == [0, 2]
    assert [score.num_bytes for score in scores[0]] == [len(text.encode()) for _, text in TEXTS]
    assert [score.num_bytes for score in scores[2]] == [score.num_bytes for score in scores[0]]
    assert [score.num_tokens for score in scores[2]] != [score.num_tokens for score in scores[0]]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind[0])
def test_rows_alone_and_in_blocks_give_the_same(kind, monkeypatch):
    member = member_of(*kind)
    pairs = own_pairs_of(member)
    together = score_by_member([member], {0: pairs})[0]
    for name, most in (("_MAX_LOGITS", 4 * member.vocab_size), ("_MAX_MIXED", 3 * member.vocab_size)):
        monkeypatch.setattr(teacher_forcing, name, most)
    for found in (
        score_by_member([member], {0: pairs})[0],
        [score_by_member([member], {0: [p]})[0][0] for p in pairs],
    ):
        for one, other in zip(found, together, strict=True):
            torch.testing.assert_close(one.log_probs, other.log_probs, atol=1e-4, rtol=0)


def test_rows_of_any_length_are_one_forward():
    member = scripted(torch.zeros(tiny.rows_of(tokenizer_of("gemma"))), "gemma")
    pairs = [Pair([2], list(range(10, 10 + n)), n) for n in (5, 1, 3)]
    score_by_member([member], {0: pairs})
    assert len(member.model.calls) == 1


def test_nothing_to_score_is_certain():
    member = member_of("llama", "smol")
    member.model.eval()
    for scores in (
        score_by_member([member], {0: [Pair([5], [], 0)]})[0],
        score_by_member([member], {0: [Pair([5], [], 0), Pair([5], [6], 1)]})[0],
    ):
        assert (scores[0].log_prob, scores[0].num_tokens, scores[0].num_bytes, scores[0].is_greedy) == (0, 0, 0, True)


def test_greedy_is_what_is_the_best_everywhere():
    row = torch.zeros(tiny.rows_of(tokenizer_of("smol")))
    row[[30, 31]] = torch.tensor([2.0, 1.0])
    scores = score_by_member([scripted(row)], {0: [Pair([9], [30, 30], 2), Pair([9], [30, 31], 2)]})[0]
    assert [score.is_greedy for score in scores] == [True, False]


def test_an_id_that_a_member_gives_nothing_has_no_probability():
    row = torch.zeros(tiny.rows_of(tokenizer_of("smol")))
    row[30] = -torch.inf
    scores = score_by_member([scripted(row)], {0: [Pair([9], [31, 30], 2), Pair([9], [31, 32], 2)]})[0]
    assert scores[0].log_prob == -math.inf
    assert not scores[0].is_greedy
    assert math.isfinite(scores[1].log_prob)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_member_that_fails_is_named_with_the_text(bad):
    usual = torch.zeros(tiny.rows_of(tokenizer_of("smol")))
    failed = usual + bad if bad < 0 else usual.index_fill(0, torch.tensor([40]), bad)
    model = tiny.ScriptedModel(tokenizer_of("smol"), lambda ids: failed if ids[-1] == 33 else usual)
    members = [member_of("gemma3", "gemma"), LocalMember(model, tokenizer_of("smol"), name="bad")]
    pairs = {0: own_pairs_of(members[0])[:2], 1: [Pair([9], [31, 32], 2), Pair([9], [31, 33, 34], 3)]}
    with pytest.raises(MemberError, match="'bad' returned NaN or infinite logits in answer 4 at step 3"):
        score_by_member(members, pairs, ["answer 3", "answer 4"])
    with pytest.raises(MemberError, match="'bad' returned NaN or infinite logits on the prompt"):
        score_by_member(members, pairs)


def test_a_text_beyond_a_members_positions_is_refused_before_anything_runs():
    model = tiny.tiny_gpt2(tokenizer_of("smol"), n_positions=16)
    members = [
        scripted(torch.zeros(tiny.rows_of(tokenizer_of("smol")))),
        LocalMember(model, tokenizer_of("smol"), name="short"),
    ]
    fits = Pair([9] * 10, [10] * 7, 7)
    assert score_by_member(members, {1: [fits]})[1][0].num_tokens == 7
    long = Pair([9] * 10, [10] * 8, 8)
    with pytest.raises(ConfigurationError, match="'short' has positions for 16 ids, but prompt and answer 1 take 17"):
        score_by_member(members, {0: [fits, long], 1: [fits, long]}, ["answer 0", "answer 1"])
    assert not members[0].model.calls


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind[0])
def test_a_text_is_cut_as_the_whole_is_where_that_begins_with_the_prompt(kind):
    member = member_of(*kind)
    prompt = MemberContext(member.encoder, "append", b"The cat")
    before = list(prompt.ids)
    pair = own_pair(member, prompt, b"The cat", b" sat on the mat")
    whole = MemberContext(member.encoder, "retokenize", b"The cat sat on the mat").ids
    assert [*pair.prompt, *pair.continuation] == whole
    assert pair.num_bytes == 15
    assert prompt.ids == before
    # A prompt of its own, such as a rendered conversation, is continued.
    other = MemberContext.of_ids(member.encoder, [*before, *before])
    pair = own_pair(member, other, b"The cat", b" sat")
    assert pair.prompt == [*before, *before]
    assert member.encoder.token_bytes.write(pair.continuation) == b" sat"
