"""The commands of `hf-ensemble`, their arguments and their help. Nothing here imports torch."""

import argparse
import inspect
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from .. import __version__

# Repeated here, because their own modules import torch; `tests/cli/test_parsers.py` compares them.
METRICS = ("exact_match", "contains")
MEASURES = ("exact_match", "F1", "accuracy", "normalized_accuracy", "bits_per_byte", "chrF", "BLEU")
DEFAULT_MEASURES = MEASURES[:-2]

CHAT_COMMANDS = """\
/reset        start a new conversation with the same system message
/system TEXT  set the system message and start a new conversation; without TEXT: no system message
/save FILE    write the conversation as JSON
/exit         end the chat, like Ctrl-D
Ctrl-C interrupts an answer.
"""


class UsageError(Exception):
    """Invalid arguments."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Report the error in one line."""
        self.exit(2, f"hf-ensemble: error: {message} (see `{self.prog} --help`)\n")


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of all commands. `command` in its result names the module of `cli` that runs it."""
    parser = _Parser(
        prog="hf-ensemble",
        description="Several language models, with different tokenizers, that decode together as one.",
        epilog="`hf-ensemble COMMAND --help` shows a command's options and examples.",
    )
    parser.add_argument("--version", action="version", version=f"hf_ensemble {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    for add_own, *groups in _COMMANDS:
        summary, _, examples = (inspect.getdoc(add_own) or "").partition("\n\nExamples:\n")
        command = subparsers.add_parser(
            add_own.__name__[1:],
            help=summary[:1].lower() + summary[1:-1],
            description=summary,
            epilog=f"examples:\n{examples}\n",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        for add in (*groups, add_own):
            add(command)
        command.add_argument("--traceback", action="store_true", help="show the whole traceback of an error")
    return parser


# Each command: its help, and what adds the arguments that it has alone


def _generate(parser: argparse.ArgumentParser) -> None:
    """Continue prompts; only the new text goes to stdout.

    Examples:
      hf-ensemble generate "The capital of France is" --members model-a model-b
      hf-ensemble generate --members my-ensemble --file prompts.txt --lines --json --output texts.jsonl
      hf-ensemble generate "The cat" --members model-a model-b --method gac --weights 0.7 0.3 --max-new-tokens 16
      hf-ensemble generate "The cat" --members model-a model-b --method unite --option top_k=5 --temperature 0.8 --seed 1
      hf-ensemble generate "Who are you?" --members chat-a model-b --chat --max-new-tokens 16
    """
    parser.add_argument("--chat", action="store_true", help="each prompt is a message, and the text the answer to it")
    parser.add_argument("--system", metavar="TEXT", help="system message, with --chat")
    _add_batch_size(parser.add_argument, "prompts that run together; ")


def _chat(parser: argparse.ArgumentParser) -> None:
    """Talk with an ensemble; answers are streamed.

    Examples:
      hf-ensemble chat --members chat-a model-b
      hf-ensemble chat --members my-chat --system "Answer in one sentence." --temperature 0.7
      hf-ensemble chat --members chat-a model-b --method gac --max-new-tokens 16

    in the conversation:
    """
    parser.set_defaults(max_new_tokens=512)
    parser.epilog = f"{parser.epilog}{textwrap.indent(CHAT_COMMANDS, '  ')}"
    parser.add_argument("--system", metavar="TEXT", help="system message")


def _compare(parser: argparse.ArgumentParser) -> None:
    """Continue the same prompts with each member alone and with the ensemble, greedily.

    Examples:
      hf-ensemble compare "The capital of France is" --members model-a model-b
      hf-ensemble compare --members my-ensemble --file prompts.txt --lines --max-new-tokens 16 --json
      hf-ensemble compare "The cat" --members model-a model-b --method gac --stop "."
    """
    parser.set_defaults(max_new_tokens=32)


def _inspect(parser: argparse.ArgumentParser) -> None:
    """Show what the members' tokenizers share, and how the members differ.

    Examples:
      hf-ensemble inspect --members model-a model-b
      hf-ensemble inspect --members my-ensemble --text prompts.txt --json
    """
    parser.add_argument("--text", metavar="FILE", help="text like those to be written; the report looks at its words")


def _doctor(parser: argparse.ArgumentParser) -> None:
    """Check the members for faults before they show in texts; exit code 1 if there are any.

    Examples:
      hf-ensemble doctor --members model-a model-b
      hf-ensemble doctor --members my-ensemble --json
    """


def _select(parser: argparse.ArgumentParser) -> None:
    """Choose the best candidate and those close to it.

    Examples:
      hf-ensemble select --members model-a model-b --scores 80.6 72.7 --save chosen
      hf-ensemble select --members model-a model-b --scores 80.6 72.7 --responses a.jsonl b.jsonl
      hf-ensemble select --members model-a model-b --examples dev.jsonl --metric contains --max-new-tokens 8 --json

    files are lines of JSON:
      --examples   {"prompt": "2 + 2 =", "reference": "4"}; a reference is a text or a list of texts
      --responses  a text, or what `hf-ensemble generate --json` writes
    """
    add = parser.add_argument_group("scores, given or measured").add_argument
    add("--scores", nargs="+", type=float, metavar="POINTS", help="one per candidate, in percent")
    add("--responses", nargs="+", metavar="FILE", help="one per candidate, to compare their lengths")
    add("--mean-lengths", nargs="+", type=float, metavar="LENGTH", help="one per candidate")
    add("--examples", metavar="FILE", help="development set to run every candidate on")
    add("--metric", choices=METRICS, help="how an answer is compared with its reference")
    _add_batch_size(add)
    add = parser.add_argument_group("limits").add_argument
    add("--max-members", type=int, metavar="N", help="default: no limit")
    add(
        "--max-gap",
        type=float,
        default=10.0,
        metavar="POINTS",
        help="maximum number of points below the best; default: 10",
    )
    add("--max-length-ratio", type=float, default=2.0, metavar="RATIO", help="default: 2")
    add("--save", metavar="FOLDER", help="save an ensemble of the chosen members there, with the best as the primary")


def _eval(parser: argparse.ArgumentParser) -> None:
    r"""Evaluate an ensemble and each of its members on files of examples.

    Examples:
      hf-ensemble eval --members model-a model-b --data questions.jsonl worked.txt --max-new-tokens 8
      hf-ensemble eval --members model-a model-b --data choices.jsonl --method gac --also gac@0.7,0.3 unite:top_k=5
      hf-ensemble eval --members model-a model-b --data questions.jsonl worked.txt --data choices.jsonl --limit 2 \
          --measures exact_match accuracy --state-file state.jsonl --time-limit 500 --table table.md --plot plot.svg \
          --responses responses.jsonl

    files are lines of JSON, all of one form:
      {"question": "Who?", "answer": ["Paris", "Paris, France"]}          exact match, F1, bits per byte, chrF, BLEU
      {"question": "Which?", "A": "this", "B": "that", "answer": "B"}     accuracy, bits per byte
      {"prompt": "2 + 2 =", "reference": "4"}                             as the first
      {"text": "Once upon a time"}                                        bits per byte
    """
    add = parser.add_argument_group("evaluation").add_argument
    add(
        "--data",
        nargs="+",
        action="append",
        required=True,
        metavar=("FILE", "WORKED"),
        help="examples, and a file of worked examples that precede each of them; can be repeated",
    )
    add(
        "--also",
        nargs="+",
        default=[],
        metavar="METHOD[:KEY=VALUE,…][@WEIGHT,…]",
        help="more methods, each a row of the table",
    )
    add("--no-members", action="store_true", help="leave out the single members")
    add(
        "--measures",
        nargs="+",
        choices=MEASURES,
        default=list(DEFAULT_MEASURES),
        help="default: all but chrF and BLEU, which need sacrebleu",
    )
    add("--limit", type=int, metavar="N", help="maximum number of examples from a file")
    add("--skip-damaged", action="store_true", help="skip examples of unknown form")
    add = parser.add_argument_group("run").add_argument
    add("--max-new-tokens", type=int, default=32, metavar="N", help="per answer; default: 32")
    _add_batch_size(add)
    add("--state-file", metavar="FILE", help="keeps finished work, so that the same command continues it")
    add(
        "--time-limit",
        type=float,
        metavar="SECONDS",
        help="stop early, with all systems on the same examples, drawn at random; exit code 1 if work is left",
    )
    add = parser.add_argument_group("output in addition to the table on stdout").add_argument
    add("--table", type=Path, metavar="FILE", help="a table: .md, .txt, .csv, .json")
    add("--plot", type=Path, metavar="FILE", help="a plot: .svg, .png, .pdf")
    add("--responses", type=Path, metavar="FILE", help="all responses with their scores: .jsonl")


def _advise(parser: argparse.ArgumentParser) -> None:
    """Find out whether an ensemble of these members pays, which one, and what it costs.

    Examples:
      hf-ensemble advise --members model-a model-b --data dev.jsonl --max-new-tokens 4
      hf-ensemble advise --members model-a model-b chat-a --data dev.jsonl --minutes 10 --state-folder state \
          --max-new-tokens 4 --page advice.html --save advised

    The file has the forms that `hf-ensemble eval` takes, with at least 20 examples, better a few hundred.
    """
    add = parser.add_argument_group("trial").add_argument
    add(
        "--data",
        nargs="+",
        required=True,
        metavar=("FILE", "WORKED"),
        help="examples, optionally with a file of worked examples that precede each of them",
    )
    add("--limit", type=int, metavar="N", help="maximum number of examples from the file")
    add("--marking", choices=("text", "number"), default="text", help="how answers are compared; default: text")
    add("--measure", choices=DEFAULT_MEASURES, help="default: exact match, accuracy, or bits per byte of texts")
    add(
        "--methods",
        nargs="+",
        default=[],
        metavar="METHOD[:KEY=VALUE,…]",
        help="default: gac, unite, spans of one and of four words, vote, mbr, rerank",
    )
    add(
        "--least-gain",
        type=float,
        default=0.01,
        metavar="GAIN",
        help="smallest gain worth having; default: 0.01, one point",
    )
    add = parser.add_argument_group("run").add_argument
    add("--minutes", type=float, default=10.0, metavar="MINUTES", help="time limit, not counting loading; default: 10")
    add("--max-new-tokens", type=int, default=32, metavar="N", help="per answer; default: 32")
    _add_batch_size(add)
    add("--state-folder", metavar="FOLDER", help="keeps finished work, so that the same command continues it")
    add = parser.add_argument_group("output in addition to the advice").add_argument
    add("--page", type=Path, metavar="FILE", help="a page with plots: .html")
    add("--save", metavar="FOLDER", help="save the chosen ensemble there, unless the answer is no")


def _serve(parser: argparse.ArgumentParser) -> None:
    """Serve an ensemble as `transformers serve` serves a model.

    Examples:
      hf-ensemble serve --members chat-a model-b
      hf-ensemble serve --members my-chat --port 8080 --name my-chat
      hf-ensemble serve --members chat-a model-b --method gac --weights 0.7 0.3 --host 0.0.0.0 --api-key-env MY_KEY
    """
    parser.add_argument("--host", default="localhost", help="default: localhost")
    parser.add_argument("--port", type=int, default=8000, help="default: 8000; 0 for any free port")
    parser.add_argument("--name", help="model name that clients use (default: the members' names, joined by +)")
    parser.add_argument("--enable-cors", action="store_true", help="allow requests from web pages of other hosts")
    parser.add_argument("--log-level", default="info", choices=["error", "warning", "info", "debug"])
    parser.add_argument("--api-key-env", metavar="NAME", help="environment variable that holds the key of clients")
    add = parser.add_argument_group("limits").add_argument
    add("--max-batch", type=int, help="maximum number of texts written together (default: 32)")
    add("--max-waiting", type=int, help="maximum number of waiting texts; any more get a 503 (default: 256)")
    add("--max-new-tokens", type=int, help="maximum number of tokens per request; more get a 400 (default: 4096)")
    add(
        "--max-seconds", type=float, help="maximum number of seconds per request; longer ones get a 504 (default: 600)"
    )
    add(
        "--max-body-bytes",
        type=int,
        help="maximum number of bytes in a request body; larger ones get a 413 (default: 1048576)",
    )


# Arguments that several commands take


def _add_members(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("members").add_argument
    add(
        "--members",
        nargs="+",
        required=True,
        metavar="MODEL",
        help="Hub ids or paths, the primary first, or one saved ensemble",
    )
    add("--dtype", nargs="+", help="dtype of the weights: one, or one per member")
    add("--device-map", nargs="+", help="device of the weights: one, or one per member")
    add("--revision", nargs="+", help="branch, tag or commit on the Hub: one, or one per member")
    add(
        "--allow-remote",
        action="store_true",
        help="allow a saved ensemble to contact its servers and start its actors",
    )
    add("--member-key-env", metavar="NAME", help="environment variable with the key for a saved ensemble's servers")


def _add_method(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("method").add_argument
    add("--method", help="name of a method; a wrong name lists them all (default: as saved, else unite)")
    _add_pairs(add, "--option", "an option of the method; can be repeated")
    add("--weights", nargs="+", type=float, metavar="WEIGHT", help="mixing weights, one per member")


def _add_prompts(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("prompts").add_argument
    add("prompt", nargs="*", metavar="PROMPT", help="texts, before `--members` (default: all of stdin as one)")
    add("--file", help="file to read the prompts from instead")
    add("--lines", action="store_true", help="each line of the file, or of stdin, is a prompt")


def _add_lengths(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("texts").add_argument
    add("--max-new-tokens", type=int, default=128, metavar="N", help="default: %(default)s")
    add("--stop", action="append", metavar="TEXT", help="ends a text; can be repeated")
    _add_pairs(add, "--set", "any other option of `generate`, as JSON or a plain word; can be repeated")


def _add_pairs(add: Any, name: str, what: str) -> None:
    add(name, action="append", default=[], metavar="KEY=VALUE", help=what)


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("sampling (greedy decoding without any of these)").add_argument
    add("--sample", action="store_true", help="sample tokens")
    add("--temperature", type=float, metavar="T")
    add("--top-k", type=int, metavar="K")
    add("--top-p", type=float, metavar="P")
    add("--seed", type=int)


def _add_batch_size(add: Any, what: str = "") -> None:
    add("--batch-size", type=int, default=8, metavar="N", help=f"{what}default: 8")


def _add_output(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("output").add_argument
    add("--json", action="store_true", help="JSON instead of text")
    add("--output", metavar="FILE", help="file to write when everything is done (default: stdout)")


_COMMANDS: tuple[tuple[Callable[[argparse.ArgumentParser], None], ...], ...] = (
    (_generate, _add_prompts, _add_members, _add_method, _add_lengths, _add_sampling, _add_output),
    (_chat, _add_members, _add_method, _add_lengths, _add_sampling),
    (_compare, _add_prompts, _add_members, _add_method, _add_lengths, _add_output),
    (_inspect, _add_members, _add_output),
    (_doctor, _add_members, _add_output),
    (_select, _add_members, _add_lengths, _add_output),
    (_eval, _add_members, _add_method),
    (_advise, _add_members, _add_output),
    (_serve, _add_members, _add_method),
)
"""The commands, each with the shared arguments that it takes."""
