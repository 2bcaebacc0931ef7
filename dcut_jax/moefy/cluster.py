"""Which neurons go together, and a first router.

Neurons that fire on the same tokens share an expert. Those that matter most everywhere
are shared by all rows. Routers predict, linearly, how large each expert's output is.

Source: the idea is MoEfication's (arXiv 2110.01786); balanced clusters of activations
and a ridge fit stand for its co-activation graph and its trained routers.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from dcut_jax.config import ExpertsConfig, ModelConfig
from dcut_jax.models import dense
from dcut_jax.models.layers import project
from dcut_jax.weights.split import Split

ITERATIONS = 8
RIDGE = 1e-2  # of the mean square of an input channel


@partial(jax.jit, static_argnames="cfg")
def activations(
    params: Any, cfg: ModelConfig, token_NS: Array, valid_NS: Array
) -> list[tuple[Array, Array]]:
    """Inputs `[N, S, E]` and neurons `[N, S, F]` of every feed-forward layer."""
    seen: list[tuple[Array, Array]] = []

    def feed(h: Array, layer: Any, cfg: ModelConfig, valid: Array) -> Array:
        gate = jax.nn.silu(project(h, layer["gate_EF"]))
        neuron = gate * project(h, layer["up_EF"])
        seen.append((h, neuron))
        return project(neuron, layer["down_FE"])

    dense.forward_sequences(params, cfg, token_NS, valid_NS, feed=feed)
    return seen


def order_neurons(
    active_NF: Float32[np.ndarray, "N F"],
    weight_F: Float32[np.ndarray, "F"],
    experts: ExpertsConfig,
) -> Int32[np.ndarray, "F"]:
    """The shared expert's neurons, then each expert's.

    Args:
      active_NF: absolute values of neurons, of some tokens.
      weight_F: how much a unit of each neuron adds: the length of its output.
    """
    ranking = np.argsort(-active_NF.mean(0) * weight_F, kind="stable")
    shared_F, rest_F = ranking[: experts.shared_mlp], ranking[experts.shared_mlp :]
    rest_F = np.sort(rest_F)
    group_F = balanced_groups(active_NF[:, rest_F].T, experts.count)
    own = [np.sort(rest_F[group_F == q]) for q in range(experts.count)]
    return np.concatenate([np.sort(shared_F), *own]).astype(np.int32)


def balanced_groups(point_FX: Float32[np.ndarray, "F X"], groups: int) -> np.ndarray:
    """k-means with groups of one size; the same for the same points."""
    room = len(point_FX) // groups
    unit = point_FX / (np.linalg.norm(point_FX, axis=1, keepdims=True) + 1e-9)
    centre = unit[np.linspace(0, len(unit) - 1, groups).astype(int)]
    group_F = np.zeros(len(unit), int)
    for _ in range(ITERATIONS):
        near = unit @ centre.T  # points and centres are of length 1
        before, group_F = group_F, deal(near, room)
        if np.array_equal(before, group_F):
            break
        centre = np.stack([unit[group_F == q].mean(0) for q in range(groups)])
        centre /= np.linalg.norm(centre, axis=1, keepdims=True) + 1e-9
    return group_F


def deal(near_FQ: Float32[np.ndarray, "F Q"], room: int) -> np.ndarray:
    """A group of `room` points for each column: the nearest pairs first."""
    group_F = np.full(len(near_FQ), -1)
    left = [room] * near_FQ.shape[1]
    for at in np.argsort(-near_FQ, axis=None, kind="stable").tolist():
        point, group = divmod(at, len(left))
        if left[group] and group_F[point] < 0:
            group_F[point] = group
            left[group] -= 1
    return group_F


@jax.jit
def _moments(x_NE: Array, neuron_NQF: Array, down_QFE: Array) -> tuple[Array, Array]:
    out_NQE = jnp.einsum("nqf,qfe->nqe", neuron_NQF, down_QFE)
    size_NQ = jnp.linalg.norm(out_NQE, axis=-1)
    # Only which experts are larger than others matters.
    size_NQ = size_NQ - jnp.mean(size_NQ, axis=1, keepdims=True)
    return x_NE.T @ x_NE, x_NE.T @ size_NQ


Batch = tuple[Int32[np.ndarray, "N S"], Any]


def make_split(
    params: Any,
    cfg: ModelConfig,
    experts: ExpertsConfig,
    batches: Sequence[Batch],
    clustered: int,
) -> Split:
    """Clusters neurons on the first `clustered` batches, fits routers on all.

    Args:
      batches: tokens and which are valid, all of one shape.
    """
    layers = params["layers"]
    firsts = [_rows(activations(params, cfg, *b), b[1]) for b in batches[:clustered]]
    orders = []
    for i, layer in enumerate(layers):
        active_NF = np.abs(np.concatenate([f[i][1] for f in firsts]))
        weight_F = np.linalg.norm(np.asarray(layer["down_FE"], np.float32), axis=1)
        orders.append(order_neurons(active_NF, weight_F, experts))
    del firsts
    gram = np.zeros((cfg.layers, cfg.embed, cfg.embed))
    cross = np.zeros((cfg.layers, cfg.embed, experts.count))
    tokens = sum(int(np.sum(valid_NS)) for _, valid_NS in batches)
    for batch in batches:
        rows = _rows(activations(params, cfg, *batch), batch[1])
        for i, (x_NE, neuron_NF) in enumerate(rows):
            own_QF = orders[i][experts.shared_mlp :].reshape(experts.count, -1)
            down_QFE = layers[i]["down_FE"][own_QF].astype(jnp.float32)
            xx, xy = _moments(x_NE, neuron_NF[:, own_QF], down_QFE)
            gram[i] += np.asarray(xx, np.float64)
            cross[i] += np.asarray(xy, np.float64)
    return Split(
        neuron_YF=np.stack(orders),
        router_YEQ=np.stack(
            [_ridge(g, c, tokens) for g, c in zip(gram, cross, strict=True)]
        ),
        attention_norm_YE=_stack(layers, "attention_norm_E"),
        mlp_norm_YE=_stack(layers, "mlp_norm_E"),
        norm_E=np.asarray(params["norm_E"], np.float32),
    )


def _rows(seen: list[tuple[Array, Array]], valid_NS: Any) -> list[Any]:
    """Valid rows of each layer's inputs and neurons."""
    own = np.asarray(valid_NS)
    return [(np.asarray(x)[own], np.asarray(h)[own]) for x, h in seen]


def _ridge(gram_EE: np.ndarray, cross_EQ: np.ndarray, tokens: int) -> np.ndarray:
    """A router whose scores, over the tokens it was fitted on, have a spread of one."""
    size = np.trace(gram_EE) / len(gram_EE)
    router = np.linalg.solve(gram_EE + RIDGE * size * np.eye(len(gram_EE)), cross_EQ)
    power = np.mean(np.sum(router * (gram_EE @ router), axis=0)) / tokens
    return (router / np.sqrt(power + 1e-12)).astype(np.float32)


def _stack(layers: Any, name: str) -> np.ndarray:
    return np.stack([np.asarray(layer[name], np.float32) for layer in layers])
