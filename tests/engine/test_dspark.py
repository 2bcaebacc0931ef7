"""Drafters with DSpark's heads: other drafts, other scores, the same text."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcut_jax.cost.table import CostTable
from dcut_jax.decode import steps as S
from dcut_jax.decode.compile import Compiler
from dcut_jax.decode.propose import propose
from dcut_jax.decode.state import init_state
from dcut_jax.engine.config import EngineConfig
from dcut_jax.engine.engine import Engine
from dcut_jax.engine.policy import ArPolicy, FixedPolicy, unmeasured
from dcut_jax.engine.requests import Request
from dcut_jax.models import drafter
from dcut_jax.models.params import init

CONFIG = EngineConfig(3, 96, sampling=True)
BOTH = {"markov_rank": 6, "confidence_head": True}


def with_heads(pair, **options):
    """The trained drafter with random heads, small enough that some drafts hold."""
    cfg = replace(pair.drafter, **options)
    drawn = init(drafter.specs(cfg), jax.random.key(7), jnp.dtype("float32"))
    heads = {k: drawn[k] for k in ("markov", "confidence") if k in drawn}
    heads = jax.tree.map(lambda x: 1.5 * x, heads)
    weights = pair.params["drafter"] | heads
    return S.Models(pair.target, cfg, pair.params | {"drafter": weights})


@pytest.fixture(
    scope="module",
    params=[
        BOTH,
        pytest.param(BOTH | {"sample_from_anchor": True}, marks=pytest.mark.slow),
        pytest.param({"markov_rank": 6}, marks=pytest.mark.slow),
        pytest.param({"confidence_head": True}, marks=pytest.mark.slow),
    ],
    ids=["both", "anchor", "markov", "confidence"],
)
def models(request, pair):
    return with_heads(pair, **request.param)


@pytest.fixture(scope="module")
def compiler(models):
    return Compiler(models, "float32")


@pytest.fixture(scope="module")
def asked():
    rng = np.random.default_rng(5)
    prompts = [tuple(rng.integers(0, 100, n).tolist()) for n in (3, 8, 40, 5, 17)]
    return [
        Request(prompts[0], 40),
        Request(prompts[1], 30),
        Request(prompts[2], 40),
        Request(prompts[3], 25, temperature=3.0, seed=1),
        Request(prompts[4], 30, temperature=2.0, top_p=0.95, seed=2),
        Request(prompts[0], 35),
    ]


@pytest.fixture(scope="module")
def plain(pair, asked):
    """What the target alone says, one request at a time."""
    alone = S.Models(pair.target, None, {"target": pair.params["target"]})
    engine = Engine(alone, replace(CONFIG, slots=1), ArPolicy())
    return [c.tokens for c in engine.generate(asked)]


def texts(engine, asked):
    return [c.tokens for c in engine.generate(asked)]


@pytest.mark.slow
def test_every_draft_verified(models, compiler, asked, plain):
    engine = Engine(models, CONFIG, FixedPolicy(7), compiler=compiler)
    assert texts(engine, asked) == plain
    if not models.drafter.sample_from_anchor:  # it was trained for the other
        assert sum(len(t) for t in plain) > 1.2 * sum(r.active for r in engine.records)


@pytest.mark.slow
def test_drafts_cut_by_a_plan(models, compiler, asked, plain):
    policy = replace(
        unmeasured(), factors=(4.0,), widths=(7,), plain=False, bypass=False
    )
    shapes = CONFIG.shapes(models)
    B = shapes.slots
    table = CostTable(
        CostTable.empty().fingerprint,
        draft={(B, w, 128): (0.1,) for w in policy.ladder(shapes)},
        verify={
            (B, lay.rows, lay.width, 128): (1 + 0.1 * lay.rows,)
            for lay in policy.layouts(shapes)
        },
        plan={(B,): (1e-3,)},
        catch_up={(B, steps): (1e-6,) for steps in (4, 32)},
    )
    policy = replace(policy, table=table)
    engine = Engine(models, CONFIG, policy, compiler=compiler)
    assert texts(engine, asked) == plain
    assert any(0 < r.kept < r.active * r.width for r in engine.records)


def test_a_plan_goes_by_what_the_heads_propose(models):
    cfg, params = models.drafter, models.params
    kv = S.init_caches(models, 2, jnp.float32, 2).drafter
    anchor_B = jnp.array([5, 9], jnp.int32)
    state = init_state(2, 1, 1).replace(anchor_B=anchor_B)

    @jax.jit
    def both(params):
        hidden_BKE = drafter.block_forward(
            params["drafter"],
            cfg,
            params["draft_embed_VE"],
            anchor_B,
            state.length_B,
            kv,
            state.table_BN,
            3,
        )
        head_VE = params["draft_head_VE"]
        want = propose(params["drafter"], cfg, hidden_BKE, anchor_B, head_VE)
        got = S.draft(params, kv, state, models=models, width=3, columns=5)
        return got, want

    got, want = both(params)
    assert np.isnan(got.logp_BK[:, 3:]).all()
    np.testing.assert_array_equal(got.token_BK[:, :3], want.token)
    np.testing.assert_allclose(got.logp_BK[:, :3], want.logp, rtol=1e-5)
