"""Registers the model type of ensembles with the `Auto` classes when the package is imported."""

import importlib
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM

from . import answers as answers
from . import methods as methods
from .chat import tokenizer as tokenizer
from .config import EnsembleConfig


class _Deferred:
    """Stands for `EnsembleForCausalLM` until it is used, because its imports take a second."""

    config_class = EnsembleConfig

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(".model", __package__).EnsembleForCausalLM, name)


AutoConfig.register(EnsembleConfig.model_type, EnsembleConfig)
AutoModelForCausalLM.register(EnsembleConfig, _Deferred())
