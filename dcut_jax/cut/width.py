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
    """Picks the draft width with the best expected tokens per ms.

    A step of width `w` shows what the plan would have been worth at every width up to
    `w` (its utility, tokens per ms). Widths are compared within a step, as ratios to
    the narrowest one's utility: how easy the texts happened to be then cancels.
    Confidences are not acceptance rates, so each width's predictions are scaled by what
    steps of that width really committed, shrunk to all widths' scale. Nothing of the
    current step's drafts enters its own width.

    Attributes:
      widths: the ladder, rising.
      probe_every: every so many steps the width that ran longest ago is run. Without,
        nothing would be learnt of the widths beyond the current one, nor of how far
        the others' predictions are to be believed.
    """

    widths: tuple[int, ...]
    probe_every: int = 32
    _relative: dict[int, _Mean] = field(default_factory=dict)
    _own: dict[int, _Ratio] = field(default_factory=dict)
    _pooled: _Ratio = field(default_factory=_Ratio)
    _ran: dict[int, int] = field(default_factory=dict)
    _step: int = 0

    def __post_init__(self) -> None:
        if not self.widths or list(self.widths) != sorted(set(self.widths)):
            raise ValueError(f"widths must rise; found {self.widths}")
        if self.widths[0] < 1:
            raise ValueError(f"a width is at least 1 draft; found {self.widths[0]}")
        if self.probe_every < 1:
            raise ValueError(
                f"probe_every must be at least 1; found {self.probe_every}"
            )

    def next(self) -> int:
        """The width of the coming step."""
        step, self._step = self._step, self._step + 1
        if step < len(self.widths):  # each once, the widest first
            width = self.widths[-1 - step]
        elif step % self.probe_every == 0:
            width = min(self.widths, key=self._ran.__getitem__)
        else:
            width = max(self.widths, key=self.expected)
        self._ran[width] = step
        return width

    def expected(self, width: int) -> float:
        """Expected tokens per ms, relative to what the narrowest width promises.

        0 before anything is known of the width.
        """
        pooled = self._pooled.value(prior=1.0)
        own = self._own.get(width, _Ratio())
        return self._relative.get(width, _Mean()).value() * own.value(prior=pooled)

    def observe(
        self,
        width: int,
        utilities: Mapping[int, float],
        predicted: float,
        committed: float,
    ) -> None:
        """Takes in one finished step.

        Args:
          width: the width it ran.
          utilities: predicted tokens per ms of its best plan at each width up to
            `width`, the narrowest included.
          predicted, committed: tokens of the plan that ran, expected and real.
        """
        narrowest = utilities[self.widths[0]]
        if narrowest > 0:
            for w, utility in utilities.items():
                self._relative.setdefault(w, _Mean()).add(utility / narrowest)
        self._own.setdefault(width, _Ratio()).add(committed, predicted)
        self._pooled.add(committed, predicted)
