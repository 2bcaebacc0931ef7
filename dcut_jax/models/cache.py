"""The key/value cache: pages for all layers, and a table of who has which.

A page holds `CHUNK` positions, the piece that attention reads at a time. Keys are
stored transposed, `[layers, P, G, D, C]`, values as `[layers, P, G, C, D]`: both
products of attention then run along the minor axis of their right-hand side, and a head
dimension of 64 still gives a TPU full 128-wide lanes for the keys. One array for all
layers makes a commit one write per row.

A table `[B, N]` names the pages of each slot in order; target and drafter share it.
Behind a slot's own pages it says `NO_PAGE`, which reads as some page and is written to
none. What lies past a slot's length is never seen, whatever it is, and needs no
clean-up.
"""

from typing import Any

import flax.struct
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.verify_attention import Pages

CHUNK = 128  # positions of a page, C
NO_PAGE = 2**31 - 1  # beyond every page


def pages_for(positions: int) -> int:
    """Pages that so many positions of one slot take."""
    return -(-positions // CHUNK)


def capacity(positions: int) -> int:
    """Positions of whole pages, for `positions` wanted."""
    return pages_for(positions) * CHUNK


@flax.struct.dataclass
class KvCache:
    """Keys `[Y, P, G, D, C]` and values `[Y, P, G, C, D]` of all Y layers."""

    k: Array
    v: Array


def init_cache(cfg: Any, pages: int, dtype: DTypeLike) -> KvCache:
    """Zeros for a target's or a drafter's `cfg`."""
    lead = (cfg.layers, pages, cfg.kv_heads)
    return KvCache(
        k=jnp.zeros((*lead, cfg.head_dim, CHUNK), dtype),
        v=jnp.zeros((*lead, CHUNK, cfg.head_dim), dtype),
    )


def page_bytes(cfg: Any, dtype: DTypeLike) -> int:
    """What a page takes: keys and values of all layers."""
    numbers = 2 * cfg.layers * cfg.kv_heads * cfg.head_dim * CHUNK
    return numbers * jnp.dtype(dtype).itemsize


def in_order(slots: int, pages: int) -> Int[Array, "B N"]:
    """The table of slots with `pages` pages each, that lie one slot after the other."""
    return jnp.arange(slots * pages, dtype=jnp.int32).reshape(slots, pages)


def pages_of_layer(
    kv: KvCache, layer: int, table_BN: Int[Array, "B N"], length_B: Int[Array, "B"]
) -> Pages:
    """One layer of the pages that each row of a table names; rows may repeat.

    It is what attention takes; nothing is read before.
    """
    return Pages(kv.k, kv.v, layer, table_BN, length_B)


def as_cached(kv: KvCache, k: Array, v: Array) -> tuple[Array, Array]:
    """Fresh keys and values as they will be read from the cache.

    So a row sees the same of another whether both ran in one step or in two.
    """
    return k.astype(kv.k.dtype), v.astype(kv.v.dtype)


def write_rows(
    kv: KvCache,
    table_BN: Int[Array, "B N"],
    k_YTGD: Float[Array, "Y T G D"],
    v_YTGD: Float[Array, "Y T G D"],
    slot_T: Int[Array, "T"],
    position_T: Int[Array, "T"],
    counted_T: Bool[Array, "T"],
) -> KvCache:
    """Writes the counted rows, each to a slot and position of its own.

    The others leave the cache as it was, wherever they point, and so do rows that their
    slot has no page for.
    """
    inside_T = counted_T & (position_T < table_BN.shape[1] * CHUNK)
    page_T = table_BN.at[slot_T, position_T // CHUNK].get(mode="clip")
    page_T = jnp.where(inside_T, page_T, NO_PAGE)  # and is dropped there
    at_T = position_T % CHUNK
    k_TYGD = k_YTGD.swapaxes(0, 1).astype(kv.k.dtype)
    v_TYGD = v_YTGD.swapaxes(0, 1).astype(kv.v.dtype)
    return KvCache(
        k=kv.k.at[:, page_T, :, :, at_T].set(k_TYGD, mode="drop"),
        v=kv.v.at[:, page_T, :, at_T].set(v_TYGD, mode="drop"),
    )


def write_pages(kv: KvCache, some: KvCache, page_N: Int[Array, "N"]) -> KvCache:
    """Copies the N pages of `some` over those that `page_N` names, none twice.

    One after the other, and none that goes nowhere: of most prompts' pages, most.
    """
    real_N = page_N < kv.k.shape[1]
    order_N = jnp.argsort(~real_N, stable=True)

    def put(i: Array, kv: KvCache) -> KvCache:
        at = order_N[i]

        def copied(to: Array, of: Array) -> Array:
            page = lax.dynamic_slice_in_dim(of, at, 1, axis=1)
            return lax.dynamic_update_slice_in_dim(to, page, page_N[at], axis=1)

        return KvCache(copied(kv.k, some.k), copied(kv.v, some.v))

    return lax.fori_loop(0, real_N.sum(), put, kv)


def copy_pages(kv: KvCache, page_N: Int[Array, "N"]) -> KvCache:
    """A cache of N pages with what those have that `page_N` names."""
    return KvCache(
        k=kv.k.at[:, page_N].get(mode="clip"), v=kv.v.at[:, page_N].get(mode="clip")
    )
