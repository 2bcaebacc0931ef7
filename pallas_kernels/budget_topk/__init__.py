"""The best drafts of a whole batch, for several budgets at once."""

from pallas_kernels.budget_topk.api import BudgetTopK, budget_topk
from pallas_kernels.budget_topk.kernel import fits
from pallas_kernels.budget_topk.keys import survival_units, units_to_gain
from pallas_kernels.budget_topk.reference import kept_units

__all__ = [
    "BudgetTopK",
    "budget_topk",
    "fits",
    "kept_units",
    "survival_units",
    "units_to_gain",
]
