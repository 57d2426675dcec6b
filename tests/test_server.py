"""`vllm serve` over HTTP on loopback: completions and chat, plain and streaming, at once."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest


@pytest.fixture(scope="module")
def server(tiny_model, tmp_path_factory):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(tiny_model)]
    arguments = ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    arguments += ["--max-model-len", "512", "--served-model-name", "tiny"]
    with log.open("w") as output:
        process = subprocess.Popen([*command, *arguments], stdout=output, stderr=output)
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    deadline = time.monotonic() + 180
    while True:
        try:
            client.models.list()
            break
        except openai.APIConnectionError:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.5)
    yield client
    process.terminate()
    process.wait(60)
    client.close()


def complete(client, prompt, **more):
    return client.completions.create(
        model="tiny", prompt=prompt, max_tokens=24, temperature=0, **more
    )


def test_completions_at_once_equal_those_alone(server):
    prompts = [f"The {word} statement" for word in ("with", "import", "return", "global", "try")]
    alone = [complete(server, prompt).choices[0].text for prompt in prompts]
    with ThreadPoolExecutor(5) as pool:
        together = list(pool.map(lambda p: complete(server, p).choices[0].text, prompts))
    assert together == alone
    assert len(set(alone)) > 1


def test_streaming_completion_equals_the_plain_one(server):
    plain = complete(server, "The with statement")
    parts = [chunk.choices[0].text for chunk in complete(server, "The with statement", stream=True)]
    assert len(parts) > 5
    assert "".join(parts) == plain.choices[0].text
    assert plain.usage.completion_tokens == 24


def test_chat_plain_and_streaming(server):
    def chat(**more):
        return server.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "Explain the with statement."}],
            max_tokens=24,
            temperature=0,
            **more,
        )

    plain = chat().choices[0].message.content
    streamed = [chunk.choices[0].delta.content or "" for chunk in chat(stream=True)]
    assert plain
    assert "".join(streamed) == plain
