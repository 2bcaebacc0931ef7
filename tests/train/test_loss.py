"""The loss and its gradients: the reference's numbers, and the parts one by one."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from dcut_jax.models import drafter
from dcut_jax.models.dense import forward_sequences
from dcut_jax.models.layers import project
from dcut_jax.models.params import init
from dcut_jax.train.blocks import Blocks, labels
from dcut_jax.train.loss import (
    Objective,
    Shortlist,
    block_matches,
    pace_weights,
    slot_terms,
    slot_weights,
    weighted_loss,
)
from dcut_jax.weights.dflash import load_drafter, to_published


def mean_loss(*args):
    total, weight = weighted_loss(*args)
    return total / weight


@pytest.fixture(scope="module")
def case(golden, target):
    """The reference's training batch: config, parameters, blocks, and what it says."""
    target_cfg, target_params = target
    cfg, params = load_drafter(golden / "train_case", jnp.float32)
    said = json.loads((golden / "train_case" / "case.json").read_text())
    token_NS = jnp.asarray(said["tokens"], jnp.int32)
    anchor_NA = jnp.asarray(said["anchors"], jnp.int32)
    valid_NS = jnp.ones(token_NS.shape, bool)
    taps = jax.jit(
        lambda t: (
            forward_sequences(
                target_params, target_cfg, t, valid_NS, cfg.target_layers
            ).taps
        )
    )(token_NS)
    length_N = jnp.full(token_NS.shape[0], token_NS.shape[1])
    blocks = Blocks(
        token_NS, length_N, taps, anchor_NA, jnp.ones(anchor_NA.shape, bool)
    )
    return cfg, params, blocks, said


@pytest.fixture(scope="module")
def one_layer(case):
    """The same batch for a drafter of one layer, which compiles faster."""
    cfg, params, blocks, said = case
    cfg = replace(cfg, layers=1, layer_types=cfg.layer_types[:1], causal=(False,))
    return cfg, params | {"layers": params["layers"][:1]}, blocks, said


@pytest.fixture(scope="module")
def one_layer_answer(one_layer, target):
    return loss_and_grads(one_layer, target)


def loss_and_grads(case, target, width=7, dtype=jnp.float32, shortlist=None):
    cfg, params, blocks, said = case
    embed, head = target[1]["embed_VE"], target[1]["head_VE"]

    @jax.jit
    def both(params):
        objective = Objective(gamma=said["gamma"])
        return jax.value_and_grad(mean_loss)(
            params, cfg, embed, head, blocks, width, objective, shortlist, dtype
        )

    return both(params)


def test_loss_and_every_gradient_equal_the_reference(case, target, golden):
    cfg, _, _, said = case
    loss, grads = loss_and_grads(case, target)
    assert float(loss) == pytest.approx(said["loss"], rel=1e-6)
    want = load_file(golden / "train_case" / "grads.safetensors")
    got = to_published(grads, cfg)
    assert got.keys() == want.keys()
    for name in want:
        scale = np.abs(want[name]).max()
        np.testing.assert_allclose(got[name], want[name], atol=1e-5 * scale, rtol=0)


def test_bfloat16_products_stay_close(one_layer, one_layer_answer, target):
    loss, grads = one_layer_answer
    loss_bf, grads_bf = loss_and_grads(one_layer, target, dtype=jnp.bfloat16)
    assert float(loss_bf) == pytest.approx(float(loss), rel=3e-3)
    flat = jnp.concatenate([g.ravel() for g in jax.tree.leaves(grads)])
    flat_bf = jnp.concatenate([g.ravel() for g in jax.tree.leaves(grads_bf)])
    assert flat_bf.dtype == jnp.float32
    assert float(jnp.linalg.norm(flat_bf - flat) / jnp.linalg.norm(flat)) < 0.05


def test_a_shortlist_of_all_words_is_the_whole_softmax(
    one_layer, one_layer_answer, target
):
    cfg = one_layer[0]
    word = np.random.default_rng(0).permutation(cfg.vocab)
    every = Shortlist(
        jnp.asarray(word), jnp.asarray(np.argsort(word)), jnp.zeros(cfg.vocab)
    )
    loss, grads = one_layer_answer
    short, short_grads = loss_and_grads(one_layer, target, shortlist=every)
    assert float(short) == pytest.approx(float(loss), rel=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), grads, short_grads
    )


def test_terms_of_a_slot_are_those_of_whole_softmaxes():
    rng = np.random.default_rng(0)
    logits, target = rng.normal(size=(2, 5, 11)).astype(np.float32)
    label = rng.integers(0, 11, 5)
    q = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    p = np.exp(target) / np.exp(target).sum(-1, keepdims=True)
    found = slot_terms(jnp.asarray(logits), jnp.asarray(target), jnp.asarray(label))
    np.testing.assert_allclose(found.ce_X, -np.log(q[np.arange(5), label]), rtol=1e-5)
    np.testing.assert_allclose(found.kl_X, (p * np.log(p / q)).sum(-1), rtol=1e-4)
    np.testing.assert_allclose(found.l1_X, np.abs(p - q).sum(-1), rtol=1e-4)


def test_a_drafter_that_is_the_target_has_no_distance_to_it():
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(3, 7)), jnp.float32)
    found = slot_terms(logits, logits, jnp.zeros(3, jnp.int32))
    np.testing.assert_allclose(found.kl_X, 0, atol=1e-6)
    np.testing.assert_allclose(found.l1_X, 0, atol=1e-6)


def test_pace_weights_are_the_derivative_of_the_accepted_length():
    logp_XK = jnp.log(jnp.asarray([[0.9, 0.2, 0.7], [0.5, 0.5, 0.1]]))
    there_XK = jnp.asarray([[True, True, True], [True, True, False]])

    def length(shift_XK):
        chance = (0.5 * jnp.exp(logp_XK) + 0.5) * jnp.exp(shift_XK)
        return jnp.sum(jnp.where(there_XK, jnp.cumprod(chance, axis=-1), 0))

    want = jax.grad(length)(jnp.zeros_like(logp_XK))
    np.testing.assert_allclose(pace_weights(logp_XK, there_XK), want, rtol=1e-5)
    # They are weights: nothing is learned through them.
    through = jax.grad(lambda x: jnp.sum(pace_weights(x, there_XK)))(logp_XK)
    assert not np.any(through)


@pytest.fixture(scope="module")
def with_heads(one_layer, target):
    """A drafter with both of DSpark's heads, and blocks with the target's states."""
    cfg, _, blocks, said = one_layer
    cfg = replace(cfg, markov_rank=4, confidence_head=True)
    params = init(drafter.specs(cfg), jax.random.key(3), jnp.float32)
    rows = forward_sequences(
        target[1], target[0], blocks.token_NS, jnp.ones(blocks.token_NS.shape, bool)
    )
    return cfg, params, blocks.replace(hidden_NSE=rows.hidden), said


def loss_of(with_heads, target, objective, width=7, shortlist=None):
    cfg, params, blocks, _ = with_heads
    embed, head = target[1]["embed_VE"], target[1]["head_VE"]
    run = jax.jit(
        lambda p: jax.value_and_grad(mean_loss)(
            p, cfg, embed, head, blocks, width, objective, shortlist
        )
    )
    return run(params)


def test_every_term_reaches_every_part_of_the_drafter(with_heads, target):
    objective = Objective(ce=0.1, kl=0.2, l1=0.9, confidence=1.0, pace=True)
    loss, grads = loss_of(with_heads, target, objective)
    assert np.isfinite(float(loss))
    assert all(np.any(np.asarray(g)) for g in jax.tree.leaves(grads))


def test_a_shortlist_of_all_words_changes_no_term(with_heads, target):
    cfg = with_heads[0]
    word = np.random.default_rng(0).permutation(cfg.vocab)
    every = Shortlist(
        jnp.asarray(word), jnp.asarray(np.argsort(word)), jnp.zeros(cfg.vocab)
    )
    objective = Objective(ce=0.1, kl=0.2, l1=0.9, confidence=1.0)
    loss, grads = loss_of(with_heads, target, objective)
    short, short_grads = loss_of(with_heads, target, objective, shortlist=every)
    assert float(short) == pytest.approx(float(loss), rel=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), grads, short_grads
    )


def test_heads_alone_leave_the_rest_as_it_is(with_heads, target):
    objective = Objective(confidence=1.0, heads_only=True)
    _, grads = loss_of(with_heads, target, objective)
    for name, some in grads.items():
        learns = any(np.any(np.asarray(g)) for g in jax.tree.leaves(some))
        assert learns == (name in ("markov", "confidence")), name


def test_a_silent_markov_head_is_the_drafter_without_one(with_heads, target):
    cfg, params, blocks, said = with_heads
    silent = jnp.zeros_like(params["markov"]["next_VX"])
    markov = params["markov"] | {"next_VX": silent}
    loss, _ = loss_of(
        (cfg, params | {"markov": markov}, blocks, said), target, Objective()
    )
    bare = {n: p for n, p in params.items() if n not in ("markov", "confidence")}
    plain = replace(cfg, markov_rank=0, confidence_head=False)
    want, _ = loss_of((plain, bare, blocks, said), target, Objective())
    assert float(loss) == pytest.approx(float(want), rel=1e-6)


def test_comparing_without_the_targets_states_is_refused(one_layer, target):
    with pytest.raises(ValueError, match="no hidden states"):
        loss_of(one_layer, target, Objective(kl=1.0))


@pytest.mark.parametrize("contract", [1, 2])
def test_the_gradient_of_a_product_is_that_of_autodiff(contract):
    kx, kw = jax.random.split(jax.random.key(0))
    x = jax.random.normal(kx, (2, 3, 4, 5))
    w = jax.random.normal(kw, (4, 5, 6)[2 - contract :] + (7,) * (2 - contract))
    axes = tuple(range(-contract, 0)), tuple(range(contract))

    def ours(x, w):
        return jnp.sum(jnp.sin(project(x, w, contract)))

    def plain(x, w):
        return jnp.sum(jnp.sin(jnp.tensordot(x, w, axes)))

    got, want = (jax.grad(f, argnums=(0, 1))(x, w) for f in (ours, plain))
    for g, v in zip(got, want, strict=True):
        np.testing.assert_allclose(g, v, atol=1e-5)


def test_labels_stop_at_the_end_of_the_document(case):
    _, _, blocks, said = case
    token_NAK, there_NAK = labels(blocks, 7)
    for n, anchors in enumerate(said["anchors"]):
        for a, anchor in enumerate(anchors):
            want = said["tokens"][n][anchor + 1 : anchor + 8]
            assert token_NAK[n, a, : len(want)].tolist() == want
            assert there_NAK[n, a].tolist() == [k < len(want) for k in range(7)]


def test_slot_weights():
    np.testing.assert_allclose(
        slot_weights(3, 4.0), np.exp([0, -0.25, -0.5]), rtol=1e-6
    )


def test_invalid_anchors_weigh_nothing(one_layer, one_layer_answer, target):
    cfg, params, blocks, said = one_layer
    want, _ = one_layer_answer
    more = blocks.replace(
        anchor_NA=jnp.pad(blocks.anchor_NA, ((0, 0), (0, 3))),
        valid_NA=jnp.pad(blocks.valid_NA, ((0, 0), (0, 3))),
    )
    got, grads = loss_and_grads((cfg, params, more, said), target)
    assert float(got) == pytest.approx(float(want), rel=1e-6)
    # Their context is empty; no softmax may go wrong over it.
    assert all(bool(jnp.all(jnp.isfinite(g))) for g in jax.tree.leaves(grads))


def test_matches_of_a_trained_drafter(golden, target, case):
    # The drafter behind the trace reaches a mean length of 7.4 on its own prompts.
    cfg, params = load_drafter(golden / "full", jnp.float32)
    embed, head = target[1]["embed_VE"], target[1]["head_VE"]
    run = jax.jit(lambda b: block_matches(params, cfg, embed, head, b, 7))
    match, there = run(case[2])
    assert not bool(jnp.any(match & ~there))
    assert float(jnp.sum(match) / jnp.sum(there)) > 0.8
