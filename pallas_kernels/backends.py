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
# cudnn: NVIDIA's own. pallas_interpret: the TPU kernel as ordinary XLA, to test it on
# any device. The others are those of experts, see `experts.api`.
Backend = Literal[
    "xla",
    "pallas_tpu",
    "pallas_mosaic_gpu",
    "cudnn",
    "pallas_interpret",
    "platform",
    "reference",
    "blocks",
    "ragged_dot",
    "tokamax",
]

Operation = Literal["budget_topk", "confidence", "attention", "experts"]

Kind = Literal["cpu", "tpu", "gpu", "hopper"]

# The forms that each operation has.
FORMS: dict[Operation, tuple[Backend, ...]] = {
    "budget_topk": ("xla", "pallas_tpu", "pallas_mosaic_gpu", "pallas_interpret"),
    "confidence": ("xla", "pallas_tpu", "pallas_interpret"),
    "attention": ("xla", "pallas_tpu", "cudnn", "pallas_interpret"),
    "experts": ("platform", "reference", "blocks", "ragged_dot", "tokamax"),
}

# Of GPUs Mosaic compiles for Hopper and what came after; on others its compiler ends
# the process.
HOPPER = 9.0

# Where each backend runs. cuDNN has attention for Ampere, too, which was not compiled.
RUNS_ON: dict[Backend, tuple[Kind, ...]] = {
    "xla": get_args(Kind),
    "pallas_interpret": get_args(Kind),
    "pallas_tpu": ("tpu",),
    "pallas_mosaic_gpu": ("hopper",),
    "cudnn": ("hopper",),
    "platform": get_args(Kind),
    "reference": get_args(Kind),
    "blocks": get_args(Kind),
    "ragged_dot": get_args(Kind),
    "tokamax": ("hopper",),
}


@dataclass(frozen=True)
class Backends:
    """The form of each operation.

    Attributes:
      head_chunk: words of a head that `confidence` takes at a time in XLA; None: all.
    """

    budget_topk: Backend = "xla"
    confidence: Backend = "xla"
    attention: Backend = "xla"
    experts: Backend = "platform"
    head_chunk: int | None = None

    def check(self, device: Any) -> None:
        """Raises ValueError, with the reason, for what cannot run on `device`."""
        check("budget_topk", self.budget_topk, device)
        check("confidence", self.confidence, device)
        check("attention", self.attention, device)
        check("experts", self.experts, device)


PLAIN = Backends()  # nothing that is not everywhere

# The one table of defaults. A kernel stands here where its form in XLA is a chain of
# launches between drafting and verification, or moves what the kernel does not: of
# attention, a copy of every page, as far as the longest request of the batch goes.
# Others wait until a device was measured.
# Logits of a head taken whole are 2.3 GiB for 4096 rows of 151936 words, in chunks of
# 8192 128 MiB. On CPUs chunks took up to three times as long (docs/lab.md).
DEFAULTS: dict[Kind, Backends] = {
    "cpu": PLAIN,
    "gpu": Backends(head_chunk=8192),
    "hopper": Backends(budget_topk="pallas_mosaic_gpu", head_chunk=8192),
    "tpu": Backends(budget_topk="pallas_tpu", attention="pallas_tpu", head_chunk=8192),
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
    hopper = number.isdecimal() and float(capability) >= HOPPER
    return "hopper" if hopper else "gpu"


def defaults(device: Any) -> Backends:
    """The forms to run on a device, which may be one that is only compiled for."""
    return DEFAULTS[device_kind(device)]


def check(operation: Operation, backend: str, device: Any) -> None:
    """Raises ValueError, with the reason, unless a form can run on `device`."""
    form, kind = known(operation, backend), device_kind(device)
    if kind not in RUNS_ON[form]:
        raise ValueError(_refusal(operation, form, kind))


def known(operation: Operation, backend: str) -> Backend:
    """`backend`; raises ValueError unless it is one of the operation's."""
    for form in FORMS[operation]:
        if form == backend:
            return form
    raise ValueError(
        f"{operation} has no backend {backend!r}; choose one of "
        f"{', '.join(FORMS[operation])}"
    )


_names: dict[Kind, str] = {
    "cpu": "a CPU",
    "tpu": "a TPU",
    "gpu": f"a GPU below compute capability {HOPPER}",
    "hopper": "a GPU",
}


def _refusal(operation: Operation, backend: Backend, kind: Kind) -> str:
    on = (
        "on TPUs alone"
        if backend == "pallas_tpu"
        else f"on GPUs of compute capability {HOPPER} and above (Hopper)"
    )
    others = [f'"{form}"' for form in FORMS[operation] if kind in RUNS_ON[form]]
    return (
        f'backend "{backend}" of {operation} runs {on}, and this is {_names[kind]}; '
        f"use {' or '.join(others)}"
    )


def require(operand: Array, operation: Operation, backend: Backend) -> Array:
    """`operand`, in a program that may be lowered only for what runs `backend`.

    A kernel that reaches the wrong compiler fails there with words about its insides.
    Which platform a program is for is known when it is lowered, not when it is traced:
    this is an identity whose lowering rule refuses the others.

    Raises:
      ValueError: when lowered for another platform. (How capable a GPU is, a lowering
        does not tell: that is for `check`.)
    """
    return _identity(operation, backend)(operand)


@cache
def _identity(operation: Operation, backend: Backend) -> Any:
    primitive = Primitive(f"require_{backend}_of_{operation}")
    primitive.def_abstract_eval(lambda aval: aval)
    batching.primitive_batchers[primitive] = lambda args, axes: (
        primitive.bind(*args),
        axes[0],
    )
    platforms: dict[str, Kind] = {"cpu": "cpu", "tpu": "tpu", "gpu": "hopper"}
    for platform, kind in platforms.items():
        runs = kind in RUNS_ON[backend]
        rule = _pass if runs else _refuse(_refusal(operation, backend, kind))
        mlir.register_lowering(primitive, rule, platform=platform)
    return jax.jit(primitive.bind)


def _pass(ctx: Any, operand: Any) -> Any:
    del ctx
    return [operand]


def _refuse(why: str) -> Any:
    def rule(ctx: Any, operand: Any) -> Any:
        del ctx, operand
        raise ValueError(why)

    return rule
