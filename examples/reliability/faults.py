"""Cause faults one by one, and check that each ends as docs/reliability.md promises.

    python examples/reliability/faults.py                        # all of them, on tiny members
    python examples/reliability/faults.py --groups cache memory  # some

Every fault runs in a separate process with limited time and memory, and has a line in the table: the result, and
whether it is as promised. The exit code is 1 if a promise is broken. While a hostile folder is loaded, the system
(inotify) reports every file that is opened, moved or deleted in a folder next to it that must not be touched, and
Python (`sys.addaudithook`) reports what is executed. Needs Linux.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.extend(str(Path(__file__).resolve().parents[1] / folder) for folder in ("", "benchmarks"))

import cache_faults
import hostile
import memory_faults
from child import Seen, run, run_together
from report import setting
from rows import Table
from tiny_members import save_tiny_members

from hf_ensemble import EnsembleForCausalLM

REFUSALS = ("ConfigurationError: ", "VocabularyError: ")


class Faults:
    """The faults, and the table of what came of them.

    Args:
        folder: An empty one.
        device: Where members are whose memory runs out.
        every: Of hostile folders only every so many are tried.
    """

    def __init__(self, folder: Path, device: str, every: int):
        self._folder, self._device, self._every = folder, device, every
        self._members = save_tiny_members(folder / "members")
        self._canary = folder / "canary"
        self._canary.mkdir()
        (self._canary / "secret.txt").write_text("a secret", "utf-8")
        shutil.copy(folder / "members" / "one" / "model.safetensors", self._canary / "weights.safetensors")
        self._cache = folder / "cache"
        # Everything is imported and warm before processes are copied from this one.
        self._text = cache_faults.write(self._members, self._cache)
        self._table = Table("fault", "what came back")

    @property
    def num_failed(self) -> int:
        return self._table.num_failed

    def _row(self, fault: str, told: str, is_right: bool) -> None:
        self._table.row(fault, told.replace(f"{self._folder}{os.sep}", ""), is_right=is_right)

    def _run(self, fault: Callable[..., Any], *arguments: Any) -> Seen:
        return run(fault, *arguments, canary=self._canary)

    # The stored maps

    def cache(self) -> None:
        """Disks that are full or read-only, maps that are damaged, processes that build at once or are killed."""
        for name, fault in (
            ("full disk", cache_faults.full_disk),
            ("read-only folder", cache_faults.read_only_folder),
        ):
            seen = self._run(fault, self._members, self._empty("unwritable"))
            text, _, how = seen.text.partition("¦")
            is_right = text == self._text and any("Set HF_ENSEMBLE_CACHE" in one for one in seen.warnings)
            self._row(f"cache: {name} ({how})", f"the right text; {seen.told}" if is_right else seen.told, is_right)
        for name, damage in cache_faults.DAMAGES.items():
            cache = self._copied("damaged")
            for path in cache.iterdir():
                damage(path)
            seen = self._run(cache_faults.write, self._members, cache)
            is_right = seen.text == self._text and any("is damaged" in one for one in seen.warnings)
            again = self._run(cache_faults.write, self._members, cache)
            is_right &= again.text == self._text and not again.warnings
            self._row(f"cache: maps {name}", f"the right text; {seen.told}" if is_right else seen.told, is_right)
        self._at_once()
        self._killed()

    def _at_once(self) -> None:
        cache = self._empty("at-once")
        both = run_together(cache_faults.write_beside, self._members, cache, time.time() + 0.5)
        left = cache_faults.leftovers(cache)
        is_right = [seen.text for seen in both] == [self._text] * 2 and not left
        told = f"the right text in both, {len(list(cache.iterdir()))} maps, nothing else"
        self._row("cache: two processes build the maps at once", told if is_right else str([*both, left]), is_right)

    def _killed(self) -> None:
        cache = self._empty("killed")
        seen = self._run(cache_faults.killed, self._members, cache)
        left = len(cache_faults.leftovers(cache))
        cache_faults.age(cache)
        again = self._run(cache_faults.write, self._members, cache)
        is_right = "died" in seen.error and left == 1 and again.text == self._text and not again.warnings
        is_right &= not cache_faults.leftovers(cache)
        told = f"{seen.error}; the next has the right text, and removed what was left, two hours later"
        self._row(
            "cache: the process is killed while it writes a map", told if is_right else f"{seen} {again}", is_right
        )

    def _empty(self, name: str) -> Path:
        shutil.rmtree(self._folder / name, ignore_errors=True)
        (self._folder / name).mkdir()
        return self._folder / name

    def _copied(self, name: str) -> Path:
        shutil.rmtree(self._folder / name, ignore_errors=True)
        return Path(shutil.copytree(self._cache, self._folder / name))

    # Memory

    def memory(self) -> None:
        """A member runs out of memory in step 50, in a call and in a server's batch."""
        os.environ["HF_ENSEMBLE_CACHE"] = str(self._cache)
        step, members = memory_faults.STEP, self._members
        if self._device == "cuda":
            # In this process: a child cannot use a GPU that its parent has used.
            told = memory_faults.in_call(members, self._device)
            self._row(f"memory runs out in step {step} of a call (really, on a GPU)", told, True)
        else:
            seen = self._run(memory_faults.in_call, members, self._device)
            self._row(f"memory runs out in step {step} of a call (as planted)", seen.told, bool(seen.text))
        seen = self._run(memory_faults.in_server, members, "cpu")
        self._row(f"memory runs out in step {step} of a server's batch (as planted)", seen.told, bool(seen.text))

    # Hostile folders

    def members(self) -> None:
        """Members' folders."""
        self._hostile("member", hostile.MEMBERS, self._folder / "members" / "one")

    def ensembles(self) -> None:
        """Saved ensembles."""
        saved = self._folder / "saved"
        EnsembleForCausalLM.from_pretrained(self._members).save_pretrained(saved, include_members=True)
        self._hostile("saved ensemble", hostile.ENSEMBLES, saved)

    def _hostile(self, kind: str, faults: dict[str, Callable[[Path, Path], Any]], good: Path) -> None:
        os.environ["HF_ENSEMBLE_CACHE"] = str(self._cache)
        for name, spoil in list(faults.items())[:: self._every]:
            folder = self._folder / "hostile"
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(good, folder)
            spoil(folder, self._canary)
            seen = self._run(_loaded, folder, self._members[1] if kind == "member" else None)
            harm = [*(f"TOUCHED {path}" for path in seen.outside), *(f"EXECUTED {what}" for what in seen.executed)]
            is_right = not harm and seen.error.startswith(REFUSALS)
            if name in hostile.HARMLESS:
                is_right = not harm and seen.text == "loaded"
            self._row(f"{kind}: {name}", "; ".join([*harm, seen.told]), is_right)


def _loaded(folder: Path, other: str | None) -> str:
    EnsembleForCausalLM.from_pretrained(folder if other is None else [folder, other])
    return "loaded"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    groups = ("cache", "memory", "members", "ensembles")
    parser.add_argument("--groups", nargs="+", choices=groups, default=groups)
    parser.add_argument("--every", type=int, default=1, help="try only every so many of the hostile folders")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="whose memory runs out in a call"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)  # children are copies of this process, and have none of its threads
    kept = os.environ.get("HF_ENSEMBLE_CACHE")
    print(setting(args.device))
    try:
        with tempfile.TemporaryDirectory() as folder:
            faults = Faults(Path(folder).resolve(), args.device, args.every)
            for group in args.groups:
                getattr(faults, group)()
    finally:
        if kept is None:
            os.environ.pop("HF_ENSEMBLE_CACHE", None)
        else:
            os.environ["HF_ENSEMBLE_CACHE"] = kept
    return int(faults.num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
