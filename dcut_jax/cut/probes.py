"""When a step is taken that is not the best, and what that may lose."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dcut_jax.cut.choice import PLAIN, Choice
from dcut_jax.cut.evidence import Promise

# Steps' time that a width's budget for probes may save up.
_SAVED_STEPS = 3
# Times `every` after which the narrowest width is probed whatever it costs.
_LONGEST_SPELL = 8
# Steps after which a plain step is due where drafts seem better: only by its side is it
# seen that drafting costs more than was measured.
_PLAIN_EVERY = 8
# Plain steps, between drafting ones, that are taken first whatever they lose: a cost
# that was measured in a bad moment is soon seen to be wrong.
_FIRST_PLAIN = 4


class _Charge(NamedTuple):
    """A probe that was paid for and whose outcome is not known yet."""

    promise: Promise
    best_per_ms: float  # what the best choice would have yielded
    paid_ms: float
    least_ms: float  # how far its budget may fall

    def refund(self, worth: float) -> float:
        """What was paid too much, ms, for a step that yielded `worth` an anchor."""
        return self.paid_ms - (self.promise.ms - worth / self.best_per_ms)


class Probes:
    """Picks probes and keeps their accounts.

    Probes are paid for from a fixed share of the time, an equal part for each width, so
    one that costs much is rare. Each is charged what it is expected to lose, and once
    its outcome is known what it did: promises err, and what they err by would otherwise
    be lost again and again. A width that promises more than plain decoding but not
    safely is tried at once, and for as long as its budget covers what it loses. Plain
    decoding is tried more often (8 steps), unless it is further behind than costs may
    err, and at first in every second step, four times, but not beside a prompt. Only
    it and the narrowest are never left out for longer than eight times `every` steps,
    whatever that costs.

    Args:
      drafting: the widths that draft, rising.
      every, share, costs_err: as `WidthChooser` has them.
    """

    def __init__(
        self, drafting: Sequence[int], every: int, share: float, costs_err: float
    ) -> None:
        self._drafting = tuple(drafting)
        self._every, self._share, self._costs_err = every, share, costs_err
        self._looked: dict[int, int] = {}  # the step that last showed a width
        self._plain = 0  # steps taken alone
        self._budget_ms: dict[int, float] = {}
        self._charged: dict[int, _Charge] = {}

    def took(self, choice: Choice, step: int, alone: bool) -> None:
        """A step was chosen; `alone`: see `WidthChooser.next`."""
        # Beside a prompt a plain step is another piece of work.
        if choice.planned or choice == PLAIN and alone:
            self._looked[choice.width] = step
        self._plain += alone and choice == PLAIN

    def pick(
        self,
        step: int,
        best: Choice,
        promises: Mapping[Choice, Promise],
        alone: bool,
    ) -> Choice | None:
        """A try of a width that is due and paid for, or a plain step; once a step.

        Plain decoding has nothing to show but its time. But what has not run for long
        has the costs of long ago, and these were once compared in a bad moment.

        Args:
          promises: of plain decoding, if it may be tried, of tries, and of the best.
          alone: see `WidthChooser.next`.
        """
        # Nothing is known of the best if it was never looked at, nor then lost.
        most = promises[best].per_ms
        some = [Choice(w, planned=True, tries=True) for w in self._drafting]
        # Beside a prompt a plain step shows nothing of what it costs alone.
        some += [PLAIN] if alone else []
        others = [c for c in some if c in promises and c[:2] != best[:2]]
        parts = max(len(others), len(self._drafting))
        earned_ms = self._share * promises[best].ms / parts
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
            waited = step - self._looked.get(width, -self._every)
            longest = self._every * _LONGEST_SPELL
            forced = width in (0, self._drafting[0]) and waited >= longest
            new = width == 0 and self._plain < _FIRST_PLAIN
            forced |= new and waited >= 2
            # What may be better than plain decoding is tried again once it is known
            # how the last try went, for as long as tries do not lose.
            doubted = best == PLAIN and loss_ms == 0 and width not in self._charged
            every = min(_PLAIN_EVERY, self._every) if width == 0 else self._every
            hopeless = width == 0 and promise.per_ms * self._costs_err <= most
            affordable = budget_ms >= loss_ms and not hopeless
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

    def owes(self, width: int) -> bool:
        """Whether the outcome of a probe of this width is still to be settled."""
        return width in self._charged

    def settle(self, width: int, worth: float) -> None:
        """A probe yielded `worth` an anchor; it is charged what it really lost."""
        charge = self._charged.pop(width)
        settled_ms = self._budget_ms[width] + charge.refund(worth)
        self._budget_ms[width] = max(settled_ms, charge.least_ms)

    def withdraw(self, width: int) -> None:
        """No outcome will come of a probe; what was paid for it comes back."""
        if width in self._charged:
            self._budget_ms[width] += self._charged.pop(width).paid_ms
