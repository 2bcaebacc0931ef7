"""The Markov and the confidence head against NumPy."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcut_jax.config import ConfigError, DrafterConfig, RopeConfig
from dcut_jax.models import drafter
from dcut_jax.models.params import flatten_names, init

V, E, R = 23, 16, 5
CFG = DrafterConfig(
    vocab=V,
    embed=E,
    mlp=24,
    layers=1,
    heads=2,
    kv_heads=1,
    head_dim=8,
    rope=RopeConfig(10000.0),
    norm_eps=1e-6,
    block=4,
    mask_token=V - 1,
    target_layers=(0,),
    target_depth=2,
    layer_types=("full_attention",),
    causal=(False,),
    markov_rank=R,
    confidence_head=True,
)


def drawn(cfg, dtype="float32"):
    return init(drafter.specs(cfg), jax.random.key(1), jnp.dtype(dtype))


def rows(*shape):
    rng = np.random.default_rng(2)
    previous = rng.integers(0, V, shape).astype(np.int32)
    return rng.normal(size=(*shape, E)).astype(np.float32), previous


def test_heads_are_there_only_where_asked_for():
    plain = flatten_names(drafter.specs(replace(CFG, markov_rank=0, confidence_head=0)))
    both = flatten_names(drafter.specs(CFG))
    assert {n: s.shape for n, s in both.items() if n not in plain} == {
        "markov.previous_VX": (V, R),
        "markov.next_VX": (V, R),
        "confidence.weight_X": (E + R,),
        "confidence.bias": (),
    }
    alone = drafter.specs(replace(CFG, markov_rank=0))
    assert alone["confidence"]["weight_X"].shape == (E,)
    assert "markov" not in alone


@pytest.mark.parametrize("shape", [(), (7,), (3, 4)])
def test_the_bias_is_a_row_times_a_table(shape):
    params = drawn(CFG)
    _, previous = rows(*shape)
    markov = jax.tree.map(np.asarray, params["markov"])
    want = markov["previous_VX"][previous] @ markov["next_VX"].T
    got = drafter.markov_bias(params, jnp.asarray(previous))
    assert got.shape == (*shape, V)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rank", [0, R])
@pytest.mark.parametrize("shape", [(), (7,), (3, 4)])
def test_the_confidence_is_one_linear_layer(rank, shape):
    cfg = replace(CFG, markov_rank=rank)
    params = drawn(cfg)
    hidden, previous = rows(*shape)
    features = hidden
    if rank:
        table_VX = np.asarray(params["markov"]["previous_VX"])
        features = np.concatenate([hidden, table_VX[previous]], -1)
    head = jax.tree.map(np.asarray, params["confidence"])
    want = features @ head["weight_X"] + head["bias"]
    got = drafter.confidence_logit(
        params, cfg, jnp.asarray(hidden), jnp.asarray(previous)
    )
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_both_are_float32_on_bfloat16_weights():
    params = drawn(CFG, "bfloat16")
    hidden, previous = map(jnp.asarray, rows(7))
    logit = drafter.confidence_logit(params, CFG, hidden, previous)
    assert logit.dtype == drafter.markov_bias(params, previous).dtype == jnp.float32
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    want = drafter.confidence_logit(exact, CFG, hidden, previous)
    np.testing.assert_array_equal(logit, want)


def test_gradients_reach_every_weight_of_the_heads():
    params = drawn(CFG)
    hidden, previous = map(jnp.asarray, rows(7))

    def loss(p):
        confidence = drafter.confidence_logit(p, CFG, hidden, previous)
        return jnp.sum(confidence**2) + jnp.sum(drafter.markov_bias(p, previous) ** 2)

    grads = jax.grad(loss)(params)
    for leaf in jax.tree.leaves((grads["markov"], grads["confidence"])):
        assert np.isfinite(leaf).all()
        assert np.abs(leaf).max() > 0


def test_a_negative_rank_is_refused():
    with pytest.raises(ConfigError, match="markov_rank -2 is negative"):
        replace(CFG, markov_rank=-2)
