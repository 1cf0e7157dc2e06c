"""Bug bank, section J: members that are wrapped, adapted, narrow, offloaded, changed or tried out at a bad time.

| case | where |
| --- | --- |
| J3, J4, J5, J6, J7, J10, J12, J13, J19, J24 | here |
| J25 | here for objects on the meta device |
"""

import copy
import importlib
import logging
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, pipeline

from hf_ensemble import ConfigurationError, EnsembleForCausalLM, EnsembleLogitsProcessor, MemberConfig, MemberError
from hf_ensemble.members import cache_probe
from hf_ensemble.members.local import LocalMember
from tests import tiny
from tests.contracts import SPANS, make_ensemble

from .kit import TOKEN_METHODS, control_tokens_may_be_chosen, output_ids, tokenizer_of

pytestmark = control_tokens_may_be_chosen

PROMPTS = ["x", "Once upon a time there was"]
NUM_NEW = 6
each_place = pytest.mark.parametrize("place", [0, 1], ids=["primary", "assistant"])


def ensemble_of(*models, method="gac", **options):
    """Members that try out their caches themselves, unlike those of `make_ensemble`."""
    tokenizers = [tokenizer_of("small")] * len(models)
    names = [MemberConfig(name=f"member-{n}") for n in range(len(models))]
    return EnsembleForCausalLM.from_members(models, tokenizers, method=method, member_configs=names, **options)


def beside(model, place, **options):
    """An ensemble of a model, as the primary or as the assistant, and of another one."""
    models = [tiny.tiny_llama(tokenizer_of("small"), seed=9, num_hidden_layers=1)]
    models.insert(place, model)
    return ensemble_of(*models, **options)


def text_of(ensemble, **options):
    return output_ids(
        ensemble, PROMPTS, **{"max_new_tokens": NUM_NEW, "eos_token_id": [], "pad_token_id": 0, **options}
    )


# --- J3: wrappers ---------------------------------------------------------------------------------------------------


class Wrapper(nn.Module):
    """As many wrappers are: what it is given by name, and all that it is asked for, goes on to the model."""

    def __init__(self, wrapped):
        super().__init__()
        self.wrapped = wrapped

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.wrapped, name)

    def forward(self, *args, **kwargs):
        return self.wrapped(*args, **kwargs)


class NamesSome(Wrapper):
    """As that of PEFT, which names some arguments, and neither positions nor the cache."""

    def forward(self, input_ids=None, attention_mask=None, **kwargs):
        return self.wrapped(input_ids=input_ids, attention_mask=attention_mask, **kwargs)


QUICK = [("gpt2", "names some"), ("gpt2", "compiled"), ("mamba", "names some")]
WRAPPERS = {
    "wrapper": Wrapper,
    "names some": NamesSome,
    "twice": lambda model: Wrapper(NamesSome(model)),
    "compiled": lambda model: torch.compile(model, backend="eager"),
}


@torch.compiler.set_stance("force_eager")  # compiling takes minutes
@pytest.mark.parametrize(
    ("architecture", "wrapper"),
    [
        pytest.param(name, wrapper, marks=[] if (name, wrapper) in QUICK else [pytest.mark.slow])
        for name in ("gpt2", "gemma3", "mamba")
        for wrapper in WRAPPERS
    ],
)
def test_a_wrapped_member_is_the_member(architecture, wrapper):
    """J3: Learned positions, windows and recurrent states of rows that are padded, in the decoding loop and beside it."""
    model = getattr(tiny, f"tiny_{architecture}")(tokenizer_of("small"), seed=7)
    wrapped = WRAPPERS[wrapper](model)
    alone = ensemble_of(wrapped)
    inputs = alone.tokenizer(PROMPTS, return_tensors="pt", padding=True)
    stock = model.generate(**inputs, max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=[], pad_token_id=0).tolist()
    assert text_of(alone) == stock
    assert alone._members[0].cache_mode == ensemble_of(model)._members[0].cache_mode
    for place in (0, 1):
        assert text_of(beside(wrapped, place)) == text_of(beside(model, place))


@pytest.mark.slow
def test_a_compiled_member_gets_its_positions():
    """J3: The case that was seen."""
    model = tiny.tiny_gpt2(tokenizer_of("small"), seed=7, n_layer=1)
    compiled = ensemble_of(torch.compile(model, backend="eager"))
    assert text_of(compiled, max_new_tokens=3) == text_of(ensemble_of(model), max_new_tokens=3)


def test_a_wrapper_that_hands_on_nothing_is_given_nothing_more():
    """J3: What is wrapped counts only where it can be reached."""

    class Closed(Wrapper):
        def forward(self, input_ids, use_cache=None, return_dict=None):
            return self.wrapped(input_ids=input_ids, use_cache=False)

    model = tiny.tiny_llama(tokenizer_of("small"), seed=7)
    member = LocalMember(Closed(model), tokenizer_of("small"))
    assert not member.accepts("position_ids")
    with pytest.warns(UserWarning, match="whole context is computed again"):
        assert member.cache_mode == "recompute"


# --- J4: adapters ---------------------------------------------------------------------------------------------------


class FakeAdapter:
    """What matters of a configuration of PEFT."""

    def __init__(self, is_prompt_learning):
        self.is_prompt_learning = is_prompt_learning


@pytest.mark.parametrize("wrapper", [lambda model: model, Wrapper], ids=["bare", "wrapped"])
def test_an_adapter_of_virtual_tokens_is_refused_with_the_reason(wrapper):
    """J4: When the ensemble is made; one that changes weights is not."""
    model = tiny.tiny_llama(tokenizer_of("small"))
    model.peft_config = {"mine": FakeAdapter(is_prompt_learning=True)}
    with pytest.raises(ConfigurationError, match=r"'mine' of member 'member-0' \(FakeAdapter\).*virtual tokens.*LoRA"):
        ensemble_of(wrapper(model))
    model.peft_config = {"mine": FakeAdapter(is_prompt_learning=False)}
    ensemble_of(wrapper(model))


@pytest.fixture
def peft():
    return pytest.importorskip("peft")


of_peft = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@of_peft
@pytest.mark.parametrize("config", ["PromptTuningConfig", "PrefixTuningConfig", "PromptEncoderConfig"])
def test_prompt_and_prefix_tuning_of_peft_are_refused(config, peft):
    """J4: All whose virtual tokens stand before the text."""
    options = getattr(peft, config)(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model = peft.get_peft_model(tiny.tiny_llama(tokenizer_of("small")), options)
    with pytest.raises(ConfigurationError, match=rf"member-0.*{config}.*virtual tokens"):
        ensemble_of(model)


@of_peft
@pytest.mark.parametrize(
    ("architecture", "layer"),
    [pytest.param("llama", "q_proj", marks=pytest.mark.slow), ("gpt2", "c_attn"), ("mamba", "in_proj")],
)
def test_lora_of_peft_writes_what_its_own_generate_does(architecture, layer, peft):
    """J4: In the decoding loop and beside it, on and off; every state of it is tried."""
    base = getattr(tiny, f"tiny_{architecture}")(tokenizer_of("small"), seed=1)
    options = {"init_lora_weights": False, "fan_in_fan_out": architecture == "gpt2"}
    torch.manual_seed(0)
    model = peft.get_peft_model(
        copy.deepcopy(base), peft.LoraConfig(task_type="CAUSAL_LM", target_modules=[layer], **options)
    ).eval()
    alone = ensemble_of(model)
    inputs = alone.tokenizer(PROMPTS, return_tensors="pt", padding=True)
    own = model.generate(**inputs, max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=[], pad_token_id=0).tolist()
    assert text_of(alone) == own != text_of(ensemble_of(base))
    pair = beside(model, 1)
    found = text_of(pair)
    with model.disable_adapter():
        assert text_of(pair) == text_of(beside(base, 1))
    assert text_of(beside(model.merge_and_unload(), 1)) == found


# --- J5: tokenizers with dropout ------------------------------------------------------------------------------------


def with_dropout(tokenizer):
    twin = copy.deepcopy(tokenizer)
    twin.backend_tokenizer.model.dropout = 0.5
    return twin


@pytest.mark.crossed
@each_place
@pytest.mark.parametrize("name", ["smol", "llama2"])
@pytest.mark.parametrize("method", ["gac", "unite", "sweetspan"])
def test_a_tokenizer_that_drops_merges_is_read_without(method, name, place):
    """J5: Same ids in, same text out; the user's tokenizer goes on as it was."""
    texts = []
    dropping = with_dropout(tokenizer_of(name))
    for tokenizer in (tokenizer_of(name), dropping):
        tokenizers = [tokenizer_of("gemma")]
        tokenizers.insert(place, tokenizer)
        models = [tiny.tiny_llama(t, seed=n, num_hidden_layers=1) for n, t in enumerate(tokenizers)]
        ensemble = make_ensemble(models, tokenizers, method=SPANS if method == "sweetspan" else method)
        texts += [output_ids(ensemble, "Once upon a time there was", max_new_tokens=6) for _ in range(2)]
    assert texts == texts[:1] * 4
    assert dropping.backend_tokenizer.model.dropout == 0.5


def test_what_an_ensemble_encodes_itself_is_encoded_without_dropout():
    """J5: Prompts, texts to be scored, conversations; and its maps are found again."""
    tokenizer, dropping = tokenizer_of("smol"), with_dropout(tokenizer_of("smol"))
    members = [LocalMember(tiny.tiny_llama(t), t) for t in (tokenizer, dropping, dropping)]
    fingerprints = [member.encoder.token_bytes.fingerprint for member in members]
    assert fingerprints[1] == fingerprints[2]
    ensembles = [make_ensemble([tiny.tiny_llama(t)], [t]) for t in (tokenizer, dropping)]
    text = "Once upon a time there was a king who had three daughters."
    for read in (
        lambda one: one.tokenizer(text)["input_ids"],
        lambda one: one.apply_chat_template([{"role": "user", "content": text}])["input_ids"],
        lambda one: one._members[0].encoder.encode(text.encode()),
        lambda one: one.score([text], [" They lived."]).log_probs.tolist(),
    ):
        assert read(ensembles[0]) == read(ensembles[1]) == read(ensembles[1])


# --- J6: narrow heads -----------------------------------------------------------------------------------------------


def narrow(seed=1, extra_rows=16):
    """More embeddings than ids that it writes, such as of images."""
    tokenizer = tokenizer_of("small")
    model = tiny.tiny_llama(tokenizer, seed=seed, extra_rows=extra_rows, num_hidden_layers=1)
    head = nn.Linear(model.config.hidden_size, tiny.rows_of(tokenizer), bias=False)
    with torch.no_grad():
        model.lm_head = head.requires_grad_(False)
        head.weight.normal_(0, 0.5, generator=torch.Generator().manual_seed(seed))
    return model


def apertus():
    transformers = importlib.import_module("transformers")
    if not hasattr(transformers, "Apertus1p5TextForCausalLM"):
        pytest.skip("newer versions of transformers have it")
    tokenizer = tokenizer_of("small")
    rows = tiny.rows_of(tokenizer)
    config = transformers.Apertus1p5TextConfig(
        **tiny.SIZES | {"max_position_embeddings": 16384},
        vocab_size=rows + 16,
        output_vocab_size=rows,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.Apertus1p5TextForCausalLM(config).eval()


@pytest.mark.parametrize(
    ("make", "method"),
    [
        *((narrow, method) for method in (*TOKEN_METHODS, "sweetspan")),
        (apertus, "gac"),
        *(pytest.param(apertus, method, marks=pytest.mark.slow) for method in (*TOKEN_METHODS[1:], "sweetspan")),
    ],
)
def test_the_width_of_the_head_is_what_counts(method, make):
    """J6: By every method, as the primary and as the assistant."""
    model = make()
    method = SPANS if method == "sweetspan" else method
    inputs = tokenizer_of("small")(PROMPTS[1], return_tensors="pt")
    stock = model.generate(**inputs, max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=[], pad_token_id=0).tolist()
    alone = ensemble_of(model, method=method)
    assert alone._members[0].vocab_size == tiny.rows_of(tokenizer_of("small")) < model.config.vocab_size
    assert output_ids(alone, PROMPTS[1], max_new_tokens=NUM_NEW, eos_token_id=[], pad_token_id=0) == stock
    for place in (0, 1):
        assert text_of(beside(model, place, method=method, weights=[1 - place, place]))
        assert text_of(beside(model, place, method=method))


# --- J7: weights on the disk ----------------------------------------------------------------------------------------


@pytest.mark.crossed
@each_place
@pytest.mark.parametrize("on_disk", [("model.embed_tokens",), ("model.embed_tokens", "model.layers", "lm_head")])
@pytest.mark.filterwarnings("ignore:You are calling .generate.. with the `input_ids` being on a device type different")
def test_weights_that_wait_on_the_disk_are_run_where_the_others_are(on_disk, place, tmp_path):
    """J7: The embeddings alone, and all that has weights."""
    model = tiny.tiny_llama(tokenizer_of("small"), seed=3)
    model.save_pretrained(tmp_path / "model")
    places = dict.fromkeys(("model.embed_tokens", "model.layers", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    places |= dict.fromkeys(on_disk, "disk")
    offloaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "disk"
    )
    assert offloaded.get_input_embeddings().weight.is_meta
    assert text_of(beside(offloaded, place)) == text_of(beside(model, place))


# --- J10: ruled-out ids ---------------------------------------------------------------------------------------------


def with_bias(value, architecture="llama", dtype=torch.float32):
    """A model whose head gives this for one id, whatever the text."""
    model = getattr(tiny, f"tiny_{architecture}")(tokenizer_of("small"), seed=4)
    model.lm_head.bias = nn.Parameter(torch.zeros(tiny.rows_of(tokenizer_of("small"))), requires_grad=False)
    model.lm_head.bias[50] = value
    return model.to(dtype)


@pytest.mark.crossed
@each_place
@pytest.mark.parametrize("method", [*TOKEN_METHODS, "sweetspan"])
def test_an_id_may_be_ruled_out_for_good(method, place):
    """J10: -inf is a probability of zero; the member keeps its cache."""
    model = with_bias(-torch.inf)
    method = SPANS if method == "sweetspan" else method
    ensemble = beside(model, place, method=method)
    found = text_of(ensemble)
    assert found == text_of(beside(with_bias(-1e4), place, method=method))
    assert ensemble._members[place].cache_mode == "repack"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_no_probability_is_refused_with_a_remedy_that_fits(value, dtype):
    """J10: NaN, and infinity on the other side; a float32 model is not told to be one."""
    ensemble = beside(with_bias(value, dtype=dtype), 1)
    remedy = "Load it in float32" if dtype == torch.bfloat16 else "Run it alone on this text"
    with pytest.raises(MemberError, match=rf"member-1.*{dtype}.*{remedy}"):
        text_of(ensemble)


def test_a_cache_with_which_other_ids_are_ruled_out_is_not_used():
    """J10: In the trial of caches."""
    finite = torch.zeros(3, 2, 5)
    ruled_out = finite.index_fill(-1, torch.tensor([1]), -torch.inf)
    assert cache_probe.distance_of_logits(ruled_out, ruled_out) == 0
    assert (
        cache_probe.distance_of_logits(finite, ruled_out)
        == cache_probe.distance_of_logits(ruled_out, finite)
        == torch.inf
    )
    assert not cache_probe.distance_of_logits(finite * torch.nan, finite) <= 1


# --- J12: resized embeddings ----------------------------------------------------------------------------------------


@pytest.mark.crossed
@each_place
@pytest.mark.parametrize("change", [8, -8])
def test_embeddings_that_were_resized_since_are_an_error_that_says_what_to_do(change, place):
    """J12: By the name and the sizes, however the ensemble is asked."""
    model = tiny.tiny_llama(tokenizer_of("small"), seed=3, num_hidden_layers=1)
    ensemble = beside(model, place)
    processor = EnsembleLogitsProcessor(list(ensemble.members), ensemble.tokenizers)
    width = model.config.vocab_size
    text_of(ensemble)
    model.resize_token_embeddings(width + change)
    message = rf"{width + change} ids, but had {width} .*Create the ensemble again"
    for method in ("gac", "unite", SPANS):
        with pytest.raises(ConfigurationError, match=f"member-{place}.*{message}"):
            text_of(ensemble, method=method)
    with pytest.raises(ConfigurationError, match=f"member-{place}.*{message}"):
        ensemble.score(["The cat"], [" sat"])
    with pytest.raises(ConfigurationError, match=f"member-{place}.*{message}"):
        ensemble._members[place].new_rows(1).forward([[1, 2, 3]], [1])
    inputs = tokenizer_of("small")("The cat", return_tensors="pt")
    with pytest.raises(ConfigurationError, match=message):
        ensemble.members[0].generate(**inputs, logits_processor=[processor], max_new_tokens=2)
    assert len(text_of(beside(model, place))[0]) > 8


# --- J13: when caches are tried -------------------------------------------------------------------------------------


@pytest.fixture
def trials(monkeypatch):
    """The assistants that try out their caches."""
    seen = []
    find = cache_probe.find_cache_mode

    def watch(member, *args):
        seen.extend([member.name] * (member.name != "member-0"))
        return find(member, *args)

    monkeypatch.setattr("hf_ensemble.members.local.find_cache_mode", watch)
    return seen


def training(dropout):
    return tiny.tiny_llama(tokenizer_of("small"), seed=3, attention_dropout=dropout).train()


@each_place
def test_a_first_call_in_training_mode_warns_and_leaves_nothing_behind(place):
    """J13: With dropout no cache can be told from a wrong one; afterwards the ensemble is as a fresh one."""
    model = training(dropout=0.3)
    ensemble = beside(model, place)
    state = torch.get_rng_state()
    with pytest.warns(UserWarning, match=f"member-{place}.*training mode.*`eval"):
        assert ensemble._members[place].cache_mode == "recompute"
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in model.modules())
    text_of(ensemble)
    model.eval()
    fresh = beside(model, place)
    assert text_of(ensemble) == text_of(fresh)
    assert ensemble._members[place].cache_mode == fresh._members[place].cache_mode == "repack"


def test_training_mode_without_dropout_is_nothing_to_warn_of(trials):
    """J13: It gives the same logits every time."""
    ensemble = beside(training(dropout=0.0), 1)
    text_of(ensemble)
    assert ensemble._members[1].cache_mode == "repack"
    assert trials == ["member-1"]


@pytest.mark.parametrize("change", ["dtype", "device", "training", "inner hook", "adapter", "attention", "weights"])
def test_a_changed_model_tries_its_caches_again(change, trials):
    """J13: And an unchanged one does not; one that is changed back needs no more than it knows."""
    model = tiny.tiny_llama(tokenizer_of("small"), seed=3)
    ensemble = beside(model, 1)
    text_of(ensemble)
    text_of(ensemble, method=SPANS)
    assert trials == ["member-1"]
    layer = model.model.layers[0]
    if change == "dtype":
        model.to(torch.bfloat16)
    elif change == "device":
        with torch.no_grad():
            model._apply(torch.Tensor.clone)
    elif change == "training":
        model.train()
    elif change == "inner hook":
        hook = layer.register_forward_hook(lambda *_: None)
    elif change == "adapter":
        layer._disable_adapters = True
    elif change == "attention":
        model.set_attn_implementation("eager")
    else:
        layer.self_attn.q_proj.weight = nn.Parameter(torch.zeros_like(layer.self_attn.q_proj.weight))
    text_of(ensemble)
    text_of(ensemble)
    assert trials == ["member-1"] * 2
    if change in ("inner hook", "training"):
        hook.remove() if change == "inner hook" else model.eval()
        text_of(ensemble)
        assert trials == ["member-1"] * 2


def test_a_cache_that_a_hook_spoils_is_used_again_without_it():
    """J13: As steering vectors do that count the ids of a forward pass."""
    model = tiny.tiny_llama(tokenizer_of("small"), seed=3)
    ensemble = beside(model, 1)
    expected = text_of(ensemble)

    def steer(module, args, output):
        return output + 3.0 * (output.shape[1] > 1)

    hook = model.model.layers[0].mlp.register_forward_hook(steer)
    with pytest.warns(UserWarning, match="whole context is computed again"):
        text_of(ensemble)
    hook.remove()
    assert text_of(ensemble) == expected
    assert ensemble._members[1].cache_mode == "repack"


@contextmanager
def warnings_logged():
    """What is said at WARNING while caches are tried."""
    said = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    cache_probe.logger.addHandler(handler)
    try:
        yield said
    finally:
        cache_probe.logger.removeHandler(handler)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), RuntimeError("out of memory")], ids=repr
)
def test_a_trial_without_memory_is_said_and_made_again_at_the_next_call(error):
    """J13: Another cache serves until then."""
    model = tiny.tiny_llama(tokenizer_of("small"), seed=3)
    ensemble = beside(model, 1)
    is_short = True

    def fail(module, args, kwargs):
        if is_short and kwargs["use_cache"] and len(kwargs["input_ids"]) == 2:
            raise error

    model.register_forward_pre_hook(fail, with_kwargs=True)
    with warnings_logged() as said:
        first = output_ids(ensemble, "Once upon", max_new_tokens=4)
        assert ensemble._members[1].cache_mode == "row_chunks"
    assert all("memory to try cache mode repack of member 'member-1'" in message for message in said)
    assert said
    is_short = False
    with warnings_logged() as said:
        assert output_ids(ensemble, "Once upon", max_new_tokens=4) == first
        assert ensemble._members[1].cache_mode == "repack"
    assert not said


# --- J19: kept buffers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_kept_buffers_are_not_used_for_another_dtype(attention):
    """J19: Nor are the masks that they hold; there and back."""
    ensemble = make_ensemble(
        [tiny.tiny_gemma3(tokenizer_of("small"), seed=n, attn_implementation=attention) for n in range(2)],
        [tokenizer_of("small")] * 2,
    )
    for member in ensemble._members:
        member.cache_mode = "static"
    expected = text_of(ensemble)
    ensemble.to(torch.bfloat16)
    text_of(ensemble)
    ensemble.float()
    for member in ensemble._members:
        assert member.buffer_pool._free
    text_of(ensemble)
    again = make_ensemble(list(ensemble.members), ensemble.tokenizers)
    assert text_of(ensemble) == text_of(again)
    assert len(expected) == 2


# --- J24: rounding, and where warnings point ------------------------------------------------------------------------


class EightBit(nn.Linear):
    """Rounds its input to 8 bits by the largest number in the batch, as quantised layers do."""

    def forward(self, states):
        scale = states.abs().amax() / 127
        return nn.functional.linear((states / scale).round() * scale, self.weight, self.bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cache_of_a_quantised_member_is_used(dtype):
    """J24: Rounding depends on what is in the batch, and so does not say that a cache is wrong."""
    model = tiny.tiny_llama(tokenizer_of("small"), seed=3, num_hidden_layers=4).to(dtype)
    for module in model.model.modules():
        if type(module) is nn.Linear:
            module.__class__ = EightBit
    model.is_quantized = True
    assert ensemble_of(model)._members[0].cache_mode == "repack"
    forgetful = Forgetful(tokenizer_of("small"))
    forgetful.is_quantized = True
    with pytest.warns(UserWarning, match="whole context is computed again"):
        assert ensemble_of(forgetful)._members[0].cache_mode == "recompute"


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_the_cache_of_a_member_under_autocast_is_used(architecture):
    """J24: Its dtype is not the one that it computes in."""
    model = getattr(tiny, f"tiny_{architecture}")(tokenizer_of("small"), seed=3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ensemble_of(model)._members[0].cache_mode == "repack"


class Forgetful(tiny.ScriptedModel):
    """Reads nothing of its cache."""

    def __init__(self, tokenizer):
        rows = torch.arange(float(tiny.rows_of(tokenizer)))
        super().__init__(tokenizer, lambda context: (rows * (1 + sum(context))) % 7)

    def forward(self, input_ids, past_key_values=None, cache=None, use_cache=None, **kwargs):
        return super().forward(input_ids, use_cache=False)


@pytest.mark.parametrize("way", ["generate", "score", "pipeline"])
def test_a_warning_points_at_the_users_line(way):
    """J24: Not into this package, nor into the libraries between."""
    ensemble = beside(Forgetful(tokenizer_of("small")), 1)
    inputs = ensemble.tokenizer("The cat", return_tensors="pt")
    generate = pipeline("text-generation", model=ensemble, tokenizer=ensemble.tokenizer)
    with pytest.warns(UserWarning, match="whole context is computed again") as caught:
        if way == "generate":
            ensemble.generate(**inputs, max_new_tokens=1)
        elif way == "score":
            ensemble.score(["The cat"], [" sat"])
        else:
            generate("The cat", max_new_tokens=1)
    (found,) = [one for one in caught if "computed again" in str(one.message)]
    assert found.filename == __file__


# --- J25: no numbers ------------------------------------------------------------------------------------------------


@each_place
def test_a_member_on_the_meta_device_is_refused_at_once(place):
    """J25: With what to do; also if only some of it was left there."""
    model = tiny.tiny_llama(tokenizer_of("small"))
    model.lm_head.to("meta")
    for one in (model, tiny.tiny_llama(tokenizer_of("small")).to("meta")):
        with pytest.raises(ConfigurationError, match=f"member-{place}.*meta device.*from_pretrained"):
            beside(one, place)
