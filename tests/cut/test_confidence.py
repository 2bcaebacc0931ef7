"""top1 against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcut_jax.cut.confidence import top1


def by_hand(logits: np.ndarray):
    x = logits.astype(np.float64)
    token = x.argmax(axis=-1)
    log_total = np.log(np.exp(x - x.max(axis=-1, keepdims=True)).sum(axis=-1))
    return token, -log_total


def test_hand_computed():
    got = top1(jnp.log(jnp.array([[0.2, 0.5, 0.3], [0.7, 0.1, 0.2]])))
    assert got.token.tolist() == [1, 0]
    np.testing.assert_allclose(got.logp, np.log([0.5, 0.7]), rtol=1e-6)


@pytest.mark.parametrize("shape", [(9,), (3, 1000), (2, 3, 65)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_matches_numpy_for_any_rows_and_dtype(shape, dtype):
    logits = 5 * jax.random.normal(jax.random.key(0), shape, dtype)
    got = jax.jit(top1)(logits)
    token, logp = by_hand(np.asarray(logits))
    assert got.token.dtype == jnp.int32
    assert got.logp.dtype == jnp.float32
    np.testing.assert_array_equal(got.token, token)
    np.testing.assert_allclose(got.logp, logp, rtol=1e-5, atol=1e-6)


def test_ties_go_to_the_lowest_index():
    got = top1(jnp.array([[0.0, 2.0, 2.0, 2.0], [1.0, 1.0, 1.0, 1.0]]))
    assert got.token.tolist() == [1, 0]
    np.testing.assert_allclose(got.logp[1], -np.log(4), rtol=1e-6)


def test_near_certainty_survives_bfloat16():
    logits = jnp.array([[8.0, 0.0, 0.0]], jnp.bfloat16)
    np.testing.assert_allclose(
        top1(logits).logp, [-np.log1p(2 * np.exp(-8))], rtol=1e-4
    )


def test_large_logits_do_not_overflow():
    np.testing.assert_allclose(
        top1(jnp.array([[3e38, 0.0], [-3e38, -3e38]])).logp, [0, -np.log(2)], rtol=1e-6
    )


@pytest.mark.parametrize(
    "row",
    [[0.0, np.nan, 1.0], [np.nan] * 3, [np.inf, 0.0, 1.0], [-np.inf] * 3],
    ids=["a_nan", "all_nan", "infinite", "nothing_possible"],
)
def test_a_row_without_a_distribution_has_no_confidence(row):
    got = top1(jnp.array([row, [0.0, 0.0, 1.0]], jnp.float32))
    assert jnp.isnan(got.logp).tolist() == [True, False]
    assert 0 <= got.token[0] < 3
    assert got.token[1] == 2


def test_impossible_words_are_allowed():
    got = top1(jnp.array([[-np.inf, 0.0, 0.0]]))
    assert got.token.tolist() == [1]
    np.testing.assert_allclose(got.logp, [-np.log(2)], rtol=1e-6)
