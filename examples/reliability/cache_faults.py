"""What can happen to the stored vocabulary maps: each function causes one fault and returns the resulting text."""

import ctypes
import os
import resource
import signal
import struct
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from hf_ensemble import EnsembleForCausalLM
from hf_ensemble.vocabulary import store

PROMPT = "The history of the city"
_NEW_MOUNTS, _NEW_USER = 0x00020000, 0x10000000
_READ_ONLY = 1


def write(members: list[str], cache: Path) -> str:
    """Load the members with a cache, and let them write."""
    os.environ["HF_ENSEMBLE_CACHE"] = str(cache)
    ensemble = EnsembleForCausalLM.from_pretrained(members)
    ids = ensemble.generate(**ensemble.tokenizer(PROMPT, return_tensors="pt"), max_new_tokens=12, do_sample=False)
    return ensemble.tokenizer.decode(ids[0])


def _mounted(folder: Path, flags: int, size: int) -> bool:
    """Mount a small disk in memory that only this process sees; whether that was permitted."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_MOUNTS | (0 if os.geteuid() == 0 else _NEW_USER)):
        return False
    # What is mounted from here on stays here.
    libc.mount(None, b"/", None, 0x44000, None)
    return libc.mount(b"tmpfs", str(folder).encode(), b"tmpfs", flags, f"size={size}".encode()) == 0


def full_disk(members: list[str], cache: Path) -> str:
    """A disk of 4 KiB; where none can be mounted, files of 4 KiB at most."""
    if _mounted(cache, 0, 4096):
        return f"{write(members, cache)}¦a disk of 4 KiB was mounted"
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    return f"{write(members, cache)}¦no disk can be mounted here: files may have 4 KiB (RLIMIT_FSIZE)"


def read_only_folder(members: list[str], cache: Path) -> str:
    """A disk that cannot be written; where none can be mounted, a folder without the right to."""
    if _mounted(cache, _READ_ONLY, 1 << 20):
        return f"{write(members, cache)}¦a disk was mounted read-only"
    cache.chmod(0o555)
    return f"{write(members, cache)}¦no disk can be mounted here: a folder without the right to write"


def killed(members: list[str], cache: Path) -> str:
    """The process is killed when the first map is written and not yet in its place."""
    os.environ["HF_ENSEMBLE_CACHE"] = str(cache)
    replace = os.replace

    def die(source: str, target: str) -> None:
        if str(target).endswith(".safetensors"):
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)

    store.os.replace = die  # type: ignore[assignment]
    return write(members, cache)


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    (length,) = struct.unpack("<Q", data[:8])
    place = (8 + length + len(data)) // 2
    data[place] ^= 0x10
    path.write_bytes(data)


def _of_another_version(path: Path) -> None:
    arrays = load_file(path)
    arrays.pop("checksum")
    save_file(arrays, path)


def _other_names(path: Path) -> None:
    save_file({"something": np.zeros(3)}, path)


def _bomb(path: Path) -> None:
    size = 1 << 36
    head = b'{"kinds":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (size, size)
    path.write_bytes(struct.pack("<Q", len(head)) + head)
    os.truncate(path, 8 + len(head) + size)  # no byte of which is on the disk


DAMAGES: dict[str, Callable[[Path], None]] = {
    "cut in half": _cut,
    "with a bit flipped": _flipped,
    "of a version without checksums": _of_another_version,
    "with other arrays": _other_names,
    "that unfold to 64 GiB": _bomb,
}
"""What is done to every stored map."""


def leftovers(cache: Path) -> list[str]:
    """Files that are no maps."""
    return [path.name for path in cache.iterdir() if not path.name.endswith(".safetensors")]


def age(cache: Path) -> None:
    """Make everything in a cache two hours old."""
    for path in cache.iterdir():
        os.utime(path, (time.time() - 7200,) * 2)


def write_beside(members: list[str], cache: Path, start: float) -> str:
    """Like `write`, at a time when another process does so too."""
    time.sleep(max(0.0, start - time.time()))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        return write(members, cache)
