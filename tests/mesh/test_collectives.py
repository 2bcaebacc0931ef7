"""What is computed by shards of the words, against one device."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from dcut_jax.cut.confidence import top1
from dcut_jax.decode.sample import Sampling, log_probability, next_token
from dcut_jax.decode.shards import from_first
from dcut_jax.mesh import make_placement
from dcut_jax.models.collectives import lookup, own_columns, total

VOCAB, SHARDS = 64, 4


@pytest.fixture(scope="module")
def placement():
    return make_placement({"model": SHARDS}, "tp")


@pytest.fixture(scope="module")
def spread(placement):
    """Maps a function over the mesh: the first argument is cut along an axis."""

    def make(fn, cut, rest=0):
        return jax.jit(
            jax.shard_map(
                fn,
                mesh=placement.mesh,
                in_specs=(cut, *[P()] * rest),
                out_specs=P("model"),
                check_vma=False,
            )
        )

    return make


@pytest.fixture(scope="module")
def logits_TV():
    """Plain rows; ties within a shard and across; words ruled out; broken rows."""
    x = np.array(jax.random.normal(jax.random.key(0), (12, VOCAB)) * 3, np.float32)
    x[1, [40, 7, 9]] = 20.0
    x[2] = 1.5
    x[3, 16:32] = -np.inf
    x[4, 17:] = -np.inf
    x[5, 50] = np.nan
    x[6, 3] = np.inf
    x[7] = -np.inf
    x[8, 63] = 30.0
    x[9, [15, 16]] = 12.0
    x[10] += 80.0
    return x


def by_device(x):
    """Results of each device, one below the other, as an array of devices."""
    return np.asarray(x).reshape(SHARDS, -1, *x.shape[1:])


def test_the_sharded_top1_is_the_whole_ones(spread, logits_TV):
    want = jax.tree.map(np.asarray, top1(jnp.asarray(logits_TV)))
    got = spread(partial(top1, over="model"), P(None, "model"))(logits_TV)
    token_XT, logp_XT = by_device(got.token), by_device(got.logp)
    usable_T = ~np.isnan(want.logp)
    assert usable_T.tolist() == [True] * 5 + [False] * 3 + [True] * 4
    for token_T, logp_T in zip(token_XT, logp_XT, strict=True):
        np.testing.assert_array_equal(token_T[usable_T], want.token[usable_T])
        np.testing.assert_allclose(logp_T, want.logp, rtol=2e-6, atol=1e-6)
        assert ((token_T >= 0) & (token_T < VOCAB)).all()
    # To the last bit the same everywhere: no device may think another draft surer.
    assert (token_XT == token_XT[0]).all()
    assert (logp_XT.view(np.int32) == logp_XT[0].view(np.int32)).all()


def test_draws_and_their_log_probabilities(spread, logits_TV):
    rows = logits_TV[[0, 1, 2, 3, 4, 8, 9, 10]]
    T = len(rows)
    sampling = Sampling(
        temperature=jnp.asarray([0.0, 0.7] * (T // 2), jnp.float32),
        top_k=jnp.asarray([0, 5] * (T // 2), jnp.int32),
        top_p=jnp.full(T, 0.9, jnp.float32),
        min_p=jnp.zeros(T, jnp.float32),
        seed=jnp.arange(T, dtype=jnp.int32),
    )
    position_T = jnp.arange(T, dtype=jnp.int32) + 5

    def chosen(logits_TV, over=None):
        token_T = next_token(logits_TV, sampling, position_T, over)
        return token_T, log_probability(logits_TV, token_T, over)

    want_T, want_logp_T = map(np.asarray, chosen(jnp.asarray(rows)))
    token, logp = spread(partial(chosen, over="model"), P(None, "model"))(rows)
    for token_T, logp_T in zip(by_device(token), by_device(logp), strict=True):
        np.testing.assert_array_equal(token_T, want_T)
        np.testing.assert_allclose(logp_T, want_logp_T, rtol=1e-5, atol=1e-5)


def test_a_look_up_finds_each_word_once(spread):
    table_VX = np.arange(VOCAB * 3, dtype=np.float32).reshape(VOCAB, 3)
    token = np.array([[0, 15, 16], [31, 63, 48]], np.int32)
    run = spread(lambda t, i: lookup(i, t, "model"), P("model", None), rest=1)
    got = run(table_VX, token)
    for own in by_device(got):
        np.testing.assert_array_equal(own.reshape(2, 3, 3), table_VX[token])


def test_a_product_of_cut_columns_sums_to_the_whole(spread):
    x = np.array(jax.random.normal(jax.random.key(1), (5, 16)), np.float32)
    w = np.array(jax.random.normal(jax.random.key(2), (16, 3)), np.float32)

    def part(w, x):
        return total(own_columns(x, w.shape[0], "model") @ w, "model")

    got = spread(part, P("model", None), rest=1)(w, x)
    for own in by_device(got):
        np.testing.assert_allclose(own, x @ w, rtol=1e-5, atol=1e-5)


def test_the_first_device_is_believed_bit_for_bit(placement, spread):
    floats = np.array([np.nan, -0.0, np.inf, 1e-42, 3.0], np.float32)

    def fn(mark_1):
        rank = jax.lax.axis_index("model")
        mine = {
            "float": jnp.where(rank == 0, floats, jnp.float32(7)),
            "int": jnp.int32(11) + rank,
            "bool": jnp.stack([rank == 0, rank != 0]),
        }
        got = from_first(mine, placement.mesh.axis_names)
        return jax.tree.map(lambda x: jnp.atleast_1d(x)[None], got)

    got = spread(fn, P("model"))(np.zeros(SHARDS, np.float32))
    assert got["float"].shape == (SHARDS, 5)
    for own in np.asarray(got["float"]):
        np.testing.assert_array_equal(own.view(np.int32), floats.view(np.int32))
    assert np.asarray(got["int"]).ravel().tolist() == [11] * SHARDS
    assert np.asarray(got["bool"]).tolist() == [[True, False]] * SHARDS
