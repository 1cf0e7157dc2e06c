"""Hostile folders of members and saved ensembles: each function spoils one thing in a copy."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

CODE = "open({canary!r}, 'w').write('executed')\nfrom transformers import LlamaConfig as C, LlamaForCausalLM as M\n"
DEEP = "[" * 100_000 + "]" * 100_000


def edited(file: Path, **changes: Any) -> None:
    """Change values of a JSON file."""
    file.write_text(json.dumps({**json.loads(file.read_text("utf-8")), **changes}), "utf-8")


def _appended(file: Path, text: str) -> None:
    """Put something before the closing brace of a JSON file."""
    file.write_text(f"{file.read_text('utf-8').rstrip()[:-1]}, {text}}}", "utf-8")


def _tokenizer(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    values = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    change(values)
    (folder / "tokenizer.json").write_text(json.dumps(values), "utf-8")


def _link(file: Path, target: Path) -> None:
    file.unlink(missing_ok=True)
    file.symlink_to(target)


def _pickle(folder: Path, name: str) -> None:
    class Harmful:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return os.system, ("true",)

    (folder / "model.safetensors").unlink()
    torch.save({"model.embed_tokens.weight": Harmful()}, folder / name)


def _index(folder: Path, file: str) -> None:
    (folder / "model.safetensors").unlink(missing_ok=True)
    index = {"metadata": {}, "weight_map": {"model.embed_tokens.weight": file}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")


def _pickle_by_index(folder: Path) -> None:
    _pickle(folder, "weights.bin")
    _index(folder, "weights.bin")


def _own_code(folder: Path, canary: Path, file: str, **changes: Any) -> None:
    (folder / "own.py").write_text(CODE.format(canary=str(canary / "executed")), "utf-8")
    edited(folder / file, **changes)


HARMLESS = ("code of its own beside a known model type", "tokenizer_config.json that names files elsewhere")
"""What is loaded, since nothing of it has to be looked at."""

_CLASSES = {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}

MEMBERS: dict[str, Callable[[Path, Path], Any]] = {
    "config.json nested 100,000 deep": lambda f, c: (f / "config.json").write_text(
        f'{{"model_type": "llama", "x": {DEEP}}}'
    ),
    "config.json with vocab_size 10**12": lambda f, c: edited(f / "config.json", vocab_size=10**12),
    "config.json with 10**9 layers": lambda f, c: edited(f / "config.json", num_hidden_layers=10**9),
    "config.json with 5,000 layers": lambda f, c: edited(f / "config.json", num_hidden_layers=5000),
    "config.json with hidden_size 2**20": lambda f, c: edited(f / "config.json", hidden_size=2**20),
    "config.json with a text for a number": lambda f, c: edited(f / "config.json", hidden_size="large"),
    "config.json with a list for a name": lambda f, c: edited(f / "config.json", model_type=["llama"]),
    "config.json with one key twice": lambda f, c: _appended(f / "config.json", '"vocab_size": 7'),
    "config.json that is no object": lambda f, c: (f / "config.json").write_text("[1, 2]"),
    "code of its own for the model": lambda f, c: _own_code(f, c, "config.json", model_type="own", auto_map=_CLASSES),
    HARMLESS[0]: lambda f, c: _own_code(f, c, "config.json", auto_map=_CLASSES),
    "code of its own for the tokenizer": lambda f, c: _own_code(
        f, c, "tokenizer_config.json", tokenizer_class="Own", auto_map={"AutoTokenizer": ["own.M", "own.M"]}
    ),
    "weights as a pickle": lambda f, c: _pickle(f, "pytorch_model.bin"),
    "weights as a pickle, by the index": lambda f, c: _pickle_by_index(f),
    "weights of an index at ../": lambda f, c: _index(f, "../canary/weights.safetensors"),
    "weights of an index at an absolute path": lambda f, c: _index(f, str(c / "weights.safetensors")),
    "weights that config.json names at ../": lambda f, c: edited(
        f / "config.json", transformers_weights="../canary/weights.safetensors"
    ),
    "weights cut short": lambda f, c: os.truncate(f / "model.safetensors", 5000),
    "weights whose head claims 2**60 bytes": lambda f, c: (f / "model.safetensors").write_bytes(
        (2**60).to_bytes(8, "little") + b"{}"
    ),
    "weights that are not all there": lambda f, c: _some_weights(f),
    HARMLESS[1]: lambda f, c: edited(
        f / "tokenizer_config.json", tokenizer_file=str(c / "secret.txt"), vocab_file=str(c / "secret.txt")
    ),
    "tokenizer.json nested 100,000 deep": lambda f, c: _appended(f / "tokenizer.json", f'"x": {DEEP}'),
    "tokenizer.json with the id 4294967000": lambda f, c: _tokenizer(
        f, lambda t: t["model"]["vocab"].update({"<x>": 4294967000})
    ),
    "tokenizer.json with the id 10**12": lambda f, c: _tokenizer(
        f, lambda t: t["model"]["vocab"].update({"<x>": 10**12})
    ),
    "tokenizer.json that pads to 10**10 ids": lambda f, c: _tokenizer(f, lambda t: t.update(padding=_PADDING)),
    "tokenizer.json that is no text": lambda f, c: (f / "tokenizer.json").write_bytes(b"\xff" * 100),
    "chat_template.jinja that links to another file": lambda f, c: _link(f / "chat_template.jinja", c / "secret.txt"),
    "generation_config.json with 10**9 beams": lambda f, c: (f / "generation_config.json").write_text(
        '{"num_beams": 1000000000}'
    ),
    "generation_config.json of wrong types": lambda f, c: (f / "generation_config.json").write_text(
        '{"max_new_tokens": "x"}'
    ),
}
"""What is done to a member's folder, given a folder that nothing may be read in."""

_PADDING = {
    "strategy": {"Fixed": 10**10}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
    "pad_token": "<end>",
}  # fmt: skip


def _some_weights(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _member(folder: Path, **changes: Any) -> None:
    values = json.loads((folder / "config.json").read_text("utf-8"))
    values["members"][0].update(changes)
    edited(folder / "config.json", members=values["members"])


def _many_members(folder: Path) -> None:
    values = json.loads((folder / "config.json").read_text("utf-8"))
    edited(folder / "config.json", members=values["members"] * 500_000)


def _deep_method() -> dict[str, Any]:
    method: dict[str, Any] = {"name": "unite"}
    for _ in range(200):
        method = {"name": "fuse", "model": "x", "ranker": method}
    return method


def _linked_member(folder: Path, canary: Path) -> None:
    shutil.rmtree(folder / "members" / "one")
    (folder / "members" / "one").symlink_to(canary)


def _unfinished(folder: Path, canary: Path) -> None:
    """A save that was stopped, whose members would take the place of folders of other people."""
    (canary / "one").mkdir(exist_ok=True)
    (folder / ".saved").mkdir()
    shutil.move(folder / "members", folder / ".saved" / "members")
    (folder / "members").symlink_to(canary)


ENSEMBLES: dict[str, Callable[[Path, Path], Any]] = {
    "config.json nested 100,000 deep": lambda f, c: (f / "config.json").write_text(
        f'{{"model_type": "hf_ensemble", "members": {DEEP}}}'
    ),
    "a method nested 200 deep": lambda f, c: edited(f / "config.json", method=_deep_method()),
    "a million members": lambda f, c: _many_members(f),
    "itself as a member": lambda f, c: _member(f, path="."),
    "a member of a wrong type": lambda f, c: _member(f, path=3),
    "a member above the root of the disk": lambda f, c: _member(f, path="../" * 60 + "etc"),
    "a member at ../ that is no model": lambda f, c: _member(f, path="../canary"),
    "a member at an absolute path that is no model": lambda f, c: _member(f, path=str(c)),
    "a subfolder ../": lambda f, c: _member(f, subfolder="../../canary"),
    "a GGUF file at ../": lambda f, c: _member(f, gguf_file="../../canary/secret.txt"),
    "a tokenizer at an absolute path": lambda f, c: _member(f, tokenizer=str(c)),
    "a tokenizer's file elsewhere": lambda f, c: _member(
        f, tokenizer_kwargs={"tokenizer_file": str(c / "secret.txt")}
    ),
    "a tokenizer with trust_remote_code": lambda f, c: _member(f, tokenizer_kwargs={"trust_remote_code": True}),
    "a bundled member that links elsewhere": lambda f, c: _linked_member(f, c),
    "a bundled file that links elsewhere": lambda f, c: _link(
        f / "members" / "one" / "tokenizer.json", c / "secret.txt"
    ),
    "an unfinished save that links elsewhere": lambda f, c: _link(f / ".saved", c),
    "an unfinished save over a link to elsewhere": lambda f, c: _unfinished(f, c),
    "weights NaN": lambda f, c: edited(f / "config.json", weights=[float("nan"), 1.0]),
    "weights Infinity": lambda f, c: edited(f / "config.json", weights=[float("inf"), 1.0]),
    "weights twice": lambda f, c: _appended(f / "config.json", '"weights": [1, 0]'),
    "primary_config with 10**9 layers": lambda f, c: edited(
        f / "config.json", primary_config={"model_type": "gemma3_text", "num_hidden_layers": 10**9}
    ),
    "a function to import": lambda f, c: edited(
        f / "config.json", method={"name": "vote", "extract": {"function": "os:system"}}
    ),
    "a server to send prompts to": lambda f, c: edited(
        f / "config.json", members=[{"url": "http://127.0.0.1:9/v1", "model": "x", "tokenizer": "./members/one"}]
    ),
    "a Ray actor to start": lambda f, c: _member(f, ray={"num_cpus": 10**9}),
    "generation_config.json of wrong types": lambda f, c: (f / "generation_config.json").write_text(
        '{"max_new_tokens": [1]}'
    ),
}
"""What is done to the folder of a saved ensemble whose members are bundled."""
