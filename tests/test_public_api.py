"""The public names are what they are said to be, and importing changes nothing."""

import subprocess
import sys
from pathlib import Path

import hf_ensemble

DOCS = Path(__file__).resolve().parents[1]


def test_public_names_are_importable_sorted_and_documented():
    assert hf_ensemble.__all__ == sorted(hf_ensemble.__all__)
    pages = (DOCS / "README.md").read_text("utf-8") + "".join(
        page.read_text("utf-8") for page in (DOCS / "docs").rglob("*.md")
    )
    for name in hf_ensemble.__all__:
        assert getattr(hf_ensemble, name).__doc__
        assert name in pages, f"{name} is not in the docs"


def test_import_registers_the_model_type_and_changes_nothing_else():
    code = """
import os, logging, torch, transformers, warnings
from transformers import AutoConfig
def state():
    return (dict(os.environ), torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled(),
            torch.random.get_rng_state().tolist(), logging.getLogger().level, transformers.logging.get_verbosity(),
            list(warnings.filters))
transformers.AutoModelForCausalLM, transformers.GenerationMixin, transformers.PreTrainedModel, transformers.DynamicCache
before = state()
import hf_ensemble
assert state() == before
assert AutoConfig.for_model("hf_ensemble").model_type == "hf_ensemble"
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
