"""`hf-ensemble doctor`: the faults of members."""

import argparse

from . import arguments


def run(args: argparse.Namespace) -> int:
    """Write the report.

    Returns:
        The exit code: 1 if something was found.
    """
    report = arguments.load_ensemble(args).check()
    with arguments.output(args) as write:
        write(report.to_dict(), report)
    return int(bool(report.findings))
