"""Checks of the small files of a model or a saved ensemble, before they are used: they may be hostile."""

import json
import os
import posixpath
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from ..config import MOST_MEMBERS
from ..errors import ConfigurationError

_MOST_BYTES = 64 << 20
_MOST_DEPTH = 64

LAYERS = re.compile(r"(^|_)(n_layers?|num_layers|num_\w*_layers|encoder_layers|decoder_layers)$")
"""Names of a number of layers in a configuration."""

_MOST = (
    (LAYERS, 10_000),
    (re.compile(r"experts$"), 100_000),
    (re.compile(r"^num_(beams|beam_groups|return_sequences)$"), 10_000),
    (re.compile(r"(^|_)vocab_size$"), 2**31 - 1),
)
"""Limits of counts in a configuration; `transformers` creates so many objects before it reads a weight."""

_JSON_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "adapter_config.json",
    "model.safetensors.index.json",
)

_READ = (*_JSON_FILES, "*.jinja", "additional_chat_templates/*.jinja", "tokenizer.json", "*.safetensors")
"""Names of the files that are read from a folder."""

_REMEDY = "Get it again from a source that you trust, or leave the member out"


def check_folder(name: str, folder: Path, within: Path | None = None) -> None:
    """Check the small files of a folder from which a model, tokenizer or ensemble will be read.

    Args:
        name: Name of the member, for errors.
        folder: The folder. If it does not exist, nothing is checked.
        within: The folder that links must not leave. None: links may lead anywhere, as in a folder that the user
            names.

    Raises:
        ConfigurationError: If a file breaks a rule; the message names the file, the rule and the value.
    """
    if not folder.is_dir():
        return
    for pattern in _READ:
        # The content of a template is not checked; every other file has a format.
        base = folder if within is None and pattern.endswith(".jinja") else within
        if base is None:
            continue
        for file in folder.glob(pattern):
            check_link(f"{name} cannot be loaded: it holds", file, base)
    for file_name in _JSON_FILES:
        if (folder / file_name).is_file():
            check_json(name, folder / file_name)


def check_json(name: str, file: Path) -> Mapping[str, Any]:
    """Read a JSON file, and refuse it if it could do harm.

    Args:
        name: Name of the member, for errors.
        file: The file.

    Returns:
        The file's content.

    Raises:
        ConfigurationError: If the file is not an object, is too large or nested too deep, has two values for a key or
            a count that is too large, or names a weights file in another folder.
    """
    what = f"{name} cannot be loaded: {str(file)!r}"
    try:
        size = file.stat().st_size
        values = json.loads(file.read_text("utf-8"), object_pairs_hook=_object) if size <= _MOST_BYTES else None
    except RecursionError:
        raise _refused(what, f"is nested more than {_MOST_DEPTH} levels deep") from None
    except (OSError, ValueError) as error:
        raise _refused(what, f"cannot be read as JSON: {error}") from error
    if size > _MOST_BYTES:
        raise _refused(what, f"has {size} bytes; the limit is {_MOST_BYTES}")
    if not isinstance(values, dict):
        raise _refused(what, f"has to hold a JSON object, but holds {values!r:.60}")
    depth = 0
    level: list[Any] = [values]
    while level:
        depth += 1
        if depth > _MOST_DEPTH:
            raise _refused(what, f"is nested more than {_MOST_DEPTH} levels deep")
        for part in level:
            _check_counts(what, part)
        level = [child for part in level for child in _children(part)]
    if not isinstance(kind := values.get("model_type", ""), str):
        raise _refused(what, f"sets 'model_type' to {kind!r:.60}, but it has to be a text")
    if file.name.endswith(".index.json"):
        _check_index(what, values)
    return values


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found and repr(found[key]) != repr(value):
            raise ValueError(f"the key {key!r} is there twice, with the values {found[key]!r:.60} and {value!r:.60}")
        found[key] = value
    return found


def _children(part: Any) -> Iterator[Any]:
    values = part.values() if isinstance(part, dict) else part
    return (value for value in values if isinstance(value, (dict, list)))


def _check_counts(what: str, part: Any) -> None:
    for key, value in part.items() if isinstance(part, dict) else ():
        if key == "members" and isinstance(value, list) and len(value) > MOST_MEMBERS:
            raise _refused(what, f"lists {len(value)} members; the limit is {MOST_MEMBERS}")
        for pattern, most in _MOST if isinstance(value, (int, float)) else ():
            if pattern.search(key) and value > most:
                raise _refused(what, f"sets {key!r} to {value}; the limit is {most}")


def _check_index(what: str, values: Mapping[str, Any]) -> None:
    files = values.get("weight_map")
    if not isinstance(files, dict):
        raise _refused(what, f"has to map weights to files in 'weight_map', but this is {files!r:.60}")
    for file in files.values():
        is_name = isinstance(file, str) and file == posixpath.basename(file) and "\\" not in file
        if not (is_name and file.endswith(".safetensors")):
            raise _refused(
                what, f"names {file!r:.200} as a file of weights, but only safetensors files beside it are read"
            )


def read_generation_config(name: str, path: str, options: Mapping[str, Any]) -> GenerationConfig | None:
    """Read a generation config; None if there is none.

    Args:
        name: Name of the member or ensemble, for errors.
        path: The folder or repository of a model.
        options: The subfolder, and options of Hub access.

    Raises:
        ConfigurationError: If one of its values has a wrong type.
    """
    try:
        return GenerationConfig.from_pretrained(path, **options)
    except OSError:
        return None
    except Exception as error:
        raise ConfigurationError(
            f"{name} cannot be loaded: its generation_config.json cannot be used: {error}"
        ) from error


def check_inside(what: str, path: Any) -> None:
    """Refuse a relative path that leads out of its folder.

    Args:
        what: Start of the error, with a verb: "the ensemble 'x' names the subfolder".
        path: The path; None for none.

    Raises:
        ConfigurationError: If the path is absolute, or leads out of the folder.
    """
    place = posixpath.normpath(str(path or ""))
    if place.startswith(("..", "/")) or "\\" in place:
        raise ConfigurationError(f"{what} {path!r:.200}, which leads out of its folder. {_REMEDY}.")


def check_link(what: str, path: Path, within: Path) -> None:
    """Refuse a path that leaves a folder through a link.

    Links in the Hub's cache stay within their repository's folder, and are allowed.

    Args:
        what: Start of the error, with a verb.
        path: The path.
        within: The folder.

    Raises:
        ConfigurationError: If the path leaves the folder.
    """
    root = Path(os.path.realpath(within))
    repository = next((folder for folder in root.parents if folder.name.startswith("models--")), root)
    if "\0" in str(path) or not Path(os.path.realpath(path)).is_relative_to(repository):
        raise ConfigurationError(
            f"{what} {str(path)!r}, a link that leads out of {str(within)!r}. If you trust its target, replace the "
            "link with a copy."
        )


def _refused(what: str, why: str) -> ConfigurationError:
    return ConfigurationError(f"{what} {why}. {_REMEDY}.")
