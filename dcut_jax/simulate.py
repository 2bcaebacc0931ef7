"""Batches that decode on paper: drafts and their fate are drawn, time is looked up.

The width chooser, the calibration and the weights are the engine's own, the planner is
its twin in NumPy; a model, a drafter and a device are what is missing. A step goes as
the engine's does, but for these: what a step taught is known to the very next one,
where the engine reads it one step late; slots are never empty, and a last step may go
beyond a request's length; costs are never corrected nor capped; context and catching up
are free.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import jax
import numpy as np
from jaxtyping import Array

from dcut_jax.cut.calibration import Calibration, calibrate, identity, learn
from dcut_jax.cut.choice import Choice, StepCosts
from dcut_jax.cut.ease import Ease, batch_ease
from dcut_jax.cut.fairness import Fairness, Progress, weights
from dcut_jax.cut.numpy_plan import NumpyPlan, Objective, plan_numpy
from dcut_jax.cut.survival import log_survival


class Drafts(NamedTuple):
    """A block of drafts for every request."""

    chance_BK: np.ndarray  # of being accepted, once those before it are
    logp_BK: np.ndarray  # float32, log of the drafter's confidence


@dataclass(frozen=True)
class Acceptance:
    """How likely drafts are to be accepted, and how sure the drafter is of them.

    The log-odds of a draft's chance, given that those before it were accepted, are

        level + ease of the request + step_sd * z + draft_sd * z'

    with one standard normal z per request and step and one z' per draft.

    Attributes:
      sharpness: log-odds of the confidence over those of the chance. 1: confidences
        are chances; below: the drafter is less sure than it might be.
    """

    level: float
    step_sd: float
    draft_sd: float
    sharpness: float = 1.0

    def draw(self, rng: np.random.Generator, ease_B: np.ndarray, drafts: int) -> Drafts:
        """Drafts for requests whose log-odds lie `ease_B` above the level."""
        step_B1 = self.step_sd * rng.standard_normal((ease_B.size, 1))
        draft_BK = self.draft_sd * rng.standard_normal((ease_B.size, drafts))
        odds_BK = self.level + ease_B[:, None] + step_B1 + draft_BK
        return Drafts(
            chance_BK=np.exp(_log_sigmoid(odds_BK)),
            logp_BK=_log_sigmoid(self.sharpness * odds_BK).astype(np.float32),
        )


def _log_sigmoid(x: np.ndarray) -> np.ndarray:
    return -np.logaddexp(0, -x)


@dataclass(frozen=True)
class Setup:
    """What steps there are, what they cost, and by which rules one is taken.

    Attributes:
      widths: drafting widths (M), rising.
      rows_R: rows of the tiers, rising.
      costs: of every step, ms.
      objective, ratios: see `cut.plan`.
      fairness: see `cut.fairness.weights`.
      patience: steps without a verified draft after which a request is given one;
        None: never.
      calibrates: whether plans go by chances learned online, not by confidences.
      paid: what steps really take, where that is not what is planned by; None: it is.
    """

    widths: tuple[int, ...]
    rows_R: tuple[int, ...]
    costs: StepCosts
    objective: Objective = "tokens"
    ratios: tuple[float, ...] | None = None
    fairness: Fairness = "equal"
    patience: int | None = None
    calibrates: bool = False
    paid: StepCosts | None = None

    def __post_init__(self) -> None:
        wanted = len(self.widths), len(self.rows_R)
        for costs in (self.costs, self.paid or self.costs):
            found = costs.planned_MR.shape
            if found != wanted or costs.full_M.shape != wanted[:1]:
                raise ValueError(
                    f"expected costs for {wanted[0]} widths and {wanted[1]} tiers, "
                    f"found planned_MR {found} and full_M {costs.full_M.shape}; give "
                    f"every width and tier a cost, infinite where there is no such step"
                )


class Chooser(Protocol):
    """Decides before a step what is drafted; `cut.width.WidthChooser` is one."""

    def next(self, costs: StepCosts, ease: float) -> Choice: ...

    def expected(self, choice: Choice) -> float: ...

    def look(
        self,
        *,
        requests: int,
        anchors: float,
        gain_MR: np.ndarray,
        full_M: np.ndarray,
    ) -> None: ...

    def outcome(
        self,
        choice: Choice,
        *,
        requests: int,
        predicted: float | None,
        accepted: float,
        worth: float | None = None,
    ) -> None: ...


@dataclass(frozen=True)
class Always:
    """The same step again and again: plain decoding, or one fixed width."""

    choice: Choice

    def next(self, costs: StepCosts, ease: float) -> Choice:
        return self.choice

    def expected(self, choice: Choice) -> float:
        """Nothing is expected."""
        return 0.0

    def look(self, **seen: object) -> None:
        """Nothing is learned."""

    def outcome(self, choice: Choice, **seen: object) -> None:
        """Nothing is learned."""


class Step(NamedTuple):
    """One step of the whole batch.

    Attributes:
      choice: what was drafted, and whether a plan cut it.
      ms: its cost.
      keep_B, accepted_B: drafts verified of each request, and those accepted.
      ended_B: requests that are done with it; their slots hold new ones next.
    """

    choice: Choice
    ms: float
    keep_B: np.ndarray
    accepted_B: np.ndarray
    ended_B: np.ndarray


class Tried(NamedTuple):
    """What the last plan came to, for the calibration to learn from."""

    logp_BK: np.ndarray
    keep_B: np.ndarray
    accepted_B: np.ndarray


@jax.jit
def _learned_survival(
    cal: Calibration, tried_BK: Array, keep_B: Array, accepted_B: Array, logp_BK: Array
) -> tuple[Calibration, Array]:
    """Takes in the last plan's outcome, then judges drafts: one call for both."""
    cal = learn(cal, tried_BK, keep_B, accepted_B)
    return cal, log_survival(calibrate(cal, logp_BK))


def raw_survival(logp_BK: np.ndarray) -> np.ndarray:
    """`log_survival` where confidences stand for chances, to the bit; NumPy.

    A call of JAX takes longer than all else that a step does here.
    """
    return np.add.accumulate(np.minimum(logp_BK, np.float32(0)), axis=1)


@dataclass
class Simulation:
    """A batch in flight, all slots always taken.

    Attributes:
      ease_B: of each slot's requests; see `Acceptance`.
      spread: standard deviation of single requests around it.
      length: tokens of a request. The last step may go beyond.
      seed: runs of one seed draw the same drafts and luck in their n-th step, whatever
        they do with them.
    """

    setup: Setup
    chooser: Chooser
    acceptance: Acceptance
    ease_B: Sequence[float]
    length: int = 128
    seed: int = 0
    spread: float = 0.0
    _rng: np.random.Generator = field(init=False)
    _calibration: Calibration = field(init=False)
    _tried: Tried = field(init=False)
    _waited_B: np.ndarray = field(init=False)
    _progress: list[Progress] = field(init=False)
    _ease: list[Ease] = field(init=False)
    _number_B: np.ndarray = field(init=False)  # requests that a slot has had
    _own_B: np.ndarray = field(init=False)
    _left_B: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        slots = len(self.ease_B)
        if not slots or self.length < 1:
            raise ValueError(
                f"expected at least one slot and requests of at least one token, found "
                f"{slots} and {self.length}; give an ease per slot and a length >= 1"
            )
        self._rng = np.random.default_rng(self.seed)
        drafts = self.setup.widths[-1]
        self._calibration = identity(drafts)
        zero_B = np.zeros(slots, np.int32)
        self._tried = Tried(np.zeros((slots, drafts), np.float32), zero_B, zero_B)
        self._waited_B = zero_B
        self._progress = [Progress() for _ in self.ease_B]
        self._ease = [Ease() for _ in self.ease_B]
        self._number_B = np.zeros(slots, int)
        self._own_B = np.array([self._text(slot) for slot in range(slots)])
        # Slots are somewhere within their requests, so that these do not end together.
        self._left_B = self._rng.integers(1, self.length + 1, slots)

    def step(self) -> Step:
        """Drafts, plans, verifies, and takes in what that showed."""
        setup = self.setup
        choice = self.chooser.next(setup.costs, batch_ease(self._ease))
        expected = self.chooser.expected(choice)
        ease_B = np.asarray(self.ease_B, float) + self._own_B
        drafts = self.acceptance.draw(self._rng, ease_B, setup.widths[-1])
        luck_BK = self._rng.random(drafts.chance_BK.shape)
        drafted_K = np.arange(setup.widths[-1]) < choice.width
        logp_BK = np.where(drafted_K, drafts.logp_BK, np.float32(np.nan))

        weight_B = self._weights()
        plan = self._plan(choice, logp_BK, weight_B) if choice.planned else None
        keep_B = plan.keep_B if plan else np.full(ease_B.size, choice.width, np.int32)
        passed_BK = np.logical_and.accumulate(luck_BK < drafts.chance_BK, axis=1)
        accepted_B = np.minimum(passed_BK.sum(axis=1), keep_B).astype(np.int32)

        if plan:
            self._tried = Tried(logp_BK, keep_B, accepted_B)
        if choice.width:
            self.chooser.outcome(
                choice,
                requests=ease_B.size,
                predicted=plan.gain if plan else None,
                accepted=float(accepted_B.sum()),
                worth=1 + float(weight_B @ accepted_B) / float(weight_B.sum()),
            )
            self._waited_B = np.where(keep_B > 0, 0, self._waited_B + 1)
            share_B = keep_B / max(keep_B.mean(), 1e-9)
            for ease, of, share in zip(self._ease, accepted_B, share_B, strict=True):
                ease.add(float(of), expected * float(share))
        ended_B = self._advance(1 + accepted_B)
        return Step(choice, self._ms(choice, plan), keep_B, accepted_B, ended_B)

    def _plan(
        self, choice: Choice, logp_BK: np.ndarray, weight_B: np.ndarray
    ) -> NumpyPlan:
        """The step's plan; the chooser sees what each width could have gained."""
        setup = self.setup
        survival_BK = self._survival(logp_BK)
        gain_MR = np.full(setup.costs.planned_MR.shape, np.nan)
        full_M = np.full(len(setup.widths), np.nan)
        draft_K = np.arange(survival_BK.shape[1])
        any_cost_R = np.ones(len(setup.rows_R))  # a gain does not depend on it
        for m, width in enumerate(setup.widths):
            if width <= choice.width:
                narrow_BK = np.where(draft_K < width, survival_BK, np.nan)
                gain_MR[m] = self._best(narrow_BK, any_cost_R, weight_B).gain_R
                full_M[m] = np.exp(survival_BK[:, :width]).sum()
        self.chooser.look(
            requests=weight_B.size,
            anchors=float(weight_B.sum()),
            gain_MR=gain_MR,
            full_M=full_M,
        )
        m = setup.widths.index(choice.width)
        due_B = None
        if setup.patience is not None:
            due_B = self._waited_B + 1 >= setup.patience
        costs = setup.costs.verifying() if choice.tries else setup.costs
        return self._best(survival_BK, costs.planned_MR[m], weight_B, due_B)

    def _best(
        self,
        survival_BK: np.ndarray,
        cost_ms_R: np.ndarray,
        weight_B: np.ndarray,
        due_B: np.ndarray | None = None,
    ) -> NumpyPlan:
        return plan_numpy(
            survival_BK,
            np.ones(weight_B.shape, bool),
            self.setup.rows_R,
            cost_ms_R,
            weight_B=weight_B,
            due_B=due_B,
            objective=self.setup.objective,
            ratios=self.setup.ratios,
        )

    def _weights(self) -> np.ndarray:
        priority_B = [1.0] * len(self._progress)
        rate_B = [p.rate for p in self._progress]
        return weights(self.setup.fairness, priority_B, rate_B)

    def _survival(self, logp_BK: np.ndarray) -> np.ndarray:
        """Log-survivals to plan by."""
        if not self.setup.calibrates:
            return raw_survival(logp_BK)
        self._calibration, survival_BK = _learned_survival(
            self._calibration, *self._tried, logp_BK
        )
        return np.asarray(survival_BK)

    def _ms(self, choice: Choice, plan: NumpyPlan | None) -> float:
        costs = self.setup.paid or self.setup.costs
        if choice.width == 0:
            return costs.plain_ms
        m = self.setup.widths.index(choice.width)
        ms = costs.full_M[m] if plan is None else costs.planned_MR[m, plan.tier]
        return float(ms)

    def _text(self, slot: int) -> float:
        """By how much the slot's present request is easier than its others.

        The n-th request of a slot is the same in all runs of one seed.
        """
        if not self.spread:
            return 0.0
        rng = np.random.default_rng((self.seed, slot, int(self._number_B[slot])))
        return self.spread * float(rng.standard_normal())

    def _advance(self, tokens_B: np.ndarray) -> np.ndarray:
        """Hands out tokens, and fills the slots of requests that are done."""
        self._left_B = self._left_B - tokens_B
        ended_B = self._left_B <= 0
        self._left_B = np.where(ended_B, self.length, self._left_B)
        self._waited_B = np.where(ended_B, 0, self._waited_B)
        for slot, (tokens, ended) in enumerate(zip(tokens_B, ended_B, strict=True)):
            if ended:
                self._progress[slot], self._ease[slot] = Progress(), Ease()
                self._number_B[slot] += 1
                self._own_B[slot] = self._text(slot)
            else:
                self._progress[slot].add(int(tokens))
        return ended_B


class Served(NamedTuple):
    """One request, from its first step to its last."""

    slot: int
    ms: float
    tokens: int

    @property
    def ms_per_token(self) -> float:
        return self.ms / self.tokens


@dataclass(frozen=True)
class Run:
    """Many steps in sum.

    Attributes:
      steps, ms: how many, and their time.
      anchors, accepted: tokens, of either kind.
      drafted, verified: drafts asked for and drafts verified.
      served: requests that began and ended within these steps.
    """

    steps: int
    ms: float
    anchors: int
    accepted: int
    drafted: int
    verified: int
    served: tuple[Served, ...]

    @property
    def tokens(self) -> int:
        return self.anchors + self.accepted

    @property
    def tokens_per_s(self) -> float:
        return 1e3 * self.tokens / self.ms

    @property
    def mean_accepted_length(self) -> float:
        """Tokens per request and step, the anchor's own among them."""
        return self.tokens / self.anchors

    @property
    def mean_width(self) -> float:
        """Drafts asked for per request and step."""
        return self.drafted / self.anchors

    @property
    def mean_rows(self) -> float:
        """Rows verified per request and step, the anchor among them."""
        return 1 + self.verified / self.anchors


def total(steps: Iterable[Step]) -> Run:
    """Adds up steps. Of each slot, the request that ran when they began is left out."""
    count, ms, anchors, accepted, drafted, verified = 0, 0.0, 0, 0, 0, 0
    served: list[Served] = []
    began: dict[int, tuple[float, int]] = {}  # by slot: the time, and tokens since
    for step in steps:
        count, ms = count + 1, ms + step.ms
        anchors += step.keep_B.size
        accepted += int(step.accepted_B.sum())
        drafted += step.choice.width * step.keep_B.size
        verified += int(step.keep_B.sum())
        for slot, (start_ms, tokens) in began.items():
            began[slot] = start_ms, tokens + 1 + int(step.accepted_B[slot])
        for slot in np.flatnonzero(step.ended_B).tolist():
            if slot in began:
                start_ms, tokens = began[slot]
                served.append(Served(slot, ms - start_ms, tokens))
            began[slot] = ms, 0
    return Run(count, ms, anchors, accepted, drafted, verified, tuple(served))


def simulate(batch: Simulation, *, steps: int, warm_up: int) -> Run:
    """Runs a batch; nothing of its first `warm_up` steps is counted.

    Raises:
      ValueError: no step would be counted.
    """
    if steps < 1 or warm_up < 0:
        raise ValueError(
            f"expected at least one step to count and none or more before, found "
            f"{steps} and {warm_up}"
        )
    for _ in range(warm_up):
        batch.step()
    return total(batch.step() for _ in range(steps))
