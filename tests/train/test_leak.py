"""A block sees the context before its anchor and itself, in training as in drafting."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcut_jax.models import cache, drafter
from dcut_jax.train.blocks import Blocks, block_hidden
from dcut_jax.weights.dflash import load_drafter

S, ANCHORS = 32, (9, 14, 25)


@pytest.fixture(scope="module", params=["full", "swa", "from_anchor"])
def setup(request, golden, target):
    name = "full" if request.param == "from_anchor" else request.param
    cfg, params = load_drafter(golden / name, jnp.float32)
    if request.param == "from_anchor":
        cfg = replace(cfg, sample_from_anchor=True)
    rng = np.random.default_rng(0)
    blocks = Blocks(
        jnp.asarray(rng.integers(0, 100, (1, S)), jnp.int32),
        jnp.array([S]),
        jnp.asarray(rng.normal(size=(1, S, 192)), jnp.float32),
        jnp.array([ANCHORS]),
        jnp.ones((1, len(ANCHORS)), bool),
    )
    embed_VE = target[1]["embed_VE"]
    run = jax.jit(lambda blocks: block_hidden(params, cfg, embed_VE, blocks, 7)[0])
    return cfg, params, embed_VE, blocks, run


def test_training_computes_what_drafting_computes(setup):
    cfg, params, embed_VE, blocks, run = setup
    got_AKE = run(blocks)
    start_B = jnp.array(ANCHORS)

    @jax.jit
    def draft(blocks):
        ctx_SE = drafter.context(params, cfg, blocks.taps_NSC)
        k, v = drafter.context_kv(params, cfg, ctx_SE, jnp.arange(S)[None])
        table_1N = cache.in_order(1, cache.pages_for(S))
        kv = cache.init_cache(cfg, table_1N.size, jnp.float32)
        slot, every = jnp.zeros(S, int), jnp.ones(S, bool)
        place = slot, jnp.arange(S), every
        kv = cache.write_rows(kv, table_1N, k[:, 0], v[:, 0], *place)
        table_BN = jnp.repeat(table_1N, len(ANCHORS), axis=0)
        anchor_B = blocks.token_NS[0, start_B]
        return drafter.block_forward(
            params, cfg, embed_VE, anchor_B, start_B, kv, table_BN, 7
        )

    want_BKE = draft(blocks)
    np.testing.assert_allclose(got_AKE, want_BKE, atol=2e-5)


@pytest.mark.parametrize("block", range(len(ANCHORS)))
def test_nothing_at_or_after_the_anchor_matters(setup, block):
    *_, blocks, run = setup
    anchor = ANCHORS[block]
    changed = blocks.replace(
        taps_NSC=blocks.taps_NSC.at[:, anchor:].add(1.0),
        token_NS=blocks.token_NS.at[:, anchor + 1 :].set(7),
    )
    np.testing.assert_array_equal(run(changed)[block], run(blocks)[block])


@pytest.mark.parametrize("block", range(len(ANCHORS)))
def test_other_blocks_do_not_matter(setup, block):
    *_, blocks, run = setup
    others = [a if i == block else a + 3 for i, a in enumerate(ANCHORS)]
    changed = blocks.replace(anchor_NA=jnp.array([others]))
    got, want = run(changed), run(blocks)
    np.testing.assert_array_equal(got[block], want[block])
    assert not np.allclose(got[block - 1], want[block - 1], atol=1e-3)


@pytest.mark.parametrize("block", range(len(ANCHORS)))
def test_context_before_and_the_anchor_itself_matter(setup, block):
    *_, blocks, run = setup
    anchor = ANCHORS[block]
    want = run(blocks)[block]
    last = blocks.replace(taps_NSC=blocks.taps_NSC.at[:, anchor - 1].add(1.0))
    first = blocks.replace(taps_NSC=blocks.taps_NSC.at[:, 0].add(1.0))
    other = blocks.token_NS[0, anchor] % 99 + 1
    token = blocks.replace(token_NS=blocks.token_NS.at[:, anchor].set(other))
    for changed in (last, first, token):
        assert float(jnp.max(jnp.abs(run(changed)[block] - want))) > 1e-3
