"""The shell blocks of the docs run, on tiny members."""

import io
import re
import shlex
from pathlib import Path

import pytest

from hf_ensemble import cli
from tests import tiny

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "command_line.md"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the primary .* wrote the control token")
def test_shell_blocks_run(tmp_path, monkeypatch, capsys):
    tiny.save_pair(tmp_path, "model-a", "model-b")
    monkeypatch.chdir(tmp_path)
    lines = "".join(re.findall(r"```bash\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)).splitlines()
    assert len(lines) > 5
    for line in lines:
        before, _, command = line.rpartition("| ")
        monkeypatch.setattr("sys.stdin", io.StringIO(before.removeprefix("echo ").strip('" ')))
        assert cli.main(shlex.split(command)[1:]) == 0, f"{line}: {capsys.readouterr().err}"
