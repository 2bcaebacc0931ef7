"""What a model's steps take of each device's memory, before there is such a model.

Steps are compiled ahead of time for a mesh from declared parameters; nothing of the
model's size is allocated. Sizes are the compiler's, of the platform it compiles for.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax.numpy as jnp

from dcut_jax.config import ConfigError, ModelConfig
from dcut_jax.decode import steps as S
from dcut_jax.decode.compile import Compiler
from dcut_jax.decode.placing import abstract
from dcut_jax.engine.config import EngineConfig
from dcut_jax.engine.dispatch import PREFILL_CHUNKS
from dcut_jax.mesh import Placement


@dataclass(frozen=True)
class StepMemory:
    """Bytes on each device.

    Attributes:
      arguments: what the step is given: parameters, caches, state.
      outputs: what it leaves, beyond what is written over an argument.
      temporary: what it needs while it runs.
    """

    step: str
    arguments: int
    outputs: int
    temporary: int

    @property
    def total(self) -> int:
        return self.arguments + self.outputs + self.temporary

    def beyond(self, fewer: "StepMemory", times: int) -> "StepMemory":
        """On the straight line from `fewer` to this one, so many times as far again."""
        ends = (
            (getattr(fewer, name), getattr(self, name))
            for name in ("arguments", "outputs", "temporary")
        )
        return StepMemory(self.step, *(b + times * (b - a) for a, b in ends))


def footprint(
    target: ModelConfig,
    placement: Placement,
    config: EngineConfig,
    rows: Sequence[int],
    dtype: str = "bfloat16",
    prefills: Sequence[int] = PREFILL_CHUNKS,
) -> tuple[StepMemory, ...]:
    """Compiles a target's steps for a mesh and reads what they take.

    Args:
      rows: of a request, in the verify steps to compile; 1 is plain decoding.
      dtype: of the parameters.
      prefills: rows of the prefill steps to compile.

    Raises:
      ConfigError: the mesh does not divide the model or the slots.
    """
    dtypes = {"target": jnp.dtype(dtype)}
    models = abstract(S.Models(target, None, {}), placement, dtypes)
    shapes = replace(config.shapes(models), width=max(rows))
    compiler = Compiler(models, config.cache_dtype)
    steps = {
        f"prefill {chunk} rows": partial(compiler.prefill, shapes, chunk)
        for chunk in prefills
    }
    for per_request in rows:
        name = f"verify {per_request * config.slots} rows"
        lay = S.everything(shapes, per_request - 1)
        steps[name] = partial(compiler.verify, shapes, lay)
        steps[f"commit {per_request * config.slots} rows"] = partial(
            compiler.commit, shapes, lay.rows
        )
    compiler.prepare(list(steps.values()))
    return tuple(_memory(name, step()) for name, step in steps.items())


def footprint_of_layers(
    target: ModelConfig, layers: int, *args: Any, **options: Any
) -> tuple[StepMemory, ...]:
    """`footprint` from compiling fewer layers, twice, where all would take long.

    What a step takes grows by the same with every layer, where layers are alike, so two
    depths tell the rest.

    Args:
      layers: of the shallower model; half of those of the deeper one.

    Raises:
      ConfigError: they do not divide the target's depth.
    """
    if target.layers % layers:
        raise ConfigError(
            f"expected layers that divide the target's {target.layers}, found {layers}"
        )
    short, long = (
        footprint(_shallower(target, depth), *args, **options)
        for depth in (layers, 2 * layers)
    )
    times = target.layers // layers - 2
    return tuple(b.beyond(a, times) for a, b in zip(short, long, strict=True))


def _shallower(target: ModelConfig, layers: int) -> ModelConfig:
    """The first layers of a target."""
    experts = target.experts
    if experts is not None:
        kept = tuple(layer for layer in experts.layers if layer < layers)
        experts = replace(experts, layers=kept)
    return replace(target, layers=layers, experts=experts)


def render(steps: Sequence[StepMemory]) -> str:
    """A line per step, GiB on each device."""
    lines = [f"{'GiB on each device':22}{'given':>9}{'left':>9}{'while':>9}{'all':>9}"]
    for step in steps:
        sizes = (step.arguments, step.outputs, step.temporary, step.total)
        cells = "".join(f"{size / 2**30:9.2f}" for size in sizes)
        lines.append(f"{step.step:22}{cells}")
    return "\n".join(lines)


def _memory(name: str, compiled: Any) -> StepMemory:
    found = compiled.memory_analysis()
    return StepMemory(
        step=name,
        arguments=found.argument_size_in_bytes,
        outputs=found.output_size_in_bytes - found.alias_size_in_bytes,
        temporary=found.temp_size_in_bytes,
    )
