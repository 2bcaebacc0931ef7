"""Checkpoints of a run: written while training goes on, and whole or not taken at all.

A checkpoint holds parameters, the optimiser's state and the step. Which documents,
anchors and words a step draws are functions of its number and the run's seed
(`loop.Trainer.step`), so data position and random state need no place in it. Beside
the arrays stand the losses since the last line of the log, so that this line, too, is
what it would have been, and a check sum.

Orbax writes under another name and renames when all is there: a run that is killed,
however hard, leaves whole checkpoints and at most one that has not yet a step's name.
What a rename cannot promise (a power cut, a failing disk, a deletion half done) the
check sum finds. Such a checkpoint is passed over for the one before it.

The last two are kept, and those of every `keep_every` steps. An older one goes only
when a newer one is whole, so for a while there are three of the last.
"""

import logging
import os
import re
import shutil
import sys
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from dcut_jax.train.step import TrainState
from dcut_jax.weights.errors import CheckpointError

DIRECTORY = "checkpoints"
KEPT = 2
DAMAGED = "damaged-"  # before the step, in the name of what could not be read
UNFINISHED = "*.orbax-checkpoint-tmp"
MB = 1e6
LOGGERS = ("absl", "asyncio")  # Orbax's


class SaveError(OSError):
    """Something of a run could not be written; what was saved before is untouched."""


@dataclass(frozen=True)
class Restored:
    """What a run goes on from.

    Attributes:
      losses: of the steps since the last line of the log.
    """

    state: TrainState
    losses: tuple[float, ...] = ()


class Checkpoints:
    """Checkpoints of one run; leaving the context waits for the last to be written.

    Args:
      out: the run's directory.
      keep_every: also keeps those of every so many steps; 0: the last two alone.
      write: whether this process is the run. If so, what a killed one left unfinished
        is removed; a reader leaves it alone, for the run may be writing it.
    """

    def __init__(self, out: Path, keep_every: int = 0, write: bool = False):
        self.path = out.resolve() / DIRECTORY
        self._write = write
        self._writing: int | None = None
        policy = checkpoint_managers.LatestN(KEPT)
        if keep_every:
            policy = checkpoint_managers.AnyPreservationPolicy(
                [policy, checkpoint_managers.EveryNSteps(keep_every)]
            )
        options = ocp.CheckpointManagerOptions(
            create=True, preservation_policy=policy, cleanup_tmp_directories=write
        )
        self._manager = ocp.CheckpointManager(
            self.path, item_handlers=ocp.StandardCheckpointHandler(), options=options
        )

    def __enter__(self) -> Self:
        for name in LOGGERS:
            logging.getLogger(name).addFilter(self._says)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self._manager.close()
        except Exception as error:
            if kind is None:  # or the first error would be hidden by its own echo
                raise self._failed(error) from error
        finally:
            for name in LOGGERS:
                logging.getLogger(name).removeFilter(self._says)

    def _says(self, record: logging.LogRecord) -> bool:
        """Nothing: what Orbax logs, whole tracebacks, is raised here as one error."""
        return False

    def steps(self) -> list[int]:
        """Steps with a checkpoint, in order; one that is being written is there too."""
        return sorted(self._manager.all_steps())

    def latest_step(self) -> int | None:
        """The last of `steps`; None before the first."""
        return max(self.steps(), default=None)

    # -- writing -----------------------------------------------------------------

    def require_room(self, state: TrainState) -> None:
        """Refuses to begin where the disk has no room for one more checkpoint.

        Raises:
          SaveError: says how much is needed and how much is free.
        """
        need, free = size_of(state), shutil.disk_usage(self.path).free
        if free < need:
            raise SaveError(
                f"{self.path}: expected room for one more checkpoint, about "
                f"{need / MB:.1f} MB, found {free / MB:.1f} MB free; free some space, "
                f"or name another `out`"
            )

    def save(self, state: TrainState, losses: Sequence[float] = ()) -> None:
        """Begins to write the state under its step, after the one before is written.

        Returns once the state is copied, so the caller may donate it; `check` tells
        how it went.

        Args:
          losses: of the steps since the last line of the log.

        Raises:
          SaveError: this or the last checkpoint could not be written.
        """
        self.wait()
        self._writing = int(state.step)
        self._need = size_of(state)
        beside: dict[str, object] = {"losses": [float(x) for x in losses]}
        if jax.process_count() == 1:  # none of several holds the whole state
            beside["crc32"] = check_sum(state)
        try:
            self._manager.save(
                self._writing,
                args=ocp.args.StandardSave(state),
                custom_metadata=beside,
                force=True,
            )
        except Exception as error:
            raise self._failed(error) from error

    def check(self) -> None:
        """Raises SaveError if the last save has failed; never waits."""
        if self._writing is not None and not self._manager.is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Waits for the checkpoint that is being written; raises as `check` does."""
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._failed(error) from error
        self._writing = None

    def _failed(self, error: Exception) -> SaveError:
        """What to tell, once what was written in vain is out of the way."""
        step, self._writing = self._writing, None
        for unfinished in self.path.glob(UNFINISHED):
            _remove(unfinished)
        self._manager.reload()
        free, there = shutil.disk_usage(self.path).free, self.steps()
        kept, then = "nothing was saved before", "it begins anew"
        if there:
            kept = f"saved before and untouched: {', '.join(map(str, there))}"
            then = f"it goes on from step {there[-1]}"
        return SaveError(
            f"the checkpoint of step {step} could not be written under {self.path}: "
            f"{reason(error)}; it takes about {self._need / MB:.1f} MB, and "
            f"{free / MB:.1f} MB are free there ({kept}); free some space and run the "
            f"same command again: {then}"
        )

    # -- reading -----------------------------------------------------------------

    def restore(self, like: TrainState) -> Restored:
        """The latest whole checkpoint, or `like` if there is none at all.

        Damaged ones are passed over, which standard error is told; the run also
        renames them, so that it can write these steps again.

        Args:
          like: gives the structure, shapes and dtypes that are expected.

        Raises:
          CheckpointError: there are checkpoints, and none of them can be read.
        """
        self.wait()
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        damaged: dict[int, str] = {}
        for step in reversed(self.steps()):
            try:
                found = self._read(step, abstract)
            except Exception as error:
                damaged[step] = reason(error)
                continue
            for bad, why in damaged.items():
                self._pass_over(bad, why, step)
            return found
        if not damaged:
            return Restored(like)
        whys = "; ".join(f"step {step}: {why}" for step, why in damaged.items())
        raise CheckpointError(
            f"{self.path}: expected a whole checkpoint of this run, found none "
            f"({whys}); if another version of this program wrote them, go on with "
            f"that one; otherwise move them away to begin anew"
        )

    def _read(self, step: int, abstract: TrainState) -> Restored:
        there = sorted(leaf.shape for leaf in self._shapes(step))
        expected = sorted(leaf.shape for leaf in jax.tree.leaves(abstract))
        if there != expected:
            # Orbax would find this out in the middle of many reads, which it leaves.
            raise CheckpointError("its arrays have other shapes than this run's")
        state = self._manager.restore(step, args=ocp.args.StandardRestore(abstract))
        metadata = self._manager.metadata(step)
        if metadata.commit_timestamp_nsecs is None:
            raise CheckpointError("its description is missing")
        beside = metadata.custom_metadata or {}
        # Earlier versions wrote no check sum, nor do several processes.
        alone = jax.process_count() == 1
        if alone and "crc32" in beside and beside["crc32"] != check_sum(state):
            raise CheckpointError(
                "its content does not have the check sum it was given"
            )
        return Restored(state, tuple(beside.get("losses", ())))

    def _shapes(self, step: int) -> list[Any]:
        """Descriptions of the arrays of a checkpoint, in no order."""
        return [x for x in jax.tree.leaves(self._manager.item_metadata(step)) if x]

    def _pass_over(self, step: int, why: str, instead: int) -> None:
        moved = ""
        if self._write:
            place = self.path / f"{DAMAGED}{step}"
            shutil.rmtree(place, ignore_errors=True)
            os.replace(self.path / str(step), place)
            self._manager.reload()
            moved = f"; it is now {place.name}"
        print(
            f"{self.path}: the checkpoint of step {step} is damaged ({why}){moved}; "
            f"step {instead} is taken instead",
            file=sys.stderr,
        )


def _remove(unfinished: Path) -> None:
    """Removes a directory into which a thread may write a last file meanwhile."""
    for _ in range(20):
        shutil.rmtree(unfinished, ignore_errors=True)
        if not unfinished.exists():
            return
        time.sleep(0.05)


def has_checkpoints(out: Path) -> bool:
    """Whether a run's directory has any, whole or not; looks at names alone."""
    where = out / DIRECTORY
    return where.is_dir() and any(entry.name.isdecimal() for entry in where.iterdir())


def checkpoints(out: Path) -> Checkpoints:
    """Checkpoints of a run, for a reader."""
    return Checkpoints(out)


def restore(manager: Checkpoints, like: TrainState) -> TrainState:
    """The state of the latest whole checkpoint; see `Checkpoints.restore`."""
    return manager.restore(like).state


def size_of(state: TrainState) -> int:
    """Bytes of a state's arrays; a checkpoint takes a little less, it is packed."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(state))


def check_sum(state: TrainState) -> int:
    """CRC-32 of all arrays, their places, shapes and dtypes."""
    crc = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        array = np.ascontiguousarray(leaf)
        name = f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape};"
        crc = zlib.crc32(array.view(np.uint8).data, zlib.crc32(name.encode(), crc))
    return crc


def reason(error: BaseException) -> str:
    """Why something could not be read or written, in a few words."""
    text = str(error)
    # TensorStore has the system's number in its text, under any kind of error.
    number = re.search(r"os_error_code='(\d+)'", text)
    if number:
        return os.strerror(int(number[1]))
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    first = text.strip().splitlines()[0] if text.strip() else type(error).__name__
    return first if len(first) <= 160 else f"{first[:157]}..."
