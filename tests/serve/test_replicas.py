"""Two replicas of SmolLM2 behind one address, by Ray Serve on this machine."""

import asyncio
from collections import Counter
from types import SimpleNamespace

import httpx
import pytest

from dcut_jax.engine.load import load_pair
from dcut_jax.generate import generate

# Ray and what it brings warn of their own deprecations.
pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("default")]

FLAGS = ["--mode", "ar", "--slots", "2", "--max-length", "96"]
PROMPTS = [f"Count from {n} to {n + 5}." for n in range(12)]
TOKENS = 12


@pytest.fixture(scope="module")
def ray_serve():
    import ray
    from ray import serve

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield serve
    serve.shutdown()
    ray.shutdown()


@pytest.fixture(scope="module")
def address(ray_serve):
    from dcut_jax.serve.replicas import build

    ray_serve.start(http_options={"host": "127.0.0.1", "port": 8765})
    ray_serve.run(build({"flags": FLAGS, "replicas": 2}), name="dcut")
    return "http://127.0.0.1:8765"


def test_both_answer_and_the_text_is_that_of_generate(address):
    async def ask(client, prompt):
        answer = await client.post(
            "/v1/chat/completions",
            json={
                "model": "SmolLM2-135M-Instruct",
                "messages": [{"role": "user", "content": prompt}],
                "max_tokens": TOKENS,
                "temperature": 0,
            },
        )
        answer.raise_for_status()
        text = answer.json()["choices"][0]["message"]["content"]
        return answer.headers["x-dcut-replica"], text

    async def ask_all():
        async with httpx.AsyncClient(base_url=address, timeout=300) as client:
            return await asyncio.gather(*(ask(client, p) for p in PROMPTS))

    answers = asyncio.run(ask_all())
    assert len(Counter(replica for replica, _ in answers)) == 2

    pair = load_pair("smollm2", "none", "float32", "float32", None)
    text = pair.target.text()
    done = generate(
        [tuple(text.chat([{"role": "user", "content": p}])) for p in PROMPTS],
        pair,
        batch_size=4,
        max_new_tokens=TOKENS,
        stop=text.eos_ids,
        mode="ar",
    )
    assert [t for _, t in answers] == [text.decode(c.tokens) for c in done]


def test_a_stream_comes_in_pieces(address):
    with httpx.stream(
        "POST",
        f"{address}/v1/completions",
        json={
            "model": "SmolLM2-135M-Instruct",
            "prompt": "One, two,",
            "max_tokens": TOKENS,
            "stream": True,
            "ignore_eos": True,
        },
        timeout=300,
    ) as answer:
        pieces = [line for line in answer.iter_lines() if line.startswith("data: {")]
    assert len(pieces) >= TOKENS // 2


def test_requests_go_to_replicas_by_what_they_expect_to_yield():
    from dcut_jax.serve.replicas import RATE, ByThroughput

    some = [SimpleNamespace(routing_stats={RATE: rate}) for rate in (10.0, 30.0)]
    first = Counter()
    for _ in range(4000):
        order = asyncio.run(ByThroughput.choose_replicas(None, some))
        assert len(order) == 2
        first[some.index(order[0][0])] += 1
    assert first[1] / 4000 == pytest.approx(0.75, abs=0.03)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"slots": 2}, "found slots"),
        ({"flags": "--slots 2"}, "list of texts"),
        ({"flags": ["--port", "9"]}, "--port is Ray's"),
    ],
)
def test_what_does_not_fit_is_refused(args, message):
    from dcut_jax.serve.replicas import build

    with pytest.raises(ValueError, match=message):
        build(args)
