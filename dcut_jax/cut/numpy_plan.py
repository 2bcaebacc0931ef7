"""The same plan in plain NumPy, for engines that do not run on JAX."""

from fractions import Fraction
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

Objective = Literal["tokens", "paper"]

# Fine enough for any ratio in decimals, and with 512 blocks of 32 rows below 2**31.
FINEST_RATIO = 10_000


class NumpyPlan(NamedTuple):
    """The decision for one step; the fields of `Plan`."""

    keep_B: np.ndarray  # int32, drafts to verify, the first ones of each request
    tier: int  # index of the chosen tier
    budget: int  # drafts kept: the sum of keep_B
    gain: float  # drafts expected to be accepted
    utility_R: np.ndarray  # float64, tokens per ms; -inf where a tier is too narrow


def plan_numpy(
    log_survival_BK: Any,
    active_B: Any,
    rows_R: Any,
    cost_ms_R: Any,
    *,
    objective: Objective = "tokens",
    ratios: tuple[float, ...] | None = None,
) -> NumpyPlan:
    """Picks the tier that yields most per millisecond, and the drafts that fill it.

    Takes anything that `np.asarray` takes, and decides as `dcut_jax.cut.plan` does; see
    there for ranges and rules. Gains are summed in float64, so utilities closer than
    float32 rounding may be told apart here and not there.

    Raises:
      ValueError: shapes that do not belong together, tiers that do not rise or cannot
        hold the anchors, a cost that is not finite and above 0, an unknown objective,
        or ratios that are not one per tier and in (0, 1].
    """
    survival_BK = np.asarray(log_survival_BK, np.float32)
    active_B = np.asarray(active_B, bool)
    rows_R, cost_ms_R = np.asarray(rows_R), np.asarray(cost_ms_R, np.float64)
    check_inputs(survival_BK, active_B, rows_R, cost_ms_R)
    check_options(objective, ratios, tiers=rows_R.size)

    active = int(active_B.sum())
    ranked = rank(survival_BK, active_B)
    # gains[m]: sum of the m best survivals.
    gains = np.append(0.0, np.cumsum(np.exp(ranked.value_N, dtype=np.float64)))
    selectable = ranked.owner_N.size
    if ratios is None:
        budget_R = np.minimum(rows_R - active, selectable)
    else:
        over_R, under_R = (np.asarray(n) for n in ratio_fractions(ratios))
        width = survival_BK.shape[1] + 1
        wanted_R = -(-active * width * over_R // under_R) - active
        budget_R = np.clip(wanted_R, 0, selectable)

    fits_R = (budget_R >= 0) & (active + budget_R <= rows_R)
    budget_R = np.where(fits_R, budget_R, 0)
    anchors = active if objective == "tokens" else 0
    utility_R = np.where(fits_R, (anchors + gains[budget_R]) / cost_ms_R, -np.inf)
    tier = int(np.argmax(utility_R))  # the first, so the narrowest
    budget = int(budget_R[tier])
    keep_B = np.bincount(ranked.owner_N[:budget], minlength=active_B.size)
    return NumpyPlan(
        keep_B=keep_B.astype(np.int32),
        tier=tier,
        budget=budget,
        gain=float(gains[budget]),
        utility_R=utility_R,
    )


class Ranking(NamedTuple):
    """All drafts that may be kept, best first."""

    owner_N: np.ndarray
    value_N: np.ndarray


def rank(survival_BK: np.ndarray, active_B: np.ndarray) -> Ranking:
    """By value, then earlier position, then lower request. Rows are made to fall."""
    falling_KB = np.minimum.accumulate(survival_BK, axis=1).T  # NaN spreads to the end
    usable_KB = ~np.isnan(falling_KB) & active_B
    value_N = falling_KB[usable_KB]
    order_N = np.argsort(-value_N, kind="stable")
    return Ranking(np.nonzero(usable_KB)[1][order_N], value_N[order_N])


def ratio_fractions(ratios: tuple[float, ...]) -> tuple[list[int], list[int]]:
    """Numerators and denominators of ratios, read as decimals: 0.1 is 1 / 10."""
    fractions = [Fraction(ratio).limit_denominator(FINEST_RATIO) for ratio in ratios]
    return [f.numerator for f in fractions], [f.denominator for f in fractions]


def check_inputs(
    survival_BK: np.ndarray,
    active_B: np.ndarray,
    rows_R: np.ndarray,
    cost_ms_R: np.ndarray,
) -> None:
    """Raises for arrays that no plan can be made from."""
    if survival_BK.ndim != 2 or active_B.shape != survival_BK.shape[:1]:
        raise ValueError(
            f"expected log_survival_BK [B, K] and active_B [B], got "
            f"{survival_BK.shape} and {active_B.shape}"
        )
    if rows_R.ndim != 1 or not rows_R.size or cost_ms_R.shape != rows_R.shape:
        raise ValueError(
            f"expected rows_R and cost_ms_R of one length R >= 1, got shapes "
            f"{rows_R.shape} and {cost_ms_R.shape}"
        )
    if not np.issubdtype(rows_R.dtype, np.integer) or (np.diff(rows_R) <= 0).any():
        raise ValueError(
            f"expected whole, strictly rising rows_R, got {rows_R.tolist()}; "
            f"sort the tiers and drop duplicates, with their costs"
        )
    if rows_R[-1] < active_B.sum():
        raise ValueError(
            f"the widest tier has {rows_R[-1]} rows, but {active_B.sum()} requests are "
            f"active; add a tier that holds one row of each"
        )
    if not (np.isfinite(cost_ms_R) & (cost_ms_R > 0)).all():
        raise ValueError(
            f"expected finite costs above 0 ms, got {cost_ms_R.tolist()} for tiers of "
            f"{rows_R.tolist()} rows; measure the missing ones"
        )


def check_options(
    objective: str, ratios: tuple[float, ...] | None, *, tiers: int
) -> None:
    """Raises for options that make no sense, alone or for this many tiers."""
    if objective not in get_args(Objective):
        raise ValueError(
            f"{objective=} is unknown; choose one of {get_args(Objective)}"
        )
    if ratios is not None and (
        len(ratios) != tiers or not all(0 < ratio <= 1 for ratio in ratios)
    ):
        raise ValueError(
            f"expected {tiers} ratios in (0, 1], one per tier, got {ratios}"
        )
