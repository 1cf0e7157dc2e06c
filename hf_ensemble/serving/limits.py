"""The limits of a server."""

from dataclasses import dataclass

from ..config import check_positive_integer
from ..errors import ConfigurationError


@dataclass(frozen=True)
class Limits:
    """The limits of a server; each has its own status for requests beyond it.

    Raises:
        ConfigurationError: If one is not above 0.
    """

    max_batch: int = 32
    """Largest number of texts written together; others wait."""
    max_waiting: int = 256
    """Largest number of waiting texts. A request beyond it gets a 503 with `Retry-After`."""
    max_new_tokens: int = 4096
    """Largest number of tokens per request. More is a 400."""
    max_seconds: float = 600.0
    """Seconds per request, waiting included. More is a 504."""
    max_body_bytes: int = 1 << 20
    """Largest size of a request's body, in bytes. More is a 413."""

    def __post_init__(self) -> None:
        for name in ("max_batch", "max_waiting", "max_new_tokens", "max_body_bytes"):
            check_positive_integer(name, getattr(self, name))
        if not self.max_seconds > 0:
            raise ConfigurationError(f"`max_seconds` has to be above 0, but is {self.max_seconds}.")
