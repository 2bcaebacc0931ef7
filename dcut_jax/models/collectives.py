"""What crosses devices in a forward pass that is mapped over a mesh.

Everywhere `over` names the mesh axis that heads, feed-forward and words are cut over;
None means that nothing is, and then nothing here does anything.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

Over = str | None


class Dealt(NamedTuple):
    """How experts are dealt over a mesh axis, each device having its own.

    Attributes:
      axis: the mesh axis.
      rows: the mesh axes over which rows are dealt, this one among them; none, where
        all devices have the same rows.
    """

    axis: str
    rows: tuple[str, ...]


def total(x: Array, over: Over) -> Array:
    """Sums what each device has computed of a product that contracts a cut axis."""
    return x if over is None else lax.psum(x, over)


def lookup(token: Int[Array, "*N"], table_VX: Array, over: Over) -> Array:
    """Rows of a table, of which each device holds a stretch of the words."""
    if over is None:
        return table_VX[token]
    rows = table_VX.shape[0]
    own = token - lax.axis_index(over) * rows
    mine = (own >= 0) & (own < rows)
    found = table_VX[jnp.where(mine, own, 0)]
    return lax.psum(jnp.where(mine[..., None], found, jnp.zeros_like(found)), over)


def own_columns(x: Array, count: int, over: Over) -> Array:
    """This device's `count` columns of the last axis, of an array that all hold."""
    if over is None:
        return x
    start = lax.axis_index(over) * count
    return lax.dynamic_slice_in_dim(x, start, count, axis=x.ndim - 1)
