"""What a token of each request is worth, and how long a step may take."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Fairness = Literal["equal", "proportional"]

# Weight of a step in a request's running rate: it remembers about thirty.
_RATE = 1 / 32
# Tokens per step of a request that is new; every step yields one at least.
_NEW_RATE = 1.0
# A smaller share of the largest weight would be no number above 0 in float32.
_LEAST = 1e-30


@dataclass
class Progress:
    """Tokens per step that a request has got of late."""

    rate: float = _NEW_RATE

    def add(self, tokens: int) -> None:
        """Takes in one finished step."""
        self.rate += _RATE * (tokens - self.rate)


def weights(
    fairness: Fairness, priority_B: Sequence[float], rate_B: Sequence[float]
) -> np.ndarray:
    """Weights for `plan`, float32, the largest 1.

    "equal": a request's priority alone. "proportional": priority over rate, which
    steers towards the largest sum of priority times log rate: to speed one request up
    by a tenth is then worth as much as any other, however easy its text is (Kelly,
    Maulloo and Tan, 1998).

    Args:
      priority_B: above 0.
      rate_B: tokens per step of earlier steps, above 0.

    Raises:
      ValueError: one of them is not above 0, or `fairness` is unknown.
    """
    priority, rate = np.asarray(priority_B, float), np.asarray(rate_B, float)
    if not ((priority > 0).all() and (rate > 0).all()):
        raise ValueError(
            f"expected priorities and rates above 0, found {priority} and {rate}"
        )
    if fairness == "equal":
        weight_B = priority
    elif fairness == "proportional":
        weight_B = priority / rate
    else:
        raise ValueError(
            f"fairness {fairness!r} is unknown; choose equal or proportional"
        )
    share_B = weight_B / weight_B.max(initial=0.0)
    return np.maximum(share_B, _LEAST).astype(np.float32)


def jain_index(rate_B: Sequence[float]) -> float:
    """Jain's index of equality: 1 where all rates are the same, 1/B at worst.

    Source: Jain, Chiu and Hawe, DEC-TR-301 (1984).
    """
    rate = np.asarray(rate_B, float)
    return float(rate.sum() ** 2 / (rate.size * np.square(rate).sum()))
