"""DFlash checkpoints: read back bit for bit, and what does not fit is named."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from dcut_jax.config import ConfigError, Llama3Scaling, RopeConfig
from dcut_jax.models.drafter import specs
from dcut_jax.models.params import flatten_names, init
from dcut_jax.weights.dflash import (
    check_pair,
    config_json,
    default_taps,
    drafter_config,
    load_drafter,
    save_drafter,
)
from dcut_jax.weights.errors import CheckpointError
from dcut_jax.weights.hf import load_hf

GOLDEN = Path(__file__).parents[1] / "golden" / "dflash"


@pytest.fixture
def edit(tmp_path):
    """A copy of a drafter whose config and tensors a test may change."""

    def make(config=None, tensors=None, name="full"):
        for file in ("config.json", "model.safetensors"):
            shutil.copy(GOLDEN / name / file, tmp_path / file)
        if config:
            raw = json.loads((tmp_path / "config.json").read_text())
            config(raw)
            (tmp_path / "config.json").write_text(json.dumps(raw))
        if tensors:
            there = load_file(tmp_path / "model.safetensors")
            tensors(there)
            save_file(there, tmp_path / "model.safetensors")
        return tmp_path

    return make


def raw_config(name="full"):
    return json.loads((GOLDEN / name / "config.json").read_text())


@pytest.mark.parametrize("name", ["full", "swa"])
def test_round_trip_is_bit_for_bit(name, tmp_path):
    cfg, params = load_drafter(GOLDEN / name, jnp.float32)
    save_drafter(tmp_path, cfg, params, jnp.float32)
    again_cfg, again = load_drafter(tmp_path, jnp.float32)
    assert again_cfg == cfg
    jax.tree.map(np.testing.assert_array_equal, params, again)
    ours = load_file(tmp_path / "model.safetensors")
    theirs = load_file(GOLDEN / name / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for tensor, value in theirs.items():
        np.testing.assert_array_equal(ours[tensor], value)


def test_bfloat16_is_stored_as_bfloat16(tmp_path):
    cfg, params = load_drafter(GOLDEN / "full", jnp.bfloat16)
    save_drafter(tmp_path, cfg, params, jnp.bfloat16)
    assert load_file(tmp_path / "model.safetensors")["fc.weight"].dtype == "bfloat16"
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    jax.tree.map(
        np.testing.assert_array_equal, params, load_drafter(tmp_path, jnp.bfloat16)[1]
    )


def test_a_saved_file_names_its_format(tmp_path):
    cfg, params = load_drafter(GOLDEN / "full", jnp.float32)
    save_drafter(tmp_path, cfg, params, jnp.float32)
    with safe_open(tmp_path / "model.safetensors", framework="numpy") as file:
        assert file.metadata() == {"format": "pt"}


def test_every_option_of_the_config_survives(tmp_path):
    cfg, _ = load_drafter(GOLDEN / "swa", jnp.float32)
    cfg = replace(
        cfg,
        rope=RopeConfig(5e5, Llama3Scaling(8.0, 1.0, 4.0, 8192)),
        causal=(False, True, False),
        sample_from_anchor=True,
    )
    params = init(specs(cfg), jax.random.key(0), jnp.float32)
    save_drafter(tmp_path, cfg, params, jnp.float32)
    assert load_drafter(tmp_path, jnp.float32)[0] == cfg


def test_the_reference_reads_what_is_written():
    # transformers 4 reads rope_theta, transformers 5 rope_parameters.
    cfg, _ = load_drafter(GOLDEN / "full", jnp.float32)
    raw = config_json(cfg, jnp.float32)
    assert raw["rope_theta"] == raw["rope_parameters"]["rope_theta"] == 50000.0
    theirs = raw_config()
    assert raw["dflash_config"].items() >= theirs["dflash_config"].items()
    for key in ("block_size", "num_target_layers", "layer_types", "head_dim"):
        assert raw[key] == theirs[key]


def test_a_name_prefix_is_accepted(edit):
    def prefix(tensors):
        for name in list(tensors):
            tensors[f"model.{name}"] = tensors.pop(name)

    _, want = load_drafter(GOLDEN / "full", jnp.float32)
    _, got = load_drafter(edit(tensors=prefix), jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, want, got)


@pytest.mark.parametrize("key", ["block_size", "mask_token_id"])
def test_fields_in_either_place(key):
    raw = raw_config()
    value = raw.pop(key, None) or raw["dflash_config"].pop(key)
    inside = raw | {"dflash_config": raw["dflash_config"] | {key: value}}
    outside = raw | {key: value}
    assert drafter_config(inside, "x") == drafter_config(outside, "x")
    both = inside | {key: value + 1}
    with pytest.raises(ConfigError, match=f"`{key}` is {value + 1}.* and {value} in"):
        drafter_config(both, "x")
    with pytest.raises(ConfigError, match=f"`{key}` is missing"):
        drafter_config(raw, "x")


def test_either_form_of_rope_and_never_a_guess():
    raw = raw_config()
    old = {k: v for k, v in raw.items() if k != "rope_parameters"}
    new = {k: v for k, v in raw.items() if k != "rope_theta"}
    assert drafter_config(old, "x").rope == drafter_config(new, "x").rope
    neither = {k: v for k, v in old.items() if k != "rope_theta"}
    with pytest.raises(ConfigError, match="RoPE base"):
        drafter_config(neither, "x")
    with pytest.raises(ConfigError, match="10000.0 and 50000.0"):
        drafter_config(raw | {"rope_theta": 10000.0}, "x")


@pytest.mark.parametrize(
    ("value", "causal"),
    [
        (None, (True, True, False)),
        (True, (True, True, True)),
        (False, (False, False, False)),
        ([True, False, False], (True, False, False)),
    ],
)
def test_causality(value, causal):
    assert (
        drafter_config(raw_config("swa") | {"is_causal": value}, "x").causal == causal
    )


def test_default_taps():
    # Qwen3-8B, Qwen3.5-4B and a 64-layer model, as published.
    assert default_taps(5, 36) == (1, 9, 17, 25, 33)
    assert default_taps(5, 32) == (1, 8, 15, 22, 29)
    assert default_taps(5, 64) == (1, 16, 31, 46, 61)
    assert default_taps(1, 12) == (6,)
    raw = raw_config()
    del raw["dflash_config"]["target_layer_ids"]
    assert drafter_config(raw, "x").target_layers == default_taps(3, 6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash2DraftModel"),
        ({"architectures": ["Gemma4DSparkModel"]}, "Gemma4DSparkModel"),
        ({"architectures": None}, "not supported; known: DFlashDraftModel"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ({"input_embedding_scale": 2.0}, "input_embedding_scale=2.0"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"layer_types": ["linear_attention"] * 3}, "linear_attention"),
        ({"layer_types": ["full_attention"]}, "3 layers, but 1 layer types"),
        ({"layer_types": ["sliding_attention"] * 3}, "sliding_window"),
        ({"is_causal": "yes"}, "is_causal is 'yes'"),
        ({"num_target_layers": None}, "`num_target_layers` is missing"),
        ({"num_target_layers": 3}, r"target_layer_ids \[1, 2, 3\]"),
        ({"vocab_size": 100}, "mask_token_id 100"),
    ],
)
def test_refused_configs(change, message):
    with pytest.raises(ConfigError, match=rf"somewhere/config.json: .*{message}"):
        drafter_config(raw_config() | change, "somewhere/config.json")


def _rename(tensors, old, new):
    tensors[new] = tensors.pop(old)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("fc.weight"), "tensor fc.weight is missing, 1 of 36 in all$"),
        (
            lambda t: t.update({"layers.3.mlp.up_proj.weight": t["fc.weight"]}),
            "tensor layers.3.mlp.up_proj.weight is not part",
        ),
        (
            lambda t: t.update({"norm.weight": np.ones(63, np.float32)}),
            r"tensor norm.weight has shape \[63\], expected \[64\] by the config",
        ),
        (
            lambda t: t.update({"fc.weight": np.ascontiguousarray(t["fc.weight"].T)}),
            r"tensor fc.weight has shape \[192, 64\], expected \[64, 192\] by the",
        ),
        (
            lambda t: t.update({"model.fc.weight": t["fc.weight"]}),
            "tensor fc.weight is there twice",
        ),
        (
            lambda t: _rename(
                t,
                "layers.0.self_attn.q_proj.weight",
                "layers.0.self_attn.qkv_proj.weight",
            ),
            "fused q, k and v",
        ),
        (
            lambda t: t.update(
                {"layers.0.self_attn.k_proj_target.weight": t["fc.weight"]}
            ),
            "DFlare",
        ),
        (
            lambda t: t.update({"layers.0.mlp_conv.base_kernel": t["fc.weight"]}),
            "DFlash2",
        ),
    ],
)
def test_refused_tensors(edit, change, message):
    directory = edit(tensors=change)
    with pytest.raises(CheckpointError, match=message) as error:
        load_drafter(directory, jnp.float32)
    assert str(directory / "model.safetensors") in str(error.value)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_missing_and_broken_files(edit, file):
    directory = edit()
    (directory / file).write_bytes(b"{")
    with pytest.raises(CheckpointError, match=file):
        load_drafter(directory, jnp.float32)
    (directory / file).unlink()
    with pytest.raises(CheckpointError, match=f"{file} does not exist"):
        load_drafter(directory, jnp.float32)


def test_a_config_that_is_no_object(edit):
    directory = edit()
    (directory / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match=r"config\.json holds a JSON list"):
        load_drafter(directory, jnp.float32)


def test_a_drafter_of_another_target_is_refused():
    target, _ = load_hf(GOLDEN / "target", jnp.float32)
    cfg, _ = load_drafter(GOLDEN / "full", jnp.float32)
    check_pair(target, cfg)
    for change, message in [
        ({"embed": 128}, "hidden size .target 128, drafter 64"),
        ({"layers": 7}, "layers of the target .target 7, drafter 6"),
        ({"vocab": 90}, "vocabulary .target 90, drafter 101.*mask token 100"),
    ]:
        with pytest.raises(ConfigError, match=message):
            check_pair(replace(target, **change), cfg)


def test_spec_covers_what_is_stored():
    cfg, params = load_drafter(GOLDEN / "full", jnp.float32)
    shapes = {n: s.shape for n, s in flatten_names(specs(cfg)).items()}
    assert {n: p.shape for n, p in flatten_names(params).items()} == shapes
