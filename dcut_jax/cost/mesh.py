"""Sizes of meshes, and what they split of a model, without a device.

`dcut_jax.mesh.Placement` is a mesh of real devices; this is one on paper. Under every
strategy requests are split over `data` and `expert`: each device of those axes serves
its own, and a step lasts as long as the fullest shard's. `model` splits heads,
feed-forward parts and vocabulary; `expert` splits the routed experts, to which rows
travel. What an axis does not split is there on each of its devices.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

from dcut_jax.axes import EXPERT, MESH_AXES, MODEL, Strategy, mesh_axes
from dcut_jax.config import ConfigError
from dcut_jax.cost.shapes import DrafterShape, ModelShape
from dcut_jax.mesh import require_divisible

SINGLE = "single"  # of a run on one device
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)


@dataclass(frozen=True)
class MeshShape:
    """Devices along each axis, and the strategy by which models are laid out on them.

    Raises:
      ConfigError: an unknown strategy, or an axis that it does not use.
    """

    strategy: str = SINGLE
    data: int = 1
    expert: int = 1
    model: int = 1

    def __post_init__(self) -> None:
        if self.strategy not in (SINGLE, *STRATEGIES):
            raise ConfigError(
                f"strategy {self.strategy!r} is unknown; choose one of "
                f"{', '.join(STRATEGIES)}"
            )
        used = used_axes(self.strategy)
        wrong = {
            axis: size
            for axis in MESH_AXES
            if (size := getattr(self, axis)) < 1 or (size > 1 and axis not in used)
        }
        if wrong:
            raise ConfigError(
                f"strategy {self.strategy} uses the axes {', '.join(used) or '(none)'};"
                f" found {wrong}: expected 1 along any other, and at least 1"
            )

    @property
    def devices(self) -> int:
        return self.data * self.expert * self.model

    @property
    def shards(self) -> int:
        """Parts that requests are split into."""
        return self.data * self.expert

    @property
    def described(self) -> tuple[tuple[str, int], ...]:
        """Names and sizes of the axes in use, as a fingerprint has them."""
        return tuple((axis, getattr(self, axis)) for axis in used_axes(self.strategy))

    def __str__(self) -> str:
        return ",".join(f"{axis}={n}" for axis, n in self.described) or "one device"


def used_axes(strategy: str) -> tuple[str, ...]:
    """The axes of a strategy's mesh; none on one device."""
    return mesh_axes(strategy) if strategy in STRATEGIES else ()


def mesh_shape(described: Sequence[tuple[str, int]], strategy: str) -> MeshShape:
    """The mesh that a fingerprint names.

    Raises:
      ConfigError: an unknown axis or strategy, or one that does not use that axis.
    """
    unknown = [axis for axis, _ in described if axis not in MESH_AXES]
    if unknown:
        raise ConfigError(
            f"mesh axes {unknown} are unknown; expected some of {', '.join(MESH_AXES)}"
        )
    return MeshShape(strategy, **dict(described))


def mesh_shapes(devices: int, strategy: Strategy) -> Iterator[MeshShape]:
    """All meshes of so many devices on which a strategy uses each of its axes."""
    axes = mesh_axes(strategy)
    divisors = [n for n in range(2, devices + 1) if devices % n == 0]
    for sizes in itertools.product(divisors, repeat=len(axes)):
        found = MeshShape(strategy, **dict(zip(axes, sizes, strict=True)))
        if found.devices == devices:
            yield found


def check_divides(
    mesh: MeshShape, target: ModelShape, drafter: DrafterShape | None
) -> None:
    """Raises ConfigError, with the sizes that would do, where an axis cannot split."""
    if EXPERT in used_axes(mesh.strategy) and not target.experts:
        raise ConfigError(
            f"strategy {mesh.strategy} splits experts, and {target.name} has none; "
            f"choose dp, tp or dp+tp"
        )
    sizes = {"key/value heads": target.kv_heads, "vocabulary": target.vocab}
    if target.moe_layers < target.layers:
        sizes["feed-forward"] = target.mlp
    if target.experts:
        sizes["feed-forward of an expert"] = target.expert_mlp
        require_divisible(
            f"mesh axis {EXPERT}", mesh.expert, {"experts": target.experts}
        )
    if drafter:
        sizes["the drafter's key/value heads"] = drafter.kv_heads
        sizes["its feed-forward"] = drafter.mlp
    require_divisible(f"mesh axis {MODEL}", mesh.model, sizes)
