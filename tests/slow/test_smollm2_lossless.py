"""SmolLM2 in float32: the text of every arm and every tier is AR's own."""

from dataclasses import replace

import numpy as np
import pytest

from dcut_jax.bench.runner import Texts, logit_gap
from dcut_jax.cost.table import CostTable
from dcut_jax.decode.compile import Compiler
from dcut_jax.decode.defer import CATCH_UPS
from dcut_jax.engine.config import EngineConfig
from dcut_jax.engine.engine import Engine
from dcut_jax.engine.policy import ArPolicy, FixedPolicy, unmeasured
from dcut_jax.engine.requests import Request
from dcut_jax.prompts import load_prompts

PROMPTS, NEW_TOKENS, NEAR_TIE = 64, 96, 1e-4
REFERENCE_BATCH = 16

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def requests(pair):
    text = pair.target.text()
    ids = [text.chat(list(p.messages)) for p in load_prompts("default", PROMPTS)]
    return [Request(tuple(i), NEW_TOKENS, text.eos_ids) for i in ids]


@pytest.fixture(scope="module")
def reference(pair, requests):
    engine = Engine(
        pair.without_drafter(), config_for(REFERENCE_BATCH, requests), ArPolicy()
    )
    return engine.generate(requests)


def config_for(batch, requests):
    longest = max(len(r.prompt) for r in requests) + NEW_TOKENS
    return EngineConfig(batch, longest)


def only_tier(shapes, rows):
    """A policy that takes widths in turn and finds one tier worth running."""
    policy = replace(unmeasured(), plain=False, probe_every=1, probe_share=1.0)
    B = shapes.slots
    verify = {
        (B, lay.rows, lay.width, 1): (1.0 if lay.rows == rows else 1e6,)
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


@pytest.mark.parametrize("batch", [1, 4, 16])
def test_every_arm_and_tier_gives_the_text_of_ar(batch, pair, requests, reference):
    config = config_for(batch, requests)
    compiler = Compiler(pair.models, config.cache_dtype)
    texts = Texts(reference)

    def check(arm, policy, numbers):
        engine = Engine(pair.models, config, policy, compiler=compiler)
        some = [requests[i] for i in numbers]
        for i, completion in zip(numbers, engine.generate(some), strict=True):
            assert completion.finish == reference[i].finish
            assert len(completion.tokens) == len(reference[i].tokens)
            texts.check(arm, batch, i, completion.tokens, finished=True)
        return engine

    everyone = range(PROMPTS)
    if batch != REFERENCE_BATCH:
        check("ar", ArPolicy(), everyone)
    check("fixed-7", FixedPolicy(7), everyone)
    shapes = config.shapes(pair.models)
    tiers = unmeasured().tiers(shapes)
    for i, rows in enumerate(tiers):
        numbers = list(everyone)[i :: len(tiers)]
        engine = check("dcut", only_tier(shapes, rows), numbers)
        offering = {
            width
            for width in engine.policy.ladder(shapes)
            if rows in engine.policy.offered(shapes, width)
        }
        ran = {record.rows for record in engine.records if record.width in offering}
        assert ran == {rows}

    plain = pair.without_drafter()
    checks = texts.results(
        lambda d: logit_gap(plain, requests[d.prompt].prompt, texts, d)
    )
    for found in checks:
        assert found.prompts == PROMPTS
        print(found.arm, batch, found.tokens, "tokens", found.differences)
        gaps = [abs(d.gap) for d in found.differences]
        assert not gaps or np.max(gaps) < NEAR_TIE, found
