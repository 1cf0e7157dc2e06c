"""Advice for your own members: whether an ensemble of them pays, which one, and what it costs."""

from .advice import Advice, TriedEnsemble, TriedMember
from .run import advise

__all__ = ["Advice", "TriedEnsemble", "TriedMember", "advise"]
