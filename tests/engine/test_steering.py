"""What D-Cut learns while it decodes, and what requests may ask of it."""

import time
from dataclasses import replace

import numpy as np
import pytest

from dcut_jax.cost.online import Correction
from dcut_jax.cut.choice import Choice
from dcut_jax.cut.fairness import Progress, weights
from dcut_jax.decode.compile import Compiler
from dcut_jax.engine.config import EngineConfig
from dcut_jax.engine.engine import Engine
from dcut_jax.engine.policy import (
    DCutPolicy,
    draft_work,
    unmeasured,
    verify_work,
)
from dcut_jax.engine.requests import Request

SLOTS = 4
CONFIG = EngineConfig(SLOTS, 200)
# Texts of the tiny pair: it has learned sequences that count up, and no others.
EASY = [tuple(range(a, a + 4)) for a in (55, 8, 36)]
HARD = (3, 91, 17, 64, 2)


@pytest.fixture
def build(pair, compiler, invented_table):
    """An engine whose policy has invented costs."""

    def make(
        verify_ms,
        draft_ms=lambda width: 1e-3,
        config=CONFIG,
        clock=time.perf_counter,
        **choice,
    ):
        policy = replace(unmeasured(), **({"correct": False} | choice))
        shapes = config.shapes(pair)
        table = invented_table(policy, shapes, verify_ms, draft_ms=draft_ms)
        policy = replace(policy, table=table)
        used = compiler if config == CONFIG else Compiler(pair, "float32")
        return Engine(pair, config, policy, compiler=used, clock=clock)

    return make


def wide_is_free(lay):
    return 10.0 + 1e-3 * lay.rows


def rows_are_dear(lay):
    return float(lay.rows)


class TestCalibration:
    def test_every_label_is_learned_once(self, build):
        engine = build(wide_is_free, plain=False, bypass=False)
        engine.generate([Request(p, 40) for p in (*EASY, HARD)])
        assert all(r.decision is not None for r in engine.records)
        labels = engine.steering.calibration.own.labels
        assert labels.shape == (engine.shapes.width - 1,)
        assert engine.steering.calibration.pooled.labels > 0
        raw, calibrated = engine.steering.reliability()
        kept = sum(r.kept for r in engine.records)
        assert raw.count_X.sum() == calibrated.count_X.sum() == kept
        assert raw.survived_X.sum() == sum(r.accepted for r in engine.records)

    def test_reliability_is_counted_since_the_last_report(self, build):
        engine = build(wide_is_free, plain=False, bypass=False)
        engine.generate([Request(p, 20) for p in EASY])
        assert engine.steering.reliability()[0].count_X.sum() > 0
        assert engine.steering.reliability()[0].count_X.sum() == 0

    def test_an_outcome_is_learned_though_other_steps_came_between(self, build):
        # Only probes draft: between two plans there are many plain steps.
        dear = {"draft_ms": lambda width: 8.0}
        engine = build(rows_are_dear, **dear, probe_every=8, probe_share=1.0)
        engine.generate([Request(p, 120) for p in (*EASY, HARD)])
        planned = [r for r in engine.records if r.decision is not None]
        assert len(planned) < len(engine.records) / 2
        raw, _ = engine.steering.reliability()
        kept = sum(r.kept for r in planned)
        assert kept - planned[-1].kept <= raw.count_X.sum() <= kept
        assert raw.survived_X.sum() <= sum(r.accepted for r in planned)

    def test_the_last_outcome_of_some_requests_is_learned_with_the_next(self, build):
        engine = build(wide_is_free, plain=False, bypass=False)
        for _ in range(2):
            engine.reset()  # in the midst of the first
            engine.admit(engine.prefill(Request(EASY[0], 60)))
            for _ in range(3):
                engine.step()
            engine.flush()
        raw, _ = engine.steering.reliability()
        kept = [r.kept for r in engine.records]
        assert len(kept) == 6
        assert min(kept) > 0
        assert raw.count_X.sum() == sum(kept[:5])

    def test_without_it_confidences_stand_for_themselves(self, build):
        engine = build(wide_is_free, plain=False, bypass=False, calibrate=False)
        engine.generate([Request(p, 30) for p in EASY])
        assert engine.steering.calibration.pooled.labels == 0
        raw, calibrated = engine.steering.reliability()
        np.testing.assert_array_equal(raw.count_X, calibrated.count_X)

    def test_what_was_learned_outlives_the_requests(self, build):
        engine = build(wide_is_free, plain=False, bypass=False)
        engine.generate([Request(p, 30) for p in EASY])
        before = engine.steering.calibration.pooled.labels
        engine.generate([Request(p, 5) for p in EASY])
        assert engine.steering.calibration.pooled.labels > 0.5 * before


def keeps(engine, monkeypatch):
    """Drafts kept in each slot, plan by plan."""
    kept = []
    decide = engine.steering.decide

    def note(*args):
        keep_B, host = decide(*args)
        kept.append(np.asarray(keep_B))
        return keep_B, host

    monkeypatch.setattr(engine.steering, "decide", note)
    return kept


class TestPatience:
    @pytest.mark.parametrize("patience", [3, 7])
    def test_no_request_waits_longer(self, build, monkeypatch, patience):
        # Two more rows are nearly free, a third is not: the hard text gets none.
        engine = build(
            lambda lay: 10.0 if lay.rows <= 6 else 1e4,
            factors=(1.0, 1.5, 4.0),
            plain=False,
            bypass=False,
            patience=patience,
        )
        kept = keeps(engine, monkeypatch)
        engine.generate([Request(p, 40) for p in (*EASY, HARD)])
        gaps, waited = [], 0
        for keep_B in kept[:20]:
            waited = 0 if keep_B[3] else waited + 1
            gaps.append(waited)
        assert max(gaps) <= patience - 1

    def test_without_it_a_hard_text_goes_without(self, build, monkeypatch):
        engine = build(
            lambda lay: 10.0 if lay.rows <= 6 else 1e4,
            factors=(1.0, 1.5, 4.0),
            plain=False,
            bypass=False,
            patience=None,
        )
        kept = keeps(engine, monkeypatch)
        engine.generate([Request(p, 40) for p in (*EASY, HARD)])
        at = [-1, *np.flatnonzero([k[3] for k in kept[:20]]), 20]
        assert np.diff(at).max() > 7


class TestWeights:
    def rates(self, build, monkeypatch, requests, **choice):
        """Drafts kept for the last request in the first steps, of all kept."""
        engine = build(
            lambda lay: 10.0 if lay.rows <= 6 else 1e4,
            factors=(1.0, 1.5, 4.0),
            plain=False,
            bypass=False,
            patience=None,
            **choice,
        )
        kept = keeps(engine, monkeypatch)
        engine.generate(requests)
        some = np.array(kept[:25])
        return some[:, 3].sum() / some.sum()

    def test_a_request_of_high_priority_is_served_first(self, build, monkeypatch):
        requests = [Request(p, 60) for p in (*EASY, EASY[0])]
        before = self.rates(build, monkeypatch, requests)
        requests[3] = replace(requests[3], priority=10.0)
        assert self.rates(build, monkeypatch, requests) > 2 * before

    def test_equal_priorities_change_nothing(self, build, monkeypatch):
        requests = [Request(p, 60) for p in (*EASY, HARD)]
        same = [replace(r, priority=7.0) for r in requests]
        a, b = (self.rates(build, monkeypatch, some) for some in (requests, same))
        assert a == b

    def test_proportional_fairness_gives_the_slow_more(self, build, monkeypatch):
        requests = [Request(p, 60) for p in (*EASY, HARD)]
        equal = self.rates(build, monkeypatch, requests)
        fair = self.rates(build, monkeypatch, requests, fairness="proportional")
        assert fair > equal

    def test_no_draw_of_a_step_is_in_what_its_plan_is_weighed_by(
        self, build, monkeypatch
    ):
        """Nor one of the step before it, which was not read then."""
        choice = {"plain": False, "bypass": False, "fairness": "proportional"}
        engine = build(wide_is_free, **choice)
        weighed, counts = [], []
        decide = engine.steering.decide

        def watched(run, proposal, state, choice, weight_B, *rest):
            weighed.append(weight_B.copy())
            return decide(run, proposal, state, choice, weight_B, *rest)

        monkeypatch.setattr(engine.steering, "decide", watched)
        engine.on_outcome = lambda record, outcome: counts.append(outcome.count_B)
        engine.generate([Request(p, 100) for p in (*EASY, HARD)])
        whole = next(i for i, count_B in enumerate(counts) if not count_B.all())
        assert whole > 5
        progress = [Progress() for _ in range(SLOTS)]
        for step in range(whole):
            for one, count in zip(progress, counts[step - 2], strict=True):
                if step >= 2:
                    one.add(int(count))
            want_B = weights("proportional", [1.0] * SLOTS, [p.rate for p in progress])
            np.testing.assert_array_equal(weighed[step], want_B)
        assert len(np.unique(weighed[whole - 1])) > 1


def test_what_a_request_accepts_is_held_against_what_any_would(build, monkeypatch):
    engine = build(wide_is_free, plain=False)
    seen = []
    choose = engine.steering.choose

    def watched(running, *args):
        seen.append([(e.accepted, e.expected) for e in running])
        return choose(running, *args)

    monkeypatch.setattr(engine.steering, "choose", watched)
    done = engine.generate([Request(p, 60) for p in (*EASY, HARD)])
    last = next(sums for sums in reversed(seen) if len(sums) == SLOTS)
    assert all(expected > 0 for _, expected in last)
    easy, hard = last[0], last[-1]
    assert easy[0] / easy[1] > hard[0] / hard[1]
    assert all(sums[0][0] <= done[0].accepted for sums in seen if sums)


class TestDeadline:
    @pytest.fixture(autouse=True)
    def as_fast_as_the_table_says(self, monkeypatch):
        monkeypatch.setattr(Correction, "slowdown", 1.0)

    def test_no_step_is_longer_than_the_tightest_wish(self, build):
        def verify_ms(lay):
            return 7.9 if lay.rows <= 24 else 8.12

        requests = [Request(p, 40) for p in (*EASY, EASY[0])]
        free = build(verify_ms, widths=(7,))
        free.generate(requests)
        assert max(r.rows for r in free.records) == 32
        requests[1] = replace(requests[1], tpot_ms=8.1)
        tight = build(verify_ms, widths=(7,))
        tight.generate(requests)
        assert max(r.rows for r in tight.records) <= 24

    @pytest.mark.parametrize("wish_ms", [1.0, 5e-324])
    def test_a_wish_that_no_step_can_meet_gets_the_shortest(self, build, wish_ms):
        engine = build(wide_is_free)
        engine.generate([Request(p, 20, tpot_ms=wish_ms) for p in EASY])
        assert {r.rows for r in engine.records} == {SLOTS}

    @pytest.mark.parametrize(("slowdown", "widest"), [(1.0, 32), (1.25, 24)])
    def test_a_slow_machine_has_less_time(self, build, monkeypatch, slowdown, widest):
        monkeypatch.setattr(Correction, "slowdown", slowdown)
        monkeypatch.setattr(Correction, "observe", lambda self, work, ms: None)

        def verify_ms(lay):
            return 7.9 if lay.rows <= 24 else 8.12

        engine = build(verify_ms, widths=(7,), correct=True)
        engine.generate([Request(p, 40, tpot_ms=10.0) for p in (*EASY, EASY[0])])
        assert max(r.rows for r in engine.records) == widest


class TestCorrection:
    def test_a_wrong_table_heals(self, build):
        # By the table a wide step takes as long as a thousand plain ones.
        engine = build(
            lambda lay: 1e3 if lay.rows > SLOTS else 1.0,
            correct=True,
            probe_every=2,
            probe_share=1.0,
        )
        engine.generate([Request(p, 100) for p in (*EASY, HARD)] * 3)
        shapes, policy = engine.shapes, engine.policy
        factor = engine.steering.correction.factor
        wide = policy.layout(shapes, 3, 4 * SLOTS)
        plain = policy.layout(shapes, 3, SLOTS)
        assert engine.steering.correction.version > 0
        assert factor(verify_work(wide)) < 0.8 * factor(verify_work(plain))

    def test_steps_around_a_prefill_are_left_out(self, build):
        engine = build(wide_is_free, correct=True)
        seen = []
        observe = engine.steering.correction.observe

        def note(measured_ms, ms):
            seen.append(dict(measured_ms))
            observe(measured_ms, ms)

        engine.steering.correction.observe = note
        for prompt in EASY:
            engine.admit(engine.prefill(Request(prompt, 60)))
        engine.step()
        engine.step()
        assert len(seen) == 1
        assert seen[0].keys() >= {draft_work(engine.records[-1].width)}
        engine.prefill(Request(HARD, 5))
        before = len(seen)
        engine.step()
        assert len(seen) == before
        engine.step()
        assert len(seen) == before + 1

    def test_a_cost_counts_all_that_was_dispatched(self, build):
        engine = build(wide_is_free, correct=True, plain=False, bypass=False)
        seen = []
        engine.steering.correction.observe = lambda work, ms: seen.append(dict(work))
        for prompt in EASY:
            engine.admit(engine.prefill(Request(prompt, 60)))
        for _ in range(6):
            engine.step()
        kinds = [sorted(kind for kind, _, _ in work) for work in seen]
        assert kinds[-1] == ["draft", "plan", "verify"]
        last = engine.records[-1]
        assert draft_work(last.width) in seen[-1]

    def test_drafts_that_ran_twice_before_a_read_count_twice(self, build):
        engine = build(wide_is_free, correct=True, plain=False, bypass=False)
        engine.generate([Request(HARD, 9)])
        steering, seen = engine.steering, []
        steering.correction.observe = lambda work, ms: seen.append(dict(work))
        steering.has_read(64)
        work = draft_work(engine.records[-1].width)
        for _ in range(2):
            steering.drafts(engine.records[-1].width)
        steering.has_read(64)
        assert seen == [{work: 2 * steering._measured[0][work]}]


class TestBypass:
    def test_where_all_drafts_pay_no_plan_is_made(self, build):
        engine = build(lambda lay: 10.0, plain=True, probe_every=10)
        requests = [Request(p, 150) for p in (*EASY, EASY[1])]
        engine.generate(requests)
        later = engine.records[3:]
        assert sum(r.decision is None and r.width > 0 for r in later) > len(later) / 2
        assert any(r.decision is not None for r in later)  # looks, now and then

    @pytest.mark.slow
    def test_a_published_policy_plans_every_step(self, pair, build, invented_table):
        shapes = CONFIG.shapes(pair)
        policy = DCutPolicy.published(unmeasured().table)
        table = invented_table(policy, shapes, wide_is_free)
        engine = Engine(
            pair,
            CONFIG,
            replace(policy, table=table),
            compiler=Compiler(pair, "float32"),
        )
        engine.generate([Request(p, 30) for p in EASY])
        assert all(r.decision is not None for r in engine.records)
        assert engine.steering.chooser.next(engine.steering._costs) == Choice(
            shapes.width - 1, planned=True
        )


def test_drafts_beyond_the_last_token_are_worth_nothing(build):
    # One token is left after the first, and the anchor gives it.
    engine = build(lambda lay: 10.0 + lay.rows / 10, plain=False, bypass=False)
    engine.generate([Request(EASY[0], 2) for _ in range(60)])
    assert all(r.decision.gain < 1e-30 for r in engine.records)
    kept = [r.kept for r in engine.records[8:]]
    assert kept.count(0) >= len(kept) - 1  # but for a look
    # Where there is room for drafts they are worth as much as ever.
    steps = len(engine.records)
    engine.generate([Request(p, 60) for p in EASY])
    assert sum(r.accepted for r in engine.records[steps:]) > 60


def test_a_crowd_says_little_of_the_one_who_is_left(build, monkeypatch):
    engine = build(wide_is_free)
    asked = []
    crowd = engine.steering.chooser._evidence.crowd
    monkeypatch.setattr(
        engine.steering.chooser._evidence,
        "crowd",
        lambda requests: (asked.append(requests), crowd(requests)),
    )
    engine.generate([Request(EASY[0], 60), *[Request(EASY[1], 9)] * 3])
    assert (asked[0], asked[-1]) == (SLOTS, 1)


def halting_after(count):
    """A halt after so many tokens, whichever."""

    def make():
        left = iter(range(count - 1, -1, -1))
        return lambda token: next(left) == 0

    return make


@pytest.mark.parametrize("requests", [1, 4])
def test_a_plan_whose_request_was_halted_teaches_nothing(build, requests):
    engine = build(wide_is_free, plain=False, bypass=False)
    looks = []
    look = engine.steering.look
    engine.steering.look = lambda *seen: (looks.append(seen), look(*seen))
    texts = (EASY * 4)[:requests]
    for _ in range(3):  # one after another, without a reset in between
        running = [
            engine.admit(engine.prefill(Request(p, 60, halt=halting_after(9 + i))))
            for i, p in enumerate(texts)
        ]
        while engine.running:
            engine.step()
        assert {c.finish for c in running} == {"stop"}
    engine.step()
    raw, calibrated = engine.steering.reliability()
    taught = [r for r in engine.records if r.teaches]
    assert raw.count_X.sum() == calibrated.count_X.sum() == sum(r.kept for r in taught)
    assert raw.survived_X.sum() == sum(r.accepted for r in taught)
    # The last plan of each round has nobody left to decode for.
    seen = [np.count_nonzero(weight_B) for _, weight_B in looks]
    assert seen == [r.active for r in taught]


@pytest.mark.parametrize("phases", [False, True])
def test_all_work_is_timed_from_before_it_is_dispatched(build, monkeypatch, phases):
    now, seen = [0.0], []  # time moves when work is dispatched, by a known amount
    engine = build(
        wide_is_free, clock=lambda: now[0], correct=True, plain=False, bypass=False
    )
    engine.steering.correction.observe = lambda work, ms: seen.append((len(work), ms))
    compiler = engine.compiler

    def ticking(name):
        look_up = getattr(compiler, name)

        def look_up_slow(*key):
            run = look_up(*key)

            def slow(*args):
                now[0] += 1.0
                return run(*args)

            return slow

        monkeypatch.setattr(compiler, name, look_up_slow)

    for name in ("draft", "decide", "verify"):
        ticking(name)
    for prompt in EASY:
        engine.admit(engine.prefill(Request(prompt, 60)))
    engine.time_phases = phases
    for _ in range(6):
        engine.step()
    # Where phases are waited for one by one nothing is learned of costs, not even by
    # the step after, which reads what such a step dispatched.
    assert seen[-1:] == ([] if phases else [(3, 3000.0)])
    if phases:
        engine.time_phases = False
        engine.step()
        assert seen == []
        engine.step()
        assert seen[-1:] == [(3, 3000.0)]
