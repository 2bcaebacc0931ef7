"""Memory for keys and values, from what a device has left."""

import jax
import pytest

from dcut_jax.config import ConfigError
from dcut_jax.engine import memory
from dcut_jax.engine.config import EngineConfig
from dcut_jax.engine.memory import PROMPTS, SHARE, free_bytes, kv_budget
from dcut_jax.engine.paging import bytes_of_page, pages_in

CONFIG = EngineConfig(4, 200)  # of two pages a slot


@pytest.fixture
def page(pair):
    return bytes_of_page(pair, "float32")


def test_where_all_slots_fit_nothing_is_bounded(pair, page):
    free = (PROMPTS * 2 + round(4 * 2 / SHARE) + 1) * page
    assert kv_budget(pair, CONFIG, free) is None


def test_else_the_pages_of_what_is_free_are_taken(pair, page):
    budget = kv_budget(pair, CONFIG, 10 * page)
    assert 2 * page <= budget < 8 * page
    assert budget == int(SHARE * (10 - PROMPTS * 2) * page)
    assert pages_in(pair, "float32", budget) == 4


def test_a_text_that_never_fits_is_an_error_at_the_start(pair, page):
    with pytest.raises(ConfigError, match=r"200 tokens .* MiB are free.*max_length"):
        kv_budget(pair, CONFIG, 6 * page)


def test_a_cpu_has_what_the_machine_and_its_container_leave(monkeypatch, tmp_path):
    [cpu] = jax.devices("cpu")[:1]
    assert 2**20 < free_bytes(cpu) < 2**50
    (tmp_path / "memory.max").write_text("4096000\n")
    (tmp_path / "memory.current").write_text("196000\n")
    (tmp_path / "memory.stat").write_text("anon 96000\ninactive_file 100000\n")
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    assert free_bytes(cpu) == 4_000_000
    (tmp_path / "memory.max").write_text("max\n")
    assert free_bytes(cpu) > 4_000_000


class Device:
    platform = "gpu"

    def __init__(self, stats):
        self.stats = stats

    def memory_stats(self):
        return self.stats


def test_of_a_mesh_this_process_asks_its_own_devices(pair, page, monkeypatch):
    some = [Device({"bytes_limit": n * page, "bytes_in_use": 0}) for n in (30, 10)]
    monkeypatch.setattr(memory, "_own_devices", lambda models: some)
    assert kv_budget(pair, CONFIG) == kv_budget(pair, CONFIG, 10 * page)
    monkeypatch.setattr(memory, "_own_devices", lambda models: [*some, Device(None)])
    assert kv_budget(pair, CONFIG) is None


def test_devices_that_say_so_are_asked():
    assert free_bytes(Device({"bytes_limit": 100, "bytes_in_use": 30})) == 70
    assert free_bytes(Device(None)) is None
