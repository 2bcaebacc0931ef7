"""Inputs that every backend must agree on, and that benches time."""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np


@dataclass(frozen=True)
class Case:
    """One call of `head_confidence`."""

    name: str
    hidden_NE: np.ndarray
    head_VE: np.ndarray


def random(name: str, rows: int, embed: int, vocab: int, dtype: Any) -> Case:
    """Logits of a spread of about 3."""
    rng = np.random.default_rng(0)
    hidden_NE = rng.standard_normal((rows, embed)).astype(np.float32)
    head_VE = rng.standard_normal((vocab, embed)) * 3 / np.sqrt(embed)
    return Case(name, hidden_NE, head_VE.astype(np.dtype(dtype)))


def with_logits(name: str, logits_NV: list[list[float]]) -> Case:
    """Hidden states that pick rows of a head: products are exact."""
    head_VE = np.array(logits_NV, np.float32).T
    return Case(name, np.eye(head_VE.shape[1], dtype=np.float32), head_VE)


# Vocabularies are no multiples of chunks or blocks, so that the last one is ragged.
CASES = (
    random("float32", 20, 64, 2600, np.float32),
    random("bfloat16", 20, 64, 2600, ml_dtypes.bfloat16),
    random("one_row_few_words", 1, 16, 5, np.float32),
    with_logits("ties", [[0.0, 2.0, 2.0, 2.0] * 650, [1.0, 1.0, 1.0, 1.0] * 650]),
    with_logits("certain", [[3e38] + [0.0] * 2599, [0.0] * 2599 + [90.0]]),
    with_logits("low", [[-3e38] * 2600, [-1e4] * 2599 + [-1e4 + 1]]),
)
