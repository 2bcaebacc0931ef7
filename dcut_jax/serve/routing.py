"""Which of several replicas a request is sent to."""

import math
from collections.abc import Callable, Sequence
from typing import TypeGuard


def weights(rates: Sequence[float | None]) -> list[float]:
    """What each replica weighs, by its predicted throughput.

    One that has said nothing yet counts as the mean of those that have.

    Args:
      rates: tokens per second of each replica; None or not finite where unknown.
    """
    known = [r for r in rates if _is_known(r)]
    usual = sum(known) / len(known) if known else 1.0
    return [r if _is_known(r) else usual for r in rates]


def _is_known(rate: float | None) -> TypeGuard[float]:
    return rate is not None and math.isfinite(rate) and rate > 0


def weighted_order(weight: Sequence[float], uniform: Callable[[], float]) -> list[int]:
    """Indices in a random order, heavy ones early.

    The first is each index with a chance proportional to its weight, the second so
    among the rest, and so on. Source: Efraimidis and Spirakis 2006, sorting by
    `log(u) / weight`.

    Args:
      uniform: draws from [0, 1).
    """
    key = [math.log(1.0 - uniform()) / w for w in weight]
    return sorted(range(len(key)), key=lambda i: key[i], reverse=True)
