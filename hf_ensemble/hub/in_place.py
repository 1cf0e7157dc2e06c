"""Moves new files into place, so that a folder holds either the old or the new ensemble, never a mixture.

Several files cannot be moved at once. So one step decides: when everything is written, the folder gets a name that
marks it as complete. The writer, or the next reader that finds this name, moves the rest into place.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from ..errors import ConfigurationError

BUNDLE = "members"
"""Folder of bundled members, within the ensemble's."""

MAY_BE_STALE = ("chat_template.jinja",)
"""Files that would change what is loaded if an older save left them behind."""

_WHOLE = ".saved"
"""Name of the folder with a complete ensemble that is not fully in place yet."""

_STALE = "stale"
"""Folder in it with the names of files that the new ensemble does not have."""

_REPLACED = "replaced"
"""Folder in it for files that were in the way."""


def write_in_place(folder: Path, write: Callable[[Path], None]) -> None:
    """Write files elsewhere, then move them into place, the configuration last.

    A failure leaves the folder unchanged. If the process is stopped after everything is written, the next load or save
    moves the new files into place. Files with other names stay, and so does a README.

    Args:
        folder: Their place; created if it does not exist.
        write: Writes them into a given folder.

    Raises:
        ConfigurationError: If an interrupted older save cannot be finished, or there is a folder in place of a file,
            or a file in place of a folder.
    """
    finish_writing(folder)
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as temporary:
            new = Path(temporary, "new")
            write(new)
            _check_nothing_is_in_the_way(new, folder)
            stale = new / _STALE
            stale.mkdir()
            (new / _REPLACED).mkdir()
            for name in MAY_BE_STALE:
                if not (new / name).exists():
                    (stale / name).touch()
            new.rename(folder / _WHOLE)
    except BaseException:
        if is_new and not (folder / _WHOLE).exists():
            shutil.rmtree(folder)
        raise
    finish_writing(folder)


def finish_writing(folder: Path) -> bool:
    """Finish a save that was interrupted before its files were in place.

    Every step can be repeated, also by several processes at once.

    Returns:
        Whether there was anything to finish.

    Raises:
        ConfigurationError: If it cannot be put into place, or a link leads out of the folder.
    """
    whole = folder / _WHOLE
    if not whole.is_dir():
        return False
    into = [folder / BUNDLE] if (whole / BUNDLE).exists() else []
    for path in (whole, whole / _STALE, whole / BUNDLE, whole / _REPLACED, *into):
        if path.is_symlink():
            raise ConfigurationError(
                f"saving to {str(folder)!r} was stopped before all files were in place, and they cannot be put there: "
                f"{str(path)!r} is a link, so files outside the folder would be moved. Remove the link, or get the folder again."
            )
    try:
        for name in _names(whole / _STALE):
            (folder / name).unlink(missing_ok=True)
        for name in _names(whole / BUNDLE):
            (folder / BUNDLE).mkdir(exist_ok=True)
            _replace_folder(whole / BUNDLE / name, folder / BUNDLE / name, whole / _REPLACED / name)
        files = [name for name in _names(whole) if (whole / name).is_file()]
        for name in sorted(files, key=lambda name: name == "config.json"):
            if name != "README.md" or not (folder / name).exists():
                with contextlib.suppress(FileNotFoundError):
                    (whole / name).replace(folder / name)
        done = tempfile.TemporaryDirectory(dir=folder, prefix=".saving-")
        with done, contextlib.suppress(FileNotFoundError):
            whole.rename(Path(done.name, _WHOLE))
    except OSError as error:
        raise ConfigurationError(
            f"saving to {str(folder)!r} was interrupted before all files were in place, and they cannot be moved "
            f"there now: {error}. Load the ensemble once with write access to the folder."
        ) from error
    return True


def _check_nothing_is_in_the_way(new: Path, folder: Path) -> None:
    for name in sorted({*_names(new), *MAY_BE_STALE}.difference(["README.md"])):
        is_folder = (folder / name).is_dir()
        if (folder / name).exists() and is_folder != (new / name).is_dir():
            raise ConfigurationError(
                f"the ensemble cannot be saved to {str(folder)!r}: {name!r} is a {'folder' if is_folder else 'file'} "
                f"there, but has to be a {'file' if is_folder else 'folder'}. Move it away, or choose another folder."
            )


def _replace_folder(new: Path, place: Path, aside: Path) -> None:
    if not aside.exists():
        with contextlib.suppress(FileNotFoundError):
            place.rename(aside)
    try:
        new.rename(place)
    except FileNotFoundError:
        # Another process has just done it, and the file moved aside may be the new one.
        if not place.exists():
            aside.rename(place)


def _names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder)) if folder.is_dir() else []
