"""The selection as one stable sort."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int32

from pallas_kernels.budget_topk.keys import key_values, survival_units


class Selection(NamedTuple):
    """What every form of the operation returns."""

    keep_RB: Int32[Array, "R B"]  # selected keys of each request
    units_R: Int32[Array, "R"]  # sum of their `survival_units`


def select(key_KB: Int32[Array, "K B"], budget_R: Int32[Array, "R"]) -> Selection:
    """Selects the `budget_R[r]` largest keys; on ties the first in memory order.

    Args:
      key_KB: of `keys.order_keys`.
      budget_R: in 0..selectable keys.
    """
    order_N = jnp.argsort(key_KB.ravel(), descending=True, stable=True)
    place_N = jnp.arange(order_N.size, dtype=jnp.int32)
    rank_N = jnp.zeros_like(place_N).at[order_N].set(place_N, unique_indices=True)
    selected_RKB = rank_N.reshape(1, *key_KB.shape) < budget_R[:, None, None]
    keep_RB = jnp.sum(selected_RKB, axis=1, dtype=jnp.int32)
    return Selection(keep_RB, kept_units(survival_units(key_values(key_KB.T)), keep_RB))


def kept_units(
    units_BK: Int32[Array, "B K"], keep_RB: Int32[Array, "R B"]
) -> Int32[Array, "R"]:
    """Sums over the first `keep_RB[r, b]` of each request's units, for every r."""
    upto_BK1 = jnp.pad(jnp.cumsum(units_BK, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))
    request_1B = jnp.arange(units_BK.shape[0])[None]
    return jnp.sum(upto_BK1[request_1B, keep_RB], axis=1, dtype=jnp.int32)
