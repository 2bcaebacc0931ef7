"""A loop over occupied blocks: so many rows of one expert at a time.

The loop ends at run time, after the last block that holds a row. So weights of experts
without rows are never read, and time follows the experts that are active. All blocks
have one shape, whatever the number of rows: a row's result then depends neither on how
many there are, nor on which others share its block.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.experts.reference import one_expert

# Fewer rows would read an expert's weights again for its next block, more would
# multiply padding: at few rows most blocks hold one or two (docs/lab.md).
ROWS = 8


class Blocks(NamedTuple):
    """Expert and first row of each block; only the first `number` are occupied."""

    expert_X: Int32[Array, "X"]
    row_X: Int32[Array, "X"]
    number: Int32[Array, ""]


def occupied(size_Q: Int32[Array, "Q"], rows: int) -> Blocks:
    """The blocks that `rows` rows in groups of `size_Q` fill, in order of rows."""
    Q = size_Q.shape[0]
    blocks_Q = -(-size_Q // ROWS)
    end_Q = jnp.cumsum(blocks_Q)
    # Each of the experts leaves at most one block that is not full.
    most = min(rows, rows // ROWS + Q)
    block_X = jnp.arange(most, dtype=jnp.int32)
    expert_X = jnp.sum(block_X[:, None] >= end_Q[None], axis=1, dtype=jnp.int32)
    expert_X = jnp.minimum(expert_X, Q - 1)
    first_Q = jnp.cumsum(size_Q) - size_Q
    within_X = block_X - (end_Q - blocks_Q)[expert_X]
    return Blocks(expert_X, first_Q[expert_X] + within_X * ROWS, end_Q[-1])


def swiglu(
    x_NE: Float[Array, "N E"],
    size_Q: Int32[Array, "Q"],
    gate_QEF: Float[Array, "Q E F"],
    up_QEF: Float[Array, "Q E F"],
    down_QFE: Float[Array, "Q F E"],
) -> Float32[Array, "N E"]:
    """See `api.grouped_swiglu`."""
    N, E = x_NE.shape
    blocks = occupied(size_Q, N)
    padded = jnp.pad(x_NE, ((0, ROWS), (0, 0)))

    def run(i: Array, out: Array) -> Array:
        q, row = blocks.expert_X[i], blocks.row_X[i]
        x = lax.dynamic_slice(padded, (row, 0), (ROWS, E))
        weights = (
            lax.dynamic_index_in_dim(w, q, keepdims=False)
            for w in (gate_QEF, up_QEF, down_QFE)
        )
        # A block that is not full runs into the next expert's rows, whose own block
        # comes later and overwrites them.
        return lax.dynamic_update_slice(out, one_expert(x, *weights), (row, 0))

    out = lax.fori_loop(0, blocks.number, run, jnp.zeros(padded.shape, jnp.float32))
    owned_N = jnp.arange(N) < jnp.sum(size_Q)
    return jnp.where(owned_N[:, None], out[:N], 0.0)
