"""The draft width: explored, compared, and corrected by what steps commit."""

import numpy as np
import pytest

from dcut_jax.cut.width import WidthChooser

WIDTHS = (3, 7, 15)


def run(chooser, steps, utility, *, honesty=None, predicted=10.0, noise=0.0, seed=0):
    """Widths of `steps` steps of a world with fixed predicted utilities.

    `honesty` is committed over predicted tokens, by the width that ran.
    """
    rng = np.random.default_rng(seed)
    ran = []
    for _ in range(steps):
        width = chooser.next()
        ran.append(width)
        shown = {
            w: utility[w] * (1 + noise * rng.normal())
            for w in chooser.widths
            if w <= width
        }
        share = (honesty or {}).get(width, 1.0) * (1 + noise * rng.normal())
        chooser.observe(width, shown, predicted=predicted, committed=predicted * share)
    return ran


def test_each_width_is_tried_first_the_widest_to_begin_with():
    assert run(WidthChooser(WIDTHS), 3, {3: 1, 7: 1, 15: 1}) == [15, 7, 3]


@pytest.mark.parametrize("best", WIDTHS)
@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_it_settles_on_the_best_width(best, noise):
    utility = {w: 1.5 if w == best else 1.0 for w in WIDTHS}
    ran = run(WidthChooser(WIDTHS), 300, utility, noise=noise)
    late = ran[100:]
    probes = sum(step % 32 == 0 for step in range(100, 300))
    assert late.count(best) >= len(late) - probes


def test_a_tie_goes_to_the_narrowest():
    ran = run(WidthChooser(WIDTHS, 1000), 20, dict.fromkeys(WIDTHS, 2.0))
    assert set(ran[3:]) == {3}


def test_predictions_are_scaled_by_what_steps_commit():
    # 15 promises most tokens per ms and keeps half of it; 7 keeps its word.
    chooser = WidthChooser(WIDTHS)
    ran = run(
        chooser,
        800,
        {3: 1.0, 7: 1.5, 15: 2.0},
        honesty={3: 1.0, 7: 1.0, 15: 0.5},
    )
    assert ran[3] == 15  # nothing is known of its honesty at first
    assert {w for step, w in enumerate(ran) if step >= 400 and step % 32} == {7}
    assert chooser.expected(7) == pytest.approx(1.5, rel=0.02)
    assert chooser.expected(15) == pytest.approx(1.0, rel=0.1)


def test_a_scale_that_all_widths_share_changes_no_choice():
    utility = {3: 1.0, 7: 1.5, 15: 1.2}
    honest = run(WidthChooser(WIDTHS), 200, utility)
    boastful = run(
        WidthChooser(WIDTHS), 200, utility, honesty=dict.fromkeys(WIDTHS, 0.4)
    )
    assert honest == boastful


def test_expectations_are_relative_to_the_narrowest_width():
    chooser = WidthChooser((3, 7))
    run(chooser, 400, {3: 4.0, 7: 2.0}, honesty={3: 0.5, 7: 0.5})
    assert chooser.expected(3) == pytest.approx(0.5, rel=0.01)
    assert chooser.expected(7) == pytest.approx(0.25, rel=0.01)


def test_how_easy_the_texts_are_changes_no_choice():
    """Only the narrow width is seen while the texts are hard."""
    chooser = WidthChooser((3, 7), 1000)
    for _ in range(20):
        chooser.observe(7, {3: 3.0, 7: 2.5}, predicted=4.0, committed=4.0)
    for _ in range(20):
        chooser.observe(3, {3: 1.0}, predicted=2.0, committed=2.0)
    assert chooser.expected(7) < chooser.expected(3)


def test_little_evidence_is_not_believed_at_once():
    chooser = WidthChooser((7,))
    run(chooser, 1, {7: 2.0}, honesty={7: 0.0})
    assert 0.75 < chooser.expected(7) < 1.0


@pytest.mark.parametrize("probe_every", [5, 32])
@pytest.mark.parametrize("best", WIDTHS)
def test_the_others_are_probed_in_turn(best, probe_every):
    chooser = WidthChooser(WIDTHS, probe_every)
    ran = run(chooser, 5 * probe_every, {w: 1.0 + (w == best) for w in WIDTHS})
    others = [w for w in reversed(WIDTHS) if w != best]
    assert ran[probe_every::probe_every] == others * 2
    assert {w for step, w in enumerate(ran) if step > 2 and step % probe_every} == {
        best
    }


def test_a_world_that_changes_is_followed():
    chooser = WidthChooser(WIDTHS, 8)
    run(chooser, 100, {3: 2.0, 7: 1.0, 15: 1.0})
    late = run(chooser, 400, {3: 1.0, 7: 1.0, 15: 2.0})[-100:]
    assert late.count(15) >= 100 - 100 // 8 - 1


def test_widths_beyond_the_one_that_ran_keep_their_expectation():
    chooser = WidthChooser(WIDTHS)
    run(chooser, 3, dict.fromkeys(WIDTHS, 1.0))
    before = chooser.expected(15)
    chooser.observe(7, {3: 1.0, 7: 9.0}, predicted=4.0, committed=4.0)
    assert chooser.expected(15) == before
    assert chooser.expected(7) > before


def test_nothing_is_expected_of_a_width_that_was_never_seen():
    assert WidthChooser(WIDTHS).expected(7) == 0.0


def test_a_step_that_predicted_nothing_is_harmless():
    chooser = WidthChooser(WIDTHS)
    chooser.observe(3, {3: 0.0}, predicted=0.0, committed=0.0)
    assert chooser.expected(3) == 0.0
    assert chooser.next() in WIDTHS


def test_one_width_leaves_no_choice():
    assert set(run(WidthChooser((7,)), 70, {7: 1.0})) == {7}


@pytest.mark.parametrize("widths", [(), (7, 3), (3, 3), (0, 3), (-1,)], ids=str)
def test_widths_that_do_not_rise_from_one_are_refused(widths):
    with pytest.raises(ValueError, match="found"):
        WidthChooser(widths)


def test_probing_never_is_refused():
    with pytest.raises(ValueError, match="probe_every must be at least 1; found 0"):
        WidthChooser(WIDTHS, 0)
