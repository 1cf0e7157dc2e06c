"""What the arguments of several commands mean: an ensemble, its method, prompts, options of `generate`, an output."""

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch

from ..config import MemberConfig, MethodConfig, made, method_class, method_config
from ..errors import ConfigurationError
from ..evaluation import Configuration
from ..files import read_text, whole_file
from ..model import EnsembleForCausalLM
from .parsers import UsageError


def load_ensemble(args: argparse.Namespace, places: Sequence[int] | None = None) -> EnsembleForCausalLM:
    """Load the ensemble that the arguments name: its members, and perhaps a method and weights.

    Args:
        args: The arguments.
        places: Positions of the members in `--members`, if not all are wanted, or in another order.

    Raises:
        UsageError: If a list does not have one value per member.
        ConfigurationError: If a member cannot be loaded.
    """
    places = range(len(args.members)) if places is None else places
    method = read_method(args)
    given = {name: _per_member(name, args, places) for name in ("dtype", "device_map", "revision")}
    options = {name: value for name, value in given.items() if value is not None}
    options |= {"allow_remote": args.allow_remote, "api_key_env": args.member_key_env}
    source: Any = args.members[0]
    if len(args.members) > 1:
        revision = options.pop("revision", None)
        revisions = revision if isinstance(revision, list) else [revision] * len(places)
        paths = [args.members[place] for place in places]
        source = [MemberConfig(path=path, revision=own) for path, own in zip(paths, revisions, strict=True)]
    weights = getattr(args, "weights", None)
    return EnsembleForCausalLM.from_pretrained(source, method=method, weights=weights, **options)


def _per_member(name: str, args: argparse.Namespace, places: Sequence[int]) -> Any:
    values, count = getattr(args, name), len(args.members)
    if values is None or len(values) == 1:
        return values[0] if values else None
    if len(values) != count:
        raise UsageError(
            f"`--{name.replace('_', '-')}` takes one value, or one per member: got {len(values)} for {count} members."
        )
    return [values[place] for place in places]


def read_method(args: argparse.Namespace) -> MethodConfig | None:
    """Return the method with its options; None if the arguments do not name one.

    Raises:
        UsageError: If there is no such method or option, or a value has the wrong type.
    """
    name, pairs = getattr(args, "method", None), getattr(args, "option", [])
    if name is None:
        if pairs:
            raise UsageError(f"`--option {pairs[0]}` needs `--method`, the method that it belongs to.")
        return None
    try:
        kind = method_class(name)
        hints = get_type_hints(kind)
        known = [option.name for option in dataclasses.fields(kind)]
        options = {}
        for key, text in _pairs("option", pairs):
            if key not in known:
                raise UsageError(f"method {name!r} has no option {key!r}. Options: {', '.join(known) or 'none'}.")
            options[key] = _read_value(f"--option {key}", text, hints[key])
        return made(kind, options)
    except ConfigurationError as error:
        raise UsageError(str(error)) from error


def read_configuration(text: str) -> Configuration:
    """Read `METHOD[:KEY=VALUE,…][@WEIGHT,…]`.

    Raises:
        UsageError: If it has another form, or there is no such method or option.
    """
    head, at, listed = text.partition("@")
    name, _, pairs = head.partition(":")
    try:
        method = read_method(argparse.Namespace(method=name, option=pairs.split(",") if pairs else []))
    except UsageError as error:
        hint = " Every comma begins another option." if pairs.count(",") else ""
        raise UsageError(f"{text!r}: {error}{hint}") from error
    try:
        weights = [float(weight) for weight in listed.split(",")] if at else None
    except ValueError:
        raise UsageError(
            f"a method has to be METHOD:KEY=VALUE,…@WEIGHT,…, but the weights in {text!r} are not numbers."
        ) from None
    return Configuration(method, weights)


def check_free(folder: str) -> None:
    """Check that an ensemble can be saved to a folder, before the work for it starts.

    Raises:
        UsageError: If it exists, or cannot be created.
    """
    path = Path(folder)
    if path.exists():
        raise UsageError(f"`--save {folder}` exists already: choose a new folder.")
    above = next(parent for parent in path.absolute().parents if parent.exists())
    if not above.is_dir():
        raise UsageError(f"`--save {folder}` cannot be created: {above} is not a folder.")


def _read_value(argument: str, text: str, hint: Any) -> Any:
    """The value of one option, in its declared type."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if text == "none" and NoneType in kinds:
        return None
    if get_origin(hint) is tuple:
        return tuple(text.split("+"))
    if get_origin(hint) is Mapping:
        return {key: _read_json(value) for key, value in _pairs(argument, text.split("+"))}
    literals = [choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
    if text in literals:
        return text
    kind_of, _, path = text.partition(":")
    for kind in kinds:
        if getattr(kind, "kind", None) == kind_of:
            return kind(path)
    said: dict[Any, list[str]] = {
        NoneType: ["none"],
        bool: ["true", "false"],
        int: ["an integer"],
        float: ["a number"],
    }
    said |= {kind: [f"{kind.kind}:PATH"] for kind in kinds if hasattr(kind, "kind")}
    said |= {kind: list(get_args(kind)) for kind in kinds if get_origin(kind) is Literal}
    for kind in kinds:
        if isinstance(kind, type) and issubclass(kind, MethodConfig):
            return method_config(text)
        if kind in (int, float, str):
            with contextlib.suppress(ValueError):
                return kind(text)
    choices = [choice for kind in kinds for choice in said.get(kind, ())]
    if text not in choices:
        raise UsageError(f"`{argument}` has to be {' or '.join(choices)}, but is {text!r}.")
    return {"none": None, "true": True, "false": False}.get(text, text)


def _pairs(argument: str, pairs: list[str]) -> Iterator[tuple[str, str]]:
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise UsageError(f"`--{argument}` has to be KEY=VALUE, but is {pair!r}.")
        yield key, value


def read_prompts(args: argparse.Namespace) -> list[str]:
    """Return the prompts from the arguments, a file or stdin.

    Raises:
        UsageError: If there is none, one is empty, or there are two sources.
    """
    if args.prompt and args.file:
        raise UsageError("give prompts as arguments or in a `--file`, not both.")
    prompts: list[str] = args.prompt
    if not prompts and (args.file or not sys.stdin.isatty()):
        text = read_text(args.file) if args.file else sys.stdin.read()
        prompts = [prompt for prompt in (text.split("\n") if args.lines else [text.removesuffix("\n")]) if prompt]
    if not prompts:
        raise UsageError("there is no prompt: give one as an argument before `--members`, in a `--file`, or on stdin.")
    if not all(prompts):
        raise UsageError("a prompt is empty: give some text to continue.")
    return prompts


def generate_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of `generate`, including `max_new_tokens`; greedy unless they or the method say otherwise.

    Raises:
        UsageError: If a value cannot be used.
    """
    if args.max_new_tokens < 1:
        raise UsageError(f"`--max-new-tokens` has to be a positive integer, but is {args.max_new_tokens}.")
    sampling = {name: getattr(args, name, None) for name in ("temperature", "top_k", "top_p")}
    options: dict[str, Any] = {name: value for name, value in sampling.items() if value is not None}
    if getattr(args, "sample", False) or options:
        options["do_sample"] = True
    options["max_new_tokens"] = args.max_new_tokens
    if args.stop:
        if "" in args.stop:
            raise UsageError("`--stop` has to be a non-empty text, because every text ends with the empty one.")
        options["stop_strings"] = args.stop
    for key, text in _pairs("set", args.set):
        options[key] = _read_json(text)
    return options


def _read_json(text: str) -> Any:
    """A JSON value, or the text itself if it is not JSON."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


@contextlib.contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Set a seed, and restore the random state of the process afterwards."""
    with torch.random.fork_rng(enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        yield


@contextlib.contextmanager
def output(args: argparse.Namespace) -> Iterator[Callable[[Any, object], None]]:
    """Give a function that writes results as JSON lines or as text: to stdout, or to a file once it is complete."""
    with contextlib.ExitStack() as stack:
        stream = sys.stdout
        if args.output is not None:
            unfinished = stack.enter_context(whole_file(args.output))
            stream = stack.enter_context(unfinished.open("w", encoding="utf-8"))

        def write(value: Any, text: object) -> None:
            print(json.dumps(value, ensure_ascii=False) if args.json else text, file=stream, flush=True)

        yield write
