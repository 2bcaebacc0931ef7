"""GGUF files against the same weights in Hugging Face's layout."""

import math

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

from dcut_jax.config import ConfigError, Llama3Scaling, RopeConfig
from dcut_jax.models.dense import specs
from dcut_jax.models.params import flatten_names
from dcut_jax.weights.gguf import GgufFile, config_from_gguf, load_gguf
from dcut_jax.weights.hf import load_hf, save_hf


def assert_same(got, want):
    got, want = flatten_names(got), flatten_names(want)
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("qk_norm", [False, True], ids=["llama", "qwen3"])
def test_each_type_equals_its_hugging_face_twin(
    tmp_path, tiny, write_gguf, kind, qk_norm
):
    cfg, params, published = tiny(qk_norm=qk_norm)
    quant = gguf.GGMLQuantizationType[kind]
    save_hf(tmp_path, cfg, params)
    save_file(
        {
            name: value
            if value.ndim == 1
            else gguf.quants.dequantize(gguf.quants.quantize(value, quant), quant)
            for name, value in published.items()
        },
        tmp_path / "model.safetensors",
    )
    path = write_gguf(tmp_path / "x.gguf", cfg, published, kind=kind)
    got_cfg, got = load_gguf(GgufFile(path), "float32")
    want_cfg, want = load_hf(tmp_path, "float32")
    assert got_cfg == want_cfg == cfg
    assert_same(got, want)


def test_a_missing_output_tensor_means_a_tied_head(tmp_path, tiny, write_gguf):
    cfg, params, published = tiny(tied=True)
    path = write_gguf(tmp_path / "x.gguf", cfg, published)
    got_cfg, got = load_gguf(GgufFile(path), "float32")
    assert got_cfg == cfg
    assert_same(got, params)


def test_sizes_that_are_left_out_follow_from_the_others(tmp_path, tiny, write_gguf):
    cfg, params, published = tiny(heads=2, kv_heads=2)
    dropped = (
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "rope.dimension_count",
    )
    fields = {f"llama.{key}": None for key in dropped}
    path = write_gguf(tmp_path / "x.gguf", cfg, published, fields=fields)
    got_cfg, got = load_gguf(GgufFile(path), "float32")
    assert got_cfg == cfg
    assert_same(got, params)


def llama_cpp_factors(theta, head_dim, factor, low, high, original):
    """`rope_freqs.weight` as llama.cpp's converter computes it."""
    out = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (i / head_dim)
        if wavelength < original / high:
            out.append(1.0)
        elif wavelength > original / low:
            out.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            out.append(1 / ((1 - smooth) / factor + smooth))
    return np.asarray(out, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recovered(tmp_path, tiny, write_gguf, factor):
    scaling = Llama3Scaling(factor, 1.0, 4.0, 8192)
    cfg, _, published = tiny(rope=RopeConfig(500000.0, scaling))
    freqs = llama_cpp_factors(500000.0, 32, factor, 1.0, 4.0, 8192)
    assert 1 < np.sort(np.unique(freqs))[1] < factor  # the blend is exercised
    tensors = {"rope_freqs.weight": freqs}
    path = write_gguf(tmp_path / "x.gguf", cfg, published, tensors=tensors)
    assert load_gguf(GgufFile(path), "float32")[0] == cfg


def test_neutral_scaling_is_none(tmp_path, tiny, write_gguf):
    cfg, _, published = tiny()
    tensors = {"rope_freqs.weight": np.ones(16, np.float32)}
    path = write_gguf(tmp_path / "x.gguf", cfg, published, tensors=tensors)
    assert load_gguf(GgufFile(path), "float32")[0] == cfg


@pytest.mark.parametrize(
    "freqs",
    [
        llama_cpp_factors(500000.0, 32, 8.0, 1.0, 2.0, 8192),
        llama_cpp_factors(500000.0, 32, 8.0, 1.0, 4.0, 4096),
        np.ones(8, np.float32),
    ],
    ids=["other blend", "other length", "other head size"],
)
def test_scaling_that_cannot_be_stated_is_refused(tmp_path, tiny, write_gguf, freqs):
    cfg, _, published = tiny()
    tensors = {"rope_freqs.weight": freqs}
    path = write_gguf(tmp_path / "x.gguf", cfg, published, tensors=tensors)
    with pytest.raises(ConfigError, match=r"x\.gguf.*rope_freqs\.weight.*config\.json"):
        load_gguf(GgufFile(path), "float32")


def test_smollm2_is_what_its_card_says(smollm2):
    cfg = config_from_gguf(smollm2)
    assert (cfg.layers, cfg.embed, cfg.mlp, cfg.vocab) == (30, 576, 1536, 49152)
    assert (cfg.heads, cfg.kv_heads, cfg.head_dim) == (9, 3, 64)
    assert (cfg.rope, cfg.norm_eps, cfg.max_position) == (RopeConfig(1e5), 1e-5, 8192)
    assert cfg.tied
    assert not cfg.qk_norm
    sizes = [math.prod(spec.shape) for spec in flatten_names(specs(cfg)).values()]
    assert sum(sizes) == 134_515_008
