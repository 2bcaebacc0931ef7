"""From names on a command line to models ready to decode."""

from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp

from dcut_jax.decode.steps import Models
from dcut_jax.models import dense, params
from dcut_jax.weights.dflash import check_pair, load_drafter
from dcut_jax.weights.load import SMOLLM2, Target, fingerprint, load_target

SHIPPED = {SMOLLM2: "smollm2-135m-dflash"}
NO_DRAFTER = "none"


@dataclass(frozen=True, eq=False)
class Pair:
    """A target and its drafter, loaded.

    Attributes:
      models: configs and parameters of both, as the engine takes them.
      drafter: name for people; "" without one.
      drafter_identity: tells checkpoints apart; "" without one.
    """

    target: Target
    models: Models
    drafter: str
    drafter_identity: str

    def without_drafter(self) -> Models:
        """The target alone: plain decoding pays nothing for the drafter."""
        weights = {"target": self.models.params["target"]}
        return Models(self.models.target, None, weights)


def checkpoints_directory() -> Path:
    """Where the drafters that come with the project are."""
    package = Path(__file__).resolve().parents[1]
    installed, clone = package / "checkpoints", package.parent / "checkpoints"
    return installed if installed.is_dir() else clone


def drafter_directory(target: str, drafter: str | None) -> Path | None:
    """The drafter's directory; None means the one shipped for `target`.

    Raises:
      ValueError: none was named and none is shipped for this target.
    """
    if drafter == NO_DRAFTER:
        return None
    if drafter is not None:
        return Path(drafter)
    if target not in SHIPPED:
        raise ValueError(
            f"no drafter is shipped for target {target!r} (shipped for: "
            f"{', '.join(SHIPPED)}); name one with --drafter DIRECTORY, or train one "
            f"with `python -m dcut_jax.train`"
        )
    return checkpoints_directory() / SHIPPED[target]


def load_pair(target: str, drafter: str | None, dtype: str, draft_dtype: str) -> Pair:
    """Loads a target and its drafter.

    Args:
      target: see `weights.load.load_target`.
      drafter: a DFlash checkpoint's directory; None for the shipped one, "none" for
        plain decoding alone.
      dtype, draft_dtype: of the target's and of the drafter's weights. The drafter
        reads the target's embedding and head in its own dtype.
    """
    loaded = load_target(target, jnp.dtype(dtype))
    directory = drafter_directory(target, drafter)
    weights = {"target": loaded.params}
    if directory is None:
        return Pair(loaded, Models(loaded.cfg, None, weights), "", "")
    cfg, drafter_params = load_drafter(directory, jnp.dtype(draft_dtype))
    check_pair(loaded.cfg, cfg)
    tables = params.cast(
        {
            "draft_embed_VE": loaded.params["embed_VE"],
            "draft_head_VE": dense.head_VE(loaded.params),
        },
        jnp.dtype(draft_dtype),
    )
    return Pair(
        target=loaded,
        models=Models(loaded.cfg, cfg, weights | {"drafter": drafter_params} | tables),
        drafter=directory.name,
        drafter_identity=fingerprint([directory / "model.safetensors"]),
    )
