"""The same plan in plain NumPy, for engines that do not run on JAX."""

import math
from fractions import Fraction
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

Objective = Literal["tokens", "paper"]

# Fine enough for any ratio in decimals, and with 512 blocks of 32 rows below 2**31.
FINEST_RATIO = 10_000
# The log of a chance just below 1: where a draft stands that something must precede.
BELOW_CERTAIN = -1e-6
# Of the integers that stand for survivals; see `survival_units`.
GAIN_BITS, LOG_BITS, LOG_LIMIT, LOW_BITS, ONE = 17, 20, 16, 12, 1 << 24


class NumpyPlan(NamedTuple):
    """The decision for one step; the fields of `Plan`."""

    keep_B: np.ndarray  # int32, drafts to verify, the first ones of each request
    tier: int  # index of the chosen tier
    budget: int  # drafts kept: the sum of keep_B
    gain: float  # drafts expected to be accepted, none weighted
    gain_R: np.ndarray  # float32, weighted, in each tier that holds the anchors
    utility_R: np.ndarray  # float32, tokens per ms; -inf where a tier is too narrow


def plan_numpy(
    log_survival_BK: Any,
    active_B: Any,
    rows_R: Any,
    cost_ms_R: Any,
    *,
    weight_B: Any = None,
    due_B: Any = None,
    objective: Objective = "tokens",
    ratios: tuple[float, ...] | None = None,
) -> NumpyPlan:
    """Picks the tier that yields most per millisecond, and the drafts that fill it.

    Takes anything that `np.asarray` takes, and decides as `dcut_jax.cut.plan` does, bit
    for bit where no request is weighted or due; see there for ranges and rules. (A
    weight enters by its logarithm, and logarithms differ from library to library.)

    Raises:
      ValueError: shapes that do not belong together, tiers that do not rise or cannot
        hold the anchors, a cost that is not above 0 (infinite: that tier cannot
        be chosen; at least one can), weights that are not in (0, 1], an unknown
        objective, or ratios that are not one per tier and in (0, 1].
    """
    survival_BK = np.asarray(log_survival_BK, np.float32)
    active_B = np.asarray(active_B, bool)
    rows_R, cost_ms_R = np.asarray(rows_R), np.asarray(cost_ms_R, np.float32)
    check_inputs(survival_BK, active_B, rows_R, cost_ms_R)
    check_options(objective, ratios, tiers=rows_R.size)

    if weight_B is None:
        weight_B = np.ones(active_B.shape)
    weight_B = np.asarray(weight_B, np.float32)
    due_B = np.zeros_like(active_B) if due_B is None else np.asarray(due_B, bool)
    check_requests(active_B, weight_B, due_B)

    active = int(active_B.sum())
    value_BK = survival_BK + np.log(weight_B)[:, None]
    due_B = due_B & active_B & ~np.isnan(value_BK[:, 0])
    rank_BK = value_BK
    if due_B.any():
        rank_BK = np.minimum(value_BK, np.float32(BELOW_CERTAIN))
        rank_BK[due_B, 0] = BELOW_CERTAIN / 2 * (1 - np.exp(value_BK[due_B, 0]))
    ranked = rank(rank_BK, active_B)
    # gains[m]: sum of what the m first drafts are worth.
    units_N = survival_units(falling(value_BK).T[ranked.place_KB])
    units = np.append(0, np.cumsum(units_N))
    gains = units.astype(np.float32) * np.float32(2.0**-GAIN_BITS)
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
    feasible_R = fits_R & np.isfinite(cost_ms_R)
    roomy_R = feasible_R & (budget_R >= due_B.sum())
    feasible_R = roomy_R if roomy_R.any() else feasible_R
    gain_R = np.where(fits_R, gains[budget_R], np.float32(0))
    anchors = weight_B[active_B].sum() if objective == "tokens" else np.float32(0)
    no_R = np.float32(-np.inf)
    utility_R = np.where(feasible_R, (anchors + gain_R) / cost_ms_R, no_R)
    tier = int(np.argmax(utility_R))  # the first, so the narrowest
    budget = int(budget_R[tier]) if feasible_R.any() else 0
    keep_B = np.bincount(ranked.owner_N[:budget], minlength=active_B.size)
    kept_BK = np.arange(survival_BK.shape[1]) < keep_B[:, None]
    return NumpyPlan(
        keep_B=keep_B.astype(np.int32),
        tier=tier,
        budget=budget,
        gain=float(np.exp(survival_BK[kept_BK], dtype=np.float64).sum()),
        gain_R=gain_R,
        utility_R=utility_R,
    )


class Ranking(NamedTuple):
    """All drafts that may be kept, best first."""

    owner_N: np.ndarray
    place_KB: tuple[np.ndarray, np.ndarray]  # their indices, position first


def rank(survival_BK: np.ndarray, active_B: np.ndarray) -> Ranking:
    """By value, then earlier position, then lower request. Rows are made to fall."""
    falling_KB = falling(survival_BK).T
    usable_KB = ~np.isnan(falling_KB) & active_B
    order_N = np.argsort(-falling_KB[usable_KB], kind="stable")
    draft_N, owner_N = (index_N[order_N] for index_N in np.nonzero(usable_KB))
    return Ranking(owner_N, (draft_N, owner_N))


def survival_units(log_survival: np.ndarray) -> np.ndarray:
    """Survivals in multiples of `2**-GAIN_BITS`, int64, the same everywhere.

    Libraries round exponentials, and sums of floats, each in its own way; with
    integers a tier is chosen alike by all. Bit for bit what
    `pallas_kernels.budget_topk.keys.survival_units` has, which says how it works.
    """
    distance = np.clip(-np.asarray(log_survival, np.float32), 0, LOG_LIMIT)
    steps = (distance * np.float32(1 << LOG_BITS)).astype(np.int64)
    low = steps & ((1 << LOW_BITS) - 1)
    product = ONE - (low << (24 - LOG_BITS)) + ((low * low) >> (2 * LOG_BITS - 23))
    for bit in range(LOW_BITS, LOG_BITS + LOG_LIMIT.bit_length()):
        distant = 2.0 ** (bit - LOG_BITS)
        factor = round(ONE * math.exp(-distant)) if distant < LOG_LIMIT else 0
        upper, lower = factor >> 12, factor & 4095
        cross = (product >> 12) * lower + (product & 4095) * upper
        times = (product >> 12) * upper + (cross >> 12)
        product = np.where((steps >> bit) & 1 == 1, times, product)
    shift = 24 - GAIN_BITS
    return (product + (1 << (shift - 1))) >> shift


def falling(value_BK: np.ndarray) -> np.ndarray:
    """The smallest value so far along each row; NaN spreads to the end."""
    return np.minimum.accumulate(value_BK, axis=1)


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
    fits = survival_BK.ndim == 2 and active_B.shape == survival_BK.shape[:1]
    if not fits or survival_BK.shape[1] < 1:
        raise ValueError(
            f"expected log_survival_BK [B, K], K >= 1, and active_B [B], got "
            f"{survival_BK.shape} and {active_B.shape}"
        )
    if (survival_BK > 0).any():
        raise ValueError(
            f"expected logs of survivals, at most 0, got {np.nanmax(survival_BK)}; "
            f"pass np.log of the chances, summed along each request"
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
    if not (cost_ms_R > 0).all() or not np.isfinite(cost_ms_R).any():
        raise ValueError(
            f"expected costs above 0 ms, one of them finite, got {cost_ms_R.tolist()} "
            f"for tiers of {rows_R.tolist()} rows; measure the missing ones"
        )


def check_requests(
    active_B: np.ndarray, weight_B: np.ndarray, due_B: np.ndarray
) -> None:
    """Raises for weights and marks that are not of these requests."""
    if weight_B.shape != active_B.shape or due_B.shape != active_B.shape:
        raise ValueError(
            f"expected weight_B and due_B like active_B, {active_B.shape}, got "
            f"{weight_B.shape} and {due_B.shape}"
        )
    if not ((weight_B > 0) & (weight_B <= 1)).all():
        raise ValueError(
            f"expected weights in (0, 1], got {weight_B.tolist()}; divide them by the "
            f"largest"
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
