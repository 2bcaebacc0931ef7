"""Policies: tiers, layouts and costs belong together, whatever the shapes."""

from dataclasses import replace

import numpy as np
import pytest

from dcut_jax.cost.table import CostError, CostTable
from dcut_jax.decode.steps import StepShapes, anchors_only, everything
from dcut_jax.engine.policy import (
    PAPER_RATIOS,
    ArPolicy,
    DCutPolicy,
    FixedPolicy,
    draft_work,
    profiled,
    unmeasured,
)


def shapes_of(slots, width):
    return StepShapes(slots=slots, positions=256, width=width, stops=4)


class Recorder:
    """Stands in for a cost table and notes which cells are read."""

    def __init__(self, verify_ms=lambda rows, width: 1.0):
        self.verify, self.draft, self.plan = set(), set(), set()
        self._verify_ms = verify_ms

    def verify_ms(self, slots, rows, width, context):
        self.verify.add((slots, rows, width))
        return self._verify_ms(rows, width)

    def draft_ms(self, slots, width, context):
        self.draft.add((slots, width))
        return 0.25

    def plan_ms(self, slots):
        self.plan.add((slots,))
        return 0.5

    def catch_up_ms(self, slots, steps):
        return 0.8 * steps


def planned_ms(policy, shapes):
    return policy.costs(shapes, policy.measured(shapes, 128.0)).planned_MR


CHOICES = {
    "default": {},
    "one_width": {"widths": (5,)},
    "widths_between_tiers": {"widths": (2, 4)},
    "no_tiers_but_the_ends": {"factors": ()},
    "one_tier": {"factors": (1.5,), "widths": (3,)},
}


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
@pytest.mark.parametrize("slots", [1, 3, 8])
@pytest.mark.parametrize("width", [8, 10, 16])
class TestDCut:
    def test_the_cells_it_reads_are_the_steps_it_can_run(self, slots, width, choice):
        table, shapes = Recorder(), shapes_of(slots, width)
        policy = DCutPolicy(table, **choice)
        planned_ms(policy, shapes)
        lays = policy.layouts(shapes)
        assert table.verify == {(slots, lay.rows, lay.width) for lay in lays}
        assert table.draft == {(slots, w) for w in policy.ladder(shapes)}
        assert table.plan == {(slots,)}
        assert len(lays) == len(table.verify)

    def test_every_choice_of_a_plan_has_an_executable(self, slots, width, choice):
        policy, shapes = (
            DCutPolicy(CostTable.empty(), **choice),
            shapes_of(slots, width),
        )
        tiers, lays = policy.tiers(shapes), policy.layouts(shapes)
        assert list(tiers) == sorted(set(tiers))
        assert (tiers[0], tiers[-1]) == (slots, slots * width)
        for drafts in policy.ladder(shapes):
            full = everything(shapes, drafts)
            assert full.rows in tiers
            assert policy.layout(shapes, drafts, full.rows) == full
            offered = policy.offered(shapes, drafts)
            assert {slots, full.rows} <= set(offered) <= set(tiers)
            for rows in offered:
                assert policy.layout(shapes, drafts, rows) in lays

    def test_a_tier_that_a_width_is_not_offered_is_never_worth_it(
        self, slots, width, choice
    ):
        policy = DCutPolicy(Recorder(lambda rows, width: float(rows)), **choice)
        shapes = shapes_of(slots, width)
        cost_ms = planned_ms(policy, shapes)
        rows_R = np.array(policy.tiers(shapes))
        for drafts, cost_R in zip(policy.ladder(shapes), cost_ms, strict=True):
            offered_R = np.isin(rows_R, policy.offered(shapes, drafts))
            want_R = np.where(offered_R, rows_R + 0.75, np.inf)
            want_R[rows_R == slots] += 3.2  # the drafter has to catch up at once
            np.testing.assert_array_equal(cost_R, want_R)


def test_a_cheaper_wider_tier_does_not_make_a_narrower_one_look_cheap():
    # A plan names the tier that runs, so each tier has to show its own time.
    table = Recorder(lambda rows, width: 9.0 if rows == 6 else 2.0)
    policy = DCutPolicy(table, widths=(7,), factors=(1.0, 1.5))
    assert planned_ms(policy, shapes_of(4, 8)).tolist() == [[2.75 + 3.2, 9.75, 2.75]]


def test_default_widths_go_as_far_as_the_block():
    policy = unmeasured()
    assert policy.ladder(shapes_of(4, 16)) == (3, 7, 15)
    assert policy.ladder(shapes_of(4, 8)) == (3, 7)
    assert policy.ladder(shapes_of(4, 6)) == (3, 5)
    assert policy.ladder(shapes_of(4, 3)) == (2,)


def test_default_tiers():
    policy, shapes = unmeasured(), shapes_of(4, 16)
    assert policy.tiers(shapes) == (4, 8, 12, 16, 24, 32, 48, 64)
    # The anchors alone, and from a quarter of the block to all of it.
    assert policy.offered(shapes, 3) == (4, 8, 12, 16)
    assert policy.offered(shapes, 7) == (4, 8, 12, 16, 24, 32)
    assert policy.offered(shapes, 15) == (4, 16, 24, 32, 48, 64)


def test_ratios_leave_no_choice_of_widths_or_tiers():
    published = DCutPolicy.published(CostTable.empty())
    for choice in ({"widths": (3,)}, {"factors": (2.0,)}, {"plain": True}):
        with pytest.raises(ValueError, match="leave no choice"):
            replace(published, **choice)


def test_plain_steps_cannot_be_weighed_by_the_papers_objective():
    with pytest.raises(ValueError, match="set plain=False"):
        DCutPolicy(CostTable.empty(), objective="paper")


def test_steps_without_a_plan_cost_no_planning():
    shapes = shapes_of(4, 8)
    policy = DCutPolicy(Recorder(lambda rows, width: float(rows)))
    costs = policy.costs(shapes, policy.measured(shapes, 0.0))
    assert costs.plain_ms == 4.0 + 0.8  # and what its context costs later
    assert costs.full_M.tolist() == [16.25, 32.25]
    none = replace(policy, plain=False, bypass=False)
    costs = none.costs(shapes, none.measured(shapes, 0.0))
    assert costs.plain_ms == np.inf
    assert costs.full_M.tolist() == [np.inf, np.inf]


def test_a_correction_reaches_every_step_that_runs_the_work():
    shapes = shapes_of(4, 8)
    policy = DCutPolicy(Recorder(lambda rows, width: float(rows)))
    ms = policy.measured(shapes, 0.0)
    dear = policy.costs(shapes, ms | {draft_work(7): ms[draft_work(7)] + 1.0})
    costs = policy.costs(shapes, ms)
    np.testing.assert_array_equal(dear.planned_MR[0], costs.planned_MR[0])
    np.testing.assert_array_equal(dear.planned_MR[1], costs.planned_MR[1] + 1)
    assert (dear.full_M - costs.full_M).tolist() == [0, 1]


def test_a_policy_of_no_known_fairness():
    with pytest.raises(ValueError, match="fairness 'max-min' is unknown"):
        replace(unmeasured(), fairness="max-min")


def test_the_papers_objective_cannot_choose_a_width():
    plans_only = {"plain": False, "bypass": False, "objective": "paper"}
    with pytest.raises(ValueError, match="knows no choice of widths"):
        replace(unmeasured(), **plans_only)
    replace(unmeasured(), widths=(7,), **plans_only)


def test_patience_is_at_least_a_step():
    with pytest.raises(ValueError, match="found 0"):
        replace(unmeasured(), patience=0)


def test_a_table_covers_a_policy_when_every_cell_is_there():
    shapes = shapes_of(4, 8)
    assert DCutPolicy(Recorder()).covered(shapes)
    assert not unmeasured().covered(shapes)


@pytest.mark.parametrize("widths", [(0,), (8,), (3, 8)], ids=str)
def test_widths_outside_the_block_are_refused(widths):
    policy = DCutPolicy(CostTable.empty(), widths=widths)
    with pytest.raises(ValueError, match=r"outside 1\.\.7"):
        policy.ladder(shapes_of(4, 8))


@pytest.mark.parametrize(
    ("slots", "width", "rows"),
    [
        (4, 16, (16, 32, 48, 64)),
        (32, 16, (128, 256, 384, 512)),
        (1, 8, (2, 4, 6, 8)),
        (3, 6, (5, 9, 14, 18)),
    ],
)
def test_the_published_policy_has_a_tier_per_ratio(slots, width, rows):
    shapes = shapes_of(slots, width)
    policy = DCutPolicy.published(CostTable.empty())
    assert policy.tiers(shapes) == rows
    key = policy.plan_key(shapes)
    assert (key.objective, key.ratios) == ("paper", PAPER_RATIOS)
    assert key.widths == (width - 1,)
    assert everything(shapes, width - 1) in policy.layouts(shapes)


def test_the_published_policy_reads_the_cells_of_its_steps():
    table, shapes = Recorder(), shapes_of(4, 16)
    policy = DCutPolicy.published(table)
    planned_ms(policy, shapes)
    lays = policy.layouts(shapes)
    assert table.verify == {(4, lay.rows, lay.width) for lay in lays}


def test_plain_policies_have_one_executable():
    shapes = shapes_of(4, 8)
    assert ArPolicy().layouts(shapes) == [anchors_only(shapes)]
    assert FixedPolicy(3).layouts(shapes) == [everything(shapes, 3)]


@pytest.mark.parametrize("width", [0, -1])
def test_a_fixed_width_drafts_something(width):
    with pytest.raises(ValueError, match="at least 1 draft; found"):
        FixedPolicy(width)


def test_a_cost_that_was_not_measured_is_an_error():
    with pytest.raises(CostError, match="no plan time for 4 slots"):
        unmeasured().measured(shapes_of(4, 8), 0.0)


def test_the_chooser_has_the_ladder():
    policy = replace(unmeasured(), probe_every=9)
    chooser = policy.chooser(shapes_of(4, 8))
    assert replace(policy, plain=False).chooser(shapes_of(4, 8)).widths == (3, 7)
    assert (chooser.widths, chooser.probe_every) == ((0, 3, 7), 9)


@pytest.mark.parametrize("width", [4, 8, 10, 11, 16])
@pytest.mark.parametrize("slots", [1, 4])
def test_what_is_profiled_serves_every_arm_of_a_bench(slots, width):
    shapes = shapes_of(slots, width)
    layouts = {lay for policy in profiled() for lay in policy.layouts(shapes)}
    for policy in (unmeasured(), DCutPolicy.published(CostTable.empty())):
        assert set(policy.layouts(shapes)) <= layouts
