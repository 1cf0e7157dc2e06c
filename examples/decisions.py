"""Write a page that shows in a browser which member decided each token.

python examples/decisions.py                                             # SmolLM2-135M-Instruct and Gemma-3-270M
python examples/decisions.py --models A B --method unite --output page.html
"""

import argparse

from demo_models import models_or_demo

from hf_ensemble import EnsembleForCausalLM

PROMPTS = ["The capital of France is", "Once upon a time"]


def main() -> None:
    """Generate, write the page, and print each member's share of the decisions."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", help="ids or paths of the members, the primary first")
    parser.add_argument("--method", default="gac")
    parser.add_argument("--output", default="decisions.html", help="the page to write")
    parser.add_argument("--new-tokens", type=int, default=48)
    args = parser.parse_args()

    ensemble = EnsembleForCausalLM.from_pretrained(models_or_demo(args.models), method=args.method, dtype="float32")
    inputs = ensemble.tokenizer(PROMPTS, return_tensors="pt", padding=True)
    output = ensemble.generate(
        **inputs,
        max_new_tokens=args.new_tokens,
        do_sample=False,
        return_dict_in_generate=True,
        output_decisions=True,
    )
    all_decisions = [decision for row in output.decisions for decision in row]
    for index, name in enumerate(output.decisions.members):
        decided = sum(decision.decided_by == index for decision in all_decisions)
        agreed = sum(index in decision.agreeing for decision in all_decisions)
        print(f"{name}: decided {decided} of {len(all_decisions)}, its own best was chosen {agreed} times")
    output.decisions.to_html(args.output)
    print(f"page: {args.output}")


if __name__ == "__main__":
    main()
