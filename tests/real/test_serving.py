import threading
import time

import openai
import pytest
import uvicorn

from hf_ensemble import EnsembleForCausalLM
from hf_ensemble.serving import build_app

pytestmark = pytest.mark.real


def test_the_openai_client_gets_an_answer_of_the_real_pair(demo_models):
    ensemble = EnsembleForCausalLM.from_pretrained(demo_models, dtype="bfloat16")
    server = uvicorn.Server(uvicorn.Config(build_app(ensemble), port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
            (model,) = client.models.list()
            assert model.id == "SmolLM2-135M-Instruct+gemma-3-270m"
            stream = client.chat.completions.create(
                model=model.id,
                messages=[{"role": "user", "content": "What is the capital of France? One word."}],
                max_tokens=12,
                temperature=0,
                stream=True,
            )
            assert "Paris" in "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    finally:
        server.should_exit = True
        thread.join()
