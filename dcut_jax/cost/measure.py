"""Timing of prepared steps: warm-up, interleaved rounds, raw samples."""

import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import jax

Key = TypeVar("Key")


def measure(
    steps: Mapping[Key, Callable[[], object]],
    *,
    rounds: int,
    enough_ms: float = float("inf"),
    agree: Callable[[float], float] = float,
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[Key, tuple[float, ...]]:
    """Times each step `rounds` times, in ms, after one run that does not count.

    The steps take turns, so that a slow spell of the machine falls on all of them.
    Each callable returns what must be ready for the step to be over.

    Args:
      enough_ms: a step that was timed for as long as this, twice at least, is left out
        of further rounds: what is long varies less.
      agree: from a time to the one that counts; of several processes, all must go on
        with the same.
    """
    for step in steps.values():
        jax.block_until_ready(step())
    samples: dict[Key, list[float]] = {key: [] for key in steps}
    total = rounds * len(steps)
    for done in range(rounds):
        for i, (key, step) in enumerate(steps.items()):
            if len(samples[key]) < 2 or sum(samples[key]) < enough_ms:
                start = time.perf_counter()
                jax.block_until_ready(step())
                samples[key].append(agree((time.perf_counter() - start) * 1e3))
            if on_progress:
                on_progress(done * len(steps) + i + 1, total)
    return {key: tuple(values) for key, values in samples.items()}
