"""What all simulations share: how drafts are accepted, and a policy's steps."""

from dataclasses import replace

from dcut_jax.bench.published import StepTimes
from dcut_jax.cost.online import Work
from dcut_jax.cost.roofline import Roofline
from dcut_jax.cost.select import roofline_table
from dcut_jax.cost.table import CostTable
from dcut_jax.cut.choice import StepCosts
from dcut_jax.decode.defer import CATCH_UPS
from dcut_jax.decode.steps import StepShapes, anchors_only
from dcut_jax.engine.policy import (
    PLAN_WORK,
    DCutPolicy,
    catch_up_work,
    draft_work,
    verify_work,
    wanted_costs,
)
from dcut_jax.simulate import Acceptance, Setup

# Least squares of logs (Nelder-Mead, by hand) on the eight published allocations: what
# 32 requests get of so many rows, dealt out evenly or to the most confident. All are
# met within 1%, without a term for where in its block a draft stands.
ACCEPTANCE = Acceptance(level=5.5, step_sd=1.35, draft_sd=5.05)


def dcut_setup(
    policy: DCutPolicy,
    shapes: StepShapes,
    costs: StepCosts,
    paid: StepCosts | None = None,
) -> Setup:
    """The steps and rules of a D-Cut policy.

    Args:
      costs: that it plans by.
      paid: what steps really take; None: the same.
    """
    return Setup(
        widths=policy.ladder(shapes),
        rows_R=policy.tiers(shapes),
        costs=costs,
        objective=policy.objective,
        ratios=policy.ratios,
        fairness=policy.fairness,
        patience=policy.patience,
        calibrates=policy.calibrate,
        paid=paid,
    )


def work_ms(
    policy: DCutPolicy, shapes: StepShapes, times: StepTimes
) -> dict[Work, float]:
    """Times of all work that a policy's steps are made of.

    Planning is free, and so is the drafter's context of plain steps.
    """
    layouts = [anchors_only(shapes), *policy.layouts(shapes)]
    return {
        PLAN_WORK: 0.0,
        **{catch_up_work(steps): 0.0 for steps in CATCH_UPS},
        **{draft_work(w): times.draft_ms(w) for w in policy.ladder(shapes)},
        **{verify_work(lay): times.verify_ms(lay.rows) for lay in layouts},
    }


def roofline_ms(
    policy: DCutPolicy, shapes: StepShapes, model: Roofline, context: int
) -> dict[Work, float]:
    """Times of all work that a policy's steps are made of, computed."""
    wanted = wanted_costs([policy], shapes, [context])
    nowhere = CostTable.empty().fingerprint
    table = roofline_table(model, nowhere, wanted)
    return replace(policy, table=table).measured(shapes, context)
