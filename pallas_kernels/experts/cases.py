"""Inputs that every backend must agree on, and that benches time."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Int32

# Most cases share one shape, as every shape is a compilation.
ROWS, EXPERTS, EMBED, MLP = 24, 5, 16, 12


@dataclass(frozen=True)
class Case:
    """One call of `grouped_swiglu`."""

    name: str
    x_NE: Float32[np.ndarray, "N E"]
    size_Q: Int32[np.ndarray, "Q"]
    gate_QEF: Float32[np.ndarray, "Q E F"]
    up_QEF: Float32[np.ndarray, "Q E F"]
    down_QFE: Float32[np.ndarray, "Q F E"]


def case(
    name: str, sizes: list[int], rows: int = ROWS, embed: int = EMBED, mlp: int = MLP
) -> Case:
    """Random rows and weights; `sizes` are rows of each expert."""
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    experts = len(sizes)
    return Case(
        name,
        draw(rows, embed),
        np.asarray(sizes, np.int32),
        draw(experts, embed, mlp),
        draw(experts, embed, mlp),
        draw(experts, mlp, embed),
    )


CASES = (
    case("even", [5, 5, 5, 5, 4]),
    case("one_expert_has_all", [0, 0, ROWS, 0, 0]),
    case("first_and_last", [9, 0, 0, 0, 15]),
    case("full_blocks", [8, 0, 16, 0, 0]),
    case("just_over_a_block", [9, 1, 9, 0, 5]),
    case("rows_of_nobody", [3, 0, 1, 0, 2]),
    case("nobody_has_any", [0, 0, 0, 0, 0]),
    case("one_row", [0, 1, 0], rows=1),
    case("more_experts_than_rows", [0, 1, 0, 0, 1, 0, 0, 1, 0, 0, 0], rows=4),
    case("many_rows", [40, 0, 25, 63], rows=128, embed=32, mlp=8),
)
