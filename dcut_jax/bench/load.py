"""Load on a server: requests by a trace, over HTTP, and what their clients saw.

Knows nothing of engines: any server with OpenAI's API can be under it. A request is a
thread of its own that reads a stream; loads here are of tens of requests.
"""

import contextlib
import http.client
import json
import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import numpy as np

TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Load:
    """How requests arrive.

    Attributes:
      concurrency: so many at all times, each followed by the next; 0 where they arrive
        by a rate.
      rate: requests per second, Poisson.
      burst: requests that arrive together; the times between bursts are drawn.
    """

    concurrency: int = 0
    rate: float = 0.0
    burst: int = 1

    def __post_init__(self) -> None:
        if (self.concurrency > 0) == (self.rate > 0):
            raise ValueError(
                f"a load is a concurrency or a rate; found {self.concurrency} and "
                f"{self.rate}"
            )
        if self.burst < 1:
            raise ValueError(f"a burst is of at least 1 request; found {self.burst}")

    @property
    def name(self) -> str:
        if self.concurrency:
            return f"concurrency {self.concurrency}"
        return f"{self.rate:g}/s" + (f" by {self.burst}" if self.burst > 1 else "")

    def arrivals(self, requests: int, seed: int) -> list[float]:
        """When each request comes, s from the start; the same for the same seed."""
        draw, at, found = random.Random(seed), 0.0, []
        for i in range(requests):
            if i and i % self.burst == 0 and self.rate:
                at += draw.expovariate(self.rate / self.burst)
            found.append(at)
        return found


@dataclass(frozen=True)
class Sample:
    """One request as its client saw it; times are s, NaN where there was none.

    Attributes:
      kind: class of the request, such as the set that its prompt is of.
      status: of HTTP; 0 where the answer broke off.
      ttft_s: from sending it to the first piece of text.
      tpot_s: between tokens, from the first piece to the last or to the end that an end
        token made; NaN with one token.
      end_s: when it ended, from the start of the trace.
    """

    kind: str
    status: int
    tokens: int
    ttft_s: float
    tpot_s: float
    end_s: float
    text: str


def ask(url: str, body: Mapping[str, Any], kind: str, start: float) -> Sample:
    """Sends one request and reads its stream to the end; what fails has status 0."""
    nan = float("nan")
    sent = time.perf_counter()
    first = last = nan
    text, tokens, status, whole = "", 0, 0, False
    try:
        for status, line in _answer(url, body):
            whole = whole or line.strip() == b"data: [DONE]"
            if not line.startswith(b"data: {"):
                continue
            data = json.loads(line.removeprefix(b"data: "))
            if "error" in data:
                status = 500
                break
            said = "".join(c["delta"].get("content") or "" for c in data["choices"])
            ended = any(c.get("finish_reason") for c in data["choices"])
            if said or ended:  # an end token counts, and has no text
                last = time.perf_counter()
                first = last if math.isnan(first) else first
                text += said
            if data.get("usage"):
                tokens = data["usage"]["completion_tokens"]
    except (OSError, http.client.HTTPException):
        status = 0
    except (ValueError, LookupError, TypeError, AttributeError):
        status = 0  # none of this protocol
    else:  # a chunk that never came reads like the end
        status = 0 if status == 200 and not whole else status
    return Sample(
        kind=kind,
        status=status,
        tokens=tokens,
        ttft_s=first - sent,
        tpot_s=(last - first) / (tokens - 1) if tokens > 1 else nan,
        end_s=time.perf_counter() - start,
        text=text,
    )


def _answer(url: str, body: Mapping[str, Any]) -> Iterator[tuple[int, bytes]]:
    """The status and lines of a stream; of an answer without any one empty line."""
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=TIMEOUT_S)
    with contextlib.closing(connection):
        connection.request(
            "POST",
            "/v1/chat/completions",
            json.dumps(body),
            {"Content-Type": "application/json"},
        )
        answer = connection.getresponse()
        yield answer.status, b""
        for line in answer:
            yield answer.status, line


def replay(
    url: str,
    bodies: Sequence[tuple[str, Mapping[str, Any]]],
    load: Load,
    seed: int,
    on_progress: Callable[[int], None] | None = None,
) -> list[Sample]:
    """Sends `bodies`, each with its class, as a load says; samples in their order."""
    found: list[Sample | None] = [None] * len(bodies)
    arrivals = load.arrivals(len(bodies), seed)
    lock, waiting = threading.Lock(), iter(range(len(bodies)))
    start = time.perf_counter()

    def one(index: int) -> None:
        kind, body = bodies[index]
        found[index] = ask(url, body, kind, start)
        if on_progress is not None:
            on_progress(sum(f is not None for f in found))

    def many() -> None:
        while True:
            with lock:
                index = next(waiting, None)
            if index is None:
                return
            one(index)

    def start_thread(work: Callable[..., None], *args: int) -> threading.Thread:
        thread = threading.Thread(target=work, args=args)
        thread.start()
        return thread

    if load.concurrency:
        threads = [start_thread(many) for _ in range(load.concurrency)]
    else:
        threads = []
        for index, at in enumerate(arrivals):
            time.sleep(max(start + at - time.perf_counter(), 0))
            threads.append(start_thread(one, index))
    for thread in threads:
        thread.join()
    assert all(found), "`ask` gives a sample whatever happens"
    return [f for f in found if f is not None]


@dataclass(frozen=True)
class Summary:
    """What a load came to.

    Attributes:
      throughput: tokens per second, from the first arrival to the last end.
      goodput: the same, of requests that kept to the TPOT target; NaN without one.
      failed: requests without a whole answer.
      ttft_ms, tpot_ms: medians, 90th and 99th percentiles.
    """

    requests: int
    failed: int
    tokens: int
    seconds: float
    throughput: float
    goodput: float
    ttft_ms: tuple[float, float, float]
    tpot_ms: tuple[float, float, float]


def summarise(
    samples: Sequence[Sample], target_ms: float | None, seconds: float | None = None
) -> Summary:
    """Sums samples up; `seconds` of the whole trace, for one class of it."""
    whole = [s for s in samples if s.status == 200]
    seconds = seconds or max((s.end_s for s in samples), default=float("nan"))

    def rate(some: Sequence[Sample]) -> float:
        return sum(s.tokens for s in some) / seconds

    good = float("nan")
    if target_ms is not None:
        good = rate([s for s in whole if not s.tpot_s * 1e3 > target_ms])
    return Summary(
        requests=len(samples),
        failed=len(samples) - len(whole),
        tokens=sum(s.tokens for s in whole),
        seconds=seconds,
        throughput=rate(whole),
        goodput=good,
        ttft_ms=_percentiles([s.ttft_s * 1e3 for s in whole]),
        tpot_ms=_percentiles([s.tpot_s * 1e3 for s in whole]),
    )


def _percentiles(values: Sequence[float]) -> tuple[float, float, float]:
    known = [v for v in values if v == v]
    if not known:
        return (float("nan"),) * 3
    p50, p90, p99 = np.percentile(known, (50, 90, 99)).tolist()
    return p50, p90, p99
