"""What ids write at the beginning of a text, if the space that their tokenizer puts before the first word is dropped."""

from collections.abc import Sequence
from functools import cached_property

from .encoding import ByteEncoder
from .token_bytes import TokenBytes

_SPACE = b" "


class TextStartEncoder(ByteEncoder):
    """The encoder of a tokenizer whose entries have lost one leading space, for example at the beginning of a line.

    An entry that is only a space keeps it, because otherwise it would write nothing. Text that is not an entry is
    encoded as the tokenizer does after a space.

    Args:
        encoder: The tokenizer's encoder.
    """

    def __init__(self, encoder: ByteEncoder):
        self.__dict__.update(vars(encoder))
        self.__dict__.pop("id_of", None)
        self._after_space = encoder
        self.token_bytes = _without_space(encoder.token_bytes)

    @cached_property
    def id_of(self) -> dict[bytes, int]:
        """The canonical id of every entry: the one with the space, which the tokenizer uses there, or else its own."""
        plain = self._after_space.id_of
        found = {data: i for data, i in plain.items() if not _loses_space(data)}
        found.update((data[1:], i) for data, i in plain.items() if _loses_space(data))
        if _SPACE in plain:
            found[_SPACE] = plain[_SPACE]
        return found

    def encode(self, data: bytes) -> list[int] | None:
        """Encode bytes as the beginning of a text; see `ByteEncoder.encode`."""
        if data in self.id_of:
            return [self.id_of[data]]
        return self._after_space.encode(_SPACE + data)

    def encode_batch(self, batch: Sequence[bytes]) -> list[list[int] | None]:
        """Encode many byte strings as `encode` does."""
        ids_of = self.id_of
        missing = [data for data in batch if data not in ids_of]
        encoded = iter(self._after_space.encode_batch([_SPACE + data for data in missing]))
        return [[ids_of[data]] if data in ids_of else next(encoded) for data in batch]


def _loses_space(data: bytes) -> bool:
    return len(data) > 1 and data.startswith(_SPACE)


def _without_space(token_bytes: TokenBytes) -> TokenBytes:
    entries = [data[1:] if _loses_space(data) else data for data in token_bytes.entries]
    return token_bytes.with_entries(entries, "start")
