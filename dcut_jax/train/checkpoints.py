"""Orbax checkpoints of a run."""

from pathlib import Path

import jax
import orbax.checkpoint as ocp

from dcut_jax.train.step import TrainState


def checkpoints(out: Path) -> ocp.CheckpointManager:
    """Checkpoints of a run; the last two are kept."""
    options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True)
    return ocp.CheckpointManager(out / "checkpoints", options=options)


def save(manager: ocp.CheckpointManager, state: TrainState) -> None:
    """Saves under the state's step."""
    manager.save(int(state.step), args=ocp.args.StandardSave(state), force=True)


def restore(manager: ocp.CheckpointManager, like: TrainState) -> TrainState:
    """The latest checkpoint, or `like` if there is none."""
    manager.wait_until_finished()
    step = manager.latest_step()
    if step is None:
        return like
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    return manager.restore(step, args=ocp.args.StandardRestore(abstract))
