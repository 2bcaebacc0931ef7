"""The TPU kernel: a request's own pages go through the chip one after another.

Page tables and lengths are read before a page is fetched, so a page beyond a request's
length, or before its window, costs neither a transfer nor arithmetic: its turn names a
page that is on the chip already, and does nothing.

There is none for GPUs: Mosaic GPU wants products in layouts of its own. There XLA's
form runs, or cuDNN where it is asked for.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_kernels.backends import Backend, require
from pallas_kernels.products import product
from pallas_kernels.verify_attention.softmax import (
    Pages,
    Running,
    apart,
    begin,
    finish,
    merge,
    per_query,
    seen_pages,
    side_by_side,
)

# Of queries, sums and outputs on the chip at once: of one of them, in float32. A page
# of eight heads of 128 is 256 KiB in bfloat16; keys and values are there twice.
BLOCK_VALUES = 128 << 10

# Fresh rows come in whole registers. Of a single one in bfloat16, as plain decoding has
# it, Mosaic takes the product with its value for an outer one, and then lowers none.
SUBLANES, LANES = 8, 128

_ROWS_BY_COLUMNS = (((1,), (0,)), ((), ()))
_ROWS_BY_ROWS = (((1,), (1,)), ((), ()))


def attend(
    q_BJHD: Float[Array, "B J H D"],
    k_BSGD: Float[Array, "B S G D"],
    v_BSGD: Float[Array, "B S G D"],
    mask_BJS: Bool[Array, "B J S"],
    pages: Pages,
    since_BJ: Int32[Array, "B J"] | None,
    *,
    backend: Backend,
) -> Float32[Array, "B J H D"]:
    """See `reference.attend`.

    Raises:
      ValueError: lowered for what does not run `backend`.
    """
    q_BJHD = require(q_BJHD, "attention", backend)
    launch = partial(launch_tpu, interpret=backend == "pallas_interpret")
    return launch(q_BJHD, k_BSGD, v_BSGD, mask_BJS, pages, since_BJ)


def heads_at_once(kv_heads: int, rows: int, head_dim: int) -> int:
    """Key/value heads of a program: as many as fit, in equal parts."""
    fitting = max(1, BLOCK_VALUES // (rows * head_dim))
    return max(n for n in range(1, kv_heads + 1) if kv_heads % n == 0 and n <= fitting)


def launch_tpu(
    q_BJHD: Float[Array, "B J H D"],
    k_BSGD: Float[Array, "B S G D"],
    v_BSGD: Float[Array, "B S G D"],
    mask_BJS: Bool[Array, "B J S"],
    pages: Pages,
    since_BJ: Int32[Array, "B J"] | None,
    *,
    interpret: Any = False,
) -> Float32[Array, "B J H D"]:
    """One launch; pages are the innermost axis of the grid, up to the longest request.

    Args:
      interpret: what `pl.pallas_call` takes.
    """
    B, J, H, D = q_BJHD.shape
    S, G, C = k_BSGD.shape[1], k_BSGD.shape[2], pages.size
    X = H // G * J
    heads = heads_at_once(G, X, D)
    read = seen_pages(pages, since_BJ)
    turns = jnp.maximum(jnp.max(read.end_B), 1)
    columns = pages.page_BN.shape[1]

    def page_at(b: Array, g: Array, i: Array, *scalars: Any) -> tuple[Any, ...]:
        layer_ref, page_ref, first_ref, end_ref, _ = scalars
        at = jnp.maximum(jnp.minimum(i, end_ref[b] - 1), first_ref[b])
        at = jnp.minimum(at, columns - 1)
        return layer_ref[0], page_ref[b * columns + at], g, 0, 0

    def of_heads(*block: int) -> Any:
        return pl.BlockSpec((None, heads, *block), lambda b, g, i, *_: (b, g, 0, 0))

    def of_request(*block: int) -> Any:
        return pl.BlockSpec((None, *block), lambda b, g, i, *_: (b, 0, 0))

    def of_page(*block: int) -> Any:
        return pl.BlockSpec((None, None, heads, *block), page_at)

    def filled_up(x: Array, axis: int) -> Array:
        """Fresh rows that no row sees at the end."""
        pad = [(0, -S % SUBLANES if i == axis else 0) for i in range(x.ndim)]
        return jnp.pad(x, pad)

    mask_BXS = per_query(filled_up(mask_BJS.astype(jnp.int32), 2), H // G)
    windows = () if since_BJ is None else (per_query(since_BJ[..., None], H // G),)
    scalars = (
        jnp.reshape(jnp.asarray(pages.layer, jnp.int32), (1,)),
        pages.valid_BN.reshape(-1),  # in two axes it would be padded to full lanes
        *read,
        pages.length_B,
    )
    q_BGXD = side_by_side(q_BJHD, G)
    if k_BSGD.dtype == pages.k_YPGDC.dtype:  # or each product has it rounded its way
        q_BGXD = q_BGXD.astype(k_BSGD.dtype)
    # Of heads that do not fill the lanes XLA keeps values the other way round, not
    # to pad them. To ask for them so costs nothing; for the plain way, a whole copy.
    upright = D % LANES == 0
    size = pages.k_YPGDC.dtype.itemsize
    out_BGXD = pl.pallas_call(
        partial(_body, windowed=since_BJ is not None, upright=upright),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(B, G // heads, turns),
            in_specs=(
                of_heads(X, D),
                of_heads(mask_BXS.shape[2], D),
                of_heads(mask_BXS.shape[2], D),
                of_request(*mask_BXS.shape[1:]),
                *(of_request(X, 1) for _ in windows),
                of_page(D, C),
                of_page(C, D) if upright else of_page(D, C),
            ),
            out_specs=of_heads(X, D),
            scratch_shapes=[
                pltpu.VMEM((heads, X, 1), jnp.float32),
                pltpu.VMEM((heads, X, 1), jnp.float32),
                pltpu.VMEM((heads, X, D), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((B, G, X, D), jnp.float32),
        compiler_params=None
        if interpret is True
        else pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        # Of caches that are full, for nothing else is known when this is compiled.
        cost_estimate=pl.CostEstimate(
            flops=4 * B * J * H * D * (columns * C + S),
            bytes_accessed=2 * B * G * D * (columns * C + S) * size,
            transcendentals=B * J * H * (columns * C + S),
        ),
        interpret=interpret,
        name="verify_attention",
    )(
        *scalars,
        q_BGXD,
        filled_up(k_BSGD, 1).swapaxes(1, 2),
        filled_up(v_BSGD, 1).swapaxes(1, 2),
        mask_BXS,
        *windows,
        pages.k_YPGDC,
        pages.v_YPGCD if upright else pages.v_YPGCD.swapaxes(3, 4),
    )
    return apart(out_BGXD, J)


def _body(*refs: Any, windowed: bool, upright: bool) -> None:
    """One page of one request; references of blocks, the softmax carried in scratch.

    Values are `[heads, C, D]`, or `[heads, D, C]` unless they are `upright`.
    """
    _, _, first_ref, end_ref, length_ref, *rest = refs
    q_ref, k_new_ref, v_new_ref, mask_ref, *rest = rest  # [heads, X or S, D], [X, S]
    since_ref = rest.pop(0) if windowed else None  # [X, 1]
    k_ref, v_ref, out_ref, *running = rest  # [heads, D, C], see above, [heads, X, D]
    heads, C = k_ref.shape[0], k_ref.shape[2]
    b, i = pl.program_id(0), pl.program_id(2)

    def keep(h: int, found: Running) -> None:
        for ref, value in zip(running, found, strict=True):
            ref[h] = value

    @pl.when(i == 0)
    def fresh_rows() -> None:
        for h in range(heads):
            s = product(q_ref[h], k_new_ref[h], _ROWS_BY_ROWS)
            s = jnp.where(mask_ref[...] != 0, s, -jnp.inf)
            keep(h, begin(s, v_new_ref[h], _ROWS_BY_COLUMNS))

    @pl.when((i >= first_ref[b]) & (i < end_ref[b]))
    def cached_rows() -> None:
        left = length_ref[b] - i * C
        place_1C = lax.broadcasted_iota(jnp.int32, (1, C), 1)
        own = (
            lax.broadcasted_iota(jnp.int32, v_ref.shape[1:], 0 if upright else 1) < left
        )
        seen = place_1C < left
        if since_ref is not None:
            seen = seen & (place_1C + i * C >= since_ref[...])
        for h in range(heads):
            s = product(q_ref[h], k_ref[h], _ROWS_BY_COLUMNS)
            s = jnp.where(seen, s, -jnp.inf)
            v = jnp.where(own, v_ref[h], 0)  # 0 times NaN is NaN
            so_far = Running(*(ref[h] for ref in running))
            by = _ROWS_BY_COLUMNS if upright else _ROWS_BY_ROWS
            keep(h, merge(so_far, s, v.astype(v_ref.dtype), by))

    @pl.when(i == pl.num_programs(2) - 1)
    def the_end() -> None:
        for h in range(heads):
            out_ref[h] = finish(Running(*(ref[h] for ref in running)))
