"""Chunks of prompts that go along with the steps of those who decode."""

from dataclasses import replace

import numpy as np
import pytest

from dcut_jax.decode.compile import Compiler
from dcut_jax.decode.steps import anchors_only
from dcut_jax.engine.config import EngineConfig
from dcut_jax.engine.engine import Engine
from dcut_jax.engine.paging import bytes_of_page
from dcut_jax.engine.policy import (
    ArPolicy,
    DCutPolicy,
    FixedPolicy,
    share_work,
    unmeasured,
    verify_work,
)
from dcut_jax.engine.profile import contexts, fingerprint, profile
from dcut_jax.engine.requests import Request
from dcut_jax.engine.steering import Steering

SLOTS = 3
CONFIG = EngineConfig(
    SLOTS,
    200,
    sampling=True,
    logprobs=True,
    likeliest=2,
    prefix_cache=False,
    shared_chunks=(32,),
)
TWO = replace(CONFIG, shared_chunks=(8, 32))
# Texts of the tiny pair: it has learned sequences that count up.
EASY = [tuple(range(a, a + 4)) for a in (55, 8, 36)]


def cost(lay):
    return 1.0 + 0.06 * lay.rows


@pytest.fixture(scope="module")
def compiler(pair):
    return Compiler(pair, "float32")


@pytest.fixture(scope="module")
def policies(pair, invented_table):
    def make(verify_ms=cost, config=CONFIG, widths=(3,), **choice):
        policy = replace(unmeasured(), widths=widths, factors=(2.0,), **choice)
        shapes = config.shapes(pair)
        return replace(policy, table=invented_table(policy, shapes, verify_ms))

    return {"ar": ArPolicy(), "fixed": FixedPolicy(3), "dcut": make()} | {"make": make}


def serve(engine, requests):
    """Decodes requests; all but the first are run beside those who came earlier."""
    engine.reset()
    engine.records = []
    waiting = list(requests)
    done = [engine.admit(engine.prefill(waiting.pop(0)))]
    begun = None
    while waiting or begun or engine.running:
        if begun is None and waiting and engine.admits(waiting[0]):
            begun = engine.begin_prefill(waiting.pop(0))
        if begun and not engine.active:
            engine.prefill_chunk(begun)
        elif begun and begun.left:
            engine.step(begun)
        else:
            engine.step()
        if begun and not begun.left and engine.admits(begun.request):
            done.append(engine.admit(engine.end_prefill(begun)))
            begun = None
    return done


@pytest.fixture(scope="module")
def requests():
    long = tuple(range(3, 90))
    hot = {"temperature": 0.9, "seed": 5}
    return [
        Request(EASY[0], 60),
        Request(long, 30),
        Request(EASY[1], 12, **hot),
        Request(long[40:60], 40, **hot),
        Request(long[7:47], 20),
    ]


@pytest.fixture(scope="module")
def plain(pair, compiler, requests):
    config = replace(CONFIG, shared_chunks=())
    return Engine(pair, config, ArPolicy(), compiler=compiler).generate(requests)


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param("ar", marks=pytest.mark.slow),
        pytest.param("fixed", marks=pytest.mark.slow),
        "dcut",
    ],
)
def test_the_texts_are_those_of_plain_decoding(
    pair, compiler, policies, requests, plain, mode, compilations
):
    engine = Engine(pair, CONFIG, policies[mode], compiler=compiler)
    compilations.clear()
    got = serve(engine, requests)
    assert compilations == []
    assert [c.tokens for c in got] == [c.tokens for c in plain]
    for one, other in zip(got, plain, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert len(one.likeliest) == len(one.tokens)
        for mine, its in zip(one.likeliest, other.likeliest, strict=True):
            assert [t for t, _ in mine] == [t for t, _ in its]
            assert [p for _, p in mine] == pytest.approx([p for _, p in its], abs=1e-4)
    first = got[0]  # greedy: what was taken is the likeliest
    assert [some[0] for some in first.likeliest] == list(
        zip(first.tokens, first.logprobs, strict=True)
    )
    along = [r for r in engine.records if r.prompt_rows]
    assert {r.prompt_rows for r in along} == {32}
    assert sum(r.committed for r in along) >= len(along)
    assert engine.paging.used == 0


@pytest.mark.slow
def test_who_was_put_aside_comes_back_along_with_steps(pair, compiler, requests):
    memory = 3 * bytes_of_page(pair, "float32")
    config = replace(CONFIG, kv_memory=memory)
    engine = Engine(pair, config, FixedPolicy(3))
    long = [replace(r, prompt=r.prompt * 4, max_new_tokens=70) for r in requests[::2]]
    long = [replace(r, prompt=r.prompt[:100]) for r in long]
    alone = replace(CONFIG, shared_chunks=())
    want = Engine(pair, alone, ArPolicy(), compiler=compiler).generate(long)
    got = engine.generate(long)
    assert [c.tokens for c in got] == [c.tokens for c in want]
    assert engine.preemptions > 0
    assert any(r.prompt_rows for r in engine.records)


class TestCosts:
    def test_a_chunk_is_no_reason_to_draft_more(self, pair, policies):
        """Where its time comes on top, whatever the rows, the plan stays."""
        policy, shapes = policies["dcut"], CONFIG.shapes(pair)
        ms = policy.measured(shapes, 128)
        beside, own = policy.beside(shapes, ms, 32)
        assert own == pytest.approx(0.1 * 32)
        for lay in policy.shared(shapes):
            assert beside[verify_work(lay)] == pytest.approx(ms[verify_work(lay)])

    def test_wide_steps_take_none_along(self, pair, policies):
        policy, shapes = policies["make"](config=TWO, widths=(3, 7)), TWO.shapes(pair)
        ms, _ = policy.beside(shapes, policy.measured(shapes, 128), 8)
        costs = policy.costs(shapes, ms)
        assert policy.tiers(shapes) == (3, 6, 12, 24)
        assert np.isfinite(costs.planned_MR[0]).tolist() == [True, True, True, False]
        assert np.isinf(costs.planned_MR[1][2:]).all()
        assert np.isfinite(costs.full_M).tolist() == [True, False]
        assert np.isfinite(costs.plain_ms)

    def test_rows_that_are_dearer_beside_a_chunk_are_fewer(
        self, pair, compiler, policies
    ):
        """Alone rows are all but free; beside a chunk each costs."""
        policy = policies["make"](lambda lay: 10.0 + 1e-3 * lay.rows)
        dear = {key: (20.0 + 5 * key[1],) for key in policy.table.share}
        policy = replace(policy, table=replace(policy.table, share=dear), correct=False)
        engine = Engine(pair, CONFIG, policy, compiler=compiler)
        request = Request(tuple(range(3, 90)) * 2, 1)
        engine.reset()
        running = [engine.admit(engine.prefill(Request(p, 150))) for p in EASY[:2]]
        for _ in range(8):
            engine.step()
        begun = engine.begin_prefill(request)
        while begun.left:
            engine.step(begun)
        engine.flush()
        assert all(done.finish == "running" for done in running)
        along = [r for r in engine.records if r.prompt_rows == 32]
        alone = [r for r in engine.records if not r.prompt_rows]
        assert len(along) >= 5
        assert max(r.rows for r in along) < 12 <= max(r.rows for r in alone)

    def test_a_time_limit_counts_the_chunk(self, pair, policies):
        """With 32 rows no step is short enough, with 8 some are."""
        policy, shapes = policies["make"](config=TWO, correct=False), TWO.shapes(pair)
        steering = Steering(policy, shapes)
        assert steering.chunk(32, 100, float("inf")) == 32
        assert steering.chunk(8, 100, float("inf")) == 8
        assert steering.chunk(32, 100, 5.0) == 32  # 1.18 ms of anchors, and 3.2
        assert steering.chunk(32, 100, 4.0) == 8
        assert steering.chunk(32, 100, 0.1) == 8
        # 2 ms have room for 0.8 of the chunk and a plain step, not for two rows each.
        costs = steering._plan_costs(None, 100, 2.1, 8)
        tiers = policy.tiers(shapes)
        fits = [t for t, ms in zip(tiers, costs.planned_MR[0], strict=True) if ms < 1e6]
        assert fits == [SLOTS]
        assert steering._plan_costs(None, 100, 2.1).planned_MR[0][1] < 1e6

    def test_they_are_measured(self, pair, compiler, policies):
        policy, here = policies["dcut"], fingerprint(pair, CONFIG, "tiny", "tiny")
        table = profile(
            pair, CONFIG, [policy], here, [5, 6, 7], compiler=compiler, rounds=1
        )
        shapes, ends = CONFIG.shapes(pair), contexts(CONFIG)
        assert set(table.share) == {
            (SLOTS, lay.rows, lay.width, 32, end)
            for lay in policy.shared(shapes)
            for end in ends
        }
        own = replace(policy, table=table)
        assert own.covered(shapes)
        bare = replace(policy, table=replace(table, share={}))
        assert not bare.covered(shapes)
        ms = own.measured(shapes, ends[0])
        assert share_work(anchors_only(shapes), 32) in ms


class TestRefusals:
    def test_a_step_that_takes_none(self, pair, compiler):
        config = replace(CONFIG, shared_chunks=())
        engine = Engine(pair, config, ArPolicy(), compiler=compiler)
        engine.admit(engine.prefill(Request(EASY[0], 9)))
        with pytest.raises(ValueError, match="expected an engine with shared_chunks"):
            engine.step(engine.begin_prefill(Request(EASY[1], 9)))

    def test_a_policy_that_takes_none(self, pair):
        policy = DCutPolicy.published(unmeasured().table)
        with pytest.raises(ValueError, match="takes no prompts along"):
            Engine(pair, CONFIG, policy)

    @pytest.mark.parametrize("chunks", [(32, 8), (8, 8), (0,)])
    def test_sizes_that_cannot_be(self, chunks):
        with pytest.raises(ValueError, match="ascending order"):
            replace(CONFIG, shared_chunks=chunks)
