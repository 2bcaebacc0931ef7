"""Measuring costs, and the store that keeps them."""

import dataclasses
import json
import time

import numpy as np
import pytest

from dcut_jax.cost.table import KEY_PARTS, CostError, CostTable
from dcut_jax.decode.defer import CATCH_UPS
from dcut_jax.decode.pack import layout
from dcut_jax.decode.steps import StepShapes
from dcut_jax.engine import profile as profile_module
from dcut_jax.engine.config import EngineConfig
from dcut_jax.engine.engine import Engine
from dcut_jax.engine.policy import ArPolicy, DCutPolicy, unmeasured
from dcut_jax.engine.profile import (
    contexts,
    cost_table,
    default_directory,
    fingerprint,
    profile,
    table_path,
)
from dcut_jax.engine.requests import Request
from pallas_kernels.backends import Backends

SLOTS, ROUNDS = 4, 2
CONFIG = EngineConfig(SLOTS, 224)
COMMAND = "python -m dcut_jax.profile"


NEEDED = [unmeasured()]


@pytest.fixture(scope="module")
def here(pair):
    return fingerprint(pair, CONFIG, "tiny target", "tiny/drafter")


@pytest.fixture(scope="module")
def policy():
    """Three tiers, so that little is compiled."""
    return dataclasses.replace(unmeasured(), widths=(3, 7), factors=(2.0,))


@pytest.fixture(scope="module")
def progress():
    return []


@pytest.fixture(scope="module")
def measured(pair, compiler, policy, here, progress):
    return profile(
        pair,
        CONFIG,
        [policy],
        here,
        [5, 6, 7],
        compiler=compiler,
        rounds=ROUNDS,
        on_progress=lambda *at: progress.append(at),
    )


@pytest.fixture(scope="module")
def shapes(pair):
    return StepShapes(SLOTS, CONFIG.positions, pair.drafter.max_drafts + 1, 4)


class TestProfile:
    def test_the_cells_are_those_of_the_policy(self, measured, policy, shapes):
        ends = contexts(CONFIG)
        assert ends == (128, 256)
        assert set(measured.draft) == {(SLOTS, w, at) for w in (3, 7) for at in ends}
        assert set(measured.verify) == {
            (SLOTS, lay.rows, lay.width, at)
            for lay in policy.layouts(shapes)
            for at in ends
        }
        assert set(measured.plan) == {(SLOTS,)}
        assert set(measured.catch_up) == {(SLOTS, steps) for steps in CATCH_UPS}

    def test_raw_samples_are_kept(self, measured, here):
        for cells in (getattr(measured, kind) for kind in KEY_PARTS):
            for samples in cells.values():
                assert len(samples) == ROUNDS
                assert all(0 < ms < 60_000 for ms in samples)
        assert measured.fingerprint == here

    def test_progress_is_told(self, measured, progress):
        kinds = (measured.draft, measured.verify, measured.plan, measured.catch_up)
        total = ROUNDS * sum(map(len, kinds))
        assert progress == [("batch 4", i, total) for i in range(1, total + 1)]

    def test_an_engine_runs_on_it(self, pair, compiler, measured, policy, shapes):
        own = dataclasses.replace(policy, table=measured)
        cost_ms = own.costs(shapes, own.measured(shapes, 64.0)).planned_MR
        assert cost_ms.shape == (2, 4)
        assert (cost_ms > measured.plan_ms(SLOTS)).all()
        prompts = [Request((5, 6, 7), 12), Request((40, 42, 44, 46), 12)]
        want = Engine(pair, CONFIG, ArPolicy(), compiler=compiler).generate(prompts)
        got = Engine(pair, CONFIG, own, compiler=compiler).generate(prompts)
        assert [c.tokens for c in got] == [c.tokens for c in want]

    @pytest.mark.parametrize(
        ("max_length", "want"),
        [
            (2, (128,)),
            (128, (128,)),
            (129, (128,)),
            (130, (128, 256)),
            (384, (128, 384)),
            (385, (128, 384)),
            (512, (128, 512)),
            (1000, (128, 512, 1024)),
            (2**15, (128, 512, 2048, 8192, 2**15)),
        ],
    )
    def test_contexts_are_whole_pages_up_to_the_longest(self, max_length, want):
        assert contexts(EngineConfig(1, max_length)) == want

    def test_a_context_is_what_is_cached(self, pair, compiler, policy, here):
        seen = set()
        draft = compiler.draft

        class Watched:
            def __getattr__(self, name):
                return getattr(compiler, name)

            def draft(self, *key):
                run = draft(*key)

                def step(params, cache, state):
                    seen.add(int(state.length_B.max()))
                    return run(params, cache, state)

                return step

        profile(pair, CONFIG, [policy], here, [5, 6, 7], compiler=Watched(), rounds=1)
        assert seen == {128, CONFIG.max_length - 1}


class TestSpread:
    """Which drafts a timed step verifies."""

    def test_by_hand(self):
        # Survivals .9 .45 | .5 .4 | .8 .08: the best three are two firsts and a .5.
        logp_BK = np.log([[0.9, 0.5], [0.5, 0.8], [0.8, 0.1]])
        keep_B = profile_module._spread(logp_BK, layout(3, 6, 3))
        assert keep_B.tolist() == [1, 1, 1]
        keep_B = profile_module._spread(logp_BK, layout(3, 7, 3))
        assert keep_B.tolist() == [2, 1, 1]

    def test_it_fills_the_rows_of_every_layout(self, policy, shapes):
        rng = np.random.default_rng(0)
        logp_BK = np.log(rng.uniform(0.01, 1, (SLOTS, 7)))
        for lay in unmeasured().layouts(shapes):
            keep_B = profile_module._spread(logp_BK, lay)
            assert keep_B.sum() == lay.rows - SLOTS
            assert keep_B.max(initial=0) < max(lay.width, 1)

    def test_drafts_without_confidence_come_last(self):
        logp_BK = np.full((2, 3), np.nan)
        logp_BK[:, 0] = np.log([0.5, 0.6])
        assert profile_module._spread(logp_BK, layout(2, 4, 4)).tolist() == [1, 1]


class TestFingerprint:
    def test_lengths_that_are_profiled_at_other_contexts_are_others(self, pair, here):
        for length, positions in ((129, 128), (130, 256), (256, 256), (257, 256)):
            config = dataclasses.replace(CONFIG, max_length=length)
            there = fingerprint(pair, config, "tiny target", "tiny/drafter")
            assert there.positions == contexts(config)[-1] == positions

    def test_it_says_what_and_where(self, pair, here):
        assert here.target == "tiny target"
        assert here.drafter == "tiny/drafter"
        assert here.device_kind
        assert here.host.endswith("cores")
        assert (here.dtype, here.draft_dtype) == ("float32", "float32")
        assert (here.cache_dtype, here.positions) == ("float32", 256)
        wider = EngineConfig(SLOTS, 512, cache_dtype="bfloat16")
        there = fingerprint(pair, wider, "tiny target", "tiny/drafter")
        assert here.differences(there) == [
            "cache_dtype: 'float32', here 'bfloat16'",
            "positions: 256, here 512",
        ]

    def test_steps_that_do_more_are_others(self, pair, here):
        more = EngineConfig(SLOTS, 224, sampling=True, logprobs=True)
        there = fingerprint(pair, more, "tiny target", "tiny/drafter")
        assert here.differences(there) == [
            "sampling: False, here True",
            "logprobs: 0, here 1",
        ]

    def test_other_kernels_are_others(self, pair, here):
        forms = Backends(budget_topk="pallas_interpret")
        there = fingerprint(
            pair,
            EngineConfig(SLOTS, 224, backends=forms),
            "tiny target",
            "tiny/drafter",
        )
        [difference] = here.differences(there)
        assert "budget_topk=xla" in difference
        assert "budget_topk=pallas_interpret" in difference

    def test_a_kernel_that_cannot_run_here_is_refused(self, pair):
        forms = EngineConfig(SLOTS, 224, backends=Backends(budget_topk="pallas_tpu"))
        with pytest.raises(ValueError, match="runs on TPUs alone, and this is a CPU"):
            fingerprint(pair, forms, "tiny target", "tiny/drafter")
        with pytest.raises(ValueError, match="runs on TPUs alone, and this is a CPU"):
            Engine(pair, forms, ArPolicy())

    def test_the_batch_size_is_in_the_cells_instead(self, pair, here):
        other = EngineConfig(SLOTS + 1, 224)
        assert fingerprint(pair, other, "tiny target", "tiny/drafter") == here


class TestStore:
    """`cost_table`: measured once, then read; never another machine's."""

    @pytest.fixture
    def fresh(self, here, shapes, invented_table):
        def make(slots=SLOTS):
            own = dataclasses.replace(shapes, slots=slots)
            table = invented_table(unmeasured(), own, lambda lay: float(lay.rows))
            return dataclasses.replace(table, fingerprint=here)

        return make

    def never(self):
        raise AssertionError("measured again")

    def test_measured_once_and_then_read(self, here, shapes, fresh, tmp_path):
        got = cost_table(NEEDED, shapes, here, tmp_path, measure_missing=fresh)
        assert got == fresh()
        again = cost_table(NEEDED, shapes, here, tmp_path, measure_missing=self.never)
        assert again == got

    def test_a_table_that_lacks_a_cell_is_measured_again(
        self, here, shapes, fresh, tmp_path
    ):
        whole = fresh()
        part = {k: v for k, v in whole.verify.items() if k[1] != shapes.slots}
        path = table_path(tmp_path, here)
        dataclasses.replace(whole, verify=part).save(path)
        got = cost_table(NEEDED, shapes, here, tmp_path, measure_missing=fresh)
        assert got == whole

    def test_reading_takes_milliseconds(self, here, shapes, fresh, tmp_path):
        cost_table(NEEDED, shapes, here, tmp_path, measure_missing=fresh)
        times = []
        for _ in range(5):
            start = time.perf_counter()
            cost_table(NEEDED, shapes, here, tmp_path, measure_missing=None)
            times.append(time.perf_counter() - start)
        assert min(times) < 0.05

    def test_another_batch_size_is_added(self, here, shapes, fresh, tmp_path):
        cost_table(NEEDED, shapes, here, tmp_path, measure_missing=fresh)
        other = dataclasses.replace(shapes, slots=8)
        got = cost_table(
            NEEDED, other, here, tmp_path, measure_missing=lambda: fresh(8)
        )
        for own in (shapes, other):
            assert dataclasses.replace(unmeasured(), table=got).covered(own)
        assert CostTable.load(table_path(tmp_path, here)) == got

    def test_nothing_stored_and_measuring_not_allowed(self, here, shapes, tmp_path):
        with pytest.raises(CostError, match=f"batch size 4.*no file.*{COMMAND}"):
            cost_table(NEEDED, shapes, here, tmp_path, measure_missing=None)

    def test_another_batch_size_stored_and_measuring_not_allowed(
        self, here, shapes, fresh, tmp_path
    ):
        cost_table(NEEDED, shapes, here, tmp_path, measure_missing=fresh)
        other = dataclasses.replace(shapes, slots=8)
        with pytest.raises(CostError, match=f"batch size 8.*not all.*{COMMAND}"):
            cost_table(NEEDED, other, here, tmp_path, measure_missing=None)

    @pytest.mark.parametrize(
        ("field", "value"),
        [("jax", "0.0.1"), ("host", "a laptop, 2 cores"), ("cache_dtype", "bfloat16")],
    )
    def test_another_fingerprint_is_refused_not_replaced(
        self, here, shapes, fresh, tmp_path, field, value
    ):
        there = dataclasses.replace(here, **{field: value})
        path = table_path(tmp_path, here)
        dataclasses.replace(fresh(), fingerprint=there).save(path)
        before = path.read_bytes()
        with pytest.raises(CostError, match=f"{field}: '{value}', here.*{COMMAND}"):
            cost_table(NEEDED, shapes, here, tmp_path, measure_missing=self.never)
        assert path.read_bytes() == before

    def test_a_corrupt_file_is_refused_by_name(self, here, shapes, fresh, tmp_path):
        cost_table(NEEDED, shapes, here, tmp_path, measure_missing=fresh)
        path = table_path(tmp_path, here)
        path.write_text(path.read_text()[:100])
        with pytest.raises(CostError, match=f"{path.name} is not a cost.*{COMMAND}"):
            cost_table(NEEDED, shapes, here, tmp_path, measure_missing=self.never)

    def test_a_table_with_a_cost_of_zero_is_refused(
        self, here, shapes, fresh, tmp_path
    ):
        cost_table(NEEDED, shapes, here, tmp_path, measure_missing=fresh)
        path = table_path(tmp_path, here)
        data = json.loads(path.read_text())
        data["plan"][0][1] = [0.0]
        path.write_text(json.dumps(data))
        with pytest.raises(CostError, match="finite samples above 0 ms"):
            cost_table(NEEDED, shapes, here, tmp_path, measure_missing=self.never)

    def test_paths_tell_models_and_sizes_apart(self, here, tmp_path):
        changes = [
            {},
            {"device_kind": "NVIDIA H20"},
            {"target": "other"},
            {"drafter": ""},
            {"dtype": "bfloat16"},
            {"draft_dtype": "bfloat16"},
            {"positions": 512},
            {"cache_dtype": "bfloat16"},
            {"jax": "0.0.1"},
            {"code": "other"},
            {"host": "a laptop, 2 cores"},
        ]
        paths = {table_path(tmp_path, dataclasses.replace(here, **c)) for c in changes}
        assert len(paths) == len(changes)
        assert all(p.parent == tmp_path for p in paths)
        assert all(" " not in p.name for p in paths)

    def test_the_directory_follows_the_environment(self, monkeypatch, tmp_path):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert default_directory() == tmp_path / "dcut-jax" / "cost"
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setenv("HOME", str(tmp_path))
        assert default_directory() == tmp_path / ".cache" / "dcut-jax" / "cost"


def test_the_policy_of_the_paper_can_be_profiled(pair, compiler, here, shapes):
    policy = DCutPolicy.published(CostTable.empty())
    table = profile(pair, CONFIG, [policy], here, [5], compiler=compiler, rounds=1)
    own = dataclasses.replace(policy, table=table)
    assert np.isfinite(list(own.measured(shapes, 300.0).values())).all()
