"""Time drafts for large members with random weights on a GPU, with the acceptance of real members.

A 1B drafts for itself and an 8B (Llama shapes, bfloat16). Random weights write byte garbage and agree on nothing. So
the script replays a real text, and makes as many entries of each draft right as were kept in the rounds that
`speculation.py --save-acceptance` recorded with real members. Everything else is as in a normal call: the drafter's
steps, the members' checks, mixing, choosing, rolling back. Plain decoding and drafts take turns.

    python examples/benchmarks/replayed_drafts.py acceptance.json --tokenizer FOLDER_OF_LLAMA3

With `--members tiny tiny-qwen --device cpu`, the script runs without a GPU, as a check.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from large_members import ReplayingEnsemble, time_ensemble
from members import SHAPES, random_members
from report import milliseconds, print_heads, print_row, quartiles, setting
from texts import text_ids

import hf_ensemble
from hf_ensemble.decoding.speculation.decoder import SpeculativeDecoder
from hf_ensemble.decoding.speculation.drafts import NGRAM


def outcomes(path: Path, method: str, drafter: str | None) -> list[bool]:
    """For entries that a member (any, if None) drafted for real members, one after the other, whether they were kept."""
    kept: list[bool] = []
    for record in json.loads(path.read_text("utf-8")):
        if record["method"] != method:
            continue
        for name, num_drafted, num_kept in record["rounds"]:
            if num_drafted and name != NGRAM and record["speculation"] == name and drafter in (None, name):
                kept += [True] * num_kept + [False] * (num_kept < num_drafted)
    return kept


NUM_BEYOND = 64
"""Ids of the text after the last new one: a draft may reach beyond it."""


class ReplayedDecoder(SpeculativeDecoder):
    """Chooses the ids of a text, whatever the scores; drafts are them too, as far as the recorded outcomes say."""

    outcomes: Iterator[bool]
    text_ids: list[int]
    there: torch.Tensor
    """The same ids on the device of the ensemble."""
    prompt_length: int
    drafted_at = -1
    are_kept: list[bool]

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._pick, self._chooser._pick = self._chooser._pick, self._pick_replayed
        self._writer.entries_of = self._entries_replayed
        self._judge, self._drafting.judge = self._drafting.judge, self._judge_replayed

    def _pick_replayed(self, scores, entries):
        _, is_empty = self._pick(scores, entries)
        start = self.prompt_length + entries[0][1]
        return self.there[start : start + len(entries)], is_empty

    def _entries_replayed(self, ids, member):
        place = self.prompt_length + self._rows[0].num_entries
        draft = self.text_ids[place : place + len(ids)]
        if place != self.drafted_at:  # else there are more ids of the same draft
            self.drafted_at, self.are_kept = place, []
        while all(self.are_kept) and len(self.are_kept) < len(draft):
            self.are_kept.append(next(self.outcomes))
        if not all(self.are_kept):
            draft[self.are_kept.index(False)] += 1
        return draft

    def _judge_replayed(self, chains, choices, weights, drafter):
        if drafter is not None:
            self._judge(chains, choices, weights, drafter)
        else:
            # What the member would have drafted in a plain step; the random weights themselves never agree.
            is_kept = next(self.outcomes)
            self._drafting.length.judged(self._drafters[0].member.name, is_kept, not is_kept)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("acceptance", type=Path)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--members", nargs=2, default=["8B", "1B"], choices=SHAPES, help="the second drafts")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--drafter", help="take the recorded drafts of this member only")
    parser.add_argument("--methods", nargs="+", default=["unite", "gac"])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    recorded = {method: outcomes(args.acceptance, method, args.drafter) for method in args.methods}
    for method, kept in recorded.items():
        if not any(kept):
            sys.exit(
                f"replayed_drafts.py: {args.acceptance} has no kept draft of a member for {method!r}: record some"
            )
    ensemble = random_members(args.members, [args.tokenizer] * 2, [args.device], ReplayingEnsemble)
    text = text_ids(ensemble.tokenizer, args.prompt + args.new_tokens + NUM_BEYOND)
    ReplayedDecoder.text_ids = text.tolist()
    ReplayedDecoder.there = text.to(ensemble.device)
    ReplayedDecoder.prompt_length = args.prompt
    hf_ensemble.modes.drafts.SpeculativeDecoder = ReplayedDecoder
    drafter = ensemble.config.members[1].name
    prompt = text[None, : args.prompt].to(ensemble.device)
    details = "bfloat16", f"prompt {args.prompt}", f"{args.new_tokens} new tokens", f"{args.turns} turns"
    print(setting(ensemble.device, *details))
    print_heads(
        "method", "share of drafted entries kept", "plain, ms a token", "with drafts, ms a token", "written a round",
        "plain to drafts",
    )  # fmt: skip
    for method in args.methods:
        kept = recorded[method]
        ReplayedDecoder.outcomes = itertools.cycle(kept)
        plain, drafted, rounds = [], [], []
        for turn in range(args.turns + 1):
            ensemble.replayed_ids = text.tolist()
            without = time_ensemble(ensemble, prompt, args.new_tokens, method)
            ensemble.replayed_ids = None  # the decoder itself replays, so that no processor looks at every position
            with_drafts, output = time_drafts(ensemble, prompt, args.new_tokens, method, drafter)
            if turn:  # the first warms up
                plain.append(without)
                drafted.append(with_drafts)
                rounds.append(output.speculation.entries_per_round)
        ratios = [a / b for a, b in zip(plain, drafted, strict=True)]
        print_row(
            method, f"{sum(kept) / len(kept):.2f} of {len(kept)}", milliseconds(plain, 2), milliseconds(drafted, 2),
            f"{sum(rounds) / len(rounds):.2f}", quartiles(ratios, 2),
        )  # fmt: skip


def time_drafts(ensemble, ids: torch.Tensor, new_tokens: int, method: str, drafter: str):
    """Seconds a token with drafts, and the output."""
    outputs = []
    options = {"speculation": drafter, "return_dict_in_generate": True}
    seconds = time_ensemble(ensemble, ids, new_tokens, method, outputs, **options)
    return seconds, outputs[0]


if __name__ == "__main__":
    main()
