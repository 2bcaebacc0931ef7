"""One table of tensor names, used to read and to write, and a strict assembler.

Owners of the published names: Hugging Face transformers (`LlamaForCausalLM`,
`Qwen3ForCausalLM`) and llama.cpp (GGUF architectures `llama` and `qwen3`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from dcut_jax.config import ModelConfig
from dcut_jax.models.dense import specs
from dcut_jax.models.params import ParamSpec, flatten_names
from dcut_jax.weights.errors import CheckpointError

# as_is: the same array. linear: `[out, in]` there, `[in, *out]` here, and
# `[*in, out]` for the output projection. rotary: linear, and rows of a head are the
# components that RoPE rotates in pairs.
Layout = Literal["as_is", "linear", "rotary"]


@dataclass(frozen=True)
class Name:
    """One parameter; `{i}` stands for the layer."""

    ours: str
    hf: str
    gguf: str
    layout: Layout


_LAYER: tuple[tuple[str, str, str, Layout], ...] = (
    ("attention_norm_E", "input_layernorm", "attn_norm", "as_is"),
    ("mlp_norm_E", "post_attention_layernorm", "ffn_norm", "as_is"),
    ("q_EHD", "self_attn.q_proj", "attn_q", "rotary"),
    ("k_EGD", "self_attn.k_proj", "attn_k", "rotary"),
    ("v_EGD", "self_attn.v_proj", "attn_v", "linear"),
    ("o_HDE", "self_attn.o_proj", "attn_output", "linear"),
    ("q_norm_D", "self_attn.q_norm", "attn_q_norm", "as_is"),
    ("k_norm_D", "self_attn.k_norm", "attn_k_norm", "as_is"),
    ("gate_EF", "mlp.gate_proj", "ffn_gate", "linear"),
    ("up_EF", "mlp.up_proj", "ffn_up", "linear"),
    ("down_FE", "mlp.down_proj", "ffn_down", "linear"),
)
TABLE = (
    Name("embed_VE", "model.embed_tokens.weight", "token_embd.weight", "as_is"),
    Name("norm_E", "model.norm.weight", "output_norm.weight", "as_is"),
    Name("head_VE", "lm_head.weight", "output.weight", "as_is"),
    *(
        Name(
            f"layers.{{i}}.{ours}",
            f"model.layers.{{i}}.{hf}.weight",
            f"blk.{{i}}.{gguf}.weight",
            layout,
        )
        for ours, hf, gguf, layout in _LAYER
    ),
)
_BY_OURS = {name.ours: name for name in TABLE}


@dataclass(frozen=True)
class Scheme:
    """How one kind of file names and lays out its tensors.

    Attributes:
      column: which names of the table it uses.
      paired: rows of a q or k head are stored as pairs `(2i, 2i + 1)`; ours are
        `(i, i + D/2)`.
      ignored: ends of names of buffers that hold no weights.
    """

    column: Literal["hf", "gguf"]
    paired: bool = False
    ignored: tuple[str, ...] = ()


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
    """Where a published tensor goes."""

    ours: str
    spec: ParamSpec
    layout: Layout

    @property
    def published_shape(self) -> tuple[int, ...]:
        if self.layout == "as_is":
            return self.spec.shape
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

    def write(self, value: np.ndarray, paired: bool) -> np.ndarray:
        """The published array of one of ours."""
        if self.layout == "as_is":
            return value
        value = value.reshape(self.published_shape[::-1]).T
        if self.layout == "rotary" and paired:
            _, H, D = self.spec.shape
            halves = value.reshape(H, 2, D // 2, -1)
            value = halves.swapaxes(1, 2).reshape(value.shape)
        return np.ascontiguousarray(value)


def slots(cfg: ModelConfig, scheme: Scheme) -> dict[str, Slot]:
    """Every tensor that a checkpoint of `cfg` has, by its published name."""
    out = {}
    for ours, spec in flatten_names(specs(cfg)).items():
        top, *rest = ours.split(".")
        layer, leaf = rest if rest else (None, None)
        name = _BY_OURS[ours if leaf is None else f"{top}.{{i}}.{leaf}"]
        published = getattr(name, scheme.column).format(i=layer)
        out[published] = Slot(ours, spec, name.layout)
    return out


def _tree(flat: dict[str, Any], cfg: ModelConfig) -> dict[str, Any]:
    """The nested form of dotted names; the inverse of `flatten_names`."""
    shape = specs(cfg)
    tree = {name: flat[name] for name in shape if name != "layers"}
    tree["layers"] = tuple(
        {leaf: flat[f"layers.{i}.{leaf}"] for leaf in layer}
        for i, layer in enumerate(shape["layers"])
    )
    return tree


def assemble(
    tensors: TensorSource,
    cfg: ModelConfig,
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
    wanted = slots(cfg, scheme)
    found = [n for n in tensors if not n.endswith(scheme.ignored or ("\0",))]
    head, table = (
        getattr(_BY_OURS[ours], scheme.column) for ours in ("head_VE", "embed_VE")
    )
    missing = sorted(wanted.keys() - set(found))
    if missing:
        hint = (
            "; is the head tied? The config says it is not" if head in missing else ""
        )
        raise CheckpointError(
            f"{where}: tensor {missing[0]} is missing, {len(missing)} of "
            f"{len(wanted)} in all{hint}"
        )
    surplus = sorted(set(found) - wanted.keys() - ({head} if cfg.tied else set()))
    if surplus:
        raise CheckpointError(
            f"{tensors.file_of(surplus[0])}: tensor {surplus[0]} is not part of this "
            f"model ({cfg.layers} layers, q/k norm {cfg.qk_norm}); "
            f"{len(surplus)} such tensors"
        )

    def check_shape(name: str, value: np.ndarray, expected: tuple[int, ...]) -> None:
        if value.shape != expected:
            raise CheckpointError(
                f"{tensors.file_of(name)}: tensor {name} has shape "
                f"{list(value.shape)}, expected {list(expected)} by the config"
            )

    if cfg.tied and head in found:
        value = tensors[head]
        check_shape(head, value, wanted[table].published_shape)
        if not np.array_equal(value, tensors[table]):
            raise CheckpointError(
                f"{tensors.file_of(head)}: tensor {head} differs from {table}, but the "
                f"config ties them; set tie_word_embeddings to false if it is separate"
            )

    def take(name: str, slot: Slot) -> jax.Array:
        value = tensors[name]
        check_shape(name, value, slot.published_shape)
        # A copy: the value may be a view of the file.
        return jnp.array(slot.read(value, scheme.paired), jnp.dtype(dtype))

    return _tree({slot.ours: take(name, slot) for name, slot in wanted.items()}, cfg)


def publish(
    params: dict[str, Any], cfg: ModelConfig, scheme: Scheme
) -> dict[str, np.ndarray]:
    """Tensors under their published names; the inverse of `assemble`."""
    flat = flatten_names(params)
    return {
        name: slot.write(np.asarray(flat[slot.ours]), scheme.paired)
        for name, slot in slots(cfg, scheme).items()
    }
