"""What a device has left for keys and values, measured where a server starts."""

import os
from pathlib import Path
from typing import Any

from dcut_jax.config import ConfigError
from dcut_jax.decode.steps import Models
from dcut_jax.engine.config import EngineConfig, device_of
from dcut_jax.engine.paging import bytes_of_page
from dcut_jax.models.cache import CHUNK
from dcut_jax.processes import least

# Of what is free; the rest is for what steps need while they run.
SHARE = 0.8
# Prompts on their way have caches of their own, see `EngineConfig.kv_memory`.
PROMPTS = 2
CGROUP = Path("/sys/fs/cgroup")


def free_bytes(device: Any) -> int | None:
    """Memory of a device that nobody uses; of a CPU, what this process may have of it.

    None where it does not say.
    """
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"] - stats["bytes_in_use"])
    if device.platform != "cpu":
        return None
    return min((n for n in (_of_machine(), _of_group()) if n is not None), default=None)


def kv_budget(
    models: Models, config: EngineConfig, free: int | None = None
) -> int | None:
    """Bytes of each device for pages, where those of all slots would not fit.

    None where they fit, or where a device does not say what it has.

    Args:
      free: of each device; None: measured, the least of all processes.

    Raises:
      ConfigError: there is no room for one text of full length.
    """
    if free is None:
        devices = _own_devices(models)
        found = [free_bytes(device) for device in devices]
        known = [n for n in found if n is not None]
        # CPUs pose as several devices, which share one memory.
        parts = len(devices) if devices[0].platform == "cpu" else 1
        free = least(min(known) // parts if len(known) == len(found) else None)
    if free is None:
        return None
    slot = bytes_of_page(models, config.cache_dtype) * config.positions // CHUNK
    budget = int(SHARE * (free - PROMPTS * slot))
    if budget < slot:
        raise ConfigError(
            f"keys and values of a text of {config.max_length} tokens take "
            f"{slot / 2**20:.0f} MiB of each device, and {PROMPTS} prompts on their "
            f"way as much each; {free / 2**20:.0f} MiB are free. Expected a shorter "
            f"max_length, a narrower cache dtype, or a kv_memory of your own"
        )
    return budget if budget < slot * (config.slots // models.shards) else None


def _own_devices(models: Models) -> list[Any]:
    """This process's devices that parameters are on; of others nothing is said."""
    if models.placement is None:
        return [device_of(models)]
    return list(models.placement.mesh.local_devices)


def _of_machine() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        [kib] = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
        return int(kib) * 1024
    except (OSError, ValueError):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def _of_group() -> int | None:
    """What a container has left (cgroup v2)."""
    try:
        most = (CGROUP / "memory.max").read_text().strip()
        if most == "max":
            return None
        used = int((CGROUP / "memory.current").read_text())
        stat = (CGROUP / "memory.stat").read_text().splitlines()
        # Files that were read, a checkpoint for one, are let go where room is short.
        cached = dict(line.split() for line in stat).get("inactive_file", "0")
        return max(int(most) - used + int(cached), 0)
    except (OSError, ValueError):
        return None
