"""Contrastive decoding across tokenizers: favour what an expert prefers more than an amateur does.

python examples/contrastive_decoding.py                                  # Gemma-3-270M against SmolLM2-135M-Instruct
python examples/contrastive_decoding.py --expert LARGE --amateur SMALL
"""

import argparse

from demo_models import models_or_demo

from hf_ensemble import EnsembleForCausalLM, GacConfig

PROMPTS = ["The capital of France is", "My favourite thing about winter is"]


def main() -> None:
    """Print what the expert writes alone, and what it writes when contrasted with the amateur."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--expert", help="id or path of the member to follow, which is the primary")
    parser.add_argument("--amateur", help="id or path of the member to stay away from")
    parser.add_argument("--strength", type=float, default=0.5, help="how far to stay away; 0 is the expert alone")
    parser.add_argument("--alpha", type=float, default=0.1, help="least share of the best entry's probability")
    parser.add_argument("--new-tokens", type=int, default=24)
    args = parser.parse_args()
    amateur, expert = models_or_demo([args.amateur, args.expert])

    ensemble = EnsembleForCausalLM.from_pretrained(
        [expert, amateur],
        method=GacConfig(space="log", alpha=args.alpha),
        weights=[1 + args.strength, -args.strength],
        dtype="float32",
    )
    for prompt in PROMPTS:
        inputs = ensemble.tokenizer(prompt, return_tensors="pt")
        print(f"\n{prompt!r}")
        for name, options in (("expert", {"weights": [1, 0], "method": "gac"}), ("contrastive", {})):
            ids = ensemble.generate(**inputs, max_new_tokens=args.new_tokens, do_sample=False, **options)
            new_ids = ids[0, inputs.input_ids.shape[1] :]
            print(f"  {name:<12}{ensemble.tokenizer.decode(new_ids, skip_special_tokens=True)!r}")


if __name__ == "__main__":
    main()
