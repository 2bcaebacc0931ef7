"""The drafter's context of plainly decoded rows: projected later, and many at once.

Plain decoding commits a row per request and step. The drafter asks for its keys and
values of that row when it next drafts, which may be hundreds of steps later, or never.
So such a step leaves the row's hidden states, and a catch-up projects all that have
gathered: one large product in place of many that read the same weights for a few rows.
"""

from dataclasses import replace

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int

# Steps that fit; and how many a catch-up takes in, the least that is enough. The small
# one is for plain steps between drafting ones.
ROOM = 32
CATCH_UPS = (4, ROOM)


@flax.struct.dataclass
class Deferred:
    """Rows whose drafter context is not in the cache yet.

    Attributes:
      tap_BPC: hidden states of the target's tapped layers, side by side.
      position_BP: where each row stands in its request.
      count_B: how many of a slot's rows wait; beyond them nothing is meant.
    """

    tap_BPC: Float32[Array, "B P C"]
    position_BP: Int[Array, "B P"]
    count_B: Int[Array, "B"]


def nothing_deferred(slots: int, columns: int) -> Deferred:
    """No row waits."""
    return Deferred(
        tap_BPC=jnp.zeros((slots, ROOM, columns), jnp.float32),
        position_BP=jnp.zeros((slots, ROOM), jnp.int32),
        count_B=jnp.zeros(slots, jnp.int32),
    )


def put_off(
    deferred: Deferred,
    tap_TC: Float32[Array, "T C"],
    slot_T: Int[Array, "T"],
    position_T: Int[Array, "T"],
    counted_T: Bool[Array, "T"],
) -> Deferred:
    """Adds the counted rows, at most one of a slot. Where a slot is full they are lost.

    Whoever drafts or fills a slot's last place catches up before.
    """
    room = deferred.position_BP.shape[1]
    at_T = jnp.where(counted_T, deferred.count_B[slot_T], room)  # and is dropped there
    return Deferred(
        tap_BPC=deferred.tap_BPC.at[slot_T, at_T].set(tap_TC, mode="drop"),
        position_BP=deferred.position_BP.at[slot_T, at_T].set(position_T, mode="drop"),
        count_B=deferred.count_B.at[slot_T].add(counted_T.astype(jnp.int32)),
    )


def emptied(deferred: Deferred, slot: Int[Array, ""]) -> Deferred:
    """The same with nothing waiting in a slot, which gets another request.

    A slot beyond the last is none.
    """
    return replace(deferred, count_B=deferred.count_B.at[slot].set(0, mode="drop"))
