"""A small development set: its examples, the models' responses, and their scores by a metric."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

from torch import Tensor
from transformers.utils import logging

from .config import check_positive_integer, method_config
from .errors import ConfigurationError
from .members.state import padded_left

Metric = Callable[[str, Any], float]
"""Maps a response and the example's reference to a number; higher is better."""


class DevSet:
    """A development set, and the metric by which responses to it are scored.

    Args:
        examples: Dictionaries with `prompt` and `reference`, or pairs of them.
        metric: A function of a response and a reference that returns a number, or the name of one.

    Attributes:
        prompts: The prompts of the examples.

    Raises:
        ConfigurationError: If there is no example, an example has another form or no prompt, or there is no such
            metric.
    """

    def __init__(self, examples: Iterable[Any], metric: str | Metric):
        self.prompts: list[str] = []
        self._references: list[Any] = []
        for n, example in enumerate(examples):
            try:
                parts = itemgetter("prompt", "reference")(example) if isinstance(example, Mapping) else example
                prompt, reference = parts
            except (KeyError, TypeError, ValueError) as error:
                raise ConfigurationError(
                    f"example {n} of the development set has to be a dictionary with 'prompt' and 'reference' or a "
                    f"pair of them, but is {example!r:.200}."
                ) from error
            self.prompts.append(read_prompt(prompt, n))
            self._references.append(reference)
        if not self.prompts:
            raise ConfigurationError("the development set is empty: give at least one example.")
        if not callable(metric) and metric not in METRICS:
            raise ConfigurationError(
                f"`metric` has to be a function of a response and a reference, or one of {', '.join(METRICS)}, but is "
                f"{metric!r}."
            )
        self._metric = metric if callable(metric) else METRICS[metric]

    def score(self, responses: Sequence[str]) -> float:
        """Return the mean of the metric over the responses, one per example.

        Raises:
            ConfigurationError: If the metric returns anything but a finite number.
        """
        values = []
        for n, (response, reference) in enumerate(zip(responses, self._references, strict=True)):
            value = self._metric(response, reference)
            try:
                number = math.nan if isinstance(value, str) else float(value)
            except (TypeError, ValueError):
                number = math.nan
            if not math.isfinite(number):
                raise ConfigurationError(
                    f"the metric has to return a finite number, but returned {value!r:.200} for example {n} (response "
                    f"{response!r:.200})."
                )
            values.append(number)
        return math.fsum(values) / len(values)


def read_prompt(prompt: Any, place: int) -> str:
    """Check that a prompt is a non-empty text.

    Args:
        prompt: The prompt.
        place: Its index in a list, for the error.

    Raises:
        ConfigurationError: If it is not a text, or is empty.
    """
    if not isinstance(prompt, str) or not prompt:
        raise ConfigurationError(f"prompt {place} has to be a non-empty text, but is {prompt!r:.200}.")
    return prompt


def exact_match(response: str, reference: str | Sequence[str]) -> float:
    """Return 1 if the response is the reference or one of them, ignoring case and surrounding white space; else 0.

    Args:
        response: What was written.
        reference: A text, or a list of texts.

    Raises:
        ConfigurationError: If the reference is neither.
    """
    return float(_plain(response) in _plain_references(reference))


def contains(response: str, reference: str | Sequence[str]) -> float:
    """Return 1 if the response contains the reference or one of them, ignoring case; else 0.

    Args:
        response: What was written.
        reference: A text, or a list of texts.

    Raises:
        ConfigurationError: If the reference is neither.
    """
    return float(any(text in _plain(response) for text in _plain_references(reference)))


METRICS: dict[str, Metric] = {"exact_match": exact_match, "contains": contains}


def _plain(text: str) -> str:
    return text.strip().casefold()


def _plain_references(reference: str | Sequence[str]) -> list[str]:
    references = [reference] if isinstance(reference, str) else reference
    if not are_texts(references):
        raise ConfigurationError(
            f"this metric compares with a text or a list of texts, but the reference is {reference!r:.200}."
        )
    return [_plain(text) for text in references]


def are_texts(values: Any) -> bool:
    """Whether a value is a list of texts."""
    return isinstance(values, (list, tuple)) and all(isinstance(value, str) for value in values)


def mean_lengths_of(responses: Sequence[Sequence[str]] | None, count: int, each: str) -> Sequence[float | None]:
    """Return the mean number of characters of responses, without white space at their ends.

    Args:
        responses: The responses of each writer; None if lengths are not compared.
        count: Number of writers.
        each: The word for a writer in errors.

    Raises:
        ConfigurationError: If there is not one list of texts per writer, or one is empty.
    """
    if responses is None:
        return [None] * count
    if not all(are_texts(texts) for texts in responses):
        raise ConfigurationError(f"`responses` must have a list of texts for each {each}.")
    if len(responses) != count or not all(map(len, responses)):
        raise ConfigurationError(
            f"`responses` must have one non-empty list per {each}: got {[*map(len, responses)]} responses for {count} "
            f"{each}s."
        )
    return [sum(len(text.strip()) for text in texts) / len(texts) for texts in responses]


def run_batches(
    ensemble: Any, prompts: Sequence[str], *, max_new_tokens: int, batch_size: int, **options: Any
) -> Iterator[list[str]]:
    """Let an ensemble answer prompts in batches padded on the left, greedily unless options say otherwise.

    Args:
        ensemble: An `EnsembleForCausalLM`.
        prompts: The prompts.
        max_new_tokens: Largest number of ids of a response.
        batch_size: Number of prompts that run together.
        **options: Other options of `generate`.

    Yields:
        The responses to each batch, without the prompts.

    Raises:
        ConfigurationError: If a number is not positive, or the options do not give one text per prompt.
    """
    check_positive_integer("max_new_tokens", max_new_tokens)
    check_positive_integer("batch_size", batch_size)
    options = with_greedy(ensemble, {"max_new_tokens": max_new_tokens, **options})
    tokenizer, device = ensemble.tokenizer, ensemble.member_views[0].device
    for start in range(0, len(prompts), batch_size):
        rows = tokenizer(list(prompts[start : start + batch_size]))["input_ids"]
        ids, mask = padded_left(rows, tokenizer.pad_token_id or 0)
        output = ensemble.generate(input_ids=ids.to(device), attention_mask=mask.to(device), **options)
        if not isinstance(output, Tensor) or len(output) != len(rows):
            raise ConfigurationError(
                "the options of `generate` have to give one text per prompt: leave out `num_return_sequences` and "
                "`return_dict_in_generate`."
            )
        yield tokenizer.batch_decode(output[:, ids.shape[1] :], skip_special_tokens=True)


def with_greedy(ensemble: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `generate`, greedy unless they or the method say otherwise.

    Args:
        ensemble: An `EnsembleForCausalLM`.
        options: The options, perhaps with a `method`.
    """
    method = options.get("method")
    config = ensemble.config.method if method is None else method_config(method)
    return {"do_sample": False, **config.generate_options_beside(None), **options}


def answer_all(ensemble: Any, prompts: Sequence[str], bar: Any, **options: Any) -> list[str]:
    """Let an ensemble answer prompts as in `run_batches`, and move a progress bar on.

    Args:
        ensemble: An `EnsembleForCausalLM`.
        prompts: The prompts.
        bar: The bar, which counts prompts.
        **options: Other options of `run_batches`.
    """
    responses: list[str] = []
    for batch in run_batches(ensemble, prompts, **options):
        responses += batch
        bar.update(len(batch))
    return responses


def run_members(ensemble: Any, prompts: Sequence[str], **options: Any) -> list[list[str]]:
    """Let every member alone answer the prompts, greedily unless options say otherwise.

    Args:
        ensemble: An `EnsembleForCausalLM`.
        prompts: The prompts.
        **options: `max_new_tokens`, `batch_size` and other options, as in `run_batches`.

    Returns:
        For each member its response to each prompt.

    Raises:
        ConfigurationError: If `max_new_tokens` is missing, or an option names ids of one tokenizer.
    """
    if options.get("max_new_tokens") is None:
        raise ConfigurationError("give `max_new_tokens` to run the members.")
    refuse_ids_of_one(options)
    count = len(ensemble.members)
    with logging.tqdm(total=count * len(prompts), desc="running members", unit="prompt") as bar:
        return [answer_all(ensemble.alone(index), prompts, bar, **options) for index in range(count)]


def refuse_ids_of_one(options: Mapping[str, Any]) -> None:
    """Refuse options of `generate` that cannot apply to several members, each running alone.

    Raises:
        ConfigurationError: If an option names ids of one tokenizer.
    """
    if "eos_token_id" in options:
        raise ConfigurationError(
            "`eos_token_id` cannot be used here, because each tokenizer has its own ids. Use `stop_strings`, or add "
            "the ids to a member with `MemberConfig(eos_token_id=...)`."
        )
