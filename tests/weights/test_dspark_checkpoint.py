"""DSpark's published layout: read back bit for bit, and what does not fit is named."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dcut_jax.config import ConfigError
from dcut_jax.models.drafter import specs
from dcut_jax.models.params import init
from dcut_jax.weights.dflash import (
    config_json,
    drafter_config,
    load_drafter,
    save_drafter,
)
from dcut_jax.weights.errors import CheckpointError

V, E, F, H, G, D, R, LAYERS = 30, 16, 24, 4, 2, 8, 3, 2

# As deepseek-ai/DeepSpec writes it, in the form of transformers 5.
PUBLISHED = {
    "architectures": ["Qwen3DSparkModel"],
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "block_size": 7,
    "confidence_head_with_markov": True,
    "dtype": "float32",
    "enable_confidence_head": True,
    "head_dim": D,
    "hidden_act": "silu",
    "hidden_size": E,
    "intermediate_size": F,
    "layer_types": ["full_attention"] * LAYERS,
    "markov_head_type": "vanilla",
    "markov_rank": R,
    "mask_token_id": 29,
    "num_anchors": 512,
    "num_attention_heads": H,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": G,
    "num_target_layers": 6,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 70000.0, "rope_type": "default"},
    "sliding_window": None,
    "target_layer_ids": [1, 3],
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": V,
}


def published_tensors(dtype=np.float32):
    """All tensors of such a file, without the target's tables."""
    shapes = {
        "fc.weight": (E, 2 * E),
        "hidden_norm.weight": (E,),
        "norm.weight": (E,),
        "markov_head.markov_w1.weight": (V, R),
        "markov_head.markov_w2.weight": (V, R),
        "confidence_head.proj.weight": (1, E + R),
        "confidence_head.proj.bias": (1,),
    }
    for i in range(LAYERS):
        attention, mlp = f"layers.{i}.self_attn.", f"layers.{i}.mlp."
        shapes |= {
            f"layers.{i}.input_layernorm.weight": (E,),
            f"layers.{i}.post_attention_layernorm.weight": (E,),
            attention + "q_proj.weight": (H * D, E),
            attention + "k_proj.weight": (G * D, E),
            attention + "v_proj.weight": (G * D, E),
            attention + "o_proj.weight": (E, H * D),
            attention + "q_norm.weight": (D,),
            attention + "k_norm.weight": (D,),
            mlp + "gate_proj.weight": (F, E),
            mlp + "up_proj.weight": (F, E),
            mlp + "down_proj.weight": (E, F),
        }
    rng = np.random.default_rng(0)
    return {n: rng.normal(size=s).astype(dtype) for n, s in shapes.items()}


@pytest.fixture
def write(tmp_path):
    """A published file with changes: of the config, and of tensors (None drops one)."""

    def make(config=None, tensors=None, dtype=np.float32):
        directory = tmp_path / "published"
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(PUBLISHED | (config or {})))
        stored = published_tensors(dtype) | (tensors or {})
        stored = {n: x for n, x in stored.items() if x is not None}
        save_file(stored, directory / "model.safetensors")
        return directory

    return make


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_round_trip_is_bit_for_bit(write, tmp_path, dtype):
    directory = write(dtype=dtype)
    cfg, params = load_drafter(directory, jnp.dtype(dtype))
    save_drafter(tmp_path / "ours", cfg, params, jnp.dtype(dtype))
    theirs = load_file(directory / "model.safetensors")
    ours = load_file(tmp_path / "ours" / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype
        assert ours[name].shape == value.shape
        assert ours[name].tobytes() == value.tobytes()
    again_cfg, again = load_drafter(tmp_path / "ours", jnp.dtype(dtype))
    assert again_cfg == cfg
    jax.tree.map(np.testing.assert_array_equal, params, again)


def test_the_config_says_what_is_published(write, tmp_path):
    cfg, params = load_drafter(write(), jnp.float32)
    assert (cfg.markov_rank, cfg.confidence_head, cfg.sample_from_anchor) == (
        R,
        True,
        True,
    )
    assert cfg.block == cfg.max_drafts == 7
    assert cfg.causal == (False, False)
    save_drafter(tmp_path, cfg, params, jnp.float32)
    raw = json.loads((tmp_path / "config.json").read_text())
    differs = {k: v for k, v in PUBLISHED.items() if raw.get(k, "absent") != v}
    assert differs == {"attention_dropout": 0.0}


def test_tables_lie_as_published(write):
    _, params = load_drafter(write(), jnp.float32)
    tensors = published_tensors()
    previous_VX, next_VX = (
        tensors[f"markov_head.markov_{w}.weight"] for w in ("w1", "w2")
    )
    np.testing.assert_array_equal(params["markov"]["previous_VX"], previous_VX)
    np.testing.assert_array_equal(params["markov"]["next_VX"], next_VX)
    weight_X = tensors["confidence_head.proj.weight"][0]
    np.testing.assert_array_equal(params["confidence"]["weight_X"], weight_X)
    bias = tensors["confidence_head.proj.bias"][0]
    np.testing.assert_array_equal(params["confidence"]["bias"], bias)


@pytest.mark.parametrize("rank", [0, R])
@pytest.mark.parametrize("confidence", [False, True])
@pytest.mark.parametrize("anchor", [False, True])
def test_every_combination_survives(tmp_path, rank, confidence, anchor):
    cfg = replace(
        drafter_config(PUBLISHED, "x"),
        markov_rank=rank,
        confidence_head=confidence,
        sample_from_anchor=anchor,
    )
    params = init(specs(cfg), jax.random.key(0), jnp.dtype("float32"))
    save_drafter(tmp_path, cfg, params, jnp.float32)
    again_cfg, again = load_drafter(tmp_path, jnp.float32)
    assert again_cfg == cfg
    if rank or confidence:  # under the name that vLLM reads, too
        raw = json.loads((tmp_path / "config.json").read_text())
        assert raw["dspark_bonus_anchor"] is not anchor
    jax.tree.map(np.testing.assert_array_equal, params, again)


def test_a_drafter_without_heads_is_written_as_dflash():
    cfg = replace(drafter_config(PUBLISHED, "x"), markov_rank=0, confidence_head=False)
    raw = config_json(cfg, jnp.dtype("float32"))
    assert raw["architectures"] == ["DFlashDraftModel"]
    assert raw["dflash_config"]["sample_from_anchor"] is True
    heads = {"markov_rank", "markov_head_type", "enable_confidence_head", "num_anchors"}
    assert not heads & raw.keys()


def test_deepspecs_dflash_baseline(write):
    heads = {n: None for n in published_tensors() if "_head." in n}
    directory = write({"markov_rank": 0, "enable_confidence_head": False}, heads)
    cfg, params = load_drafter(directory, jnp.float32)
    assert cfg.sample_from_anchor
    assert not {"markov", "confidence"} & params.keys()


def test_copies_of_the_targets_tables_are_passed_over(write, tmp_path):
    table = np.zeros((V, E), np.float32)
    tables = {"embed_tokens.weight": table, "lm_head.weight": table}
    cfg, params = load_drafter(write(tensors=tables), jnp.float32)
    save_drafter(tmp_path, cfg, params, jnp.float32)
    assert (
        load_file(tmp_path / "model.safetensors").keys() == published_tensors().keys()
    )


def test_the_fields_may_sit_in_dflash_config():
    names = ("markov_rank", "markov_head_type", "enable_confidence_head")
    inner = {name: PUBLISHED[name] for name in names}
    outer = {k: v for k, v in PUBLISHED.items() if k not in names}
    assert drafter_config(outer | {"dflash_config": inner}, "x") == drafter_config(
        PUBLISHED, "x"
    )
    # Some files of this kind call themselves DFlash's; those must say what slot 0 does.
    other = outer | {"architectures": ["DFlashDraftModel"], "dflash_config": inner}
    with pytest.raises(ConfigError, match="`sample_from_anchor` is missing"):
        drafter_config(other, "x")
    for anchor in (False, True):
        cfg = drafter_config(other | {"sample_from_anchor": anchor}, "x")
        assert (cfg.markov_rank, cfg.sample_from_anchor) == (R, anchor)
        bonus = {"dspark_bonus_anchor": not anchor}
        for raw in (other, PUBLISHED):
            assert drafter_config(raw | bonus, "x").sample_from_anchor == anchor
        with pytest.raises(ConfigError, match="contradict each other"):
            drafter_config(other | bonus | {"sample_from_anchor": not anchor}, "x")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"markov_head_type": "rnn"}, "markov_head_type='rnn' is not .*: 'vanilla'"),
        ({"markov_head_type": "GATED"}, "markov_head_type='gated' is not supported"),
        ({"markov_rank": None}, "`markov_rank` is missing"),
        (
            {"markov_rank": -1, "confidence_head_with_markov": None},
            "markov_rank -1 is negative",
        ),
        ({"enable_confidence_head": None}, "`enable_confidence_head` is missing"),
        (
            {"confidence_head_with_markov": False},
            "confidence_head_with_markov=False with markov_rank=3 .*expected True",
        ),
        ({"markov_rank": 0}, "confidence_head_with_markov=True .*expected False"),
        ({"target_layer_ids": [-1, 3]}, r"target_layer_ids \[-1, 3\]"),
        ({"speculators_model_type": "dspark"}, "speculators"),
        ({"architectures": ["Qwen35DSparkModel"]}, "Qwen35DSparkModel.*known: DFlash"),
    ],
)
def test_refused_configs(change, message):
    with pytest.raises(ConfigError, match=rf"^here/config.json: .*{message}"):
        drafter_config(PUBLISHED | change, "here/config.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"markov_head.gate_proj.weight": (R, E + R)}, "gated Markov head"),
        ({"markov_head.joint_proj.bias": (3 * R,)}, "recurrent Markov head"),
        ({"d2t": (V,)}, "vocabulary of its own"),
        (
            {"markov_head.markov_w2.weight": (R, V)},
            r"shape \[3, 30\], expected \[30, 3",
        ),
        ({"confidence_head.proj.weight": (1, E)}, r"shape \[1, 16\], expected \[1, 19"),
        ({"confidence_head.proj.bias": (2,)}, r"shape \[2\], expected \[1\]"),
        ({"lm_head.weight": (V - 1, E)}, r"lm_head.* \[29, 16\], expected \[30, 16\]"),
    ],
)
def test_refused_tensors(write, change, message):
    tensors = {name: np.zeros(shape, np.float32) for name, shape in change.items()}
    with pytest.raises(CheckpointError, match=message):
        load_drafter(write(tensors=tensors), jnp.float32)


def test_a_missing_head_is_named(write):
    directory = write(tensors={"confidence_head.proj.bias": None})
    with pytest.raises(CheckpointError, match="confidence_head.proj.bias is missing"):
        load_drafter(directory, jnp.float32)


def test_dflash_files_still_hold_no_tables(write):
    config = {"architectures": ["DFlashDraftModel"], "sample_from_anchor": True}
    table = np.zeros((V, E), np.float32)
    with pytest.raises(CheckpointError, match="tensor lm_head.weight is not part of"):
        load_drafter(write(config, {"lm_head.weight": table}), jnp.float32)
