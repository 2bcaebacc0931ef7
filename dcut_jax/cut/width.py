"""How many drafts to ask for, from statistics of earlier steps."""

from collections.abc import Mapping
from dataclasses import dataclass, field

# Weight of a step in the running means: they remember about twenty steps.
_RATE = 0.05
# Steps' worth of trust in the prior before there is evidence; it fades as that comes.
_PRIOR_STEPS = 8.0


@dataclass
class _Ratio:
    """Committed over predicted tokens, both decayed."""

    committed: float = 0.0
    predicted: float = 0.0
    steps: float = 0.0
    prior_steps: float = _PRIOR_STEPS

    def add(self, committed: float, predicted: float) -> None:
        keep = 1 - _RATE
        self.committed = self.committed * keep + committed
        self.predicted = self.predicted * keep + predicted
        self.steps = self.steps * keep + 1
        self.prior_steps *= keep

    def value(self, prior: float) -> float:
        """The ratio, shrunk to `prior` while there is little evidence."""
        if self.predicted == 0:
            return prior
        scale = self.predicted / self.steps * self.prior_steps
        return (self.committed + prior * scale) / (self.predicted + scale)


@dataclass
class _Mean:
    """A running mean that forgets; of few values it is their plain mean."""

    total: float = 0.0
    weight: float = 0.0

    def add(self, value: float) -> None:
        self.total = self.total * (1 - _RATE) + value
        self.weight = self.weight * (1 - _RATE) + 1

    def value(self) -> float:
        return self.total / self.weight if self.weight else 0.0


@dataclass
class WidthChooser:
    """Picks the draft width with the best expected tokens per ms; 0 is plain decoding.

    A step of width `w` shows what the plan would have been worth at every width up to
    `w` (its utility, tokens per ms). Widths are compared within a step, as ratios to
    the narrowest one's utility: how easy the texts happened to be then cancels.
    Confidences are not acceptance rates, so each width's predictions are scaled by what
    steps of that width really committed, shrunk to all widths' scale. Nothing of the
    current step's drafts enters its own width.

    Every width is run once, the widest first. After that the best runs, and of the
    others now and then one that has not run for long: without, nothing would be learnt
    of the widths beyond the current one, nor of how far the others' predictions are to
    be believed. Probes are paid for from a fixed share of the time, an equal part for
    each width, so one that costs much is rare.

    Attributes:
      widths: the ladder, rising. With 0 in it, a step of 0 promises exactly one token
        per request, and needs no look.
      probe_every: steps after which a width is due for a probe.
      probe_share: of the time, what probes may lose against the best width.
    """

    widths: tuple[int, ...]
    probe_every: int = 32
    probe_share: float = 0.01
    _relative: dict[int, _Mean] = field(default_factory=dict)
    _ms: dict[int, _Mean] = field(default_factory=dict)
    _own: dict[int, _Ratio] = field(default_factory=dict)
    _pooled: _Ratio = field(default_factory=_Ratio)
    _ran: dict[int, int] = field(default_factory=dict)
    _step: int = 0
    _credit_ms: dict[int, float] = field(default_factory=dict)

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

    @property
    def drafting(self) -> tuple[int, ...]:
        """The widths that need a look: all but 0."""
        return tuple(w for w in self.widths if w != 0)

    def next(self) -> int:
        """The width of the coming step."""
        step, self._step = self._step, self._step + 1
        width = self._pick(step)
        self._ran[width] = step
        return width

    def _pick(self, step: int) -> int:
        if step < len(self.drafting):
            return self.drafting[-1 - step]
        best = max(self.widths, key=self.expected)
        earned_ms = self.probe_share * self._mean_ms(best) / len(self.drafting)
        affordable = []
        for w in self.drafting:
            if w == best:
                continue
            # Each has its own purse: a cheap probe takes nothing from a dear one. It
            # holds one probe, so that no burst follows a long calm spell.
            loss_ms = self._loss_ms(w, best)
            purse_ms = min(self._credit_ms.get(w, 0.0) + earned_ms, loss_ms)
            self._credit_ms[w] = purse_ms
            due = step - self._ran[w] >= self.probe_every
            if due and purse_ms >= loss_ms:
                affordable.append(w)
        if not affordable:
            return best
        probe = min(affordable, key=self._ran.__getitem__)
        self._credit_ms[probe] = 0.0
        return probe

    def _mean_ms(self, width: int) -> float:
        return self._ms.get(width, _Mean()).value()

    def _loss_ms(self, width: int, best: int) -> float:
        """What a step of `width` costs beyond what the best takes for its tokens."""
        most = self.expected(best)
        share = 1 - self.expected(width) / most if most > 0 else 0.0
        return self._mean_ms(width) * share

    def expected(self, width: int) -> float:
        """Expected tokens per ms, relative to what the narrowest width promises.

        0 before anything is known of the width.
        """
        if width == 0:
            return 1.0  # it keeps its promise
        pooled = self._pooled.value(prior=1.0)
        own = self._own.get(width, _Ratio())
        return self._relative.get(width, _Mean()).value() * own.value(prior=pooled)

    def observe(
        self,
        width: int,
        utilities: Mapping[int, float],
        predicted: float,
        committed: float,
        ms: Mapping[int, float],
    ) -> None:
        """Takes in one finished step that drafted.

        Args:
          width: the width it ran.
          utilities: predicted tokens per ms of its best plan at each width up to
            `width`, the narrowest included.
          predicted, committed: tokens of the plan that ran, expected and real.
          ms: costs of the step that ran and, where it is in the ladder, of one of
            width 0.
        """
        narrowest = utilities[self.widths[0]]
        if narrowest > 0:
            for w, utility in utilities.items():
                self._relative.setdefault(w, _Mean()).add(utility / narrowest)
        for w, cost in ms.items():
            self._ms.setdefault(w, _Mean()).add(cost)
        self._own.setdefault(width, _Ratio()).add(committed, predicted)
        self._pooled.add(committed, predicted)
