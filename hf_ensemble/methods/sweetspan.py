"""SweetSpan: its options, and the scoring, filtering and choice of candidate spans.

Reference:
    Xu, Chen, Wu and Zhang, "Hit the Sweet Spot! Span-Level Ensemble for Large Language Models"
    (https://arxiv.org/abs/2409.18583).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from ..config import METHODS, MethodConfig, check_option, check_positive_integer, is_number
from ..errors import ConfigurationError
from ..offers import Offer

SpanScore = Literal["perplexity", "bits_per_byte"]


@dataclass(frozen=True)
class SweetSpanConfig(MethodConfig):
    """SweetSpan: members propose spans of words and score each other's, and the best is kept.

    Reference:
        Xu, Chen, Wu and Zhang, "Hit the Sweet Spot! Span-Level Ensemble for Large Language Models"
        (https://arxiv.org/abs/2409.18583).

    Relations:
        The other methods decide token by token, over distributions. Here, members score whole words, and mixing
        weights are ignored, except that a member of weight 0 takes no part.
    """

    name: ClassVar[str] = "sweetspan"
    decides: ClassVar[Literal["tokens", "spans"]] = "spans"
    likelihoods_ignore_options: ClassVar[bool] = True

    span_length: int = 4
    """Number of words in a span."""

    filter_ratio: float = 10.0
    """λ: a span's highest and lowest scores are dropped if one is more than λ times the other; for three or more
    members.
    """

    score: SpanScore = "perplexity"
    """`"perplexity"` (over each member's own tokens, as in the paper) or `"bits_per_byte"` (which does not depend on how
    finely a member cuts the text)."""

    max_span_tokens: int | None = None
    """Largest number of a member's tokens in one span, including the one that shows its completion. None: 16 times
    `span_length`.
    """

    def __post_init__(self) -> None:
        check_positive_integer("span_length", self.span_length)
        if self.max_span_tokens is not None:
            check_positive_integer("max_span_tokens", self.max_span_tokens)
        if self.max_span_tokens is not None and self.max_span_tokens < self.span_length:
            raise ConfigurationError(
                f"`max_span_tokens` has to be at least `span_length`, but is {self.max_span_tokens} for "
                f"{self.span_length} words."
            )
        ratio, scores = self.filter_ratio, get_args(SpanScore)
        check_option("filter_ratio", ratio, is_number(ratio) and ratio >= 0, "a number of at least 0")
        check_option("score", self.score, self.score in scores, f"one of {', '.join(scores)}")

    @property
    def asks(self) -> frozenset[Offer]:
        """What every member that takes part has to provide."""
        return frozenset({Offer.SPANS})

    @property
    def token_limit(self) -> int:
        """`max_span_tokens`, or its default."""
        return 16 * self.span_length if self.max_span_tokens is None else self.max_span_tokens


METHODS[SweetSpanConfig.name] = SweetSpanConfig


@dataclass(frozen=True)
class SpanChoice:
    """The winning candidate, and the members whose scores did not count.

    Attributes:
        winner: Index of the candidate with the lowest mean.
        filtered: For each candidate, the members whose scores were dropped.
    """

    winner: int
    filtered: tuple[tuple[int, ...], ...]


def span_score(log_prob: float, num_tokens: int, num_bytes: int, score: SpanScore) -> float:
    """Return one member's score of a span; lower is better.

    Args:
        log_prob: Natural logarithm of the span's probability.
        num_tokens: Number of the member's tokens in it, EOS included.
        num_bytes: Number of bytes in it, EOS counted as one.
        score: `"perplexity"` (per token), or `"bits_per_byte"`.
    """
    if score == "bits_per_byte":
        return -log_prob / (math.log(2) * num_bytes)
    exponent = -log_prob / num_tokens
    return math.exp(exponent) if exponent < 700 else math.inf


def choose_span(scores: Sequence[Sequence[float | None]], filter_ratio: float, score: SpanScore) -> SpanChoice:
    """Filter the scores of every candidate, and choose the candidate with the lowest mean of the rest.

    Args:
        scores: For each candidate, one score per member; None for members without a score.
        filter_ratio: With three scores or more, a candidate's highest and lowest perplexities (per byte for
            `"bits_per_byte"`) are dropped if the highest is more than this many times the lowest.
        score: The kind of scores.

    Returns:
        The choice; ties go to the first.
    """
    filtered, means = [], []
    for row in scores:
        # A candidate without scores is the worst.
        order = sorted((value, n) for n, value in enumerate(row) if value is not None) or [(math.inf, -1)]
        low, high = (perplexity(value, score) for value, _ in (order[0], order[-1]))
        # Not `>`: 0 times infinity is NaN, and a ratio of 0 drops infinite scores too.
        is_split = len(order) > 2 and not high <= filter_ratio * low
        kept = [value for value, _ in (order[1:-1] if is_split else order)]
        filtered.append(tuple(sorted(n for _, n in (order[0], order[-1]))) if is_split else ())
        means.append(math.fsum(kept) / len(kept) if all(map(math.isfinite, kept)) else math.inf)
    return SpanChoice(min(range(len(means)), key=means.__getitem__), tuple(filtered))


def perplexity(value: float, score: SpanScore) -> float:
    """Return the perplexity of a score: per token, or per byte for `"bits_per_byte"`.

    Args:
        value: The score.
        score: Its kind.
    """
    if score == "perplexity":
        return value
    return 2.0**value if value < 1000 else math.inf
