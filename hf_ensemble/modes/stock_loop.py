"""The hooks of the stock `generate`: the primary runs in its loop, and the call's mode does the rest."""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteriaList
from transformers.modeling_outputs import CausalLMOutputWithPast

from .. import messages
from ..decoding.call import Call
from ..decoding.loop import Loop
from ..errors import ConfigurationError, MemberError
from ..members.member import Member
from .base import Mode
from .stop_strings import stop_string_criteria, without_stop_strings

WAITS = "primary_waits"
"""Marks the forward passes of the decoding loop in which the primary does not run; its own state does, if needed."""

_CACHES = ("past_key_values", "cache")
"""Names of a cache in the stock loop."""

_running: ContextVar[tuple[Any, Any]] = ContextVar("running", default=(None, None))
"""The `Mode` of the running call of `generate`, and the generation config of its stock loop once prepared. Another
mode may then take over.

Every thread has its own, and a nested call restores the outer one's. Work scheduled meanwhile, such as a callback of
an event loop, keeps the mode with its caches until it has run.
"""


def waiting(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a stock loop in which the primary does not run; without a cache, which would stay empty."""
    return {**{key: value for key, value in kwargs.items() if key not in _CACHES}, WAITS: True}


def _mode_of(generation_config: Any) -> Mode | None:
    """The mode of the loop with this generation config; None for another loop nested inside a call."""
    mode, prepared = _running.get()
    return mode if prepared is generation_config else None


class Hook(LogitsProcessor):
    """A mode's action in the stock loop, as a processor.

    The stock list reads the signature of every processor at every step, which takes ten times as long for a plain
    function.

    Args:
        function: Takes all ids so far, of shape `(num_rows, length)`, and the scores; returns scores.
    """

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]):
        self._function = function

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> Any:
        """Scores, of shape `(num_rows, width)`."""
        return self._function(input_ids, scores)


class FollowingCriteriaList(StoppingCriteriaList):
    """Stopping criteria that pass on a step's ids, before any streamer sees them.

    A row that has ended stays so, whatever the criteria answer for its later ids.

    Args:
        criteria: The criteria of the call.
        follow: Takes all ids so far, of shape `(batch_size, length)`, and which rows have ended, of shape
            `(batch_size,)`; returns which have now.
        begin: Takes all ids so far, before the criteria do, so that GPU work it starts runs beside them.
    """

    def __init__(
        self,
        criteria: StoppingCriteriaList,
        follow: Callable[[Tensor, Tensor], Tensor],
        begin: Callable[[Tensor], None] = lambda _: None,
    ):
        super().__init__(criteria)
        self._follow, self._begin = follow, begin
        self._done: Tensor | None = None

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> Any:
        """Return which rows have ended, of shape `(batch_size,)`."""
        self._begin(input_ids)
        done: Any = super().__call__(input_ids, scores, **kwargs)
        self._done = self._follow(input_ids, done if self._done is None else self._done | done)
        return self._done


class RecordedCriteriaList(StoppingCriteriaList):
    """Stopping criteria that record at every step which rows they have ended.

    Args:
        criteria: The criteria of the call.
        ends: Takes their result at each step, of shape `(batch_size,)`.
    """

    def __init__(self, criteria: StoppingCriteriaList, ends: list[Tensor]):
        super().__init__(criteria)  # the stock loop inspects the list
        self._criteria, self._ends = criteria, ends

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> Any:
        """Return which rows have ended, of shape `(batch_size,)`."""
        done: Any = self._criteria(input_ids, scores, **kwargs)
        self._ends.append(done)
        return done


class WatchedCriteriaList(StoppingCriteriaList):
    """Stopping criteria that record what has been written: every complete step passes here, in every mode.

    Args:
        criteria: The criteria of the call.
        call: The call, which is told.
    """

    def __init__(self, criteria: StoppingCriteriaList, call: Call):
        super().__init__(criteria)
        self._criteria, self._call = criteria, call

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> Any:
        """Return which rows have ended, of shape `(batch_size,)`."""
        done: Any = self._criteria(input_ids, scores, **kwargs)
        self._call.written = input_ids
        return done


class StockLoopHooks:
    """The hooks of `generate`, answered by the primary or by the call's mode.

    Mix-in for a `GenerationMixin` with `primary_member`.
    """

    primary_member: Member

    @property
    def primary(self) -> Any:
        """The primary model.

        Raises:
            ConfigurationError: If it is not in this process.
        """
        member = self.primary_member
        if member.model is None:
            raise ConfigurationError(
                f"the primary {member.name!r} is {member.kind}, so this process cannot run it alone or look inside. "
                "Use `generate`, or load it as a causal language model of this process."
            )
        return member.model

    def _prepare_special_tokens(self, generation_config: Any, *args: Any, **kwargs: Any) -> None:
        # Stock processors treat every end id as a column, and without a pad token, the first one pads.
        ends: Any = generation_config.eos_token_id
        if ends is not None:
            ends = torch.as_tensor(ends).flatten().tolist()
            generation_config.eos_token_id = self.primary_member.ids_with_row(ends) or None
        super()._prepare_special_tokens(generation_config, *args, **kwargs)  # type: ignore[misc]

    # Of the mode

    def generate_in(
        self, mode: Mode, inputs: Any, *, logits_processor: Any, stopping_criteria: Any, **kwargs: Any
    ) -> Any:
        """Run the stock `generate` in a mode, which adds to an output object; for modes only."""
        # Any iterables are allowed.
        kwargs["logits_processor"] = LogitsProcessorList(logits_processor or ())
        kwargs["stopping_criteria"] = StoppingCriteriaList(stopping_criteria or ())
        token = _running.set((mode, None))
        try:
            output = super().generate(inputs, **kwargs)  # type: ignore[misc]
            if not isinstance(output, Tensor):
                _running.get()[0].fill(output)
        except MemberError as error:
            self._add_written(error, mode.call)
            raise
        finally:
            _running.reset(token)
        return output

    def _add_written(self, error: MemberError, call: Call) -> None:
        """Add the text so far to an error; a nested call has already done so."""
        if call.written is None or error.written:
            return
        token_bytes = self.primary_member.encoder.token_bytes
        rows = call.written[:, call.prompt_length :]
        if call.settings.num_beams > 1:
            # Criteria see more candidates of a prompt than there are beams, the best first.
            rows = rows.unflatten(0, (call.num_prompts, -1))[:, : call.settings.num_beams].flatten(0, 1)
        error.written = tuple(token_bytes.write(ids).decode("utf-8", "replace") for ids in rows.tolist())
        error.args = (f"{error} {messages.written_so_far(error.written, rows.shape[1])}",)

    def _get_logits_processor(self, generation_config: Any, **kwargs: Any) -> LogitsProcessorList:
        mode, prepared = _running.get()
        if mode is None or prepared is not None:
            return super()._get_logits_processor(generation_config, **kwargs)  # type: ignore[misc,no-any-return]
        prompt_ids = kwargs["encoder_input_ids"]
        copies = max(generation_config.num_beams, generation_config.num_return_sequences)
        mode.call.weights.expand(len(prompt_ids), copies)
        stock = super()._get_logits_processor(generation_config, **kwargs)  # type: ignore[misc]
        mode.call.settings = generation_config
        mode.call.prompt_length, mode.call.num_prompts = prompt_ids.shape[1], len(prompt_ids)
        mode = mode.for_processors(stock, len(prompt_ids) * copies)
        _running.set((mode, generation_config))
        mask = (kwargs.get("model_kwargs") or {}).get("attention_mask")
        rows = prompt_ids.repeat_interleave(copies, dim=0)
        return LogitsProcessorList(mode.processors(stock, rows, mask))

    def _get_stopping_criteria(self, **kwargs: Any) -> StoppingCriteriaList:
        config, tokenizer = kwargs["generation_config"], kwargs.get("tokenizer")
        mode = _mode_of(config)
        if config.stop_strings is not None and tokenizer is not None:
            kwargs["generation_config"] = without_stop_strings(config)
        criteria: StoppingCriteriaList = super()._get_stopping_criteria(**kwargs)  # type: ignore[misc]
        if kwargs["generation_config"] is not config:
            own = StoppingCriteriaList([stop_string_criteria(config.stop_strings, tokenizer)])
            # One that the user passed replaces this one, as in the stock loop.
            criteria = self._merge_criteria_processor_list(own, criteria)  # type: ignore[attr-defined]
        if mode is None:
            return criteria
        criteria = WatchedCriteriaList(mode.criteria(criteria), mode.call)
        return criteria if mode.call.ends is None else RecordedCriteriaList(criteria, mode.call.ends)

    def _sample(
        self,
        input_ids: Any,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **kwargs: Any,
    ) -> Any:
        stock = super()._sample  # type: ignore[misc]
        loop = Loop(input_ids, logits_processor, stopping_criteria, generation_config, kwargs, stock)
        mode = _mode_of(generation_config)
        return loop.run() if mode is None else mode.sample(loop)

    def _beam_search(self, *args: Any, generation_config: GenerationConfig, **kwargs: Any) -> Any:
        mode = _mode_of(generation_config)
        if mode is not None and mode.runs_primary:
            kwargs = waiting(kwargs)
        return super()._beam_search(*args, generation_config=generation_config, **kwargs)  # type: ignore[misc]

    # Of the primary

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        logits_to_keep: Any = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the primary alone; the other members act in `generate`. Arguments and result are the primary's.

        Raises:
            ConfigurationError: If `labels` is given: an ensemble has no loss of its own.
        """
        if labels is not None:
            raise ConfigurationError("an ensemble has no loss, so `labels` cannot be used with it. Use `score`.")
        member: Any = self.primary_member
        if kwargs.pop(WAITS, False):
            assert input_ids is not None
            return CausalLMOutputWithPast(logits=input_ids.new_zeros(len(input_ids), 1, member.vocab_size).float())
        primary = self.primary
        if position_ids is not None and member.max_positions is not None:
            # Ended rows are padded further, and their positions would exceed the table.
            position_ids = position_ids.clamp_max(member.max_positions - 1)
        cache = past_key_values if cache is None else cache
        given = {
            "input_ids": input_ids,
            "inputs_embeds": inputs_embeds,
            member.cache_keyword: cache,
            "use_cache": use_cache,
        }
        optional = {"attention_mask": attention_mask, "position_ids": position_ids, "logits_to_keep": logits_to_keep}
        given |= {key: value for key, value in optional.items() if member.accepts(key)}
        kwargs |= {key: value for key, value in given.items() if value is not None}
        if member.accepts("output_router_logits"):
            kwargs["output_router_logits"] = False
        try:
            return primary(**kwargs)
        except Exception as error:
            raise messages.failed_pass(member.name, error) from error

    def get_input_embeddings(self) -> Any:
        """The primary's input embeddings."""
        return self.primary.get_input_embeddings()

    def get_output_embeddings(self) -> Any:
        """The primary's language-modelling head."""
        return self.primary.get_output_embeddings()

    def prepare_inputs_for_generation(self, input_ids: Tensor, **kwargs: Any) -> Any:
        """Prepare the primary's inputs for one step."""
        if kwargs.get(WAITS):
            return {"input_ids": input_ids, WAITS: True}
        return self.primary.prepare_inputs_for_generation(input_ids, **kwargs)

    def create_masks_for_generate(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare the primary's attention masks."""
        return self.primary.create_masks_for_generate(*args, **kwargs)

    def _prepare_position_ids_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        if not self.primary_member.runs_in_loop:
            return None
        return self.primary._prepare_position_ids_for_generation(*args, **kwargs)

    def _update_model_kwargs_for_generation(self, outputs: Any, model_kwargs: Any, *args: Any, **kwargs: Any) -> Any:
        if model_kwargs.get(WAITS):
            return model_kwargs
        return self.primary._update_model_kwargs_for_generation(outputs, model_kwargs, *args, **kwargs)

    def _prepare_cache_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        if not self.primary_member.runs_in_loop:
            return None
        # On transformers 5.17 the name of the cache depends on the model's class.
        return self.primary._prepare_cache_for_generation(*args, **kwargs)

    @property
    def _is_stateful(self) -> bool:
        return self.primary_member.runs_in_loop and bool(self.primary._is_stateful)
