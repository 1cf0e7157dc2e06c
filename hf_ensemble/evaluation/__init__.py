"""Evaluates an ensemble and its members on files of JSON lines, by what they write and by likelihoods."""

from .estimates import Estimate
from .marking import Result
from .results import Evaluation
from .run import Configuration, evaluate
from .sets import EvaluationSet, Item, normalize_answer, read_set

__all__ = [
    "Configuration",
    "Estimate",
    "Evaluation",
    "EvaluationSet",
    "Item",
    "Result",
    "evaluate",
    "normalize_answer",
    "read_set",
]
