"""What the bug-bank tests share: scripts that write a given text, ensembles of such members, and what they were shown.

Which section of the bug bank stands in which file, and every case's place, is in each file's docstring.
"""

import functools
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from hf_ensemble import EnsembleForCausalLM
from hf_ensemble.config import method_config, normalize_weights
from tests import tiny
from tests.contracts import AVERAGING, MAPPED, METHODS, make_ensemble
from tests.reference import ReferenceMember

each_method = pytest.mark.parametrize("method", AVERAGING)
gac_and_slowly_unite = pytest.mark.parametrize("method", ["gac", pytest.param("unite", marks=pytest.mark.slow)])
"""For what no method has a part in."""
each_averaging_method = pytest.mark.parametrize("method", [*AVERAGING, *MAPPED])
TOKEN_METHODS = (*METHODS, *MAPPED)
each_token_method = pytest.mark.parametrize("method", TOKEN_METHODS)


def methods_by_turns(methods: Sequence[str] = AVERAGING, **values: Sequence) -> Any:
    """Parametrize over all combinations of values, with the methods by turns (they differ little in such cases)."""
    params = []
    for places in itertools.product(*(range(len(of_one)) for of_one in values.values())):
        chosen = [of_one[n] for of_one, n in zip(values.values(), places, strict=True)]
        method = methods[sum(places) % len(methods)]
        names = [" + ".join(one) if isinstance(one, tuple) else str(one) for one in chosen]
        params.append(pytest.param(method, *chosen, id="-".join([*names, method])))
    return pytest.mark.parametrize(("method", *values), params)


control_tokens_may_be_chosen = pytest.mark.filterwarnings("ignore:the primary .* wrote the control token")
members_may_be_lossy = pytest.mark.filterwarnings("ignore::UserWarning")


@functools.cache
def tokenizer_of(name: str):
    make = {
        "smol": tiny.smol_like,
        "gemma": tiny.gemma_like,
        "small": tiny.byte_level_bpe,
        "large": functools.partial(tiny.byte_level_bpe, 500),
        "holes": functools.partial(tiny.byte_level_bpe, holes=(300, 301)),
        "odd_added": tiny.odd_added_bpe,
        "nfkc": tiny.nfkc_bpe,
        "lowercase": tiny.lowercasing_bpe,
        "wordpiece": tiny.wordpiece,
        "unigram": tiny.unigram,
        "llama2": functools.partial(tiny.sentencepiece_bpe, style="llama2"),
        "metaspace": functools.partial(tiny.sentencepiece_bpe, style="metaspace"),
        "qwen": tiny.qwen_like,
        "bare": tiny.bare_bpe,
        "with_bos": functools.partial(tiny.byte_level_bpe, bos="<|start|>", add_bos=True),
    }
    return make[name]()


@functools.cache
def spelling(tokenizer) -> ReferenceMember:
    """How a tokenizer's ids spell text, by the plain reference."""
    return ReferenceMember(tiny.ScriptedModel(tokenizer), tokenizer)


def id_of(tokenizer, text: str) -> int:
    """The canonical id of an entry."""
    return spelling(tokenizer).canonical_id(text.encode())


def writer(tokenizer, *wholes: str) -> Callable:
    """A script that goes on with whichever of these texts (prompt included) the context begins, then ends it.

    It takes the longest entry that fits.
    """
    member = spelling(tokenizer)
    longest = max(map(len, member.entries))

    def script(context: tuple[int, ...]):
        seen = member.text_of_prompt(context)
        for whole in wholes:
            rest = whole.encode().removeprefix(seen)
            if rest and whole.encode().startswith(seen):
                entry = next(rest[:n] for n in range(longest, 0, -1) if rest[:n] in member.entries)
                return {member.canonical_id(entry): 1.0}
        return {tokenizer.eos_token_id: 1.0}

    return script


def ensemble_of(
    *members: tuple[Any, Any], method: Any = "unite", weights: Sequence[float] | None = None
) -> EnsembleForCausalLM:
    """An ensemble of scripted members, given as (tokenizer, script).

    Members of the same tokenizers are the same objects, with other scripts, so use one such ensemble after the other.
    """
    tokenizers = tuple(tokenizer for tokenizer, _ in members)
    ensemble = _blank_ensemble(tokenizers)
    for model, (_, script) in zip(ensemble.members, members, strict=True):
        model.script, model.prompt_length = script, 1
        model.calls.clear()
    ensemble.config.method = method_config(method)
    ensemble.config.weights = weights if weights is None else normalize_weights(weights, len(members))
    return ensemble


@functools.cache
def _blank_ensemble(tokenizers: tuple) -> EnsembleForCausalLM:
    return ready(make_ensemble([tiny.ScriptedModel(tokenizer) for tokenizer in tokenizers], tokenizers))


def ready(ensemble: EnsembleForCausalLM) -> EnsembleForCausalLM:
    """Run once, since members try out their caches then, and forget the calls of scripted members."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ensemble.generate(**ensemble.tokenizer("a", return_tensors="pt"), max_new_tokens=1)
    for model in ensemble.members:
        if isinstance(model, tiny.ScriptedModel):
            model.calls.clear()
    return ensemble


def duet(tokenizers: Sequence[str], *wholes: str, **options: Any) -> EnsembleForCausalLM:
    """Members that all write the same texts, each cut its own way."""
    members = [tokenizer_of(name) for name in tokenizers]
    return ensemble_of(*((tokenizer, writer(tokenizer, *wholes)) for tokenizer in members), **options)


def output_ids(ensemble: EnsembleForCausalLM, prompt: str | Sequence[str], **options: Any) -> list[list[int]]:
    """Greedy output for a prompt, or a batch padded by the ensemble's tokenizer."""
    is_batch = not isinstance(prompt, str) and len(prompt) > 1
    inputs = ensemble.tokenizer(prompt, return_tensors="pt", padding=is_batch)
    return ensemble.generate(**inputs, **{"max_new_tokens": 60, "do_sample": False, **options}).tolist()


def texts_of(ensemble: EnsembleForCausalLM, prompts: Sequence[str], **options: Any) -> list[str]:
    """Prompt and continuation of a batch, as the ids write them (nothing cleaned up, no special tokens)."""
    primary = spelling(ensemble.tokenizers[0])
    return [primary.text_of_prompt(ids).decode() for ids in output_ids(ensemble, prompts, **options)]


def text_of(ensemble: EnsembleForCausalLM, prompt: str, **options: Any) -> str:
    return texts_of(ensemble, [prompt], **options)[0]


def contexts_of(ensemble: EnsembleForCausalLM, index: int) -> list[tuple[int, ...]]:
    """Every context that a scripted member was shown, the first first."""
    return [context for call in ensemble.members[index].calls for context in call.contexts if context]


def texts_shown_to(ensemble: EnsembleForCausalLM, index: int) -> list[str]:
    """What these contexts spell, control tokens included by their names."""
    tokenizer = ensemble.tokenizers[index]
    member = spelling(tokenizer)
    shown = []
    for context in contexts_of(ensemble, index):
        tokens = [
            tokenizer.convert_ids_to_tokens(i).encode() if i in member.control else member.token_bytes[i]
            for i in context
        ]
        shown.append(b"".join(tokens).decode(errors="replace"))
    return shown
