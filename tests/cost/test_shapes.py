"""Sizes of models: against parameter declarations and public counts."""

import json
from pathlib import Path

import jax
import pytest

from dcut_jax.config import (
    ConfigError,
    DrafterConfig,
    ExpertsConfig,
    ModelConfig,
    RopeConfig,
    model_config_from_hf,
    read_config,
)
from dcut_jax.cost.shapes import (
    drafter_shape,
    model_shape,
    read_shape,
    targets_directory,
    usual_drafter,
)
from dcut_jax.models import dense, drafter
from dcut_jax.weights.dflash import drafter_config

SIZES = dict(embed=32, mlp=48, heads=4, kv_heads=2, head_dim=8, norm_eps=1e-6)
ROPE = RopeConfig(1e4)


def declared(specs):
    sizes = [s.shape for s in jax.tree.leaves(specs)]
    return sum(int(jax.numpy.prod(jax.numpy.array(s))) if s else 1 for s in sizes)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("qk_norm", [True, False])
def test_a_target_has_the_parameters_that_it_declares(tied, qk_norm):
    cfg = ModelConfig(
        vocab=96, layers=3, rope=ROPE, max_position=64, tied=tied, qk_norm=qk_norm,
        **SIZES,
    )  # fmt: skip
    shape = model_shape(cfg)
    assert shape.params == shape.active_params == declared(dense.specs(cfg))


def test_a_drafter_has_the_products_that_it_declares():
    cfg = DrafterConfig(
        vocab=96, layers=2, rope=ROPE, block=8, mask_token=1, target_layers=(0, 1, 2),
        target_depth=3, layer_types=("full_attention",) * 2, causal=(False,) * 2,
        **SIZES,
    )  # fmt: skip
    shape = drafter_shape(cfg)
    products = [s for s in jax.tree.leaves(drafter.specs(cfg)) if len(s.shape) > 1]
    assert shape.params == declared(products)
    assert (shape.taps, shape.block) == (3, 8)


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [  # as the model cards round them
        ("qwen3-8b", 8.2, 8.2),
        ("qwen3-30b-a3b", 30.5, 3.35),
        ("llama-3.3-70b", 70.6, 70.6),
        ("qwen3-235b-a22b", 235, 22.2),
    ],
)
def test_shipped_architectures_have_their_published_sizes(name, billions, active):
    shape = read_shape(targets_directory() / f"{name}.toml")
    assert shape.name == name
    assert shape.params / 1e9 == pytest.approx(billions, rel=2e-3)
    assert shape.active_params / 1e9 == pytest.approx(active, rel=3e-3)


@pytest.mark.parametrize("shared", [0, 12])
def test_a_mixture_has_the_parameters_that_it_declares(shared):
    experts = ExpertsConfig(8, 2, 16, (0, 2), "softmax", shared, bool(shared))
    cfg = ModelConfig(
        vocab=96, layers=3, rope=ROPE, max_position=64, tied=False, experts=experts,
        **SIZES,
    )  # fmt: skip
    assert model_shape(cfg).params == declared(dense.specs(cfg))


MIXTURE = {
    "rope_theta": 1e4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}


@pytest.mark.parametrize(
    ("changes", "dense_layers"),
    [
        ({}, 0),
        ({"mlp_only_layers": [0, 3]}, 2),
        ({"decoder_sparse_step": 2}, 3),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, 4),
    ],
)
def test_layers_without_experts(changes, dense_layers):
    shape = model_shape(model_config_from_hf(MIXTURE | changes, "mixture"))
    assert shape.dense_layers == dense_layers
    assert shape.moe_layers == 6 - dense_layers
    idle = shape.moe_layers * 6 * 3 * 32 * 16
    assert shape.params - shape.active_params == idle


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architectures": ["Gpt9"]}, r"architecture \['Gpt9'\]"),
        ({"num_experts": None}, "expected one number of experts"),
        ({"moe_intermediate_size": None}, "`moe_intermediate_size` is missing"),
    ],
)
def test_what_is_missing_or_wrong_is_named(changes, says, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MIXTURE | changes))
    with pytest.raises(ConfigError, match=says):
        read_shape(path)


def test_a_missing_file_says_where_others_are(tmp_path):
    with pytest.raises(ConfigError, match="configs/targets"):
        read_shape(tmp_path / "none.toml")


def test_a_drafters_config_is_read_and_the_usual_one_is_as_published():
    golden = drafter_shape_of_golden()
    assert golden.taps >= 1
    usual = usual_drafter(read_shape(targets_directory() / "qwen3-8b.toml"))
    # Counted for Qwen3-8B-DFlash-b16: 192.9 million a layer, 83.9 in the projection.
    assert usual.params == 5 * 192_937_984 + 5 * 4096 * 4096
    assert usual.layers * usual.kv_values * 2 == 20_480  # bytes a position, bfloat16


def drafter_shape_of_golden():
    path = Path(__file__).parents[1] / "golden" / "dflash" / "full"
    return drafter_shape(drafter_config(read_config(path), str(path)))
