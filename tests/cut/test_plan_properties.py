"""plan: what holds for every batch, with weights and requests that are due."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcut_jax.cut.numpy_plan import plan_numpy
from dcut_jax.cut.plan import plan

B, K, R = 5, 6, 4  # one shape, so that one executable serves all examples
jitted = jax.jit(plan, static_argnames=("objective",))

unit = st.floats(2**-10, 1.0, width=32)
confidence = st.one_of(unit, st.just(1.0), st.just(0.0), st.just(float("nan")))


@st.composite
def batches(draw):
    """Log-survivals, who is active, tiers that rise, costs, weights, who is due."""
    conf_BK = np.array(draw(st.lists(confidence, min_size=B * K, max_size=B * K)))
    with np.errstate(divide="ignore"):
        logs_BK = np.log(conf_BK.reshape(B, K).astype(np.float32)).cumsum(axis=1)
    active_B = np.array(draw(st.lists(st.booleans(), min_size=B, max_size=B)))
    narrow = st.integers(1, B * (K + 1) - 1)
    rows = draw(st.lists(narrow, min_size=R - 1, max_size=R - 1, unique=True))
    cost = st.one_of(st.floats(0.5, 50.0, width=32), st.just(float("inf")))
    cost_R = draw(st.lists(cost, min_size=R - 1, max_size=R - 1))
    weight_B = np.array(draw(st.lists(unit, min_size=B, max_size=B)), np.float32)
    due_B = np.array(draw(st.lists(st.booleans(), min_size=B, max_size=B)))
    return dict(
        logs_BK=logs_BK,
        active_B=active_B,
        rows_R=np.array([*sorted(rows), B * (K + 1)], np.int32),
        cost_R=np.array([*cost_R, draw(st.floats(0.5, 50.0, width=32))], np.float32),
        weight_B=weight_B,
        due_B=due_B,
    )


def run(batch, **options):
    asked = {k: jnp.asarray(v) if k != "objective" else v for k, v in options.items()}
    args = (batch[k] for k in ("logs_BK", "active_B", "rows_R", "cost_R"))
    return jax.device_get(jitted(*(jnp.asarray(x) for x in args), **asked))


def selectable(batch):
    known_BK = ~np.maximum.accumulate(np.isnan(batch["logs_BK"]), axis=1)
    return known_BK & batch["active_B"][:, None]


@settings(max_examples=150, deadline=None)
@given(batches(), st.sampled_from(["tokens", "paper"]), st.booleans(), st.booleans())
def test_a_plan_fits_its_tier_and_keeps_prefixes(batch, objective, weighted, due):
    options = {"objective": objective}
    options |= {"weight_B": batch["weight_B"]} if weighted else {}
    options |= {"due_B": batch["due_B"]} if due else {}
    made = run(batch, **options)
    active = int(batch["active_B"].sum())
    usable_B = selectable(batch).sum(axis=1)
    assert (made.keep_B >= 0).all()
    assert (made.keep_B <= usable_B).all()  # a prefix, and the anchor beside it
    assert made.budget == made.keep_B.sum()
    assert active + made.budget <= batch["rows_R"][made.tier]
    room = batch["rows_R"][made.tier] - active
    assert made.budget == min(room, usable_B.sum())  # a plan fills its tier
    assert np.isfinite(batch["cost_R"][made.tier])
    kept_BK = np.arange(K) < made.keep_B[:, None]
    gain = np.exp(np.minimum.accumulate(batch["logs_BK"], axis=1))[kept_BK].sum()
    assert made.gain == pytest.approx(gain, rel=1e-5, abs=1e-6)


@settings(max_examples=100, deadline=None)
@given(batches(), st.randoms(use_true_random=False), st.booleans())
def test_the_order_of_the_batch_does_not_matter(batch, random, weighted):
    # Apart from ties, which go to the lower request: those are made to differ.
    jitter_BK = np.arange(B * K, dtype=np.float32).reshape(B, K) * 1e-3
    finite_BK = np.maximum(batch["logs_BK"] * 0.5, -20.0)  # keeps NaN
    batch = batch | {"logs_BK": finite_BK - jitter_BK.cumsum(axis=1)}
    order = list(range(B))
    random.shuffle(order)
    per_request = ("logs_BK", "active_B", "weight_B", "due_B")
    other = batch | {name: batch[name][order] for name in per_request}
    given_B = ("due_B", "weight_B") if weighted else ("due_B",)
    a = run(batch, **{name: batch[name] for name in given_B})
    b = run(other, **{name: other[name] for name in given_B})
    utility = np.sort(a.utility_R)
    everyone = a.budget >= batch["due_B"].sum()  # or those due would be a tie
    if everyone and utility[-1] > utility[-2] * (1 + 1e-5):
        np.testing.assert_array_equal(b.keep_B, a.keep_B[order])
        assert a.tier == b.tier


@settings(max_examples=100, deadline=None)
@given(batches(), st.booleans())
def test_the_widest_tier_alone_verifies_all_that_is_known(batch, weighted):
    only_R = np.where(np.arange(R) == R - 1, 1.0, np.inf).astype(np.float32)
    options = {"weight_B": batch["weight_B"]} if weighted else {}
    made = run(batch | {"cost_R": only_R}, **options)
    np.testing.assert_array_equal(made.keep_B, selectable(batch).sum(axis=1))


@settings(max_examples=100, deadline=None)
@given(batches())
def test_equal_weights_change_no_bit(batch):
    plain = run(batch)
    equal = run(batch, weight_B=np.ones(B, np.float32))
    jax.tree.map(np.testing.assert_array_equal, plain, equal)


@settings(max_examples=100, deadline=None)
@given(batches())
def test_nobody_due_changes_no_bit(batch):
    plain = run(batch)
    none = run(batch, due_B=np.zeros(B, bool))
    jax.tree.map(np.testing.assert_array_equal, plain, none)


@settings(max_examples=150, deadline=None)
@given(batches(), st.booleans())
def test_whoever_is_due_has_a_draft_verified(batch, weighted):
    options = {"weight_B": batch["weight_B"]} if weighted else {}
    made = run(batch, due_B=batch["due_B"], **options)
    due_B = batch["due_B"] & selectable(batch)[:, 0]
    active = batch["active_B"].sum()
    runs_R = np.isfinite(batch["cost_R"]) & (batch["rows_R"] >= active)
    roomy_R = runs_R & (batch["rows_R"] - active >= due_B.sum())
    if roomy_R.any():
        assert (made.keep_B[due_B] > 0).all()


@settings(max_examples=150, deadline=None)
@given(batches(), st.booleans(), st.booleans())
def test_numpy_makes_the_same_plan(batch, weighted, due):
    options = {"weight_B": batch["weight_B"]} if weighted else {}
    options |= {"due_B": batch["due_B"]} if due else {}
    made = run(batch, **options)
    args = (batch[k] for k in ("logs_BK", "active_B", "rows_R", "cost_R"))
    want = plan_numpy(*args, **options)
    if not weighted and not due:
        np.testing.assert_array_equal(made.gain_R, want.gain_R)
        np.testing.assert_array_equal(made.utility_R, want.utility_R)
        np.testing.assert_array_equal(made.keep_B, want.keep_B)
        return
    # Logarithms of weights round, and ties then fall either way.
    np.testing.assert_allclose(made.gain_R, want.gain_R, rtol=1e-4, atol=1e-4)
    close = np.sort(want.utility_R)
    if close[-1] > close[-2] * (1 + 1e-4) + 1e-6:
        assert made.tier == want.tier
        if not weighted:
            np.testing.assert_array_equal(made.keep_B, want.keep_B)


def test_a_heavy_request_is_served_before_a_likely_one():
    logs_BK = np.log(np.array([[0.9, 0.81], [0.6, 0.36]], np.float32))
    batch = dict(
        logs_BK=logs_BK,
        active_B=np.array([True, True]),
        rows_R=np.array([3], np.int32),
        cost_R=np.array([1.0], np.float32),
    )
    assert run(batch).keep_B.tolist() == [1, 0]
    fair = run(batch, weight_B=np.array([0.5, 1.0], np.float32))
    assert fair.keep_B.tolist() == [0, 1]
    assert fair.gain == pytest.approx(0.6)  # drafts, not their worth
    assert fair.utility_R[0] == pytest.approx(0.5 + 1.0 + 0.6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight_B": [0.0, 1.0]}, "in \\(0, 1\\], got"),
        ({"weight_B": [1.0, 2.0]}, "divide them by the largest"),
        ({"weight_B": [1.0]}, "like active_B"),
        ({"due_B": [True]}, "like active_B"),
    ],
)
def test_weights_that_are_none_are_refused(options, message):
    args = (np.zeros((2, 1), np.float32), [True, True], [2, 4], [1.0, 2.0])
    with pytest.raises(ValueError, match=message):
        plan_numpy(*args, **options)


@pytest.mark.parametrize(
    ("logs_BK", "message"),
    [
        (np.zeros((2, 0)), "K >= 1"),
        (np.full((2, 3), 0.5), "pass np.log of the chances"),
    ],
)
def test_what_is_no_log_survival_is_refused(logs_BK, message):
    with pytest.raises(ValueError, match=message):
        plan_numpy(logs_BK, [True, True], [2, 8], [1.0, 2.0])
