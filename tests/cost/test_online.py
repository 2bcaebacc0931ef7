"""Corrections of costs: a wrong table heals; how fast the machine is does not enter."""

import math

import numpy as np
import pytest

from dcut_jax.cost.online import Correction

PLAIN, WIDE, DRAFT = ("verify", 4, 1), ("verify", 16, 4), ("draft", 3, 0)
TABLE = {PLAIN: 30.0, WIDE: 60.0, DRAFT: 8.0}


def run(correction, steps, truth, *, noise=0.05, mood=0.0, seed=0):
    """Steps of a machine whose speed wanders: nine plain ones, then a drafting one."""
    rng = np.random.default_rng(seed)
    wander = 0.0
    for i in range(steps):
        works = (DRAFT, WIDE) if i % 10 == 9 else (PLAIN,)
        wander += mood * rng.normal()
        ms = sum(truth[w] for w in works) * math.exp(wander + noise * rng.normal())
        correction.observe({w: TABLE[w] for w in works}, ms)


def ratio(correction):
    """Corrected time of a drafting step over that of a plain one."""
    ms = {w: t * correction.factor(w) for w, t in TABLE.items()}
    return (ms[DRAFT] + ms[WIDE]) / ms[PLAIN]


def real_ratio(truth):
    return (truth[DRAFT] + truth[WIDE]) / truth[PLAIN]


@pytest.mark.parametrize("wrong", [0.7, 1.0, 1.5])
@pytest.mark.parametrize("mood", [0.0, 0.05])
def test_a_wrong_table_heals(wrong, mood):
    truth = TABLE | {WIDE: TABLE[WIDE] * wrong}
    correction = Correction()
    run(correction, 1000, truth, mood=mood)
    assert ratio(correction) == pytest.approx(real_ratio(truth), rel=0.07)


def test_a_machine_that_is_slower_throughout_changes_nothing():
    correction = Correction()
    run(correction, 1000, {w: 3 * t for w, t in TABLE.items()})
    assert ratio(correction) == pytest.approx(real_ratio(TABLE), rel=0.05)


def test_the_slowdown_is_that_of_the_present():
    correction = Correction()
    run(correction, 200, TABLE)
    assert correction.slowdown == pytest.approx(1.0, rel=0.05)
    run(correction, 200, {w: 3 * t for w, t in TABLE.items()})
    assert correction.slowdown == pytest.approx(3.0, rel=0.05)


def test_one_accident_moves_little():
    correction = Correction()
    run(correction, 400, TABLE)
    for some in (correction, Correction()):
        correction, before = some, ratio(some)
        correction.observe({PLAIN: 30.0}, 30.0)
        correction.observe({DRAFT: 8.0, WIDE: 60.0}, 60_000.0)
        correction.observe({PLAIN: 30.0}, 30.0)
        correction.observe({DRAFT: 8.0, WIDE: 60.0}, 68.0)
        assert ratio(correction) == pytest.approx(before, rel=0.02)
        run(correction, 40, TABLE)
        assert correction.slowdown == pytest.approx(1.0, rel=0.1)


def test_what_is_no_accident_is_learned_the_second_time():
    truth = TABLE | {WIDE: TABLE[WIDE] * 1.9}
    correction = Correction()
    run(correction, 400, truth)
    assert ratio(correction) == pytest.approx(real_ratio(truth), rel=0.1)


def test_an_ordinary_surprise_is_not_counted_twice():
    correction = Correction()
    seen = []
    for _ in range(4):
        correction.observe({PLAIN: 30.0}, 30.0)
        correction.observe({DRAFT: 8.0, WIDE: 60.0}, 68.0 * 1.4)
        seen.append(ratio(correction))
    assert max(seen) <= real_ratio(TABLE) * 1.4 * 1.001


def test_corrections_are_bounded():
    correction = Correction()
    run(correction, 20_000, TABLE | {WIDE: 100 * TABLE[WIDE]}, noise=0.0)
    factors = [correction.factor(w) for w in TABLE]
    assert max(factors) <= 2 + 1e-9
    assert min(factors) >= 0.5 - 1e-9


def test_steps_of_the_same_work_teach_nothing():
    correction = Correction()
    for ms in (30.0, 90.0, 10.0):
        correction.observe({PLAIN: 30.0}, ms)
    assert correction.version == 0
    assert correction.factor(PLAIN) == 1.0


def test_nothing_is_compared_over_a_gap():
    correction = Correction()
    correction.observe({PLAIN: 30.0}, 30.0)
    correction.forget_last()
    correction.observe({DRAFT: 8.0, WIDE: 60.0}, 600.0)
    assert correction.version == 0


@pytest.mark.parametrize("ms", [0.0, -1.0])
def test_a_time_that_is_none_is_left_out(ms):
    correction = Correction()
    correction.observe({PLAIN: 30.0}, 30.0)
    correction.observe({DRAFT: 8.0, WIDE: 60.0}, ms)
    assert correction.version == 0
