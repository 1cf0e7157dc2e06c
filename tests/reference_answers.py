"""The plain reference for whole answers (section 9): from what was written to what is returned, one function a rule.

Writing the answers, scoring them under the members and running a model that fuses them are not here: their results are
given. Nothing is imported that takes seconds, and no code is shared with the library.

Where the semantics leave something open:

- Numbers that differ by rounding only (relatively by less than 1e-9) are a tie: three times 1/9 is 1/3.
- "Earliest": all samples of the first member come before those of the second, and methods follow in the order named.
- A written answer is cut before equal ones are put together. Of an answer that is too long, what its first ids write is
  kept, as in stock generation, and less where that, encoded by itself, needs more ids again. A begun character is cut
  off only where the answer has not ended. Log-probabilities stay those of what was written.
- What a token-level method writes are the primary's ids, so they count and are returned like the primary's own. Own
  ids that end in a begun character lose the last of them.
- Where one writer ended by a control token and another by a stop string, the earliest decides whether there is an EOS.
- A method counts 1/N with N all members, those of weight 0 too.
- The text of an answer has U+FFFD for what is no UTF-8. In the ids, one stands for each character that the primary
  cannot write, and for each byte that is part of none.
- A group of an extractor's last match that took no part is no answer. Candidates without an answer rank after all
  others, in order. Where the primary wrote nothing, its first candidate is the earliest of all.
- chrF sees no white space, so an answer of nothing else is an empty one. Against aggregated references, an empty
  answer has 100 for the weight of the empty references, and those count as references without n-grams.
- A utility is called once, with one pair a place in its two lists, `h` in the first and `r` in the second.
- An answer without a byte that has not ended has no bits per byte and ranks last.
- "Max logits" is the published one: the logit counts for the one that is read first and against the other.
- As many answers "were written" as there are writers, samples of one member counted one by one; all places that a text
  fills have the same ids.
"""

import codecs
import hashlib
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

REPLACEMENT = "\ufffd"
PRIMARY = 0


class Primary(Protocol):
    """What is used of `tests.reference.ReferenceMember`."""

    token_bytes: dict[int, bytes]
    control_eos: list[int]

    def encode(self, data: bytes) -> list[int] | None: ...


class Written(NamedTuple):
    """An answer as one writer wrote it."""

    writer: int | str
    """A member's index, or a method's name."""
    number: int
    """Which of its answers: 0 is the first."""
    data: bytes
    end: str | None
    """`"eos"`: by a control token; `"text"`: by a stop string or an end id that writes text; None: it has not ended."""
    ids: tuple[int, ...] = ()
    """The ids that were generated, the end id included."""
    log_prob: float = 0.0


@dataclass
class Candidate:
    data: bytes
    ended: bool
    writers: list[Written]
    """In order; never none."""
    weights: list[float]
    """By writer; those of all candidates sum to 1."""

    @property
    def weight(self) -> float:
        return math.fsum(self.weights)

    @property
    def text(self) -> str:
        return self.data.decode(errors="replace")

    @property
    def has_eos(self) -> bool:
        return self.writers[0].end == "eos"


# --- Seeds ----------------------------------------------------------------------------------------------------------


def seed_of(call_seed: int, name: str, index: int, prompt: bytes, num_earlier: int, number: int) -> int:
    """The seed of one candidate's generator.

    Fixed is what it depends on. Open are the hash, how its parts are told apart and put in order, how many bits are
    kept, what a member's name and the prompt bytes of a conversation are, and what a method's seed is; so another
    implementation has other seeds, with the same equalities among them.
    """
    digest = hashlib.sha256()
    for part in (str(call_seed), name, str(index), prompt, str(num_earlier), str(number)):
        data = part if isinstance(part, bytes) else part.encode()
        digest.update(len(data).to_bytes(8, "big") + data)
    return int.from_bytes(digest.digest()[:8], "big") >> 1


def seeds(
    call_seed: int, members: Mapping[int, str], prompts: Sequence[bytes], num_candidates: int
) -> dict[tuple[int, int, int], int]:
    """The seeds of a call by row, member and number, given the names of the members that write, by index."""
    found = {}
    for row, prompt in enumerate(prompts):
        num_earlier = list(prompts[:row]).count(prompt)
        for index, name in members.items():
            for number in range(num_candidates):
                found[row, index, number] = seed_of(call_seed, name, index, prompt, num_earlier, number)
    return found


# --- Candidates -----------------------------------------------------------------------------------------------------


def in_order(written: Sequence[Written], methods: Sequence[str] = ()) -> list[Written]:
    """Members before methods, samples in number order."""

    def place(answer: Written) -> tuple[bool, int, int]:
        is_method = isinstance(answer.writer, str)
        return is_method, methods.index(answer.writer) if is_method else answer.writer, answer.number

    return sorted(written, key=place)


def cut(answer: Written, primary: Primary, max_new_tokens: int) -> Written:
    """What fits this many of the primary's ids, an EOS included; what had to be cut has not ended."""
    while True:
        if answer.end is None:
            answer = answer._replace(data=_without_begun(answer.data))
        ids = ids_of(answer, primary)
        if len(ids) <= max_new_tokens:
            return answer
        kept = _without_begun(b"".join(primary.token_bytes.get(i, b"") for i in ids[:max_new_tokens]))
        answer = answer._replace(data=_bytes_of(_chars(answer.data)[: len(_chars(kept))]), end=None)


def merge(
    written: Sequence[Written], weights: Sequence[float], num_candidates: int = 1, methods: Sequence[str] = ()
) -> list[Candidate]:
    """Make one candidate of equal texts that agree in having ended, in the order of their first writers."""
    shares = []
    for answer in in_order(written, methods):
        is_method = isinstance(answer.writer, str)
        shares.append(1 / len(weights) if is_method else weights[answer.writer] / sum(weights) / num_candidates)
    total = math.fsum(shares)

    candidates: dict[tuple[bytes, bool], Candidate] = {}
    for answer, share in zip(in_order(written, methods), shares, strict=True):
        ended = answer.end is not None
        candidate = candidates.setdefault((answer.data, ended), Candidate(answer.data, ended, [], []))
        candidate.writers.append(answer)
        candidate.weights.append(share / total)
    return list(candidates.values())


def _without_begun(data: bytes) -> bytes:
    """The bytes without those that begin a character at their end."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    begun, _ = decoder.getstate()
    return data[: len(data) - len(begun)]


def _chars(data: bytes) -> str:
    """The characters, with a stand-in for each byte that is part of none."""
    return data.decode(errors="surrogateescape")


def _bytes_of(chars: str) -> bytes:
    return chars.encode(errors="surrogateescape")


# --- Ids ------------------------------------------------------------------------------------------------------------


def ids_returned(candidate: Candidate, primary: Primary) -> list[int]:
    """The primary's own ids if it is a writer, else its encoding of the text and its first EOS."""
    own = [answer for answer in candidate.writers if _wrote_primary_ids(answer)]
    return ids_of((own or candidate.writers)[0], primary)


def ids_of(answer: Written, primary: Primary) -> list[int]:
    """The primary's ids for what one writer wrote, which may have been cut since."""
    if _wrote_primary_ids(answer):
        for length in range(len(answer.ids), -1, -1):
            ids = list(answer.ids[:length])
            if b"".join(primary.token_bytes.get(i, b"") for i in ids) == answer.data:
                return ids
    eos = primary.control_eos[:1] if answer.end == "eos" else []
    return [*encode(answer.data, primary), *eos]


def _wrote_primary_ids(answer: Written) -> bool:
    return answer.writer == PRIMARY or isinstance(answer.writer, str)


def encode(data: bytes, primary: Primary) -> list[int]:
    """The primary's ids for a text, U+FFFD standing for what it cannot write."""
    ids = primary.encode(data)
    if ids is None:
        shown = [char if primary.encode(_bytes_of(char)) is not None else REPLACEMENT for char in _chars(data)]
        ids = primary.encode(_bytes_of("".join(shown)))
    if ids is None:
        raise ValueError("The primary cannot write U+FFFD.")
    return ids


# --- Ranking --------------------------------------------------------------------------------------------------------


class Choice(NamedTuple):
    ranking: list[int]
    """The candidates, best first."""
    scores: list[float | None]
    """By candidate."""


def is_tie(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12)


def best_first(scores: Sequence[float]) -> list[int]:
    """The highest, then the highest of the rest, and so on; of a tie the earliest."""
    ranking: list[int] = []
    left = list(range(len(scores)))
    while left:
        highest = max(scores[index] for index in left)
        ranking.append(next(index for index in left if is_tie(scores[index], highest)))
        left.remove(ranking[-1])
    return ranking


def places(candidates: Sequence[Candidate], ranking: Sequence[int], num_return_sequences: int = 1) -> list[int]:
    """The candidates that are returned: each fills as many places as it has writers.

    Raises:
        ValueError: If more are asked for than were written.
    """
    filled = [index for index in ranking for _ in candidates[index].writers]
    if num_return_sequences > len(filled):
        raise ValueError(f"{num_return_sequences} answers cannot be returned: {len(filled)} were written.")
    return filled[:num_return_sequences]


# --- Vote -----------------------------------------------------------------------------------------------------------

Extractor = Callable[[str], str | None] | str | re.Pattern | None


def answer_in(text: str, extract: Extractor = None) -> str | None:
    """What a text answers; None if nothing."""
    if extract is None:
        return text.strip()
    if callable(extract):
        answer = extract(text)
        if answer is not None and not isinstance(answer, str):
            raise TypeError(f"An extractor returns a string or None, not {answer!r}.")
        return answer
    found = None
    for match in re.finditer(extract, text):
        found = match.group(1) if match.re.groups else match.group()
    return found


def vote(candidates: Sequence[Candidate], extract: Extractor = None) -> Choice:
    """The answer of the highest weight; in a tie the primary's, else the earliest.

    The scores are the weights of the candidates' answers, None for a candidate without one. If all are None, the
    choice is the primary's first candidate, and a warning is due.
    """
    answers = [answer_in(candidate.text, extract) for candidate in candidates]
    groups: dict[str, list[int]] = {}
    for index, answer in enumerate(answers):
        if answer is not None:
            groups.setdefault(answer, []).append(index)
    weights = {
        answer: math.fsum(weight for index in group for weight in candidates[index].weights)
        for answer, group in groups.items()
    }
    ranking: list[int] = []
    left = list(groups)
    while left:
        highest = max(weights[answer] for answer in left)
        tied = [answer for answer in left if is_tie(weights[answer], highest)]
        by_primary = [answer for answer in tied if any(_is_primarys(candidates[index]) for index in groups[answer])]
        winner = (by_primary or tied)[0]
        ranking += groups[winner]
        left.remove(winner)

    silent = [index for index, answer in enumerate(answers) if answer is None]
    if not ranking:
        silent.sort(key=lambda index: not _is_primarys(candidates[index]))
    return Choice([*ranking, *silent], [None if answer is None else weights[answer] for answer in answers])


def _is_primarys(candidate: Candidate) -> bool:
    return any(answer.writer == PRIMARY for answer in candidate.writers)


# --- Minimum Bayes risk ---------------------------------------------------------------------------------------------

ORDER = 6
BETA = 2


def ngrams(text: str, order: int) -> Counter[str]:
    """The character n-grams of one order, white space left out."""
    chars = "".join(text.split())
    return Counter(chars[at : at + order] for at in range(len(chars) - order + 1))


def is_empty(text: str) -> bool:
    return not text.split()


def chrf(hypothesis: str, reference: str) -> float:
    """The sentence chrF of sacrebleu, from 0 to 100, but 100 for two empty texts."""
    if is_empty(hypothesis) and is_empty(reference):
        return 100.0
    precisions, recalls = [], []
    for order in range(1, ORDER + 1):
        ours, theirs = ngrams(hypothesis, order), ngrams(reference, order)
        if ours and theirs:
            matches = sum(min(count, theirs[ngram]) for ngram, count in ours.items())
            precisions.append(matches / sum(ours.values()))
            recalls.append(matches / sum(theirs.values()))
    return _f_score(precisions, recalls)


def aggregated_chrf(hypothesis: str, references: Sequence[str], weights: Sequence[float]) -> float:
    """The same against the average n-gram counts of all references.

    NOTE: Vamvas and Sennrich (2024), https://arxiv.org/abs/2402.04251, average uniformly; here the weights, which sum
    to 1, are those of the candidates.
    """
    if is_empty(hypothesis):
        return 100 * math.fsum(w for text, w in zip(references, weights, strict=True) if is_empty(text))
    precisions, recalls = [], []
    for order in range(1, ORDER + 1):
        ours = ngrams(hypothesis, order)
        theirs: dict[str, float] = {}
        for text, weight in zip(references, weights, strict=True):
            for ngram, count in ngrams(text, order).items():
                theirs[ngram] = theirs.get(ngram, 0.0) + weight * count
        if ours and theirs:
            matches = math.fsum(min(count, theirs.get(ngram, 0.0)) for ngram, count in ours.items())
            precisions.append(matches / sum(ours.values()))
            recalls.append(matches / math.fsum(theirs.values()))
    return _f_score(precisions, recalls)


def _f_score(precisions: Sequence[float], recalls: Sequence[float]) -> float:
    """Of the averages over the orders that both texts have."""
    if not any(precisions):
        return 0.0
    precision, recall = sum(precisions) / len(precisions), sum(recalls) / len(recalls)
    return 100 * (1 + BETA**2) * precision * recall / (BETA**2 * precision + recall)


Utility = Callable[[list[str], list[str]], Sequence[float]]


def mbr(candidates: Sequence[Candidate], utility: str | Utility = "chrf", aggregate: bool = False) -> Choice:
    """The highest expected utility over all candidates, itself included; of a tie the earliest."""
    texts = [candidate.text for candidate in candidates]
    weights = [candidate.weight for candidate in candidates]
    if aggregate:
        if utility != "chrf":
            raise ValueError("Only chrF has an aggregated form.")
        scores = [aggregated_chrf(text, texts, weights) for text in texts]
        return Choice(best_first(scores), scores)

    hypotheses = [text for text in texts for _ in texts]
    references = [text for _ in texts for text in texts]
    if callable(utility):
        utilities = [float(value) for value in utility(hypotheses, references)]
    else:
        utilities = [chrf(h, r) for h, r in zip(hypotheses, references, strict=True)]
    if len(utilities) != len(hypotheses) or any(math.isnan(value) for value in utilities):
        raise ValueError("A utility gives one number for each pair of texts.")
    scores = []
    for index in range(len(texts)):
        row = utilities[index * len(texts) : (index + 1) * len(texts)]
        scores.append(math.fsum(weight * value for weight, value in zip(weights, row, strict=True)))
    return Choice(best_first(scores), scores)


# --- Rerank ---------------------------------------------------------------------------------------------------------


def bits_per_byte(candidate: Candidate, log_prob: float) -> float:
    """Of a whole answer under one member, given the natural log-probability of its text and, if it has one, its EOS.

    The EOS counts as one byte.
    """
    num_bytes = len(candidate.data) + candidate.has_eos
    return -log_prob / math.log(2) / num_bytes if num_bytes else math.inf


def rerank_by_likelihood(
    candidates: Sequence[Candidate], log_probs: Sequence[Sequence[float | None]], weights: Sequence[float]
) -> Choice:
    """The lowest plain mean of bits per byte over the members of weight above 0; `log_probs` by candidate and member."""
    scores = []
    for candidate, by_member in zip(candidates, log_probs, strict=True):
        own = [bits_per_byte(candidate, p) for p, weight in zip(by_member, weights, strict=True) if weight > 0]
        scores.append(sum(own) / len(own))
    return Choice(best_first([-score for score in scores]), scores)


def rerank_by_reward(rewards: Sequence[float]) -> Choice:
    """The highest reward."""
    return Choice(best_first(rewards), list(rewards))


def rerank_by_pairs(logits: Sequence[Sequence[float]]) -> Choice:
    """The highest sum of logits against all others; `logits[i][j]` is that i, read first, is better than j."""
    scores = []
    for i in range(len(logits)):
        scores.append(math.fsum(logits[i][j] - logits[j][i] for j in range(len(logits)) if j != i))
    return Choice(best_first(scores), scores)
