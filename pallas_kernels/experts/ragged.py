"""Three grouped products, by `jax.lax.ragged_dot` or by tokamax."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.products import precision

Grouped = Callable[[Array, Array], Array]


def swiglu(
    x_NE: Float[Array, "N E"],
    size_Q: Int32[Array, "Q"],
    gate_QEF: Float[Array, "Q E F"],
    up_QEF: Float[Array, "Q E F"],
    down_QFE: Float[Array, "Q F E"],
) -> Float32[Array, "N E"]:
    """See `api.grouped_swiglu`; a kernel on TPUs, Q times the work elsewhere."""

    def product(x: Array, weight: Array) -> Array:
        return lax.ragged_dot(
            x.astype(weight.dtype),
            weight,
            size_Q,
            precision=precision(weight),
            preferred_element_type=jnp.float32,
        )

    return _swiglu(product, x_NE, size_Q, gate_QEF, up_QEF, down_QFE)


def swiglu_tokamax(
    x_NE: Float[Array, "N E"],
    size_Q: Int32[Array, "Q"],
    gate_QEF: Float[Array, "Q E F"],
    up_QEF: Float[Array, "Q E F"],
    down_QFE: Float[Array, "Q F E"],
) -> Float32[Array, "N E"]:
    """See `api.grouped_swiglu`; kernels of openxla/tokamax, chosen for the GPU."""
    tokamax = _tokamax()

    def product(x: Array, weight: Array) -> Array:
        return tokamax.ragged_dot(
            x.astype(weight.dtype),
            weight,
            size_Q,
            precision=precision(weight),
            preferred_element_type=jnp.float32,
        )

    return _swiglu(product, x_NE, size_Q, gate_QEF, up_QEF, down_QFE)


def _tokamax() -> Any:
    try:
        import tokamax
    except ImportError as error:
        raise ImportError(
            'grouped_swiglu(backend="tokamax") needs the package tokamax, which is not '
            "installed; install a release that fits this JAX (0.0.12 for JAX 0.10, "
            '0.0.17 and Python 3.12 for later ones), or use backend="blocks"'
        ) from error
    return tokamax


def _swiglu(
    product: Grouped,
    x_NE: Array,
    size_Q: Array,
    gate_QEF: Array,
    up_QEF: Array,
    down_QFE: Array,
) -> Array:
    hidden_NF = jax.nn.silu(product(x_NE, gate_QEF)) * product(x_NE, up_QEF)
    out_NE = product(hidden_NF, down_QFE)
    # What kernels leave in rows of no group is not defined everywhere.
    owned_N = jnp.arange(x_NE.shape[0]) < jnp.sum(size_Q)
    return jnp.where(owned_N[:, None], out_NE, 0.0)
