"""The log of a run: `log.jsonl` has a line per logged step.

A run that goes on from a checkpoint cuts what lies behind it, so no step is there
twice, however the run before ended.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from dcut_jax.files import write_text
from dcut_jax.train.checkpoints import MB, SaveError
from dcut_jax.train.data import DatasetError

LOG = "log.jsonl"
EVENTS = "tensorboard"  # a directory of the run


class RunLog:
    """The log of a run that goes on from `step`; a context that closes it.

    Args:
      out: the run's directory.
      step: what lies behind it is cut: the run makes it again.
      tensorboard: also write TensorBoard's event files, under `out`.

    Raises:
      DatasetError: the log has a line that is none of ours.
      ImportError: `tensorboard` is asked for, and tensorboardX cannot be imported.
      SaveError: the log could not be written.
    """

    def __init__(self, out: Path, step: int, tensorboard: bool = False):
        self.path = out / LOG
        self._events: Any = None
        cut_log(self.path, step)
        if tensorboard:
            require_tensorboard()
            from tensorboardX import SummaryWriter

            # Whatever reads the events drops those of steps that are made again.
            self._events = SummaryWriter(str(out / EVENTS), purge_step=step + 1)
        # Unbuffered: a line is there once `write` returns, or the error is ours.
        self._file = self.path.open("ab", buffering=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        if self._events is not None:
            self._events.close()

    def write(self, entry: Mapping[str, Any]) -> None:
        """Appends a line; its numbers also go to TensorBoard, under their names.

        Args:
          entry: has `step`; with a `width`, it is an evaluation at that width.

        Raises:
          SaveError: there is no room for the line.
        """
        line = (json.dumps(entry) + "\n").encode()
        try:
            written = self._file.write(line)
        except OSError as error:
            raise self._failed(error.strerror or str(error)) from error
        if written != len(line):  # a disk takes what it can before it refuses
            raise self._failed(os.strerror(28))
        if self._events is not None:
            for name, value in scalars(entry).items():
                self._events.add_scalar(name, value, entry["step"])
            self._events.flush()

    def _failed(self, why: str) -> SaveError:
        free = shutil.disk_usage(self.path.parent).free
        return SaveError(
            f"{self.path}: expected to append a line, found: {why}; "
            f"{free / MB:.1f} MB are free there. Checkpoints are untouched: free some "
            f"space and run the same command again"
        )


def cut_log(path: Path, step: int) -> None:
    """Leaves a log's lines up to `step`, in one go; half a last line goes too.

    Raises:
      DatasetError: a line is not an object with a whole number `step`.
    """
    if not path.exists():
        return
    text = path.read_text()
    lines = text.splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines.pop()  # a killed run was writing it
    kept = []
    for number, line in enumerate(lines, 1):
        try:
            if int(json.loads(line)["step"]) <= step:
                kept.append(line)
        except (ValueError, KeyError, TypeError) as error:
            raise DatasetError(
                f"{path}:{number}: expected a JSON object with `step`, found "
                f"{line[:60]!r}; correct this line, or move the log away"
            ) from error
    if "".join(kept) != text:
        write_text(path, "".join(kept))


def scalars(entry: Mapping[str, Any]) -> dict[str, float]:
    """Numbers of a log line under TensorBoard's names.

    `train/loss`, or of an evaluation `eval/width 7/accepted` and
    `eval/width 7/slot 01` and so on.
    """
    of_width = f"eval/width {entry['width']}" if "width" in entry else "train"
    found: dict[str, float] = {}
    for name, value in entry.items():
        if name in ("step", "width"):
            continue
        if name == "slots":
            found |= {f"{of_width}/slot {k:02}": s for k, s in enumerate(value, 1)}
        else:
            found[f"{of_width}/{name}"] = float(value)
    return found


def require_tensorboard() -> None:
    """Raises ImportError, saying what to do, where tensorboardX cannot be imported."""
    try:
        import tensorboardX  # noqa: F401  (an extra)
    except ImportError as error:
        raise ImportError(
            f"--tensorboard needs tensorboardX, which cannot be imported ({error}); "
            f"run `pip install tensorboardX`, or leave --tensorboard out: {LOG} has "
            f"the same numbers"
        ) from error
