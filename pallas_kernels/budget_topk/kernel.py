"""The selection as one kernel: bisection instead of a sort.

Two integers fix a budget's selection. The *cut* is the largest key that at least
`budget` keys reach; all keys above it are selected. Of the keys equal to it, those at
the first places are, up to the *tie end*. Both are found bit by bit, by counting.

Keys lie position by position, each position's requests along the lanes. The body uses
element-wise operations, sums over a whole array, loops with carries and slices of a
reference: what lowers on Mosaic TPU and on Mosaic GPU alike. The launchers differ in
how they share out the budgets: on a TPU one program advances all of them together, so
that their sums overlap; on a GPU each has a block of its own.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import sequential_vmap
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Int32

from pallas_kernels.backends import Backend, require
from pallas_kernels.budget_topk.keys import NEVER, key_values, survival_units
from pallas_kernels.budget_topk.reference import Selection

# All keys of a batch sit on chip at once, and on TPUs budgets are unrolled: at these
# limits 62 KiB and 16 scalars, far from any chip's bounds, and tested.
MAX_REQUESTS, MAX_DRAFTS, MAX_BUDGETS = 512, 31, 16
LANES = 128


def select(
    key_KB: Int32[Array, "K B"], budget_R: Int32[Array, "R"], *, backend: Backend
) -> Selection:
    """Selects the `budget_R[r]` largest keys; on ties the first in memory order.

    Args:
      key_KB: of `keys.order_keys`.
      budget_R: in 0..selectable keys.

    Raises:
      ValueError: more requests, drafts or budgets than `MAX_...`; lowered for what does
        not run `backend`.
    """
    check_limits(*key_KB.shape, *budget_R.shape)
    launches: dict[Backend, Callable[..., Selection]] = {
        "pallas_tpu": launch_tpu,
        "pallas_mosaic_gpu": launch_gpu,
        "pallas_interpret": partial(launch_tpu, interpret=True),
    }
    launch = partial(launches[backend], drafts=key_KB.shape[0])
    # Several batches at once are launched one after another: TPUs take no block of
    # budgets out of an array with more of them.
    launch = sequential_vmap(launch)
    found = launch(tile(key_KB), require(budget_R, "budget_topk", backend))
    keep_RP = found.keep_RB.reshape(budget_R.shape[0], -1)  # requests and padding
    return Selection(keep_RP[:, : key_KB.shape[1]], found.units_R)


def fits(requests: int, drafts: int) -> bool:
    """Whether the kernel takes a batch of so many requests with so many drafts."""
    return requests <= MAX_REQUESTS and drafts <= MAX_DRAFTS


def check_limits(drafts: int, requests: int, budgets: int) -> None:
    """Raises where the kernel was never meant to work."""
    found = (requests, drafts, budgets)
    limits = (MAX_REQUESTS, MAX_DRAFTS, MAX_BUDGETS)
    if any(size > limit for size, limit in zip(found, limits, strict=True)):
        raise ValueError(
            f"budget_topk's kernel takes at most {limits} (requests, drafts, budgets), "
            f'got {found}; use backend="xla", or split the batch'
        )


def tile(key_KB: Int32[Array, "K B"]) -> Int32[Array, "rows lanes"]:
    """Keys in full lanes, S rows a position; the padding is never selected."""
    padding = -key_KB.shape[1] % LANES
    key_KP = jnp.pad(key_KB, ((0, 0), (0, padding)), constant_values=NEVER)
    return key_KP.reshape(-1, LANES)


def launch_tpu(
    key: Int32[Array, "rows lanes"],
    budget_R: Int32[Array, "R"],
    drafts: int,
    *,
    interpret: Any = False,
) -> Selection:
    """One launch, one program; `keep_RB` comes as `[R, S, LANES]`.

    Args:
      interpret: what `pl.pallas_call` takes.
    """
    budgets, rows = budget_R.shape[0], key.shape[0] // drafts

    def body(budget_ref: Any, key_ref: Any, keep_ref: Any, units_ref: Any) -> None:
        wanted = [budget_ref[r] for r in range(budgets)]
        keeps, units = select_all(key_ref, wanted, drafts)
        for r in range(budgets):
            keep_ref[r] = keeps[r]
            units_ref[r] = units[r]

    smem = pl.BlockSpec(memory_space=pltpu.SMEM)
    vmem = pl.BlockSpec(memory_space=pltpu.VMEM)
    keep, units_R = pl.pallas_call(
        body,
        out_shape=out_shapes(budgets, rows),
        in_specs=(smem, vmem),
        out_specs=(vmem, smem),
        interpret=interpret,
        name="budget_topk",
    )(budget_R, key)
    return Selection(keep, units_R)


def launch_gpu(
    key: Int32[Array, "rows lanes"], budget_R: Int32[Array, "R"], drafts: int
) -> Selection:
    """One launch, a block of one warpgroup for each budget; see `launch_tpu`."""
    # Not at the top: it wants packages that only come with JAX's GPU extras.
    from jax.experimental.pallas import mosaic_gpu as plgpu

    budgets, rows = budget_R.shape[0], key.shape[0] // drafts

    def body(budget_ref: Any, key_ref: Any, keep_ref: Any, units_ref: Any) -> None:
        r = lax.axis_index("budget")
        [keep], [units] = select_all(key_ref, [budget_ref[r]], drafts)
        keep_ref[r] = keep
        units_ref[r] = units

    keep, units_R = plgpu.kernel(
        body,
        out_type=out_shapes(budgets, rows),
        grid=(budgets,),
        grid_names=("budget",),
        # The default from JAX 0.11 on; the other one has no layout for an iota.
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
    )(budget_R, key)
    return Selection(keep, units_R)


def out_shapes(budgets: int, rows: int) -> tuple[Any, Any]:
    """Of counts and of gains."""
    keep = jax.ShapeDtypeStruct((budgets, rows, LANES), jnp.int32)
    return keep, jax.ShapeDtypeStruct((budgets,), jnp.int32)


def select_all(
    key_ref: Any,  # [K * S, LANES]
    budgets: Sequence[Array],
    drafts: int,
) -> tuple[list[Array], list[Array]]:
    """The body: for each budget counts `[S, LANES]` and the sum of survival units."""
    rows = key_ref.shape[0] // drafts
    key = key_ref[...]
    cuts, tie_ends = find_cuts(key, places(key.shape), budgets)
    place = places((rows, LANES))

    def add_position(k: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        key = key_ref[pl.ds(k * rows, rows), :]
        units = survival_units(key_values(key))
        before = k * (rows * LANES)
        added = []
        for r, (cut, tie_end) in enumerate(zip(cuts, tie_ends, strict=True)):
            tied = (key == cut) & (place < tie_end - before)
            kept = (key > cut) | tied
            added.append(sums[2 * r] + kept.astype(jnp.int32))
            added.append(sums[2 * r + 1] + jnp.where(kept, units, 0))
        return tuple(added)

    zeros = jnp.zeros((rows, LANES), jnp.int32)
    sums = lax.fori_loop(0, drafts, add_position, (zeros,) * (2 * len(budgets)))
    return list(sums[::2]), [jnp.sum(units) for units in sums[1::2]]


def places(shape: tuple[int, int]) -> Int32[Array, "rows lanes"]:
    """Places in memory order."""
    row, lane = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    return row * shape[1] + lane


def find_cuts(
    key: Int32[Array, "rows lanes"],
    place: Int32[Array, "rows lanes"],
    budgets: Sequence[Array],
) -> tuple[list[Array], list[Array]]:
    """Cut and tie end of each budget. A budget of 0 gets a cut that no key reaches."""

    # Flipping the sign bit turns the order of bit patterns into that of integers.
    def reached(r: int, pattern: Array) -> Array:
        return count(key >= pattern ^ SIGN_BIT) >= budgets[r]

    cuts = [p ^ SIGN_BIT for p in largest(reached, len(budgets), bits=32)]
    ties = [m - count(key > cut) for m, cut in zip(budgets, cuts, strict=True)]

    def within(r: int, end: Array) -> Array:
        return count((key == cuts[r]) & (place < end)) <= ties[r]

    return cuts, largest(within, len(budgets), bits=key.size.bit_length())


SIGN_BIT = np.int32(-(2**31))


def largest(
    holds: Callable[[int, Array], Array], budgets: int, *, bits: int
) -> list[Array]:
    """Per budget, the largest pattern of `bits` bits for which `holds(r, pattern)`.

    What holds for a pattern must hold for all smaller ones, and for 0. All budgets
    advance together, so that their reductions overlap.
    """

    def set_bit(step: Array, found: tuple[Array, ...]) -> tuple[Array, ...]:
        bit = lax.shift_left(jnp.int32(1), jnp.int32(bits - 1) - step)
        return tuple(
            jnp.where(holds(r, pattern | bit), pattern | bit, pattern)
            for r, pattern in enumerate(found)
        )

    return list(lax.fori_loop(0, bits, set_bit, (jnp.int32(0),) * budgets))


def count(mask: Bool[Array, "rows lanes"]) -> Int32[Array, ""]:
    """How many are true."""
    return jnp.sum(mask.astype(jnp.int32))
