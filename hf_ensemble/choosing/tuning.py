"""Searching a method's options on a small development set."""

import dataclasses
import itertools
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers.utils import logging

from ..config import MethodConfig, method_config, normalize_weights
from ..dev_set import DevSet, Metric, answer_all, are_texts
from ..errors import ConfigurationError
from ..model import EnsembleForCausalLM
from ..state_file import (
    StateFile,
    can_be_found_again,
    describe_generation_config,
    describe_method,
)
from ..tables import aligned


@dataclass(frozen=True)
class TuningPoint:
    """One point of the grid.

    Attributes:
        method: The method's configuration.
        weights: The mixing weights, which sum to 1 if the method scales them.
        score: Mean of the metric.
        seconds: How long it ran.
        responses: The ensemble's responses, one per example.
    """

    method: MethodConfig
    weights: tuple[float, ...]
    score: float
    seconds: float
    responses: tuple[str, ...] = field(repr=False)


@dataclass(frozen=True)
class TuningResult:
    """All points of a search; `str()` gives the table, the best first.

    Attributes:
        table: The points, in the order of the grid.
        names: The options that the grid varies.
    """

    table: tuple[TuningPoint, ...]
    names: tuple[str, ...]

    @property
    def best(self) -> TuningPoint:
        """The point with the highest score; of equal points, the first in the grid."""
        return max(self.table, key=lambda point: point.score)

    def __str__(self) -> str:
        """The table, one line a point."""
        rows = [[*self.names, "score", "seconds"]]
        for point in sorted(self.table, key=lambda point: -point.score):
            values = [
                " ".join(f"{w:.3g}" for w in point.weights) if name == "weights" else str(getattr(point.method, name))
                for name in self.names
            ]
            rows.append([*values, f"{point.score:.4f}", f"{point.seconds:.1f}"])
        return aligned(rows)


def tune_method(
    ensemble: EnsembleForCausalLM,
    examples: Iterable[Any],
    metric: str | Metric,
    grid: Mapping[str, Sequence[Any]],
    *,
    max_new_tokens: int,
    method: str | MethodConfig | None = None,
    weights: Sequence[float] | None = None,
    state_file: str | os.PathLike[str] | None = None,
    batch_size: int = 8,
    **generate_options: Any,
) -> TuningResult:
    """Run an ensemble over a development set with every combination of a method's options, and keep the best.

    Decodes greedily unless `generate_options` say otherwise. The ensemble is not changed: use the result as
    `ensemble.generate(..., method=result.best.method, weights=result.best.weights)`.

    With a `state_file`, every finished point becomes a JSON line in it, and a search that was stopped continues where
    it was. A line holds the responses, not the score, so you can change the metric or the references, or extend the
    grid, without running anything again. The file is keyed by the members (their configurations, tokenizers and a
    sample of their weights), the prompts, the options of `generate` and the ensemble's generation config.

    Args:
        ensemble: The ensemble.
        examples: The development set: dictionaries with `prompt` and `reference`, or pairs of them.
        metric: A function of a response and a reference that returns a number, higher is better; or `"exact_match"` or
            `"contains"` (the reference is then a text or a list of texts).
        grid: For each option of the method, the values to try; the key `weights` takes mixing weights (lists of one
            weight per member). All combinations run; the last option varies fastest.
        max_new_tokens: Largest number of ids of a response.
        method: The method, with the options that the grid does not vary. Default: the ensemble's.
        weights: Mixing weights, if the grid has none. Default: the ensemble's.
        state_file: File for finished points. Default: none.
        batch_size: Number of prompts that run together.
        **generate_options: Other options of `generate`.

    Returns:
        The best point and the whole table.

    Raises:
        ConfigurationError: Before anything runs, if the grid, a value in it or the development set is invalid, or
            `state_file` belongs to another search. Later, if the metric does not return a finite number.
    """
    dev_set = DevSet(examples, metric)
    prompts = dev_set.prompts
    base = ensemble.config.method if method is None else method_config(method)
    points = _points(grid, base, ensemble.config.weights if weights is None else weights, len(ensemble.members))
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "batch_size": batch_size, **generate_options}
    state, finished = None, {}
    if state_file is not None:
        for point_method, _ in points:
            point_method.check_saveable(is_for_hub=False)
        settings = {
            # Raised when responses of finished points can change.
            "format": 1,
            "members": [member.description() for member in ensemble.member_views],
            "prompts": prompts,
            "generation config": describe_generation_config(ensemble),
            "options": options,
        }
        state = StateFile(state_file, settings)
        finished = dict(state.read(lambda part: _read_point(part, len(prompts))))

    table = []
    with logging.tqdm(total=len(points) * len(prompts), desc="tuning", unit="prompt") as bar:
        for point_method, point_weights in points:
            name = json.dumps([describe_method(point_method), point_weights])
            # Functions of two points may have the same name.
            if name in finished and can_be_found_again(point_method):
                responses, seconds = finished[name]
                bar.update(len(responses))
            else:
                began = time.perf_counter()
                responses = answer_all(ensemble, prompts, bar, method=point_method, weights=point_weights, **options)
                seconds = time.perf_counter() - began
                finished[name] = (responses, seconds)
                if state is not None:
                    state.add({"point": json.loads(name), "responses": responses, "seconds": round(seconds, 3)})
            score = dev_set.score(responses)
            table.append(TuningPoint(point_method, tuple(point_weights), score, seconds, tuple(responses)))
    return TuningResult(tuple(table), tuple(grid))


def _read_point(part: dict[str, Any], num_prompts: int) -> tuple[str, tuple[list[str], float]]:
    responses = part["responses"]
    if not are_texts(responses) or len(responses) != num_prompts:
        raise ValueError(f"`responses` is not a list of {num_prompts} texts")
    return json.dumps(part["point"]), (responses, float(part["seconds"]))


def _points(
    grid: Mapping[str, Sequence[Any]], base: MethodConfig, weights: Any, num_members: int
) -> list[tuple[MethodConfig, list[float]]]:
    """All combinations, each checked."""
    if not grid:
        raise ConfigurationError("`grid` must name at least one option and its values, but is empty.")
    known = [*(option.name for option in dataclasses.fields(base)), "weights"]
    for name, values in grid.items():
        if name not in known:
            raise ConfigurationError(
                f"method {base.name!r} has no option {name!r} to search. Options: {', '.join(known)}."
            )
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise ConfigurationError(f"`grid[{name!r}]` has to be a list of at least one value, but is {values!r}.")
    points = []
    for combination in itertools.product(*grid.values()):
        changes = dict(zip(grid, combination, strict=True))
        own_weights = changes.pop("weights", weights)
        if own_weights is not None and not isinstance(own_weights, (list, tuple)):
            raise ConfigurationError(
                f"weights have to be lists if they are searched or kept in a search, but are {own_weights!r:.200}."
            )
        method = dataclasses.replace(base, **changes)
        method.check_members(num_members)
        points.append((method, normalize_weights(own_weights, num_members, method.takes_weights_as_given)))
    return points
