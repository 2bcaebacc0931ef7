"""Whole steps with the Pallas kernels in them, as plain XLA: the text stays the same."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dcut_jax.engine.config import EngineConfig
from dcut_jax.engine.engine import Engine
from dcut_jax.engine.policy import ArPolicy, FixedPolicy, unmeasured
from dcut_jax.engine.requests import Request
from pallas_kernels.backends import Backends

MAX_LENGTH, SLOTS = 224, 2
KERNELS = Backends(
    budget_topk="pallas_interpret",
    confidence="pallas_interpret",
    attention="pallas_interpret",
)
TRACE = Path(__file__).parents[1] / "golden" / "dflash" / "full" / "trace.json"


@pytest.fixture(scope="module")
def requests():
    """One begins in its second page, one crosses into it, and one waits for a slot."""
    found = [tuple(p["prompt"]) for p in json.loads(TRACE.read_text())]
    long = found[8] * 13
    return [Request(long[:140], 24), Request(long[:120], 20), Request(found[1], 12)]


def texts(models, policy, requests, **forms):
    engine = Engine(models, EngineConfig(SLOTS, MAX_LENGTH, **forms), policy)
    return [c.tokens for c in engine.generate(requests)], engine.records


@pytest.fixture(scope="module")
def want(pair, requests):
    return texts(pair, ArPolicy(), requests)[0]


def test_drafts_and_verification_with_attention_in_the_kernel(pair, requests, want):
    forms = Backends(attention="pallas_interpret")
    got, records = texts(pair, FixedPolicy(3), requests, backends=forms)
    assert got == want
    assert sum(r.accepted for r in records) > len(records)


@pytest.mark.slow
def test_planned_steps_with_every_kernel(sliding_pair, requests, want, invented_table):
    """Layers with windows among them."""
    config = EngineConfig(SLOTS, MAX_LENGTH, backends=KERNELS)
    policy = replace(unmeasured(), widths=(7,), factors=(2.0,), plain=False)
    shapes = config.shapes(sliding_pair)
    table = invented_table(policy, shapes, lambda lay: 1.0 + lay.rows / 16)
    policy = replace(policy, table=table)
    got, records = texts(sliding_pair, policy, requests, backends=KERNELS)
    assert got == want
    assert {r.width for r in records} > {0} or any(r.kept for r in records)
