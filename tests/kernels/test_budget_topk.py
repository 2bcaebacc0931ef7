"""budget_topk: every backend against a sort of tuples."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jaxtyping import TypeCheckError

from pallas_kernels import Backend
from pallas_kernels.budget_topk import budget_topk
from pallas_kernels.budget_topk.cases import CASES, Case, falling

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
        # Survivals below 1e-37 may be flushed to 0.
        np.testing.assert_allclose(got.gain_R, gain_R, rtol=1e-6, atol=1e-36)

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
    backend = "pallas"


def test_hand_computed():
    survival_BK = jnp.array([[0.9, 0.45, 0.05], [0.5, 0.4, 0.3]], jnp.float32)
    got = budget_topk(
        jnp.log(survival_BK),
        jnp.ones(2, bool),
        jnp.array([1, 3, 4], jnp.int32),
        backend="xla",
    )
    assert got.keep_RB.tolist() == [[1, 0], [2, 1], [2, 2]]
    np.testing.assert_allclose(got.gain_R, [0.9, 1.85, 2.25], rtol=1e-6)


def export_for(platform: str, kind: str, batch: int, drafts: int, budgets: int):
    """Lowers the real kernel for a device that need not be there."""
    device = jax.sharding.AbstractDevice(
        device_kind=kind, num_cores=1, platform="gpu" if platform == "cuda" else "tpu"
    )
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    run = jax.jit(partial(budget_topk, backend="pallas"))
    with jax.sharding.use_abstract_mesh(mesh):
        return export.export(run, platforms=[platform])(
            jax.ShapeDtypeStruct((batch, drafts), jnp.float32),
            jax.ShapeDtypeStruct((batch,), jnp.bool_),
            jax.ShapeDtypeStruct((budgets,), jnp.int32),
        )


@pytest.mark.parametrize("shape", [(1, 1, 1), (16, 15, 8), (512, 31, 16)])
def test_lowers_for_tpu(shape):
    assert "tpu_custom_call" in export_for("tpu", "TPU v5e", *shape).mlir_module()


def test_pallas_refuses_a_gpu():
    with pytest.raises(ValueError, match='for a GPU.* use backend="xla"'):
        export_for("cuda", "NVIDIA H200", 16, 15, 8)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="about the CPU")
@pytest.mark.parametrize("run", [budget_topk, jitted], ids=["eager", "jit"])
def test_pallas_refuses_a_cpu(run):
    with pytest.raises(ValueError, match='for a CPU.* "pallas_interpret"'):
        run(*arguments(CASES[0]), backend="pallas")


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
    assert budget_topk(*inputs, backend="xla").keep_RB.shape == (budgets, batch)


def test_an_unknown_backend_is_refused():
    with pytest.raises((ValueError, TypeCheckError), match="backend"):
        budget_topk(*arguments(CASES[0]), backend="triton")
