"""The whole loop on a tiny target with experts: one text for every policy and tier."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcut_jax.config import (
    ConfigError,
    DrafterConfig,
    ExpertsConfig,
    ModelConfig,
    RopeConfig,
)
from dcut_jax.cut.width import FIRST_REQUESTS
from dcut_jax.decode.compile import Compiler
from dcut_jax.decode.placing import on_mesh
from dcut_jax.decode.steps import Models
from dcut_jax.engine.config import EngineConfig
from dcut_jax.engine.engine import Engine
from dcut_jax.engine.policy import ArPolicy, FixedPolicy, unmeasured
from dcut_jax.engine.requests import Request
from dcut_jax.mesh import make_placement
from dcut_jax.models import dense, drafter
from dcut_jax.models.params import init

SLOTS, NEW, VOCAB = 3, 24, 17
TARGET = ModelConfig(
    vocab=VOCAB,
    embed=32,
    mlp=24,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=16,
    rope=RopeConfig(1e4),
    norm_eps=1e-6,
    max_position=256,
    tied=True,
    qk_norm=True,
    experts=ExpertsConfig(
        count=6, active=2, mlp=12, layers=(1,), gating="renormalised", shared_mlp=8
    ),
)
DRAFTER = DrafterConfig(
    vocab=VOCAB,
    embed=32,
    mlp=24,
    layers=1,
    heads=2,
    kv_heads=1,
    head_dim=16,
    rope=RopeConfig(1e4),
    norm_eps=1e-6,
    block=4,
    mask_token=VOCAB - 1,
    target_layers=(0, 1),
    target_depth=2,
    layer_types=("full_attention",),
    causal=(False,),
)


@pytest.fixture(scope="module")
def models():
    keys = jax.random.split(jax.random.key(3))
    target = init(dense.specs(TARGET), keys[0], jnp.dtype("float32"))
    params = {
        "target": target,
        "drafter": init(drafter.specs(DRAFTER), keys[1], jnp.dtype("float32")),
        "draft_embed_VE": target["embed_VE"],
        "draft_head_VE": dense.head_VE(target),
    }
    return Models(TARGET, DRAFTER, params)


@pytest.fixture(scope="module")
def requests():
    rng = np.random.default_rng(0)
    lengths = (3, 33, 9, 5, 40)
    prompts = [tuple(rng.integers(0, VOCAB - 1, n).tolist()) for n in lengths]
    return [Request(p, NEW - i) for i, p in enumerate(prompts)]


@pytest.fixture(scope="module")
def greedy(models, requests):
    """The target's own text, from whole passes without any cache."""
    token_NS = np.zeros((len(requests), 128), np.int32)
    length_N = np.array([len(r.prompt) for r in requests])
    for row, r in zip(token_NS, requests, strict=True):
        row[: len(r.prompt)] = r.prompt

    @jax.jit
    def next_token(params, token_NS, length_N):
        valid_NS = jnp.arange(token_NS.shape[1])[None] < length_N[:, None]
        rows = dense.forward_sequences(params, TARGET, token_NS, valid_NS)
        last_NE = rows.hidden[jnp.arange(len(length_N)), length_N - 1]
        return dense.logits(last_NE, dense.head_VE(params)).argmax(-1)

    texts = [[] for _ in requests]
    for _ in range(NEW):
        found_N = np.asarray(next_token(models.params["target"], token_NS, length_N))
        token_NS[np.arange(len(requests)), length_N] = found_N
        length_N = length_N + 1
        for text, token in zip(texts, found_N.tolist(), strict=True):
            text.append(token)
    return [t[: r.max_new_tokens] for t, r in zip(texts, requests, strict=True)]


@pytest.fixture(scope="module")
def compiler(models):
    return Compiler(models, "float32")


@pytest.fixture(scope="module")
def run(models, requests, compiler):
    def texts(policy):
        engine = Engine(models, EngineConfig(SLOTS, 96), policy, compiler=compiler)
        return [c.tokens for c in engine.generate(requests)]

    return texts


def test_plain_decoding_gives_the_targets_own_text(run, greedy):
    assert run(ArPolicy()) == greedy
    assert len({tuple(t) for t in greedy}) == len(greedy)  # not one loop for all


def test_experts_dealt_over_devices_do_not_change_the_text(models, requests, greedy):
    """Six experts over three devices, each of which has one of the slots."""
    spread = on_mesh(models, make_placement({"expert": 3}, "ep"))
    engine = Engine(spread, EngineConfig(SLOTS, 96), FixedPolicy(3))
    some = TARGET.experts.layers[0]
    experts = spread.params["target"]["layers"][some]["experts"]
    assert experts["gate_QEF"].addressable_shards[0].data.shape[0] == 2
    assert [c.tokens for c in engine.generate(requests)] == greedy
    with pytest.raises(ConfigError, match="experts 6; sizes.*1, 2, 3, 6"):
        on_mesh(models, make_placement({"expert": 4}, "ep"))


@pytest.mark.parametrize("width", [1, 3])
def test_fixed_widths_do_not_change_the_text(run, greedy, width):
    assert run(FixedPolicy(width)) == greedy


@pytest.mark.parametrize("rows", [SLOTS, 2 * SLOTS, 3 * SLOTS, 4 * SLOTS])
def test_no_tier_changes_the_text(
    models, requests, compiler, greedy, invented_table, rows
):
    """Each tier in turn is so cheap that plans take it."""
    policy = replace(
        unmeasured(),
        widths=(3,),
        factors=(2.0, 3.0),
        plain=False,
        bypass=False,
        calibrate=False,
        correct=False,
        patience=None,
    )
    config = EngineConfig(SLOTS, 96)
    table = invented_table(
        policy, config.shapes(models), lambda lay: 0.1 if lay.rows == rows else 1e3
    )
    policy = replace(policy, table=table)
    engine = Engine(models, config, policy, compiler=compiler)
    assert [c.tokens for c in engine.generate(requests)] == greedy
    first = -(-FIRST_REQUESTS // SLOTS)  # looks, which verify something
    later = [r.rows for r in engine.records if r.active == SLOTS][first:]
    assert set(later) == {rows}
