"""Addresses of servers: what may stand in one, and how it is shown."""

from urllib.parse import urlsplit

from .errors import ConfigurationError


def checked_url(url: str, name: str) -> str:
    """Look whether a URL can be that of a server, and give it without a slash at its end.

    Args:
        url: The URL.
        name: Of the member, for the error.

    Raises:
        ConfigurationError: If it is none, or holds what belongs to nobody else: it is saved and shown.
    """
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        is_url = False
    if not is_url or any(character.isspace() for character in url):
        raise ConfigurationError(
            f"`url` of member {name!r} has to be like 'http://host:8000/v1', but is {shown(url)!r:.200}."
        )
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise ConfigurationError(
            f"`url` of member {name!r} ({shown(url)}) holds a user or a query, which would be saved with it. Put a key into "
            "an environment variable and name that as `api_key_env`."
        )
    return url.rstrip("/")


def shown(url: str) -> str:
    """A URL as errors show it: without user-info, query and fragment."""
    head, _, rest = url.partition("://")
    if not rest:
        return url.partition("?")[0].partition("#")[0].rpartition("@")[2]
    rest = rest.partition("?")[0].partition("#")[0]
    host, slash, path = rest.partition("/")
    return f"{head}://{host.rpartition('@')[2]}{slash}{path}"
