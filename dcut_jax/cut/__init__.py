"""What to verify: confidences, survivals, and the plan of a step."""

from dcut_jax.cut.confidence import Top1, top1
from dcut_jax.cut.numpy_plan import NumpyPlan, Objective, plan_numpy
from dcut_jax.cut.plan import Plan, paper_budgets, plan, tier_budgets
from dcut_jax.cut.survival import log_survival

__all__ = [
    "NumpyPlan",
    "Objective",
    "Plan",
    "Top1",
    "log_survival",
    "paper_budgets",
    "plan",
    "plan_numpy",
    "tier_budgets",
    "top1",
]
