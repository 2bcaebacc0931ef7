"""Inputs that every backend must agree on, and that benches time."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float32, Int32

# Most cases share one shape, as every shape is a compilation.
SMALL = (5, 7)
DENORMAL = np.float32(1e-45)  # the smallest float above 0


@dataclass(frozen=True)
class Case:
    """One call of `budget_topk`."""

    name: str
    log_survival_BK: Float32[np.ndarray, "B K"]
    active_B: Bool[np.ndarray, "B"]
    budget_R: Int32[np.ndarray, "R"]


def case(name: str, log_survival_BK: np.ndarray, active: object = True) -> Case:
    """A case with eight budgets, from below none to above all."""
    batch, drafts = log_survival_BK.shape
    total = batch * drafts
    budgets = [-3, 0, 1, total // 4, total // 2, total - 1, total, total + 5]
    return Case(
        name,
        log_survival_BK.astype(np.float32),
        np.broadcast_to(np.asarray(active, bool), (batch,)),
        np.asarray(budgets, np.int32),
    )


def falling(batch: int, drafts: int) -> np.ndarray:
    """Log-survivals as a drafter gives them."""
    confidence_BK = np.random.default_rng(0).uniform(0.2, 1.0, (batch, drafts))
    return np.cumsum(np.log(confidence_BK), axis=1).astype(np.float32)


def with_column(column: slice, value: float, rows: slice) -> np.ndarray:
    """Falling rows, some of them overwritten."""
    log_survival_BK = falling(*SMALL)
    log_survival_BK[rows, column] = value
    return log_survival_BK


def widest() -> Case:
    """The kernel's limits, all at once."""
    budget_R = np.linspace(0, 512 * 31, 16).astype(np.int32)
    return Case("widest", falling(512, 31), np.ones(512, bool), budget_R)


steps_BK = np.broadcast_to(np.arange(SMALL[1]), SMALL)  # 0, 1, ..., K - 1 in each row

CASES = (
    case("one_draft", falling(1, 1)),
    case("one_request", falling(1, 15)),
    case("typical", falling(16, 15)),
    case("more_requests_than_lanes", falling(130, 7)),
    widest(),
    case("small", falling(*SMALL)),
    case("ties_across_requests", -steps_BK),
    case("ties_along_requests", -(steps_BK // 3)),
    case("all_equal", np.zeros(SMALL)),
    case("signed_zeros", np.where(steps_BK % 2, 0.0, -0.0)),
    case("zero_survival", np.full(SMALL, -np.inf)),
    case(
        "zero_survival_tails", with_column(slice(3, None), -np.inf, slice(0, None, 2))
    ),
    case("nan_tails", with_column(slice(4, None), np.nan, slice(1, None, 2))),
    case("nan_heads", with_column(slice(0, 1), np.nan, slice(0, 2))),
    case("nan_amid", with_column(slice(2, 3), np.nan, slice(1, 4))),
    case("all_nan", np.full(SMALL, np.nan)),
    case("denormal_logs", -steps_BK * DENORMAL),
    case("denormal_survivals", -88 - 2.0 * steps_BK),
    case("inactive_rows", falling(*SMALL), [True, False, True, False, True]),
    case("all_inactive", falling(*SMALL), False),
    case("rising_rows", falling(*SMALL)[:, ::-1]),
    case("rise_after_fall", with_column(slice(3, 4), -0.01, slice(0, None, 2))),
)
