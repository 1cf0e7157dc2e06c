"""Several causal language models, with different tokenizers, that decode together as one Hugging Face model."""

from .choosing.prompt_weights import packllm_weights, weights_from_scores
from .choosing.selection import select_members
from .choosing.tuning import tune_method
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
from .decoding.hooks import EnsembleLogitsProcessor
from .decoding.spans.decoder import SpanDecoderOutput
from .decoding.spans.stopping_criteria import SpanStoppingCriteria
from .decoding.speculation.decoder import SpeculationRound, SpeculationStats
from .errors import ConfigurationError, EnsembleError, MemberError, VocabularyError
from .model import EnsembleForCausalLM
from .recording.decision import Decision, MemberDecision
from .recording.decisions import Decisions
from .recording.spans import SpanCandidate, SpanRound
from .scoring.likelihoods import Scores
from .vocabulary.anchors import AnchorTokens
from .vocabulary.union import UnionVocabulary

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
