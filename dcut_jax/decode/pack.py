"""Packing: from keep counts to the flat rows of a verify step, and back.

Kept rows of all requests stand one after another, `[T]`; only they enter the linear
layers and the LM head. Attention wants the rows of one request together. It gets them
in groups of `J`: the first `J` rows of request `b` always form group `b`, the rows
beyond fill `O` further groups. A request with `n` rows needs `ceil(n / J) - 1` of
those, so `O = (T - B) // J` is always enough. Each group reads its request's pages.
"""

import math
from dataclasses import dataclass

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# What gathering a group's cache costs, in units of the attention work of a row; with
# further groups all of them are gathered. Measured on a CPU (docs/lab.md); elsewhere an
# estimate. It only weighs groupings, each of which is right.
_GATHER_COST = 2.5


@dataclass(frozen=True)
class Layout:
    """Static shape of a verify step: `slots` requests, `rows` rows, `width` a request.

    Attributes:
      group: rows of an attention group, J.
      overflow: groups beyond the first of a request, O.
    """

    slots: int
    rows: int
    width: int
    group: int
    overflow: int


def layout(slots: int, rows: int, width: int) -> Layout:
    """The cheapest grouping for a tier of `rows` rows, at most `width` a request.

    With fewer rows than slots as many slots may be in use, each with its anchor.
    """
    width = max(min(width, rows - slots + 1), 1)

    def overflow(group: int) -> int:
        return 0 if group >= width else (rows - slots) // group

    def cost(group: int) -> float:
        count = slots + overflow(group)
        gathered = count if overflow(group) else 0
        return count * group + gathered * _GATHER_COST

    group = min(range(1, width + 1), key=cost)
    return Layout(slots, rows, width, group, overflow(group))


def tier_rows(slots: int, width: int, factors: tuple[float, ...]) -> tuple[int, ...]:
    """Row counts of the tiers: `slots` times each factor, from anchors to full width.

    Raises:
      ValueError: for a factor outside `1..width`.
    """
    outside = [f for f in factors if not 1 <= f <= width]
    if outside:
        raise ValueError(
            f"tier factors are rows per request, 1 to {width} here; found {outside}"
        )
    ends = {slots, slots * width}
    return tuple(sorted(ends | {math.ceil(slots * f) for f in factors}))


@flax.struct.dataclass
class Packed:
    """Where each row of the tier comes from.

    Attributes:
      owner_T: request of the row (a valid index on padding rows too).
      offset_T: 0 for the anchor, `k` for draft `k`.
      valid_T: false on padding.
      first_B: index of a request's anchor row.
      count_B: rows of a request; 0 where it is inactive.
    """

    owner_T: Int[Array, "T"]
    offset_T: Int[Array, "T"]
    valid_T: Bool[Array, "T"]
    first_B: Int[Array, "B"]
    count_B: Int[Array, "B"]


def pack(keep_B: Int[Array, "B"], active_B: Bool[Array, "B"], rows: int) -> Packed:
    """Lays anchors and kept drafts of all requests into `rows` rows."""
    count_B = jnp.where(active_B, keep_B + 1, 0)
    end_B = jnp.cumsum(count_B)
    row_T = jnp.arange(rows)
    owner_T = jnp.sum(row_T[:, None] >= end_B[None, :], axis=1)
    owner_T = jnp.minimum(owner_T, keep_B.shape[0] - 1)
    first_B = end_B - count_B
    valid_T = row_T < end_B[-1]
    offset_T = jnp.where(valid_T, row_T - first_B[owner_T], 0)
    return Packed(owner_T, offset_T, valid_T, first_B, count_B)


@flax.struct.dataclass
class Groups:
    """Rows by attention group, and groups by row.

    The first B groups are the requests' own, the further ones follow: I = B + O.

    Attributes:
      row_IJ: row of each place (some row, where the place is empty).
      offset_IJ: offset of that row in its request.
      owner_I: request of each group.
      place_T: place of each row, flattened.
    """

    row_IJ: Int[Array, "I J"]
    offset_IJ: Int[Array, "I J"]
    owner_I: Int[Array, "I"]
    place_T: Int[Array, "T"]


def groups(packed: Packed, lay: Layout) -> Groups:
    """Attention groups of a packed step."""
    J, O, B, T = lay.group, lay.overflow, lay.slots, lay.rows
    further_B = jnp.maximum(-(-packed.count_B // J) - 1, 0)
    end_B = jnp.cumsum(further_B)
    start_B = end_B - further_B
    group_O = jnp.arange(O)
    owner_O = jnp.sum(group_O[:, None] >= end_B[None, :], axis=1)
    owner_O = jnp.minimum(owner_O, B - 1)
    owner_I = jnp.concatenate([jnp.arange(B), owner_O])
    first_I = jnp.concatenate(
        [jnp.zeros(B, jnp.int32), (group_O - start_B[owner_O] + 1) * J]
    )
    offset_IJ = first_I[:, None] + jnp.arange(J)[None, :]
    beyond_T = packed.offset_T - J
    further_T = start_B[packed.owner_T] + beyond_T // J
    place_T = jnp.where(
        beyond_T < 0,
        packed.owner_T * J + packed.offset_T,
        (B + further_T) * J + beyond_T % J,
    )
    row_IJ = packed.first_B[owner_I][:, None] + offset_IJ
    return Groups(jnp.clip(row_IJ, 0, T - 1), offset_IJ, owner_I, place_T)


def unpack(x_T: Float[Array, "T *rest"], packed: Packed, width: int) -> Array:
    """Rows by request, `[B, W, *rest]`; places past a request's count hold any row."""
    row_BW = packed.first_B[:, None] + jnp.arange(width)[None, :]
    return x_T[jnp.clip(row_BW, 0, x_T.shape[0] - 1)]
