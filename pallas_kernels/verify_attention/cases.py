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
    rows: int,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 16,
    dtype: Any = np.float32,
    fresh_dtype: Any = None,
    sees: Sees = "before",
    window: int | None = None,
    page: int = PAGE,
    spare: int = 1,
    seed: int = 0,
) -> Case:
    """Requests of `lengths` cached positions and `rows` fresh rows each.

    Args:
      heads: of queries, and of keys and values.
      spare: columns of the page table that nobody uses; their numbers lead nowhere.
    """
    rng = np.random.default_rng(seed)
    B, (H, G), D = len(lengths), heads, head_dim
    used = [-(-length // page) for length in lengths]
    pages, columns = sum(used) + 2, max(used) + spare

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
    """Two requests that begin with the same page."""
    one = case("shared_prefix", [300, 290, 128], rows=4)
    one.page_BN[1, 0] = one.page_BN[2, 0] = one.page_BN[0, 0]
    return one


BFLOAT16 = ml_dtypes.bfloat16

CASES = (
    case("verify", [300, 1, 128, 0, 129], rows=4),
    case("anchors", [257, 17], rows=1),
    case("nothing_cached", [0, 0], rows=3),
    case("prompt_chunk", [130], rows=32),
    case("block", [140, 400], rows=8, sees="block"),
    case("block_and_window", [400, 300, 20], rows=8, sees="block", window=40),
    case("window_of_one_page", [511, 512, 513], rows=2, window=128),
    case("every_head_its_own", [200, 3], rows=2, heads=(3, 3)),
    case("nine_heads_of_64", [150, 90], rows=4, heads=(9, 3), head_dim=64),
    case("head_dim_256", [129], rows=2, heads=(2, 1), head_dim=256),
    case("bfloat16", [300, 77], rows=4, dtype=BFLOAT16),
    case(
        "fresh_rows_unrounded",
        [300, 77],
        rows=4,
        dtype=BFLOAT16,
        fresh_dtype=np.float32,
    ),
    shared_prefix(),
)
