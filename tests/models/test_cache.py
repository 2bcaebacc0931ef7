"""The cache: what is written, and above all what is not."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcut_jax.models.cache import (
    CHUNK,
    NO_PAGE,
    KvCache,
    capacity,
    copy_pages,
    in_order,
    init_cache,
    page_bytes,
    pages_for,
    pages_of_layer,
    write_pages,
    write_rows,
)

Y, B, W, G, D = 2, 3, 4, 2, 6
# Two pages of each slot, in no order, and one that nobody has.
TABLE = np.array([[4, 1], [6, 0], [2, 5]], np.int32)
PAGES = 7


def draw(rng, pages=PAGES, dtype=np.float32):
    return KvCache(
        k=rng.normal(size=(Y, pages, G, D, CHUNK)).astype(dtype),
        v=rng.normal(size=(Y, pages, G, CHUNK, D)).astype(dtype),
    )


def rows(rng):
    return rng.normal(size=(Y, B, W, G, D)).astype(np.float32)


def written(kv, k_YBWGD, v_YBWGD, start_B, count_B):
    """The same by a loop over rows."""
    k, v = kv.k.copy(), kv.v.copy()
    for b in range(B):
        for row in range(count_B[b]):
            page, at = TABLE[b, (start_B[b] + row) // CHUNK], (start_B[b] + row) % CHUNK
            k[:, page, :, :, at] = k_YBWGD[:, b, row]
            v[:, page, :, at] = v_YBWGD[:, b, row]
    return KvCache(k, v)


@jax.jit
def write(kv, k_YBWGD, v_YBWGD, start_B, count_B, table_BN=TABLE):
    """The first `count_B` rows of each slot, from `start_B` on."""
    slot_T, row_T = jnp.repeat(jnp.arange(B), W), jnp.tile(jnp.arange(W), B)
    flat = (Y, B * W, G, D)
    return write_rows(
        kv,
        jnp.asarray(table_BN),
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
@pytest.mark.parametrize(
    "start_B", [[0, 60, 124], [126, 125, 252], [5, 128, 200]], ids=str
)
def test_write_rows_writes_the_counted_rows_and_nothing_else(start_B, count_B):
    rng = np.random.default_rng(0)
    kv, k, v = draw(rng), rows(rng), rows(rng)
    got = write(kv, k, v, jnp.asarray(start_B), jnp.asarray(count_B))
    want = written(kv, k, v, start_B, count_B)
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("start", [124, 126, 253, 256, 300])
def test_a_slot_without_a_page_writes_into_no_other(start):
    rng = np.random.default_rng(0)
    kv, k, v = draw(rng), rows(rng), rows(rng)
    table_BN = TABLE.copy()
    table_BN[:, 1] = NO_PAGE
    start_B, full_B = jnp.full(B, start), jnp.full(B, W)
    got = write(kv, k, v, start_B, full_B, table_BN)
    fits = max(min(CHUNK - start, W), 0)
    want = written(kv, k, v, [start] * B, [fits] * B)
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
    stored = got.k[:, TABLE[:, 0], :, :, :W].transpose(0, 1, 4, 2, 3)
    np.testing.assert_array_equal(stored, jnp.asarray(k, jnp.bfloat16))


def test_written_rows_are_read_back_where_they_were_put():
    rng = np.random.default_rng(0)
    kv, k, v = draw(rng), rows(rng), rows(rng)
    start_B = jnp.asarray([128, 178, 252])
    kv = write(kv, k, v, start_B, jnp.full(B, W))
    pages = pages_of_layer(kv, 1, jnp.asarray(TABLE), start_B)
    got_k = pages.k_YPGDC[pages.layer, pages.page_BN[:, 1]]
    got_v = pages.v_YPGCD[pages.layer, pages.page_BN[:, 1]]
    for b, at in enumerate((start_B - CHUNK).tolist()):
        np.testing.assert_array_equal(
            got_k[b, :, :, at : at + W].transpose(2, 0, 1), k[1, b]
        )
        np.testing.assert_array_equal(got_v[b, :, at : at + W].swapaxes(0, 1), v[1, b])


def test_write_pages_replaces_those_that_are_named():
    rng = np.random.default_rng(0)
    kv, some = draw(rng), draw(rng, pages=4)
    to_N = jnp.asarray([5, NO_PAGE, 0, NO_PAGE], jnp.int32)
    got = jax.jit(write_pages)(kv, some, to_N)
    want = jax.tree.map(np.copy, kv)
    for name in ("k", "v"):
        getattr(want, name)[:, 5] = getattr(some, name)[:, 0]
        getattr(want, name)[:, 0] = getattr(some, name)[:, 2]
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_copied_pages_are_those_that_are_named():
    kv = draw(np.random.default_rng(0))
    got = jax.jit(copy_pages)(kv, jnp.asarray([6, 2, NO_PAGE], jnp.int32))
    np.testing.assert_array_equal(got.k[:, :2], kv.k[:, [6, 2]])
    np.testing.assert_array_equal(got.v[:, :2], kv.v[:, [6, 2]])
    assert got.k.shape[1] == 3


@pytest.mark.parametrize(
    ("wanted", "got"), [(1, 1), (127, 1), (128, 1), (129, 2), (256, 2)]
)
def test_pages_of_so_many_positions(wanted, got):
    assert pages_for(wanted) == got
    assert capacity(wanted) == got * CHUNK


def test_an_empty_cache():
    cfg = SimpleNamespace(layers=3, kv_heads=2, head_dim=6)
    kv = init_cache(cfg, 5, jnp.bfloat16)
    assert kv.k.shape == (3, 5, 2, 6, 128)
    assert kv.v.shape == (3, 5, 2, 128, 6)
    assert kv.k.dtype == kv.v.dtype == jnp.bfloat16
    assert not kv.k.any()
    assert not kv.v.any()
    assert kv.k.nbytes + kv.v.nbytes == 5 * page_bytes(cfg, "bfloat16")


def test_pages_in_order():
    assert in_order(2, 3).tolist() == [[0, 1, 2], [3, 4, 5]]
