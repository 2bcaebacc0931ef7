"""How much of a machine's arithmetic a training step uses.

Counted are the products that a step cannot do without, two operations for a multiply
and an add; what is computed twice to save memory counts once. The peak is a large
product in the run's dtype, measured here and now.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dcut_jax.config import DrafterConfig, ModelConfig
from dcut_jax.models import dense
from dcut_jax.models.drafter import block_rows
from dcut_jax.train.config import TrainConfig

PEAK_SIZE = 3072


@dataclass(frozen=True)
class StepWork:
    """Operations of one step, by what they are for."""

    target: float  # forward pass, where features are computed online
    context: float  # projecting features and making keys and values of them
    blocks: float  # layers of the drafter over the blocks' rows
    attention: float
    heads: float

    @property
    def total(self) -> float:
        return self.target + self.context + self.blocks + self.attention + self.heads


def step_work(
    cfg: TrainConfig,
    target: ModelConfig,
    drafter: DrafterConfig,
    width: int,
    length: int,
) -> StepWork:
    """Operations of a step of blocks of `width` drafts on documents of `length`.

    A trained product costs three times its forward pass; a frozen head gives its
    operand a gradient and costs twice; what only compares costs once.
    """
    documents = cfg.docs * cfg.accumulate
    blocks, E = documents * cfg.anchors, drafter.embed
    rows, drafts = blocks * block_rows(drafter, width), blocks * width
    kv = 2 * E * drafter.kv_heads * drafter.head_dim
    layer = 2 * E * drafter.heads * drafter.head_dim + kv + 3 * E * drafter.mlp
    context = len(drafter.target_layers) * E * E + drafter.layers * kv
    # A block sees half of a document on the average.
    seen = length / 2 + width
    heads_width = drafter.heads * drafter.head_dim
    words = cfg.shortlist or drafter.vocab
    compared = E * words if cfg.objective.compares else 0
    online = 0
    if cfg.features == "online":
        target_heads = target.heads * target.head_dim
        online = _weights_of_layers(target) + target.layers * target_heads * length
    return StepWork(
        target=2 * documents * length * online,
        context=3 * 2 * documents * length * context,
        blocks=3 * 2 * rows * drafter.layers * layer,
        attention=3 * 2 * rows * drafter.layers * 2 * heads_width * seen,
        heads=2 * drafts * (2 * E * words + 3 * drafter.markov_rank * words + compared),
    )


def _weights_of_layers(target: ModelConfig) -> int:
    """Parameters of the target's layers that are matrices."""
    specs = jax.tree.leaves(dense.specs(target)["layers"])
    return sum(int(np.prod(s.shape)) for s in specs if len(s.shape) > 1)


def measure_peak(dtype: str, seconds: float = 1.0) -> float:
    """Operations a second of a large product, the best of several; all devices."""
    x = jnp.ones((PEAK_SIZE, PEAK_SIZE), dtype)
    run = jax.jit(
        lambda x: jax.lax.dot(x, x, preferred_element_type=jnp.float32),
        donate_argnums=(),
    )
    ms = median_ms(lambda: run(x), seconds, best=True)
    return 2 * PEAK_SIZE**3 / ms * 1e3 * jax.device_count()


def median_ms(call: Callable[[], Any], seconds: float, *, best: bool = False) -> float:
    """Median time of a call over about so many seconds, ms; or the shortest."""
    jax.block_until_ready(call())
    times: list[float] = []
    while sum(times) < 1e3 * seconds or len(times) < 3:
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(1e3 * (time.perf_counter() - start))
    return min(times) if best else float(np.median(times))
