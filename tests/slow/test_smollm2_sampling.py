"""SmolLM2 in float32: drawn text is plain sampling's, seed for seed."""

from dataclasses import replace

import pytest

from dcut_jax.cost.table import CostTable
from dcut_jax.decode.compile import Compiler
from dcut_jax.decode.defer import CATCH_UPS
from dcut_jax.engine.config import EngineConfig
from dcut_jax.engine.engine import Engine
from dcut_jax.engine.policy import ArPolicy, FixedPolicy, unmeasured
from dcut_jax.engine.requests import Request
from dcut_jax.prompts import load_prompts

PROMPTS, NEW_TOKENS, TOP_P = 32, 64, 0.9

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def prompts(pair):
    text = pair.target.text()
    return [
        (tuple(text.chat(list(p.messages))), text.eos_ids)
        for p in load_prompts("default", PROMPTS)
    ]


def dcut(shapes):
    """Widths and tiers in turn: every cost is the same, and every width is due."""
    policy = replace(unmeasured(), probe_every=1, probe_share=1.0, correct=False)
    B = shapes.slots
    verify = {
        (B, lay.rows, lay.width, 1): (10.0 + 0.3 * lay.rows / B,)
        for lay in policy.layouts(shapes)
    }
    table = CostTable(
        policy.table.fingerprint,
        draft={(B, width, 1): (1e-3,) for width in policy.ladder(shapes)},
        verify=verify,
        plan={(B,): (1e-3,)},
        catch_up={(B, steps): (1e-6,) for steps in CATCH_UPS},
    )
    return replace(policy, table=table)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_every_arm_draws_what_plain_sampling_draws(pair, prompts, temperature):
    requests = [
        Request(ids, NEW_TOKENS, stop, temperature, top_p=TOP_P, seed=seed)
        for seed, (ids, stop) in enumerate(prompts)
    ]
    longest = max(len(r.prompt) for r in requests) + NEW_TOKENS

    def generate(models, policy, slots):
        config = EngineConfig(slots, longest, sampling=True)
        compiler = Compiler(models, config.cache_dtype)
        if policy == "dcut":
            policy = dcut(config.shapes(models))
        engine = Engine(models, config, policy, compiler=compiler)
        return engine, engine.generate(requests)

    _, want = generate(pair.without_drafter(), ArPolicy(), 16)
    assert len({tuple(c.tokens) for c in want}) == PROMPTS
    for policy, slots in ((FixedPolicy(7), 4), ("dcut", 8)):
        engine, got = generate(pair.models, policy, slots)
        print(temperature, policy, sum(len(c.tokens) for c in got), "tokens")
        for i, (a, b) in enumerate(zip(want, got, strict=True)):
            assert a.tokens == b.tokens, (temperature, policy, i)
        if policy == "dcut":
            assert len({(r.width, r.rows) for r in engine.records}) > 5
