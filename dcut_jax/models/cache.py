"""The key/value cache: two arrays for all layers, a row of them per slot.

Keys are stored transposed, `[layers, B, G, D, L]`, values as `[layers, B, G, L, D]`:
both products of attention then run along the minor axis of their right-hand side, and
a head dimension of 64 still gives a TPU full 128-wide lanes for the keys. One array for
all layers makes a commit one write per slot. What lies past a slot's length is never
read and needs no clean-up.
"""

from typing import Any

import flax.struct
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from dcut_jax.models.attention import CachedContext

CHUNK = 128


def capacity(positions: int) -> int:
    """Allocated positions for `positions` wanted: a multiple of the read chunk."""
    return -(-positions // CHUNK) * CHUNK


@flax.struct.dataclass
class KvCache:
    """Keys `[Y, B, G, D, L]` and values `[Y, B, G, L, D]` of all Y layers."""

    k: Array
    v: Array


def init_cache(cfg: Any, slots: int, positions: int, dtype: DTypeLike) -> KvCache:
    """Zeros for a target's or a drafter's `cfg`."""
    L = capacity(positions)
    lead = (cfg.layers, slots, cfg.kv_heads)
    return KvCache(
        k=jnp.zeros((*lead, cfg.head_dim, L), dtype),
        v=jnp.zeros((*lead, L, cfg.head_dim), dtype),
    )


def _read(
    kv: KvCache, layer: int, slot: int | Array, slots: int, start: Array
) -> tuple[Array, Array]:
    G, D = kv.k.shape[2:4]
    k = lax.dynamic_slice(kv.k, (layer, slot, 0, 0, start), (1, slots, G, D, CHUNK))
    v = lax.dynamic_slice(kv.v, (layer, slot, 0, start, 0), (1, slots, G, CHUNK, D))
    return k[0], v[0]


def read_slots(kv: KvCache, layer: int, length_B: Int[Array, "B"]) -> CachedContext:
    """Every slot's cache of one layer."""
    slots = kv.k.shape[1]

    def read(start: Array) -> tuple[Array, Array]:
        return _read(kv, layer, 0, slots, start)

    return CachedContext(read, length_B, CHUNK)


def read_owners(
    kv: KvCache, layer: int, length_B: Int[Array, "B"], owner_O: Int[Array, "O"]
) -> CachedContext:
    """The caches of `owner_O`, one per group; slots may repeat."""
    slots = kv.k.shape[1]

    def read(start: Array) -> tuple[Array, Array]:
        k_BGDC, v_BGCD = _read(kv, layer, 0, slots, start)
        return k_BGDC[owner_O], v_BGCD[owner_O]

    return CachedContext(read, length_B[owner_O], CHUNK)


def read_slot(
    kv: KvCache, layer: int, slot: Int[Array, ""], length: Int[Array, ""]
) -> CachedContext:
    """One slot's cache of one layer, as a batch of one."""

    def read(start: Array) -> tuple[Array, Array]:
        return _read(kv, layer, slot, 1, start)

    return CachedContext(read, length[None], CHUNK)


def write_rows(
    kv: KvCache,
    k_YBWGD: Float[Array, "Y B W G D"],
    v_YBWGD: Float[Array, "Y B W G D"],
    start_B: Int[Array, "B"],
    count_B: Int[Array, "B"],
) -> KvCache:
    """Writes the first `count_B` of `W` rows of each slot at `start_B`.

    Rows past the count leave the cache as it was. The cache must reach to
    `start_B + W`, counted or not: a write past the end would be moved, not cut.
    """
    Y, B, W, G, D = k_YBWGD.shape
    k_YBGDW = k_YBWGD.transpose(0, 1, 3, 4, 2).astype(kv.k.dtype)
    v_YBGWD = v_YBWGD.transpose(0, 1, 3, 2, 4).astype(kv.v.dtype)
    row_W = jnp.arange(W)

    def put(array: Array, fresh: Array, b: Array, at: Any, counted: Array) -> Array:
        new = lax.dynamic_slice_in_dim(fresh, b, 1, axis=1)
        old = lax.dynamic_slice(array, at, new.shape)
        return lax.dynamic_update_slice(array, jnp.where(counted, new, old), at)

    def one_slot(b: Array, kv: KvCache) -> KvCache:
        counted_W = row_W < count_B[b]
        start = start_B[b]
        return KvCache(
            k=put(
                kv.k,
                k_YBGDW,
                b,
                (0, b, 0, 0, start),
                counted_W[None, None, None, None, :],
            ),
            v=put(
                kv.v,
                v_YBGWD,
                b,
                (0, b, 0, start, 0),
                counted_W[None, None, None, :, None],
            ),
        )

    return lax.fori_loop(0, B, one_slot, kv)


def write_slot(kv: KvCache, one: KvCache, slot: Int[Array, ""]) -> KvCache:
    """Copies a one-slot cache over a slot."""
    at = (0, slot, 0, 0, 0)
    return KvCache(
        k=lax.dynamic_update_slice(kv.k, one.k, at),
        v=lax.dynamic_update_slice(kv.v, one.v, at),
    )
