"""A drafter's proposals and how sure it is of them."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32


class Top1(NamedTuple):
    """The most likely token of each row."""

    token: Int32[Array, "*rows"]
    logp: Float32[Array, "*rows"]  # log of its softmax probability, in [-log V, 0]


def top1(logits: Float[Array, "*rows V"], over: str | None = None) -> Top1:
    """Picks each row's arg-max, the lowest index on ties, and its log-probability.

    The log-sum-exp is taken in float32 whatever the logits' type: near certainty, in
    bfloat16 it would be mostly rounding. No array of the logits' size is written.

    Args:
      logits: scores of the whole vocabulary. A row that holds a NaN or +inf, or
        nothing above -inf, gets a NaN `logp` and some valid token.
      over: the mesh axis over which the vocabulary is cut, if it is: `logits` are then
        of this device's stretch of it, and all devices get the same result.
    """
    if over is not None:
        return _top1_of_shards(logits, over)
    vocab = logits.shape[-1]
    x = logits.astype(jnp.float32)
    peak = jnp.max(x, axis=-1, keepdims=True)
    # jnp.argmax reduces (value, index) pairs, which XLA does not vectorise on CPUs.
    index = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    token = jnp.min(jnp.where(x == peak, index, vocab - 1), axis=-1)
    return Top1(token, -jnp.log(jnp.sum(jnp.exp(x - peak), axis=-1)))


def _top1_of_shards(logits: Float[Array, "*rows V"], over: str) -> Top1:
    """One small gather: each shard's maximum, sum of exponentials and arg-max."""
    vocab = logits.shape[-1]
    x = logits.astype(jnp.float32)
    own_peak = jnp.max(x, axis=-1, keepdims=True)
    index = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    own_token = jnp.min(jnp.where(x == own_peak, index, vocab - 1), axis=-1)
    own_sum = jnp.sum(jnp.exp(x - own_peak), axis=-1)
    # A shard of words that are all ruled out has no sum; it adds nothing.
    own_sum = jnp.where(own_peak[..., 0] == -jnp.inf, 0.0, own_sum)
    floats = jnp.stack([own_peak[..., 0], own_sum])
    bits = jnp.concatenate(
        [lax.bitcast_convert_type(floats, jnp.int32), own_token[None]]
    )
    bits_SX = lax.all_gather(bits, over)
    peak_S = lax.bitcast_convert_type(bits_SX[:, 0], jnp.float32)
    sum_S = lax.bitcast_convert_type(bits_SX[:, 1], jnp.float32)
    peak = jnp.max(peak_S, axis=0)
    shards = peak_S.shape[0]
    first_S = vocab * jnp.arange(shards).reshape(shards, *[1] * (peak_S.ndim - 1))
    token_S = bits_SX[:, 2] + first_S
    # Of a row without a largest logit: the last word, as on one device.
    last = shards * vocab - 1
    token = jnp.min(jnp.where(peak_S == peak[None], token_S, last), axis=0)
    scale_S = jnp.where(sum_S == 0, 0.0, jnp.exp(peak_S - peak[None]))
    total = jnp.sum(sum_S * scale_S, axis=0)
    return Top1(token, jnp.where(peak == -jnp.inf, jnp.nan, -jnp.log(total)))
