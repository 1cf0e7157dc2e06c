"""Values of examples and their uncertainty: exact match, F1, bits per byte, bootstrap over documents."""

import re
from collections.abc import Sequence
from functools import cache

import numpy as np
from cells import Cells, Key

from hf_ensemble.evaluation import Estimate, EvaluationSet, read_set

NUM_DRAWS = 10_000


def evaluation_set(task: str, examples: Sequence[dict]) -> EvaluationSet:
    """Return the examples as `hf_ensemble.evaluation` marks them: an answer is a line, or the last number.

    Args:
        task: Name of the set.
        examples: The set's examples.
    """
    records = [{"prompt": example["prompt"], "answers": example["answers"]} for example in examples]
    return read_set(records, name=task, marking="number" if task.startswith("gsm") else "text")


def exact_matches(questions: EvaluationSet, cell: dict) -> np.ndarray:
    """Return 1 or 0 for each example, of shape `(num_examples,)`.

    Args:
        questions: The set.
        cell: A cell of written answers.
    """
    pairs = zip(cell["responses"], questions.items, strict=True)
    return np.array([float(questions.is_right(response, item)) for response, item in pairs])


def answers(questions: EvaluationSet, cell: dict) -> list[str]:
    """Return each example's answer in a form that can be compared: the normalised line, or the last number.

    Args:
        questions: The set.
        cell: A cell of written answers.
    """
    return [questions.compared(response) for response in cell["responses"]]


def f1_scores(questions: EvaluationSet, cell: dict) -> np.ndarray:
    """Return SQuAD's F1 of each example, of shape `(num_examples,)`.

    Args:
        questions: A set whose answers are marked as texts.
        cell: A cell of written answers.
    """
    pairs = zip(cell["responses"], questions.items, strict=True)
    return np.array([questions.f1(response, item) for response, item in pairs])


def document_of(cluster: str) -> str:
    """Return the document of a QAMR sentence, the article of an XQuAD paragraph, or the problem.

    Args:
        cluster: What the example is about.
    """
    return re.sub(r"(:\d+:\d+|#\d+)$", "", cluster)


def ratio(values: np.ndarray, sizes: np.ndarray, clusters: Sequence[str]) -> Estimate:
    """Return the sum of values over the sum of sizes, with the percentile interval of a bootstrap over clusters.

    Differences of paired values compare two systems; means over seeds pool them.

    Args:
        values: Array of shape `(num_examples,)`.
        sizes: Array of shape `(num_examples,)`.
        clusters: One per example.
    """
    names = sorted(set(clusters))
    places = np.array([names.index(cluster) for cluster in clusters])
    sums = [np.bincount(places, weights=numbers, minlength=len(names)) for numbers in (values, sizes)]
    drawn = _draws(len(names))
    low, high = np.percentile((drawn @ sums[0]) / (drawn @ sums[1]), [2.5, 97.5])
    return Estimate(float(values.sum() / sizes.sum()), float(low), float(high))


@cache
def _draws(count: int) -> np.ndarray:
    """Return how often each cluster is drawn, of shape `(NUM_DRAWS, count)`."""
    return np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), NUM_DRAWS)


def share_right(cells: Cells, key: Key, questions: EvaluationSet) -> float:
    """Return the exact match of a finished cell.

    Args:
        cells: All cells.
        key: The key of a cell of written answers.
        questions: The set.
    """
    return float(exact_matches(questions, cells[key]).mean())
