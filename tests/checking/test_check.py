"""`ensemble.check()` and `hf-ensemble doctor`: each planted fault is found by name, and nothing else is."""

import json

import pytest
import torch
from tokenizers import Regex, normalizers, processors
from torch.testing._internal.two_tensor import TwoTensor

from hf_ensemble import EnsembleForCausalLM, MemberConfig
from hf_ensemble.cli import main
from hf_ensemble.members.member_model import tensors_of
from tests import tiny

pytestmark = pytest.mark.filterwarnings(
    "ignore:member .* ends texts with ids", "ignore:member .* is in training mode", "ignore:.*has no row for"
)

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def sound():
    """A tokenizer and a model with nothing wrong."""
    tokenizer = tiny.smol_like()
    return tokenizer, tiny.tiny_llama(tokenizer, seed=1, max_position_embeddings=4096)


def found(tokenizer, model, **options):
    """What is found of a member beside a sound one: each check with its words."""
    other, sound_model = sound()
    items = [MemberConfig(name="sound"), MemberConfig(name="odd", **options)]
    ensemble = EnsembleForCausalLM.from_members([sound_model, model], [other, tokenizer], member_configs=items)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    was_training = model.training
    report = ensemble.check()
    assert model.training == was_training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(finding.member == "odd" for finding in report.findings)
    return {finding.check: finding for finding in report.findings}


def no_second_space():
    tokenizer = tiny.smol_like()
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace(Regex(" {2,}"), " ")
    return tokenizer


def forgetful():
    tokenizer = tiny.smol_like()
    tokenizer.backend_tokenizer.model.dropout = 0.3
    return tokenizer


def twice_begun():
    tokenizer = tiny.gemma_like()
    bos = tokenizer.bos_token
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} {bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)]
    )
    return tokenizer


def of(tokenizer):
    return tokenizer, tiny.tiny_llama(tokenizer, seed=2, max_position_embeddings=4096)


def with_template(template):
    tokenizer, model = of(tiny.smol_like())
    tokenizer.chat_template = template
    return tokenizer, model


def other_end():
    tokenizer, model = of(tiny.smol_like())
    model.generation_config.eos_token_id = 0
    return tokenizer, model


def few_rows():
    tokenizer = tiny.smol_like()
    return tokenizer, tiny.tiny_llama(len(tokenizer) - 5, seed=2, max_position_embeddings=4096)


def in_training():
    tokenizer, model = of(tiny.smol_like())
    return tokenizer, model.train()


def weak_memory():
    tokenizer, model = of(tiny.smol_like())

    def overflow(module, inputs, output):
        return output * (float("inf") if output.shape[1] > 300 else 1.0)

    model.get_input_embeddings().register_forward_hook(overflow)
    return tokenizer, model


def short():
    tokenizer = tiny.smol_like()
    return tokenizer, tiny.tiny_gpt2(tokenizer, n_positions=64, seed=2)


def one_by_one():
    tokenizer = tiny.smol_like()
    return tokenizer, tiny.tiny_mamba(tokenizer, seed=2)


FAULTS = {
    "round trip": lambda: of(tiny.lowercasing_bpe()),
    "spaces": lambda: of(no_second_space()),
    "dropout": lambda: of(forgetful()),
    "BOS": lambda: of(twice_begun()),
    "EOS": other_end,
    "head": few_rows,
    "system turns": lambda: with_template(
        TEMPLATE.replace("%}<|im_start|>", "if message['role'] != 'system' %}<|im_start|>", 1)
    ),
    "end of turns": lambda: with_template(TEMPLATE.replace("<|im_end|>", "<|im_start|>")),
    "training mode": in_training,
    "long text": weak_memory,
    "positions": short,
    "equal members": sound,
    "steps": one_by_one,
}
WORDS = {
    "round trip": "as '",
    "spaces": "return x",
    "dropout": "0.3",
    "BOS": "twice",
    "EOS": "MemberConfig(eos_token_id=[2])",
    "head": "5 more tokens",
    "system turns": "drops",
    "end of turns": "MemberConfig(eos_token_id=[1])",
    "training mode": "eval()",
    "long text": "NaN or infinite",
    "positions": "64 tokens",
    "equal members": "as member 'sound'",
    "steps": "repack",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_and_nothing_else(fault):
    report = found(*FAULTS[fault]())
    assert set(report) == {fault}
    assert WORDS[fault] in str(report[fault])
    assert report[fault].why
    assert report[fault].remedy


def test_sound_members_give_nothing_to_find():
    assert not found(*of(tiny.qwen_like()))
    assert not found(*with_template(TEMPLATE))


def test_what_is_named_as_an_end_is_an_end():
    assert not found(*other_end(), eos_token_id=[2])


def test_the_report_says_how_each_member_runs():
    tokenizer, model = with_template(TEMPLATE)
    ensemble = EnsembleForCausalLM.from_members([model], [tokenizer], member_configs=[MemberConfig(name="one")])
    (state,) = ensemble.check().members
    size = sum(weight.numel() * 4 for weight in model.parameters())
    config = model.config
    assert state.weight_bytes >= size
    assert state.cache_bytes == 1000 * 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    assert (state.name, state.runs, state.steps) == ("one", "float32 on cpu", "cache mode 'repack'")
    assert state.reads == ("turns", "system turns")
    assert "nothing found" in str(ensemble.check())


def test_packed_weights_count_as_what_they_are_packed_into():
    """By the numbers that lie in memory, each once; and not by the dtype that a packed weight claims to have."""
    plain, tied = torch.nn.Linear(3, 2, bias=False), torch.nn.Linear(3, 2, bias=False)
    tied.weight = plain.weight
    packed = torch.nn.Linear(3, 2, bias=False)
    packed.weight = torch.nn.Parameter(TwoTensor(torch.zeros(2, 3), torch.zeros(2, 3)))
    packed.register_buffer("scale", torch.zeros(2, dtype=torch.float16))
    assert sum(tensor.nbytes for tensor in tensors_of([plain, tied, packed, packed])) == 6 * 4 + 2 * 6 * 4 + 2 * 2


def test_what_a_template_reads_is_seen():
    template = TEMPLATE + "{{ tools | tojson if tools else '' }}{% for m in messages %}{{ m.tool_calls }}{% endfor %}"
    tokenizer, model = with_template(template)
    ensemble = EnsembleForCausalLM.from_members([model], [tokenizer])
    assert ensemble.check().members[0].reads == ("turns", "system turns", "tools", "tool calls")


def test_the_command_writes_the_report_and_says_by_its_exit_code_whether_something_was_found(tmp_path, capsys):
    tokenizer, model = with_template(TEMPLATE.replace("<|im_end|>", "<|im_start|>"))
    for part in (tokenizer, model):
        part.save_pretrained(tmp_path / "odd")
    assert main(["doctor", "--members", str(tmp_path / "odd")]) == 1
    assert "odd: end of turns: its chat template ends an answer with '<|im_start|>' (id 1)" in capsys.readouterr().out
    assert main(["doctor", "--members", str(tmp_path / "odd"), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["findings"][0]["check"] == "end of turns"
    tokenizer, model = sound()
    for part in (tokenizer, model):
        part.save_pretrained(tmp_path / "sound")
    assert main(["doctor", "--members", str(tmp_path / "sound")]) == 0
