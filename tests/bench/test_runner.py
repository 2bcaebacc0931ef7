"""Arms by name, texts against AR's by hand, and a cell that has nothing to decode."""

import math
from types import SimpleNamespace

import pytest

from dcut_jax.bench.records import AR, NO_TOKEN, Difference
from dcut_jax.bench.runner import (
    DCUT,
    PUBLISHED,
    WITHOUT,
    Arm,
    Stopwatch,
    Texts,
    decode_cell,
    logit_gap,
    policy_of,
    take_turns,
)
from dcut_jax.decode.steps import Caches, StepShapes
from dcut_jax.engine.policy import ArPolicy, FixedPolicy, profiled, unmeasured
from dcut_jax.engine.requests import Completion, Request
from dcut_jax.engine.slots import Prefilled


def places(texts):
    """Where each arm's texts first differ, as (prompt, position, expected, found)."""
    return {
        check.arm: [
            (d.prompt, d.position, d.expected, d.found) for d in check.differences
        ]
        for check in texts.results(lambda d: 0.0)
    }


class TestTexts:
    @pytest.mark.parametrize(
        ("tokens", "finished", "want"),
        [
            ([4, 5, 6], True, []),
            ([4, 5], False, []),
            ([], False, []),
            ([4, 5], True, [(0, 2, 6, NO_TOKEN)]),
            ([4, 5, 6, 7], True, [(0, 3, NO_TOKEN, 7)]),
            ([4, 5, 6, 7], False, [(0, 3, NO_TOKEN, 7)]),
            ([4, 9, 6, 7], True, [(0, 1, 5, 9)]),
            ([4, 9], False, [(0, 1, 5, 9)]),
        ],
    )
    def test_one_text(self, tokens, finished, want):
        texts = Texts([Completion([4, 5, 6], "stop")])
        texts.check("dcut", 8, 0, tokens, finished=finished)
        assert places(texts) == {"dcut": want}

    def test_arms_prompts_and_batch_sizes_are_kept_apart(self):
        texts = Texts([Completion([1, 2], "length"), Completion([3, 4], "length")])
        texts.check("dcut", 1, 0, [1, 2], finished=True)
        texts.check("dcut", 1, 1, [3, 9], finished=True)
        texts.check("dcut", 8, 1, [8], finished=False)
        texts.check("dcut", 8, 1, [3, 9], finished=True)
        texts.check("dcut", 8, 1, [3, 9], finished=True)
        texts.check(AR, 8, 1, [3], finished=False)
        dcut, ar = texts.results(lambda d: d.batch / 4)
        assert (dcut.prompts, dcut.tokens) == (2, 4)
        assert [(d.batch, d.position, d.gap) for d in dcut.differences] == [
            (1, 1, 0.25),
            (8, 0, 2.0),
            (8, 1, 2.0),
        ]
        assert (ar.prompts, ar.tokens, ar.differences) == (1, 1, ())

    @pytest.mark.parametrize(("expected", "found"), [(NO_TOKEN, 3), (3, NO_TOKEN)])
    def test_an_end_has_no_logit(self, expected, found):
        difference = Difference(0, 1, 8, math.nan, expected, found)
        texts = Texts([Completion([1, 2], "length")])
        assert math.isnan(logit_gap(None, [5], texts, difference))


class TestPolicyOf:
    def test_arms(self):
        assert policy_of(AR, unmeasured, 0) == ArPolicy()
        assert policy_of("fixed-15", unmeasured, 15) == FixedPolicy(15)
        assert policy_of("dcut", unmeasured, 7) == unmeasured()
        assert policy_of("published", unmeasured, 7).objective == "paper"

    def test_arms_without_a_term(self):
        assert not policy_of("dcut-no-plain", unmeasured, 7).plain
        assert not policy_of("dcut-no-bypass", unmeasured, 7).bypass
        assert not policy_of("dcut-no-calibration", unmeasured, 7).calibrate
        assert not policy_of("dcut-no-correction", unmeasured, 7).correct
        assert policy_of("dcut-no-width", unmeasured, 7).widths == (7,)

    @pytest.mark.parametrize("most", [3, 7, 10, 15, 16, 31])
    def test_what_is_profiled_is_enough_for_every_arm(self, most):
        shapes = StepShapes(slots=4, positions=256, width=most + 1, stops=1)
        layouts = {lay for policy in profiled() for lay in policy.layouts(shapes)}
        for arm in (DCUT, PUBLISHED, *WITHOUT):
            policy = policy_of(arm, unmeasured, most)
            assert set(policy.layouts(shapes)) <= layouts
            assert set(policy.ladder(shapes)) <= {
                width for some in profiled() for width in some.ladder(shapes)
            }

    @pytest.mark.parametrize("arm", ["", "fixed-", "fixed-0", "fixed-x", "fixed-²"])
    def test_there_is_no_such_arm(self, arm):
        with pytest.raises(ValueError, match="is unknown; choose from ar, fixed-WIDTH"):
            policy_of(arm, unmeasured, 15)

    def test_a_width_that_does_not_fit(self):
        with pytest.raises(ValueError, match="'fixed-8'.* block holds 1 to 7 drafts"):
            policy_of("fixed-8", unmeasured, 7)


@pytest.mark.parametrize("prompts", [1, 5])
def test_prompts_that_all_end_at_once_are_refused(prompts):
    """They take no slot, so waiting for full slots would take forever."""
    stopping = SimpleNamespace(
        config=SimpleNamespace(slots=2),
        models=SimpleNamespace(drafter=None),
        records=[],
        running=0,
        reset=lambda: None,
        admit=lambda ready: Completion([ready.first_token], "stop"),
    )
    ready = [Prefilled(Request((1,), 8, (0,)), Caches(None, None), 0)] * prompts
    texts = Texts([Completion([0], "stop")] * prompts)
    arm = Arm(AR, stopping, Stopwatch())
    cell = decode_cell(arm, ready, texts, round=0, tokens_per_request=3)
    with pytest.raises(ValueError, match="ends at its first token.*other prompts"):
        next(cell)


class TestTurns:
    def turns(self, seed):
        turns = []

        def cell(name, shares):
            for share in shares:
                turns.append(name)
                yield share
            return name.upper()

        cells = [cell("a", [0.2, 0.9, 1.0]), cell("b", [0.5, 1.0])]
        assert take_turns(cells, seed) == ["A", "B"]
        return "".join(turns)

    def test_the_one_furthest_behind_has_the_turn(self):
        """Where two are as far behind, as at the start, no arm is always the first."""
        assert {self.turns(seed) for seed in range(16)} == {"ababa", "baaba"}
        assert self.turns(3) == self.turns(3)

    def test_a_watch_runs_for_its_owner_alone(self, monkeypatch):
        now = [0.0]
        clock = SimpleNamespace(perf_counter=lambda: now[0])
        monkeypatch.setattr("dcut_jax.bench.runner.time", clock)
        watch = Stopwatch()
        for own, others in [(2.0, 5.0), (1.0, 7.0)]:
            with watch.running():
                now[0] += own
                during = watch()
            now[0] += others
            assert watch() == during
        assert watch() == 3.0
