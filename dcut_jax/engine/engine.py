"""The host loop: slots, admission, and one read-back per step."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dcut_jax.decode import steps as S
from dcut_jax.decode.compile import Compiler
from dcut_jax.decode.pack import Layout
from dcut_jax.decode.sample import Sampling
from dcut_jax.decode.state import NO_STOP, from_wire, init_state
from dcut_jax.engine.policy import ArPolicy, DCutPolicy, FixedPolicy, Policy
from dcut_jax.engine.requests import Completion, Request
from dcut_jax.models.cache import CHUNK, capacity

PREFILL_CHUNKS = (32, 128)
KEPT_RECORDS = 100_000  # of the newest steps, at least


@dataclass(frozen=True)
class EngineConfig:
    """Sizes of a batch in flight.

    Attributes:
      slots: requests decoded together.
      max_length: longest prompt plus output, in tokens.
      max_stops: stop tokens a request may name.
      cache_dtype: of the key/value caches.
      sampling: whether requests may draw their tokens; without, steps are a little
        cheaper.
    """

    slots: int
    max_length: int
    max_stops: int = 4
    cache_dtype: str = "float32"
    sampling: bool = False

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise ValueError(f"batch size must be at least 1; found {self.slots}")
        if self.max_stops < 1:
            raise ValueError(f"max_stops must be at least 1; found {self.max_stops}")
        if self.max_length < 2:
            raise ValueError(
                f"max_length must hold a prompt and a token; found {self.max_length}"
            )

    @property
    def positions(self) -> int:
        """Positions that a slot's caches hold."""
        return capacity(self.max_length)

    def shapes(self, models: S.Models) -> S.StepShapes:
        """Shapes of a step of these models."""
        return S.StepShapes(
            slots=self.slots,
            positions=self.positions,
            width=models.drafter.max_drafts + 1 if models.drafter else 1,
            stops=self.max_stops,
            sampling=self.sampling,
        )


@dataclass
class StepRecord:
    """One step as the host saw it. Phase times are there when phases are timed."""

    width: int
    rows: int
    kept: int
    active: int
    committed: int = 0
    accepted: int = 0
    decision: S.Decision | None = None
    costs: "StepCosts | None" = None
    phase_ms: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class StepCosts:
    """What steps cost at one context length, ms; `device_MR` holds `cost_MR` again."""

    cost_MR: np.ndarray
    device_MR: Any
    plain: float


@dataclass(frozen=True)
class Planned:
    """A plan: on the device, as the host knows it, and the costs it reckoned with."""

    keep_B: Any
    decision: S.Decision
    costs: StepCosts


@dataclass(frozen=True)
class Prefilled:
    """A prompt's one-slot caches, and the token that follows it."""

    request: Request
    caches: S.Caches
    first_token: int


@dataclass
class _Slot:
    request: Request
    completion: Completion


class Engine:
    """Decodes requests in a fixed number of slots under one policy.

    Everything is compiled in the constructor; after it nothing compiles. One engine
    serves one thread.
    """

    def __init__(
        self,
        models: S.Models,
        config: EngineConfig,
        policy: Policy,
        *,
        compiler: Compiler | None = None,
        time_phases: bool = False,
    ) -> None:
        if not isinstance(policy, ArPolicy) and models.drafter is None:
            raise ValueError(f"{type(policy).__name__} needs a drafter; found none")
        self.models = models
        self.config = config
        self.policy = policy
        self.time_phases = time_phases
        self.records: list[StepRecord] = []
        self.shapes = config.shapes(models)
        most = models.target.max_position
        if config.max_length > most:
            raise ValueError(
                f"max_length {config.max_length} is beyond the {most} positions that "
                f"the target was made for; shorten prompts or outputs"
            )
        self.compiler = compiler or Compiler(models, config.cache_dtype)
        self.compiler.require(models, config.cache_dtype)
        if isinstance(policy, DCutPolicy):
            policy.cost_ms(self.shapes, 0.0)  # raises for a cost that is missing
            self.chooser = policy.chooser(self.shapes)
            self._step_costs: dict[int, StepCosts] = {}
        self.prepare(policy)
        self.reset()

    # -- compiled pieces ---------------------------------------------------------

    def prepare(self, policy: Policy) -> None:
        """Compiles all that a policy can ask for, as far as it is not there yet."""
        exe, shapes = self.compiler, self.shapes
        layouts = policy.layouts(shapes)
        jobs = [partial(exe.draft, shapes, width) for width in policy.ladder(shapes)]
        jobs += [partial(exe.verify, shapes, lay) for lay in layouts]
        jobs += [partial(exe.prefill, shapes, chunk) for chunk in PREFILL_CHUNKS]
        jobs += [partial(exe.commit, shapes, n) for n in {lay.rows for lay in layouts}]
        jobs += [partial(f, shapes) for f in (exe.empty, exe.insert, exe.release)]
        if isinstance(policy, DCutPolicy):
            jobs.append(partial(exe.decide, shapes, policy.plan_key(shapes)))
        exe.prepare(jobs)

    # -- state -------------------------------------------------------------------

    def reset(self) -> None:
        """Empties every slot."""
        self.free()  # or there would be two of the caches for a while
        shapes = self.shapes
        self.state = init_state(shapes.slots, shapes.stops, shapes.sampling)
        self.caches = S.init_caches(
            self.models,
            shapes.slots,
            shapes.positions,
            jnp.dtype(self.config.cache_dtype),
        )
        self._wire = jnp.zeros((shapes.slots, shapes.wire_columns), jnp.int32)
        self._pending: StepRecord | None = None

    def free(self) -> None:
        """Gives the caches' memory back; only `reset` may come next.

        Requests that were still running are cancelled.
        """
        self._caches: S.Caches | None = None
        for slot in getattr(self, "_slots", ()):
            if slot is not None:
                slot.completion.finish = "cancelled"
        self._slots: list[_Slot | None] = [None] * self.shapes.slots

    @property
    def caches(self) -> S.Caches:
        """Caches of all slots."""
        if self._caches is None:
            raise ValueError("this engine was freed; call reset() before anything else")
        return self._caches

    @caches.setter
    def caches(self, caches: S.Caches) -> None:
        self._caches = caches

    @property
    def running(self) -> int:
        """Slots in use, as far as the host has read."""
        return sum(slot is not None for slot in self._slots)

    # -- admission ---------------------------------------------------------------

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
        self.check(request)
        caches = self.compiler.empty(self.shapes)()
        prompt = np.asarray(request.prompt, np.int32)
        done, token = 0, None
        while done < len(prompt):
            left = len(prompt) - done
            chunk = next((c for c in PREFILL_CHUNKS if c >= left), PREFILL_CHUNKS[-1])
            count = min(left, chunk)
            tokens = np.zeros(chunk, np.int32)
            tokens[:count] = prompt[done : done + count]
            run = self.compiler.prefill(self.shapes, chunk)
            caches, token = run(
                self.models.params,
                caches,
                tokens,
                np.int32(done),
                np.int32(count),
                self._sampling(request),
            )
            done += count
        return Prefilled(request, caches, int(token))  # type: ignore[arg-type]

    def admit(self, ready: Prefilled) -> Completion:
        """Puts a prefilled request into a free slot and emits its first token."""
        request = ready.request
        completion = Completion([ready.first_token])
        if ready.first_token in request.stop:
            completion.finish = "stop"
            return completion
        if request.max_new_tokens == 1:
            completion.finish = "length"
            return completion
        if self.running == self.config.slots:
            raise ValueError(
                f"all {self.config.slots} slots are in use; step until one is free"
            )
        slot = self._slots.index(None)
        self.place(slot, ready, room=request.max_new_tokens - 1)
        self._slots[slot] = _Slot(request, completion)
        return completion

    def place(self, slot: int, ready: Prefilled, room: int) -> None:
        """Copies a prefilled prompt into a slot's caches and starts it there."""
        request = ready.request
        stop = np.full(self.config.max_stops, NO_STOP, np.int32)
        stop[: len(request.stop)] = request.stop
        self.state, self.caches = self.compiler.insert(self.shapes)(
            self.state,
            self.caches,
            ready.caches,
            np.int32(slot),
            np.int32(ready.first_token),
            np.int32(len(request.prompt)),
            np.int32(room),
            stop,
            self._sampling(request),
        )

    def _sampling(self, request: Request) -> Sampling | None:
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
        slots = enumerate(self._slots)
        at = next((i for i, s in slots if s and s.completion is completion), None)
        if at is None:
            raise ValueError("expected a completion of this engine; it holds no such")
        self.state = self.compiler.release(self.shapes)(self.state, np.int32(at))
        self._slots[at] = None
        completion.finish = "cancelled"

    # -- one step ----------------------------------------------------------------

    def step(self) -> None:
        """Dispatches one step and reads the newest finished outcome."""
        clock = _Phases(self.time_phases)
        match self.policy:
            case ArPolicy():
                self._verify(S.anchors_only(self.shapes), self._no_drafts, 0, clock)
                self._read(clock)
            case FixedPolicy(width=width):
                proposal = self._draft(width, clock)
                lay = S.everything(self.shapes, width)
                self._verify(lay, proposal.token_BK, width, clock)
                self._read(clock)
            case DCutPolicy():
                self._cut_step(self.policy, clock)

    def _draft(self, width: int, clock: "_Phases") -> S.Proposal:
        run = self.compiler.draft(self.shapes, width)
        proposal = run(self.models.params, self.caches.drafter, self.state)
        clock.stop("draft", proposal)
        return proposal

    def _cut_step(self, policy: DCutPolicy, clock: "_Phases") -> None:
        shapes, ladder = self.shapes, policy.ladder(self.shapes)
        width = self.chooser.next()
        if width == 0:
            self._read(clock)  # the one read of this step
            if self.running:
                self._verify(S.anchors_only(shapes), self._no_drafts, 0, clock)
            return
        proposal = self._draft(width, clock)
        costs = self._costs(policy)
        plan, bundle = self.compiler.decide(shapes, policy.plan_key(shapes))(
            proposal,
            self.state,
            costs.device_MR,
            np.int32(ladder.index(width)),
            self._wire,
        )
        host = np.asarray(bundle)  # the one device-to-host read of a step
        clock.stop("plan", None)
        self._absorb(host[:-1])
        if not self.running:
            return
        decision = S.read_decision(host[-1], len(ladder))
        rows = policy.tiers(shapes)[decision.tier]
        lay = policy.layout(shapes, width, rows)
        made = Planned(plan.keep_B, decision, costs)
        self._verify(lay, proposal.token_BK, width, clock, made)

    def _costs(self, policy: DCutPolicy) -> StepCosts:
        """Step costs for the longest running context, to which attention reads."""
        lengths = [
            len(s.request.prompt) + len(s.completion.tokens) for s in self._slots if s
        ]
        context = max(lengths, default=0) // CHUNK
        if context not in self._step_costs:
            end = (context + 1) * CHUNK  # it reads whole chunks
            cost_MR = policy.cost_ms(self.shapes, end)
            self._step_costs[context] = StepCosts(
                cost_MR,
                jax.device_put(cost_MR),  # jnp.asarray would compile
                policy.plain_ms(self.shapes, end) if policy.plain else 0.0,
            )
        return self._step_costs[context]

    def flush(self) -> None:
        """Reads the outcome that is still on the device."""
        self._read(_Phases(False))

    @property
    def _no_drafts(self) -> Any:
        return np.zeros((self.shapes.slots, self.shapes.width - 1), np.int32)

    def _verify(
        self,
        lay: Layout,
        token_BK: Any,
        width: int,
        clock: "_Phases",
        plan: "Planned | None" = None,
    ) -> None:
        """Verifies and commits; without a plan all `width` drafts are kept."""
        everything = np.full(self.shapes.slots, width, np.int32)
        keep_B = plan.keep_B if plan else everything
        self._wire, self.state, fresh = self.compiler.verify(self.shapes, lay)(
            self.models.params, self.caches.target, self.state, token_BK, keep_B
        )
        clock.stop("verify", self._wire)
        self.caches = self.compiler.commit(self.shapes, lay.rows)(self.caches, fresh)
        clock.stop("commit", self.caches)
        active = self.running
        self._pending = StepRecord(
            width=width,
            rows=lay.rows,
            kept=plan.decision.kept if plan else width * active,
            active=active,
            decision=plan.decision if plan else None,
            costs=plan.costs if plan else None,
            phase_ms=clock.ms,
        )

    def _read(self, clock: "_Phases") -> None:
        host = np.asarray(self._wire)
        clock.stop("read", None)
        self._absorb(host)

    def _absorb(self, wire_BX: np.ndarray) -> None:
        """Hands committed tokens to their requests and frees finished slots."""
        record, self._pending = self._pending, None
        if record is None:
            return
        outcome = from_wire(wire_BX)
        for i, slot in enumerate(self._slots):
            count = int(outcome.count_B[i])
            if slot is None or count == 0:
                continue
            done = slot.completion
            done.tokens.extend(int(t) for t in outcome.token_BW[i, :count])
            done.steps += 1
            done.accepted += int(outcome.accepted_B[i])
            record.committed += count
            record.accepted += int(outcome.accepted_B[i])
            if outcome.finished_B[i]:
                stopped = done.tokens[-1] in slot.request.stop
                done.finish = "stop" if stopped else "length"
                self._slots[i] = None
        self.records.append(record)
        if len(self.records) >= 2 * KEPT_RECORDS:
            del self.records[:KEPT_RECORDS]
        if record.decision is not None and record.costs is not None:
            assert isinstance(self.policy, DCutPolicy)
            self._learn(self.policy, record, record.decision, record.costs)

    def _learn(
        self,
        policy: DCutPolicy,
        record: StepRecord,
        decision: S.Decision,
        costs: StepCosts,
    ) -> None:
        """Tells the chooser what a step that drafted promised, and what it gave."""
        ladder = policy.ladder(self.shapes)
        seen = zip(ladder, decision.utility, strict=True)
        utilities = {w: u for w, u in seen if w <= record.width}
        ran = costs.cost_MR[ladder.index(record.width), decision.tier]
        ms = {record.width: float(ran)}
        if policy.plain:
            utilities[0] = record.active / costs.plain
            ms[0] = costs.plain
        self.chooser.observe(
            record.width,
            utilities,
            predicted=record.active + decision.gain,
            committed=record.committed,
            ms=ms,
        )

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
            while waiting and self.running < self.config.slots:
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


class _Phases:
    """Times the phases of a step; waits for the device only when asked to."""

    def __init__(self, on: bool) -> None:
        self.on = on
        self.ms: dict[str, float] = {}
        self._last = time.perf_counter()

    def stop(self, phase: str, wait_for: Any) -> None:
        if not self.on:
            return
        jax.block_until_ready(wait_for)
        now = time.perf_counter()
        self.ms[phase] = self.ms.get(phase, 0.0) + (now - self._last) * 1e3
        self._last = now
