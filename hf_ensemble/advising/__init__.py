"""Advice for one's own members: whether an ensemble of them pays, which, and what it costs."""

from .advice import Advice, TriedEnsemble, TriedMember
from .run import advise

__all__ = ["Advice", "TriedEnsemble", "TriedMember", "advise"]
