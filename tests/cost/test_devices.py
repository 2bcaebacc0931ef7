"""Peak rates: complete, with sources, and never made up."""

import pytest

from dcut_jax.cost.devices import find_device, known_devices
from dcut_jax.cost.host import measure_host
from dcut_jax.cost.table import CostError

WANTED = "a100-40gb a100-80gb h100 h200 h20 b200 tpu-v4 tpu-v5e tpu-v5p tpu-v6e tpu-v7x"


def test_every_kind_is_there_with_its_source():
    assert set(known_devices()) == set(WANTED.split())
    for device in known_devices().values():
        assert device.source
        # Operations for every byte: elsewhere a unit is wrong.
        assert 30 < device.products_per_s("bfloat16") / device.memory_per_s < 600
        assert device.memory_per_s > device.link_per_s > 1e11
        assert 1e10 < device.memory_bytes < 3e11


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("h200", "h200"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("TPU v5 lite", "tpu-v5e"),
        ("TPU v5", "tpu-v5p"),
        ("TPU v6 lite", "tpu-v6e"),
        ("TPU7x", "tpu-v7x"),
    ],
)
def test_jax_names_and_short_ones_are_understood(kind, name):
    assert find_device(kind).name == name


@pytest.mark.parametrize("kind", ["cpu", "NVIDIA L40S", "H2", "", "NVIDIA H200 NVL"])
def test_other_kinds_are_measured_or_nothing(kind):
    with pytest.raises(CostError, match="never computed.*dcut_jax.profile"):
        find_device(kind)


def test_a_rate_that_nobody_published_is_no_rate():
    assert find_device("h200").products_per_s("float32") == 67e12
    with pytest.raises(CostError, match="no peak rate of float32 products"):
        find_device("tpu-v5e").products_per_s("float32")


def test_a_link_is_what_a_device_can_send():
    """Data sheets add both directions."""
    assert find_device("h200").link_per_s == 450e9


def test_a_device_of_jax_may_be_half_a_chip():
    half = find_device("TPU7x")
    assert half.products_per_s("bfloat16") == 2307e12 / 2
    assert half.memory_bytes == 96 * 2**30


def test_this_machine_is_measured():
    host = measure_host({"float32"}, seconds=0.01)
    assert host.products_per_s("float32") > 1e9
    with pytest.raises(CostError, match="no peak rate of bfloat16"):
        host.products_per_s("bfloat16")
    assert host.memory_per_s > 1e8
    assert host.memory_bytes > 1e9
    assert host.link_per_s == 0
