"""grouped_swiglu: every backend against loops, and what the blocks promise."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from pallas_kernels.backends import Backend
from pallas_kernels.experts import grouped_swiglu
from pallas_kernels.experts.api import BY_PLATFORM
from pallas_kernels.experts.blocks import ROWS, occupied
from pallas_kernels.experts.cases import CASES, Case, case

jitted = jax.jit(grouped_swiglu, static_argnames="backend")


def arguments(case: Case, dtype="float32"):
    weights = case.gate_QEF, case.up_QEF, case.down_QFE
    return (
        jnp.asarray(case.x_NE),
        jnp.asarray(case.size_Q),
        *(jnp.asarray(w, dtype) for w in weights),
    )


def by_hand(case: Case):
    """Row after row, in float64."""
    out = np.zeros(case.x_NE.shape)
    owner = np.repeat(np.arange(len(case.size_Q)), case.size_Q)
    for n, q in enumerate(owner):
        x = case.x_NE[n].astype(np.float64)
        gate, up = x @ case.gate_QEF[q], x @ case.up_QEF[q]
        out[n] = (gate / (1 + np.exp(-gate)) * up) @ case.down_QFE[q]
    return out


class ExpertsContract:
    backend: Backend

    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
    def test_matches_loops(self, case):
        got = jitted(*arguments(case), backend=self.backend)
        np.testing.assert_allclose(got, by_hand(case), rtol=1e-4, atol=1e-3)

    def test_rows_of_nobody_are_zero(self):
        found = next(c for c in CASES if c.name == "rows_of_nobody")
        got = jitted(*arguments(found), backend=self.backend)
        assert np.all(np.asarray(got)[6:] == 0)

    def test_products_are_in_the_weights_dtype_and_come_out_in_float32(self):
        found = CASES[0]
        got = jitted(*arguments(found, "bfloat16"), backend=self.backend)
        assert got.dtype == jnp.float32
        want = by_hand(found)
        assert np.max(np.abs(got - want)) < 0.05 * np.max(np.abs(want))


class TestReference(ExpertsContract):
    backend = "reference"


class TestBlocks(ExpertsContract):
    backend = "blocks"

    @pytest.mark.parametrize("rows", [1, 3, 8, 12, 24, 64, 130])
    def test_a_row_is_the_same_bit_for_bit_whatever_runs_beside_it(self, rows):
        """In batches of any size, at any place of a block, alone or not."""
        whole = case("", [0, 130, 0], rows=130, embed=64, mlp=48)
        x_NE, _, *weights = arguments(whole)
        want_NE = np.asarray(
            jitted(x_NE, jnp.array([0, 130, 0]), *weights, backend="blocks")
        )
        first = 130 - rows
        size_Q = jnp.array([rows // 3, rows - rows // 3, 0])
        # Expert 0 has the first third, so that expert 1's rows begin anywhere.
        got_NE = jitted(x_NE[first:], size_Q, *weights, backend="blocks")
        own = first + rows // 3
        np.testing.assert_array_equal(got_NE[rows // 3 :], want_NE[own:])

    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
    def test_blocks_without_rows_are_not_run(self, case):
        blocks = occupied(jnp.asarray(case.size_Q), len(case.x_NE))
        want = [
            (q, int(np.sum(case.size_Q[:q])) + start)
            for q, size in enumerate(case.size_Q)
            for start in range(0, size, ROWS)
        ]
        number = int(blocks.number)
        assert number == len(want) <= len(blocks.expert_X)
        got = zip(blocks.expert_X.tolist(), blocks.row_X.tolist(), strict=True)
        assert list(got)[:number] == want


class TestRaggedDot(ExpertsContract):
    backend = "ragged_dot"


class TestPlatform(ExpertsContract):
    backend = "platform"

    def test_it_is_the_backend_of_the_platform(self):
        args = arguments(CASES[0])
        want = jitted(*args, backend=BY_PLATFORM["cpu"])
        np.testing.assert_array_equal(jitted(*args, backend="platform"), want)

    def test_a_tpu_gets_the_grouped_product_and_a_gpu_the_loop(self):
        def text(platform):
            lowered = export.export(jitted, platforms=[platform])
            return lowered(*arguments(CASES[0]), backend="platform").mlir_module()

        assert "ragged_dot" in text("tpu")
        assert "stablehlo.while" not in text("tpu")
        assert "stablehlo.while" in text("cuda")
        assert "stablehlo.while" in text("cpu")


def test_tokamax_says_that_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokamax", None)
    with pytest.raises(ImportError, match='"tokamax" needs|tokamax, which is not'):
        grouped_swiglu(*arguments(CASES[0]), backend="tokamax")


def test_tokamax_gets_what_it_asks_for(monkeypatch):
    """Of its `ragged_dot`, by a stand-in: rows, weights and sizes in their places."""

    class StandIn:
        @staticmethod
        def ragged_dot(lhs, rhs, group_sizes, *, precision, preferred_element_type):
            return jax.lax.ragged_dot(
                lhs,
                rhs,
                group_sizes,
                precision=precision,
                preferred_element_type=preferred_element_type,
            )

    monkeypatch.setitem(sys.modules, "tokamax", StandIn)
    got = grouped_swiglu(*arguments(CASES[0]), backend="tokamax")
    np.testing.assert_allclose(got, by_hand(CASES[0]), rtol=1e-4, atol=1e-3)


def test_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match="experts has no backend 'cuda'; choose one"):
        grouped_swiglu(*arguments(CASES[0]), backend="cuda")
