"""Vocabulary maps on disk: safetensors files, keyed by everything they depend on."""

import contextlib
import hashlib
import json
import os
import time
import uuid
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub import constants
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from transformers import PreTrainedTokenizerBase

from .. import messages
from .backend import bare_view, component_state, fast_backend

_SCHEMA = 2
"""Part of every key: raise it when the stored data, or its computation, changes."""

_PROBE_TEXT = (
    "The quick brown fox doesn't jump over 1234567890 lazy dogs;\n\tif (a <= b) { return x[i]->y; }  // naïve café\r\n"
    "Überraschung, déjà vu, Привет мир, 你好世界, こんにちは, สวัสดี, שלום, مرحبا 👩‍💻🎉 <tag>▁\n\n\n    done."
)
_PROBE_STEP = 61

_CHECKSUM = "checksum"
"""Name of the array with the checksum of the others."""

_MOST_BYTES = 1 << 31
"""More bytes than any map takes."""

_ABANDONED = 3600.0
"""Age in seconds at which an unfinished file is taken to be left over."""


def cache_folder() -> Path:
    """Return the folder of stored maps: `HF_ENSEMBLE_CACHE`, by default `hf_ensemble` in the Hugging Face cache home."""
    return Path(os.environ.get("HF_ENSEMBLE_CACHE") or Path(constants.HF_HOME) / "hf_ensemble")


def store_key(kind: str, *parts: Any) -> str:
    """Return the name of the stored file for data that depends on `parts` (JSON values) and nothing else."""
    digest = hashlib.sha256(json.dumps([_SCHEMA, kind, *parts]).encode()).hexdigest()
    return f"{kind}-{digest[:40]}"


def load_arrays(key: str) -> dict[str, np.ndarray] | None:
    """Read stored arrays; None if there are none, or if the file is damaged, with a warning."""
    path = cache_folder() / f"{key}.safetensors"
    if not path.is_file():
        return None
    try:
        if (size := path.stat().st_size) > _MOST_BYTES:
            raise ValueError(f"it has {size} bytes; the limit is {_MOST_BYTES}")
        arrays = load_file(path)
        found = arrays.pop(_CHECKSUM, None)
        if found is None or found.tolist() != _checksum(arrays).tolist():
            raise ValueError("its checksum is wrong")
    except (SafetensorError, OSError, ValueError) as error:
        messages.warn(f"the stored map {path} is damaged ({error}) and will be rebuilt.")
        return None
    return arrays


def save_arrays(key: str, arrays: dict[str, np.ndarray]) -> None:
    """Store arrays. A reader sees the complete file or none, even if two processes store the same key at once."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder, key)
        temporary = folder / f".{key}-{uuid.uuid4().hex}"
        try:
            whole = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
            save_file({**whole, _CHECKSUM: _checksum(whole)}, temporary)
            os.replace(temporary, folder / f"{key}.safetensors")
        finally:
            temporary.unlink(missing_ok=True)
    except (OSError, SafetensorError) as error:
        messages.warn(
            f"vocabulary maps cannot be stored in {folder} ({error}), so they will be rebuilt next time. Set "
            "HF_ENSEMBLE_CACHE to a writable folder."
        )


def _checksum(arrays: dict[str, np.ndarray]) -> np.ndarray:
    """A checksum of arrays, their names, dtypes and shapes."""
    value = 0
    for name, array in sorted(arrays.items()):
        value = zlib.crc32(f"{name} {array.dtype} {array.shape} ".encode(), value)
        value = zlib.crc32(np.ascontiguousarray(array).data.cast("B") if array.size else b"", value)
    return np.array([value], dtype=np.int64)


def _remove_abandoned(folder: Path, key: str) -> None:
    """Remove unfinished files that stopped processes left behind."""
    for path in folder.glob(f".{key}-*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _ABANDONED:
                path.unlink()


def load_or_build(key: str | None, build: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Read stored arrays, or build and store them; without a key, they are built but not stored."""
    if key is None:
        return build()
    arrays = load_arrays(key)
    if arrays is None:
        arrays = build()
        save_arrays(key, arrays)
    return arrays


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash of everything in a tokenizer that determines its ids and what they write.

    A tokenizer loaded from a folder is identified by its tokenizer.json, its live settings, and a sample of its ids,
    which is several times faster than writing out its vocabulary; any other by its whole description.
    """
    backend = fast_backend(tokenizer)
    digest = hashlib.sha256()
    path = Path(tokenizer.name_or_path or "") / "tokenizer.json"
    if tokenizer.name_or_path and path.is_file():
        size = backend.get_vocab_size(with_added_tokens=True)
        digest.update(path.read_bytes())
        components = (backend.normalizer, backend.pre_tokenizer, backend.decoder, backend.post_processor)
        added = {i: token.__getstate__() for i, token in backend.get_added_tokens_decoder().items()}
        sample = [backend.id_to_token(i) for i in range(0, size, _PROBE_STEP)]
        probe = bare_view(backend).encode(_PROBE_TEXT, add_special_tokens=False).ids
        state = [type(backend.model).__name__, size, list(map(component_state, components)), added, sample, probe]
        digest.update(json.dumps(state, default=str).encode())
    else:
        # Padding and truncation come first in the description; they are left from the user's last call, and do not
        # count.
        head, mark, rest = backend.to_str().partition('"added_tokens":')
        state = json.loads(f"{head}{mark}null}}") | {"padding": None, "truncation": None}
        digest.update(json.dumps(state).encode() + rest.encode())
    digest.update(json.dumps([tokenizer.all_special_ids, tokenizer.unk_token_id]).encode())
    return digest.hexdigest()
