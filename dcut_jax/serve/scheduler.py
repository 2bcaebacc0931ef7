"""One thread that owns the engine, and the queue in front of it.

Whoever asks lives in an event loop; the engine's thread prefills, steps, and hands what
came of it back to that loop. A prompt goes through the target in chunks, a bounded
number of tokens at a time, so that those who decode do not wait for it: with their
steps, where the engine takes chunks along, and else between two of them.
"""

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from dcut_jax.engine.engine import Engine
from dcut_jax.engine.requests import Completion, Likeliest, Origin, Request
from dcut_jax.engine.slots import Prefill
from dcut_jax.serve.watch import Watch

log = logging.getLogger(__name__)

# Why a text ended: as the engine has it, or it came too late, was under way when the
# server ended, or when its engine broke.
End = Literal["stop", "length", "cancelled", "failed", "late", "dropped", "broken"]

# A request of priority p goes as if it had come this / p later than it did: no others,
# whatever their priorities, pass it for longer than that.
_PATIENCE_S = 10.0


@dataclass(frozen=True)
class Limits:
    """What the server takes in.

    Attributes:
      queue: texts that wait for a slot.
      per_client: requests that one client may have under way.
      body_bytes: of a request.
      choices: texts that one request may ask for.
      prefill_tokens: of prompts, between two steps of those who decode; of an engine
        that takes chunks along, those are what counts.
    """

    queue: int = 256
    per_client: int = 64
    body_bytes: int = 1 << 20
    choices: int = 16
    prefill_tokens: int = 128

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1; found {value}")


class Refused(Exception):
    """Not taken in; `retry_s` says when to ask again."""

    def __init__(self, message: str, retry_s: int, *, draining: bool = False) -> None:
        super().__init__(message)
        self.retry_s = retry_s
        self.draining = draining


@dataclass(frozen=True)
class News:
    """What one step brought a text; with `end`, nothing comes after it."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    likeliest: tuple[Likeliest, ...] = ()
    origins: tuple[Origin, ...] = ()
    end: End | None = None


@dataclass(eq=False)
class Job:
    """One text under way.

    The engine's thread writes `completion` and the times, the loop reads `news`.

    Attributes:
      news: where it is told of itself.
      deadline: seconds on the monotonic clock, after which nobody wants it.
      arrived, first, last: when it came, and its first and newest token did; seconds.
    """

    request: Request
    news: "asyncio.Queue[tuple[Job, News]]"
    deadline: float = math.inf
    arrived: float = field(default_factory=time.monotonic)
    completion: Completion | None = None
    first: float = math.nan
    last: float = math.nan
    sent: int = 0
    cancelled: bool = False
    ended: bool = False

    @property
    def decodes(self) -> bool:
        """Whether it is in a slot."""
        return self.completion is not None and self.completion.finish == "running"

    @property
    def turn(self) -> float:
        """Who goes first: the smallest."""
        return self.arrived + _PATIENCE_S / self.request.priority


class Scheduler:
    """Serves jobs with one engine, from a thread of its own.

    Args:
      engine: nobody else may touch it from `start` to `stop`.
      on_step: called in the engine's thread before each step; for tests that break
        things.
      alive: called in that thread now and then; raises where the engine is of no use.
    """

    def __init__(
        self,
        engine: Engine,
        limits: Limits,
        watch: Watch | None = None,
        on_step: Callable[["Scheduler"], None] | None = None,
        alive: Callable[[], None] | None = None,
    ) -> None:
        self.engine = engine
        self.limits = limits
        self.watch = watch or Watch(engine)
        self.on_step = on_step
        self.alive = alive
        self.failure: BaseException | None = None
        self.draining = False
        self._stopping = False
        self._changed = threading.Condition()
        self._queue: list[Job] = []  # guarded by `_changed`, as are flags above
        self.running: list[Job] = []  # of the engine's thread, as are the next two
        self._next: Job | None = None  # whose prompt is being run
        self._begun: Prefill | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._idle = asyncio.Event()
        self._thread: threading.Thread | None = None

    # -- from the event loop ------------------------------------------------------

    def start(self) -> None:
        """Starts the engine's thread; called in the loop that jobs are awaited in."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """Drops what is under way and ends the thread."""
        with self._changed:
            self._stopping = self.draining = True
            self._changed.notify()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    async def drain(self, patience_s: float) -> bool:
        """Takes nothing in and finishes what is there; whether that came to an end."""
        with self._changed:
            self.draining = True
            self._changed.notify()
        try:
            await asyncio.wait_for(self._idle.wait(), patience_s)
        except TimeoutError:
            return False
        return True

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queues all of these, or none.

        Raises:
          Refused: there is no room, or the server is about to end.
        """
        with self._changed:
            if self.failure is not None:
                raise Refused(f"the engine failed: {self.failure}", 60, draining=True)
            if self.draining:
                raise Refused("the server is shutting down", 10, draining=True)
            waiting = len(self._queue)
            if waiting + len(jobs) > self.limits.queue:
                raise Refused(
                    f"{waiting} texts wait already and the queue holds "
                    f"{self.limits.queue}; ask again later",
                    self.watch.wait_s(waiting),
                )
            self._queue.extend(jobs)
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """Nobody wants it any more; harmless for one that has ended."""
        with self._changed:
            job.cancelled = True
            self._changed.notify()

    @property
    def waiting(self) -> int:
        """Texts in the queue, and the one whose prompt is being run."""
        return len(self._queue) + (self._next is not None)

    # -- the engine's thread ------------------------------------------------------

    def _work(self) -> None:
        try:
            while self._wait():
                self._turn()
        except Exception as error:  # the engine is of no more use
            log.exception("the engine failed")
            self.failure = error
        with self._changed:
            self.draining = True
            left, self._queue = self._queue, []
        if self._next is not None:
            left.append(self._next)
        end: End = "broken" if self.failure else "dropped"
        self._deliver([(job, News(end=end)) for job in (*left, *self.running)])
        self.running, self._next, self._begun = [], None, None
        self.watch.ended()
        self._tell_idle()

    def _wait(self) -> bool:
        """Waits for something to do; False once it is time to end."""
        with self._changed:
            while not self._stopping and not self.busy:
                if self.draining:
                    self._tell_idle()
                if self.alive is not None:
                    self.alive()
                self.watch.publish(self, now=True)
                self._changed.wait(1.0)  # what was a moment ago is over then
            return not self._stopping

    @property
    def busy(self) -> bool:
        return bool(self._queue or self.running or self._next)

    @property
    def _has_room(self) -> bool:
        return self.engine.active < self.engine.config.slots

    def _tell_idle(self) -> None:
        self._call(self._idle.set)

    def _turn(self) -> None:
        """One round: who has left, prompts, a step, and what came of it."""
        self._drop_unwanted()
        run = self._next is None or (self._begun is not None and not self._begun.left)
        if self.engine.unread and run and self._has_room:
            # Whoever comes meanwhile need not wait for a step more. And what the last
            # chunk of a prompt took is known before the prompt enters a slot.
            self.engine.flush()
            self.watch.after_step()
            self._report()
        beside = self._prefill()
        if self.engine.running:
            if self.on_step is not None:
                self.on_step(self)
            self.watch.before_step()
            self.engine.step(beside)
            self.watch.after_step()
        self._report()
        self.watch.publish(self)

    def _drop_unwanted(self) -> None:
        """Ends jobs that were called off or are too late."""
        now = time.monotonic()

        def why(job: Job) -> End | None:
            if job.cancelled:
                return "cancelled"
            return "late" if now > job.deadline else None

        with self._changed:
            gone = [job for job in self._queue if why(job)]
            self._queue = [job for job in self._queue if not why(job)]
        if self._next is not None and why(self._next):
            gone.append(self._next)
            self._next = self._begun = None
        # Told before the engine is asked for anything: it may fail then.
        self._deliver([(job, News(end=why(job))) for job in gone])
        for job in [job for job in self.running if why(job)]:
            assert job.completion is not None, "a running job has one"
            self.engine.cancel(job.completion)
            if job.completion.finish == "cancelled":
                self.running.remove(job)
                self._deliver([(job, News(end=why(job)))])

    def _prefill(self) -> Prefill | None:
        """Some chunks of prompts, as many as those who decode may be asked to wait.

        No more where nobody does: between turns it is seen who has left, or is late.

        Returns:
          The prompt of which the coming step is to take a chunk along, if it can.
        """
        spent = 0
        while spent < self.limits.prefill_tokens:
            self._next = self._next or self._take()
            job = self._next
            if job is None:
                return None
            if self._begun is None:
                self._begun = self.engine.begin_prefill(job.request)
            if self._begun.left and self.engine.active and self.engine.shapes.chunks:
                return self._begun
            if self._begun.left:
                spent += self.engine.prefill_chunk(self._begun)
            if not self._begun.left:
                if not self.engine.admits(job.request):
                    return None  # others came to need the pages that were there
                ready = self.engine.end_prefill(self._begun)
                job.completion = self.engine.admit(ready)
                self.running.append(job)
                self.watch.prefilled(self._begun.done - self._begun.found)
                self._next = self._begun = None
                self._report()
            if job.cancelled:  # by now; a long prompt is not run to its end
                return None
        return None

    def _take(self) -> Job | None:
        """The job whose turn it is, if there are a slot and pages for it."""
        with self._changed:
            if not self._queue:
                return None
            job = min(self._queue, key=lambda j: j.turn)
            if not self.engine.admits(job.request):
                return None
            self._queue.remove(job)
            return job

    def _report(self) -> None:
        """Hands new tokens to those who wait for them."""
        now, found = time.monotonic(), []
        for job in self.running:
            done = job.completion
            assert done is not None, "a running job has one"
            since, job.sent = job.sent, len(done.tokens)
            end = None if done.finish == "running" else done.finish
            if job.sent > since:
                job.first = now if math.isnan(job.first) else job.first
                job.last = now
            if job.sent > since or end is not None:
                found.append(
                    (
                        job,
                        News(
                            tuple(done.tokens[since:]),
                            tuple(done.logprobs[since:]),
                            tuple(done.likeliest[since:]),
                            tuple(done.origins[since:]),
                            end,
                        ),
                    )
                )
        self.running = [job for job in self.running if job.decodes]
        self._deliver(found)

    def _deliver(self, found: Sequence[tuple[Job, News]]) -> None:
        """Passes news to the loop, all at once."""
        if not found:
            return
        for job, news in found:
            if news.end is not None:
                job.ended = True
            self.watch.told(job, news)

        def hand_over() -> None:
            for job, news in found:
                job.news.put_nowait((job, news))

        self._call(hand_over)

    def _call(self, function: Callable[[], None]) -> None:
        assert self._loop is not None, "start() comes first"
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:  # the loop has ended, and with it all who waited
            log.debug("nobody is left to tell")
