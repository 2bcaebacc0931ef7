"""What all forms share: pages, rows side by side, and a softmax that grows by pieces.

A kernel and XLA's form take keys in the same order, fresh ones first, and pieces are
merged by the same functions; so they differ by what their products round.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.products import product


class Pages(NamedTuple):
    """Cached keys and values of all requests and layers, in pages of C positions.

    Position `p` of request `b` is place `p % C` of page `page_BN[b, p // C]`. Requests
    may share pages. What lies at and past a request's length is never used, be it NaN,
    nor is a page that lies there whole, whatever number stands for it.
    """

    k_YPGDC: Float[Array, "Y P G D C"]  # keys transposed, so that C is minor
    v_YPGCD: Float[Array, "Y P G C D"]
    layer: Int32[Array, ""] | int
    page_BN: Int32[Array, "B N"]
    length_B: Int32[Array, "B"]  # cached positions of each request

    @property
    def size(self) -> int:
        """Positions of a page, C."""
        return self.k_YPGDC.shape[-1]

    @property
    def valid_BN(self) -> Int32[Array, "B N"]:
        """Page numbers that exist, also where none is used."""
        return jnp.clip(self.page_BN, 0, self.k_YPGDC.shape[1] - 1)


class Range(NamedTuple):
    """The pages of each request that any of its rows sees: `first..end - 1`."""

    first_B: Int32[Array, "B"]
    end_B: Int32[Array, "B"]


def seen_pages(pages: Pages, since_BJ: Int32[Array, "B J"] | None) -> Range:
    """Which pages there are to read; `since_BJ`: see `first_seen`."""
    end_B = (pages.length_B + pages.size - 1) // pages.size
    if since_BJ is None:
        return Range(jnp.zeros_like(end_B), end_B)
    first_B = jnp.maximum(jnp.min(since_BJ, axis=1), 0) // pages.size
    return Range(jnp.minimum(first_B, end_B), end_B)


def first_seen(
    position_BJ: Int32[Array, "B J"] | None, window: int | None
) -> Int32[Array, "B J"] | None:
    """The first position that each row sees through a window; None without one.

    Raises:
      ValueError: a window without positions.
    """
    if window is None:
        return None
    if position_BJ is None:
        raise ValueError(
            "a window is counted from the positions of the queries: expected "
            "position_BJ with it, found None"
        )
    return position_BJ - window + 1


def side_by_side(q_BJHD: Float[Array, "B J H D"], kv_heads: int) -> Array:
    """Scaled queries, those of one key/value head together: `[B, G, X, D]`.

    X = (H / G) * J, head after head.
    """
    B, J, H, D = q_BJHD.shape
    repeat = H // kv_heads
    return (
        (q_BJHD * (1 / math.sqrt(D)))
        .reshape(B, J, kv_heads, repeat, D)
        .transpose(0, 2, 3, 1, 4)
        .reshape(B, kv_heads, repeat * J, D)
    )


def apart(out_BGXD: Float[Array, "B G X D"], rows: int) -> Array:
    """`[B, J, H, D]` of `rows` = J; undoes `side_by_side`."""
    B, G, X, D = out_BGXD.shape
    repeat = X // rows
    return (
        out_BGXD.reshape(B, G, repeat, rows, D)
        .transpose(0, 3, 1, 2, 4)
        .reshape(B, rows, G * repeat, D)
    )


def per_query(x_BJN: Array, repeat: int) -> Array:
    """What a row says, for each of its queries of a key/value head: `[B, X, N]`."""
    B, J, N = x_BJN.shape
    tiled = jnp.broadcast_to(x_BJN[:, None], (B, repeat, J, N))
    return tiled.reshape(B, repeat * J, N)


class Running(NamedTuple):
    """A softmax over the keys so far; N stands for any leading axes."""

    peak: Float32[Array, "*N X 1"]  # largest score
    total: Float32[Array, "*N X 1"]  # sum of exp(score - peak)
    weighted: Float32[Array, "*N X D"]  # sum of the values, each by its exponential


def begin(s: Array, v: Array, dimensions: lax.DotDimensionNumbers) -> Running:
    """Of the first keys, of which every row sees at least one.

    Args:
      s: scores `[*N, X, C]`, -inf where a key is not seen.
      v: values; `dimensions`: of `[*N, X, C]` and `v`.
    """
    peak = jnp.max(s, axis=-1, keepdims=True)
    p = jnp.exp(s - peak)
    return Running(peak, jnp.sum(p, axis=-1, keepdims=True), product(p, v, dimensions))


def merge(
    found: Running, s: Array, v: Array, dimensions: lax.DotDimensionNumbers
) -> Running:
    """Further keys, see `begin`; a row may see none of them."""
    peak = jnp.maximum(found.peak, jnp.max(s, axis=-1, keepdims=True))
    p = jnp.exp(s - peak)
    keep = jnp.exp(found.peak - peak)
    return Running(
        peak,
        found.total * keep + jnp.sum(p, axis=-1, keepdims=True),
        found.weighted * keep + product(p, v, dimensions),
    )


def finish(found: Running) -> Float32[Array, "*N X D"]:
    """The mean of the values."""
    return found.weighted / found.total
