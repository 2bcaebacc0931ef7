"""Shares of requests between replicas."""

import math
import random
from collections import Counter

import pytest

from dcut_jax.serve.routing import weighted_order, weights


@pytest.mark.parametrize(
    ("rates", "want"),
    [
        ([10.0, 30.0], [10.0, 30.0]),
        ([10.0, None, 30.0], [10.0, 20.0, 30.0]),
        ([None, None], [1.0, 1.0]),
        ([math.nan, 5.0, 0.0, -1.0], [5.0, 5.0, 5.0, 5.0]),
    ],
)
def test_who_says_nothing_counts_as_usual(rates, want):
    assert weights(rates) == want


def test_shares_are_in_proportion():
    draw = random.Random(0).random
    orders = [weighted_order([1.0, 3.0, 6.0], draw) for _ in range(20_000)]
    first = Counter(order[0] for order in orders)
    for i, share in enumerate((0.1, 0.3, 0.6)):
        assert first[i] / len(orders) == pytest.approx(share, abs=0.01)
    # Behind the heaviest, the other two in proportion again.
    second = Counter(order[1] for order in orders if order[0] == 2)
    assert second[1] / first[2] == pytest.approx(0.75, abs=0.01)
    assert all(sorted(order) == [0, 1, 2] for order in orders)
