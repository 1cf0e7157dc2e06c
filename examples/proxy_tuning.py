"""Proxy tuning across tokenizers: shift a base model by what tuning changed in a smaller one.

python examples/proxy_tuning.py --base LARGE --tuned SMALL_INSTRUCT --untuned SMALL

The demo models include no untuned version of SmolLM2-135M-Instruct. Without `--untuned` the tuned model takes its
place: nothing is shifted and the text equals the base's (Gemma-3-270M), which only checks that the parts work
together.
"""

import argparse

from demo_models import models_or_demo

from hf_ensemble import EnsembleForCausalLM, GacConfig

PROMPTS = ["Question: What is the capital of France?\nAnswer:", "The three largest planets are"]


def main() -> None:
    """Print what the base writes alone, and what it writes when shifted."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--base", help="id or path of the model to move, which is the primary")
    parser.add_argument("--tuned", help="id or path of the tuned model")
    parser.add_argument("--untuned", help="id or path of the same before tuning; default: the tuned one")
    parser.add_argument("--strength", type=float, default=1.0, help="how far to move")
    parser.add_argument("--new-tokens", type=int, default=24)
    args = parser.parse_args()
    tuned, base = models_or_demo([args.tuned, args.base])

    ensemble = EnsembleForCausalLM.from_pretrained(
        [base, tuned, args.untuned or tuned],
        method=GacConfig(space="log"),
        weights=[1, args.strength, -args.strength],
        dtype="float32",
    )
    for prompt in PROMPTS:
        inputs = ensemble.tokenizer(prompt, return_tensors="pt")
        print(f"\n{prompt!r}")
        for name, options in (("base", {"weights": [1, 0, 0], "method": "gac"}), ("moved", {})):
            ids = ensemble.generate(**inputs, max_new_tokens=args.new_tokens, do_sample=False, **options)
            new_ids = ids[0, inputs.input_ids.shape[1] :]
            print(f"  {name:<8}{ensemble.tokenizer.decode(new_ids, skip_special_tokens=True)!r}")


if __name__ == "__main__":
    main()
