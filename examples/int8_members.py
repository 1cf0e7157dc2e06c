"""Members that run faster on a CPU: linear layers with 8-bit weights and activations, the head among them.

Each row of activations has its own scale, so a text does not depend on what else is in the batch. Embeddings stay as they
are, also where the head shares their weights.

    python examples/int8_members.py [--models A B] [--prompt TEXT]
"""

import argparse

import torch
from demo_models import models_or_demo
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_ensemble import EnsembleForCausalLM


class Int8Linear(nn.Module):
    """A linear layer with 8-bit weights, one scale for each output, and 8-bit activations, one scale for each row."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach().float()
        self.scale = nn.Buffer(weight.abs().amax(1).clamp_min(1e-12) / 127)
        self.weight = nn.Parameter((weight / self.scale[:, None]).round().to(torch.int8), requires_grad=False)
        self.bias = linear.bias

    def forward(self, states: Tensor) -> Tensor:
        rows = states.flatten(0, -2)
        scale = rows.abs().amax(1, keepdim=True).float().clamp_min(1e-12) / 127
        product = torch._int_mm((rows / scale).round().to(torch.int8), self.weight.t())
        found = (product * scale * self.scale).to(states.dtype).unflatten(0, states.shape[:-1])
        return found if self.bias is None else found + self.bias


def to_int8(model: nn.Module, kept: tuple[str, ...] = ("down_proj",)) -> nn.Module:
    """Replace a model's linear layers in place, except those of some names, whose activations have outliers."""
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and name.rsplit(".", 1)[-1] not in kept:
            model.set_submodule(name, Int8Linear(module))
    return model


def int8_ensemble(paths: list[str]) -> EnsembleForCausalLM:
    """An ensemble of models that are quantised once they are loaded."""
    models = [to_int8(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)) for path in paths]
    return EnsembleForCausalLM.from_members(models, [AutoTokenizer.from_pretrained(path) for path in paths])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", help="members; default: the two demo models")
    parser.add_argument("--prompt", default="The capital of France is")
    args = parser.parse_args()
    ensemble = int8_ensemble(models_or_demo(args.models))
    inputs = ensemble.tokenizer(args.prompt, return_tensors="pt")
    ids = ensemble.generate(**inputs, max_new_tokens=16, do_sample=False)
    print(ensemble.tokenizer.decode(ids[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()
