"""The DFlash v1 drafter: a whole block of drafts in one forward pass.

Source: DFlash (arXiv 2602.06036), in the layout of the z-lab checkpoints. Hidden
states of a few target layers, taken when the target processed a token, are projected
once and enter every drafter layer as keys and values; the block `[anchor, mask, ...]`
asks the questions. Embedding and LM head are the target's.

Two small heads of DSpark (arXiv 2607.05147) are options. DFlash's slots do not know
what the slots before them drafted; a Markov head adds that, as a low-rank bias on the
logits. A confidence head tells the chance that a draft is accepted. Both as in
`modeling/dspark` of deepseek-ai/DeepSpec; its gated and recurrent variants of the
Markov head are not there.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dcut_jax.config import DrafterConfig
from dcut_jax.models.cache import KvCache, pages_of_layer
from dcut_jax.models.collectives import Over, lookup, own_columns, total
from dcut_jax.models.dense import embed, layer_specs
from dcut_jax.models.layers import (
    attention_inputs,
    key_value,
    project,
    rms_norm,
    rotation,
    swiglu,
)
from dcut_jax.models.params import ParamSpec
from pallas_kernels.backends import Backend
from pallas_kernels.products import product
from pallas_kernels.verify_attention import verify_attention

Attend = Callable[[int, Array, Array, Array], Array]


def specs(cfg: DrafterConfig) -> dict[str, Any]:
    """Every parameter of a drafter.

    `X` is the rank in `markov` and, in `confidence`, the hidden state with a row of
    `previous_VX` behind it.
    """
    taps = len(cfg.target_layers) * cfg.embed
    norm = ParamSpec((cfg.embed,), ("embed",), None)
    tree: dict[str, Any] = {
        "fc_CE": ParamSpec((taps, cfg.embed), ("taps", "embed"), taps),
        "hidden_norm_E": norm,
        "layers": tuple(layer_specs(cfg, qk_norm=True) for _ in range(cfg.layers)),
        "norm_E": norm,
    }
    if cfg.markov_rank:
        shape, fan_in = (cfg.vocab, cfg.markov_rank), cfg.markov_rank
        table = ParamSpec(shape, ("vocab", "rank"), fan_in)
        tree["markov"] = {"previous_VX": table, "next_VX": table}
    if cfg.confidence_head:
        features = cfg.embed + cfg.markov_rank
        tree["confidence"] = {
            "weight_X": ParamSpec((features,), ("features",), features),
            "bias": ParamSpec((), (), features),
        }
    return tree


def context(
    params: dict[str, Any],
    cfg: DrafterConfig,
    taps: Float[Array, "*N C"],
    over: Over = None,
) -> Float[Array, "*N E"]:
    """Projects tapped features to the rows that every layer sees as context."""
    fc_CE = params["fc_CE"]
    ctx = total(project(own_columns(taps, fc_CE.shape[0], over), fc_CE), over)
    return rms_norm(ctx, params["hidden_norm_E"], cfg.norm_eps)


def context_kv(
    params: dict[str, Any],
    cfg: DrafterConfig,
    ctx: Float[Array, "*N E"],
    position: Int[Array, "*N"],
) -> tuple[Float[Array, "Y *N G D"], Float[Array, "Y *N G D"]]:
    """Keys (rotated) and values of context rows, in every layer.

    Context does not pass through a layer's input norm, so this depends on nothing but
    the row itself and is cached as soon as the target has processed the token.
    """
    by = rotation(position, cfg.rope, cfg.head_dim)
    pairs = [key_value(ctx, layer, by, cfg.norm_eps) for layer in params["layers"]]
    return jnp.stack([k for k, _ in pairs]), jnp.stack([v for _, v in pairs])


def block_mask(cfg: DrafterConfig, layer: int, rows: int) -> Bool[Array, "W W"]:
    """Which rows of its block a row sees in a layer (query first).

    Source: `dflash` 0.1.0. A sliding layer's window bounds the block part too, on
    both sides where the layer is not causal.
    """
    ahead_WW = jnp.arange(rows)[:, None] - jnp.arange(rows)[None, :]
    seen_WW = jnp.ones((rows, rows), bool)
    if cfg.causal[layer]:
        seen_WW &= ahead_WW >= 0
    window = layer_window(cfg, layer)
    if window is not None:
        seen_WW &= jnp.abs(ahead_WW) < window
    return seen_WW


def layer_window(cfg: DrafterConfig, layer: int) -> int | None:
    """The window of a sliding layer, None for full attention."""
    return cfg.window if cfg.layer_types[layer] == "sliding_attention" else None


def block_rows(cfg: DrafterConfig, width: int) -> int:
    """Rows of a block that drafts `width` tokens."""
    return width if cfg.sample_from_anchor else width + 1


def block_tokens(
    cfg: DrafterConfig, anchor: Int[Array, "*N"], width: int
) -> Int[Array, "*N W"]:
    """`[anchor, mask, ..., mask]`, enough rows for `width` drafts."""
    if not 1 <= width <= cfg.max_drafts:
        raise ValueError(
            f"width {width} is outside 1..{cfg.max_drafts}, the drafts of a block of "
            f"{cfg.block}"
        )
    masks = block_rows(cfg, width) - 1
    return jnp.pad(
        anchor[..., None],
        [(0, 0)] * anchor.ndim + [(0, masks)],
        constant_values=cfg.mask_token,
    )


def block_layers(
    params: dict[str, Any],
    cfg: DrafterConfig,
    x: Float[Array, "*N E"],
    position: Int[Array, "*N"],
    attend_layer: Attend,
    over: Over = None,
) -> Float[Array, "*N E"]:
    """Runs block rows through the layers and the final norm.

    Args:
      x: embedded block tokens.
      attend_layer: from `(layer, q_NHD, k_NGD, v_NGD)` of the block rows to the
        attention output `[*N, H, D]`. It alone knows the context.
      over: see `dense.forward`.
    """
    by = rotation(position, cfg.rope, cfg.head_dim)
    for i, layer in enumerate(params["layers"]):
        with jax.named_scope(f"draft_layer_{i}"):
            h = rms_norm(x, layer["attention_norm_E"], cfg.norm_eps)
            q, k, v = attention_inputs(h, layer, by, cfg.norm_eps)
            out = project(attend_layer(i, q, k, v), layer["o_HDE"], contract=2)
            x = x + total(out, over)
            x = x + swiglu(rms_norm(x, layer["mlp_norm_E"], cfg.norm_eps), layer, over)
    return rms_norm(x, params["norm_E"], cfg.norm_eps)


def draft_slots(
    cfg: DrafterConfig, hidden: Float[Array, "*N W E"]
) -> Float[Array, "*N K E"]:
    """The rows of a block that draft: all but the anchor's, by default."""
    return hidden if cfg.sample_from_anchor else hidden[..., 1:, :]


def markov_bias(
    params: dict[str, Any], previous: Int[Array, "*N"], over: Over = None
) -> Float[Array, "*N V"]:
    """What the token just before adds to the logits of a slot, float32.

    Args:
      params: of a drafter with a Markov head.
      previous: the token drafted just before; for the first draft the anchor.

    Source: `VanillaMarkov` of deepseek-ai/DeepSpec (`modeling/dspark/markov_head.py`):
    a row of one table times the transpose of another, without a constant.
    """
    markov = params["markov"]
    x = lookup(previous, markov["previous_VX"], over)
    return product(x, markov["next_VX"], (((x.ndim - 1,), (1,)), ((), ())))


def confidence_logit(
    params: dict[str, Any],
    cfg: DrafterConfig,
    hidden: Float[Array, "*N E"],
    previous: Int[Array, "*N"],
    over: Over = None,
) -> Float[Array, "*N"]:
    """Log-odds that a draft is accepted once those before it are, float32.

    The draft itself is no argument: at a temperature, a score that depends on the token
    it judges would change the law of the text once a plan goes by it.

    Args:
      params: of a drafter with a confidence head.
      hidden: of the slots, ready for the LM head.
      previous: see `markov_bias`; without a Markov head it is not looked at.

    Source: `AcceptRatePredictor` and `predict_confidence_step` of deepseek-ai/DeepSpec
    (`modeling/dspark`): one linear layer with a constant, on the hidden state and,
    behind it, the Markov head's row of the token before. In float32 whatever the
    weights' dtype, as vLLM and SGLang have it.
    """
    head = jax.tree.map(lambda x: x.astype(jnp.float32), params["confidence"])
    features = hidden.astype(jnp.float32)
    if cfg.markov_rank:
        table_VX = params["markov"]["previous_VX"]
        row = lookup(previous, table_VX, over).astype(jnp.float32)
        features = jnp.concatenate([features, row], axis=-1)
    return project(features, head["weight_X"]) + head["bias"]


def block_forward(
    params: dict[str, Any],
    cfg: DrafterConfig,
    embed_VE: Float[Array, "V E"],
    anchor_B: Int[Array, "B"],
    start_B: Int[Array, "B"],
    kv: KvCache,
    table_BN: Int[Array, "B N"],
    width: int,
    over: Over = None,
    attention: Backend = "xla",
) -> Float[Array, "B K E"]:
    """Hidden states of `width` draft slots per request, ready for the LM head.

    Nothing is written: keys and values of the block exist only inside this call.

    Args:
      embed_VE: the target's embedding.
      anchor_B: last committed token of each request.
      start_B: its position, which is also the number of context rows in the cache.
      kv, table_BN: cached `context_kv`, and the pages of each request.
      width: drafts wanted, `1..cfg.max_drafts`. On non-causal layers the drafts of a
        narrow block need not be a prefix of a wide block's.
      over: see `dense.forward`.
      attention: the form of `verify_attention`.

    Raises:
      ValueError: `width` is out of range.
    """
    token_BW = block_tokens(cfg, anchor_B, width)
    B, W = token_BW.shape
    position_BW = start_B[:, None] + jnp.arange(W)[None, :]

    def attend_layer(i: int, q: Array, k: Array, v: Array) -> Array:
        return verify_attention(
            q,
            k,
            v,
            jnp.broadcast_to(block_mask(cfg, i, W)[None], (B, W, W)),
            pages_of_layer(kv, i, table_BN, start_B),
            backend=attention,
            position_BJ=position_BW,
            window=layer_window(cfg, i),
        )

    x_BWE = embed(token_BW, embed_VE, over)
    hidden_BWE = block_layers(params, cfg, x_BWE, position_BW, attend_layer, over)
    return draft_slots(cfg, hidden_BWE)
