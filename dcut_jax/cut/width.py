"""How many drafts to ask for, and whether to plan, from statistics of earlier steps."""

from dataclasses import dataclass, field

import numpy as np

from dcut_jax.cut.choice import PLAIN, Choice, StepCosts
from dcut_jax.cut.evidence import Evidence, Promise
from dcut_jax.cut.probes import Probes

# The widest that can run is looked at first, in so many requests' steps. Fewer would
# lose less where drafts do not pay, and be misled by the start of a text.
FIRST_REQUESTS = 8


@dataclass
class WidthChooser:
    """Picks the step with the best expected yield per ms.

    To choose from: plain decoding (width 0); for each drafting width a step that
    verifies all drafts and plans nothing, and one whose drafts a plan cuts. The first
    two take the executables of plain and of fixed-width decoding, and do no other work.
    Each kind must be worth `margin` more than the best of those before it, and what is
    to replace plain decoding, by its lower estimate: plain decoding yields what it
    yields, but a promise of drafts is a guess, and the best of several guesses is
    most often one that errs upwards. What steps promise is `cut.evidence`'s to say.
    Nothing of a step's own drafts enters its choice.

    The widest width is looked at first; it shows all. What could not run then, beside
    a prompt or under a cap, is looked at once it can. After that the best step runs,
    and now and then (`cut.probes`) a planned step of a width that has drafted none for
    long; a draft is verified in it, or chances once thought too low would never be seen
    to rise.

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
    _step: int = field(default=0, init=False)
    _evidence: Evidence = field(init=False, repr=False)
    _probes: Probes = field(init=False, repr=False)

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
        self._evidence = Evidence(self.drafting)
        self._probes = Probes(
            self.drafting, self.probe_every, self.probe_share, self.costs_err
        )

    @property
    def drafting(self) -> tuple[int, ...]:
        """The widths that need a look: all but 0."""
        return tuple(w for w in self.widths if w != 0)

    def next(
        self,
        costs: StepCosts,
        ease: float = 1.0,
        *,
        requests: int | None = None,
        alone: bool = True,
    ) -> Choice:
        """The coming step's choice.

        Args:
          costs: what steps cost.
          ease: see `Evidence.promises`.
          requests: how many run; None: as many as in the newest look.
          alone: whether nothing goes along; what does hides what a step costs.
        """
        if requests:
            self._evidence.crowd(requests)
        step, self._step = self._step, self._step + 1
        choice = self._pick(step, costs, ease, alone)
        self._probes.took(choice, step, alone)
        return choice

    def _pick(self, step: int, costs: StepCosts, ease: float, alone: bool) -> Choice:
        for m in range(len(self.drafting) - 1, -1, -1):
            new = self._evidence.shown(m) < FIRST_REQUESTS
            if new and costs.verifies(m):
                return Choice(self.drafting[m], planned=True, tries=True)
        promises = self._evidence.lately(costs, ease)
        if 0 not in self.widths:
            promises = {c: p for c, p in promises.items() if c != PLAIN}
        best = self.best({c: p for c, p in promises.items() if not c.tries})
        return self._probes.pick(step, best, promises, alone) or best

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

    def promises(self, costs: StepCosts, ease: float = 1.0) -> dict[Choice, Promise]:
        """See `Evidence.promises`."""
        return self._evidence.promises(costs, ease)

    def expected(self, choice: Choice) -> float:
        """See `Evidence.expected`."""
        return self._evidence.expected(choice)

    def look(
        self,
        *,
        requests: int,
        anchors: float,
        gain_MR: np.ndarray,
        full_M: np.ndarray,
    ) -> None:
        """See `Evidence.look`."""
        self._evidence.look(
            self._step,
            requests=requests,
            anchors=anchors,
            gain_MR=gain_MR,
            full_M=full_M,
        )

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
        if choice.tries and self._probes.owes(choice.width):
            worth = 1 + accepted / requests if worth is None else worth
            self._probes.settle(choice.width, worth)
        self._evidence.outcome(
            choice.width, requests=requests, predicted=predicted, accepted=accepted
        )

    def withdraw(self, choice: Choice) -> None:
        """No outcome will come of a step that was chosen."""
        if choice.tries:
            self._probes.withdraw(choice.width)


def _drafts_nothing(choice: Choice) -> bool:
    return choice.width == 0


def _plans_nothing(choice: Choice) -> bool:
    return choice.width > 0 and not choice.planned


def _plans(choice: Choice) -> bool:
    return choice.planned
