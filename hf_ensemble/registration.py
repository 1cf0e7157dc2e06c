"""The model type of ensembles, known to the `Auto` classes from the import of the package on."""

import importlib
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM

from . import answers as answers
from . import methods as methods
from .chat import tokenizer as tokenizer
from .config import EnsembleConfig


class _Deferred:
    """Stands for `EnsembleForCausalLM` until something of it is asked for, since what it imports takes a second."""

    config_class = EnsembleConfig

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(".model", __package__).EnsembleForCausalLM, name)


AutoConfig.register(EnsembleConfig.model_type, EnsembleConfig)
AutoModelForCausalLM.register(EnsembleConfig, _Deferred())
