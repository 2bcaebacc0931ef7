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
from jaxtyping import Array, Bool, Float, Int

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


def as_cached(kv: KvCache, k: Array, v: Array) -> tuple[Array, Array]:
    """Fresh keys and values as they will be read from the cache.

    So a row sees the same of another whether both ran in one step or in two.
    """
    return k.astype(kv.k.dtype), v.astype(kv.v.dtype)


def write_rows(
    kv: KvCache,
    k_YTGD: Float[Array, "Y T G D"],
    v_YTGD: Float[Array, "Y T G D"],
    slot_T: Int[Array, "T"],
    position_T: Int[Array, "T"],
    counted_T: Bool[Array, "T"],
) -> KvCache:
    """Writes the counted rows, each to a slot and position of its own.

    The others leave the cache as it was, wherever they point.
    """
    beyond = kv.k.shape[-1]
    at_T = jnp.where(counted_T, position_T, beyond)  # and is dropped there
    k_TYGD = k_YTGD.swapaxes(0, 1).astype(kv.k.dtype)
    v_TYGD = v_YTGD.swapaxes(0, 1).astype(kv.v.dtype)
    return KvCache(
        k=kv.k.at[:, slot_T, :, :, at_T].set(k_TYGD, mode="drop"),
        v=kv.v.at[:, slot_T, :, at_T].set(v_TYGD, mode="drop"),
    )


def write_slot(
    kv: KvCache,
    one: KvCache,
    slot: Int[Array, ""],
    here: Bool[Array, ""] | None = None,
) -> KvCache:
    """Copies a one-slot cache over a slot; only if it is `here`, where that is told."""
    at = (0, slot, 0, 0, 0)

    def write(all_X: Array, one_X: Array) -> Array:
        if here is not None:
            old_X = lax.dynamic_slice(all_X, at, one_X.shape)
            one_X = jnp.where(here, one_X, old_X)
        return lax.dynamic_update_slice(all_X, one_X, at)

    return KvCache(k=write(kv.k, one.k), v=write(kv.v, one.v))
