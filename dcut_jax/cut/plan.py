"""Which tier to run, and how many drafts of each request to verify in it."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from dcut_jax.cut.numpy_plan import (
    BELOW_CERTAIN,
    Objective,
    check_options,
    ratio_fractions,
)
from pallas_kernels.backends import Backend
from pallas_kernels.budget_topk import (
    budget_topk,
    kept_units,
    survival_units,
    units_to_gain,
)


class Plan(NamedTuple):
    """The decision for one step of the whole batch."""

    keep_B: Int32[Array, "B"]  # drafts to verify, the first ones of each request
    tier: Int32[Array, ""]  # index of the chosen tier
    budget: Int32[Array, ""]  # drafts kept: the sum of keep_B
    gain: Float32[Array, ""]  # drafts expected to be accepted, none weighted
    gain_R: Float32[Array, "R"]  # weighted, in each tier that holds the anchors
    utility_R: Float32[Array, "R"]  # tokens per ms; -inf where a tier cannot be run


def plan(
    log_survival_BK: Float32[Array, "B K"],
    active_B: Bool[Array, "B"],
    rows_R: Int32[Array, "R"],
    cost_ms_R: Float32[Array, "R"],
    *,
    weight_B: Float32[Array, "B"] | None = None,
    due_B: Bool[Array, "B"] | None = None,
    objective: Objective = "tokens",
    ratios: tuple[float, ...] | None = None,
    backend: Backend = "xla",
) -> Plan:
    """Picks the tier that yields most per millisecond, and the drafts that fill it.

    Every tier gets the best drafts of the batch that it has room for. With A active
    requests (one anchor row each) and an expected gain of G accepted drafts:

    * objective "tokens": (A + G) / cost, the tokens committed per ms;
    * objective "paper": G / cost, D-Cut's own choice. Keeping no draft is worth 0.

    With weights a token counts as much as its request's weight: A is then the sum of
    the active weights, and a draft ranks by weight times survival. A weight is the same
    all along a request, so what is kept is still a prefix. Weights of 1 change no bit.

    On an exact tie the narrower tier wins. Requests with equal survivals aside, the
    plan does not depend on the order of the batch.

    Args:
      log_survival_BK: see `log_survival`. NaN is never kept, nor anything behind it.
      active_B: an inactive request has no anchor and keeps nothing.
      rows_R: rows of each tier, anchors included, strictly rising. The last must hold
        every anchor.
      cost_ms_R: time of a step in each tier, above 0. A tier with any other cost is
        never chosen; that is an error which the caller raises, outside of jit.
      weight_B: what a token of each request is worth, in (0, 1], the largest active
        one 1. It must not depend on draws of this step.
      due_B: requests of which a draft is verified whatever it is worth, where any tier
        that can be run has room for all of them; so nobody goes without for ever. In
        utilities they count what they are worth.
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
    return plan_shards(
        log_survival_BK,
        active_B,
        rows_R[None],
        cost_ms_R,
        weight_B=weight_B,
        due_B=due_B,
        objective=objective,
        ratios=ratios,
        backend=backend,
    )


def plan_shards(
    log_survival_BK: Float32[Array, "B K"],
    active_B: Bool[Array, "B"],
    rows_SR: Int32[Array, "S R"],
    cost_ms_R: Float32[Array, "R"],
    *,
    weight_B: Float32[Array, "B"] | None = None,
    due_B: Bool[Array, "B"] | None = None,
    objective: Objective = "tokens",
    ratios: tuple[float, ...] | None = None,
    backend: Backend = "xla",
) -> Plan:
    """`plan` for a batch whose S equal parts lie on shards of a mesh, in order.

    All shards run one tier, because the step lasts until the last of them is done. In
    each tier a shard's rows hold its own best drafts; a draft of a full shard cannot
    take an idle one's row. The tier is the one that yields most over all shards. One
    that does not hold some shard's anchors is never run.

    Args:
      rows_SR: rows of each tier on each shard; see `plan` for the rest.
      cost_ms_R: time of a step of the whole mesh in each tier.
    """
    shards, tiers = rows_SR.shape
    check_options(objective, ratios, tiers=tiers)
    if weight_B is None:
        weight_B = jnp.ones(active_B.shape, jnp.float32)
    fill = partial(_fill_tiers, ratios=ratios, backend=backend)
    if shards == 1:
        filled = fill(log_survival_BK, active_B, rows_SR[0], weight_B, due_B)
    else:

        def cut(x_B: Array) -> Array:
            return x_B.reshape(shards, -1, *x_B.shape[1:])

        per_B = (log_survival_BK, active_B, weight_B, due_B)
        survival_SBK, active_SB, weight_SB, due_SB = jax.tree.map(cut, per_B)
        filled = _together(
            jax.vmap(fill)(survival_SBK, active_SB, rows_SR, weight_SB, due_SB)
        )

    feasible_R = filled.fits_R & jnp.isfinite(cost_ms_R) & (cost_ms_R > 0)
    if due_B is not None:
        roomy_R = feasible_R & filled.due_fit_R
        feasible_R = jnp.where(jnp.any(roomy_R), roomy_R, feasible_R)
    yield_R = gain_R = jnp.where(filled.fits_R, filled.gain_R, 0.0)
    if objective == "tokens":
        yield_R += jnp.sum(jnp.where(active_B, weight_B, 0.0))
    utility_R = jnp.where(feasible_R, yield_R / cost_ms_R, -jnp.inf)
    tier = jnp.argmax(utility_R).astype(jnp.int32)  # the first, so the narrowest
    runnable = jnp.any(feasible_R)
    keep_B = jnp.where(runnable, filled.keep_RB[tier], 0)
    kept_BK = jnp.arange(log_survival_BK.shape[1])[None] < keep_B[:, None]
    return Plan(
        keep_B=keep_B,
        tier=tier,
        budget=jnp.sum(keep_B, dtype=jnp.int32),
        gain=jnp.sum(jnp.where(kept_BK, jnp.exp(log_survival_BK), 0.0)),
        gain_R=gain_R,
        utility_R=utility_R,
    )


class _Filled(NamedTuple):
    """Every tier with its best drafts."""

    keep_RB: Int32[Array, "R B"]
    gain_R: Float32[Array, "R"]  # weighted; of no meaning where the anchors do not fit
    fits_R: Bool[Array, "R"]  # whether anchors and drafts do
    due_fit_R: Bool[Array, "R"]  # whether a draft of everybody who is due does


def _fill_tiers(
    log_survival_BK: Array,
    active_B: Array,
    rows_R: Array,
    weight_B: Array,
    due_B: Array | None,
    *,
    ratios: tuple[float, ...] | None,
    backend: Backend,
) -> _Filled:
    """The best drafts for every tier, of requests that share its rows."""
    active_count = jnp.sum(active_B, dtype=jnp.int32)
    selectable = selectable_drafts(log_survival_BK, active_B)
    if ratios is None:
        budget_R = tier_budgets(rows_R, active_B, selectable)
    else:
        width = log_survival_BK.shape[1] + 1
        wanted_R = paper_budgets(ratios, active_count, width)
        budget_R = jnp.minimum(wanted_R, selectable)
    fits_R = (budget_R >= 0) & (active_count + budget_R <= rows_R)
    budget_R = jnp.where(fits_R, budget_R, 0)

    value_BK = log_survival_BK + jnp.log(weight_B)[:, None]
    rank_BK, due_fit_R = value_BK, fits_R
    if due_B is not None:
        due_B = due_B & active_B & ~jnp.isnan(value_BK[:, 0])
        rank_BK = put_first(value_BK, due_B)
        due_fit_R = budget_R >= jnp.sum(due_B, dtype=jnp.int32)

    topk = budget_topk(rank_BK, active_B, budget_R, backend=backend)
    gain_R = topk.gain_R
    if due_B is not None:  # then they were not ranked by what they are worth
        worth_R = kept_worth(value_BK, topk.keep_RB)
        gain_R = jnp.where(jnp.any(due_B), worth_R, gain_R)
    return _Filled(topk.keep_RB, gain_R, fits_R, due_fit_R)


def _together(filled_S: _Filled) -> _Filled:
    """What all shards do in each tier, from what each does."""
    shards, tiers, slots = filled_S.keep_RB.shape
    return _Filled(
        keep_RB=filled_S.keep_RB.swapaxes(0, 1).reshape(tiers, shards * slots),
        gain_R=jnp.sum(filled_S.gain_R, axis=0),
        fits_R=jnp.all(filled_S.fits_R, axis=0),
        due_fit_R=jnp.all(filled_S.due_fit_R, axis=0),
    )


def put_first(
    value_BK: Float32[Array, "B K"], due_B: Bool[Array, "B"]
) -> Float32[Array, "B K"]:
    """Values in which the first drafts of due requests stand above all others.

    Among themselves they keep their order.
    """
    below_BK = jnp.minimum(value_BK, BELOW_CERTAIN)
    lowered_BK = jnp.where(jnp.any(due_B), below_BK, value_BK)
    first_1K = jnp.arange(value_BK.shape[1])[None] == 0
    above_BK = BELOW_CERTAIN / 2 * (1 - jnp.exp(value_BK))
    return jnp.where(first_1K & due_B[:, None], above_BK, lowered_BK)


def kept_worth(
    value_BK: Float32[Array, "B K"], keep_RB: Int32[Array, "R B"]
) -> Float32[Array, "R"]:
    """Sum of what each budget's kept drafts are worth, as `budget_topk` adds up."""
    units_BK = jnp.where(jnp.isnan(value_BK), 0, survival_units(value_BK))
    return units_to_gain(kept_units(units_BK, keep_RB))


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
