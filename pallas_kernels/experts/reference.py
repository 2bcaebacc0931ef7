"""Every expert over every row, and a mask: simple, and Q times the work."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32


def product(
    x: Float[Array, "N X"], weight: Float[Array, "X Y"]
) -> Float32[Array, "N Y"]:
    """A matrix product in the weight's dtype, float32 out; exact for float32."""
    exact = weight.dtype == jnp.float32
    return lax.dot(
        x.astype(weight.dtype),
        weight,
        precision=lax.Precision.HIGHEST if exact else None,
        preferred_element_type=jnp.float32,
    )


def one_expert(x: Array, gate_EF: Array, up_EF: Array, down_FE: Array) -> Array:
    """SwiGLU with one set of weights."""
    return product(jax.nn.silu(product(x, gate_EF)) * product(x, up_EF), down_FE)


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
