"""The DFlash training loss: many blocks per document, none of which sees another.

Source: DFlash (arXiv 2602.06036). A block sees the context strictly before its anchor,
which is what it will see when it drafts, and itself. Letters beyond `axes`:
N documents, A anchors of each, M words of a shortlist.
"""

import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from dcut_jax.config import DrafterConfig
from dcut_jax.models import drafter
from dcut_jax.models.dense import embed, logits
from dcut_jax.models.params import cast


@flax.struct.dataclass
class Blocks:
    """What one step trains on.

    Attributes:
      token_NS: documents, padded at the end.
      length_N: their lengths.
      taps_NSC: features of the target at every position.
      anchor_NA: positions of the anchors; where `valid_NA` is false, anything in range.
      valid_NA: which anchors count.
    """

    token_NS: Int[Array, "N S"]
    length_N: Int[Array, "N"]
    taps_NSC: Float[Array, "N S C"]
    anchor_NA: Int[Array, "N A"]
    valid_NA: Bool[Array, "N A"]


def labels(
    blocks: Blocks, width: int
) -> tuple[Int[Array, "N A K"], Bool[Array, "N A K"]]:
    """The token each draft slot should propose, and whether there is one."""
    first = blocks.anchor_NA[..., None] + 1
    at_NAK = first + jnp.arange(width)[None, None, :]
    there_NAK = at_NAK < blocks.length_N[:, None, None]
    N, A, K = at_NAK.shape
    last = blocks.token_NS.shape[1] - 1
    flat = jnp.minimum(at_NAK, last).reshape(N, A * K)
    token_NAK = jnp.take_along_axis(blocks.token_NS, flat, axis=1).reshape(N, A, K)
    return token_NAK, there_NAK & blocks.valid_NA[..., None]


def slot_weights(width: int, gamma: float) -> Float[Array, "K"]:
    """`exp(-(k - 1) / gamma)` for drafts `k = 1..width`."""
    return jnp.exp(-jnp.arange(width, dtype=jnp.float32) / gamma)


def _block_attention(
    cfg: DrafterConfig,
    layer: int,
    blocks: Blocks,
    q_NAWHD: Array,
    k_NAWGD: Array,
    v_NAWGD: Array,
    k_NSGD: Array,
    v_NSGD: Array,
    dtype: jnp.dtype,
) -> Float[Array, "N A W H D"]:
    """Each block over its document's context before the anchor, and over itself."""
    N, A, W, H, D = q_NAWHD.shape
    S, G = k_NSGD.shape[1:3]
    R = H // G
    # X: query rows that share a key/value head of one document.
    q_NAGXD = (
        (q_NAWHD * (1 / math.sqrt(D)))
        .reshape(N, A, W, G, R, D)
        .transpose(0, 3, 1, 4, 2, 5)
        .astype(dtype)
    )  # N G A R W D
    s_ctx = _dot(
        q_NAGXD.reshape(N, G, A * R * W, D),
        k_NSGD.transpose(0, 2, 1, 3).astype(dtype),
        "NGXD,NGSD->NGXS",
    ).reshape(N, G, A, R, W, S)
    k_blk = k_NAWGD.transpose(0, 3, 1, 2, 4).astype(dtype)  # N G A W D
    v_blk = v_NAWGD.transpose(0, 3, 1, 2, 4).astype(dtype)
    s_blk = _dot(
        q_NAGXD.reshape(N, G, A, R * W, D), k_blk, "NGAXD,NGAWD->NGAXW"
    ).reshape(N, G, A, R, W, W)

    position_S = jnp.arange(S)[None, None, None, :]
    anchor_NA11 = blocks.anchor_NA[:, :, None, None]
    seen = position_S < anchor_NA11
    window = drafter.layer_window(cfg, layer)
    if window is not None:
        row_W = jnp.arange(W)[None, None, :, None]
        seen = seen & (anchor_NA11 + row_W - position_S < window)
    s_ctx = jnp.where(seen[:, None, :, None], s_ctx, -jnp.inf)
    own_WW = drafter.block_mask(cfg, layer, W)
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
        p_ctx.astype(dtype).reshape(N, G, A * R * W, S),
        v_NSGD.transpose(0, 2, 1, 3).astype(dtype),
        "NGXS,NGSD->NGXD",
    ).reshape(N, G, A, R, W, D)
    o_blk = _dot(
        p_blk.astype(dtype).reshape(N, G, A, R * W, W), v_blk, "NGAXW,NGAWD->NGAXD"
    ).reshape(N, G, A, R, W, D)
    out = (o_ctx + o_blk) / total
    return out.transpose(0, 2, 4, 1, 3, 5).reshape(N, A, W, H, D)


def _dot(a: Array, b: Array, how: str) -> Array:
    return jnp.einsum(how, a, b, preferred_element_type=jnp.float32)


def block_hidden(
    params: dict[str, Any],
    cfg: DrafterConfig,
    embed_VE: Float[Array, "V E"],
    blocks: Blocks,
    width: int,
    dtype: jnp.dtype = jnp.float32,
) -> Float[Array, "N A K E"]:
    """Hidden states of the draft slots of every block.

    Args:
      width: drafts per block, `1..cfg.max_drafts`.
      dtype: of the attention products' inputs; the linear layers follow `params`.
    """
    N, S = blocks.token_NS.shape
    ctx_NSE = drafter.context(params, cfg, blocks.taps_NSC)
    position_NS = jnp.broadcast_to(jnp.arange(S)[None], (N, S))
    k_YNSGD, v_YNSGD = drafter.context_kv(params, cfg, ctx_NSE, position_NS)

    anchor_token_NA = jnp.take_along_axis(blocks.token_NS, blocks.anchor_NA, axis=1)
    token_NAW = drafter.block_tokens(cfg, anchor_token_NA, width)
    W = token_NAW.shape[-1]
    position_NAW = blocks.anchor_NA[..., None] + jnp.arange(W)[None, None, :]

    def attend_layer(i: int, q: Array, k: Array, v: Array) -> Array:
        return _block_attention(cfg, i, blocks, q, k, v, k_YNSGD[i], v_YNSGD[i], dtype)

    x_NAWE = embed(token_NAW, embed_VE)
    hidden = drafter.block_layers(params, cfg, x_NAWE, position_NAW, attend_layer)
    return drafter.draft_slots(cfg, hidden)


@jax.custom_vjp
def cross_entropy(
    hidden_XE: Float[Array, "X E"],
    head_ME: Float[Array, "M E"],
    label_X: Int[Array, "X"],
    bias_M: Float[Array, "M"] | None = None,
) -> Float[Array, "X"]:
    """`-log softmax(hidden @ head.T + bias)[label]`, differentiable in `hidden`.

    The head is frozen and gets no gradient, so the gradient of a row is the mean head
    row under the softmax minus the label's, which the forward pass can form while it
    has the logits at hand: nothing of size `X * M` is kept for the backward pass.
    """
    return _cross_entropy(hidden_XE, head_ME, label_X, bias_M, False)[0]


def _cross_entropy(
    hidden_XE: Array,
    head_ME: Array,
    label_X: Array,
    bias_M: Array | None,
    gradient: bool,
) -> tuple[Array, Array | None]:
    logit_XM = logits(hidden_XE, head_ME)
    if bias_M is not None:
        logit_XM = logit_XM + bias_M[None, :]
    log_total_X1 = jax.nn.logsumexp(logit_XM, axis=-1, keepdims=True)
    label_XE = head_ME[label_X]
    # The label's logit with the operands that made the others.
    read_XE = hidden_XE.astype(head_ME.dtype).astype(jnp.float32)
    label_logit_X = jnp.sum(read_XE * label_XE.astype(jnp.float32), axis=-1)
    if bias_M is not None:
        label_logit_X = label_logit_X + bias_M[label_X]
    nll_X = log_total_X1[:, 0] - label_logit_X
    if not gradient:
        return nll_X, None
    p_XM = jnp.exp(logit_XM - log_total_X1).astype(head_ME.dtype)
    mean_XE = lax.dot_general(
        p_XM, head_ME, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
    )
    return nll_X, mean_XE - label_XE.astype(jnp.float32)


def _cross_entropy_forward(
    hidden_XE: Array, head_ME: Array, label_X: Array, bias_M: Array | None = None
):
    return _cross_entropy(hidden_XE, head_ME, label_X, bias_M, True)


def _cross_entropy_backward(grad_XE: Array, grad_X: Array):
    return grad_XE * grad_X[:, None], None, None, None


cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


@flax.struct.dataclass
class Shortlist:
    """A part of the vocabulary that stands for the whole in one step.

    Attributes:
      word_M: its tokens, without repeats; every label of the step is among them.
      place_V: a token's index in `word_M` (anything for tokens outside).
      bias_M: added to the logits: minus the log of the chance a word had to be drawn,
        so that those drawn at random also stand for those that were not.
    """

    word_M: Int[Array, "M"]
    place_V: Int[Array, "V"]
    bias_M: Float[Array, "M"]


def block_loss(
    params: dict[str, Any],
    cfg: DrafterConfig,
    embed_VE: Float[Array, "V E"],
    head_VE: Float[Array, "V E"],
    blocks: Blocks,
    width: int,
    gamma: float,
    shortlist: Shortlist | None = None,
    compute_dtype: jnp.dtype = jnp.float32,
) -> Float[Array, ""]:
    """Weighted cross entropy of the drafts, over the sum of the weights.

    Args:
      params: float32 masters.
      embed_VE, head_VE: the target's, frozen.
      width: drafts per block; fewer than the full block train its narrow form.
      gamma: slot `k >= 1` weighs `exp(-(k - 1) / gamma)`.
      shortlist: if given, softmax runs over its words only.
      compute_dtype: what products read; they accumulate in float32 in any case.
    """
    hidden_NAKE = block_hidden(
        cast(params, compute_dtype), cfg, embed_VE, blocks, width, compute_dtype
    )
    label_NAK, there_NAK = labels(blocks, width)
    head_ME, bias_M = head_VE, None
    if shortlist is not None:
        bias_M = shortlist.bias_M
        head_ME = head_VE[shortlist.word_M]
        label_NAK = shortlist.place_V[label_NAK]
    nll_X = cross_entropy(
        hidden_NAKE.reshape(-1, cfg.embed),
        head_ME.astype(compute_dtype),
        label_NAK.reshape(-1),
        bias_M,
    )
    weight_NAK = (
        there_NAK.astype(jnp.float32) * slot_weights(width, gamma)[None, None, :]
    )
    total = jnp.maximum(jnp.sum(weight_NAK), 1e-6)
    return jnp.sum(nll_X.reshape(weight_NAK.shape) * weight_NAK) / total


def block_matches(
    params: dict[str, Any],
    cfg: DrafterConfig,
    embed_VE: Float[Array, "V E"],
    head_VE: Float[Array, "V E"],
    blocks: Blocks,
    width: int,
    compute_dtype: jnp.dtype = jnp.float32,
) -> tuple[Bool[Array, "N A K"], Bool[Array, "N A K"]]:
    """Whether each draft is the document's token, and whether there is such a token.

    Over the whole vocabulary. Where the documents are the target's greedy text, these
    are the acceptances of greedy decoding.
    """
    hidden_NAKE = block_hidden(
        cast(params, compute_dtype), cfg, embed_VE, blocks, width, compute_dtype
    )
    label_NAK, there_NAK = labels(blocks, width)
    head = head_VE.astype(compute_dtype)
    # One document at a time: logits of all would not fit.
    draft_NAK = lax.map(lambda h: jnp.argmax(logits(h, head), axis=-1), hidden_NAKE)
    return (draft_NAK == label_NAK) & there_NAK, there_NAK
