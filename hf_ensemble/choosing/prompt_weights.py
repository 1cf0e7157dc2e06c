"""Mixing weights from scores on a development set, or from how well the members predict the prompt."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..config import is_number
from ..decoding.prompts import OwnPrompts, prepare_prompt, read_prompts
from ..errors import ConfigurationError, MemberError
from ..members.member import Member
from ..model import EnsembleForCausalLM
from ..offers import Offer
from ..scoring.by_member import score_by_member
from ..scoring.pairs import Pair, num_bytes_after


def weights_from_scores(scores: Sequence[float], chance: float = 0.0) -> list[float]:
    """Give every member a weight proportional to its development score minus the score of chance.

    A member at or below chance gets weight 0 and so does not run.

    Args:
        scores: One score per member, all on the same scale; higher is better.
        chance: The score of guessing on that scale: 0 for free text, 1/K (or 100/K) for K choices.

    Returns:
        Weights that sum to 1, one per member.

    Raises:
        ConfigurationError: If there is no score, one is not finite, or none is above chance.

    Reference:
        DeePEn-Adapt in Huang et al., "Ensemble Learning for Heterogeneous Large Language Models with Deep Parallel
        Collaboration" (https://arxiv.org/abs/2404.12715), section 3.
    """
    try:
        values, chance = [float(score) for score in scores], float(chance)
    except (TypeError, ValueError):
        raise ConfigurationError(
            f"`scores` and `chance` must be numbers, one score per member, but are {scores!r:.200} and {chance!r:.80}."
        ) from None
    if not values:
        raise ConfigurationError("`scores` must have one entry per member, but is empty.")
    if not all(map(math.isfinite, [*values, chance])):
        raise ConfigurationError(f"`scores` and `chance` must be finite, but are {values} and {chance}.")
    above = [max(0.0, value - chance) for value in values]
    if not math.isfinite(sum(above)):
        raise ConfigurationError(f"`scores` and `chance` are too far apart for weights: {values} and {chance}.")
    total = math.fsum(above)
    if total == 0:
        raise ConfigurationError(
            f"no score is above the chance level {chance:g}: the best is {max(values):g}. Give both on the same "
            "scale, or use uniform weights."
        )
    return [value / total for value in above]


@torch.no_grad()
def packllm_weights(
    ensemble: EnsembleForCausalLM,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    temperature: float = 1.0,
    token_type_ids: Any = None,
    member_prompts: Sequence[Any] | None = None,
) -> Tensor:
    """Weight members by how well each predicts the prompt, once per row.

    `softmax(-loss * b / temperature)` over the members: `loss` is a member's mean loss in nats per byte, over the
    bytes of the prompt that it can predict, so that cutting text into finer pieces is no advantage; `b` is the
    prompt's number of bytes per token of the primary, which turns it back into a loss per token. Ids that write
    nothing (BOS, control tokens of a template) are read but not counted. Every member reads the prompt once, as in
    `generate` with re-encoded contexts, whatever the ensemble's weights.

    Args:
        ensemble: The ensemble.
        input_ids: The primary's ids of the prompts, of shape `(batch_size, length)`.
        attention_mask: 1 for ids of the prompt and 0 for padding, of the same shape.
        temperature: τ; higher values give more equal weights.
        token_type_ids: Not read; accepted so that a tokenizer's whole output can be passed on.
        member_prompts: Prompts for single members, as in `generate`.

    Returns:
        Weights of shape `(batch_size, num_members)`, each row summing to 1, in float32 on the device of `input_ids`.

    Raises:
        ConfigurationError: If `temperature` is not positive, or a member has nothing to predict in a prompt, because
            it reads it as one token without a BOS.
        MemberError: If a member fails or returns NaN, or no member gives a prompt any probability.

    Reference:
        Mavromatis et al., "Pack of LLMs: Model Fusion at Test-Time via Perplexity Optimization"
        (https://arxiv.org/abs/2404.11531).
    """
    if not (is_number(temperature) and 0 < temperature < math.inf):
        raise ConfigurationError(f"`temperature` has to be a positive number, but is {temperature!r}.")
    if input_ids is None:
        raise ConfigurationError("`input_ids` must be given: the weights depend on the prompt.")
    members = ensemble.member_views
    for member in members:
        member.refuse({Offer.PROMPT_LOSS}, "`packllm_weights`")
    ids, mask = prepare_prompt(members[0], input_ids, attention_mask)
    own = OwnPrompts(members, member_prompts, len(ids), ensemble.config.chat_id)
    prompts = read_prompts(members, range(len(members)), "retokenize", ids, mask, own)
    losses = []
    for index, member in enumerate(members):
        rows = [context.ids for context in prompts.contexts[index]] if index else prompts.ids
        losses.append(_losses_per_byte(member, rows))
    loss = torch.stack(losses, dim=-1)  # (num_prompts, M)
    if impossible := loss.isinf().all(-1).nonzero()[:, 0].tolist():
        raise MemberError(f"no member gives prompt {impossible[0]} any probability, so they cannot be weighted by it.")
    entry = members[0].encoder.token_bytes.entry
    num_tokens = [sum(1 for i in row if entry(i)) for row in prompts.ids]
    bytes_per_token = torch.tensor([len(text) / n for text, n in zip(prompts.texts, num_tokens, strict=True)])
    weights = (-loss * bytes_per_token[:, None] / temperature).softmax(-1)
    return weights[prompts.prompt_of_row].to(ids.device)


def _losses_per_byte(member: Member, rows: Sequence[list[int]]) -> Tensor:
    """A member's mean loss in nats per byte, for the bytes of each row after its first id, of shape `(num_rows,)`."""
    token_bytes = member.encoder.token_bytes
    pairs = [Pair(row[:1], row[1:], num_bytes_after(member, row[:1], row[1:])) for row in rows]
    for n, pair in enumerate(pairs):
        if pair.num_bytes == 0:
            raise ConfigurationError(
                f"member {member.name!r} has nothing to predict in prompt {n}, which it reads as "
                f"{token_bytes.write_from_start(rows[n])!r}. Give longer prompts, or other weights."
            )
    losses = []
    for pair, score in zip(pairs, score_by_member([member], {0: pairs})[0], strict=True):
        writes = torch.tensor([bool(token_bytes.entry(i)) for i in pair.continuation])
        losses.append(-score.log_probs[writes].sum() / pair.num_bytes)
    return torch.stack(losses).float()
