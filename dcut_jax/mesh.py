"""Meshes of devices, and where arrays lie on them.

A `Placement` is a mesh and a strategy: which of its axes cut what. `axes.py` holds the
rules; this module applies them to what is declared once, with logical axes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dcut_jax.axes import (
    EXPERT,
    MESH_AXES,
    MODEL,
    SLOTS,
    Rules,
    Strategy,
    mesh_axes,
    serving_rules,
)
from dcut_jax.config import ConfigError
from dcut_jax.models.params import ParamSpec

STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)


@dataclass(frozen=True)
class Placement:
    """A serving mesh of more than one device, and the strategy on it."""

    mesh: Mesh
    strategy: Strategy

    @property
    def rules(self) -> Rules:
        return serving_rules(self.strategy)

    @property
    def slot_axes(self) -> tuple[str, ...]:
        """Mesh axes that requests are dealt over; none under `tp`."""
        return self.rules.get(SLOTS, ())

    @property
    def model_axis(self) -> str | None:
        """The mesh axis that heads, feed-forward and words are cut over, if any."""
        return MODEL if "heads" in self.rules else None

    @property
    def expert_axis(self) -> str | None:
        """The mesh axis that experts are dealt over, if any."""
        return EXPERT if "experts" in self.rules else None

    @property
    def shards(self) -> int:
        """Parts that the slots of a batch are dealt into."""
        return math.prod(self.mesh.shape[axis] for axis in self.slot_axes)

    @property
    def described(self) -> tuple[tuple[str, int], ...]:
        """Axes and sizes, as a fingerprint has them."""
        return tuple((str(axis), n) for axis, n in self.mesh.shape.items())

    def spec(self, axes: Sequence[str | None]) -> PartitionSpec:
        """How an array with these logical axes is cut."""
        return partition(axes, self.rules)

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(self.mesh, spec)


def partition(axes: Sequence[str | None], rules: Rules) -> PartitionSpec:
    """How an array with these logical axes is cut; an axis without a rule is not.

    Raises:
      ConfigError: two of them would be cut over the same mesh axis.
    """
    cut = [rules.get(axis, ()) if axis else () for axis in axes]
    used = [over for entry in cut for over in entry]
    if len(set(used)) < len(used):
        raise ConfigError(f"rules {rules} cut {tuple(axes)} twice over one mesh axis")
    return PartitionSpec(*(e[0] if len(e) == 1 else e or None for e in cut))


def make_placement(
    sizes: Mapping[str, int], strategy: Strategy | None
) -> Placement | None:
    """A placement on this run's devices; None for a run on one.

    Args:
      sizes: of the mesh's axes.
      strategy: None: the one that uses the axes named.

    Raises:
      ConfigError: axes and strategy do not fit, or there are not so many devices.
    """
    named = tuple(axis for axis in MESH_AXES if axis in sizes)
    if strategy is None:
        strategy = _strategy_of(named)
    if mesh_axes(strategy) != named:
        raise ConfigError(
            f"strategy {strategy} needs a mesh with the axes "
            f"{', '.join(mesh_axes(strategy))}; found {', '.join(named) or 'none'}"
        )
    count = math.prod(sizes.values())
    devices = jax.devices()
    if count == 1 and jax.process_count() == 1:
        return None
    fits = count <= len(devices) if jax.process_count() == 1 else count == len(devices)
    if not fits:
        raise ConfigError(
            f"a mesh of {' x '.join(f'{a}={n}' for a, n in sizes.items())} is {count} "
            f"devices, and there are {len(devices)}"
            + (
                f" in {jax.process_count()} processes, all of which a mesh must use"
                if jax.process_count() > 1
                else "; name a smaller one"
            )
        )
    shape = [sizes[axis] for axis in named]
    return Placement(Mesh(np.asarray(devices[:count]).reshape(shape), named), strategy)


def _strategy_of(named: tuple[str, ...]) -> Strategy:
    found = [s for s in STRATEGIES if mesh_axes(s) == named]
    if not found:
        raise ConfigError(
            f"no strategy uses the mesh axes {', '.join(named) or '(none)'} together; "
            f"known: "
            + "; ".join(f"{s} ({', '.join(mesh_axes(s))})" for s in STRATEGIES)
        )
    return found[0]  # no two use the same axes


def require_divisible(axis: str, many: int, by_name: Mapping[str, int]) -> None:
    """Refuses a size of a mesh axis that does not divide what it cuts.

    Raises:
      ConfigError: naming what it does not divide, and the sizes that divide all.
    """
    wrong = [f"{name} {n}" for name, n in by_name.items() if n % many]
    if wrong:
        fit = math.gcd(*by_name.values())
        good = [d for d in range(1, fit + 1) if fit % d == 0]
        raise ConfigError(
            f"{axis} {many} does not divide {', '.join(wrong)}; sizes that divide all "
            f"it cuts: {', '.join(map(str, good))}"
        )


def place(tree: Any, shardings: Any) -> Any:
    """Puts arrays that every process holds whole onto the devices of a mesh.

    Args:
      shardings: one for all, or a tree of them.
    """
    if isinstance(shardings, NamedSharding):
        shardings = jax.tree.map(lambda _: shardings, tree)

    def put(x: Any, sharding: NamedSharding) -> jax.Array:
        x = np.asarray(x)
        return jax.make_array_from_callback(x.shape, sharding, lambda at: x[at])

    return jax.tree.map(put, tree, shardings)


def param_partitions(specs: Any, placement: Placement) -> Any:
    """A partition for every parameter that is declared."""

    def cut(spec: ParamSpec) -> PartitionSpec:
        return placement.spec(spec.axes)

    return jax.tree.map(cut, specs)
