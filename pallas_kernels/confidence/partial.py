"""What is kept of a piece of the vocabulary, and how two pieces become one.

Chunks of a loop, blocks of a kernel and shards of a mesh all meet here.
"""

from functools import reduce
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32, Int32

NO_WORD = np.int32(2**31 - 1)


class Partial(NamedTuple):
    """Of the words seen so far, a column each: kernels want two axes."""

    peak: Float32[Array, "N 1"]  # largest logit
    second: Float32[Array, "N 1"]  # largest but one; equal to the peak where it is tied
    total: Float32[Array, "N 1"]  # sum of exp(logit - peak)
    token: Int32[Array, "N 1"]  # the lowest word that has the peak


class Confidence(NamedTuple):
    """Statistics of each row's softmax, float32 whatever the inputs were."""

    token: Int32[Array, "N"]  # the most likely word, the lowest on ties
    logp: Float32[Array, "N"]  # log of its probability, in [-log V, 0]
    margin: Float32[Array, "N"]  # its logit less the next best one, at least 0
    lse: Float32[Array, "N"]  # log of the sum of exponentials of the logits
    peak: Float32[Array, "N"]  # the largest logit; costs nothing beyond the arg-max


def nothing(rows: int) -> Partial:
    """Before any word."""
    none = jnp.full((rows, 1), -jnp.inf, jnp.float32)
    token = jnp.full((rows, 1), NO_WORD, jnp.int32)
    return Partial(none, none, jnp.zeros((rows, 1), jnp.float32), token)


def of_logits(
    logits_NC: Float32[Array, "N C"], word_NC: Int32[Array, "N C"]
) -> Partial:
    """Of one piece. Words that are not there have a logit of -inf."""
    peak_N1 = jnp.max(logits_NC, axis=1, keepdims=True)
    # Not argmax: it reduces pairs, which CPUs do not vectorise and Mosaic GPU lacks.
    # A row with a NaN has no word at its peak, and gets the lowest.
    at_peak_NC = (logits_NC == peak_N1) | jnp.isnan(peak_N1)
    token_N1 = jnp.min(jnp.where(at_peak_NC, word_NC, NO_WORD), axis=1, keepdims=True)
    others_NC = jnp.where(word_NC == token_N1, -jnp.inf, logits_NC)
    total_N1 = jnp.sum(_share(logits_NC, peak_N1), axis=1, keepdims=True)
    second_N1 = jnp.max(others_NC, axis=1, keepdims=True)
    return Partial(peak_N1, second_N1, total_N1, token_N1)


def merge(a: Partial, b: Partial) -> Partial:
    """Of both pieces; `b` may stand anywhere in the vocabulary."""
    peak = jnp.maximum(a.peak, b.peak)
    lowest = jnp.minimum(a.token, b.token)
    token = jnp.where(a.peak > b.peak, a.token, b.token)  # of a NaN any will do
    return Partial(
        peak=peak,
        second=jnp.maximum(
            jnp.minimum(a.peak, b.peak), jnp.maximum(a.second, b.second)
        ),
        total=a.total * _share(a.peak, peak) + b.total * _share(b.peak, peak),
        token=jnp.where(a.peak == b.peak, lowest, token),
    )


def merge_shards(mine: Partial, axis: str | tuple[str, ...]) -> Partial:
    """Of all shards of a mesh axis, inside `shard_map`; words are numbered globally."""
    floats = [lax.bitcast_convert_type(x, jnp.int32) for x in mine[:3]]
    gathered_SN4 = lax.all_gather(jnp.concatenate([*floats, mine.token], axis=1), axis)

    def of_shard(bits_N4: Array) -> Partial:
        floats_N3 = lax.bitcast_convert_type(bits_N4[:, :3], jnp.float32)
        peak, second, total = jnp.split(floats_N3, 3, axis=1)
        return Partial(peak, second, total, bits_N4[:, 3:])

    # In the order of the shards, so that all devices find the same bits.
    return reduce(merge, map(of_shard, jnp.unstack(gathered_SN4)))


def finish(whole: Partial) -> Confidence:
    """The statistics of the whole vocabulary.

    A row that holds a NaN or +inf, or nothing above -inf, has NaN statistics, and some
    valid word; its peak is not finite.
    """
    # The total is NaN where a logit was NaN or +inf.
    possible = (whole.peak > -jnp.inf) & ~jnp.isnan(whole.total)
    log_total = jnp.where(possible, jnp.log(whole.total), jnp.nan)
    return Confidence(
        token=whole.token[:, 0],
        logp=-log_total[:, 0],
        margin=jnp.where(possible, whole.peak - whole.second, jnp.nan)[:, 0],
        lse=(whole.peak + log_total)[:, 0],
        peak=whole.peak[:, 0],
    )


def _share(logit: Array, peak: Array) -> Array:
    """`exp(logit - peak)`; 0 where both are -inf, for there is no word."""
    return jnp.where(logit == -jnp.inf, 0.0, jnp.exp(logit - peak))
