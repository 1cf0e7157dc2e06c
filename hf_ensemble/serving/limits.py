"""What a server takes on at most."""

from dataclasses import dataclass

from ..config import check_positive_integer
from ..errors import ConfigurationError


@dataclass(frozen=True)
class Limits:
    """What a server takes on at most; what is beyond it is refused with a status of its own.

    Raises:
        ConfigurationError: If one is not above 0.
    """

    max_batch: int = 32
    """Texts that are written together; others wait."""
    max_waiting: int = 256
    """Texts that may wait. A request beyond it is answered with 503 and `Retry-After`."""
    max_new_tokens: int = 4096
    """Tokens that a request may ask for. More is a 400."""
    max_seconds: float = 600.0
    """Seconds until a request is given up, waiting included: 504."""
    max_body_bytes: int = 1 << 20
    """Size of a request's body. More is a 413."""

    def __post_init__(self) -> None:
        for name in ("max_batch", "max_waiting", "max_new_tokens", "max_body_bytes"):
            check_positive_integer(name, getattr(self, name))
        if not self.max_seconds > 0:
            raise ConfigurationError(f"`max_seconds` has to be above 0, but is {self.max_seconds}.")
