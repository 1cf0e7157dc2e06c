"""Time and memory of a union vocabulary: built cold, and read from disk.

    HF_ENSEMBLE_NPM_TOKENIZERS=.../@lenml python examples/benchmarks/vocabulary.py
    python examples/benchmarks/vocabulary.py --members FOLDER FOLDER --members FOLDER FOLDER FOLDER

Each row runs in a separate process, with an empty folder of maps; its tokenizers are loaded before the clock starts.
*Extra* is how far the resident memory of the process then rises at its peak; *processor* is the processor time of the
cold build, which is more informative than *cold* if other programs run at the same time.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measure import Peak
from members import models_or_demo
from report import print_heads, print_row
from transformers import AutoTokenizer

from hf_ensemble import UnionVocabulary

MAX_COLD_SECONDS, MAX_MIB, MAX_DISK_SECONDS = 5.0, 1024, 0.2


def measure(folders: list[str]) -> dict[str, float]:
    """Measure one union vocabulary; the folder of maps must be empty."""
    tokenizers = [AutoTokenizer.from_pretrained(folder, local_files_only=True) for folder in folders]
    peak = Peak(["cpu"])
    start, cpu = time.perf_counter(), time.process_time()
    built = UnionVocabulary.from_tokenizers(tokenizers)
    row = {"cold": time.perf_counter() - start, "cpu": time.process_time() - cpu, "mib": peak.mib_above_start()}
    row |= {"union": len(built), "shared": built.num_shared}
    del built
    disk = []
    for _ in range(3):
        start = time.perf_counter()
        UnionVocabulary.from_tokenizers(tokenizers)
        disk.append(time.perf_counter() - start)
    return row | {"disk": sorted(disk)[1]}


def default_members() -> dict[str, list[str]]:
    """Return the rows that are measured if none are asked for."""
    smollm2, gemma3 = models_or_demo(None)
    rows = {"SmolLM2 x Gemma-3": [smollm2, gemma3]}
    npm = os.environ.get("HF_ENSEMBLE_NPM_TOKENIZERS")
    if npm is None:
        print("HF_ENSEMBLE_NPM_TOKENIZERS is not set: the rows with Llama-3 and Qwen3 are left out", file=sys.stderr)
        return rows
    llama3, qwen3 = (str(Path(npm, f"tokenizer-{name}", "models")) for name in ("llama3", "qwen3"))
    return {"Llama-3 x Qwen3": [llama3, qwen3], **rows, "Llama-3 x Qwen3 x Gemma-3": [llama3, qwen3, gemma3]}


def main() -> None:
    """Print the table; the exit code says whether every row is within the limits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", nargs="+", action="append", metavar="FOLDER", help="tokenizers of one row")
    parser.add_argument("--measure", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure)))
        return
    rows = default_members() if arguments.members is None else {" x ".join(row): row for row in arguments.members}
    print_heads("members", "cold, s", "processor, s", "extra, MiB", "from disk, s", "union", "shared", "")
    all_within = True
    for name, folders in rows.items():
        with tempfile.TemporaryDirectory() as maps:
            command = [sys.executable, __file__, "--measure", *folders]
            run = subprocess.run(
                command, env=os.environ | {"HF_ENSEMBLE_CACHE": maps}, stdout=subprocess.PIPE, text=True, check=True
            )
        row = json.loads(run.stdout.splitlines()[-1])
        within = row["cold"] <= MAX_COLD_SECONDS and row["mib"] <= MAX_MIB and row["disk"] <= MAX_DISK_SECONDS
        all_within &= within
        print_row(
            name, f"{row['cold']:.2f}", f"{row['cpu']:.2f}", f"{row['mib']:.0f}", f"{row['disk']:.3f}",
            f"{row['union']:,}", f"{row['shared']:,}", "" if within else "over the limit",
        )  # fmt: skip
    if not all_within:
        sys.exit(f"Limits: {MAX_COLD_SECONDS} s cold, {MAX_MIB} MiB, {MAX_DISK_SECONDS} s from disk.")


if __name__ == "__main__":
    main()
