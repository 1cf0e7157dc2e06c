"""Several causal language models, with different tokenizers, that decode together as one Hugging Face model."""

import importlib
import sys
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"

if TYPE_CHECKING:
    from .advising import Advice, advise
    from .answers import FuseConfig, MbrConfig, RerankConfig, VoteConfig
    from .answers.fusers import Fuser
    from .answers.judges import PairRanker, RewardModel
    from .answers.record import Answer, Answers, AnswerWriter
    from .choosing.prompt_weights import packllm_weights, weights_from_scores
    from .choosing.selection import select_members
    from .choosing.tuning import tune_method
    from .config import EnsembleConfig, MemberConfig
    from .decoding.ensemble_processor import EnsembleLogitsProcessor
    from .decoding.spans.decoder import SpanDecoderOutput
    from .decoding.spans.stopping_criteria import SpanStoppingCriteria
    from .decoding.speculation.stats import SpeculationRound, SpeculationStats
    from .errors import ConfigurationError, EnsembleError, MemberError, VocabularyError
    from .methods import DeepenConfig, EvaConfig, GacConfig, MinedConfig, SweetSpanConfig, UniteConfig
    from .model import EnsembleForCausalLM
    from .modes.answers import AnswersOutput
    from .recording.decision import Decision, MemberDecision
    from .recording.decisions import Decisions
    from .recording.spans import SpanCandidate, SpanRound
    from .scoring.likelihoods import Likelihoods, Scores
    from .vocabulary.anchors import AnchorTokens
    from .vocabulary.union import UnionVocabulary

_SOURCES = {
    ".advising": ("Advice", "advise"),
    ".answers": ("FuseConfig", "MbrConfig", "RerankConfig", "VoteConfig"),
    ".answers.fusers": ("Fuser",),
    ".answers.judges": ("PairRanker", "RewardModel"),
    ".answers.record": ("Answer", "Answers", "AnswerWriter"),
    ".choosing.prompt_weights": ("packllm_weights", "weights_from_scores"),
    ".choosing.selection": ("select_members",),
    ".choosing.tuning": ("tune_method",),
    ".config": ("EnsembleConfig", "MemberConfig"),
    ".decoding.ensemble_processor": ("EnsembleLogitsProcessor",),
    ".decoding.spans.decoder": ("SpanDecoderOutput",),
    ".decoding.spans.stopping_criteria": ("SpanStoppingCriteria",),
    ".decoding.speculation.stats": ("SpeculationRound", "SpeculationStats"),
    ".errors": ("ConfigurationError", "EnsembleError", "MemberError", "VocabularyError"),
    ".methods": ("DeepenConfig", "EvaConfig", "GacConfig", "MinedConfig", "SweetSpanConfig", "UniteConfig"),
    ".model": ("EnsembleForCausalLM",),
    ".modes.answers": ("AnswersOutput",),
    ".recording.decision": ("Decision", "MemberDecision"),
    ".recording.decisions": ("Decisions",),
    ".recording.spans": ("SpanCandidate", "SpanRound"),
    ".scoring.likelihoods": ("Likelihoods", "Scores"),
    ".vocabulary.anchors": ("AnchorTokens",),
    ".vocabulary.union": ("UnionVocabulary",),
}
"""The modules of the public names. A name is imported on first use, because importing all of them takes seconds."""

_MODULE_OF = {name: module for module, names in _SOURCES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_MODULE_OF[name], __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_name = PurePath(*sys.argv[:1]).name
_is_command = _name in ("hf-ensemble", "hf-ensemble.exe") or (_name == "-m" and "hf_ensemble.cli" in sys.orig_argv)

# The command `hf-ensemble` imports what it needs itself, so its help does not load torch. Every other process
# registers the model type.
if not _is_command:
    from . import registration as registration

__all__ = [
    "Advice",
    "AnchorTokens",
    "Answer",
    "AnswerWriter",
    "Answers",
    "AnswersOutput",
    "ConfigurationError",
    "Decision",
    "Decisions",
    "DeepenConfig",
    "EnsembleConfig",
    "EnsembleError",
    "EnsembleForCausalLM",
    "EnsembleLogitsProcessor",
    "EvaConfig",
    "FuseConfig",
    "Fuser",
    "GacConfig",
    "Likelihoods",
    "MbrConfig",
    "MemberConfig",
    "MemberDecision",
    "MemberError",
    "MinedConfig",
    "PairRanker",
    "RerankConfig",
    "RewardModel",
    "Scores",
    "SpanCandidate",
    "SpanDecoderOutput",
    "SpanRound",
    "SpanStoppingCriteria",
    "SpeculationRound",
    "SpeculationStats",
    "SweetSpanConfig",
    "UnionVocabulary",
    "UniteConfig",
    "VocabularyError",
    "VoteConfig",
    "advise",
    "packllm_weights",
    "select_members",
    "tune_method",
    "weights_from_scores",
]
