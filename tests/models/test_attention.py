"""Attention over the models' pages, against one plain softmax per query in NumPy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcut_jax.models.cache import CHUNK, KvCache, pages_of_layer
from dcut_jax.models.dense import causal_mask
from pallas_kernels.verify_attention import (
    reference,
    sequence_attention,
    verify_attention,
)

B, J, S, G, D = 3, 3, 4, 2, 8
LENGTHS = [
    (0, 0, 0),
    (127, 128, 129),
    (0, 1, 255),
    (256, 256, 256),
    (300, 5, 383),
    (384, 0, 128),
]

# Three pages of each slot, in no order, and two that nobody has.
PAGES = 11
TABLE = np.random.default_rng(5).permutation(PAGES)[2:].reshape(B, 3).astype(np.int32)


def softmax_attention(q_BJHD, k_BSGD, v_BSGD, mask_BJS, past, windows):
    """One query at a time: every visible key in one list, and one softmax.

    `past[b]` holds `(k_LGD, v_LGD)`; `windows[b, j]` is how many of the last of them
    query `j` sees.
    """
    out = np.zeros(q_BJHD.shape)
    heads, kv_heads = q_BJHD.shape[2], k_BSGD.shape[2]
    for b, j, h in np.ndindex(*q_BJHD.shape[:3]):
        g = h // (heads // kv_heads)
        fresh = mask_BJS[b, j]
        old_k, old_v = past[b]
        seen = slice(max(len(old_k) - windows[b, j], 0), None)
        k = np.concatenate([old_k[seen, g], k_BSGD[b, fresh, g]]).astype(np.float64)
        v = np.concatenate([old_v[seen, g], v_BSGD[b, fresh, g]])
        score = k @ q_BJHD[b, j, h] / np.sqrt(q_BJHD.shape[-1])
        weight = np.exp(score - score.max())
        out[b, j, h] = weight @ v / weight.sum()
    return out


def draw(heads, batch=B, seed=0):
    """Queries, fresh keys and values, and a full cache of two layers."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return (2 * rng.normal(size=shape)).astype(np.float32)

    fresh = normal(batch, J, heads, D), normal(batch, S, G, D), normal(batch, S, G, D)
    kv = KvCache(k=normal(2, PAGES, G, D, CHUNK), v=normal(2, PAGES, G, CHUNK, D))
    return fresh, kv, rng.random((batch, J, S)) < 0.5


def past_of(kv, layer, slot, length):
    pages = TABLE[slot]
    k_LGD = np.concatenate([kv.k[layer, page].transpose(2, 0, 1) for page in pages])
    v_LGD = np.concatenate([kv.v[layer, page].swapaxes(0, 1) for page in pages])
    return k_LGD[:length], v_LGD[:length]


@partial(jax.jit, static_argnames=("layer", "window"))
def over_slots(q, k, v, mask, kv, length_B, layer=1, position_BJ=None, window=None):
    pages = pages_of_layer(kv, layer, jnp.asarray(TABLE), length_B)
    by = {"position_BJ": position_BJ, "window": window}
    return verify_attention(q, k, v, mask, pages, backend="xla", **by)


@pytest.mark.parametrize("heads", [2, 4], ids=["one_query_head_per_kv", "grouped"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_cache_and_fresh_keys_share_one_softmax(lengths, heads):
    fresh, kv, mask_BJS = draw(heads)
    mask_BJS[..., 0] = True  # each query sees at least one fresh key
    got = over_slots(*fresh, mask_BJS, kv, jnp.asarray(lengths))
    past = [past_of(kv, 1, b, n) for b, n in enumerate(lengths)]
    all_seen = np.full((B, J), 1000)
    want = softmax_attention(*fresh, mask_BJS, past, all_seen)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("window", [1, 6, 130])
def test_a_window_hides_old_positions(lengths, window):
    fresh, kv, mask_BJS = draw(4)
    mask_BJS[..., 0] = True
    length_B = np.array(lengths)
    position_BJ = length_B[:, None] + np.arange(J)
    got = over_slots(
        *fresh,
        mask_BJS,
        kv,
        jnp.asarray(length_B),
        position_BJ=jnp.asarray(position_BJ),
        window=window,
    )
    # The query `j` positions past the cache sees `window - 1 - j` cached ones.
    cached_BJ = np.maximum(window - 1 - (position_BJ - length_B[:, None]), 0)
    past = [past_of(kv, 1, b, n) for b, n in enumerate(lengths)]
    want = softmax_attention(*fresh, mask_BJS, past, cached_BJ)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


def test_without_a_cache():
    fresh, _, mask_BJS = draw(4)
    mask_BJS[..., -1] = True
    got = jax.jit(sequence_attention)(*fresh, mask_BJS)
    nothing = [(np.zeros((0, G, D)), np.zeros((0, G, D)))] * B
    want = softmax_attention(*fresh, mask_BJS, nothing, np.zeros((B, J), int))
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


def test_groups_read_the_pages_of_their_owners():
    owner_O, lengths = [2, 0, 2, 2], (129, 7, 200)
    fresh, kv, mask_OJS = draw(4, batch=4)
    mask_OJS[..., 0] = True

    @jax.jit
    def run(q, k, v, mask, kv, length_B, owner_O):
        table_ON = jnp.asarray(TABLE)[owner_O]
        pages = pages_of_layer(kv, 0, table_ON, length_B[owner_O])
        return verify_attention(q, k, v, mask, pages, backend="xla")

    got = run(*fresh, mask_OJS, kv, jnp.asarray(lengths), jnp.asarray(owner_O))
    past = [past_of(kv, 0, b, lengths[b]) for b in owner_O]
    want = softmax_attention(*fresh, mask_OJS, past, np.full((4, J), 1000))
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("junk", [1e6, -np.inf, np.nan])
def test_what_lies_past_a_length_does_not_matter(junk):
    fresh, kv, mask_BJS = draw(4)
    mask_BJS[..., 0] = True
    length_B = jnp.asarray([127, 0, 129])
    want = over_slots(*fresh, mask_BJS, kv, length_B)
    beyond_PC = np.ones((PAGES, CHUNK), bool)
    for pages, length in zip(TABLE, length_B.tolist(), strict=True):
        beyond_PC[pages] = np.arange(384).reshape(3, CHUNK) >= length
    kv = KvCache(
        k=np.where(beyond_PC[None, :, None, None, :], junk, kv.k).astype(np.float32),
        v=np.where(beyond_PC[None, :, None, :, None], junk, kv.v).astype(np.float32),
    )
    np.testing.assert_array_equal(over_slots(*fresh, mask_BJS, kv, length_B), want)


def test_only_as_many_pages_are_read_as_the_longest_request_needs(monkeypatch):
    fresh, kv, mask_BJS = draw(4)
    mask_BJS[..., 0] = True
    merged, merge = [], reference.merge

    def noting(found, s, *rest):
        jax.debug.callback(lambda _: merged.append(None), s[0, 0, 0, 0])
        return merge(found, s, *rest)

    monkeypatch.setattr(reference, "merge", noting)
    run = jax.jit(lambda kv, n: over_slots.__wrapped__(*fresh, mask_BJS, kv, n))
    for longest, pages in [(0, 0), (1, 1), (128, 1), (129, 2), (384, 3)]:
        merged.clear()
        jax.block_until_ready(run(kv, jnp.asarray([longest, 0, 0])))
        jax.effects_barrier()
        assert len(merged) == pages


def test_bfloat16_caches_give_float32_of_nearly_the_same_value():
    fresh, kv, mask_BJS = draw(4)
    mask_BJS[..., 0] = True
    length_B = jnp.asarray([127, 128, 129])
    want = over_slots(*fresh, mask_BJS, kv, length_B)
    low = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), kv)
    got = over_slots(*fresh, mask_BJS, low, length_B)
    assert got.dtype == jnp.float32
    # Scores here spread over tens, so one rounded key can move a whole weight.
    assert np.abs(np.asarray(got - want)).mean() < 0.05


def test_causal_mask_by_hand():
    valid_NS = jnp.asarray([[True, True, True], [False, True, False]])
    got = causal_mask(valid_NS).astype(int).tolist()
    assert got[0] == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert got[1] == [[1, 0, 0], [0, 1, 0], [0, 1, 1]]
