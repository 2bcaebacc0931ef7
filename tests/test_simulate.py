"""Batches on paper: what they hand out adds up, and the engine's parts decide."""

import copy

import numpy as np
import pytest

from dcut_jax.cut.choice import PLAIN, Choice, StepCosts
from dcut_jax.cut.plan import plan
from dcut_jax.cut.survival import log_survival
from dcut_jax.cut.width import WidthChooser
from dcut_jax.simulate import (
    Acceptance,
    Always,
    Setup,
    Simulation,
    raw_survival,
    simulate,
    total,
)

WIDTHS, ROWS = (3, 7), (4, 8, 16, 32)
# A draft costs 0.1 ms, a verified row 0.4; the narrow width has no widest tier.
COSTS = StepCosts(
    plain_ms=5.0,
    planned_MR=np.array([[6.0, 7.6, 10.8, np.inf], [6.4, 8.0, 11.2, 17.6]]),
    full_M=np.array([10.5, 17.0]),
)
EASY = Acceptance(level=5.5, step_sd=1.35, draft_sd=5.05)
CERTAIN = Acceptance(level=50.0, step_sd=0.0, draft_sd=0.0)
HOPELESS = Acceptance(level=-50.0, step_sd=0.0, draft_sd=0.0)


def batch(chooser=None, acceptance=EASY, ease_B=(0.0,) * 4, seed=0, length=64, **rules):
    setup = Setup(WIDTHS, ROWS, COSTS, **rules)
    chooser = chooser or WidthChooser((0, *WIDTHS))
    return Simulation(setup, chooser, acceptance, ease_B, length=length, seed=seed)


@pytest.mark.parametrize(
    "rules",
    [{}, {"calibrates": True}, {"fairness": "proportional"}, {"patience": 4}],
    ids=str,
)
def test_tokens_are_anchors_and_accepted_drafts_and_time_is_the_tables(rules):
    b = batch(**rules)
    steps = [b.step() for _ in range(60)]
    for step in steps:
        assert (step.accepted_B <= step.keep_B).all()
        assert (step.keep_B <= step.choice.width).all()
        if step.choice == PLAIN:
            assert step.ms == COSTS.plain_ms
        elif not step.choice.planned:
            assert step.ms == COSTS.full_M[WIDTHS.index(step.choice.width)]
        else:
            tier = ROWS.index(4 + step.keep_B.sum())  # a plan fills its tier
            assert step.ms == COSTS.planned_MR[WIDTHS.index(step.choice.width), tier]
    run = total(steps)
    assert run.tokens == 60 * 4 + sum(int(s.accepted_B.sum()) for s in steps)
    assert run.ms == pytest.approx(sum(s.ms for s in steps))
    assert run.tokens_per_s == pytest.approx(1e3 * run.tokens / run.ms)


def test_one_seed_is_one_run():
    def run(seed):
        return simulate(batch(seed=seed, calibrates=True), steps=40, warm_up=5)

    assert run(3) == run(3)
    assert run(3) != run(4)


def test_drafts_do_not_depend_on_what_is_done_with_them():
    narrow, wide = batch(Always(Choice(3, False))), batch(Always(Choice(7, False)))
    for _ in range(20):
        a, b = narrow.step(), wide.step()
        np.testing.assert_array_equal(a.accepted_B, np.minimum(b.accepted_B, 3))


@pytest.mark.parametrize(
    ("acceptance", "width", "length"), [(CERTAIN, 7, 8.0), (HOPELESS, 0, 1.0)]
)
def test_sure_drafts_are_all_taken_and_hopeless_ones_never_drafted(
    acceptance, width, length
):
    run = simulate(batch(acceptance=acceptance), steps=200, warm_up=64)
    assert run.mean_accepted_length == pytest.approx(length, rel=0.03)
    assert run.mean_width == pytest.approx(width, abs=0.3)


@pytest.mark.parametrize(
    "rules", [{}, {"fairness": "proportional"}, {"patience": 2}], ids=str
)
def test_the_plan_is_the_devices_own(rules):
    """What `plan_numpy` kept is what the compiled planner keeps of the same drafts."""
    ease_B = (0.0, 0.0, -2.0, -9.0)
    b = batch(Always(Choice(7, planned=True)), ease_B=ease_B, **rules)
    patience, due, weighted = rules.get("patience"), 0, 0
    for _ in range(20):
        logp_BK = EASY.draw(copy.deepcopy(b._rng), np.array(ease_B), 7).logp_BK
        weight_B = b._weights()
        due_B = None if patience is None else b._waited_B + 1 >= patience
        due += 0 if due_B is None else due_B.sum()
        weighted += np.ptp(weight_B)
        step = b.step()
        survival_BK = log_survival(logp_BK)
        np.testing.assert_array_equal(raw_survival(logp_BK), survival_BK)
        want = plan(
            survival_BK,
            np.ones(4, bool),
            np.array(ROWS, np.int32),
            COSTS.planned_MR[1].astype(np.float32),
            weight_B=weight_B.astype(np.float32),
            due_B=due_B,
        )
        np.testing.assert_array_equal(step.keep_B, want.keep_B)
    assert (due > 0) == (patience is not None)
    assert (weighted > 0) == ("fairness" in rules)


def test_texts_that_turn_easy_are_drafted_for_again():
    """Chances once learned to be low are seen to have risen: looks verify drafts."""
    # The drafter is as sure as ever; first it is wrong, then it is right.
    b = batch(acceptance=Acceptance(-3.0, 0.0, 0.5, sharpness=-1), calibrates=True)
    hard = total(b.step() for _ in range(600))
    assert hard.mean_width < 0.2
    b.acceptance = Acceptance(3.0, 0.0, 0.5)
    for _ in range(400):
        b.step()
    assert total(b.step() for _ in range(200)).mean_width > 2


def test_what_is_tried_verifies_a_draft():
    b = batch(acceptance=HOPELESS, calibrates=True)
    steps = [b.step() for _ in range(900)]
    looks = [s for s in steps if s.choice.planned]
    assert len(looks) > 5
    assert all(s.keep_B.sum() > 0 for s in looks)


def test_a_width_is_chosen_before_its_drafts_are_known():
    """Two batches that differ in the coming drafts alone ask for the same width."""
    one, other = batch(), batch()
    for _ in range(40):
        assert one.step().choice == other.step().choice
    other._rng.random()  # all drafts from here on are others
    assert one.step().choice == other.step().choice


def test_patience_gives_every_request_a_draft():
    """Of two hopeless requests among easy ones, none waits for more than 4 steps."""

    def longest_wait(patience):
        wide = Always(Choice(7, planned=True))
        b = batch(
            wide, ease_B=(0.0, 0.0, -20.0, -20.0), length=10_000, patience=patience
        )
        kept = np.array([b.step().keep_B > 0 for _ in range(100)])
        waits = [len(run) for column in kept.T for run in _gaps(column)]
        return max(waits, default=0)

    assert longest_wait(None) > 20
    assert longest_wait(4) < 4


def _gaps(kept):
    """Runs of steps without a draft."""
    text = "".join("x" if k else "." for k in kept)
    return [part for part in text.split("x") if part]


def test_weights_help_the_slowest():
    def slowest(fairness):
        wide = Always(Choice(7, planned=True))
        ease_B = (2.0, 2.0, 2.0, -3.0)
        b = batch(wide, ease_B=ease_B, fairness=fairness, length=10_000)
        return sum(1 + b.step().accepted_B for _ in range(300)).min() / 300

    assert slowest("proportional") > 1.05 * slowest("equal")


def test_calibration_repairs_a_drafter_that_is_too_modest():
    modest = Acceptance(level=5.5, step_sd=1.35, draft_sd=5.05, sharpness=0.3)

    def speed(calibrates):
        wide = Always(Choice(7, planned=True))
        b = batch(wide, acceptance=modest, calibrates=calibrates)
        return simulate(b, steps=400, warm_up=50).tokens_per_s

    assert speed(True) > 1.01 * speed(False)


def test_served_requests_are_whole_ones():
    run = simulate(batch(length=32), steps=300, warm_up=10)
    assert run.served
    assert all(32 <= r.tokens < 32 + 8 for r in run.served)
    per_token = [r.ms_per_token for r in run.served]
    # All slots share the time: requests' tokens per ms are the batch's, split by four.
    assert 4 * np.mean(np.reciprocal(per_token)) == pytest.approx(
        run.tokens_per_s / 1e3, rel=0.1
    )


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: batch(ease_B=()), "at least one slot"),
        (lambda: batch(length=0), "at least one token"),
        (lambda: simulate(batch(), steps=0, warm_up=0), "at least one step"),
        (lambda: Setup((3,), ROWS, COSTS), "expected costs for 1 widths"),
    ],
)
def test_what_makes_no_sense_is_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_one_text_at_a_time_drafts_are_for_the_easy_ones(monkeypatch):
    """On average drafting barely pays; texts differ, and steps show how."""
    costs = StepCosts(
        plain_ms=25.6,
        planned_MR=np.array([[32.7, 42.7, 42.9, np.inf], [33.6, 43.6, 43.8, 52.1]]),
        full_M=np.array([43.5, 51.3]),
    )
    setup = Setup(WIDTHS, (1, 2, 4, 8), costs)
    uneven = Acceptance(level=-0.1, step_sd=0.5, draft_sd=2.0)

    def rate(chooser, seed):
        one = Simulation(setup, chooser, uneven, (0.0,), 64, seed=seed, spread=1.5)
        return simulate(one, steps=1500, warm_up=60).tokens_per_s

    def choosing():
        return [rate(WidthChooser((0, *WIDTHS)), seed) for seed in range(4)]

    plain = [rate(Always(PLAIN), seed) for seed in range(4)]
    told = np.mean(choosing()) / np.mean(plain)
    monkeypatch.setattr("dcut_jax.simulate.batch_ease", lambda running: 1.0)
    untold = np.mean(choosing()) / np.mean(plain)
    assert told > 1.1
    assert told > 1.03 * untold
