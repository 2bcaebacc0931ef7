"""What a step verifies: nothing but anchors, everything, or what is worth its cost."""

from dataclasses import dataclass, field
from typing import Any, Protocol

import jax.numpy as jnp

from dcut_jax.cost.table import CostTable
from dcut_jax.cut import Objective
from dcut_jax.decode.pack import Layout, layout, tier_rows
from dcut_jax.decode.steps import PlanKey, StepShapes, anchors_only, everything
from pallas_kernels import Backend

# Rows per request of the default tiers: about geometric, and holding the full widths of
# 3, 7 and 15 drafts and the quarters of a block of 16.
TIER_FACTORS = (1, 1.5, 2, 3, 4, 6, 8, 12, 16)
PAPER_RATIOS = (0.25, 0.5, 0.75, 1.0)


class Policy(Protocol):
    """What the engine asks a policy at every step."""

    widths: tuple[int, ...]

    def layouts(self, shapes: StepShapes) -> list[Layout]: ...
    def reset(self) -> None: ...
    def observe(self, record: Any, outcome: Any) -> None: ...


@dataclass
class ArPolicy:
    """Plain autoregressive decoding: the drafter never runs."""

    widths: tuple[int, ...] = ()

    def layouts(self, shapes: StepShapes) -> list[Layout]:
        return [anchors_only(shapes)]

    def reset(self) -> None: ...

    def observe(self, record: Any, outcome: Any) -> None: ...


@dataclass
class FixedPolicy:
    """Always `width` drafts, all of them verified."""

    width: int

    @property
    def widths(self) -> tuple[int, ...]:
        return (self.width,)

    def next_width(self) -> int:
        return self.width

    def layouts(self, shapes: StepShapes) -> list[Layout]:
        return [everything(shapes, self.width)]

    def reset(self) -> None: ...

    def observe(self, record: Any, outcome: Any) -> None: ...


class DCutPolicy: ...
