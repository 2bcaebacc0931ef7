"""What the command lines share: flags, bars, and errors without a traceback."""

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

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
from dcut_jax.weights.load import SMOLLM2

DTYPES = ("float32", "bfloat16", "float16")


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Target, drafter and their dtypes."""
    parser.add_argument(
        "--target",
        default=SMOLLM2,
        help=f"a Hugging Face directory, a GGUF file, or {SMOLLM2!r} (default)",
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
    """An `argparse` type: whole numbers of at least 1, between commas."""
    return tuple(positive(part) for part in text.split(","))


@contextmanager
def bar(title: str, total: int | None):
    """A progress bar on standard error; yields a function `(done, title or None)`."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(title, total=total)

        def update(done: int, description: str | None = None) -> None:
            changes: dict[str, Any] = {"completed": done}
            if description is not None:
                changes["description"] = description
            progress.update(task, **changes)

        yield update


def run(main: Callable[[Sequence[str] | None], int]) -> None:
    """Exits with `main`'s status; a user's mistake ends in one line, no traceback."""
    try:
        sys.exit(main(None))
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted")
