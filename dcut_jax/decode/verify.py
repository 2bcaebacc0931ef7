"""The target's pass over packed rows, and over the chunks of a prompt."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int

from dcut_jax.config import ModelConfig
from dcut_jax.decode.pack import Layout, Packed, groups, unpack
from dcut_jax.models import dense
from dcut_jax.models.cache import KvCache, as_cached, in_order, pages_of_layer
from dcut_jax.models.collectives import Dealt, Over
from pallas_kernels.backends import PLAIN, Backends
from pallas_kernels.verify_attention import verify_attention


def verify_rows(
    params: dict[str, Any],
    cfg: ModelConfig,
    kv: KvCache,
    table_BN: Int[Array, "B N"],
    token_T: Int[Array, "T"],
    length_B: Int[Array, "B"],
    packed: Packed,
    lay: Layout,
    taps: tuple[int, ...],
    over: Over = None,
    dealt: Dealt | None = None,
    forms: Backends = PLAIN,
) -> dense.Rows:
    """Runs anchors and kept drafts through the target; the cache is only read.

    A row sees its request's cache and the rows of its request up to itself. Request
    `b`'s anchor stands at position `length_B[b]`.

    Args:
      forms: of attention and experts.
    """
    width = lay.width
    group = groups(packed, lay)
    position_T = length_B[packed.owner_T] + packed.offset_T
    mask_IJW = jnp.arange(width)[None, None, :] <= group.offset_IJ[:, :, None]
    own_BW11 = (jnp.arange(width)[None] < packed.count_B[:, None])[:, :, None, None]

    def attend_layer(layer: int, q_THD: Array, k_TGD: Array, v_TGD: Array) -> Array:
        k_TGD, v_TGD = as_cached(kv, k_TGD, v_TGD)
        k_BWGD, v_BWGD = unpack(k_TGD, packed, width), unpack(v_TGD, packed, width)
        # Behind its own a request has others' rows: masked, but 0 times NaN is NaN.
        v_BWGD = jnp.where(own_BW11, v_BWGD, 0)
        if lay.overflow:
            k_IWGD, v_IWGD = k_BWGD[group.owner_I], v_BWGD[group.owner_I]
            length_I, table_IN = length_B[group.owner_I], table_BN[group.owner_I]
        else:  # every group is a slot's own
            k_IWGD, v_IWGD = k_BWGD, v_BWGD
            length_I, table_IN = length_B, table_BN
        out_IJHD = verify_attention(
            q_THD[group.row_IJ],
            k_IWGD,
            v_IWGD,
            mask_IJW,
            pages_of_layer(kv, layer, table_IN, length_I),
            backend=forms.attention,
        )
        return out_IJHD.reshape(-1, *out_IJHD.shape[2:])[group.place_T]

    return dense.forward(
        params,
        cfg,
        token_T,
        position_T,
        packed.valid_T,
        attend_layer,
        taps,
        over,
        dealt,
        expert_form=forms.experts,
    )


def prefill_rows(
    params: dict[str, Any],
    cfg: ModelConfig,
    kv: KvCache,
    token_P: Int[Array, "P"],
    length: Int[Array, ""],
    count: Int[Array, ""],
    taps: tuple[int, ...],
    over: Over = None,
    dealt: Dealt | None = None,
    forms: Backends = PLAIN,
) -> dense.Rows:
    """One chunk of one prompt: causal over itself, after `length` cached positions.

    Its first `count` rows are real. The pages of `kv` are the prompt's, in order.

    Args:
      forms: of attention and experts.
    """
    P = token_P.shape[0]
    table_1N = in_order(1, kv.k.shape[1])
    mask_1PP = jnp.tril(jnp.ones((P, P), bool))[None]

    def attend_layer(layer: int, q_PHD: Array, k_PGD: Array, v_PGD: Array) -> Array:
        k_PGD, v_PGD = as_cached(kv, k_PGD, v_PGD)
        pages = pages_of_layer(kv, layer, table_1N, length[None])
        fresh = q_PHD[None], k_PGD[None], v_PGD[None], mask_1PP
        return verify_attention(*fresh, pages, backend=forms.attention)[0]

    row_P = jnp.arange(P)
    return dense.forward(
        params,
        cfg,
        token_P,
        length + row_P,
        row_P < count,
        attend_layer,
        taps,
        over,
        dealt,
        expert_form=forms.experts,
    )
