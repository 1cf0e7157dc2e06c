"""Run a script several times at once: the runs share one GPU, which a small model alone does not fill."""

import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor


def run_all(script: str, argument_lists: Sequence[Sequence[str]], at_once: int) -> int:
    """Run a script with each list of arguments.

    Args:
        script: Path of the script.
        argument_lists: The arguments of each run.
        at_once: How many run at once.

    Returns:
        0 if everything is finished, 3 if some runs have work left, 1 if a run failed.
    """

    def run(arguments: Sequence[str]) -> int:
        return subprocess.run([sys.executable, script, *arguments]).returncode

    with ThreadPoolExecutor(at_once) as pool:
        codes = set(pool.map(run, argument_lists))
    return 1 if codes - {0, 3} else max(codes)
