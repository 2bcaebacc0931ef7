"""Model descriptions: frozen dataclasses, read from a checkpoint's `config.json`."""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args


class ConfigError(ValueError):
    """A model description that is incomplete, contradictory or not supported."""


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3's stretch of the slow RoPE frequencies (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True)
class RopeConfig:
    theta: float
    scaling: Llama3Scaling | None = None


Gating = Literal["softmax", "renormalised", "ones"]


@dataclass(frozen=True)
class ExpertsConfig:
    """Feed-forward parts of which a row uses a few: a mixture of experts.

    A router scores all experts for a row; the `active` best ones run, each a SwiGLU of
    its own, and their outputs are added up by gate values. Qwen3-MoE's layout, and
    Qwen2-MoE's for the shared expert.

    Attributes:
      count: experts of a layer (`num_experts`).
      active: experts that a row is sent to (`num_experts_per_tok`).
      mlp: neurons of an expert (`moe_intermediate_size`).
      layers: the layers that have experts, ascending; the others are dense.
      gating: gate values of chosen experts. softmax: over all experts' scores.
        renormalised: the same, divided by their sum (`norm_topk_prob`). ones: 1, so
        that a dense layer cut into experts is itself when all of them run.
      shared_mlp: neurons of an expert that every row uses; 0: there is none.
      shared_gate: whether the shared expert's output is scaled by a sigmoid of the row.
    """

    count: int
    active: int
    mlp: int
    layers: tuple[int, ...]
    gating: Gating
    shared_mlp: int = 0
    shared_gate: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.active <= self.count:
            raise ConfigError(
                f"num_experts_per_tok {self.active} is outside 1..{self.count}, the "
                f"experts of a layer"
            )
        if self.gating not in get_args(Gating):
            raise ConfigError(
                f"gating {self.gating!r} is unknown; known: "
                f"{', '.join(get_args(Gating))}"
            )
        if self.shared_gate and not self.shared_mlp:
            raise ConfigError(
                "shared_expert_gate is set, but there is no shared expert"
            )


@dataclass(frozen=True)
class ModelConfig:
    """A decoder: Llama family or Qwen3 (`qk_norm`), dense or with experts.

    `head_dim` is independent of `embed / heads`. `tied` heads reuse the embedding.
    `mlp` is of dense layers; `experts` is None where all layers are dense.
    """

    vocab: int
    embed: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rope: RopeConfig
    norm_eps: float
    max_position: int
    tied: bool
    qk_norm: bool = False
    experts: ExpertsConfig | None = None

    def __post_init__(self) -> None:
        if self.experts and not set(self.experts.layers) <= set(range(self.layers)):
            raise ConfigError(
                f"layers with experts {list(self.experts.layers)} must be among "
                f"0..{self.layers - 1}"
            )
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"{self.heads} query heads are not a multiple of "
                f"{self.kv_heads} key/value heads"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim {self.head_dim} is odd; RoPE rotates pairs")


LayerType = Literal["full_attention", "sliding_attention"]


@dataclass(frozen=True)
class DrafterConfig:
    """A DFlash v1 drafter (arXiv 2602.06036), with DSpark's heads as options.

    Layouts are those of the z-lab checkpoints and of deepseek-ai/DeepSpec. A head that
    is left out costs nothing: the drafter is then DFlash's, bit for bit.

    Attributes:
      block: width of a full block, the anchor included (`block_size`).
      mask_token: row of the target's embedding that stands at undrafted slots.
      target_layers: taps; `i` is the residual stream *after* decoder layer `i`.
      window: rows a sliding layer sees; a query at `q` sees keys with `q - k < window`.
      causal: per layer, whether the block part of attention is causal.
      sample_from_anchor: slot 0 drafts as well and slot `k` predicts position
        `k + 1` (DeepSpec's alignment), where by default slot `k >= 1` predicts its own.
      markov_rank: rank of the Markov head (DSpark, arXiv 2607.05147), which lets the
        token drafted just before bias the logits of a slot; 0: no such head.
      confidence_head: whether a trained head tells the chance that a draft is
        accepted. It sees the slot's hidden state, and with a Markov head the token
        just before; never the token that it judges.
    """

    vocab: int
    embed: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rope: RopeConfig
    norm_eps: float
    block: int
    mask_token: int
    target_layers: tuple[int, ...]
    target_depth: int
    layer_types: tuple[LayerType, ...]
    causal: tuple[bool, ...]
    window: int | None = None
    sample_from_anchor: bool = False
    markov_rank: int = 0
    confidence_head: bool = False

    def __post_init__(self) -> None:
        if len(self.layer_types) != self.layers or len(self.causal) != self.layers:
            raise ConfigError(
                f"{self.layers} layers, but {len(self.layer_types)} layer types and "
                f"{len(self.causal)} causality flags"
            )
        if "sliding_attention" in self.layer_types and not self.window:
            raise ConfigError(
                "a sliding_attention layer needs sliding_window, which is not set"
            )
        outside = [i for i in self.target_layers if not 0 <= i < self.target_depth]
        if outside or not self.target_layers:
            raise ConfigError(
                f"target_layer_ids {list(self.target_layers)} must name layers "
                f"0..{self.target_depth - 1} of the target"
            )
        if not 0 <= self.mask_token < self.vocab:
            raise ConfigError(
                f"mask_token_id {self.mask_token} is outside the vocabulary "
                f"of {self.vocab}"
            )
        if self.block < 2:
            raise ConfigError(f"block_size {self.block} leaves no draft; expected >= 2")
        if self.heads % self.kv_heads or self.head_dim % 2:
            raise ConfigError(
                f"{self.heads} heads, {self.kv_heads} key/value heads of "
                f"{self.head_dim}: expected a multiple and an even head_dim"
            )
        if self.markov_rank < 0:
            raise ConfigError(
                f"markov_rank {self.markov_rank} is negative; expected the rank of the "
                f"Markov head, or 0 for a drafter without one"
            )

    @property
    def max_drafts(self) -> int:
        """Most drafts one block can hold."""
        return self.block if self.sample_from_anchor else self.block - 1


def _require(raw: Mapping[str, Any], key: str, where: str) -> Any:
    if raw.get(key) is None:
        raise ConfigError(f"{where}: `{key}` is missing; a model needs it")
    return raw[key]


def read_rope(raw: Mapping[str, Any], where: str) -> RopeConfig:
    """Reads RoPE from either form of `config.json`; never guesses a theta.

    transformers 4 wrote `rope_theta` and `rope_scaling`, transformers 5 writes
    `rope_parameters`; a file may hold both, and then they must agree.
    """
    new = raw.get("rope_parameters") or {}
    old = raw.get("rope_scaling") or {}
    thetas = {
        float(t)
        for t in (raw.get("rope_theta"), new.get("rope_theta"))
        if t is not None
    }
    if len(thetas) != 1:
        found = "none" if not thetas else " and ".join(map(str, sorted(thetas)))
        raise ConfigError(
            f"{where}: expected one RoPE base in `rope_theta` or "
            f"`rope_parameters.rope_theta`, found {found}"
        )
    scalings = {_read_scaling(form, where) for form in (new, old) if form}
    if len(scalings) > 1:
        raise ConfigError(
            f"{where}: `rope_parameters` and `rope_scaling` scale RoPE differently; "
            f"expected one scaling, found {new} and {old}"
        )
    return RopeConfig(thetas.pop(), scalings.pop() if scalings else None)


def _read_scaling(form: Mapping[str, Any], where: str) -> Llama3Scaling | None:
    kind = form.get("rope_type", form.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ConfigError(
            f"{where}: RoPE scaling {kind!r} is not supported; known: default, llama3"
        )
    return Llama3Scaling(
        factor=float(_require(form, "factor", where)),
        low_freq_factor=float(_require(form, "low_freq_factor", where)),
        high_freq_factor=float(_require(form, "high_freq_factor", where)),
        original_max_position=int(
            _require(form, "original_max_position_embeddings", where)
        ),
    )


def rope_json(rope: RopeConfig) -> dict[str, Any]:
    """RoPE in both forms of `config.json`; the inverse of `read_rope`."""
    scaling: dict[str, Any] | None = None
    if (s := rope.scaling) is not None:
        scaling = {
            "rope_type": "llama3",
            "factor": s.factor,
            "low_freq_factor": s.low_freq_factor,
            "high_freq_factor": s.high_freq_factor,
            "original_max_position_embeddings": s.original_max_position,
        }
    parameters = {"rope_theta": rope.theta} | (scaling or {"rope_type": "default"})
    return {
        "rope_theta": rope.theta,
        "rope_scaling": scaling,
        "rope_parameters": parameters,
    }


# Architectures of transformers, and one of this project: what Qwen3-MoE's keys and
# tensor names say with the additions that `experts_json` writes.
OWN_MOE = "DcutMoeForCausalLM"
_QK_NORM = {
    "LlamaForCausalLM": False,
    "Qwen3ForCausalLM": True,
    "Qwen3MoeForCausalLM": True,
}
_MOE = ("Qwen3MoeForCausalLM", OWN_MOE)


def read_experts(
    raw: Mapping[str, Any], layers: int, own: bool, where: str
) -> ExpertsConfig | None:
    """Reads the experts of a Qwen3-MoE `config.json`, or of this project's own kind.

    None where no layer has any. Only our own kind has `gating` and shared experts.
    """
    # transformers 4 wrote `num_experts`; 5 writes `num_local_experts` and reads both.
    names = ("num_experts", "num_local_experts")
    counts = {int(raw[name]) for name in names if raw.get(name) is not None}
    if len(counts) != 1:
        found = "none" if not counts else " and ".join(map(str, sorted(counts)))
        raise ConfigError(
            f"{where}: expected one number of experts in `num_experts` or "
            f"`num_local_experts`, found {found}"
        )
    count = counts.pop()
    step = int(raw.get("decoder_sparse_step") or 1)
    dense = set(raw.get("mlp_only_layers") or ())
    sparse = [i for i in range(layers) if i not in dense and (i + 1) % step == 0]
    if not count or not sparse:
        return None
    gating: Gating = "renormalised" if raw.get("norm_topk_prob") else "softmax"
    foreign = [key for key in _OWN_KEYS if raw.get(key) and not own]
    if foreign:
        raise ConfigError(
            f"{where}: {foreign[0]} is not part of Qwen3-MoE; a checkpoint with it has "
            f"the architecture {OWN_MOE}"
        )
    return ExpertsConfig(
        count=count,
        active=int(_require(raw, "num_experts_per_tok", where)),
        mlp=int(_require(raw, "moe_intermediate_size", where)),
        layers=tuple(sparse),
        gating=raw.get("gating", gating),
        shared_mlp=int(raw.get("shared_expert_intermediate_size") or 0),
        shared_gate=bool(raw.get("shared_expert_gate", False)),
    )


_OWN_KEYS = ("gating", "shared_expert_intermediate_size", "shared_expert_gate")


def experts_json(cfg: ModelConfig) -> dict[str, Any]:
    """Architecture and experts of `cfg` in `config.json`; undoes `read_experts`."""
    x = cfg.experts
    if x is None:
        name = "qwen3" if cfg.qk_norm else "llama"
        return {
            "architectures": [f"{name.capitalize()}ForCausalLM"],
            "model_type": name,
        }
    published = cfg.qk_norm and x.gating != "ones" and not x.shared_mlp
    own = {
        "qk_norm": cfg.qk_norm,
        "gating": x.gating,
        "shared_expert_intermediate_size": x.shared_mlp,
        "shared_expert_gate": x.shared_gate,
    }
    return {
        "architectures": ["Qwen3MoeForCausalLM" if published else OWN_MOE],
        "model_type": "qwen3_moe" if published else "dcut_moe",
        "num_experts": x.count,
        "num_experts_per_tok": x.active,
        "moe_intermediate_size": x.mlp,
        "norm_topk_prob": x.gating == "renormalised",
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i in range(cfg.layers) if i not in x.layers],
    } | ({} if published else own)


def model_config_from_hf(raw: Mapping[str, Any], where: str) -> ModelConfig:
    """Reads a target's `config.json` (Hugging Face's names).

    Raises:
      ConfigError: naming `where`, for an unknown architecture or a missing field.
    """
    names = raw.get("architectures") or []
    known = [n for n in names if n in (*_QK_NORM, *_MOE)]
    if not known:
        raise ConfigError(
            f"{where}: architecture {names} is not supported; "
            f"known: {', '.join(sorted({*_QK_NORM, *_MOE}))}"
        )
    own = known[0] == OWN_MOE
    for unsupported in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if raw.get(unsupported):
            raise ConfigError(f"{where}: {unsupported}=true is not supported")
    if raw.get("hidden_act", "silu") != "silu":
        raise ConfigError(
            f"{where}: hidden_act {raw['hidden_act']!r} is not supported; known: silu"
        )
    embed = int(_require(raw, "hidden_size", where))
    heads = int(_require(raw, "num_attention_heads", where))
    layers = int(_require(raw, "num_hidden_layers", where))
    return ModelConfig(
        vocab=int(_require(raw, "vocab_size", where)),
        embed=embed,
        mlp=int(_require(raw, "intermediate_size", where)),
        layers=layers,
        heads=heads,
        kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or embed // heads),
        rope=read_rope(raw, where),
        norm_eps=float(_require(raw, "rms_norm_eps", where)),
        max_position=int(_require(raw, "max_position_embeddings", where)),
        tied=bool(raw.get("tie_word_embeddings", False)),
        qk_norm=bool(_require(raw, "qk_norm", where)) if own else _QK_NORM[known[0]],
        experts=read_experts(raw, layers, own, where) if known[0] in _MOE else None,
    )


def read_config(path: Path) -> dict[str, Any]:
    """A `config.json`, a TOML file with its names, or a directory with the former.

    Raises:
      ConfigError: there is no such file, or it is neither.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        text = file.read_text()
        raw = tomllib.loads(text) if file.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise ConfigError(
            f"expected a model's config.json, or a TOML file with its names, at "
            f"{path}, found {error}; the project's own are in configs/targets"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{file}: expected names and values, found {raw!r}")
    return raw
