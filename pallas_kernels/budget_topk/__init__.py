"""The best drafts of a whole batch, for several budgets at once."""

from pallas_kernels.budget_topk.api import BudgetTopK, budget_topk

__all__ = ["BudgetTopK", "budget_topk"]
