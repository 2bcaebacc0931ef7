"""From names on a command line to models ready to decode, and what their steps cost."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp

from dcut_jax.cost.host import measure_host
from dcut_jax.cost.select import select
from dcut_jax.cost.shapes import drafter_shape, model_shape
from dcut_jax.cost.table import CostTable, Fingerprint
from dcut_jax.decode.compile import Compiler
from dcut_jax.decode.placing import on_mesh
from dcut_jax.decode.steps import Models
from dcut_jax.engine import profile as profiling
from dcut_jax.engine.config import EngineConfig
from dcut_jax.engine.policy import profiled, wanted_costs
from dcut_jax.engine.synthetic import SYNTHETIC, synthetic_models
from dcut_jax.mesh import Placement
from dcut_jax.models import dense, params
from dcut_jax.weights.dflash import check_pair, load_drafter
from dcut_jax.weights.load import (
    SMOLLM2,
    SMOLLM2_MOE,
    Target,
    checkpoints_directory,
    fingerprint,
    load_target,
)

# The split target has the dense one's features, nearly, and so takes its drafter.
SHIPPED = {SMOLLM2: "smollm2-135m-dflash", SMOLLM2_MOE: "smollm2-135m-dflash"}
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
        models = self.models
        weights = {"target": models.params["target"]}
        return Models(models.target, None, weights, models.placement)

    def here(self, config: EngineConfig) -> Fingerprint:
        """Where this process runs, and on what: the key of measured costs."""
        return profiling.fingerprint(
            self.models, config, self.target.identity, self.drafter_identity
        )


def has_drafter(target: str, drafter: str | None) -> bool:
    """Whether a drafter is named, or none is and one is shipped for `target`."""
    return target in SHIPPED if drafter is None else drafter != NO_DRAFTER


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
            f"{', '.join(SHIPPED)}); name one with --drafter DIRECTORY, train one "
            f"with `python -m dcut_jax.train`, or decode without one, with "
            f"--drafter {NO_DRAFTER}"
        )
    return checkpoints_directory() / SHIPPED[target]


def load_pair(
    target: str,
    drafter: str | None,
    dtype: str,
    draft_dtype: str,
    placement: Placement | None = None,
) -> Pair:
    """Loads a target and its drafter.

    Args:
      target: see `weights.load.load_target`.
      drafter: a DFlash checkpoint's directory; None for the shipped one, "none" for
        plain decoding alone; "synthetic:" and a file, see `engine.synthetic`, beside a
        target of random weights.
      dtype, draft_dtype: of the target's and of the drafter's weights. The drafter
        reads the target's embedding and head in its own dtype.
      placement: the mesh to put both on. They are then loaded on the host, where
        `target.params` stay, whole; `models` has them on the mesh.
    """
    if placement is None:
        return _load_pair(target, drafter, dtype, draft_dtype)
    with jax.default_device(_host()):
        pair = _load_pair(target, drafter, dtype, draft_dtype)
        return replace(pair, models=on_mesh(pair.models, placement))


def _host() -> jax.Device:
    """The processor, as a device beside the accelerators."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise ValueError(
            "expected the host's processor among JAX's devices, found none; a mesh's "
            "parameters are loaded there first. Add cpu to JAX_PLATFORMS, as in "
            "JAX_PLATFORMS=cuda,cpu"
        ) from error


def _load_pair(target: str, drafter: str | None, dtype: str, draft_dtype: str) -> Pair:
    if drafter is not None and drafter.startswith(SYNTHETIC):
        path = Path(drafter.removeprefix(SYNTHETIC))
        counts, models, identity = synthetic_models(target, path, dtype, draft_dtype)
        return Pair(counts, models, f"synthetic drafts ({path.stem})", identity)
    directory = drafter_directory(target, drafter)
    if directory is None:
        alone = load_target(target, jnp.dtype(dtype))
        return Pair(alone, Models(alone.cfg, None, {"target": alone.params}), "", "")
    # Before the target, which may take minutes: a wrong path then fails at once.
    cfg, drafter_params = load_drafter(directory, jnp.dtype(draft_dtype))
    loaded = load_target(target, jnp.dtype(dtype))
    check_pair(loaded.cfg, cfg)
    tables = params.cast(
        {
            "draft_embed_VE": loaded.params["embed_VE"],
            "draft_head_VE": dense.head_VE(loaded.params),
        },
        jnp.dtype(draft_dtype),
    )
    weights = {"target": loaded.params, "drafter": drafter_params}
    return Pair(
        target=loaded,
        models=Models(loaded.cfg, cfg, weights | tables),
        drafter=directory.name,
        drafter_identity=fingerprint(
            [directory / name for name in ("config.json", "model.safetensors")]
        ),
    )


def measure_costs(
    pair: Pair,
    config: EngineConfig,
    tokens: Sequence[int],
    compiler: Compiler,
    *,
    rounds: int = profiling.ROUNDS,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> CostTable:
    """Measures, at one batch size, what D-Cut's policies can ask for.

    Args:
      tokens: real ones, to fill the caches with.
      on_progress: see `engine.profile.profile`.
    """
    return profiling.profile(
        pair.models,
        config,
        profiled(),
        pair.here(config),
        tokens,
        compiler=compiler,
        rounds=rounds,
        on_progress=on_progress,
    )


def stored_costs(
    pair: Pair,
    config: EngineConfig,
    tokens: Sequence[int],
    compiler: Compiler,
    directory: Path,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> CostTable:
    """This machine's cost table, measured now if this batch size never was."""
    return profiling.cost_table(
        profiled(),
        config.shapes(pair.models),
        pair.here(config),
        directory,
        measure_missing=lambda: measure_costs(
            pair, config, tokens, compiler, on_progress=on_progress
        ),
    )


def computed_costs(pair: Pair, config: EngineConfig, directory: Path) -> CostTable:
    """Costs to start with at once: measured where they are, else from peak rates.

    A CPU's rates are measured, which takes about a second; other devices' are those
    published of their kind.

    Raises:
      CostError: see `cost.select.select`.
    """
    here = pair.here(config)
    path = profiling.table_path(directory, here)
    text = profiling.table_text(path)
    device = None
    if jax.default_backend() == "cpu":
        device = measure_host({here.dtype, here.draft_dtype})
    drafter = pair.models.drafter
    return select(
        here,
        wanted_costs(
            profiled(), config.shapes(pair.models), profiling.contexts(config)
        ),
        model_shape(pair.models.target, pair.target.name),
        drafter_shape(drafter) if drafter else None,
        stored=CostTable.parse(text, path) if text else None,
        device=device,
    )
