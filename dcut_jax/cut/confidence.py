"""A drafter's proposals and how sure it is of them."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32


class Top1(NamedTuple):
    """The most likely token of each row."""

    token: Int32[Array, "*rows"]
    logp: Float32[Array, "*rows"]  # log of its softmax probability, in [-log V, 0]


def top1(logits: Float[Array, "*rows V"]) -> Top1:
    """Picks each row's arg-max, the lowest index on ties, and its log-probability.

    The log-sum-exp is taken in float32 whatever the logits' type: near certainty, in
    bfloat16 it would be mostly rounding. No array of the logits' size is written.

    Args:
      logits: scores of the whole vocabulary, not of one shard of it. A row that holds
        a NaN or +inf, or nothing above -inf, gets a NaN `logp` and some valid token.
    """
    vocab = logits.shape[-1]
    x = logits.astype(jnp.float32)
    peak = jnp.max(x, axis=-1, keepdims=True)
    # jnp.argmax reduces (value, index) pairs, which XLA does not vectorise on CPUs.
    index = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    token = jnp.min(jnp.where(x == peak, index, vocab - 1), axis=-1)
    return Top1(token, -jnp.log(jnp.sum(jnp.exp(x - peak), axis=-1)))
