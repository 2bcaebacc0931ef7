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

E, N = 16, 24
CFG = ExpertsConfig(
    count=8, active=2, mlp=8, layers=(0,), gating="renormalised", shared_mlp=4
)


@pytest.fixture(scope="module")
def layer():
    return init(experts.specs(E, CFG), jax.random.key(0), jnp.dtype("float32"))


VALID_N = np.arange(N) % 6 != 5


@pytest.fixture(scope="module", params=["mixed", "alike"])
def rows(request):
    """Rows, of which most may want the same experts."""
    x_NE = np.array(jax.random.normal(jax.random.key(7), (N, E)), np.float32)
    if request.param == "alike":
        x_NE[4:20] = x_NE[4]
    return x_NE


def most_asked(layer, x_NE, shards, devices):
    """The most rows of a shard that ask for one device, by plain counting."""
    expert_NA = np.asarray(experts.route(x_NE, layer["router_EQ"], CFG).expert_NA)
    device_NA = expert_NA // (CFG.count // devices)
    rows_of_shards = np.split(np.arange(N), shards)
    asked = [
        sum(device in device_NA[n] for n in rows if VALID_N[n])
        for rows in rows_of_shards
        for device in range(devices)
    ]
    return max(asked)


@pytest.mark.parametrize(
    ("sizes", "strategy"),
    [
        ({"expert": 4}, "ep"),
        ({"expert": 2, "model": 2}, "tp+ep"),
        ({"data": 2, "expert": 4}, "dp+ep"),
    ],
)
@pytest.mark.parametrize("dealt", [True, False], ids=["dealt rows", "the same rows"])
def test_experts_on_other_devices_add_what_they_would_here(
    layer, rows, sizes, strategy, dealt
):
    placement = make_placement(sizes, strategy)
    want = experts.forward(jnp.asarray(rows), layer, CFG, jnp.asarray(VALID_N))
    over = placement.slot_axes if dealt else ()
    at = P(over or None)

    def fn(layer, x_NE, valid_N):
        out, crowded = experts.forward_on_mesh(
            x_NE, layer, CFG, valid_N, placement.model_axis, Dealt("expert", over)
        )
        return out, jnp.full(1, crowded)

    run = jax.jit(
        jax.shard_map(
            fn,
            mesh=placement.mesh,
            in_specs=(param_partitions(experts.specs(E, CFG), placement), at, at),
            out_specs=(at, P(placement.mesh.axis_names)),
            check_vma=False,
        )
    )
    got, crowded = run(layer, rows, VALID_N)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    many, shards = sizes["expert"], placement.shards
    room = experts.capacity(N // shards, CFG.active, many)
    too_many = most_asked(layer, rows, shards, many) > room
    assert crowded.tolist() == [int(dealt and too_many)] * placement.mesh.size


def test_rows_travel_both_ways(layer):
    """Or the test above would compare one way alone."""
    room = experts.capacity(N // 4, CFG.active, 4)
    assert room < N // 4
    x_NE = np.array(jax.random.normal(jax.random.key(7), (N, E)), np.float32)
    assert most_asked(layer, x_NE, 4, 4) <= room
    x_NE[4:20] = x_NE[4]
    assert most_asked(layer, x_NE, 4, 4) > room


def test_room_for_all_where_all_may_come():
    assert experts.capacity(8, 8, 2) == 8
    assert experts.capacity(64, 8, 64) == 10
    assert experts.capacity(1, 2, 4) == 1
