"""Corrects measured costs by the time that real steps take.

Imports nothing but NumPy and the standard library.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

# Standard deviation of what a table says of a piece of work, as a log ratio: it was
# measured once, while the machine was so fast.
_TABLE_SPREAD = 0.15
# Of the time of one step, beside its neighbour's.
_STEP_SPREAD = 0.1
# A correction drifts by this much per step that tells something of it.
_DRIFT = 0.003
# No correction is beyond this: a table that is worse has to be made anew.
MOST_FACTOR = 2.0
_MOST = math.log(MOST_FACTOR)
# Weight of a step in the present slowdown: it remembers about twenty.
_SLOWDOWN_RATE = 0.05
# Beyond this, in standard deviations, a surprise is an accident: something else ran.
# Unless the next comparison is one as well; then the table is very wrong.
_ACCIDENT = 3.0
# Factors are told anew once one has moved by this much, as a log ratio.
_TELL = 0.005

Work = tuple[str, int, int]  # kind and two sizes, as the engine names its executables


@dataclass
class _Belief:
    """Log of real over measured time, and how unsure it is."""

    log: float = 0.0
    variance: float = _TABLE_SPREAD**2
    told: float = 0.0  # as of the last version


@dataclass
class Correction:
    """Factors on the measured times of single pieces of work.

    How fast a machine is changes from minute to minute, and by more than the pieces
    differ. So a step is compared with the one just before it only: what both share
    cancels, the machine's present slowdown with it. Two neighbours that ran different
    work show how the costs of that work compare, which is all that a choice among
    them needs; steps that run the same work for ever show nothing, and change nothing.

    Each surprise is split among the pieces of both steps by how much of the time they
    are and how unsure they still are: a Kalman filter with a variance per piece.

    Attributes:
      version: rises once a factor has changed by half a percent: whoever reckons with
        them need not do so anew at every step.
    """

    version: int = 0
    _beliefs: dict[Work, _Belief] = field(default_factory=dict)
    _log_slowdown: float = 0.0
    _steps: int = 0
    _last: tuple[dict[Work, float], float] | None = None  # what ran, and how long
    _suspects: bool = False

    def factor(self, work: Work) -> float:
        """Real over measured time of a piece of work, relative to the others."""
        belief = self._beliefs.get(work)
        return math.exp(belief.log) if belief else 1.0

    @property
    def slowdown(self) -> float:
        """How much longer than its corrected cost a step takes of late."""
        return math.exp(self._log_slowdown)

    def forget_last(self) -> None:
        """The next step has no neighbour: something else ran in between."""
        self._last = None

    def observe(self, measured_ms: Mapping[Work, float], ms: float) -> None:
        """Takes in one step.

        Args:
          measured_ms: the pieces of work it ran, and what the table says of each, not
            corrected.
          ms: how long it took.
        """
        if not (ms > 0 and measured_ms and min(measured_ms.values()) > 0):
            self._last = None
            return
        last, self._last = self._last, (dict(measured_ms), ms)
        residual, shares = self._compare(measured_ms, ms)
        self._steps += 1
        rate = max(_SLOWDOWN_RATE, 1 / self._steps)
        change = min(max(residual - self._log_slowdown, -_MOST), _MOST)
        self._log_slowdown += rate * change
        if last is None:
            return
        before, old_shares = self._compare(*last)
        tilt = {
            work: shares.get(work, 0.0) - old_shares.get(work, 0.0)
            for work in shares.keys() | old_shares.keys()
        }
        if max(map(abs, tilt.values())) > 0.05:
            self._learn(residual - before, tilt)

    def _compare(
        self, measured_ms: Mapping[Work, float], ms: float
    ) -> tuple[float, dict[Work, float]]:
        """Log of a step's time over what it was to be, and the shares of its pieces."""
        expected = {work: t * self.factor(work) for work, t in measured_ms.items()}
        total = sum(expected.values())
        return math.log(ms / total), {w: t / total for w, t in expected.items()}

    def _learn(self, surprise: float, tilt: Mapping[Work, float]) -> None:
        beliefs = {w: self._beliefs.setdefault(w, _Belief()) for w in tilt}
        for belief in beliefs.values():
            belief.variance += _DRIFT**2
        spread = sum(h * h * beliefs[w].variance for w, h in tilt.items())
        variance = spread + 2 * _STEP_SPREAD**2
        bound = _ACCIDENT * math.sqrt(variance)
        if abs(surprise) > bound:
            self._last = None  # or its neighbour would tell of it once more
            self._suspects, again = True, self._suspects
            if not again:
                return
            surprise = math.copysign(bound, surprise)
        else:
            self._suspects = False
        for work, h in sorted(tilt.items()):
            belief = beliefs[work]
            gain = belief.variance * h / variance
            belief.log = min(max(belief.log + gain * surprise, -_MOST), _MOST)
            belief.variance *= 1 - gain * h
        if any(abs(belief.log - belief.told) > _TELL for belief in beliefs.values()):
            self.version += 1
            for belief in self._beliefs.values():
                belief.told = belief.log
