"""Device state of a batch in flight, and what a step leaves for the host."""

from typing import NamedTuple

import flax.struct
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float32, Int

from dcut_jax.decode.sample import Likeliest, Sampling, greedy
from dcut_jax.models.cache import NO_PAGE

NO_STOP = -1  # pads the stop set; no token has this id
BROKEN = -2  # stands for the token after a row whose logits are not finite
COUNTS = 4  # columns of the wire form before its tokens
ACCEPTED = 1  # the one with accepted drafts


@flax.struct.dataclass
class DecodeState:
    """One row per slot.

    Attributes:
      anchor_B: last committed token; not in the cache yet.
      length_B: cached positions, which is also the anchor's position; 0 in a slot
        whose request has ended.
      room_B: tokens the request may still emit.
      active_B: whether the slot decodes.
      stop_BZ: tokens that end the request, padded with `NO_STOP`.
      table_BN: the slot's pages in the caches of both models, see `models.cache`. The
        host writes it, steps read it.
      sampling: how tokens are drawn; None where every request takes the arg-max.
    """

    anchor_B: Int[Array, "B"]
    length_B: Int[Array, "B"]
    room_B: Int[Array, "B"]
    active_B: Bool[Array, "B"]
    stop_BZ: Int[Array, "B Z"]
    table_BN: Int[Array, "B N"]
    sampling: Sampling | None = None


@flax.struct.dataclass
class Outcome:
    """What one step committed.

    Attributes:
      token_BW: committed tokens, the first `count_B` of each row.
      count_B: tokens committed; 0 where the slot was inactive.
      accepted_B: drafts the target agreed with, before stops and limits.
      verified_B: drafts that were checked.
      finished_B: the request ended in this step; its last token is `BROKEN` where the
        target had no token to give.
      logp_BW: log-probability of each token; None where nobody asks for it.
      likeliest: the most likely tokens in its place, `[B, W, L]`; None likewise.
      crowded_B: layers in which rows asked for more of one device's experts than its
        place holds, and took the slower way; None where rows do not travel.
    """

    token_BW: Int[Array, "B W"]
    count_B: Int[Array, "B"]
    accepted_B: Int[Array, "B"]
    verified_B: Int[Array, "B"]
    finished_B: Bool[Array, "B"]
    logp_BW: Float32[Array, "B W"] | None = None
    likeliest: Likeliest | None = None
    crowded_B: Int[Array, "B"] | None = None


def init_state(
    slots: int, stops: int, pages: int, sampling: bool = False
) -> DecodeState:
    """All slots empty, with room for `stops` stop tokens and `pages` pages each."""
    zero_B = jnp.zeros(slots, jnp.int32)
    return DecodeState(
        anchor_B=zero_B,
        length_B=zero_B,
        room_B=zero_B,
        active_B=jnp.zeros(slots, bool),
        stop_BZ=jnp.full((slots, max(stops, 1)), NO_STOP, jnp.int32),
        table_BN=jnp.full((slots, pages), NO_PAGE, jnp.int32),
        sampling=greedy(slots) if sampling else None,
    )


def told_columns(logprobs: int) -> int:
    """Numbers that the wire form has of each token, see `StepShapes.logprobs`."""
    return 1 + min(logprobs, 1) + 2 * max(logprobs - 1, 0)


def to_wire(outcome: Outcome) -> Int[Array, "B X"]:
    """One integer array, so that the host reads once: counts, tokens, their logps.

    Log-probabilities go as the bits of their floats.
    """
    counts = jnp.stack(
        [
            outcome.count_B,
            outcome.accepted_B,
            outcome.verified_B,
            outcome.finished_B.astype(jnp.int32),
        ],
        axis=1,
    )
    parts = [counts, outcome.token_BW]
    if outcome.logp_BW is not None:
        parts.append(lax.bitcast_convert_type(outcome.logp_BW, jnp.int32))
    if outcome.likeliest is not None:
        slots, beside = len(outcome.token_BW), outcome.likeliest
        logp_BWL = lax.bitcast_convert_type(beside.logp, jnp.int32)
        parts += [x.reshape(slots, -1) for x in (beside.token, logp_BWL)]
    if outcome.crowded_B is not None:
        parts.append(outcome.crowded_B[:, None])
    return jnp.concatenate(parts, axis=1)


class HostOutcome(NamedTuple):
    """An `Outcome` that the host has read."""

    token_BW: np.ndarray
    count_B: np.ndarray
    accepted_B: np.ndarray
    verified_B: np.ndarray
    finished_B: np.ndarray
    logp_BW: np.ndarray | None
    crowded: int
    likeliest_BWL: tuple[np.ndarray, np.ndarray] | None  # tokens, and their logs


def from_wire(
    wire_BX: np.ndarray, logprobs: int = 0, crowds: bool = False
) -> HostOutcome:
    """The outcome that `to_wire` wrote, with or without `logprobs` and `crowded_B`."""
    crowded = 0
    if crowds:
        # Every shard has its own, which are the same but for how rows are dealt.
        crowded = int(wire_BX[:, -1].max())
        wire_BX = wire_BX[:, :-1]
    parts = np.split(wire_BX[:, COUNTS:], told_columns(logprobs), axis=1)
    beside = None
    if logprobs > 1:
        slots, width = parts[0].shape
        tokens, logps = np.split(np.concatenate(parts[2:], axis=1), 2, axis=1)
        shape = slots, width, logprobs - 1
        logp_BWL = np.ascontiguousarray(logps).view(np.float32).reshape(shape)
        beside = tokens.reshape(shape), logp_BWL
    return HostOutcome(
        token_BW=parts[0],
        count_B=wire_BX[:, 0],
        accepted_B=wire_BX[:, ACCEPTED],
        verified_B=wire_BX[:, 2],
        finished_B=wire_BX[:, 3].astype(bool),
        logp_BW=parts[1].view(np.float32) if logprobs else None,
        crowded=crowded,
        likeliest_BWL=beside,
    )
