"""Attention in plain JAX: a page of every request at a time, up to the longest."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_kernels.products import product
from pallas_kernels.verify_attention.softmax import (
    Pages,
    Running,
    apart,
    begin,
    finish,
    merge,
    per_query,
    seen_pages,
    side_by_side,
)

_PER_HEAD = (((3,), (2,)), ((0, 1), (0, 1)))  # of [B, G, *, n] and [B, G, n, *]


def attend(
    q_BJHD: Float[Array, "B J H D"],
    k_BSGD: Float[Array, "B S G D"],
    v_BSGD: Float[Array, "B S G D"],
    mask_BJS: Bool[Array, "B J S"],
    pages: Pages,
    since_BJ: Int32[Array, "B J"] | None,
) -> Float32[Array, "B J H D"]:
    """See `api.verify_attention`; `since_BJ` is what `first_seen` makes of a window."""
    J, G = q_BJHD.shape[1], k_BSGD.shape[2]
    q_BGXD = side_by_side(q_BJHD, G)
    read = seen_pages(pages, since_BJ)
    page_BN, C = pages.valid_BN, pages.size
    length_B11 = pages.length_B[:, None, None]

    def step(i: Array, found: Running) -> Running:
        page_B = lax.dynamic_index_in_dim(page_BN, i, axis=1, keepdims=False)
        # One gather of pages costs a CPU no more than a slice of a contiguous cache
        # would; a slice for each request took twice as long (docs/lab.md).
        k_BGDC = pages.k_YPGDC.at[pages.layer, page_B].get(mode="clip")
        v_BGCD = pages.v_YPGCD.at[pages.layer, page_B].get(mode="clip")
        position_11C = (i * C + jnp.arange(C))[None, None]
        own_B1C = position_11C < length_B11
        v_BGCD = jnp.where(own_B1C[..., None], v_BGCD, 0)  # 0 times NaN is NaN
        mask_BJC = jnp.broadcast_to(own_B1C, (own_B1C.shape[0], J, C))
        if since_BJ is not None:
            mask_BJC &= position_11C >= since_BJ[:, :, None]
        s_BGXC = _seen(product(q_BGXD, k_BGDC, _PER_HEAD), mask_BJC)
        return merge(found, s_BGXC, v_BGCD, _PER_HEAD)

    first, end = jnp.min(read.first_B), jnp.max(read.end_B)
    found = _fresh(q_BGXD, k_BSGD, v_BSGD, mask_BJS)
    return apart(finish(lax.fori_loop(first, end, step, found)), J)


def sequence_attention(
    q_BJHD: Float[Array, "B J H D"],
    k_BSGD: Float[Array, "B S G D"],
    v_BSGD: Float[Array, "B S G D"],
    mask_BJS: Bool[Array, "B J S"],
) -> Float32[Array, "B J H D"]:
    """Where nothing is cached: whole sequences, in XLA everywhere, with a gradient.

    Arguments are those of `verify_attention`.
    """
    q_BGXD = side_by_side(q_BJHD, k_BSGD.shape[2])
    found = _fresh(q_BGXD, k_BSGD, v_BSGD, mask_BJS)
    return apart(finish(found), q_BJHD.shape[1])


def _fresh(q_BGXD: Array, k_BSGD: Array, v_BSGD: Array, mask_BJS: Array) -> Running:
    """The softmax over fresh keys alone."""
    s_BGXS = product(q_BGXD, k_BSGD.transpose(0, 2, 3, 1), _PER_HEAD)
    return begin(_seen(s_BGXS, mask_BJS), v_BSGD.swapaxes(1, 2), _PER_HEAD)


def _seen(s_BGXC: Array, mask_BJC: Array) -> Array:
    """Scores, -inf where a row does not see the key."""
    repeat = s_BGXC.shape[2] // mask_BJC.shape[1]
    return jnp.where(per_query(mask_BJC, repeat)[:, None], s_BGXC, -jnp.inf)
