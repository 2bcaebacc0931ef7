"""Acceptance: the longest prefix on which draft and target agree, then one more."""

from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array, Int

from dcut_jax.decode.state import BROKEN, DecodeState, Outcome


def accept(
    predicted_BW: Int[Array, "B W"],
    draft_BK: Int[Array, "B K"],
    keep_B: Int[Array, "B"],
    state: DecodeState,
) -> tuple[Outcome, DecodeState]:
    """Commits what decoding with the target alone would have emitted.

    Args:
      predicted_BW: the target's own token after each row, its arg-max or its draw for
        that position; row 0 follows the anchor. A draft is accepted where it is this
        token, so what comes out is plain decoding's whatever was proposed. `BROKEN`
        ends a request as a stop token does; no draft is equal to it.
      draft_BK: proposals, of which the first `keep_B` were verified. `K >= W - 1`.

    Returns:
      The outcome and the next state. A stop token is committed and ends the request;
      tokens behind it, or beyond the room left, are dropped.
    """
    B, W = predicted_BW.shape
    index_1W = jnp.arange(W)[None]
    verified_BK = index_1W[:, : W - 1] < keep_B[:, None]
    match_BK = (draft_BK[:, : W - 1] == predicted_BW[:, : W - 1]) & verified_BK
    accepted_B = jnp.sum(jnp.cumprod(match_BK.astype(jnp.int32), axis=1), axis=1)

    # An accepted draft is the target's own token, so predictions are the output.
    is_stop_BW = jnp.any(predicted_BW[:, :, None] == state.stop_BZ[:, None, :], axis=2)
    is_stop_BW |= predicted_BW == BROKEN
    to_stop_B = jnp.min(jnp.where(is_stop_BW, index_1W + 1, W + 1), axis=1)
    count_B = jnp.minimum(jnp.minimum(accepted_B + 1, to_stop_B), state.room_B)
    count_B = jnp.where(state.active_B, count_B, 0)
    room_B = state.room_B - count_B
    finished_B = state.active_B & ((count_B == to_stop_B) | (room_B <= 0))
    last_B1 = jnp.maximum(count_B - 1, 0)[:, None]
    newest_B = jnp.take_along_axis(predicted_BW, last_B1, axis=1)[:, 0]
    outcome = Outcome(
        token_BW=predicted_BW,
        count_B=count_B,
        accepted_B=jnp.where(state.active_B, accepted_B, 0),
        verified_B=jnp.where(state.active_B, keep_B, 0),
        finished_B=finished_B,
    )
    return outcome, replace(
        state,
        anchor_B=jnp.where(state.active_B, newest_B, state.anchor_B),
        # A slot that ended has no context: attention reads as far as the longest.
        length_B=jnp.where(finished_B, 0, state.length_B + count_B),
        room_B=room_B,
        active_B=state.active_B & ~finished_B,
    )
