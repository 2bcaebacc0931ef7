"""One tier for all shards, and each shard's own best drafts in it."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcut_jax.cut.plan import plan, plan_shards
from dcut_jax.cut.survival import log_survival

K = 4
ROWS_R = np.array([3, 5, 9, 15])


def survival_of(seed, slots):
    key = jax.random.key(seed)
    return np.asarray(log_survival(jnp.log(jax.random.uniform(key, (slots, K)))))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("due", [False, True])
def test_one_shard_is_the_plan_without_shards(seed, due):
    survival_BK = survival_of(seed, 3)
    active_B = np.array([True, True, seed % 2 == 0])
    cost_R = np.array([1.0, 1.1, 1.3, 2.5], np.float32)
    options = {"due_B": jnp.array([False, due, due])} if due else {}
    want = plan(survival_BK, active_B, jnp.asarray(ROWS_R), cost_R, **options)
    got = plan_shards(
        survival_BK, active_B, jnp.asarray(ROWS_R)[None], cost_R, **options
    )
    for a, b in zip(want, got, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("seed", range(6))
def test_the_tier_is_the_best_of_all_that_shards_can_do(seed):
    """Against all tiers and, in each, all ways to fill each shard's rows."""
    slots, shards = 2, 3
    rng = np.random.default_rng(seed)
    survival_BK = survival_of(seed, slots * shards)
    active_B = rng.random(slots * shards) < 0.8
    rows_R = np.array([2, 3, 5, 8])
    cost_R = np.array([1.0, 1.15, 1.6, 2.2], np.float32)
    empty_S = (~active_B.reshape(shards, slots)).sum(axis=1)
    rows_SR = (rows_R[None] - empty_S[:, None]).astype(np.int32)

    def gain(shard, rows):
        """The best of a shard's rows, by trying all keep counts."""
        own = slice(shard * slots, (shard + 1) * slots)
        active = active_B[own]
        worth = np.where(active[:, None], np.exp(survival_BK[own]), 0.0)
        free = rows - active.sum()
        return max(
            sum(worth[i, :k].sum() for i, k in enumerate(keep))
            for keep in itertools.product(range(K + 1), repeat=slots)
            if sum(k for k, a in zip(keep, active, strict=True) if a) <= free
        )

    gain_R = [
        sum(gain(s, rows_SR[s, r]) for s in range(shards)) for r in range(len(rows_R))
    ]
    utility_R = (active_B.sum() + np.array(gain_R)) / cost_R
    got = plan_shards(survival_BK, active_B, jnp.asarray(rows_SR), cost_R)
    np.testing.assert_allclose(got.gain_R, gain_R, rtol=1e-5)
    assert int(got.tier) == int(np.argmax(utility_R))
    keep_SB = np.asarray(got.keep_B).reshape(shards, slots)
    active_SB = active_B.reshape(shards, slots)
    assert (keep_SB[~active_SB] == 0).all()
    used_S = (keep_SB + 1)[:, :].sum(axis=1, where=active_SB)
    assert (used_S <= rows_SR[:, int(got.tier)]).all()


@pytest.mark.slow
def test_an_idle_shard_gives_no_rows_to_a_full_one():
    """With rows in common the sure request would take all six."""
    survival_BK = np.log(np.array([[0.99, 0.98, 0.97, 0.96], [0.2, 0.02, 0.01, 0.01]]))
    both = np.array([True, True])
    rows_R, cost_R = np.array([2, 6]), np.array([9.0, 1.0], np.float32)
    common = plan(survival_BK.astype(np.float32), both, jnp.asarray(rows_R), cost_R)
    assert common.keep_B.tolist() == [4, 0]
    apart = plan_shards(
        survival_BK.astype(np.float32),
        both,
        jnp.asarray(np.tile(rows_R // 2, (2, 1)).astype(np.int32)),
        cost_R,
    )
    assert apart.keep_B.tolist() == [2, 2]


def test_the_fullest_shard_rules_out_tiers_that_it_does_not_fit():
    survival_BK = survival_of(0, 4)
    active_B = np.array([True, False, True, True])
    # The narrow tier would hold the first shard's one anchor, not the second's two.
    rows_SR = jnp.asarray(np.array([[1, 4], [1, 4]], np.int32))
    got = plan_shards(survival_BK, active_B, rows_SR, np.array([0.01, 1.0], np.float32))
    assert int(got.tier) == 1
    assert np.isneginf(np.asarray(got.utility_R)[0])
