"""Reads and writes targets in Hugging Face's layout: `config.json`, safetensors."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from dcut_jax.config import (
    ConfigError,
    ModelConfig,
    experts_json,
    model_config_from_hf,
    rope_json,
)
from dcut_jax.files import write_text
from dcut_jax.weights.errors import CheckpointError
from dcut_jax.weights.json_io import read_json
from dcut_jax.weights.names import HF, assemble, publish
from dcut_jax.weights.safetensors_io import TensorFiles, read_tensors, write_tensors
from dcut_jax.weights.stacked import unstacked

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint: one, or the shards its index names.

    Raises:
      CheckpointError: there are none, or a shard is missing.
    """
    if (directory / WEIGHTS).is_file():
        return [directory / WEIGHTS]
    if not (directory / INDEX).is_file():
        found = sorted(p.name for p in directory.iterdir())[:20]
        raise CheckpointError(
            f"{directory}: expected {WEIGHTS} or {INDEX}, found {found}; other formats "
            f"of weights must be converted first"
        )
    shards = [directory / name for name in sorted(set(_weight_map(directory).values()))]
    missing = [p.name for p in shards if not p.is_file()]
    if missing:
        raise CheckpointError(
            f"{directory}: {INDEX} names {len(shards)} shards, of which {missing} do "
            f"not exist; fetch them"
        )
    return shards


def _weight_map(directory: Path) -> dict[str, str]:
    path = directory / INDEX
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: expected a `weight_map` from tensor to file")
    return weight_map


def _open(directory: Path) -> TensorFiles:
    """Opens the weights, and holds shards against their index."""
    files = weight_files(directory)
    tensors = read_tensors(files)
    if files == [directory / WEIGHTS]:
        return tensors
    weight_map = _weight_map(directory)
    for name, shard in weight_map.items():
        if name not in tensors or Path(tensors.file_of(name)).name != shard:
            raise CheckpointError(
                f"{directory / shard}: tensor {name} is missing; {INDEX} says it is "
                f"here"
            )
    for name in tensors:
        if name not in weight_map:
            raise CheckpointError(
                f"{tensors.file_of(name)}: tensor {name} is not in {INDEX}"
            )
    return tensors


def load_hf(
    directory: str | Path, dtype: DTypeLike
) -> tuple[ModelConfig, dict[str, Any]]:
    """Loads a target.

    Args:
      dtype: of the parameters; stored tensors may be float32, float16 or bfloat16.

    Raises:
      ConfigError: `config.json` is incomplete or describes an unsupported model.
      CheckpointError: a file is missing or broken, or the tensors do not fit.
    """
    directory = Path(directory)
    raw = read_json(directory / CONFIG)
    if raw.get("quantization_config"):
        raise ConfigError(
            f"{directory / CONFIG}: quantised checkpoints are not supported; use the "
            f"float32, float16 or bfloat16 one"
        )
    cfg = model_config_from_hf(raw, str(directory / CONFIG))
    tensors = unstacked(_open(directory))
    return cfg, assemble(tensors, cfg, HF, dtype, str(directory))


def hf_config(cfg: ModelConfig, dtype: DTypeLike) -> dict[str, Any]:
    """The `config.json` of a target; for transformers 4 and 5, where they have it."""
    return {
        **experts_json(cfg),
        "attention_bias": False,
        "dtype": jnp.dtype(dtype).name,
        "head_dim": cfg.head_dim,
        "hidden_act": "silu",
        "hidden_size": cfg.embed,
        "intermediate_size": cfg.mlp,
        "max_position_embeddings": cfg.max_position,
        "num_attention_heads": cfg.heads,
        "num_hidden_layers": cfg.layers,
        "num_key_value_heads": cfg.kv_heads,
        "rms_norm_eps": cfg.norm_eps,
        **rope_json(cfg.rope),
        "tie_word_embeddings": cfg.tied,
        "vocab_size": cfg.vocab,
    }


def write_checkpoint(
    directory: str | Path, config: Mapping[str, Any], tensors: Mapping[str, Any]
) -> None:
    """Writes `config.json` and one file of weights."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    # Never new weights beside an old description.
    (directory / CONFIG).unlink(missing_ok=True)
    # transformers refuses metadata that names no format.
    write_tensors(directory / WEIGHTS, tensors, metadata={"format": "pt"})
    write_text(directory / CONFIG, json.dumps(config, indent=1) + "\n")


def save_hf(directory: str | Path, cfg: ModelConfig, params: dict[str, Any]) -> None:
    """Writes a checkpoint that `load_hf` and transformers read, in params' dtype."""
    config = hf_config(cfg, params["embed_VE"].dtype)
    write_checkpoint(directory, config, publish(params, cfg, HF))
