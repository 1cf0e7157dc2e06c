"""Evaluating an ensemble and its members: what they write and how likely they find it, on files of JSON lines."""

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
