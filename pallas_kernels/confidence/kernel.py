"""The statistics as one TPU kernel: a block of the head at a time, logits on chip.

There is none for GPUs: Mosaic GPU has no product of plain arrays, and the loop over
chunks already writes little there.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.backends import Backend, require
from pallas_kernels.confidence.partial import Partial, merge, nothing, of_logits
from pallas_kernels.confidence.reference import head_logits, words


@dataclass(frozen=True)
class Blocks:
    """Tile sizes: `rows` of hidden states against `words` of the head.

    Two blocks of the head are on chip at once, 1024 words of 8192 columns in bfloat16
    being 16 MiB each, so wide models take fewer words.
    """

    rows: int = 256
    words: int = 1024


BLOCK_BYTES = 4 << 20  # of one block of the head


def blocks_for(embed: int, itemsize: int) -> Blocks:
    """As many words as fit `BLOCK_BYTES`, in full lanes."""
    fitting = BLOCK_BYTES // (embed * itemsize) // 128 * 128
    return Blocks(words=min(max(fitting, 128), Blocks.words))


def partial_of_head(
    hidden_NE: Float[Array, "N E"],
    head_VE: Float[Array, "V E"],
    first: Int32[Array, ""] | int,
    *,
    backend: Backend,
    blocks: Blocks | None = None,
) -> Partial:
    """Of the words `first..first + V`; see `reference.partial_of_head`.

    Raises:
      ValueError: lowered for what does not run `backend`.
    """
    blocks = blocks or blocks_for(head_VE.shape[1], head_VE.dtype.itemsize)
    hidden_NE = require(hidden_NE, "confidence", backend)
    interpret = backend == "pallas_interpret"
    found = launch_tpu(hidden_NE, head_VE, blocks, interpret=interpret)
    return found._replace(token=found.token + first)


def launch_tpu(
    hidden_NE: Float[Array, "N E"],
    head_VE: Float[Array, "V E"],
    blocks: Blocks,
    *,
    interpret: Any = False,
) -> Partial:
    """One launch; words are the innermost axis of the grid and come one after another.

    Args:
      interpret: what `pl.pallas_call` takes.
    """
    (rows, embed), vocab = hidden_NE.shape, head_VE.shape[0]
    block_rows = min(blocks.rows, rows)
    grid = (pl.cdiv(rows, block_rows), pl.cdiv(vocab, blocks.words))

    def body(hidden_ref: Any, head_ref: Any, *out_refs: Any) -> None:
        block = pl.program_id(1)

        @pl.when(block == 0)
        def _() -> None:
            for ref, value in zip(out_refs, nothing(block_rows), strict=True):
                ref[...] = value

        logits = head_logits(hidden_ref[...], head_ref[...])
        word = words(logits.shape, block * blocks.words)
        logits = jnp.where(word < vocab, logits, -jnp.inf)  # the last block is ragged
        found = Partial(*(ref[...] for ref in out_refs))
        for ref, value in zip(
            out_refs, merge(found, of_logits(logits, word)), strict=True
        ):
            ref[...] = value

    column = pl.BlockSpec((block_rows, 1), lambda i, j: (i, 0))
    floats = jax.ShapeDtypeStruct((rows, 1), jnp.float32)
    size = head_VE.dtype.itemsize
    found = pl.pallas_call(
        body,
        grid=grid,
        in_specs=(
            pl.BlockSpec((block_rows, embed), lambda i, j: (i, 0)),
            pl.BlockSpec((blocks.words, embed), lambda i, j: (j, 0)),
        ),
        out_specs=(column,) * 4,
        out_shape=(floats, floats, floats, jax.ShapeDtypeStruct((rows, 1), jnp.int32)),
        compiler_params=None
        if interpret is True
        else pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * rows * embed * vocab,
            bytes_accessed=grid[0] * vocab * embed * size + rows * embed * size,
            transcendentals=rows * vocab,
        ),
        interpret=interpret,
        name="confidence",
    )(hidden_NE.astype(head_VE.dtype), head_VE)
    return Partial(*found)
