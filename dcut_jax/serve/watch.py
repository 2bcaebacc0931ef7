"""What the server knows of itself: metrics for Prometheus, and a snapshot for the page.

The engine's thread writes; others read the newest snapshot, or scrape the registry.
"""

import math
import time
from collections import Counter as Tally
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from dcut_jax.decode.state import HostOutcome
from dcut_jax.engine.engine import Engine
from dcut_jax.engine.policy import ArPolicy, FixedPolicy
from dcut_jax.engine.slots import StepRecord

if TYPE_CHECKING:
    from dcut_jax.serve.scheduler import Job, News, Scheduler

PHASES_EVERY = 64  # of so many steps one waits for each phase, to time it
_WINDOW = 256  # steps that shares and lengths are averaged over
_RATE_S = 5.0  # time that throughput is counted over
_TIMES = 1000  # finished texts that percentiles are of
_HISTORY = 180  # points of the page's curves, one a second
_PUBLISH_S = 0.25
_FADE = 0.995  # of what is known of survival, per step
_STEP_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
_TOKEN_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)


class Watch:
    """Counts what an engine and its scheduler do.

    Attributes:
      registry: of Prometheus metrics, all named `dcut_...`.
      snapshot: the page's data, plain values that JSON can hold; replaced, not changed.
    """

    def __init__(self, engine: Engine, phases_every: int = PHASES_EVERY) -> None:
        self.engine = engine
        self.phases_every = phases_every
        self.started = time.time()
        self.registry = CollectorRegistry()
        self._metrics()
        K = engine.shapes.width - 1
        self._reached_K = np.zeros(K)
        self._survived_K = np.zeros(K)
        self._window: deque[StepRecord] = deque(maxlen=_WINDOW)
        self._rate: deque[tuple[float, int]] = deque()
        self._tpot_ms: deque[float] = deque(maxlen=_TIMES)
        self._ttft_ms: deque[float] = deque(maxlen=_TIMES)
        self._history: deque[dict[str, float]] = deque(maxlen=_HISTORY)
        self._kinds: Tally[str] = Tally()
        self._tiers: Tally[int] = Tally()
        self._phases: dict[str, float] = {}
        self._service_s = 1.0  # that a text holds a slot, about
        self._steps = 0
        self._found = self._found_before = engine.found_tokens
        self._preempted = self._preempted_before = engine.preemptions
        self._published = self._noted = -math.inf
        self.snapshot: dict[str, Any] = {}
        engine.on_outcome = self._outcome

    def _metrics(self) -> None:
        def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
            return Gauge(f"dcut_{name}", text, labels, registry=self.registry)

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"dcut_{name}", text, labels, registry=self.registry)

        def histogram(
            name: str, text: str, buckets: tuple[float, ...], label: str = ""
        ) -> Histogram:
            labels = (label,) if label else ()
            return Histogram(
                f"dcut_{name}", text, labels, registry=self.registry, buckets=buckets
            )

        self.queue = gauge("queue_length", "Texts that wait for a slot")
        self.slots = gauge("slots", "Slots that the engine has")
        self.used = gauge("slots_used", "Slots in use")
        self.rate = gauge("tokens_per_second", f"Over the last {_RATE_S:.0f} s")
        self.keep = gauge("keep_share", "Rows verified, of those of full blocks")
        self.width = gauge("mean_width", "Drafts asked for per request and step")
        self.length = gauge("mean_accepted_length", "Tokens per request and step, E[L]")
        self.gain = gauge(
            "gain_over_plain", "Expected tokens per ms of the best step over plain ones"
        )
        self.tpot = gauge("tpot_ms", "Time per token, newest texts", ("quantile",))
        self.tokens = counter("tokens", "Tokens sent, by how they came", ("origin",))
        self.prompts = counter("prompt_tokens", "Prompt tokens run")
        self.found = counter("prefix_hit_tokens", "Prompt tokens known and not run")
        self.preempted = counter(
            "preemptions", "Texts put aside for want of pages, and gone on with later"
        )
        self.pages = gauge("pages", "Pages of keys and values", ("state",))
        self.texts = counter("texts", "Texts that ended, by why", ("end",))
        self.drafts = counter("drafts", "Drafts verified", ("result",))
        self.steps = counter("steps", "Decode steps: plain, full, planned", ("kind",))
        self.tiers = counter(
            "tier_steps", "Decode steps by rows, a prompt's among them", ("rows",)
        )
        self.shared = counter("shared_steps", "Decode steps with a chunk of a prompt")
        self.answers = counter("http_responses", "HTTP responses", ("path", "code"))
        self.phase = histogram("step_phase_ms", "Sampled steps", _STEP_MS, "phase")
        self.ttft = histogram("ttft_seconds", "Arrival to first token", _SECONDS)
        self.per_token = histogram("tpot_seconds", "Time per token of a text", _TOKEN_S)
        self.slots.set(self.engine.config.slots)

    # -- steps ----------------------------------------------------------------------

    def before_step(self) -> None:
        """Now and then makes the coming step one whose phases are timed."""
        self._steps += 1
        if self._steps % self.phases_every == 0:
            self.engine.flush()  # or its first phase would wait for the last step
            self.engine.time_phases = True

    def after_step(self) -> None:
        """Takes in the records of steps that were read."""
        self.engine.time_phases = False
        records, self.engine.records = self.engine.records, []
        for record in records:
            self._window.append(record)
            kind = "plain" if record.width == 0 else "full"
            kind = "planned" if record.decision is not None else kind
            self._kinds[kind] += 1
            self.steps.labels(kind).inc()
            rows = record.rows + record.prompt_rows
            self._tiers[rows] += 1
            self.tiers.labels(rows).inc()
            self.shared.inc(record.prompt_rows > 0)
            for phase, ms in record.phase_ms.items():
                self.phase.labels(phase).observe(ms)
                self._phases[phase] = ms

    def _outcome(self, record: StepRecord, outcome: HostOutcome) -> None:
        """How far the drafts of a step survived."""
        ran = outcome.count_B > 0
        verified_B, accepted_B = outcome.verified_B[ran], outcome.accepted_B[ran]
        verified, accepted = int(verified_B.sum()), int(accepted_B.sum())
        if not verified:
            return
        self.drafts.labels("accepted").inc(accepted)
        self.drafts.labels("rejected").inc(verified - accepted)
        k_K = np.arange(len(self._reached_K))
        reached = verified_B[:, None] > k_K
        self._reached_K = self._reached_K * _FADE + reached.sum(0)
        survived = reached & (accepted_B[:, None] > k_K)
        self._survived_K = self._survived_K * _FADE + survived.sum(0)

    # -- texts ----------------------------------------------------------------------

    def prefilled(self, tokens: int) -> None:
        """A prompt has been run."""
        self.prompts.inc(tokens)

    def told(self, job: "Job", news: "News") -> None:
        """News of a text are on their way."""
        for origin, count in Tally(news.origins).items():
            self.tokens.labels(origin).inc(count)
        if news.tokens:
            self._rate.append((time.monotonic(), len(news.tokens)))
            if job.sent == len(news.tokens):  # its first
                self.ttft.observe(job.first - job.arrived)
                self._ttft_ms.append((job.first - job.arrived) * 1e3)
        if news.end is None:
            return
        self.texts.labels(news.end).inc()
        if math.isnan(job.first):
            return
        self._service_s += 0.1 * (job.last - job.first - self._service_s)
        if job.sent > 1:
            seconds = (job.last - job.first) / (job.sent - 1)
            self.per_token.observe(seconds)
            self._tpot_ms.append(seconds * 1e3)

    def wait_s(self, waiting: int) -> int:
        """About how long the queue takes, s; what `Retry-After` says."""
        rounds = (waiting + 1) / self.engine.config.slots
        return int(min(max(math.ceil(rounds * self._service_s), 1), 60))

    # -- what others see ------------------------------------------------------------

    def publish(self, scheduler: "Scheduler", *, now: bool = False) -> None:
        """Makes a new snapshot, unless the last one is fresh."""
        at = time.monotonic()
        if not now and at - self._published < _PUBLISH_S:
            return
        self._published = at
        while self._rate and self._rate[0][0] < at - _RATE_S:
            self._rate.popleft()
        rate = sum(tokens for _, tokens in self._rate) / _RATE_S
        shares, outlook = self._shares(), self._outlook()
        used, waiting = self.engine.active, scheduler.waiting
        pages = self._pages()
        tpot = _percentiles(self._tpot_ms)
        self.queue.set(waiting)
        self.used.set(used)
        self.rate.set(rate)
        self.keep.set(shares["keep_share"])
        self.width.set(shares["mean_width"])
        self.length.set(shares["mean_accepted_length"])
        self.gain.set(outlook.get("gain", 1.0))
        for name, value in tpot.items():
            self.tpot.labels(f"0.{name[1:]}").set(value)
        if at - self._noted >= 1:
            self._noted = at
            self._history.append(
                {
                    "at": time.time(),
                    "tokens_per_s": rate,
                    "used": used,
                    "waiting": waiting,
                    "gain": outlook.get("gain", 1.0),
                    **shares,
                }
            )
        with np.errstate(invalid="ignore"):
            survival_K = self._survived_K / self._reached_K
        self.snapshot = _plain(
            {
                "at": time.time(),
                "uptime_s": time.time() - self.started,
                "policy": self._policy(),
                "slots": self.engine.config.slots,
                "used": used,
                "waiting": waiting,
                "draining": scheduler.draining,
                "pages": pages,
                "prefix_hit_tokens": self._found - self._found_before,
                "preemptions": self._preempted - self._preempted_before,
                "tokens_per_s": rate,
                "tpot_ms": tpot,
                "ttft_ms": _percentiles(self._ttft_ms),
                "steps": dict(self._kinds),
                "tiers": {str(k): n for k, n in sorted(self._tiers.items())},
                "phases_ms": dict(self._phases),
                "survival": survival_K.tolist(),
                "history": list(self._history),
                "requests": [
                    {
                        "prompt_tokens": len(job.request.prompt),
                        "tokens": len(job.completion.tokens),
                        "of": job.request.max_new_tokens,
                        "accepted": job.completion.accepted,
                        "verified": job.completion.verified,
                        "age_s": at - job.arrived,
                    }
                    for job in scheduler.running
                    if job.completion is not None
                ],
                **shares,
                **outlook,
            }
        )

    def ended(self) -> None:
        """Nothing runs any more: what is shown must not stay as it was last."""
        for gauge in (self.queue, self.used, self.rate):
            gauge.set(0)
        still = {"used": 0, "waiting": 0, "tokens_per_s": 0.0, "requests": []}
        self.snapshot = self.snapshot | still | {"draining": True}

    def _pages(self) -> dict[str, int]:
        """Pages by what they are; counts what the engine found and put aside since."""
        engine = self.engine
        self.found.inc(engine.found_tokens - self._found)
        self.preempted.inc(engine.preemptions - self._preempted)
        self._found, self._preempted = engine.found_tokens, engine.preemptions
        paging = engine.paging
        pages = {"used": paging.used, "cached": paging.cached, "free": paging.free}
        for state, count in pages.items():
            self.pages.labels(state).set(count)
        return pages

    def _policy(self) -> str:
        match self.engine.policy:
            case ArPolicy():
                return "ar"
            case FixedPolicy(width=width):
                return f"fixed-{width}"
            case _:
                return "dcut"

    def _shares(self) -> dict[str, float]:
        """Means over the last steps."""
        some = self._window
        active = sum(r.active for r in some)
        rows = active * self.engine.shapes.width
        return {
            "keep_share": sum(r.active + r.kept for r in some) / max(rows, 1),
            "mean_width": sum(r.width for r in some) / max(len(some), 1),
            "mean_accepted_length": sum(r.committed for r in some) / max(active, 1),
        }

    def _outlook(self) -> dict[str, Any]:
        """What D-Cut expects of its choices, and what they cost; empty for others.

        `gain`: tokens per ms of what it takes now, over those of plain decoding;
        `predicted_per_s`: tokens that it gives with every slot in use.
        """
        steering = self.engine.steering
        if steering is None:
            return {}
        costs, promises, best = steering.outlook()
        plain = next((p for c, p in promises.items() if c.width == 0), None)
        found: dict[str, Any] = {
            "predicted_per_s": promises[best].per_ms * 1e3 * self.engine.config.slots,
            "best": {"width": best.width, "planned": best.planned},
            "costs": {
                "plain_ms": costs.plain_ms,
                "tiers": list(steering.key.rows_R),
                "widths": list(steering.key.widths),
                "planned_ms": costs.planned_MR.tolist(),
                "full_ms": costs.full_M.tolist(),
            },
            "promises": [
                {"width": c.width, "planned": c.planned, "per_s": p.per_ms * 1e3}
                for c, p in promises.items()
            ],
        }
        if plain is not None:
            found["gain"] = promises[best].per_ms / plain.per_ms
        return found


def _percentiles(values: "deque[float]") -> dict[str, float]:
    found = np.percentile(values, (50, 90, 99)) if values else (math.nan,) * 3
    return dict(zip(("p50", "p90", "p99"), map(float, found), strict=True))


def _plain(value: Any) -> Any:
    """The same with null for what is not finite, which JSON has no word for."""
    if isinstance(value, dict):
        return {key: _plain(v) for key, v in value.items()}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
