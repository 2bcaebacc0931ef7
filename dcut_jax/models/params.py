"""Parameters declared once, by shape and logical axes, and what reads that.

The same declaration serves random initialisation, loading and saving.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dcut_jax.axes import LogicalAxis


@dataclass(frozen=True)
class ParamSpec:
    """One parameter; unregistered, so `jax.tree.map` sees a leaf.

    `fan_in` scales the random initialisation by `1 / sqrt(fan_in)`; None means a norm
    weight, which starts at one.
    """

    shape: tuple[int, ...]
    axes: tuple[LogicalAxis, ...]
    fan_in: int | None

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.axes), (self.shape, self.axes)


def init(specs: Any, key: jax.Array, dtype: jnp.dtype) -> Any:
    """Draws parameters for `specs`, one random key per leaf."""
    leaves, treedef = jax.tree.flatten(specs)
    keys = jax.random.split(key, len(leaves))

    def draw(spec: ParamSpec, k: jax.Array) -> jax.Array:
        if spec.fan_in is None:
            return jnp.ones(spec.shape, dtype)
        scale = 1 / math.sqrt(spec.fan_in)
        return (jax.random.normal(k, spec.shape) * scale).astype(dtype)

    drawn = [draw(s, k) for s, k in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(treedef, drawn)


def cast(params: Any, dtype: jnp.dtype) -> Any:
    """The same tree in another dtype."""
    return jax.tree.map(lambda p: jnp.asarray(p, dtype), params)


def flatten_names(
    tree: Mapping[str, Any] | Sequence[Any], prefix: str = ""
) -> dict[str, Any]:
    """Dotted names of a tree of dicts and tuples: `layers.3.q_EHD`."""
    out: dict[str, Any] = {}
    items: Iterable[tuple[Any, Any]] = (
        tree.items() if isinstance(tree, Mapping) else enumerate(tree)
    )
    for key, value in items:
        name = f"{prefix}{key}"
        if isinstance(value, Mapping | tuple | list):
            out |= flatten_names(value, f"{name}.")
        else:
            out[name] = value
    return out
