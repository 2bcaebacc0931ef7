"""Mixtures of experts: routing and sums by hand, and whole passes against transformers.

The golden numbers are those of transformers' Qwen3-MoE (`tests/golden/qwen3_moe`).
"""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from dcut_jax.config import ConfigError, ExpertsConfig, ModelConfig, RopeConfig
from dcut_jax.models import dense, experts
from dcut_jax.models.params import flatten_names, init
from dcut_jax.weights.hf import load_hf

GOLDEN = Path(__file__).parents[1] / "golden" / "qwen3_moe"
E, N = 24, 19
PLAIN = ExpertsConfig(count=6, active=3, mlp=10, layers=(0,), gating="softmax")
CONFIGS = {
    "softmax": PLAIN,
    "renormalised": replace(PLAIN, gating="renormalised"),
    "ones": replace(PLAIN, gating="ones"),
    "shared": replace(PLAIN, shared_mlp=14),
    "shared, gated": replace(PLAIN, shared_mlp=14, shared_gate=True),
    "one expert a row": replace(PLAIN, active=1),
    "all experts": replace(PLAIN, active=6),
}


def silu(x):
    return x / (1 + np.exp(-x))


def by_hand(x_NE, layer, cfg, valid_N):
    """A row at a time and an expert at a time, in float64."""
    layer = {k: np.asarray(v, np.float64) for k, v in flatten_names(layer).items()}
    out = np.zeros(x_NE.shape)
    for n, x in enumerate(np.asarray(x_NE, np.float64)):
        score = x @ layer["router_EQ"]
        p = np.exp(score - score.max())
        p /= p.sum()
        chosen = sorted(range(cfg.count), key=lambda q: -score[q])[: cfg.active]
        gate = {
            "softmax": {q: p[q] for q in chosen},
            "renormalised": {q: p[q] / sum(p[c] for c in chosen) for q in chosen},
            "ones": dict.fromkeys(chosen, 1.0),
        }[cfg.gating]
        for q in chosen if valid_N[n] else ():
            h = silu(x @ layer["gate_QEF"][q]) * (x @ layer["up_QEF"][q])
            out[n] += gate[q] * (h @ layer["down_QFE"][q])
        if cfg.shared_mlp:
            h = silu(x @ layer["shared.gate_EF"]) * (x @ layer["shared.up_EF"])
            mix = 1.0
            if cfg.shared_gate:
                mix = 1 / (1 + np.exp(-(x @ layer["shared_gate_E"])))
            out[n] += mix * (h @ layer["shared.down_FE"])
    return out


def some_rows(cfg, rows=N):
    layer = init(experts.specs(E, cfg), jax.random.key(1), jnp.dtype("float32"))
    return jax.random.normal(jax.random.key(2), (rows, E)), layer


@pytest.mark.parametrize("cfg", CONFIGS.values(), ids=CONFIGS)
def test_a_layer_is_what_loops_give(cfg):
    x_NE, layer = some_rows(cfg)
    valid_N = np.arange(N) % 4 != 1
    got = experts.forward(x_NE, layer, cfg, jnp.asarray(valid_N))
    want = by_hand(x_NE, layer, cfg, valid_N)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_equal_scores_go_to_the_lower_expert():
    router_EQ = jnp.zeros((E, PLAIN.count))
    routing = experts.route(jnp.ones((2, E)), router_EQ, PLAIN)
    np.testing.assert_array_equal(routing.expert_NA, [[0, 1, 2]] * 2)


def test_padding_opens_no_expert(monkeypatch):
    """The sizes that the kernel gets are those of valid rows alone."""
    seen = []

    def record(x_NE, size_Q, *weights, backend):
        seen.append(np.asarray(size_Q))
        return jnp.zeros_like(x_NE)

    monkeypatch.setattr(experts, "grouped_swiglu", record)
    x_NE, layer = some_rows(PLAIN)
    x_NE = jnp.broadcast_to(x_NE[:1], x_NE.shape).at[4].set(-x_NE[0])
    for valid_N in (np.arange(N) == 4, np.zeros(N, bool), np.ones(N, bool)):
        experts.forward(x_NE, layer, PLAIN, jnp.asarray(valid_N))
    one, none, all_ = seen
    assert one.sum() == PLAIN.active == np.count_nonzero(one)
    assert none.sum() == 0
    assert all_.sum() == PLAIN.active * N


def test_the_form_that_is_named_is_the_one_that_runs(monkeypatch):
    seen = []

    def record(x_NE, size_Q, *weights, backend):
        seen.append(backend)
        return jnp.zeros_like(x_NE)

    monkeypatch.setattr(experts, "grouped_swiglu", record)
    x_NE, layer = some_rows(PLAIN)
    rows = {"experts": layer}, SimpleNamespace(experts=PLAIN), jnp.ones(N, bool)
    dense.feed_forward(x_NE, *rows)
    dense.feed_forward(x_NE, *rows, form="tokamax")
    assert seen == ["platform", "tokamax"]


@pytest.mark.parametrize("shape", [(N,), (3, 5), (1, 2, 4)], ids=str)
def test_rows_may_have_any_leading_shape(shape):
    rows = int(np.prod(shape))
    x_NE, layer = some_rows(PLAIN, rows)
    valid = jnp.ones(shape, bool)
    got = experts.forward(x_NE.reshape(*shape, E), layer, PLAIN, valid)
    want = experts.forward(x_NE, layer, PLAIN, valid.reshape(-1))
    np.testing.assert_array_equal(got.reshape(-1, E), want)


def test_a_dense_layer_cut_into_experts_is_itself_when_all_run():
    cfg = replace(PLAIN, active=PLAIN.count, gating="ones", shared_mlp=14)
    x_NE, layer = some_rows(cfg)
    whole = {
        "gate_EF": [layer["shared"]["gate_EF"], *layer["gate_QEF"]],
        "up_EF": [layer["shared"]["up_EF"], *layer["up_QEF"]],
    }
    whole = {name: jnp.concatenate(parts, axis=1) for name, parts in whole.items()}
    downs = [layer["shared"]["down_FE"], *layer["down_QFE"]]
    whole["down_FE"] = jnp.concatenate(downs, axis=0)
    got = experts.forward(x_NE, layer, cfg, jnp.ones(N, bool))
    want = dense.swiglu(x_NE, whole)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["renormalised", "softmax"])
def test_logits_and_routing_are_those_of_transformers(name, monkeypatch):
    routed = []

    def record(*args):
        routed.append(route(*args))
        return routed[-1]

    route = experts.route
    monkeypatch.setattr(experts, "route", record)
    cfg, params = load_hf(GOLDEN, "float32")
    assert cfg.experts.gating == "renormalised"
    cfg = replace(cfg, experts=replace(cfg.experts, gating=name))
    golden = load_file(GOLDEN / "golden.safetensors")
    token_NS = jnp.asarray(golden["tokens"], jnp.int32)

    @jax.jit
    def run(params):
        valid_NS = jnp.ones(token_NS.shape, bool)
        rows = dense.forward_sequences(params, cfg, token_NS, valid_NS)
        chosen = [r.expert_NA for r in routed]
        return dense.logits(rows.hidden, dense.head_VE(params)), chosen

    got, chosen = run(params)
    np.testing.assert_allclose(got, golden[f"{name}.logits"], rtol=0, atol=1e-4)
    assert len(chosen) == len(cfg.experts.layers) < cfg.layers
    for layer, expert_NA in zip(cfg.experts.layers, chosen, strict=True):
        want = golden[f"{name}.experts.{layer}"].reshape(expert_NA.shape)
        np.testing.assert_array_equal(np.sort(expert_NA), np.sort(want))


def test_a_config_that_contradicts_itself_is_refused():
    with pytest.raises(ConfigError, match="num_experts_per_tok 7 is outside 1..6"):
        replace(PLAIN, active=7)
    with pytest.raises(ConfigError, match="gating 'sum' is unknown; known: softmax"):
        replace(PLAIN, gating="sum")
    with pytest.raises(ConfigError, match="there is no shared expert"):
        replace(PLAIN, shared_gate=True)
    shape = dict(vocab=8, embed=8, mlp=8, layers=2, heads=1, kv_heads=1, head_dim=8)
    rest = dict(rope=RopeConfig(1e4), norm_eps=1e-6, max_position=8, tied=True)
    with pytest.raises(ConfigError, match=r"experts \[2\] must be among 0..1"):
        ModelConfig(**shape, **rest, experts=replace(PLAIN, layers=(2,)))
