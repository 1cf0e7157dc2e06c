"""The plain, slow reference for mixing weights (section 10) that are not simply given."""

from collections.abc import Sequence

import torch

from tests.reference import Reference, ReferenceMember, State


def weights_from_scores(scores: Sequence[float], chance: float = 0.0) -> list[float]:
    """Weights in proportion to how far a member's development score is above chance.

    Where the semantics leave something open: a member at or below chance gets weight 0.

    Raises:
        ValueError: If no score is above chance.
    """
    above = [max(score - chance, 0.0) for score in scores]
    if not any(above):
        raise ValueError(f"No score of {list(scores)} is above {chance}.")
    return [value / sum(above) for value in above]


class PackllmWeights:
    """Weights by how well each member predicts the prompt, the same for all steps: `Reference(weights=...)`.

    Where the semantics leave something open:

    - A loss is over the text tokens of the member's context after the prompt that have a token before them: BOS and
      other control tokens are read, not scored, and a member without BOS does not score its first token.
    - The bytes are what those tokens write, the space that a tokenizer puts in front included; the log-probability is
      that of the token under the softmax over all ids with a token.
    - `b` is the bytes of the prompt's text over the number of the primary's tokens that write it, control tokens not
      counted.
    - A begun character at the end is scored where the member has byte tokens.
    - A member that scored nothing is an error.

    Args:
        temperature: The paper's tau.
    """

    def __init__(self, temperature: float = 1.0):
        self.temperature = temperature

    def __call__(self, reference: Reference, state: State) -> list[float]:
        prompt = state.primary_ids[: state.prompt_length]
        start = reference.prompt_state(prompt)
        contexts = [prompt, *(own.appended for own in start.assistants)]
        losses = [nats_per_byte(member, ids) for member, ids in zip(reference.members, contexts, strict=True)]
        writing = sum(i in reference.primary.token_bytes for i in prompt)
        bytes_per_token = len(reference.primary.text_of_prompt(prompt)) / writing
        logits = torch.tensor([-loss * bytes_per_token / self.temperature for loss in losses], dtype=torch.float64)
        return logits.softmax(0).tolist()


@torch.no_grad()
def nats_per_byte(member: ReferenceMember, context: Sequence[int]) -> float:
    ids = torch.tensor([list(context)])
    mask = torch.ones_like(ids)
    logits = member.model(input_ids=ids, attention_mask=mask, use_cache=False).logits[0].double()  # (T, V)
    real = torch.tensor(sorted(i for i in member.vocab.values() if i < member.num_rows))
    nats, num_bytes = 0.0, 0
    for at, i in enumerate(context):
        if at and i in member.token_bytes:
            nats += (logits[at - 1, real].logsumexp(0) - logits[at - 1, i]).item()
            num_bytes += len(member.token_bytes[i])
    if not num_bytes:
        raise ValueError(f"{member.name} scores no byte of the prompt: it has fewer than two tokens there.")
    return nats / num_bytes
