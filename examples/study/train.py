"""Fine-tune the study's members: bfloat16 weights with float32 masters, AdamW, loss on the answers only.

    python examples/study/train.py --task qamr --kind lora --seeds 0 1 2 --at-once 6
    python examples/study/train.py --task qamr --kind full --seeds 0 1 2 --at-once 6
    python examples/study/train.py --small      # two tiny members on a CPU, in a minute

A member is a folder in the study's `members`: an adapter of at most 16 MiB, or a whole model. `--checkpoints 5 25`
also keeps it as it was after 5 and 25 % of the steps. Finished members are not trained again. With `--minutes`, a run
stops in time and exits with code 3; the same command resumes it, with the same result.
"""

import argparse
import json
import math
import random
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import made_up
import side_by_side
import torch
import transformers
from cells import read_examples
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from trained import BASES, TRAIN_SETS, base_path, member_name
from transformers import AutoModelForCausalLM, AutoTokenizer

MAX_ADAPTER_BYTES = 15.5 * 2**20
MAX_TOKENS = 768
EPOCHS = {"qamr": 1, "gsm": 2}
LEARNING_RATES = {"lora": 1e-3, "full": 1e-4}

Row = tuple[list[int], list[int], int]
"""Ids of a prompt and its answer, and the bytes of the answer."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("study"), help="of the study")
    parser.add_argument("--bases", nargs="+", choices=BASES, default=list(BASES))
    parser.add_argument("--task", choices=TRAIN_SETS, default="qamr")
    parser.add_argument("--kind", choices=LEARNING_RATES, default="lora")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--epochs", type=int, help="default: 1 on QAMR, 2 on GSM8K")
    parser.add_argument("--batch-size", type=int, default=48)
    parser.add_argument("--learning-rate", type=float, help="default: 1e-3 for adapters, 1e-4 for whole models")
    parser.add_argument("--rank", type=int, help="of adapters; default: the largest multiple of 8 that fits 16 MiB")
    parser.add_argument("--checkpoints", type=int, nargs="*", default=[], metavar="PERCENT")
    parser.add_argument("--limit", type=int, help="most examples to train on, and most to watch")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after these")
    parser.add_argument("--at-once", type=int, default=1, help="how many members are trained at a time")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="tiny members, after `prepare.py --small`")
    args = parser.parse_args()
    if args.small:
        torch.set_num_threads(1)  # more threads would only wait for each other
        args.learning_rate, args.epochs, args.batch_size = args.learning_rate or 1e-2, args.epochs or 8, 8
        if not (args.folder / "bases").exists():
            examples = read_examples(args.folder, "qa_train")
            made_up.make_bases(args.folder / "bases", [x["prompt"] + " " + x["answers"][0] for x in examples])

    runs = [(base, seed) for base in args.bases for seed in args.seeds]
    if args.at_once > 1 and len(runs) > 1:
        options = [*sys.argv[1:], "--at-once", "1"]
        own = [[*options, "--bases", base, "--seeds", str(seed)] for base, seed in runs]
        return side_by_side.run_all(__file__, own, args.at_once)
    stop_at = time.monotonic() + 60 * args.minutes
    done = [Training(args, base, seed).run(stop_at) for base, seed in runs]
    return 0 if all(done) else 3


class Training:
    """The training of one member, which can stop and resume."""

    def __init__(self, args: argparse.Namespace, base: str, seed: int):
        self.args, self.base, self.seed = args, base, seed
        self.name = member_name(base, args.task, args.kind, seed)
        self.state_file = args.folder / "members" / f"{self.name}.state"
        self.log: dict[str, Any] = {"seconds": 0.0, "tokens": 0, "loss": [], "dev bits per byte": {}}
        self.step = 0

    def folder_of(self, percent: int) -> Path:
        return (
            self.args.folder / "members" / member_name(self.base, self.args.task, self.args.kind, self.seed, percent)
        )

    def run(self, stop_at: float) -> bool:
        """Train to the end or until time is up; return whether the end was reached."""
        if self.folder_of(100).exists():
            return True
        self.load()
        per_epoch = math.ceil(len(self.train) / self.args.batch_size)
        total = per_epoch * (self.args.epochs or EPOCHS[self.args.task])
        marks = {math.ceil(total * percent / 100): percent for percent in (*self.args.checkpoints, 100)}
        began = time.perf_counter()
        running: list[torch.Tensor] = []
        while self.step < total:
            if running and time.monotonic() > stop_at:
                self.log["seconds"] += time.perf_counter() - began
                self.save_state()
                print(f"{self.name}: {self.step} of {total} steps, run the command again to resume", flush=True)
                return False
            if self.step % per_epoch == 0 or not running:
                batches = self.batches(self.step // per_epoch)
            running.append(self.update(batches[self.step % per_epoch], total))
            self.step += 1
            if self.step in marks:
                mean = torch.stack(running[-max(1, total // 20) :]).mean().item()
                self.log["loss"].append([self.step, round(mean, 4)])
                self.log["seconds"] += time.perf_counter() - began
                self.save(marks[self.step], total)
                began = time.perf_counter()
        self.state_file.unlink(missing_ok=True)
        return True

    def load(self) -> None:
        args, path = self.args, base_path(self.args.folder, self.base)
        torch.manual_seed(self.seed)
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).to(args.device)
        eos = self.model.generation_config.eos_token_id
        self.eos = eos[0] if isinstance(eos, list) else eos
        if args.kind == "lora":
            self.add_adapter()
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.masters = [p.detach().float() for p in self.parameters]
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        fused = torch.device(args.device).type == "cuda"
        self.optimizer = torch.optim.AdamW(self.masters, betas=(0.9, 0.95), weight_decay=0.01, fused=fused)
        count = f":{args.limit}" if args.limit else ""
        self.train, self.dev = (
            self.encode(read_examples(args.folder, name + count)) for name in TRAIN_SETS[args.task]
        )
        if self.state_file.exists():
            state = torch.load(self.state_file, map_location=args.device)
            self.step, self.log = state["step"], state["log"]
            self.optimizer.load_state_dict(state["optimizer"])
            torch._foreach_copy_(self.masters, state["masters"])
            self.round_masters()
        self.model.train()

    def add_adapter(self) -> None:
        from peft import LoraConfig, get_peft_model

        linear = [module for name, module in self.model.named_modules() if isinstance(module, torch.nn.Linear)]
        sizes = [m.in_features + m.out_features for m in linear if m is not self.model.get_output_embeddings()]
        fitting = int(MAX_ADAPTER_BYTES / 2 / sum(sizes))
        rank = self.args.rank or max(8, fitting - fitting % 8)
        rank = min(rank, 8) if self.args.small else rank
        config = LoraConfig(r=rank, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        self.adapted = get_peft_model(self.model, config, autocast_adapter_dtype=False)

    def encode(self, examples: list[dict]) -> list[Row]:
        answers = [" " + example["answers"][0] for example in examples]
        prompt_ids = self.tokenizer([example["prompt"] for example in examples])["input_ids"]
        answer_ids = self.tokenizer(answers, add_special_tokens=False)["input_ids"]
        rows = [(p, [*a, self.eos], len(t.encode())) for p, a, t in zip(prompt_ids, answer_ids, answers, strict=True)]
        return [row for row in rows if len(row[0]) + len(row[1]) < MAX_TOKENS]

    def batches(self, epoch: int) -> list[list[Row]]:
        """Return an epoch's batches in random order, each of rows of about the same length."""
        rng, size = random.Random(f"{self.seed} {epoch}"), self.args.batch_size
        rows = rng.sample(self.train, len(self.train))
        found = []
        for start in range(0, len(rows), 50 * size):
            part = sorted(rows[start : start + 50 * size], key=lambda row: len(row[0]) + len(row[1]))
            found += [part[n : n + size] for n in range(0, len(part), size)]
        rng.shuffle(found)
        return found

    def loss(self, rows: list[Row], with_end: bool = True) -> tuple[torch.Tensor, int]:
        """Return the nats of the answers and their number of tokens."""
        width = max(len(prompt) + len(answer) for prompt, answer, _ in rows)
        ids, labels = torch.full((len(rows), width), self.eos), torch.full((len(rows), width), -100)
        for n, (prompt, answer, _) in enumerate(rows):
            stop = len(prompt) + len(answer)
            ids[n, :stop] = torch.tensor(prompt + answer)
            # The last id, which ends the answer, is not part of its bytes.
            labels[n, len(prompt) : stop - (not with_end)] = ids[n, len(prompt) : stop - (not with_end)]
        ids, labels = (
            ids.to(self.args.device, non_blocking=True),
            labels[:, 1:].to(self.args.device, non_blocking=True),
        )
        hidden = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        counts = labels != -100
        parts = zip(hidden[counts].split(1024), labels[counts].split(1024), strict=True)
        # The logits of a large vocabulary are computed again in the backward pass instead of kept.
        nats = [checkpoint(self.nats, *part, use_reentrant=False) for part in parts]
        return torch.stack(nats).sum(), sum(len(answer) - (not with_end) for _, answer, _ in rows)

    def nats(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model.get_output_embeddings()(hidden).float(), labels, reduction="sum")

    def update(self, rows: list[Row], total: int) -> torch.Tensor:
        """Take one step; return its loss per token."""
        warm, rate = max(1, total // 20), self.args.learning_rate or LEARNING_RATES[self.args.kind]
        cosine = 0.5 * (1 + math.cos(math.pi * self.step / total))
        for group in self.optimizer.param_groups:
            group["lr"] = rate * min(1, (self.step + 1) / warm) * (0.1 + 0.9 * cosine)
        nats, count = self.loss(rows)
        (nats / count).backward()
        torch._foreach_copy_([master.grad for master in self.masters], [p.grad for p in self.parameters])
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.optimizer.step()
        self.round_masters()
        self.model.zero_grad()
        self.log["tokens"] += sum(len(prompt) + len(answer) for prompt, answer, _ in rows)
        return nats.detach() / count

    @torch.no_grad()
    def round_masters(self) -> None:
        torch._foreach_copy_(self.parameters, self.masters)

    @torch.no_grad()
    def dev_bits(self) -> float:
        """Return the bits per byte of the development set's answers."""
        self.model.eval()
        nats = sum(self.loss(self.dev[n : n + 32], with_end=False)[0].item() for n in range(0, len(self.dev), 32))
        self.model.train()
        return nats / math.log(2) / sum(num_bytes for _, _, num_bytes in self.dev)

    def save(self, percent: int, total: int) -> None:
        """Save the member, completely or not at all."""
        folder = self.folder_of(percent)
        unfinished = folder.with_name(f".{folder.name}")
        shutil.rmtree(unfinished, ignore_errors=True)
        if self.args.kind == "lora":
            self.adapted.save_pretrained(unfinished, save_embedding_layers=False)
        else:
            self.model.save_pretrained(unfinished)
            self.tokenizer.save_pretrained(unfinished)
        self.log["dev bits per byte"][str(percent)] = round(self.dev_bits(), 4)
        on_gpu = torch.device(self.args.device).type == "cuda"
        about = {
            "base": self.base,
            "options": {key: str(value) for key, value in vars(self.args).items() if key not in ("bases", "seeds")},
            "steps": [self.step, total],
            "trained parameters": sum(p.numel() for p in self.parameters),
            "peak GiB": round(torch.cuda.max_memory_allocated() / 2**30, 2) if on_gpu else None,
            "versions": [torch.__version__, transformers.__version__],
            **self.log,
        }
        (unfinished / "training.json").write_text(json.dumps(about, indent=1), "utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
        print(
            f"{folder.name}: dev bits per byte {self.log['dev bits per byte']}, {self.log['seconds']:.0f} s",
            flush=True,
        )

    def save_state(self) -> None:
        state = {"step": self.step, "log": self.log, "masters": self.masters, "optimizer": self.optimizer.state_dict()}
        unfinished = self.state_file.with_suffix(".partial")
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, unfinished)
        unfinished.rename(self.state_file)


if __name__ == "__main__":
    sys.exit(main())
