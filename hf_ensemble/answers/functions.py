"""The user's functions in a configuration: calls that raise errors with their names, and import paths for saving."""

import importlib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigurationError


@dataclass(frozen=True)
class Imported:
    """A function that a saved configuration names and that has not been imported yet.

    Attributes:
        path: Its import path, `"module:name"`.
    """

    path: str

    def load(self, is_trusted: bool) -> Callable[..., Any]:
        """Import the function.

        Args:
            is_trusted: Whether its code may run.

        Raises:
            ConfigurationError: If its code may not run, or there is no such function.
        """
        if not is_trusted:
            raise self._untrusted()
        module, _, name = self.path.partition(":")
        try:
            found: Any = importlib.import_module(module)
            for part in name.split("."):
                found = getattr(found, part)
        except Exception as error:
            raise ConfigurationError(
                f"the function {self.path!r} of a saved ensemble cannot be imported: {error}. Make its module "
                "importable here, or pass another `method`."
            ) from error
        if not callable(found):
            raise ConfigurationError(f"{self.path!r}, which a saved ensemble names as a function, is {found!r:.80}.")
        return found  # type: ignore[no-any-return]

    def __call__(self, *args: Any) -> Any:
        """Raise an error: it has not been imported.

        Raises:
            ConfigurationError: Always.
        """
        raise self._untrusted()

    def _untrusted(self) -> ConfigurationError:
        return ConfigurationError(
            f"this saved ensemble calls the function {self.path!r}, which runs code that is not part of this package. "
            "If you trust it, load the ensemble with `trust_remote_code=True`; otherwise pass another `method`."
        )


def path_of(function: Any) -> str:
    """Return the import path of a function, `"module:name"`, even if it cannot be imported by that path."""
    if isinstance(function, Imported):
        return function.path
    owner = function if hasattr(function, "__qualname__") else type(function)
    # Methods of built-in types name their class only.
    of_class = getattr(function, "__objclass__", type(function))
    module = getattr(function, "__module__", None) or of_class.__module__
    return f"{module}:{owner.__qualname__}"


def name_of(function: Any) -> str:
    """Return the name of a function for tables."""
    return path_of(function).rpartition(":")[2].rpartition(".")[2]


def check_importable(function: Any, option: str) -> None:
    """Refuse to save a function that cannot be found by its import path.

    Args:
        function: The function.
        option: The option that holds it, for the error.

    Raises:
        ConfigurationError: If it cannot be found.
    """
    if isinstance(function, Imported):
        return
    path = path_of(function)
    try:
        is_found = not path.startswith("__main__:") and Imported(path).load(is_trusted=True) is function
    except ConfigurationError:
        is_found = False
    if not is_found:
        raise ConfigurationError(
            f"`{option}` is {path!r}, which cannot be imported by that path, so a saved ensemble could not find it "
            "again. Define it as a function at the top level of a module."
        )


def has_parameter(function: Callable[..., Any], name: str) -> bool:
    """Whether a user's function has a parameter of this name."""
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):  # raised for some that are not written in Python
        return False


def call_for_numbers(function: Callable[..., Any], option: str, count: int, *args: Any, **by_name: Any) -> list[float]:
    """Call a user's function that has to return a certain number of finite numbers.

    Args:
        function: The function.
        option: The option that holds it, for errors.
        count: Number of numbers.
        *args: What it is called with.
        **by_name: The same, by name.

    Raises:
        ConfigurationError: If it raises, or gives something else.
    """
    found = called(lambda *a, **b: _listed(function(*a, **b)), option, *args, of=function, **by_name)
    try:
        numbers = (
            None if any(isinstance(value, (str, bytes)) for value in found) else [float(value) for value in found]
        )
    except (TypeError, ValueError, OverflowError):
        numbers = None
    if numbers is None or len(numbers) != count:
        got = f"{len(numbers)} numbers" if numbers is not None else f"{found!r:.200}"
        raise ConfigurationError(
            f"`{option}` ({path_of(function)}) has to return {count} numbers, but returned {got}."
        )
    for place, number in enumerate(numbers):
        if not math.isfinite(number):
            about = ", ".join(
                f"{texts[place]!r:.80}" for texts in args if isinstance(texts, Sequence) and len(texts) == count
            )
            raise ConfigurationError(
                f"`{option}` ({path_of(function)}) has to return finite numbers, but returned {number} for "
                f"{about or place}."
            )
    return numbers


def _listed(values: Any) -> Any:
    """The result of a function as a list, which may run the function's code; a single value as a list of one."""
    if hasattr(values, "tolist"):
        values = values.tolist()
    is_no_list = isinstance(values, (str, bytes, Mapping, Set)) or not isinstance(values, Iterable)
    return [values] if is_no_list else list(values)


def called(function: Callable[..., Any], option: str, *args: Any, of: Any = None, **by_name: Any) -> Any:
    """Call a user's function.

    Args:
        function: The function.
        option: The option that holds it, for the error.
        *args: What it is called with.
        of: The function that errors name, if `function` only calls it.
        **by_name: The same, by name.

    Raises:
        ConfigurationError: If it raises.
    """
    try:
        return function(*args, **by_name)
    except ConfigurationError:
        raise
    except Exception as error:
        given = ", ".join(f"{value!r:.80}" for value in args)
        raise ConfigurationError(
            f"`{option}` ({path_of(of or function)}) raised {type(error).__name__}: {error}, for {given}."
        ) from error
