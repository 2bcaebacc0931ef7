"""Devices that need not be there: programs are lowered for them on any machine."""

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import jax
from jax import export
from jax.experimental import topologies

KINDS = {"tpu": ("TPU v5e", "tpu"), "cuda": ("NVIDIA H200", "gpu")}


def export_for(platform: str, run: Callable[..., Any], *args: Any) -> str:
    """The program of `run`, lowered for a "tpu" or for "cuda"; args are shapes."""
    with lowering_for(platform):
        lowered = export.export(jax.jit(run), platforms=[platform])(*args)
    return lowered.mlir_module()


@contextmanager
def gpu_interpreter() -> Iterator[None]:
    """Mosaic GPU kernels run on the host, and races are found."""
    from jax.experimental.pallas import mosaic_gpu

    home: Any = mosaic_gpu
    if not hasattr(mosaic_gpu, "InterpretGPUParams"):  # JAX 0.10
        from jax._src.pallas.mosaic_gpu.interpret import params as home
    with home.force_gpu_interpret_mode(home.InterpretGPUParams(detect_races=True)):
        yield


def tpu_races_found() -> bool:
    """Whether the TPU interpreter found a race in what it ran last.

    It has to be asked for (`detect_races`), and for two cores: one runs the programs of
    a grid in turn.
    """
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    races = interpret_pallas_call.races
    assert races is not None, "nothing was run in the interpreter"
    return races.races_found


def gpu_races_found() -> bool:
    """Whether `gpu_interpreter` found a race in what it ran last."""
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    return interpret_pallas_call.get_races().races_found


@cache
def tpu_devices(topology: str) -> tuple[Any, ...]:
    """Devices of a TPU slice to compile for, as "v5e:2x4"; they run nothing.

    Raises:
      ImportError: without libtpu, the compiler.
    """
    _need("libtpu", "the extra `tpu`")
    # No look-up of where this runs, and no lock against other processes.
    for name, value in _TPU_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    return tuple(topologies.get_topology_desc(topology, "tpu").devices)


@cache
def h200_devices(count: int = 1) -> tuple[Any, ...]:
    """H200s to compile for; they run nothing.

    Raises:
      ImportError: without JAX's CUDA plugin, the compiler.
    """
    _need("jax_cuda12_plugin", "the extra `cuda12` or `cuda13`", "jax_cuda13_plugin")
    jax.devices("cpu")  # plugins register themselves when the first backend starts
    found = topologies.get_topology_desc(
        "", "cuda", target_config=_H200, topology=f"1x1x{count}"
    )
    return tuple(found.devices)


def compiling_for(device: Any) -> Any:
    """A context in which what asks for the chip while it is lowered finds `device`."""
    name = "tpu" if device.platform == "tpu" else "gpu"
    return _chip(device.device_kind, name)


def lowering_for(platform: str) -> Any:
    """The same for some "tpu", or for "cuda"."""
    return _chip(*KINDS[platform])


def _chip(kind: str, platform: str) -> Any:
    device = jax.sharding.AbstractDevice(
        device_kind=kind, num_cores=1, platform=platform
    )
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


def _need(module: str, extra: str, other: str = "") -> None:
    if not any(importlib.util.find_spec(name) for name in (module, other or module)):
        raise ImportError(
            f"compiling for a device that is not there needs {module}; install {extra}"
        )


_TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_LOG_DIR": "disabled",
}

# What XLA wants to know of one H200, in the text form of its GpuTargetConfigProto:
# the figures of CUDA's device properties.
_H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32
  core_count: 132 fpus_per_core: 128
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 151397597184 device_address_bits: 64
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  device_vendor: "NVIDIA Corporation" name: "NVIDIA H200"
  driver_version: "12.9.0" runtime_version: "12.9.0"
  compile_time_toolkit_version: "12.9.0" dnn_version: "9.10.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H200"
"""
