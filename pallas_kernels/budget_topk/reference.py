"""The selection as one stable sort."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32


def select(
    key_KB: Int32[Array, "K B"], budget_R: Int32[Array, "R"]
) -> Bool[Array, "R K B"]:
    """Marks the `budget_R[r]` largest keys; on ties the first in memory order."""
    order_N = jnp.argsort(key_KB.ravel(), descending=True, stable=True)
    place_N = jnp.arange(order_N.size, dtype=jnp.int32)
    rank_N = jnp.zeros_like(place_N).at[order_N].set(place_N, unique_indices=True)
    return rank_N.reshape(1, *key_KB.shape) < budget_R[:, None, None]
