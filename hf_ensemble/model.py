"""Several causal language models, each with its own tokenizer, as one Hugging Face model."""

import contextlib
import copy
import dataclasses
import uuid
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, GenerationMixin, PreTrainedModel

from .chat.tokenizer import ensemble_tokenizer
from .checking.findings import CheckReport
from .checking.run import check_members
from .config import EnsembleConfig, MethodConfig, check_positive_integer, method_config
from .decoding.call import Call, Kept, end_ids
from .decoding.prompts import OwnPrompts
from .decoding.refusals import refuse_for_ensembles, refuse_without_output
from .decoding.step_weights import StepWeights, WeightsLike
from .ensemble_page import ensemble_in_notebook
from .errors import ConfigurationError
from .hub.loading import Loading
from .hub.saving import Saving
from .member_comparison import CompatibilityReport, compare_members
from .members.member import Member, refuse_missing_offers
from .modes import mode_for_generate, mode_of
from .modes.base import Mode
from .modes.options import run_call, take_options
from .modes.stock_loop import StockLoopHooks
from .offers import Offer
from .scoring.likelihoods import Likelihoods, score_pairs
from .scoring.pairs import read_pairs


class EnsembleForCausalLM(Loading, Saving, StockLoopHooks, PreTrainedModel, GenerationMixin):  # type: ignore[misc, override]
    """An ensemble of causal language models that decodes as one model.

    The first member is the primary. Users see the ids of its tokenizer, `forward` is its forward pass, and it runs
    inside the stock decoding loop. At every step, the other members' distributions are mixed in. To create an
    ensemble, use `from_pretrained` (names or paths) or `from_members` (loaded objects).

    Attributes:
        members: The models, the primary first.
        tokenizers: Their tokenizers.
        tokenizer: A copy of the primary's tokenizer that pads on the left. Every member reads the conversations that
            it renders with `apply_chat_template` in its own template.
        union_vocabulary: The union of all members' vocabularies.
    """

    config_class = EnsembleConfig
    base_model_prefix = ""
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def __init__(self, config: EnsembleConfig, members: Sequence[Member] | None = None):
        if not members:
            raise ConfigurationError(
                "an ensemble holds loaded models, so it cannot be created from a configuration alone. Use "
                "`from_pretrained([...])` or `from_members(...)`."
            )
        primary, item = members[0], config.members[0]
        model: Any = primary.model
        if model is not None:
            config._attn_implementation = model.config._attn_implementation
        config.chat_id = uuid.uuid4().hex if config.chat_id is None else config.chat_id
        super().__init__(config)
        # A member elsewhere has no weights in this process.
        self.members = nn.ModuleList([nn.Module() if member.model is None else member.model for member in members])
        self._members = list(members)
        if primary.generation_config is not None:
            self.generation_config = copy.deepcopy(primary.generation_config)
        # The primary's EOS ids follow the same rule as every member's, including added ones.
        self.generation_config.eos_token_id = list(primary.eos_token_ids) or None
        if hasattr(model, "hf_device_map"):
            self.hf_device_map = dict(model.hf_device_map)
        self.tokenizers = [member.tokenizer for member in members]
        control = primary.encoder.token_bytes.control
        self.tokenizer = ensemble_tokenizer(
            primary.tokenizer, control, primary.name, item.chat_template, item.system_prompt, config.chat_id
        )
        self._kept = Kept(self._members)
        self.union_vocabulary = self._kept.union

    def compatibility(
        self,
        text: str | None = None,
        *,
        responses: Sequence[Sequence[str]] | None = None,
        prompts: Sequence[str] | None = None,
        max_new_tokens: int | None = None,
        batch_size: int = 8,
        **generate_options: Any,
    ) -> CompatibilityReport:
        """Compare the members: shared entries, how they cut words, context lengths, EOS, templates, response lengths.

        Args:
            text: A text similar to those to be written. Every member cuts its words, which white space separates.
                Default: common words, that is, the first 1,000 entries of each member that are a space and two or more
                letters.
            responses: For each member, its responses to the same prompts, to compare their lengths.
            prompts: Prompts on which every member runs alone, to get such responses.
            max_new_tokens: Largest number of ids of a response to `prompts`.
            batch_size: Number of prompts that run together.
            **generate_options: Other options of the members' `generate`, with `prompts`.

        Returns:
            The figures; `print` shows a table.

        Raises:
            ConfigurationError: If `text` has no words, or the number of responses or prompts is wrong.
        """
        return compare_members(self, text, responses, prompts, max_new_tokens, batch_size, generate_options)

    def check(self) -> CheckReport:
        """Check the members for faults, before they show in texts.

        The checks cover every member's tokenizer (lost characters and spaces, dropout, tokens without a row, BOS,
        EOS), its chat template (dropped system turns, turns that do not end), and its model (training mode, NaN on a
        long text, positions, how its steps run and why not faster). They also find members that are the same. Each
        model runs on a text of 1,024 tokens.

        Returns:
            The findings; `print` shows them as text.
        """
        return check_members(self)

    def _repr_html_(self) -> str:
        """The members, and the method with its options, for notebooks."""
        return ensemble_in_notebook(self)

    @property
    def member_views(self) -> tuple[Member, ...]:
        """The members as this library sees them, the primary first: name, tokenizer, vocabulary, EOS ids, positions."""
        return tuple(self._members)

    def alone(self, member: int | str) -> "EnsembleForCausalLM":
        """Return one member as an ensemble of one, which writes and scores as that member does alone.

        It shares model and tokenizer with this ensemble, and keeps the member's name, EOS ids and chat template. Its
        generation config is the member's own. A member behind a server writes by UniTE, from its best entries only.

        Args:
            member: Index of the member, 0 for the primary, or its name.

        Raises:
            ConfigurationError: If there is no such member, or more than one of that name, or it cannot be a primary.
        """
        names = [view.name for view in self._members]
        index = names.index(member) if isinstance(member, str) and names.count(member) == 1 else member
        if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < len(names):
            raise ConfigurationError(
                f"`member` has to be a number from 0 to {len(names) - 1} or the name of one member "
                f"({', '.join(map(repr, names))}), but is {member!r}."
            )
        self._members[index].refuse({Offer.PRIMARY}, "an ensemble of one")
        return self.writer(index)

    def writer(self, index: int) -> "EnsembleForCausalLM":
        """Return one member as an ensemble of one whose prompts are already read for it; for modes only.

        Args:
            index: Index of the member.
        """
        view, item = self._members[index], dataclasses.replace(self.config.members[index])
        method = "gac" if Offer.ROWS in view.offers else "unite"
        config = EnsembleConfig(members=[item], method=method, primary_config=copy.deepcopy(view.config))
        return type(self)(config, [view])

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
        """Render one conversation or a batch; `generate` then gives every member its own rendering.

        This is `ensemble.tokenizer.apply_chat_template`, with the arguments of `transformers`. When `generate` receives
        the primary's ids that it returns, every other member reads the conversation in its own template.

        Args:
            conversation: Turns with `role` and `content`, or a list of such conversations.
            **kwargs: `add_generation_prompt`, `continue_final_message`, `tools`, `padding`, `return_tensors`, …; others
                are variables of every member's template.

        Raises:
            ConfigurationError: If the template refuses the conversation, or it contains anything but text.
        """
        return self.tokenizer.apply_chat_template(conversation, **kwargs)

    def restart_member(self, name: str) -> None:
        """Restart a member that runs in another process and has died: its actor is ended and started again.

        Failed calls are not continued; their text so far is in the error's `written`.

        Args:
            name: The member's name.

        Raises:
            ConfigurationError: If there is no such member, it runs in this process, or another model is loaded now.
        """
        found = {id(member): member for member in self._members if member.name == name}
        if not found:
            names = ", ".join(repr(member.name) for member in self._members)
            raise ConfigurationError(f"there is no member {name!r} to restart. Members: {names}.")
        for member in found.values():
            member.restart()

    def close(self) -> None:
        """End what members have started outside this process, such as Ray actors.

        These members cannot run until you restart them. The same happens at the end of `with ensemble:`, when nothing
        refers to the ensemble any more, and when the interpreter ends.
        """
        for member in self._members:
            member.close()

    def __enter__(self) -> "EnsembleForCausalLM":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    # Being a model

    @property
    def device(self) -> torch.device:
        """The device that the primary's ids go to."""
        return self._members[0].device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the primary."""
        return self._members[0].dtype

    @property
    def primary_member(self) -> Member:  # type: ignore[override]
        """The primary as this library sees it."""
        return self._members[0]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # `to`, `half`, `cuda` and the like all call this, so it checks before anything is moved.
        for member in self._members:
            model: Any = member.model
            if model is None:
                raise ConfigurationError(
                    f"member {member.name!r} is {member.kind} and cannot be moved or cast here. Choose its device and "
                    "dtype when you load it."
                )
            is_spread = len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1
            if is_spread or getattr(model, "is_quantized", False):
                raise ConfigurationError(
                    f"member {member.name!r} is {'spread over devices' if is_spread else 'quantised'} and cannot be "
                    "moved or cast. Load it with the `device_map` and `dtype` you want."
                )
        return super()._apply(fn, recurse)

    # Generating

    @torch.no_grad()
    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        prefix_allowed_tokens_fn: Any = None,
        synced_gpus: bool | None = None,
        assistant_model: Any = None,
        streamer: Any = None,
        negative_prompt_ids: Tensor | None = None,
        negative_prompt_attention_mask: Tensor | None = None,
        custom_generate: Any = None,
        *,
        method: str | MethodConfig | None = None,
        weights: WeightsLike | None = None,
        member_prompts: Sequence[Any] | None = None,
        output_decisions: bool = False,
        num_decision_entries: int = 5,
        speculation: str | None = None,
        seed: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Generate with all members: takes all arguments of `transformers`, and a method and weights for this call.

        Args:
            inputs: The primary's ids, of shape `(batch_size, length)`; the same as `input_ids`.
            generation_config: As in `transformers`; unset values come from the ensemble's, which starts as a copy of
                the primary's.
            logits_processor: Processors of fused scores over the primary's ids.
            stopping_criteria: Criteria over the primary's ids.
            prefix_allowed_tokens_fn: As in `transformers`, over the primary's ids.
            synced_gpus: As in `transformers`.
            assistant_model: Refused.
            streamer: As in `transformers`; its `end` is called even if generation fails.
            negative_prompt_ids: Refused.
            negative_prompt_attention_mask: Refused.
            custom_generate: Refused.
            method: Name or configuration of the method for this call.
            weights: Mixing weights for this call: one per member, one such list per row of `input_ids`, or a function
                that returns either. The function is called at every step with the number of steps so far and all ids
                so far, of shape `(batch_size, length)`.
            member_prompts: Plain-text prompts for single members. One entry per member: a text for all rows, a list
                with one text per row, or None (also in such a list) for the text of `input_ids`. The primary's entry
                is None, unless there are no `input_ids`.
            output_decisions: Whether to record which member decided what, in `decisions` of the output, a `Decisions`.
                Needs `return_dict_in_generate=True`, and no beams.
            num_decision_entries: Number of best entries per member to record at each decision.
            speculation: The drafter of several tokens, which all members check in one forward pass: `"ngram"` (what
                followed the last ids earlier in the text), the name of a member, which continues by itself, or
                `"auto"` for both; if drafts cannot be used, `"auto"` runs the plain loop. Greedy texts stay the same
                (up to ties), and sampled texts keep their distribution. The length of drafts adapts to what pays.
                Default: no drafts.
            seed: For methods that choose among whole answers: determines their samples, whatever else is in the batch.
                Default: drawn from torch's CPU generator.
            **kwargs: Generation options and the primary's inputs, as in `transformers`.

        Returns:
            The primary's ids of shape `(batch_size * num_return_sequences, length)`, or, with
            `return_dict_in_generate`, an output object whose `scores` and `logits` are the ensemble's, over the
            primary's ids. With a token-level method, it also has `num_forwards` (each member's forward passes) and,
            except with beams, `share_ensembled` (for each row, the share of choices that no gate made alone); it has
            neither if the primary has all the weight and its own `generate` runs. With `speculation`, it has
            `speculation`, a `SpeculationStats`.

        Raises:
            ConfigurationError: If an option cannot work for an ensemble, or the inputs do not fit, or a member's
                embeddings have been resized.
            MemberError: If a member fails, returns NaN, or every candidate was filtered out.
        """
        arguments: dict[str, Any] = {
            "generation_config": generation_config,
            "logits_processor": logits_processor,
            "stopping_criteria": stopping_criteria,
            "prefix_allowed_tokens_fn": prefix_allowed_tokens_fn,
            "synced_gpus": synced_gpus,
            "streamer": streamer,
        }
        refused = {
            "assistant_model": assistant_model,
            "negative_prompt_ids": negative_prompt_ids,
            "negative_prompt_attention_mask": negative_prompt_attention_mask,
            "custom_generate": custom_generate,
            "inputs_embeds": kwargs.get("inputs_embeds"),
            "labels": kwargs.get("labels"),
        }

        def mode_for(call: Call) -> Mode:
            refuse_for_ensembles(call.settings, kwargs, refused)
            if output_decisions:
                refuse_without_output(call.settings)
                check_positive_integer("num_decision_entries", num_decision_entries)
                call.num_decision_entries = num_decision_entries
            return mode_for_generate(call, speculation)

        try:
            call = self.new_call(method, weights)
            call.seed, call.arguments = seed, arguments
            return run_call(self, call, mode_for, inputs, kwargs, member_prompts)
        except BaseException:
            if streamer is not None:
                # So its readers never hang. The first failure is raised, even if the streamer (its event loop) fails
                # too.
                with contextlib.suppress(Exception):
                    streamer.end()
            raise

    def check_options(
        self, *, method: str | MethodConfig | None = None, weights: WeightsLike | None = None, **options: Any
    ) -> None:
        """Refuse options of `generate` that cannot be used with a method, before anything runs.

        Args:
            method: As in `generate`.
            weights: As in `generate`.
            **options: Generation options.

        Raises:
            ConfigurationError: As `generate` would, except for what depends on the prompts.
        """
        call = self.new_call(method, weights)
        call.arguments = dict.fromkeys(
            ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "synced_gpus")
        )
        take_options(self, call, None, options)
        mode_for_generate(call, None)

    @torch.no_grad()
    def score(
        self,
        prompts: Sequence[str | Sequence[int]],
        continuations: Sequence[str | Sequence[int]],
        *,
        method: str | MethodConfig | None = None,
        weights: WeightsLike | None = None,
        batch_size: int = 8,
        member_prompts: Sequence[Any] | None = None,
    ) -> Likelihoods:
        """Score how likely each continuation is after its prompt, by the distributions that `generate` decodes with.

        The primary encodes prompt and continuation as one text and splits it as lm-evaluation-harness does; an empty
        prompt stands for the token that starts a text (BOS, else EOS). The score uses the fused distribution of each
        token; for mixture sampling, that of the mixture. With spans, it is the mean of the members' own
        log-probabilities.

        Args:
            prompts: Texts, or lists of the primary's ids.
            continuations: One for each prompt, also as text or as ids.
            method: Name or configuration of the method for this call.
            weights: Mixing weights for this call: one per member, one such list per prompt, or a function as in
                `generate`, which is called with the left-padded ids of a batch, in the order of the prompts.
            batch_size: Number of pairs that run together.
            member_prompts: Plain texts that members read instead of the prompts, as in `generate`: one entry per
                member, each a text for all prompts, a list with one per prompt, or None. The primary's entry is None.

        Raises:
            ConfigurationError: If prompts and continuations do not match, or a text is too long for a member.
            MemberError: If a member fails or returns NaN.
        """
        mode = mode_of(self.new_call(method, weights))
        call = mode.call
        asked = Offer.ROWS if call.config.decides == "tokens" else Offer.LIKELIHOODS
        for index in sorted(call.participants):
            self._members[index].refuse({asked}, f"`score` with method {call.config.name!r}")
        pairs = read_pairs(self._members[0], prompts, continuations, call.chat_id)
        ends = end_ids(self.generation_config)
        own = OwnPrompts(self._members, member_prompts, len(pairs), call.chat_id)
        return score_pairs(pairs, call.weights, own, batch_size, lambda batch: mode.score_batch(batch, ends))

    def new_call(
        self, method: str | MethodConfig | None = None, weights: WeightsLike | None = None, is_writer: bool = False
    ) -> Call:
        """Return the data of a call; for modes only.

        Args:
            method: Name or configuration of the method. Default: the ensemble's.
            weights: Mixing weights. Default: the ensemble's.
            is_writer: Whether this is a `writer`, which skips the checks of an ensemble.
        """
        for member in self._members:
            member.check_size()
        config = self.config.method if method is None else method_config(method)
        config.check_members(len(self._members))
        given = self.config.weights if weights is None else weights
        step_weights = StepWeights(given, len(self._members), config.takes_weights_as_given)
        if not is_writer:
            refuse_missing_offers(self._members, config, step_weights.participants)
        return Call(self._kept, config, step_weights, self.config.chat_id)


AutoConfig.register(EnsembleConfig.model_type, EnsembleConfig, exist_ok=True)
AutoModelForCausalLM.register(EnsembleConfig, EnsembleForCausalLM, exist_ok=True)
