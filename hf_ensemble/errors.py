"""The errors of this library: each names what is wrong, the rule, the value and the remedy."""


class EnsembleError(Exception):
    """Base of all errors raised by hf_ensemble on purpose."""


class VocabularyError(EnsembleError, ValueError):
    """A tokenizer, or a set of tokenizers, cannot be turned into token bytes or a union vocabulary."""


class ConfigurationError(EnsembleError, ValueError):
    """An option, or a combination of options, has no meaning for an ensemble."""


class MemberError(EnsembleError, RuntimeError):
    """A member failed while the ensemble was decoding: it raised, gave NaN, died, or ran out of positions.

    Attributes:
        written: What `generate` had written after each prompt when it failed: a text a row, of beams one a beam. Empty
            where nothing was written by `generate`.
    """

    written: tuple[str, ...] = ()
