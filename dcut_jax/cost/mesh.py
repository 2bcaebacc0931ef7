"""Meshes of devices, and the strategies by which models are laid out on them.

Under every strategy requests are split over `data` and `expert`: each device of those
axes serves its own, and a step lasts as long as the fullest shard's. `model` splits
heads, feed-forward parts and vocabulary; `expert` splits the routed experts, to which
rows travel. What an axis does not split is there on each of its devices.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dcut_jax.cost.shapes import DrafterShape, ModelShape
from dcut_jax.cost.table import CostError

AXES = ("data", "model", "expert")
# The axes that a strategy uses.
STRATEGIES = {
    "single": (),
    "dp": ("data",),
    "tp": ("model",),
    "ep": ("expert",),
    "dp+tp": ("data", "model"),
    "tp+ep": ("model", "expert"),
    "dp+ep": ("data", "expert"),
}


@dataclass(frozen=True)
class Placement:
    """A mesh, and how models are laid out on it.

    Attributes:
      data, model, expert: devices along each axis.
    """

    strategy: str = "single"
    data: int = 1
    model: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise CostError(
                f"strategy {self.strategy!r} is unknown; choose one of "
                f"{', '.join(STRATEGIES)}"
            )
        used = STRATEGIES[self.strategy]
        wrong = {
            axis: size
            for axis in AXES
            if (size := getattr(self, axis)) < 1 or (size > 1 and axis not in used)
        }
        if wrong:
            raise CostError(
                f"strategy {self.strategy} uses the axes {', '.join(used) or 'none'}; "
                f"found {wrong}: expected 1 along any other, and at least 1"
            )

    @property
    def devices(self) -> int:
        return self.data * self.model * self.expert

    @property
    def shards(self) -> int:
        """Parts that requests are split into."""
        return self.data * self.expert

    @property
    def mesh(self) -> tuple[tuple[str, int], ...]:
        """Names and sizes of the axes in use, as a fingerprint has them."""
        return tuple((axis, getattr(self, axis)) for axis in STRATEGIES[self.strategy])

    def __str__(self) -> str:
        return ",".join(f"{axis}={size}" for axis, size in self.mesh) or "one device"


def placement(mesh: Sequence[tuple[str, int]], strategy: str) -> Placement:
    """The placement that a fingerprint's mesh and strategy name.

    Raises:
      CostError: an unknown axis or strategy, or one that does not use that axis.
    """
    unknown = [axis for axis, _ in mesh if axis not in AXES]
    if unknown:
        raise CostError(
            f"mesh axes {unknown} are unknown; expected some of {', '.join(AXES)}"
        )
    return Placement(strategy, **dict(mesh))


def placements(devices: int, strategy: str) -> Iterator[Placement]:
    """All meshes of so many devices on which a strategy uses each of its axes."""
    axes = STRATEGIES[strategy]
    divisors = [n for n in range(2, devices + 1) if devices % n == 0]
    for sizes in itertools.product(divisors, repeat=len(axes)):
        found = Placement(strategy, **dict(zip(axes, sizes, strict=True)))
        if found.devices == devices:
            yield found


def check_divides(
    place: Placement, target: ModelShape, drafter: DrafterShape | None
) -> None:
    """Raises CostError, with the sizes that would do, where an axis cannot split."""
    if place.strategy.endswith("ep") and not target.experts:
        raise CostError(
            f"strategy {place.strategy} splits experts, and {target.name} has none; "
            f"choose dp, tp or dp+tp"
        )
    split = {"model": [("key/value heads", target.kv_heads), ("mlp", target.mlp)]}
    if target.experts:
        split["model"].append(("mlp of an expert", target.expert_mlp))
        split["expert"] = [("experts", target.experts)]
    if drafter:
        split["model"] += [
            ("key/value heads of the drafter", drafter.kv_heads),
            ("mlp of the drafter", drafter.mlp),
        ]
    for axis, sizes in split.items():
        along = getattr(place, axis)
        for what, size in sizes:
            if size % along:
                possible = [n for n in range(1, size + 1) if size % n == 0]
                raise CostError(
                    f"{target.name} has {size} {what}, which {axis}={along} does not "
                    f"divide; choose one of {possible[:12]}"
                )
