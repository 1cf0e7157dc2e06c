"""What an ensemble wrote, held against a plain reference step by step."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def follow_reference(
    reference: Any,
    prompt: Sequence[int],
    found: Sequence[int],
    logits: Sequence[Tensor],
    num_steps: int,
    tolerance: float,
    margin: float,
    goes_on: Callable[[list[int]], bool] = lambda written: True,
) -> list[Any]:
    """Distributions along the reference's own greedy text, and the text, as far as its best two can be told apart.

    Args:
        reference: The reference.
        prompt: The primary's ids of the prompt.
        found: Ids that the ensemble wrote.
        logits: The ensemble's log-probabilities of each step, of shape `(width,)`.
        num_steps: Most ids that are followed.
        tolerance: Of probabilities.
        margin: Of the best two log-probabilities, below which the text is followed no further.
        goes_on: Whether the text is followed after these ids.

    Returns:
        The reference's steps.
    """
    state, written, steps = reference.prompt_state(prompt), [], []
    while len(written) < num_steps and goes_on(written):
        step = reference.distribution(state)
        steps.append(step)
        probs = logits[len(written)].exp()
        dense = torch.zeros_like(probs)
        dense[list(step.columns)] = torch.tensor(list(step.columns.values()), dtype=dense.dtype)
        torch.testing.assert_close(probs, dense, atol=tolerance, rtol=0)
        chosen, found_margin = reference.choose(step)
        if found_margin < margin:
            break
        for i in chosen[: num_steps - len(written)]:
            assert found[len(written)] == i
            written.append(i)
        if written[-1] in reference.primary.eos_ids:
            break
        state = reference.advance(state, chosen)
    return steps
