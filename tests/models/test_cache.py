"""The cache: what is written, and above all what is not."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcut_jax.models.cache import (
    CHUNK,
    KvCache,
    capacity,
    init_cache,
    read_slots,
    write_rows,
    write_slot,
)

Y, B, W, G, D, L = 2, 3, 4, 2, 6, CHUNK


def draw(rng, slots=B, dtype=np.float32):
    return KvCache(
        k=rng.normal(size=(Y, slots, G, D, L)).astype(dtype),
        v=rng.normal(size=(Y, slots, G, L, D)).astype(dtype),
    )


def rows(rng):
    return rng.normal(size=(Y, B, W, G, D)).astype(np.float32)


def written(kv, k_YBWGD, v_YBWGD, start_B, count_B):
    """The same by a loop over rows."""
    k, v = kv.k.copy(), kv.v.copy()
    for b in range(B):
        for row in range(count_B[b]):
            at = start_B[b] + row
            k[:, b, :, :, at] = k_YBWGD[:, b, row]
            v[:, b, :, at] = v_YBWGD[:, b, row]
    return KvCache(k, v)


@jax.jit
def write(kv, k_YBWGD, v_YBWGD, start_B, count_B):
    """The first `count_B` rows of each slot, from `start_B` on."""
    slot_T, row_T = jnp.repeat(jnp.arange(B), W), jnp.tile(jnp.arange(W), B)
    flat = (Y, B * W, G, D)
    return write_rows(
        kv,
        k_YBWGD.reshape(flat),
        v_YBWGD.reshape(flat),
        slot_T,
        start_B[slot_T] + row_T,
        row_T < count_B[slot_T],
    )


@pytest.mark.parametrize(
    "count_B",
    [[0, 0, 0], [4, 4, 4], [1, 0, 3], [0, 4, 0], [0, 0, 2]],
    ids=str,
)
@pytest.mark.parametrize("start_B", [[0, 60, 124], [124, 124, 124], [5, 5, 5]], ids=str)
def test_write_rows_writes_the_counted_rows_and_nothing_else(start_B, count_B):
    rng = np.random.default_rng(0)
    kv, k, v = draw(rng), rows(rng), rows(rng)
    got = write(kv, k, v, jnp.asarray(start_B), jnp.asarray(count_B))
    want = written(kv, k, v, start_B, count_B)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_rejected_rows_leave_no_trace_even_when_they_are_not_finite():
    rng = np.random.default_rng(0)
    kv, k, v = draw(rng), rows(rng), rows(rng)
    k[:, :, 2:], v[:, :, 2:] = np.nan, np.inf
    start_B = jnp.asarray([3, 60, 124])
    got = write(kv, k, v, start_B, jnp.asarray([2, 0, 1]))
    assert np.isfinite(got.k).all()
    assert np.isfinite(got.v).all()


def test_rows_are_stored_in_the_dtype_of_the_cache():
    rng = np.random.default_rng(0)
    kv = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), draw(rng))
    k, v = rows(rng), rows(rng)
    got = write(kv, k, v, jnp.zeros(B, int), jnp.full(B, W))
    assert got.k.dtype == got.v.dtype == jnp.bfloat16
    stored = got.k[:, :, :, :, :W].transpose(0, 1, 4, 2, 3)
    np.testing.assert_array_equal(stored, jnp.asarray(k, jnp.bfloat16))


def test_written_rows_are_read_back_where_they_were_put():
    rng = np.random.default_rng(0)
    kv, k, v = draw(rng), rows(rng), rows(rng)
    start_B = jnp.asarray([0, 50, 124])
    kv = write(kv, k, v, start_B, jnp.full(B, W))
    got_k, got_v = read_slots(kv, 1, start_B).read(jnp.asarray(0))
    for b, at in enumerate(start_B.tolist()):
        np.testing.assert_array_equal(
            got_k[b, :, :, at : at + W].transpose(2, 0, 1), k[1, b]
        )
        np.testing.assert_array_equal(got_v[b, :, at : at + W].swapaxes(0, 1), v[1, b])


@pytest.mark.parametrize("slot", range(B))
def test_write_slot_replaces_one_slot(slot):
    rng = np.random.default_rng(0)
    kv, one = draw(rng), draw(rng, slots=1)
    got = jax.jit(write_slot)(kv, one, jnp.asarray(slot))
    want = jax.tree.map(np.copy, kv)
    want.k[:, slot], want.v[:, slot] = one.k[:, 0], one.v[:, 0]
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize(
    ("wanted", "got"), [(1, 128), (127, 128), (128, 128), (129, 256), (256, 256)]
)
def test_capacity_is_a_multiple_of_the_chunk(wanted, got):
    assert capacity(wanted) == got


def test_an_empty_cache():
    cfg = SimpleNamespace(layers=3, kv_heads=2, head_dim=6)
    kv = init_cache(cfg, 4, 129, jnp.bfloat16)
    assert kv.k.shape == (3, 4, 2, 6, 256)
    assert kv.v.shape == (3, 4, 2, 256, 6)
    assert kv.k.dtype == kv.v.dtype == jnp.bfloat16
    assert not kv.k.any()
    assert not kv.v.any()
