"""Functions that saved ensembles of the tests name by their import paths."""


def first_word(text):
    """What a vote reads out."""
    return text.split()[0] if text.split() else None


def same_length(hypotheses, references):
    """A utility."""
    return [-float(abs(len(h) - len(r))) for h, r in zip(hypotheses, references, strict=True)]


def shortest(prompts, answers):
    """A score."""
    return [-float(len(answer)) for answer in answers]
