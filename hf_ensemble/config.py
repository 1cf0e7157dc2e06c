"""Configurations of an ensemble and of its members."""

import dataclasses
import functools
import inspect
import json
import operator
import os
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig

from .address import checked_url
from .errors import ConfigurationError
from .method_options import METHODS as METHODS
from .method_options import GatedConfig as GatedConfig
from .method_options import MethodConfig as MethodConfig
from .method_options import check_option as check_option
from .method_options import check_positive_integer as check_positive_integer
from .method_options import is_integer as is_integer
from .method_options import is_number as is_number
from .method_options import made as made
from .method_options import method_class as method_class
from .method_options import method_config as method_config
from .method_options import normalize_weights as normalize_weights


@dataclass
class MemberConfig:
    """Where one member comes from and how it is loaded."""

    path: str | None = None
    """Hub id or path of the model, or of an adapter, which is then loaded on the model that it names. In a saved
    ensemble, a path that begins with `./` or `../` starts at its folder or repository. None: the member was passed as
    an object without an id or path.
    """

    name: str | None = None
    """Name of the member in errors, and to choose it as a drafter. Default: the last part of `path`."""

    revision: str | None = None
    """Branch, tag or commit on the Hub."""

    subfolder: str | None = None
    """Folder within the repository or path."""

    gguf_file: str | None = None
    """File to load from a repository of GGUF files."""

    dtype: str | None = None
    """Name of the weights' dtype (`"float32"`, `"bfloat16"`, …). None: the `dtype` of `from_pretrained`."""

    device_map: Any = None
    """Device of the weights, as in `transformers`. None: the `device_map` of `from_pretrained`. Never saved."""

    tokenizer: str | None = None
    """Hub id or path of the tokenizer, if it is not beside the model."""

    tokenizer_kwargs: dict[str, Any] | None = None
    """Options for loading the tokenizer, such as the languages of a translation model: `{"src_lang": "eng_Latn",
    "tgt_lang": "deu_Latn"}`.
    """

    eos_token_id: list[int] = field(default_factory=list)
    """More ids that end a text, in addition to those of the member's generation config."""

    chat_template: str | None = None
    """Jinja template for conversations. None: the tokenizer's own."""

    system_prompt: str | None = None
    """System turn that this member reads instead of the conversation's; empty for no system turn. None: the
    conversation's.
    """

    adapter: str | None = None
    """Hub id or path of an adapter such as LoRA, which is loaded on the model at `path`. Needs `peft`."""

    adapter_revision: str | None = None
    """Branch, tag or commit of the adapter on the Hub."""

    adapter_subfolder: str | None = None
    """Folder of the adapter within its repository or path."""

    quantization_config: Any = None
    """How to quantise the weights while they load: a configuration of `transformers` (`TorchAoConfig`,
    `BitsAndBytesConfig`, …) or its dictionary, which is what the attribute holds. None: keep the weights as stored.
    """

    ray: dict[str, Any] | None = None
    """Runs the member in a Ray actor with these options of Ray's `.options(...)`: `num_cpus`, `num_gpus`, `memory`,
    `resources`, `accelerator_type`. Empty: an actor with Ray's defaults. None: the member runs in this process, unless
    the ensemble is loaded with `placement="ray"`.
    """

    url: str | None = None
    """Base URL of the server ("http://host:8000/v1") for a member that vLLM serves; used instead of `path`. A saved
    ensemble contacts it only with `allow_remote=True`. Needs `httpx2`.
    """

    model: str | None = None
    """The name under which the server at `url` serves the model."""

    api_key_env: str | None = None
    """Name of the environment variable with the key of the server. The key is read for each request and never saved.
    """

    timeout: float | None = None
    """Seconds to wait for an answer from the server. None: 120."""

    vocab_size: int | None = None
    """Number of ids of a served model, if there is no `config.json` beside its tokenizer."""

    commit: str | None = field(default=None, compare=False, repr=False)
    """Commit that was loaded from the Hub, set while loading. Never saved; a pushed ensemble has it as `revision`."""

    adapter_commit: str | None = field(default=None, compare=False, repr=False)
    """The adapter's commit; the same rules apply."""

    def __post_init__(self) -> None:
        if isinstance(self.dtype, torch.dtype):
            self.dtype = str(self.dtype).removeprefix("torch.")
        for option in dataclasses.fields(self):
            value = getattr(self, option.name)
            if option.type != str | None or value is None:
                continue
            if isinstance(value, os.PathLike):
                setattr(self, option.name, os.fspath(value))
            elif not isinstance(value, str):
                raise ConfigurationError(
                    f"a member's `{option.name}` has to be a text or None, but is {value!r:.200}."
                )
        if self.quantization_config is not None:
            self.quantization_config = _checked_quantization(self.quantization_config)
        if self.ray is not None:
            self.ray = _checked_ray_options(self.ray)
        if self.url is not None:
            self.url = checked_url(self.url, self.short_name or "without a name")
        _check_served_options(self)
        self.tokenizer_kwargs = _checked_tokenizer_options(self.tokenizer_kwargs)
        given: Any = [] if self.eos_token_id is None else self.eos_token_id
        try:
            self.eos_token_id = [operator.index(i) for i in (given if isinstance(given, (list, tuple)) else [given])]
        except TypeError:
            raise ConfigurationError(
                f"a member's `eos_token_id` has to be an id or a list of ids, but is {given!r:.200}."
            ) from None

    @property
    def short_name(self) -> str:
        """The member's name, or else the last part of its id or path; empty if it has neither."""
        return self.name or last_part(self.path or self.model or "")

    @property
    def is_elsewhere(self) -> bool:
        """Whether the member runs in another process, an actor's or a server's."""
        return self.url is not None or self.ray is not None

    def to_dict(self) -> dict[str, Any]:
        """Return what is saved: everything that is set, except what belongs to one machine."""
        values = dataclasses.asdict(self)
        del values["device_map"], values["commit"], values["adapter_commit"]
        return {key: value for key, value in values.items() if value not in (None, [])}


def _checked_quantization(given: Any) -> dict[str, Any]:
    """Return a quantisation configuration as a dictionary."""
    what = "a member's `quantization_config`"
    values = given.to_dict() if hasattr(given, "to_dict") and hasattr(given, "quant_method") else given
    if not isinstance(values, dict):
        raise ConfigurationError(
            f"{what} has to be a configuration such as `TorchAoConfig(...)` or `BitsAndBytesConfig(...)`, its dictionary, or "
            f"None, but is {given!r:.200}."
        )
    try:
        kept: dict[str, Any] = json.loads(json.dumps(values))
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{what} cannot be written as JSON: {error}.") from error
    if kept.get("quant_method") is None:
        if not (kept.get("load_in_8bit") or kept.get("load_in_4bit")):
            raise ConfigurationError(f"{what} names no `quant_method`: {given!r:.200}.")
        kept["quant_method"] = "bitsandbytes"
    return kept


_RAY_AMOUNTS = ("num_cpus", "num_gpus", "memory")
_RAY_OPTIONS = (*_RAY_AMOUNTS, "resources", "accelerator_type")
"""Options of an actor that say where it may run. A saved ensemble must not decide what it runs, or for how long."""


def _checked_ray_options(given: Any) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise ConfigurationError(
            f"a member's `ray` has to be a dictionary of an actor's options, or None, but is {given!r:.200}."
        )
    if unknown := sorted(map(str, set(given).difference(_RAY_OPTIONS))):
        raise ConfigurationError(
            f"a member's `ray` has no option {unknown[0]!r}. Options: {', '.join(_RAY_OPTIONS)}. Pass options for all "
            "actors, such as `runtime_env`, to `ray.init(...)`, and call it first."
        )
    amounts = {name: given[name] for name in _RAY_AMOUNTS if given.get(name) is not None}
    resources = {} if given.get("resources") is None else given["resources"]
    if not isinstance(resources, dict) or not all(isinstance(name, str) for name in resources):
        raise ConfigurationError(
            f"`resources` of a member's `ray` has to be a dictionary of amounts by name, but is {resources!r:.200}."
        )
    for name, amount in [*amounts.items(), *resources.items()]:
        if not is_number(amount) or amount < 0:
            raise ConfigurationError(
                f"{name!r} of a member's `ray` has to be a number of at least 0, but is {amount!r:.200}."
            )
    kind = given.get("accelerator_type")
    if kind is not None and not isinstance(kind, str):
        raise ConfigurationError(f"`accelerator_type` of a member's `ray` has to be a name, but is {kind!r:.200}.")
    return {key: value for key, value in given.items() if value is not None}


_LOADED = (
    "path",
    "revision",
    "subfolder",
    "gguf_file",
    "dtype",
    "device_map",
    "adapter",
    "quantization_config",
    "ray",
)
"""Options of members that are loaded into this process."""

_SERVED = ("model", "api_key_env", "timeout", "vocab_size")
"""Options of members that a server has loaded."""


def _checked_tokenizer_options(options: Any) -> dict[str, Any] | None:
    if options is not None and not (isinstance(options, dict) and all(isinstance(key, str) for key in options)):
        raise ConfigurationError(
            f"a member's `tokenizer_kwargs` has to be a dict of options, but is {options!r:.200}."
        )
    for key in options or ():
        if key in ("trust_remote_code", "code_revision") or key.endswith("_file"):
            raise ConfigurationError(
                f"a member's `tokenizer_kwargs` cannot hold {key!r}: with it, a saved ensemble could run code or read any file. "
                "Load the tokenizer yourself and pass it: `tokenizers=[...]`."
            )
    return options or None


def _check_served_options(item: MemberConfig) -> None:
    """Refuse options that contradict each other: a member is either loaded or served."""
    given = [name for name in (_SERVED if item.url is None else _LOADED) if getattr(item, name) is not None]
    if item.url is None and given:
        raise ConfigurationError(f"a member's `{given[0]}` is only for members behind a server: give its `url` too.")
    if item.url is None:
        return
    if given:
        raise ConfigurationError(
            f"a member is either served or loaded: it has the `url` {item.url!r} and also `{given[0]}`. Leave one out."
        )
    if not item.model:
        raise ConfigurationError(
            f"a member at {item.url!r} needs `model`, the name under which the server has it (see {item.url}/models)."
        )
    if item.api_key_env is not None and not item.api_key_env.isidentifier():
        raise ConfigurationError(
            "a member's `api_key_env` has to be the name of an environment variable, such as 'SERVER_KEY', but is not "
            "a name. Its value is not shown here, because it may be the key itself."
        )
    if item.timeout is not None and not (is_number(item.timeout) and item.timeout > 0):
        raise ConfigurationError(
            f"a member's `timeout` has to be a number of seconds above 0, but is {item.timeout!r}."
        )
    if item.vocab_size is not None:
        check_positive_integer("vocab_size", item.vocab_size)


def last_part(path: str) -> str:
    """The last part of an id or path: the default name."""
    return path.rstrip("/").rsplit("/", 1)[-1]


def is_local(path: str) -> bool:
    """Whether a member's path is a folder of this machine, not a Hub id."""
    return os.path.isabs(path) or path.startswith((".", "~")) or os.path.exists(path)


def paths_of(item: MemberConfig) -> dict[str, str]:
    """The ids and paths of a member's parts, by their options."""
    given = {"path": item.path, "tokenizer": item.tokenizer, "adapter": item.adapter}
    return {key: path for key, path in given.items() if path is not None}


def check_on_hub(item: MemberConfig, name: str, remedy: str) -> None:
    """Refuse to push a reference that others could not load.

    Args:
        item: The member.
        name: Its name in errors.
        remedy: What to do instead: "Pass `include_members=True`".

    Raises:
        ConfigurationError: If a part of it is on this machine.
    """
    for key, path in paths_of(item).items():
        if is_local(path):
            what = "member" if key == "path" else f"the {key} of member"
            raise ConfigurationError(
                f"{what} {name!r} is in a folder of this machine, so others could not load what is pushed. {remedy}, "
                "or load the member by its Hub id."
            )


_COMMON_OPTIONS = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)
"""Options of every language model that some configuration classes do not declare."""


MOST_MEMBERS = 1000
"""Limit on the members of an ensemble."""


class EnsembleConfig(PreTrainedConfig):
    """Configuration of an ensemble: its members, the method that fuses them, and their mixing weights.

    It also holds the primary's configuration, which is the text configuration of an ensemble.
    """

    model_type = "hf_ensemble"

    members: Any = None
    """`MemberConfig`s, the primary first."""

    method: Any = "unite"
    """Name or configuration of the method."""

    weights: Any = None
    """Mixing weights, one per member; None for equal weights."""

    primary_config: Any = None
    """The primary's configuration."""

    chat_id: Any = None
    """Random text that an ensemble and its tokenizer share, also when they are saved: an ensemble reads only the
    conversations that its own tokenizer renders. None: a new one for every ensemble."""

    def __post_init__(self, **kwargs: Any) -> None:
        members: Any = self.members or []
        if not isinstance(members, (list, tuple)):
            raise ConfigurationError(f"`members` has to be a list of `MemberConfig`s, but is {members!r:.200}.")
        if len(members) > MOST_MEMBERS:
            raise ConfigurationError(f"`members` lists {len(members)} members; the limit is {MOST_MEMBERS}.")
        self.members = [_member_config(place, item) for place, item in enumerate(members)]
        self.method = method_config(self.method)
        if self.weights is not None:
            self.weights = normalize_weights(self.weights, len(self.members), self.method.takes_weights_as_given)
        if not isinstance(self.chat_id, str | None):
            raise ConfigurationError(f"`chat_id` has to be a text or None, but is {self.chat_id!r:.200}.")
        primary_config = _primary_config(self.primary_config)
        # The base class fills in missing values, and must not take them from the primary.
        self.primary_config = None
        super().__post_init__(**kwargs)
        self.primary_config = primary_config

    def __getattr__(self, name: str) -> Any:
        """Return the primary's value of what libraries read from a configuration (`vocab_size`, `hidden_size`, …)."""
        primary_config = self.__dict__.get("primary_config")
        if primary_config is not None:
            text_config = primary_config.get_text_config(decoder=True)
            kind: Any = type(text_config)
            if name in _options_of(kind):
                return getattr(text_config, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> PreTrainedConfig:
        """Return the primary's text configuration, because an ensemble reads and writes the primary's ids."""
        if self.primary_config is None:
            return self
        text_config: PreTrainedConfig = self.primary_config.get_text_config(decoder=decoder, encoder=encoder)
        return text_config

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Upload the configuration alone, like any other configuration.

        Raises:
            ConfigurationError: If a member is on this machine, so that others could not load it.
        """
        self.method.check_saveable(is_for_hub=True)
        for item in self.members:
            check_on_hub(item, item.short_name, "Push the ensemble itself with `include_members=True`")
        return super().push_to_hub(*args, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        values: dict[str, Any] = super().to_dict()
        values["members"] = [member.to_dict() for member in self.members]
        values["method"] = self.method.to_dict()
        values["primary_config"] = None if self.primary_config is None else self.primary_config.to_dict()
        for part in (values, values["primary_config"] or {}):
            # A path of this machine, or a duplicate of `members`.
            part.pop("_name_or_path", None)
        return values


def _member_config(place: int, given: Any) -> MemberConfig:
    if isinstance(given, MemberConfig):
        return given
    if not isinstance(given, dict):
        raise ConfigurationError(f"member {place} has to be a `MemberConfig` or its options, but is {given!r:.200}.")
    known = [option.name for option in dataclasses.fields(MemberConfig)]
    if unknown := sorted(map(str, set(given).difference(known))):
        raise ConfigurationError(f"member {place} has no option {unknown[0]!r}. Options: {', '.join(known)}.")
    return MemberConfig(**given)


def _primary_config(given: Any) -> PreTrainedConfig | None:
    if isinstance(given, dict):
        options = dict(given)
        kind = options.pop("model_type", None)
        try:
            # For a served primary, only the size may be known: its type is empty.
            given = PreTrainedConfig(**options) if kind == "" else AutoConfig.for_model(kind, **options)
        except Exception as error:
            raise ConfigurationError(f"`primary_config` cannot be read: {str(error)[:200]}") from error
    if given is not None and (not isinstance(given, PreTrainedConfig) or isinstance(given, EnsembleConfig)):
        raise ConfigurationError(f"`primary_config` has to be the configuration of a model, but is {given!r:.200}.")
    return given


@functools.cache
def _options_of(kind: Any) -> frozenset[str]:
    """The options that a configuration class declares, without what a checkpoint adds, such as code to run."""
    return frozenset({*inspect.signature(kind.__init__).parameters, *kind.attribute_map, *_COMMON_OPTIONS})
