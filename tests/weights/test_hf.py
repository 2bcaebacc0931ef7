"""Targets in Hugging Face's layout: layout by hand, round trips, shards."""

import json
from dataclasses import replace

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from dcut_jax.config import (
    ConfigError,
    ExpertsConfig,
    Llama3Scaling,
    RopeConfig,
    model_config_from_hf,
)
from dcut_jax.models.params import flatten_names
from dcut_jax.weights.errors import CheckpointError
from dcut_jax.weights.hf import hf_config, load_hf, save_hf
from dcut_jax.weights.safetensors_io import read_tensors, write_tensors

LLAMA3 = RopeConfig(500000.0, Llama3Scaling(8.0, 1.0, 4.0, 8192))
ONE = np.zeros((1, 1), np.float32)
MOE = ExpertsConfig(count=5, active=2, mlp=24, layers=(1,), gating="renormalised")
VARIANTS = {
    "llama": {},
    "tied": {"tied": True},
    "qwen3": {"qk_norm": True, "head_dim": 16},
    "llama3": {"rope": LLAMA3},
    "qwen3_moe": {"qk_norm": True, "experts": MOE},
    "own moe": {"experts": replace(MOE, gating="ones", shared_mlp=24, layers=(0, 1))},
    "own moe, gated": {
        "qk_norm": True,
        "experts": replace(MOE, shared_mlp=24, shared_gate=True),
    },
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


def test_experts_have_the_published_names_and_keys(tmp_path, tiny):
    cfg, params, _ = tiny(qk_norm=True, experts=MOE)
    save_hf(tmp_path, cfg, params)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]
    assert config["model_type"] == "qwen3_moe"
    assert config["norm_topk_prob"] is True
    assert config["mlp_only_layers"] == [0]
    sizes = "num_experts", "num_experts_per_tok", "moe_intermediate_size"
    assert [config[key] for key in sizes] == [5, 2, 24]
    stored = load_file(tmp_path / "model.safetensors")
    experts = {n: v.shape for n, v in stored.items() if "mlp" in n and "layers.1" in n}
    layer = "model.layers.1.mlp."
    want = {layer + "gate.weight": (5, 64)}
    for q in range(5):
        want[f"{layer}experts.{q}.gate_proj.weight"] = (24, 64)
        want[f"{layer}experts.{q}.up_proj.weight"] = (24, 64)
        want[f"{layer}experts.{q}.down_proj.weight"] = (64, 24)
    assert experts == want
    third = stored[f"{layer}experts.3.up_proj.weight"]
    np.testing.assert_array_equal(third.T, params["layers"][1]["experts"]["up_QEF"][3])


def stacked(published, experts):
    """The same tensors with one stack per layer, as transformers 5 has in memory."""
    layer = "model.layers.1.mlp.experts"
    one = {n: v for n, v in published.items() if not n.startswith(layer)}

    def stack(part):
        return [published[f"{layer}.{q}.{part}.weight"] for q in range(experts)]

    halves = np.stack(stack("gate_proj")), np.stack(stack("up_proj"))
    one[f"{layer}.gate_up_proj"] = np.concatenate(halves, axis=1)
    one[f"{layer}.down_proj"] = np.stack(stack("down_proj"))
    return one


def test_stacked_experts_are_read_like_single_ones(tmp_path, tiny):
    cfg, params, published = tiny(qk_norm=True, experts=MOE)
    got_cfg, got = load_hf(
        write_directory(tmp_path, cfg, stacked(published, 5)), "float32"
    )
    assert got_cfg == cfg
    assert_same(got, params)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda t: t.pop("model.layers.1.mlp.experts.2.up_proj.weight"),
            r"model.layers.1.mlp.experts.2.up_proj.weight is missing, 1 of",
        ),
        (
            lambda t: t.update({"model.layers.1.mlp.experts.5.up_proj.weight": ONE}),
            "experts.5.up_proj.weight is not part of this model",
        ),
        (
            lambda t: t.update({"model.layers.1.mlp.experts.0.down_proj.weight": ONE}),
            r"experts.0.down_proj.weight has shape \[1, 1\], expected \[64, 24\]",
        ),
        (
            lambda t: t.update(
                {"model.layers.1.mlp.experts.down_proj": np.zeros((5, 64, 24), "f4")}
            ),
            "experts.0.down_proj.weight is there twice, in a stack and on its own",
        ),
        (
            lambda t: t.update({"model.layers.1.mlp.experts.gate_up_proj": ONE}),
            "gate_up_proj has shape .* expected one matrix per expert",
        ),
    ],
    ids=["missing", "surplus", "shape", "twice", "no stack"],
)
def test_experts_that_do_not_fit_are_named(tmp_path, tiny, change, says):
    cfg, _, published = tiny(qk_norm=True, experts=MOE)
    change(published)
    with pytest.raises(CheckpointError, match=says):
        load_hf(write_directory(tmp_path, cfg, published), "float32")


def test_which_layers_have_experts_is_read_as_transformers_does(tiny):
    cfg, _, _ = tiny(qk_norm=True, layers=7, experts=replace(MOE, layers=(3,)))
    raw = hf_config(cfg, "float32")

    def layers(**changes):
        return model_config_from_hf(raw | changes, "here").experts

    every = {"mlp_only_layers": []}
    assert layers().layers == (3,)
    assert layers(**every).layers == tuple(range(7))
    assert layers(**every, decoder_sparse_step=2).layers == (1, 3, 5)
    sparse = layers(decoder_sparse_step=3, mlp_only_layers=[2])
    assert sparse.layers == (5,)
    assert layers(mlp_only_layers=list(range(7))) is None
    with pytest.raises(ConfigError, match="gating is not part of Qwen3-MoE"):
        layers(gating="ones")
    with pytest.raises(ConfigError, match="num_experts_per_tok"):
        layers(num_experts_per_tok=None)
    assert layers(num_experts=None, num_local_experts=5).count == 5
    with pytest.raises(ConfigError, match="one number of experts .* found 4 and 5"):
        layers(num_local_experts=4)


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
