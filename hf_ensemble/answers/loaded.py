"""Models that judge or fuse answers: how they are loaded, and how they read text."""

import dataclasses
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase
from typing_extensions import Self

from ..chat.conversation import Conversation
from ..chat.rendering import PLAIN_TEMPLATE, ChatRenderer
from ..config import check_option, check_positive_integer, is_local
from ..errors import ConfigurationError
from ..vocabulary.backend import bare_view, fast_backend
from ..vocabulary.rendered import RenderedEncoder
from .base import Turns

if TYPE_CHECKING:
    # Importing it takes most of a second, so only calls with a judge or fuser do.
    from transformers import PreTrainedModel

_POSITION_TABLES = {"position_embeddings", "position_embedding", "embed_positions", "wpe"}
_SANE_LENGTH = 10**9
"""Tokenizers without a limit report 10^30."""

_Row = TypeVar("_Row")


@dataclass(frozen=True)
class ModelSource:
    """The source of a model that judges or fuses answers, and how to load it."""

    kind: ClassVar[str]
    """Its kind, in saved configurations."""

    what: ClassVar[str]
    """Its name in errors."""

    path: str
    """Hub id or path of the model, with its tokenizer beside it. Only safetensors are read, and no code is run."""

    revision: str | None = None
    """Branch, tag or commit on the Hub."""

    subfolder: str | None = None
    """Folder within the repository or path."""

    dtype: str | None = field(default=None, kw_only=True)
    """Name of the weights' dtype (`"float32"`, `"bfloat16"`, …). None: the checkpoint's."""

    device: str | None = field(default=None, kw_only=True)
    """Device of the weights (`"cuda"`). None: the CPU. Never saved."""

    batch_size: int = field(default=8, kw_only=True)
    """Number of texts that it reads at once."""

    def __post_init__(self) -> None:
        if isinstance(self.path, os.PathLike):
            object.__setattr__(self, "path", os.fspath(self.path))
        if isinstance(self.device, torch.device):
            object.__setattr__(self, "device", str(self.device))
        if isinstance(self.dtype, torch.dtype):
            object.__setattr__(self, "dtype", str(self.dtype).removeprefix("torch."))
        is_path = isinstance(self.path, str) and bool(self.path)
        check_option("path", self.path, is_path, "a Hub id or a path")
        for option in dataclasses.fields(self):
            value = getattr(self, option.name)
            if option.type == str | None:
                check_option(option.name, value, value is None or isinstance(value, str), "a text or None")
        is_dtype = self.dtype is None or isinstance(getattr(torch, self.dtype, None), torch.dtype)
        check_option("dtype", self.dtype, is_dtype, "the name of a dtype of torch or None")
        check_positive_integer("batch_size", self.batch_size)

    def to_dict(self) -> dict[str, Any]:
        """Return what is saved: its kind and everything that is set, except what belongs to one machine."""
        saved = {
            option.name: getattr(self, option.name)
            for option in dataclasses.fields(self)
            if option.name != "device" and getattr(self, option.name) != option.default
        }
        return {"kind": self.kind, **saved}

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> Self:
        """Read the result of `to_dict`.

        Raises:
            ConfigurationError: If it is of another kind, or there is no such option.
        """
        options = dict(saved)
        kind = options.pop("kind", cls.kind)
        check_option("kind", kind, kind == cls.kind, repr(cls.kind))
        known = [option.name for option in dataclasses.fields(cls)]
        if unknown := sorted(map(str, set(options).difference(known))):
            raise ConfigurationError(f"{cls.what} has no option {unknown[0]!r}. Options: {', '.join(known)}.")
        if "path" not in options:
            raise ConfigurationError(f"{cls.what} has no `path`: give a Hub id or a path.")
        return cls(**options)

    @property
    def name(self) -> str:
        """Its name and path, for errors."""
        return f"{self.what} {self.path!r}"

    def load_config(self) -> PreTrainedConfig:
        """Read the model's configuration, before any weight.

        Raises:
            ConfigurationError: If there is none.
        """
        if os.path.isfile(self.path) or (is_local(self.path) and not os.path.isdir(self.path)):
            raise ConfigurationError(
                f"{self.name} cannot be loaded: there is no such folder. Give a Hub id, or the folder in which it was "
                "saved."
            )
        try:
            config: PreTrainedConfig = AutoConfig.from_pretrained(self.path, **self._options)
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"{self.name} cannot be loaded: {error}") from error
        return config

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """Load the tokenizer beside the model.

        Raises:
            ConfigurationError: If there is none.
        """
        try:
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(self.path, **self._options)
        except Exception as error:
            raise ConfigurationError(
                f"{self.name} has no tokenizer that can be loaded: {error} Save its tokenizer in the same folder."
            ) from error
        special = set(tokenizer.all_special_tokens)
        # Some classes create an empty tokenizer if there is no file.
        if not any(char.isalpha() for token in tokenizer.get_vocab() if token not in special for char in token):
            raise ConfigurationError(
                f"{self.name} has no tokenizer that writes text. Save its tokenizer in the same folder."
            )
        return tokenizer

    def load_model(self, model_class: Any, refuses_unexpected: bool = False) -> "PreTrainedModel":
        """Load the model for inference.

        Args:
            model_class: Its class, or an auto class.
            refuses_unexpected: Whether to refuse weights that the model does not have, too.

        Raises:
            ConfigurationError: If it cannot be loaded, or not all of its weights are in the checkpoint.
        """
        dtype = "auto" if self.dtype is None else self.dtype
        options = {**self._options, "dtype": dtype, "use_safetensors": True, "output_loading_info": True}
        try:
            model, info = model_class.from_pretrained(self.path, **options)
            if self.device is not None:
                model = model.to(self.device)
        except (OSError, ValueError, ImportError, AttributeError, RuntimeError, AssertionError) as error:
            raise ConfigurationError(f"{self.name} cannot be loaded: {error}") from error
        problems = [("lacks", info["missing_keys"])]
        if refuses_unexpected:
            # Old checkpoints hold position numbers, which are not weights.
            unexpected = [key for key in info["unexpected_keys"] if not str(key).endswith("position_ids")]
            problems.append(("has no place for", unexpected))
        for problem, keys in problems:
            if keys:
                raise ConfigurationError(
                    f"{self.name} is not a checkpoint of {type(model).__name__}: it {problem} {len(keys)} weights, "
                    f"such as {sorted(map(str, keys))[0]!r}, and random weights in their place would be useless. Use "
                    "a checkpoint that was trained for it."
                )
        loaded: PreTrainedModel = model.eval()
        return loaded

    @property
    def _options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"trust_remote_code": False}
        if self.revision is not None:
            options["revision"] = self.revision
        if self.subfolder is not None:
            options["subfolder"] = self.subfolder
        return options


@dataclass(frozen=True)
class Frame:
    """What a tokenizer puts around a text, or a pair of texts.

    Attributes:
        ids: The ids in front of, between and after the texts.
        types: The segment of each of them.
    """

    ids: tuple[tuple[int, ...], ...]
    types: tuple[tuple[int, ...], ...]

    def __len__(self) -> int:
        return sum(map(len, self.ids))

    def around(self, *texts: Sequence[int]) -> list[int]:
        """The ids of framed texts."""
        parts = [*self.ids[0]]
        for text, after in zip(texts, self.ids[1:], strict=True):
            parts += [*text, *after]
        return parts

    def segments(self, *texts: Sequence[int]) -> list[int]:
        """The segment of each id of framed texts."""
        parts = [*self.types[0]]
        for number, (text, after) in enumerate(zip(texts, self.types[1:], strict=True)):
            parts += [*[number] * len(text), *after]
        return parts


class Reader:
    """How a loaded model reads text. Content never becomes control tokens.

    Args:
        tokenizer: The model's tokenizer; only read.
        model: The model.
        name: Its name in errors.
        chat_template: A template to use instead of the tokenizer's own.
        control: Ids that are control tokens, even if the tokenizer does not flag them.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        model: "PreTrainedModel",
        name: str,
        chat_template: str | None = None,
        control: Collection[int] = (),
    ):
        self._backend = fast_backend(tokenizer, name)
        embeddings: Any = model.get_input_embeddings()
        self._num_ids = int(embeddings.weight.shape[0])
        self._name = name
        added = self._backend.get_added_tokens_decoder()
        special = {i for i, token in added.items() if token.special} | set(tokenizer.all_special_ids) | set(control)
        self._encoder = RenderedEncoder(self._backend, special, self._num_ids)
        self._renderer = ChatRenderer(tokenizer, self._encoder, name, chat_template)
        self._plain = ChatRenderer(tokenizer, self._encoder, name, PLAIN_TEMPLATE)
        self.has_template = chat_template is not None or tokenizer.chat_template is not None

    def frame(self, num_texts: int) -> Frame:
        """What the tokenizer puts around one text, or a pair."""
        view = bare_view(self._backend)
        view.post_processor = self._backend.post_processor
        encoding = view.encode("a", "a" if num_texts == 2 else None)
        ids: list[list[int]] = [[] for _ in range(num_texts + 1)]
        types: list[list[int]] = [[] for _ in range(num_texts + 1)]
        place = 0
        for i, kind, text in zip(encoding.ids, encoding.type_ids, encoding.sequence_ids, strict=True):
            if text is None:
                ids[place].append(i)
                types[place].append(kind)
            else:
                place = text + 1
        return Frame(tuple(map(tuple, ids)), tuple(map(tuple, types)))

    def encode(self, form: str, content: Mapping[str, str], starts: bool = False) -> list[int]:
        """Encode a text, without what the tokenizer puts around it.

        Args:
            form: A format string, whose own text may spell control tokens.
            content: Its fields, which never do.
            starts: Whether to add what the tokenizer puts in front of a text (BOS).

        Raises:
            ConfigurationError: If the model has no row for an id.
        """
        texts = "".join(content.values())
        sign = next((sign for sign in map(chr, range(0xFDD0, 0xFDF0)) if sign not in texts), None)
        if sign is None:
            raise ConfigurationError("a text must not contain every noncharacter from U+FDD0 to U+FDEF.")
        marked = {key: self._encoder.mark(text, sign) for key, text in content.items()}
        start = self._encoder.start if starts else ""
        return self._checked(self._encoder.encode(start + form.format(**marked), sign))

    def conversation(self, turns: Turns, adds_prompt: bool = False) -> list[int]:
        """Encode a conversation in the model's chat template.

        Args:
            turns: The turns.
            adds_prompt: Whether to add the beginning of an answer at the end.

        Raises:
            ConfigurationError: If the template refuses it, or the model has no row for an id.
        """
        try:
            ids = self._renderer.ids(Conversation(turns, {"add_generation_prompt": adds_prompt}))
        except ConfigurationError as error:
            raise ConfigurationError(
                f"the chat template of {self._name} refuses the conversation: {error.__cause__ or error} Change the "
                "conversation, or give the model another template."
            ) from error
        return self._checked(ids)

    def plain_text(self, turns: Turns) -> str:
        """A conversation as plain text: a single user turn unchanged, otherwise each turn headed by its role."""
        if len(turns) == 1 and turns[0]["role"] == "user":
            return text_of(turns[0])
        return self._plain.text(Conversation(turns))

    def _checked(self, ids: list[int]) -> list[int]:
        if ids and max(ids) >= self._num_ids:
            raise ConfigurationError(
                f"{self._name} cannot read the text: its tokenizer writes the id {max(ids)}, but the model has rows for "
                f"{self._num_ids} ids. Save the model with its own tokenizer."
            )
        return ids


def text_of(turn: dict[str, Any]) -> str:
    """The text of a turn, its parts joined."""
    content = Conversation([turn]).with_joined_parts().messages[0].get("content")
    return content or ""


def learned_positions(model: "PreTrainedModel") -> int | None:
    """The number of ids that fit a model's learned position embeddings; None if no length is too long."""
    sizes = []
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in _POSITION_TABLES and isinstance(module, torch.nn.Embedding):
            # OPT and BART begin at position 2, RoBERTa after its padding.
            unused = int(getattr(module, "offset", 0)) + (0 if module.padding_idx is None else module.padding_idx + 1)
            sizes.append(module.num_embeddings - unused)
    return min(sizes, default=None)


def told_length(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The number of ids that a model reads by its tokenizer; None if the tokenizer does not say."""
    length = tokenizer.model_max_length
    return int(length) if length < _SANE_LENGTH else None


def in_batches(rows: Sequence[_Row], size: int, length: Callable[[_Row], int]) -> Iterator[list[int]]:
    """Indices of the rows of each batch: rows of similar length, to save padding."""
    order = sorted(range(len(rows)), key=lambda n: length(rows[n]))
    for start in range(0, len(order), size):
        yield order[start : start + size]


def padded_right(rows: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Rows of ids padded on the right, and a mask with 0 for padding, each of shape `(num_rows, longest)`."""
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[pad_id] * (width - len(row))] for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    return ids, mask
