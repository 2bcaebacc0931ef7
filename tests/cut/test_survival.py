"""log_survival: running sums that fail closed."""

import jax
import jax.numpy as jnp
import numpy as np

from dcut_jax.cut.survival import log_survival

NAN, INF = np.nan, np.inf


def test_hand_computed():
    confidence_BK = jnp.array([[0.9, 0.5, 0.1], [1.0, 1.0, 0.25]])
    got = jnp.exp(log_survival(jnp.log(confidence_BK)))
    np.testing.assert_allclose(got, [[0.9, 0.45, 0.045], [1, 1, 0.25]], rtol=1e-6)


def test_an_unknown_confidence_closes_the_rest_of_its_row_only():
    logp_BK = jnp.array([[-1.0, NAN, -1.0], [NAN, 0.0, 0.0], [-1.0, -1.0, -1.0]])
    want = [[-1, NAN, NAN], [NAN, NAN, NAN], [-1, -2, -3]]
    np.testing.assert_array_equal(log_survival(logp_BK), want)


def test_impossible_drafts_stay_selectable():
    logp_BK = jnp.array([[-1.0, -INF, -1.0], [-INF, -INF, NAN]])
    want = [[-1, -INF, -INF], [-INF, -INF, NAN]]
    np.testing.assert_array_equal(log_survival(logp_BK), want)


def test_a_confidence_above_one_counts_as_one():
    got = log_survival(jnp.array([[1e-7, -1.0, 0.5, INF]]))
    np.testing.assert_array_equal(got, [[0, -1, -1, -1]])


def test_half_precision_is_summed_in_float32():
    got = log_survival(jnp.full((1, 15), -0.01, jnp.bfloat16))
    step = np.float32(jnp.bfloat16(-0.01))
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got[0], np.cumsum(np.full(15, step)))


def test_rows_never_rise_and_match_numpy_bit_for_bit():
    logp_BK = jnp.log(jax.random.uniform(jax.random.key(0), (256, 31), minval=1e-4))
    got_BK = np.asarray(jax.jit(log_survival)(logp_BK))
    assert (np.diff(got_BK, axis=1) <= 0).all()
    np.testing.assert_array_equal(got_BK, np.cumsum(np.asarray(logp_BK), axis=1))
