"""Reads and writes drafters in the published layouts of DFlash and of DSpark.

A directory with `config.json` and `model.safetensors`: linear weights are
`[out, in]`, layer names are those of a Qwen3 decoder, and neither embedding nor LM
head is stored, for both are the target's.

DSpark's layout is that with two heads. What it has of its own, and where that stands in
deepseek-ai/DeepSpec:

* Architecture `Qwen3DSparkModel`; `block_size`, `mask_token_id`, `target_layer_ids`,
  `markov_rank`, `markov_head_type`, `enable_confidence_head` and
  `confidence_head_with_markov` at the top level (`modeling/dspark/qwen3/config.py`).
* `markov_head.markov_w1.weight` and `.markov_w2.weight`, both `[vocabulary, rank]`
  (`markov_head.py`); `confidence_head.proj.weight`, `[1, hidden size + rank]`, and
  `.bias`, `[1]` (`common.py`).
* Slot 0 drafts too, and no field says so. vllm-project/speculators has one,
  `sample_from_anchor`, true by default for DSpark and false for DFlash
  (`models/dspark/config.py`); vLLM reads its opposite, `dspark_bonus_anchor`, false by
  default (`DSparkSpeculator`). Both are written. DeepSpec and SGLang know neither: they
  take slot 0 to draft, so train for them with `sample_from_anchor`.
* `embed_tokens.weight` and `lm_head.weight` may be stored: copies of the target's,
  frozen in training (`trainer/base_trainer.py`). SGLang (`models/dspark.py`) skips
  them, and so does this module.

Source: DFlash (arXiv 2602.06036), DSpark (arXiv 2607.05147), and the checkpoints
published with them.
"""

from collections.abc import Mapping
from dataclasses import replace
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
DSPARK_ARCHITECTURE = "Qwen3DSparkModel"

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
    "markov_head.gate_proj": "a drafter with a gated Markov head (DSpark)",
    "markov_head.joint_proj": "a drafter with a recurrent Markov head (DSpark)",
    "d2t": "a drafter with a vocabulary of its own",
}
DFLASH = Scheme(
    "dflash",
    model="a DFlash drafter of {cfg.layers} layers",
    prefix="model.",
    relatives=_RELATIVES,
)
DSPARK = replace(DFLASH, copies=("embed_tokens.weight", "lm_head.weight"))


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

    `block_size`, `mask_token_id`, `target_layer_ids`, `is_causal`,
    `sample_from_anchor` and the fields of the heads may sit at the top level or in
    `dflash_config`.

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
    if names not in ([ARCHITECTURE], [DSPARK_ARCHITECTURE]):
        raise ConfigError(
            f"{where}: architecture {names} is not supported; "
            f"known: {ARCHITECTURE}, {DSPARK_ARCHITECTURE}"
        )
    if raw.get("speculators_model_type") is not None:
        raise ConfigError(
            f"{where}: the layout of speculators (`speculators_model_type`) is not "
            f"supported (it names a tapped layer by the one behind it); expected "
            f"z-lab's or DeepSpec's"
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
        **_read_heads(raw, names == [DSPARK_ARCHITECTURE], where),
    )


def _read_heads(raw: Mapping[str, Any], dspark: bool, where: str) -> dict[str, Any]:
    """DSpark's options, and which position a slot predicts.

    DFlash files with a Markov head are in the wild with either alignment, and a wrong
    one costs nearly all acceptance, so those must say which it is.
    """
    field = _needed if dspark else _either
    rank = int(field(raw, "markov_rank", where) or 0)
    confidence = bool(field(raw, "enable_confidence_head", where))
    kind = str(_either(raw, "markov_head_type", where) or "vanilla").lower()
    if rank and kind != "vanilla":
        raise ConfigError(
            f"{where}: markov_head_type={kind!r} is not supported; known: 'vanilla'"
        )
    with_markov = _either(raw, "confidence_head_with_markov", where)
    if confidence and with_markov is not None and bool(with_markov) != (rank > 0):
        raise ConfigError(
            f"{where}: confidence_head_with_markov={with_markov!r} with "
            f"markov_rank={rank} is not supported; expected {rank > 0}: a confidence "
            f"head sees the token before where, and only where, there is a Markov head"
        )
    return dict(
        sample_from_anchor=_read_alignment(raw, dspark, rank > 0, where),
        markov_rank=rank,
        confidence_head=confidence,
    )


def _read_alignment(
    raw: Mapping[str, Any], dspark: bool, markov: bool, where: str
) -> bool:
    """Whether slot 0 drafts, by either of its names."""
    anchor = _either(raw, "sample_from_anchor", where)
    bonus = _either(raw, "dspark_bonus_anchor", where)
    if bonus is not None:
        if anchor is not None and bool(anchor) == bool(bonus):
            raise ConfigError(
                f"{where}: sample_from_anchor={anchor!r} and "
                f"dspark_bonus_anchor={bonus!r} contradict each other; expected one to "
                f"be the opposite of the other"
            )
        return not bonus
    if anchor is None and markov and not dspark:
        _needed(raw, "sample_from_anchor", where)
    return dspark if anchor is None else bool(anchor)


def config_json(cfg: DrafterConfig, dtype: jnp.dtype) -> dict[str, Any]:
    """The published form of a drafter's description, RoPE in both its forms.

    DFlash's layout without heads, else DSpark's.
    """
    published_causal = tuple(t == "sliding_attention" for t in cfg.layer_types)
    causal: bool | list[bool] | None
    if cfg.causal == published_causal:
        causal = None
    elif len(set(cfg.causal)) == 1:
        causal = cfg.causal[0]
    else:
        causal = list(cfg.causal)
    block = {
        "mask_token_id": cfg.mask_token,
        "target_layer_ids": list(cfg.target_layers),
        "is_causal": causal,
        "sample_from_anchor": cfg.sample_from_anchor,
    }
    dspark = has_heads(cfg)
    own = block | _heads_json(cfg) if dspark else {"dflash_config": block}
    return {
        "architectures": [DSPARK_ARCHITECTURE if dspark else ARCHITECTURE],
        "model_type": "qwen3",
        "attention_bias": False,
        "block_size": cfg.block,
        **own,
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


def has_heads(cfg: DrafterConfig) -> bool:
    """Whether a drafter has any of DSpark's heads, and so DSpark's layout."""
    return cfg.markov_rank > 0 or cfg.confidence_head


def _heads_json(cfg: DrafterConfig) -> dict[str, Any]:
    """Fields of the heads. DeepSpec does not build a model without `num_anchors`.

    That is a number of its training and of no meaning here; 512 is what it trains with.
    """
    return {
        "dspark_bonus_anchor": not cfg.sample_from_anchor,
        "num_anchors": 512,
        "markov_rank": cfg.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": cfg.confidence_head,
        "confidence_head_with_markov": cfg.markov_rank > 0,
    }


def to_published(params: dict[str, Any], cfg: DrafterConfig) -> dict[str, np.ndarray]:
    """Tensors under their published names."""
    return publish(params, cfg, DFLASH)


def load_drafter(
    directory: str | Path, dtype: jnp.dtype
) -> tuple[DrafterConfig, dict[str, Any]]:
    """Loads a drafter, in DFlash's layout or in DSpark's.

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
    raw = read_json(config_path)
    cfg = drafter_config(raw, str(config_path))
    scheme = DSPARK if raw["architectures"] == [DSPARK_ARCHITECTURE] else DFLASH
    tensors = read_tensors(weights_path)
    return cfg, assemble(tensors, cfg, scheme, dtype, str(weights_path))


def save_drafter(
    directory: str | Path,
    cfg: DrafterConfig,
    params: dict[str, Any],
    dtype: jnp.dtype,
) -> None:
    """Writes a drafter that `load_drafter` and the published runtimes read.

    With heads, some of these need slot 0 to draft; see this module's first lines.
    Without the target's tables: vLLM and SGLang take them from the target. DeepSpec's
    own evaluation wants them in the file.
    """
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
