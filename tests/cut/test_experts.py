"""Expert-aware plans: equal to exhaustive search, and prefixes of each request."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcut_jax.cut.experts import plan_experts
from dcut_jax.cut.numpy_plan import plan_numpy


def exhaustive(survival_BK, active_B, asks_BWX, fixed_ms, row_ms, expert_ms):
    """The best utility over all prefixes of all requests."""
    best = -1.0
    longest = [
        int(np.logical_and.accumulate(~np.isnan(row)).sum()) * on
        for row, on in zip(survival_BK, active_B, strict=True)
    ]
    for keep in itertools.product(*(range(n + 1) for n in longest)):
        rows, tokens, asked = 0, 0.0, set()
        for b, count in enumerate(keep):
            if active_B[b]:
                rows += 1 + count
                tokens += 1 + np.exp(survival_BK[b, :count]).sum()
                for w in range(count + 1):
                    asked |= set(np.flatnonzero(asks_BWX[b, w]))
        ms = fixed_ms + row_ms * rows + expert_ms * len(asked)
        best = max(best, tokens / ms)
    return best


def drawn(seed, B, K, X, top_k=2):
    rng = np.random.default_rng(seed)
    survival_BK = np.cumsum(np.log(rng.uniform(0.05, 1.0, (B, K))), axis=1)
    asks_BWX = rng.random((B, K + 1, X)).argsort(axis=2) < top_k
    return survival_BK, asks_BWX


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    B=st.integers(1, 3),
    K=st.integers(1, 4),
    X=st.integers(2, 9),
    fixed_ms=st.sampled_from([0.1, 1.0, 10.0]),
    row_ms=st.sampled_from([0.0, 0.05, 0.5]),
    expert_ms=st.sampled_from([0.0, 0.02, 0.3, 2.0]),
    unknown=st.booleans(),
)
def test_equals_exhaustive_search(seed, B, K, X, fixed_ms, row_ms, expert_ms, unknown):
    survival_BK, asks_BWX = drawn(seed, B, K, X)
    active_B = np.random.default_rng(seed).random(B) < 0.8
    active_B[0] = True
    if unknown:
        survival_BK[seed % B, seed % K] = np.nan
    times = dict(fixed_ms=fixed_ms, row_ms=row_ms, expert_ms=expert_ms)
    plan = plan_experts(survival_BK, active_B, asks_BWX, **times)
    best = exhaustive(survival_BK, active_B, asks_BWX, *times.values())
    assert plan.utility == pytest.approx(best, rel=1e-6)
    # What it says of itself is so.
    kept = [np.exp(s[:n]).sum() for s, n in zip(survival_BK, plan.keep_B, strict=True)]
    assert plan.gain == pytest.approx(sum(kept))
    assert plan.rows == active_B.sum() + plan.keep_B.sum()
    asked = np.zeros(X, bool)
    for b in np.flatnonzero(active_B):
        asked |= asks_BWX[b, : plan.keep_B[b] + 1].any(axis=0)
    assert plan.opened == asked.sum()
    assert (plan.keep_B[~active_B] == 0).all()


def test_a_likelier_draft_may_cost_more_than_it_is_worth():
    """Two requests; the likelier draft opens two experts, the other none."""
    survival_BK = np.log([[0.6], [0.5]])
    asks_BWX = np.zeros((2, 2, 6), bool)
    asks_BWX[:, 0, :2] = True  # both anchors
    asks_BWX[0, 1, 2:4] = True
    asks_BWX[1, 1, :2] = True
    times = dict(fixed_ms=1.0, row_ms=0.1)
    free = plan_experts(survival_BK, [True] * 2, asks_BWX, **times, expert_ms=0.0)
    np.testing.assert_array_equal(free.keep_B, [1, 1])
    dear = plan_experts(survival_BK, [True] * 2, asks_BWX, **times, expert_ms=0.4)
    np.testing.assert_array_equal(dear.keep_B, [0, 1])
    assert dear.opened == 2
    assert dear.utility == pytest.approx(2.5 / (1 + 0.3 + 0.8))


def test_a_draft_never_comes_without_the_one_before_it():
    """The second draft is free and likely; the first opens what it is not worth."""
    survival_BK = np.log([[0.30, 0.29]])
    asks_BWX = np.zeros((1, 3, 4), bool)
    asks_BWX[0, 0, 0] = asks_BWX[0, 2, 0] = True
    asks_BWX[0, 1, 1:] = True
    times = dict(fixed_ms=1.0, row_ms=0.05)
    cheap = plan_experts(survival_BK, [True], asks_BWX, **times, expert_ms=0.05)
    assert cheap.keep_B.tolist() == [2]
    dear = plan_experts(survival_BK, [True], asks_BWX, **times, expert_ms=0.6)
    assert dear.keep_B.tolist() == [0]


@pytest.mark.parametrize("seed", range(5))
def test_without_a_price_of_experts_it_is_the_plan_of_every_budget(seed):
    survival_BK, asks_BWX = drawn(seed, 6, 5, 12)
    rows_R = np.arange(6, 37)
    want = plan_numpy(survival_BK, np.ones(6, bool), rows_R, 2.0 + 0.3 * rows_R)
    got = plan_experts(
        survival_BK, [True] * 6, asks_BWX, fixed_ms=2.0, row_ms=0.3, expert_ms=0.0
    )
    assert got.utility == pytest.approx(want.utility_R.max(), rel=1e-5)
    np.testing.assert_array_equal(got.keep_B, want.keep_B)


def test_it_is_quick_enough_for_a_batch_and_beats_survival_order():
    """32 requests of 15 drafts; against every budget in survival order."""
    survival_BK, asks_BWX = drawn(0, 32, 15, 64, top_k=4)
    times = dict(fixed_ms=1.0, row_ms=0.01, expert_ms=0.2)
    plan = plan_experts(survival_BK, [True] * 32, asks_BWX, **times)
    rows_R = np.arange(32, 513)
    for cost in (1.0 + 0.01 * rows_R, 1.0 + 0.05 * rows_R, 1.0 + 0.2 * rows_R):
        other = plan_numpy(survival_BK, np.ones(32, bool), rows_R, cost)
        kept = np.arange(16) <= other.keep_B[:, None]
        ms = 1.0 + 0.01 * kept.sum() + 0.2 * asks_BWX[kept].any(axis=0).sum()
        assert plan.utility >= (32 + other.gain) / ms - 1e-6


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"asks_BWX": np.zeros((2, 3, 4), bool)}, r"asks_BWX \[B, K \+ 1, X\]"),
        ({"active_B": [False, False]}, "an active request"),
        ({"log_survival_BK": np.full((2, 3), 0.1)}, "at most 0"),
        ({"fixed_ms": 0.0}, "fixed_ms above 0"),
        ({"expert_ms": np.nan}, "finite times"),
    ],
)
def test_what_makes_no_sense_is_refused(change, says):
    good = dict(
        log_survival_BK=np.log(np.full((2, 3), 0.5)),
        active_B=[True, True],
        asks_BWX=np.zeros((2, 4, 4), bool),
        fixed_ms=1.0,
        row_ms=0.1,
        expert_ms=0.1,
    )
    with pytest.raises(ValueError, match=says):
        plan_experts(**{**good, **change})
