"""Texts that the benchmarks read, and texts that they make members write."""

import torch
from transformers import LogitsProcessor, PreTrainedTokenizerBase

PROMPT = (
    "The history of the city begins with a small settlement at the river. Over the centuries it grew, traded with its "
    "neighbours, burned down twice and was built again, each time with wider streets."
)
TEXT = (
    f"{PROMPT} In 1874 the first railway came, and with it factories, workers' quarters, a gasworks and two newspapers "
    "(one of them still exists). Zürich, naïve café, 你好世界, def main(argv): return [int(x) for x in argv[1:]] # done. "
)
QUESTIONS = (
    "Question: What is the capital of France?\nAnswer: Paris\n\nQuestion: What is the capital of Italy?\nAnswer: Rome\n\n"
    "Question: What is the capital of Spain?\nAnswer:"
)
BEGINNINGS = [
    "The capital of France is",
    "Once upon a time, in a small village far away from the sea, there lived",
    "def fibonacci(n):\n",
    "Water boils at",
    "The three most important inventions of the nineteenth century, in the order in which they were made, were",
    "Dear Sir or Madam,\n\nI am writing to you about",
    "In mathematics, a prime number is",
    "Die Hauptstadt von Deutschland ist",
]
"""Of different lengths, and none says anything twice."""


def text_ids(tokenizer: PreTrainedTokenizerBase, count: int, skip: int = 0) -> torch.Tensor:
    """Return the first ids of a text without an end.

    Args:
        tokenizer: Whose ids.
        count: How many.
        skip: Words of `TEXT` to begin after.

    Returns:
        Ids, of shape `(count,)`.
    """
    words = TEXT.split(" ")
    text = " ".join([*words[skip:], *words[:skip]]) if skip else TEXT
    copies = 1
    while len(ids := tokenizer(text * copies).input_ids) < count:
        copies *= 2
    return torch.tensor(ids[:count])


class Replay(LogitsProcessor):
    """Overrides what was chosen with the next id of a text.

    Args:
        ids: The text, of shape `(num_ids,)`.
        num_prompt_ids: How many ids of the prompt are no part of `ids`.
    """

    def __init__(self, ids: torch.Tensor | list[int], num_prompt_ids: int = 0):
        self.ids, self.num_prompt_ids = ids, num_prompt_ids

    def __call__(self, input_ids, scores):
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self.ids[input_ids.shape[1] - self.num_prompt_ids]] = 0.0
        return forced
