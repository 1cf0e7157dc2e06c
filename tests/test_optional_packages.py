"""What errors tell users to install is what the extras of this package require."""

import re
from pathlib import Path

from hf_ensemble.optional_packages import REQUIREMENTS, install, not_installed

PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def test_every_extra_has_its_package_with_the_same_bounds():
    section = PYPROJECT.read_text("utf-8").partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    extras = re.findall(r'^[a-z-]+ = \["(.+)"\]$', section, re.MULTILINE)
    assert sorted(REQUIREMENTS.values()) == sorted(extras)
    assert all(requirement.startswith(package) for package, requirement in REQUIREMENTS.items())


def test_the_error_names_what_needs_the_package_and_how_to_install_it():
    error = not_installed("member 'a' is to run in a Ray actor", "ray")
    command = '`pip install "ray>=2.10"`'
    assert str(error) == f"member 'a' is to run in a Ray actor, but `ray` is not installed: {command}."
    assert install("torchao") == "`pip install torchao`"
