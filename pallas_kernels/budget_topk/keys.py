"""What the order and the gains are decided on: integers, the same on every device.

Float comparisons would not do: some devices take denormals for zero, some do not. Nor
would sums of floats, which depend on their order, and exponentials, of which every
library has its own.
"""

import math

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

# Numpy scalars: unlike arrays they cost no transfer and may enter any trace.
NEVER = np.int32(-(2**31))  # key of a draft that may not be selected
INF_BITS = np.int32(0x7F800000)
MAGNITUDE_BITS = np.int32(0x7FFFFFFF)

GAIN_BITS = 17  # fractional bits of a gain: 16383 certain drafts fit 31 bits
LOG_BITS = 20  # fractional bits of a log-survival
LOG_LIMIT = 16  # survivals of e^-16 and below count as 0
LOW_BITS = 12  # of a log-survival, the bits that a parabola is good for
ONE = 1 << 24  # what 1.0 is while exponentials are multiplied


def order_keys(
    log_survival_BK: Float32[Array, "B K"], active_B: Bool[Array, "B"]
) -> Int32[Array, "B K"]:
    """Integers ordered as the values are; `NEVER` where no draft may be selected."""
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


def survival_units(log_survival: Float32[Array, "*shape"]) -> Int32[Array, "*shape"]:
    """Survivals in multiples of `2**-GAIN_BITS`, within 6e-6 of the true ones.

    Of floats only what is exact on every device is asked: comparison with a constant,
    a power of two as factor, truncation to an integer. The exponential is a product of
    constants, one for each bit of the log, and of a parabola for the lowest ones.
    `dcut_jax.cut.numpy_plan.survival_units` is the same in NumPy, bit for bit.

    Args:
      log_survival: no NaN. Above 0 counts as 0.
    """
    distance = jnp.minimum(jnp.maximum(-log_survival, 0.0), float(LOG_LIMIT))
    steps = (distance * float(1 << LOG_BITS)).astype(jnp.int32)
    low = steps & ((1 << LOW_BITS) - 1)
    product = ONE - (low << (24 - LOG_BITS)) + ((low * low) >> (2 * LOG_BITS - 23))
    for bit, factor in exponential_factors():
        kept = _times(product, factor)
        product = jnp.where((steps >> bit) & 1 == 1, kept, product)
    shift = 24 - GAIN_BITS
    return (product + (1 << (shift - 1))) >> shift


def exponential_factors() -> list[tuple[int, int]]:
    """`e^-x` in units of 2**-24, for each higher bit of a log: its place and the value.

    The last one stands for the limit and beyond: it is 0.
    """
    bits = range(LOW_BITS, LOG_BITS + LOG_LIMIT.bit_length())
    factors = [round(ONE * math.exp(-(2.0 ** (bit - LOG_BITS)))) for bit in bits]
    return list(zip(bits, [*factors[:-1], 0], strict=True))


def _times(x: Int32[Array, "*shape"], factor: int) -> Int32[Array, "*shape"]:
    """Product of two numbers in units of 2**-24, from halves that fit 32 bits."""
    x_high, x_low = x >> 12, x & 4095
    high, low = factor >> 12, factor & 4095
    return x_high * high + ((x_high * low + x_low * high) >> 12)


def units_to_gain(units: Int32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Gains as floats: of sums below 2**24 units exact, beyond rounded once."""
    return units.astype(jnp.float32) * np.float32(2.0**-GAIN_BITS)
