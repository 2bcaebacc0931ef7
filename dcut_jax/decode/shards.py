"""A batch dealt over shards of a mesh: from one's own slots to all of them, and back.

`axes` are the mesh axes over which slots are dealt; where there are none, every device
has all slots and nothing here does anything.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

Axes = tuple[str, ...]


def gathered(tree: Any, axes: Axes) -> Any:
    """Arrays `[B, ...]` of all slots, from those of each shard's own."""
    if not axes:
        return tree
    return jax.tree.map(lambda x: lax.all_gather(x, axes, axis=0, tiled=True), tree)


def own(x_B: Array, count: int, axes: Axes) -> Array:
    """This shard's `count` slots of an array that all have whole."""
    if not axes:
        return x_B
    return lax.dynamic_slice_in_dim(x_B, lax.axis_index(axes) * count, count)


def own_slot(
    slot: Int[Array, ""], count: int, axes: Axes
) -> tuple[Array, Bool[Array, ""] | None]:
    """Where a slot of the batch is in this shard, and whether it is here at all.

    Not here: an index that no slot has; None: it always is.
    """
    if not axes:
        return slot, None
    at = slot - lax.axis_index(axes) * count
    here = (at >= 0) & (at < count)
    return jnp.where(here, at, count), here


def from_shard(tree: Any, shard: Int[Array, ""], axes: Axes) -> Any:
    """What one shard has, on all of them."""
    if not axes:
        return tree
    here = lax.axis_index(axes) == shard
    return jax.tree.map(lambda x: lax.psum(jnp.where(here, x, 0), axes), tree)


def from_first(tree: Any, axes: Axes) -> Any:
    """The first device's bits of every array, on all devices of a mesh with `axes`.

    Bits, so that NaNs pass, and in one sum to which the others add zeros.
    """
    leaves, treedef = jax.tree.flatten(tree)
    bits = jnp.concatenate([_to_bits(x) for x in leaves])
    bits = lax.psum(jnp.where(lax.axis_index(axes) == 0, bits, 0), axes)
    ends = [0]
    for x in leaves:
        ends.append(ends[-1] + math.prod(x.shape))
    parts = [bits[a:b] for a, b in zip(ends, ends[1:], strict=False)]
    return jax.tree.unflatten(
        treedef, [_from_bits(part, x) for part, x in zip(parts, leaves, strict=True)]
    )


def _to_bits(x: Array) -> Int[Array, "X"]:
    assert x.dtype in (jnp.float32, jnp.int32, jnp.bool_), x.dtype
    if x.dtype == jnp.float32:
        return lax.bitcast_convert_type(x, jnp.int32).ravel()
    return x.astype(jnp.int32).ravel()


def _from_bits(bits: Int[Array, "X"], like: Array) -> Array:
    shaped = bits.reshape(like.shape)
    if like.dtype == jnp.float32:
        return lax.bitcast_convert_type(shaped, jnp.float32)
    return shaped.astype(like.dtype)
