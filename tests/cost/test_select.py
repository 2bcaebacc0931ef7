"""Which costs are chosen, and that computed ones say so and are used alike."""

import math
from dataclasses import replace

import pytest

from dcut_jax.config import ConfigError
from dcut_jax.cost.devices import find_device
from dcut_jax.cost.experts import distinct_experts
from dcut_jax.cost.mesh import MeshShape
from dcut_jax.cost.roofline import Roofline
from dcut_jax.cost.select import Wanted, covers, select
from dcut_jax.cost.shapes import read_shape, targets_directory, usual_drafter
from dcut_jax.cost.table import CostError, CostTable, Fingerprint
from dcut_jax.decode.steps import StepShapes
from dcut_jax.engine.policy import DCutPolicy, wanted_costs

HERE = Fingerprint(
    device_kind="NVIDIA H200",
    device_count=4,
    host="",
    mesh=(("expert", 4),),
    strategy="ep",
    target="target-1",
    drafter="drafter-1",
    dtype="bfloat16",
    draft_dtype="bfloat16",
    cache_dtype="bfloat16",
    positions=4096,
    sampling=False,
    logprobs=False,
    backends="budget_topk=xla",
    jax="0.10.0",
    code="abc",
)
TARGET = read_shape(targets_directory() / "qwen3-30b-a3b.toml")
DRAFTER = usual_drafter(TARGET)
CONTEXTS = (256, 2048)


def wanted(slots=8, shards=4):
    shapes = StepShapes(slots=slots, positions=0, width=16, stops=0, shards=shards)
    return wanted_costs([DCutPolicy(CostTable.empty())], shapes, CONTEXTS)


def chosen(here=HERE, slots=8, **more):
    shards = math.prod(n for axis, n in here.mesh if axis != "model")
    return select(here, wanted(slots, shards), TARGET, DRAFTER, **more)


def as_measured(table, scale=2.0, fixed=1.0):
    """A table as if its times had been measured on a real machine."""
    real = {
        kind: {k: (fixed + scale * v[0],) for k, v in getattr(table, kind).items()}
        for kind in ("draft", "verify", "plan", "catch_up")
    }
    return replace(table, source="measured", **real)


def test_rows_of_a_table_are_those_of_a_shard():
    model = Roofline(find_device("H200"), MeshShape("ep", expert=4), TARGET, DRAFTER)
    [ms] = chosen().verify[8, 16, 8, 2048]
    assert ms == model.verify_ms(8, 4 * 16, 2048)


def test_a_plain_step_of_few_rows_reads_as_many_contexts():
    model = Roofline(find_device("H200"), MeshShape("ep", expert=4), TARGET, DRAFTER)
    shapes = StepShapes(8, positions=0, width=16, stops=0, shards=4, fewer=(1,))
    few = wanted_costs([DCutPolicy(CostTable.empty())], shapes, CONTEXTS)
    [ms] = select(HERE, few, TARGET, DRAFTER).verify[8, 1, 1, 2048]
    assert ms == model.verify_ms(4, 4, 2048, features=False)


def test_without_measurements_costs_are_computed_and_say_so():
    table = chosen()
    assert table.source == "roofline"
    assert table.fingerprint == HERE
    assert covers(table, wanted())


def test_a_policy_takes_them_like_measured_ones():
    shapes = StepShapes(slots=8, positions=0, width=16, stops=0, shards=4)
    policy = DCutPolicy(chosen())
    assert policy.covered(shapes)
    costs = policy.costs(shapes, policy.measured(shapes, 1000))
    assert costs.plain_ms > 0
    assert (costs.planned_MR > 0).all()
    near, far = (policy.measured(shapes, context) for context in CONTEXTS)
    assert all(near[work] <= far[work] for work in near)


def test_what_was_measured_here_comes_first():
    measured = as_measured(chosen())
    assert chosen(stored=measured) is measured


def test_what_was_measured_elsewhere_is_refused():
    other = replace(HERE, strategy="dp", mesh=(("data", 4),))
    measured = as_measured(chosen(other))
    with pytest.raises(
        CostError, match="measured elsewhere.*strategy: 'dp', here 'ep'"
    ):
        chosen(stored=measured)


def test_each_layout_has_its_own_costs():
    other = replace(HERE, strategy="dp", mesh=(("data", 4),))
    key = (8, 2, 1, 2048)  # rows of one of four shards
    assert chosen().verify[key] != chosen(other).verify[key]


def test_other_batch_sizes_that_were_measured_fit_the_roofline():
    measured = as_measured(chosen(slots=4))
    table = chosen(slots=8, stored=measured)
    assert table.source == "fitted roofline"
    raw = chosen(slots=8)
    for kind in ("draft", "verify"):
        for key, (ms,) in getattr(table, kind).items():
            assert ms == pytest.approx(1 + 2 * getattr(raw, kind)[key][0])
    # Planning has one cell a batch size, and what it takes is mostly not arithmetic.
    (then,), (now,) = measured.plan[(4,)], table.plan[(8,)]
    assert now == pytest.approx(
        then + raw.plan[(8,)][0] - chosen(slots=4).plan[(4,)][0]
    )


def test_experts_that_were_touched_tell_how_rows_are_routed():
    measured = as_measured(chosen(slots=4), scale=1.0, fixed=0.0)
    uneven = {
        key: (distinct_experts(TARGET.experts, TARGET.top_k, 4 * key[1], 5.0),)
        for key in measured.verify
    }
    plain = chosen(slots=8, stored=measured)
    informed = chosen(slots=8, stored=replace(measured, experts=uneven))
    key = (8, 16, 8, 2048)
    assert informed.verify[key] != plain.verify[key]


def test_computed_costs_never_pass_for_measured_ones(tmp_path):
    computed = chosen()
    assert chosen(stored=computed).source == "roofline"
    computed.save(tmp_path / "table.json")
    assert CostTable.load(tmp_path / "table.json") == computed
    with pytest.raises(CostError, match="one table is measured, the other roofline"):
        as_measured(computed).merged(computed)
    with pytest.raises(CostError, match="source 'guessed'"):
        replace(computed, source="guessed")


def test_counts_of_experts_are_kept_and_checked(tmp_path):
    table = as_measured(chosen())
    key = next(iter(table.verify))
    seen = replace(table, experts={key: (41.5, 43.0)})
    seen.save(tmp_path / "table.json")
    assert CostTable.load(tmp_path / "table.json").experts == {key: (41.5, 43.0)}
    assert seen.merged(table).experts == seen.experts
    for wrong in ({(1, 2, 3, 4): (5.0,)}, {key: (0.0,)}):
        with pytest.raises(CostError, match="distinct experts of"):
            replace(table, experts=wrong)


def test_an_unknown_device_is_measured_or_refused():
    here = replace(HERE, device_kind="Some TPU v99", mesh=(), strategy="single")
    with pytest.raises(CostError, match="never computed"):
        chosen(here)
    measured = as_measured(chosen(here, device=find_device("H200")))
    assert chosen(here, stored=measured) is measured


def test_a_mesh_that_cannot_be_is_refused():
    wide = replace(HERE, mesh=(("model", 8),), strategy="tp")
    with pytest.raises(ConfigError, match="key/value heads 4; sizes.*1, 2, 4$"):
        chosen(wide)


def test_a_table_without_a_cell_does_not_cover():
    table = chosen()
    less = dict(table.draft)
    for context in CONTEXTS:
        del less[8, 7, context]
    assert not covers(replace(table, draft=less), wanted())
    assert not covers(table, replace(wanted(), slots=16))
    assert covers(table, Wanted(8, (7,), (), (), CONTEXTS))


def test_a_chunk_of_a_prompt_makes_a_step_longer_and_is_fitted_like_one():
    def wanted(slots):
        shapes = StepShapes(
            slots=slots, positions=0, width=16, stops=0, chunks=(32, 128), shards=4
        )
        return wanted_costs([DCutPolicy(CostTable.empty())], shapes, CONTEXTS)

    table = select(HERE, wanted(8), TARGET, DRAFTER)
    assert {key[3] for key in table.share} == {32, 128}
    for (B, rows, width, chunk, context), [ms] in table.share.items():
        [alone] = table.verify[B, rows, width, context]
        assert ms > alone
        if chunk == 128:
            assert ms > table.share[B, rows, width, 32, context][0]
    # Measured of another batch size, and of steps without a prompt alone.
    stored = replace(as_measured(table, scale=2.0, fixed=1.0), share={})
    fitted = select(HERE, wanted(16), TARGET, DRAFTER, stored=stored)
    bare = select(HERE, wanted(16), TARGET, DRAFTER)
    for key, [ms] in bare.share.items():
        assert fitted.share[key][0] == pytest.approx(1.0 + 2.0 * ms, rel=1e-3)
