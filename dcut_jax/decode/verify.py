"""The target's pass over packed rows, and over the chunks of a prompt."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int

from dcut_jax.config import ModelConfig
from dcut_jax.decode.pack import Layout, Packed, groups, unpack
from dcut_jax.models import dense
from dcut_jax.models.attention import attend
from dcut_jax.models.cache import KvCache, read_owners, read_slot, read_slots


def verify_rows(
    params: dict[str, Any],
    cfg: ModelConfig,
    kv: KvCache,
    token_T: Int[Array, "T"],
    length_B: Int[Array, "B"],
    packed: Packed,
    lay: Layout,
    taps: tuple[int, ...],
) -> dense.Rows:
    """Runs anchors and kept drafts through the target; the cache is only read.

    A row sees its request's cache and the rows of its request up to itself. Request
    `b`'s anchor stands at position `length_B[b]`.
    """
    width = lay.width
    group = groups(packed, lay)
    position_T = length_B[packed.owner_T] + packed.offset_T
    slot_W = jnp.arange(width)
    first_BJ = jnp.broadcast_to(jnp.arange(lay.group)[None, :], (lay.slots, lay.group))
    mask_BJW = slot_W[None, None, :] <= first_BJ[:, :, None]
    mask_OJW = slot_W[None, None, :] <= group.offset_OJ[:, :, None]

    def attend_layer(layer: int, q_THD: Array, k_TGD: Array, v_TGD: Array) -> Array:
        k_BWGD = unpack(k_TGD, packed, width)
        v_BWGD = unpack(v_TGD, packed, width)
        out = attend(
            q_THD[group.row_BJ],
            k_BWGD,
            v_BWGD,
            mask_BJW,
            read_slots(kv, layer, length_B),
        )
        H, D = out.shape[-2:]
        flat = out.reshape(-1, H, D)
        if lay.overflow:
            further = attend(
                q_THD[group.row_OJ],
                k_BWGD[group.owner_O],
                v_BWGD[group.owner_O],
                mask_OJW,
                read_owners(kv, layer, length_B, group.owner_O),
            )
            flat = jnp.concatenate([flat, further.reshape(-1, H, D)])
        return flat[group.place_T]

    return dense.forward(params, cfg, token_T, position_T, attend_layer, taps)


def prefill_rows(
    params: dict[str, Any],
    cfg: ModelConfig,
    kv: KvCache,
    token_P: Int[Array, "P"],
    slot: Int[Array, ""],
    length: Int[Array, ""],
    taps: tuple[int, ...],
) -> dense.Rows:
    """One chunk of one prompt: causal over itself, after `length` cached positions."""
    P = token_P.shape[0]
    mask_1PP = jnp.tril(jnp.ones((P, P), bool))[None]

    def attend_layer(layer: int, q_PHD: Array, k_PGD: Array, v_PGD: Array) -> Array:
        cached = read_slot(kv, layer, slot, length)
        return attend(q_PHD[None], k_PGD[None], v_PGD[None], mask_1PP, cached)[0]

    position_P = length + jnp.arange(P)
    return dense.forward(params, cfg, token_P, position_P, attend_layer, taps)
