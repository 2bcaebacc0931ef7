"""How much of a machine's arithmetic a training step uses.

Counted are the products that a step cannot do without, two operations for a multiply
and an add; what is computed twice to save memory counts once. The peak is a large
product in the run's dtype, measured here and now.
"""

import time
from dataclasses import asdict, dataclass, fields

import jax
import numpy as np

from dcut_jax.config import DrafterConfig, ModelConfig
from dcut_jax.cost.host import measure_peak
from dcut_jax.models import dense
from dcut_jax.models.drafter import block_rows
from dcut_jax.models.params import ParamSpec
from dcut_jax.train.config import TrainConfig
from dcut_jax.train.loop import Trainer


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
    """Parameters of the target's layers that are matrices and that a row uses."""

    def used(spec: ParamSpec) -> int:
        size = int(np.prod(spec.shape)) if len(spec.shape) > 1 else 0
        x = target.experts
        if x is not None and spec.axes[:1] == ("experts",):
            size = size * x.active // x.count
        return size

    return sum(used(s) for s in jax.tree.leaves(dense.specs(target)["layers"]))


@dataclass(frozen=True)
class Roofline:
    """A run's steps against the machine.

    Attributes:
      steps: that were timed.
      ms: median time of a step.
      work: mean operations of a step.
      per_s: operations of these steps over their time.
      peak_per_s: of a large product in the run's dtype.
    """

    steps: int
    ms: float
    work: StepWork
    per_s: float
    peak_per_s: float

    @property
    def share(self) -> float:
        """Of the peak."""
        return self.per_s / self.peak_per_s

    def __str__(self) -> str:
        parts = asdict(self.work)
        shares = ", ".join(
            f"{name} {part / self.work.total:.0%}" for name, part in parts.items()
        )
        return (
            f"{self.steps} steps, {self.ms:.0f} ms each (median): "
            f"{self.work.total / 1e9:.1f} GFLOP a step ({shares}), "
            f"{self.per_s / 1e9:.0f} GFLOP/s, {self.share:.0%} of the "
            f"{self.peak_per_s / 1e9:.0f} GFLOP/s of a large product"
        )


def measure(trainer: Trainer, target: ModelConfig, steps: int) -> Roofline:
    """Times steps of a run; nothing of it is saved.

    The first step of each width and length compiles, and is not among them.
    """
    cfg, seen = trainer.cfg, set()
    times: list[float] = []
    works: list[StepWork] = []
    devices = 1 if trainer.mesh is None else trainer.mesh.size
    peak = devices * measure_peak(cfg.compute_dtype)
    while len(times) < steps:
        _, length = trainer.order.of_step(int(trainer.state.step))
        start = time.perf_counter()
        width = int(trainer.step()["width"])
        spent = time.perf_counter() - start
        if (width, length) not in seen:
            seen.add((width, length))
            continue
        times.append(spent)
        works.append(step_work(cfg, target, trainer.drafter_cfg, width, length))
    names = [f.name for f in fields(StepWork)]
    mean = StepWork(*(np.mean([getattr(w, n) for w in works]) for n in names))
    per_s = sum(w.total for w in works) / sum(times)
    return Roofline(len(times), 1e3 * float(np.median(times)), mean, per_s, peak)
