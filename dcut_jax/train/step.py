"""One optimiser step of a run, as a pure function of its state and blocks."""

from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Int

from dcut_jax.config import DrafterConfig
from dcut_jax.mesh import place
from dcut_jax.models import drafter, params
from dcut_jax.train.blocks import Blocks
from dcut_jax.train.config import TrainConfig
from dcut_jax.train.loss import Shortlist, weighted_loss
from dcut_jax.train.mesh import param_shardings, replicated

# Weight decay of matrices under Muon, which needs some; the public trainers' value.
_MUON_DECAY = 0.1


@flax.struct.dataclass
class TrainState:
    """What a checkpoint holds; parameters are the float32 masters.

    Attributes:
      ema: their moving average; None where the run keeps none.
    """

    params: Any
    opt_state: Any
    step: Int[Array, ""]
    ema: Any = None

    @property
    def best(self) -> Any:
        """What is evaluated and exported: the average where there is one."""
        return self.params if self.ema is None else self.ema


def make_optimizer(cfg: TrainConfig) -> optax.GradientTransformation:
    """The run's optimiser, clipped, warmed up, then a cosine to zero.

    `adamw` has no decay. `muon` takes matrices, all inputs of a product against all its
    outputs, with ten times the rate; the rest and the tables of words stay with Adam.
    """
    warmup = min(max(1, int(cfg.warmup * cfg.steps)), cfg.steps - 1)

    def schedule(peak: float) -> optax.Schedule:
        return optax.warmup_cosine_decay_schedule(0.0, peak, warmup, cfg.steps)

    if cfg.optimizer == "muon":
        rule = optax.contrib.muon(
            schedule(10 * cfg.lr),
            weight_decay=_MUON_DECAY,
            adam_b2=0.95,
            adam_learning_rate=schedule(cfg.lr),
            muon_weight_dimension_numbers=muon_axes,
        )
    else:
        rule = optax.adamw(schedule(cfg.lr), b1=0.9, b2=0.95, weight_decay=0.0)
    return optax.chain(optax.clip_by_global_norm(cfg.clip), rule)


def muon_axes(p: dict[str, Any]) -> Any:
    """Which axes of a parameter Muon takes as rows and columns; None for Adam's."""

    def axes(path: tuple[Any, ...], x: Array) -> Any:
        names = [str(getattr(key, "key", key)) for key in path]
        if x.ndim < 2 or "markov" in names:
            return None
        inputs = 2 if names[-1] == "o_HDE" else 1
        return optax.contrib.MuonDimensionNumbers(
            tuple(range(inputs)), tuple(range(inputs, x.ndim))
        )

    return jax.tree_util.tree_map_with_path(axes, p)


def init_state(drafter_cfg: DrafterConfig, cfg: TrainConfig) -> TrainState:
    """Random parameters; what a layer adds to the residual starts small.

    A Markov head starts without a say, so a drafter begins as DFlash's.
    """
    p = params.init(drafter.specs(drafter_cfg), jax.random.key(cfg.seed), jnp.float32)
    shrink = (2 * drafter_cfg.layers) ** -0.5
    layers = tuple(
        layer | {n: layer[n] * shrink for n in ("o_HDE", "down_FE")}
        for layer in p["layers"]
    )
    p = p | {"layers": layers}
    if "markov" in p:
        silent = jnp.zeros_like(p["markov"]["next_VX"])
        p = p | {"markov": p["markov"] | {"next_VX": silent}}
    return new_state(p, cfg)


def new_state(p: Any, cfg: TrainConfig) -> TrainState:
    """The state of a run that begins with these parameters."""
    # A copy, for the state's buffers are donated, and none twice.
    ema = jax.tree.map(jnp.copy, p) if cfg.ema else None
    return TrainState(p, make_optimizer(cfg).init(p), jnp.zeros((), jnp.int32), ema)


def on_mesh(
    state: TrainState, mesh: Mesh, drafter_cfg: DrafterConfig, cfg: TrainConfig
) -> TrainState:
    """The same state, cut over a mesh; every process holds it whole before."""
    p = place(state.params, param_shardings(mesh, drafter_cfg))
    # All but the parameters is made where it is to lie.
    fresh = jax.jit(lambda p: constrain(new_state(p, cfg), mesh, drafter_cfg, cfg))
    return fresh(p)


def constrain(
    state: TrainState, mesh: Mesh, drafter_cfg: DrafterConfig, cfg: TrainConfig
) -> TrainState:
    """Says where a state lies: what is of a parameter's shape lies where it does."""
    at = param_shardings(mesh, drafter_cfg)
    everywhere = replicated(mesh)

    def masked(x: Any) -> bool:
        """A parameter that a part of the optimiser leaves to another."""
        return isinstance(x, optax.MaskedNode)

    opt_state = optax.tree.map_params(
        make_optimizer(cfg),
        lambda x, at: x if masked(x) else lax.with_sharding_constraint(x, at),
        state.opt_state,
        at,
        transform_non_params=lambda x: lax.with_sharding_constraint(x, everywhere),
        is_leaf=masked,
    )
    ema = state.ema
    if ema is not None:
        ema = lax.with_sharding_constraint(ema, at)
    return TrainState(
        lax.with_sharding_constraint(state.params, at),
        opt_state,
        lax.with_sharding_constraint(state.step, everywhere),
        ema,
    )


def train_step(
    state: TrainState,
    embed_VE: Array,
    head_VE: Array,
    batches: tuple[Blocks, Shortlist | None],
    *,
    cfg: TrainConfig,
    drafter_cfg: DrafterConfig,
    width: int,
    mesh: Mesh | None = None,
) -> tuple[TrainState, dict[str, Array]]:
    """One optimiser step over one or more micro-batches.

    Args:
      batches: every array with a leading axis of `cfg.accumulate`.

    Returns:
      The next state, and `loss` and `grad_norm`. They are those of one batch of all
      blocks: losses and weights are summed before one is divided by the other.
    """

    def one(batch: tuple[Blocks, Shortlist | None]) -> tuple[tuple[Array, Array], Any]:
        def loss_fn(p: Any) -> tuple[Array, Array]:
            return weighted_loss(
                p,
                drafter_cfg,
                embed_VE,
                head_VE,
                batch[0],
                width,
                cfg.objective,
                batch[1],
                jnp.dtype(cfg.compute_dtype),
                mesh,
            )

        return jax.value_and_grad(loss_fn, has_aux=True)(state.params)

    if cfg.accumulate == 1:
        (total, weight), grads = one(jax.tree.map(lambda x: x[0], batches))
    else:
        first = jax.tree.map(lambda x: x[0], batches)
        nothing = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(one, first)
        )
        (total, weight), grads = lax.scan(
            lambda sums, batch: (jax.tree.map(jnp.add, sums, one(batch)), None),
            nothing,
            batches,
        )[0]
    weight = jnp.maximum(weight, 1e-6)
    grads = jax.tree.map(lambda g: g / weight, grads)
    # Optax relies on implicit promotion, which strict runs forbid.
    with jax.numpy_dtype_promotion("standard"):
        tx = make_optimizer(cfg)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        new_params = optax.apply_updates(state.params, updates)
        metrics = {"loss": total / weight, "grad_norm": optax.tree.norm(grads)}
    ema = state.ema
    if ema is not None:
        # At first a shorter average: else weights of before any training stay in it.
        step = state.step.astype(jnp.float32)
        keep = jnp.minimum(cfg.ema, (1 + step) / (10 + step))
        ema = jax.tree.map(lambda a, p: keep * a + (1 - keep) * p, ema, new_params)
    state = TrainState(new_params, opt_state, state.step + 1, ema)
    if mesh is not None:
        state = constrain(state, mesh, drafter_cfg, cfg)
    return state, metrics


# One program per width and length of the documents.
compiled_step = partial(
    jax.jit,
    static_argnames=("cfg", "drafter_cfg", "width", "mesh"),
    donate_argnames="state",
)(train_step)
