"""Whole steps with the kernels in them, as plain XLA: the text stays the same."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcut_jax.config import DrafterConfig, ExpertsConfig, ModelConfig, RopeConfig
from dcut_jax.decode.steps import Models
from dcut_jax.engine import dispatch
from dcut_jax.engine.config import EngineConfig
from dcut_jax.engine.engine import Engine
from dcut_jax.engine.policy import ArPolicy, FixedPolicy, unmeasured
from dcut_jax.engine.requests import Request
from dcut_jax.models import dense, drafter
from dcut_jax.models.params import init
from pallas_kernels.backends import Backends

KERNELS = Backends(
    budget_topk="pallas_interpret",
    confidence="pallas_interpret",
    attention="pallas_interpret",
    experts="ragged_dot",
)
SLOTS, MAX_LENGTH, VOCAB = 2, 224, 17  # two pages a slot
SIZES = {
    "vocab": VOCAB,
    "embed": 32,
    "mlp": 24,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "rope": RopeConfig(1e4),
    "norm_eps": 1e-6,
}
TARGET = ModelConfig(
    **SIZES,
    layers=1,
    max_position=256,
    tied=True,
    experts=ExpertsConfig(
        count=4, active=2, mlp=12, layers=(0,), gating="renormalised"
    ),
)
DRAFTER = DrafterConfig(
    **SIZES,
    layers=1,
    block=4,
    mask_token=VOCAB - 1,
    target_layers=(0,),
    target_depth=1,
    layer_types=("sliding_attention",),
    causal=(False,),
    window=70,
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


def some_requests(vocab):
    """One begins in its second page, one comes to it, and one waits for a slot."""
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(0, vocab, n).tolist()) for n in (140, 120, 5)]
    return [Request(p, n) for p, n in zip(prompts, (12, 16, 20), strict=True)]


def run(models, policy, requests, **forms):
    """Texts, and what was counted."""
    engine = Engine(models, EngineConfig(SLOTS, MAX_LENGTH, **forms), policy)
    return [c.tokens for c in engine.generate(requests)], engine.records


def test_drafts_and_verification_with_attention_in_the_kernel(models, monkeypatch):
    """And prefill; the drafter's layer has a window."""
    monkeypatch.setattr(dispatch, "PREFILL_CHUNKS", (32,))  # fewer to compile
    requests = some_requests(VOCAB - 1)
    want, _ = run(models, FixedPolicy(3), requests)
    forms = Backends(attention="pallas_interpret")
    got, _ = run(models, FixedPolicy(3), requests, backends=forms)
    assert got == want
    assert len({tuple(text) for text in want}) == len(want)


@pytest.mark.slow
def test_planned_steps_with_every_kernel(models, invented_table):
    requests = some_requests(VOCAB - 1)
    want, _ = run(models, ArPolicy(), requests)
    policy = replace(
        unmeasured(), widths=(3,), factors=(2.0,), plain=False, bypass=False
    )
    shapes = EngineConfig(SLOTS, MAX_LENGTH).shapes(models)
    table = invented_table(policy, shapes, lambda lay: 1.0 if lay.rows == 4 else 9.0)
    got, records = run(models, replace(policy, table=table), requests, backends=KERNELS)
    assert got == want
    assert {r.rows for r in records if r.active == SLOTS} == {4}


@pytest.mark.slow
def test_accepted_drafts_with_attention_in_the_kernel(pair):
    """Of a trained drafter, so that several rows of a request are committed at once."""
    requests = some_requests(pair.target.vocab)
    want, _ = run(pair, ArPolicy(), requests)
    forms = Backends(attention="pallas_interpret")
    got, records = run(pair, FixedPolicy(7), requests, backends=forms)
    assert got == want
    assert sum(r.accepted for r in records) > len(records)
