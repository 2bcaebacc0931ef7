"""Blocks of a training step, and the drafter's pass over them.

Source: DFlash (arXiv 2602.06036). A block sees the context strictly before its anchor,
which is what it will see when it drafts, and itself; no block sees another. Letters
beyond `axes`: N documents, A anchors of each.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from dcut_jax.axes import DATA, MODEL
from dcut_jax.config import DrafterConfig
from dcut_jax.models import drafter
from dcut_jax.models.dense import embed
from dcut_jax.train.attention import block_attention


@flax.struct.dataclass
class Blocks:
    """What one step trains on.

    Attributes:
      token_NS: documents, padded at the end.
      length_N: their lengths.
      taps_NSC: features of the target at every position; None until they are computed.
      hidden_NSE: its last hidden states, normed, from which the LM head makes the
        logits of the next position; None where nothing compares with them.
      anchor_NA: positions of the anchors; where `valid_NA` is false, anything in range.
      valid_NA: which anchors count.
    """

    token_NS: Int[Array, "N S"]
    length_N: Int[Array, "N"]
    taps_NSC: Float[Array, "N S C"] | None
    anchor_NA: Int[Array, "N A"]
    valid_NA: Bool[Array, "N A"]
    hidden_NSE: Float[Array, "N S E"] | None = None


def labels(
    blocks: Blocks, width: int
) -> tuple[Int[Array, "N A K"], Bool[Array, "N A K"]]:
    """The token each draft slot should propose, and whether there is one."""
    at_NAK = _label_positions(blocks, width)
    there_NAK = at_NAK < blocks.length_N[:, None, None]
    token_NAK = _rows_at(blocks.token_NS, at_NAK)
    return token_NAK, there_NAK & blocks.valid_NA[..., None]


def previous_tokens(blocks: Blocks, width: int) -> Int[Array, "N A K"]:
    """The token before each slot's: the anchor's, then the labels but the last."""
    return _rows_at(blocks.token_NS, _label_positions(blocks, width) - 1)


def target_hidden(blocks: Blocks, width: int) -> Float[Array, "N A K E"]:
    """Hidden states that the target judges each draft slot by.

    Raises:
      ValueError: the blocks have none.
    """
    if blocks.hidden_NSE is None:
        raise ValueError("these blocks have no hidden states of the target")
    return _rows_at(blocks.hidden_NSE, _label_positions(blocks, width) - 1)


def _label_positions(blocks: Blocks, width: int) -> Int[Array, "N A K"]:
    return blocks.anchor_NA[..., None] + 1 + jnp.arange(width)[None, None, :]


def _rows_at(values_NSX: Array, at_NAK: Int[Array, "N A K"]) -> Array:
    """Entries of each sequence at some of its positions; the last beyond its end."""
    at_NAK = jnp.minimum(at_NAK, values_NSX.shape[1] - 1)
    return jax.vmap(lambda values_SX, at_AK: values_SX[at_AK])(values_NSX, at_NAK)


def block_hidden(
    params: dict[str, Any],
    cfg: DrafterConfig,
    embed_VE: Float[Array, "V E"],
    blocks: Blocks,
    width: int,
    dtype: jnp.dtype = jnp.float32,
    mesh: Mesh | None = None,
) -> Float[Array, "N A K E"]:
    """Hidden states of the draft slots of every block.

    Args:
      width: drafts per block, `1..cfg.max_drafts`.
      dtype: of the attention products' inputs; the linear layers follow `params`.
      mesh: the devices of a step, if several; each attends with its own part.
    """
    N, S = blocks.token_NS.shape
    assert blocks.taps_NSC is not None, "features come first"
    ctx_NSE = drafter.context(params, cfg, blocks.taps_NSC)
    position_NS = jnp.broadcast_to(jnp.arange(S)[None], (N, S))
    k_YNSGD, v_YNSGD = drafter.context_kv(params, cfg, ctx_NSE, position_NS)

    anchor_token_NA = jnp.take_along_axis(blocks.token_NS, blocks.anchor_NA, axis=1)
    token_NAW = drafter.block_tokens(cfg, anchor_token_NA, width)
    W = token_NAW.shape[-1]
    position_NAW = blocks.anchor_NA[..., None] + jnp.arange(W)[None, None, :]

    def attend_layer(i: int, q: Array, k: Array, v: Array) -> Array:
        def attention(
            anchor_NA: Array, q: Array, k: Array, v: Array, k_ctx: Array, v_ctx: Array
        ) -> Array:
            return block_attention(cfg, i, anchor_NA, q, k, v, k_ctx, v_ctx, dtype)

        inputs = (blocks.anchor_NA, q, k, v, k_YNSGD[i], v_YNSGD[i])
        if mesh is None:
            return attention(*inputs)
        documents = PartitionSpec(DATA)
        by_head = PartitionSpec(DATA, None, None, MODEL)
        context = PartitionSpec(DATA, None, MODEL)
        return jax.shard_map(
            attention,
            mesh=mesh,
            in_specs=(documents, by_head, by_head, by_head, context, context),
            out_specs=by_head,
        )(*inputs)

    x_NAWE = embed(token_NAW, embed_VE)
    hidden = drafter.block_layers(params, cfg, x_NAWE, position_NAW, attend_layer)
    return drafter.draft_slots(cfg, hidden)
