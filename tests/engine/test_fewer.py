"""Plain steps of fewer rows than slots, where few requests run."""

from dataclasses import replace

import numpy as np
import pytest

from dcut_jax.cost.table import CostTable
from dcut_jax.decode.placing import on_mesh
from dcut_jax.decode.steps import anchors_only, plain_layouts
from dcut_jax.engine.config import EngineConfig
from dcut_jax.engine.engine import Engine
from dcut_jax.engine.policy import ArPolicy, unmeasured, verify_work
from dcut_jax.engine.profile import contexts, profile
from dcut_jax.engine.requests import Request
from dcut_jax.mesh import make_placement

CONFIG = EngineConfig(4, 200, fewer=(1, 2))
PROMPTS = [(55, 56, 57), (8, 9, 10, 11), (36, 37, 38), (3, 91, 17, 64, 2)]
# They end one after another, so that one runs at last.
REQUESTS = [Request(p, n) for p, n in zip(PROMPTS, (20, 60, 90, 40), strict=True)]


def least(running):
    return next(rows for rows in (1, 2, 4) if rows >= running)


@pytest.fixture(scope="module")
def full(pair, compiler):
    """Texts where every plain step has a row for each slot."""
    engine = Engine(pair, replace(CONFIG, fewer=()), ArPolicy(), compiler=compiler)
    done = engine.generate(REQUESTS)
    assert {r.rows for r in engine.records} == {4}
    return [c.tokens for c in done]


def texts(engine):
    return [c.tokens for c in engine.generate(REQUESTS)]


def test_plain_decoding_has_rows_for_those_who_run(pair, compiler, full):
    engine = Engine(pair, CONFIG, ArPolicy(), compiler=compiler)
    assert texts(engine) == full
    assert {r.rows for r in engine.records} == {1, 2, 4}
    assert all(r.rows == least(r.active) for r in engine.records)


def test_drafts_come_between(pair, compiler, invented_table, full):
    """The drafter catches up with what few rows left, whichever slots they are of."""
    policy = replace(unmeasured(), probe_every=3, probe_share=1.0, patience=None)
    table = invented_table(policy, CONFIG.shapes(pair), lambda lay: 8.0 + lay.rows)
    policy = replace(policy, table=table, correct=False)
    engine = Engine(pair, CONFIG, policy, compiler=compiler)
    assert texts(engine) == full
    plain = [r for r in engine.records if r.width == 0]
    assert {r.rows for r in plain} > {1}
    assert all(r.rows == least(r.active) for r in plain)
    drafted = [r for r in engine.records if r.width]
    assert sum(r.accepted for r in drafted) > len(drafted)


def test_a_plain_step_costs_what_its_rows_do(pair, invented_table):
    shapes = CONFIG.shapes(pair)
    table = invented_table(unmeasured(), shapes, lambda lay: 8.0 + lay.rows)
    policy = replace(unmeasured(), table=table)
    ms = policy.measured(shapes, 128)
    costs = {n: policy.costs(shapes, ms, n) for n in (1, 2, 3, 4, None)}
    base = costs[None].plain_ms
    assert {n: c.plain_ms - base for n, c in costs.items()} == pytest.approx(
        {1: -3.0, 2: -2.0, 3: 0.0, 4: 0.0, None: 0.0}
    )
    for one in costs.values():
        np.testing.assert_array_equal(one.planned_MR, costs[None].planned_MR)


def test_every_size_is_measured(pair, compiler):
    shapes = CONFIG.shapes(pair)
    policy = replace(unmeasured(), widths=(7,), factors=(2.0,))
    here = CostTable.empty().fingerprint
    made = profile(
        pair, CONFIG, [policy], here, PROMPTS[0], compiler=compiler, rounds=1
    )
    ms = replace(policy, table=made).measured(shapes, contexts(CONFIG)[0])
    assert {verify_work(lay) for lay in plain_layouts(shapes)} <= ms.keys()


@pytest.mark.parametrize("shards", [1, 2])
def test_of_a_shard(pair, full, shards):
    """The fullest shard says how many rows all of them have."""
    placement = make_placement({"data": shards, "model": 1}, "dp+tp")
    models = on_mesh(pair, placement) if shards > 1 else pair
    engine = Engine(models, CONFIG, ArPolicy())
    assert engine.shapes.fewer == ((1, 2) if shards == 1 else (1,))
    assert anchors_only(engine.shapes, 1).rows == 1
    assert texts(engine) == full
    assert {r.rows for r in engine.records} >= {shards}


@pytest.mark.parametrize("fewer", [(0, 1), (2, 1), (1, 1), (4,)])
def test_what_is_not_fewer_is_refused(fewer):
    with pytest.raises(ValueError, match="below the 4 slots.*found"):
        EngineConfig(4, 200, fewer=fewer)
