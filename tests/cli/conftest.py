import pytest

from hf_ensemble import EnsembleForCausalLM
from tests import tiny

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture(scope="session")
def member_folder(tmp_path_factory):
    """A folder with `model-a`, `model-b`, `chat-a` (which has a chat template), and ensembles of them."""
    folder = tmp_path_factory.mktemp("members")
    model_a, model_b = tiny.save_pair(folder, "model-a", "model-b")
    tokenizer = tiny.smol_like()
    tokenizer.chat_template = TEMPLATE
    tiny.tiny_llama(tokenizer).save_pretrained(folder / "chat-a")
    tokenizer.save_pretrained(folder / "chat-a")
    EnsembleForCausalLM.from_pretrained([model_a, model_b], method="gac").save_pretrained(folder / "my-ensemble")
    EnsembleForCausalLM.from_pretrained([folder / "chat-a", model_b]).save_pretrained(folder / "my-chat")
    return folder


@pytest.fixture
def here(member_folder, monkeypatch):
    """That folder as the working folder."""
    monkeypatch.chdir(member_folder)
    return member_folder
