"""Reads and writes DFlash drafters in the published layout of the z-lab checkpoints.

A directory with `config.json` and `model.safetensors`: linear weights are
`[out, in]`, layer names are those of a Qwen3 decoder, and neither embedding nor LM
head is stored, for both are the target's.

Source: DFlash (arXiv 2602.06036) and the checkpoints published with it.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dcut_jax.config import (
    ConfigError,
    DrafterConfig,
    LayerType,
    ModelConfig,
    read_rope,
)
from dcut_jax.models.drafter import specs
from dcut_jax.models.params import ParamSpec, flatten_names
from dcut_jax.weights.errors import CheckpointError
from dcut_jax.weights.safetensors_io import read_tensors, write_tensors

ARCHITECTURE = "DFlashDraftModel"
WEIGHTS = "model.safetensors"

_TOP = {
    "fc_CE": "fc.weight",
    "hidden_norm_E": "hidden_norm.weight",
    "norm_E": "norm.weight",
}
_LAYER = {
    "attention_norm_E": "input_layernorm.weight",
    "mlp_norm_E": "post_attention_layernorm.weight",
    "q_EHD": "self_attn.q_proj.weight",
    "k_EGD": "self_attn.k_proj.weight",
    "v_EGD": "self_attn.v_proj.weight",
    "o_HDE": "self_attn.o_proj.weight",
    "q_norm_D": "self_attn.q_norm.weight",
    "k_norm_D": "self_attn.k_norm.weight",
    "gate_EF": "mlp.gate_proj.weight",
    "up_EF": "mlp.up_proj.weight",
    "down_FE": "mlp.down_proj.weight",
}

# Tensors of relatives that compute something else, by a part of their names.
_VARIANTS = {
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
    rope: dict[str, Any] = {"rope_type": "default"}
    if cfg.rope.scaling is not None:
        s = cfg.rope.scaling
        rope = {
            "rope_type": "llama3",
            "factor": s.factor,
            "low_freq_factor": s.low_freq_factor,
            "high_freq_factor": s.high_freq_factor,
            "original_max_position_embeddings": s.original_max_position,
        }
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
        "rope_theta": cfg.rope.theta,
        "rope_scaling": None if cfg.rope.scaling is None else rope,
        "rope_parameters": {"rope_theta": cfg.rope.theta} | rope,
        "sliding_window": cfg.window,
        "use_sliding_window": cfg.window is not None,
        "tie_word_embeddings": False,
        "vocab_size": cfg.vocab,
    }


def _published_name(ours: str) -> str:
    if ours in _TOP:
        return _TOP[ours]
    _, layer, leaf = ours.split(".")
    return f"layers.{layer}.{_LAYER[leaf]}"


def _published_shape(spec: ParamSpec) -> tuple[int, ...]:
    """Linear weights are `[out, in]`; norms are as they are."""
    if spec.fan_in is None:
        return spec.shape
    return (int(np.prod(spec.shape)) // spec.fan_in, spec.fan_in)


def _variant(name: str) -> str:
    for part, what in _VARIANTS.items():
        if part in name:
            return f" (this is {what}, which is not supported)"
    return ""


def from_published(
    tensors: Mapping[str, np.ndarray],
    cfg: DrafterConfig,
    dtype: jnp.dtype,
    where: str,
) -> dict[str, Any]:
    """Parameters from tensors under their published names, `model.` prefix or not.

    Raises:
      CheckpointError: naming file and tensor, where one is surplus, missing, double or
        of another shape than the config says.
    """
    found: dict[str, np.ndarray] = {}
    for full_name, value in tensors.items():
        name = full_name.removeprefix("model.")
        if name in found:
            raise CheckpointError(f"{where}: tensor {name} is there twice")
        found[name] = value
    flat = flatten_names(specs(cfg))
    wanted = {_published_name(ours): spec for ours, spec in flat.items()}
    surplus = sorted(found.keys() - wanted.keys())
    if surplus:
        raise CheckpointError(
            f"{where}: tensor {surplus[0]} is not part of a DFlash drafter of "
            f"{cfg.layers} layers{_variant(surplus[0])}; {len(surplus)} such tensors"
        )
    missing = sorted(wanted.keys() - found.keys())
    if missing:
        raise CheckpointError(
            f"{where}: tensor {missing[0]} is missing; {len(missing)} such tensors"
        )
    for name, spec in wanted.items():
        if found[name].shape != _published_shape(spec):
            raise CheckpointError(
                f"{where}: tensor {name} is {list(found[name].shape)}, the config says "
                f"{list(_published_shape(spec))}"
            )

    def take(ours: str) -> jax.Array:
        spec, value = flat[ours], found[_published_name(ours)]
        return jnp.asarray(value.T.reshape(spec.shape), dtype)

    layer_names = specs(cfg)["layers"][0]
    return {ours: take(ours) for ours in _TOP} | {
        "layers": tuple(
            {leaf: take(f"layers.{i}.{leaf}") for leaf in layer_names}
            for i in range(cfg.layers)
        )
    }


def to_published(params: dict[str, Any], cfg: DrafterConfig) -> dict[str, np.ndarray]:
    """Tensors under their published names; the inverse of `from_published`."""
    out = {}
    for ours, spec in flatten_names(specs(cfg)).items():
        value: Any = params
        for part in ours.split("."):
            value = value[int(part)] if part.isdigit() else value[part]
        shape = _published_shape(spec)
        matrix = np.asarray(value).reshape(shape[::-1]).T
        out[_published_name(ours)] = np.ascontiguousarray(matrix)
    return out


def load_drafter(
    directory: str | Path, dtype: jnp.dtype
) -> tuple[DrafterConfig, dict[str, Any]]:
    """Loads a drafter.

    Raises:
      ConfigError: `config.json` is incomplete, contradictory or of another kind.
      CheckpointError: a file is missing, or the weights do not fit the config.
    """
    config_path = Path(directory) / "config.json"
    weights_path = Path(directory) / WEIGHTS
    for path in (config_path, weights_path):
        if not path.is_file():
            raise CheckpointError(
                f"{path} does not exist; a DFlash drafter has config.json and {WEIGHTS}"
            )
    try:
        raw = json.loads(config_path.read_text())
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{config_path} is not JSON: {error}") from error
    cfg = drafter_config(raw, str(config_path))
    tensors = read_tensors(weights_path)
    return cfg, from_published(tensors, cfg, dtype, str(weights_path))


def save_drafter(
    directory: str | Path,
    cfg: DrafterConfig,
    params: dict[str, Any],
    dtype: jnp.dtype,
) -> None:
    """Writes a drafter that `load_drafter` and the published runtimes read."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = to_published(params, cfg)
    write_tensors(
        directory / WEIGHTS,
        {name: value.astype(jnp.dtype(dtype)) for name, value in tensors.items()},
    )
    text = json.dumps(config_json(cfg, dtype), indent=1)
    (directory / "config.json").write_text(text + "\n")


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
