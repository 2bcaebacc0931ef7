"""A thousand random events, from a seed: nothing leaks, sticks, or changes a text."""

import asyncio
import random
import threading
import time
from collections import Counter
from dataclasses import replace

import httpx
import pytest

from dcut_jax.engine.engine import Engine
from dcut_jax.engine.paging import bytes_of_page
from dcut_jax.engine.requests import Request
from dcut_jax.serve.scheduler import Job, Limits

COMPLETION = "/v1/completions"
EVENTS = 1000


def requests(count, rng, openings=("",)):
    """Bodies that go well, few enough to know their texts."""
    return [
        {
            "model": "tiny",
            "prompt": rng.choice(openings)
            + "".join(rng.choices("abc de", k=rng.randint(1, 20))),
            "max_tokens": rng.randint(1, 24),
            "temperature": rng.choice([0, 0.8, 1.2]),
            "seed": rng.randint(0, 5),
            "priority": rng.choice([0.5, 1, 8]),
        }
        for _ in range(count)
    ]


def bad(rng):
    """A body that is refused, and with which status."""
    fine = {"model": "tiny", "prompt": "a"}
    return rng.choice(
        [
            {"json": fine | {"prompt": ""}},
            {"json": fine | {"prompt": "x" * 5000}},
            {"json": fine | {"max_tokens": rng.choice(["7", -1, 1.5, [], 10**9])}},
            {"json": fine | {rng.choice(["foo", "tools", "é"]): 1}},
            {"json": fine | {"seed": 2**70}},
            {"json": [fine]},
            {"json": {"model": "tiny"}},
            {"content": b'{"model": "tiny", "prompt": "a"'},
            {"content": bytes(rng.randrange(256) for _ in range(40))},
            {"content": b'{"model": "tiny", "prompt": "\xff"}'},
            {"content": b'{"model": "tiny", "prompt": "\\ud800"}'},
        ]
    )


class Fuzzer:
    def __init__(self, url, rng, bodies, want):
        self.rng = rng
        self.bodies = bodies
        self.want = want
        self.seen = Counter()
        self.http = httpx.AsyncClient(base_url=url, timeout=120)

    async def event(self):
        kinds = ["whole", "stream", "bad", "leaves", "gives up", "late"]
        kind = self.rng.choices(kinds, [4, 4, 6, 3, 2, 1])[0]
        index = self.rng.randrange(len(self.bodies))
        await getattr(self, kind.replace(" ", "_"))(self.bodies[index], index)
        self.seen[kind] += 1

    async def whole(self, body, index):
        got = await self.http.post(COMPLETION, json=body)
        if got.status_code == 503:
            assert int(got.headers["Retry-After"]) >= 1
            self.seen["refused"] += 1
            return
        assert got.status_code == 200, got.text
        assert got.json()["choices"][0]["text"] == self.want[index]

    async def stream(self, body, index):
        said = ""
        async with self.http.stream(
            "POST", COMPLETION, json=body | {"stream": True}
        ) as got:
            if got.status_code == 503:
                self.seen["refused"] += 1
                return
            assert got.status_code == 200
            async for line in got.aiter_lines():
                if line.startswith("data: {"):
                    said += httpx.Response(200, text=line[6:]).json()["choices"][0][
                        "text"
                    ]
        assert line == "" or line == "data: [DONE]"
        assert said == self.want[index]

    async def bad(self, body, index):
        headers = {"content-type": "application/json"}
        got = await self.http.post(COMPLETION, headers=headers, **bad(self.rng))
        assert got.status_code in (400, 503), got.text
        assert got.json()["error"]["message"]
        self.seen["told why"] += got.status_code == 400

    async def leaves(self, body, index):
        """Goes away after some pieces."""
        left = self.rng.randint(0, 6)
        body = body | {"stream": True, "max_tokens": 100, "ignore_eos": True}
        async with self.http.stream("POST", COMPLETION, json=body) as got:
            if got.status_code == 503:
                return
            async for _ in got.aiter_lines():
                left -= 1
                if left <= 0:
                    return

    async def gives_up(self, body, index):
        """Goes away before there is an answer."""
        call = self.http.post(COMPLETION, json=body | {"max_tokens": 100})
        try:
            await asyncio.wait_for(call, self.rng.uniform(0, 0.05))
        except TimeoutError:
            self.seen["gave up"] += 1

    async def late(self, body, index):
        body = body | {"deadline_ms": self.rng.choice([0.01, 5, 50])}
        got = await self.http.post(COMPLETION, json=body)
        assert got.status_code in (200, 408, 503), got.text
        self.seen["too late"] += got.status_code == 408
        if got.status_code == 200:
            assert got.json()["choices"][0]["text"] == self.want[index]

    async def run(self, events, together):
        left = iter(range(events))

        async def work():
            for _ in left:
                await self.event()

        async with self.http:
            async with asyncio.TaskGroup() as group:
                for _ in range(together):
                    group.create_task(work())


@pytest.fixture(scope="module")
def crowded(tiny, config, engine):
    """An engine with pages for two texts of full length where there are three slots."""
    config = replace(config, kv_memory=4 * bytes_of_page(tiny, config.cache_dtype))
    return Engine(tiny, config, engine.policy, compiler=engine.compiler)


def assert_all_pages_are_back(engine):
    paging = engine.paging
    assert paging.used == 0
    assert paging.free + paging.cached == engine.shapes.pages


@pytest.mark.parametrize(("seed", "which"), [(7, "engine"), (8, "crowded")])
def test_random_events(request, serve, plain, text, seed, which):
    engine = request.getfixturevalue(which)
    scarce = which == "crowded"
    rng = random.Random(seed)
    # Of 112 tokens, to grow beyond a page, and of 140, to share one.
    long = ["abcd fgh" * 16, "abcd fgh" * 20] if scarce else []
    bodies = requests(24, rng, openings=["", *long])
    want = [
        text.decode(
            plain(
                Request(
                    tuple(text.encode(b["prompt"])),
                    b["max_tokens"],
                    (100,),
                    b["temperature"],
                    seed=b["seed"],
                )
            ).tokens
        )
        for b in bodies
    ]
    limits = Limits(queue=12, per_client=100, prefill_tokens=32)
    live = serve(engine, text, limits=limits)
    request.addfinalizer(live.stop)
    preempted, found = engine.preemptions, engine.found_tokens
    live.post(max_tokens=1)
    live.settle()
    tasks = len(asyncio.all_tasks(live.loop))
    fuzzer = Fuzzer(live.url, rng, bodies, want)
    asyncio.run(fuzzer.run(EVENTS, together=20))
    print(fuzzer.seen)
    kinds = ("whole", "stream", "leaves", "told why", "gave up")
    assert min(fuzzer.seen[k] for k in kinds) > 20
    assert fuzzer.seen["too late"] > 0
    live.settle()
    assert_all_pages_are_back(engine)
    assert (engine.preemptions > preempted) == scarce
    assert (engine.found_tokens > found) == scarce
    assert live.scheduler.failure is None
    assert live.engine.running == 0
    assert live.scheduler.waiting == 0
    live.forgets(Job)
    got = live.post(**{k: v for k, v in bodies[0].items() if k != "model"})
    assert got.json()["choices"][0]["text"] == want[0]
    live.http.close()
    for _ in range(200):
        if len(asyncio.all_tasks(live.loop)) <= tasks:
            break
        live.call(asyncio.sleep(0.05))
    assert len(asyncio.all_tasks(live.loop)) <= tasks
    live.http = httpx.Client(base_url=live.url, timeout=120)
    draining = Fuzzer(live.url, rng, bodies, want)
    crowd = threading.Thread(target=asyncio.run, args=(draining.run(60, together=20),))
    crowd.start()
    while not live.scheduler.busy:
        assert crowd.is_alive(), "they have come and gone"
        time.sleep(1e-3)
    assert live.call(live.scheduler.drain(60)) is True
    crowd.join(120)
    assert draining.seen["refused"] > 0
    assert_all_pages_are_back(engine)
    assert live.post(max_tokens=1).status_code == 503
