"""Which form of an operation runs: named by the caller, never guessed from the process.

A program is traced and lowered on machines that will not run it, so "the default
backend" of the process says nothing. Callers take a device of the mesh that the program
is for, ask `defaults` once, and hand the names down.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jaxtyping import Array

# xla: the reference, anywhere. pallas_tpu, pallas_mosaic_gpu: the kernels proper.
# pallas_interpret: the TPU kernel as ordinary XLA, to test it on any device.
Backend = Literal["xla", "pallas_tpu", "pallas_mosaic_gpu", "pallas_interpret"]

Kind = Literal["cpu", "tpu", "gpu", "hopper"]

# Of GPUs Mosaic compiles for Hopper and what came after; on others its compiler ends
# the process.
MOSAIC_CAPABILITY = 9.0

# Where each backend runs.
RUNS_ON: dict[Backend, tuple[Kind, ...]] = {
    "xla": get_args(Kind),
    "pallas_interpret": get_args(Kind),
    "pallas_tpu": ("tpu",),
    "pallas_mosaic_gpu": ("hopper",),
}


@dataclass(frozen=True)
class Backends:
    """The form of each operation.

    Attributes:
      head_chunk: words of a head that `confidence` takes at a time in XLA; None: all.
    """

    budget_topk: Backend = "xla"
    confidence: Backend = "xla"
    head_chunk: int | None = None

    def check(self, device: Any) -> None:
        """Raises ValueError, with the reason, for what cannot run on `device`."""
        for backend in (self.budget_topk, self.confidence):
            check(backend, device)


PLAIN = Backends()  # XLA throughout

# The one table of defaults. A kernel stands here where its form in XLA is a chain of
# launches between drafting and verification; others wait until a device was measured.
# Logits of a head taken whole are 2.3 GiB for 4096 rows of 151936 words, in chunks of
# 8192 128 MiB. On CPUs chunks took up to three times as long (docs/lab.md).
DEFAULTS: dict[Kind, Backends] = {
    "cpu": PLAIN,
    "gpu": Backends(head_chunk=8192),
    "hopper": Backends(budget_topk="pallas_mosaic_gpu", head_chunk=8192),
    "tpu": Backends(budget_topk="pallas_tpu", head_chunk=8192),
}


def device_kind(device: Any) -> Kind:
    """The row of the tables that a device belongs to.

    Raises:
      ValueError: a platform that no table knows.
    """
    if device.platform in ("cpu", "tpu"):
        return device.platform
    if device.platform not in ("gpu", "cuda"):
        raise ValueError(
            f"expected a device of a CPU, a GPU or a TPU, got platform "
            f"{device.platform!r}; add it to pallas_kernels.backends"
        )
    # AMD's have names there, like "gfx942", and no Mosaic.
    capability = str(getattr(device, "compute_capability", ""))
    number = capability.replace(".", "", 1)
    hopper = number.isdecimal() and float(capability) >= MOSAIC_CAPABILITY
    return "hopper" if hopper else "gpu"


def defaults(device: Any) -> Backends:
    """The forms to run on a device, which may be one that is only compiled for."""
    return DEFAULTS[device_kind(device)]


def check(backend: str, device: Any) -> None:
    """Raises ValueError, with the reason, unless `backend` can run on `device`."""
    known(backend)
    kind = device_kind(device)
    if kind not in RUNS_ON[backend]:  # type: ignore[index]
        raise ValueError(f"{_reason(backend, _names[kind])}; {_advice(kind)}")


def known(backend: str) -> None:
    """Raises ValueError for a name that is none of the backends'."""
    if backend not in get_args(Backend):
        raise ValueError(
            f"{backend=} is unknown; choose one of {', '.join(get_args(Backend))}"
        )


_names: dict[Kind, str] = {
    "cpu": "a CPU",
    "tpu": "a TPU",
    "gpu": f"a GPU below compute capability {MOSAIC_CAPABILITY}",
    "hopper": "a GPU",
}


def _reason(backend: str, found: str) -> str:
    needs = {
        "pallas_tpu": "runs on TPUs alone",
        "pallas_mosaic_gpu": "runs on GPUs of compute capability "
        f"{MOSAIC_CAPABILITY} and above (Hopper)",
    }
    return f'backend "{backend}" {needs[backend]}, and this is {found}'


def _advice(kind: Kind) -> str:
    names = [f'"{b}"' for b, kinds in RUNS_ON.items() if kind in kinds]
    return f"use {' or '.join(names)}"


def require(operand: Array, backend: Backend) -> Array:
    """`operand`, in a program that may be lowered only for what runs `backend`.

    A kernel that reaches the wrong compiler fails there with words about its insides.
    Which platform a program is for is known when it is lowered, not when it is traced:
    this is an identity whose lowering rule refuses the others.

    Raises:
      ValueError: when lowered for another platform. (How capable a GPU is, a lowering
        does not tell: that is for `check`.)
    """
    return _identity(backend)(operand)


@cache
def _identity(backend: Backend) -> Any:
    primitive = Primitive(f"require_{backend}")
    primitive.def_abstract_eval(lambda aval: aval)
    batching.primitive_batchers[primitive] = lambda args, axes: (
        primitive.bind(*args),
        axes[0],
    )
    platforms = {"cpu": "cpu", "tpu": "tpu", "gpu": "hopper"}
    for platform, kind in platforms.items():
        rule = _pass if kind in RUNS_ON[backend] else _refuse(backend, kind)
        mlir.register_lowering(primitive, rule, platform=platform)
    return jax.jit(primitive.bind)


def _pass(ctx: Any, operand: Any) -> Any:
    del ctx
    return [operand]


def _refuse(backend: Backend, kind: Any) -> Any:
    def rule(ctx: Any, operand: Any) -> Any:
        del ctx, operand
        raise ValueError(f"{_reason(backend, _names[kind])}; {_advice(kind)}")

    return rule
