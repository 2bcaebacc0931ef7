"""Drawing tokens: which remain, with what frequency, and what does not matter."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcut_jax.cut.confidence import top1
from dcut_jax.decode.sample import (
    Sampling,
    greedy,
    keep,
    likeliest,
    log_probability,
    next_token,
    pick,
    weights,
)
from dcut_jax.mesh import make_placement

VOCAB = 300  # two blocks of the search and a part of one


def settings(rows, **changes):
    """Settings that draw from the whole vocabulary, but for the changes."""
    base = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0}
    types = {"top_k": np.int32, "seed": np.int32}
    return Sampling(
        **{
            name: jnp.asarray(np.broadcast_to(value, rows), types.get(name, np.float32))
            for name, value in (base | changes).items()
        }
    )


def draw_logits(rows=6, vocab=VOCAB, seed=0):
    return 3 * np.random.default_rng(seed).normal(size=(rows, vocab)).astype(np.float32)


def probabilities(logits_V):
    p = np.exp(logits_V.astype(np.float64) - logits_V.max())
    return p / p.sum()


def kept_by_sorting(p_V, top_k=0, top_p=1.0, min_p=0.0):
    """Which tokens stay, one after another from the most likely."""
    order = np.argsort(-p_V, kind="stable")
    first = order[: top_k or len(p_V)]
    mass, second = 0.0, []
    for token in first:
        if mass >= top_p * p_V[first].sum() and top_p < 1:
            break
        second.append(token)
        mass += p_V[token]
    return {int(t) for t in second if p_V[t] >= min_p * p_V.max()}


run_keep = jax.jit(
    lambda logits, sampling: keep(weights(logits, sampling.temperature), sampling)
)


@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": 10**6},
        {"top_p": 0.9},
        {"top_p": 0.3},
        {"top_p": 1e-6},
        {"min_p": 0.2},
        {"min_p": 1.0},
        {"top_k": 20, "top_p": 0.8},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.05},
    ],
    ids=str,
)
def test_the_tokens_that_remain_are_those_found_by_sorting(filters):
    logits_TV = draw_logits()
    kept_TV = np.asarray(run_keep(logits_TV, settings(len(logits_TV), **filters)))
    for logits_V, kept_V in zip(logits_TV, kept_TV, strict=True):
        want = kept_by_sorting(probabilities(logits_V), **filters)
        assert set(np.flatnonzero(kept_V).tolist()) == want


def test_tokens_tied_with_the_last_remain():
    logits_TV = np.float32([[2, 1, 1, 1, 0]])
    assert run_keep(logits_TV, settings(1, top_k=2)).tolist() == [[1, 1, 1, 1, 0]]
    assert run_keep(logits_TV, settings(1, top_p=0.5)).tolist() == [[1, 1, 1, 1, 0]]


@pytest.mark.parametrize(
    "settings_of_one",
    [
        {"temperature": 0.7, "min_p": 1.0},
        {"temperature": 0.3, "min_p": 0.999999},
        {"temperature": 0.3, "top_p": 1e-46},
        {"temperature": 0.3, "top_k": 1},
        {"temperature": 1e-10},
        {"temperature": 1e-10, "top_k": 1},
    ],
    ids=str,
)
def test_what_leaves_one_token_leaves_the_likeliest(settings_of_one):
    logits_TV = draw_logits(64, vocab=101)
    rows = settings(64, seed=np.arange(64), **settings_of_one)
    got = choose(logits_TV, rows, jnp.arange(64))
    np.testing.assert_array_equal(got, logits_TV.argmax(axis=1))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("everywhere", [True, False])
def test_logits_that_are_no_numbers_give_some_token(bad, everywhere):
    logits_TV = draw_logits(4)
    logits_TV[:, slice(None) if everywhere else 7] = bad
    got = np.asarray(choose(logits_TV, settings(4), jnp.arange(4)))
    assert ((got >= 0) & (got < VOCAB)).all()


def test_each_row_has_its_own_settings():
    logits_TV = np.repeat(draw_logits(1), 3, axis=0)
    rows = settings(3, top_k=[0, 5, 2])
    assert run_keep(logits_TV, rows).sum(axis=1).tolist() == [VOCAB, 5, 2]


class TestPick:
    def test_every_number_finds_the_token_that_inversion_gives(self):
        weight_V = np.random.default_rng(0).uniform(size=VOCAB).astype(np.float32)
        weight_V[100:260] = 0  # a whole block among them
        uniform_N = np.linspace(0, 1, 2000, endpoint=False, dtype=np.float32)
        found = jax.jit(pick)(np.tile(weight_V, (2000, 1)), uniform_N)
        end_V = np.cumsum(weight_V.astype(np.float64))
        want = np.searchsorted(end_V, uniform_N * end_V[-1], side="right")
        assert np.mean(np.asarray(found) != want) < 0.002  # rounding at the borders
        assert (weight_V[np.asarray(found)] > 0).all()

    @pytest.mark.parametrize("token", [0, 127, 128, 255, 299])
    @pytest.mark.parametrize("number", [0.0, 0.5, np.float32(1) - 2**-24])
    def test_the_only_token_is_always_drawn(self, token, number):
        weight_TV = np.zeros((1, VOCAB), np.float32)
        weight_TV[0, token] = 1e-3
        got = jax.jit(pick)(weight_TV, np.float32([number]))
        assert got.tolist() == [token]


choose = jax.jit(next_token)


def test_a_greedy_row_takes_the_first_of_the_largest_beside_rows_that_draw():
    logits_TV = draw_logits(4)
    logits_TV[2, [5, 200]] = 50.0
    position_T = jnp.arange(4)
    mixed = settings(4, temperature=[0.0, 1.0, 0.0, 1.0])
    got = choose(logits_TV, mixed, position_T)
    alone = choose(logits_TV, greedy(4), position_T)
    assert got[2] == 5
    assert got[0] == alone[0] == logits_TV[0].argmax()
    assert alone.tolist() == logits_TV.argmax(axis=1).tolist()


def test_a_draw_depends_on_logits_settings_seed_and_position_alone():
    logits_V = draw_logits(1)[0]
    alone = choose(logits_V[None], settings(1, seed=3), jnp.asarray([17]))
    among = choose(
        np.stack([draw_logits(1, seed=8)[0], logits_V, logits_V, logits_V]),
        settings(4, seed=[3, 3, 4, 3], temperature=[0.0, 1.0, 1.0, 1.0]),
        jnp.asarray([17, 17, 17, 18]),
    )
    assert among[1] == alone[0]
    many = [
        int(choose(logits_V[None], settings(1, seed=s), jnp.asarray([p]))[0])
        for s, p in [(3, 17), (4, 17), (3, 18), (5, 17), (3, 19), (6, 17)]
    ]
    assert len(set(many)) > 2


class TestLogProbability:
    def test_it_is_the_softmax_of_the_logits_as_they_are(self):
        logits_TV = draw_logits(64) + np.float32(50)
        logits_TV[:, 5] = -np.inf
        token_T = np.random.default_rng(1).integers(VOCAB, size=64).astype(np.int32)
        token_T[0] = 5
        got = np.asarray(jax.jit(log_probability)(logits_TV, token_T))
        exact_TV = logits_TV.astype(np.float64)
        exact_TV -= exact_TV.max(axis=1, keepdims=True)
        exact_TV -= np.log(np.exp(exact_TV).sum(axis=1, keepdims=True))
        np.testing.assert_allclose(got, exact_TV[np.arange(64), token_T], rtol=2e-6)
        assert got[0] == -np.inf

    def test_of_the_likeliest_it_is_the_confidence(self):
        best = top1(jnp.asarray(draw_logits(64)))
        got = log_probability(jnp.asarray(draw_logits(64)), best.token)
        np.testing.assert_array_equal(got, best.logp)


@pytest.mark.parametrize("shards", [1, 2])
def test_the_likeliest_tokens(shards):
    logits_TV = draw_logits()
    logits_TV[1, [7, 250, 31]] = 11.0  # ties go to the lower index, on every device
    run = partial(likeliest, count=3)
    if shards > 1:
        run = jax.shard_map(
            partial(run, over="model"),
            mesh=make_placement({"model": shards}, "tp").mesh,
            in_specs=jax.P(None, "model"),
            out_specs=jax.P(),
            check_vma=False,
        )
    got = jax.jit(run)(logits_TV)
    order_TV = np.argsort(-logits_TV, axis=1, kind="stable")
    np.testing.assert_array_equal(got.token, order_TV[:, :3])
    assert got.token[1].tolist() == [7, 31, 250]
    for row, tokens, logp in zip(logits_TV, got.token, got.logp, strict=True):
        want = np.log(probabilities(row))[np.asarray(tokens)]
        np.testing.assert_allclose(logp, want, atol=1e-5)
