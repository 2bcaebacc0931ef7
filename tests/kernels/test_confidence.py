"""head_confidence: every backend against NumPy in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, PartitionSpec

from pallas_kernels.backends import Backend
from pallas_kernels.confidence import from_logits, head_confidence, kernel
from pallas_kernels.confidence.cases import CASES, Case
from pallas_kernels.confidence.partial import finish, merge, of_logits
from pallas_kernels.confidence.reference import words
from pallas_kernels.targets import export_for, tpu_races_found

jitted = jax.jit(head_confidence, static_argnames=("backend", "chunk"))


def by_hand(case: Case):
    """The statistics in float64, of the products that the head's dtype gives."""
    hidden_NE = case.hidden_NE.astype(case.head_VE.dtype).astype(np.float64)
    logits_NV = hidden_NE @ case.head_VE.astype(np.float64).T
    token_N = logits_NV.argmax(axis=1)
    ordered_NV = np.sort(logits_NV, axis=1)
    peak_N = ordered_NV[:, -1]
    log_total_N = np.log(np.exp(logits_NV - peak_N[:, None]).sum(axis=1))
    margin_N = peak_N - ordered_NV[:, -2]
    return token_N, -log_total_N, margin_N, peak_N + log_total_N, peak_N


def assert_close(got, case: Case):
    token_N, logp_N, margin_N, lse_N, peak_N = by_hand(case)
    np.testing.assert_array_equal(got.token, token_N)
    np.testing.assert_allclose(got.logp, logp_N, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got.margin, margin_N, rtol=1e-5, atol=2e-5)
    np.testing.assert_allclose(got.lse, lse_N, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got.peak, peak_N, rtol=1e-5, atol=1e-5)
    assert {x.dtype for x in got[1:]} == {jnp.dtype(jnp.float32)}


class ConfidenceContract:
    backend: Backend
    chunk: int | None = None

    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
    def test_matches_numpy(self, case):
        arrays = jnp.asarray(case.hidden_NE), jnp.asarray(case.head_VE)
        assert_close(jitted(*arrays, backend=self.backend, chunk=self.chunk), case)

    @pytest.mark.parametrize(
        ("word", "value"), [(0, np.nan), (1299, np.nan), (5, np.inf), (None, -np.inf)]
    )
    def test_a_row_without_a_distribution_has_no_statistics(self, word, value):
        head_VE = np.zeros((1300, 1), np.float32)
        head_VE[word] = value  # None: of every word
        got = jitted(
            jnp.ones((1, 1)),
            jnp.asarray(head_VE),
            backend=self.backend,
            chunk=self.chunk,
        )
        assert all(np.isnan(x).all() for x in (got.logp, got.margin, got.lse))
        assert not np.isfinite(got.peak).any()
        assert 0 <= got.token[0] < 1300


class TestXla(ConfidenceContract):
    backend = "xla"


class TestXlaChunked(ConfidenceContract):
    backend, chunk = "xla", 512


class TestInterpret(ConfidenceContract):
    backend = "pallas_interpret"


@pytest.mark.tpu
@pytest.mark.skipif(jax.default_backend() != "tpu", reason="needs a TPU")
class TestTpu(ConfidenceContract):
    backend = "pallas_tpu"


def test_hand_computed():
    got = from_logits(jnp.log(jnp.array([[0.2, 0.5, 0.3], [0.7, 0.1, 0.2]])))
    assert got.token.tolist() == [1, 0]
    np.testing.assert_allclose(got.logp, np.log([0.5, 0.7]), rtol=1e-6)
    np.testing.assert_allclose(got.margin, np.log([0.5 / 0.3, 0.7 / 0.2]), rtol=1e-5)
    np.testing.assert_allclose(got.lse, [0, 0], atol=1e-6)


def test_pieces_merge_in_any_order():
    rng = np.random.default_rng(0)
    logits_NV = jnp.asarray(rng.integers(0, 6, (50, 12)), jnp.float32)  # many ties
    whole = from_logits(logits_NV)
    left, right = logits_NV[:, :5], logits_NV[:, 5:]
    a = of_logits(left, words(left.shape, 0))
    b = of_logits(right, words(right.shape, 5))
    for got in (finish(merge(a, b)), finish(merge(b, a))):
        np.testing.assert_array_equal(got.token, whole.token)
        np.testing.assert_array_equal(got.margin, whole.margin)
        np.testing.assert_allclose(got.logp, whole.logp, rtol=1e-6)


def random_case(seed: int) -> Case:
    """Of one shape; spreads from flat to certain, and every third full of ties."""
    rng = np.random.default_rng(seed)
    if seed % 3 == 0:
        logits_NV = rng.integers(-3, 4, (6, 300)).astype(np.float32)
    else:
        spread = 10.0 ** rng.uniform(-3, 3)
        logits_NV = (rng.standard_normal((6, 300)) * spread).astype(np.float32)
    return Case("random", np.eye(6, dtype=np.float32), logits_NV.T.copy())


@pytest.mark.parametrize(
    "seeds", [range(60), pytest.param(range(10_000), marks=pytest.mark.slow)], ids=len
)
def test_random_heads_in_the_kernel(seeds):
    for seed in seeds:
        one = random_case(seed)
        arrays = jnp.asarray(one.hidden_NE), jnp.asarray(one.head_VE)
        got = jax.device_get(jitted(*arrays, backend="pallas_interpret", chunk=None))
        assert_close(got, one)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="needs eight devices")
@pytest.mark.parametrize("form", [("xla", 100), ("pallas_interpret", None)])
def test_a_head_cut_over_a_mesh_is_the_whole_one(form):
    backend, chunk = form
    mesh = jax.make_mesh((8,), ("model",), axis_types=(AxisType.Auto,))
    split, whole = PartitionSpec("model"), PartitionSpec()
    run = jax.jit(
        jax.shard_map(
            partial(head_confidence, backend=backend, chunk=chunk, over="model"),
            mesh=mesh,
            in_specs=(whole, split),
            out_specs=whole,
            check_vma=False,
        )
    )
    for case in (CASES[0], CASES[3]):  # 2600 words: 325 on each
        arrays = jnp.asarray(case.hidden_NE), jnp.asarray(case.head_VE)
        assert_close(run(*arrays), case)


def test_the_tpu_interpreter_finds_no_race_and_only_the_last_block_ragged():
    case = CASES[0]
    params = pltpu.InterpretParams(
        detect_races=True, num_cores_or_threads=2, out_of_bounds_reads="uninitialized"
    )
    launch = partial(kernel.launch_tpu, blocks=kernel.Blocks(8, 1024), interpret=params)
    found = jax.jit(launch)(jnp.asarray(case.hidden_NE), jnp.asarray(case.head_VE))
    assert_close(finish(found), case)
    assert not tpu_races_found()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", [(1, 576, 49152), (512, 4096, 151936)])
def test_lowers_for_tpu(shape, dtype):
    rows, embed, vocab = shape
    text = export_for(
        "tpu",
        partial(head_confidence, backend="pallas_tpu", chunk=None),
        jax.ShapeDtypeStruct((rows, embed), jnp.float32),
        jax.ShapeDtypeStruct((vocab, embed), dtype),
    )
    assert "tpu_custom_call" in text


def test_there_is_no_kernel_for_gpus():
    arrays = jnp.zeros((1, 8)), jnp.zeros((4, 8))
    with pytest.raises(ValueError, match="confidence has no backend 'pallas_mosaic"):
        head_confidence(*arrays, backend="pallas_mosaic_gpu", chunk=None)
