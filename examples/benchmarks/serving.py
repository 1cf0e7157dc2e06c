"""Time a server with simultaneous clients against the same requests one by one, in one run.

    python examples/benchmarks/serving.py [--models A B] [--clients 16] [--new-tokens 64]
    python examples/benchmarks/serving.py --tokenizers FOLDER_OF_LLAMA3 FOLDER_OF_QWEN3 --clients 32

Requests go over HTTP on this machine. Each is greedy and has its own prompt; no text ends early. The last column says
how many texts are the same as one by one (two that differ had a near tie). With `--tokenizers` the members are an 8B
and a 7B with random weights in bfloat16 on a GPU (`--shapes`, `--device`).
"""

import argparse
import contextlib
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import uvicorn
from members import add_arguments, load
from report import print_heads, print_row, setting
from texts import TEXT

from hf_ensemble import EnsembleForCausalLM
from hf_ensemble.config import method_config
from hf_ensemble.serving import Limits, build_app


@contextlib.contextmanager
def client_of(ensemble: EnsembleForCausalLM, max_batch: int) -> Iterator[openai.OpenAI]:
    """Serve an ensemble as `ensemble` on this machine, and give a client of it.

    Args:
        ensemble: The ensemble.
        max_batch: How many texts are written together.
    """
    app = build_app(ensemble, "ensemble", limits=Limits(max_batch=max_batch))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    address = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1"
    try:
        with openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=3600) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, "8B", "7B")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--method", help="default: the ensemble's, UniTE")
    parser.add_argument("--repeats", type=int, default=1, help="the fastest counts")
    args = parser.parse_args()
    ensemble = load(args)
    if args.method:
        ensemble.config.method = method_config(args.method)
    words = TEXT.split(" ")
    prompts = [" ".join(words[n % 40 : n % 40 + 24 + n % 8]) for n in range(args.clients)]

    print(setting(ensemble.device, ensemble.dtype, f"{args.new_tokens} new tokens", f"{args.repeats} repeats"))
    print_heads(
        "clients at once", "requests", "seconds", "processor seconds", "tokens a second", "times as many", "same texts"
    )
    first_rate, expected = None, None
    with client_of(ensemble, args.clients) as client:

        def ask(prompt: str, num_new: int = args.new_tokens) -> str:
            # Without EOS, so that every text has all its tokens.
            config = json.dumps({"eos_token_id": [], "pad_token_id": 0, "max_new_tokens": num_new})
            answer = client.completions.create(
                model="ensemble", prompt=prompt, extra_body={"generation_config": config}
            )
            assert answer.usage.completion_tokens == num_new
            return answer.choices[0].text

        for clients in (1, args.clients):
            seconds = []  # with those of the processor
            for _ in range(args.repeats):
                with ThreadPoolExecutor(clients) as pool:
                    list(pool.map(lambda prompt: ask(prompt, 4), prompts[:clients]))
                    start, spent = time.perf_counter(), time.process_time()
                    texts = list(pool.map(ask, prompts))
                    seconds.append((time.perf_counter() - start, time.process_time() - spent))
            fastest, spent = min(seconds)
            rate = args.new_tokens * len(prompts) / fastest
            first_rate, expected = first_rate or rate, expected or texts
            same = sum(text == other for text, other in zip(texts, expected, strict=True))
            print_row(
                clients, len(prompts), f"{fastest:.1f}", f"{spent:.1f}", f"{rate:.1f}", f"{rate / first_rate:.2f}",
                f"{same} of {len(texts)}",
            )  # fmt: skip


if __name__ == "__main__":
    main()
