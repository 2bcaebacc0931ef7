"""The key/value cache: one array for all layers, a row of it per slot.

`kv` is `[layers, 2, B, G, L, D]`, keys first. One array makes a commit one write per
slot, whatever the number of layers. What lies past a slot's length is never read and
needs no clean-up.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from dcut_jax.models.attention import CachedContext

CHUNK = 128


def capacity(positions: int) -> int:
    """Allocated positions for `positions` wanted: a multiple of the read chunk."""
    return -(-positions // CHUNK) * CHUNK


def init_cache(cfg: Any, slots: int, positions: int, dtype: jnp.dtype) -> Array:
    """Zeros `[layers, 2, B, G, L, D]` for a target's or a drafter's `cfg`."""
    shape = (cfg.layers, 2, slots, cfg.kv_heads, capacity(positions), cfg.head_dim)
    return jnp.zeros(shape, dtype)


def read_slots(kv: Array, layer: int, length_B: Array) -> CachedContext:
    """Every slot's cache of one layer."""
    _, _, B, G, _, D = kv.shape

    def read(start: Array) -> tuple[Array, Array]:
        part = lax.dynamic_slice(
            kv, (layer, 0, 0, 0, start, 0), (1, 2, B, G, CHUNK, D)
        )
        return part[0, 0], part[0, 1]

    return CachedContext(read, length_B, CHUNK)


def read_owners(
    kv: Array, layer: int, length_B: Array, owner_O: Int[Array, "O"]
) -> CachedContext:
    """The caches of `owner_O`, one per group; slots may repeat."""
    every = read_slots(kv, layer, length_B)

    def read(start: Array) -> tuple[Array, Array]:
        k_BGCD, v_BGCD = every.read(start)
        return k_BGCD[owner_O], v_BGCD[owner_O]

    return CachedContext(read, length_B[owner_O], CHUNK)


def read_slot(kv: Array, layer: int, slot: Array, length: Array) -> CachedContext:
    """One slot's cache of one layer, as a batch of one."""
    _, _, _, G, _, D = kv.shape

    def read(start: Array) -> tuple[Array, Array]:
        part = lax.dynamic_slice(
            kv, (layer, 0, slot, 0, start, 0), (1, 2, 1, G, CHUNK, D)
        )
        return part[0, 0], part[0, 1]

    return CachedContext(read, length[None], CHUNK)


def write_rows(
    kv: Float[Array, "Y 2 B G L D"],
    k_YBWGD: Float[Array, "Y B W G D"],
    v_YBWGD: Float[Array, "Y B W G D"],
    start_B: Int[Array, "B"],
    count_B: Int[Array, "B"],
) -> Float[Array, "Y 2 B G L D"]:
    """Writes the first `count_B` of `W` rows of each slot at `start_B`.

    Rows past the count leave the cache as it was. The cache must reach to
    `start_B + W`, counted or not: a write past the end would be moved, not cut.
    """
    Y, _, B, G, _, D = kv.shape
    W = k_YBWGD.shape[2]
    fresh = jnp.stack([k_YBWGD, v_YBWGD], axis=1).swapaxes(3, 4).astype(kv.dtype)

    def one_slot(b, kv):
        at = (0, 0, b, 0, start_B[b], 0)
        old = lax.dynamic_slice(kv, at, (Y, 2, 1, G, W, D))
        new = lax.dynamic_slice_in_dim(fresh, b, 1, axis=2)
        new = new.reshape(Y, 2, 1, G, W, D)
        counted = (jnp.arange(W) < count_B[b]).reshape(1, 1, 1, 1, W, 1)
        return lax.dynamic_update_slice(kv, jnp.where(counted, new, old), at)

    return lax.fori_loop(0, B, one_slot, kv)
