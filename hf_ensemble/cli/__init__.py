"""The command `hf-ensemble`: ensembles from a shell."""

from .command import main

__all__ = ["main"]
