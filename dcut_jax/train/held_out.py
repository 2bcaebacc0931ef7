"""How good a drafter is while it trains: drafts of held-out blocks, teacher-forced.

They are cheap and always the same, so they draw a curve. What counts is decoding; see
`evaluate`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from dcut_jax.config import DrafterConfig
from dcut_jax.train.blocks import Blocks
from dcut_jax.train.config import TrainConfig
from dcut_jax.train.loss import block_matches

compiled_matches = jax.jit(
    block_matches, static_argnames=("cfg", "width", "compute_dtype")
)


def held_out_matches(
    params: Any,
    drafter_cfg: DrafterConfig,
    embed_VE: Array,
    head_VE: Array,
    draw: Callable[[np.ndarray, int, int, np.random.Generator], Blocks],
    documents: np.ndarray,
    cfg: TrainConfig,
    width: int,
) -> dict[str, Any]:
    """Drafts of held-out blocks against their documents, whole vocabulary.

    Args:
      draw: blocks of documents: so many anchors of each, cut to so many tokens.
      documents: those held out; `cfg` says how many anchors of each, and how many at
        a time.
      width: drafts per block.

    Returns:
      `accepted`: mean accepted length, the anchor's token included, of the longest
      matching prefix; `slots`: per slot, how often it matches where all before it
      did; `blocks`: how many blocks that is over. They are the same for all of the
      run's widths: those whose document goes on for the widest.
    """
    widest = max((width, *cfg.widths))
    # The same blocks every time.
    rng = np.random.default_rng((cfg.seed, 2))
    reached = np.zeros(width, np.int64)
    matched = np.zeros(width, np.int64)
    count = 0
    for first in range(0, len(documents), cfg.docs):
        some = documents[first : first + cfg.docs]
        # One shape for all: the last batch repeats itself, and is cut below.
        full = np.resize(some, cfg.docs)
        blocks = draw(full, cfg.eval_anchors, cfg.length, rng)
        match, _ = compiled_matches(
            params,
            drafter_cfg,
            embed_VE,
            head_VE,
            blocks,
            width,
            jnp.dtype(cfg.compute_dtype),
        )
        reaches_NA = blocks.anchor_NA + widest < blocks.length_N[:, None]
        counted_NA = np.asarray(blocks.valid_NA & reaches_NA)
        counted_NA[len(some) :] = False
        prefix = np.cumprod(np.asarray(match)[counted_NA], axis=-1)
        count += len(prefix)
        matched += prefix.sum(axis=0)
        reached += np.concatenate([[len(prefix)], prefix.sum(axis=0)[:-1]])
    accepted = 1 + matched.sum() / max(count, 1)
    return {
        "accepted": float(accepted),
        "blocks": count,
        "slots": [round(float(s), 3) for s in matched / np.maximum(reached, 1)],
    }
