"""Can the interpreters find what kernels are run in them for? Planted faults say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.targets import gpu_interpreter, gpu_races_found, tpu_races_found

ROWS, LANES = 8, 128
X = np.arange(2 * ROWS * LANES, dtype=np.float32).reshape(2 * ROWS, LANES)
OUT = jax.ShapeDtypeStruct(X.shape, jnp.float32)


def on_tpu(body, *, to, **params):
    """Two programs, each with its half of `X`; `to(i)` is the half they write."""
    return pl.pallas_call(
        body,
        grid=(2,),
        in_specs=[pl.BlockSpec((ROWS, LANES), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((ROWS, LANES), lambda i: (to(i), 0)),
        out_shape=OUT,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=pltpu.InterpretParams(**params),
    )(X)


def raced(run, seen):
    """Whether a detector found a race in a run; since JAX 0.12 by an exception."""
    try:
        jax.block_until_ready(run())
    except Exception as error:
        if "race" not in str(error).lower():
            raise
        return True
    return seen()


def twice(x_ref, out_ref):
    out_ref[...] = x_ref[...] * 2


@pytest.mark.parametrize(
    ("to", "cores", "found"),
    [
        (lambda i: i, 2, False),
        (lambda i: 0, 2, True),
        # One core runs programs in turn, so it sees nothing of what two would do.
        (lambda i: 0, 1, False),
    ],
    ids=["apart", "over each other", "over each other, one core"],
)
def test_programs_that_write_over_each_other_on_a_tpu(to, cores, found):
    def run():
        return on_tpu(twice, to=to, detect_races=True, num_cores_or_threads=cores)

    try:
        assert raced(run, tpu_races_found) == found
    finally:
        pltpu.reset_tpu_interpret_mode_state()


@pytest.mark.parametrize("row", [1, -1], ids=["behind", "before"])
def test_a_read_out_of_bounds_on_a_tpu(row):
    def beyond(x_ref, out_ref):
        first = jnp.where(pl.program_id(0) < 2, row, 0)
        out_ref[...] = x_ref[pl.ds(first, ROWS), :]

    try:
        with pytest.raises(Exception, match="(?s)Out-of-bounds read"):
            jax.block_until_ready(on_tpu(beyond, to=lambda i: i))
    finally:
        pltpu.reset_tpu_interpret_mode_state()


def on_gpu(**programs):
    """Two programs that both write the first row."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def body(x_ref, out_ref):
        out_ref[0] = x_ref[jax.lax.axis_index("i")]

    run = plgpu.kernel(
        body,
        out_type=OUT,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
        **programs,
    )
    with gpu_interpreter():
        return raced(lambda: jax.jit(run)(X), gpu_races_found)


def test_threads_that_write_over_each_other_on_a_gpu():
    assert on_gpu(num_threads=2, thread_name="i")


def test_blocks_of_a_cluster_that_write_over_each_other_on_a_gpu():
    assert on_gpu(cluster=(2,), cluster_names=("i",))


@pytest.mark.xfail(
    jax.__version_info__ < (0, 11),
    strict=True,
    reason="JAX 0.10 runs blocks of a grid one after another, so that no two are there "
    "at once to be compared; those of a cluster are. Kernels are run as one cluster",
)
def test_blocks_of_a_grid_that_write_over_each_other_on_a_gpu():
    assert on_gpu(grid=(2,), grid_names=("i",))
