"""Layers with experts, dealt over devices, against one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from dcut_jax.config import ExpertsConfig
from dcut_jax.mesh import make_placement, param_partitions
from dcut_jax.models import experts
from dcut_jax.models.collectives import Dealt
from dcut_jax.models.params import init

E, N = 16, 12
CFG = ExpertsConfig(
    count=8, active=2, mlp=8, layers=(0,), gating="renormalised", shared_mlp=4
)


@pytest.fixture(scope="module")
def layer():
    return init(experts.specs(E, CFG), jax.random.key(0), jnp.dtype("float32"))


@pytest.fixture(scope="module")
def rows():
    """Rows of which some are padding and most are alike: experts are crowded."""
    x_NE = np.array(jax.random.normal(jax.random.key(1), (N, E)), np.float32)
    x_NE[4:10] = x_NE[4]
    return x_NE, np.arange(N) % 5 != 3


@pytest.mark.parametrize(
    ("sizes", "strategy"),
    [
        ({"expert": 4}, "ep"),
        ({"expert": 2, "model": 2}, "tp+ep"),
        ({"data": 2, "expert": 2}, "dp+ep"),
    ],
)
@pytest.mark.parametrize("dealt", [True, False], ids=["dealt rows", "the same rows"])
def test_experts_on_other_devices_add_what_they_would_here(
    layer, rows, sizes, strategy, dealt
):
    placement = make_placement(sizes, strategy)
    want = experts.forward(jnp.asarray(rows[0]), layer, CFG, jnp.asarray(rows[1]))
    at = P(placement.slot_axes) if dealt else P()

    def fn(layer, x_NE, valid_N):
        return experts.forward(
            x_NE, layer, CFG, valid_N, placement.model_axis, Dealt("expert", dealt)
        )

    run = jax.jit(
        jax.shard_map(
            fn,
            mesh=placement.mesh,
            in_specs=(param_partitions(experts.specs(E, CFG), placement), at, at),
            out_specs=at,
            check_vma=False,
        )
    )
    np.testing.assert_allclose(run(layer, *rows), want, rtol=1e-4, atol=1e-5)
