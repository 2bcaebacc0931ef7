"""What callers use: from log-survivals and budgets to drafts kept per request."""

from typing import NamedTuple, get_args

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from pallas_kernels import Backend
from pallas_kernels.budget_topk import kernel, reference

# Numpy scalars: unlike arrays they cost no transfer and may enter any trace.
NEVER = np.int32(-(2**31))  # key of a draft that may not be selected
INF_BITS = np.int32(0x7F800000)
MAGNITUDE_BITS = np.int32(0x7FFFFFFF)


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
      backend: "pallas" needs a TPU; the other two run anywhere.

    Returns:
      Counts whose rows sum to the clamped budgets, and gains in float32. A survival
      below 1e-37 may count as 0, as some devices flush denormals. The order itself is
      exact: it is decided on integers.

    Raises:
      ValueError: unknown backend; a batch beyond the kernel's limits; or, when a
        program with "pallas" is lowered for anything but a TPU.
    """
    key_KB = order_keys(log_survival_BK, active_B).T
    selectable = jnp.sum(key_KB > NEVER, dtype=jnp.int32)
    budget_R = jnp.clip(budget_R, 0, selectable)
    match backend:
        case "xla":
            selected_RKB = reference.select(key_KB, budget_R)
        case "pallas" | "pallas_interpret":
            interpret = backend == "pallas_interpret"
            selected_RKB = kernel.select(key_KB, budget_R, interpret=interpret)
        case _:
            raise ValueError(
                f"{backend=} is unknown; choose one of {get_args(Backend)}"
            )
    survival_RKB = jnp.where(selected_RKB, jnp.exp(key_values(key_KB)), 0.0)
    return BudgetTopK(
        keep_RB=jnp.sum(selected_RKB, axis=1, dtype=jnp.int32),
        gain_R=jnp.sum(survival_RKB, axis=(1, 2)),
    )


def order_keys(
    log_survival_BK: Float32[Array, "B K"], active_B: Bool[Array, "B"]
) -> Int32[Array, "B K"]:
    """Integers ordered as the values are; `NEVER` where no draft may be selected.

    Comparing floats would not do: some devices take denormals for zero, some do not.
    """
    bits_BK = lax.bitcast_convert_type(log_survival_BK, jnp.int32)
    size_BK = bits_BK & MAGNITUDE_BITS
    key_BK = jnp.where(bits_BK < 0, -size_BK, size_BK)  # -0 and +0 share a key
    usable_BK = (size_BK <= INF_BITS) & active_B[:, None]  # beyond are the NaNs
    # NEVER is the smallest key, so the running minimum carries it to the row's end.
    return lax.cummin(jnp.where(usable_BK, key_BK, NEVER), axis=1)


def key_values(key: Int32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """The floats that `order_keys` was given."""
    bits = jnp.where(key < 0, NEVER - key, key)
    return lax.bitcast_convert_type(bits, jnp.float32)
