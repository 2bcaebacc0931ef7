"""One engine does what another does, by what is told it; and ends when nothing is."""

import math
import socket
import threading
from dataclasses import replace

import pytest

from dcut_jax.decode.compile import Compiler
from dcut_jax.engine.config import EngineConfig
from dcut_jax.engine.engine import Engine
from dcut_jax.engine.paging import bytes_of_page
from dcut_jax.engine.policy import FixedPolicy
from dcut_jax.engine.requests import Request
from dcut_jax.serve.lead import Leader, Lost, follow, from_plain, to_plain
from dcut_jax.serve.scheduler import Limits
from dcut_jax.stops import StopStrings


def watched(engine, seen):
    """Notes of every step what the host knows of it, before the pages of its end."""
    engine.on_outcome = lambda record, outcome: seen.append(
        (
            record.width,
            record.rows,
            record.prompt_rows,
            outcome.token_BW.tolist(),
            outcome.count_B.tolist(),
            engine.paging.table_BN.tolist(),
        )
    )


@pytest.fixture(scope="module")
def two_engines(tiny):
    """Two of one kind, with pages for less than all slots."""
    memory = 4 * bytes_of_page(tiny, "float32")
    config = EngineConfig(
        *(3, 224, 1), sampling=True, kv_memory=memory, shared_chunks=(32,)
    )
    compiler = Compiler(tiny, "float32")
    return [Engine(tiny, config, FixedPolicy(3), compiler=compiler) for _ in range(2)]


@pytest.fixture
def pair_of_engines(two_engines):
    for engine in two_engines:
        engine.reset()
        engine.records = []
    return two_engines


@pytest.fixture
def lines():
    both = socket.socketpair()
    yield both
    for line in both:
        line.close()


def test_the_follower_does_as_the_leader(pair_of_engines, lines, serve, text, plain):
    own, other = pair_of_engines
    here, there = lines
    ended, seen = [], ([], [])

    def run():
        with there.makefile() as calls:
            follow(other, calls, lambda strings: StopStrings(text, strings))
        ended.append("well")

    watched(other, seen[1])
    follower = threading.Thread(target=run)
    follower.start()
    leader = Leader(own, [here])
    live = serve(leader, text, limits=Limits(prefill_tokens=32))
    tell = own.on_outcome
    watched(own, seen[0])
    noted = own.on_outcome
    own.on_outcome = lambda *news: (noted(*news), tell(*news))
    live.scheduler.watch.phases_every = 5
    wish = live.post(prompt="a", tpot_ms=5)  # nothing is planned by it here
    assert (wish.status_code, wish.json()["error"]["param"]) == (400, "tpot_ms")
    found = {}

    def ask(i):
        body = {"prompt": [3 + (i * j) % 90 for j in range(90 + 7 * i)], "seed": i}
        body |= {"max_tokens": 60, "temperature": i % 2, "ignore_eos": True}
        if i == 2:
            body |= {"stop": ["!", "ab"]}
        if i == 5:
            body |= {"deadline_ms": 60}
        found[i] = body, live.post(**body)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    live.settle()
    live.stop()
    leader.end()
    follower.join(60)
    assert ended == ["well"]
    for i, (body, got) in found.items():
        if i in (2, 5):
            continue
        request = Request(
            tuple(body["prompt"]), 60, temperature=float(i % 2), seed=body["seed"]
        )
        assert got.json()["choices"][0]["text"] == text.decode(plain(request).tokens)
    assert own.preemptions == other.preemptions
    assert own.running == other.running == 0
    assert len(seen[0]) > 30
    assert seen[0] == seen[1]
    assert any(prompt_rows for _, _, prompt_rows, *_ in seen[0])


def test_one_that_is_lost_ends_what_runs_and_refuses_more(
    pair_of_engines, lines, serve, text
):
    here, there = lines
    live = serve(Leader(pair_of_engines[0], [here]), text)
    live.scheduler.alive = live.engine.alive
    assert live.post(max_tokens=3).status_code == 200
    first_heard = RuntimeError("a socket is closed")
    assert live.engine.cause(first_heard, wait_s=0.01) is first_heard
    there.close()
    assert isinstance(live.engine.cause(first_heard, wait_s=10), Lost)
    for _ in range(300):
        if live.http.get("/health").status_code == 503:
            break
        threading.Event().wait(0.05)
    refused = live.post(max_tokens=3)
    assert refused.status_code == 503
    assert "process 1 of 1 has ended" in refused.json()["error"]["message"]
    live.stop()


def test_a_follower_whose_leader_is_gone(pair_of_engines):
    with pytest.raises(Lost, match="process 0"):
        follow(pair_of_engines[1], ['["flush"]\n'], lambda strings: None)


def test_requests_travel_whole(text):
    some = Request(
        (1, 2), 3, (100,), 0.5, 7, 0.9, 0.1, 11, StopStrings(text, ["a"]), 2.0, 8.0
    )
    for request in (some, Request((5,), 1), replace(some, tpot_ms=math.inf)):
        got = from_plain(to_plain(request), lambda strings: StopStrings(text, strings))
        assert replace(got, halt=None) == replace(request, halt=None)
        if request.halt:
            assert got.halt.strings == request.halt.strings
    with pytest.raises(AssertionError):
        to_plain(Request((5,), 1, halt=lambda: None))
