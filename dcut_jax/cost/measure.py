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
      enough_ms: a step is not timed for much longer than this, but twice: what is long
        varies less. Its turns are then spread over all rounds.
      agree: from a time to the one that counts; of several processes, all must go on
        with the same.
    """
    for step in steps.values():
        jax.block_until_ready(step())
    samples: dict[Key, list[float]] = {key: [] for key in steps}
    total = rounds * len(steps)
    for done in range(rounds):
        for i, (key, step) in enumerate(steps.items()):
            if done == 0 or _has_turn(done, rounds, enough_ms / min(samples[key])):
                start = time.perf_counter()
                jax.block_until_ready(step())
                samples[key].append(agree((time.perf_counter() - start) * 1e3))
            if on_progress:
                on_progress(done * len(steps) + i + 1, total)
    return {key: tuple(values) for key, values in samples.items()}


def _has_turn(done: int, rounds: int, turns: float) -> bool:
    """Whether round `done` is one of `turns`, evenly spread from the first to the last.

    Two at least.
    """
    if turns >= rounds:
        return True
    gaps = max(int(turns), 2) - 1
    return done * gaps // (rounds - 1) > (done - 1) * gaps // (rounds - 1)
