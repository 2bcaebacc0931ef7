"""A dense target cut into experts: with all of them on, it is the dense one."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dcut_jax.config import ConfigError, ModelConfig, RopeConfig
from dcut_jax.models import dense
from dcut_jax.models.params import init
from dcut_jax.weights.errors import CheckpointError
from dcut_jax.weights.hf import load_hf, save_hf
from dcut_jax.weights.split import (
    SPLIT,
    Split,
    cut,
    even_experts,
    load_split,
    save_split,
)


@pytest.fixture(scope="module")
def dense_target():
    cfg = ModelConfig(
        vocab=19,
        embed=16,
        mlp=96,
        layers=1,
        heads=2,
        kv_heads=1,
        head_dim=8,
        rope=RopeConfig(1e4),
        norm_eps=1e-6,
        max_position=64,
        tied=True,
    )
    return cfg, init(dense.specs(cfg), jax.random.key(0), jnp.dtype("float32"))


def some_split(cfg, params, experts):
    """A random order of neurons and random routers, with the dense norms."""
    rng = np.random.default_rng(0)
    layers = params["layers"]
    return Split(
        np.stack([rng.permutation(cfg.mlp) for _ in layers]).astype(np.int32),
        rng.standard_normal((cfg.layers, cfg.embed, experts.count)).astype("f4"),
        np.stack([np.asarray(x["attention_norm_E"]) for x in layers]),
        np.stack([np.asarray(x["mlp_norm_E"]) for x in layers]),
        np.asarray(params["norm_E"]),
    )


@partial(jax.jit, static_argnums=0)
def logits(cfg, params):
    token_NS = jax.random.randint(jax.random.key(1), (2, 12), 0, cfg.vocab)
    rows = dense.forward_sequences(
        params, cfg, token_NS, jnp.ones(token_NS.shape, bool)
    )
    return dense.logits(rows.hidden, dense.head_VE(params))


@pytest.mark.slow
@pytest.mark.parametrize("shared", [0, 32])
def test_all_experts_together_are_the_dense_target(dense_target, shared):
    cfg, params = dense_target
    experts = even_experts(cfg, 8, 8, shared)
    whole = cut(cfg, params, experts, some_split(cfg, params, experts))
    want = logits(cfg, params)
    np.testing.assert_allclose(logits(*whole), want, rtol=1e-5, atol=1e-5)
    few = replace(experts, active=2)
    part = cut(cfg, params, few, some_split(cfg, params, few))
    assert np.max(np.abs(logits(*part) - want)) > 1e-2 * np.max(np.abs(want))


def test_a_split_and_the_checkpoint_of_it_are_read_back(tmp_path, dense_target):
    cfg, params = dense_target
    experts = even_experts(cfg, 4, 2, 64)
    split = some_split(cfg, params, experts)
    whole_cfg, whole = cut(cfg, params, experts, split)
    save_split(tmp_path / "small", whole_cfg, split, {"base": "tiny"})
    got_experts, got = load_split(tmp_path / "small", cfg, "ours")
    assert got_experts == experts
    for name, value in vars(split).items():
        np.testing.assert_array_equal(vars(got)[name], value)
    save_hf(tmp_path / "whole", whole_cfg, whole)
    again = load_hf(tmp_path / "whole", "float32")
    assert again[0] == whole_cfg
    np.testing.assert_array_equal(logits(*again), logits(whole_cfg, whole))


def test_a_split_that_does_not_fit_is_refused(tmp_path, dense_target):
    cfg, params = dense_target
    experts = even_experts(cfg, 4, 2, 64)
    split = some_split(cfg, params, experts)
    save_split(tmp_path, cut(cfg, params, experts, split)[0], split, {})
    with pytest.raises(CheckpointError, match="expected experts, and the rest as in"):
        load_split(tmp_path, replace(cfg, layers=3), "ours")
    stored = load_file(tmp_path / SPLIT)
    stored["neuron_YF"][0, 0] = stored["neuron_YF"][0, 1]
    save_file(stored, tmp_path / SPLIT)
    with pytest.raises(CheckpointError, match="each layer's neurons once"):
        load_split(tmp_path, cfg, "ours")
    (tmp_path / SPLIT).write_bytes(b"short")
    with pytest.raises(CheckpointError, match="missing or damaged: .*moefy make"):
        load_split(tmp_path, cfg, "ours")


def test_a_split_of_another_target_of_the_same_shape_is_refused(tmp_path, dense_target):
    cfg, params = dense_target
    experts = even_experts(cfg, 4, 2, 64)
    split = some_split(cfg, params, experts)
    about = {"base_identity": "theirs"}
    save_split(tmp_path, cut(cfg, params, experts, split)[0], split, about)
    with pytest.raises(CheckpointError, match="split of target ours, found one of the"):
        load_split(tmp_path, cfg, "ours")
    assert load_split(tmp_path, cfg, "theirs")[0] == experts


def test_experts_must_share_the_neurons_evenly(dense_target):
    with pytest.raises(ConfigError, match="96 neurons less 64 .* multiple of 5"):
        even_experts(dense_target[0], 5, 2, 64)
