"""Ten times what a server can do, for five minutes: it refuses, and it forgets."""

import asyncio
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import httpx
import jax.numpy as jnp
import pytest

from dcut_jax.models.cache import page_bytes
from dcut_jax.weights.dflash import load_drafter
from dcut_jax.weights.hf import load_hf

pytestmark = pytest.mark.slow

SERVE = Path(__file__).parents[1] / "serve"
GOLDEN = Path(__file__).parents[1] / "golden" / "dflash"
SECONDS = float(os.environ.get("DCUT_OVERLOAD_S", "300"))
CAPACITY_S = 15.0
SLOTS, QUEUE, PER_CLIENT = 4, 12, 10
KEYS = ("one", "two")
GROWTH_MB = 64.0


def page_size():
    """Bytes of a page of both models."""
    target, _ = load_hf(GOLDEN / "target", jnp.dtype("float32"))
    drafter, _ = load_drafter(GOLDEN / "full", jnp.dtype("float32"))
    return sum(page_bytes(cfg, "float32") for cfg in (target, drafter))


@pytest.fixture(params=["fixed", "dcut"])
def server(request, tmp_path):
    """A process with the tiny pair; gives it and its address.

    With D-Cut, pages for two texts and a half, where there are four slots.
    """
    flags = ["--target", str(GOLDEN / "target"), "--drafter", str(GOLDEN / "full")]
    flags += ["--draft-dtype", "float32", "--slots", str(SLOTS), "--max-length", "224"]
    flags += ["--name", "tiny", "--port", "0"]
    if request.param == "fixed":
        flags += ["--mode", "fixed", "--width", "3"]
    else:
        flags += ["--mode", "dcut", "--cost-dir", str(tmp_path)]
        flags += ["--kv-memory", str(5 * page_size())]
    flags += ["--queue", str(QUEUE), "--per-client", str(PER_CLIENT)]
    flags += [f"--api-key={key}" for key in KEYS]
    command = [sys.executable, str(SERVE / "process.py"), *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        line = process.stdout.readline()
        assert "at http://" in line
        yield process, line.rsplit(" ", 1)[1].strip()
        process.kill()


def resident_mb(process):
    status = Path(f"/proc/{process.pid}/status")
    if not status.exists():
        pytest.skip("needs /proc to see how much memory a process has")
    line = next(x for x in status.read_text().splitlines() if x.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def body(rng):
    return {
        "model": "tiny",
        "prompt": "".join(rng.choices("abcde ", k=rng.randint(1, 120))),
        "max_tokens": rng.randint(20, 100),
        "temperature": rng.choice([0, 0.9]),
        "stream": rng.random() < 0.5,
        "ignore_eos": True,
    }


async def ask(http, rng, seen):
    """One request; some clients leave in mid-stream."""
    asked = body(rng)
    headers = {"Authorization": f"Bearer {rng.choices(KEYS, [3, 1])[0]}"}
    call = http.stream("POST", "/v1/completions", json=asked, headers=headers)
    leaves = asked["stream"] and rng.random() < 0.1
    async with call as got:
        seen[got.status_code] += 1
        if got.status_code != 200:
            assert got.status_code in (429, 503), await got.aread()
            assert int(got.headers["Retry-After"]) >= 1
            return
        lines = []
        async for line in got.aiter_lines():
            lines.append(line)
            if leaves:
                seen["left"] += 1
                return
    if asked["stream"]:
        assert lines[-2 if lines[-1] == "" else -1] == "data: [DONE]"
    else:
        assert f'"completion_tokens":{asked["max_tokens"]}' in lines[0].replace(" ", "")
    seen["whole"] += 1


async def capacity(http, rng):
    """Requests a second, with every slot in use and nobody refused."""
    seen, end = Counter(), time.monotonic() + CAPACITY_S

    async def one_after_the_other():
        while time.monotonic() < end:
            await ask(http, rng, seen)

    await asyncio.gather(*(one_after_the_other() for _ in range(2 * SLOTS)))
    return seen[200] / CAPACITY_S


async def overload(http, rng, rate, process):
    """Arrivals at a rate, whatever comes of them; what was seen, and memory."""
    seen, memory_mb, end = Counter(), [], time.monotonic() + SECONDS
    due = noted = time.monotonic()
    async with asyncio.TaskGroup() as group:
        while (now := time.monotonic()) < end:
            if now >= noted:
                noted += SECONDS / 20
                memory_mb.append(resident_mb(process))
            due += rng.expovariate(rate)
            await asyncio.sleep(max(due - time.monotonic(), 0))
            group.create_task(ask(http, rng, seen))
    return seen, memory_mb


def state(http):
    found = http.get("/live", headers={"Authorization": f"Bearer {KEYS[0]}"}).json()
    return {name: found[name] for name in ("used", "waiting", "pages")}


def test_overload(server):
    process, url = server
    rng = random.Random(3)

    async def run():
        limits = httpx.Limits(max_connections=400)
        async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as http:
            rate = 10 * await capacity(http, rng)
            return rate, *await overload(http, rng, rate, process)

    with httpx.Client(base_url=url, timeout=60) as http:
        start = state(http)
        pages = sum(start["pages"].values())
        rate, seen, memory_mb = asyncio.run(run())
        print(f"{rate:.0f} a second: {dict(seen)}; memory {memory_mb}")
        asked = seen[200] + seen[429] + seen[503]
        assert asked > 0.5 * rate * SECONDS  # the load was there
        assert seen[429] > 0
        assert seen[503] > 0
        assert seen[200] == seen["whole"] + seen["left"]
        for _ in range(600):
            end = state(http)
            if end["used"] == end["waiting"] == 0:
                break
            time.sleep(0.1)
        assert (start["used"], start["waiting"]) == (end["used"], end["waiting"])
        assert start["pages"]["used"] == end["pages"]["used"] == 0
        assert sum(end["pages"].values()) == pages
        assert http.get("/health").status_code == 200
    # Once all that runs has been run, it takes no more.
    quarter = len(memory_mb) // 4
    assert max(memory_mb[-quarter:]) < memory_mb[quarter] + GROWTH_MB
