"""How numbers are multiplied, in models and in kernels alike."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32


def product(
    x: Array, y: Array, dimensions: lax.DotDimensionNumbers
) -> Float32[Array, "..."]:
    """In the dtype of `y`, and summed in float32; of float32 all bits count.

    Left alone, TPUs and recent GPUs round float32 inputs further, each shape in its own
    way.
    """
    return lax.dot_general(
        x.astype(y.dtype),
        y,
        dimensions,
        precision=precision(y),
        preferred_element_type=jnp.float32,
    )


def precision(y: Array) -> lax.Precision | None:
    """What to ask for in a product with `y`."""
    return lax.Precision.HIGHEST if y.dtype == jnp.float32 else None
