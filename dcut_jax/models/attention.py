"""Attention of a few fresh rows per request over its cache and over each other.

One function serves prefill chunks, verification and drafting; they differ in their
masks and in how a piece of the cache is read.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from dcut_jax.models.layers import product

ReadChunk = Callable[[Array], tuple[Array, Array]]


@dataclass(frozen=True)
class CachedContext:
    """The cached part of the keys and values.

    Attributes:
      read: from a first position to `k_BGDC, v_BGCD` of the next `chunk` positions.
      length_B: cached positions of each request; only these are seen.
      chunk: positions read at a time.
    """

    read: ReadChunk
    length_B: Int[Array, "B"]
    chunk: int


_PER_HEAD = (((3,), (2,)), ((0, 1), (0, 1)))  # of [B, G, *, n] and [B, G, n, *]


def attend(
    q_BJHD: Float[Array, "B J H D"],
    k_BSGD: Float[Array, "B S G D"],
    v_BSGD: Float[Array, "B S G D"],
    mask_BJS: Bool[Array, "B J S"],
    cached: CachedContext | None = None,
    *,
    position_BJ: Int[Array, "B J"] | None = None,
    window: int | None = None,
) -> Float[Array, "B J H D"]:
    """Grouped-query attention with one softmax over cached and fresh keys.

    The cache is read in chunks up to the longest request, so time follows the real
    context and not the capacity; the softmax is carried along (max, sum, weighted sum).

    Args:
      q_BJHD: queries, unscaled.
      k_BSGD, v_BSGD: fresh keys and values, not in the cache yet.
      mask_BJS: which fresh keys a query sees. Each query must see at least one.
      cached: the cache, all of it visible up to its lengths.
      position_BJ: positions of the queries; needed with `window`.
      window: if set, a cached key at `k` is seen only while `position - k < window`.
        (The caller's mask states the same for fresh keys.)
    """
    B, J, H, D = q_BJHD.shape
    G = k_BSGD.shape[2]
    repeat = H // G
    # Queries of one key/value head side by side: X = repeat * J.
    q_BGXD = (
        (q_BJHD * (1 / math.sqrt(D)))
        .reshape(B, J, G, repeat, D)
        .transpose(0, 2, 3, 1, 4)
        .reshape(B, G, repeat * J, D)
    )

    def per_query(x_BJC: Array) -> Array:
        tiled = jnp.broadcast_to(x_BJC[:, None, None], (B, 1, repeat, *x_BJC.shape[1:]))
        return tiled.reshape(B, 1, repeat * J, x_BJC.shape[-1])

    def merge(carry, s_BGXC, visible_BXC, v_BGCD):
        m_BGX1, l_BGX1, acc_BGXD = carry
        s_BGXC = jnp.where(visible_BXC, s_BGXC, -jnp.inf)
        new_m = jnp.maximum(m_BGX1, jnp.max(s_BGXC, axis=-1, keepdims=True))
        p_BGXC = jnp.exp(s_BGXC - new_m)
        keep = jnp.exp(m_BGX1 - new_m)
        l_BGX1 = l_BGX1 * keep + jnp.sum(p_BGXC, axis=-1, keepdims=True)
        return new_m, l_BGX1, acc_BGXD * keep + product(p_BGXC, v_BGCD, _PER_HEAD)

    # Fresh keys first: every query sees one, so the running maximum is finite.
    s_BGXS = product(q_BGXD, k_BSGD.transpose(0, 2, 3, 1), _PER_HEAD)
    s_BGXS = jnp.where(per_query(mask_BJS), s_BGXS, -jnp.inf)
    m_BGX1 = jnp.max(s_BGXS, axis=-1, keepdims=True)
    p_BGXS = jnp.exp(s_BGXS - m_BGX1)
    carry = (
        m_BGX1,
        jnp.sum(p_BGXS, axis=-1, keepdims=True),
        product(p_BGXS, v_BSGD.swapaxes(1, 2), _PER_HEAD),
    )

    if cached is not None:
        length_B11 = cached.length_B[:, None, None]

        def step(i, carry):
            start = i * cached.chunk
            k_BGDC, v_BGCD = cached.read(start)
            position_11C = (start + jnp.arange(cached.chunk))[None, None, :]
            there_B1C = position_11C < length_B11
            seen = jnp.broadcast_to(there_B1C, (B, J, cached.chunk))
            # What others left in a page weighs 0, but 0 times NaN is NaN.
            v_BGCD = jnp.where(there_B1C[..., None], v_BGCD, 0)
            if window is not None:
                assert position_BJ is not None, "a window needs query positions"
                seen &= position_BJ[:, :, None] - position_11C < window
            s_BGXC = product(q_BGXD, k_BGDC, _PER_HEAD)
            return merge(carry, s_BGXC, per_query(seen), v_BGCD)

        chunks = (jnp.max(cached.length_B) + cached.chunk - 1) // cached.chunk
        carry = lax.fori_loop(0, chunks, step, carry)

    _, l_BGX1, acc_BGXD = carry
    out_BGXD = acc_BGXD / l_BGX1
    return (
        out_BGXD.reshape(B, G, repeat, J, D)
        .transpose(0, 3, 1, 2, 4)
        .reshape(B, J, H, D)
    )


def causal_mask(valid_NS: Bool[Array, "N S"]) -> Bool[Array, "N S S"]:
    """Whole sequences: a position sees itself and the valid ones before it."""
    S = valid_NS.shape[1]
    before_SS = jnp.tril(jnp.ones((S, S), bool))
    # The diagonal stays visible on padding, so that its softmax is defined.
    return before_SS[None] & (valid_NS[:, None, :] | jnp.eye(S, dtype=bool)[None])
