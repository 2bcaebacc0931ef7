"""Meshes, strategies and what they refuse."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from dcut_jax.axes import mesh_axes, serving_rules
from dcut_jax.cli import mesh_sizes
from dcut_jax.config import ConfigError
from dcut_jax.mesh import STRATEGIES, make_placement, partition, require_divisible


@pytest.mark.parametrize(
    ("strategy", "axes", "shards", "heads"),
    [
        ("dp", ("data",), 2, None),
        ("tp", ("model",), 1, "model"),
        ("ep", ("expert",), 2, None),
        ("dp+tp", ("data", "model"), 2, "model"),
        ("tp+ep", ("expert", "model"), 2, "model"),
        ("dp+ep", ("data", "expert"), 4, None),
    ],
)
def test_each_strategy_has_its_axes_and_cuts(strategy, axes, shards, heads):
    assert mesh_axes(strategy) == axes
    placement = make_placement(dict.fromkeys(axes, 2), None)
    assert placement.strategy == strategy
    assert placement.shards == shards
    assert placement.spec(["embed", "heads", "head_dim"]) == P(None, heads, None)
    assert placement.described == tuple((axis, 2) for axis in axes)


def test_every_strategy_is_in_the_table_above():
    assert {mesh_axes(s) for s in STRATEGIES} == {
        ("data",),
        ("model",),
        ("expert",),
        ("data", "model"),
        ("expert", "model"),
        ("data", "expert"),
    }


def test_requests_lie_over_both_axes_of_dp_and_ep():
    assert serving_rules("dp+ep")["slots"] == ("data", "expert")
    assert partition(["slots", None], serving_rules("dp+ep")) == P(
        ("data", "expert"), None
    )


def test_devices_that_share_a_model_are_neighbours():
    placement = make_placement({"model": 2, "data": 4}, "dp+tp")
    ids = np.vectorize(lambda device: device.id)(placement.mesh.devices)
    assert ids.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_one_device_is_no_mesh():
    assert make_placement({"data": 1, "model": 1}, "dp+tp") is None


def test_a_rule_that_cuts_twice_is_refused():
    with pytest.raises(ConfigError, match="twice"):
        partition(["heads", "mlp"], serving_rules("tp"))


@pytest.mark.parametrize(
    ("sizes", "strategy", "message"),
    [
        ({"data": 2}, "tp", "strategy tp needs a mesh with the axes model; found data"),
        ({"data": 2, "model": 2}, "dp", "axes data; found data, model"),
        ({"model": 16}, "tp", "model=16 is 16 devices, and there are 8"),
        ({"data": 2, "expert": 2, "model": 2}, None, "no strategy uses"),
    ],
)
def test_axes_that_do_not_fit_are_refused(sizes, strategy, message):
    with pytest.raises(ConfigError, match=message):
        make_placement(sizes, strategy)


def test_sizes_that_divide_are_listed():
    with pytest.raises(ConfigError) as error:
        require_divisible("mesh axis model", 2, {"heads": 9, "key/value heads": 3})
    assert str(error.value) == (
        "mesh axis model 2 does not divide heads 9, key/value heads 3; sizes that "
        "divide all it cuts: 1, 3"
    )
    require_divisible("mesh axis model", 3, {"heads": 9, "key/value heads": 3})


def test_sizes_on_the_command_line():
    assert mesh_sizes("data=2,model=4") == {"data": 2, "model": 4}
    for wrong in ("data", "data=0", "rows=2", "data=2,data=2", ""):
        with pytest.raises(Exception, match="expected"):
            mesh_sizes(wrong)
    assert len(jax.devices()) == 8
