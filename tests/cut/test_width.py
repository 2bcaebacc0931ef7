"""The choice of width and plan: explored, compared, corrected, and paid for."""

import numpy as np
import pytest

from dcut_jax.cost.online import Correction
from dcut_jax.cut.choice import PLAIN, Choice, StepCosts
from dcut_jax.cut.evidence import Evidence
from dcut_jax.cut.width import WidthChooser

WIDTHS = (3, 7, 15)
LADDER = (0, *WIDTHS)
ANCHORS = 4.0


def world(per_ms, *, plain=1.0, full=1.02):
    """Gains and costs in which a planned step of each width is worth so much per ms.

    There are two tiers: the anchors alone, and everything. A step that plans nothing
    takes `full` times as long as one with a plan.
    """
    gain_MR = np.array([[0.0, ANCHORS * (w + 1) / 4] for w in WIDTHS])
    ms = np.array([1 + (w + 1) / 4 for w in WIDTHS])
    ms = ms / np.array([per_ms[w] for w in WIDTHS])
    planned_MR = np.stack([np.full(3, np.inf), ms], axis=1)
    return gain_MR, StepCosts(1 / plain, planned_MR, ms * full)


def run(chooser, steps, gain_MR, costs, *, honesty=None, noise=0.0, seed=0, alone=True):
    """What ran; `honesty`: accepted over predicted drafts, by width."""
    rng = np.random.default_rng(seed)
    ran = []
    for _ in range(steps):
        choice = chooser.next(costs, alone=alone)
        ran.append(choice)
        if choice == PLAIN:
            continue
        m = WIDTHS.index(choice.width)
        share = (honesty or {}).get(choice.width, 1.0)
        accepted = gain_MR[m, 1] * share * (1 + noise * rng.normal())
        seen_MR = None
        if choice.planned:
            seen_MR = gain_MR * (1 + noise * rng.normal())
            seen_MR[m + 1 :] = np.nan
            chooser.look(
                requests=int(ANCHORS),
                anchors=ANCHORS,
                gain_MR=seen_MR,
                full_M=seen_MR[:, 1],
            )
        chooser.outcome(
            choice,
            requests=int(ANCHORS),
            predicted=None if seen_MR is None else seen_MR[m, 1],
            accepted=accepted,
        )
    return ran


def look(width):
    return Choice(width, planned=True, tries=True)


def widths(ran):
    return [choice.width for choice in ran]


def test_the_widest_is_looked_at_first_and_no_other_needs_to_be():
    made = world({3: 1.5, 7: 1.2, 15: 1.1}, full=1.05)
    ran = run(WidthChooser(LADDER), 20, *made)
    assert ran[:2] == [look(15)] * 2
    # Plain steps by its side show whether costs are true.
    assert ran[2:10] == [PLAIN, Choice(3, True)] * 4
    assert ran[10:18] == [Choice(3, True)] * 8


def test_a_large_batch_needs_one_first_look_a_small_one_more():
    for anchors, looks in ((1.0, 8), (64.0, 1)):
        gain_MR, costs = world({3: 1.5, 7: 1.2, 15: 1.1})
        chooser = WidthChooser(LADDER)
        for _ in range(looks):
            assert chooser.next(costs) == look(15)
            gains_MR = gain_MR * anchors / ANCHORS
            chooser.look(
                requests=int(anchors),
                anchors=anchors,
                gain_MR=gains_MR,
                full_M=gains_MR[:, 1],
            )
        assert chooser.next(costs) == look(3)


@pytest.mark.parametrize("best", WIDTHS)
@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_it_settles_on_the_best_width(best, noise):
    per_ms = {w: 1.5 if w == best else 1.0 for w in WIDTHS}
    ran = run(WidthChooser(WIDTHS), 300, *world(per_ms), noise=noise)
    assert widths(ran)[100:].count(best) >= 190


@pytest.mark.parametrize(
    ("per_ms", "best"),
    [
        ({3: 0.9, 7: 0.8, 15: 0.2}, 0),
        ({3: 1.2, 7: 0.8, 15: 0.2}, 3),
        ({3: 1.2, 7: 1.5, 15: 0.2}, 7),
    ],
)
def test_nothing_is_drafted_where_that_is_best(per_ms, best):
    ran = run(WidthChooser(LADDER), 300, *world(per_ms), noise=0.05)
    assert widths(ran)[100:].count(best) >= 190


def test_plain_decoding_is_not_corrected_by_what_drafts_gave():
    # Drafts give a fifth of what they promise; an anchor gives all.
    made = world({3: 1.6, 7: 1.5, 15: 1.0})
    ran = run(WidthChooser(LADDER), 1000, *made, honesty=dict.fromkeys(WIDTHS, 0.2))
    assert widths(ran)[700:].count(0) >= 280


def test_gains_are_scaled_by_what_steps_of_that_width_give():
    made = world({3: 1.0, 7: 1.5, 15: 1.4})
    ran = run(WidthChooser(WIDTHS), 600, *made, honesty={7: 0.3})
    assert widths(ran)[400:].count(15) >= 180


def test_a_plan_has_to_be_worth_more_than_its_margin():
    per_ms = {3: 1.3, 7: 1.0, 15: 0.5}
    for full, planned in ((1.005, False), (1.03, True)):
        ran = run(WidthChooser(LADDER), 60, *world(per_ms, full=full))
        assert ran[12:40].count(Choice(3, planned)) >= 26


def test_drafting_has_to_be_worth_more_than_its_margin():
    for plain, width in ((1.0, 3), (1.08, 0)):
        made = world({3: 1.07, 7: 0.5, 15: 0.3}, plain=plain, full=1.2)
        ran = widths(run(WidthChooser(LADDER), 400, *made))
        assert ran[-100:].count(width) >= 90


def test_a_small_promise_is_tried_before_it_is_believed():
    # Drafts promise a tenth more than plain decoding and yield a twentieth less.
    gain_MR, costs = world({3: 1.1, 7: 0.5, 15: 0.3}, full=1.2)
    for noise in (0.0, 0.4):
        made = {"honesty": {3: 0.73}, "noise": noise}
        ran = widths(run(WidthChooser(LADDER), 600, gain_MR, costs, **made))
        assert 2 <= ran.count(3) <= 60
    chooser = WidthChooser(LADDER, probe_share=0.01)
    ran = widths(run(chooser, 600, gain_MR, costs, noise=0.4))
    assert ran[-200:].count(3) >= 150


def test_a_step_without_a_plan_is_planned_now_and_then():
    made = world({3: 1.3, 7: 1.0, 15: 0.5}, full=1.0)
    ran = run(WidthChooser(LADDER, probe_every=10), 200, *made)
    assert 15 <= ran.count(look(3)) <= 21
    assert ran.count(Choice(3, False)) >= 150


def test_probes_lose_no_more_than_their_share():
    per_ms = {3: 0.5, 7: 0.3, 15: 0.1}
    gain_MR, costs = world(per_ms)
    chooser = WidthChooser(LADDER, probe_every=8, probe_share=0.02)
    ran = run(chooser, 20_000, gain_MR, costs)[1:]
    lost = {w: 1 - per_ms[w] for w in WIDTHS}
    ms = {w: costs.planned_MR[m, 1] for m, w in enumerate(WIDTHS)} | {0: 1.0}
    total = sum(ms[c.width] for c in ran)
    spent = sum(lost[c.width] * ms[c.width] for c in ran if c.width)
    # The narrowest may cost more: it has a longest spell.
    assert spent / total < 0.02 + lost[3] * ms[3] / (8 * 8)
    assert all(widths(ran).count(w) >= 2 for w in WIDTHS)


def test_a_probe_is_charged_what_it_lost_not_what_it_was_expected_to():
    # Promised to lose a hundredth, it loses nearly half. Promises learn that slowly.
    gain_MR, costs = world({3: 0.99, 7: 0.3, 15: 0.1})
    chooser = WidthChooser(LADDER, probe_share=0.01)
    ran = run(chooser, 3000, gain_MR, costs, honesty={3: 0.1})[4:]
    ms = costs.planned_MR[0, 1]
    lost_ms = ms - (1 + 0.1 * gain_MR[0, 1] / ANCHORS)
    probes = widths(ran).count(3)
    # An equal part of the hundredth, and the longest spell's.
    assert probes * lost_ms < 3000 * (0.01 / 3 + lost_ms / 256) + lost_ms
    assert probes >= 2


@pytest.mark.parametrize("slow", [2.0, 5.0])
def test_a_long_hard_spell_does_not_bury_a_width(slow):
    # Probes that are taken whatever they cost lose far more than any budget earns.
    hard_MR, costs = world({3: 1.2, 7: 0.1, 15: 0.05})
    costs = costs._replace(
        planned_MR=costs.planned_MR * slow, full_M=costs.full_M * slow
    )
    chooser = WidthChooser(LADDER, probe_share=0.01)
    run(chooser, 20_000, hard_MR * 0.01, costs)
    easy = widths(run(chooser, 1000, hard_MR * slow * 2, costs))
    assert easy.count(3) >= 300


def test_a_probe_whose_outcome_never_comes_costs_nothing():
    # A width that is worth it is found, though every other outcome of it is lost.
    gain_MR, costs = world({3: 1.06, 7: 0.3, 15: 0.1})
    chooser, ran = WidthChooser(LADDER), []
    for step in range(1200):
        choice = chooser.next(costs)
        ran.append(choice)
        if choice.planned:
            m = WIDTHS.index(choice.width)
            seen_MR = np.where(np.arange(3)[:, None] <= m, gain_MR, np.nan)
            chooser.look(
                requests=4, anchors=ANCHORS, gain_MR=seen_MR, full_M=seen_MR[:, 1]
            )
            if step % 2:
                chooser.withdraw(choice)
                continue
        if choice.width:
            gain = gain_MR[WIDTHS.index(choice.width), 1]
            predicted = gain if choice.planned else None
            chooser.outcome(choice, requests=4, predicted=predicted, accepted=gain)
    assert widths(ran)[-600:].count(3) >= 500


def test_promises_are_for_as_many_as_run():
    # Alone a request's drafts all pay, in a crowd none; the newest look is a crowd's.
    _, costs = world({3: 1.0, 7: 1.0, 15: 1.0})
    chooser = WidthChooser(LADDER)
    for requests, each in ((1, 3.0), (32, 0.0)):
        for _ in range(8):
            gain_MR = np.full((3, 2), [0.0, requests * each])
            chooser.look(
                requests=requests,
                anchors=float(requests),
                gain_MR=gain_MR,
                full_M=gain_MR[:, 1],
            )
    promised = {}
    for requests in (32, 1):
        chooser.next(costs, requests=requests)
        promised[requests] = chooser.promises(costs)[Choice(3, planned=True)].per_ms
    assert promised[1] > 1.5 * promised[32]


def test_a_neighbour_of_a_probe_does_not_settle_it():
    # The step before it is read after it was chosen, and may be of the same width.
    gain_MR, costs = world({3: 1.06, 7: 0.3, 15: 0.1})
    chooser = WidthChooser(LADDER)
    while not chooser._probes.owes(3):
        choice = chooser.next(costs)
        if choice.planned:
            m = WIDTHS.index(choice.width)
            seen_MR = np.where(np.arange(3)[:, None] <= m, gain_MR, np.nan)
            chooser.look(
                requests=4, anchors=ANCHORS, gain_MR=seen_MR, full_M=seen_MR[:, 1]
            )
    neighbour = Choice(3, planned=True)
    chooser.outcome(neighbour, requests=4, predicted=4.0, accepted=4.0)
    chooser.withdraw(neighbour)
    assert chooser._probes.owes(3)
    chooser.outcome(choice, requests=4, predicted=4.0, accepted=4.0)
    assert not chooser._probes.owes(3)


def test_a_probe_is_settled_in_the_worth_that_was_promised():
    # Only the heavy request's drafts are accepted: a quarter more per weighted anchor,
    # hardly anything per request. Settled by counts, no probe would ever pay.
    weight_B = np.array([1.0, 0.1, 0.1, 0.1])
    anchors = float(weight_B.sum())
    gain_MR, costs = world({3: 1.06, 7: 0.3, 15: 0.1})
    chooser, ran = WidthChooser(LADDER), []
    for _ in range(500):
        choice = chooser.next(costs)
        ran.append(choice)
        if choice == PLAIN:
            continue
        m = WIDTHS.index(choice.width)
        share_MR = gain_MR / ANCHORS
        accepted = share_MR[m, 1] * anchors  # of the first request, whose weight is 1
        if choice.planned:
            seen_MR = np.where(np.arange(3)[:, None] <= m, share_MR * anchors, np.nan)
            chooser.look(
                requests=4, anchors=anchors, gain_MR=seen_MR, full_M=seen_MR[:, 1]
            )
        chooser.outcome(
            choice,
            requests=4,
            predicted=accepted if choice.planned else None,
            accepted=accepted,
            worth=1 + accepted / anchors,
        )
    assert widths(ran).count(3) >= 400


def test_no_spell_without_drafts_is_longer_than_stated():
    made = world({3: 0.05, 7: 0.02, 15: 0.01})
    chooser = WidthChooser(LADDER, probe_every=4, probe_share=1e-6)
    at = np.flatnonzero(np.array(widths(run(chooser, 500, *made))) == 3)
    assert np.diff(at).max() == 4 * 8


def test_beside_drafts_plain_decoding_is_due_every_eight_steps():
    gain_MR, costs = world({3: 1.06, 7: 0.3, 15: 0.1})
    chooser = WidthChooser(LADDER, probe_share=0.1)
    ran = widths(run(chooser, 800, gain_MR, costs))[400:]
    assert ran.count(3) > 200
    assert np.diff(np.flatnonzero(np.array(ran) == 0)).min() == 8


def test_plain_decoding_is_not_tried_beside_prompts():
    """It would show nothing there, and be due again at the very next step."""
    chooser = WidthChooser(LADDER)
    ran = run(chooser, 600, *world({3: 1.5, 7: 0.5, 15: 0.3}), alone=False)
    assert widths(ran).count(0) == 0
    alone = run(chooser, 50, *world({3: 1.5, 7: 0.5, 15: 0.3}))
    assert 1 <= widths(alone).count(0) <= 8


def test_easy_requests_get_drafts_where_hard_ones_get_none():
    gain_MR, costs = world({3: 1.0, 7: 0.5, 15: 0.3})
    chooser = WidthChooser(LADDER)
    run(chooser, 100, gain_MR, costs)
    promised = [chooser.promises(costs, ease) for ease in (0.5, 1.0, 2.0)]
    drafts = Choice(3, True)
    assert [p[PLAIN] for p in promised] == [promised[0][PLAIN]] * 3
    worth = [p[drafts].per_ms * p[drafts].ms for p in promised]
    assert worth == sorted(worth)
    assert chooser.next(costs, 2.0).width == 3
    assert [chooser.next(costs, 0.5).width for _ in range(20)].count(0) >= 18


def test_a_width_that_could_not_run_at_first_is_looked_at_once_it_can():
    gain_MR, costs = world({3: 1.0, 7: 0.5, 15: 0.3})
    narrow_MR = np.where(np.array(WIDTHS)[:, None] == 3, costs.planned_MR, np.inf)
    chooser = WidthChooser(LADDER)
    run(chooser, 60, gain_MR, costs._replace(planned_MR=narrow_MR))
    assert run(chooser, 1, gain_MR, costs) == [look(15)]


def test_few_that_run_are_looked_at_as_often_after_a_crowd():
    """How many looks count is a matter of who runs, not of the first step of all."""
    gain_MR, costs = world({3: 1.5, 7: 1.0, 15: 1.0})
    looked = {"anchors": 64.0, "gain_MR": gain_MR * 16, "full_M": gain_MR[:, 1] * 16}
    evidence = Evidence(WIDTHS)
    for step in range(3):
        evidence.look(step, requests=64, **looked)
    counts = []
    for step in range(3, 200):
        few = {"anchors": 1.0, "gain_MR": gain_MR / 4, "full_M": gain_MR[:, 1] / 4}
        evidence.look(step, requests=1, **few)
    for requests in (1, 64):
        weight_J = evidence._looks[0].weight_J(requests)
        counts.append(int(np.count_nonzero(weight_J > 0)))
    assert counts == [200, 20]


def test_who_asks_what_is_promised_changes_nothing():
    """Of the processes of a mesh one alone shows promises; all must choose alike."""

    class Asked(WidthChooser):
        def next(self, costs, ease=1.0, **how):
            self.promises(costs._replace(plain_ms=2 * costs.plain_ms), 2.0)
            return super().next(costs, ease, **how)

    made = world({3: 1.02, 7: 0.9, 15: 0.8})
    ran = [
        run(kind(LADDER, probe_share=0.1), 400, *made, noise=0.5)
        for kind in (WidthChooser, Asked)
    ]
    assert ran[0] == ran[1]
    assert len(set(ran[0])) > 2


@pytest.mark.parametrize("ease", [0.5, 1.0, 2.0])
def test_what_is_expected_is_of_requests_as_easy_as_any(ease):
    gain_MR, costs = world({3: 1.5, 7: 1.1, 15: 1.0})
    chooser = WidthChooser(WIDTHS)
    assert chooser.expected(chooser.next(costs, ease)) == 0.0  # nothing is known
    run(chooser, 100, gain_MR, costs)
    chooser.next(costs, ease)
    for m, width in enumerate(WIDTHS):
        for planned in (True, False):
            found = chooser.expected(Choice(width, planned))
            assert found == pytest.approx(gain_MR[m, 1] / ANCHORS, rel=0.05)
    assert chooser.expected(PLAIN) == 0.0


def test_what_is_expected_is_of_plans_that_keep_something():
    """Others teach nothing of a text, so they must not lower what it is held to."""
    costs = StepCosts(25.6, np.array([[32.7, 42.9]]), np.array([np.inf]))
    chooser = WidthChooser((0, 3))
    accepted = []
    for step in range(60):
        chooser.next(costs)
        gain = 1.0 if step % 2 else 0.1
        looked = {"gain_MR": np.array([[0.0, gain]]), "full_M": np.array([gain])}
        chooser.look(requests=1, anchors=1.0, **looked)
        if (1 + gain) / 42.9 > 1 / 32.7:
            chooser.outcome(Choice(3, True), requests=1, predicted=gain, accepted=gain)
            accepted.append(gain)
    chooser.next(costs)
    expected = chooser.expected(Choice(3, planned=True))
    assert expected == pytest.approx(np.mean(accepted), rel=0.02)


def test_a_safe_promise_is_soon_below_what_drafts_give():
    """The lower estimate has to be one: not above what the ratio comes to."""
    gain_MR, costs = world({3: 1.0, 7: 0.5, 15: 0.5})
    evidence, honest = Evidence(WIDTHS), 0.7
    looked = {"requests": 4, "anchors": ANCHORS, "full_M": gain_MR[:, 1]}
    for step in range(30):
        evidence.look(step, gain_MR=gain_MR, **looked)
        predicted = 2.6
        evidence.outcome(
            3, requests=4, predicted=predicted, accepted=honest * predicted
        )
    promise = evidence.promises(costs)[Choice(3, planned=True)]
    truth = (1 + honest * gain_MR[0, 1] / ANCHORS) / costs.planned_MR[0, 1]
    assert promise.safe_per_ms < truth < promise.per_ms


def test_what_can_verify_nothing_is_not_tried():
    """Beside a prompt wide blocks have the tier of anchors alone."""
    planned_MR = np.array([[2.0, 3.0], [2.5, np.inf]])
    costs = StepCosts(1.5, planned_MR, np.full(2, np.inf))
    chooser = WidthChooser((0, 3, 7))
    gains = {
        "gain_MR": np.array([[0.0, 9.0], [np.nan] * 2]),
        "full_M": np.array([9, 0]),
    }
    for _ in range(200):
        choice = chooser.next(costs, alone=False)
        assert choice.width != 7
        if choice.planned:
            chooser.look(requests=16, anchors=16.0, **gains)
    everywhere = costs._replace(planned_MR=np.array([[2.0, 3.0], [2.5, 4.0]]))
    assert chooser.next(everywhere) == Choice(7, planned=True, tries=True)


def test_plain_decoding_is_tried_again_where_drafts_are_best():
    """Its cost was thought to be higher by a third, and only its own steps tell."""
    gain_MR, true = world({3: 0.8, 7: 0.5, 15: 0.3})
    chooser, correction = WidthChooser(LADDER), Correction()
    work = {c: ("step", c.width, int(c.planned)) for c in _choices(true)}
    # Two neighbours in a bad moment: the plain one took four times as long.
    for choice, slow in ((Choice(3, True), 1.0), (PLAIN, 4.0)) * 2:
        ms = _choices(true)[choice]
        correction.observe({work[choice]: ms}, ms * slow)
    assert correction.factor(work[PLAIN]) > 1.25
    ran = []
    for _ in range(600):
        factor = {c: correction.factor(w) for c, w in work.items()}
        believed = StepCosts(
            true.plain_ms * factor[PLAIN],
            true.planned_MR * np.array([[factor[Choice(w, True)]] for w in WIDTHS]),
            true.full_M * np.array([factor[Choice(w, False)] for w in WIDTHS]),
        )
        ran += run(chooser, 1, gain_MR, believed)
        choice = ran[-1]._replace(tries=False)
        ms = _choices(true)[choice]
        correction.observe({work[choice]: ms}, ms)
    assert Choice(3, planned=True) in ran[:4]  # it is misled at first
    assert ran[12:40].count(PLAIN) >= 25
    assert ran[-200:].count(PLAIN) >= 190


def _choices(costs):
    """What each choice takes."""
    planned = {Choice(w, True): costs.planned_MR[m, 1] for m, w in enumerate(WIDTHS)}
    full = {Choice(w, False): costs.full_M[m] for m, w in enumerate(WIDTHS)}
    return {PLAIN: costs.plain_ms, **planned, **full}


def test_it_notices_that_texts_have_become_easier():
    chooser = WidthChooser(LADDER)
    gain_MR, costs = world({3: 1.3, 7: 1.1, 15: 0.5})
    assert widths(run(chooser, 400, gain_MR * 0.2, costs))[-100:].count(0) >= 95
    ran = run(chooser, 1200, gain_MR, costs)
    assert widths(ran)[-100:].count(3) >= 90


def test_new_costs_change_the_choice_at_once():
    chooser = WidthChooser(LADDER)
    gain_MR, costs = world({3: 1.3, 7: 1.1, 15: 0.5})
    assert run(chooser, 50, gain_MR, costs)[-1].width == 3
    dear = StepCosts(costs.plain_ms, costs.planned_MR * 2, costs.full_M * 2)
    assert chooser.next(dear) == PLAIN


def test_an_old_chooser_is_as_quick_as_a_new_one():
    chooser = WidthChooser(LADDER)
    gain_MR, costs = world({3: 1.3, 7: 1.1, 15: 0.5})
    run(chooser, 20_000, gain_MR, costs)
    ran = run(chooser, 1500, gain_MR * 0.2, costs)
    assert widths(ran)[-100:].count(0) >= 90


def test_what_it_knew_is_not_lost_in_a_spell_without_end():
    chooser = WidthChooser(LADDER)
    gain_MR, costs = world({3: 1.1, 7: 1.3, 15: 1.5})
    run(chooser, 50, gain_MR, costs)
    plain_only = costs.within(costs.plain_ms)
    for _ in range(600_000):
        chooser._step += 1
    assert chooser.next(plain_only) == PLAIN
    assert chooser.best(chooser.promises(costs)).width == 15


def test_looks_are_charged_for_what_they_verify():
    """Plans would verify nothing; a look has to, and is as rare as that costs."""

    def spent(verify_ms):
        row_ms = [1.02, 1 + verify_ms]
        costs = StepCosts(1.0, np.array([row_ms] * 3), np.full(3, 1 + verify_ms))
        chooser = WidthChooser(LADDER, probe_every=8)
        ran = run(chooser, 4000, np.zeros((3, 2)), costs)[8:]
        looks = [c for c in ran if c.planned]
        assert all(c.tries for c in looks)
        return len(looks), verify_ms * len(looks) / len(ran)

    (cheap, _), (dear, lost) = spent(0.05), spent(1.0)
    assert cheap > 3 * dear > 0
    assert lost < 0.005 + 1.0 / (8 * 8)  # the narrowest has a longest spell


def test_the_best_of_what_is_promised_may_be_plain_within_the_margin():
    """What a server's page says is what is taken, not the largest promise."""
    made = world({3: 1.01, 7: 0.9, 15: 0.8})
    chooser = WidthChooser(LADDER)
    run(chooser, 200, *made)
    promises = chooser.promises(made[1])
    assert promises[Choice(3, True)].per_ms > promises[PLAIN].per_ms
    assert chooser.best(promises) == PLAIN


def test_few_requests_tell_little_of_many():
    # Alone, a request has all its drafts in any tier; with 31 others it has hardly one.
    _, costs = world({3: 1.3, 7: 0.3, 15: 0.1})
    chooser = WidthChooser(LADDER)

    def step(requests, share):
        choice = chooser.next(costs)
        if choice.planned:
            gain_MR = np.array([[0.0, share * requests]] * 3)
            gain_MR[WIDTHS.index(choice.width) + 1 :] = np.nan
            full_M = gain_MR[:, 1]
            chooser.look(
                requests=requests, anchors=requests, gain_MR=gain_MR, full_M=full_M
            )
        if choice.width:
            accepted = share * requests
            predicted = accepted if choice.planned else None
            chooser.outcome(
                choice, requests=requests, predicted=predicted, accepted=accepted
            )
        return choice.width

    alone = [step(1, 1.0) for _ in range(400)]
    assert alone[-200:].count(3) >= 150
    crowded = [step(32, 0.1) for _ in range(100)]
    assert crowded[:20].count(0) >= 10


def test_weights_do_not_enter_what_is_accepted_of_what_was_predicted():
    # One heavy request gets little, three light ones much.
    evidence = Evidence((3,))
    gain_MR = np.array([[0.0, 0.2 + 0.1 * 3 * 2.0]])
    full_M = np.array([0.2 + 3 * 2.0])
    for step in range(400):
        planned = step % 5 == 0
        if planned:
            evidence.look(step, requests=4, anchors=1.3, gain_MR=gain_MR, full_M=full_M)
        predicted = 6.2 if planned else None
        evidence.outcome(3, requests=4, predicted=predicted, accepted=6.2)
    assert evidence.scale(3) == pytest.approx(1.0, abs=0.01)


class TestCap:
    def test_before_any_look_it_takes_what_there_is(self):
        _, costs = world({3: 1.0, 7: 1.0, 15: 1.0}, full=0.9)
        capped = costs._replace(plain_ms=np.inf).within(0.1)
        assert WidthChooser(WIDTHS).next(capped) == Choice(3, planned=False)

    def test_only_steps_that_are_short_enough_are_left(self):
        _, costs = world({3: 1.0, 7: 1.0, 15: 1.0}, full=1.2)
        capped = costs.within(3.0)
        assert capped.plain_ms == 1.0
        assert np.isfinite(capped.planned_MR).sum() == 2  # of widths 3 and 7
        assert np.isfinite(capped.full_M).tolist() == [True, False, False]
        ran = run(WidthChooser(LADDER), 100, world({3: 9, 7: 9, 15: 9})[0], capped)
        assert max(widths(ran)) == 7

    def test_the_cheapest_is_left_where_none_is_short_enough(self):
        _, costs = world({3: 1.0, 7: 1.0, 15: 1.0}, full=0.9)
        capped = costs._replace(plain_ms=np.inf).within(0.1)
        assert not np.isfinite(capped.planned_MR).any()
        assert np.isfinite(capped.full_M).tolist() == [True, False, False]

    def test_a_width_never_looked_at_may_be_all_there_is(self):
        chooser = WidthChooser(WIDTHS, probe_every=1)
        gain_MR, costs = world({3: 1.0, 7: 1.0, 15: 1.0})
        narrow_MR = np.where(np.arange(3)[:, None] == 0, gain_MR, np.nan)
        for _ in range(8):
            chooser.look(
                requests=4, anchors=4.0, gain_MR=narrow_MR, full_M=narrow_MR[:, 1]
            )
        wide_MR = costs.planned_MR.copy()
        wide_MR[0] = np.inf
        wide = StepCosts(np.inf, wide_MR, np.full(3, np.inf))
        assert chooser.next(wide).width in (7, 15)

    def test_without_a_cap_nothing_changes(self):
        _, costs = world({3: 1.0, 7: 1.0, 15: 1.0})
        same = costs.within(np.inf)
        np.testing.assert_array_equal(same.planned_MR, costs.planned_MR)


@pytest.mark.parametrize(
    "options",
    [
        {"widths": (0,)},
        {"widths": (7, 3)},
        {"widths": (3, 3)},
        {"widths": (-1, 3)},
        {"widths": WIDTHS, "probe_every": 0},
        {"widths": WIDTHS, "probe_share": 0.0},
        {"widths": WIDTHS, "margin": 1.0},
        {"widths": WIDTHS, "margin": -0.1},
        {"widths": WIDTHS, "costs_err": 0.9},
    ],
)
def test_senseless_options_are_refused(options):
    with pytest.raises(ValueError, match="found"):
        WidthChooser(**options)


def test_a_first_tier_that_is_a_share_of_the_block_is_not_left_out():
    """With the paper's ratios it holds drafts; else it is the anchors alone."""
    _, costs = world({3: 1.5, 7: 1.2, 15: 1.1})
    ms_MR = np.array([[1.0, 2.0], [1.5, np.inf], [np.inf, 3.0]])
    anchors = costs._replace(planned_MR=ms_MR)
    # A width that has no other tier keeps the one that it has.
    want = [[np.inf, 2.0], [1.5, np.inf], [np.inf, 3.0]]
    np.testing.assert_array_equal(anchors.verifying().planned_MR, want)
    ratios = anchors._replace(anchors_first=False)
    np.testing.assert_array_equal(ratios.verifying().planned_MR, ms_MR)
    assert ratios.within(2.0).anchors_first is False
