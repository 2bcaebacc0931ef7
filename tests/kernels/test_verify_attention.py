"""verify_attention: every backend against loops in float64."""

import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, PartitionSpec, SingleDeviceSharding
from jaxtyping import TypeCheckError

from pallas_kernels.backends import Backend
from pallas_kernels.targets import (
    compiling_for,
    export_for,
    lowering_for,
    tpu_devices,
    tpu_races_found,
)
from pallas_kernels.verify_attention import Pages, cudnn, kernel, verify_attention
from pallas_kernels.verify_attention.cases import (
    CASES,
    LAYER,
    MORE_CASES,
    Case,
    case,
)
from pallas_kernels.verify_attention.softmax import first_seen, seen_pages

BATCH = ("q_BJHD", "k_BSGD", "v_BSGD", "mask_BJS", "page_BN", "length_B")
traces: list[Backend] = []


def pages_of(one: Case) -> Pages:
    arrays = one.k_YPGDC, one.v_YPGCD, LAYER, one.page_BN, one.length_B
    return Pages(*map(jnp.asarray, arrays))


def arguments(one: Case):
    fresh = one.q_BJHD, one.k_BSGD, one.v_BSGD, one.mask_BJS
    return tuple(map(jnp.asarray, fresh))


@partial(jax.jit, static_argnames=("backend", "window"))
def run(fresh, pages, position_BJ, *, backend, window):
    traces.append(backend)
    return verify_attention(
        *fresh, pages, backend=backend, position_BJ=position_BJ, window=window
    )


def found(one: Case, backend: Backend):
    position_BJ = jnp.asarray(one.position_BJ)
    args = arguments(one), pages_of(one), position_BJ
    return run(*args, backend=backend, window=one.window)


def by_hand(one: Case):
    """Row after row and head after head, keys in the order of their positions."""
    B, J, H, D = one.q_BJHD.shape
    repeat = H // one.k_BSGD.shape[2]
    wide = [x.astype(np.float64) for x in (one.k_BSGD, one.v_BSGD)]
    k_cached, v_cached = (
        x[LAYER].astype(np.float64) for x in (one.k_YPGDC, one.v_YPGCD)
    )
    C = k_cached.shape[-1]
    out = np.zeros((B, J, H, D))
    for b, j, h in np.ndindex(B, J, H):
        g, at = h // repeat, one.position_BJ[b, j]
        keys, values = [], []
        for p in range(one.length_B[b]):
            if one.window is None or at - p < one.window:
                page = one.page_BN[b, p // C]
                keys.append(k_cached[page, g, :, p % C])
                values.append(v_cached[page, g, p % C])
        for s in np.flatnonzero(one.mask_BJS[b, j]):
            keys.append(wide[0][b, s, g])
            values.append(wide[1][b, s, g])
        score = np.array(keys) @ one.q_BJHD[b, j, h].astype(np.float64) / np.sqrt(D)
        weight = np.exp(score - score.max())
        out[b, j, h] = weight @ np.array(values) / weight.sum()
    return out


def assert_close(got, one: Case):
    rounded = one.k_YPGDC.dtype != np.float32
    tolerance = 2e-2 if rounded else 2e-5
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, by_hand(one), rtol=tolerance, atol=tolerance)


class AttentionContract:
    backend: Backend

    @pytest.mark.parametrize(
        "one",
        [*CASES, *(pytest.param(one, marks=pytest.mark.slow) for one in MORE_CASES)],
        ids=lambda one: one.name,
    )
    def test_matches_loops(self, one):
        """Where nothing is NaN but what no row may use."""
        assert_close(found(one, self.backend), one)

    def test_a_request_is_the_same_beside_other_neighbours(self):
        one, other = CASES[0], CASES[2]
        mixed = {name: getattr(other, name).copy() for name in BATCH}
        for name in BATCH:
            mixed[name][2] = getattr(one, name)[0]
        beside = replace(one, **mixed)  # whose pages are none of theirs
        alone = found(one, self.backend)[0]
        np.testing.assert_allclose(
            found(beside, self.backend)[2], alone, rtol=1e-6, atol=1e-6
        )

    def test_lengths_tables_and_layers_are_run_time_values(self):
        found(CASES[0], self.backend)
        before = len(traces)
        one = replace(CASES[0], length_B=CASES[0].length_B // 2)
        assert_close(found(one, self.backend), one)
        assert len(traces) == before


class TestXla(AttentionContract):
    backend = "xla"


class TestInterpret(AttentionContract):
    backend = "pallas_interpret"


@pytest.mark.tpu
@pytest.mark.skipif(jax.default_backend() != "tpu", reason="needs a TPU")
class TestTpu(AttentionContract):
    backend = "pallas_tpu"


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
class TestXlaOnGpu(AttentionContract):
    backend = "xla"


def test_hand_computed():
    """One cached key and one fresh one, of which the query likes the former."""
    one = case("", [1], rows=1, heads=(1, 1), head_dim=2, pages=2, columns=1)
    one.k_YPGDC[LAYER, one.page_BN[0, 0], 0, :, 0] = [np.log(3) * np.sqrt(2), 0]
    one.v_YPGCD[LAYER, one.page_BN[0, 0], 0, 0] = [4.0, 8.0]
    one.q_BJHD[:], one.k_BSGD[:], one.v_BSGD[:] = [1, 0], [0, 5], [0, 4]
    np.testing.assert_allclose(found(one, "xla")[0, 0, 0], [3, 7], rtol=1e-6)


def test_pages_that_no_row_sees_are_left_out():
    one = next(c for c in CASES if c.window is not None)  # 40, 30, 2 and 48 cached
    pages = pages_of(one)
    since_BJ = first_seen(jnp.asarray(one.position_BJ), one.window)
    assert since_BJ[:, 0].tolist() == [30, 20, -8, 38]
    read = seen_pages(pages, since_BJ)
    assert read.first_B.tolist() == [3, 2, 0, 4]
    assert read.end_B.tolist() == [5, 4, 1, 6]
    assert seen_pages(pages, None).first_B.tolist() == [0] * 4
    empty = pages._replace(length_B=jnp.zeros(4, jnp.int32))
    assert seen_pages(empty, None).end_B.tolist() == [0] * 4


@pytest.mark.parametrize(
    "one",
    [CASES[4], pytest.param(CASES[0], marks=pytest.mark.slow)],
    ids=lambda one: one.name,
)
def test_the_tpu_interpreter_finds_no_race_and_nothing_out_of_bounds(one):
    params = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2)
    since_BJ = first_seen(jnp.asarray(one.position_BJ), one.window)
    launch = jax.jit(partial(kernel.launch_tpu, interpret=params))
    got = launch(*arguments(one), pages_of(one), since_BJ)
    assert_close(got, one)
    assert not tpu_races_found()


def random_attention(seed: int) -> Case:
    """Of one shape; lengths, page tables and what rows see are drawn."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 41, 4)
    one = case("random", lengths.tolist(), seed=seed)
    sees_BJS = rng.random(one.mask_BJS.shape) < 0.5
    return replace(one, mask_BJS=sees_BJS | np.eye(3, dtype=bool)[None])


@pytest.mark.parametrize(
    "seeds", [range(20), pytest.param(range(10_000), marks=pytest.mark.slow)], ids=len
)
def test_random_pages_in_the_kernel(seeds):
    for seed in seeds:
        one = random_attention(seed)
        assert_close(found(one, "pallas_interpret"), one)


SHAPES = [  # of requests, rows of each, heads, key/value heads, head dimension
    (16, 1, 9, 3, 64),
    (64, 4, 32, 8, 128),
    (32, 16, 32, 4, 128),
    (1, 128, 32, 8, 128),
    (8, 16, 8, 2, 256),
]


def declared(shape, dtype=jnp.bfloat16, window=None, pages=64):
    """A call and its arguments, with tables of 16 pages."""
    B, J, H, G, D = shape
    like = jax.ShapeDtypeStruct
    fresh = like((B, J, G, D), dtype)
    args = (
        like((B, J, H, D), jnp.float32),
        fresh,
        fresh,
        like((B, J, J), jnp.bool_),
        like((2, pages, G, D, 128), dtype),
        like((2, pages, G, 128, D), dtype),
        like((B, 16), jnp.int32),
        like((B,), jnp.int32),
        like((B, J), jnp.int32),
    )

    def call(backend):
        def attend(q, k, v, mask, k_pages, v_pages, page_BN, length_B, position_BJ):
            return verify_attention(
                q,
                k,
                v,
                mask,
                Pages(k_pages, v_pages, 1, page_BN, length_B),
                backend=backend,
                position_BJ=position_BJ,
                window=window,
            )

        return attend

    return call, args


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        (SHAPES[0], jnp.float32),
        (SHAPES[3], jnp.bfloat16),
        *(
            pytest.param(shape, dtype, marks=pytest.mark.slow)
            for shape in SHAPES
            for dtype in (jnp.float32, jnp.bfloat16)
        ),
    ],
)
def test_lowers_for_tpu(shape, dtype):
    call, args = declared(shape, dtype)
    assert "tpu_custom_call" in export_for("tpu", call("pallas_tpu"), *args)


def test_a_window_lowers_for_tpu():
    call, args = declared(SHAPES[2], window=512)
    assert "tpu_custom_call" in export_for("tpu", call("pallas_tpu"), *args)


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2", "v5p:2x2x1", "tpu7x:2x2x1"])
@pytest.mark.parametrize("shape", SHAPES)
def test_compiles_for_tpu_without_a_copy_of_the_pages(shape, topology):
    """By TPUs' own compiler, where it is installed; the pages are 64 MiB or more."""
    pytest.importorskip("libtpu")
    device = tpu_devices(topology)[0]
    call, args = declared(shape, pages=1024)
    at = SingleDeviceSharding(device)
    placed = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at) for x in args]
    with compiling_for(device):
        done = jax.jit(call("pallas_tpu")).lower(*placed).compile()
    pages = math.prod(args[4].shape) * 2
    assert pages >= 64 << 20
    assert done.memory_analysis().temp_size_in_bytes < pages / 4


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_the_reference_lowers_for_both(platform):
    call, args = declared(SHAPES[1])
    assert "stablehlo.while" in export_for(platform, call("xla"), *args)


@pytest.mark.parametrize(
    "backend", ["xla", pytest.param("pallas_interpret", marks=pytest.mark.slow)]
)
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="needs eight devices")
def test_key_value_heads_cut_over_a_mesh(backend):
    """Each device has its own heads; nothing crosses."""
    one = case("", [15, 9], heads=(16, 8))
    mesh = jax.make_mesh((8,), ("model",), axis_types=(AxisType.Auto,))
    heads = PartitionSpec(None, None, "model")
    whole = PartitionSpec()

    def attend(q, k, v, mask, k_pages, v_pages):
        pages = Pages(k_pages, v_pages, LAYER, one.page_BN, one.length_B)
        return verify_attention(q, k, v, mask, pages, backend=backend)

    run = jax.jit(
        jax.shard_map(
            attend,
            mesh=mesh,
            in_specs=(heads, heads, heads, whole, heads, heads),
            out_specs=heads,
            check_vma=False,
        )
    )
    assert_close(run(*arguments(one), one.k_YPGDC, one.v_YPGCD), one)


@pytest.mark.parametrize(
    ("heads", "rows", "dim", "at_once"),
    [
        (8, 64, 128, 8),
        (8, 512, 128, 2),
        (3, 3, 64, 3),
        (3, 2048, 256, 1),
        (6, 256, 128, 3),
    ],
)
def test_heads_at_once_are_equal_parts_that_fit(heads, rows, dim, at_once):
    assert kernel.heads_at_once(heads, rows, dim) == at_once


def test_cudnn_is_given_what_the_rows_see():
    """Its keys, values and mask, by XLA's attention of the same name."""
    for one in (CASES[0], CASES[4]):
        since_BJ = first_seen(jnp.asarray(one.position_BJ), one.window)
        q_BJHD, *fresh = arguments(one)
        keys, values, mask = cudnn.gathered(*fresh, pages_of(one), since_BJ)
        attention = partial(jax.nn.dot_product_attention, implementation="xla")
        assert_close(attention(q_BJHD, keys, values, mask=mask), one)


def test_cudnn_lowers_for_cuda(monkeypatch):
    from jax._src.cudnn import fused_attention_stablehlo as home

    monkeypatch.setattr(home, "check_cudnn_version", lambda: 91000)  # none is here
    call, args = declared(SHAPES[1], window=512)
    with lowering_for("cuda"):
        traced = jax.jit(call("cudnn")).trace(*args)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert "__cudnn$fmhaScaleBiasSoftmax" in text
        with pytest.raises(ValueError, match="capability 9.0 .* this is a CPU"):
            traced.lower()
    call, args = declared(SHAPES[1], jnp.float32)
    with pytest.raises(ValueError, match="16 bits, found float32; keep the cache in"):
        jax.eval_shape(call("cudnn"), *args)


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
@pytest.mark.parametrize("one", [CASES[5], MORE_CASES[-1]], ids=lambda one: one.name)
def test_cudnn_matches_loops(one):
    assert_close(found(one, "cudnn"), one)


def test_a_window_needs_positions():
    one = CASES[0]
    with pytest.raises(ValueError, match="expected position_BJ with it, found None"):
        verify_attention(*arguments(one), pages_of(one), backend="xla", window=5)


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("pallas_mosaic_gpu", "attention has no backend 'pallas_mosaic_gpu'"),
        ("triton", "choose one of xla, pallas_tpu, cudnn"),
    ],
)
def test_other_backends_are_refused(backend, message):
    one = CASES[0]
    with pytest.raises((ValueError, TypeCheckError), match=message):
        verify_attention(*arguments(one), pages_of(one), backend=backend)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="about the CPU")
def test_the_kernel_refuses_a_cpu():
    one = CASES[0]
    with pytest.raises(ValueError, match='this is a CPU; .*"pallas_interpret"'):
        verify_attention(*arguments(one), pages_of(one), backend="pallas_tpu")
