"""Distinct experts: the formula against draws, its limits, and its fit."""

import numpy as np
import pytest

from dcut_jax.cost.experts import EVEN, distinct_experts, fit_concentration


@pytest.mark.parametrize("rows", [1, 2, 8, 40])
def test_even_routing_is_what_draws_give(rows):
    rng = np.random.default_rng(0)
    E, k = 16, 3
    found = [
        len({e for _ in range(rows) for e in rng.choice(E, k, replace=False)})
        for _ in range(2000)
    ]
    assert distinct_experts(E, k, rows) == pytest.approx(np.mean(found), rel=0.02)


def test_uneven_routing_is_what_draws_give():
    """Experts with chances of their own, drawn anew for every trial."""
    rng = np.random.default_rng(1)
    E, share, c, rows = 64, 0.125, 6.0, 24
    found = []
    for _ in range(400):
        chance_E = rng.beta(c * share, c * (1 - share), E)
        asked = rng.random((rows, E)) < chance_E
        found.append(asked.any(axis=0).sum())
    assert distinct_experts(E, 8, rows, c) == pytest.approx(np.mean(found), rel=0.02)


@pytest.mark.parametrize("c", [EVEN, 1e6, 300.0, 3.0])
def test_one_row_touches_its_own_and_more_rows_touch_more(c):
    seen = [distinct_experts(128, 8, rows, c) for rows in range(200)]
    assert seen[0] == 0
    assert seen[1] == pytest.approx(8)
    assert (np.diff(seen) > 0).all()
    assert (np.diff(seen, 2) < 1e-9).all()  # each row opens fewer than the one before
    assert seen[-1] < 128


def test_the_formula_without_concentration_is_its_limit():
    even = distinct_experts(128, 8, 20)
    assert distinct_experts(128, 8, 20, 9e4) == pytest.approx(even, rel=1e-3)
    assert even == pytest.approx(128 * (1 - (1 - 8 / 128) ** 20))


def test_all_experts_are_asked_for_by_every_row():
    assert distinct_experts(4, 4, 1) == 4


@pytest.mark.parametrize("c", [0.5, 20.0, 2000.0, EVEN])
def test_a_concentration_is_found_again(c):
    seen = [(rows, distinct_experts(64, 4, rows, c)) for rows in (2, 8, 32, 128)]
    assert fit_concentration(64, 4, seen) == pytest.approx(c, rel=1e-3)


def test_single_rows_tell_nothing():
    with pytest.raises(ValueError, match="two rows and more"):
        fit_concentration(64, 4, [(1, 4.0)])
