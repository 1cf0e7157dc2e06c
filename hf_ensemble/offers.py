"""What can be asked of a member. Kinds of members differ in what they provide."""

from enum import Enum


class Offer(Enum):
    """Something that a member can provide; its value has its name in errors and the remedy if a member cannot."""

    ROWS = ("whole rows of logits", "Use method 'unite', 'sweetspan' or a choice among whole answers")
    ENTRIES = ("its best entries and the logits of others", "Use 'sweetspan' or a choice among whole answers")
    EMBEDDINGS = ("its embeddings", "Use a method that does not compare them, such as 'unite'")
    SPANS = ("spans", "Use a token-level method")
    ANSWERS = ("whole answers", "Use a token-level method")
    LIKELIHOODS = ("the likelihood of a text", "Choose by another criterion")
    PROMPT_LOSS = ("how well it predicts the prompt", "Give weights of another kind")
    GATE = ("a decision alone, as the gate", "Name another member as `gate`")
    PRIMARY = ("the ids of the ensemble, as the primary", "Put another member first")
    DRAFTS = ("drafts, or to check them", "Leave out `speculation`, or pass 'auto'")

    @property
    def what(self) -> str:
        """Its name in errors."""
        return self.value[0]

    @property
    def remedy(self) -> str:
        """What to do instead."""
        return self.value[1]


ALL_OFFERS = frozenset(Offer)
"""What a decoder-only model in this process provides."""
