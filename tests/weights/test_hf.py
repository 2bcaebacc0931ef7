"""Targets in Hugging Face's layout: layout by hand, round trips, shards."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from dcut_jax.config import Llama3Scaling, RopeConfig
from dcut_jax.models.params import flatten_names
from dcut_jax.weights.hf import hf_config, load_hf, save_hf
from dcut_jax.weights.safetensors_io import read_tensors, write_tensors

LLAMA3 = RopeConfig(500000.0, Llama3Scaling(8.0, 1.0, 4.0, 8192))
VARIANTS = {
    "llama": {},
    "tied": {"tied": True},
    "qwen3": {"qk_norm": True, "head_dim": 16},
    "llama3": {"rope": LLAMA3},
}


def assert_same(got, want):
    got, want = flatten_names(got), flatten_names(want)
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)


def write_directory(directory, cfg, tensors):
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(hf_config(cfg, "float32")))
    return directory


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_what_is_saved_loads_back(tmp_path, tiny, changes):
    cfg, params, _ = tiny(**changes)
    save_hf(tmp_path, cfg, params)
    got_cfg, got = load_hf(tmp_path, "float32")
    assert got_cfg == cfg
    assert_same(got, params)
    assert isinstance(got["layers"], tuple)


def test_a_saved_file_has_the_published_names_and_shapes(tmp_path, tiny):
    cfg, params, _ = tiny(layers=1, qk_norm=True)
    save_hf(tmp_path, cfg, params)
    stored = load_file(tmp_path / "model.safetensors")
    layer = "model.layers.0."
    assert {name: value.shape for name, value in stored.items()} == {
        "model.embed_tokens.weight": (40, 64),
        "model.norm.weight": (64,),
        "lm_head.weight": (40, 64),
        layer + "input_layernorm.weight": (64,),
        layer + "post_attention_layernorm.weight": (64,),
        layer + "self_attn.q_proj.weight": (128, 64),
        layer + "self_attn.k_proj.weight": (64, 64),
        layer + "self_attn.v_proj.weight": (64, 64),
        layer + "self_attn.o_proj.weight": (64, 128),
        layer + "self_attn.q_norm.weight": (32,),
        layer + "self_attn.k_norm.weight": (32,),
        layer + "mlp.gate_proj.weight": (96, 64),
        layer + "mlp.up_proj.weight": (96, 64),
        layer + "mlp.down_proj.weight": (64, 96),
    }


def test_every_element_goes_where_the_layout_says(tmp_path, tiny):
    cfg, _, published = tiny(qk_norm=True)
    _, params = load_hf(write_directory(tmp_path, cfg, published), "float32")
    for i, layer in enumerate(params["layers"]):
        stored = {
            name.removeprefix(f"model.layers.{i}.").removesuffix(".weight"): value
            for name, value in published.items()
        }
        for ours, theirs, heads in (("q_EHD", "q", 4), ("k_EGD", "k", 2)):
            for h in range(heads):
                np.testing.assert_array_equal(
                    layer[ours][:, h, :],
                    stored[f"self_attn.{theirs}_proj"][h * 32 : (h + 1) * 32].T,
                )
        for g in range(2):
            np.testing.assert_array_equal(
                layer["v_EGD"][:, g], stored["self_attn.v_proj"][g * 32 : g * 32 + 32].T
            )
        for h in range(4):
            np.testing.assert_array_equal(
                layer["o_HDE"][h], stored["self_attn.o_proj"][:, h * 32 : h * 32 + 32].T
            )
        for ours, theirs in (
            ("gate_EF", "mlp.gate_proj"),
            ("up_EF", "mlp.up_proj"),
            ("down_FE", "mlp.down_proj"),
            ("attention_norm_E", "input_layernorm"),
            ("mlp_norm_E", "post_attention_layernorm"),
            ("q_norm_D", "self_attn.q_norm"),
            ("k_norm_D", "self_attn.k_norm"),
        ):
            np.testing.assert_array_equal(layer[ours], stored[theirs].T)
    for ours, theirs in (
        ("embed_VE", "model.embed_tokens.weight"),
        ("norm_E", "model.norm.weight"),
        ("head_VE", "lm_head.weight"),
    ):
        np.testing.assert_array_equal(params[ours], published[theirs])


def test_shards_load_like_one_file(tmp_path, tiny):
    cfg, params, published = tiny()
    names = sorted(published)
    weight_map = {}
    for shard, part in enumerate((names[:7], names[7:])):
        file = f"model-{shard + 1:05}-of-00002.safetensors"
        save_file({n: published[n] for n in part}, tmp_path / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text(json.dumps(hf_config(cfg, "float32")))
    assert_same(load_hf(tmp_path, "float32")[1], params)


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16"])
def test_dtypes_are_read_and_cast(tmp_path, tiny, stored, wanted):
    cfg, _, published = tiny()
    narrow = {name: value.astype(stored) for name, value in published.items()}
    _, params = load_hf(write_directory(tmp_path, cfg, narrow), wanted)
    assert {p.dtype.name for p in jax.tree.leaves(params)} == {wanted}
    np.testing.assert_array_equal(
        params["head_VE"], narrow["lm_head.weight"].astype(np.float32).astype(wanted)
    )


def test_a_tied_head_that_is_stored_all_the_same_is_accepted(tmp_path, tiny):
    cfg, params, published = tiny(tied=True)
    published["lm_head.weight"] = published["model.embed_tokens.weight"].copy()
    _, got = load_hf(write_directory(tmp_path, cfg, published), "float32")
    assert_same(got, params)


def test_rotary_buffers_are_ignored(tmp_path, tiny):
    cfg, params, published = tiny()
    published["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    _, got = load_hf(write_directory(tmp_path, cfg, published), "float32")
    assert_same(got, params)


def test_tensors_are_read_when_asked_for(tmp_path):
    path = tmp_path / "x.safetensors"
    value = np.arange(6, dtype=np.float32).reshape(2, 3)
    write_tensors(path, {"a": value.T, "b": value}, metadata={"made_by": "a test"})
    tensors = read_tensors(path)
    assert sorted(tensors) == ["a", "b"]
    np.testing.assert_array_equal(tensors["a"], value.T)
    assert tensors.file_of("b") == str(path)
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_the_header_has_the_metadata_given_and_none_by_itself(tmp_path, metadata):
    path = tmp_path / "x.safetensors"
    write_tensors(path, {"a": np.ones(2, np.float32)}, metadata=metadata)
    with safe_open(path, framework="numpy") as file:
        assert file.metadata() == metadata
    assert (b"__metadata__" in path.read_bytes()) == (metadata is not None)
