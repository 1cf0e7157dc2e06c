"""Evaluating an ensemble and its members: exact match, accuracy and bits per byte on files of JSON lines."""

from .marking import Result
from .results import Evaluation
from .run import Configuration, evaluate
from .sets import EvaluationSet, Item, normalize_answer, read_set

__all__ = [
    "Configuration",
    "Evaluation",
    "EvaluationSet",
    "Item",
    "Result",
    "evaluate",
    "normalize_answer",
    "read_set",
]
