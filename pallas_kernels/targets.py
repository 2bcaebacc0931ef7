"""Devices that need not be there: programs are lowered for them on any machine."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
from jax import export

KINDS = {"tpu": ("TPU v5e", "tpu"), "cuda": ("NVIDIA H200", "gpu")}


def export_for(platform: str, run: Callable[..., Any], *args: Any) -> str:
    """The program of `run`, lowered for a "tpu" or for "cuda"; args are shapes."""
    kind, name = KINDS[platform]
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=1, platform=name)
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
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
