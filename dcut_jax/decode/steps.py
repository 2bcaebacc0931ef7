"""One decode step in pieces, as pure functions of static shapes.

`decode.compile` makes executables of them.
"""

from dataclasses import dataclass, replace
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from dcut_jax.config import DrafterConfig, ModelConfig
from dcut_jax.cut.confidence import top1
from dcut_jax.cut.numpy_plan import Objective
from dcut_jax.cut.plan import Plan, plan
from dcut_jax.cut.survival import log_survival
from dcut_jax.decode.accept import accept
from dcut_jax.decode.pack import Layout, Packed, layout, pack, unpack
from dcut_jax.decode.sample import Sampling, next_token
from dcut_jax.decode.state import DecodeState, Outcome, to_wire
from dcut_jax.decode.verify import prefill_rows, verify_rows
from dcut_jax.models import dense, drafter
from dcut_jax.models.cache import KvCache, init_cache, write_rows, write_slot
from pallas_kernels import Backend


@dataclass(frozen=True)
class Models:
    """Target and drafter as the steps need them: configs and parameters.

    `params` holds `target`; with a drafter also `drafter`, and `draft_embed_VE` and
    `draft_head_VE`, the target's tables in the drafter's dtype.
    """

    target: ModelConfig
    drafter: DrafterConfig | None
    params: dict[str, Any]

    @property
    def taps(self) -> tuple[int, ...]:
        return self.drafter.target_layers if self.drafter else ()


@flax.struct.dataclass
class Caches:
    """Key/value caches under the same slots; `drafter` is None without one."""

    target: KvCache
    drafter: KvCache | None


@flax.struct.dataclass
class Fresh:
    """Keys and values of a step's rows, and which of them the commit writes where.

    Each of the two models has its own layers, heads and head dimension.
    """

    target_k: Float[Array, "Y T G D"]
    target_v: Float[Array, "Y T G D"]
    drafter_k: Float[Array, "Y T G D"] | None
    drafter_v: Float[Array, "Y T G D"] | None
    slot_T: Int[Array, "T"]
    position_T: Int[Array, "T"]
    counted_T: Bool[Array, "T"]


@flax.struct.dataclass
class Proposal:
    """Drafts of every slot and their log-confidence."""

    token_BK: Int[Array, "B K"]
    logp_BK: Float[Array, "B K"]


def init_caches(models: Models, slots: int, positions: int, dtype: Any) -> Caches:
    """Empty caches for `slots` requests of up to `positions` positions."""
    return Caches(
        target=init_cache(models.target, slots, positions, dtype),
        drafter=init_cache(models.drafter, slots, positions, dtype)
        if models.drafter
        else None,
    )


def draft(
    params: dict[str, Any],
    kv: KvCache,
    state: DecodeState,
    *,
    models: Models,
    width: int,
    columns: int,
) -> Proposal:
    """Asks the drafter for `width` drafts a request, padded to `columns`.

    A padded draft has no confidence (NaN), so no plan can keep it; one planner and one
    verifier per tier then serve every width.
    """
    cfg = models.drafter
    assert cfg is not None
    hidden_BKE = drafter.block_forward(
        params["drafter"],
        cfg,
        params["draft_embed_VE"],
        state.anchor_B,
        state.length_B,
        kv,
        width,
    )
    best = top1(dense.logits(hidden_BKE, params["draft_head_VE"]))
    pad = ((0, 0), (0, columns - width))
    return Proposal(
        jnp.pad(best.token, pad), jnp.pad(best.logp, pad, constant_values=jnp.nan)
    )


def decide(
    proposal: Proposal,
    state: DecodeState,
    cost_ms_MR: Array,
    width_index: Array,
    previous_BX: Array,
    *,
    key: "PlanKey",
) -> tuple[Plan, Array]:
    """Plans the step; returns the plan and all that the host reads, in one array.

    `cost_ms_MR` has a row per draft width of the ladder; `width_index` is the one that
    was drafted. The plan is also made for every narrower width, as far as its utility:
    the host learns what those would have been worth.

    Returns:
      The plan, and `[B + 1, X]` int32: the wire form of the previous outcome, and the
      row that `read_decision` reads.
    """
    # An empty slot leaves a row empty: layouts hold `rows - slots` drafts, no more.
    empty = jnp.sum(~state.active_B, dtype=jnp.int32)
    rows_R = jnp.asarray(key.rows_R, jnp.int32) - empty
    logp_BK = proposal.logp_BK
    slot_K = jnp.arange(logp_BK.shape[1])[None]

    def plan_for(logp_BK: Array, cost_ms_R: Array) -> Plan:
        return plan(
            log_survival(logp_BK),
            state.active_B,
            rows_R,
            cost_ms_R,
            objective=key.objective,
            ratios=key.ratios,
            backend=key.backend,
        )

    chosen = plan_for(logp_BK, cost_ms_MR[width_index])
    utility = []
    for m, width in enumerate(key.widths):
        cut_BK = jnp.where(slot_K < width, logp_BK, jnp.nan)
        utility.append(jnp.max(plan_for(cut_BK, cost_ms_MR[m]).utility_R))
    floats = jnp.stack([chosen.gain, *utility])
    row = jnp.concatenate(
        [
            jnp.stack([chosen.tier, chosen.budget]),
            lax.bitcast_convert_type(floats, jnp.int32),
        ]
    )
    row_X = jnp.pad(row, (0, previous_BX.shape[1] - row.shape[0]))
    return chosen, jnp.concatenate([previous_BX, row_X[None]])


@dataclass(frozen=True)
class Decision:
    """The host's view of a plan: `utility` is tokens per ms, by ladder width."""

    tier: int
    kept: int
    gain: float
    utility: tuple[float, ...]


def read_decision(row_X: np.ndarray, widths: int) -> Decision:
    """The last row of what `decide` returns."""
    gain, *utility = row_X[2 : 3 + widths].view(np.float32)
    return Decision(
        int(row_X[0]), int(row_X[1]), float(gain), tuple(float(u) for u in utility)
    )


def verify(
    params: dict[str, Any],
    kv: KvCache,
    state: DecodeState,
    token_BK: Array,
    keep_B: Array,
    *,
    models: Models,
    lay: Layout,
    wire_width: int,
) -> tuple[Array, DecodeState, Fresh]:
    """Checks anchors and kept drafts; the outcome comes in its wire form."""
    packed = pack(keep_B, state.active_B, lay.rows)
    block_BW = jnp.concatenate([state.anchor_B[:, None], token_BK], axis=1)
    token_T = block_BW[packed.owner_T, packed.offset_T]
    rows = verify_rows(
        params["target"],
        models.target,
        kv,
        token_T,
        state.length_B,
        packed,
        lay,
        models.taps,
    )
    predicted_T = choose(
        params,
        rows.hidden,
        None
        if state.sampling is None
        else jax.tree.map(lambda x: x[packed.owner_T], state.sampling),
        state.length_B[packed.owner_T] + packed.offset_T + 1,
    )
    predicted_BW = unpack(predicted_T, packed, lay.width)
    outcome, after = accept(predicted_BW, token_BK, keep_B, state)
    wire_BX = to_wire(widen(outcome, wire_width))
    return wire_BX, after, fresh_rows(params, models, rows, packed, state, outcome)


def choose(
    params: dict[str, Any],
    hidden_TE: Array,
    sampling: Sampling | None,
    position_T: Array,
) -> Array:
    """The target's token for each of `position_T`, from the row before it."""
    logits_TV = dense.logits(hidden_TE, dense.head_VE(params["target"]))
    if sampling is None:
        return top1(logits_TV).token
    return next_token(logits_TV, sampling, position_T)


def widen(outcome: Outcome, width: int) -> Outcome:
    """Pads the token columns, so that every step has one wire shape."""
    pad = width - outcome.token_BW.shape[1]
    return replace(outcome, token_BW=jnp.pad(outcome.token_BW, ((0, 0), (0, pad))))


def fresh_rows(
    params: dict[str, Any],
    models: Models,
    rows: dense.Rows,
    packed: Packed,
    state: DecodeState,
    outcome: Outcome,
) -> Fresh:
    """What a step leaves for the caches of target and drafter.

    `state` is the one before the step.
    """
    owner_T = packed.owner_T
    position_T = state.length_B[owner_T] + packed.offset_T
    draft_k, draft_v = draft_context(params, models, rows.taps, position_T)
    return Fresh(
        target_k=rows.k,
        target_v=rows.v,
        drafter_k=draft_k,
        drafter_v=draft_v,
        slot_T=owner_T,
        position_T=position_T,
        counted_T=packed.valid_T & (packed.offset_T < outcome.count_B[owner_T]),
    )


def draft_context(
    params: dict[str, Any], models: Models, taps_TC: Array, position_T: Array
) -> tuple[Array, Array] | tuple[None, None]:
    """The drafter's keys and values of target rows; None where there is no drafter."""
    if models.drafter is None:
        return None, None
    weights = params["drafter"]
    ctx_TE = drafter.context(weights, models.drafter, taps_TC)
    return drafter.context_kv(weights, models.drafter, ctx_TE, position_T)


def commit(caches: Caches, fresh: Fresh) -> Caches:
    """Writes the keys and values of committed rows; every other entry stays."""

    def write(kv: KvCache, k: Array | None, v: Array | None) -> KvCache:
        assert k is not None, "a cache without keys for it"
        assert v is not None, "a cache without values for it"
        return write_rows(kv, k, v, fresh.slot_T, fresh.position_T, fresh.counted_T)

    return Caches(
        target=write(caches.target, fresh.target_k, fresh.target_v),
        drafter=None
        if caches.drafter is None
        else write(caches.drafter, fresh.drafter_k, fresh.drafter_v),
    )


def prefill(
    params: dict[str, Any],
    caches: Caches,
    token_P: Array,
    length: Array,
    count: Array,
    sampling: Sampling | None,
    *,
    models: Models,
) -> tuple[Caches, Array]:
    """One chunk of a prompt into one-slot caches; the token that follows its rows.

    The first `count` of P rows are real; they stand at `length` onwards. `sampling` is
    of one slot.
    """
    rows = prefill_rows(
        params["target"],
        models.target,
        caches.target,
        token_P,
        jnp.zeros((), jnp.int32),
        length,
        models.taps,
    )
    last_E = rows.hidden[count - 1]
    token = choose(params, last_E[None], sampling, (length + count)[None])[0]

    row_P = jnp.arange(token_P.shape[0])
    position_P = length + row_P
    draft_k, draft_v = draft_context(params, models, rows.taps, position_P)
    fresh = Fresh(
        rows.k,
        rows.v,
        draft_k,
        draft_v,
        slot_T=jnp.zeros_like(row_P),
        position_T=position_P,
        counted_T=row_P < count,
    )
    return commit(caches, fresh), token


def insert(
    state: DecodeState,
    caches: Caches,
    one: Caches,
    slot: Array,
    anchor: Array,
    length: Array,
    room: Array,
    stop_Z: Array,
    sampling: Sampling | None,
) -> tuple[DecodeState, Caches]:
    """Puts a prefilled request into a slot; `sampling` is of one slot."""

    state = DecodeState(
        anchor_B=state.anchor_B.at[slot].set(anchor),
        length_B=state.length_B.at[slot].set(length),
        room_B=state.room_B.at[slot].set(room),
        active_B=state.active_B.at[slot].set(True),
        stop_BZ=state.stop_BZ.at[slot].set(stop_Z),
        sampling=jax.tree.map(
            lambda all_B, one_1: all_B.at[slot].set(one_1[0]), state.sampling, sampling
        ),
    )
    return state, Caches(
        target=write_slot(caches.target, one.target, slot),
        drafter=None
        if caches.drafter is None or one.drafter is None
        else write_slot(caches.drafter, one.drafter, slot),
    )


def release(state: DecodeState, slot: Array) -> DecodeState:
    """Empties a slot whose request was called off."""
    return replace(
        state,
        active_B=state.active_B.at[slot].set(False),
        length_B=state.length_B.at[slot].set(0),
    )


@dataclass(frozen=True)
class StepShapes:
    """Static shapes of a batch in flight.

    Attributes:
      slots: requests decoded together, B.
      positions: cached positions a slot needs, its widest step included, L.
      width: rows of a full block, W; 1 without a drafter.
      stops: stop tokens a request may have.
      sampling: whether requests may draw their tokens.
    """

    slots: int
    positions: int
    width: int
    stops: int
    sampling: bool = False

    @property
    def wire_columns(self) -> int:
        """Columns of an outcome's wire form; also holds a decision's row."""
        return max(3 + self.width, 16)


@dataclass(frozen=True)
class PlanKey:
    """What a planner is compiled for: tiers, draft widths, and the objective."""

    rows_R: tuple[int, ...]
    widths: tuple[int, ...]
    objective: Objective
    ratios: tuple[float, ...] | None
    backend: Backend


def anchors_only(shapes: StepShapes) -> Layout:
    """Plain autoregressive decoding."""
    return layout(shapes.slots, shapes.slots, 1)


def everything(shapes: StepShapes, width: int) -> Layout:
    """All `width` drafts of every request."""
    return layout(shapes.slots, shapes.slots * (width + 1), width + 1)
