"""The selection as one kernel: bisection instead of a sort.

Two integers fix a budget's selection. The *cut* is the largest key that at least
`budget` keys reach; all keys above it are selected. Of the keys equal to it, those at
the first places are, up to the *tie end*. Both are found bit by bit, by counting.

The body uses element-wise operations, sums over a whole array and loops that carry
scalars: what lowers on Mosaic TPU and on Mosaic GPU alike.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxtyping import Array, Bool, Int32

# All keys of a batch sit in one on-chip array, and budgets are unrolled: at these
# limits 62 KiB and 16 scalars, far from any chip's bounds, and tested.
MAX_REQUESTS, MAX_DRAFTS, MAX_BUDGETS = 512, 31, 16
LANES = 128
SIGN_BIT = np.int32(-(2**31))


def select(
    key_KB: Int32[Array, "K B"], budget_R: Int32[Array, "R"], *, interpret: bool
) -> Bool[Array, "R K B"]:
    """Marks the `budget_R[r]` largest keys; on ties the first in memory order.

    Args:
      key_KB: any integers but the smallest one, which marks what is never selected.
      budget_R: in 0..selectable keys.

    Raises:
      ValueError: more requests, drafts or budgets than `MAX_...`; not interpreted and
        lowered for anything but a TPU.
    """
    check_limits(*key_KB.shape, *budget_R.shape)
    if not interpret:
        budget_R = require_tpu(budget_R)
    cut_R, tie_end_R = launch_tpu(tile(key_KB), budget_R, interpret=interpret)
    place_KB = jnp.arange(key_KB.size, dtype=jnp.int32).reshape(key_KB.shape)
    cut_R11, tie_end_R11 = cut_R[:, None, None], tie_end_R[:, None, None]
    tied_RKB = (key_KB[None] == cut_R11) & (place_KB[None] < tie_end_R11)
    return (key_KB[None] > cut_R11) | tied_RKB


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
    """Keys in full lanes, in memory order; the padding is never selected."""
    padding = -key_KB.size % LANES
    key_N = jnp.pad(key_KB.ravel(), (0, padding), constant_values=SIGN_BIT)
    return key_N.reshape(-1, LANES)


def launch_tpu(
    key: Int32[Array, "rows lanes"], budget_R: Int32[Array, "R"], *, interpret: bool
) -> tuple[Int32[Array, "R"], Int32[Array, "R"]]:
    """One launch, one program: cut and tie end of every budget."""
    smem = pl.BlockSpec(memory_space=pltpu.SMEM)
    vmem = pl.BlockSpec(memory_space=pltpu.VMEM)
    scalars_R = jax.ShapeDtypeStruct(budget_R.shape, jnp.int32)
    cut_R, tie_end_R = pl.pallas_call(
        write_cuts,
        out_shape=(scalars_R, scalars_R),
        in_specs=(vmem, smem),
        out_specs=(smem, smem),
        interpret=interpret,
        name="budget_topk",
    )(key, budget_R)
    return cut_R, tie_end_R


def write_cuts(
    key_ref: Any,  # [rows, LANES]
    budget_ref: Any,  # [R]
    cut_ref: Any,  # [R]
    tie_end_ref: Any,  # [R]
) -> None:
    """The kernel body."""
    budgets = [budget_ref[r] for r in range(budget_ref.shape[0])]
    cuts, tie_ends = find_cuts(key_ref[...], budgets)
    for r, (cut, tie_end) in enumerate(zip(cuts, tie_ends, strict=True)):
        cut_ref[r] = cut
        tie_end_ref[r] = tie_end


def find_cuts(
    key: Int32[Array, "rows lanes"], budgets: list[Array]
) -> tuple[list[Array], list[Array]]:
    """Cut and tie end of each budget. A budget of 0 gets a cut that no key reaches."""
    rows, lanes = key.shape
    row, lane = (lax.broadcasted_iota(jnp.int32, key.shape, axis) for axis in (0, 1))
    place = row * lanes + lane

    # Flipping the sign bit turns the order of bit patterns into that of integers.
    def reached(r: int, pattern: Array) -> Array:
        return count(key >= pattern ^ SIGN_BIT) >= budgets[r]

    cuts = [p ^ SIGN_BIT for p in largest(reached, len(budgets), bits=32)]
    ties = [m - count(key > cut) for m, cut in zip(budgets, cuts, strict=True)]

    def within(r: int, end: Array) -> Array:
        return count((key == cuts[r]) & (place < end)) <= ties[r]

    return cuts, largest(within, len(budgets), bits=key.size.bit_length())


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


# Which device a program is for is known when it is lowered, not when it is traced; an
# identity with a lowering rule per platform is where the wrong one can be refused.
require_tpu_p = Primitive("budget_topk_require_tpu")
require_tpu_p.def_abstract_eval(lambda aval: aval)
require_tpu = jax.jit(require_tpu_p.bind)


def refuse(platform: str, advice: str, ctx: Any, *operands: Any) -> Any:
    """Lowering rule of a platform that has no launcher."""
    raise ValueError(
        f'budget_topk(backend="pallas") was lowered for {platform}, but has a kernel '
        f"for TPUs only; {advice}"
    )


TRY_INTERPRET = 'use backend="xla", or "pallas_interpret" to test the kernel'
mlir.register_lowering(require_tpu_p, lambda ctx, x: [x], platform="tpu")
mlir.register_lowering(
    require_tpu_p, partial(refuse, "a CPU", TRY_INTERPRET), platform="cpu"
)
mlir.register_lowering(
    require_tpu_p, partial(refuse, "a GPU", 'use backend="xla"'), platform="gpu"
)
