"""Several causal language models, each with its own tokenizer, as one Hugging Face model."""

import contextlib
import copy
import dataclasses
import inspect
import os
import posixpath
import warnings
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import CommitInfo, HfApi
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.modeling_outputs import CausalLMOutputWithPast

from . import messages
from .chat.tokenizer import ensemble_tokenizer
from .config import (
    EnsembleConfig,
    MemberConfig,
    MethodConfig,
    SweetSpanConfig,
    check_positive_integer,
    method_config,
    normalize_weights,
)
from .decoding.decided_ids import write_decided
from .decoding.hooks import FusionProcessor, SelectionProcessor, UnpaddedPenalty
from .decoding.prompts import OwnPrompts
from .decoding.row_processors import WARPERS, RowProcessors, needs_whole_batch
from .decoding.spans.decoder import SpanDecoder, SpanDecoderOutput
from .decoding.speculation.decoder import PrimaryAlone, SpeculativeDecoder
from .decoding.speculation.draft_length import DraftLength
from .decoding.speculation.options import Speculation, obstacle_in_call, obstacle_in_method
from .decoding.step_weights import MixingWeights, WeightsLike
from .decoding.stopping_criteria import FollowingCriteriaList
from .decoding.token_decoder import TokenFusion
from .errors import ConfigurationError, MemberError
from .hub.loading import HUB_OPTIONS, check_members, check_token, load_members, loaded_commit, resolve_members
from .hub.saving import EnsembleParts, is_local, local_card, plan_push, plan_save, push_ensemble, write_ensemble
from .member_comparison import CompatibilityReport, compare_members
from .members.member import Member
from .methods import build_method
from .methods.base import MemberMaps, TokenMethod, eos_ids_of
from .recording.recorder import DecisionRecorder, PrimaryRecorder, RecordingCriteriaList
from .recording.spans import decisions_of_rounds
from .scoring.likelihoods import Scores, read_pairs, score_pairs
from .vocabulary.union import UnionVocabulary

_ANY_VOCABULARY = {"RepetitionPenaltyLogitsProcessor", "NoRepeatNGramLogitsProcessor"}
"""Processors that know ids by the text before them only, so that they act on any member's own."""

_EARLY_END_PROCESSORS = {"MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor"}

_WAITS = "primary_waits"
"""Marks the forward passes of the decoding loop in which the primary does not run; its own state does, if needed."""

_MAX_METHODS = 8
"""Methods kept ready, each with its index maps on the device; a call with other options or EOS ids makes another."""

_MAX_DRAFT_LENGTHS = 64
"""Kinds of calls of which it is kept how fast their drafts are checked and how many are kept."""

_REFUSED_OPTIONS = {
    "guidance_scale": "it would run the primary alone a second time",
    "token_healing": "it rewrites the prompt in the primary's tokens only",
    "watermarking_config": "its green lists are made for one vocabulary",
    "prompt_lookup_num_tokens": 'its drafts are checked by the primary only. Pass `speculation="ngram"` instead',
    "assistant_early_exit": "its drafts are checked by the primary only",
    "penalty_alpha": "it needs the primary's hidden states for every candidate",
    "dola_layers": "it contrasts layers of the primary only",
    "use_mtp": "multi-token prediction drafts are not checked by the other members",
}


class _Call:
    """What one `generate` call hands to the hooks that the stock method calls; nothing is kept on the model."""

    def __init__(self, method: MethodConfig, weights: MixingWeights):
        self.method = method
        self.weights = weights
        self.fusion: TokenFusion | None = None
        self.own_prompts: OwnPrompts | None = None
        self.num_decision_entries: int | None = None
        self.recorder: DecisionRecorder | None = None
        self.has_cache = False
        self.speculation: Speculation | None = None
        self.speculator: SpeculativeDecoder | None = None

    @property
    def is_by_primary(self) -> bool:
        """Whether the primary decides everything, and so runs by itself."""
        gate = self.method.gate_rule
        return self.weights.is_only(0) and (gate is None or gate[0] == 0) and not self.method.cuts_off

    @property
    def is_by_spans(self) -> bool:
        """Whether members decide span by span."""
        return isinstance(self.method, SweetSpanConfig) and not self.is_by_primary


class _CallProcessors(LogitsProcessorList):
    """The user's processors, carrying the call to `_get_logits_processor` and, for spans, on to `_sample`."""

    call: _Call


class _CallCriteria(StoppingCriteriaList):
    """The user's criteria, carrying the call to `_get_stopping_criteria`."""

    call: _Call


class EnsembleForCausalLM(PreTrainedModel, GenerationMixin):
    """An ensemble of causal language models that decodes as one model.

    The first member is the primary: its tokenizer reads and writes the ids that users see, `forward` is its forward,
    and it runs inside the stock decoding loop; at every step the other members' distributions are mixed in. Made by
    `from_pretrained` (names or paths) or `from_members` (loaded objects).

    Attributes:
        members: The models, the primary first.
        tokenizers: Their tokenizers.
        tokenizer: A copy of the primary's tokenizer that pads on the left; what it renders with `apply_chat_template`,
            every member reads in its own template.
        union_vocabulary: All members' vocabularies as one.
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
                "an ensemble holds loaded models, so it cannot be made from a configuration alone. Use "
                "`from_pretrained([...])` or `from_members(...)`."
            )
        super().__init__(config)
        self.members = nn.ModuleList([member.model for member in members])
        self._members = list(members)
        primary: Any = members[0].model
        if getattr(primary, "generation_config", None) is not None:
            self.generation_config = copy.deepcopy(primary.generation_config)
        # The primary's ends of texts by the same rule as everybody's, added ones included.
        if members[0].eos_token_ids:
            self.generation_config.eos_token_id = list(members[0].eos_token_ids)
        if hasattr(primary, "hf_device_map"):
            self.hf_device_map = dict(primary.hf_device_map)
        self.tokenizers = [member.tokenizer for member in members]
        self.tokenizer = ensemble_tokenizer(
            members[0].tokenizer,
            members[0].encoder.token_bytes.control,
            members[0].name,
            config.members[0].chat_template,
            config.members[0].system_prompt,
        )
        self.union_vocabulary = UnionVocabulary([member.encoder for member in members])
        self._methods: dict[Any, TokenMethod] = {}
        self._draft_lengths: dict[Any, DraftLength] = {}

    # Making, saving and loading

    @classmethod
    def from_members(
        cls,
        models: Sequence[PreTrainedModel],
        tokenizers: Sequence[PreTrainedTokenizerBase],
        method: str | MethodConfig = "unite",
        weights: Sequence[float] | None = None,
        member_configs: Sequence[MemberConfig] | None = None,
    ) -> "EnsembleForCausalLM":
        """Make an ensemble of loaded models and tokenizers. None of them is changed.

        Args:
            models: Causal language models; the first is the primary.
            tokenizers: Their fast tokenizers.
            method: Name or configuration of the method.
            weights: Mixing weights, one per member. Default: the same for all.
            member_configs: Where each member comes from, its name, and ids that end its texts. Default: each model's
                own `name_or_path`.

        Raises:
            ConfigurationError: If the lists do not match, or a model is no decoder-only causal language model.
            VocabularyError: If a tokenizer cannot be understood.
        """
        if not models:
            raise ConfigurationError("an ensemble needs at least one member: got 0.")
        if len(tokenizers) != len(models):
            raise messages.wrong_count("tokenizers", len(tokenizers), len(models))
        if member_configs is None:
            member_configs = [MemberConfig(path=str(model.name_or_path) or None) for model in models]
        if len(member_configs) != len(models):
            raise messages.wrong_count("member_configs", len(member_configs), len(models))
        config = EnsembleConfig(
            members=[dataclasses.replace(item) for item in member_configs],
            method=method_config(method),
            weights=weights,
            primary_config=copy.deepcopy(models[0].config),
        )
        config.method.check_members(len(models))
        known: dict[Any, Member] = {}
        members = []
        for model, tokenizer, item in zip(models, tokenizers, config.members, strict=True):
            if item.dtype is None:
                item.dtype = str(model.dtype).removeprefix("torch.")
            beside = str(getattr(model, "name_or_path", "") or "")
            if item.tokenizer is None and tokenizer.name_or_path and tokenizer.name_or_path != beside:
                item.tokenizer = tokenizer.name_or_path
            if item.commit is None and item.path and not is_local(item.path):
                # Transformers 5.17 keeps the commit with the configuration.
                item.commit = getattr(model.config, "_commit_hash", None) or loaded_commit(
                    item.path, posixpath.join(item.subfolder or "", "config.json"), item.revision, None
                )
            key = (id(model), id(tokenizer), tuple(item.eos_token_id), item.chat_template, item.system_prompt)
            if key not in known:
                known[key] = Member(
                    model, tokenizer, item.name, item.eos_token_id, item.chat_template, item.system_prompt
                )
            members.append(known[key])
        config._attn_implementation = models[0].config._attn_implementation
        return cls(config, members)

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        pretrained_model_name_or_path: Any,
        *model_args: Any,
        config: PreTrainedConfig | None = None,
        method: str | MethodConfig | None = None,
        weights: Sequence[float] | None = None,
        dtype: Any = "auto",
        device_map: Any = None,
        tokenizers: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> "EnsembleForCausalLM":
        """Load an ensemble from its members, or as it was saved.

        Args:
            pretrained_model_name_or_path: A list of members (Hub ids, paths or `MemberConfig`s), the primary first; or
                the id or path of a saved ensemble. The id or path of a single model makes an ensemble of one.
            *model_args: Refused.
            config: Configuration of a saved ensemble, where it is loaded already.
            method: Name or configuration of the method. Default: as saved, else `"unite"`.
            weights: Mixing weights, one per member. Default: as saved, else the same for all.
            dtype: One dtype for all members, or a list with one per member. Default: as saved, else as each
                checkpoint says.
            device_map: Where the weights go, as in `transformers`: one value for all members, or a list.
            tokenizers: Tokenizers, or their ids or paths, one per member; None where it is beside the model.
            **kwargs: `revision` and `subfolder` of the ensemble; everything else (`token`, `cache_dir`, `max_memory` for
                all members together, `attn_implementation`, …) is passed on to every member's loading.

        Raises:
            ConfigurationError: If a member cannot be found or is no causal language model; before any weight is read.
            VocabularyError: If a tokenizer is missing or cannot be understood.
        """
        if model_args:
            raise ConfigurationError(f"an ensemble takes no positional model arguments, but got {len(model_args)}.")
        kwargs.pop("adapter_kwargs", None)
        if "torch_dtype" in kwargs:
            dtype = kwargs.pop("torch_dtype")
        source = pretrained_model_name_or_path
        hub: dict[str, Any] = {key: kwargs[key] for key in HUB_OPTIONS if key in kwargs}
        check_token(hub.get("token"))
        is_saved = False
        if isinstance(source, (str, os.PathLike)):
            located: dict[str, Any] = {key: kwargs.pop(key) for key in ("revision", "subfolder") if key in kwargs}
            if config is None:
                config = _read_config(str(source), located | hub)
            if isinstance(config, EnsembleConfig):
                is_saved = True
                saved = copy.deepcopy(config)
                items = resolve_members(saved.members, str(source), located, hub)
                method = saved.method if method is None else method
                weights = saved.weights if weights is None else weights
                if dtype != "auto" and dtype is not None:
                    for item in items:
                        item.dtype = None
            else:
                items = [MemberConfig(path=str(source), **located)]
        else:
            items = [item if isinstance(item, MemberConfig) else MemberConfig(path=os.fspath(item)) for item in source]
        if not items:
            raise ConfigurationError("an ensemble needs at least one member: got an empty list.")
        items = [dataclasses.replace(item) for item in items]
        method = method_config("unite" if method is None else method)
        if weights is not None:
            weights = normalize_weights(weights, len(items), method.takes_weights_as_given)
        method.check_members(len(items))
        configs = check_members(items, hub)
        models, loaded_tokenizers = load_members(items, configs, dtype, device_map, tokenizers, kwargs)
        ensemble = cls.from_members(models, loaded_tokenizers, method, weights, items)
        if is_saved:
            ensemble._load_generation_config(str(source), located | hub)
        return ensemble

    def save_pretrained(  # type: ignore[override]
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        state_dict: None = None,
        push_to_hub: bool = False,
        max_shard_size: int | str = "50GB",
        *,
        include_members: bool = False,
        safe_serialization: bool = True,
        **push_options: Any,
    ) -> None:
        """Save the ensemble's configuration, generation configuration, the primary's tokenizer and a README.

        Members are saved as references (Hub ids, or paths, relative to the folder where they lie inside it) or, with
        `include_members`, as they are now. A save that fails leaves an older one in the folder as it was.

        Args:
            save_directory: Folder to write to.
            is_main_process: Whether this process writes.
            state_dict: Refused: members have weights of their own.
            push_to_hub: Whether to upload the ensemble too.
            max_shard_size: Most bytes of a file of an included member, or a size like `"5GB"`.
            include_members: Whether to write every distinct member too, with its tokenizer, into a folder in
                `members/`.
            safe_serialization: Weights are always safetensors; False is refused.
            **push_options: Options of `push_to_hub`, `repo_id` (default: the folder's name) among them.

        Raises:
            ConfigurationError: If a member was given as an object that came from nowhere and is not included, cannot be
                written or would be overwritten; if a generation configuration cannot be saved; or if an option is
                unknown. Nothing is written then.
        """
        if state_dict is not None or not safe_serialization:
            raise ConfigurationError(
                "an ensemble takes neither `state_dict` nor `safe_serialization=False`: with `include_members=True` its "
                "members are written with their own weights, as safetensors."
            )
        if push_options.get("token") is None:
            push_options.pop("token", None)
        known = {"repo_id", *inspect.signature(self.push_to_hub).parameters} - {"include_members", "max_shard_size"}
        if push_options and not (push_to_hub and set(push_options) <= known):
            raise ConfigurationError(
                f"`save_pretrained` of an ensemble has no option {next(iter(set(push_options) - known), None)!r}."
                if push_to_hub
                else f"options {sorted(push_options)} do nothing without `push_to_hub=True`."
            )
        check_token(push_options.get("token"))
        if not is_main_process:
            return
        folder = Path(save_directory).resolve()
        if folder.is_file():
            raise ConfigurationError(f"{str(folder)!r} is a file; an ensemble is saved to a folder.")
        plan = plan_save(self._parts(), include_members, folder)
        if push_to_hub:
            repo_id = push_options.pop("repo_id", folder.name)
            plan_push(self._parts(), include_members, HfApi(token=push_options.get("token")))
        write_ensemble(plan, folder, max_shard_size, local_card(plan, folder, self.model_tags or ()))
        if push_to_hub:
            self.push_to_hub(repo_id, max_shard_size=max_shard_size, include_members=include_members, **push_options)

    def push_to_hub(  # type: ignore[override]
        self,
        repo_id: str,
        *,
        include_members: bool = False,
        commit_message: str | None = None,
        commit_description: str | None = None,
        private: bool | None = None,
        token: bool | str | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        max_shard_size: int | str = "50GB",
        tags: str | Sequence[str] | None = None,
    ) -> CommitInfo:
        """Upload the ensemble to the Hub in one commit: what `save_pretrained` writes, with a README.

        Members are named by their Hub ids and the commits that were loaded, or uploaded too. Nothing that belongs to
        this machine is uploaded. A README that is in the repository already stays.

        Args:
            repo_id: Repository, made if there is none.
            include_members: Whether to upload the members too. Needed for those that are no Hub ids.
            commit_message: First line of the commit.
            commit_description: Description of the commit.
            private: Whether a new repository is private.
            token: Token of the Hub. Default: that of `hf auth login`.
            revision: Branch to upload to, made if there is none.
            create_pr: Whether to propose the commit as a pull request.
            max_shard_size: Most bytes of a file of an included member, or a size like `"5GB"`.
            tags: More tags for the README.

        Returns:
            The commit.

        Raises:
            ConfigurationError: If a member lies on this machine and is not included, or its commit cannot be found;
                before anything is uploaded. Otherwise as `save_pretrained`.
            huggingface_hub.errors.HfHubHTTPError: If the Hub refuses.
        """
        check_token(token)
        api = HfApi(token=token, library_name="hf_ensemble")
        return push_ensemble(
            plan_push(self._parts(), include_members, api),
            api,
            repo_id,
            max_shard_size=max_shard_size,
            commit_message=commit_message,
            commit_description=commit_description,
            private=private,
            revision=revision,
            create_pr=create_pr,
            tags=[*(self.model_tags or ()), *([tags] if isinstance(tags, str) else tags or ())],
        )

    def _parts(self) -> EnsembleParts:
        config: Any = self.config
        return EnsembleParts(config, self.generation_config, self._members, self.tokenizer, type(self).__name__)

    def _load_generation_config(self, source: str, located: dict[str, Any]) -> None:
        try:
            self.generation_config = GenerationConfig.from_pretrained(source, **located)
        except OSError:
            # The primary's own stays.
            return

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
        """Compare the members: shared entries, how alike words are cut, context lengths, EOS, templates, lengths.

        Args:
            text: A text like those to be written, whose words (what white space separates) are cut by every member.
                Default: common words, the first 1,000 entries of each member that are a space and two or more letters.
            responses: For each member its responses to the same prompts; their lengths are compared then.
            prompts: Prompts to run every member on by itself, for such responses.
            max_new_tokens: Most ids of a response to `prompts`.
            batch_size: Number of prompts that run together.
            **generate_options: Other options of the members' `generate`, with `prompts`.

        Returns:
            The figures; printed, a table.

        Raises:
            ConfigurationError: If `text` has no words, or responses or prompts are missing or too many.
        """
        return compare_members(
            self._members,
            self.union_vocabulary,
            text,
            responses,
            prompts,
            max_new_tokens,
            batch_size,
            **generate_options,
        )

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
        """Render a conversation, or a batch of them, so that `generate` gives every member its own rendering.

        The same as `ensemble.tokenizer.apply_chat_template`, whose arguments are those of `transformers`. The result are
        the primary's ids; the other members read the conversation in their own templates when `generate` gets these ids.

        Args:
            conversation: Turns with `role` and `content`, or a list of such conversations.
            **kwargs: `add_generation_prompt`, `continue_final_message`, `tools`, `padding`, `return_tensors`, …; others
                are variables of every member's template.

        Raises:
            ConfigurationError: If the template refuses the conversation, or it holds something else than text.
        """
        return self.tokenizer.apply_chat_template(conversation, **kwargs)

    # Being a model

    @property
    def primary(self) -> Any:
        """The primary model."""
        return self._members[0].model

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
            raise ConfigurationError("an ensemble has no loss: `labels` cannot be used with it. See `score`.")
        member = self._members[0]
        if kwargs.pop(_WAITS, False):
            assert input_ids is not None
            return CausalLMOutputWithPast(logits=input_ids.new_zeros(len(input_ids), 1, member.vocab_size).float())
        if position_ids is not None and member.max_positions is not None:
            # Rows that have ended are padded on, and their positions would run out of the table.
            position_ids = position_ids.clamp_max(member.max_positions - 1)
        given = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
            member.cache_keyword: cache if cache is not None else past_key_values,
            "use_cache": use_cache,
            "logits_to_keep": logits_to_keep,
        }
        optional = {"position_ids", "logits_to_keep", "attention_mask"}
        kwargs.update(
            (key, value)
            for key, value in given.items()
            if value is not None and (key not in optional or member.accepts(key))
        )
        if member.accepts("output_router_logits"):
            kwargs["output_router_logits"] = False
        try:
            return self.primary(**kwargs)
        except Exception as error:
            raise MemberError(f"member {member.name!r} failed in its forward pass: {error}") from error

    def get_input_embeddings(self) -> nn.Module:
        """The primary's input embeddings."""
        embeddings: nn.Module = self.primary.get_input_embeddings()
        return embeddings

    def get_output_embeddings(self) -> nn.Module:
        """The primary's language-modelling head."""
        embeddings: nn.Module = self.primary.get_output_embeddings()
        return embeddings

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # What `to`, `half`, `cuda` and their like come down to: checked before anything is moved.
        for member in self._members:
            model: Any = member.model
            is_spread = len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1
            if is_spread or getattr(model, "is_quantized", False):
                raise ConfigurationError(
                    f"member {member.name!r} is {'spread over devices' if is_spread else 'quantised'} and cannot be moved "
                    "or cast. Load it with the `device_map` and `dtype` that you want."
                )
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        # A copy makes its methods anew: they hold graphs and buffers of a device.
        return {**self.__dict__, "_methods": {}, "_draft_lengths": {}}

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
        **kwargs: Any,
    ) -> Any:
        """Generate with all members: everything that `transformers` takes, and the method and weights of this call.

        Args:
            inputs: The primary's ids, of shape `(batch_size, length)`; the same as `input_ids`.
            generation_config: As in `transformers`; unset values come from the ensemble's, which starts as a copy of
                the primary's.
            logits_processor: Processors of fused scores over the primary's ids.
            stopping_criteria: Criteria over the primary's ids.
            prefix_allowed_tokens_fn: As in `transformers`, over the primary's ids.
            synced_gpus: As in `transformers`.
            assistant_model: Refused.
            streamer: As in `transformers`; its `end` is called also if generation fails.
            negative_prompt_ids: Refused.
            negative_prompt_attention_mask: Refused.
            custom_generate: Refused.
            method: Name or configuration of the method for this call.
            weights: Mixing weights for this call: one per member; or one such list for each row of `input_ids`; or a
                function that is called at every step with the number of steps before it and all ids so far, of shape
                `(batch_size, length)`, and returns either.
            member_prompts: Prompts of members' own, as plain text: one entry per member, each a text for all rows, a list
                with one per row, or None, also in such a list, for the text of `input_ids`. The primary's entry is None,
                unless there are no `input_ids`.
            output_decisions: Whether to record who decided what: `decisions` of the output, a `Decisions`. Takes
                `return_dict_in_generate=True`, and no beams.
            num_decision_entries: Number of each member's best entries that are recorded at each decision.
            speculation: Who drafts several tokens ahead, for all members to check in one forward pass: `"ngram"` (what
                followed the last ids where they stood before in the text), the name of a member, which writes on by
                itself, or `"auto"` for both, where speculation can be used, else the plain loop. Greedy texts are those
                without drafts (up to ties), and sampled ones of the same law. How much is drafted follows from what
                pays. Default: nobody.
            **kwargs: Generation options and the primary's inputs, as in `transformers`.

        Returns:
            The primary's ids of shape `(batch_size * num_return_sequences, length)`, or an output object with
            `return_dict_in_generate`, whose `scores` and `logits` are the ensemble's, over the primary's ids. Of a
            token-level method it also has `num_forwards` (each member's forward passes) and, but for beams,
            `share_ensembled` (for each row, the share of choices that no gate made alone); neither where the primary has
            all the weight and its own `generate` runs. With `speculation` it has `speculation`, a `SpeculationStats`.

        Raises:
            ConfigurationError: If an option cannot work for an ensemble, or the inputs do not fit, or a member's
                embeddings have been resized.
            MemberError: If a member fails, gives NaN, or every candidate was filtered out.
        """
        try:
            refused = {
                "assistant_model": assistant_model,
                "negative_prompt_ids": negative_prompt_ids,
                "negative_prompt_attention_mask": negative_prompt_attention_mask,
                "custom_generate": custom_generate,
                "inputs_embeds": kwargs.get("inputs_embeds"),
                "labels": kwargs.get("labels"),
            }
            for name, value in refused.items():
                if value is not None:
                    raise ConfigurationError(f"`{name}` cannot be used with an ensemble.")
            call = self._call(method, weights)
            call.has_cache = any(kwargs.get(key) is not None for key in ("past_key_values", "cache"))
            kwargs.pop("token_type_ids", None)
            settings = self._prepare_generation_config(  # type: ignore[misc]
                generation_config, **{key: value for key, value in kwargs.items() if value is not None}
            )[0]
            self._refuse_options(settings, kwargs)
            if output_decisions:
                _refuse_without_decisions(settings)
                check_positive_integer("num_decision_entries", num_decision_entries)
                call.num_decision_entries = num_decision_entries
            if speculation is not None:
                call.speculation = Speculation(speculation, self._members)
                found = obstacle_in_call(settings, call.has_cache, synced_gpus, output_decisions)
                if call.is_by_primary and call.speculation.is_auto:
                    call.speculation = None
                elif found is None and not call.is_by_primary:
                    found = obstacle_in_method(call.method, call.weights)
                if found is not None and call.speculation is not None:
                    call.speculation.refuse(*found)
                    call.speculation = None
            if call.method.greedy_only and not call.is_by_primary:
                _refuse_all_but_greedy(settings, call.method)
            if call.is_by_spans:
                self._refuse_options_of_spans(settings, call.has_cache, prefix_allowed_tokens_fn, synced_gpus)
            inputs, member_prompts = self._primary_prompt(inputs, kwargs, member_prompts)
            inputs = self._prepare_inputs(inputs, kwargs)
            renderers = [member.renderer for member in self._members]
            call.own_prompts = OwnPrompts(renderers, member_prompts, 1 if inputs is None else len(inputs))
            if settings.stop_strings is not None and kwargs.get("tokenizer") is None:
                kwargs["tokenizer"] = self.tokenizer
            processors = _CallProcessors(logits_processor or [])
            criteria = _CallCriteria(stopping_criteria or [])
            processors.call = criteria.call = call
            output = super().generate(
                inputs,
                generation_config=generation_config,
                logits_processor=processors,
                stopping_criteria=criteria,
                prefix_allowed_tokens_fn=prefix_allowed_tokens_fn,
                synced_gpus=synced_gpus,
                streamer=streamer,
                **kwargs,
            )
        except BaseException:
            if streamer is not None:
                # What failed is what shall be seen, also if the streamer (whose event loop may be closed) fails as well.
                with contextlib.suppress(Exception):
                    streamer.end()
            raise
        if call.fusion is not None and not isinstance(output, Tensor):
            if settings.output_logits:
                output["logits"] = tuple(call.fusion.logits_rows)
            if settings.output_scores and call.fusion.scores_rows:
                output["scores"] = tuple(call.fusion.scores_rows)
            output["num_forwards"] = call.fusion.num_forwards
            if settings.num_beams in (None, 1):
                output["share_ensembled"] = call.fusion.share_ensembled
        if call.speculator is not None and not isinstance(output, Tensor):
            output["num_forwards"] = call.speculator.num_forwards
            output["share_ensembled"] = call.speculator.share_ensembled
            output["speculation"] = call.speculator.stats
        if call.recorder is not None:
            output["decisions"] = call.recorder.decisions(output.sequences)
        return output

    @torch.no_grad()
    def score(
        self,
        prompts: Sequence[str | Sequence[int]],
        continuations: Sequence[str | Sequence[int]],
        *,
        method: str | MethodConfig | None = None,
        weights: WeightsLike | None = None,
        batch_size: int = 8,
    ) -> Scores:
        """Score continuations: how likely each is after its prompt, by the distributions that `generate` decodes with.

        A pair of texts is encoded as one by the primary and split as lm-evaluation-harness does it; an empty prompt is
        what a text starts from (BOS, else EOS). Token by token the fused distribution is read, of mixture sampling that
        of the mixture. With spans it is the mean over the members of each one's own log-probability.

        Args:
            prompts: Texts, or lists of the primary's ids.
            continuations: One for each prompt, of its kind.
            method: Name or configuration of the method for this call.
            weights: Mixing weights for this call: one per member; or one such list for each prompt; or a function as in
                `generate`, which is called with the ids of a batch, left-padded, in the order of the prompts.
            batch_size: Number of pairs that run together.

        Raises:
            ConfigurationError: If prompts and continuations do not match, or a text is too long for a member.
            MemberError: If a member fails or gives NaN.
        """
        call = self._call(method, weights)
        pairs = read_pairs(self._members[0], self.tokenizer, prompts, continuations)
        token_method = None
        if not call.is_by_primary and not call.is_by_spans:
            eos: Any = self.generation_config.eos_token_id
            token_method = self._method(call.method, [eos] if isinstance(eos, int) else list(eos or ()))
        renderers = [member.renderer for member in self._members]
        return score_pairs(self._members, token_method, call.method, call.weights, pairs, batch_size, renderers)

    def _call(self, method: str | MethodConfig | None, weights: WeightsLike | None) -> _Call:
        for member in self._members:
            member.check_size()
        config = self.config.method if method is None else method_config(method)
        count = len(self._members)
        config.check_members(count)
        given = self.config.weights if weights is None else weights
        call = _Call(config, MixingWeights(given, count, config.takes_weights_as_given))
        if isinstance(config, SweetSpanConfig):
            call.weights.refuse_varying(config.name)
        return call

    def _refuse_options(self, settings: GenerationConfig, kwargs: dict[str, Any]) -> None:
        for name, reason in _REFUSED_OPTIONS.items():
            value = getattr(settings, name, kwargs.get(name))
            if value is not None and value is not False and not (name == "guidance_scale" and value == 1):
                raise ConfigurationError(f"`{name}` cannot be used with an ensemble: {reason}.")
        if "paged" in str(settings.cache_implementation):
            raise ConfigurationError(
                f"`cache_implementation={settings.cache_implementation!r}` cannot be used with an ensemble: the paged "
                "loop decodes with the primary alone."
            )

    def _refuse_options_of_spans(
        self, settings: GenerationConfig, has_cache: bool, prefix_allowed_tokens_fn: Any, synced_gpus: Any
    ) -> None:
        outputs = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
        refused: dict[str, Any] = {name: getattr(settings, name, None) for name in outputs}
        refused |= {
            "num_beams": settings.num_beams not in (None, 1),
            "prefix_allowed_tokens_fn": prefix_allowed_tokens_fn is not None,
            "synced_gpus": synced_gpus,
            "cache_implementation": settings.cache_implementation not in (None, "dynamic"),
            "past_key_values": has_cache,
        }
        reasons = dict.fromkeys(outputs, "a span has no distribution over tokens; see `rounds` of the output")
        reasons |= {
            "num_beams": "a round keeps one span",
            "prefix_allowed_tokens_fn": "it knows the primary's ids only, but every member proposes",
            "synced_gpus": "rounds run on one process",
            "cache_implementation": "rejected spans are rolled back, which takes a dynamic cache",
            "past_key_values": "the members keep caches of their own",
        }
        for name, is_asked in refused.items():
            if is_asked:
                raise ConfigurationError(f"`{name}` cannot be used with method 'sweetspan': {reasons[name]}.")

    def _primary_prompt(
        self, inputs: Any, kwargs: dict[str, Any], member_prompts: Sequence[Any] | None
    ) -> tuple[Any, Sequence[Any] | None]:
        """Encode the primary's entry of `member_prompts` where there are no ids. Returns the ids, and what is left."""
        has_ids = inputs is not None or kwargs.get("input_ids") is not None
        if has_ids or not isinstance(member_prompts, (list, tuple)) or not member_prompts or member_prompts[0] is None:
            return inputs, member_prompts
        texts = [member_prompts[0]] if isinstance(member_prompts[0], str) else list(member_prompts[0])
        encoded = self.tokenizer(texts, padding=len(texts) > 1, return_tensors="pt").to(self._members[0].device)
        kwargs["attention_mask"] = encoded["attention_mask"]
        return encoded["input_ids"], [None, *member_prompts[1:]]

    def _prepare_inputs(self, inputs: Any, kwargs: dict[str, Any]) -> Tensor | None:
        """Check the prompt; move padding to the left and give empty rows a start. Returns the ids."""
        ids = inputs if inputs is not None else kwargs.pop("input_ids", None)
        primary = self._members[0]
        if ids is None:
            return None
        if not isinstance(ids, Tensor):
            raise TypeError(
                f"`input_ids` has to be a tensor of the primary's ids, but is {type(ids).__name__}. Encode text with "
                "`ensemble.tokenizer(text, return_tensors='pt')`."
            )
        if ids.ndim != 2 or (ids.is_floating_point() and ids.numel()):
            raise ConfigurationError(
                f"`input_ids` has to be of shape (batch_size, length) and integer, but is {tuple(ids.shape)}, {ids.dtype}."
            )
        if ids.shape[0] == 0:
            raise ConfigurationError("`input_ids` holds no row: give at least one prompt.")
        ids = ids.long()
        mask = kwargs.get("attention_mask")
        if mask is not None and mask.shape != ids.shape:
            raise ConfigurationError(
                f"`attention_mask` has shape {tuple(mask.shape)}, but `input_ids` has {tuple(ids.shape)}: pass the whole "
                "text, also with a cache."
            )
        outside = ids[(ids < 0) | (ids >= primary.vocab_size)]
        if outside.numel():
            raise messages.id_outside(f"`input_ids` holds {int(outside[0])}", primary.name, primary.vocab_size)
        if mask is not None and ids.shape[1]:
            # Left padding is what a decoder needs; the order of the real ids stays.
            is_right_padded = bool((mask[:, :-1] > mask[:, 1:]).any())
            if is_right_padded:
                warnings.warn("the prompt is padded on the right: its padding is moved to the left.", stacklevel=3)
                order = (mask != 0).long().argsort(dim=-1, stable=True)
                ids, mask = ids.gather(-1, order), mask.gather(-1, order)
        empty = torch.ones(len(ids), dtype=torch.bool) if ids.shape[1] == 0 else None
        if empty is None and mask is not None:
            empty = (mask.sum(-1) == 0).cpu()
        if empty is not None and bool(empty.any()):
            start = primary.encoder.start_ids
            if not start:
                what = f"row {int(empty.nonzero()[0, 0])} of the prompt is empty"
                raise messages.nothing_to_start_from(primary.name, what)
            missing = max(0, len(start) - ids.shape[1])
            mask = torch.ones_like(ids) if mask is None else mask
            ids, mask = nn.functional.pad(ids, (missing, 0)), nn.functional.pad(mask, (missing, 0))
            ids[empty, -len(start) :] = torch.tensor(start, device=ids.device)
            mask[empty, -len(start) :] = 1
        if mask is not None:
            kwargs["attention_mask"] = mask
        return ids

    def _get_logits_processor(self, generation_config: Any, **kwargs: Any) -> LogitsProcessorList:  # type: ignore[override]
        """Put the fusion first and the decision over the union vocabulary last."""
        given = kwargs.get("logits_processor")
        call = getattr(given, "call", None)
        if call is not None:
            copies = max(generation_config.num_beams, generation_config.num_return_sequences)
            call.weights.expand(len(kwargs["encoder_input_ids"]), copies)
        stock = super()._get_logits_processor(generation_config, **kwargs)  # type: ignore[misc]
        if call is None:
            return stock
        prompt = kwargs["encoder_input_ids"].repeat_interleave(copies, dim=0)
        mask = (kwargs.get("model_kwargs") or {}).get("attention_mask")
        eos_ids = _ids_of(generation_config._eos_token_tensor)
        if call.speculation is not None:
            name = needs_whole_batch(stock) if len(prompt) > 1 else None
            if name is None:
                processors = _CallProcessors(stock)
                processors.call = call
                return processors
            call.speculation.refuse(
                f"the logits processor {name} and several rows",
                "rows are decided at their own pace, so a processor is called with one row at a time",
                "Decode the rows one by one",
            )
            call.speculation = None
        if call.is_by_primary:
            if call.num_decision_entries is None:
                return stock
            ends = eos_ids_of(self._members[:1], eos_ids)[0]
            maps = MemberMaps(self.union_vocabulary, 0, ends, prompt.device)
            call.recorder = DecisionRecorder(self._members, [maps], prompt, mask, call.num_decision_entries)
            return LogitsProcessorList([PrimaryRecorder(call.recorder, len(self._members)), *stock])
        if call.is_by_spans:
            processors = _CallProcessors(self._processors_for_spans(stock, call.weights.participants))
            processors.call = call
            return processors
        is_beam_search = generation_config.num_beams > 1
        decides_over_union = not is_beam_search and all(type(item).__name__ in WARPERS for item in stock)
        keeps_rows = bool(
            generation_config.return_dict_in_generate
            and (generation_config.output_logits or generation_config.output_scores)
        )
        if call.method.draws_one:
            self._refuse_all_but_plain_sampling(generation_config, stock)
        method = self._method(call.method, eos_ids)
        is_wide = decides_over_union and method.is_wide
        if call.num_decision_entries is not None:
            call.recorder = DecisionRecorder(
                self._members, method.maps, prompt, mask, call.num_decision_entries, is_wide, method.reads_first_ids
            )
        call.fusion = TokenFusion(
            self._members,
            method,
            call.method,
            call.weights,
            prompt,
            mask,
            is_wide=decides_over_union,
            runs_primary=self._primary_can_wait(call, generation_config, method),
            keep_rows=keeps_rows,
            own_prompts=call.own_prompts,
            recorder=call.recorder,
            max_new_tokens=generation_config.max_length - kwargs["input_ids_seq_length"],
        )
        first = FusionProcessor(call.fusion, is_beam_search)
        if mask is not None:
            stock = LogitsProcessorList(
                UnpaddedPenalty(item, mask) if isinstance(item, RepetitionPenaltyLogitsProcessor) else item
                for item in stock
            )
        last = SelectionProcessor(call.fusion, generation_config.do_sample, generation_config.num_beams)
        processors = _CallProcessors([first, *stock, last])
        processors.call = call
        return processors

    def _primary_can_wait(self, call: _Call, generation_config: Any, method: TokenMethod) -> bool:
        """Whether the primary need not run in the decoding loop: not every step needs it, or its steps are captured."""
        gate = call.method.gate_rule
        needs_it = gate[0] == 0 if gate else 0 in call.weights.participants and not call.method.draws_one
        needs_it |= method.starts_from_primary
        # What only its own pass through the decoding loop can give.
        outputs = generation_config.output_attentions or generation_config.output_hidden_states
        return not (
            (needs_it and not self._members[0].is_captured)
            or call.has_cache
            or generation_config.num_beams > 1
            or generation_config.use_cache is False
            or generation_config.prefill_chunk_size is not None
            or generation_config.cache_implementation not in (None, "dynamic")
            or (generation_config.return_dict_in_generate and outputs)
        )

    @staticmethod
    def _refuse_all_but_plain_sampling(generation_config: Any, stock: LogitsProcessorList) -> None:
        rule = "draws one member for each token, which gives texts of the mixture's law only"
        if not generation_config.do_sample or generation_config.num_beams > 1:
            found = "beam search" if generation_config.num_beams > 1 else "greedy decoding"
            raise ConfigurationError(
                f'`strategy="mixture_sampling"` {rule} if texts are sampled, but this is {found}. Pass `do_sample=True`.'
            )
        if stock:
            name = type(stock[0]).__name__
            raise ConfigurationError(
                f'`strategy="mixture_sampling"` {rule} without processors, but there is a {name}. Pass `top_k=0`, '
                "`top_p=1.0` and `temperature=1.0`, and no others."
            )

    def _processors_for_spans(self, stock: LogitsProcessorList, participants: Collection[int]) -> list[Any]:
        """The processors that act on every member's proposals; refused are those that know the primary's ids only."""
        # How early a text may end is counted in the primary's ids: see `SpanDecoder`.
        kept = [item for item in stock if type(item).__name__ not in _EARLY_END_PROCESSORS]
        # Members read rows one by one, without the padding that the stock penalty passes over in a batch.
        kept = [
            RepetitionPenaltyLogitsProcessor(item.penalty)
            if isinstance(getattr(item, "prompt_ignore_length", None), Tensor)
            else item
            for item in kept
        ]
        fingerprints = {self._members[index].encoder.token_bytes.fingerprint for index in {0, *participants}}
        for item in kept:
            name = type(item).__name__
            if name not in WARPERS | _ANY_VOCABULARY and len(fingerprints) > 1:
                raise ConfigurationError(
                    f"the logits processor {name} cannot be used with method 'sweetspan' unless all members have the "
                    "same tokenizer: it knows the primary's ids only, but every member proposes in its own."
                )
        return kept

    def _sample(
        self,
        input_ids: Any,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """Run the stock loop, or hand over to spans or to speculation."""
        call = getattr(logits_processor, "call", None)
        if call is not None and call.fusion is not None:
            if call.fusion.runs_primary:
                for key in ("past_key_values", "cache"):
                    model_kwargs.pop(key, None)
                model_kwargs[_WAITS] = True
            call = None
        if call is None:
            return super()._sample(  # type: ignore[misc]
                input_ids,
                logits_processor,
                stopping_criteria,
                generation_config,
                synced_gpus,
                streamer,
                **model_kwargs,
            )
        if call.speculation is not None:
            mask = model_kwargs.get("attention_mask")
            return self._speculate(
                call, input_ids, mask, logits_processor, stopping_criteria, generation_config, streamer
            )
        config: Any = generation_config
        prompt_length = input_ids.shape[1]
        eos_ids = _ids_of(config._eos_token_tensor)
        decoder = SpanDecoder(
            self._members,
            call.weights.participants,
            call.method,
            eos_ids_of(self._members, eos_ids),
            input_ids,
            model_kwargs.get("attention_mask"),
            LogitsProcessorList(logits_processor),
            do_sample=bool(config.do_sample),
            max_new_tokens=config.max_length - prompt_length,
            min_new_tokens=max(config.min_new_tokens or 0, (config.min_length or 0) - prompt_length),
            use_cache=config.use_cache is not False,
            own_prompts=call.own_prompts,
        )
        pad = _pad_of(config)
        ids = write_decided(decoder, input_ids, stopping_criteria, pad, streamer)
        if not config.return_dict_in_generate:
            return ids
        output = SpanDecoderOutput(sequences=ids, rounds=decoder.rounds)  # type: ignore[arg-type]
        if call.num_decision_entries is not None:
            mask = model_kwargs.get("attention_mask")
            output["decisions"] = decisions_of_rounds(decoder, call.method, input_ids, mask, ids)
        return output

    def _speculate(
        self,
        call: _Call,
        input_ids: Tensor,
        mask: Tensor | None,
        processors: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        config: Any,
        streamer: Any,
    ) -> Any:
        assert call.speculation is not None
        eos_ids = _ids_of(config._eos_token_tensor)
        pad = _pad_of(config)
        method: TokenMethod
        if call.is_by_primary:
            ends = eos_ids_of(self._members, eos_ids)
            method = PrimaryAlone(self.union_vocabulary, ends, self._members[0].device)
        else:
            method = self._method(call.method, eos_ids)
        num_parameters = [member.model.num_parameters() for member in self._members]
        participants = tuple(sorted(call.weights.participants))
        drafters = call.speculation.drafters(participants, num_parameters)
        # What earlier calls of this kind have measured; each is used by one call at a time.
        kind = (call.method, call.is_by_primary, call.speculation.name, participants, len(input_ids), method.device)
        draft_length = self._draft_lengths.pop(kind, None) or self._new_draft_length(
            drafters, participants, num_parameters
        )
        call.speculator = SpeculativeDecoder(
            self._members,
            method,
            call.method.name,
            call.weights.at(0, input_ids),
            input_ids,
            mask,
            RowProcessors(processors, input_ids, mask),
            do_sample=bool(config.do_sample),
            max_new_tokens=config.max_length - input_ids.shape[1],
            end_ids=eos_ids,
            drafters=drafters,
            uses_ngrams=call.speculation.uses_ngrams,
            draft_length=draft_length,
            keep_rows=bool(config.return_dict_in_generate and (config.output_logits or config.output_scores)),
            filler=pad or 0,
            own_prompts=call.own_prompts,
        )
        try:
            ids = write_decided(call.speculator, input_ids, stopping_criteria, pad, streamer)
        finally:
            call.speculator.close()
        if len(self._draft_lengths) >= _MAX_DRAFT_LENGTHS:
            self._draft_lengths.clear()
        self._draft_lengths[kind] = draft_length
        if not config.return_dict_in_generate:
            return ids
        return GenerateDecoderOnlyOutput(
            sequences=ids,  # type: ignore[arg-type]
            scores=tuple(call.speculator.scores_rows) if config.output_scores else None,  # type: ignore[arg-type]
            logits=tuple(call.speculator.logits_rows) if config.output_logits else None,  # type: ignore[arg-type]
        )

    def _new_draft_length(
        self, drafters: Sequence[int], participants: Sequence[int], num_parameters: Sequence[int]
    ) -> DraftLength:
        running = sum(num_parameters[index] for index in participants)
        return DraftLength(
            shares={self._members[index].name: num_parameters[index] / running for index in drafters},
            # The first three also capture graphs, of steps and of mixing.
            num_trials=4 if any(self._members[index].is_captured for index in participants) else 1,
        )

    def _get_stopping_criteria(self, **kwargs: Any) -> StoppingCriteriaList:  # type: ignore[override]
        call = getattr(kwargs.get("stopping_criteria"), "call", None)
        criteria = super()._get_stopping_criteria(**kwargs)  # type: ignore[misc]
        if call is not None and call.is_by_primary and call.recorder is not None:
            return RecordingCriteriaList(criteria, call.recorder)
        if call is None or call.fusion is None or kwargs["generation_config"].num_beams > 1:
            return criteria
        return FollowingCriteriaList(criteria, call.fusion)

    def _method(self, config: MethodConfig, eos_ids: list[int]) -> TokenMethod:
        device = self._members[0].device
        key = (config, tuple(eos_ids), device)
        for other_key, other in list(self._methods.items()):
            if other_key != key:
                other.forget()
        method = self._methods.get(key)
        if method is None or method.is_stale:
            if len(self._methods) >= _MAX_METHODS:
                self._methods.clear()
            method = build_method(
                config, self._members, self.union_vocabulary, eos_ids_of(self._members, eos_ids), device
            )
            self._methods[key] = method
        return method

    # The primary runs in the stock loop, so what the loop asks a model for is asked of the primary.

    def prepare_inputs_for_generation(self, input_ids: Tensor, **kwargs: Any) -> dict[str, Any]:
        """Prepare the primary's inputs for one step."""
        if kwargs.get(_WAITS):
            return {"input_ids": input_ids, _WAITS: True}
        inputs: dict[str, Any] = self.primary.prepare_inputs_for_generation(input_ids, **kwargs)
        return inputs

    def create_masks_for_generate(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare the primary's attention masks."""
        return self.primary.create_masks_for_generate(*args, **kwargs)

    def _prepare_position_ids_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        return self.primary._prepare_position_ids_for_generation(*args, **kwargs)

    def _update_model_kwargs_for_generation(self, outputs: Any, model_kwargs: Any, *args: Any, **kwargs: Any) -> Any:
        if model_kwargs.get(_WAITS):
            return model_kwargs
        return self.primary._update_model_kwargs_for_generation(outputs, model_kwargs, *args, **kwargs)

    def _prepare_cache_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        # On transformers 5.17 the name of the cache depends on the model's class.
        return self.primary._prepare_cache_for_generation(*args, **kwargs)

    @property
    def _is_stateful(self) -> bool:  # type: ignore[override]
        return bool(self.primary._is_stateful)


def _refuse_all_but_greedy(settings: GenerationConfig, method: MethodConfig) -> None:
    asked = {"do_sample": bool(settings.do_sample), "num_beams": settings.num_beams not in (None, 1)}
    for name, is_asked in asked.items():
        if is_asked:
            raise ConfigurationError(
                f"`{name}={getattr(settings, name)}` cannot be used with these options of method {method.name!r}: "
                f"{method.greedy_only}. Pass `do_sample=False` and `num_beams=1`."
            )


def _refuse_without_decisions(settings: GenerationConfig) -> None:
    if not settings.return_dict_in_generate:
        raise ConfigurationError(
            "`output_decisions` gives `decisions` of the output object: pass `return_dict_in_generate=True` too."
        )
    if settings.num_beams not in (None, 1):
        raise ConfigurationError(
            f"`output_decisions` cannot be used with `num_beams={settings.num_beams}`: beams are chosen by the "
            "probabilities of whole texts, so nobody decides a token. Pass `num_beams=1`."
        )


def _pad_of(config: Any) -> int | None:
    return None if config._pad_token_tensor is None else int(config._pad_token_tensor)


def _ids_of(tensor: Tensor | None) -> list[int]:
    return [] if tensor is None else tensor.tolist()


def _read_config(source: str, located: dict[str, Any]) -> PreTrainedConfig | None:
    try:
        return AutoConfig.from_pretrained(source, **located)  # type: ignore[no-any-return]
    except ConfigurationError:
        raise
    except (OSError, ValueError):
        # `check_members` says what is wrong with it.
        return None


AutoConfig.register(EnsembleConfig.model_type, EnsembleConfig)
AutoModelForCausalLM.register(EnsembleConfig, EnsembleForCausalLM)
