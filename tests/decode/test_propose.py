"""Drafting with DSpark's heads: against a plain loop, and against DFlash."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcut_jax.config import DrafterConfig, RopeConfig
from dcut_jax.cut.confidence import top1
from dcut_jax.decode.propose import propose
from dcut_jax.models import dense, drafter
from dcut_jax.models.params import init

B, K, V, E, R = 5, 7, 401, 32, 6
DFLASH = DrafterConfig(
    vocab=V,
    embed=E,
    mlp=24,
    layers=1,
    heads=2,
    kv_heads=1,
    head_dim=8,
    rope=RopeConfig(10000.0),
    norm_eps=1e-6,
    block=K + 1,
    mask_token=V - 1,
    target_layers=(0,),
    target_depth=2,
    layer_types=("full_attention",),
    causal=(False,),
)
MARKOV = replace(DFLASH, markov_rank=R)
CONFIDENCE = replace(DFLASH, confidence_head=True)
BOTH = replace(MARKOV, confidence_head=True)

run = jax.jit(propose, static_argnames="cfg")


def drawn(cfg, dtype="float32"):
    """Weights; a Markov head that matters."""
    params = init(drafter.specs(cfg), jax.random.key(0), jnp.dtype(dtype))
    if cfg.markov_rank:
        params["markov"] = jax.tree.map(lambda x: 3 * x, params["markov"])
    return params


@pytest.fixture(scope="module")
def block():
    """Hidden states, anchors and an LM head."""
    rng = np.random.default_rng(3)
    hidden_BKE = rng.normal(size=(B, K, E)).astype(np.float32)
    head_VE = rng.normal(size=(V, E)).astype(np.float32) / np.sqrt(E)
    return hidden_BKE, rng.integers(0, V, B).astype(np.int32), head_VE


def serial(params, cfg, hidden_BKE, anchor_B, head_VE):
    """One draft after another, in float64: tokens, logp, and margins of the choice."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    token_BK = np.zeros((B, K), int)
    score_BK, margin_BK = np.zeros((B, K)), np.zeros((B, K))
    for b in range(B):
        previous = anchor_B[b]
        for k in range(K):
            h_E = hidden_BKE[b, k].astype(np.float64)
            logits_V = head_VE.astype(np.float64) @ h_E
            if cfg.markov_rank:
                row_X = params["markov"]["previous_VX"][previous]
                logits_V = logits_V + params["markov"]["next_VX"] @ row_X
                h_E = np.concatenate([h_E, row_X])
            token = int(np.argmax(logits_V))
            second, first = np.sort(logits_V)[-2:]
            margin_BK[b, k] = first - second
            score_BK[b, k] = first - np.logaddexp.reduce(logits_V)
            if cfg.confidence_head:
                head = params["confidence"]
                logit = head["weight_X"] @ h_E + head["bias"]
                score_BK[b, k] = -np.logaddexp(0, -logit)
            token_BK[b, k] = previous = token
    return token_BK, score_BK, margin_BK


@pytest.mark.parametrize(
    "cfg", [DFLASH, MARKOV, CONFIDENCE, BOTH], ids=["dflash", "markov", "conf", "both"]
)
def test_drafts_and_scores_of_a_plain_loop(block, cfg):
    params = drawn(cfg)
    got = run(params, cfg, *block)
    token_BK, score_BK, margin_BK = serial(params, cfg, *block)
    assert margin_BK.min() > 1e-4  # so no rounding can choose
    np.testing.assert_array_equal(got.token, token_BK)
    np.testing.assert_allclose(got.logp, score_BK, rtol=2e-5, atol=2e-5)


def test_the_markov_head_matters(block):
    token_BK = run(drawn(MARKOV), MARKOV, *block).token
    plain_BK = run(drawn(DFLASH), DFLASH, *block).token
    assert np.mean(np.asarray(token_BK) != np.asarray(plain_BK)) > 0.2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("zero", ["previous_VX", "next_VX"])
def test_a_zero_markov_head_is_dflash_bit_for_bit(block, zero, dtype):
    # XLA:CPU sums short rows in an order that depends on how many there are, hence the
    # larger vocabulary; the smallest of a target that we know has ten times as much.
    markov, dflash = (replace(cfg, vocab=4096) for cfg in (MARKOV, DFLASH))
    hidden_BKE, anchor_B, _ = block
    head_VE = np.random.default_rng(4).normal(size=(4096, E)) / np.sqrt(E)
    head_VE = jnp.asarray(head_VE, dtype)
    params = drawn(markov, dtype)
    params["markov"][zero] *= 0
    got = run(params, markov, hidden_BKE, anchor_B, head_VE)
    want = run(drawn(dflash, dtype), dflash, hidden_BKE, anchor_B, head_VE)
    np.testing.assert_array_equal(got.token, want.token)
    np.testing.assert_array_equal(got.logp, want.logp)


def test_a_zero_markov_head_on_a_tiny_vocabulary(block):
    params = drawn(MARKOV)
    params["markov"]["next_VX"] *= 0
    got, want = run(params, MARKOV, *block), run(drawn(DFLASH), DFLASH, *block)
    np.testing.assert_array_equal(got.token, want.token)
    np.testing.assert_allclose(got.logp, want.logp, rtol=3e-7)


def test_without_heads_it_is_the_top_of_the_lm_head(block):
    hidden_BKE, _, head_VE = block

    @jax.jit
    def old(hidden_BKE, head_VE):
        return top1(dense.logits(hidden_BKE, head_VE))

    got, want = run(drawn(DFLASH), DFLASH, *block), old(hidden_BKE, head_VE)
    np.testing.assert_array_equal(got.token, want.token)
    # Two programs: under JAX 0.12 one rounds a last bit in another way.
    np.testing.assert_array_max_ulp(np.asarray(got.logp), np.asarray(want.logp), 1)


def test_ties_go_to_the_lowest_index(block):
    params = drawn(MARKOV)
    params["markov"]["next_VX"] *= 0
    params["markov"]["next_VX"] += params["markov"]["next_VX"][:1]
    hidden_BKE, anchor_B, head_VE = block
    got = run(params, MARKOV, hidden_BKE, anchor_B, 0 * head_VE)
    np.testing.assert_array_equal(got.token, np.zeros((B, K)))


@pytest.mark.parametrize("cfg", [CONFIDENCE, BOTH], ids=["conf", "both"])
def test_a_confidence_head_changes_scores_and_no_draft(block, cfg):
    got = run(drawn(cfg), cfg, *block)
    plain_cfg = replace(cfg, confidence_head=False)
    plain = run(drawn(cfg), plain_cfg, *block)
    np.testing.assert_array_equal(got.token, plain.token)
    assert np.abs(np.asarray(got.logp) - np.asarray(plain.logp)).min() > 0
    assert (np.asarray(got.logp) <= 0).all()


def test_no_confidence_sees_the_token_it_judges(block):
    """Other LM heads draft other tokens; only what comes *after* those may notice."""
    params = drawn(BOTH)
    hidden_BKE, anchor_B, head_VE = block
    first = run(params, BOTH, hidden_BKE, anchor_B, head_VE)
    other = run(params, BOTH, hidden_BKE, anchor_B, head_VE[::-1])
    differ_BK = np.asarray(first.token) != np.asarray(other.token)
    assert differ_BK[:, 0].all()
    moved_BK = np.asarray(first.logp) != np.asarray(other.logp)
    assert not moved_BK[:, 0].any()
    np.testing.assert_array_equal(moved_BK[:, 1:], differ_BK[:, :-1])


def test_without_a_markov_head_no_confidence_sees_any_token(block):
    params = drawn(CONFIDENCE)
    hidden_BKE, anchor_B, head_VE = block
    first = run(params, CONFIDENCE, hidden_BKE, anchor_B, head_VE)
    other = run(params, CONFIDENCE, hidden_BKE, (anchor_B + 1) % V, head_VE[::-1])
    np.testing.assert_array_equal(first.logp, other.logp)


def test_the_last_draft_judges_by_the_one_before(block):
    """The same by hand: `confidence_logit` of the drafts shifted by one."""
    params = drawn(BOTH)
    hidden_BKE, anchor_B, _ = block
    got = run(params, BOTH, *block)
    previous_BK = np.concatenate([anchor_B[:, None], got.token[:, :-1]], axis=1)
    of_these = jax.jit(partial(drafter.confidence_logit, params, BOTH))
    want = jax.nn.log_sigmoid(of_these(hidden_BKE, previous_BK))
    np.testing.assert_allclose(got.logp, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("cfg", [MARKOV, BOTH], ids=["markov", "both"])
def test_a_request_does_not_depend_on_its_neighbours(block, cfg):
    params = drawn(cfg)
    hidden_BKE, anchor_B, head_VE = block
    whole = run(params, cfg, *block)
    alone = run(params, cfg, hidden_BKE[2:3], anchor_B[2:3], head_VE)
    np.testing.assert_array_equal(whole.token[2:3], alone.token)
    np.testing.assert_allclose(whole.logp[2:3], alone.logp, rtol=1e-5, atol=1e-6)


def test_a_nan_stays_where_it_is(block):
    """An unknown confidence closes its row for the plan; others are none the wiser."""
    params = drawn(BOTH)
    hidden_BKE, anchor_B, head_VE = block
    broken = hidden_BKE.copy()
    broken[1, 3] = np.nan
    got = run(params, BOTH, broken, anchor_B, head_VE)
    want = run(params, BOTH, *block)
    bad_BK = np.isnan(np.asarray(got.logp))
    assert bad_BK.sum() == 1
    assert bad_BK[1, 3]
    others = np.arange(B) != 1
    np.testing.assert_array_equal(got.token[others], want.token[others])
    token_BK = np.asarray(got.token)
    assert ((token_BK >= 0) & (token_BK < V)).all()
