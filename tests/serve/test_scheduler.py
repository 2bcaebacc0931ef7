"""What the scheduler promises: order, limits, ends of every kind, and no leaks."""

import asyncio
import json
import threading
from dataclasses import replace

import httpx
import jax.numpy as jnp
import numpy as np
import pytest

from dcut_jax.cut.choice import PLAIN
from dcut_jax.decode.steps import Models
from dcut_jax.engine.config import EngineConfig
from dcut_jax.engine.engine import Engine
from dcut_jax.engine.paging import bytes_of_page
from dcut_jax.engine.policy import ArPolicy
from dcut_jax.engine.requests import Request
from dcut_jax.models.cache import NO_PAGE
from dcut_jax.serve.scheduler import Job, Limits, Scheduler

COMPLETION = "/v1/completions"


def in_threads(count, work):
    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    return threads


def join(threads):
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()


class Gate:
    """Holds the engine's thread before a step, until it is opened."""

    def __init__(self):
        self.held = threading.Event()
        self.open = threading.Event()

    def __call__(self, scheduler):
        self.held.set()
        self.open.wait(60)


def until_there_are(count):
    """Holds the engine's thread until so many requests have come."""
    there = threading.Event()

    def hold(scheduler):
        for _ in range(60_000):
            if len(scheduler.running) + scheduler.waiting >= count:
                there.set()
            if there.wait(0.001):
                return

    return hold


def poison(scheduler, prompt):
    """Makes the cache of the request with this prompt a field of NaN."""
    engine = scheduler.engine
    for slot, used in enumerate(engine.batch.slots):
        if used is not None and used.request.prompt == prompt:
            target, pages = engine.caches.target, engine.paging.table_BN[slot]
            pages = pages[pages != NO_PAGE]
            target = replace(target, v=target.v.at[:, pages].set(jnp.nan))
            engine.caches = replace(engine.caches, target=target)


@pytest.mark.parametrize("stream", [False, True])
def test_a_poisoned_step_fails_one_request_and_no_other(start, plain, text, stream):
    bad, good = tuple(text.encode("bad")), [tuple(text.encode(p)) for p in ("a", "go")]
    hold = until_there_are(3)

    def on_step(scheduler):
        hold(scheduler)
        if len(scheduler.running) == 3:
            scheduler.engine.flush()
            poison(scheduler, bad)

    live = start(on_step=on_step)
    found = {}

    def ask(i):
        prompt = [list(p) for p in (bad, *good)][i]
        found[i] = live.post(
            prompt=prompt, max_tokens=150, temperature=0, ignore_eos=True, stream=stream
        )

    join(in_threads(3, ask))
    if stream and found[0].status_code == 200:
        last = [line for line in found[0].iter_lines() if line][-1]
        error = json.loads(last.removeprefix("data: "))["error"]
    else:
        assert found[0].status_code == 500
        error = found[0].json()["error"]
    assert error["code"] == "not_finite"
    for i, prompt in enumerate(good, 1):
        want = text.decode(plain(Request(prompt, 150)).tokens)
        if stream:
            lines = [x for x in found[i].iter_lines() if x.startswith("data: {")]
            data = [json.loads(x.removeprefix("data: ")) for x in lines]
            assert "".join(d["choices"][0]["text"] for d in data) == want
        else:
            assert found[i].json()["choices"][0]["text"] == want
    live.settle()
    assert live.post(max_tokens=2).status_code == 200


def test_a_full_queue_says_when_to_come_again(start):
    gate = Gate()
    live = start(limits=Limits(queue=4), on_step=gate)
    found = []
    waiting = in_threads(1, lambda i: found.append(live.post(max_tokens=4)))
    gate.held.wait(60)
    # One runs, two more find a slot, four wait, and for the others there is no room.
    waiting += in_threads(20, lambda i: found.append(live.post(max_tokens=4)))
    while len(found) < 14:
        gate.open.wait(0.01)
    refused = list(found)
    assert {r.status_code for r in refused} == {503}
    assert all(int(r.headers["Retry-After"]) >= 1 for r in refused)
    assert live.scheduler.waiting <= 6
    gate.open.set()
    join(waiting)
    assert sum(r.status_code == 200 for r in found) >= 5
    assert {r.status_code for r in found} == {200, 503}
    live.settle()
    assert live.engine.running == 0


def test_one_client_may_have_so_many_requests_and_no_more(start):
    gate = Gate()
    live = start(limits=Limits(per_client=2), on_step=gate)
    found = []
    waiting = in_threads(5, lambda i: found.append(live.post(max_tokens=2)))
    while len(found) < 3:
        gate.open.wait(0.01)
    assert [r.status_code for r in found] == [429] * 3
    assert all(r.headers["Retry-After"] for r in found)
    gate.open.set()
    join(waiting)
    assert [r.status_code for r in found[3:]] == [200] * 2
    live.settle()
    assert live.post(max_tokens=1).status_code == 200


def test_keys(start):
    live = start(api_keys=("one", "two"))
    assert live.post(max_tokens=1).status_code == 401
    for key, status in (("two", 200), ("three", 401)):
        live.http.headers["Authorization"] = f"Bearer {key}"
        assert live.post(max_tokens=1).status_code == status
        assert live.http.get("/v1/models").status_code == status
    assert live.http.get("/health").status_code == 200


def test_the_more_important_goes_first(start):
    gate, hold = Gate(), until_there_are(3)

    def on_step(scheduler):
        hold(scheduler)
        if len(scheduler.running) == 3:
            gate(scheduler)

    live = start(on_step=on_step)
    begun, begin = [], live.engine.begin_prefill

    def begin_prefill(request):
        begun.append(request.priority)
        return begin(request)

    live.engine.begin_prefill = begin_prefill

    def ask(**body):
        got = live.post(temperature=0, ignore_eos=True, **body)
        assert got.status_code == 200

    long = in_threads(3, lambda i: ask(max_tokens=200 + i))
    assert gate.held.wait(60)
    low = in_threads(1, lambda i: ask(max_tokens=1, priority=0.5))
    while live.scheduler.waiting < 1:
        gate.open.wait(0.01)
    high = in_threads(1, lambda i: ask(max_tokens=1, priority=50))
    while live.scheduler.waiting < 2:
        gate.open.wait(0.01)
    gate.open.set()
    join([*long, *low, *high])
    assert begun == [1, 1, 1, 50, 0.5]


def test_a_long_prompt_does_not_stop_those_who_decode(start):
    gate, records = Gate(), []
    live = start(on_step=gate)
    told = live.engine.on_outcome
    live.engine.on_outcome = lambda *news: (records.append(news[0]), told(*news))
    decoding = in_threads(1, lambda i: live.post(max_tokens=200, ignore_eos=True))
    gate.held.wait(60)
    long = in_threads(1, lambda i: live.post(prompt=[5] * 190, max_tokens=1))
    while not live.scheduler.waiting:
        gate.open.wait(0.01)
    gate.open.set()
    join([*decoding, *long])
    along = [record for record in records if record.prompt_rows]
    assert [record.prompt_rows for record in along] == [32] * 6
    assert all(record.committed > 0 for record in along)
    live.shown()
    lines = live.http.get("/metrics").text.splitlines()
    assert "dcut_shared_steps_total 6.0" in lines
    assert live.http.get("/live").json()["tiers"].keys() & {
        str(record.rows + 32) for record in along
    }


def test_prompts_of_one_token_leave_time_to_see_who_is_late(start):
    """Nobody decodes and prompts come without an end; turns end all the same."""
    live = start(limits=Limits(prefill_tokens=32))
    taken, take = [], live.scheduler._take

    def busy():
        taken.append(take())
        return taken[-1]

    live.scheduler._take = busy
    turns, drop = [], live.scheduler._drop_unwanted

    def turn():
        turns.append(len(taken))
        drop()

    live.scheduler._drop_unwanted = turn
    found = []
    asked = in_threads(
        12, lambda i: found.append(live.post(prompt=[5 + i] * 32, max_tokens=1))
    )
    join(asked)
    assert [r.status_code for r in found] == [200] * 12
    assert np.diff(turns).max() <= 2


def test_who_comes_while_a_step_is_read_goes_along_with_the_next(engine, monkeypatch):
    """As after a text's end, which a client answers with another request."""
    engine.reset()
    monkeypatch.setattr(engine.steering.chooser, "next", lambda *at, **of: PLAIN)
    scheduler = Scheduler(engine, Limits(prefill_tokens=32))
    scheduler._call = lambda function: function()
    first, second = (Job(Request((5 + i,) * 40, 30), asyncio.Queue()) for i in (0, 1))
    flush, step, beside, came = engine.flush, engine.step, [], []

    def read():
        flush()
        if len(first.completion.tokens) == 5:
            scheduler._queue.append(second)
            came.append(len(beside))

    monkeypatch.setattr(engine, "flush", read)
    monkeypatch.setattr(engine, "step", lambda some: beside.append(some) or step(some))
    scheduler._queue.append(first)
    for _ in range(30):
        scheduler._turn()
    assert beside[came[0]].request is second.request
    engine.reset()


def test_where_none_goes_along_prompts_run_between_steps(serve, text, tiny):
    models = Models(tiny.target, None, {"target": tiny.params["target"]})
    engine = Engine(models, EngineConfig(3, 224, 1, sampling=True), ArPolicy())
    gate, order = Gate(), []
    chunk, step = engine.prefill_chunk, engine.step
    engine.prefill_chunk = lambda b: order.append(chunk(b)) or order[-1]
    engine.step = lambda beside: order.append("step") or step(beside)
    live = serve(engine, text, limits=Limits(prefill_tokens=32), on_step=gate)
    try:
        decoding = in_threads(1, lambda i: live.post(max_tokens=200, ignore_eos=True))
        gate.held.wait(60)
        long = in_threads(1, lambda i: live.post(prompt=[5] * 190, max_tokens=1))
        while not live.scheduler.waiting:
            gate.open.wait(0.01)
        gate.open.set()
        join([*decoding, *long])
    finally:
        live.stop()
    first = order.index(128)
    assert "step" in order[first + 1 : order.index(62)]


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_frees_a_slot(start, stream):
    live = start()
    body = {"model": "tiny", "prompt": "ab", "max_tokens": 200, "ignore_eos": True}
    url = f"{live.url}{COMPLETION}"
    for _ in range(4):
        if stream:
            with httpx.stream("POST", url, json=body | {"stream": True}) as got:
                next(got.iter_lines())
        else:
            with pytest.raises(httpx.TimeoutException):
                httpx.post(url, json=body, timeout=0.001)
    live.settle()
    assert live.engine.running == 0
    assert live.post(max_tokens=1).status_code == 200


def test_a_deadline_that_passes(start):
    gate = Gate()
    live = start(on_step=gate)
    found = []
    late = in_threads(
        1, lambda i: found.append(live.post(max_tokens=200, deadline_ms=50))
    )
    gate.held.wait(60)
    threading.Event().wait(0.1)
    gate.open.set()
    join(late)
    assert found[0].status_code == 408
    assert found[0].json()["error"]["code"] == "deadline_exceeded"
    live.settle()


def test_draining_finishes_what_is_there_and_takes_nothing_in(start):
    gate = Gate()
    live = start(on_step=gate)
    found = []
    running = in_threads(5, lambda i: found.append(live.post(max_tokens=20)))
    gate.held.wait(60)
    while len(live.scheduler.running) + live.scheduler.waiting < 5:
        gate.open.wait(0.01)
    drained = []
    waits = in_threads(
        1, lambda i: drained.append(live.call(live.scheduler.drain(100)))
    )
    while not live.scheduler.draining:
        gate.open.wait(0.01)
    refused = live.post(max_tokens=1)
    assert refused.status_code == 503
    assert refused.headers["Retry-After"]
    assert live.http.get("/ready").status_code == 503
    assert live.http.get("/health").status_code == 200
    gate.open.set()
    join([*running, *waits])
    assert drained == [True]
    assert [r.status_code for r in found] == [200] * 5


def test_what_does_not_end_in_time_is_dropped(start):
    gate = Gate()
    live = start(on_step=gate)
    found = []
    running = in_threads(4, lambda i: found.append(live.post(max_tokens=200)))
    gate.held.wait(60)
    while len(live.scheduler.running) + live.scheduler.waiting < 4:
        gate.open.wait(0.01)
    assert live.call(live.scheduler.drain(0.01)) is False
    stops = in_threads(1, lambda i: live.call(live.scheduler.stop()))
    while not live.scheduler._stopping:
        gate.open.wait(0.01)
    gate.open.set()
    join([*running, *stops])
    assert [r.status_code for r in found] == [503] * 4


@pytest.mark.parametrize("what", ["step", "begin_prefill", "admit"])
def test_an_engine_that_breaks_is_said_to_be_broken(start, monkeypatch, what):
    def fail(*args):
        raise RuntimeError("out of luck")

    live = start()
    monkeypatch.setattr(live.engine, what, fail)
    failed = live.post(max_tokens=9)
    assert failed.status_code == 500
    assert failed.json()["error"]["code"] == "engine_failed"
    assert live.http.get("/health").status_code == 503
    refused = live.post(max_tokens=9)
    assert refused.status_code == 503
    assert "out of luck" in refused.json()["error"]["message"]
    shown = live.http.get("/live").json()
    assert shown["failed"] == "out of luck"
    assert (shown["used"], shown["waiting"], shown["requests"]) == (0, 0, [])


def test_nothing_is_kept_of_a_request_that_has_ended(start):
    live = start()
    for stream in (False, True):
        live.post(max_tokens=5, stream=stream)
    live.post(max_tokens="no")
    live.settle()
    live.forgets(Job)
    assert live.engine.records == []


def test_a_prompt_that_begins_like_another_is_found(start, plain, text):
    live = start()
    prompt = [5 + i % 7 for i in range(150)]
    for end in ([9], [8, 7]):
        got = live.post(
            prompt=prompt + end, max_tokens=9, temperature=0, ignore_eos=True
        )
        want = text.decode(plain(Request(tuple(prompt + end), 9)).tokens)
        assert got.json()["choices"][0]["text"] == want
    live.shown()
    pages = live.http.get("/live").json()["pages"]
    assert pages == {"used": 0, "cached": 1, "free": live.engine.shapes.pages - 1}
    lines = live.http.get("/metrics").text.splitlines()
    assert "dcut_prefix_hit_tokens_total 128.0" in lines
    assert "dcut_prompt_tokens_total 175.0" in lines
    assert 'dcut_pages{state="cached"} 1.0' in lines


@pytest.mark.slow
def test_texts_are_the_same_with_pages_for_half_of_the_slots(serve, text, tiny, plain):
    """Prompts wait, running texts are put aside, and one that never fits is refused."""
    models = Models(tiny.target, None, {"target": tiny.params["target"]})
    memory = 3 * bytes_of_page(models, "float32")
    config = EngineConfig(3, 224, 1, sampling=True, logprobs=True, kv_memory=memory)
    engine = Engine(models, config, ArPolicy())
    live = serve(engine, text)
    try:
        prompts = [[3 + (i * j) % 90 for j in range(90 + 7 * i)] for i in range(9)]
        found = {}

        def ask(i):
            body = {"prompt": prompts[i], "max_tokens": 60, "seed": i, "logprobs": 0}
            body |= {"temperature": i % 2, "ignore_eos": True, "priority": 1 + i % 3}
            if i == 8:  # leaves early
                url, body["model"] = f"{live.url}{COMPLETION}", "tiny"
                with pytest.raises(httpx.TimeoutException):
                    httpx.post(url, json=body, timeout=0.05)
            else:
                found[i] = live.post(**body)

        join(in_threads(9, ask))
        for i, got in found.items():
            heat = float(i % 2)
            request = Request(tuple(prompts[i]), 60, temperature=heat, seed=i)
            want = text.decode(plain(request).tokens)
            assert got.json()["choices"][0]["text"] == want
        live.settle()
        assert engine.preemptions > 0
        paging = engine.paging
        assert (paging.used, paging.free + paging.cached) == (0, 3)
        live.scheduler.watch.publish(live.scheduler, now=True)
        assert live.http.get("/live").json()["preemptions"] == engine.preemptions
    finally:
        live.stop()
