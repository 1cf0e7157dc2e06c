"""The plain, slow reference for likelihoods (section 12): a fresh step of the method's own reference before every id.

Where the semantics leave something open:

- An empty prompt is what `generate` starts from: what the tokenizer puts in front of a text, else BOS, else EOS.
- The continuation is greedy if at every decision the best entry is what comes next; the ids of an entry are one
  decision, and the last may reach beyond the continuation's end.
- Spans: a member's ids of the continuation are those of its own encoding of the whole text where that begins with its
  encoding of the prompt; else the continuation is encoded by itself, after the prompt.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from tests.reference import Reference, ReferenceMember


class Score(NamedTuple):
    log_prob: float
    is_greedy: bool
    margin: float
    """How far the best entry is ahead of the next, at the decision where it is least."""


def split(member: ReferenceMember, prompt: str, continuation: str) -> tuple[list[int], list[int]]:
    """The primary's ids of both, cut as lm-evaluation-harness does."""
    tokenizer = member.tokenizer
    while prompt and prompt[-1].isspace():
        prompt, continuation = prompt[:-1], prompt[-1] + continuation
    if not prompt:
        return _start(member), tokenizer(continuation, add_special_tokens=False)["input_ids"]
    before = tokenizer(prompt)["input_ids"]
    return before, tokenizer(prompt + continuation)["input_ids"][len(before) :]


def _start(member: ReferenceMember) -> list[int]:
    tokenizer = member.tokenizer
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    return member.prompt_prefix or [first]


def score(reference: Reference, prompt: Sequence[int], continuation: Sequence[int]) -> Score:
    """The log-probability of the primary's ids of a continuation after those of a prompt."""
    state, total, least = reference.prompt_state(prompt), 0.0, math.inf
    is_greedy, entry = True, []
    for i in continuation:
        step = reference.distribution(state)
        prob = step.columns.get(i, 0.0)
        total += math.log(prob) if prob else -math.inf
        if is_greedy:
            if not entry:
                entry, margin = reference.choose(step)
                least = min(least, margin)
            is_greedy, entry = entry[0] == i, entry[1:]
        state = reference.advance(state, [i])
    return Score(total, is_greedy, least)


@torch.no_grad()
def score_by_spans(
    members: Sequence[ReferenceMember], weights: Sequence[float], prompt: Sequence[int], continuation: Sequence[int]
) -> float:
    """The mean over the members of the log-probability of the continuation in each one's own ids."""
    primary, found = members[0], []
    before, after = primary.text_of_prompt(prompt), primary.text_of_prompt([*prompt, *continuation])
    for index, (member, weight) in enumerate(zip(members, weights, strict=True)):
        if not weight:
            continue
        start, ids = list(prompt), list(continuation)
        if index:
            first = member.prompt_prefix or ([] if before else _start(member))
            start = [*first, *member.prompt_ids(before.decode())]
            whole = [*first, *member.prompt_ids(after.decode())]
            is_prefix = whole[: len(start)] == start
            ids = whole[len(start) :] if is_prefix else member.append_ids(after[len(before) :].decode())
        row = torch.tensor([[*start, *ids]])
        logits = member.model(input_ids=row, attention_mask=torch.ones_like(row), use_cache=False).logits[0].double()
        real = torch.tensor(sorted(i for i in member.vocab.values() if i < member.num_rows))
        logprobs = logits - logits[:, real].logsumexp(-1, keepdim=True)
        found.append(sum(logprobs[len(start) + n - 1, i].item() for n, i in enumerate(ids)))
    return sum(found) / len(found)
