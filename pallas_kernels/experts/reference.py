"""Every expert over every row, and a mask: simple, and Q times the work."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.products import product

_MATRICES = (((1,), (0,)), ((), ()))


def one_expert(x: Array, gate_EF: Array, up_EF: Array, down_FE: Array) -> Array:
    """SwiGLU with one set of weights."""
    gate, up = (product(x, weight, _MATRICES) for weight in (gate_EF, up_EF))
    return product(jax.nn.silu(gate) * up, down_FE, _MATRICES)


def swiglu(
    x_NE: Float[Array, "N E"],
    size_Q: Int32[Array, "Q"],
    gate_QEF: Float[Array, "Q E F"],
    up_QEF: Float[Array, "Q E F"],
    down_QFE: Float[Array, "Q F E"],
) -> Float32[Array, "N E"]:
    """See `api.grouped_swiglu`."""
    row_N = jnp.arange(x_NE.shape[0])
    end_Q = jnp.cumsum(size_Q)

    def add(q: Array, out_NE: Array) -> Array:
        own_N = (row_N >= end_Q[q] - size_Q[q]) & (row_N < end_Q[q])
        y_NE = one_expert(x_NE, gate_QEF[q], up_QEF[q], down_QFE[q])
        return out_NE + jnp.where(own_N[:, None], y_NE, 0.0)

    zero_NE = jnp.zeros(x_NE.shape, jnp.float32)
    return lax.fori_loop(0, size_Q.shape[0], add, zero_NE)
