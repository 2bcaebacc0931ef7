"""What the command lines share: flags, bars, and errors without a traceback."""

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from dcut_jax.axes import MESH_AXES
from dcut_jax.config import ConfigError
from dcut_jax.engine.load import NO_DRAFTER
from dcut_jax.engine.synthetic import SYNTHETIC
from dcut_jax.mesh import STRATEGIES, Placement, make_placement
from dcut_jax.processes import ends_with_others, first, join
from dcut_jax.weights.load import RANDOM, SMOLLM2, SMOLLM2_MOE

DTYPES = ("float32", "bfloat16", "float16")
TRACEBACK = "DCUT_TRACEBACK"

V = TypeVar("V")


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Target, drafter, and the dtypes of both and of their caches."""
    parser.add_argument(
        "--target",
        default=SMOLLM2,
        help=f"a Hugging Face directory, a GGUF file, {SMOLLM2_MOE!r}, {RANDOM}PATH of "
        f"a config for random weights, or {SMOLLM2!r} (default)",
    )
    parser.add_argument(
        "--drafter",
        default=None,
        help="a DFlash checkpoint's directory; default: the one shipped for the "
        f"target; {NO_DRAFTER!r} for plain decoding alone; {SYNTHETIC}FILE, beside "
        "random weights, for drafts that are right as often as the file says",
    )
    parser.add_argument("--dtype", default="float32", choices=DTYPES)
    parser.add_argument(
        "--draft-dtype",
        default="bfloat16",
        choices=DTYPES,
        help="of the drafter's weights and its copy of the target's head; it changes "
        "drafts, never the text (default: bfloat16)",
    )
    parser.add_argument(
        "--cache-dtype",
        default="float32",
        choices=DTYPES,
        help="of the key/value caches; the narrow ones take half the memory, but on "
        "CPUs they are very slow (default: float32)",
    )


def refuse_set(
    parser: argparse.ArgumentParser,
    args: argparse.Namespace,
    names: Sequence[str],
    why: str,
) -> None:
    """Refuses flags that would be ignored: any of `names` that is not its default."""
    for name in names:
        if getattr(args, name) != parser.get_default(name):
            parser.error(f"--{name.replace('_', '-')} {why}")


def add_memory_flag(
    parser: argparse.ArgumentParser,
    default: str = "enough for all slots at full length",
) -> None:
    """How much memory keys and values may take."""
    parser.add_argument(
        "--kv-memory",
        type=memory_size,
        metavar="SIZE",
        help=f"of each device, for keys and values of target and drafter, as in 512MiB "
        f"or 4GiB; where it runs out, texts wait, or are put aside and gone on with "
        f"later (default: {default})",
    )


def add_mesh_flags(parser: argparse.ArgumentParser) -> None:
    """Mesh and strategy, and the processes that share the mesh."""
    parser.add_argument(
        "--mesh",
        type=mesh_sizes,
        metavar="AXIS=SIZE,...",
        help=f"devices to share the work, as in data=2,model=2; axes: "
        f"{', '.join(MESH_AXES)} (default: one device)",
    )
    parser.add_argument(
        "--strategy",
        choices=STRATEGIES,
        help="how: requests over `data` (dp), heads, feed-forward and words over "
        "`model` (tp), requests and experts over `expert` (ep); default: the one that "
        "uses the axes of --mesh",
    )
    add_process_flags(parser)


def add_process_flags(parser: argparse.ArgumentParser) -> None:
    """Which of several processes this is; see `processes.join`."""
    parser.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="of process 0, where several machines take part; each runs this command",
    )
    parser.add_argument("--processes", type=positive, help="how many they are")
    parser.add_argument("--process-id", type=int, help="which of them this is, from 0")


def join_processes(args: argparse.Namespace) -> None:
    """Joins the other processes, if any; only the first goes on to print."""
    join(args.coordinator, args.processes, args.process_id)
    if args.process_id:
        # Nothing else would tell its lines from those of the first.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def placement_of(args: argparse.Namespace) -> Placement | None:
    """The placement that `add_mesh_flags` describe; None for a run on one device.

    Joins the processes first, so it comes before anything else that uses a device.

    Raises:
      ConfigError: flags that do not fit together, or not this run's devices.
    """
    if args.mesh is None and (args.strategy or args.processes):
        raise ConfigError(
            "--strategy and --processes are of a mesh; name its axes and sizes with "
            "--mesh, as in --mesh data=2,model=4"
        )
    join_processes(args)
    return None if args.mesh is None else make_placement(args.mesh, args.strategy)


def mesh_sizes(text: str) -> dict[str, int]:
    """An `argparse` type: `axis=size`, between commas, each axis once."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if axis not in MESH_AXES or axis in sizes:
            raise argparse.ArgumentTypeError(
                f"expected AXIS=SIZE between commas, each of {', '.join(MESH_AXES)} "
                f"once at most; found {part!r}"
            )
        sizes[axis] = positive(size)
    return sizes


def memory_size(text: str) -> int:
    """An `argparse` type: bytes, or a number with KiB, MiB, GiB or TiB behind it."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:([KMGT])iB)?", text.strip())
    size = 0
    if found:
        size = int(float(found[1]) * 1024 ** (" KMGT".index(found[2] or " ")))
    if size < 1:
        raise argparse.ArgumentTypeError(
            f"expected a size such as 512MiB or 4GiB, found {text!r}"
        )
    return size


def positive(text: str) -> int:
    """An `argparse` type: a whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(
            f"expected a whole number >= 1, found {text!r}"
        )
    return value


def positives(text: str) -> tuple[int, ...]:
    """An `argparse` type: whole numbers of at least 1, between commas, each once."""
    return distinct([positive(part) for part in text.split(",")])


def distinct(values: Sequence[V]) -> tuple[V, ...]:
    """The values of a list on the command line, refused where one is there twice."""
    twice = [value for i, value in enumerate(values) if value in values[:i]]
    if twice:
        raise argparse.ArgumentTypeError(f"{twice[0]} is there twice; name it once")
    return tuple(values)


@contextmanager
def bar(title: str, total: int | None, *, shown: bool = True):
    """A progress bar on standard error; yields a function `(done, title or None)`."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    shown = shown and first()
    with Progress(*columns, console=console, disable=not shown) as progress:
        task = progress.add_task(title, total=total)

        def update(done: int, description: str | None = None) -> None:
            changes: dict[str, Any] = {"completed": done}
            if description is not None:
                changes["description"] = description
            progress.update(task, **changes)

        yield update


def run(main: Callable[[Sequence[str] | None], int]) -> None:
    """Exits with `main`'s status; an error ends in one line, without a traceback.

    Most are a user's mistakes, but JAX raises ValueError too; the line says how to
    see where it came from.
    """
    try:
        with ends_with_others():
            sys.exit(main(None))
    except (ValueError, OSError, ImportError) as error:
        if os.environ.get(TRACEBACK) == "1":
            raise
        sys.exit(f"error: {error} (set {TRACEBACK}=1 to see where)")
    except KeyboardInterrupt:
        sys.exit("interrupted")
