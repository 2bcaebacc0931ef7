"""Inputs that every backend must agree on, and that benches time."""

from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np

PAGE = 128  # positions, as the caches have them
LAYERS, LAYER = 2, 1

Sees = Literal["before", "block"]  # of fresh rows: those up to itself, or all


@dataclass(frozen=True)
class Case:
    """One call of `verify_attention`; arrays are in the order of its arguments.

    Whatever no row may use is NaN: pages of nobody, and places past a length.
    """

    name: str
    q_BJHD: np.ndarray
    k_BSGD: np.ndarray
    v_BSGD: np.ndarray
    mask_BJS: np.ndarray
    k_YPGDC: np.ndarray
    v_YPGCD: np.ndarray
    page_BN: np.ndarray
    length_B: np.ndarray
    window: int | None = None

    @property
    def position_BJ(self) -> np.ndarray:
        """Rows stand behind what is cached, one after another."""
        rows = self.q_BJHD.shape[1]
        return (self.length_B[:, None] + np.arange(rows)[None]).astype(np.int32)


def case(
    name: str,
    lengths: list[int],
    *,
    rows: int = 3,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 8,
    dtype: Any = np.float32,
    fresh_dtype: Any = None,
    sees: Sees = "before",
    window: int | None = None,
    page: int = 8,
    pages: int = 20,
    columns: int = 6,
    seed: int = 0,
) -> Case:
    """Requests of `lengths` cached positions and `rows` fresh rows each.

    Args:
      heads: of queries, and of keys and values.
      pages, columns: of the cache and of the page table; numbers in places that no
        request uses lead nowhere.
    """
    rng = np.random.default_rng(seed)
    B, (H, G), D = len(lengths), heads, head_dim
    used = [-(-length // page) for length in lengths]

    def values(*shape: int, of: Any = dtype) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.dtype(of))

    k_YPGDC = np.full((LAYERS, pages, G, D, page), np.nan, np.dtype(dtype))
    v_YPGCD = np.full((LAYERS, pages, G, page, D), np.nan, np.dtype(dtype))
    page_BN = rng.choice([-1, 0, 2**30], (B, columns)).astype(np.int32)
    free = iter(rng.permutation(pages))
    for b, length in enumerate(lengths):
        for n in range(used[b]):
            at = page_BN[b, n] = next(free)
            own = min(length - n * page, page)
            k_YPGDC[:, at, :, :, :own] = values(LAYERS, G, D, own)
            v_YPGCD[:, at, :, :own] = values(LAYERS, G, own, D)
    mask_JS = np.ones((rows, rows), bool)
    if sees == "before":
        mask_JS = np.tril(mask_JS)
    if window is not None:
        apart = np.arange(rows)[:, None] - np.arange(rows)[None]
        mask_JS &= np.abs(apart) < window
    return Case(
        name=name,
        q_BJHD=values(B, rows, H, D, of=np.float32),
        k_BSGD=values(B, rows, G, D, of=fresh_dtype or dtype),
        v_BSGD=values(B, rows, G, D, of=fresh_dtype or dtype),
        mask_BJS=np.broadcast_to(mask_JS[None], (B, rows, rows)),
        k_YPGDC=k_YPGDC,
        v_YPGCD=v_YPGCD,
        page_BN=page_BN,
        length_B=np.asarray(lengths, np.int32),
        window=window,
    )


def shared_prefix() -> Case:
    """Three requests that begin with the same page."""
    one = case("shared_prefix", [30, 29, 8, 0])
    one.page_BN[1, 0] = one.page_BN[2, 0] = one.page_BN[0, 0]
    return one


BFLOAT16 = ml_dtypes.bfloat16

# Most share a shape, as every shape is a compilation.
CASES = (
    case("verify", [30, 1, 8, 9]),
    case("nothing_cached", [0, 0, 0, 0]),
    case("block", [47, 0, 48, 5], sees="block"),
    shared_prefix(),
    case("block_and_window", [40, 30, 2, 48], sees="block", window=11),
    case(
        "fresh_unrounded",
        [30, 7],
        head_dim=128,
        dtype=BFLOAT16,
        fresh_dtype=np.float32,
    ),
)
REAL: dict[str, Any] = {"page": PAGE, "pages": 10, "columns": 4}
MORE_CASES = (
    case("real_pages", [300, 1, 128], rows=4, **REAL),
    case("anchors", [257, 17], rows=1, **REAL),
    case("prompt_chunk", [130], rows=32, **REAL),
    case("window_of_one_page", [271, 272, 273], rows=2, window=128, **REAL),
    case("every_head_its_own", [20, 3], heads=(3, 3)),
    case("nine_heads_of_64", [15, 9], heads=(9, 3), head_dim=64),
    case("head_dim_256", [12], heads=(2, 1), head_dim=256),
    case("bfloat16", [300, 77], rows=4, head_dim=128, dtype=BFLOAT16, **REAL),
)
