"""The statistics in plain JAX: from logits, and from the head in chunks."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.confidence.partial import (
    Confidence,
    Partial,
    finish,
    merge,
    merge_shards,
    nothing,
    of_logits,
)
from pallas_kernels.products import product


def from_logits(logits_NV: Float[Array, "N V"], over: str | None = None) -> Confidence:
    """Of logits that are there already; `over` as `head_confidence` has it."""
    first = first_word(logits_NV.shape[1], over)
    word_NV = words(logits_NV.shape, first)
    return whole(of_logits(logits_NV.astype(jnp.float32), word_NV), over)


def first_word(own: int, over: str | None) -> Array | int:
    """Where a shard of `own` words begins."""
    return 0 if over is None else lax.axis_index(over) * own


def whole(found: Partial, over: str | None) -> Confidence:
    """The statistics, of all shards if the vocabulary is cut."""
    return finish(found if over is None else merge_shards(found, over))


def partial_of_head(
    hidden_NE: Float[Array, "N E"],
    head_VE: Float[Array, "V E"],
    first: Int32[Array, ""] | int,
    chunk: int | None,
) -> Partial:
    """Of the words `first..first + V`, `chunk` of them at a time.

    Of the logits no more than `[N, chunk]` is there at once; None: all of them.
    """
    rows, vocab = hidden_NE.shape[0], head_VE.shape[0]
    if chunk is None or vocab <= chunk:
        logits_NV = head_logits(hidden_NE, head_VE)
        return of_logits(logits_NV, words(logits_NV.shape, first))

    def step(i: Array, found: Partial) -> Partial:
        # The last chunk starts early enough to end with the table; what it repeats is
        # left out, for its words count once.
        start = jnp.minimum(i * chunk, vocab - chunk)
        part_CE = lax.dynamic_slice_in_dim(head_VE, start, chunk)
        logits_NC = head_logits(hidden_NE, part_CE)
        own_NC = words(logits_NC.shape, start) >= i * chunk
        logits_NC = jnp.where(own_NC, logits_NC, -jnp.inf)
        return merge(found, of_logits(logits_NC, words(logits_NC.shape, first + start)))

    return lax.fori_loop(0, -(-vocab // chunk), step, nothing(rows))


def head_logits(
    hidden_NE: Float[Array, "N E"], head_VE: Float[Array, "V E"]
) -> Float32[Array, "N V"]:
    """Products in the head's dtype, sums in float32; of float32 all bits count."""
    return product(hidden_NE, head_VE, (((1,), (1,)), ((), ())))


def words(shape: tuple[int, ...], first: Array | int) -> Int32[Array, "N V"]:
    """The number of each column's word."""
    return first + lax.broadcasted_iota(jnp.int32, shape, 1)
