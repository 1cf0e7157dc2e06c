"""Members behind a server: reads their tokenizers and configurations, and queries their servers."""

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from ..config import MemberConfig
from ..errors import ConfigurationError
from ..optional_packages import not_installed
from .per_member import listed

if TYPE_CHECKING:
    from ..members.served.member import ServedMember


def check_served(items: Sequence[MemberConfig], api_key_env: Any, is_saved: bool, allow_remote: bool) -> None:
    """Refuse served members that cannot or must not be contacted, before any request.

    Args:
        items: The members; their `api_key_env` is changed in place.
        api_key_env: The argument of `from_pretrained`: one name for every member that asks for a key, or one per
            member.
        is_saved: Whether the members come from a saved ensemble, not from the user.
        allow_remote: Whether saved members may be contacted.

    Raises:
        ConfigurationError: If a member must not be contacted, its key must not be sent, or the needed package is not
            installed.
    """
    for number, item in enumerate(items):
        if item.url is None:
            continue
        if is_saved and not allow_remote:
            raise ConfigurationError(
                f"member {number} of this saved ensemble, {item.model!r}, is behind the server {item.url}, which "
                "would receive your prompts. A saved ensemble contacts servers only if you allow it: pass "
                "`allow_remote=True`, or `--allow-remote` on the command line."
            )
        try:
            import httpx2  # noqa: F401
        except ImportError as error:
            raise not_installed(f"member {number} is behind a server", "httpx2") from error
    _take_keys(items, api_key_env, is_saved)


def _take_keys(items: Sequence[MemberConfig], given: Any, is_saved: bool) -> None:
    """Apply the names of keys. Keys that a saved ensemble names are sent only if the caller names them too."""
    names = listed("api_key_env", given, len(items))
    if names is None:
        names = [None if item.api_key_env is None else given for item in items]
        if given is not None and not any(names):
            raise ConfigurationError(
                f"`api_key_env={given!r:.200}` is for members that ask for a key, but no member does. Pass a list "
                "with one entry per member, None where no key is wanted."
            )
    for number, (item, name) in enumerate(zip(items, names, strict=True)):
        if name is not None and (item.url is None or not isinstance(name, str)):
            raise ConfigurationError(
                "`api_key_env` has to be the name of an environment variable for members with a `url`, but is "
                f"{name!r:.200} for member {number}."
            )
        if is_saved and item.api_key_env is not None and name is None:
            raise ConfigurationError(
                f"member {number} of this saved ensemble, {item.model!r}, asks for the key in ${item.api_key_env} to be sent "
                f"to {item.url}. To allow this, pass `api_key_env={item.api_key_env!r}`."
            )
        item.api_key_env = name or item.api_key_env


def connect(item: MemberConfig, tokenizer: PreTrainedTokenizerBase, hub: Mapping[str, Any]) -> "ServedMember":
    """Query the server of a member, and read its model's configuration beside the tokenizer.

    Args:
        item: The member.
        tokenizer: Its tokenizer.
        hub: Options of Hub access.

    Raises:
        ConfigurationError: If the server has no such model, or the tokenizer does not fit.
        MemberError: If the server does not answer.
    """
    from ..members.served.http_client import HttpClient
    from ..members.served.member import ServedMember

    source = item.tokenizer or tokenizer.name_or_path
    config: PreTrainedConfig | None = None
    generation_config = None
    if source and (os.path.isdir(source) or not os.path.isabs(source)):
        with contextlib.suppress(OSError, ValueError):
            config = AutoConfig.from_pretrained(source, trust_remote_code=False, **hub)
        with contextlib.suppress(OSError, ValueError):
            generation_config = GenerationConfig.from_pretrained(source, **hub)
    client = HttpClient(item.short_name, str(item.url), item.api_key_env, item.timeout)
    try:
        return ServedMember(
            client,
            str(item.model),
            tokenizer,
            config,
            generation_config,
            item.vocab_size,
            item.eos_token_id,
            item.chat_template,
            item.system_prompt,
        )
    except BaseException:
        client.close()
        raise
