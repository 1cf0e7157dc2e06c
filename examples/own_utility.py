"""Minimum Bayes risk with your own utility: how similar a language model finds two texts, compared with chrF.

    python examples/own_utility.py
    python examples/own_utility.py --reader bert-like-model --samples 8

A text's vector is the mean of the reader's last hidden states over its tokens; the utility is the cosine of two such
vectors. Plug in BERTScore or COMET in the same way: as a function of two lists of texts.
"""

import argparse
from collections.abc import Sequence

import torch
from demo_models import models_or_demo
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from hf_ensemble import EnsembleForCausalLM, MbrConfig

PROMPTS = ["The capital of France is", "To make a good cup of tea, first"]


class Alike:
    """Cosine similarity between the vectors of texts.

    Args:
        path: Hub id or path of the model that reads the texts.
    """

    def __init__(self, path: str):
        self._tokenizer = AutoTokenizer.from_pretrained(path)
        self._model = AutoModel.from_pretrained(path, dtype="float32").eval()

    def __call__(self, candidates: Sequence[str], references: Sequence[str]) -> Tensor:
        """Return one cosine per pair, of shape `(num_pairs,)`."""
        # A candidate appears in many pairs, but is read only once.
        vectors = {text: self.vector(text) for text in {*candidates, *references}}
        pairs = zip(candidates, references, strict=True)
        return torch.stack([torch.cosine_similarity(vectors[a], vectors[b], dim=0) for a, b in pairs])

    @torch.no_grad()
    def vector(self, text: str) -> Tensor:
        # An empty text would give the model no input.
        ids = self._tokenizer(text or " ", return_tensors="pt")["input_ids"]
        return self._model(ids).last_hidden_state[0].mean(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", help="members, the primary first; default: the two demo models")
    parser.add_argument("--reader", help="model whose hidden states compare texts; default: the last member")
    parser.add_argument("--samples", type=int, default=4, help="samples from each member")
    parser.add_argument("--new-tokens", type=int, default=16)
    args = parser.parse_args()
    paths = models_or_demo(args.models)
    ensemble = EnsembleForCausalLM.from_pretrained(paths, dtype="float32")
    utilities = {"chrF": "chrf", "vectors": Alike(args.reader or paths[-1])}
    options = {"do_sample": True, "temperature": 0.8, "max_new_tokens": args.new_tokens, "seed": 0}
    for prompt in PROMPTS:
        inputs = ensemble.tokenizer(prompt, return_tensors="pt")
        print(f"\n{prompt!r}")
        for name, utility in utilities.items():
            method = MbrConfig(utility=utility, num_candidates=args.samples)
            output = ensemble.generate(**inputs, method=method, return_dict_in_generate=True, **options)
            best = min(output.answers[0], key=lambda answer: answer.rank)
            (score,) = best.scores.values()
            print(f"  {name:<8} {score:7.3f}  {best.text!r}, by {best.writers[0].name}")


if __name__ == "__main__":
    main()
