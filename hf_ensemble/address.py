"""Addresses of servers: which are valid, and how errors show them."""

from urllib.parse import urlsplit

from .errors import ConfigurationError


def checked_url(url: str, name: str) -> str:
    """Check the URL of a server, and return it without a trailing slash.

    Args:
        url: The URL.
        name: Name of the member, for the error.

    Raises:
        ConfigurationError: If it is not a URL, or contains a user or a query, which would be saved and shown.
    """
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        is_url = False
    if not is_url or any(character.isspace() for character in url):
        raise ConfigurationError(
            f"`url` of member {name!r} has to look like 'http://host:8000/v1', but is {shown(url)!r:.200}."
        )
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise ConfigurationError(
            f"`url` of member {name!r} ({shown(url)}) contains a user or a query, which would be saved with it. Put "
            "the key into an environment variable, and pass the variable's name as `api_key_env`."
        )
    return url.rstrip("/")


def shown(url: str) -> str:
    """Return a URL as errors show it: without user, query and fragment."""
    head, _, rest = url.partition("://")
    if not rest:
        return url.partition("?")[0].partition("#")[0].rpartition("@")[2]
    rest = rest.partition("?")[0].partition("#")[0]
    host, slash, path = rest.partition("/")
    return f"{head}://{host.rpartition('@')[2]}{slash}{path}"
