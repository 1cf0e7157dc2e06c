"""Optional packages: what to install when one is missing."""

from .errors import ConfigurationError

REQUIREMENTS = {
    "gguf": "gguf>=0.10",
    "httpx2": "httpx2>=2.12,<3",
    "lm-eval": "lm-eval>=0.4.13",
    "matplotlib": "matplotlib>=3.9",
    "pandas": "pandas>=2.2",
    "peft": "peft>=0.19.1",
    "rapidfuzz": "rapidfuzz>=3.14.6",
    "ray": "ray>=2.10",
    "sacrebleu": "sacrebleu>=2.4,<3",
    "transformers": "transformers[serving]",
    "xgrammar": "xgrammar>=0.2.8",
}
"""Packages as this package's extras require them. Errors name the package itself, which can always be installed."""


def install(package: str) -> str:
    """Return the command that installs an optional package.

    Args:
        package: The package, by the name under which it is installed.
    """
    requirement = REQUIREMENTS.get(package, package)
    return f"`pip install {requirement}`" if requirement == package else f'`pip install "{requirement}"`'


def not_installed(what: str, package: str) -> ConfigurationError:
    """Return the error for an optional package that is missing.

    Args:
        what: What needs the package, as a clause: "member 'a' is to run in a Ray actor".
        package: The package, by the name under which it is installed.
    """
    return ConfigurationError(f"{what}, but `{package}` is not installed: {install(package)}.")
