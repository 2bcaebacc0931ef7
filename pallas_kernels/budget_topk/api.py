"""What callers use: from log-survivals and budgets to drafts kept per request."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from pallas_kernels.backends import Backend, known
from pallas_kernels.budget_topk import kernel, reference
from pallas_kernels.budget_topk.keys import (
    GAIN_BITS,
    NEVER,
    order_keys,
    units_to_gain,
)

# More certain drafts than these would overflow a gain of 32 bits.
MOST_DRAFTS = (1 << (31 - GAIN_BITS)) - 1


class BudgetTopK(NamedTuple):
    """The selection of each budget."""

    keep_RB: Int32[Array, "R B"]  # selected drafts of each request, 0..K
    gain_R: Float32[Array, "R"]  # sum of their survivals: expected accepted drafts


def budget_topk(
    log_survival_BK: Float32[Array, "B K"],
    active_B: Bool[Array, "B"],
    budget_R: Int32[Array, "R"],
    *,
    backend: Backend,
) -> BudgetTopK:
    """Keeps the best drafts of the whole batch, once for every budget.

    Larger log-survival first; ties go to the earlier position, then to the lower
    request. Kept drafts are always a prefix of their request: a NaN closes the rest of
    its row, and a value that rises along the row counts as the smallest before it.

    Args:
      log_survival_BK: log of the chance that a draft and all before it are accepted,
        in [-inf, 0]. -inf is selectable and sorts last; NaN is never selected.
      active_B: rows of inactive requests are never selected from.
      budget_R: drafts to keep, at run time. Below 0 means 0; above the number of
        selectable drafts means all of them.
      backend: see `pallas_kernels.backends`. "xla" takes any number of budgets, and
        any B and K with `B * K <= MOST_DRAFTS`; the kernels have limits of their own.

    Returns:
      Counts whose rows sum to the clamped budgets, and gains: sums of survivals, each
      rounded to a multiple of 2**-17 (an error of at most 6e-6 a draft). Both are
      decided on integers, and so are the same bit for bit on every backend and device.

    Raises:
      ValueError: unknown backend; a batch beyond the limits; or, when a program with
        a kernel is lowered for what does not run it.
    """
    known("budget_topk", backend)
    if log_survival_BK.size > MOST_DRAFTS:
        raise ValueError(
            f"budget_topk takes at most {MOST_DRAFTS} drafts, got "
            f"{log_survival_BK.shape} (requests, drafts of each); split the batch"
        )
    key_KB = order_keys(log_survival_BK, active_B).T
    selectable = jnp.sum(key_KB > NEVER, dtype=jnp.int32)
    budget_R = jnp.clip(budget_R, 0, selectable)
    if backend == "xla":
        found = reference.select(key_KB, budget_R)
    else:
        found = kernel.select(key_KB, budget_R, backend=backend)
    return BudgetTopK(found.keep_RB, units_to_gain(found.units_R))
