"""Planning inside a step: what was learned, what to verify, and one read-back for both.

Everything here is one executable: it takes in the outcome of the last planned step,
turns confidences into chances, plans, and hands the host all that it has to know.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import flax.struct
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32, Int32

from dcut_jax.cut.calibration import (
    Calibration,
    Reliability,
    calibrate,
    identity,
    learn,
    no_reliability,
    observe,
)
from dcut_jax.cut.numpy_plan import Objective
from dcut_jax.cut.plan import Plan, plan_shards
from dcut_jax.cut.survival import log_survival
from dcut_jax.decode.shards import from_first, gathered
from dcut_jax.decode.state import ACCEPTED, DecodeState
from dcut_jax.mesh import Placement
from pallas_kernels.backends import Backend

# Log-value of a draft that can do no good: e to this is nothing beside any other.
NO_VALUE = -80.0


@flax.struct.dataclass
class Proposal:
    """Drafts of every slot and their log-confidence."""

    token_BK: Int32[Array, "B K"]
    logp_BK: Float32[Array, "B K"]


@flax.struct.dataclass
class Memory:
    """What planning carries from step to step.

    Attributes:
      calibration: of confidences, learned from outcomes.
      raw, calibrated: how both kinds of survival compared with outcomes.
      logp_BK, survival_BK: of the last plan: log-confidences as the drafter gave them,
        and the log-survivals that the plan went by.
      keep_B: what it kept; 0 once its outcome has been taken in.
    """

    calibration: Calibration
    raw: Reliability
    calibrated: Reliability
    logp_BK: Float32[Array, "B K"]
    survival_BK: Float32[Array, "B K"]
    keep_B: Int32[Array, "B"]


def init_memory(slots: int, drafts: int) -> Memory:
    """Nothing planned yet."""
    return Memory(
        calibration=identity(drafts),
        raw=no_reliability(),
        calibrated=no_reliability(),
        logp_BK=jnp.zeros((slots, drafts), jnp.float32),
        survival_BK=jnp.zeros((slots, drafts), jnp.float32),
        keep_B=jnp.zeros(slots, jnp.int32),
    )


@dataclass(frozen=True)
class PlanKey:
    """What a planner is compiled for.

    Attributes:
      rows_R: tiers; `widths`: the drafting widths.
      objective, ratios, backend: see `cut.plan.plan`.
      calibrated: whether chances are learned; if not, confidences stand for them.
      patient: whether the host may say of requests that a draft of theirs is due.
      shards: parts of the batch that pack apart; tiers are then rows of one part.
    """

    rows_R: tuple[int, ...]
    widths: tuple[int, ...]
    objective: Objective
    ratios: tuple[float, ...] | None
    backend: Backend
    calibrated: bool
    patient: bool
    shards: int = 1


@flax.struct.dataclass
class Situation:
    """What the host tells a plan, in NumPy arrays and numbers.

    Attributes:
      cost_ms_MR: step times by drafting width and tier, float32.
      width_index: which of the widths was drafted, int32.
      weight_B: see `cut.plan.plan`, float32.
      due_B: requests of which a draft is verified whatever it is worth, bool.
    """

    cost_ms_MR: Any
    width_index: Any
    weight_B: Any
    due_B: Any


def decide(
    proposal: Proposal,
    state: DecodeState,
    memory: Memory,
    situation: Situation,
    planned_BX: Int32[Array, "B X"],
    previous_BX: Int32[Array, "B X"],
    *,
    key: PlanKey,
    placement: Placement | None = None,
) -> tuple[Int32[Array, "B"], Memory, Int32[Array, "N X"]]:
    """Plans the step; returns what to keep, and all that the host reads, in one array.

    The same is worked out for every narrower width, as far as its gains: the host
    learns what those would have been worth.

    Args:
      planned_BX: outcome of the last planned step, in its wire form.
      previous_BX: outcome of the last step of any kind.
      placement: the mesh over which this is mapped, if it is. Then `state` alone is of
        a shard's own slots. Every device plans, and all take the first one's word.

    Returns:
      Drafts to verify, the memory, and `previous_BX` with rows below it that
      `read_decision` reads.
    """
    active_B, room_B = state.active_B, state.room_B
    if placement is not None:
        active_B, room_B = gathered((active_B, room_B), placement.slot_axes)
    memory = take_in(memory, planned_BX[:, ACCEPTED], key)
    logp_BK = calibrate(memory.calibration, proposal.logp_BK)
    slot_K = jnp.arange(logp_BK.shape[1])[None]
    survival_BK = value_BK = log_survival(logp_BK)
    if key.objective == "tokens":
        # An anchor gives a token, so of `room` tokens all but one can be drafts.
        useless_BK = slot_K >= room_B[:, None] - 1
        least_BK = jnp.minimum(value_BK, NO_VALUE)  # or values would rise along a text
        value_BK = jnp.where(useless_BK, least_BK, value_BK)
    # An empty slot leaves a row empty: layouts hold `rows - slots` drafts, no more.
    empty_S = jnp.sum(~active_B.reshape(key.shards, -1), axis=1, dtype=jnp.int32)
    rows_SR = jnp.asarray(key.rows_R, jnp.int32)[None] - empty_S[:, None]

    def plan_for(value_BK: Array, cost_ms_R: Array, due_B: Array | None = None) -> Plan:
        return plan_shards(
            value_BK,
            active_B,
            rows_SR,
            cost_ms_R,
            weight_B=situation.weight_B,
            due_B=due_B,
            objective=key.objective,
            ratios=key.ratios,
            backend=key.backend,
        )

    gain_MR, full_M = [], []
    for m, width in enumerate(key.widths):
        cut_BK = jnp.where(slot_K < width, value_BK, jnp.nan)
        counted_BK = active_B[:, None] & ~jnp.isnan(cut_BK)
        full_M.append(jnp.sum(jnp.where(counted_BK, jnp.exp(cut_BK), 0.0)))
        gain_R = plan_for(cut_BK, situation.cost_ms_MR[m]).gain_R
        gain_MR.append(jnp.where(m <= situation.width_index, gain_R, jnp.nan))

    due_B = situation.due_B & active_B if key.patient else None
    chosen = plan_for(value_BK, situation.cost_ms_MR[situation.width_index], due_B)
    memory = replace(
        memory,
        logp_BK=proposal.logp_BK,
        survival_BK=survival_BK,
        keep_B=chosen.keep_B,
    )
    floats = jnp.stack([chosen.gain, *full_M, *jnp.concatenate(gain_MR)])
    told = [
        jnp.stack([chosen.tier, chosen.budget]),
        lax.bitcast_convert_type(floats, jnp.int32),
    ]
    decided = chosen.keep_B, memory, below(previous_BX, jnp.concatenate(told))
    if placement is not None:
        decided = from_first(decided, placement.mesh.axis_names)
    return decided


def take_in(memory: Memory, accepted_B: Int32[Array, "B"], key: PlanKey) -> Memory:
    """Learns from the outcome of the last plan; without one, nothing."""
    keep_B = memory.keep_B
    raw_BK = jnp.exp(log_survival(memory.logp_BK))
    calibrated_BK = jnp.exp(memory.survival_BK)
    return replace(
        memory,
        calibration=learn(memory.calibration, memory.logp_BK, keep_B, accepted_B)
        if key.calibrated
        else memory.calibration,
        raw=observe(memory.raw, raw_BK, keep_B, accepted_B),
        calibrated=observe(memory.calibrated, calibrated_BK, keep_B, accepted_B),
    )


def below(
    wire_BX: Int32[Array, "B X"], told_U: Int32[Array, "U"]
) -> Int32[Array, "N X"]:
    """Adds as many rows as `told_U` needs."""
    columns = wire_BX.shape[1]
    rows = -(-told_U.shape[0] // columns)
    padded = jnp.pad(told_U, (0, rows * columns - told_U.shape[0]))
    return jnp.concatenate([wire_BX, padded.reshape(rows, columns)])


class Decision(NamedTuple):
    """The host's view of a plan."""

    tier: int
    kept: int
    gain: float  # drafts expected to be accepted
    full_M: np.ndarray  # the same if all drafts of a width were verified
    gain_MR: np.ndarray  # by drafting width and tier, weighted; NaN where not drafted


def read_decision(rows_NX: np.ndarray, key: PlanKey) -> Decision:
    """The rows that `decide` puts below the outcome."""
    told_U = rows_NX.ravel()
    M, R = len(key.widths), len(key.rows_R)
    floats = told_U[2 : 3 + M + M * R].view(np.float32).astype(float)
    return Decision(
        tier=int(told_U[0]),
        kept=int(told_U[1]),
        gain=float(floats[0]),
        full_M=floats[1 : 1 + M],
        gain_MR=floats[1 + M :].reshape(M, R),
    )
