"""Compiles kernels and whole steps for TPUs and GPUs that are not there.

The vendors' own compilers run, on abstract parameters; nothing is executed, so no time
is measured. What they say is kept: memory for each device, hidden temporaries, floating
point operations and bytes of XLA's cost analysis. `make aot` runs this in environments
that hold the compilers.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding

from dcut_jax.cli import run
from dcut_jax.config import (
    ConfigError,
    ModelConfig,
    RopeConfig,
    model_config_from_hf,
    read_config,
)
from dcut_jax.cost.table import CostTable
from dcut_jax.decode.compile import Compiler
from dcut_jax.decode.placing import abstract
from dcut_jax.decode.steps import Models, StepShapes, anchors_only, everything
from dcut_jax.engine.dispatch import PREFILL_CHUNKS
from dcut_jax.engine.policy import DCutPolicy
from dcut_jax.engine.synthetic import usual_drafter_config
from dcut_jax.files import write_text
from dcut_jax.mesh import Placement
from dcut_jax.models.cache import capacity
from pallas_kernels import targets
from pallas_kernels.backends import Backend, defaults
from pallas_kernels.budget_topk import budget_topk
from pallas_kernels.confidence import head_confidence
from pallas_kernels.verify_attention import Pages, verify_attention

WIDTH = 15  # drafts of a block
DRAFT_LAYERS = 5
POSITIONS = 2048


@dataclass(frozen=True)
class Target:
    """Devices to compile for."""

    name: str
    count: int
    devices: Callable[[], Sequence[Any]]

    @property
    def models(self) -> list[str]:
        """Whose steps are compiled unless others are named."""
        return ["SmolLM2-135M"] if self.count == 1 else [QWEN3_8B]


TPU_TARGETS = tuple(
    Target(f"{chip} x{count}", count, partial(targets.tpu_devices, topology))
    for chip, count, topology in [
        ("v5e", 1, "v5e:2x2"),
        ("v5p", 1, "v5p:2x2x1"),
        ("v6e", 1, "v6e:2x2"),
        ("TPU7x", 1, "tpu7x:2x2x1"),
        ("v5e", 8, "v5e:2x4"),
    ]
)
CUDA_TARGETS = tuple(
    Target(f"H200 x{count}", count, partial(targets.h200_devices, count))
    for count in (1, 8)
)


def with_drafter(target: ModelConfig) -> Models:
    """A target, and a drafter of five layers of its own shape, as DFlash's are."""
    draft = usual_drafter_config(target, WIDTH, DRAFT_LAYERS)
    return Models(target, draft, {})


# Its shapes, as its publishers have them in `config.json`.
SMOLLM2 = ModelConfig(
    vocab=49152,
    embed=576,
    mlp=1536,
    layers=30,
    heads=9,
    kv_heads=3,
    head_dim=64,
    rope=RopeConfig(theta=100_000.0),
    norm_eps=1e-5,
    max_position=8192,
    tied=True,
)
QWEN3_8B = "configs/targets/qwen3-8b.toml"


def models_of(name: str) -> Models:
    """A target with a drafter: SmolLM2, or one whose sizes a file has.

    Raises:
      ConfigError: no such file, or it describes no model that is known.
    """
    if name == "SmolLM2-135M":
        return with_drafter(SMOLLM2)
    return with_drafter(model_config_from_hf(read_config(Path(name)), name))


@dataclass(frozen=True)
class Row:
    """What a compiler said of one program; bytes are of each device.

    Attributes:
      error: its first words where it refused; then there are no numbers.
    """

    target: str
    program: str
    seconds: float
    arguments_bytes: int = 0
    outputs_bytes: int = 0
    temporary_bytes: int = 0
    flops: float = 0.0
    accessed_bytes: float = 0.0
    error: str = ""


@dataclass(frozen=True)
class Program:
    """Something to compile, once it is asked to."""

    name: str
    build: Callable[[], Any]


def compiled_row(target: str, program: Program) -> Row:
    """Compiles, and reads what there is to read."""
    start = time.perf_counter()
    try:
        done = program.build()
    except Exception as error:  # whatever a compiler raises belongs into the table
        words = " ".join(str(error).split())[:200]
        return Row(target, program.name, time.perf_counter() - start, error=words)
    seconds = time.perf_counter() - start
    memory, cost = done.memory_analysis(), done.cost_analysis() or {}
    return Row(
        target=target,
        program=program.name,
        seconds=seconds,
        arguments_bytes=memory.argument_size_in_bytes,
        outputs_bytes=memory.output_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        flops=cost.get("flops", 0.0),
        accessed_bytes=cost.get("bytes accessed", 0.0),
    )


def kernel_programs(target: Target) -> Iterator[Program]:
    """Every kernel in the device's own form, at a small and a large size."""
    device = target.devices()[0]
    forms = defaults(device)

    def compiled(fn: Callable[..., Any], *shapes: tuple[tuple[int, ...], Any]) -> Any:
        at = SingleDeviceSharding(device)
        args = [jax.ShapeDtypeStruct(*shape, sharding=at) for shape in shapes]
        with targets.compiling_for(device):
            return jax.jit(fn).lower(*args).compile()

    for B, K, R in [(16, 15, 8), (512, 31, 16)]:
        yield Program(
            f"budget_topk {forms.budget_topk} {B}x{K}, {R} budgets",
            partial(
                compiled,
                partial(budget_topk, backend=forms.budget_topk),
                ((B, K), jnp.float32),
                ((B,), jnp.bool_),
                ((R,), jnp.int32),
            ),
        )
    heads = ["xla", "pallas_tpu"] if device.platform == "tpu" else ["xla"]
    for backend in heads:
        for N, E, V in [(64, 576, 49152), (4096, 4096, 151936)]:
            fn = partial(
                head_confidence,
                backend=backend,  # type: ignore[arg-type]
                chunk=forms.head_chunk,
            )
            yield Program(
                f"confidence {backend} {N}x{E}, {V} words",
                partial(compiled, fn, ((N, E), jnp.float32), ((V, E), jnp.bfloat16)),
            )
    yield from attention_programs(device.platform, compiled)


ATTENTIONS = [  # requests, rows, heads, key/value heads, head dimension
    (16, 1, 9, 3, 64),
    (64, 8, 32, 8, 128),
    (256, 16, 32, 4, 128),
    (1, 128, 64, 8, 128),
]
CACHE_PAGES, TABLE = 4096, POSITIONS // 128


def attention_programs(
    platform: str, compiled: Callable[..., Any]
) -> Iterator[Program]:
    """`verify_attention` over a cache that is large beside all else.

    A hidden copy of the cache, in another layout, would be seen among the temporaries.
    """
    # cuDNN is left out: its call compiles only beside the library, which is large.
    backends: tuple[Backend, ...] = ("xla",)
    if platform == "tpu":
        backends += ("pallas_tpu",)
    for backend, (B, J, H, G, D) in product(backends, ATTENTIONS):

        def attend(q, k, v, mask, k_pages, v_pages, page_BN, length_B, backend=backend):
            pages = Pages(k_pages, v_pages, 1, page_BN, length_B)
            return verify_attention(q, k, v, mask, pages, backend=backend)

        fresh = ((B, J, G, D), jnp.bfloat16)
        shapes = (
            ((B, J, H, D), jnp.float32),
            fresh,
            fresh,
            ((B, J, J), jnp.bool_),
            ((2, CACHE_PAGES, G, D, 128), jnp.bfloat16),
            ((2, CACHE_PAGES, G, 128, D), jnp.bfloat16),
            ((B, TABLE), jnp.int32),
            ((B,), jnp.int32),
        )
        yield Program(
            f"attention {backend} {B}x{J}, {H}/{G}x{D}",
            partial(compiled, attend, *shapes),
        )


def step_programs(target: Target, name: str, slots: int) -> Iterator[Program]:
    """A step of a model in bfloat16, its heads cut over all devices of the target.

    What has an LM head in it comes a second time where the device has a kernel for that
    and it is not the default.
    """
    devices = target.devices()[: target.count]
    mesh = Mesh(np.asarray(devices), ("model",))
    models = models_of(name)
    dtypes = dict.fromkeys(
        ("target", "drafter", "draft_embed_VE", "draft_head_VE"), jnp.bfloat16
    )
    models = abstract(models, Placement(mesh, "tp"), dtypes)
    forms = defaults(devices[0])
    shapes = StepShapes(
        slots=slots,
        positions=capacity(POSITIONS),
        width=WIDTH + 1,
        stops=4,
        backends=forms,
        shards=models.shards,
    )
    compiler = Compiler(models, jnp.bfloat16)
    key = DCutPolicy(CostTable.empty()).plan_key(shapes)
    full = everything(shapes, WIDTH)
    chunk = max(PREFILL_CHUNKS)
    steps: dict[str, Callable[[], Any]] = {
        f"draft {WIDTH}": partial(compiler.draft, shapes, WIDTH),
        "decide": partial(compiler.decide, shapes, key),
        "verify anchors": partial(compiler.verify, shapes, anchors_only(shapes)),
        f"verify {full.rows} rows": partial(compiler.verify, shapes, full),
        f"commit {full.rows} rows": partial(compiler.commit, shapes, full.rows),
        f"prefill {chunk}": partial(compiler.prefill, shapes, chunk),
    }
    if devices[0].platform == "tpu":
        more = replace(shapes, backends=replace(forms, confidence="pallas_tpu"))
        steps |= {
            f"draft {WIDTH}, head in a kernel": partial(compiler.draft, more, WIDTH),
            f"verify {full.rows} rows, head in a kernel": partial(
                compiler.verify, more, full
            ),
        }
    for step, job in steps.items():

        def build(job: Callable[[], Any] = job) -> Any:
            compiler.prepare([job])
            return job()

        yield Program(f"{Path(name).stem}, batch {slots}: {step}", build)


def markdown(rows: Sequence[Row]) -> str:
    """The table for people; MiB are of each device."""

    def mib(count: float) -> str:
        return f"{count / 2**20:.1f}"

    lines = [
        "| target | program | arguments, MiB | temporary, MiB | GFLOP | accessed, MiB "
        "| compiled in, s |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        said = (
            [
                mib(row.arguments_bytes),
                mib(row.temporary_bytes),
                f"{row.flops / 1e9:.2f}" if row.flops else "not told",
                mib(row.accessed_bytes) if row.accessed_bytes else "not told",
            ]
            if not row.error
            else [f"refused: {row.error}", "", "", ""]
        )
        cells = [row.target, row.program, *said, f"{row.seconds:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    args = parser().parse_args(argv)
    known = TPU_TARGETS if args.platform == "tpu" else CUDA_TARGETS
    names = [t.name for t in known]
    if other := [name for name in args.targets or () if name not in names]:
        raise ConfigError(
            f"--targets: expected some of {args.platform}'s, {', '.join(names)}; found "
            f"{', '.join(other)}"
        )
    chosen = [t for t in known if not args.targets or t.name in args.targets]
    rows: list[Row] = []
    for target in chosen:
        for program in programs_of(target, args.models, args.batch_size):
            if args.only not in program.name:
                continue
            row = compiled_row(target.name, program)
            print(f"{row.target}: {row.program}: {row.error or 'ok'}", flush=True)
            rows.append(row)
            if args.out:  # after each, for some take many minutes
                save(Path(args.out), args.platform, rows)
    print(markdown(rows))
    if not rows:
        raise ConfigError(
            f"--only {args.only!r}: expected a part of a program's name, found none "
            f"that has it; nothing was compiled"
        )
    return 1 if any(row.error for row in rows) else 0


def programs_of(
    target: Target, models: Sequence[str] | None, slots: int
) -> Iterator[Program]:
    """All that is compiled for a target; kernels once, for one of its devices."""
    if target.count == 1:
        yield from kernel_programs(target)
    for name in target.models if models is None else models:
        yield from step_programs(target, name, slots)


def save(out: Path, platform: str, rows: Sequence[Row]) -> None:
    """Writes the record, and the table beside it."""
    record = {
        "platform": platform,
        "jax": jax.__version__,
        "rows": [asdict(row) for row in rows],
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out.with_suffix(".json"), json.dumps(record, indent=1) + "\n")
    write_text(out.with_suffix(".md"), markdown(rows))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(prog="python -m dcut_jax.aot", description=__doc__)
    p.add_argument("platform", choices=["tpu", "cuda"])
    names = [t.name for t in (*TPU_TARGETS, *CUDA_TARGETS)]
    p.add_argument(
        "--targets", nargs="*", choices=names, help="default: all of the platform"
    )
    p.add_argument(
        "--models",
        nargs="*",
        help="whose steps are compiled: SmolLM2-135M or files like those in "
        "configs/targets, or none; default: a small one, on 8 devices a larger",
    )
    p.add_argument(
        "--only", metavar="WORDS", default="", help="programs with this in their name"
    )
    p.add_argument("--batch-size", type=int, default=32)
    p.add_argument("--out", help="where to write, without suffix: .json and .md")
    return p


if __name__ == "__main__":
    run(main)
