"""What earlier steps showed of drafts, and what coming ones promise by that."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dcut_jax.cut.choice import PLAIN, Choice, StepCosts

# What is known of a width rests on about so many requests' steps, however many requests
# are in a step: of one request a single step says next to nothing.
_REQUEST_STEPS = 600
# Looks at a width that count: so many requests' worth of those that run, and between
# these bounds.
_LOOK_REQUESTS = 1024
_FEWEST_LOOKS, _MOST_LOOKS = 20, 256
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
# Accepted drafts that tell as much as the prior. Of exponential weights, about half the
# sum is as good as independent steps.
_PRIOR_DRAFTS = 2 * _DISPERSION / _PRIOR_ERROR**2


class Promise(NamedTuple):
    """What a choice is expected to yield, and its time."""

    per_ms: float  # worth per anchor and ms
    ms: float
    risk: float = 0.0  # one standard error of `per_ms`, as a share of it
    drafts: float = 0.0  # accepted per anchor, if any is kept, of texts as easy as any

    @property
    def safe_per_ms(self) -> float:
        """What it yields if its drafts do worse than expected."""
        return self.per_ms * (1 - self.risk)


class _Looks:
    """What planned steps could have gained at one width, per anchor; the newest ones.

    Rings of arrays: a step must not pay for a loop over hundreds of looks.
    """

    def __init__(self, tiers: int) -> None:
        self._step_J = np.zeros(_MOST_LOOKS)
        self._requests_J = np.ones(_MOST_LOOKS)
        self._share_JR = np.zeros((_MOST_LOOKS, tiers))
        self._base_J = np.zeros(_MOST_LOOKS)
        self._accepted_J = np.zeros(_MOST_LOOKS)
        self._taken = 0
        self._known: tuple[int, np.ndarray] | None = None  # `weight_J`

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
        self._known = None

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

        The newest count most, and those that were as crowded; of a large crowd few are
        enough. Known until the next look, for a step asks for every promise.
        """
        if self._known is not None and self._known[0] == requests:
            return self._known[1]
        kept = np.clip(_LOOK_REQUESTS / requests, _FEWEST_LOOKS, _MOST_LOOKS)
        age_J = (self._taken - 1 - np.arange(self.count)) % _MOST_LOOKS
        step_J = self._step_J[: self.count]
        crowd_J = np.abs(np.log2(self._requests_J[: self.count] / requests))
        halvings_J = (self._step_J.max() - step_J) / _HALF_LIFE
        halvings_J += _CROWD_HALVINGS * crowd_J
        halvings_J[age_J >= kept] = np.inf
        weight_J = np.exp2(halvings_J.min() - halvings_J)
        weight_J /= weight_J.sum()
        self._known = requests, weight_J
        return weight_J


@dataclass
class _Ratio:
    """Accepted over predicted drafts, both decayed, in requests' steps.

    The prior weighs as many drafts as its error says, and fades as evidence comes.
    """

    accepted: float = 0.0
    predicted: float = 0.0
    prior: float = _PRIOR_DRAFTS

    def add(self, requests: float, accepted: float, predicted: float) -> None:
        keep = 1 - min(_MOST_RATE, requests / _REQUEST_STEPS)
        self.accepted = self.accepted * keep + accepted
        self.predicted = self.predicted * keep + predicted
        self.prior *= keep

    def value(self, prior: float) -> float:
        """The ratio, shrunk to `prior` while there is little evidence."""
        return (self.accepted + prior * self.prior) / (self.predicted + self.prior)

    @property
    def error(self) -> float:
        """Relative standard error of the ratio."""
        return _PRIOR_ERROR * (1 + self.accepted / _PRIOR_DRAFTS) ** -0.5


class Evidence:
    """What drafts of each width have yielded, and what steps promise by that.

    A planned step of width `w` shows what every tier would have gained at every width
    up to `w`, of live confidences. Remembered gains are weighed against the costs as
    they are now. How much better one width is than another is asked within steps that
    showed both, so that easy and hard texts cancel. Confidences are not acceptance
    rates, so gains are scaled by what steps of that width really accepted, shrunk to
    all widths' scale.
    """

    def __init__(self, drafting: Sequence[int]) -> None:
        """Nothing is known of these widths, which rise."""
        self._drafting = tuple(drafting)
        self._looks: dict[int, _Looks] = {}
        self._shown: dict[int, float] = {}  # requests' steps looked at
        self._requests = 1  # that promises are for
        self._own: dict[int, _Ratio] = {}
        self._pooled = _Ratio()
        self._known: tuple[StepCosts, float, dict[Choice, Promise]] | None = None
        self._news = 0

    # -- what it promises ----------------------------------------------------------

    def promises(self, costs: StepCosts, ease: float = 1.0) -> dict[Choice, Promise]:
        """What each choice that can be taken is expected to yield, per anchor.

        Who asks changes nothing: of several processes one alone may.

        Args:
          ease: how many more drafts the running requests have accepted than those that
            were looked at, see `cut.ease`.
        """
        found: dict[Choice, Promise] = {}
        for m, width in enumerate(self._drafting):
            if np.isfinite(costs.planned_MR[m]).any():
                found[Choice(width, True)] = self._planned(m, costs.planned_MR[m], ease)
            if np.isfinite(costs.full_M[m]):
                full_ms = float(costs.full_M[m])
                found[Choice(width, False)] = self._full(m, full_ms, ease)
        if np.isfinite(costs.plain_ms):
            found[PLAIN] = Promise(1 / costs.plain_ms, costs.plain_ms)
        return found

    def lately(self, costs: StepCosts, ease: float) -> dict[Choice, Promise]:
        """`promises`, and the same of choices that try; not anew at every step."""
        known = self._known
        if known is None or known[0] is not costs or known[1] != ease:
            found = self.promises(costs, ease)
            trying_MR = costs.verifying().planned_MR
            for m, width in enumerate(self._drafting):
                if Choice(width, planned=True) in found and costs.verifies(m):
                    tried = Choice(width, planned=True, tries=True)
                    found[tried] = self._planned(m, trying_MR[m], ease)
            known = costs, ease, found
            self._known, self._news = known, 0
        return known[2]

    def expected(self, choice: Choice) -> float:
        """Drafts that are accepted of a request as easy as any; 0 where unknown.

        Of a plan: if it keeps any.

        Args:
          choice: what `next` has just given.
        """
        promise = self._known[2].get(choice) if self._known else None
        return promise.drafts if promise else 0.0

    def scale(self, width: int) -> float:
        """Drafts accepted of those predicted, in steps of this width."""
        return self._own.get(width, _Ratio()).value(self._pooled.value(prior=1.0))

    def shown(self, m: int) -> float:
        """Requests' steps in which the `m`-th width was looked at."""
        return self._shown.get(m, 0.0)

    def _planned(self, m: int, cost_ms_R: np.ndarray, ease: float) -> Promise:
        """Promise of the `m`-th drafting width where its tiers cost so much."""
        looks = self._looks.get(m)
        if looks is None:
            return Promise(0.0, float(cost_ms_R.min()))
        weight_J, lately = looks.weight_J(self._requests), self._lately(looks)
        drafts_JR = self.scale(self._drafting[m]) * looks.share_JR
        per_ms_JR = (1 + ease * drafts_JR) / cost_ms_R
        per_ms = float(weight_J @ per_ms_JR.max(axis=1)) * lately
        ms = float(weight_J @ cost_ms_R[per_ms_JR.argmax(axis=1)])
        # A plan goes by what it sees of its drafts, not by the ease of their texts. One
        # that keeps none of them shows nothing of any text, so it must not count here.
        tier_J1 = ((1 + drafts_JR) / cost_ms_R).argmax(axis=1)[:, None]
        drafts_J = np.take_along_axis(drafts_JR, tier_J1, axis=1)[:, 0]
        keeps = float(weight_J[drafts_J > 0].sum())
        drafts = float(weight_J @ drafts_J) / keeps if keeps > 0 else 0.0
        return Promise(
            per_ms, ms, self._risk(m, per_ms * ms), (1 + drafts) * lately - 1
        )

    def _full(self, m: int, cost_ms: float, ease: float) -> Promise:
        """The same where all drafts are verified; they are in the last tier."""
        looks = self._looks.get(m)
        if looks is None:
            return Promise(0.0, cost_ms)
        share = float(looks.weight_J(self._requests) @ looks.share_JR[:, -1])
        drafts, lately = self.scale(self._drafting[m]) * share, self._lately(looks)
        worth = (1 + ease * drafts) * lately
        risk = self._risk(m, worth)
        return Promise(worth / cost_ms, cost_ms, risk, (1 + drafts) * lately - 1)

    def _risk(self, m: int, worth: float) -> float:
        """One standard error of `worth` an anchor, as a share: its drafts may fail."""
        own = self._own.get(self._drafting[m], _Ratio())
        return own.error * max(1 - 1 / worth, 0.0) if worth > 0 else 0.0

    def _lately(self, looks: _Looks) -> float:
        """How much easier the texts of late are than those of these looks.

        Every planned step shows the narrowest width, only some go wide: those say how a
        width compares with the narrowest, and all of them what that one yields.
        """
        late, scale = self._looks[0], self.scale(self._drafting[0])
        if looks is late:
            return 1.0
        now, then = (x.weight_J(self._requests) @ x.base_J for x in (late, looks))
        return (1 + scale * float(now)) / (1 + scale * float(then))

    def _full_gain(self, width: int) -> float:
        """Expected accepted drafts per request of a step that verifies them all."""
        looks = self._looks.get(self._drafting.index(width))
        if looks is None:
            return 0.0
        return float(looks.weight_J(self._requests) @ looks.accepted_J)

    def crowd(self, requests: int) -> None:
        """Promises are for so many requests from now on, and until the next look."""
        if requests != self._requests:
            self._requests, self._known = requests, None

    # -- what it takes in ----------------------------------------------------------

    def look(
        self,
        step: int,
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
        self.crowd(requests)
        share_MR = gain_MR / anchors
        for m, share_R in enumerate(share_MR):
            if not np.isnan(share_R[0]):
                if m not in self._looks:
                    self._looks[m] = _Looks(share_R.size)
                base, accepted = float(share_MR[0, -1]), full_M[m] / requests
                self._shown[m] = self._shown.get(m, 0.0) + requests
                self._looks[m].add(step, requests, share_R, base, accepted)
        self._tell()

    def outcome(
        self, width: int, *, requests: int, predicted: float | None, accepted: float
    ) -> None:
        """Takes in a finished step that drafted; see `WidthChooser.outcome`."""
        if predicted is None:
            predicted = requests * self._full_gain(width)
        if predicted > 0:
            own = self._own.setdefault(width, _Ratio())
            own.add(requests, accepted, predicted)
            self._pooled.add(requests, accepted, predicted)
            self._tell()

    def _tell(self) -> None:
        """Something new is known; promises are reckoned anew once it is enough."""
        self._news += 1
        looks = max((looks.count for looks in self._looks.values()), default=0)
        if self._news * _NEWS >= looks:
            self._known = None
