"""Which tier to run, and how many drafts of each request to verify in it."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from dcut_jax.cut.numpy_plan import Objective, check_options, ratio_fractions
from pallas_kernels import Backend
from pallas_kernels.budget_topk import budget_topk


class Plan(NamedTuple):
    """The decision for one step of the whole batch."""

    keep_B: Int32[Array, "B"]  # drafts to verify, the first ones of each request
    tier: Int32[Array, ""]  # index of the chosen tier
    budget: Int32[Array, ""]  # drafts kept: the sum of keep_B
    gain: Float32[Array, ""]  # drafts expected to be accepted
    utility_R: Float32[Array, "R"]  # tokens per ms; -inf where a tier cannot be run


def plan(
    log_survival_BK: Float32[Array, "B K"],
    active_B: Bool[Array, "B"],
    rows_R: Int32[Array, "R"],
    cost_ms_R: Float32[Array, "R"],
    *,
    objective: Objective = "tokens",
    ratios: tuple[float, ...] | None = None,
    backend: Backend = "xla",
) -> Plan:
    """Picks the tier that yields most per millisecond, and the drafts that fill it.

    Every tier gets the best drafts of the batch that it has room for. With A active
    requests (one anchor row each) and an expected gain of G accepted drafts:

    * objective "tokens": (A + G) / cost, the tokens committed per ms;
    * objective "paper": G / cost, D-Cut's own choice. Keeping no draft is worth 0.

    On an exact tie the narrower tier wins. Requests with equal survivals aside, the
    plan does not depend on the order of the batch.

    Args:
      log_survival_BK: see `log_survival`. NaN is never kept, nor anything behind it.
      active_B: an inactive request has no anchor and keeps nothing.
      rows_R: rows of each tier, anchors included, strictly rising. The last must hold
        every anchor.
      cost_ms_R: time of a step in each tier, above 0. A tier with any other cost is
        never chosen; that is an error which the caller raises, outside of jit.
      ratios: with these, one per tier, tier r keeps what the paper keeps at
        `ratios[r]` instead of filling its rows; see `paper_budgets`.
      backend: see `budget_topk`.

    Returns:
      A plan with A + budget <= rows_R[tier]. If no tier can be run: tier 0, nothing
      kept, and -inf throughout `utility_R`.

    Raises:
      ValueError: an unknown objective, or ratios that are not one per tier in (0, 1].

    Source: D-Cut (arXiv 2607.14647), objective U, in draft indexing. The paper's code
    leaves the anchors out of it and has four fixed ratios in place of tiers.
    """
    check_options(objective, ratios, tiers=rows_R.shape[0])
    active_count = jnp.sum(active_B, dtype=jnp.int32)
    selectable = selectable_drafts(log_survival_BK, active_B)
    if ratios is None:
        budget_R = tier_budgets(rows_R, active_B, selectable)
    else:
        width = log_survival_BK.shape[1] + 1
        wanted_R = paper_budgets(ratios, active_count, width)
        budget_R = jnp.minimum(wanted_R, selectable)
    fits_R = (budget_R >= 0) & (active_count + budget_R <= rows_R)
    feasible_R = fits_R & jnp.isfinite(cost_ms_R) & (cost_ms_R > 0)
    budget_R = jnp.where(feasible_R, budget_R, 0)

    topk = budget_topk(log_survival_BK, active_B, budget_R, backend=backend)
    yield_R = topk.gain_R
    if objective == "tokens":
        yield_R += active_count.astype(jnp.float32)
    utility_R = jnp.where(feasible_R, yield_R / cost_ms_R, -jnp.inf)
    tier = jnp.argmax(utility_R).astype(jnp.int32)  # the first, so the narrowest
    keep_B = topk.keep_RB[tier]
    return Plan(
        keep_B=keep_B,
        tier=tier,
        budget=jnp.sum(keep_B, dtype=jnp.int32),
        gain=topk.gain_R[tier],
        utility_R=utility_R,
    )


def selectable_drafts(
    log_survival_BK: Float32[Array, "B K"], active_B: Bool[Array, "B"]
) -> Int32[Array, ""]:
    """How many drafts can be kept: those of active requests, before any NaN."""
    closed_BK = lax.cummax(jnp.isnan(log_survival_BK).astype(jnp.int32), axis=1)
    return jnp.sum((closed_BK == 0) & active_B[:, None], dtype=jnp.int32)


def tier_budgets(
    rows_R: Int32[Array, "R"], active_B: Bool[Array, "B"], selectable: Int32[Array, ""]
) -> Int32[Array, "R"]:
    """Drafts that fill each tier beside the anchors, as far as there are any.

    Negative where a tier is too narrow for the anchors alone.
    """
    return jnp.minimum(rows_R - jnp.sum(active_B, dtype=jnp.int32), selectable)


def paper_budgets(
    ratios: tuple[float, ...], active_count: Int32[Array, ""], block_width: int
) -> Int32[Array, "R"]:
    """Drafts that D-Cut keeps at each ratio: `max(0, ceil(A * D * ratio) - A)`.

    A ratio in (0, 1] is a share of all rows, anchors included, and anchors come first.
    `block_width` is D = K + 1, anchor included. The ceiling is taken in integers: a
    float product can land just above a whole number and cost a draft.

    Source: the reference implementation (vLLM #47131); the text gives another formula.
    """
    over_R, under_R = (np.asarray(n, np.int32) for n in ratio_fractions(ratios))
    rows_R = -(-active_count * block_width * over_R // under_R)
    return jnp.maximum(rows_R - active_count, 0)
