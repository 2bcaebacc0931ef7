"""Attention in plain JAX: a page of every request at a time, up to the longest."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_kernels.verify_attention.softmax import (
    Pages,
    Running,
    apart,
    begin,
    finish,
    merge,
    per_query,
    product,
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
    J, H, G = q_BJHD.shape[1], q_BJHD.shape[2], k_BSGD.shape[2]
    q_BGXD = side_by_side(q_BJHD, G)

    def seen(s_BGXC: Array, mask_BJC: Array) -> Array:
        return jnp.where(per_query(mask_BJC, H // G)[:, None], s_BGXC, -jnp.inf)

    s_BGXS = product(q_BGXD, k_BSGD.transpose(0, 2, 3, 1), _PER_HEAD)
    found = begin(seen(s_BGXS, mask_BJS), v_BSGD.swapaxes(1, 2), _PER_HEAD)
    read = seen_pages(pages, since_BJ)
    page_BN, C = pages.valid_BN, pages.size
    length_B11 = pages.length_B[:, None, None]

    def step(i: Array, found: Running) -> Running:
        page_B = lax.dynamic_index_in_dim(page_BN, i, axis=1, keepdims=False)
        k_BGDC = pages.k_YPGDC[pages.layer, page_B]
        v_BGCD = pages.v_YPGCD[pages.layer, page_B]
        position_11C = (i * C + jnp.arange(C))[None, None]
        own_B1C = position_11C < length_B11
        v_BGCD = jnp.where(own_B1C[..., None], v_BGCD, 0)  # 0 times NaN is NaN
        mask_BJC = jnp.broadcast_to(own_B1C, (own_B1C.shape[0], J, C))
        if since_BJ is not None:
            mask_BJC &= position_11C >= since_BJ[:, :, None]
        s_BGXC = product(q_BGXD, k_BGDC, _PER_HEAD)
        return merge(found, seen(s_BGXC, mask_BJC), v_BGCD, _PER_HEAD)

    first, end = jnp.min(read.first_B), jnp.max(read.end_B)
    return apart(finish(lax.fori_loop(first, end, step, found)), J)
