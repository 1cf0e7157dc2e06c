"""The benchmark of members in actors runs, on tiny members and a CPU; what it prints are tables."""

import pytest

from tests.scripts import run_script, tables

pytestmark = [
    pytest.mark.filterwarnings("ignore:the primary .* wrote the control token"),
    pytest.mark.filterwarnings("ignore:members of this ensemble are on"),
]
PLACES = ["all in this process", "the first in this process", "an actor each"]


def run(arguments, monkeypatch, capsys):
    options = ["--prompt", 8, "--new-tokens", 3, "--turns", 1, *arguments]
    run_script("examples/benchmarks/ray_members.py", options, monkeypatch)
    output = capsys.readouterr().out
    return output, *tables(output)


def test_ray_members(cluster, folders, monkeypatch, capsys):
    options = ["--members", "tiny", "tiny-qwen", "--tokenizers", *folders, "--dtype", "bfloat16", "--num-gpus", 0]
    output, times, traffic = run([*options, "--methods", "unite", "gac", "--batches", 1, 2], monkeypatch, capsys)
    assert [row["members"] for row in times] == PLACES * 4
    assert all(float(row["times as long as in one process"]) > 0 for row in times)
    assert all(1 <= float(row["calls a token"]) <= (2 if row["method"] == "unite" else 1) for row in traffic)
    assert output.count("[3, 3, 3] of 3 ids as in one process") == 2


@pytest.mark.slow
def test_ray_members_from_folders(cluster, folders, monkeypatch, capsys):
    output, times, _ = run(["--members", *folders, "--devices", "cpu"], monkeypatch, capsys)
    assert [row["members"] for row in times] == PLACES
    assert "[3, 3, 3] of 3" in output
