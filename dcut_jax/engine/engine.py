"""The host loop: slots, admission, and one read-back per step."""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from dcut_jax.cut.fairness import weights
from dcut_jax.decode import steps as S
from dcut_jax.decode.compile import Compiler, Executable
from dcut_jax.decode.decide import Proposal, read_decision
from dcut_jax.decode.defer import CATCH_UPS
from dcut_jax.decode.pack import Layout
from dcut_jax.decode.sample import Sampling
from dcut_jax.decode.state import BROKEN, NO_STOP, HostOutcome, from_wire
from dcut_jax.engine.config import EngineConfig
from dcut_jax.engine.paging import Paging
from dcut_jax.engine.policy import ArPolicy, DCutPolicy, FixedPolicy, Policy
from dcut_jax.engine.requests import (
    Completion,
    Likeliest,
    Request,
    halted_after,
)
from dcut_jax.engine.slots import (
    Chunk,
    Phases,
    Planned,
    Prefill,
    Prefilled,
    Slot,
    StepRecord,
    most_positions,
    origins,
)
from dcut_jax.engine.steering import Steering
from dcut_jax.models.cache import CHUNK, NO_PAGE, capacity
from dcut_jax.processes import several, wait_for_all

PREFILL_CHUNKS = (32, 128)
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
      paging: which slot has which pages.
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
            Steering(policy, self.shapes, self.agree, clock)
            if isinstance(policy, DCutPolicy)
            else None
        )
        self.prepare(policy)
        self.reset()

    # -- compiled pieces ---------------------------------------------------------

    def agree(self, number: float) -> float:
        """The first process's number, where there are several: all then go on alike."""
        if not several():
            return number
        return float(
            np.asarray(self.compiler.agree()(np.full(1, number, np.float32)))[0]
        )

    def prepare(self, policy: Policy) -> None:
        """Compiles all that a policy can ask for, as far as it is not there yet."""
        exe, shapes = self.compiler, self.shapes
        layouts = policy.layouts(shapes)
        jobs: list[Callable[[], Executable]]
        jobs = [partial(exe.draft, shapes, width) for width in policy.ladder(shapes)]
        jobs += [partial(exe.verify, shapes, lay) for lay in layouts]
        jobs += [partial(exe.prefill, shapes, chunk) for chunk in PREFILL_CHUNKS]
        jobs += [partial(exe.commit, shapes, n) for n in {lay.rows for lay in layouts}]
        jobs += [
            partial(exe.share, shapes, lay, chunk)
            for lay in policy.shared(shapes)
            for chunk in shapes.chunks
        ]
        jobs += [partial(f, shapes) for f in (exe.empty, exe.insert, exe.release)]
        if self.config.prefix_cache:
            jobs.append(partial(exe.lend, shapes))
        if self.models.placement:
            jobs.append(partial(exe.start, shapes))
        if several():
            jobs.append(exe.agree)
        if self.models.drafter:
            jobs += [partial(exe.catch_up, shapes, steps) for steps in CATCH_UPS]
        if isinstance(policy, DCutPolicy):
            jobs.append(partial(exe.decide, shapes, policy.plan_key(shapes)))
        exe.prepare(jobs)
        wait_for_all()

    # -- state -------------------------------------------------------------------

    def reset(self) -> None:
        """Empties every slot."""
        self.free()  # or there would be two of the caches for a while
        shapes = self.shapes
        self.state, self.caches = self.compiler.start(shapes)()
        self._behind = 0  # steps whose rows the drafter's cache may lack
        self._wire: Any = np.zeros((shapes.slots, shapes.wire_columns), np.int32)
        self._halted = False  # a request, by the newest outcome, in mid-plan
        if self.steering is not None:
            self.steering.reset()

    def free(self) -> None:
        """Gives the caches' memory back; only `reset` may come next.

        Requests that were still running are cancelled.
        """
        self._caches: S.Caches | None = None
        self._pending: StepRecord | None = None  # what still runs counts for nobody
        for slot in (*getattr(self, "_slots", ()), *getattr(self, "_aside", ())):
            if slot is not None:
                slot.completion.finish = "cancelled"
        self._slots: list[Slot | None] = [None] * self.shapes.slots
        self._aside: list[Slot] = []  # who waits for pages, the first first
        self._returning: tuple[Slot, Prefill] | None = None  # one of these
        self._admitted = 0
        self.paging = Paging(self.shapes, self.config.prefix_cache)

    @property
    def caches(self) -> S.Caches:
        """Caches of all slots."""
        return self._require_caches()

    @caches.setter
    def caches(self, caches: S.Caches) -> None:
        self._caches = caches

    def _require_caches(self) -> S.Caches:
        if self._caches is None:
            raise ValueError("this engine was freed; call reset() before anything else")
        return self._caches

    @property
    def running(self) -> int:
        """Requests under way, as far as the host has read: in slots, or put aside."""
        return self.active + len(self._aside)

    @property
    def active(self) -> int:
        """Slots in use, as far as the host has read."""
        return sum(slot is not None for slot in self._slots)

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
        hit = self.paging.hit(request.prompt)
        if hit is None:
            return Prefill(request, self.compiler.empty(self.shapes)())
        self._interrupt()
        page_N: np.ndarray = np.full(self.shapes.slot_pages, NO_PAGE, np.int32)
        page_N[: len(hit.pages)] = hit.pages
        lend = self.compiler.lend(self.shapes)
        self.found_tokens += hit.tokens
        return Prefill(
            request,
            lend(self.caches, np.int32(hit.shard), page_N),
            done=hit.tokens,
            found=hit.tokens,
        )

    def prefill_chunk(self, begun: Prefill) -> int:
        """Dispatches the next chunk of a prompt; returns its tokens. Nothing waits."""
        self._interrupt()
        chunk = Chunk.next(begun, _rows(begun, PREFILL_CHUNKS))
        run = self.compiler.prefill(self.shapes, chunk.rows)
        chunk.ran(*run(self.models.params, *self._of_chunk(chunk)))
        return chunk.count

    def _of_chunk(self, chunk: Chunk) -> tuple[Any, ...]:
        """What executables take of a chunk."""
        begun = chunk.of
        at = np.int32(begun.done), np.int32(chunk.count)
        return begun.caches, chunk.token_P, *at, self.sampling_of(begun.request)

    def end_prefill(self, begun: Prefill) -> Prefilled:
        """Waits for a prompt, of which all chunks were dispatched."""
        assert not begun.left, "a chunk was not run"
        assert begun.chosen is not None, "a request has a prompt"
        token, logp, beside = jax.device_get(begun.chosen)
        ready = Prefilled(begun.request, begun.caches, int(token))
        if logp is not None:
            ready = replace(ready, first_logprob=float(logp))
        if beside is not None:
            ready = replace(ready, first_likeliest=_pairs(beside.token, beside.logp))
        return ready

    def admits(self, request: Request) -> bool:
        """Whether there are a slot and pages for a request, and nobody waits for them.

        Always so while nothing runs, for one that passes `check`.
        """
        if self._aside or self.running == self.config.slots:
            return False
        return self._slot_for(request) is not None

    def _slot_for(self, request: Request) -> int | None:
        """An empty slot with pages for a request's prompt and its first step."""
        empty = [i for i, slot in enumerate(self._slots) if slot is None]
        return self.paging.slot_for(empty, request.prompt, self._positions(request))

    def _positions(self, request: Request) -> int:
        return min(len(request.prompt) + self.shapes.width, most_positions(request))

    def admit(self, ready: Prefilled) -> Completion:
        """Puts a prefilled request into a free slot and emits its first token.

        Raises:
          ValueError: there is no slot, or there are no pages; see `admits`.
        """
        request = ready.request
        if ready.first_token == BROKEN:
            return Completion(finish="failed")
        completion = Completion([ready.first_token], origins=["plain"])
        if ready.first_logprob is not None:
            completion.logprobs.append(ready.first_logprob)
        if ready.first_likeliest:
            completion.likeliest.append(ready.first_likeliest)
        halt = request.halt() if request.halt else None
        if ready.first_token in request.stop or (halt and halt(ready.first_token)):
            completion.finish = "stop"
            return completion
        if request.max_new_tokens == 1:
            completion.finish = "length"
            return completion
        if self.running == self.config.slots:
            raise ValueError(
                f"all {self.config.slots} slots are in use; step until one is free"
            )
        if not self.admits(request):
            raise ValueError(
                f"a prompt of {len(request.prompt)} tokens waits for pages, of which "
                f"{self.paging.free + self.paging.cached} are not in use; step until "
                f"admits() says that they are there"
            )
        self._enter(ready, Slot(self._admitted, request, completion, halt))
        self._admitted += 1
        return completion

    def _enter(self, ready: Prefilled, entering: Slot) -> None:
        """Takes a slot and pages, which are there, and starts a request in it."""
        request = ready.request
        slot = self._slot_for(request)
        assert slot is not None, "admits() comes first"
        page_N = self.paging.enter(slot, request.prompt, self._positions(request))
        self.place(slot, ready, request.max_new_tokens - 1, page_N)
        self._slots[slot] = entering

    def place(self, slot: int, ready: Prefilled, room: int, page_N: np.ndarray) -> None:
        """Copies a prefilled prompt into pages and starts it in a slot.

        `page_N`: see `Paging.enter`. The table is the caller's to write.
        """
        request = ready.request
        self._interrupt()
        stop = np.full(self.config.max_stops, NO_STOP, np.int32)
        stop[: len(request.stop)] = request.stop
        self.state, self.caches = self.compiler.insert(self.shapes)(
            self.state,
            self.caches,
            ready.caches,
            np.int32(slot),
            page_N,
            np.int32(ready.first_token),
            np.int32(len(request.prompt)),
            np.int32(room),
            stop,
            self.sampling_of(request),
        )

    def _interrupt(self) -> None:
        """Tells the clock of steps that something else runs."""
        if self.steering is not None:
            self.steering.interrupt()

    def sampling_of(self, request: Request) -> Sampling | None:
        """A request's settings, as of one slot."""
        if not self.config.sampling:
            return None
        row: dict[str, Any] = {
            "temperature": np.array([request.temperature], np.float32),
            "top_k": np.array([request.top_k], np.int32),
            "top_p": np.array([request.top_p], np.float32),
            "min_p": np.array([request.min_p], np.float32),
            "seed": np.array([request.seed], np.int32),
        }
        return Sampling(**row)

    def cancel(self, completion: Completion) -> None:
        """Frees the slot of a running request; its tokens so far stay.

        One that has finished, perhaps in the last step, is left as it is.

        Raises:
          ValueError: it runs, but not here.
        """
        self.flush()  # or its last tokens would go to the slot's next request
        if completion.finish != "running":
            return
        aside = next((s for s in self._aside if s.completion is completion), None)
        if aside is not None:
            self._aside.remove(aside)
            if self._returning is not None and self._returning[0] is aside:
                self._returning = None
            completion.finish = "cancelled"
            return
        slots = enumerate(self._slots)
        at = next((i for i, s in slots if s and s.completion is completion), None)
        if at is None:
            raise ValueError("expected a completion of this engine; it holds no such")
        self._release(at)
        self._vacate(at)
        completion.finish = "cancelled"

    def _release(self, slot: int) -> None:
        """Stops a slot on the device, which would decode on."""
        self.state = self.compiler.release(self.shapes)(self.state, np.int32(slot))

    def _vacate(self, at: int) -> None:
        """Frees a slot and gives its pages back; what they hold may be found later."""
        slot = self._slots[at]
        assert slot is not None, "a slot that nobody is in"
        self._slots[at] = None
        if slot.completion.finish == "failed":  # what broke it may be in its pages
            self.paging.spoil(at)
            return
        # Of the newest rows the drafter may still lack its part.
        known = max(slot.cached - self._behind, 0)
        text = (*slot.request.prompt, *slot.completion.tokens)
        self.paging.leave(at, text[:known])

    # -- pages -------------------------------------------------------------------

    def _make_room(self, rows: int) -> None:
        """Pages for all that a step of so many rows a request may commit.

        Comes when all earlier outcomes are known and before anything is written. Where
        there are too few, those who come last are put aside.
        """
        for at in sorted(self._used, key=self._rank):
            slot = self._slots[at]
            while slot and not self.paging.grow(at, min(slot.cached + rows, slot.most)):
                shard = self.paging.shard(at)
                others = [i for i in self._used if self.paging.shard(i) == shard]
                self._put_aside(max(others, key=self._rank))
                slot = self._slots[at]
        self._tell_table()

    @property
    def _used(self) -> list[int]:
        return [i for i, slot in enumerate(self._slots) if slot is not None]

    def _rank(self, at: int) -> tuple[float, int]:
        slot = self._slots[at]
        assert slot is not None, "a slot that nobody is in"
        return slot.rank

    def _tell_table(self) -> None:
        """Gives steps the table of pages as it is now."""
        if self.paging.changed:
            table_BN = self.compiler.table(self.paging.table_BN)
            self.state = replace(self.state, table_BN=table_BN)
            self.paging.changed = False

    def _put_aside(self, at: int) -> None:
        """Takes a request's slot and pages; it goes on later, from what it emitted."""
        slot = self._slots[at]
        assert slot is not None, "a slot that nobody is in"
        self._release(at)
        self._vacate(at)
        self._aside = sorted([*self._aside, slot], key=lambda s: s.rank)
        self._halted = True  # a plan may have reckoned with it
        self.preemptions += 1

    def _return(self) -> Prefill | None:
        """Brings back who was put aside, once there are pages: a chunk of its text.

        All of it where nobody decodes meanwhile. Nothing waits for the device: the
        token that follows is known.

        Returns:
          What is to go along with the coming step instead, where steps take any.
        """
        while self._aside:
            if self._returning is None:
                first = self._aside[0]
                if self._slot_for(first.rest()) is None:
                    return None
                self._returning = first, self.begin_prefill(first.rest())
            who, begun = self._returning
            if begun.left and self.active and self.shapes.chunks:
                return begun
            if begun.left:
                self.prefill_chunk(begun)
            if not begun.left and self._slot_for(begun.request) is not None:
                token = who.completion.tokens[-1]
                self._enter(Prefilled(begun.request, begun.caches, token), who)
                self._aside.remove(who)
                self._returning = None
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
        self._require_caches()
        if beside is not None and not self.shapes.chunks:
            raise ValueError(
                "expected an engine with shared_chunks, to take a prompt along; found "
                "none: run the prompt by prefill_chunk, or build one with them"
            )
        assert beside is None or beside.left, "a prompt of which nothing is left"
        begun = self._return() or beside
        chunk = self._chunk(begun) if begun else None
        self._tell_table()
        clock = Phases(self.time_phases)
        if self.time_phases:
            self._interrupt()  # waiting for each phase takes time of its own
        match self.policy:
            case ArPolicy():
                self._make_room(1)
                lay = S.anchors_only(self.shapes)
                self._verify(lay, self._no_drafts, 0, clock, chunk)
                self._read(clock)
            case FixedPolicy(width=width):
                self._make_room(width + 1)
                proposal = self._draft(width, clock)
                lay = S.everything(self.shapes, width)
                self._verify(lay, proposal.token_BK, width, clock, chunk)
                self._read(clock)
                if self.on_drafts is not None:
                    outcome = self._outcome(np.asarray(self._wire))
                    self.on_drafts(np.asarray(proposal.logp_BK), outcome)
            case DCutPolicy():
                assert self.steering is not None
                self._cut_step(self.steering, clock, chunk)
        if self.time_phases:
            self._interrupt()  # nor does the next read tell what this step took

    def _chunk(self, begun: Prefill) -> Chunk:
        """The rows of a prompt that go along with the coming step."""
        rows = _rows(begun, self.shapes.chunks)
        if self.steering is not None:
            rows = self.steering.chunk(rows, self._context, self._cap_ms)
        return Chunk.next(begun, rows)

    def _catch_up(self) -> None:
        """Brings the drafter's cache up to date."""
        if self._behind == 0:
            return
        steps = next(n for n in CATCH_UPS if n >= self._behind)
        run = self.compiler.catch_up(self.shapes, steps)
        if self.steering is not None:
            self.steering.catches_up(steps)
        self.caches = run(self.models.params, self.caches, self.state.table_BN)
        self._behind = 0

    def _draft(self, width: int, clock: Phases) -> Proposal:
        self._catch_up()
        if self.steering is not None:
            self.steering.drafts(width)
        run = self.compiler.draft(self.shapes, width)
        proposal = run(self.models.params, self.caches.drafter, self.state)
        clock.stop("draft", proposal)
        return proposal

    def _cut_step(self, steering: Steering, clock: Phases, chunk: Chunk | None) -> None:
        beside = chunk.rows if chunk else 0
        running = [slot.ease for slot in self._slots if slot]
        choice = steering.choose(running, self._context, self._cap_ms, beside)
        if not choice.planned:
            self._read(clock)  # the one read of this step
            if self.active:
                self._make_room(choice.width + 1)
                self._unplanned_step(steering, choice.width, clock, chunk)
            return
        proposal = self._draft(choice.width, clock)
        weight_B = self._weights(steering.policy)
        run = self.compiler.decide(self.shapes, steering.key)
        asked = choice, weight_B, self._waited_B, self._wire
        keep_B, host = steering.decide(run, proposal, self.state, *asked)
        clock.stop("plan", None)
        self._absorb(host[: self.shapes.slots])
        self._make_room(choice.width + 1)
        if self._halted:
            steering.forget_plan()
        if not self.active:
            steering.forget_plan()
            steering.withdraw(choice.width)
            return
        decision = read_decision(host[self.shapes.slots :], steering.key)
        weight_B = np.where([s is not None for s in self._slots], weight_B, 0)
        if not self._halted:
            steering.look(decision, weight_B)
        lay = steering.layout(choice.width, decision)
        steering.verifies(lay, beside)
        made = Planned(keep_B, decision, weight_B)
        self._verify(lay, proposal.token_BK, choice.width, clock, chunk, made)
        steering.planned(self._wire)

    def _unplanned_step(
        self, steering: Steering, width: int, clock: Phases, chunk: Chunk | None
    ) -> None:
        """Plain decoding, or all of `width` drafts."""
        token_BK = self._no_drafts
        lay = S.anchors_only(self.shapes)
        if width:
            token_BK = self._draft(width, clock).token_BK
            lay = S.everything(self.shapes, width)
        steering.verifies(lay, chunk.rows if chunk else 0)
        self._verify(lay, token_BK, width, clock, chunk)

    @property
    def _context(self) -> int:
        """Length of the longest running context, to which attention reads."""
        lengths = [
            len(s.request.prompt) + len(s.completion.tokens) for s in self._slots if s
        ]
        return max(lengths, default=0)

    @property
    def _cap_ms(self) -> float:
        """What a step may take: every one yields a token of each request."""
        return min((s.request.tpot_ms for s in self._slots if s), default=math.inf)

    def _weights(self, policy: DCutPolicy) -> np.ndarray:
        """What a token of each slot's request is worth, from steps that were read."""
        weight_B = np.ones(self.shapes.slots, np.float32)
        used = [(i, slot) for i, slot in enumerate(self._slots) if slot]
        weight_B[[i for i, _ in used]] = weights(
            policy.fairness,
            [slot.request.priority for _, slot in used],
            [slot.progress.rate for _, slot in used],
        )
        return weight_B

    @property
    def _waited_B(self) -> np.ndarray:
        """Drafting steps since a draft of each request was verified, or one more.

        What the step that is not read yet verified of whom is not known.
        """
        unread = self._pending
        cut = unread is not None and unread.decision is not None
        everything = unread is not None and unread.width > 0 and not cut
        waited = [slot.waited + cut if slot else 0 for slot in self._slots]
        return np.array(waited, np.int32) * (not everything)

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
        if S.defers(self.models, lay.rows, lay.slots):
            if self._behind == CATCH_UPS[-1]:
                self._catch_up()
            self._behind += 1
        everything = np.full(self.shapes.slots, width, np.int32)
        keep_B = plan.keep_B if plan else everything
        asked = self.models.params, self.caches.target, self.state, token_BK, keep_B
        if chunk is None:
            run = self.compiler.verify(self.shapes, lay)
            self._wire, self.state, fresh = run(*asked)
        else:
            run = self.compiler.share(self.shapes, lay, chunk.rows)
            self._wire, self.state, fresh, *prompt = run(*asked, *self._of_chunk(chunk))
            chunk.ran(*prompt)
        clock.stop("verify", self._wire)
        write = self.compiler.commit(self.shapes, lay.rows)
        self.caches = write(self.caches, self.state.table_BN, fresh)
        clock.stop("commit", self.caches)
        active = self.active
        self._pending = StepRecord(
            width=width,
            rows=lay.rows * self.shapes.shards,
            kept=plan.decision.kept if plan else width * active,
            active=active,
            decision=plan.decision if plan else None,
            weight_B=plan.weight_B if plan else None,
            expected=self.steering.expected if self.steering else 0.0,
            phase_ms=clock.ms,
            # A plan may have reckoned with a request that was halted just then.
            teaches=width > 0 and not (plan and self._halted),
            prompt_rows=chunk.rows if chunk else 0,
        )

    def _read(self, clock: Phases) -> None:
        host = np.asarray(self._wire)
        clock.stop("read", None)
        self._absorb(host)

    def _outcome(self, wire_BX: np.ndarray) -> HostOutcome:
        return from_wire(wire_BX, self.shapes.logprobs, self.shapes.crowds)

    def _absorb(self, wire_BX: np.ndarray) -> None:
        """Hands committed tokens to their requests and frees finished slots."""
        if self.steering is not None:
            self.steering.has_read(self._context)
        self._halted = False
        record, self._pending = self._pending, None
        if record is None:
            return
        outcome = self._outcome(wire_BX)
        record.crowded = outcome.crowded
        if self.on_outcome is not None:
            self.on_outcome(record, outcome)
        for i, slot in enumerate(self._slots):
            count = int(outcome.count_B[i])
            if slot is None or count == 0:
                continue
            done = slot.completion
            tokens = outcome.token_BW[i, :count].tolist()
            broken = tokens[-1] == BROKEN
            if broken:
                del tokens[-1]
                count -= 1
            end = halted_after(slot.halt, tokens) if slot.halt else None
            count = end or count
            accepted = int(outcome.accepted_B[i])
            verified = int(outcome.verified_B[i])
            done.origins.extend(origins(count, accepted, verified))
            done.tokens.extend(tokens[:count])
            if outcome.logp_BW is not None:
                done.logprobs.extend(outcome.logp_BW[i, :count].tolist())
            if outcome.likeliest_BWL is not None:
                token_BWL, logp_BWL = outcome.likeliest_BWL
                rows = zip(token_BWL[i, :count], logp_BWL[i, :count], strict=True)
                done.likeliest.extend(_pairs(*row) for row in rows)
            done.steps += 1
            slot.progress.add(count)
            if record.width:
                slot.waited = 0 if verified else slot.waited + 1
            if record.kept:  # what a plan left out of a request says nothing of it
                share = verified * record.active / record.kept
                slot.ease.add(accepted, record.expected * share)
            done.accepted += accepted
            done.verified += verified
            record.committed += count
            record.accepted += accepted
            if outcome.finished_B[i] or end is not None:
                stopped = end is not None or done.tokens[-1] in slot.request.stop
                if broken and end is None:
                    done.finish = "failed"
                else:
                    done.finish = "stop" if stopped else "length"
                self._vacate(i)
                if not outcome.finished_B[i]:
                    self._release(i)
                    self._halted = True
        self.records.append(record)
        if len(self.records) >= 2 * KEPT_RECORDS:
            del self.records[:KEPT_RECORDS]
        if self.steering is not None and record.teaches:
            self.steering.outcome(record, outcome.accepted_B)
        elif self.steering is not None and record.decision is not None:
            self.steering.withdraw(record.width)

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


def _pairs(token_L: np.ndarray, logp_L: np.ndarray) -> Likeliest:
    return tuple(zip(token_L.tolist(), logp_L.tolist(), strict=True))


def _rows(begun: Prefill, sizes: Sequence[int]) -> int:
    """The smallest of the sizes that holds what is left of a prompt, or the largest."""
    return next((size for size in sizes if size >= begun.left), sizes[-1])
