"""Calibration: what counts as a label, planted lines recovered, and odd inputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcut_jax.cut import calibration
from dcut_jax.cut.calibration import (
    Reliability,
    auc,
    calibrate,
    ece,
    identity,
    learn,
    no_reliability,
    observe,
    table,
)

NAN, INF = np.nan, np.inf
K = 15

calibrate_jit = jax.jit(calibrate)
learn_jit = jax.jit(learn)
observe_jit = jax.jit(observe)


def ints(*values):
    return jnp.array(values, jnp.int32)


def logs(confidence):
    with np.errstate(divide="ignore"):
        return np.log(np.asarray(confidence, np.float32))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def heeded(cal):
    """With the same lines, as if enough labels had taught them."""
    labels = jnp.maximum(cal.pooled.labels, calibration.ENOUGH_LABELS)
    return cal.replace(pooled=cal.pooled.replace(labels=labels))


def line(shift, shift_step, slope):
    """A planted truth: a line for each of K positions."""
    return shift + shift_step * np.arange(K), np.full(K, slope)


OVERCONFIDENT = line(-0.6, -0.08, 0.7)
UNDERCONFIDENT = line(0.8, 0.05, 1.1)
HARD = line(-2.0, -0.1, 0.4)


class World:
    """Drafts whose acceptance follows a planted line, and plans that cut by score."""

    def __init__(self, batch, seed, bar=0.3):
        self.batch, self.bar = batch, bar
        self.rng = np.random.default_rng(seed)
        self.cal = identity(K)

    def draw(self, truth, batch):
        """Log-confidences, and the accepted prefix if all were verified."""
        odds_BK = self.rng.normal(2.5, 1.7, (batch, K)) - 0.1 * np.arange(K)
        odds_BK += self.rng.normal(0, 1, (batch, 1))  # easy and hard texts
        shift_K, slope_K = truth
        yes_BK = self.rng.random((batch, K)) < sigmoid(shift_K + slope_K * odds_BK)
        accepted_B = np.cumprod(yes_BK, axis=1).sum(axis=1)
        return -np.logaddexp(0, -odds_BK).astype(np.float32), accepted_B

    def survival(self, logp_BK):
        return np.exp(np.cumsum(calibrate_jit(self.cal, logp_BK), axis=1))

    def step(self, truth):
        """One step's raw log-confidences, cut and outcome."""
        logp_BK, accepted_B = self.draw(truth, self.batch)
        keep_B = (self.survival(logp_BK) >= self.bar).sum(axis=1)
        accepted_B = np.minimum(accepted_B, keep_B)
        return logp_BK, keep_B.astype(np.int32), accepted_B.astype(np.int32)

    def run(self, truth, steps):
        for _ in range(steps):
            self.cal = learn_jit(self.cal, *self.step(truth))
        return self

    def errors(self, truth, batch=8000):
        """ECE of raw and of calibrated survival, on fresh drafts verified in full."""
        logp_BK, accepted_B = self.draw(truth, batch)
        raw_BK = np.exp(np.cumsum(logp_BK, axis=1))
        keep_B = np.full(batch, K)
        return [
            ece(jax.device_get(observe_jit(no_reliability(), s, keep_B, accepted_B)))
            for s in (raw_BK, self.survival(logp_BK))
        ]


def one_label_each(logp_BK, yes_BK, seen_BK):
    """The same drafts as requests of one label: `learn` with any labels one likes."""
    owner_N, index_N = np.nonzero(seen_BK)
    logp_NK = np.full((yes_BK.size, K), NAN, np.float32)
    logp_NK[np.arange(owner_N.size), index_N] = logp_BK[owner_N, index_N]
    keep_N, accepted_N = np.zeros((2, yes_BK.size), np.int32)
    keep_N[: owner_N.size] = index_N + 1
    accepted_N[: owner_N.size] = index_N + yes_BK[owner_N, index_N]
    return logp_NK, keep_N, accepted_N


class TestByHand:
    def test_one_rejection_at_even_odds(self):
        # p = 1/2 and weight 1/4: a pull of -1/2 against the priors' precision.
        cal = learn_jit(identity(1), logs([[0.5]]), ints(1), ints(0))
        pool = -0.5 / (0.25 + calibration._AROUND_IDENTITY.shift)
        own = pool - 0.5 / (0.25 + calibration._AROUND_POOL.shift)
        np.testing.assert_allclose(cal.pooled_line.shift, pool, rtol=1e-6)
        np.testing.assert_allclose(cal.own_line.shift, [own], rtol=1e-6)
        # At odds of 0 nothing is learned of the slope.
        np.testing.assert_allclose(cal.own_line.slope, [1], rtol=1e-6)
        # One says too little to be heeded.
        np.testing.assert_array_equal(calibrate_jit(cal, logs([[0.5]])), logs([[0.5]]))
        got = calibrate_jit(heeded(cal), logs([[0.5]]))
        np.testing.assert_allclose(got, [[np.log(sigmoid(own))]], rtol=1e-6)

    def test_a_label_is_where_the_draft_was_verified_and_reached(self):
        cal = learn_jit(
            identity(4),
            logs(np.full((4, 4), 0.5)),
            keep_B=ints(4, 2, 0, 3),
            accepted_B=ints(1, 2, 0, 0),
        )
        # Request 0 shows drafts 1 and 2, request 1 both its own, request 3 its first.
        np.testing.assert_array_equal(cal.own.labels, [3, 2, 0, 0])
        assert cal.pooled.labels == 5
        np.testing.assert_allclose(cal.own.pull_a, [0.5 + 0.5 - 0.5, 0, 0, 0])

    def test_log_odds(self):
        logp = logs([0.5, 0.9, 1 / (1 + np.exp(6)), sigmoid(9.0), 0, 1, NAN])
        want = [0, np.log(9), -6, 8.25, -10.25, 10.25, NAN]
        np.testing.assert_allclose(
            jax.jit(calibration.odds)(logp), want, rtol=2e-4, atol=1e-6
        )

    def test_a_position_forgets_only_for_labels_of_its_own(self):
        logp_BK = logs(np.full((4, 4), 0.5))
        first = learn_jit(identity(4), logp_BK, ints(4, 4, 4, 4), ints(1, 1, 1, 1))
        then = learn_jit(first, logp_BK, ints(1, 1, 0, 0), ints(1, 0, 0, 0))
        fade = 2 / (calibration._MEMORY_LABELS + 2 * calibration._MEMORY_STEPS)
        np.testing.assert_allclose(then.own.labels, [4 * (1 - fade) + 2, 4, 0, 0])
        for before, after in zip(
            jax.tree.leaves(first.own), jax.tree.leaves(then.own), strict=True
        ):
            np.testing.assert_array_equal(before[1:], after[1:])


class TestPlanted:
    def test_lines_are_recovered_although_most_labels_are_missing(self):
        world = World(batch=64, seed=0, bar=0.1).run(OVERCONFIDENT, 300)
        shift_K, slope_K = OVERCONFIDENT
        got = world.cal.own_line
        np.testing.assert_allclose(got.shift[:6], shift_K[:6], atol=0.3)
        np.testing.assert_allclose(got.slope[:6], slope_K[:6], atol=0.12)
        # What counts is the chance, also where labels are few.
        for odds in (0, 2, 4):
            want_K = sigmoid(shift_K + slope_K * odds)
            got_K = sigmoid(np.asarray(got.shift) + np.asarray(got.slope) * odds)
            np.testing.assert_allclose(got_K[:10], want_K[:10], atol=0.1)

    def test_counting_the_unreached_as_rejected_would_mislead(self):
        """The control: why labels need the chain to reach them."""
        fair, naive, world = identity(K), identity(K), World(8, seed=1, bar=0.1)
        index_K = np.arange(K)
        for _ in range(200):
            logp_BK, keep_B, accepted_B = world.step(OVERCONFIDENT)
            verified_BK = index_K < keep_B[:, None]
            reached_BK = index_K <= accepted_B[:, None]
            yes_BK = index_K < accepted_B[:, None]
            labels = one_label_each(logp_BK, yes_BK, verified_BK & reached_BK)
            fair = learn_jit(fair, *labels)
            naive = learn_jit(naive, *one_label_each(logp_BK, yes_BK, verified_BK))
            world.cal = learn_jit(world.cal, logp_BK, keep_B, accepted_B)
        # Handing over labels one by one is the same thing.
        np.testing.assert_allclose(
            fair.own_line.shift, world.cal.own_line.shift, atol=1e-3
        )
        shift_K, slope_K = OVERCONFIDENT
        third = slice(2, 5)  # 3rd to 5th draft at a confidence of 0.88
        want_K = sigmoid(shift_K + slope_K * 2)[third]
        for cal, low, high in ((fair, -0.1, 0.1), (naive, -0.9, -0.2)):
            got = cal.own_line
            off_K = sigmoid(np.asarray(got.shift + got.slope * 2))[third] - want_K
            assert (low < off_K).all(), off_K
            assert (off_K < high).all(), off_K

    @pytest.mark.parametrize("truth", [OVERCONFIDENT, UNDERCONFIDENT, HARD])
    def test_survivals_are_honest_after_200_steps_at_batch_8(self, truth):
        world = World(batch=8, seed=2).run(truth, 200)
        raw, calibrated = world.errors(truth)
        assert raw > 0.1
        assert calibrated <= 0.03

    @pytest.mark.parametrize(("batch", "most"), [(1, 0.06), (8, 0.03), (64, 0.03)])
    @pytest.mark.parametrize(
        ("before", "after"),
        [(OVERCONFIDENT, UNDERCONFIDENT), (UNDERCONFIDENT, OVERCONFIDENT)],
        ids=["to_easy", "to_hard"],
    )
    def test_another_kind_of_text_is_learned_within_200_steps(
        self, batch, most, before, after
    ):
        stale, learned = [], []
        for seed in range(3):
            world = World(batch, seed, bar=0.15 if batch == 1 else 0.3)
            stale.append(world.run(before, 200).errors(after)[1])
            learned.append(world.run(after, 200).errors(after)[1])
        assert min(stale) > 0.15
        assert np.mean(learned) <= most

    def test_honest_confidences_stay_honest(self):
        truth = line(0, 0, 1)
        world = World(batch=8, seed=5).run(truth, 200)
        raw, calibrated = world.errors(truth)
        assert raw < 0.02
        assert calibrated < 0.03


class TestWhatStays:
    def test_confidences_themselves_until_there_is_a_label(self):
        logp_BK = logs([[0.3, 1.0, 0.0, NAN], [1 - 1e-7, 1e-30, 0.5, NAN]])
        cal = identity(4)
        nothing = learn_jit(cal, logp_BK, ints(0, 0), ints(0, 0))
        for known in (cal, nothing):
            got_BK = np.asarray(calibrate_jit(known, logp_BK))
            assert got_BK.dtype == np.float32
            np.testing.assert_array_equal(got_BK.view(np.int32), logp_BK.view(np.int32))

    def test_confidences_themselves_until_there_are_enough_labels(self):
        logp_BK = logs(np.full((calibration.ENOUGH_LABELS - 1, 2), 0.7))
        ones_B = np.ones(len(logp_BK), np.int32)
        few = learn_jit(identity(2), logp_BK, ones_B, 0 * ones_B)
        np.testing.assert_array_equal(calibrate_jit(few, logp_BK), logp_BK)
        more = identity(2)
        for _ in range(2):
            more = learn_jit(more, logp_BK, ones_B, 0 * ones_B)
        assert (calibrate_jit(more, logp_BK)[:, 0] < logp_BK[:, 0] - 0.5).all()

    def test_everything_in_a_step_without_labels(self):
        world = World(batch=8, seed=6).run(OVERCONFIDENT, 20)
        logp_BK, _, _ = world.step(OVERCONFIDENT)
        zero_B = jnp.zeros(8, jnp.int32)
        after = learn_jit(world.cal, logp_BK, zero_B, zero_B)
        jax.tree.map(np.testing.assert_array_equal, after, world.cal)

    def test_nan_padding(self):
        world = World(batch=8, seed=7).run(OVERCONFIDENT, 20)
        logp_BK, keep_B, accepted_B = world.step(OVERCONFIDENT)
        cut_BK = np.where(np.arange(K) < 7, logp_BK, NAN).astype(np.float32)
        got_BK = np.asarray(calibrate_jit(world.cal, cut_BK))
        assert np.isnan(got_BK[:, 7:]).all()
        np.testing.assert_array_equal(
            got_BK[:, :7], np.asarray(calibrate_jit(world.cal, logp_BK))[:, :7]
        )
        keep_B, accepted_B = np.minimum(keep_B, 7), np.minimum(accepted_B, 7)
        padded = learn_jit(world.cal, cut_BK, keep_B, accepted_B)
        whole = learn_jit(world.cal, logp_BK, keep_B, accepted_B)
        jax.tree.map(np.testing.assert_array_equal, padded, whole)

    def test_the_order_of_confidences_within_a_position(self):
        """Even where the surer drafts are the ones that fail."""
        world = World(batch=8, seed=8, bar=0.0).run(line(0, 0, -1.5), 60)
        assert (np.asarray(world.cal.own_line.slope) >= 0.1).all()
        logp_N = np.sort(np.append(logs([0, 1e-6, 0.9999, 1 - 1e-6, 1]), -3.0))
        logp_NK = np.repeat(logp_N[:, None], K, axis=1)
        assert (np.diff(calibrate_jit(world.cal, logp_NK), axis=0) > 0).all()

    def test_the_order_of_requests_does_not_matter(self):
        one, other = World(batch=8, seed=9), World(batch=8, seed=9)
        rng = np.random.default_rng(0)
        for _ in range(50):
            step = one.step(UNDERCONFIDENT)
            order_B = rng.permutation(8)
            one.cal = learn_jit(one.cal, *step)
            other.cal = learn_jit(other.cal, *(x[order_B] for x in step))
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3),
            one.cal,
            other.cal,
        )


EXTREME = st.sampled_from([0.0, -0.0, -1e-30, -1e-7, -1e-3, -1.0, -30.0, -INF, NAN])
BATCH, DRAFTS = 4, 3


@st.composite
def steps(draw):
    """Steps of the oddest confidences, each repeated."""
    logp_BK = np.array(
        draw(st.lists(EXTREME, min_size=BATCH * DRAFTS, max_size=BATCH * DRAFTS)),
        np.float32,
    ).reshape(BATCH, DRAFTS)
    counts = st.lists(st.integers(0, DRAFTS), min_size=BATCH, max_size=BATCH)
    keep_B = np.array(draw(counts), np.int32)
    accepted_B = np.minimum(np.array(draw(counts), np.int32), keep_B)
    return logp_BK, keep_B, accepted_B, draw(st.sampled_from([1, 3, 40]))


class TestOddInputs:
    @settings(max_examples=60, deadline=None)
    @given(st.lists(steps(), min_size=1, max_size=4))
    def test_all_stays_finite(self, sequence):
        cal = identity(DRAFTS)
        for logp_BK, keep_B, accepted_B, times in sequence:
            for _ in range(times):
                cal = learn_jit(cal, logp_BK, keep_B, accepted_B)
        for leaf in jax.tree.leaves(cal):
            assert np.isfinite(leaf).all()
        assert (np.asarray(cal.own_line.slope) >= np.float32(0.1)).all()
        logp_BK = sequence[0][0]
        got_BK = np.asarray(calibrate_jit(cal, logp_BK))
        np.testing.assert_array_equal(np.isnan(got_BK), np.isnan(logp_BK))
        known_BK = ~np.isnan(got_BK)
        assert (got_BK[known_BK] <= 0).all()
        if cal.pooled.labels > 0:
            learned_BK = np.asarray(calibrate_jit(heeded(cal), logp_BK))
            assert np.isfinite(learned_BK[known_BK]).all()

    @pytest.mark.parametrize("confidence", [0.0, 1e-4, 0.5, 0.9999, 1.0])
    @pytest.mark.parametrize("accepted", [0, K])
    def test_one_confidence_and_one_outcome_forever(self, confidence, accepted):
        """All labels in one place leave shift and slope undetermined."""
        batch = 64
        logp_BK = logs(np.full((batch, K), confidence))
        keep_B = np.full(batch, K, np.int32)
        accepted_B = np.full(batch, accepted, np.int32)
        cal = identity(K)
        for _ in range(300):
            cal = learn_jit(cal, logp_BK, keep_B, accepted_B)
        p_K = np.exp(calibrate_jit(cal, logp_BK[:1])[0])
        assert abs(p_K[0] - (accepted > 0)) < 0.02

    def test_a_batch_of_surprises_does_not_throw_the_line(self):
        """64 rejections where 0.99 was sure: Newton's own step would be -100."""
        logp_BK = logs(np.full((64, 1), 0.99))
        keep_B, zero_B = np.ones(64, np.int32), np.zeros(64, np.int32)
        cal = learn_jit(identity(1), logp_BK, keep_B, zero_B)
        (logp,) = np.asarray(calibrate_jit(cal, logp_BK[:1])[0])
        assert sigmoid(-5) < np.exp(logp) < 0.6
        rng = np.random.default_rng(0)
        for _ in range(30):
            yes_B = (rng.random(64) < 0.8).astype(np.int32)
            cal = learn_jit(cal, logp_BK, keep_B, yes_B)
        assert abs(np.exp(calibrate_jit(cal, logp_BK)[0, 0]) - 0.8) < 0.1

    def test_rounded_sums_cannot_turn_a_slope_around(self):
        """A little rounding, and the determinant of the sums alone is below 0."""
        sums = {"info_aa": 1e7, "info_ab": 8.0001e7, "info_bb": 6.4e8}
        pulls = {"pull_a": 1e3, "pull_b": 9e3}
        values = {k: jnp.float32(v) for k, v in (sums | pulls).items()}
        evidence = calibration.Evidence(labels=jnp.float32(1), **values)
        base = identity(1).pooled_line
        got = calibration._fit(evidence, base, calibration._AROUND_POOL)
        assert got.slope > 1

    def test_half_precision_confidences(self):
        logp_BK = jnp.full((2, 3), -0.5, jnp.bfloat16)
        cal = learn_jit(identity(3), logp_BK, ints(3, 1), ints(1, 1))
        assert calibrate_jit(cal, logp_BK).dtype == jnp.float32
        assert calibrate_jit(identity(3), logp_BK).dtype == jnp.float32


def test_compiled_once_and_donated():
    traces = []

    def step(cal, rel, logp_BK, keep_B, accepted_B):
        traces.append(1)
        survival_BK = jnp.exp(jnp.cumsum(calibrate(cal, logp_BK), axis=1))
        rel = observe(rel, survival_BK, keep_B, accepted_B)
        return learn(cal, logp_BK, keep_B, accepted_B), rel

    compiled = jax.jit(step, donate_argnums=(0, 1))
    state = identity(K), no_reliability()
    shapes = jax.eval_shape(lambda: state)
    world = World(batch=8, seed=10)
    with jax.transfer_guard_device_to_host("disallow"):
        for _ in range(3):
            state = compiled(*state, *map(jnp.asarray, world.step(HARD)))
    assert len(traces) == 1
    assert jax.eval_shape(lambda: state) == shapes


class TestReliability:
    def test_by_hand(self):
        survival_BK = jnp.array([[0.95, 0.5, 0.45], [0.93, 0.11, NAN], [1.0, 0.0, 0.2]])
        rel = observe_jit(no_reliability(), survival_BK, ints(3, 2, 0), ints(1, 0, 0))
        rel = observe_jit(rel, survival_BK, ints(0, 3, 2), ints(0, 1, 1))
        rows = table(jax.device_get(rel))
        assert [row.drafts for row in rows] == [1, 2, 0, 0, 1, 1, 0, 0, 0, 4]
        top = rows[-1]
        assert (top.low, top.high) == (0.9, 1.0)
        np.testing.assert_allclose(top.predicted, (0.95 + 0.93 + 0.93 + 1) / 4)
        np.testing.assert_allclose(top.survived, 3 / 4)
        assert np.isnan(rows[2].predicted)
        gaps = 0.0 + 2 * 0.11 + 0.45 + 0.5 + 4 * (3.81 / 4 - 3 / 4)
        np.testing.assert_allclose(ece(rel), gaps / 9, rtol=1e-6)

    def test_a_draft_behind_a_rejected_one_counts_as_failed(self):
        survival_BK = jnp.array([[0.9, 0.7, 0.5]])
        rel = observe_jit(no_reliability(), survival_BK, ints(3), ints(0))
        assert (int(rel.count_X.sum()), int(rel.survived_X.sum())) == (3, 0)

    def test_auc_is_the_share_of_pairs_in_order(self):
        rng = np.random.default_rng(0)
        survival_BK = rng.random((40, 6)).astype(np.float32)
        accepted_B = rng.integers(0, 7, 40).astype(np.int32)
        keep_B = np.full(40, 6, np.int32)
        rel = observe_jit(no_reliability(), survival_BK, keep_B, accepted_B)
        bin_N = np.floor(survival_BK * 50).ravel()
        yes_N = (np.arange(6) < accepted_B[:, None]).ravel()
        sure, unsure = bin_N[yes_N][:, None], bin_N[~yes_N][None]
        want = np.mean((sure > unsure) + 0.5 * (sure == unsure))
        np.testing.assert_allclose(auc(jax.device_get(rel)), want, rtol=1e-12)

    def test_of_nothing_there_is_no_error_and_no_order(self):
        assert np.isnan(ece(no_reliability()))
        assert np.isnan(auc(no_reliability()))
        rel = observe_jit(no_reliability(), jnp.array([[0.5]]), ints(1), ints(1))
        assert np.isnan(auc(rel))

    def test_rows_must_divide_the_bins(self):
        with pytest.raises(ValueError, match="divide the 50 bins; found 7"):
            table(no_reliability(), rows=7)

    def test_numbers_of_a_long_run_are_not_rounded(self):
        many = Reliability(
            count_X=jnp.full(50, 2**24, jnp.int32),
            predicted_X=jnp.zeros(50),
            survived_X=jnp.full(50, 2**24, jnp.int32),
        )
        rel = observe_jit(many, jnp.array([[0.5]]), ints(1), ints(1))
        assert int(rel.count_X[25]) == int(rel.survived_X[25]) == 2**24 + 1
