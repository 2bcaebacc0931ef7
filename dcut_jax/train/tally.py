"""What became of drafts while decoding: acceptance by slot, how true chances are."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from dcut_jax.cut.calibration import (
    Reliability,
    auc,
    ece,
    no_reliability,
    observe,
    table,
)
from dcut_jax.cut.sts import Scaling, cross_fit
from dcut_jax.cut.survival import log_survival
from dcut_jax.decode.state import HostOutcome


@dataclass(frozen=True)
class Slot:
    """One place of a block, draft `k`.

    Attributes:
      reached: how often all drafts before it were accepted and the text went so far.
      accepted: how often it was then accepted.
    """

    reached: int
    accepted: int

    @property
    def rate(self) -> float:
        """Conditional acceptance; NaN where the slot was never reached."""
        return self.accepted / self.reached if self.reached else float("nan")


@dataclass(frozen=True)
class Fit:
    """How predicted chances compared with outcomes; see `cut.calibration`.

    Attributes:
      drafts: how many.
      ece, auc: NaN where there is nothing to compare.
      bins: ten equal ones of the prediction: drafts, mean prediction, share that
        happened; both NaN in an empty one.
    """

    drafts: int
    ece: float
    auc: float
    bins: tuple[tuple[int, float, float], ...]

    @classmethod
    def of(cls, rel: Reliability) -> "Fit":
        on_host = jax.device_get(rel)
        bins = tuple((r.drafts, r.predicted, r.survived) for r in table(on_host))
        return cls(int(on_host.count_X.sum()), ece(on_host), auc(on_host), bins)


class Tally:
    """Counts what became of the drafts of fixed-width steps; `Engine.on_drafts`.

    A draft counts as far as the text goes: what the target thinks of drafts behind a
    stop token, or beyond the room that a request has, is nobody's loss.
    """

    def __init__(self, width: int):
        self.width = width
        self._steps: list[tuple[np.ndarray, ...]] = []
        self._text_B = np.zeros(0, int)  # which text a slot decodes, by a number
        self._texts = 0

    def __call__(self, logp_BK: np.ndarray, outcome: HostOutcome) -> None:
        """Takes in one step: log-confidences, NaN beyond the width, and outcome."""
        if not self._texts:
            self._texts = len(outcome.count_B)
            self._text_B = np.arange(self._texts)
        text_B = self._text_B.copy()
        ended = np.flatnonzero(outcome.finished_B)  # another one follows in its slot
        self._text_B[ended] = self._texts + np.arange(len(ended))
        self._texts += len(ended)
        took_part_B = outcome.count_B > 0
        count_B = outcome.count_B[took_part_B]
        accepted_B = outcome.accepted_B[took_part_B]
        # A text that ends inside the accepted drafts says nothing of those behind.
        ended_B = count_B <= accepted_B
        known_B = np.where(ended_B, count_B, self.width)
        logp_BK = logp_BK[took_part_B, : self.width].astype(np.float32)
        accepted_B = np.minimum(accepted_B, count_B)
        self._steps.append((logp_BK, known_B, accepted_B, text_B[took_part_B]))

    def slots(self) -> tuple[Slot, ...]:
        """Conditional acceptance by draft."""
        _, known_N, accepted_N, _ = self._all()
        reached_N = np.minimum(accepted_N + 1, known_N)
        return tuple(
            Slot(int(np.sum(reached_N >= k)), int(np.sum(accepted_N >= k)))
            for k in range(1, self.width + 1)
        )

    def fits(self) -> tuple[Fit, Fit]:
        """How confidences of reached drafts, and survivals of known ones, fit."""
        logp_NK, known_N, accepted_N, _ = self._all()
        draft_1K = 1 + np.arange(self.width)[None]
        reached_NK = draft_1K <= accepted_N[:, None] + 1
        confidence_NK = np.where(reached_NK, np.exp(np.minimum(logp_NK, 0)), np.nan)
        survival_NK = np.exp(np.asarray(log_survival(jnp.asarray(logp_NK))))
        return (
            _fit(confidence_NK, known_N, accepted_N),
            _fit(survival_NK, known_N, accepted_N),
        )

    def scaling(self) -> Scaling | None:
        """What sequential temperature scaling does, fitted on every other text.

        None where there is only one text: none is left to judge it on.
        """
        logp_NK, known_N, accepted_N, text_N = self._all()
        texts = np.unique(text_N)
        if len(texts) < 2:
            return None
        logp_NK = np.minimum(logp_NK.astype(np.float64), 0)
        with np.errstate(divide="ignore"):  # a chance of 1 has infinite odds
            logit_NK = logp_NK - np.log(-np.expm1(logp_NK))
        logit_NK[np.arange(self.width)[None] >= known_N[:, None]] = np.nan
        return cross_fit(logit_NK, accepted_N, np.isin(text_N, texts[1::2]))

    def _all(self) -> list[np.ndarray]:
        """Log-chances, known drafts, accepted drafts and text of every block."""
        return [np.concatenate(part) for part in zip(*self._steps, strict=True)]


def _fit(p_NK: np.ndarray, known_N: np.ndarray, accepted_N: np.ndarray) -> Fit:
    """NaN is not counted."""
    rel, most = no_reliability(), 2048  # rows at a time, for it makes arrays of 50 each
    for first in range(0, len(p_NK), most):
        rows = slice(first, first + most)
        some = (p_NK[rows], known_N[rows], accepted_N[rows])
        rel = observe(rel, *map(jnp.asarray, some))
    return Fit.of(rel)
