"""What this machine's own processor can do: measured, for no data sheet tells it."""

import os
import time
from collections.abc import Callable, Collection

import jax
import jax.numpy as jnp
import numpy as np

from dcut_jax.cost.devices import Device

PEAK_SIZE = 3072
HOST_SIZE = 1024  # of products at the start of a program, which should not take long
COPY_BYTES = 1 << 28  # beyond any cache


def measure_host(dtypes: Collection[str], seconds: float = 0.3) -> Device:
    """Rates of the CPU that JAX runs on, the best of about `seconds` each.

    Its devices share one memory and have no link: a mesh of them is not modelled.

    Args:
      dtypes: of the products to measure; a rate that is not measured is unknown.
    """

    def products(*some: str) -> float | None:
        asked = next((dtype for dtype in some if dtype in dtypes), None)
        return measure_peak(asked, seconds, HOST_SIZE) if asked else None

    return Device(
        name="cpu",
        bf16_per_s=products("bfloat16", "float16"),  # it stands for both
        fp32_per_s=products("float32"),
        memory_per_s=measure_copy(seconds),
        memory_bytes=float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        link_per_s=0.0,
        source="measured on this machine",
    )


def measure_peak(dtype: str, seconds: float = 1.0, size: int = PEAK_SIZE) -> float:
    """Operations a second of a large product, the best of several; one device."""
    x = jnp.ones((size, size), dtype)
    run = jax.jit(
        lambda x: jax.lax.dot(x, x, preferred_element_type=jnp.float32),
    )
    jax.block_until_ready(run(x))
    best = _best(lambda: jax.block_until_ready(run(x)), seconds)
    return 2 * size**3 / best


def measure_copy(seconds: float = 1.0) -> float:
    """Bytes a second that a large copy reads and writes, the best of several."""
    source = np.ones(COPY_BYTES, np.uint8)
    target = np.empty_like(source)
    np.copyto(target, source)
    return 2 * COPY_BYTES / _best(lambda: np.copyto(target, source), seconds)


def _best(run: Callable[[], object], seconds: float) -> float:
    """Shortest time of several runs, three at least."""
    times: list[float] = []
    while sum(times) < seconds or len(times) < 3:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)
