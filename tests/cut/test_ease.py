"""Ease: what few steps say of a request, and of those that run together."""

import numpy as np
import pytest

from dcut_jax.cut.ease import Ease, batch_ease


def after(steps, accepted, expected=0.65):
    ease = Ease()
    for _ in range(steps):
        ease.add(accepted, expected)
    return ease


def test_a_text_that_turns_hard_is_seen_to():
    """What it once accepted is forgotten, not outweighed."""
    turned = after(2000, 1.4)
    for _ in range(800):
        turned.add(0.3, 0.65)
    assert batch_ease([turned]) < 0.7


def test_nobody_is_as_easy_as_any():
    assert batch_ease([]) == 1.0


def test_it_comes_to_what_a_request_shows():
    assert batch_ease([after(2000, 0.3)]) == pytest.approx(0.3 / 0.65, rel=0.03)
    assert batch_ease([after(2000, 1.4)]) == pytest.approx(1.4 / 0.65, rel=0.03)


def test_little_evidence_does_not_lead_far():
    hard = [batch_ease([after(n, 0.0)]) for n in (0, 1, 3, 10, 30)]
    assert hard == sorted(hard, reverse=True)
    assert hard[1] > 0.9
    assert hard[-1] < 0.25


def test_what_is_unknown_is_worth_a_look_the_more_the_fewer_run():
    fresh = [batch_ease([Ease()] * count) for count in (1, 4, 32, 256)]
    assert fresh == sorted(fresh, reverse=True)
    assert 1.2 < fresh[0] < 1.4
    assert fresh[-1] == 1.0


def test_easy_and_hard_ones_cancel():
    both = [after(2000, 0.2), after(2000, 1.1)]
    assert batch_ease(both) == pytest.approx(1.0, abs=0.03)


def test_a_step_of_which_nothing_was_expected_says_nothing():
    ease = Ease()
    ease.add(2.0, 0.0)
    assert ease == Ease()


def test_it_moves_in_steps_so_that_promises_can_be_kept():
    found = {batch_ease([after(n, 0.5)]) for n in range(200)}
    assert len(found) < 40
    assert all(
        np.isclose(np.log(x) / np.log(1.02) % 1, [0, 1], atol=1e-6).any() for x in found
    )
