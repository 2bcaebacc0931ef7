"""cuDNN's attention behind the same api: for GPUs, and only where it is asked for.

Through JAX it takes one array of keys and one of values a request, in 16 bits, and a
mask. So the pages of the whole table are gathered, turned and joined with the fresh
rows before it starts, whatever is in them, and what comes out is rounded to 16 bits. If
its speed is worth that, the bench of a device will tell.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_kernels.backends import require
from pallas_kernels.verify_attention.softmax import Pages


def attend(
    q_BJHD: Float[Array, "B J H D"],
    k_BSGD: Float[Array, "B S G D"],
    v_BSGD: Float[Array, "B S G D"],
    mask_BJS: Bool[Array, "B J S"],
    pages: Pages,
    since_BJ: Int32[Array, "B J"] | None,
) -> Float32[Array, "B J H D"]:
    """See `reference.attend`; fresh keys and values are rounded to the pages' dtype.

    Raises:
      ValueError: pages of another dtype than cuDNN has, or lowered for what has none.
      RuntimeError: cuDNN is not there.
    """
    dtype = pages.k_YPGDC.dtype
    if dtype not in (jnp.bfloat16, jnp.float16):
        raise ValueError(
            f'backend "cudnn" takes keys and values of 16 bits, found {dtype}; keep '
            f'the cache in bfloat16, or use "xla"'
        )
    keys, values, mask_B1JL = gathered(k_BSGD, v_BSGD, mask_BJS, pages, since_BJ)
    out = jax.nn.dot_product_attention(
        require(q_BJHD, "attention", "cudnn").astype(dtype),
        keys,
        values,
        mask=mask_B1JL,
        implementation="cudnn",
    )
    return out.astype(jnp.float32)


def gathered(
    k_BSGD: Float[Array, "B S G D"],
    v_BSGD: Float[Array, "B S G D"],
    mask_BJS: Bool[Array, "B J S"],
    pages: Pages,
    since_BJ: Int32[Array, "B J"] | None,
) -> tuple[Float[Array, "B L G D"], Float[Array, "B L G D"], Bool[Array, "B 1 J L"]]:
    """Keys, values and mask: all places of the table, and fresh rows behind them."""
    page_BN = pages.valid_BN
    (B, N), C, J = page_BN.shape, pages.size, mask_BJS.shape[1]
    k_BNGDC = pages.k_YPGDC.at[pages.layer, page_BN].get(mode="clip")
    v_BNGCD = pages.v_YPGCD.at[pages.layer, page_BN].get(mode="clip")
    G, D = k_BNGDC.shape[2:4]
    place_1L = jnp.arange(N * C)[None]
    own_BL = place_1L < pages.length_B[:, None]

    def joined(x_BNCGD: Array, fresh_BSGD: Array) -> Array:
        # Masked is not enough: a mask is added, and what lies there may be NaN.
        x_BLGD = x_BNCGD.reshape(B, N * C, G, D)
        x_BLGD = jnp.where(own_BL[:, :, None, None], x_BLGD, 0)
        return jnp.concatenate([x_BLGD, fresh_BSGD.astype(x_BLGD.dtype)], axis=1)

    seen_BJL = jnp.broadcast_to(own_BL[:, None], (B, J, N * C))
    if since_BJ is not None:
        seen_BJL &= place_1L[None] >= since_BJ[:, :, None]
    return (
        joined(k_BNGDC.transpose(0, 1, 4, 2, 3), k_BSGD),
        joined(v_BNGCD.transpose(0, 1, 3, 2, 4), v_BSGD),
        jnp.concatenate([seen_BJL, mask_BJS], axis=2)[:, None],
    )
