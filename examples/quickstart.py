"""Continue three prompts with two models that have different tokenizers: each alone, then both as an ensemble.

python examples/quickstart.py                # SmolLM2-135M-Instruct and Gemma-3-270M, from demo_models.py
python examples/quickstart.py --models A B   # ids or paths of other models
"""

import argparse
import sys
from pathlib import Path

from demo_models import models_or_demo

from hf_ensemble import EnsembleForCausalLM

PROMPTS = ["The capital of France is", "Die Hauptstadt von Deutschland ist", "def add(a, b):\n    return"]

WHAT_IT_SHOWS = """\
Three prompts prove nothing, and this pair shows how an ensemble works, not that it pays: measured on text, Gemma needs
10 to 27 % fewer bits than SmolLM2, and no mixture with equal weights was above Gemma by more than chance. Fine-tuned on
the same questions, the two are right more often together than the better one alone (docs/does_it_pay.md). Test your own:
  hf-ensemble advise --members A B --data dev.jsonl
On a CPU shared with other programs, export OMP_WAIT_POLICY=passive first, as this script did."""


def main() -> None:
    """Print how each member and two ensembles continue the prompts."""
    parser = argparse.ArgumentParser(description="Decode with two models, alone and together.")
    parser.add_argument("--models", nargs="+", metavar="MODEL", help="ids or paths, the primary first")
    models = models_or_demo(parser.parse_args().models)

    print("Loading both models and writing; on a slow CPU this takes half a minute.", flush=True)
    # A step on a CPU mostly waits for memory, and bfloat16 halves what it reads.
    ensemble = EnsembleForCausalLM.from_pretrained(models, method="unite", dtype="bfloat16")

    texts = {}
    for path, member, tokenizer in zip(models, ensemble.members, ensemble.tokenizers, strict=True):
        texts[Path(path).name] = continue_prompts(member, tokenizer)
    for method in ("unite", "gac"):
        texts[f"both, {method}"] = continue_prompts(ensemble, ensemble.tokenizer, method=method)

    print("\nWhat each writes after three prompts (greedily, 12 tokens, bfloat16):")
    for row, prompt in enumerate(PROMPTS):
        print(f"\n{prompt!r}")
        for name, continuations in texts.items():
            print(f"  {name:<24}{continuations[row]!r}")
    if parser.parse_args().models is None:
        print(f"\n{WHAT_IT_SHOWS}")
    print("\nThe models, for the README's model-a and model-b:", *models, sep="\n  ")
    print(f"The Python that has the package: {sys.executable}")


def continue_prompts(model, tokenizer, **options) -> list[str]:
    """Return what a member or an ensemble writes after the prompts."""
    inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True, padding_side="left")
    output_ids = model.generate(**inputs, max_new_tokens=12, do_sample=False, **options)
    return tokenizer.batch_decode(output_ids[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)


if __name__ == "__main__":
    main()
