"""The errors of this library. Each message names the problem, the rule, the value and the remedy."""


class EnsembleError(Exception):
    """Base of all errors that hf_ensemble raises on purpose."""


class VocabularyError(EnsembleError, ValueError):
    """A tokenizer, or a set of tokenizers, cannot be used for token bytes or a union vocabulary."""


class ConfigurationError(EnsembleError, ValueError):
    """An option, or a combination of options, cannot be used with an ensemble."""


class MemberError(EnsembleError, RuntimeError):
    """A member failed while the ensemble was decoding: it raised, returned NaN, died, or ran out of positions.

    Attributes:
        written: The text that `generate` had written for each row when it failed (with beams, for each beam). Empty if
            `generate` had written nothing.
    """

    written: tuple[str, ...] = ()
