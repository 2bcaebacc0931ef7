"""How many drafts to ask for, and whether to plan, from statistics of earlier steps."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

# What is known of a width rests on about so many requests' steps, however many requests
# are in a step: of one request a single step says next to nothing.
_REQUEST_STEPS = 600
# Looks at a width that are kept: so many requests' worth, and between these bounds.
_LOOK_REQUESTS = 1024
_FEWEST_LOOKS, _MOST_LOOKS = 20, 256
# The widest that can run is looked at first, in so many requests' steps.
FIRST_REQUESTS = 16
# Steps after which a look counts half: in a spell without drafts looks are rare, and
# old ones must not drown what a new one shows.
_HALF_LIFE = 256
# A tier leaves each request the more drafts the fewer they are. A look at twice or half
# as many requests as there are counts so many times halved.
_CROWD_HALVINGS = 2
# Promises are reckoned anew once there is a sixteenth more to reckon with.
_NEWS = 16
# Most weight of a step in the running ratio of accepted to predicted drafts.
_MOST_RATE = 0.05
# Relative standard error of that ratio before any evidence, and the variance of an
# accepted count over its mean: drafts of a request are accepted together.
_PRIOR_ERROR = 0.2
_DISPERSION = 1.5
# Steps' time that a width's budget for probes may save up.
_SAVED_STEPS = 3
# Times `probe_every` after which the narrowest width is probed whatever it costs.
_LONGEST_SPELL = 8
# Steps after which a plain step is due where drafts seem better: only by its side is it
# seen that drafting costs more than was measured.
_PLAIN_EVERY = 8


class StepCosts(NamedTuple):
    """What a step costs, ms, by drafting width (M) and tier (R).

    Infinite where there is no such step: a width that is not offered a tier, plain or
    unplanned steps that a policy does not take.
    """

    plain_ms: float  # nothing drafted, nothing planned
    planned_MR: np.ndarray
    full_M: np.ndarray  # all drafts verified, nothing planned

    @property
    def cheapest_ms(self) -> float:
        """Of all steps."""
        return min(self.plain_ms, self.planned_MR.min(), self.full_M.min())

    def within(self, cap_ms: float) -> "StepCosts":
        """Only steps of at most `cap_ms`; the cheapest alone if there are none."""
        cap_ms = max(cap_ms, self.cheapest_ms)
        return StepCosts(
            self.plain_ms if self.plain_ms <= cap_ms else np.inf,
            np.where(self.planned_MR <= cap_ms, self.planned_MR, np.inf),
            np.where(self.full_M <= cap_ms, self.full_M, np.inf),
        )

    def verifying(self) -> "StepCosts":
        """Without plans that verify nothing, the first tier, where there are others."""
        others_M1 = np.isfinite(self.planned_MR[:, 1:]).any(axis=1, keepdims=True)
        anchors_R = np.arange(self.planned_MR.shape[1]) == 0
        return self._replace(
            planned_MR=np.where(others_M1 & anchors_R, np.inf, self.planned_MR)
        )


class Choice(NamedTuple):
    """A step to take: drafts to ask for, and whether a plan cuts them.

    `tries`: the plan is to verify something (`StepCosts.verifying`), for what is
    verified alone shows how drafts do.
    """

    width: int
    planned: bool
    tries: bool = False


PLAIN = Choice(0, planned=False)


class Promise(NamedTuple):
    """What a choice is expected to yield, and its time."""

    per_ms: float  # worth per anchor and ms
    ms: float
    risk: float = 0.0  # one standard error of `per_ms`, as a share of it
    drafts: float = 0.0  # accepted per anchor, of requests as easy as any

    @property
    def safe_per_ms(self) -> float:
        """What it yields if its drafts do worse than expected."""
        return self.per_ms * (1 - self.risk)


class _Charge(NamedTuple):
    """A probe that was paid for and whose outcome is not known yet."""

    promise: Promise
    best_per_ms: float  # what the best choice would have yielded
    paid_ms: float
    least_ms: float  # how far its budget may fall

    def refund(self, worth: float) -> float:
        """What was paid too much, ms, for a step that yielded `worth` an anchor."""
        return self.paid_ms - (self.promise.ms - worth / self.best_per_ms)


class _Looks:
    """What planned steps could have gained at one width, per anchor; the newest ones.

    Rings of arrays: a step must not pay for a loop over hundreds of looks.
    """

    def __init__(self, kept: int, tiers: int) -> None:
        self._step_J = np.zeros(kept)
        self._requests_J = np.ones(kept)
        self._share_JR = np.zeros((kept, tiers))
        self._base_J = np.zeros(kept)
        self._accepted_J = np.zeros(kept)
        self._taken = 0

    def add(
        self,
        step: int,
        requests: int,
        share_R: np.ndarray,
        base: float,
        accepted: float,
    ) -> None:
        """One more look.

        Args:
          requests: how many were in the step.
          base: share of all drafts of the narrowest width, in the same step.
          accepted: expected accepted drafts per request if all were verified.
        """
        at = self._taken % self._step_J.size
        self._step_J[at], self._requests_J[at] = step, requests
        self._share_JR[at] = share_R
        self._base_J[at], self._accepted_J[at] = base, accepted
        self._taken += 1

    @property
    def count(self) -> int:
        return min(self._taken, self._step_J.size)

    @property
    def share_JR(self) -> np.ndarray:
        return self._share_JR[: self.count]

    @property
    def base_J(self) -> np.ndarray:
        return self._base_J[: self.count]

    @property
    def accepted_J(self) -> np.ndarray:
        return self._accepted_J[: self.count]

    def weight_J(self, requests: int) -> np.ndarray:
        """How much each look counts where there are so many requests; they sum to 1.

        The newest count most, and those that were as crowded.
        """
        step_J = self._step_J[: self.count]
        crowd_J = np.abs(np.log2(self._requests_J[: self.count] / requests))
        halvings_J = (self._step_J.max() - step_J) / _HALF_LIFE
        halvings_J += _CROWD_HALVINGS * crowd_J
        weight_J = np.exp2(halvings_J.min() - halvings_J)
        return weight_J / weight_J.sum()


@dataclass
class _Ratio:
    """Accepted over predicted drafts, both decayed, in requests' steps."""

    accepted: float = 0.0
    predicted: float = 0.0
    requests: float = 0.0
    prior: float = _REQUEST_STEPS  # weight of the prior, fading as evidence comes

    def add(self, requests: float, accepted: float, predicted: float) -> None:
        keep = 1 - min(_MOST_RATE, requests / _REQUEST_STEPS)
        self.accepted = self.accepted * keep + accepted
        self.predicted = self.predicted * keep + predicted
        self.requests = self.requests * keep + requests
        self.prior *= keep

    def value(self, prior: float) -> float:
        """The ratio, shrunk to `prior` while there is little evidence."""
        if self.predicted <= 0:
            return prior
        scale = self.predicted / self.requests * self.prior
        return (self.accepted + prior * scale) / (self.predicted + scale)

    @property
    def error(self) -> float:
        """Relative standard error of the ratio."""
        # Of exponential weights, about half the sum is as good as independent steps.
        evidence = self.accepted / 2 / _DISPERSION
        return (_PRIOR_ERROR**-2 + evidence) ** -0.5


@dataclass
class WidthChooser:
    """Picks the step with the best expected yield per ms.

    To choose from: plain decoding (width 0); for each drafting width a step that
    verifies all drafts and plans nothing, and one whose drafts a plan cuts. The first
    two take the executables of plain and of fixed-width decoding, and do no other work.
    Each kind must be worth `margin` more than the best of those before it, and what is
    to replace plain decoding, by its lower estimate: plain decoding yields what it
    yields, but a promise of drafts is a guess, and the best of several guesses is
    most often one that errs upwards.

    A planned step of width `w` shows what every tier would have gained at every width
    up to `w`, of live confidences. Remembered gains are weighed against the costs as
    they are now. How much better one width is than another is asked within steps that
    showed both, so that easy and hard texts cancel. Confidences are not acceptance
    rates, so gains are scaled by what steps of that width really accepted, shrunk to
    all widths' scale. Nothing of a step's own drafts enters its choice.

    The widest width is looked at first; it shows all. What could not run then, beside
    a prompt or under a cap, is looked at once it can. After that the best step runs,
    and now and then a planned step of a width that has drafted none for long; a draft
    is verified in it, or chances once thought too low would never be seen to rise.
    Probes are paid for from a fixed share of the time, an equal part for each width, so
    one that costs much is rare. Each is charged what it is expected to lose, and once
    its outcome is known what it did: promises err, and what they err by would otherwise
    be lost again and again. A width that promises more than plain decoding but not
    safely is tried at once, and for as long as its budget covers what it loses. Plain
    decoding is tried more often (8 steps), unless it is further behind than costs may
    err. Only
    it and the narrowest are never left out for longer than eight times
    `probe_every` steps, whatever that costs.

    Attributes:
      widths: the ladder, rising. With 0 in it, a step may draft nothing.
      probe_every: steps after which a width is due for a look.
      probe_share: of the time, what probes may lose against the best choice.
      margin: share by which a choice with more machinery must be better.
      costs_err: factor that a cost may be off by. Plain decoding is not tried again
        where it is further behind.
    """

    widths: tuple[int, ...]
    probe_every: int = 32
    probe_share: float = 0.005
    margin: float = 0.02
    costs_err: float = 2.0
    _looks: dict[int, _Looks] = field(default_factory=dict)
    _shown: dict[int, float] = field(default_factory=dict)  # requests' steps looked at
    _looks_kept: int = _MOST_LOOKS
    _requests: int = 1  # in the newest look
    _own: dict[int, _Ratio] = field(default_factory=dict)
    _pooled: _Ratio = field(default_factory=_Ratio)
    _looked: dict[int, int] = field(default_factory=dict)
    _step: int = 0
    _budget_ms: dict[int, float] = field(default_factory=dict)
    _charged: dict[int, _Charge] = field(default_factory=dict)
    _known: "tuple[StepCosts, float, dict[Choice, Promise]] | None" = None
    _news: int = 0

    def __post_init__(self) -> None:
        if not self.drafting or list(self.widths) != sorted(set(self.widths)):
            raise ValueError(
                f"widths must rise and hold one above 0; found {self.widths}"
            )
        if self.widths[0] < 0:
            raise ValueError(f"a width is at least 0 drafts; found {self.widths[0]}")
        if self.probe_every < 1:
            raise ValueError(
                f"probe_every must be at least 1; found {self.probe_every}"
            )
        if not 0 < self.probe_share <= 1:
            raise ValueError(
                f"probe_share must lie in (0, 1]; found {self.probe_share}"
            )
        if not 0 <= self.margin < 1:
            raise ValueError(f"margin must lie in [0, 1); found {self.margin}")
        if not self.costs_err >= 1:
            raise ValueError(f"costs_err must be at least 1; found {self.costs_err}")

    @property
    def drafting(self) -> tuple[int, ...]:
        """The widths that need a look: all but 0."""
        return tuple(w for w in self.widths if w != 0)

    def next(self, costs: StepCosts, ease: float = 1.0) -> Choice:
        """The coming step's choice.

        Args:
          costs: what steps cost.
          ease: see `promises`.
        """
        step, self._step = self._step, self._step + 1
        choice = self._pick(step, costs, ease)
        if choice.planned or choice == PLAIN:
            self._looked[choice.width] = step
        return choice

    def _pick(self, step: int, costs: StepCosts, ease: float) -> Choice:
        for m in range(len(self.drafting) - 1, -1, -1):
            new = self._shown.get(m, 0.0) < FIRST_REQUESTS
            if new and np.isfinite(costs.planned_MR[m]).any():
                return self._trying(self.drafting[m])
        promises = self._lately_promised(costs, ease)
        best = self.best({c: p for c, p in promises.items() if not c.tries})
        return self._probe(step, best, promises) or best

    def _trying(self, width: int) -> Choice:
        """A look; where there is nothing else to choose, a step as any."""
        return Choice(width, planned=True, tries=len(self.widths) > 1)

    def best(self, promises: dict[Choice, Promise]) -> Choice:
        """What is taken of these, but for probes: less machinery within the margin."""
        found, bar = None, -np.inf
        for machinery in (_drafts_nothing, _plans_nothing, _plans):
            some = [c for c in promises if machinery(c)]
            if not some:
                continue
            best = max(some, key=lambda c: promises[c].per_ms)
            promise = promises[best]
            worth = promise.safe_per_ms if found == PLAIN else promise.per_ms
            if found is None or worth > bar:
                found, bar = best, promise.per_ms * (1 + self.margin)
        assert found is not None, "some step can always be taken"
        return found

    def _probe(
        self, step: int, best: Choice, promises: dict[Choice, Promise]
    ) -> Choice | None:
        """A planned step of a width that is due and paid for, or a plain step.

        Plain decoding has nothing to show but its time. But what has not run for long
        has the costs of long ago, and these were once compared in a bad moment.
        """
        # Nothing is known of the best if it was never looked at, nor then lost.
        most = promises[best].per_ms
        some = [self._trying(w) for w in self.drafting if (w, True) != best[:2]]
        plain = promises.get(PLAIN) if 0 in self.widths else None
        if plain is not None and plain.per_ms * self.costs_err > most:
            some.append(PLAIN)
        others = [choice for choice in some if choice in promises and choice != best]
        parts = max(len(others), len(self.drafting))
        earned_ms = self.probe_share * promises[best].ms / parts
        due: dict[Choice, tuple[float, bool]] = {}
        for choice in others:
            width, promise = choice.width, promises[choice]
            behind = 1 - promise.per_ms / most if most > 0 else 0.0
            loss_ms = promise.ms * max(behind, 0.0)
            # Each has its own budget: a cheap probe takes nothing from a dear one. It
            # holds a few steps, so that no burst follows a long calm spell.
            most_ms = max(loss_ms, _SAVED_STEPS * promise.ms)
            budget_ms = min(self._budget_ms.get(width, 0.0) + earned_ms, most_ms)
            self._budget_ms[width] = budget_ms
            waited = step - self._looked.get(width, -self.probe_every)
            longest = self.probe_every * _LONGEST_SPELL
            forced = width in (0, self.drafting[0]) and waited >= longest
            # What may be better than plain decoding is tried again once it is known
            # how the last try went, for as long as tries do not lose.
            doubted = best == PLAIN and loss_ms == 0 and width not in self._charged
            affordable = budget_ms >= loss_ms
            every = (
                min(_PLAIN_EVERY, self.probe_every) if width == 0 else self.probe_every
            )
            if forced or affordable and (doubted or waited >= every):
                due[choice] = loss_ms, forced
        if not due:
            return None
        probe = min(due, key=lambda c: self._looked.get(c.width, -1))
        charge = self._charge(probe.width, promises[probe], most, *due[probe])
        if most > 0 and probe != PLAIN:
            self._charged[probe.width] = charge
        return probe

    def _charge(
        self, width: int, promise: Promise, most: float, loss_ms: float, forced: bool
    ) -> _Charge:
        """Takes a probe's expected loss from its width's budget.

        A probe can owe no more than all of its time. One that is taken whatever it
        costs owes nothing: such debts would add up, and bury the width for good.
        """
        before_ms = self._budget_ms[width]
        least_ms = min(before_ms, 0.0 if forced else -promise.ms)
        after_ms = max(before_ms - loss_ms, least_ms)
        self._budget_ms[width] = after_ms
        return _Charge(promise, most, before_ms - after_ms, least_ms)

    def _lately_promised(self, costs: StepCosts, ease: float) -> dict[Choice, Promise]:
        """`promises`, and of looks, not reckoned anew at every step."""
        known = self._known
        if known is None or known[0] is not costs or known[1] != ease:
            promises = self.promises(costs, ease)
            if len(self.widths) > 1:
                trying_MR = costs.verifying().planned_MR
                for m, width in enumerate(self.drafting):
                    if Choice(width, True) in promises:
                        tried = self._planned(m, trying_MR[m], ease)
                        promises[self._trying(width)] = tried
            known = costs, ease, promises
            self._known, self._news = known, 0
        return known[2]

    def promises(self, costs: StepCosts, ease: float = 1.0) -> dict[Choice, Promise]:
        """What each choice that can be taken is expected to yield, per anchor.

        Who asks changes nothing: of several processes one alone may.

        Args:
          ease: how many more drafts the running requests have accepted than those that
            were looked at, see `cut.ease`.
        """
        found: dict[Choice, Promise] = {}
        for m, width in enumerate(self.drafting):
            if np.isfinite(costs.planned_MR[m]).any():
                found[Choice(width, True)] = self._planned(m, costs.planned_MR[m], ease)
            if np.isfinite(costs.full_M[m]):
                full_ms = float(costs.full_M[m])
                found[Choice(width, False)] = self._full(m, full_ms, ease)
        if np.isfinite(costs.plain_ms):
            found[PLAIN] = Promise(1 / costs.plain_ms, costs.plain_ms)
        return found

    def _planned(self, m: int, cost_ms_R: np.ndarray, ease: float) -> Promise:
        """Promise of the `m`-th drafting width where its tiers cost so much."""
        looks = self._looks.get(m)
        if looks is None:
            return Promise(0.0, float(cost_ms_R.min()))
        weight_J, lately = looks.weight_J(self._requests), self._lately(looks)
        drafts_JR = self.scale(self.drafting[m]) * looks.share_JR
        per_ms_JR = (1 + ease * drafts_JR) / cost_ms_R
        per_ms = float(weight_J @ per_ms_JR.max(axis=1)) * lately
        ms = float(weight_J @ cost_ms_R[per_ms_JR.argmax(axis=1)])
        # A plan goes by what it sees of its drafts, not by the ease of their texts.
        tier_J1 = ((1 + drafts_JR) / cost_ms_R).argmax(axis=1)[:, None]
        drafts = float(weight_J @ np.take_along_axis(drafts_JR, tier_J1, axis=1)[:, 0])
        return Promise(
            per_ms, ms, self._risk(m, per_ms * ms), (1 + drafts) * lately - 1
        )

    def _full(self, m: int, cost_ms: float, ease: float) -> Promise:
        """The same where all drafts are verified; they are in the last tier."""
        looks = self._looks.get(m)
        if looks is None:
            return Promise(0.0, cost_ms)
        share = float(looks.weight_J(self._requests) @ looks.share_JR[:, -1])
        drafts, lately = self.scale(self.drafting[m]) * share, self._lately(looks)
        worth = (1 + ease * drafts) * lately
        risk = self._risk(m, worth)
        return Promise(worth / cost_ms, cost_ms, risk, (1 + drafts) * lately - 1)

    def _risk(self, m: int, worth: float) -> float:
        """One standard error of `worth` an anchor, as a share: its drafts may fail."""
        own = self._own.get(self.drafting[m], _Ratio())
        return own.error * max(1 - 1 / worth, 0.0) if worth > 0 else 0.0

    def _lately(self, looks: _Looks) -> float:
        """How much easier the texts of late are than those of these looks.

        Every planned step shows the narrowest width, only some go wide: those say how a
        width compares with the narrowest, and all of them what that one yields.
        """
        late, scale = self._looks[0], self.scale(self.drafting[0])
        if looks is late:
            return 1.0
        now, then = (x.weight_J(self._requests) @ x.base_J for x in (late, looks))
        return (1 + scale * float(now)) / (1 + scale * float(then))

    def expected(self, choice: Choice) -> float:
        """Drafts that are accepted of a request as easy as any; 0 where unknown.

        Args:
          choice: what `next` has just given.
        """
        promise = self._known[2].get(choice) if self._known else None
        return promise.drafts if promise else 0.0

    def scale(self, width: int) -> float:
        """Drafts accepted of those predicted, in steps of this width."""
        return self._own.get(width, _Ratio()).value(self._pooled.value(prior=1.0))

    def look(
        self,
        *,
        requests: int,
        anchors: float,
        gain_MR: np.ndarray,
        full_M: np.ndarray,
    ) -> None:
        """Takes in what the plan of a step saw, before its outcome is known.

        Args:
          requests: how many were in it.
          anchors: the sum of their weights; without weights, their number.
          gain_MR: weighted gain of every tier at every drafting width, NaN beyond the
            width that was drafted.
          full_M: drafts expected to be accepted if all were verified, none weighted.
        """
        if requests <= 0:
            return
        if not self._looks:
            kept = int(np.clip(_LOOK_REQUESTS / requests, _FEWEST_LOOKS, _MOST_LOOKS))
            self._looks_kept = kept
        self._requests = requests
        share_MR = gain_MR / anchors
        for m, share_R in enumerate(share_MR):
            if not np.isnan(share_R[0]):
                if m not in self._looks:
                    self._looks[m] = _Looks(self._looks_kept, share_R.size)
                base, accepted = float(share_MR[0, -1]), full_M[m] / requests
                self._shown[m] = self._shown.get(m, 0.0) + requests
                self._looks[m].add(self._step, requests, share_R, base, accepted)
        self._tell()

    def outcome(
        self,
        choice: Choice,
        *,
        requests: int,
        predicted: float | None,
        accepted: float,
        worth: float | None = None,
    ) -> None:
        """Takes in a finished step that drafted.

        Args:
          choice: what ran.
          requests: how many were in it.
          predicted: drafts that its plan expected to be accepted; None without one.
          accepted: drafts that were.
          worth: tokens per anchor, both weighted as `look` was; None without weights.
        """
        if choice.planned and choice.width in self._charged:
            charge = self._charged.pop(choice.width)
            worth = 1 + accepted / requests if worth is None else worth
            settled_ms = self._budget_ms[choice.width] + charge.refund(worth)
            self._budget_ms[choice.width] = max(settled_ms, charge.least_ms)
        if predicted is None:
            predicted = requests * self._full_gain(choice.width)
        if predicted > 0:
            own = self._own.setdefault(choice.width, _Ratio())
            own.add(requests, accepted, predicted)
            self._pooled.add(requests, accepted, predicted)
            self._tell()

    def withdraw(self, width: int) -> None:
        """No outcome will come of a planned step; what was paid for it comes back."""
        if width in self._charged:
            self._budget_ms[width] += self._charged.pop(width).paid_ms

    def _tell(self) -> None:
        """Something new is known; promises are reckoned anew once it is enough."""
        self._news += 1
        looks = max((looks.count for looks in self._looks.values()), default=0)
        if self._news * _NEWS >= looks:
            self._known = None

    def _full_gain(self, width: int) -> float:
        """Expected accepted drafts per request of a step that verifies them all."""
        looks = self._looks.get(self.drafting.index(width))
        if looks is None:
            return 0.0
        return float(looks.weight_J(self._requests) @ looks.accepted_J)


def _drafts_nothing(choice: Choice) -> bool:
    return choice.width == 0


def _plans_nothing(choice: Choice) -> bool:
    return choice.width > 0 and not choice.planned


def _plans(choice: Choice) -> bool:
    return choice.planned
