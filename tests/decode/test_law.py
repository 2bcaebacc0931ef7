"""The law of what is emitted, against enumeration, through drafting, plan and accept.

A toy: four tokens, a target and a drafter that see the last token only.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcut_jax.cut.confidence import top1
from dcut_jax.cut.plan import plan
from dcut_jax.cut.survival import log_survival
from dcut_jax.decode.accept import accept
from dcut_jax.decode.sample import Sampling, next_token
from dcut_jax.decode.state import init_state

VOCAB, DRAWS, SEEDS, WIDTH = 4, 100_000, 20, 3
BATCH = 5_000  # requests that share a plan


@pytest.fixture(scope="module", autouse=True)
def optimized():
    """So many draws take minutes in programs that are not, see tests/conftest.py."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="module")
def tables():
    """Logits of target and drafter after each token; the drafter is half right."""
    rng = np.random.default_rng(5)
    target_VV = rng.normal(size=(VOCAB, VOCAB))
    drafter_VV = target_VV + rng.normal(size=(VOCAB, VOCAB))
    return jnp.float32(target_VV), jnp.float32(drafter_VV)


@pytest.fixture(scope="module")
def law(tables):
    """Chances of the 16 texts of two tokens after token 0."""
    p_VV = np.asarray(jax.nn.softmax(tables[0], axis=1), float)
    return (p_VV[0][:, None] * p_VV).ravel()


@partial(jax.jit, static_argnames=("width", "share"))
def speculate(seed, tables, temperature_B, width, share):
    """Two tokens of each of DRAWS requests that start from token 0.

    `width` drafts are asked for; of those of a batch the plan keeps `share`.
    """
    target_VV, drafter_VV = tables
    seed_B = jnp.arange(DRAWS, dtype=jnp.int32) + seed * DRAWS
    sampling = Sampling(
        temperature=temperature_B,
        top_k=jnp.zeros(DRAWS, jnp.int32),
        top_p=jnp.ones(DRAWS),
        min_p=jnp.zeros(DRAWS),
        seed=seed_B,
    )
    rows_R = jnp.array([BATCH + int(share * BATCH * width)], jnp.int32)
    state = init_state(DRAWS, 1, 1)
    everyone_B = jnp.ones(DRAWS, bool)
    state = state.replace(active_B=everyone_B, room_B=jnp.full(DRAWS, 2))

    def step(state):
        token_B, drafts, logps = state.anchor_B, [], []
        for _ in range(width):
            best = top1(drafter_VV[token_B])
            token_B = best.token
            drafts.append(best.token)
            logps.append(best.logp)
        token_BK, logp_BK = jnp.stack(drafts, 1), jnp.stack(logps, 1)
        keep_B = jax.vmap(
            lambda log_survival_BK, active_B: (
                plan(log_survival_BK, active_B, rows_R, jnp.ones(1)).keep_B
            )
        )(
            log_survival(logp_BK).reshape(-1, BATCH, width),
            state.active_B.reshape(-1, BATCH),
        ).reshape(-1)
        block_BW = jnp.concatenate([state.anchor_B[:, None], token_BK], axis=1)
        predicted = [
            next_token(target_VV[block_BW[:, k]], sampling, state.length_B + k + 1)
            for k in range(width + 1)
        ]
        return accept(jnp.stack(predicted, 1), token_BK, keep_B, state)

    first, state = step(state)
    second, _ = step(state)
    text_B2 = jnp.where(
        (first.count_B == 2)[:, None],
        first.token_BW[:, :2],
        jnp.stack([first.token_BW[:, 0], second.token_BW[:, 0]], axis=1),
    )
    return text_B2[:, 0] * VOCAB + text_B2[:, 1]


@jax.jit
def biased(seed, tables):
    """Drafts are drawn, and verified only where the drafter is sure of the one drawn.

    That choice depends on the draw. An unverified place gets a token of the target's.
    """
    target_VV, drafter_VV = tables
    keys = iter(jax.random.split(jax.random.key(seed), 8))

    def token_after(token_B):
        p_BV = jax.nn.softmax(target_VV[token_B], axis=1)
        q_BV = jax.nn.softmax(drafter_VV[token_B], axis=1)
        draft_B = jax.random.categorical(next(keys), jnp.log(q_BV))[:, None]
        p_B = jnp.take_along_axis(p_BV, draft_B, axis=1)[:, 0]
        q_B = jnp.take_along_axis(q_BV, draft_B, axis=1)[:, 0]
        # Speculative sampling, exact where every draft is verified.
        taken_B = jax.random.uniform(next(keys), (DRAWS,)) < p_B / q_B
        rest_BV = jnp.maximum(p_BV - q_BV, 0)
        other_B = jax.random.categorical(next(keys), jnp.log(rest_BV))
        fresh_B = jax.random.categorical(next(keys), jnp.log(p_BV))
        verified_B = jnp.where(taken_B, draft_B[:, 0], other_B)
        return jnp.where(q_B == q_BV.max(axis=1), verified_B, fresh_B)

    a_B = token_after(jnp.zeros(DRAWS, jnp.int32))
    return a_B * VOCAB + token_after(a_B)


def chi_square_p(counts, p):
    """Tail probability by Wilson and Hilferty's cube root."""
    expected = counts.sum() * p
    value, freedom = ((counts - expected) ** 2 / expected).sum(), len(p) - 1
    z = ((value / freedom) ** (1 / 3) - 1 + 2 / (9 * freedom)) / np.sqrt(
        2 / (9 * freedom)
    )
    return 0.5 * (1 - float(jax.scipy.special.erf(z / np.sqrt(2))))


def passes(texts, law):
    return chi_square_p(np.bincount(np.asarray(texts), minlength=VOCAB**2), law) > 0.01


SHARES = (0.0, 0.3, 0.7, 1.0)
QUICK = {(3, 0.3)}  # the whole grid takes minutes


@pytest.mark.parametrize(
    ("width", "share"),
    [
        pytest.param(w, s, marks=() if (w, s) in QUICK else pytest.mark.slow)
        for w in range(1, WIDTH + 1)
        for s in SHARES
    ],
)
def test_texts_follow_the_law_of_the_target(tables, law, width, share):
    warm_B = jnp.ones(DRAWS)
    found = [
        passes(speculate(seed, tables, warm_B, width, share), law)
        for seed in range(SEEDS)
    ]
    assert sum(found) >= SEEDS - 1


@pytest.mark.slow
@pytest.mark.parametrize("width", range(1, WIDTH + 1))
@pytest.mark.parametrize("share", SHARES)
def test_a_mixed_batch(tables, law, width, share):
    # Every third request is greedy; it has one text, whatever its neighbours draw.
    greedy_B = np.arange(DRAWS) % 3 == 0
    temperature_B = jnp.where(greedy_B, 0.0, 1.0)
    target_VV = np.asarray(tables[0])
    first = target_VV[0].argmax()
    want = first * VOCAB + target_VV[first].argmax()
    found = []
    for seed in range(SEEDS):
        text_B = np.asarray(speculate(seed, tables, temperature_B, width, share))
        assert (text_B[greedy_B] == want).all()
        found.append(passes(text_B[~greedy_B], law))
    assert sum(found) >= SEEDS - 1


@pytest.mark.slow
def test_a_greedy_batch_has_one_text(tables):
    cold_B = jnp.zeros(DRAWS)
    texts = [
        speculate(0, tables, cold_B, width, share)
        for width in range(1, WIDTH + 1)
        for share in SHARES
    ]
    assert len(np.unique(texts)) == 1


@pytest.mark.slow
def test_seed_for_seed_no_width_or_tier_matters(tables):
    warm_B = jnp.ones(DRAWS)
    plain = speculate(3, tables, warm_B, 1, 0.0)
    for width, share in ((1, 1.0), (2, 0.5), (3, 0.3), (3, 1.0)):
        np.testing.assert_array_equal(plain, speculate(3, tables, warm_B, width, share))


def test_the_test_notices_a_choice_that_depends_on_the_draw(tables, law):
    assert not any(passes(biased(seed, tables), law) for seed in range(SEEDS))
