"""Searching a method's options on a small development set."""

import dataclasses
import hashlib
import itertools
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from .config import MethodConfig, method_config, normalize_weights
from .development import Metric, are_texts, read_examples, read_metric, run_batches, score_responses
from .errors import ConfigurationError
from .member import Member
from .model import EnsembleForCausalLM
from .tables import aligned

_FORMAT = 1
"""Part of every line of a state file: raise it when responses of finished points can change."""

_NUM_PROBES = 64


@dataclass(frozen=True)
class TuningPoint:
    """One point of the grid.

    Attributes:
        method: The method's configuration.
        weights: The mixing weights, of sum 1 where the method scales them.
        score: Mean of the metric.
        seconds: How long it ran.
        responses: What the ensemble wrote, one response an example.
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
        names: What the grid varies.
    """

    table: tuple[TuningPoint, ...]
    names: tuple[str, ...]

    @property
    def best(self) -> TuningPoint:
        """The point of the highest score; of equals, the first of the grid."""
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

    Decodes greedily unless `generate_options` say other. The ensemble is not changed: use the result as
    `ensemble.generate(..., method=result.best.method, weights=result.best.weights)`.

    With a `state_file`, every finished point is one JSON line in it, and a search that was stopped goes on where it
    was. A line holds the responses, not the score: a metric or references may change, and a grid may grow, without
    anything running again. It is keyed by the members (their configurations, tokenizers and a sample of their
    weights), the prompts, the options of `generate` and the ensemble's generation config.

    Args:
        ensemble: The ensemble.
        examples: The development set: dictionaries with `prompt` and `reference`, or pairs of them.
        metric: A function of a response and a reference that gives a number, the higher the better; or
            `"exact_match"` or `"contains"` (the reference is then a text or a list of texts).
        grid: For each option of the method the values to try, and with the key `weights` mixing weights (lists of one
            weight a member). All combinations run, the last option varying fastest.
        max_new_tokens: Most ids of a response.
        method: The method, with the options that the grid does not vary. Default: the ensemble's.
        weights: Mixing weights where the grid has none. Default: the ensemble's.
        state_file: Where finished points are kept. Default: nowhere.
        batch_size: Number of prompts that run together.
        **generate_options: Other options of `generate`.

    Returns:
        The best point and the whole table.

    Raises:
        ConfigurationError: Before anything runs, if the grid, a value in it or the development set is no good, or
            `state_file` is of another search. Later, if the metric gives no finite number.
    """
    read = read_examples(examples)
    measure = read_metric(metric)
    base = ensemble.config.method if method is None else method_config(method)
    base_weights = ensemble.config.weights if weights is None else weights
    points = _points(grid, base, base_weights, len(ensemble.members))
    finished: dict[str, dict[str, Any]] = {}
    search: dict[str, str] = {}
    path = None if state_file is None else Path(state_file)
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise ConfigurationError(
            f"`state_file` {path} cannot be written: it is a folder, or lies in none that exists."
        )
    prompts = [example.prompt for example in read]
    if path is not None:
        options = {"max_new_tokens": max_new_tokens, "batch_size": batch_size, **generate_options}
        search = _search_key(ensemble, prompts, options)
        finished = _read_state(path, search, len(read))

    table = []
    with logging.tqdm(total=len(points) * len(read), desc="tuning", unit="prompt") as bar:
        for point_method, point_weights in points:
            name = json.dumps([point_method.to_dict(), point_weights])
            if name in finished:
                responses, seconds = finished[name]["responses"], finished[name]["seconds"]
                bar.update(len(responses))
            else:
                responses = []
                began = time.perf_counter()
                batches = run_batches(
                    ensemble,
                    ensemble.tokenizer,
                    prompts,
                    max_new_tokens,
                    batch_size,
                    {**generate_options, "method": point_method, "weights": point_weights},
                )
                for batch in batches:
                    responses += batch
                    bar.update(len(batch))
                seconds = time.perf_counter() - began
                finished[name] = {"responses": responses, "seconds": seconds}
                if path is not None:
                    _add_line(path, search, name, responses, seconds)
            score = score_responses(responses, read, measure)
            table.append(TuningPoint(point_method, tuple(point_weights), score, seconds, tuple(responses)))
    return TuningResult(tuple(table), tuple(grid))


def _points(
    grid: Mapping[str, Sequence[Any]], base: MethodConfig, weights: Any, num_members: int
) -> list[tuple[MethodConfig, list[float]]]:
    """All combinations, each checked."""
    if not grid:
        raise ConfigurationError("`grid` must name at least one option and its values, but is empty.")
    known = [option.name for option in dataclasses.fields(base)]
    for name, values in grid.items():
        if name not in [*known, "weights"]:
            raise ConfigurationError(
                f"method {base.name!r} has no option {name!r} to search. Options: {', '.join([*known, 'weights'])}."
            )
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise ConfigurationError(f"`grid[{name!r}]` has to be a list of at least one value, but is {values!r}.")
    points = []
    for combination in itertools.product(*grid.values()):
        changes = dict(zip(grid, combination, strict=True))
        own_weights = changes.pop("weights", weights)
        if own_weights is not None and not isinstance(own_weights, (list, tuple)):
            raise ConfigurationError(
                f"weights that are searched, or stay the same in a search, have to be lists, but are {own_weights!r:.200}."
            )
        method = dataclasses.replace(base, **changes)
        method.check_members(num_members)
        points.append((method, normalize_weights(own_weights, num_members, method.takes_weights_as_given)))
    return points


def _search_key(ensemble: EnsembleForCausalLM, prompts: Sequence[str], options: dict[str, Any]) -> dict[str, str]:
    """A short hash of each thing that all responses of a search depend on."""
    settings = ensemble.generation_config.to_dict()
    settings.pop("transformers_version", None)
    parts: dict[str, Any] = {
        "format": _FORMAT,
        "members": [_describe(member) for member in ensemble._members],
        "prompts": list(prompts),
        "generation config": settings,
        "options": options,
    }
    key = {}
    for name, part in parts.items():
        try:
            text = json.dumps(part, sort_keys=True)
        except TypeError as error:
            raise ConfigurationError(
                f"the {name} of this search cannot be written down, so that a state file could not be told from another "
                f"search's: {error}. Leave out `state_file`, or give values that JSON has."
            ) from error
        key[name] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return key


def _describe(member: Member) -> list[Any]:
    """What makes a member another one: architecture, tokenizer, EOS ids, and a few weights of every tensor."""
    config = member.model.config.to_json_string(use_diff=True)
    digest = hashlib.sha256()
    for name, weight in sorted(member.model.named_parameters()):
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        if weight.device.type != "meta" and weight.numel():
            flat = weight.detach().reshape(-1)
            sample = flat[:: max(1, len(flat) // _NUM_PROBES)][:_NUM_PROBES]
            digest.update(json.dumps(sample.to(torch.float64).tolist()).encode())
    description = json.loads(config)
    for key in ("transformers_version", "_name_or_path"):
        description.pop(key, None)
    return [description, member.encoder.token_bytes.fingerprint, member.eos_token_ids, digest.hexdigest()]


def _read_state(path: Path, search: dict[str, str], num_prompts: int) -> dict[str, dict[str, Any]]:
    """Read finished points; what a search that was killed left of a line is cut off the file."""
    if not path.exists():
        return {}
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    finished = {}
    for n, line in enumerate(whole.splitlines(), start=1):
        try:
            entry = json.loads(line)
            key, point = dict(entry["search"]), json.dumps(entry["point"])
            float(entry["seconds"])
            # Of another search there may be another number, which is said below.
            if not are_texts(entry["responses"]) or (key == search and len(entry["responses"]) != num_prompts):
                raise ValueError(f"`responses` is no list of {num_prompts} texts")
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(
                f"`state_file` {path} is no file of a search: line {n} cannot be read ({error!r}). Name another file."
            ) from error
        if key != search:
            differing = [name for name in search if key.get(name) != search[name]]
            raise ConfigurationError(
                f"`state_file` {path} is of another search: other {', '.join(differing)}. Name another file, or delete "
                "this one."
            )
        finished[point] = entry
    if len(whole) < len(data):
        if not whole and not data.startswith(b'{"search":'):
            raise ConfigurationError(f"`state_file` {path} is no file of a search. Name another file.")
        os.truncate(path, len(whole))
    return finished


def _add_line(path: Path, search: dict[str, str], point: str, responses: list[str], seconds: float) -> None:
    line = {"search": search, "point": json.loads(point), "responses": responses, "seconds": round(seconds, 3)}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
