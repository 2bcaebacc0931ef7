"""Weights and how equal rates are, by hand."""

import numpy as np
import pytest

from dcut_jax.cut.fairness import Progress, jain_index, weights


def test_equal_is_priority_alone():
    got = weights("equal", [1.0, 4.0, 2.0], [9.0, 1.0, 3.0])
    assert got.dtype == np.float32
    assert got.tolist() == [0.25, 1.0, 0.5]
    assert weights("equal", [3.0, 3.0], [1.0, 2.0]).tolist() == [1.0, 1.0]


def test_proportional_is_priority_over_rate():
    assert weights("proportional", [1.0, 1.0, 2.0], [4.0, 1.0, 2.0]).tolist() == [
        0.25,
        1.0,
        1.0,
    ]


def test_no_requests_have_no_weights():
    assert weights("proportional", [], []).size == 0


@pytest.mark.parametrize(
    ("fairness", "priority", "rate", "message"),
    [
        ("equal", [0.0], [1.0], "above 0"),
        ("equal", [1.0], [0.0], "above 0"),
        ("equal", [float("nan")], [1.0], "above 0"),
        ("max-min", [1.0], [1.0], "choose equal or proportional"),
    ],
)
def test_senseless_ones_are_refused(fairness, priority, rate, message):
    with pytest.raises(ValueError, match=message):
        weights(fairness, priority, rate)


def test_a_rate_follows_what_steps_gave():
    progress = Progress()
    assert progress.rate == 1.0
    for _ in range(200):
        progress.add(3)
    assert progress.rate == pytest.approx(3.0, abs=0.01)


def test_jain():
    assert jain_index([2.0, 2.0, 2.0]) == pytest.approx(1.0)
    assert jain_index([1.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)


def test_no_weight_is_lost_beside_a_far_larger_one():
    got = weights("equal", [1e-300, 1.0], [1.0, 1.0])
    assert got[0] > 0
