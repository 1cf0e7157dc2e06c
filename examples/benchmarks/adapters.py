"""Time and memory of adapters that share one model's weights, compared with the same members with separate weights.

The script makes adapters with random numbers for a model. Both ensembles write the same text in turns, so they run
under the same conditions. In one, the members' rows share one forward pass per step; in the other, each member runs by
itself.

    python examples/benchmarks/adapters.py [--models MODEL]
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch
from members import models_or_demo
from peft import LoraConfig, get_peft_model
from report import milliseconds, print_heads, print_row, setting
from texts import text_ids
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_ensemble import EnsembleForCausalLM, MemberConfig
from hf_ensemble.members.member_model import tensors_of


def make_adapters(model: str, folder: Path, count: int) -> list[str]:
    """Write LoRA adapters with random numbers, of ranks 4, 8, 12 and so on.

    Args:
        model: The model's folder or id.
        folder: The folder to write to.
        count: Number of adapters.
    """
    places = []
    for number in range(count):
        torch.manual_seed(number)
        config = LoraConfig(r=4 * (number + 1), target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        places.append(str(folder / f"adapter-{number}"))
        adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), config)
        with torch.no_grad():
            for name, weight in adapted.named_parameters():
                if "lora_B" in name:
                    weight.mul_(0.1)
        adapted.save_pretrained(places[-1])
    return places


def megabytes(ensemble: EnsembleForCausalLM) -> float:
    """Return the size of all members' weights and buffers, counting shared ones once."""
    return sum(tensor.nbytes for tensor in tensors_of(ensemble.members)) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", help="the first is the adapters' model; default: the first demo model")
    parser.add_argument("--adapters", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    model = str(models_or_demo(args.models)[0])
    with tempfile.TemporaryDirectory() as folder:
        adapters = make_adapters(model, Path(folder), args.adapters)
        items = [MemberConfig(path=model, adapter=place, name=Path(place).name) for place in adapters]
        ensembles = {"weights shared": EnsembleForCausalLM.from_pretrained(items, dtype=torch.float32)}
        alone = [EnsembleForCausalLM.from_pretrained([item], dtype=torch.float32) for item in items]
    ensembles["weights of their own"] = EnsembleForCausalLM.from_members(
        [one.members[0] for one in alone],
        [one.tokenizer for one in alone],
        member_configs=[MemberConfig(name=item.name) for item in items],
    )
    plain = sum(
        weight.nbytes for weight in AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).parameters()
    )
    print(
        setting("cpu", "float32", f"{args.adapters} adapters on {Path(model).name}", f"the model {plain / 1e6:.1f} MB")
    )
    print_heads("members", "batch", "weights, MB", "ms a token", "same text")
    ids = text_ids(AutoTokenizer.from_pretrained(model), args.prompt)
    for batch in args.batches:
        inputs = ids[None].expand(batch, -1)
        seconds: dict[str, list[float]] = {name: [] for name in ensembles}
        written: dict[str, list[int]] = {}
        for repeat in range(args.repeats + 1):  # the first one warms up
            for name, ensemble in ensembles.items():
                start = time.perf_counter()
                output = ensemble.generate(
                    inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=args.new_tokens,
                    min_new_tokens=args.new_tokens, do_sample=False,
                )  # fmt: skip
                written[name] = output[0].tolist()
                if repeat:
                    seconds[name].append((time.perf_counter() - start) / args.new_tokens)
        same = len({tuple(text) for text in written.values()}) == 1
        for name, ensemble in ensembles.items():
            print_row(name, batch, f"{megabytes(ensemble):.1f}", milliseconds(seconds[name]), "yes" if same else "no")


if __name__ == "__main__":
    main()
