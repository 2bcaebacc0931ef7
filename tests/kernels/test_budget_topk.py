"""budget_topk: every backend against a sort of tuples."""

import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import TypeCheckError

from dcut_jax.cut import numpy_plan
from pallas_kernels.backends import Backend
from pallas_kernels.budget_topk import budget_topk, kernel, reference
from pallas_kernels.budget_topk.api import MOST_DRAFTS
from pallas_kernels.budget_topk.cases import CASES, SMALL, Case, case, falling
from pallas_kernels.budget_topk.keys import NEVER, order_keys, survival_units
from pallas_kernels.targets import (
    export_for,
    gpu_interpreter,
    gpu_races_found,
    tpu_races_found,
)

jitted = jax.jit(budget_topk, static_argnames="backend")


def arguments(case: Case):
    return tuple(map(jnp.asarray, (case.log_survival_BK, case.active_B, case.budget_R)))


def by_hand(case: Case):
    """Kept drafts and gain of each budget, one draft at a time."""
    drafts = []
    for b, row in enumerate(case.log_survival_BK.tolist()):
        lowest = math.inf
        for k, value in enumerate(row):
            if math.isnan(value) or not case.active_B[b]:
                break
            lowest = min(lowest, value)
            drafts.append((-lowest, k, b))
    drafts.sort()
    keep_RB = np.zeros((case.budget_R.size, case.active_B.size), np.int32)
    gains = []
    for r, budget in enumerate(case.budget_R):
        best = drafts[: max(0, budget)]
        for _, _, b in best:
            keep_RB[r, b] += 1
        gains.append(math.fsum(math.exp(-cost) for cost, _, _ in best))
    return keep_RB, np.array(gains)


class BudgetTopKContract:
    backend: Backend

    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
    def test_matches_a_sort_of_tuples(self, case):
        got = jitted(*arguments(case), backend=self.backend)
        keep_RB, gain_R = by_hand(case)
        np.testing.assert_array_equal(got.keep_RB, keep_RB)
        error_R = np.abs(got.gain_R - gain_R)
        assert (error_R <= 6e-6 * keep_RB.sum(axis=1) + 1e-7 * gain_R).all()

    def test_gains_are_those_of_integers(self):
        """So that whatever adds them up, in whatever order, finds the same tier."""
        logs_BK = falling(*SMALL)
        everything = jnp.array([logs_BK.size], jnp.int32)
        active_B = jnp.ones(len(logs_BK), bool)
        got = jitted(jnp.asarray(logs_BK), active_B, everything, backend=self.backend)
        units = numpy_plan.survival_units(logs_BK).sum()
        assert got.gain_R.tolist() == [units * 2.0**-17]

    def test_budgets_are_run_time_values(self):
        traces = []

        @jax.jit
        def run(log_survival_BK, active_B, budget_R):
            traces.append(None)
            return budget_topk(
                log_survival_BK, active_B, budget_R, backend=self.backend
            )

        x_BK, active_B = jnp.asarray(falling(5, 7)), jnp.ones(5, bool)
        for budgets in ([0, 3], [35, 1]):
            got = run(x_BK, active_B, jnp.array(budgets, jnp.int32))
            assert got.keep_RB.sum(axis=1).tolist() == budgets
        assert len(traces) == 1

    def test_permuting_requests_permutes_the_selection(self):
        x_BK, active_B = falling(5, 7), np.array([True, True, False, True, True])
        budget_R = jnp.arange(8, dtype=jnp.int32) * 4
        order_B = np.array([3, 0, 4, 2, 1])
        run = partial(jitted, backend=self.backend)
        got = run(jnp.asarray(x_BK[order_B]), jnp.asarray(active_B[order_B]), budget_R)
        want = run(jnp.asarray(x_BK), jnp.asarray(active_B), budget_R)
        np.testing.assert_array_equal(got.keep_RB, want.keep_RB[:, order_B])


class TestXla(BudgetTopKContract):
    backend = "xla"


class TestInterpret(BudgetTopKContract):
    backend = "pallas_interpret"


@pytest.mark.tpu
@pytest.mark.skipif(jax.default_backend() != "tpu", reason="needs a TPU")
class TestTpu(BudgetTopKContract):
    backend = "pallas_tpu"


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
class TestMosaicGpu(BudgetTopKContract):
    backend = "pallas_mosaic_gpu"


def test_hand_computed():
    survival_BK = jnp.array([[0.9, 0.45, 0.05], [0.5, 0.4, 0.3]], jnp.float32)
    got = jitted(
        jnp.log(survival_BK),
        jnp.ones(2, bool),
        jnp.array([1, 3, 4], jnp.int32),
        backend="xla",
    )
    assert got.keep_RB.tolist() == [[1, 0], [2, 1], [2, 2]]
    np.testing.assert_allclose(got.gain_R, [0.9, 1.85, 2.25], rtol=1e-5)


def random_case(seed: int) -> Case:
    """Many ties, holes and inactive requests, all of one shape."""
    rng = np.random.default_rng(seed)
    confidence_BK = rng.uniform(0.05, 1.0, (20, 7))
    if seed % 3 == 0:
        confidence_BK = np.round(confidence_BK, 1)
    if seed % 3 == 1:
        confidence_BK = rng.choice([0.0, 0.5, 1.0], (20, 7))
    with np.errstate(divide="ignore"):
        logs_BK = np.log(confidence_BK).cumsum(axis=1).astype(np.float32)
    logs_BK[rng.random((20, 7)) < 0.03] = np.nan
    return case("random", logs_BK, rng.random(20) < 0.9)


@pytest.mark.parametrize(
    "seeds", [range(100), pytest.param(range(10_000), marks=pytest.mark.slow)], ids=len
)
def test_random_batches_in_the_kernel(seeds):
    for seed in seeds:
        one = random_case(seed)
        got = jax.device_get(jitted(*arguments(one), backend="pallas_interpret"))
        keep_RB, gain_R = by_hand(one)
        np.testing.assert_array_equal(got.keep_RB, keep_RB, err_msg=str(seed))
        np.testing.assert_allclose(got.gain_R, gain_R, rtol=1e-6, atol=1e-3)


@pytest.mark.parametrize("backend", ["xla", "pallas_interpret"])
def test_shards_of_a_batch_are_planned_apart(backend):
    """By one call under `vmap`, which is how a mesh plans."""
    shards = [random_case(seed) for seed in range(3)]
    stacked = [jnp.stack(parts) for parts in zip(*map(arguments, shards), strict=True)]
    got = jax.jit(jax.vmap(partial(budget_topk, backend=backend)))(*stacked)
    for s, shard in enumerate(shards):
        np.testing.assert_array_equal(got.keep_RB[s], by_hand(shard)[0])


def test_shards_lower_for_tpu():
    shapes = [((4, 16, 7), jnp.float32), ((4, 16), jnp.bool_), ((4, 8), jnp.int32)]
    run = jax.vmap(partial(budget_topk, backend="pallas_tpu"))
    args = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    assert "tpu_custom_call" in export_for("tpu", run, *args)


def test_survivals_are_the_same_integers_in_numpy_and_near_the_true_ones():
    edges = [0.0, -0.0, 0.5, -np.inf, -1e-45, -16.0, -15.999999, -(2.0**-20)]
    logs_N = np.append(np.linspace(-17, 0, 400_001), edges).astype(np.float32)
    units_N = jax.device_get(jax.jit(survival_units)(jnp.asarray(logs_N)))
    np.testing.assert_array_equal(units_N, numpy_plan.survival_units(logs_N))
    true_N = np.exp(np.minimum(logs_N.astype(np.float64), 0))
    assert np.abs(units_N * 2.0**-17 - true_N).max() < 6e-6
    assert (np.diff(units_N[: -len(edges)]) >= 0).all()  # a likelier draft is no less


def launched(launch, one: Case):
    """What a launcher makes of a case, and what the reference does."""
    key_KB = order_keys(jnp.asarray(one.log_survival_BK), jnp.asarray(one.active_B)).T
    budget_R = jnp.clip(jnp.asarray(one.budget_R), 0, jnp.sum(key_KB > NEVER))
    got = launch(kernel.tile(key_KB), budget_R)
    keep_RB = got.keep_RB.reshape(budget_R.size, -1)[:, : key_KB.shape[1]]
    return (keep_RB, got.units_R), reference.select(key_KB, budget_R)


SMALL_CASES = [one for one in CASES if one.log_survival_BK.shape == SMALL]


def test_the_tpu_interpreter_finds_no_race_and_nothing_out_of_bounds():
    params = pltpu.InterpretParams(detect_races=True)  # one program: one core is all
    launch = jax.jit(
        partial(kernel.launch_tpu, drafts=SMALL[1], interpret=params),
    )
    for one in SMALL_CASES[::2]:
        got, want = launched(launch, one)
        jax.tree.map(np.testing.assert_array_equal, got, tuple(want))
        assert not tpu_races_found(), one.name


def test_the_gpu_interpreter_agrees_and_finds_nothing_out_of_bounds():
    with gpu_interpreter():
        launch = jax.jit(partial(kernel.launch_gpu, drafts=SMALL[1]))
        for one in SMALL_CASES[1::2]:
            got, want = launched(launch, one)
            jax.tree.map(np.testing.assert_array_equal, got, tuple(want))


def test_the_gpu_interpreter_finds_no_race(monkeypatch):
    """With its blocks as one cluster, for only those are there at once."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    make = plgpu.kernel

    def as_cluster(body, *, grid, grid_names, **rest):
        return make(body, cluster=grid, cluster_names=grid_names, **rest)

    monkeypatch.setattr(plgpu, "kernel", as_cluster)
    one = replace(SMALL_CASES[1], budget_R=np.array([3, 17], np.int32))
    with gpu_interpreter():
        launch = jax.jit(partial(kernel.launch_gpu, drafts=SMALL[1]))
        got, want = launched(launch, one)
        jax.tree.map(np.testing.assert_array_equal, got, tuple(want))
    assert not gpu_races_found()


def lowered_for(platform: str, backend: Backend, batch: int, drafts: int, budgets: int):
    return export_for(
        platform,
        partial(budget_topk, backend=backend),
        jax.ShapeDtypeStruct((batch, drafts), jnp.float32),
        jax.ShapeDtypeStruct((batch,), jnp.bool_),
        jax.ShapeDtypeStruct((budgets,), jnp.int32),
    )


@pytest.mark.parametrize("shape", [(1, 1, 1), (16, 15, 8), (512, 31, 16)])
def test_lowers_for_tpu(shape):
    assert "tpu_custom_call" in lowered_for("tpu", "pallas_tpu", *shape)


@pytest.mark.parametrize(
    "shape",
    [  # of this kind of kernel lowering takes 15 s alone
        (512, 31, 16),
        pytest.param((1, 1, 1), marks=pytest.mark.slow),
        pytest.param((16, 15, 8), marks=pytest.mark.slow),
    ],
)
def test_lowers_for_cuda(shape):
    assert "mosaic_gpu" in lowered_for("cuda", "pallas_mosaic_gpu", *shape)


@pytest.mark.parametrize(
    ("platform", "backend", "message"),
    [
        ("cuda", "pallas_tpu", 'runs on TPUs alone, and this is a GPU; use "xla"'),
        ("tpu", "pallas_mosaic_gpu", "of compute capability 9.0 .* this is a TPU"),
    ],
)
def test_a_kernel_is_not_lowered_for_another_platform(platform, backend, message):
    with pytest.raises(ValueError, match=message):
        lowered_for(platform, backend, 16, 15, 8)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="about the CPU")
@pytest.mark.parametrize("run", [budget_topk, jitted], ids=["eager", "jit"])
@pytest.mark.parametrize("backend", ["pallas_tpu", "pallas_mosaic_gpu"])
def test_the_kernels_refuse_a_cpu(run, backend):
    with pytest.raises(ValueError, match='this is a CPU; .*"pallas_interpret"'):
        run(*arguments(CASES[0]), backend=backend)


def test_more_drafts_than_a_gain_holds_are_refused():
    batch = MOST_DRAFTS // 31 + 1
    inputs = jnp.zeros((batch, 31)), jnp.ones(batch, bool), jnp.zeros(1, jnp.int32)
    with pytest.raises(ValueError, match=f"at most {MOST_DRAFTS} drafts"):
        budget_topk(*inputs, backend="xla")


@pytest.mark.parametrize("shape", [(513, 1, 1), (1, 32, 1), (1, 1, 17)])
def test_the_kernel_states_its_limits(shape):
    batch, drafts, budgets = shape
    inputs = (
        jnp.zeros((batch, drafts)),
        jnp.ones(batch, bool),
        jnp.zeros(budgets, jnp.int32),
    )
    with pytest.raises(ValueError, match=r"\(512, 31, 16\).* got .*" + str(batch)):
        budget_topk(*inputs, backend="pallas_interpret")
    assert jitted(*inputs, backend="xla").keep_RB.shape == (budgets, batch)


def test_an_unknown_backend_is_refused():
    with pytest.raises((ValueError, TypeCheckError), match="backend"):
        budget_topk(*arguments(CASES[0]), backend="triton")
