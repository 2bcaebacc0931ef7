"""What the command lines share: flags, bars, and errors without a traceback."""

import argparse
import os
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

from dcut_jax.engine.load import NO_DRAFTER
from dcut_jax.weights.load import SMOLLM2, SMOLLM2_MOE

DTYPES = ("float32", "bfloat16", "float16")
TRACEBACK = "DCUT_TRACEBACK"

V = TypeVar("V")


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Target, drafter, and the dtypes of both and of their caches."""
    parser.add_argument(
        "--target",
        default=SMOLLM2,
        help=f"a Hugging Face directory, a GGUF file, {SMOLLM2_MOE!r}, or {SMOLLM2!r} "
        "(default)",
    )
    parser.add_argument(
        "--drafter",
        default=None,
        help="a DFlash checkpoint's directory; default: the one shipped for the "
        f"target; {NO_DRAFTER!r} for plain decoding alone",
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
        sys.exit(main(None))
    except (ValueError, OSError, ImportError) as error:
        if os.environ.get(TRACEBACK) == "1":
            raise
        sys.exit(f"error: {error} (set {TRACEBACK}=1 to see where)")
    except KeyboardInterrupt:
        sys.exit("interrupted")
