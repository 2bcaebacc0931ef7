"""Sequential temperature scaling on chances that are known."""

import numpy as np
import pytest

from dcut_jax.cut.sts import (
    GRID,
    cross_fit,
    fit_temperatures,
    prefix_chance,
    prefix_error,
)

N, K = 60_000, 6
SCALE_K = np.array([2.0, 0.5, 2.0, 2.0, 0.5, 1.0])


def drawn(seed, scale_K=SCALE_K):
    """The truth's log-odds times a scale, and accepted lengths by the truth."""
    rng = np.random.default_rng(seed)
    truth_NK = rng.normal(1.5, 1.5, (N, K))
    accepted_NK = rng.random((N, K)) < 1 / (1 + np.exp(-truth_NK))
    accepted_N = np.cumprod(accepted_NK, axis=1).sum(axis=1)
    return truth_NK * scale_K, accepted_N


@pytest.fixture(scope="module")
def fitted():
    return fit_temperatures(*drawn(0))


def test_it_finds_the_scales(fitted):
    np.testing.assert_allclose(np.log2(fitted / SCALE_K), 0, atol=0.26)


def test_products_are_calibrated_on_texts_it_has_not_seen(fitted):
    logit_NK, accepted_N = drawn(1)
    before_K = prefix_error(logit_NK, accepted_N, np.ones(K))
    after_K = prefix_error(logit_NK, accepted_N, fitted)
    assert before_K.max() > 0.04
    assert after_K.max() < 0.015


def test_each_half_is_judged_with_temperatures_of_the_other():
    # Halves that ask for other temperatures: neither helps the other's chances.
    n = 8000
    (first_NK, first_N), (second_NK, second_N) = (
        (logit_NK[:n], accepted_N[:n]) for logit_NK, accepted_N in map(drawn, (0, 1))
    )
    second_NK = second_NK / SCALE_K**2
    logit_NK = np.concatenate([first_NK, second_NK])
    accepted_N = np.concatenate([first_N, second_N])
    half_N = np.arange(2 * n) >= n
    logit_NK[:100, 4:] = np.nan  # a hundred blocks of the first half end early
    found = cross_fit(logit_NK, accepted_N, half_N)
    assert found.drafts == (2 * n,) * 4 + (2 * n - 100,) * 2
    fits = [fit_temperatures(logit_NK[h], accepted_N[h]) for h in (~half_N, half_N)]
    errors = [
        prefix_error(logit_NK[h], accepted_N[h], t)
        for h, t in ((~half_N, fits[1]), (half_N, fits[0]))
    ]
    want = [np.average(pair, weights=[n, n]) for pair in np.transpose(errors)[:4]]
    np.testing.assert_allclose(found.after[:4], want)
    assert found.error_after > found.error_before > 0.02
    assert found.temperatures == tuple(fit_temperatures(logit_NK, accepted_N))

    # Halves alike: it helps.
    alike = cross_fit(first_NK, first_N, np.arange(n) % 2 == 1)
    assert alike.error_after < 0.025 < 0.04 < alike.error_before
    assert alike.error_before == pytest.approx(np.mean(alike.before))


def test_a_position_without_drafts_has_no_error():
    logit_NK = np.array([[1.0, np.nan], [2.0, np.nan], [0.0, np.nan]])
    found = cross_fit(logit_NK, np.array([1, 0, 1]), np.array([False, True, True]))
    assert (found.drafts, found.temperatures[1]) == ((3, 0), 1.0)
    assert np.isnan([found.before[1], found.after[1]]).all()
    assert found.error_before == found.before[0]
    for half_N in ([True] * 3, [False] * 3, [True]):
        with pytest.raises(ValueError, match="in two halves; found"):
            cross_fit(logit_NK, np.array([1, 0, 1]), np.array(half_N))


def test_order_within_a_position_is_kept(fitted):
    logit_NK, _ = drawn(1)
    own_NK = 1 / (1 + np.exp(-logit_NK / fitted))
    for k in range(K):
        order_N = np.argsort(logit_NK[:, k], kind="stable")
        assert (np.diff(own_NK[order_N, k]) >= 0).all()


def test_positions_are_fitted_one_after_another(fitted):
    # What comes later does not show in what was fitted before.
    logit_NK, accepted_N = drawn(0)
    early = fit_temperatures(logit_NK[:, :3], np.minimum(accepted_N, 3))
    np.testing.assert_array_equal(early, fitted[:3])
    other_NK = logit_NK.copy()
    other_NK[:, 0] *= 4
    assert fit_temperatures(other_NK, accepted_N)[0] > 2 * fitted[0]


def test_a_calibrated_head_is_left_nearly_alone():
    fitted = fit_temperatures(*drawn(2, np.ones(K)))
    np.testing.assert_allclose(np.log2(fitted), 0, atol=0.26)


def test_among_equals_the_nearest_to_one():
    # Of log-odds 0 every temperature makes the same chance.
    accepted_N = np.array([0, 1, 2, 1])
    np.testing.assert_array_equal(
        fit_temperatures(np.zeros((4, 2)), accepted_N), [1, 1]
    )
    got = fit_temperatures(np.zeros((4, 2)), accepted_N, np.array([8.0, 2.0, 0.25]))
    np.testing.assert_array_equal(got, [2, 2])
    assert GRID[len(GRID) // 2] == 1


def test_by_hand():
    logit_NK = np.log([[4.0, 1.0], [4.0, 1.0], [4.0, 1.0], [4.0, 1.0]])
    accepted_N = np.array([2, 1, 0, 1])
    chance_NK = prefix_chance(logit_NK, np.array([2.0, 1.0]))
    np.testing.assert_allclose(chance_NK, [[2 / 3, 1 / 3]] * 4)
    error_K = prefix_error(logit_NK, accepted_N, np.array([2.0, 1.0]))
    np.testing.assert_allclose(error_K, [3 / 4 - 2 / 3, 1 / 3 - 1 / 4])
    # 3 to 1 in the first position: log 4 / log 3 makes that of 4 to 1.
    want = np.log(4) / np.log(3)
    got = fit_temperatures(logit_NK, accepted_N, np.array([0.5, want, 1.0, 3.0]))
    assert got[0] == want


def test_drafts_that_were_not_verified_do_not_count():
    logit_NK, accepted_N = drawn(3)
    some = slice(0, N // 2)
    want = fit_temperatures(logit_NK[some], accepted_N[some])
    logit_NK[N // 2 :] = np.nan
    np.testing.assert_array_equal(fit_temperatures(logit_NK, accepted_N), want)
    logit_NK[:, 4:] = np.nan
    got = fit_temperatures(logit_NK, accepted_N)
    np.testing.assert_array_equal(got, [*want[:4], 1, 1])
    error_K = prefix_error(logit_NK, accepted_N, got)
    np.testing.assert_array_equal(np.isnan(error_K), np.arange(K) >= 4)


def test_extreme_log_odds():
    logit_NK = np.array([[1e4, -1e4], [np.inf, -np.inf]])
    chance_NK = prefix_chance(logit_NK, np.ones(2))
    np.testing.assert_array_equal(chance_NK, [[1, 0], [1, 0]])
    assert np.isfinite(fit_temperatures(logit_NK, np.array([1, 1]))).all()


@pytest.mark.parametrize(
    ("logit", "accepted", "grid", "message"),
    [
        (np.zeros(3), np.zeros(3, int), GRID, r"log-odds \[N, K\].*found \[3\]"),
        (np.zeros((3, 2)), np.zeros(2, int), GRID, r"found \[3, 2\] and \[2\]"),
        (np.zeros((2, 2)), np.array([0, 3]), GRID, r"must lie in 0\.\.2; found 0\.\.3"),
        (np.zeros((2, 2)), np.array([0, 1]), np.zeros(2), "temperatures above 0"),
        (np.zeros((2, 2)), np.array([0, 1]), np.array([]), "temperatures above 0"),
    ],
)
def test_refused(logit, accepted, grid, message):
    with pytest.raises(ValueError, match=message):
        fit_temperatures(logit, accepted, grid)
