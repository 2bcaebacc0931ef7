"""The target's next token: its arg-max, or a draw that a seed and a position fix.

A draw is a function of the row's logits, the request's settings, its seed and the
position of the token. Neither the tier, nor the width, nor a neighbour enters it; so a
speculative step, which accepts a draft where it *is* the target's own draw, emits what
plain sampling would have emitted, seed for seed.
"""

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from dcut_jax.cut.confidence import top1

_BLOCK = 128  # of the vocabulary, in the two-level search for a draw


@flax.struct.dataclass
class Sampling:
    """How tokens are drawn; one entry per slot, or per row.

    Attributes:
      temperature: divides the logits; 0 takes the arg-max.
      top_k: keep the k most likely tokens, and those tied with the last; 0 keeps all.
      top_p: of what top-k leaves, keep the smallest set of most likely tokens that
        reaches this probability, ties with the last included; 1 keeps all.
      min_p: drop tokens less likely than this share of the most likely one; 0 drops
        none.
      seed: of the request.
    """

    temperature: Float32[Array, "B"]
    top_k: Int32[Array, "B"]
    top_p: Float32[Array, "B"]
    min_p: Float32[Array, "B"]
    seed: Int32[Array, "B"]


def greedy(slots: int) -> Sampling:
    """Settings of `slots` requests that take the arg-max."""
    return Sampling(
        temperature=jnp.zeros(slots, jnp.float32),
        top_k=jnp.zeros(slots, jnp.int32),
        top_p=jnp.ones(slots, jnp.float32),
        min_p=jnp.zeros(slots, jnp.float32),
        seed=jnp.zeros(slots, jnp.int32),
    )


def next_token(
    logits_TV: Float32[Array, "T V"],
    sampling: Sampling,
    position_T: Int32[Array, "T"],
    over: str | None = None,
) -> Int32[Array, "T"]:
    """The token after each row.

    Args:
      logits_TV: float32. A row with a NaN or +inf gets some valid token.
      sampling: one entry per row.
      position_T: position of the token that is chosen.
      over: the mesh axis over which words are cut, if they are. To draw, logits are
        gathered: a draw's sums are then the ones of a single device.
    """
    best_T = top1(logits_TV, over).token
    warm_T = sampling.temperature > 0

    def drawn() -> Array:
        # A greedy row takes part with temperature 1 and is not selected below: nothing
        # is divided by a stand-in for zero.
        heat_T = jnp.where(warm_T, sampling.temperature, 1.0)
        all_TV = logits_TV
        if over is not None:
            all_TV = lax.all_gather(logits_TV, over, axis=1, tiled=True)
        # Thresholds and what is compared with them have to be the same numbers.
        weight_TV = lax.optimization_barrier(weights(all_TV, heat_T))
        kept_TV = jnp.where(keep(weight_TV, sampling), weight_TV, 0.0)
        token_T = pick(kept_TV, uniform(sampling.seed, position_T))
        total_T = jnp.sum(kept_TV, axis=1)  # NaN where a logit is
        return jnp.where(jnp.isfinite(total_T) & (total_T > 0), token_T, best_T)

    return jnp.where(warm_T, lax.cond(jnp.any(warm_T), drawn, lambda: best_T), best_T)


def log_probability(
    logits_TV: Float32[Array, "T V"],
    token_T: Int32[Array, "T"],
    over: str | None = None,
) -> Float32[Array, "T"]:
    """Log of a token's softmax probability in its row, at temperature 1, all kept.

    `over`: see `next_token`.
    """
    best = top1(logits_TV, over)
    pair_T2 = jnp.stack([token_T, best.token], axis=1)
    if over is None:
        logit_T2 = jnp.take_along_axis(logits_TV, pair_T2, axis=1)
    else:  # one device has the word; the others add nothing
        own_T2 = pair_T2 - lax.axis_index(over) * logits_TV.shape[1]
        mine_T2 = (own_T2 >= 0) & (own_T2 < logits_TV.shape[1])
        at_T2 = jnp.where(mine_T2, own_T2, 0)
        found_T2 = jnp.take_along_axis(logits_TV, at_T2, axis=1)
        logit_T2 = lax.psum(jnp.where(mine_T2, found_T2, 0.0), over)
    return best.logp + (logit_T2[:, 0] - logit_T2[:, 1])


@flax.struct.dataclass
class Likeliest:
    """The most likely tokens of some rows, and the logs of their probabilities."""

    token: Int32[Array, "*T L"]
    logp: Float32[Array, "*T L"]


def likeliest(
    logits_TV: Float32[Array, "T V"], count: int, over: str | None = None
) -> Likeliest:
    """The `count` most likely tokens of each row, the lower index first on ties.

    Their probabilities are those of `log_probability`; `over`: see `next_token`.
    """
    logit_TL, token_TL = lax.top_k(logits_TV, count)
    if over is not None:
        token_TL = token_TL + lax.axis_index(over) * logits_TV.shape[1]
        every = lax.all_gather((logit_TL, token_TL), over, axis=1, tiled=True)
        logit_TL, place_TL = lax.top_k(every[0], count)
        token_TL = jnp.take_along_axis(every[1], place_TL, axis=1)
    below_TL = logit_TL[:, :1] - logit_TL
    return Likeliest(token_TL, top1(logits_TV, over).logp[:, None] - below_TL)


def sound(
    logits_TV: Float32[Array, "T V"], over: str | None = None
) -> Bool[Array, "T"]:
    """Rows that have a next token: no NaN, no +inf, and something above -inf.

    The largest logit says it, for it is NaN where one is, and is known already.
    """
    peak_T = jnp.max(logits_TV, axis=1)
    if over is None:
        return jnp.isfinite(peak_T)
    told_2T = jnp.stack([~(peak_T < jnp.inf), peak_T > -jnp.inf])
    broken_T, some_T = lax.psum(told_2T.astype(jnp.int32), over)
    return (broken_T == 0) & (some_T > 0)


def weights(
    logits_TV: Float32[Array, "T V"], temperature_T: Float32[Array, "T"]
) -> Float32[Array, "T V"]:
    """Probabilities up to a factor: exactly 1 for the most likely token."""
    # Subtracted first, so that no rounding of a quotient is in the largest one's 0.
    below_TV = logits_TV - jnp.max(logits_TV, axis=1, keepdims=True)
    return jnp.exp(below_TV / temperature_T[:, None])


def keep(weight_TV: Float32[Array, "T V"], sampling: Sampling) -> Bool[Array, "T V"]:
    """Tokens that top-k, then top-p, then min-p leave; the most likely always.

    Thresholds are found by bisection over the weights' bits, without a sort.
    """
    vocab = weight_TV.shape[1]
    wanted_T = jnp.where(sampling.top_k > 0, sampling.top_k, vocab)
    wanted_T = jnp.minimum(wanted_T, vocab).astype(jnp.float32)
    ones_TV = jnp.ones_like(weight_TV)
    least_T = _largest_threshold(weight_TV, ones_TV, wanted_T, sampling.top_k > 0)
    first_TV = weight_TV >= least_T[:, None]

    left_TV = jnp.where(first_TV, weight_TV, 0.0)
    share_T = sampling.top_p * jnp.sum(left_TV, axis=1)
    narrow_T = sampling.top_p < 1
    least_T = _largest_threshold(left_TV, left_TV, share_T, narrow_T)
    second_TV = first_TV & (weight_TV >= least_T[:, None])
    third_TV = second_TV & (weight_TV >= sampling.min_p[:, None])
    return third_TV | (weight_TV == 1)


def _largest_threshold(
    weight_TV: Array, mass_TV: Array, wanted_T: Array, asked_T: Array
) -> Float32[Array, "T"]:
    """Largest t of each row with `sum(mass[weight >= t]) >= wanted`; 0 if not asked.

    Weights lie in [0, 1]; such floats are ordered as their bits are.
    """
    bits_TV = lax.bitcast_convert_type(weight_TV, jnp.int32)

    def narrower(bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low_T, high_T = bounds  # the threshold lies in low..high - 1
        middle_T = low_T + (high_T - low_T) // 2
        above_TV = jnp.where(bits_TV >= middle_T[:, None], mass_TV, 0.0)
        enough_T = jnp.sum(above_TV, axis=1) >= wanted_T
        return (
            jnp.where(enough_T, middle_T, low_T),
            jnp.where(enough_T, high_T, middle_T),
        )

    def unsure(bounds: tuple[Array, Array]) -> Array:
        low_T, high_T = bounds
        return jnp.any(asked_T & (high_T - low_T > 1))

    top = lax.bitcast_convert_type(jnp.float32(1), jnp.int32)
    rows = weight_TV.shape[:1]
    start = (jnp.zeros(rows, jnp.int32), jnp.full(rows, 1, jnp.int32) + top)
    low_T, _ = lax.while_loop(unsure, narrower, start)
    threshold_T = lax.bitcast_convert_type(low_T, jnp.float32)
    return jnp.where(asked_T, threshold_T, 0.0)


def uniform(
    seed_T: Int32[Array, "T"], position_T: Int32[Array, "T"]
) -> Float32[Array, "T"]:
    """A number in [0, 1) for each row, from its request's seed and its position."""

    def one(seed: Array, position: Array) -> Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.key(seed), position))

    return jax.vmap(one)(seed_T, position_T)


def pick(
    weight_TV: Float32[Array, "T V"], uniform_T: Float32[Array, "T"]
) -> Int32[Array, "T"]:
    """Draws by inversion: the first token whose cumulated weight exceeds the number's.

    Searched in blocks of the vocabulary first, so that no sum over all of it is
    cumulated. A token of weight 0 is never drawn.
    """
    rows, vocab = weight_TV.shape
    blocks = -(-vocab // _BLOCK)
    padded_TV = jnp.pad(weight_TV, ((0, 0), (0, blocks * _BLOCK - vocab)))
    block_TNM = padded_TV.reshape(rows, blocks, _BLOCK)
    end_TN = jnp.cumsum(jnp.sum(block_TNM, axis=2), axis=1)
    goal_T1 = uniform_T[:, None] * end_TN[:, -1:]
    block_T = _first_beyond(end_TN, goal_T1)
    before_T1 = jnp.where(
        block_T[:, None] > 0,
        jnp.take_along_axis(end_TN, jnp.maximum(block_T - 1, 0)[:, None], axis=1),
        0.0,
    )
    inside_TM = jnp.take_along_axis(block_TNM, block_T[:, None, None], axis=1)[:, 0]
    end_TM = before_T1 + jnp.cumsum(inside_TM, axis=1)
    # Rounding may leave the goal beyond the block's last token; then it is that one.
    end_TM = jnp.where(inside_TM > 0, end_TM, -jnp.inf)
    last_T = _BLOCK - 1 - jnp.argmax(inside_TM[:, ::-1] > 0, axis=1)
    found_TM = end_TM > goal_T1
    place_T = jnp.where(jnp.any(found_TM, axis=1), jnp.argmax(found_TM, axis=1), last_T)
    return (block_T * _BLOCK + place_T).astype(jnp.int32)


def _first_beyond(end_TN: Array, goal_T1: Array) -> Int32[Array, "T"]:
    """First block that ends beyond the goal; the last with any weight if none does."""
    start_TN = jnp.pad(end_TN[:, :-1], ((0, 0), (1, 0)))
    found_TN = (end_TN > goal_T1) & (end_TN > start_TN)
    blocks = end_TN.shape[1]
    last_T = blocks - 1 - jnp.argmax((end_TN > start_TN)[:, ::-1], axis=1)
    first_T = jnp.argmax(found_TN, axis=1)
    return jnp.where(jnp.any(found_TN, axis=1), first_T, last_T).astype(jnp.int32)
