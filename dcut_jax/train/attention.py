"""Attention of many blocks: each over its own rows and its document's context.

Two forms of one function. The direct one holds the scores of every block with the whole
context. The sparse one takes a few blocks and a chunk of context at a time, keeps a
running softmax, leaves out chunks that none of the blocks sees, and computes scores
anew in the backward pass: what it holds does not grow with the context, and what it
computes is what is seen, in whole chunks. It serves where the direct form's scores are
large.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from dcut_jax.config import DrafterConfig
from dcut_jax.models import drafter

# Bytes of scores, float32, from which the sparse form is taken.
SPARSE_FROM = 1 << 28
# Of the sparse form: blocks that are taken together, and positions of a chunk.
GROUP, CHUNK = 16, 256


def block_attention(
    cfg: DrafterConfig,
    layer: int,
    anchor_NA: Int[Array, "N A"],
    q_NAWHD: Float[Array, "N A W H D"],
    k_NAWGD: Float[Array, "N A W G D"],
    v_NAWGD: Float[Array, "N A W G D"],
    k_NSGD: Float[Array, "N S G D"],
    v_NSGD: Float[Array, "N S G D"],
    dtype: jnp.dtype,
    sparse: bool | None = None,
) -> Float[Array, "N A W H D"]:
    """Each block over its document's context before the anchor, and over itself.

    Args:
      anchor_NA: the blocks' anchors, in order where the sparse form is to skip much.
      k_NAWGD, v_NAWGD: of the blocks' own rows.
      k_NSGD, v_NSGD: of the context.
      dtype: what products read; they accumulate in float32.
      sparse: which form; None to choose by size.
    """
    N, A, W, H, D = q_NAWHD.shape
    S = k_NSGD.shape[1]
    if sparse is None:
        sparse = 4 * N * A * W * H * S >= SPARSE_FROM
    scaled = (q_NAWHD * (1 / math.sqrt(D))).astype(dtype)
    rest = (x.astype(dtype) for x in (k_NAWGD, v_NAWGD, k_NSGD, v_NSGD))
    inputs = _Inputs(anchor_NA, scaled, *rest)
    window = drafter.layer_window(cfg, layer)
    own_WW = drafter.block_mask(cfg, layer, W)
    if not sparse:
        return _direct(*inputs, own_WW, window)

    # One document at a time: mapped over several, no chunk could be left out.
    def one(document: _Inputs) -> Array:
        return _sparse(*document, own_WW, window)

    return lax.map(one, inputs)


class _Inputs(NamedTuple):
    anchor_NA: Array
    q_NAWHD: Array
    k_NAWGD: Array
    v_NAWGD: Array
    k_NSGD: Array
    v_NSGD: Array


def _seen(
    anchor: Int[Array, "*A"],
    position_S: Int[Array, "S"],
    rows: int,
    window: int | None,
) -> Bool[Array, "*A W S"]:
    """Which context the rows of a block see; they stand from the anchor on."""
    anchor = anchor[..., None, None]
    ahead = anchor - jnp.expand_dims(position_S, tuple(range(anchor.ndim - 1)))
    row_W = jnp.expand_dims(jnp.arange(rows)[:, None], tuple(range(anchor.ndim - 2)))
    seen = jnp.broadcast_to(ahead > 0, (*ahead.shape[:-2], rows, ahead.shape[-1]))
    if window is not None:
        seen &= ahead + row_W < window
    return seen


def _direct(
    anchor_NA: Array,
    q_NAWHD: Array,
    k_NAWGD: Array,
    v_NAWGD: Array,
    k_NSGD: Array,
    v_NSGD: Array,
    own_WW: Bool[Array, "W W"],
    window: int | None,
) -> Float[Array, "N A W H D"]:
    N, A, W, H, D = q_NAWHD.shape
    S, G = k_NSGD.shape[1:3]
    R = H // G
    # X: query rows that share a key/value head of one document.
    q_NGARWD = q_NAWHD.reshape(N, A, W, G, R, D).transpose(0, 3, 1, 4, 2, 5)
    s_ctx = _dot(
        q_NGARWD.reshape(N, G, A * R * W, D),
        k_NSGD.transpose(0, 2, 1, 3),
        "NGXD,NGSD->NGXS",
    ).reshape(N, G, A, R, W, S)
    k_blk = k_NAWGD.transpose(0, 3, 1, 2, 4)  # N G A W D
    v_blk = v_NAWGD.transpose(0, 3, 1, 2, 4)
    s_blk = _dot(
        q_NGARWD.reshape(N, G, A, R * W, D), k_blk, "NGAXD,NGAWD->NGAXW"
    ).reshape(N, G, A, R, W, W)
    seen_NAWS = _seen(anchor_NA, jnp.arange(S), W, window)
    s_ctx = jnp.where(seen_NAWS[:, None, :, None], s_ctx, -jnp.inf)
    s_blk = jnp.where(own_WW.reshape(1, 1, 1, 1, W, W), s_blk, -jnp.inf)

    top = lax.stop_gradient(
        jnp.maximum(
            jnp.max(s_ctx, axis=-1, keepdims=True),
            jnp.max(s_blk, axis=-1, keepdims=True),
        )
    )
    p_ctx, p_blk = jnp.exp(s_ctx - top), jnp.exp(s_blk - top)
    total = jnp.sum(p_ctx, axis=-1, keepdims=True) + jnp.sum(
        p_blk, axis=-1, keepdims=True
    )
    o_ctx = _dot(
        p_ctx.astype(v_NSGD.dtype).reshape(N, G, A * R * W, S),
        v_NSGD.transpose(0, 2, 1, 3),
        "NGXS,NGSD->NGXD",
    ).reshape(N, G, A, R, W, D)
    o_blk = _dot(
        p_blk.astype(v_blk.dtype).reshape(N, G, A, R * W, W),
        v_blk,
        "NGAXW,NGAWD->NGAXD",
    ).reshape(N, G, A, R, W, D)
    out = (o_ctx + o_blk) / total
    return out.transpose(0, 2, 4, 1, 3, 5).reshape(N, A, W, H, D)


def _sparse(
    anchor_A: Array,
    q_AWHD: Array,
    k_AWGD: Array,
    v_AWGD: Array,
    k_SGD: Array,
    v_SGD: Array,
    own_WW: Bool[Array, "W W"],
    window: int | None,
) -> Float[Array, "A W H D"]:
    """One document: groups of blocks one after another, each over chunks of context."""
    A, W, H, D = q_AWHD.shape
    S, G = k_SGD.shape[:2]
    R = H // G

    def groups(x: Array) -> Array:
        """`[groups, GROUP, ...]`, the last one filled with zeros."""
        padded = jnp.pad(x, [(0, -A % GROUP)] + [(0, 0)] * (x.ndim - 1))
        return padded.reshape(-1, GROUP, *x.shape[1:])

    def chunks(x: Array) -> Array:
        padded = jnp.pad(x, [(0, -S % CHUNK)] + [(0, 0)] * (x.ndim - 1))
        return padded.reshape(-1, CHUNK, *x.shape[1:]).transpose(0, 2, 1, 3)

    start_Q = jnp.arange(-(-S // CHUNK)) * CHUNK  # Q: chunks
    k_QGSD, v_QGSD = chunks(k_SGD), chunks(v_SGD)

    @jax.checkpoint
    def group(some: tuple[Array, Array, Array, Array]) -> Array:
        anchor_A, q_AWHD, k_AWGD, v_AWGD = some
        q_GARWD = q_AWHD.reshape(GROUP, W, G, R, D).transpose(2, 0, 3, 1, 4)
        s = _dot(q_GARWD, k_AWGD, "GARWD,AXGD->GARWX")
        s = jnp.where(own_WW[None, None, None], s, -jnp.inf)
        # A row sees itself, so the running maximum is finite from here on.
        top = lax.stop_gradient(jnp.max(s, axis=-1, keepdims=True))
        p = jnp.exp(s - top)
        total = jnp.sum(p, axis=-1, keepdims=True)
        out = _dot(p.astype(v_AWGD.dtype), v_AWGD, "GARWX,AXGD->GARWD")
        last = jnp.max(anchor_A)
        first = jnp.zeros((), jnp.int32)
        if window is not None:
            first = jnp.min(jnp.where(anchor_A > 0, anchor_A, last)) - window

        def chunk(carry: tuple[Array, ...], at: tuple[Array, ...]):
            start, k_GSD, v_GSD = at

            def see(carry: tuple[Array, ...]) -> tuple[Array, ...]:
                top, total, out = carry
                s = _dot(q_GARWD, k_GSD, "GARWD,GSD->GARWS")
                seen_AWS = _seen(anchor_A, start + jnp.arange(CHUNK), W, window)
                s = jnp.where(seen_AWS[None, :, None], s, -jnp.inf)
                new_top = lax.stop_gradient(
                    jnp.maximum(top, jnp.max(s, axis=-1, keepdims=True))
                )
                p, keep = jnp.exp(s - new_top), jnp.exp(top - new_top)
                total = total * keep + jnp.sum(p, axis=-1, keepdims=True)
                more = _dot(p.astype(v_GSD.dtype), v_GSD, "GARWS,GSD->GARWD")
                return new_top, total, out * keep + more

            visible = (start < last) & (start + CHUNK > first)
            return lax.cond(visible, see, lambda carry: carry, carry), None

        carry = (top, total, out)
        (_, total, out), _ = lax.scan(chunk, carry, (start_Q, k_QGSD, v_QGSD))
        return (out / total).transpose(1, 3, 0, 2, 4).reshape(GROUP, W, H, D)

    found = lax.map(group, tuple(map(groups, (anchor_A, q_AWHD, k_AWGD, v_AWGD))))
    return found.reshape(-1, W, H, D)[:A]


def _dot(a: Array, b: Array, how: str) -> Array:
    return jnp.einsum(how, a, b, preferred_element_type=jnp.float32)
