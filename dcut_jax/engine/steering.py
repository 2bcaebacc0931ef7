"""The host's side of D-Cut: what earlier steps taught, and what the next is to be."""

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from dcut_jax.cost.online import Correction, Work
from dcut_jax.cut.calibration import Calibration, Reliability
from dcut_jax.cut.choice import Choice, StepCosts
from dcut_jax.cut.ease import Ease, batch_ease
from dcut_jax.cut.evidence import Promise
from dcut_jax.decode.compile import Executable
from dcut_jax.decode.decide import (
    Decision,
    Proposal,
    Situation,
    init_memory,
)
from dcut_jax.decode.pack import Layout
from dcut_jax.decode.state import DecodeState
from dcut_jax.decode.steps import StepShapes, anchors_only
from dcut_jax.engine.policy import (
    PLAN_WORK,
    DCutPolicy,
    catch_up_work,
    draft_work,
    share_work,
    verify_work,
)
from dcut_jax.engine.slots import StepRecord
from dcut_jax.models.cache import CHUNK

LOG_STEP = np.log(1.02)
SHORTEST_MS = 1e-6  # no step is as short, and its logarithm is finite


class Steering:
    """Chooses the steps of one engine under one policy.

    What it learns, of confidences, costs and widths, outlives the requests.
    `expected`: drafts that the step just chosen has of any request accepted.
    `agree`: see `cost.measure.measure`; `clock`: see `Engine`.
    """

    def __init__(
        self,
        policy: DCutPolicy,
        shapes: StepShapes,
        agree: Callable[[float], float] = float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.policy = policy
        self._clock = clock
        self._agree = agree
        self.shapes = shapes
        self.key = policy.plan_key(shapes)
        self.chooser = policy.chooser(shapes)
        self.correction = Correction()
        memory = init_memory(shapes.slots, shapes.width - 1)
        self._memory = jax.device_get(memory)  # a step puts it where it belongs
        self._measured: dict[int, dict[Work, float]] = {}
        self._known: dict[int, tuple[Any, StepCosts, float]] = {}  # by chunk
        self._ease = 1.0
        self.expected = 0.0
        # Raises for one that is missing.
        self._costs = self._plan_costs(None, 0, np.inf)
        wire = shapes.slots, shapes.wire_columns
        self._planned_wire: Any = np.zeros(wire, np.int32)
        self._unverified = False  # the plan that `_memory` knows of
        self.reset()

    def reset(self) -> None:
        """Forgets the steps that are under way, and nothing else.

        The outcome of the last plan is still to be learned from, if it was verified.
        """
        if self._unverified:
            self.forget_plan()
        for width in self.chooser.drafting:
            self.withdraw(Choice(width, planned=True, tries=True))
        self.interrupt()

    # -- what a step is to be ------------------------------------------------------

    def chunk(self, wanted: int, context: int, cap_ms: float) -> int:
        """Rows of a prompt to take along: `wanted`, or fewer where time is short.

        The smallest chunk at least: a prompt is never put off for ever. `wanted` is one
        of the chunks.
        """
        sizes = [size for size in self.shapes.chunks if size <= wanted]
        while len(sizes) > 1 and np.isfinite(cap_ms):
            self._plan_costs(None, context, cap_ms, sizes[-1])
            _, costs, own_ms = self._known[sizes[-1]]
            if (costs.cheapest_ms + own_ms) * self._slowdown <= cap_ms:
                break
            sizes.pop()
        return sizes[-1]

    def choose(
        self,
        running: Sequence[Ease],
        fullest: int,
        context: int,
        cap_ms: float,
        chunk: int = 0,
    ) -> Choice:
        """The coming step.

        Args:
          running: of the requests that run.
          fullest: how many of them are in the shard that has most.
          context: cached positions of the longest of them.
          cap_ms: what a step may take; infinite if anything.
          chunk: rows of a prompt that go along.
        """
        self._costs = self._plan_costs(fullest, context, cap_ms, chunk)
        self._ease = batch_ease(running)
        choice = self.chooser.next(
            self._costs, self._ease, requests=len(running), alone=chunk == 0
        )
        self.expected = self.chooser.expected(choice)
        return choice

    def _plan_costs(
        self, fullest: int | None, context: int, cap_ms: float, chunk: int = 0
    ) -> StepCosts:
        """Step costs as they are now; the same object while they are the same."""
        # Beside a prompt a plain step has a row for every slot.
        rows = anchors_only(self.shapes, None if chunk else fullest).rows
        page = context // CHUNK
        if page not in self._measured:
            end = (page + 1) * CHUNK  # attention reads whole pages
            self._measured[page] = self.policy.measured(self.shapes, end)
        correction = self.correction
        if math.isfinite(cap_ms):
            # In steps of a fiftieth, or there would be other costs at every step.
            cap_ms = max(cap_ms / self._slowdown, SHORTEST_MS)
            cap_ms = 1.02 ** np.floor(np.log(cap_ms) / LOG_STEP)
        version = correction.version if self.policy.correct else 0
        key = (page, version, float(cap_ms), rows)
        if chunk not in self._known or self._known[chunk][0] != key:
            ms, own_ms = self._measured[page], 0.0
            if self.policy.correct:
                ms = {work: t * correction.factor(work) for work, t in ms.items()}
            if chunk:
                ms, own_ms = self.policy.beside(self.shapes, ms, chunk)
            costs = self.policy.costs(self.shapes, ms, rows).within(cap_ms - own_ms)
            self._known[chunk] = key, costs, own_ms
        return self._known[chunk][1]

    @property
    def _slowdown(self) -> float:
        """Of the machine, as far as costs are corrected."""
        return self.correction.slowdown if self.policy.correct else 1.0

    def outlook(self) -> tuple[StepCosts, dict[Choice, Promise], Choice]:
        """What steps without a prompt cost, as last reckoned, and promise; the best."""
        _, costs, _ = self._known[0]
        promises = self.chooser.promises(costs, self._ease)
        return costs, promises, self.chooser.best(promises)

    def decide(
        self,
        run: Executable,
        proposal: Proposal,
        state: DecodeState,
        choice: Choice,
        weight_B: np.ndarray,
        waited_B: np.ndarray,
        wire: Any,
    ) -> tuple[Any, np.ndarray]:
        """Plans on the device: what to keep, and the one read of the step.

        `waited_B`: drafting steps, at most, since a draft of a request was verified.
        """
        costs = self._costs.verifying() if choice.tries else self._costs
        patience = self.policy.patience
        situation = Situation(
            cost_ms_MR=costs.planned_MR.astype(np.float32),
            width_index=np.int32(self.key.widths.index(choice.width)),
            weight_B=weight_B,
            due_B=waited_B + 1 >= (np.inf if patience is None else patience),
        )
        self._dispatch(PLAN_WORK)
        self._unverified = True
        keep_B, self._memory, bundle = run(
            proposal, state, self._memory, situation, self._planned_wire, wire
        )
        return keep_B, np.asarray(bundle)

    def look(self, decision: Decision, weight_B: np.ndarray) -> None:
        """Takes in what a plan saw; `weight_B`: of its requests, 0 for empty slots."""
        self.chooser.look(
            requests=int(np.count_nonzero(weight_B)),
            anchors=float(weight_B.sum()),
            gain_MR=decision.gain_MR,
            full_M=decision.full_M,
        )

    def layout(self, width: int, decision: Decision) -> Layout:
        """The executable that a plan asks for."""
        rows = self.key.rows_R[decision.tier]
        return self.policy.layout(self.shapes, width, rows)

    # -- what came of it ----------------------------------------------------------

    def planned(self, wire: Any) -> None:
        """The outcome of a planned step, on the device, for the next plan to learn."""
        self._planned_wire = wire
        self._unverified = False

    def forget_plan(self) -> None:
        """Nothing is learned from the plan just made: a request in it is gone."""
        nothing_B: Any = np.zeros(self.shapes.slots, np.int32)
        self._memory = replace(self._memory, keep_B=nothing_B)
        self._unverified = False

    def outcome(self, record: StepRecord, count_B: np.ndarray) -> None:
        """Takes in a finished step that drafted; see `WidthChooser.outcome`.

        `count_B`: tokens that it emitted. Drafts count as accepted as far as they got
        into a text: what comes behind its end is worth nothing.
        """
        decision, weight_B = record.decision, record.weight_B
        worth = None
        if weight_B is not None:
            worth = float(weight_B @ count_B) / float(weight_B.sum())
        self.chooser.outcome(
            Choice(record.width, decision is not None, record.tries),
            requests=record.active,
            predicted=decision.gain if decision else None,
            accepted=float(np.maximum(count_B - 1, 0).sum()),
            worth=worth,
        )

    def withdraw(self, choice: Choice) -> None:
        """No outcome will be taken in of a planned step."""
        self.chooser.withdraw(choice)

    # -- how long it took -----------------------------------------------------------

    # Whoever dispatches says so just before: the clock starts with the first.

    def interrupt(self) -> None:
        """Something that is no step runs; the time up to the next read says nothing."""
        self._work: list[Work] | None = None

    def drafts(self, width: int) -> None:
        """Drafting is about to be dispatched."""
        self._dispatch(draft_work(width))

    def catches_up(self, steps: int) -> None:
        """A catch-up is about to be dispatched."""
        self._dispatch(catch_up_work(steps))

    def verifies(self, lay: Layout, chunk: int = 0) -> None:
        """Verification is about to be dispatched, with so many rows of a prompt."""
        self._dispatch(share_work(lay, chunk) if chunk else verify_work(lay))

    def _dispatch(self, work: Work) -> None:
        if self._work is None:
            return
        if not self._work:
            self._since = self._clock()
        self._work.append(work)

    def has_read(self, context: int) -> None:
        """All that was dispatched is done, up to a commit."""
        work, self._work = self._work, []
        if not self.policy.correct:
            return
        measured = self._measured.get(context // CHUNK)
        if work == []:
            return  # it was known already
        if work is None or measured is None:
            self.correction.forget_last()
            return
        ms = self._agree((self._clock() - self._since) * 1e3)
        # Before a plan is read, drafts of its width may have run twice.
        times = Counter(work)
        self.correction.observe({w: n * measured[w] for w, n in times.items()}, ms)

    # -- reports ------------------------------------------------------------------

    @property
    def calibration(self) -> Calibration:
        """What was learned of the drafter's confidences, on the host."""
        return jax.device_get(self._memory.calibration)

    def reliability(self) -> tuple[Reliability, Reliability]:
        """How raw and calibrated survivals compared with outcomes, on the host.

        Counted since the last call.
        """
        memory = self._memory
        raw, calibrated = jax.device_get((memory.raw, memory.calibrated))
        nothing = jax.tree.map(np.zeros_like, raw)
        self._memory = replace(memory, raw=nothing, calibrated=nothing)
        return raw, calibrated
