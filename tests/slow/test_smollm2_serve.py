"""SmolLM2 behind HTTP, as its command serves it: texts of `generate`, and an end."""

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from dcut_jax.generate import generate
from dcut_jax.prompts import load_prompts

pytestmark = pytest.mark.slow

SLOTS, MAX_LENGTH, NEW_TOKENS = 4, 384, 32
NAME = "SmolLM2-135M-Instruct"


@pytest.fixture(scope="module", params=["fixed", "dcut"])
def server(request, tmp_path_factory):
    """The command's process, and its address."""
    command = [sys.executable, "-m", "dcut_jax.serve", "--port", "0"]
    command += ["--slots", str(SLOTS), "--max-length", str(MAX_LENGTH)]
    command += ["--mode", request.param, "--drain-s", "120"]
    if request.param == "fixed":
        command += ["--width", "3"]
    else:
        command += ["--cost-dir", str(tmp_path_factory.mktemp("costs"))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        line = process.stdout.readline()
        assert NAME in line
        yield process, line.rsplit(" ", 1)[1].strip()
        process.kill()


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server[1]}/v1", api_key="x", timeout=600) as found:
        yield found


def test_texts_are_those_of_generate(pair, client):
    prompts = load_prompts("default", 24)
    text = pair.target.text()
    ids = [text.chat(list(p.messages)) for p in prompts]
    options = {"batch_size": 8, "max_new_tokens": NEW_TOKENS, "stop": text.eos_ids}
    want = {}
    for name, heat in (("greedy", 0.0), ("drawn", 0.8)):
        done = generate(ids, pair, mode="ar", temperature=heat, seed=11, **options)
        want |= {(name, i): text.decode(c.tokens) for i, c in enumerate(done)}

    def ask(key):
        name, i = key
        answer = client.chat.completions.create(
            model=NAME,
            messages=list(prompts[i].messages),
            max_tokens=NEW_TOKENS,
            temperature=0.8 if name == "drawn" else 0,
            seed=11 + i,
            stream=i % 2 == 0,
        )
        if i % 2:
            return key, answer.choices[0].message.content
        return key, "".join(p.choices[0].delta.content or "" for p in answer)

    with ThreadPoolExecutor(12) as pool:
        got = dict(pool.map(ask, sorted(want, key=lambda k: k[1])))
    assert got == want


def test_sigterm_lets_a_stream_end(server, client):
    process, url = server
    stream = client.completions.create(
        model=NAME,
        prompt="One, two, three,",
        max_tokens=60,
        stream=True,
        temperature=0,
        extra_body={"ignore_eos": True},
        stream_options={"include_usage": True},
    )
    first = next(stream)
    assert first.choices[0].text
    os.kill(process.pid, signal.SIGTERM)
    last = list(stream)[-1]
    assert last.usage.completion_tokens == 60
    assert process.wait(60) == 0
    with pytest.raises(openai.APIConnectionError):
        client.with_options(max_retries=0).models.list()


def test_the_bench_puts_servers_under_load(tmp_path):
    command = [sys.executable, "-m", "dcut_jax.bench", "serve", "--arms", "ar,fixed-3"]
    command += ["--rates", "4", "--burst", "2", "--requests", "6", "--rounds", "1"]
    command += ["--max-new-tokens", "8", "--tpot-ms", "1e6", "--out", str(tmp_path)]
    command += ["--slots", "2", "--max-length", "384"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    record = json.loads(done.stdout.splitlines()[-1])
    assert record == json.loads((tmp_path / "serve.json").read_text())
    assert record["differences"] == {}
    for cell in record["cells"]:
        assert (cell["all"]["failed"], cell["all"]["requests"]) == (0, 6)
        assert cell["all"]["goodput"] == cell["all"]["throughput"] > 0
        assert sum(c["requests"] for c in cell["classes"].values()) == 6
