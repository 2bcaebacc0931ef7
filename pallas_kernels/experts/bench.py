"""Times backends against the number of experts that are really active.

    python -m pallas_kernels.experts.bench

Rows stay the same while more and more experts share them. Backends and numbers of
experts take turns, so that a slow spell of the machine falls on all of them; several
layers, each with weights of its own, keep weights from staying in a cache.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.backends import FORMS, Backend
from pallas_kernels.experts.api import grouped_swiglu


@dataclass(frozen=True)
class Shape:
    """Of the timed calls; `pairs` are sorted rows, one per row and expert of it."""

    pairs: int = 64
    experts: int = 64
    embed: int = 576
    mlp: int = 192
    layers: int = 4
    rounds: int = 15
    dtype: str = "float32"


@dataclass(frozen=True)
class Record:
    """Time of one layer, ms: median of the rounds, and the fastest."""

    backend: str
    distinct: int
    median_ms: float
    least_ms: float


def sizes(shape: Shape, distinct: int) -> np.ndarray:
    """Rows of each expert: `distinct` of them share the pairs evenly."""
    size_Q = np.zeros(shape.experts, np.int32)
    chosen = np.linspace(0, shape.experts - 1, distinct).astype(int)
    size_Q[chosen] = shape.pairs // distinct
    size_Q[chosen[: shape.pairs % distinct]] += 1
    return size_Q


def make_layers(shape: Shape) -> list[tuple[jax.Array, ...]]:
    """Random weights of every layer."""
    Q, E, F = shape.experts, shape.embed, shape.mlp

    def draw(key: jax.Array) -> tuple[jax.Array, ...]:
        g, u, d = jax.random.split(key, 3)
        wide = jax.random.normal(g, (Q, E, F)), jax.random.normal(u, (Q, E, F))
        drawn = *wide, jax.random.normal(d, (Q, F, E))
        return tuple((w / 30).astype(shape.dtype) for w in drawn)

    return [draw(k) for k in jax.random.split(jax.random.key(0), shape.layers)]


def build(backend: Backend, args: Any) -> Callable[..., jax.Array]:
    """All layers one after another, compiled."""

    def run(x_NE: jax.Array, size_Q: jax.Array, layers: Any) -> jax.Array:
        for layer in layers:
            x_NE = x_NE + grouped_swiglu(x_NE, size_Q, *layer, backend=backend)
        return x_NE

    return jax.jit(run).lower(*args).compile()


def measure(shape: Shape, backends: Sequence[Backend]) -> list[Record]:
    """Every backend at every number of experts, in turns."""
    layers = make_layers(shape)
    x_NE = jax.random.normal(jax.random.key(1), (shape.pairs, shape.embed))
    most = min(shape.pairs, shape.experts)
    counts = sorted({1, *(2**i for i in range(20) if 2**i < most), most})
    by_count = {n: jnp.asarray(sizes(shape, n)) for n in counts}
    runs = {b: build(b, (x_NE, by_count[1], layers)) for b in backends}
    cells = [(b, n) for n in counts for b in backends]
    times: dict[Any, list[float]] = {cell: [] for cell in cells}
    rng = np.random.default_rng(0)
    for timed in (False, *[True] * shape.rounds):
        for i in rng.permutation(len(cells)):
            backend, distinct = cells[i]
            start = time.perf_counter()
            jax.block_until_ready(runs[backend](x_NE, by_count[distinct], layers))
            if timed:
                times[cells[i]].append(time.perf_counter() - start)
    return [
        Record(
            backend,
            distinct,
            1e3 * float(np.median(found)) / shape.layers,
            1e3 * min(found) / shape.layers,
        )
        for (backend, distinct), found in times.items()
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table, and the records as JSON in the last line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in asdict(Shape()).items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    parser.add_argument(
        "--backends",
        nargs="+",
        choices=FORMS["experts"],
        default=["blocks", "reference", "ragged_dot"],
    )
    options = vars(parser.parse_args(argv))
    backends = options.pop("backends")
    shape = Shape(**options)
    records = measure(shape, backends)
    print(f"{shape}, ms a layer: median (least)")
    for distinct in sorted({r.distinct for r in records}):
        found = {r.backend: r for r in records if r.distinct == distinct}
        cells = [
            f"{b} {found[b].median_ms:8.3f} ({found[b].least_ms:.3f})" for b in backends
        ]
        print(f"{distinct:4d} experts  " + "  ".join(cells))
    print(json.dumps([asdict(r) for r in records]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
