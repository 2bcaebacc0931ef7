"""A dense target's feed-forward layers cut into experts: a small file, and its use.

The experts' weights are the dense model's own neurons in another order, so they need
not be stored again. A directory holds `config.json`, which describes the result, and
`split.safetensors`: the order of neurons, and what was fitted since, routers and norms.
With all experts on, and the dense norms, the result is the dense model.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32, Int32
from safetensors import SafetensorError
from safetensors.numpy import load_file

from dcut_jax.config import (
    ConfigError,
    ExpertsConfig,
    ModelConfig,
    model_config_from_hf,
)
from dcut_jax.files import write_text
from dcut_jax.weights.errors import CheckpointError
from dcut_jax.weights.hf import CONFIG, hf_config
from dcut_jax.weights.json_io import read_json
from dcut_jax.weights.safetensors_io import write_tensors

SPLIT = "split.safetensors"


@dataclass(frozen=True, eq=False)
class Split:
    """How a dense target is cut.

    Attributes:
      neuron_YF: neurons of each layer in their new order: the shared expert's, then
        those of expert 0, and so on.
      router_YEQ: routers of the layers.
      attention_norm_YE, mlp_norm_YE, norm_E: norms of the result.
    """

    neuron_YF: Int32[np.ndarray, "Y F"]
    router_YEQ: Float32[np.ndarray, "Y E Q"]
    attention_norm_YE: Float32[np.ndarray, "Y E"]
    mlp_norm_YE: Float32[np.ndarray, "Y E"]
    norm_E: Float32[np.ndarray, "E"]


def even_experts(
    cfg: ModelConfig, count: int, active: int, shared_mlp: int
) -> ExpertsConfig:
    """Experts that a dense target's neurons fill exactly.

    Raises:
      ConfigError: what the shared expert leaves cannot be dealt evenly.
    """
    rest = cfg.mlp - shared_mlp
    if rest <= 0 or rest % count:
        raise ConfigError(
            f"{cfg.mlp} neurons less {shared_mlp} shared ones are not a multiple of "
            f"{count} experts"
        )
    return ExpertsConfig(
        count=count,
        active=active,
        mlp=rest // count,
        layers=tuple(range(cfg.layers)),
        gating="ones",
        shared_mlp=shared_mlp,
    )


def cut(
    cfg: ModelConfig, params: Mapping[str, Any], experts: ExpertsConfig, split: Split
) -> tuple[ModelConfig, dict[str, Any]]:
    """The target with experts, from the dense one."""
    layers = []
    for i, layer in enumerate(params["layers"]):
        dtype = layer["up_EF"].dtype
        order_F = jnp.asarray(split.neuron_YF[i])
        shared_F, own_QF = order_F[: experts.shared_mlp], order_F[experts.shared_mlp :]
        own_QF = own_QF.reshape(experts.count, experts.mlp)
        mine: dict[str, Any] = {
            "router_EQ": jnp.asarray(split.router_YEQ[i], dtype),
            "gate_QEF": layer["gate_EF"][:, own_QF].swapaxes(0, 1),
            "up_QEF": layer["up_EF"][:, own_QF].swapaxes(0, 1),
            "down_QFE": layer["down_FE"][own_QF],
        }
        if experts.shared_mlp:
            mine["shared"] = {
                "gate_EF": layer["gate_EF"][:, shared_F],
                "up_EF": layer["up_EF"][:, shared_F],
                "down_FE": layer["down_FE"][shared_F],
            }
        kept = {k: v for k, v in layer.items() if k not in _DENSE}
        norms = {
            "attention_norm_E": jnp.asarray(split.attention_norm_YE[i], dtype),
            "mlp_norm_E": jnp.asarray(split.mlp_norm_YE[i], dtype),
        }
        layers.append(kept | norms | {"experts": mine})
    norm_E = jnp.asarray(split.norm_E, params["norm_E"].dtype)
    tree = dict(params) | {"layers": tuple(layers), "norm_E": norm_E}
    return replace(cfg, experts=experts), tree


_DENSE = ("gate_EF", "up_EF", "down_FE")


def save_split(
    directory: str | Path, cfg: ModelConfig, split: Split, about: Mapping[str, Any]
) -> None:
    """Writes a split; `cfg` is of the result, `about` goes into its `config.json`."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG).unlink(missing_ok=True)  # never of another split
    write_tensors(directory / SPLIT, vars(split))
    config = hf_config(cfg, "float32") | {"split": dict(about)}
    write_text(directory / CONFIG, json.dumps(config, indent=1) + "\n")


def load_split(
    directory: Path, dense: ModelConfig, identity: str
) -> tuple[ExpertsConfig, Split]:
    """Reads what `save_split` wrote, and holds it against the dense target.

    Args:
      identity: the dense target's; a split of another, in the same shapes, is an order
        of other neurons. One that does not say whose it is is taken.

    Raises:
      CheckpointError: a file is missing or damaged, or is of another target.
    """
    raw = read_json(directory / CONFIG)
    theirs = (raw.get("split") or {}).get("base_identity", identity)
    if theirs != identity:
        raise CheckpointError(
            f"{directory / CONFIG}: expected a split of target {identity}, found one "
            f"of {theirs}; name the target that it was made of"
        )
    cfg = model_config_from_hf(raw, str(directory / CONFIG))
    if cfg.experts is None or replace(cfg, experts=None) != dense:
        raise CheckpointError(
            f"{directory / CONFIG} describes {cfg}; expected experts, and the rest as "
            f"in the dense target, {dense}"
        )
    path = directory / SPLIT
    try:
        split = Split(**load_file(path))
    except (OSError, TypeError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} is missing or damaged: {error}; make it again with "
            f"`python -m dcut_jax.moefy make`"
        ) from error
    Y, E, F, Q = cfg.layers, cfg.embed, cfg.mlp, cfg.experts.count
    shapes = {
        "neuron_YF": (Y, F),
        "router_YEQ": (Y, E, Q),
        "attention_norm_YE": (Y, E),
        "mlp_norm_YE": (Y, E),
        "norm_E": (E,),
    }
    wrong = [name for name, shape in shapes.items() if vars(split)[name].shape != shape]
    if wrong or not np.array_equal(
        np.sort(split.neuron_YF, axis=1), np.tile(np.arange(F), (Y, 1))
    ):
        raise CheckpointError(
            f"{path}: expected shapes {shapes}, and each layer's neurons once; wrong: "
            f"{wrong or ['neuron_YF']}"
        )
    return cfg.experts, split
