"""The engine on meshes: the text of one device, one plan, and nothing compiled late."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dcut_jax.config import ConfigError
from dcut_jax.cost.table import CostError, CostTable
from dcut_jax.decode.compile import Compiler
from dcut_jax.decode.placing import on_mesh
from dcut_jax.engine.config import EngineConfig
from dcut_jax.engine.engine import Engine
from dcut_jax.engine.policy import ArPolicy, FixedPolicy, unmeasured
from dcut_jax.engine.profile import fingerprint, table_path
from dcut_jax.engine.requests import Request
from dcut_jax.mesh import make_placement

MAX_LENGTH = 224
CONFIG = EngineConfig(8, MAX_LENGTH)
TRACE = Path(__file__).parents[1] / "golden" / "dflash" / "full" / "trace.json"


@pytest.fixture(scope="module")
def requests():
    """More than slots, of many lengths; one stops early, one emits two tokens."""
    found = [tuple(p["prompt"]) for p in json.loads(TRACE.read_text())]
    many = [Request(p[: 3 + i % 6], 24 + i) for i, p in enumerate(found[:9])]
    return [*many, Request((found[8] * 13)[:100], 40), Request(found[3][:5], 2)]


@pytest.fixture(scope="module")
def want(pair, compiler, requests):
    """The text of the narrow model, on one device."""
    engine = Engine(pair, CONFIG, ArPolicy(), compiler=compiler)
    return [c.tokens for c in engine.generate(requests)]


@pytest.fixture(scope="module")
def planner(invented_table):
    """From models to a policy that plans at every step, between three tiers.

    It learns nothing, so equal confidences make equal plans.
    """

    def make(models, verify_ms=lambda lay: 1.0 + lay.rows / 16):
        policy = replace(
            unmeasured(),
            widths=(7,),
            factors=(2.0,),
            plain=False,
            bypass=False,
            calibrate=False,
            correct=False,
        )
        shapes = CONFIG.shapes(models)
        return replace(policy, table=invented_table(policy, shapes, verify_ms))

    return make


@pytest.fixture(scope="module")
def both_ways(wide_pair):
    """Two shards of requests, each on two devices that share the model."""
    return on_mesh(wide_pair, make_placement({"data": 2, "model": 2}, "dp+tp"))


@pytest.fixture(scope="module")
def planned(both_ways, planner):
    return Engine(both_ways, CONFIG, planner(both_ways))


def texts(engine, requests):
    return [c.tokens for c in engine.generate(requests)]


def test_the_text_is_that_of_one_device(planned, requests, want, compilations):
    # Host-side helpers of JAX compile once in a process; the second pass has none.
    assert texts(planned, requests) == want
    compilations.clear()
    assert texts(planned, requests) == want
    assert compilations == []
    rows = {r.rows for r in planned.records}
    assert rows <= {8, 16, 64}
    assert len(rows) > 1
    assert sum(r.accepted for r in planned.records) > 2 * len(planned.records)


def test_parameters_and_caches_are_cut(planned, both_ways):
    target = both_ways.params["target"]
    q_EHD, embed_VE = target["layers"][0]["q_EHD"], target["embed_VE"]
    assert q_EHD.addressable_shards[0].data.shape == (64, 8, 24)
    assert embed_VE.addressable_shards[0].data.shape == (52, 64)
    planned.reset()
    Y, P, G, D, C = planned.caches.target.k.shape
    local = planned.caches.target.k.addressable_shards[0].data
    assert local.shape == (Y, P // 2, G // 2, D, C)


def test_a_known_prefix_comes_to_all_shards(planned, compiler, pair, requests):
    some = [t for r in requests for t in r.prompt][:150]
    asked = [Request((*some[: 128 + i], 7), 12 + i) for i in range(12)]
    alone = Engine(pair, CONFIG, ArPolicy(), compiler=compiler)
    assert texts(planned, asked) == texts(alone, asked)
    paging = planned.paging
    assert planned.found_tokens >= 11 * 128
    assert paging.free + paging.used + paging.cached == planned.shapes.pages
    assert paging.used == 0
    # The first is still known, in one shard, and whoever begins like it goes there.
    hit = paging.hit(asked[0].prompt)
    assert hit.tokens == 128
    engine_slots = range(CONFIG.slots)
    slot = paging.slot_for(engine_slots, asked[0].prompt, 140)
    assert paging.shard(slot) == hit.shard
    assert paging.shard(paging.slot_for(engine_slots, (1, 2, 3), 9)) == 0


def apart(x, copies):
    """An array that lies on every device, with what each of them is to see instead."""
    parts = [
        jax.device_put(copy, shard.device)
        for copy, shard in zip(copies, x.addressable_shards, strict=True)
    ]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts)


@pytest.fixture
def noisy(planned, monkeypatch):
    """Makes one device see other confidences than the rest, in every step."""

    def make(device):
        rng = np.random.default_rng(device)
        draft = planned.compiler.draft

        def noisy_draft(*key):
            run = draft(*key)

            def step(*args):
                got = run(*args)
                seen = [np.asarray(s.data) for s in got.logp_BK.addressable_shards]
                seen[device] = seen[device] + rng.uniform(-9, 0, seen[device].shape)
                seen[device] = seen[device].astype(np.float32)
                return replace(got, logp_BK=apart(got.logp_BK, seen))

            return step

        monkeypatch.setattr(planned.compiler, "draft", noisy_draft)

    return make


@pytest.fixture
def plans(planned, monkeypatch):
    """What each device was told to keep, plan after plan."""
    seen = []
    decide = planned.compiler.decide

    def watched(*key):
        run = decide(*key)

        def step(*args):
            got = run(*args)
            seen.append([np.asarray(s.data) for s in got[0].addressable_shards])
            return got

        return step

    monkeypatch.setattr(planned.compiler, "decide", watched)
    return seen


@pytest.mark.parametrize("device", [0, 1, 3])
def test_no_device_acts_on_a_plan_of_its_own(
    planned, noisy, plans, requests, want, device
):
    assert texts(planned, requests) == want
    clean = [plan[0].tolist() for plan in plans]
    plans.clear()
    noisy(device)
    assert texts(planned, requests) == want
    for plan in plans:
        assert len(plan) == 4
        assert all((own == plan[0]).all() for own in plan)
    # The first device's word counts: its noise changes plans, another's nothing.
    assert ([plan[0].tolist() for plan in plans] == clean) == (device != 0)


@pytest.fixture
def deciding(planned, requests, monkeypatch):
    """The compiled planner, and what it was given in the middle of these texts."""
    seen = []
    decide = planned.compiler.decide

    def watched(*key):
        run = decide(*key)

        def step(*args):
            seen.append((run, args))
            return run(*args)

        return step

    monkeypatch.setattr(planned.compiler, "decide", watched)
    texts(planned, requests)
    return seen[len(seen) // 2]


def test_each_device_holds_the_plan_of_the_first_ones_confidences(deciding):
    run, (proposal, *rest) = deciding
    shape = proposal.logp_BK.shape
    of_a_device = arrays(np.float32, shape, elements=st.floats(-9, 0, width=32))

    def plan(logp_NBK):
        return run(replace(proposal, logp_BK=apart(proposal.logp_BK, logp_NBK)), *rest)

    @settings(max_examples=40, deadline=None)
    @given(st.lists(of_a_device, min_size=4, max_size=4))
    def check(logp_NBK):
        want = jax.device_get(plan(logp_NBK[:1] * 4))
        for found, same in zip(
            jax.tree.leaves(plan(logp_NBK)), jax.tree.leaves(want), strict=True
        ):
            for shard in found.addressable_shards:
                np.testing.assert_array_equal(np.asarray(shard.data), same)

    check()


def test_what_does_not_divide_is_refused(pair, wide_pair, both_ways):
    with pytest.raises(ConfigError, match="key/value heads 2.*sizes that divide") as e:
        on_mesh(pair, make_placement({"model": 8}, "tp"))
    assert "vocabulary 101" in str(e.value)
    with pytest.raises(ConfigError, match="batch size 3"):
        Engine(both_ways, EngineConfig(3, MAX_LENGTH), ArPolicy())


def test_engines_of_another_mesh_are_refused(planned, wide_pair):
    with pytest.raises(ValueError, match="the mesh"):
        Engine(wide_pair, CONFIG, ArPolicy(), compiler=planned.compiler)


def test_each_layout_has_costs_of_its_own(wide_pair, both_ways, tmp_path):
    names = {"target": "tiny", "drafter": "tinier"}
    layouts = [
        wide_pair,
        both_ways,
        replace(both_ways, placement=make_placement({"data": 4}, "dp")),
        replace(both_ways, placement=make_placement({"expert": 4}, "ep")),
        replace(both_ways, placement=make_placement({"data": 2}, "dp")),
    ]
    prints = [fingerprint(models, CONFIG, **names) for models in layouts]
    paths = {table_path(tmp_path, here) for here in prints}
    assert len(paths) == len(layouts)
    assert prints[0].strategy == "single"
    assert prints[1].mesh == (("data", 2), ("model", 2))
    assert prints[1].device_count == 4
    path = tmp_path / "table.json"
    CostTable(prints[1], {}, {}, {}, {}).save(path)
    stored = CostTable.load(path)
    assert stored.require(prints[1]) is stored
    for here in (*prints[:1], *prints[2:]):
        with pytest.raises(CostError, match="strategy: 'dp\\+tp', here"):
            stored.require(here)


MESHES = [
    ({"data": 2}, "dp"),
    ({"data": 8}, "dp"),
    ({"model": 2}, "tp"),
    ({"model": 8}, "tp"),
    ({"expert": 4}, "ep"),
    ({"data": 4, "model": 2}, "dp+tp"),
    ({"data": 2, "model": 4}, "dp+tp"),
    ({"expert": 2, "model": 4}, "tp+ep"),
    ({"data": 2, "expert": 4}, "dp+ep"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "strategy"),
    MESHES,
    ids=["-".join([s, *map(str, sizes.values())]) for sizes, s in MESHES],
)
def test_every_mesh_strategy_and_tier_gives_one_text(
    wide_pair, requests, want, invented_table, compilations, sizes, strategy
):
    models = on_mesh(wide_pair, make_placement(sizes, strategy))
    compiler = Compiler(models, "float32")
    shapes = CONFIG.shapes(models)

    def check(policy):
        engine = Engine(models, CONFIG, policy, compiler=compiler)
        assert texts(engine, requests) == want, policy
        return {r.rows for r in engine.records}

    check(ArPolicy())
    check(FixedPolicy(7))
    base = replace(unmeasured(), bypass=False, correct=False)
    used = set()
    for favoured in base.tiers(shapes):

        def verify_ms(lay, rows=favoured):
            return 1e-3 if lay.rows == rows else 1e3

        table = invented_table(base, shapes, verify_ms)
        # The first engine compiles for all; whoever runs after it compiles nothing.
        compilations.clear()
        late = bool(used)
        used |= check(replace(base, table=table))
        assert not late or compilations == []
    assert used == {rows * shapes.shards for rows in base.tiers(shapes)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "strategy"), [({"model": 2}, "tp"), ({"data": 2, "model": 2}, "dp+tp")]
)
def test_draws_and_log_probabilities_are_those_of_one_device(
    wide_pair, requests, sizes, strategy
):
    config = replace(CONFIG, sampling=True, logprobs=True, likeliest=3)
    drawn = [
        replace(r, temperature=0.8, top_p=0.95, seed=i) if i % 3 else r
        for i, r in enumerate(requests)
    ]
    models = on_mesh(wide_pair, make_placement(sizes, strategy))
    want = Engine(wide_pair, config, FixedPolicy(7)).generate(drawn)
    got = Engine(models, config, FixedPolicy(7)).generate(drawn)
    assert [c.tokens for c in got] == [c.tokens for c in want]
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-4)
        for mine, its in zip(a.likeliest, b.likeliest, strict=True):
            assert [t for t, _ in mine] == [t for t, _ in its]
