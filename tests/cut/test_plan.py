"""plan: hand-computed, against NumPy, against every possible choice, and invariants."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcut_jax.cut.numpy_plan import plan_numpy
from dcut_jax.cut.plan import paper_budgets, plan, tier_budgets

STATIC = ("objective", "ratios", "backend")
jitted = jax.jit(plan, static_argnames=STATIC)


def run(survival_BK, active_B, rows_R, cost_ms_R, **options):
    """The jitted plan of host values, back on the host."""
    made = jitted(
        jnp.asarray(survival_BK, jnp.float32),
        jnp.asarray(active_B, bool),
        jnp.asarray(rows_R, jnp.int32),
        jnp.asarray(cost_ms_R, jnp.float32),
        **options,
    )
    return jax.device_get(made)


def logs(probability_BK):
    with np.errstate(divide="ignore"):
        return np.log(np.asarray(probability_BK, np.float32))


def random_batch(rng, batch, drafts):
    """Log-survivals with unknown tails and ties here and there, and active requests."""
    confidence_BK = rng.uniform(0.05, 1.0, (batch, drafts))
    confidence_BK[rng.random((batch, drafts)) < 0.1] = 1.0
    survival_BK = logs(np.cumprod(confidence_BK, axis=1))
    survival_BK[np.arange(drafts) >= rng.integers(1, 3 * drafts, (batch, 1))] = np.nan
    return survival_BK, rng.random(batch) < 0.8


def random_tiers(rng, batch, drafts, tiers):
    """Strictly rising rows that reach from too narrow to every row, and their costs."""
    rows_R = rng.choice(np.arange(1, batch * (drafts + 1)), tiers - 1, replace=False)
    cost_ms_R = rng.uniform(1.0, 2.0) + rng.uniform(0.05, 0.5, tiers).cumsum()
    return np.sort(np.append(rows_R, batch * (drafts + 1))), cost_ms_R


PAIR_BK = logs([[0.9, 0.45, 0.05], [0.5, 0.4, 0.3]])


class TestByHand:
    # A gain is within 6e-6 a draft of the sum of survivals: see `budget_topk`.
    def test_tokens_per_ms(self):
        # Gains of 0, 2 and 6 drafts: 0, 0.9 + 0.5, 2.6. Two anchors.
        made = run(PAIR_BK, [True, True], [2, 4, 8], [2.0, 2.5, 4.0])
        np.testing.assert_allclose(made.utility_R, [1, 3.4 / 2.5, 4.6 / 4], rtol=1e-5)
        assert (made.tier, made.budget) == (1, 2)
        assert made.keep_B.tolist() == [1, 1]
        np.testing.assert_allclose(made.gain, 1.4, rtol=1e-6)

    def test_the_papers_objective_leaves_the_anchors_out(self):
        made = run(PAIR_BK, [True, True], [2, 4, 8], [2.0, 2.5, 4.0], objective="paper")
        np.testing.assert_allclose(made.utility_R, [0, 1.4 / 2.5, 2.6 / 4], rtol=1e-5)
        assert (made.tier, made.budget) == (2, 6)
        assert made.keep_B.tolist() == [3, 3]

    def test_an_exact_tie_goes_to_the_narrower_tier(self):
        made = run(np.zeros((1, 3)), [True], [1, 2, 4], [1.0, 2.0, 4.0])
        np.testing.assert_array_equal(made.utility_R, [1, 1, 1])
        assert (made.tier, made.budget) == (0, 0)

    def test_a_tier_too_narrow_for_the_anchors_is_out(self):
        made = run(PAIR_BK, [True, True], [1, 3, 8], [1e-3, 1.0, 9.0])
        assert made.utility_R[0] == -np.inf
        assert made.tier == 1
        assert made.keep_B.tolist() == [1, 0]

    def test_a_wider_tier_can_be_cheaper(self):
        made = run(PAIR_BK, [True, True], [2, 4, 8], [2.5, 2.0, 1.0])
        assert (made.tier, made.budget) == (2, 6)

    def test_an_inactive_request_keeps_nothing_and_has_no_anchor(self):
        made = run(PAIR_BK, [False, True], [1, 3], [1.0, 1.5])
        np.testing.assert_allclose(made.utility_R, [1, 1.9 / 1.5], rtol=1e-6)
        assert made.keep_B.tolist() == [0, 2]

    def test_unknown_confidences_leave_rows_empty(self):
        survival_BK = logs([[0.9, np.nan, 0.8], [np.nan, 0.9, 0.9]])
        made = run(survival_BK, [True, True], [2, 8], [1.0, 1.1])
        assert (made.tier, made.budget) == (1, 1)
        assert made.keep_B.tolist() == [1, 0]

    @pytest.mark.parametrize("objective", ["tokens", "paper"])
    @pytest.mark.parametrize("cost", [np.nan, np.inf, 0.0, -1.0])
    def test_a_tier_without_a_cost_is_out(self, objective, cost):
        made = run(
            PAIR_BK, [True, True], [2, 4, 8], [2.0, cost, 9.0], objective=objective
        )
        assert made.utility_R[1] == -np.inf
        assert made.tier != 1

    @pytest.mark.parametrize("objective", ["tokens", "paper"])
    @pytest.mark.parametrize(
        ("survival_BK", "active_B", "tier"),
        [
            (np.full((3, 2), np.nan), [True, True, True], 1),
            (np.zeros((3, 2)), [False, False, False], 0),
        ],
        ids=["nothing_selectable", "all_inactive"],
    )
    def test_nothing_to_keep_is_a_plan(self, survival_BK, active_B, tier, objective):
        made = run(survival_BK, active_B, [2, 3, 9], [1, 2, 3], objective=objective)
        assert (made.tier, made.budget, made.gain) == (tier, 0, 0)
        assert made.keep_B.tolist() == [0, 0, 0]

    def test_no_tier_at_all_is_told_by_the_utilities(self):
        made = run(PAIR_BK, [True, True], [1], [1.0])
        assert (made.tier, made.budget) == (0, 0)
        assert made.utility_R.tolist() == [-np.inf]

    @pytest.mark.parametrize(
        "options", [{"objective": "speed"}, {"ratios": (1.0,)}, {"ratios": (0.5, 2.0)}]
    )
    def test_senseless_options_are_refused(self, options):
        with pytest.raises((ValueError, TypeError), match="|".join(options)):
            run(PAIR_BK, [True, True], [2, 8], [1.0, 2.0], **options)


class TestBudgets:
    def test_drafts_fill_a_tier_beside_its_anchors(self):
        active_B = jnp.array([True, True, False])
        got = tier_budgets(jnp.array([1, 2, 5, 9], jnp.int32), active_B, jnp.int32(4))
        assert got.tolist() == [-1, 0, 3, 4]

    @pytest.mark.parametrize(
        ("active", "width", "ratio", "drafts"),
        [
            (8, 4, 1.0, 24),
            (4, 4, 0.5, 4),
            (8, 4, 0.1, 0),
            (1, 4, 0.6, 2),
            (1, 4, 0.25, 0),
            (1, 4, 0.26, 1),
            (32, 16, 0.25, 96),  # 128 of 512 positions
            (32, 16, 0.5, 224),
            (32, 16, 0.75, 352),
            (5, 20, 0.55, 50),  # as floats 100 * 0.55 is above 55
            (0, 16, 1.0, 0),
        ],
    )
    def test_the_papers_budgets(self, active, width, ratio, drafts):
        got = paper_budgets((ratio,), jnp.int32(active), width)
        assert got.tolist() == [drafts]

    @pytest.mark.parametrize("width", [4, 8, 16])
    def test_the_quarter_grid_is_exact(self, width):
        for active in range(1, 70):
            got = paper_budgets((0.25, 0.5, 0.75, 1.0), jnp.int32(active), width)
            rows = [(active * width * quarter + 3) // 4 for quarter in (1, 2, 3, 4)]
            assert got.tolist() == [max(0, r - active) for r in rows]

    def test_short_blocks_lose_all_drafts_at_a_quarter(self):
        survival_BK = logs(np.full((8, 3), 0.9))
        made = run(survival_BK, [True] * 8, [8], [1.0], ratios=(0.25,))
        assert made.budget == 0

    def test_paper_mode_is_capped_at_what_there_is(self):
        survival_BK = np.zeros((2, 3))
        survival_BK[1] = np.nan
        made = run(
            survival_BK,
            [True, True],
            [2, 8],
            [1.0, 1.0],
            ratios=(0.25, 1.0),
            objective="paper",
        )
        assert (made.tier, made.budget) == (1, 3)
        assert made.keep_B.tolist() == [3, 0]

    def test_paper_mode_needs_the_rows(self):
        made = run(PAIR_BK, [True, True], [2, 5], [1.0, 1.0], ratios=(0.5, 1.0))
        assert made.utility_R.tolist() == [-np.inf, -np.inf]
        assert (made.tier, made.budget) == (0, 0)


@pytest.mark.parametrize("objective", ["tokens", "paper"])
@pytest.mark.parametrize(
    "ratios", [None, (0.25, 0.5, 0.75, 1.0)], ids=["tiers", "paper"]
)
@pytest.mark.parametrize("backend", ["xla", "pallas_interpret"])
def test_matches_numpy_and_holds_the_invariants(objective, ratios, backend):
    rng = np.random.default_rng(0)
    for _ in range(40):
        survival_BK, active_B = random_batch(rng, batch=6, drafts=5)
        rows_R, cost_ms_R = random_tiers(rng, batch=6, drafts=5, tiers=4)
        batch = (survival_BK, active_B, rows_R, cost_ms_R)
        made = run(*batch, objective=objective, ratios=ratios, backend=backend)
        want = plan_numpy(*batch, objective=objective, ratios=ratios)
        np.testing.assert_array_equal(made.utility_R, want.utility_R)
        np.testing.assert_array_equal(made.gain_R, want.gain_R)
        np.testing.assert_array_equal(made.keep_B, want.keep_B)
        assert (made.tier, made.budget) == (want.tier, want.budget)
        np.testing.assert_allclose(made.gain, want.gain, rtol=1e-6)
        assert made.budget == 0 or active_B.sum() + made.budget <= rows_R[made.tier]
        assert made.keep_B.sum() == made.budget
        known_B = np.cumprod(~np.isnan(survival_BK), axis=1).sum(axis=1)
        assert (made.keep_B <= np.where(active_B, known_B, 0)).all()


def best_by_trying_all(survival_BK, active_B, rows_R, cost_ms_R):
    """The largest utility of any tier and any prefixes that fit it."""
    usable_BK = active_B[:, None] & ~np.isnan(survival_BK)
    most_B = np.cumprod(usable_BK, axis=1).sum(axis=1)
    active = active_B.sum()
    best = -np.inf
    for keep_B in itertools.product(*(range(most + 1) for most in most_B)):
        kept = zip(survival_BK, keep_B, strict=True)
        gain = sum(np.exp(row[:n]).sum() for row, n in kept)
        fits_R = active + sum(keep_B) <= rows_R
        best = max(best, *np.where(fits_R, (active + gain) / cost_ms_R, -np.inf))
    return best


@pytest.mark.parametrize(("batch", "drafts"), [(1, 3), (2, 3), (3, 3)])
def test_no_choice_of_prefixes_is_better(batch, drafts):
    rng = np.random.default_rng(1)
    for _ in range(30):
        survival_BK, active_B = random_batch(rng, batch, drafts)
        tiers = random_tiers(rng, batch, drafts, tiers=3)
        made = run(survival_BK, active_B, *tiers)
        best = best_by_trying_all(survival_BK, active_B, *tiers)
        np.testing.assert_allclose(made.utility_R[made.tier], best, rtol=1e-5)


def test_permuting_requests_permutes_the_plan():
    rng = np.random.default_rng(2)
    rows_R, cost_ms_R = [8, 20, 48], [2.0, 3.0, 6.0]
    for _ in range(10):
        survival_BK = logs(rng.uniform(0.1, 0.9, (8, 5)).cumprod(axis=1))
        active_B, order_B = rng.random(8) < 0.8, rng.permutation(8)
        made = run(survival_BK, active_B, rows_R, cost_ms_R)
        moved = run(survival_BK[order_B], active_B[order_B], rows_R, cost_ms_R)
        assert (moved.tier, moved.budget) == (made.tier, made.budget)
        np.testing.assert_array_equal(moved.keep_B, made.keep_B[order_B])


def test_keeping_everything_is_the_plan_without_a_cut():
    made = run(np.full((4, 15), -0.1), [True] * 4, [64], [1.0])
    assert made.keep_B.tolist() == [15] * 4


def test_published_costs_and_survivals_choose_half_the_rows():
    # 32 requests x 16 rows of Qwen3-8B on one H20: accepted tokens and step cost by
    # share of rows. They point to 50%, whatever the paper's own selector took.
    accepted = np.array([124.6, 190.8, 200.9, 201.2])
    cost_ms_R = np.array([29.8, 43.1, 56.6, 70.1])
    rows_R = np.array([128, 256, 384, 512])
    # Survivals of that total: equal within the rows that each wider tier adds.
    gains = np.diff(accepted, prepend=32)
    drafts = np.diff(rows_R, prepend=32)
    survival_N = np.repeat(gains / drafts, drafts)
    survival_BK = logs(survival_N.reshape(15, 32).T)
    made = run(survival_BK, [True] * 32, rows_R, cost_ms_R)
    np.testing.assert_allclose(made.utility_R, accepted / cost_ms_R, rtol=1e-5)
    assert (made.tier, made.budget) == (1, 224)
    assert made.keep_B.tolist() == [7] * 32


def test_the_plan_is_traced_once():
    traces = []

    @jax.jit
    def step(*inputs):
        traces.append(None)
        return plan(*inputs)

    inputs = (jnp.asarray(PAIR_BK), jnp.array([True, True]))
    for rows, cost in (([2, 8], [1.0, 2.0]), ([3, 5], [2.0, 1.0])):
        step(*inputs, jnp.array(rows, jnp.int32), jnp.array(cost))
    assert len(traces) == 1


class TestNumpy:
    def test_takes_plain_lists(self):
        made = plan_numpy([[-0.1, -0.2], [-3.0, -9.0]], [1, 1], [2, 4], [1.0, 1.5])
        assert (made.tier, made.budget) == (1, 2)
        assert made.keep_B.tolist() == [2, 0]

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"active_B": [True]}, r"\(2, 3\) and \(1,\)"),
            ({"log_survival_BK": [0.0, 0.0]}, r"log_survival_BK \[B, K\]"),
            ({"cost_ms_R": [1.0]}, "of one length"),
            ({"rows_R": [], "cost_ms_R": []}, "R >= 1"),
            ({"rows_R": [4, 4]}, "strictly rising"),
            ({"rows_R": [2.5, 4.5]}, "whole"),
            ({"rows_R": [0, 1]}, "2 requests are active"),
            ({"cost_ms_R": [1.0, np.nan]}, "measure the missing"),
            ({"cost_ms_R": [0.0, 1.0]}, "above 0 ms"),
            ({"objective": "speed"}, "objective"),
            ({"ratios": (0.5,)}, "2 ratios"),
            ({"ratios": (0.0, 1.0)}, "one per tier"),
        ],
    )
    def test_refuses_what_no_plan_can_be_made_from(self, change, message):
        inputs = {
            "log_survival_BK": PAIR_BK,
            "active_B": [True, True],
            "rows_R": [2, 8],
            "cost_ms_R": [1.0, 2.0],
        }
        # ValueError, or the type checker's error where tests run with one.
        with pytest.raises((ValueError, TypeError), match=message):
            plan_numpy(**(inputs | change))
