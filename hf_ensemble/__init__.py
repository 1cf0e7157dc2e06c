"""Several causal language models, with different tokenizers, that decode together as one Hugging Face model."""

from .config import (
    DeepenConfig,
    EnsembleConfig,
    EvaConfig,
    GacConfig,
    MemberConfig,
    MinedConfig,
    SweetSpanConfig,
    UniteConfig,
)
from .decisions import Decision, Decisions, MemberDecision
from .errors import ConfigurationError, EnsembleError, MemberError, VocabularyError
from .generation.likelihoods import Scores
from .generation.logits_process import EnsembleLogitsProcessor
from .generation.span_decoding import SpanCandidate, SpanDecoderOutput, SpanRound
from .generation.speculation import SpeculationRound, SpeculationStats
from .generation.stopping_criteria import SpanStoppingCriteria
from .model import EnsembleForCausalLM
from .selection import select_members
from .tuning import tune_method
from .vocabulary.anchors import AnchorTokens
from .vocabulary.union import UnionVocabulary
from .weights import packllm_weights, weights_from_scores

__version__ = "0.1.0.dev0"

__all__ = [
    "AnchorTokens",
    "ConfigurationError",
    "Decision",
    "Decisions",
    "DeepenConfig",
    "EnsembleConfig",
    "EnsembleError",
    "EnsembleForCausalLM",
    "EnsembleLogitsProcessor",
    "EvaConfig",
    "GacConfig",
    "MemberConfig",
    "MemberDecision",
    "MemberError",
    "MinedConfig",
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
    "packllm_weights",
    "select_members",
    "tune_method",
    "weights_from_scores",
]
