"""The target's pass over packed rows, over the chunks of a prompt, and over both."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from dcut_jax.config import ModelConfig
from dcut_jax.decode.pack import Layout, Packed, groups, unpack
from dcut_jax.models import dense
from dcut_jax.models.cache import KvCache, as_cached, in_order, pages_of_layer
from dcut_jax.models.collectives import Dealt, Over
from pallas_kernels.backends import PLAIN, Backends
from pallas_kernels.verify_attention import verify_attention


class Part(NamedTuple):
    """Rows that attend in a way of their own, as `dense.forward` takes them."""

    token_T: Int[Array, "T"]
    position_T: Int[Array, "T"]
    valid_T: Bool[Array, "T"]
    attend_layer: dense.Attend


def slots_part(
    kv: KvCache,
    table_BN: Int[Array, "B N"],
    token_T: Int[Array, "T"],
    length_B: Int[Array, "B"],
    packed: Packed,
    lay: Layout,
    forms: Backends = PLAIN,
) -> Part:
    """Anchors and kept drafts; the cache is only read.

    A row sees its request's cache and the rows of its request up to itself. Request
    `b`'s anchor stands at position `length_B[b]`.

    Args:
      forms: of attention.
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

    return Part(token_T, position_T, packed.valid_T, attend_layer)


def prompt_part(
    kv: KvCache,
    token_P: Int[Array, "P"],
    length: Int[Array, ""],
    count: Int[Array, ""],
    forms: Backends = PLAIN,
) -> Part:
    """One chunk of one prompt: causal over itself, after `length` cached positions.

    Its first `count` rows are real. The pages of `kv` are the prompt's, in order.

    Args:
      forms: of attention.
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
    return Part(token_P, length + row_P, row_P < count, attend_layer)


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
    """Runs anchors and kept drafts through the target; see `slots_part`.

    Args:
      forms: of attention and experts.
    """
    part = slots_part(kv, table_BN, token_T, length_B, packed, lay, forms)
    return dense.forward(
        params, cfg, *part, taps, over, dealt, expert_form=forms.experts
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
    """Runs a chunk of a prompt through the target; see `prompt_part`.

    Args:
      forms: of attention and experts.
    """
    part = prompt_part(kv, token_P, length, count, forms)
    return dense.forward(
        params, cfg, *part, taps, over, dealt, expert_form=forms.experts
    )


def rows_together(
    params: dict[str, Any],
    cfg: ModelConfig,
    parts: Sequence[Part],
    taps: tuple[int, ...],
    over: Over = None,
    forms: Backends = PLAIN,
) -> list[dense.Rows]:
    """Runs the rows of all parts in one pass: only attention tells them apart.

    Args:
      forms: of experts; of attention the parts have their own.
    """
    ends = np.cumsum([part.token_T.shape[0] for part in parts])[:-1].tolist()

    def attend_layer(layer: int, q_THD: Array, k_TGD: Array, v_TGD: Array) -> Array:
        split = zip(*(jnp.split(x, ends) for x in (q_THD, k_TGD, v_TGD)), strict=True)
        out = [
            part.attend_layer(layer, *some)
            for part, some in zip(parts, split, strict=True)
        ]
        return jnp.concatenate(out)

    rows = dense.forward(
        params,
        cfg,
        jnp.concatenate([part.token_T for part in parts]),
        jnp.concatenate([part.position_T for part in parts]),
        jnp.concatenate([part.valid_T for part in parts]),
        attend_layer,
        taps,
        over,
        expert_form=forms.experts,
    )
    hidden, tapped = jnp.split(rows.hidden, ends), jnp.split(rows.taps, ends)
    k, v = jnp.split(rows.k, ends, axis=1), jnp.split(rows.v, ends, axis=1)
    return [dense.Rows(*some) for some in zip(hidden, tapped, k, v, strict=True)]
