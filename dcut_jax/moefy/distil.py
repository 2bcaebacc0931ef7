"""Routers and norms fitted to the dense target's own distribution.

Neurons stay as they are. Choosing experts has no gradient, so a choice's is taken to be
that of a soft one: how far a score is above or below the place where the choice ends.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from dcut_jax.config import ExpertsConfig, ModelConfig
from dcut_jax.models import dense
from dcut_jax.models.layers import project
from dcut_jax.weights.split import Split

SOFTNESS = 0.5  # of a choice, in spreads of the first routers' scores
ROUTER_RATE, NORM_RATE = 1e-3, 1e-3


def trained(split: Split) -> dict[str, Any]:
    """What is fitted, as a tree."""
    names = ("router_YEQ", "attention_norm_YE", "mlp_norm_YE", "norm_E")
    return {name: jnp.asarray(getattr(split, name)) for name in names}


def with_trained(split: Split, tree: dict[str, Any]) -> Split:
    """A split with fitted parts in place."""
    return replace(split, **{name: np.asarray(v) for name, v in tree.items()})


def ordered(params: Any, split: Split) -> Any:
    """The dense target with its neurons in the split's order."""
    layers = [
        layer
        | {
            "gate_EF": layer["gate_EF"][:, order_F],
            "up_EF": layer["up_EF"][:, order_F],
            "down_FE": layer["down_FE"][order_F],
        }
        for layer, order_F in zip(params["layers"], split.neuron_YF, strict=True)
    ]
    return dict(params) | {"layers": tuple(layers)}


def choice(score: Float[Array, "*N Q"], active: int) -> Float[Array, "*N Q"]:
    """One for chosen experts, zero for others, with the gradient of a soft choice."""
    best = lax.top_k(score, min(active + 1, score.shape[-1]))[0]
    end = (best[..., active - 1] + best[..., -1])[..., None] / 2
    chosen = (score >= best[..., active - 1][..., None]).astype(score.dtype)
    soft = jax.nn.sigmoid((score - lax.stop_gradient(end)) / SOFTNESS)
    return soft + lax.stop_gradient(chosen - soft)


def hidden(
    dense_params: Any,
    tree: dict[str, Any],
    cfg: ModelConfig,
    experts: ExpertsConfig,
    token_NS: Int[Array, "N S"],
    valid_NS: Bool[Array, "N S"],
) -> Float[Array, "N S E"]:
    """The split target as a dense one whose neurons are masked; differentiable.

    `dense_params` are `ordered`.
    """

    def feed(h: Array, layer: Any, cfg: ModelConfig, valid: Array) -> Array:
        gate = choice(project(h, layer["router_EQ"]), experts.active)
        own = jnp.repeat(gate, experts.mlp, axis=-1)
        ones = jnp.ones((*own.shape[:-1], experts.shared_mlp), own.dtype)
        neuron = jax.nn.silu(project(h, layer["gate_EF"])) * project(h, layer["up_EF"])
        return project(neuron * jnp.concatenate([ones, own], -1), layer["down_FE"])

    layers = [
        layer
        | {
            "router_EQ": tree["router_YEQ"][i],
            "attention_norm_E": tree["attention_norm_YE"][i],
            "mlp_norm_E": tree["mlp_norm_YE"][i],
        }
        for i, layer in enumerate(dense_params["layers"])
    ]
    params = dense_params | {"layers": tuple(layers), "norm_E": tree["norm_E"]}
    return dense.forward_sequences(params, cfg, token_NS, valid_NS, feed=feed).hidden


def divergence(
    teacher: Float[Array, "N S V"],
    student: Float[Array, "N S V"],
    valid_NS: Bool[Array, "N S"],
) -> Array:
    """Mean over valid rows of KL(teacher, student), nats."""
    p, q = jax.nn.log_softmax(teacher), jax.nn.log_softmax(student)
    each_NS = jnp.sum(jnp.exp(p) * (p - q), axis=-1)
    rows = jnp.sum(valid_NS.astype(jnp.float32))
    return jnp.sum(jnp.where(valid_NS, each_NS, 0.0)) / rows


def make_optimizer(steps: int) -> optax.GradientTransformation:
    """Adam with a cosine; routers and norms each at a rate of their own."""

    def adam(rate: float) -> optax.GradientTransformation:
        schedule = optax.warmup_cosine_decay_schedule(
            0.0, rate, min(10, steps // 4), steps
        )
        return optax.chain(
            optax.clip_by_global_norm(1.0), optax.adam(schedule, b2=0.99)
        )

    return optax.multi_transform(
        {"router": adam(ROUTER_RATE), "norm": adam(NORM_RATE)},
        lambda tree: {k: "router" if k == "router_YEQ" else "norm" for k in tree},
    )


@partial(jax.jit, static_argnames=("cfg", "experts", "steps"), donate_argnums=(1, 2))
def step(
    dense_params: Any,
    tree: dict[str, Any],
    opt_state: Any,
    token_NS: Array,
    valid_NS: Array,
    *,
    cfg: ModelConfig,
    experts: ExpertsConfig,
    steps: int,
) -> tuple[dict[str, Any], Any, Array]:
    """One step; returns the loss before it."""
    head_VE = dense.head_VE(dense_params)
    rows = dense.forward_sequences(dense_params, cfg, token_NS, valid_NS)
    teacher = dense.logits(rows.hidden, head_VE)

    def loss_of(tree: dict[str, Any]) -> Array:
        x = hidden(dense_params, tree, cfg, experts, token_NS, valid_NS)
        return divergence(teacher, dense.logits(x, head_VE), valid_NS)

    loss, grads = jax.value_and_grad(loss_of)(tree)
    with jax.numpy_dtype_promotion("standard"):  # which optax relies on
        updates, opt_state = make_optimizer(steps).update(grads, opt_state, tree)
        return optax.apply_updates(tree, updates), opt_state, loss


@partial(jax.jit, static_argnames=("cfg", "experts"))
def compare(
    dense_params: Any,
    tree: dict[str, Any],
    token_NS: Array,
    valid_NS: Array,
    *,
    cfg: ModelConfig,
    experts: ExpertsConfig,
) -> dict[str, Array]:
    """Sums over rows with a next token: losses of both, agreement, divergence, rows."""
    head_VE = dense.head_VE(dense_params)
    rows = dense.forward_sequences(dense_params, cfg, token_NS, valid_NS)
    x = hidden(dense_params, tree, cfg, experts, token_NS, valid_NS)
    p = jax.nn.log_softmax(dense.logits(rows.hidden, head_VE)[:, :-1])
    q = jax.nn.log_softmax(dense.logits(x, head_VE)[:, :-1])
    real_NS = valid_NS[:, 1:]
    next_NS1 = token_NS[:, 1:, None]

    def total(each_NS: Array) -> Array:
        return jnp.sum(jnp.where(real_NS, each_NS, 0.0))

    return {
        "dense_loss": -total(jnp.take_along_axis(p, next_NS1, -1)[..., 0]),
        "loss": -total(jnp.take_along_axis(q, next_NS1, -1)[..., 0]),
        "agree": total((p.argmax(-1) == q.argmax(-1)).astype(jnp.float32)),
        "divergence": total(jnp.sum(jnp.exp(p) * (p - q), -1)),
        "rows": jnp.sum(real_NS.astype(jnp.float32)),
    }
