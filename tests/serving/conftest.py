"""A tiny ensemble behind a server of its own, in a thread, and the client that it is made for."""

import contextlib
import threading
import time

import pytest

from hf_ensemble import EnsembleForCausalLM
from tests import tiny
from tests.cli.conftest import TEMPLATE

pytest.importorskip("uvicorn")


def tiny_ensemble(**options):
    tokenizers = [tiny.smol_like(), tiny.gemma_like()]
    tokenizers[0].chat_template = TEMPLATE
    models = [tiny.tiny_llama(tokenizers[0], seed=1), tiny.tiny_gemma3(tokenizers[1], seed=2)]
    return EnsembleForCausalLM.from_members(models, tokenizers, **options)


@contextlib.contextmanager
def served(ensemble, **options):
    """Serve it as `both`; gives the application and the address."""
    import uvicorn

    from hf_ensemble.serving import build_app

    app = build_app(ensemble, "both", **options)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield app, f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@contextlib.contextmanager
def client_of(address, **options):
    import openai

    given = {"api_key": "none", "max_retries": 0, "timeout": 60, **options}
    with openai.OpenAI(base_url=f"{address}/v1", **given) as client:
        yield client


@pytest.fixture(scope="package")
def ensemble():
    return tiny_ensemble()


@pytest.fixture(scope="package")
def client(ensemble):
    pytest.importorskip("openai")
    with served(ensemble) as (_, address), client_of(address) as client:
        yield client


MESSAGES = [{"role": "user", "content": "The cat"}]


@pytest.fixture
def ask(client):
    """Ask for an answer to a conversation."""

    def ask(messages=MESSAGES, **options):
        return client.chat.completions.create(model="both", messages=messages, **options)

    return ask


@pytest.fixture
def complete(client):
    """Ask for the completion of a text."""

    def complete(prompt="The cat", **options):
        return client.completions.create(model="both", prompt=prompt, **options)

    return complete


def inputs_of(ensemble, prompt):
    """The ids of a text, or of a conversation."""
    if isinstance(prompt, str):
        return ensemble.tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    return ensemble.tokenizer.apply_chat_template(
        prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )


def alone(ensemble, prompt, **options):
    """The new ids of a call of its own, and its output."""
    inputs = inputs_of(ensemble, prompt)
    output = ensemble.generate(
        **inputs, **{"do_sample": False, **options}, return_dict_in_generate=True, output_logits=True
    )
    return output.sequences[0, inputs["input_ids"].shape[1] :].tolist(), output


def text_alone(ensemble, prompt, **options):
    return ensemble.tokenizer.decode(alone(ensemble, prompt, **options)[0], skip_special_tokens=True)
