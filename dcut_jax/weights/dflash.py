"""Reads and writes DFlash drafters in the published layout of the z-lab checkpoints.

A directory with `config.json` and `model.safetensors`: linear weights are
`[out, in]`, layer names are those of a Qwen3 decoder, and neither embedding nor LM
head is stored, for both are the target's.

Source: DFlash (arXiv 2602.06036) and the checkpoints published with it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from dcut_jax.config import (
    ConfigError,
    DrafterConfig,
    LayerType,
    ModelConfig,
    read_rope,
    rope_json,
)
from dcut_jax.weights.errors import CheckpointError
from dcut_jax.weights.hf import CONFIG, WEIGHTS, write_checkpoint
from dcut_jax.weights.json_io import read_json
from dcut_jax.weights.names import Scheme, assemble, publish
from dcut_jax.weights.safetensors_io import read_tensors

ARCHITECTURE = "DFlashDraftModel"

# Tensors of relatives that compute something else, by a part of their names.
_RELATIVES = {
    "qkv_proj": "a drafter with fused q, k and v projections",
    "g_proj": "a drafter with gated attention (Laguna)",
    "aux_hidden_norms": "a drafter with one norm per tap (Laguna)",
    "k_proj_target": "DFlare, which projects context with weights of its own",
    "v_proj_target": "DFlare, which projects context with weights of its own",
    "layer_fusion_weights": "DFlare, which projects context with weights of its own",
    "attention_conv": "DFlash2",
    "mlp_conv": "DFlash2",
    "candidate_selector": "DFlash2",
    "encoder.": "a drafter with an encoder (Muse)",
}
DFLASH = Scheme(
    "dflash",
    model="a DFlash drafter of {cfg.layers} layers",
    prefix="model.",
    relatives=_RELATIVES,
)


def default_taps(count: int, depth: int) -> tuple[int, ...]:
    """Tapped layers where a config names none: evenly spaced over `1..depth - 3`."""
    if count == 1:
        return (depth // 2,)
    return tuple(round(1 + j * (depth - 4) / (count - 1)) for j in range(count))


def _either(raw: Mapping[str, Any], key: str, where: str) -> Any:
    """A field that may sit at the top level, in `dflash_config`, or in both."""
    inner = (raw.get("dflash_config") or {}).get(key)
    outer = raw.get(key)
    if inner is not None and outer is not None and inner != outer:
        raise ConfigError(
            f"{where}: `{key}` is {outer} at the top level and {inner} in "
            f"`dflash_config`; expected one value"
        )
    return outer if inner is None else inner


def _needed(raw: Mapping[str, Any], key: str, where: str) -> Any:
    value = _either(raw, key, where)
    if value is None:
        raise ConfigError(
            f"{where}: `{key}` is missing, at the top level and in `dflash_config`; "
            f"a drafter needs it and no default is safe"
        )
    return value


def _read_causal(
    raw: Mapping[str, Any], layer_types: tuple[LayerType, ...], where: str
) -> tuple[bool, ...]:
    causal = _either(raw, "is_causal", where)
    if causal is None:
        return tuple(t == "sliding_attention" for t in layer_types)
    if isinstance(causal, bool):
        return (causal,) * len(layer_types)
    if isinstance(causal, list) and all(isinstance(c, bool) for c in causal):
        return tuple(causal)
    raise ConfigError(
        f"{where}: is_causal is {causal!r}; expected null, true, false or one per layer"
    )


def drafter_config(raw: Mapping[str, Any], where: str) -> DrafterConfig:
    """Reads a drafter's `config.json`.

    `block_size`, `mask_token_id`, `target_layer_ids`, `is_causal` and
    `sample_from_anchor` may sit at the top level or in `dflash_config`.

    Raises:
      ConfigError: naming `where`, for another architecture, a missing or contradictory
        field, or an option that changes the function and is not supported.
    """
    fields = _read_fields(raw, where)
    try:
        return DrafterConfig(**fields)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _read_fields(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The arguments of `DrafterConfig`."""
    names = raw.get("architectures") or []
    if names != [ARCHITECTURE]:
        raise ConfigError(
            f"{where}: architecture {names} is not supported; known: {ARCHITECTURE}"
        )
    neutral = {
        "attention_bias": False,
        "input_embedding_scale": 1.0,
        "output_multiplier": 1.0,
        "final_logit_softcapping": None,
        "hidden_act": "silu",
    }
    for key, plain in neutral.items():
        value = _either(raw, key, where)
        if value is not None and value != plain:
            raise ConfigError(
                f"{where}: {key}={value!r} is not supported; known: {plain!r}"
            )
    layers = int(_needed(raw, "num_hidden_layers", where))
    depth = int(_needed(raw, "num_target_layers", where))
    layer_types = tuple(raw.get("layer_types") or ["full_attention"] * layers)
    unknown = set(layer_types) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ConfigError(
            f"{where}: layer types {sorted(unknown)} are not supported; "
            f"known: full_attention, sliding_attention"
        )
    taps = _either(raw, "target_layer_ids", where)
    window = raw.get("sliding_window")
    embed = int(_needed(raw, "hidden_size", where))
    heads = int(_needed(raw, "num_attention_heads", where))
    return dict(
        vocab=int(_needed(raw, "vocab_size", where)),
        embed=embed,
        mlp=int(_needed(raw, "intermediate_size", where)),
        layers=layers,
        heads=heads,
        kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or embed // heads),
        rope=read_rope(raw, where),
        norm_eps=float(_needed(raw, "rms_norm_eps", where)),
        block=int(_needed(raw, "block_size", where)),
        mask_token=int(_needed(raw, "mask_token_id", where)),
        target_layers=tuple(taps) if taps else default_taps(layers, depth),
        target_depth=depth,
        layer_types=layer_types,
        causal=_read_causal(raw, layer_types, where),
        window=int(window) if "sliding_attention" in layer_types and window else None,
        sample_from_anchor=bool(_either(raw, "sample_from_anchor", where)),
    )


def config_json(cfg: DrafterConfig, dtype: jnp.dtype) -> dict[str, Any]:
    """The published form of a drafter's description, RoPE in both its forms."""
    published_causal = tuple(t == "sliding_attention" for t in cfg.layer_types)
    causal: bool | list[bool] | None
    if cfg.causal == published_causal:
        causal = None
    elif len(set(cfg.causal)) == 1:
        causal = cfg.causal[0]
    else:
        causal = list(cfg.causal)
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "attention_bias": False,
        "block_size": cfg.block,
        "dflash_config": {
            "mask_token_id": cfg.mask_token,
            "target_layer_ids": list(cfg.target_layers),
            "is_causal": causal,
            "sample_from_anchor": cfg.sample_from_anchor,
        },
        "dtype": jnp.dtype(dtype).name,
        "head_dim": cfg.head_dim,
        "hidden_act": "silu",
        "hidden_size": cfg.embed,
        "intermediate_size": cfg.mlp,
        "layer_types": list(cfg.layer_types),
        "num_attention_heads": cfg.heads,
        "num_hidden_layers": cfg.layers,
        "num_key_value_heads": cfg.kv_heads,
        "num_target_layers": cfg.target_depth,
        "rms_norm_eps": cfg.norm_eps,
        **rope_json(cfg.rope),
        "sliding_window": cfg.window,
        "use_sliding_window": cfg.window is not None,
        "tie_word_embeddings": False,
        "vocab_size": cfg.vocab,
    }


def to_published(params: dict[str, Any], cfg: DrafterConfig) -> dict[str, np.ndarray]:
    """Tensors under their published names."""
    return publish(params, cfg, DFLASH)


def load_drafter(
    directory: str | Path, dtype: jnp.dtype
) -> tuple[DrafterConfig, dict[str, Any]]:
    """Loads a drafter.

    Raises:
      ConfigError: `config.json` is incomplete, contradictory or of another kind.
      CheckpointError: a file is missing, or the weights do not fit the config.
    """
    config_path, weights_path = Path(directory) / CONFIG, Path(directory) / WEIGHTS
    for path in (config_path, weights_path):
        if not path.is_file():
            raise CheckpointError(
                f"{path} does not exist; a DFlash drafter has {CONFIG} and {WEIGHTS}"
            )
    cfg = drafter_config(read_json(config_path), str(config_path))
    tensors = read_tensors(weights_path)
    return cfg, assemble(tensors, cfg, DFLASH, dtype, str(weights_path))


def save_drafter(
    directory: str | Path,
    cfg: DrafterConfig,
    params: dict[str, Any],
    dtype: jnp.dtype,
) -> None:
    """Writes a drafter that `load_drafter` and the published runtimes read."""
    tensors = {
        name: value.astype(jnp.dtype(dtype))
        for name, value in to_published(params, cfg).items()
    }
    write_checkpoint(directory, config_json(cfg, dtype), tensors)


def check_pair(target: ModelConfig, drafter: DrafterConfig) -> None:
    """Refuses a drafter that was made for another target.

    Raises:
      ConfigError: saying what differs.
    """
    pairs = {
        "hidden size": (target.embed, drafter.embed),
        "vocabulary": (target.vocab, drafter.vocab),
        "layers of the target": (target.layers, drafter.target_depth),
    }
    differ = [
        f"{what} (target {ours}, drafter {theirs})"
        for what, (ours, theirs) in pairs.items()
        if ours != theirs
    ]
    if drafter.mask_token >= target.vocab:
        differ.append(
            f"mask token {drafter.mask_token} is outside the target's vocabulary "
            f"of {target.vocab}"
        )
    if differ:
        raise ConfigError(
            "this drafter belongs to another target; they differ in "
            + ", ".join(differ)
        )
