"""What callers use: from sorted rows and group sizes to every expert's output."""

from collections.abc import Callable

from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.backends import Backend, known
from pallas_kernels.experts import blocks, ragged, reference

# Its backends. reference: every expert over every row, masked. blocks: a loop over the
# blocks of rows that are occupied. ragged_dot: `jax.lax.ragged_dot`, a kernel on TPUs
# alone; elsewhere XLA makes it a product of every row with every expert. tokamax: that
# package's kernels for GPUs, which must be installed.
#
# What "platform" stands for, decided when a program is lowered. tokamax is never taken
# unasked: its releases fit some versions of JAX and not others.
BY_PLATFORM: dict[str, Backend] = {
    "cpu": "blocks",
    "cuda": "blocks",
    "tpu": "ragged_dot",
}


def grouped_swiglu(
    x_NE: Float[Array, "N E"],
    size_Q: Int32[Array, "Q"],
    gate_QEF: Float[Array, "Q E F"],
    up_QEF: Float[Array, "Q E F"],
    down_QFE: Float[Array, "Q F E"],
    *,
    backend: Backend,
) -> Float32[Array, "N E"]:
    """`down(silu(gate x) * up x)`, each row with its own expert's weights.

    Args:
      x_NE: rows, those of expert 0 first, then those of expert 1, and so on.
      size_Q: rows of each expert, at run time; their sum is at most N.
      gate_QEF, up_QEF, down_QFE: weights of the experts. Products read their dtype and
        accumulate in float32; float32 weights mean float32 products.
      backend: one of those above.

    Returns:
      One output per row. Rows beyond the sum of the sizes are zero: they belong to no
      expert.

    Raises:
      ValueError: unknown backend.
      ImportError: "tokamax", and it is not installed.
      NotImplementedError: "platform", lowered for one that is not in `BY_PLATFORM`.
    """
    known("experts", backend)
    args = x_NE, size_Q, gate_QEF, up_QEF, down_QFE
    if backend == "platform":
        choices = {p: _CALLS[choice] for p, choice in BY_PLATFORM.items()}
        return lax.platform_dependent(*args, **choices)
    return _CALLS[backend](*args)


_CALLS: dict[Backend, Callable[..., Array]] = {
    "reference": reference.swiglu,
    "blocks": blocks.swiglu,
    "ragged_dot": ragged.swiglu,
    "tokamax": ragged.swiglu_tokamax,
}
