"""Sequential temperature scaling: an offline fit that makes confidences add up.

What a plan goes by is the product of confidences up to a draft. Confidences that are
each a little off make products that are far off. So one temperature per position is
fitted, position after position: each divides its position's log-odds such that the
product up to there, with the temperatures before it held fixed, meets how often the
whole prefix was accepted. A temperature keeps the order of drafts within a position.

Decoding itself calibrates online, in `cut.calibration`; this judges a trained drafter's
confidences on data at rest (`train eval`). NumPy alone.

Source: DSpark (arXiv 2607.05147), sequential temperature scaling: temperatures from a
grid, by the calibration error. The grid and the choice among equals are our own, the 20
bins those of deepseek-ai/DeepSpec's evaluation (`eval/dspark/evaluator.py`).
"""

from dataclasses import dataclass

import numpy as np

GRID = 2.0 ** (np.arange(-48, 49) / 16)  # from 1/8 to 8; its middle is 1
BINS = 20


def fit_temperatures(
    logit_NK: np.ndarray, accepted_N: np.ndarray, grid: np.ndarray = GRID
) -> np.ndarray:
    """Fits a temperature per position, `[K]`, the first position first.

    Args:
      logit_NK: log-odds that a draft is accepted once those before it are, as a
        confidence head gives them. A NaN stands for a draft that was not verified; it
        and those behind it do not count.
      accepted_N: length of each accepted prefix, 0..K.
      grid: temperatures to choose from, all above 0.

    Returns:
      Of temperatures with the same error the nearest to 1, by ratio; 1 where a
      position has no draft that counts.

    Raises:
      ValueError: shapes do not fit, or `grid` is empty or not positive.
    """
    _check(logit_NK, accepted_N)
    grid = np.asarray(grid, np.float64)
    if grid.ndim != 1 or not grid.size or not (np.isfinite(grid) & (grid > 0)).all():
        raise ValueError(f"expected a list of temperatures above 0; found {grid}")
    by_nearness = grid[np.argsort(np.abs(np.log(grid)), kind="stable")]
    before_N = np.ones(len(logit_NK))
    temperature_K = np.ones(logit_NK.shape[1])
    for k in range(logit_NK.shape[1]):
        yes_N = accepted_N > k
        if np.isnan(before_N * logit_NK[:, k]).all():
            break  # nor does any behind it count
        chances = (before_N * _sigmoid(logit_NK[:, k] / t) for t in by_nearness)
        errors = [_error(chance_N, yes_N) for chance_N in chances]
        temperature_K[k] = by_nearness[int(np.argmin(errors))]
        before_N = before_N * _sigmoid(logit_NK[:, k] / temperature_K[k])
    return temperature_K


def prefix_chance(logit_NK: np.ndarray, temperature_K: np.ndarray) -> np.ndarray:
    """The chance `[N, K]` that a draft and all before it are accepted.

    Never rises along a row; NaN from the first NaN of a row on.
    """
    return np.cumprod(_sigmoid(logit_NK / temperature_K), axis=1)


def prefix_error(
    logit_NK: np.ndarray, accepted_N: np.ndarray, temperature_K: np.ndarray
) -> np.ndarray:
    """Expected calibration error `[K]` of `prefix_chance`, position by position.

    The mean distance of predicted from real chances, over equal bins of the predicted,
    each by its count; noise in bins with few drafts adds to it. NaN where no draft
    counts. Arguments and errors as for `fit_temperatures`.
    """
    _check(logit_NK, accepted_N)
    chance_NK = prefix_chance(logit_NK, temperature_K)
    return np.array(
        [_error(chance_N, accepted_N > k) for k, chance_N in enumerate(chance_NK.T)]
    )


@dataclass(frozen=True)
class Scaling:
    """What temperatures do for texts that they were not fitted on, by position.

    Attributes:
      temperatures: fitted on all texts; those to use.
      drafts: how many count.
      before, after: `prefix_error` of the chances as they are, and with temperatures:
        each half of the texts with those of the other half, both by their drafts. NaN
        where no draft counts.
    """

    temperatures: tuple[float, ...]
    drafts: tuple[int, ...]
    before: tuple[float, ...]
    after: tuple[float, ...]

    @property
    def error_before(self) -> float:
        """The mean of `before` over all drafts; NaN where there is none."""
        return _mean(np.array(self.before), np.array(self.drafts))

    @property
    def error_after(self) -> float:
        """The mean of `after` over all drafts; NaN where there is none."""
        return _mean(np.array(self.after), np.array(self.drafts))


def cross_fit(
    logit_NK: np.ndarray, accepted_N: np.ndarray, second_N: np.ndarray
) -> Scaling:
    """Fits temperatures on each half of some blocks, and judges them on the other.

    Args:
      logit_NK, accepted_N: as for `fit_temperatures`.
      second_N: which blocks are of the second half. Blocks of one text belong
        together: they are much alike.

    Raises:
      ValueError: shapes do not fit, or a half is empty.
    """
    _check(logit_NK, accepted_N)
    if second_N.shape != accepted_N.shape or second_N.all() or not second_N.any():
        raise ValueError(
            f"expected {len(accepted_N)} blocks in two halves; found "
            f"{int(second_N.sum())} of {second_N.size} in the second"
        )
    parts = (~second_N, second_N)
    halves = [(logit_NK[part_N], accepted_N[part_N]) for part_N in parts]
    plain_K = np.ones(logit_NK.shape[1])
    count_HK = np.array([_counting(logit_NK) for logit_NK, _ in halves])
    before_HK = np.array([prefix_error(*half, plain_K) for half in halves])
    after_HK = np.array(
        [
            prefix_error(*half, fit_temperatures(*other))
            for half, other in zip(halves, reversed(halves), strict=True)
        ]
    )

    def both(error_HK: np.ndarray) -> tuple[float, ...]:
        pairs = zip(error_HK.T, count_HK.T, strict=True)
        return tuple(_mean(error_H, count_H) for error_H, count_H in pairs)

    return Scaling(
        temperatures=tuple(fit_temperatures(logit_NK, accepted_N).tolist()),
        drafts=tuple(count_HK.sum(axis=0).tolist()),
        before=both(before_HK),
        after=both(after_HK),
    )


def _counting(logit_NK: np.ndarray) -> np.ndarray:
    """How many drafts count, `[K]`."""
    return (~np.isnan(np.cumsum(np.abs(logit_NK), axis=1))).sum(axis=0)


def _mean(error_X: np.ndarray, count_X: np.ndarray) -> float:
    """The mean by counts; NaN where they are all 0."""
    if not count_X.sum():
        return float("nan")
    return float(np.sum(np.where(count_X > 0, error_X, 0) * count_X) / count_X.sum())


def _check(logit_NK: np.ndarray, accepted_N: np.ndarray) -> None:
    if logit_NK.ndim != 2 or accepted_N.shape != logit_NK.shape[:1]:
        raise ValueError(
            f"expected log-odds [N, K] and accepted lengths [N]; found "
            f"{list(logit_NK.shape)} and {list(accepted_N.shape)}"
        )
    if ((accepted_N < 0) | (accepted_N > logit_NK.shape[1])).any():
        raise ValueError(
            f"accepted lengths must lie in 0..{logit_NK.shape[1]}; found "
            f"{accepted_N.min()}..{accepted_N.max()}"
        )


def _sigmoid(x: np.ndarray) -> np.ndarray:
    """Without overflow, and float64 whatever the input; NaN stays NaN."""
    small = np.exp(-np.abs(np.asarray(x, np.float64)))
    return np.where(x >= 0, 1.0, small) / (1 + small)


def _error(chance_N: np.ndarray, yes_N: np.ndarray) -> float:
    known_N = ~np.isnan(chance_N)
    if not known_N.any():
        return float("nan")
    p_N, yes_N = chance_N[known_N], yes_N[known_N]
    bin_N = np.minimum((p_N * BINS).astype(int), BINS - 1)
    gap_X = np.bincount(bin_N, p_N - yes_N, BINS)
    return float(np.abs(gap_X).sum() / len(p_N))
