"""An ensemble behind the server of `transformers serve`, which `openai` clients talk to.

The stock server makes its models by the name of their class in `transformers`. Here it gets a manager that holds the
one ensemble, loaded already, and an engine that writes for all who ask; endpoints are its own.
"""

from ..errors import ConfigurationError
from ..optional_packages import install

try:
    from .app import build_app, serve
except (ImportError, NameError) as error:
    raise ConfigurationError(
        f"serving needs packages that are not installed ({error}): {install('transformers')}."
    ) from error
from .limits import Limits

__all__ = ["Limits", "build_app", "serve"]
