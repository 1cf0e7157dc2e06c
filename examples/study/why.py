"""Where an ensemble's gain comes from, and where its bits: tables from finished cells and, with members, from their steps.

    python examples/study/why.py                                                      # cells only, no model
    python examples/study/why.py --members smollm2-qamr-lora-s0 gemma-qamr-lora-s0    # these members' steps too

Leaves `why.md`, and `why.json` next to it, in the study's `report`; a later run replaces the tables that it makes anew.
Of finished cells, for pairs of members: which member's answer the ensemble gives where both are right, one or none, and
the bits there. With `--members`: where a method does not write what the better member would, and what came of the first
such place in an answer; then, at the steps of the right answers (read by all in the primary's ids, as GaC does), bits by
position, and what DeePEn's search makes of the members' distributions, beside the exact average. There an end follows
each answer.
"""

import argparse
import copy
import json
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cells import Key, read_cells
from evaluate import Ensemble
from groups import Group, as_markdown, groups_of, in_words
from marks import answers
from torch import Tensor
from trained import load

from hf_ensemble.config import method_config
from hf_ensemble.decoding.call import Call, Kept
from hf_ensemble.decoding.prompts import OwnPrompts
from hf_ensemble.decoding.step import Fused
from hf_ensemble.decoding.step_weights import StepWeights
from hf_ensemble.decoding.teacher_forcing import advance_by_blocks
from hf_ensemble.evaluation import EvaluationSet
from hf_ensemble.methods.base import eos_ids_of
from hf_ensemble.methods.deepen import Deepen, DeepenConfig
from hf_ensemble.mixing import top_entries
from hf_ensemble.recording.names import name_of
from hf_ensemble.scoring.likelihoods import Batch
from hf_ensemble.scoring.pairs import Pair, read_pairs
from hf_ensemble.scoring.token_batch import TokenBatch
from hf_ensemble.vocabulary.relative import RelativeRows

RATES = (0.05, 0.15, 0.3, 0.6, 1.0, 3.0)
ANCHORS = (4096, None)
METHODS = ("gac", "unite")
PLACES = ("first token", "later", "goes on where the member ends", "end")
KINDS = ("starts a word", "inside a word", "digits", "punctuation")
OUTCOMES = ("same answer", "both right", "made right", "made wrong", "both wrong")

Table = list[list[str]]
"""Heads, then rows."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("study"), help="of the study")
    parser.add_argument("--members", nargs="+", help="names, the primary first")
    parser.add_argument("--tasks", nargs="+", default=["qamr_test_a", "squad_test_a"], help="for the members")
    parser.add_argument("--max-new-tokens", type=int, help="default: 32, on GSM8K 256")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    tables: dict[str, Table] = {}
    for group in groups_of(read_cells(args.folder), args.folder):
        if len(group.names) == 2 and "_test_" in group.task:
            tables |= {f"{group.title}: {name}": table for name, table in by_case(group).items()}
    if args.members:
        ensemble = Ensemble(args, tuple(args.members), math.inf)
        ensemble.model = load(args.folder, args.members, args.device, args.dtype)
        for task in args.tasks:
            for name in args.members:
                ensemble.cell(Key((name,), "alone", task, "write"))
            group = Group(ensemble.cells, args.folder, [ensemble.names], task)
            for method in METHODS:
                title = f"{task}, {' + '.join(args.members)}: who {in_words(method)} overrides"
                tables[title] = overrides(ensemble, group, method)
            for name, table in at_right_answers(ensemble, group).items():
                tables[f"{task}, {' + '.join(args.members)}: {name}"] = table
    if not tables:
        sys.exit(
            f"why.py: {args.folder / 'results'} holds no pair whose members ran alone too, and there are no --members"
        )
    save(args.folder / "report", tables)


def save(folder: Path, tables: dict[str, Table]) -> None:
    """Add tables to those that are there, and write them all."""
    folder.mkdir(exist_ok=True)
    file = folder / "why.json"
    known: dict[str, Table] = json.loads(file.read_text("utf-8")) if file.exists() else {}
    known |= tables
    file.write_text(json.dumps(known, ensure_ascii=False, indent=1), "utf-8")
    parts = []
    for title, (heads, *rows) in known.items():
        parts.append(f"## {title}\n\n{as_markdown(heads, rows)}\n")
    text = "\n".join(parts)
    (folder / "why.md").write_text(text, "utf-8")
    print(text)


# From finished cells


def by_case(group: Group) -> dict[str, Table]:
    """Which member is right, and what the ensembles do then, over all seeds."""
    own = [group.exact(n).ravel() > 0 for n in range(2)]
    masks = [own[0] & own[1], own[0] & ~own[1], ~own[0] & own[1], ~own[0] & ~own[1]]
    cases = ["both right", *(f"only {name} right" for name in group.titles), "neither right"]
    shares = [f"{name}: {100 * mask.mean():.1f} %" for name, mask in zip(cases, masks, strict=True)]
    said = [np.array(group.said(n)).ravel() for n in range(2)]
    sources = ["both members'", *(f"{name}'s" for name in group.titles), "new"]
    right = [["right, %, of", *shares]]
    source = [["answers, % (right of these, %)", *sources, "gain", "by choosing", "by new answers"]]
    for system in group.systems:
        if len(group.runs(system)) < len(group.ensembles):
            continue
        marked = np.concatenate([group.marked(cell) for cell, _ in group.runs(system)])
        text = np.concatenate([answers(group.questions, cell) for cell, _ in group.runs(system)])
        right.append([in_words(system), *(f"{_percent(marked, mask):.1f}" for mask in masks)])
        same = [text == said[0], text == said[1]]
        of = [same[0] & same[1], same[0] & ~same[1], ~same[0] & same[1], ~same[0] & ~same[1]]
        gains = 100 * (marked - own[group.better])
        parts = [gains.mean(), (gains * ~of[3]).mean(), (gains * of[3]).mean()]
        source.append([in_words(system), *(f"{100 * mask.mean():.1f} ({_percent(marked, mask):.0f})" for mask in of)])
        source[-1] += [f"{value:+.1f}" for value in parts]
    tables = {"how often right in each case": right, "whose answer it is": source}
    scored = {system: group.runs(system, "score") for system in (0, 1, *group.systems)}
    full = {system: runs for system, runs in scored.items() if len(runs) == len(group.ensembles)}
    if 0 in full and 1 in full:
        bits = {system: np.concatenate([cell["bits"] for cell, _ in runs]) for system, runs in full.items()}
        tables["bits of the right answer in each case"] = [["bits of an answer, of", *shares, "all"]] + [
            [group.word(system), *(f"{_mean(values, mask):.2f}" for mask in masks), f"{values.mean():.2f}"]
            for system, values in bits.items()
        ]
        tables["bits beside the better of both members"] = against_better(
            {group.word(system): values for system, values in bits.items()}, num_members=2
        )
    return tables


def against_better(bits: dict[str, np.ndarray], num_members: int) -> Table:
    """How often, and by how much, others need fewer bits than the member that needs the fewest in all."""
    names = list(bits)
    better = min(names[:num_members], key=lambda name: bits[name].sum())
    table = [
        ["", f"fewer bits than {better}, %", "then fewer by", "more, %", "then more by", "more by 1 bit, %", "all"]
    ]
    for name in names:
        if name != better:
            more = bits[name] - bits[better]
            parts = [_percent(more < 0), _mean(-more, more < 0), _percent(more > 0), _mean(more, more > 0)]
            table.append([name, *(f"{value:.2f}" for value in (*parts, _percent(more > 1))), f"{more.mean():+.3f}"])
    return table


# Where an answer is no longer the better member's


def overrides(ensemble: Ensemble, group: Group, method: str) -> Table:
    """By position and kind of token, how often the better member wanted something else, and what came of the first time."""
    model, better = ensemble.model, group.better
    assert model is not None
    member = model.member_views[better]
    ends = {name_of(member, i) for i in member.eos_token_ids}
    own_cell = ensemble.cells[Key((ensemble.names[better],), "alone", group.task, "write")]
    was_right, said = group.marked(own_cell), answers(group.questions, own_cell)
    seen: Counter[str] = Counter()
    overridden: Counter[str] = Counter()
    came_of: dict[str, Counter[str]] = defaultdict(Counter)
    for place, decisions in decided(ensemble, group.questions, method):
        response = "".join(one.text for one in decisions)
        first: tuple[str, ...] = ("nowhere",)
        for number, one in enumerate(decisions):
            wanted = one.members[better]
            if wanted is None:
                continue
            best = wanted.best[0].text
            is_end = bool(one.control) or any(stop in one.text for stop in group.questions.stop_strings)
            member_ends = best in ends or any(stop in best for stop in group.questions.stop_strings)
            where = kinds_of(number, one.text, is_end, member_ends)
            seen.update(where)
            if not wanted.agrees:
                overridden.update(where)
                first = where if first == ("nowhere",) else first
        is_right = group.questions.is_right(response, group.questions.items[place])
        if answers(group.questions, {"responses": [response]})[0] == said[place]:
            outcome = "same answer"
        else:
            outcome = {(1, 1): "both right", (0, 1): "made right", (1, 0): "made wrong"}.get(
                (int(was_right[place]), int(is_right)), "both wrong"
            )
        for name in first:
            came_of[name][outcome] += 1
    heads = [f"beside {group.titles[better]}", "decisions", "overridden, %", "first there, answers", *OUTCOMES, "net"]
    table = [heads]
    for name in (*PLACES, *KINDS, "nowhere"):
        counts = came_of[name]
        share = f"{100 * overridden[name] / seen[name]:.1f}" if seen[name] else ""
        net = counts["made right"] - counts["made wrong"]
        row = [seen[name], share, sum(counts.values()), *(counts[outcome] for outcome in OUTCOMES), f"{net:+d}"]
        table.append([name, *map(str, row)])
    return table


def kinds_of(number: int, text: str, is_end: bool, member_ends: bool) -> tuple[str, ...]:
    """A position and, if text is written, a kind of token."""
    if is_end:
        return ("end",)
    place = "goes on where the member ends" if member_ends else "later" if number else "first token"
    core = text.strip()
    if any(sign.isdigit() for sign in core):
        return place, "digits"
    if core and not core[0].isalnum():
        return place, "punctuation"
    return place, "starts a word" if text[:1].isspace() else "inside a word"


def decided(ensemble: Ensemble, questions: EvaluationSet, method: str) -> Iterator[tuple[int, Sequence[Any]]]:
    """For each example its place in the set and the decisions of its answer."""
    model = ensemble.model
    assert model is not None
    options = {"do_sample": False, "stop_strings": questions.stop_strings, "tokenizer": model.tokenizer}
    options["max_new_tokens"] = ensemble.args.max_new_tokens or (256 if questions.marking == "number" else 32)
    options |= {"return_dict_in_generate": True, "output_decisions": True, "num_decision_entries": 1}
    for places in ensemble.batches([len(item.prompt) for item in questions.items]):
        prompts = [questions.items[place].prompt for place in places]
        inputs = model.tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left").to(model.device)
        output = model.generate(**inputs, method=method, pad_token_id=model.tokenizer.pad_token_id, **options)
        yield from zip(places, output.decisions, strict=True)


# At the steps of the right answers


class AnyRate(DeepenConfig):
    """DeePEn's options with rates above those that are allowed too."""

    def __post_init__(self) -> None:
        pass


class Steps(TokenBatch):
    """The fused steps of a batch of right answers."""

    def __iter__(self) -> Iterator[tuple[list[tuple[int, int]], Fused]]:
        """Iterate over blocks of (row, step) pairs and what the members say there."""
        for steps in advance_by_blocks(list(self._forced.values()), self._num_steps, len(self._method.union)):
            self._steps = steps
            yield steps, self._fused_step.run(self, self._plans[0][[row for row, _ in steps]])

    def folded(self, logprobs: Tensor) -> Tensor:
        """Log-probabilities of the primary's ids."""
        return self._fused_step.folded(logprobs)


def ends_as_one(logprobs: Tensor, ends: list[int]) -> Tensor:
    """Give the first of the ends the probability of all, in place."""
    end = logprobs[..., ends].logsumexp(-1)
    logprobs[..., ends] = -torch.inf
    logprobs[..., ends[0]] = end
    return logprobs


def anchors_name(count: int | None) -> str:
    return "all anchors" if count is None else f"{count:,} anchors"


def searches(kept: Kept, ends: list[int]) -> dict[str, Deepen]:
    """DeePEn by its options; those with the same anchors share their rows."""
    found = {}
    for count in ANCHORS:
        tried = {f"rate {rate:g}": AnyRate(num_anchors=count, learning_rate=rate) for rate in RATES}
        # Where the search would end.
        tried["rate 0.3, 50 steps"] = AnyRate(num_anchors=count, learning_rate=0.3, num_steps=50)
        tried["paper"] = AnyRate(num_anchors=count, variant="paper")
        made: dict[str, Deepen] = {}
        for name, config in tried.items():
            if config.variant not in made:
                eos_ids = eos_ids_of(kept.members, ends)
                made[config.variant] = config.build(kept.members, kept.union, eos_ids, kept.members[0].device)
            method = copy.copy(made[config.variant])
            method.config = config
            method._drop_graphs()  # which hold the other's rate
            found[f"DeePEn, {anchors_name(count)}, {name}"] = method
    return found


@torch.no_grad()
def at_right_answers(ensemble: Ensemble, group: Group) -> dict[str, Table]:
    """Bits by position, and DeePEn beside the exact average."""
    model = ensemble.model
    assert model is not None
    members, items = model.member_views, group.questions.items
    kept, ends = Kept(members), list(model.generation_config.eos_token_id)
    weights = StepWeights(None, len(members))
    call = Call(kept, method_config("gac"), weights)
    average = kept.method(call.config, ends)
    methods = searches(kept, ends)
    rows = {count: rows_of(kept, methods, count) for count in ANCHORS}
    names = [*group.titles, "GaC, the exact average", *methods]
    found: dict[str, list[np.ndarray]] = defaultdict(list)
    weights.expand(len(items), 1)
    for places in ensemble.batches([len(item.prompt) for item in items]):
        own = [items[place] for place in places]
        pairs = read_pairs(
            members[0], [x.prompt for x in own], [x.continuations[x.right] for x in own], model.config.chat_id
        )
        pairs = [Pair(pair.prompt, [*pair.continuation, ends[0]], pair.num_bytes) for pair in pairs]
        none = OwnPrompts(members, num_rows=len(places))
        batch = Steps(call, average, Batch(pairs, places, weights.of_prompts(places), none))
        for steps, fused in batch:
            alone = torch.eye(len(members), device=fused.weights.device)
            mixed = [average.mix(fused.logits, one.expand_as(fused.weights)).logprobs for one in alone]
            logprobs = torch.cat(
                [torch.stack([*map(batch.folded, (*mixed, fused.logprobs))]), searched(methods, fused)]
            )
            logprobs = ends_as_one(logprobs, ends)  # (D, B, V)
            targets = torch.tensor([pairs[row].continuation[step] for row, step in steps], device=model.device)
            probs, best = logprobs.exp(), logprobs.argmax(-1)
            bits = -logprobs.gather(-1, targets.expand(len(names), -1)[..., None])[..., 0] / math.log(2)
            found["bits"].append(bits.cpu().numpy())
            found["best"].append(best.cpu().numpy())
            found["right"].append((best == targets).cpu().numpy())
            for name, one in (("to primary", probs[0]), ("to average", probs[len(members)])):
                found[name].append((probs - one).abs().sum(-1).div(2).cpu().numpy())
            found["example"].append(np.array([places[row] for row, _ in steps]))
            is_end = [step + 1 == len(pairs[row].continuation) for row, step in steps]
            found["place"].append(np.where(is_end, 2, np.array([step > 0 for _, step in steps])))
            for count, own_rows in rows.items():
                found[f"loss {count}"].append(losses(own_rows, average, fused, probs).cpu().numpy())
    values = {name: np.concatenate(parts, -1) for name, parts in found.items()}
    count = len(members) + 1
    return {
        "bits by position": bits_by_position(names[:count], values, len(items)),
        "bits beside the better member, in the primary's ids": against_better(
            dict(zip(names[:count], per_example(values, len(items)), strict=False)), len(members)
        ),
        "DeePEn beside the exact average": search_table(names, values, len(members), group.num_bytes.sum(), ends[0]),
    }


def searched(methods: dict[str, Deepen], fused: Fused) -> Tensor:
    """What each search makes of a block of steps, of shape `(num_methods, num_steps, vocab_size)`."""
    parts = []
    # Few steps at a time, so that all searches find the rows that the first has formed.
    for n in range(0, len(fused.weights), 8):
        logits = [one if one is None else one[n : n + 8] for one in fused.logits]
        mixed = [method.mix(logits, fused.weights[n : n + 8]).logprobs for method in methods.values()]
        parts.append(torch.stack(mixed))
    return torch.cat(parts, 1)


def rows_of(kept: Kept, methods: dict[str, Deepen], count: int | None) -> list[RelativeRows]:
    """Each member's rows of the relative representation, against which a search's loss is computed."""
    anchors = next(method.anchors for method in methods.values() if method.config.num_anchors == count)
    weights = [member.model.get_input_embeddings().weight.detach()[: member.vocab_size] for member in kept.members]
    ids = [torch.from_numpy(own).to(weight.device) for own, weight in zip(anchors.ids, weights, strict=True)]
    return [RelativeRows(weight, own, 100.0) for weight, own in zip(weights, ids, strict=True)]


def losses(rows: Sequence[RelativeRows], average: Any, fused: Fused, probs: Tensor) -> Tensor:
    """The released search's loss, summed over anchors, at each distribution of the primary's ids.

    Args:
        rows: Each member's.
        average: GaC, which knows the ids that take part.
        fused: What the members say at the steps.
        probs: Of shape `(num_distributions, num_steps, vocab_size)`.

    Returns:
        Of shape `(num_distributions, num_steps)`.
    """
    masked = [average.masked(one, index) for index, one in enumerate(fused.logits)]
    own = [top_entries(one, min(512, one.shape[-1])) for one in masked]
    found = []
    for n, weights in enumerate(fused.weights):
        formed = [of.form(ids[n]) for of, (_, ids) in zip(rows, own, strict=True)]
        parts = [logits[n].softmax(-1) @ one for one, (logits, _) in zip(formed, own, strict=True)]
        target = (weights[:, None] * torch.stack(parts)).sum(0)  # (A,)
        there = probs[:, n, own[0][1][n]]
        there = there / there.sum(-1, keepdim=True)
        found.append((target * (target.log() - (there @ formed[0]).clamp_min(1e-30).log())).nansum(-1))
    return torch.stack(found, -1)


def per_example(values: dict[str, np.ndarray], count: int) -> np.ndarray:
    """Bits of every answer without its end, of shape `(num_distributions, num_examples)`."""
    written = values["place"] < 2
    places = values["example"][written]
    return np.array([np.bincount(places, bits[written], count) for bits in values["bits"]])


def bits_by_position(names: Sequence[str], values: dict[str, np.ndarray], count: int) -> Table:
    """Bits of an answer, and how often the best token is the right one, by position."""
    places = ("first token", "later", "end")
    table = [["", *(f"{place}, bits of an answer (best is right, %)" for place in places), "without end"]]
    for n, name in enumerate(names):
        row = []
        for place in range(3):
            mask = values["place"] == place
            row.append(f"{values['bits'][n][mask].sum() / count:.3f} ({_percent(values['right'][n], mask):.1f})")
        table.append([name, *row, f"{values['bits'][n][values['place'] < 2].sum() / count:.3f}"])
    return table


def search_table(
    names: Sequence[str], values: dict[str, np.ndarray], num_members: int, num_bytes: int, end: int
) -> Table:
    """How far each distribution is from the primary's and from the average, and whose best token it has."""
    best, written = values["best"], values["place"] < 2
    primary, average = best[0], best[num_members]
    differ = primary != average
    nothing = f"{len(primary)} steps, of which {_percent(primary == end):.0f} % the primary ends at, without a search"
    heads = [nothing, "distance to the primary", "to the average", "best is the primary's, %"]
    heads += [f"where those differ ({_percent(differ):.1f} %): primary's, %", "average's, %", "other, %"]
    heads += ["best is right, %", "bits per byte", *(f"loss, {anchors_name(count)}" for count in ANCHORS)]
    table = [heads]
    for n, name in enumerate(names):
        numbers = [values["to primary"][n].mean(), values["to average"][n].mean()]
        shares = [_percent(best[n] == primary), _percent(best[n] == primary, differ)]
        shares += [_percent(best[n] == average, differ), _percent((best[n] != primary) & (best[n] != average), differ)]
        shares.append(_percent(values["right"][n]))
        rest = [
            values["bits"][n][written].sum() / num_bytes,
            *(values[f"loss {count}"][n].mean() for count in ANCHORS),
        ]
        table.append(
            [name, *(f"{x:.3f}" for x in numbers), *(f"{x:.1f}" for x in shares), *(f"{x:.3f}" for x in rest)]
        )
    return table


def _mean(values: np.ndarray, mask: np.ndarray | None = None) -> float:
    """Mean of what a mask picks; 0 of nothing."""
    picked = values if mask is None else values[mask]
    return float(picked.mean()) if len(picked) else 0.0


def _percent(values: np.ndarray, mask: np.ndarray | None = None) -> float:
    return 100 * _mean(values, mask)


if __name__ == "__main__":
    main()
