"""An ensemble behind the server of `transformers serve`, for `openai` clients.

The stock server creates its models by the name of their class in `transformers`. Here it gets a manager with one
loaded ensemble, and an engine that writes for all requests; the endpoints are its own.
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
