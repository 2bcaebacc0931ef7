"""Decoders (Llama family, Qwen3): parameter declaration and forward pass.

One path for dense targets and for mixtures of experts: what a layer's feed-forward part
is, its parameters say.
"""

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dcut_jax.config import ModelConfig
from dcut_jax.models import experts
from dcut_jax.models.collectives import Dealt, Over, lookup, total
from dcut_jax.models.layers import (
    attention_inputs,
    project,
    rms_norm,
    rotation,
    swiglu,
)
from dcut_jax.models.params import ParamSpec
from pallas_kernels.backends import Backend
from pallas_kernels.products import product
from pallas_kernels.verify_attention import sequence_attention

Attend = Callable[[int, Array, Array, Array], Array]
Feed = Callable[[Array, dict[str, Any], ModelConfig, Array], Array]


@flax.struct.dataclass
class Rows:
    """What a forward pass leaves for its rows.

    Attributes:
      hidden: after the final norm, ready for the LM head: `[*N, E]`.
      taps: residual stream after each tapped layer, concatenated: `[*N, C]`.
      k, v: keys (rotated) and values of every layer: `[layers, *N, G, D]`.
      crowded: layers that took the slower way to their experts, see
        `experts.exchange`; None where rows do not travel to any.
    """

    hidden: Float[Array, "..."]
    taps: Float[Array, "..."]
    k: Float[Array, "..."]
    v: Float[Array, "..."]
    crowded: Int[Array, ""] | None = None


def attention_specs(cfg: Any, qk_norm: bool) -> dict[str, ParamSpec]:
    """Attention parameters of one layer; `cfg` is a target's or a drafter's."""
    E, H, G, D = cfg.embed, cfg.heads, cfg.kv_heads, cfg.head_dim
    specs = {
        "q_EHD": ParamSpec((E, H, D), ("embed", "heads", "head_dim"), E),
        "k_EGD": ParamSpec((E, G, D), ("embed", "kv_heads", "head_dim"), E),
        "v_EGD": ParamSpec((E, G, D), ("embed", "kv_heads", "head_dim"), E),
        "o_HDE": ParamSpec((H, D, E), ("heads", "head_dim", "embed"), H * D),
    }
    if qk_norm:
        specs |= {
            "q_norm_D": ParamSpec((D,), ("head_dim",), None),
            "k_norm_D": ParamSpec((D,), ("head_dim",), None),
        }
    return specs


def mlp_specs(cfg: Any) -> dict[str, ParamSpec]:
    """Feed-forward parameters of one layer; `cfg` is a target's or a drafter's."""
    E, F = cfg.embed, cfg.mlp
    return {
        "gate_EF": ParamSpec((E, F), ("embed", "mlp"), E),
        "up_EF": ParamSpec((E, F), ("embed", "mlp"), E),
        "down_FE": ParamSpec((F, E), ("mlp", "embed"), F),
    }


def layer_specs(cfg: Any, qk_norm: bool) -> dict[str, Any]:
    """One pre-norm decoder layer, dense."""
    return block_specs(cfg, qk_norm) | mlp_specs(cfg)


def block_specs(cfg: Any, qk_norm: bool) -> dict[str, Any]:
    """One pre-norm decoder layer without its feed-forward part."""
    norm = ParamSpec((cfg.embed,), ("embed",), None)
    norms = {"attention_norm_E": norm, "mlp_norm_E": norm}
    return norms | attention_specs(cfg, qk_norm)


def target_layer_specs(cfg: ModelConfig, layer: int) -> dict[str, Any]:
    """A layer of a target, dense or with experts."""
    if cfg.experts is None or layer not in cfg.experts.layers:
        return layer_specs(cfg, cfg.qk_norm)
    own = {"experts": experts.specs(cfg.embed, cfg.experts)}
    return block_specs(cfg, cfg.qk_norm) | own


def specs(cfg: ModelConfig) -> dict[str, Any]:
    """Every parameter of a target; the head is absent where it is tied."""
    table = ParamSpec((cfg.vocab, cfg.embed), ("vocab", "embed"), cfg.embed)
    tree: dict[str, Any] = {
        "embed_VE": table,
        "layers": tuple(target_layer_specs(cfg, i) for i in range(cfg.layers)),
        "norm_E": ParamSpec((cfg.embed,), ("embed",), None),
    }
    if not cfg.tied:
        tree["head_VE"] = table
    return tree


def head_VE(params: dict[str, Any]) -> Array:
    """The LM head, which may be the embedding."""
    return params.get("head_VE", params["embed_VE"])


def logits(hidden: Float[Array, "*N E"], head_VE: Array) -> Float[Array, "*N V"]:
    """LM head, float32; of the words that this device's `head_VE` holds."""
    last = hidden.ndim - 1
    return product(hidden, head_VE, (((last,), (1,)), ((), ())))


def embed(
    token: Int[Array, "*N"], embed_VE: Array, over: Over = None
) -> Float[Array, "*N E"]:
    """Embedding rows, float32."""
    return lookup(token, embed_VE, over).astype(jnp.float32)


def feed_forward(
    x: Float[Array, "*N E"],
    layer: dict[str, Any],
    cfg: ModelConfig,
    valid: Bool[Array, "*N"],
    over: Over = None,
    dealt: Dealt | None = None,
    form: Backend = "platform",
) -> tuple[Float[Array, "*N E"], Array | int]:
    """The second half of a layer: dense, or the experts that its rows are sent to.

    Also, whether it was too crowded for the quick way to them: 1 or 0.
    """
    if "experts" not in layer:
        return swiglu(x, layer, over), 0
    assert cfg.experts is not None, "a layer with experts, in a config without"
    return experts.forward_on_mesh(
        x, layer["experts"], cfg.experts, valid, over, dealt, form
    )


def forward(
    params: dict[str, Any],
    cfg: ModelConfig,
    token: Int[Array, "*N"],
    position: Int[Array, "*N"],
    valid: Bool[Array, "*N"],
    attend_layer: Attend,
    taps: tuple[int, ...] = (),
    over: Over = None,
    dealt: Dealt | None = None,
    feed: Feed | None = None,
    expert_form: Backend = "platform",
) -> Rows:
    """Runs token rows through the decoder layers.

    Args:
      token, position: one entry per row, any leading shape.
      valid: false on padding, which is sent to no expert.
      attend_layer: from `(layer, q_NHD, k_NGD, v_NGD)` to the attention output
        `[*N, H, D]`. It alone knows which rows belong together and what is cached.
      taps: layers whose output (residual stream after the layer) is wanted.
      over: the mesh axis that `params` are cut over, see `models.collectives`. Then
        queries, keys and values are of this device's heads.
      dealt: how experts are dealt over another mesh axis, see `experts.exchange`.
      feed: in place of `feed_forward`, for one that records or trains.
      expert_form: of `pallas_kernels.experts`, where a layer has experts.
    """
    x = embed(token, params["embed_VE"], over)
    by = rotation(position, cfg.rope, cfg.head_dim)
    tapped: dict[int, Array] = {}
    keys, values = [], []
    crowded: Array | int = jnp.zeros((), jnp.int32)
    for i, layer in enumerate(params["layers"]):
        with jax.named_scope(f"layer_{i}"):
            h = rms_norm(x, layer["attention_norm_E"], cfg.norm_eps)
            q, k, v = attention_inputs(h, layer, by, cfg.norm_eps)
            keys.append(k)
            values.append(v)
            out = project(attend_layer(i, q, k, v), layer["o_HDE"], contract=2)
            x = x + total(out, over)
            h = rms_norm(x, layer["mlp_norm_E"], cfg.norm_eps)
            if feed is None:
                more, slow = feed_forward(
                    h, layer, cfg, valid, over, dealt, expert_form
                )
                x, crowded = x + more, crowded + slow
            else:
                x = x + feed(h, layer, cfg, valid)
        if i in taps:
            tapped[i] = x
    empty = jnp.zeros((*token.shape, 0), jnp.float32)
    return Rows(
        hidden=rms_norm(x, params["norm_E"], cfg.norm_eps),
        taps=jnp.concatenate([tapped[i] for i in taps], -1) if taps else empty,
        k=jnp.stack(keys),
        v=jnp.stack(values),
        crowded=jnp.asarray(crowded) if dealt and dealt.rows else None,
    )


def causal_mask(valid_NS: Bool[Array, "N S"]) -> Bool[Array, "N S S"]:
    """Whole sequences: a position sees itself and the valid ones before it."""
    S = valid_NS.shape[1]
    before_SS = jnp.tril(jnp.ones((S, S), bool))
    # The diagonal stays visible on padding, so that its softmax is defined.
    return before_SS[None] & (valid_NS[:, None, :] | jnp.eye(S, dtype=bool)[None])


def forward_sequences(
    params: dict[str, Any],
    cfg: ModelConfig,
    token_NS: Int[Array, "N S"],
    valid_NS: Bool[Array, "N S"],
    taps: tuple[int, ...] = (),
    feed: Feed | None = None,
) -> Rows:
    """Whole sequences without a cache (training features, parity tests)."""
    position_NS = jnp.broadcast_to(jnp.arange(token_NS.shape[1]), token_NS.shape)
    mask_NSS = causal_mask(valid_NS)

    def attend_layer(layer: int, q: Array, k: Array, v: Array) -> Array:
        del layer
        return sequence_attention(q, k, v, mask_NSS)

    return forward(
        params, cfg, token_NS, position_NS, valid_NS, attend_layer, taps, feed=feed
    )
