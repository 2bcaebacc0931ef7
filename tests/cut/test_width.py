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
        if width == 0:
            continue
        shown = {
            w: utility[w] * (1 + noise * rng.normal() * (w > 0))
            for w in chooser.widths
            if w <= width
        }
        share = (honesty or {}).get(width, 1.0) * (1 + noise * rng.normal())
        told = [w for w in (0, width) if w in utility]
        chooser.observe(
            width,
            shown,
            predicted=predicted,
            committed=predicted * share,
            ms={w: predicted / utility[w] for w in told},
        )
    return ran


def test_each_width_is_tried_first_the_widest_to_begin_with():
    assert run(WidthChooser(WIDTHS), 3, {3: 1, 7: 1, 15: 1}) == [15, 7, 3]


@pytest.mark.parametrize("best", WIDTHS)
@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_it_settles_on_the_best_width(best, noise):
    utility = {w: 1.5 if w == best else 1.0 for w in WIDTHS}
    ran = run(WidthChooser(WIDTHS), 300, utility, noise=noise)
    assert ran[100:].count(best) >= 190


@pytest.mark.parametrize(
    ("utility", "best"),
    [
        ({0: 1.0, 3: 0.9, 7: 0.8, 15: 0.2}, 0),
        ({0: 1.0, 3: 1.2, 7: 0.8, 15: 0.2}, 3),
        ({0: 1.0, 3: 1.2, 7: 1.5, 15: 0.2}, 7),
    ],
)
def test_nothing_is_drafted_where_that_is_best(utility, best):
    ran = run(WidthChooser((0, *WIDTHS)), 300, utility, noise=0.05)
    assert ran[:3] == [15, 7, 3]  # width 0 needs no look
    assert ran[100:].count(best) >= 190


def test_plain_decoding_is_not_corrected_by_what_drafts_committed():
    # All widths keep half of what they promise; width 0 keeps it all.
    utility = {0: 1.0, 3: 1.6, 7: 1.5}
    honesty = {3: 0.5, 7: 0.5}
    ran = run(WidthChooser((0, 3, 7)), 600, utility, honesty=honesty)
    assert ran[300:].count(0) >= 280


def test_a_tie_goes_to_the_narrowest():
    chooser = WidthChooser(WIDTHS, probe_every=1000)
    ran = run(chooser, 20, dict.fromkeys(WIDTHS, 2.0))
    assert set(ran[3:]) == {3}


def test_predictions_are_scaled_by_what_steps_commit():
    # 15 promises most tokens per ms and keeps half of it; 7 keeps its word.
    chooser = WidthChooser(WIDTHS, probe_share=0.05)
    ran = run(
        chooser,
        800,
        {3: 1.0, 7: 1.5, 15: 2.0},
        honesty={3: 1.0, 7: 1.0, 15: 0.5},
    )
    assert ran[3] == 15  # nothing is known of its honesty at first
    assert ran[400:].count(7) >= 370
    assert chooser.expected(7) == pytest.approx(1.5, rel=0.02)
    assert chooser.expected(15) == pytest.approx(1.0, rel=0.1)


def test_a_scale_that_all_widths_share_changes_no_choice():
    utility = {3: 1.0, 7: 1.5, 15: 1.2}
    honest = run(WidthChooser(WIDTHS), 200, utility)
    boastful = run(
        WidthChooser(WIDTHS), 200, utility, honesty=dict.fromkeys(WIDTHS, 0.4)
    )
    for ran in (honest, boastful):
        assert ran[3:].count(7) >= 190


def test_expectations_are_relative_to_the_narrowest_width():
    chooser = WidthChooser((3, 7))
    run(chooser, 400, {3: 4.0, 7: 2.0}, honesty={3: 0.5, 7: 0.5})
    assert chooser.expected(3) == pytest.approx(0.5, rel=0.01)
    assert chooser.expected(7) == pytest.approx(0.25, rel=0.01)


def test_how_easy_the_texts_are_changes_no_choice():
    """Only the narrow width is seen while the texts are hard."""
    chooser = WidthChooser((3, 7), 1000)
    for _ in range(20):
        chooser.observe(7, {3: 3.0, 7: 2.5}, 4.0, 4.0, {7: 9.0})
    for _ in range(20):
        chooser.observe(3, {3: 1.0}, 2.0, 2.0, {3: 9.0})
    assert chooser.expected(7) < chooser.expected(3)


def test_little_evidence_is_not_believed_at_once():
    chooser = WidthChooser((7,))
    run(chooser, 1, {7: 2.0}, honesty={7: 0.0})
    assert 0.75 < chooser.expected(7) < 1.0


@pytest.mark.parametrize("probe_every", [5, 32])
@pytest.mark.parametrize("best", WIDTHS)
def test_the_others_are_probed_in_turn(best, probe_every):
    chooser = WidthChooser(WIDTHS, probe_every, probe_share=1.0)
    ran = run(chooser, 5 * probe_every, {w: 1.0 + (w == best) for w in WIDTHS})
    for width in set(WIDTHS) - {best}:
        gaps = np.diff([step for step, w in enumerate(ran) if w == width])
        assert len(gaps) >= 3
        assert set(gaps) <= {probe_every, probe_every + 1, probe_every + 2}


@pytest.mark.parametrize("share", [0.01, 0.1])
def test_probes_lose_no_more_than_their_share(share):
    utility = {0: 1.0, 3: 0.8, 7: 0.5, 15: 0.1}
    chooser = WidthChooser((0, *WIDTHS), 8, share)
    ran = np.array(run(chooser, 4000, utility)[3:])
    lost = {w: 10 / u * (1 - u) for w, u in utility.items()}
    lost_ms = sum(lost[w] for w in ran)
    whole_ms = sum(10 / utility[w] for w in ran)
    assert lost_ms <= share * whole_ms
    assert lost_ms >= 0.5 * share * whole_ms  # and they are made
    assert set(ran) == {0, *WIDTHS}


def test_a_dear_probe_does_not_keep_cheap_ones_waiting():
    # 15 costs a hundred plain steps, 3 next to nothing; and 3 looked bad at first.
    utility = {0: 1.0, 3: 0.95, 15: 0.01}
    ran = run(WidthChooser((0, 3, 15)), 600, utility)
    assert ran[2:].count(3) > 10 * max(1, ran[2:].count(15))


def test_a_world_that_changes_is_followed():
    chooser = WidthChooser(WIDTHS, 8, 0.1)
    run(chooser, 100, {3: 2.0, 7: 1.0, 15: 1.0})
    late = run(chooser, 800, {3: 1.0, 7: 1.0, 15: 2.0})[-100:]
    assert late.count(15) >= 80


def test_widths_beyond_the_one_that_ran_keep_their_expectation():
    chooser = WidthChooser(WIDTHS)
    run(chooser, 3, dict.fromkeys(WIDTHS, 1.0))
    before = chooser.expected(15)
    chooser.observe(7, {3: 1.0, 7: 9.0}, 4.0, 4.0, {7: 9.0})
    assert chooser.expected(15) == before
    assert chooser.expected(7) > before


def test_nothing_is_expected_of_a_width_that_was_never_seen():
    assert WidthChooser(WIDTHS).expected(7) == 0.0


def test_a_step_that_predicted_nothing_is_harmless():
    chooser = WidthChooser(WIDTHS)
    chooser.observe(3, {3: 0.0}, 0.0, 0.0, {3: 9.0})
    assert chooser.expected(3) == 0.0
    assert chooser.next() in WIDTHS


def test_one_width_leaves_no_choice():
    assert set(run(WidthChooser((7,)), 70, {7: 1.0})) == {7}


@pytest.mark.parametrize("widths", [(), (7, 3), (3, 3), (0,), (-1, 3)], ids=str)
def test_widths_that_are_no_ladder_are_refused(widths):
    with pytest.raises(ValueError, match="found"):
        WidthChooser(widths)


def test_probing_never_is_refused():
    with pytest.raises(ValueError, match="probe_every must be at least 1; found 0"):
        WidthChooser(WIDTHS, 0)
