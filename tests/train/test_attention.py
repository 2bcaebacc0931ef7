"""Both forms of block attention, against each other and against plain softmaxes."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcut_jax.models import drafter
from dcut_jax.train.attention import CHUNK, block_attention
from dcut_jax.weights.dflash import load_drafter

N, A, W, H, G, D = 2, 21, 5, 4, 2, 16
S = 2 * CHUNK + 37


@pytest.fixture(scope="module")
def cfg(golden):
    found, _ = load_drafter(golden / "full", jnp.float32)
    return replace(
        found,
        layers=3,
        layer_types=("full_attention", "sliding_attention", "sliding_attention"),
        causal=(False, True, False),
        window=40,
    )


@pytest.fixture(scope="module")
def case():
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    anchor_NA = np.sort(rng.integers(1, S, (N, A)), axis=1).astype(np.int32)
    anchor_NA[:, -2:] = 0  # what is no anchor, as `draw_blocks` leaves it
    shapes = (
        (N, A, W, H, D),
        (N, A, W, G, D),
        (N, A, W, G, D),
        (N, S, G, D),
        (N, S, G, D),
    )
    return jnp.asarray(anchor_NA), tuple(draw(*shape) for shape in shapes)


def plain(cfg, layer, anchor_NA, q, k, v, k_ctx, v_ctx):
    """Softmax over a block's own rows and its context, one row at a time."""
    out = np.zeros(q.shape)
    own, window = drafter.block_mask(cfg, layer, W), drafter.layer_window(cfg, layer)
    for n, a, w, h in np.ndindex(N, A, W, H):
        g, anchor = h // (H // G), int(anchor_NA[n, a])
        low = 0 if window is None else max(0, anchor + w - window + 1)
        keys = np.concatenate([k_ctx[n, low:anchor, g], k[n, a, own[w], g]])
        values = np.concatenate([v_ctx[n, low:anchor, g], v[n, a, own[w], g]])
        s = keys @ np.asarray(q[n, a, w, h]) / np.sqrt(D)
        p = np.exp(s - s.max())
        out[n, a, w, h] = p @ values / p.sum()
    return out


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_both_forms_are_the_softmax_over_what_is_seen(cfg, case, layer):
    anchor_NA, inputs = case
    want = plain(cfg, layer, anchor_NA, *map(np.asarray, inputs))
    for sparse in (False, True):
        got = jax.jit(
            lambda *x, sparse=sparse: block_attention(
                cfg, layer, anchor_NA, *x, jnp.float32, sparse
            )
        )(*inputs)
        np.testing.assert_allclose(got, want, atol=2e-5)


@pytest.mark.parametrize("layer", [0, 1])
def test_both_forms_have_the_same_gradients(cfg, case, layer):
    anchor_NA, inputs = case

    def loss(sparse, *x):
        out = block_attention(cfg, layer, anchor_NA, *x, jnp.float32, sparse)
        return jnp.sum(jnp.sin(out))

    grads = [
        jax.jit(jax.grad(lambda *x, s=s: loss(s, *x), argnums=range(5)))(*inputs)
        for s in (False, True)
    ]
    for direct, sparse in zip(*grads, strict=True):
        np.testing.assert_allclose(direct, sparse, atol=3e-5)


def test_what_no_block_sees_is_not_read(cfg, case):
    """Not a number behind all anchors would spoil a form that read it."""
    anchor_NA, (q, k, v, k_ctx, v_ctx) = case
    anchor_NA = jnp.minimum(anchor_NA, CHUNK - 1)
    spoilt = v_ctx.at[:, CHUNK:].set(jnp.nan)

    def run(values):
        return block_attention(
            cfg, 0, anchor_NA, q, k, v, k_ctx, values, jnp.float32, True
        )

    np.testing.assert_array_equal(run(spoilt), run(v_ctx))


def test_a_long_context_needs_no_memory_for_scores(cfg):
    long, anchors = 4096, 64

    def step(q, k, v, k_ctx, v_ctx, sparse):
        anchor_NA = jnp.linspace(1, long - 1, anchors).astype(jnp.int32)[None]
        out = block_attention(
            cfg, 0, anchor_NA, q, k, v, k_ctx, v_ctx, jnp.float32, sparse
        )
        return jnp.sum(out)

    shapes = (1, anchors, W, H, D), *[(1, anchors, W, G, D)] * 2, *[(1, long, G, D)] * 2
    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]

    def held(sparse):
        grad = jax.grad(lambda *x: step(*x, sparse), argnums=range(5))
        return jax.jit(grad).lower(*args).compile().memory_analysis().temp_size_in_bytes

    scores = 4 * anchors * W * H * long
    assert held(False) > 2 * scores
    assert held(True) < scores
