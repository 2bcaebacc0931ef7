"""One optimiser step of a run, as a pure function of its state and blocks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from dcut_jax.config import DrafterConfig
from dcut_jax.models import drafter, params
from dcut_jax.train.config import TrainConfig
from dcut_jax.train.loss import Blocks, Shortlist, block_loss


@flax.struct.dataclass
class TrainState:
    """What a checkpoint holds; parameters are the float32 masters."""

    params: Any
    opt_state: Any
    step: Int[Array, ""]


def make_optimizer(cfg: TrainConfig) -> optax.GradientTransformation:
    """AdamW without decay, clipped, warmed up, then a cosine to zero."""
    warmup = max(1, int(cfg.warmup * cfg.steps))
    schedule = optax.warmup_cosine_decay_schedule(0.0, cfg.lr, warmup, cfg.steps)
    return optax.chain(
        optax.clip_by_global_norm(cfg.clip),
        optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=0.0),
    )


def init_state(
    drafter_cfg: DrafterConfig, tx: optax.GradientTransformation, seed: int
) -> TrainState:
    """Random parameters; what a layer adds to the residual starts small."""
    p = params.init(drafter.specs(drafter_cfg), jax.random.key(seed), jnp.float32)
    shrink = (2 * drafter_cfg.layers) ** -0.5
    layers = tuple(
        layer | {n: layer[n] * shrink for n in ("o_HDE", "down_FE")}
        for layer in p["layers"]
    )
    p = p | {"layers": layers}
    return TrainState(p, tx.init(p), jnp.zeros((), jnp.int32))


def train_step(
    state: TrainState,
    blocks: Blocks,
    shortlist: Shortlist | None,
    *,
    loss_fn: Callable[[Any, Blocks, Shortlist | None], Float[Array, ""]],
    tx: optax.GradientTransformation,
) -> tuple[TrainState, dict[str, Array]]:
    """One optimiser step."""
    loss, grads = jax.value_and_grad(loss_fn)(state.params, blocks, shortlist)
    # Optax relies on implicit promotion, which strict runs forbid.
    with jax.numpy_dtype_promotion("standard"):
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        new_params = optax.apply_updates(state.params, updates)
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads)}
    return TrainState(new_params, opt_state, state.step + 1), metrics


@partial(
    jax.jit, static_argnames=("cfg", "drafter_cfg", "width"), donate_argnames="state"
)
def compiled_step(
    state: TrainState,
    embed_VE: Array,
    head_VE: Array,
    blocks: Blocks,
    shortlist: Shortlist | None,
    *,
    cfg: TrainConfig,
    drafter_cfg: DrafterConfig,
    width: int,
) -> tuple[TrainState, dict[str, Array]]:
    """`train_step` of a run; one program per width."""

    def loss_fn(p: Any, blocks: Blocks, shortlist: Shortlist | None) -> Array:
        return block_loss(
            p,
            drafter_cfg,
            embed_VE,
            head_VE,
            blocks,
            width,
            cfg.gamma,
            shortlist,
            jnp.dtype(cfg.compute_dtype),
        )

    tx = make_optimizer(cfg)
    return train_step(state, blocks, shortlist, loss_fn=loss_fn, tx=tx)
