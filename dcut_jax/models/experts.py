"""Mixtures of experts: parameter declaration, routing, and the pass over a layer.

Rows are sorted by the expert they are sent to and each expert multiplies its own; what
is done on which platform is in `pallas_kernels.experts`. A row's result depends on that
row alone: its experts' outputs are added in the order of its own scores.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from dcut_jax.config import ExpertsConfig
from dcut_jax.models.collectives import Dealt, Over, total
from dcut_jax.models.layers import project, swiglu
from dcut_jax.models.params import ParamSpec
from pallas_kernels.backends import Backend
from pallas_kernels.experts import grouped_swiglu


def specs(embed: int, cfg: ExpertsConfig) -> dict[str, Any]:
    """Parameters of the feed-forward part of a layer with experts."""
    E, Q, F, S = embed, cfg.count, cfg.mlp, cfg.shared_mlp
    tree: dict[str, Any] = {
        # Not cut with the experts: every device sends its own rows.
        "router_EQ": ParamSpec((E, Q), ("embed", "routes"), E),
        "gate_QEF": ParamSpec((Q, E, F), ("experts", "embed", "mlp"), E),
        "up_QEF": ParamSpec((Q, E, F), ("experts", "embed", "mlp"), E),
        "down_QFE": ParamSpec((Q, F, E), ("experts", "mlp", "embed"), F),
    }
    if cfg.shared_mlp:
        tree["shared"] = {
            "gate_EF": ParamSpec((E, S), ("embed", "mlp"), E),
            "up_EF": ParamSpec((E, S), ("embed", "mlp"), E),
            "down_FE": ParamSpec((S, E), ("mlp", "embed"), S),
        }
    if cfg.shared_gate:
        tree["shared_gate_E"] = ParamSpec((E,), ("embed",), E)
    return tree


class Routing(NamedTuple):
    """Where rows go: experts in falling order of their scores, and gate values."""

    expert_NA: Int[Array, "N A"]
    gate_NA: Float[Array, "N A"]


def route(
    x_NE: Float[Array, "N E"], router_EQ: Float[Array, "E Q"], cfg: ExpertsConfig
) -> Routing:
    """Sends each row to the experts with its largest scores, the lower one on ties.

    Source: `Qwen3MoeTopKRouter` of transformers; `gating="ones"` is this project's.
    """
    score_NQ = project(x_NE, router_EQ)
    best_NA, expert_NA = lax.top_k(score_NQ, cfg.active)
    match cfg.gating:
        case "softmax":
            total_N1 = jax.nn.logsumexp(score_NQ, axis=-1, keepdims=True)
            gate_NA = jnp.exp(best_NA - total_N1)
        case "renormalised":
            gate_NA = jax.nn.softmax(best_NA, axis=-1)
        case "ones":
            gate_NA = jnp.ones_like(best_NA)
    return Routing(expert_NA, gate_NA)


def forward(
    x: Float[Array, "*N E"],
    layer: dict[str, Any],
    cfg: ExpertsConfig,
    valid: Bool[Array, "*N"],
) -> Float[Array, "*N E"]:
    """What a layer with experts adds to its rows.

    Args:
      valid: false on padding, which is sent nowhere: it opens no expert, and nothing
        but the shared expert is added to it.
    """
    return forward_on_mesh(x, layer, cfg, valid, None, None)[0]


def forward_on_mesh(
    x: Float[Array, "*N E"],
    layer: dict[str, Any],
    cfg: ExpertsConfig,
    valid: Bool[Array, "*N"],
    over: Over,
    dealt: Dealt | None,
    form: Backend = "platform",
) -> tuple[Float[Array, "*N E"], Int[Array, ""] | int]:
    """`forward`, and what `exchange` counts.

    Args:
      over: the mesh axis that the feed-forward axis of every expert is cut over.
      dealt: how experts are dealt over another axis, if they are.
      form: of `grouped_swiglu`.
    """
    x_NE = x.reshape(-1, x.shape[-1])
    routing = route(x_NE, layer["router_EQ"], cfg)
    expert_NA = jnp.where(valid.reshape(-1, 1), routing.expert_NA, cfg.count)
    routing = Routing(expert_NA, routing.gate_NA)
    crowded: Array | int = 0
    if dealt is None:
        out_NE = dispatch(x_NE, routing, layer, form)
    else:
        out_NE, crowded = exchange(x_NE, routing, layer, dealt, form)
    out_NE = total(out_NE, over)
    if "shared" in layer:
        shared_NE = swiglu(x_NE, layer["shared"], over)
        if "shared_gate_E" in layer:
            mix_N = jax.nn.sigmoid(project(x_NE, layer["shared_gate_E"]))
            shared_NE = shared_NE * mix_N[:, None]
        out_NE = out_NE + shared_NE
    return out_NE.reshape(x.shape), crowded


def exchange(
    x_NE: Float[Array, "N E"],
    routing: Routing,
    layer: dict[str, Any],
    dealt: Dealt,
    form: Backend = "platform",
) -> tuple[Float[Array, "N E"], Int[Array, ""] | int]:
    """`dispatch` where each device of a mesh axis has experts of its own.

    Rows that are dealt as well travel: each to the devices that have one of its
    experts, once to each, into room for `capacity` rows. Where more ask for one device,
    in any shard, all rows are gathered on all devices instead. No row is ever dropped.

    Returns:
      What comes back to each row, and 1 where it went the slower way, else 0.
    """
    if not dealt.rows:
        own = _own_experts(routing, layer, dealt)
        return lax.psum(dispatch(x_NE, own, layer, form), dealt.axis), 0
    N, A = routing.expert_NA.shape
    own_count, count = layer["gate_QEF"].shape[0], layer["router_EQ"].shape[1]
    devices = count // own_count
    places = capacity(N, A, devices)
    if places == N:  # the quick way would be as long
        return _by_gathering(x_NE, routing, layer, dealt, form), 0
    device_NA = routing.expert_NA // own_count
    asks_NX = jnp.any(device_NA[:, :, None] == jnp.arange(devices)[None, None], axis=1)
    place_NX = jnp.cumsum(asks_NX.astype(jnp.int32), axis=0) - 1
    crowded = jnp.any(place_NX >= places).astype(jnp.int32)
    crowded = lax.pmax(crowded, dealt.rows)  # a way that one goes all must go
    out_NE = lax.cond(
        crowded > 0,
        lambda: _by_gathering(x_NE, routing, layer, dealt, form),
        lambda: _by_sending(
            x_NE,
            routing,
            jnp.where(asks_NX, place_NX, places),
            places,
            layer,
            dealt,
            form,
        ),
    )
    return out_NE, crowded


# Places for more rows than ask for a device where all experts are asked for alike.
SLACK = 1.25


def capacity(rows: int, active: int, devices: int) -> int:
    """Rows that a shard can send to one device; at most all of them.

    A row with `active` experts asks for a device with chance
    `1 - (1 - 1 / devices) ** active`, if any experts are as likely as any others.
    """
    share = 1 - (1 - 1 / devices) ** active
    return min(rows, math.ceil(SLACK * share * rows))


def _own_experts(routing: Routing, layer: dict[str, Any], dealt: Dealt) -> Routing:
    """The same with this device's experts numbered from 0, and the others nowhere."""
    own = layer["gate_QEF"].shape[0]
    expert_NA = routing.expert_NA - lax.axis_index(dealt.axis) * own
    here_NA = (expert_NA >= 0) & (expert_NA < own)
    return Routing(jnp.where(here_NA, expert_NA, own), routing.gate_NA)


def _by_gathering(
    x_NE: Array,
    routing: Routing,
    layer: dict[str, Any],
    dealt: Dealt,
    form: Backend,
) -> Array:
    """All rows to all devices; each row's parts are summed where it came from."""
    all_NE, all_routing = jax.tree.map(
        lambda x: lax.all_gather(x, dealt.axis, axis=0, tiled=True), (x_NE, routing)
    )
    out_NE = dispatch(all_NE, _own_experts(all_routing, layer, dealt), layer, form)
    return lax.psum_scatter(out_NE, dealt.axis, scatter_dimension=0, tiled=True)


def _by_sending(
    x_NE: Array,
    routing: Routing,
    place_NX: Int[Array, "N X"],
    places: int,
    layer: dict[str, Any],
    dealt: Dealt,
    form: Backend,
) -> Array:
    """Each row to the devices X that it asks for, at a place below `places`."""
    N, devices = place_NX.shape
    nobody = jnp.full((devices, places), N)
    row_XP = nobody.at[jnp.arange(devices)[None], place_NX].set(
        jnp.arange(N)[:, None], mode="drop"
    )
    used_XP1 = (row_XP < N)[:, :, None]
    row_XP = jnp.minimum(row_XP, N - 1)
    nowhere = layer["router_EQ"].shape[1]
    expert_XPA = jnp.where(used_XP1, routing.expert_NA[row_XP], nowhere)
    sent = x_NE[row_XP], Routing(expert_XPA, routing.gate_NA[row_XP])

    def swap(x_X: Array) -> Array:
        """From one part per receiver to one part per sender, and back."""
        return lax.all_to_all(x_X, dealt.axis, split_axis=0, concat_axis=0, tiled=True)

    got = jax.tree.map(lambda x: swap(x).reshape(-1, x.shape[-1]), sent)
    out_NE = dispatch(got[0], _own_experts(got[1], layer, dealt), layer, form)
    back_XPE = swap(out_NE.reshape(devices, places, -1))
    found_NXE = back_XPE[jnp.arange(devices)[None], jnp.minimum(place_NX, places - 1)]
    mine_NX1 = (place_NX < places)[:, :, None]
    return jnp.sum(jnp.where(mine_NX1, found_NXE, 0.0), axis=1)


def dispatch(
    x_NE: Float[Array, "N E"],
    routing: Routing,
    layer: dict[str, Any],
    form: Backend = "platform",
) -> Float[Array, "N E"]:
    """Runs rows through their experts and adds up what comes back.

    An expert number of Q or more sends the pair nowhere, and it counts as zero.
    """
    N, A = routing.expert_NA.shape
    expert_X = routing.expert_NA.reshape(-1)  # X: pairs of a row and an expert
    order_X = jnp.argsort(expert_X, stable=True)
    Q = layer["gate_QEF"].shape[0]
    size_Q = jnp.sum(expert_X[:, None] == jnp.arange(Q)[None], axis=0, dtype=jnp.int32)
    out_XE = grouped_swiglu(
        x_NE[order_X // A],
        size_Q,
        layer["gate_QEF"],
        layer["up_QEF"],
        layer["down_QFE"],
        backend=form,
    )
    place_X = jnp.zeros_like(order_X).at[order_X].set(jnp.arange(N * A))
    out_NAE = out_XE[place_X].reshape(N, A, -1)
    return jnp.sum(out_NAE * routing.gate_NA[:, :, None], axis=1)
