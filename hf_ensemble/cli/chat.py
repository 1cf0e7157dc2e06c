"""`hf-ensemble chat`: a conversation in the terminal, streamed."""

import argparse
import contextlib
import json
import sys
from typing import Any

from transformers import TextStreamer

from ..dev_set import with_greedy
from ..errors import EnsembleError
from ..files import whole_file
from ..model import EnsembleForCausalLM
from . import arguments
from .parsers import CHAT_COMMANDS


def answer(ensemble: EnsembleForCausalLM, messages: list[dict[str, str]], **options: Any) -> str:
    """Let an ensemble answer the last message of a conversation.

    Args:
        ensemble: Its tokenizer renders the conversation.
        messages: The conversation: dictionaries with `role` and `content`.
        **options: Options of `generate`.

    Raises:
        ConfigurationError: If a chat template refuses the conversation.
    """
    tokenizer: Any = ensemble.tokenizer
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = ensemble.generate(**inputs.to(ensemble.member_views[0].device), **with_greedy(ensemble, options))
    return str(tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


class _Printer(TextStreamer):
    """Prints an answer as it is written, and keeps it."""

    text = ""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Print the next piece."""
        self.text += text
        print(text, end="\n" if stream_end else "", flush=True)


class _Chat:
    def __init__(self, ensemble: EnsembleForCausalLM, options: dict[str, Any], system: str | None):
        self.ensemble, self.options = ensemble, options
        self.begin(system)

    def begin(self, system: str | None) -> None:
        self.system = system
        self.messages = [] if system is None else [{"role": "system", "content": system}]

    def say(self, text: str) -> None:
        """Answer a message. An interrupted answer counts as far as it was shown."""
        messages = [*self.messages, {"role": "user", "content": text}]
        printer = _Printer(self.ensemble.tokenizer, skip_prompt=True, skip_special_tokens=True)
        with contextlib.suppress(KeyboardInterrupt):
            answer(self.ensemble, messages, streamer=printer, **self.options)
        if printer.text:
            self.messages = [*messages, {"role": "assistant", "content": printer.text}]

    def command(self, line: str) -> None:
        """Run a line that begins with a slash."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        if name == "/reset":
            self.begin(self.system)
        elif name == "/system":
            self.begin(rest or None)
        elif name == "/save" and rest:
            with whole_file(rest) as unfinished:
                unfinished.write_text(json.dumps(self.messages, ensure_ascii=False, indent=2), "utf-8")
            _note(f"saved in {rest}")
        else:
            _note(CHAT_COMMANDS)


def run(args: argparse.Namespace) -> None:
    """Talk until the input ends."""
    options = arguments.generate_options(args)
    chat = _Chat(arguments.load_ensemble(args), options, args.system)
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (lets `input` edit lines and remember them)
        _note(CHAT_COMMANDS)
    with arguments.seeded(args.seed):
        while (line := _read_line(is_terminal)) != "/exit":
            try:
                if line.startswith("/"):
                    chat.command(line)
                elif line:
                    chat.say(line)
            except (EnsembleError, OSError) as error:
                if not is_terminal:
                    raise
                _note(f"error: {' '.join(str(error).split())}")


def _read_line(is_terminal: bool) -> str:
    """The next line; the end of the input counts as `/exit`, and Ctrl-C in a terminal as an empty line."""
    try:
        return input("> " if is_terminal else "").strip()
    except EOFError:
        line = "/exit"
    except KeyboardInterrupt:
        if not is_terminal:
            raise
        line = ""
    if is_terminal:
        print()
    return line


def _note(text: str) -> None:
    print(text.rstrip("\n"), file=sys.stderr, flush=True)
