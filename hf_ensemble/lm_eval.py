"""An ensemble as a model of lm-evaluation-harness.

`python -m hf_ensemble.lm_eval run --model hf_ensemble --model_args members=a,b,method=gac --tasks …` registers it and
hands over to the harness's own command line, which cannot add models itself. In Python, pass an `EnsembleLM` to
`lm_eval.simple_evaluate(model=…)`.
"""

import ast
import dataclasses
import json
import logging
import re
import sys
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase, StoppingCriteria

from .chat.memory import forget
from .config import METHODS, MethodConfig, method_config
from .errors import ConfigurationError
from .members.state import padded_left
from .model import EnsembleForCausalLM
from .optional_packages import install
from .scoring.pairs import encode_text

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import Collator, normalize_gen_kwargs, postprocess_generated_text, resolve_max_length
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise ImportError(f"hf_ensemble.lm_eval needs lm-evaluation-harness: {install('lm-eval')}.") from error

logger = logging.getLogger(__name__)

Ids = list[int]


@register_model("hf_ensemble")
class EnsembleLM(TemplateLM):
    """An ensemble, or a single model, that lm-evaluation-harness evaluates.

    Give one of `members`, `pretrained` and `ensemble`.

    Args:
        members: Hub ids or paths of the members, the primary first: a list, or one string with commas.
        pretrained: Hub id or path of a saved ensemble or of a single model.
        ensemble: A loaded ensemble.
        method: Name of the method. Default: the ensemble's own, else `"gac"`, which gives every token a probability.
        weights: Mixing weights: a list, or one string with commas.
        batch_size: Number of requests that run together.
        device: Device of the members. Default: the GPU if there is one, else the CPU. `"cuda:0"`, the default of the
            harness's command line, also means the CPU if there is no GPU, as in its `hf` model.
        dtype: Dtype of the members' weights, as in `from_pretrained`.
        max_length: Largest number of the primary's ids in a request; longer prompts are cut on the left. Default: the
            smallest of the members' own.
        max_gen_toks: Largest number of new ids, if a task does not set it.
        max_batch_size: Refused: it is for `batch_size="auto"`.
        **options: The method's options, by name (`threshold`, `top_k`, …); others go to `from_pretrained`.

    Raises:
        ConfigurationError: If an argument does not fit.
    """

    def __init__(
        self,
        members: str | Sequence[str] | None = None,
        pretrained: str | None = None,
        ensemble: EnsembleForCausalLM | None = None,
        method: str | None = None,
        weights: str | Sequence[float] | None = None,
        batch_size: int | str = 8,
        device: str | None = None,
        dtype: Any = "auto",
        max_length: int | None = None,
        max_gen_toks: int = 256,
        max_batch_size: int | None = None,
        **options: Any,
    ):
        super().__init__()
        sources = {"members": members, "pretrained": pretrained, "ensemble": ensemble}
        given = [name for name, value in sources.items() if value is not None]
        if len(given) != 1:
            raise ConfigurationError(f"give one of `members`, `pretrained` and `ensemble`: got {given or 'none'}.")
        if not str(batch_size).isdecimal() or int(batch_size) < 1 or max_batch_size is not None:
            raise ConfigurationError(
                "`batch_size` has to be a positive integer, but is "
                f"{batch_size!r}{' with a `max_batch_size`' if max_batch_size is not None else ''}. It cannot be "
                "found automatically."
            )
        names = {option.name for option in dataclasses.fields(METHODS[method])} if method in METHODS else set()
        method_options = {name: options.pop(name) for name in names & set(options)}
        config = None if method is None else method_config({"name": method, **method_options})
        shares = [float(part) for part in weights.split(",")] if isinstance(weights, str) else weights
        if ensemble is None:
            source: Any = pretrained
            if members is not None:
                source = members.split(",") if isinstance(members, str) else list(members)
                config = config or method_config("gac")
            if not torch.cuda.is_available() and device in (None, "cuda:0"):
                logger.warning("There is no GPU: members run on the CPU.")
                device = "cpu"
            ensemble = EnsembleForCausalLM.from_pretrained(
                source, method=config, weights=shares, dtype=dtype, **{"device_map": device or "cuda", **options}
            )
            config, shares = None, None
        elif options:
            raise ConfigurationError(
                f"`{next(iter(options))}` cannot be used with an ensemble that is already loaded."
            )
        self.ensemble = ensemble
        self.tokenizer = ensemble.tokenizer
        self._call: dict[str, Any] = {"method": config, "weights": shares}
        self.batch_size = int(batch_size)
        pairs = zip(ensemble.members, ensemble.tokenizers, strict=True)
        own_lengths = (resolve_max_length(model.config, tokenizer) for model, tokenizer in pairs)
        self.max_length = min(own_lengths) if max_length is None else max_length
        self.max_gen_toks = max_gen_toks

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> "EnsembleLM":
        """Create one from `members=a,b,method=gac,…`; a piece without `=` belongs to the value before it.

        Args:
            arg_string: Names and values.
            additional_config: What the harness adds from its own command line; None values are ignored.

        Raises:
            ConfigurationError: If the text has another form, or an argument does not fit.
        """
        arguments = {name: _value_of(value) for name, value in _split_arguments(arg_string)}
        return cls.create_from_arg_obj(arguments, additional_config)  # type: ignore[no-any-return]

    # What the harness asks about the model

    @property
    def device(self) -> torch.device:
        """The device of the primary's ids."""
        return self.ensemble.member_views[0].device

    @property
    def eot_token_id(self) -> int:
        """The primary's EOS."""
        return self.tokenizer.eos_token_id  # type: ignore[no-any-return]

    @property
    def prefix_token_id(self) -> int:
        """The id that starts a text without a prompt: the primary's BOS, else its EOS."""
        bos: int | None = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        """Name of the primary's tokenizer, for the harness's cache of requests."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """Return the information that the harness keeps with its results."""
        config = self.ensemble.config
        return {
            "members": [member.name for member in self.ensemble.member_views],
            "method": self._method.to_dict(),
            "weights": self._call["weights"] or config.weights,
            "model_num_parameters": sum(p.numel() for p in self.ensemble.parameters()),
            "model_dtype": str(self.ensemble.dtype),
        }

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> Ids:
        """Encode text with the primary's tokenizer, with its BOS rule unless the text spells the BOS.

        Args:
            string: The text.
            add_special_tokens: False if the text does not begin here, so that no BOS is put before it.
            **kwargs: Not read.
        """
        ids = encode_text(self.ensemble.member_views[0], string, starts=add_special_tokens is not False)
        forget(self.ensemble.config.chat_id, [ids])
        return ids

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Write a conversation as text, by the primary's chat template.

        Args:
            chat_history: Turns with `role` and `content`.
            add_generation_prompt: Whether an answer begins; otherwise the last turn is continued.
        """
        text = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return str(text)

    # Likelihoods

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], Ids, Ids]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        rows = [(context or [self.prefix_token_id], continuation) for _, context, continuation in requests]
        found = self._score(rows, disable_tqdm)
        for (texts, _, _), score in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, score)
        return found

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of whole texts, in disjoint windows of `max_length` ids; the first starts from BOS or EOS.

        A BOS that the tokenizer itself puts in front of a text is not scored.

        Args:
            requests: Requests of the harness, each with a text.
            disable_tqdm: Whether to show no progress.

        Returns:
            The natural log-probability of each text.
        """
        windows: list[list[tuple[Ids, Ids]]] = []
        for request in requests:
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            rolling = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1)
            windows.append(list(map(make_disjoint_window, rolling)))
        found = iter(self._score(list(chain.from_iterable(windows)), disable_tqdm))
        totals = [sum(next(found)[0] for _ in own) for own in windows]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _score(self, rows: Sequence[tuple[Ids, Ids]], disable_tqdm: bool) -> list[tuple[float, bool]]:
        cut = []
        for context, continuation in rows:
            if len(continuation) > self.max_length:
                raise ConfigurationError(
                    f"a continuation has {len(continuation)} ids, but `max_length` is {self.max_length}. Score it with "
                    "a rolling task."
                )
            # The last id is predicted, not read.
            num_kept = self.max_length + 1 - len(continuation)
            if len(context) > num_kept:
                logger.warning("a prompt of %d ids is cut to its last %d.", len(context), num_kept)
            cut.append((context[-num_kept:], continuation))
        order = Collator(cut, sort_fn=lambda row: (-len(row[0]), row[0], -len(row[1])))
        found: list[tuple[float, bool]] = self._run(order, self._score_batch, disable_tqdm, "loglikelihood")
        if num_impossible := sum(log_prob == -float("inf") for log_prob, _ in found):
            method = self.get_model_info()["method"]["name"]
            logger.warning(
                f"{num_impossible} of {len(found)} continuations have probability 0, because method {method!r}, which "
                "mixes only the members' best entries, gives one of their tokens none. To compute likelihoods, use "
                "another method or a larger `top_k`."
            )
        return found

    def _score_batch(self, rows: Sequence[tuple[Ids, Ids]]) -> list[tuple[float, bool]]:
        scores = self.ensemble.score(*zip(*rows, strict=True), batch_size=self.batch_size, **self._call)
        return list(zip(scores.log_probs.tolist(), scores.is_greedy.tolist(), strict=True))

    # Texts

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Continue each request's text up to one of its stop strings, the end of the text or its limit of new ids.

        Args:
            requests: Requests of the harness, each with a text and options of its task.
            disable_tqdm: Whether to show no progress.

        Returns:
            The new texts, each without its stop string.

        Raises:
            ConfigurationError: If the new ids leave no room for a prompt.
        """
        order = Collator(
            [(request.args, self.tok_encode(request.args[0])) for request in requests],
            sort_fn=lambda row: -len(row[1]),
            group_by="gen_kwargs",
            group_fn=lambda row: {"options": json.dumps(row[0][1], sort_keys=True, default=str)},
        )
        return self._run(order, self._continue, disable_tqdm, "generate_until")

    def _continue(self, rows: Sequence[tuple[tuple[str, dict[str, Any]], Ids]]) -> list[str]:
        """Continue texts with the same options; a row holds the request and the text's ids."""
        settings: dict[str, Any] = dict(normalize_gen_kwargs(rows[0][0][1], self.max_gen_toks))
        num_new = settings.pop("max_gen_toks")
        stops = [stop for stop in settings.pop("until") if stop]
        if not settings["do_sample"]:
            settings.pop("temperature", None)
        # A method's options for its candidates apply to every task.
        own = self._method.generate_options_beside(None)
        num_new = own.get("max_new_tokens", num_new)
        room = self.max_length - num_new
        if room < 1:
            raise ConfigurationError(
                f"{num_new} new ids leave no room for a prompt, because `max_length` is {self.max_length}. Ask for "
                "fewer."
            )
        ids, mask = padded_left([prompt[-room:] or [self.prefix_token_id] for _, prompt in rows])
        pad_id = self.eot_token_id if self.tokenizer.pad_token_id is None else self.tokenizer.pad_token_id
        options = {"max_new_tokens": num_new, "pad_token_id": pad_id, **self._stopping(stops, ids.shape[1])}
        output: Tensor = self.ensemble.generate(
            input_ids=ids.to(self.device),
            attention_mask=mask.to(self.device),
            **{**options, **settings, **own, **self._call},
        )
        stops = [*stops, self.tokenizer.decode([self.eot_token_id])] if self.eot_token_id is not None else stops
        texts = self.tokenizer.batch_decode(output[:, ids.shape[1] :], skip_special_tokens=True)
        texts = [postprocess_generated_text(text, stops, None) for text in texts]
        for (asked, _), text in zip(rows, texts, strict=True):
            self.cache_hook.add_partial("generate_until", asked, text)
        return texts

    @property
    def _method(self) -> MethodConfig:
        """The given method, or else the ensemble's own."""
        method: MethodConfig = self._call["method"] or self.ensemble.config.method
        return method

    def _stopping(self, stops: list[str], prompt_length: int) -> dict[str, Any]:
        """The stopping options of `generate`: by the primary's text, or, if every member writes, by each one's own."""
        if not stops:
            return {}
        if self._method.decides == "answers":
            return {"stop_strings": stops}
        return {"stopping_criteria": [_StopTexts(self.tokenizer, stops, prompt_length)]}

    def _run(self, order: Any, run: Callable[[Any], list[Any]], disable_tqdm: bool, kind: str) -> list[Any]:
        """Run rows batch by batch in the order of a `Collator`, and return the results in their own order."""
        found: list[Any] = []
        with tqdm(total=len(order), disable=disable_tqdm, desc=f"Running {kind} requests") as progress:
            for batch in order.get_batched(n=self.batch_size):
                found += run(batch)
                progress.update(len(batch))
        return order.get_original(found)  # type: ignore[no-any-return]


class _StopTexts(StoppingCriteria):
    """Ends each row whose new text contains one of some strings."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str], num_prompt_ids: int):
        self._tokenizer = tokenizer
        self._stops = stops
        self._start = num_prompt_ids
        # An id writes at least a byte, and the first ones may complete a character or be control tokens.
        self._num_last = max(len(stop.encode()) for stop in stops) + 8
        self._num_read = num_prompt_ids

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        """Return which rows have ended, of shape `(batch_size,)`."""
        start = max(self._start, self._num_read - self._num_last)
        self._num_read = input_ids.shape[1]
        texts = self._tokenizer.batch_decode(input_ids[:, start:], skip_special_tokens=False)
        done = [any(stop in text for stop in self._stops) for text in texts]
        return torch.tensor(done, device=input_ids.device)  # type: ignore[return-value]


def _split_arguments(text: str) -> list[tuple[str, str]]:
    """Return the names and values of `a=1,b=2,3`; a piece without `=` belongs to the value before it."""
    # A comma ends a value only if the next piece has a `=`.
    parts = [part for part in re.split(r",(?=[^,=]*=)", re.sub(",+", ",", text).strip(",")) if part]
    if parts and "=" not in parts[0]:
        first = parts[0].partition(",")[0]
        raise ConfigurationError(f"model arguments have the form `name=value,…`, but begin with {first!r}.")
    return [(name.strip(), value) for name, _, value in (part.partition("=") for part in parts)]


def _value_of(text: str) -> Any:
    if "," in text and text[0] not in "[({'\"":
        return text
    try:
        return ast.literal_eval(text.title() if text.lower() in ("true", "false", "none") else text)
    except (ValueError, SyntaxError):
        return text


def quote_lists(arguments: Sequence[str]) -> list[str]:
    """Quote values with commas in `--model_args`, because the harness would split them there."""
    quoted, is_inside = [], False
    for argument in arguments:
        if argument.startswith("-"):
            is_inside = argument in ("--model_args", "-a")
        elif is_inside and "=" in argument and argument[0] != "{" and not set("[('\"") & set(argument):
            pairs = ((name, f'"{value}"' if "," in value else value) for name, value in _split_arguments(argument))
            argument = ",".join(f"{name}={value}" for name, value in pairs)
        quoted.append(argument)
    return quoted


def main() -> None:
    """Run the harness's command line, with the model `hf_ensemble` added."""
    from lm_eval.__main__ import cli_evaluate

    sys.argv[1:] = quote_lists(sys.argv[1:])
    cli_evaluate()


if __name__ == "__main__":
    main()
