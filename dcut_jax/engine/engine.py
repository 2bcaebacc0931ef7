"""The host loop: slots, admission, and one read-back per step."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from dcut_jax.cut.choice import Choice
from dcut_jax.decode import steps as S
from dcut_jax.decode.compile import Compiler
from dcut_jax.decode.decide import read_decision
from dcut_jax.decode.pack import Layout
from dcut_jax.decode.state import DecodeState, HostOutcome, from_wire
from dcut_jax.engine import absorb
from dcut_jax.engine.batch import Batch
from dcut_jax.engine.config import EngineConfig
from dcut_jax.engine.dispatch import Dispatch, agree, rows_for
from dcut_jax.engine.paging import Paging
from dcut_jax.engine.policy import ArPolicy, DCutPolicy, FixedPolicy, Policy
from dcut_jax.engine.requests import Completion, Request
from dcut_jax.engine.slots import (
    Chunk,
    Phases,
    Planned,
    Prefill,
    Prefilled,
    Slot,
    StepRecord,
    most_positions,
)
from dcut_jax.engine.steering import Steering
from dcut_jax.models.cache import CHUNK, capacity

KEPT_RECORDS = 100_000  # of the newest steps, at least


class Engine:
    """Decodes requests in a fixed number of slots under one policy.

    Everything is compiled in the constructor; after it nothing compiles. One engine
    serves one thread.

    Args:
      clock: the seconds by which costs are corrected. Who lets engines take turns on
        one device brings one that stands still while others have theirs.

    Attributes:
      on_drafts: told of each fixed-width step, once it has been read, the drafter's
        log-confidences `[B, K]` (NaN beyond the width) and the outcome; what a slot
        without a request has of them is nothing. None: nobody asks, and a step reads
        once; with it, twice.
      on_outcome: told of each step, once it has been read, its record and its outcome,
        before the slots of finished requests are free. None: nobody asks.
      batch: who is in which slot, with which pages.
      dispatch: what runs on the device, and its arrays.
      preemptions: requests put aside for want of pages, so far.
      found_tokens: of prompts, that were known and not run, so far.
    """

    def __init__(
        self,
        models: S.Models,
        config: EngineConfig,
        policy: Policy,
        *,
        compiler: Compiler | None = None,
        time_phases: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if not isinstance(policy, ArPolicy) and models.drafter is None:
            raise ValueError(f"{type(policy).__name__} needs a drafter; found none")
        self.models = models
        self.config = config
        self.policy = policy
        self.time_phases = time_phases
        self.records: list[StepRecord] = []
        self.on_drafts: Callable[[np.ndarray, HostOutcome], None] | None = None
        self.on_outcome: Callable[[StepRecord, HostOutcome], None] | None = None
        self.shapes = config.shapes(models)
        if self.shapes.chunks and not policy.shared(self.shapes):
            raise ValueError(
                f"a policy with ratios takes no prompts along; expected no "
                f"shared_chunks, found {config.shared_chunks}"
            )
        most = models.target.max_position
        if config.max_length > most:
            raise ValueError(
                f"max_length {config.max_length} is beyond the {most} positions that "
                f"the target was made for; shorten prompts or outputs"
            )
        self.compiler = compiler or Compiler(models, config.cache_dtype)
        self.compiler.require(models, config.cache_dtype)
        self.preemptions = self.found_tokens = 0
        self.steering = (
            Steering(policy, self.shapes, partial(agree, self.compiler), clock)
            if isinstance(policy, DCutPolicy)
            else None
        )
        self.dispatch = Dispatch(
            models, config, self.shapes, self.compiler, self.steering
        )
        self.batch = Batch(self.shapes, config.prefix_cache)
        self.prepare(policy)

    def prepare(self, policy: Policy) -> None:
        """Compiles all that a policy can ask for, and runs it, if it never ran.

        Every slot is emptied.
        """
        self.free()
        self.dispatch.prepare(policy)
        self.reset()

    # -- state -------------------------------------------------------------------

    def reset(self) -> None:
        """Empties every slot."""
        self.free()
        self.dispatch.reset()
        self._halted = False  # a request, by the newest outcome, in mid-plan
        if self.steering is not None:
            self.steering.reset()

    def free(self) -> None:
        """Gives the caches' memory back; only `reset` may come next.

        Requests that were still running are cancelled.
        """
        self.dispatch.free()
        self._pending: StepRecord | None = None  # what still runs counts for nobody
        self.batch.cancel_all()
        self.batch = Batch(self.shapes, self.config.prefix_cache)

    @property
    def state(self) -> DecodeState:
        """Of the slots, on the device."""
        return self.dispatch.state

    @state.setter
    def state(self, state: DecodeState) -> None:
        self.dispatch.state = state

    @property
    def caches(self) -> S.Caches:
        """Caches of all slots."""
        return self.dispatch.caches

    @caches.setter
    def caches(self, caches: S.Caches) -> None:
        self.dispatch.caches = caches

    @property
    def paging(self) -> Paging:
        """Which slot has which pages."""
        return self.batch.paging

    @property
    def running(self) -> int:
        """Requests under way, as far as the host has read: in slots, or put aside."""
        return self.batch.running

    @property
    def active(self) -> int:
        """Slots in use, as far as the host has read."""
        return self.batch.active

    # -- admission ---------------------------------------------------------------

    @property
    def longest(self) -> int:
        """Most tokens of a prompt and its output, as far as there are pages."""
        # The last token is emitted and never cached.
        return min(self.config.max_length, self.shapes.own_pages * CHUNK + 1)

    def check(self, request: Request) -> None:
        """Raises ValueError where a request does not fit this engine."""
        need = len(request.prompt) + request.max_new_tokens
        if need > self.config.max_length:
            raise ValueError(
                f"a prompt of {len(request.prompt)} tokens and {request.max_new_tokens}"
                f" new ones need {need} positions; the cache holds "
                f"{self.config.max_length}. Shorten the prompt, ask for fewer tokens, "
                f"or raise max_length"
            )
        most, there = most_positions(request), self.shapes.own_pages * CHUNK
        if capacity(most) > there:
            raise ValueError(
                f"a prompt of {len(request.prompt)} tokens and {request.max_new_tokens}"
                f" new ones need {most} cached positions in pages of {CHUNK}; "
                f"kv_memory has room for {there}. Shorten the prompt, ask for fewer "
                f"tokens, or raise kv_memory"
            )
        if len(request.stop) > self.config.max_stops:
            raise ValueError(
                f"{len(request.stop)} stop tokens; at most {self.config.max_stops}"
            )
        if request.draws and not self.config.sampling:
            raise ValueError(
                f"a temperature of {request.temperature} draws tokens; this engine "
                f"takes the most likely ones only. Build it with sampling=True"
            )
        bad = [t for t in request.prompt if not 0 <= t < self.models.target.vocab]
        if bad:
            raise ValueError(
                f"token {bad[0]} is outside the vocabulary of "
                f"{self.models.target.vocab}"
            )

    def prefill(self, request: Request) -> Prefilled:
        """Runs a prompt through the target; keeps its caches apart from the slots."""
        begun = self.begin_prefill(request)
        while begun.left:
            self.prefill_chunk(begun)
        return self.end_prefill(begun)

    def begin_prefill(self, request: Request) -> Prefill:
        """Makes room for a prompt, apart from the slots; nothing runs yet.

        It begins behind what is known of it: pages of prompts that begin alike.
        """
        self.check(request)
        begun = self.dispatch.begin(request, self.paging.hit(request.prompt))
        self.found_tokens += begun.found
        return begun

    def prefill_chunk(self, begun: Prefill) -> int:
        """Dispatches the next chunk of a prompt; returns its tokens. Nothing waits."""
        return self.dispatch.run_chunk(begun)

    def end_prefill(self, begun: Prefill) -> Prefilled:
        """Waits for a prompt, of which all chunks were dispatched."""
        return absorb.prefilled(begun)

    def admits(self, request: Request) -> bool:
        """Whether there are a slot and pages for a request, and nobody waits for them.

        Always so while nothing runs, for one that passes `check`.
        """
        return self.batch.admits(request)

    def admit(self, ready: Prefilled) -> Completion:
        """Puts a prefilled request into a free slot and emits its first token.

        Raises:
          ValueError: there is no slot, or there are no pages; see `admits`.
        """
        entering = absorb.begin(ready, self.batch.admitted)
        if entering.completion.finish != "running":
            return entering.completion
        if self.running == self.config.slots:
            raise ValueError(
                f"all {self.config.slots} slots are in use; step until one is free"
            )
        if not self.admits(ready.request):
            raise ValueError(
                f"a prompt of {len(ready.request.prompt)} tokens waits for pages, of "
                f"which {self.paging.free + self.paging.cached} are not in use; step "
                f"until admits() says that they are there"
            )
        self._enter(ready, entering)
        self.batch.admitted += 1
        return entering.completion

    def _enter(self, ready: Prefilled, entering: Slot) -> None:
        """Takes a slot and pages, which are there, and starts a request in it."""
        request = ready.request
        at, page_N = self.batch.enter(request, entering)
        self.dispatch.insert(at, ready, request.max_new_tokens - 1, page_N)

    def cancel(self, completion: Completion) -> None:
        """Frees the slot of a running request; its tokens so far stay.

        One that has finished, perhaps in the last step, is left as it is.

        Raises:
          ValueError: it runs, but not here.
        """
        self.flush()  # or its last tokens would go to the slot's next request
        if completion.finish != "running":
            return
        if not self.batch.call_off(completion):
            at = self.batch.find(completion)
            if at is None:
                raise ValueError(
                    "expected a completion of this engine; it holds no such"
                )
            self.dispatch.release(at)
            self.batch.vacate(at, self.dispatch.behind)
        completion.finish = "cancelled"

    def _make_room(self, rows: int) -> None:
        """Pages for a step of so many rows a request; see `Batch.make_room`."""
        aside = self.batch.make_room(rows, self.dispatch.behind)
        for at in aside:
            self.dispatch.release(at)
        self._halted |= bool(aside)  # a plan may have reckoned with them
        self.preemptions += len(aside)
        self.dispatch.tell_table(self.paging)

    def _return(self) -> Prefill | None:
        """Brings back who was put aside, once there are pages: a chunk of its text.

        All of it where nobody decodes meanwhile. Nothing waits for the device: the
        token that follows is known.

        Returns:
          What is to go along with the coming step instead, where steps take any.
        """
        batch = self.batch
        while batch.aside:
            if batch.returning is None:
                first = batch.aside[0]
                if batch.slot_for(first.rest()) is None:
                    return None
                batch.returning = first, self.begin_prefill(first.rest())
            who, begun = batch.returning
            if begun.left and self.active and self.shapes.chunks:
                return begun
            if begun.left:
                self.prefill_chunk(begun)
            if not begun.left and batch.slot_for(begun.request) is not None:
                token = who.completion.tokens[-1]
                self._enter(Prefilled(begun.request, begun.caches, token), who)
                batch.aside.remove(who)
                batch.returning = None
            if self.active:
                return None
        return None

    # -- one step ----------------------------------------------------------------

    def step(self, beside: Prefill | None = None) -> None:
        """Dispatches one step and reads the newest finished outcome.

        Args:
          beside: a prompt, begun and not at its end, of which a chunk goes along. It
            does not where nobody decodes any more, or where a text that was put aside
            comes back: who is that goes first.

        Raises:
          ValueError: for a prompt, where the engine was built without `shared_chunks`.
        """
        device = self.dispatch
        device.require()
        if beside is not None and not self.shapes.chunks:
            raise ValueError(
                "expected an engine with shared_chunks, to take a prompt along; found "
                "none: run the prompt by prefill_chunk, or build one with them"
            )
        assert beside is None or beside.left, "a prompt of which nothing is left"
        begun = self._return() or beside
        chunk = self._chunk(begun) if begun else None
        device.tell_table(self.paging)
        clock = Phases(self.time_phases)
        if self.time_phases:
            device.interrupt()  # waiting for each phase takes time of its own
        match self.policy:
            case ArPolicy():
                self._make_room(1)
                lay = self._anchors(chunk)
                self._verify(lay, self._no_drafts, 0, clock, chunk)
                self._read(clock)
            case FixedPolicy(width=width):
                self._make_room(width + 1)
                proposal = device.draft(width, clock)
                lay = S.everything(self.shapes, width)
                self._verify(lay, proposal.token_BK, width, clock, chunk)
                self._read(clock)
                if self.on_drafts is not None:
                    outcome = self._outcome(np.asarray(device.wire))
                    self.on_drafts(np.asarray(proposal.logp_BK), outcome)
            case DCutPolicy():
                assert self.steering is not None
                self._cut_step(self.steering, clock, chunk)
        if self.time_phases:
            device.interrupt()  # nor does the next read tell what this step took

    def _chunk(self, begun: Prefill) -> Chunk:
        """The rows of a prompt that go along with the coming step."""
        rows = rows_for(begun, self.shapes.chunks)
        if self.steering is not None:
            rows = self.steering.chunk(rows, self.batch.context, self.batch.cap_ms)
        return Chunk.next(begun, rows)

    def _cut_step(self, steering: Steering, clock: Phases, chunk: Chunk | None) -> None:
        beside = chunk.rows if chunk else 0
        batch, device = self.batch, self.dispatch
        running = [slot.ease for slot in batch.inside]
        at = batch.fullest, batch.context, batch.cap_ms
        choice = steering.choose(running, *at, beside)
        if not choice.planned:
            self._read(clock)  # the one read of this step
            if self.active:
                self._make_room(choice.width + 1)
                self._unplanned_step(steering, choice.width, clock, chunk)
            return
        proposal = device.draft(choice.width, clock)
        weight_B = batch.weights(steering.policy.fairness)
        run = self.compiler.decide(self.shapes, steering.key)
        asked = choice, weight_B, batch.waited(self._pending), device.wire
        keep_B, host = steering.decide(run, proposal, device.state, *asked)
        clock.stop("plan", None)
        self._absorb(host[: self.shapes.slots])
        self._make_room(choice.width + 1)
        if self._halted:
            steering.forget_plan()
        if not self.active:
            steering.forget_plan()
            steering.withdraw(choice)
            return
        decision = read_decision(host[self.shapes.slots :], steering.key)
        weight_B = np.where([slot is not None for slot in batch.slots], weight_B, 0)
        if not self._halted:
            steering.look(decision, weight_B)
        lay = steering.layout(choice.width, decision)
        steering.verifies(lay, beside)
        made = Planned(keep_B, decision, weight_B, choice.tries)
        self._verify(lay, proposal.token_BK, choice.width, clock, chunk, made)
        steering.planned(device.wire)

    def _unplanned_step(
        self, steering: Steering, width: int, clock: Phases, chunk: Chunk | None
    ) -> None:
        """Plain decoding, or all of `width` drafts."""
        token_BK = self._no_drafts
        lay = self._anchors(chunk)
        if width:
            token_BK = self.dispatch.draft(width, clock).token_BK
            lay = S.everything(self.shapes, width)
        steering.verifies(lay, chunk.rows if chunk else 0)
        self._verify(lay, token_BK, width, clock, chunk)

    def _anchors(self, chunk: Chunk | None) -> Layout:
        """Of a plain step: for those who run, but beside a prompt for every slot."""
        # Who has ended on the device and was not read yet is among them.
        return S.anchors_only(self.shapes, None if chunk else self.batch.fullest)

    @property
    def unread(self) -> bool:
        """Whether the outcome of a step is still on the device."""
        return self._pending is not None

    @property
    def reads_first(self) -> bool:
        """Whether the next step most likely reads the last before it dispatches.

        So it is where no plan cut it. Whoever reads it at once loses nothing, and knows
        who has ended before the next step is made.
        """
        return self._pending is not None and self._pending.decision is None

    def flush(self) -> None:
        """Reads the outcome that is still on the device."""
        self._read(Phases(False))

    @property
    def _no_drafts(self) -> Any:
        return np.zeros((self.shapes.slots, self.shapes.width - 1), np.int32)

    def _verify(
        self,
        lay: Layout,
        token_BK: Any,
        width: int,
        clock: Phases,
        chunk: Chunk | None,
        plan: Planned | None = None,
    ) -> None:
        """Verifies and commits; without a plan all `width` drafts are kept."""
        everything = np.full(self.shapes.slots, width, np.int32)
        keep_B = plan.keep_B if plan else everything
        self.dispatch.verify(lay, token_BK, keep_B, clock, chunk)
        active = self.active
        self._pending = StepRecord(
            width=width,
            rows=lay.rows * self.shapes.shards,
            kept=plan.decision.kept if plan else width * active,
            active=active,
            decision=plan.decision if plan else None,
            weight_B=plan.weight_B if plan else None,
            tries=plan.tries if plan else False,
            expected=self.steering.expected if self.steering else 0.0,
            phase_ms=clock.ms,
            # A plan may have reckoned with a request that was halted just then.
            teaches=width > 0 and not (plan and self._halted),
            prompt_rows=chunk.rows if chunk else 0,
        )

    def _read(self, clock: Phases) -> None:
        host = np.asarray(self.dispatch.wire)
        clock.stop("read", None)
        self._absorb(host)

    def _outcome(self, wire_BX: np.ndarray) -> HostOutcome:
        return from_wire(wire_BX, self.shapes.logprobs, self.shapes.crowds)

    def _absorb(self, wire_BX: np.ndarray) -> None:
        """Hands committed tokens to their requests and frees finished slots."""
        if self.steering is not None:
            self.steering.has_read(self.batch.context)
        self._halted = False
        record, self._pending = self._pending, None
        if record is None:
            return
        outcome = self._outcome(wire_BX)
        record.crowded = outcome.crowded
        if self.on_outcome is not None:
            self.on_outcome(record, outcome)
        for at, slot in enumerate(self.batch.slots):
            if slot is None or outcome.count_B[at] == 0:
                continue
            absorb.take(slot, at, outcome, record)
            if slot.completion.finish != "running":
                self.batch.vacate(at, self.dispatch.behind)
                if not outcome.finished_B[at]:  # the device does not know of it
                    self.dispatch.release(at)
                    self._halted = True
        self.records.append(record)
        if len(self.records) >= 2 * KEPT_RECORDS:
            del self.records[:KEPT_RECORDS]
        if self.steering is not None and record.teaches:
            self.steering.outcome(record, outcome.count_B)
        elif self.steering is not None and record.decision is not None:
            self.steering.withdraw(Choice(record.width, True, record.tries))

    # -- whole lists -------------------------------------------------------------

    def generate(
        self,
        requests: Sequence[Request],
        *,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> list[Completion]:
        """Decodes all requests, refilling slots as they finish; order is kept.

        Args:
          on_progress: called with finished requests and tokens emitted so far.

        Raises:
          ValueError: before anything runs, for a request that does not fit.
        """
        for request in requests:
            self.check(request)
        self.reset()
        waiting = deque(enumerate(requests))
        results: list[Completion | None] = [None] * len(requests)
        while waiting or self.running:
            while waiting and self.admits(waiting[0][1]):
                index, request = waiting.popleft()
                results[index] = self.admit(self.prefill(request))
            if self.running:
                self.step()
            if on_progress:
                made = [r for r in results if r is not None]
                on_progress(
                    sum(r.finish != "running" for r in made),
                    sum(len(r.tokens) for r in made),
                )
        return [r for r in results if r is not None]
