"""One table of tensor names, used to read and to write, and a strict assembler.

Owners of the published names: Hugging Face transformers (`LlamaForCausalLM`,
`Qwen3ForCausalLM`, `Qwen3MoeForCausalLM`, and of Qwen2-MoE the shared expert),
llama.cpp (GGUF architectures `llama` and `qwen3`), the z-lab DFlash checkpoints
(`DFlashDraftModel`), and for the heads of a drafter deepseek-ai/DeepSpec
(`Qwen3DSparkModel`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from dcut_jax.config import DrafterConfig, ModelConfig
from dcut_jax.models import dense, drafter
from dcut_jax.models.params import ParamSpec, flatten_names
from dcut_jax.weights.errors import CheckpointError

# as_is: the same array. linear: `[out, in]` there, `[in, *out]` here, and
# `[*in, out]` for the output projection. rotary: linear, and rows of a head are the
# components that RoPE rotates in pairs. scalar: `[1]` there, `[]` here.
Layout = Literal["as_is", "linear", "rotary", "scalar"]


@dataclass(frozen=True)
class Name:
    """One parameter; `{i}` stands for the layer, "" where a kind of file lacks it.

    Where a name has `{q}`, each expert is a tensor of its own.
    """

    ours: str
    layout: Layout
    hf: str = ""
    gguf: str = ""
    dflash: str = ""


_LAYER: tuple[tuple[str, Layout, str, str], ...] = (
    ("attention_norm_E", "as_is", "input_layernorm", "attn_norm"),
    ("mlp_norm_E", "as_is", "post_attention_layernorm", "ffn_norm"),
    ("q_EHD", "rotary", "self_attn.q_proj", "attn_q"),
    ("k_EGD", "rotary", "self_attn.k_proj", "attn_k"),
    ("v_EGD", "linear", "self_attn.v_proj", "attn_v"),
    ("o_HDE", "linear", "self_attn.o_proj", "attn_output"),
    ("q_norm_D", "as_is", "self_attn.q_norm", "attn_q_norm"),
    ("k_norm_D", "as_is", "self_attn.k_norm", "attn_k_norm"),
    ("gate_EF", "linear", "mlp.gate_proj", "ffn_gate"),
    ("up_EF", "linear", "mlp.up_proj", "ffn_up"),
    ("down_FE", "linear", "mlp.down_proj", "ffn_down"),
)
_EXPERTS = (
    ("router_EQ", "gate"),
    ("gate_QEF", "experts.{q}.gate_proj"),
    ("up_QEF", "experts.{q}.up_proj"),
    ("down_QFE", "experts.{q}.down_proj"),
    ("shared.gate_EF", "shared_expert.gate_proj"),
    ("shared.up_EF", "shared_expert.up_proj"),
    ("shared.down_FE", "shared_expert.down_proj"),
    ("shared_gate_E", "shared_expert_gate"),
)
TABLE = (
    Name("embed_VE", "as_is", "model.embed_tokens.weight", "token_embd.weight"),
    Name("head_VE", "as_is", "lm_head.weight", "output.weight"),
    Name("norm_E", "as_is", "model.norm.weight", "output_norm.weight", "norm.weight"),
    Name("fc_CE", "linear", dflash="fc.weight"),
    Name("hidden_norm_E", "as_is", dflash="hidden_norm.weight"),
    Name("markov.previous_VX", "as_is", dflash="markov_head.markov_w1.weight"),
    Name("markov.next_VX", "as_is", dflash="markov_head.markov_w2.weight"),
    Name("confidence.weight_X", "linear", dflash="confidence_head.proj.weight"),
    Name("confidence.bias", "scalar", dflash="confidence_head.proj.bias"),
    *(
        Name(
            f"layers.{{i}}.{ours}",
            layout,
            f"model.layers.{{i}}.{hf}.weight",
            f"blk.{{i}}.{gguf}.weight",
            f"layers.{{i}}.{hf}.weight",
        )
        for ours, layout, hf, gguf in _LAYER
    ),
    *(
        Name(
            f"layers.{{i}}.experts.{ours}",
            "linear",
            f"model.layers.{{i}}.mlp.{hf}.weight",
        )
        for ours, hf in _EXPERTS
    ),
)
_BY_OURS = {name.ours: name for name in TABLE}


@dataclass(frozen=True)
class Scheme:
    """How one kind of file names and lays out its tensors.

    Attributes:
      column: which names of the table it uses.
      model: what it holds, for messages; a format of `cfg`.
      paired: rows of a q or k head are stored as pairs `(2i, 2i + 1)`; ours are
        `(i, i + D/2)`.
      prefix: what may stand before a name, or may not.
      ignored: ends of names of buffers that hold no weights.
      relatives: models that compute something else, by a part of a tensor's name.
      copies: names of `[V, E]` tables of another model, which a file may hold too.
        Their shape is checked; they are not read.
    """

    column: Literal["hf", "gguf", "dflash"]
    model: str = "this model ({cfg.layers} layers, q/k norm {cfg.qk_norm})"
    paired: bool = False
    prefix: str = ""
    ignored: tuple[str, ...] = ()
    relatives: Mapping[str, str] = field(default_factory=dict)
    copies: tuple[str, ...] = ()

    def name(self, ours: str, layer: str = "", expert: int = 0) -> str:
        """The published name of a row of the table, "" if it has none here."""
        published: str = getattr(_BY_OURS[ours], self.column)
        return published.format(i=layer, q=expert)


HF = Scheme("hf", ignored=("rotary_emb.inv_freq",))
# `rope_freqs.weight` is read with the description of the model, not as a weight.
GGUF_LLAMA = Scheme("gguf", paired=True, ignored=("rope_freqs.weight",))
GGUF_QWEN3 = Scheme("gguf")


@runtime_checkable
class TensorSource(Protocol):
    """Published tensors by name; `TensorFiles` is one."""

    def __iter__(self) -> Iterator[str]: ...
    def __getitem__(self, name: str) -> np.ndarray: ...
    def file_of(self, name: str) -> str: ...


@dataclass(frozen=True)
class Slot:
    """Where a published tensor goes; `part` is its place in a stack of ours."""

    ours: str
    spec: ParamSpec
    layout: Layout
    part: int | None = None

    @property
    def published_shape(self) -> tuple[int, ...]:
        if self.layout == "as_is":
            return self.spec.shape
        if self.layout == "scalar":
            return (1,)
        assert self.spec.fan_in is not None
        size = int(np.prod(self.spec.shape))
        return (size // self.spec.fan_in, self.spec.fan_in)

    def read(self, value: np.ndarray, paired: bool) -> np.ndarray:
        """Our array of a published one."""
        if self.layout == "as_is":
            return value
        if self.layout == "rotary" and paired:
            _, H, D = self.spec.shape
            pairs = value.reshape(H, D // 2, 2, -1)
            value = pairs.swapaxes(1, 2).reshape(value.shape)
        return value.T.reshape(self.spec.shape)

    def write(self, value: np.ndarray) -> np.ndarray:
        """The published array of one of ours; rows are not paired."""
        if self.layout == "as_is":
            return value
        return np.ascontiguousarray(value.reshape(self.published_shape[::-1]).T)


def _specs(cfg: ModelConfig | DrafterConfig) -> dict[str, Any]:
    return drafter.specs(cfg) if isinstance(cfg, DrafterConfig) else dense.specs(cfg)


def slots(cfg: ModelConfig | DrafterConfig, scheme: Scheme) -> dict[str, Slot]:
    """Every tensor that a checkpoint of `cfg` has, by its published name."""
    out = {}
    for ours, spec in flatten_names(_specs(cfg)).items():
        layer, row = "", ours
        if ours.startswith("layers."):
            top, layer, leaf = ours.split(".", 2)
            row = f"{top}.{{i}}.{leaf}"
        layout = _BY_OURS[row].layout
        if spec.axes[:1] != ("experts",):
            out[scheme.name(row, layer)] = Slot(ours, spec, layout)
            continue
        one = ParamSpec(spec.shape[1:], spec.axes[1:], spec.fan_in)
        for q in range(spec.shape[0]):
            out[scheme.name(row, layer, q)] = Slot(ours, one, layout, part=q)
    return out


def _tree(flat: dict[str, Any], shape: Any, name: str = "") -> Any:
    """The nested form of dotted names, as `shape` has it; undoes `flatten_names`."""
    below = f"{name}." if name else ""
    if isinstance(shape, Mapping):
        return {key: _tree(flat, part, f"{below}{key}") for key, part in shape.items()}
    if isinstance(shape, tuple):
        return tuple(_tree(flat, part, f"{below}{i}") for i, part in enumerate(shape))
    return flat[name]


def _stored_names(tensors: TensorSource, scheme: Scheme) -> dict[str, str]:
    """Names as they are stored, by name without the prefix."""
    stored: dict[str, str] = {}
    for full_name in tensors:
        name = full_name.removeprefix(scheme.prefix)
        if name in stored:
            raise CheckpointError(
                f"{tensors.file_of(full_name)}: tensor {name} is there twice"
            )
        if not name.endswith(scheme.ignored):
            stored[name] = full_name
    return stored


def assemble(
    tensors: TensorSource,
    cfg: ModelConfig | DrafterConfig,
    scheme: Scheme,
    dtype: DTypeLike,
    where: str,
) -> dict[str, Any]:
    """The parameter tree of a checkpoint, tensor by tensor.

    Every tensor must be expected and every expected tensor there, in the shape that
    the config says. A tied head that is stored all the same must equal the embedding.

    Args:
      where: file or directory, for messages about tensors that no file has.

    Raises:
      CheckpointError: naming file and tensor.
    """
    wanted, stored = slots(cfg, scheme), _stored_names(tensors, scheme)
    head, table = scheme.name("head_VE"), scheme.name("embed_VE")
    tied = isinstance(cfg, ModelConfig) and cfg.tied
    known_too = {*scheme.copies, *([head] if tied else [])}
    surplus = sorted(stored.keys() - wanted.keys() - known_too)
    if surplus:
        first = surplus[0]
        known = [what for part, what in scheme.relatives.items() if part in first]
        hint = f" (this is {known[0]}, which is not supported)" if known else ""
        raise CheckpointError(
            f"{tensors.file_of(stored[first])}: tensor {first} is not part of "
            f"{scheme.model.format(cfg=cfg)}{hint}; {len(surplus)} such tensors"
        )
    missing = sorted(wanted.keys() - stored.keys())
    if missing:
        hint = "; is the head tied? The config says it is not"
        raise CheckpointError(
            f"{where}: tensor {missing[0]} is missing, {len(missing)} of "
            f"{len(wanted)} in all{hint if head in missing else ''}"
        )

    def take(name: str, slot: Slot) -> np.ndarray:
        value = tensors[stored[name]]
        if value.shape != slot.published_shape:
            raise CheckpointError(
                f"{tensors.file_of(stored[name])}: tensor {name} has shape "
                f"{list(value.shape)}, expected {list(slot.published_shape)} by the "
                f"config"
            )
        return value

    if tied and head in stored:
        value = take(head, wanted[table])
        if not np.array_equal(value, tensors[stored[table]]):
            raise CheckpointError(
                f"{tensors.file_of(stored[head])}: tensor {head} differs from {table}, "
                f"but the config ties them; set tie_word_embeddings to false if it is "
                f"separate"
            )
    whole = ParamSpec((cfg.vocab, cfg.embed), ("vocab", "embed"), None)
    for name in set(scheme.copies) & stored.keys():
        take(name, Slot("", whole, "as_is"))

    flat = {}
    for ours, named in groupby(wanted.items(), key=lambda item: item[1].ours):
        values, stacked = [], False
        for name, slot in named:
            values.append(slot.read(take(name, slot), scheme.paired))
            stacked = slot.part is not None
        value = np.stack(values) if stacked else values[0]
        # A copy: the value may be a view of the file.
        flat[ours] = jnp.array(value, jnp.dtype(dtype))
    tree: dict[str, Any] = _tree(flat, _specs(cfg))
    return tree


def publish(
    params: dict[str, Any], cfg: ModelConfig | DrafterConfig, scheme: Scheme
) -> dict[str, np.ndarray]:
    """Tensors under their published names; the inverse of `assemble`."""
    assert not scheme.paired, scheme  # such files are read only
    flat = {name: np.asarray(value) for name, value in flatten_names(params).items()}
    return {
        name: slot.write(
            flat[slot.ours] if slot.part is None else flat[slot.ours][slot.part]
        )
        for name, slot in slots(cfg, scheme).items()
    }
