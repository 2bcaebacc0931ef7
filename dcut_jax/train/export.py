"""From a run to a drafter in the published layout, and a manifest of its origin."""

import datetime
import hashlib
import json
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from dcut_jax.config import ConfigError
from dcut_jax.files import write_text
from dcut_jax.train.checkpoints import DIRECTORY, checkpoints, restore
from dcut_jax.train.config import (
    CONFIG,
    TrainConfig,
    check_target,
    config_from_json,
    make_drafter_config,
    read_run,
)
from dcut_jax.train.data import Dataset, DatasetError
from dcut_jax.train.step import init_state
from dcut_jax.weights.dflash import WEIGHTS, save_drafter
from dcut_jax.weights.errors import CheckpointError
from dcut_jax.weights.json_io import read_json
from dcut_jax.weights.load import Target, load_target

MANIFEST = "manifest.json"


def export(run: str | Path, out: str | Path, target: str | None = None) -> int:
    """Writes a run's latest parameters in the published layout, in bfloat16.

    `manifest.json` beside them says what they are from; see `describe`.

    Args:
      target: where the run's target lies, if no longer where its config says.

    Returns:
      The step they are from.

    Raises:
      CheckpointError: the run's target is not there, or is another one, or no
        checkpoint can be read.
      ConfigError: `run` is not a training run, or has no checkpoint.
    """
    run, out = Path(run).resolve(), Path(out).resolve()
    if (out / CONFIG).exists() and (out / DIRECTORY).exists():
        raise ConfigError(
            f"{out} is a training run, whose config an export would write over; give "
            f"the drafter a directory of its own"
        )
    stored, cfg = stored_config(run)
    loaded = load_target(target or cfg.target, jnp.bfloat16)
    check_target(run, loaded)
    drafter_cfg = make_drafter_config(cfg, loaded.cfg)
    like = init_state(drafter_cfg, cfg)
    with checkpoints(run) as manager:
        if manager.latest_step() is None:
            raise ConfigError(f"{run} has no checkpoint; train first")
        try:
            state = restore(manager, like)
        except CheckpointError as error:
            if target is None:
                raise
            raise CheckpointError(
                f"expected the target of {run}, which names {cfg.target!r}; with "
                f"{target!r} no checkpoint can be read; name the run's own. {error}"
            ) from error
    save_drafter(out, drafter_cfg, state.best, jnp.bfloat16)
    manifest = describe(out, stored, loaded, int(state.step))
    write_text(out / MANIFEST, json.dumps(manifest, indent=1) + "\n")
    return int(state.step)


def stored_config(run: str | Path) -> tuple[dict[str, Any], TrainConfig]:
    """A run's config, as it was stored and as it is read.

    Raises:
      ConfigError: `run` is not a training run.
    """
    path = Path(run) / CONFIG
    stored = read_run(path)
    return stored, config_from_json(stored, str(path))


def describe(
    directory: Path, stored: Mapping[str, Any], target: Target, step: int
) -> dict[str, Any]:
    """The manifest of an exported drafter.

    Of paths it has the last part alone. The dataset is described as it is now, or not
    at all if it is no longer there. The licence is for the publisher to add.

    Args:
      stored: the run's config as it was stored, so that it says nothing of fields that
        the version which began the run did not have.
    """
    training = dict(stored)
    for key in ("target", "data", "out", "init"):
        if training.get(key):
            training[key] = Path(training[key]).resolve().name
    files = ("config.json", WEIGHTS)
    return {
        "name": directory.name,
        "format": f"{_architecture(directory)}, bfloat16",
        "target": {"name": target.name, "identity": target.identity},
        "files": {
            name: hashlib.sha256((directory / name).read_bytes()).hexdigest()
            for name in files
        },
        "step": step,
        "training": training,
        **_describe_data(stored["data"]),
        "versions": versions(Path(__file__).resolve().parents[1]),
        "date": datetime.date.today().isoformat(),
    }


def _architecture(directory: Path) -> str:
    """What published runtimes take the drafter for: DFlash's layout or DSpark's."""
    return str(read_json(directory / "config.json")["architectures"][0])


def _describe_data(path: str) -> dict[str, Any]:
    try:
        data = Dataset.open(path)
    except (DatasetError, OSError):
        return {}
    of_response = int((data.index[:, 2] - data.index[:, 1]).sum())
    # Whose features they are, and which, is said elsewhere in the manifest.
    about = {
        key: value
        for key, value in data.manifest.items()
        if key not in ("target", "taps", "channels", "feature_dtype")
    }
    return {"data": about | {"documents": len(data), "response_tokens": of_response}}


def versions(package: Path) -> dict[str, Any]:
    """Versions of JAX and of this package, and its commit if it is a git checkout."""
    try:
        ours = metadata.version("dcut-jax")
    except metadata.PackageNotFoundError:
        ours = "source"
    return {"dcut_jax": ours, "jax": jax.__version__} | _commit(package)


def _commit(package: Path) -> dict[str, Any]:
    """Nothing if the package does not lie at the top of a checkout, which is its own.

    An installed package may lie deep in the checkout of something else.
    """

    def git(*words: str) -> str:
        command = ["git", *words]
        out = subprocess.run(
            command, cwd=package, capture_output=True, text=True, check=True
        )
        return out.stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) != package.resolve().parent:
            return {}
        return {
            "commit": git("rev-parse", "HEAD"),
            "dirty": bool(git("status", "--porcelain")),
        }
    except (OSError, subprocess.CalledProcessError):
        return {}
