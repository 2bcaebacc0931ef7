"""Cutting a tiny dense target into experts and fitting them to it."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcut_jax.config import ConfigError, ModelConfig, RopeConfig
from dcut_jax.models import dense
from dcut_jax.models.params import init
from dcut_jax.moefy import __main__ as command
from dcut_jax.moefy import distil
from dcut_jax.moefy.cluster import balanced_groups, make_split
from dcut_jax.train.data import DatasetError
from dcut_jax.weights.hf import load_hf, save_hf
from dcut_jax.weights.split import cut, even_experts, load_split

CFG = ModelConfig(
    vocab=23,
    embed=16,
    mlp=40,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=8,
    rope=RopeConfig(1e4),
    norm_eps=1e-6,
    max_position=64,
    tied=True,
)
EXPERTS = even_experts(CFG, count=4, active=2, shared_mlp=8)


@pytest.fixture(scope="module")
def params():
    return init(dense.specs(CFG), jax.random.key(0), jnp.dtype("float32"))


@pytest.fixture(scope="module")
def batches():
    rng = np.random.default_rng(0)
    documents = [
        rng.integers(0, CFG.vocab, n).tolist() for n in rng.integers(8, 30, 12)
    ]
    return [command.make_batch(documents[i : i + 4], 20) for i in (0, 4, 8)]


@pytest.fixture(scope="module")
def split(params, batches):
    return make_split(params, CFG, EXPERTS, batches, clustered=2)


def test_groups_are_of_one_size_and_find_what_was_planted():
    rng = np.random.default_rng(0)
    planted = rng.permutation(np.repeat(np.arange(4), 6))
    centres = rng.standard_normal((4, 50))
    points = centres[planted] + 0.1 * rng.standard_normal((24, 50))
    group = balanced_groups(points.astype(np.float32), 4)
    assert np.bincount(group).tolist() == [6] * 4
    assert len({(p, g) for p, g in zip(planted, group, strict=True)}) == 4


def test_every_neuron_is_dealt_once(split):
    for order_F in split.neuron_YF:
        assert sorted(order_F) == list(range(CFG.mlp))


def test_a_choice_is_of_the_best_and_pulls_at_its_border():
    score = jnp.array([0.1, 2.0, -1.0, 0.5])
    got, pull = jax.vjp(partial(distil.choice, active=2), score)
    np.testing.assert_array_equal(got, [0, 1, 0, 1])
    (grad,) = pull(jnp.ones(4))
    assert np.all(np.asarray(grad) > 0)
    assert grad[0] == pytest.approx(grad[3])
    assert grad[3] > grad[1]


@pytest.mark.slow
def test_masked_neurons_are_the_experts_that_decoding_runs(params, split, batches):
    token_NS, valid_NS = batches[0]
    tree = distil.trained(split)
    ordered = distil.ordered(params, split)
    masked = jax.jit(distil.hidden, static_argnums=(2, 3))
    got = np.asarray(masked(ordered, tree, CFG, EXPERTS, token_NS, valid_NS))
    cfg, whole = cut(CFG, params, EXPERTS, split)
    forward = jax.jit(dense.forward_sequences, static_argnums=1)
    want = np.asarray(forward(whole, cfg, token_NS, valid_NS).hidden)
    np.testing.assert_allclose(got[valid_NS], want[valid_NS], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_fitting_brings_it_nearer_to_the_dense_target(params, split, batches):
    """And twice the same way; neurons stay where they are."""

    def fit():
        tree, steps = distil.trained(split), 60
        state = distil.make_optimizer(steps).init(tree)
        ordered, losses = distil.ordered(params, split), []
        for i in range(steps):
            tree, state, loss = distil.step(
                *(ordered, tree, state, *batches[i % 2]),
                cfg=CFG,
                experts=EXPERTS,
                steps=steps,
            )
            losses.append(float(loss))
        return losses, tree

    losses, tree = fit()
    assert np.mean(losses[-4:]) < 0.8 * np.mean(losses[:4])
    again, _ = fit()
    assert losses == again
    fitted = distil.with_trained(split, tree)
    assert fitted.neuron_YF is split.neuron_YF
    assert not np.array_equal(fitted.router_YEQ, split.router_YEQ)


def test_responses_of_another_tokenizer_are_refused(tmp_path, params):
    save_hf(tmp_path / "dense", CFG, params)
    lines = [{"prompt": [1, 2], "response": [3]}, {"prompt": [1, 99], "response": [3]}]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["make", "--target", str(tmp_path / "dense"), "--data", str(data)]
    words += ["--out", str(tmp_path / "small"), "--experts", "4", "--shared", "8"]
    words += ["--active", "2"]
    with pytest.raises(DatasetError, match=r"data.jsonl:2.*found 99"):
        command.main(words)
    data.write_text(json.dumps(lines[0]) + "\n")
    with pytest.raises(ConfigError, match="to measure the split on, found none"):
        command.main(words)


@pytest.mark.slow
def test_the_command_makes_a_split_and_a_checkpoint(tmp_path, params, capsys):
    save_hf(tmp_path / "dense", CFG, params)
    rng = np.random.default_rng(1)
    with (tmp_path / "data.jsonl").open("w") as file:
        for n in rng.integers(8, 30, 200):
            tokens = rng.integers(0, CFG.vocab, n).tolist()
            file.write(
                json.dumps({"prompt": tokens[:4], "response": tokens[4:]}) + "\n"
            )
    target = ["--target", str(tmp_path / "dense")]
    sizes = ["--experts", "4", "--active", "2", "--shared", "8", "--steps", "3"]
    sizes += ["--length", "20", "--cluster-batches", "1", "--fit-batches", "2"]
    paths = ["--data", str(tmp_path / "data.jsonl"), "--out", str(tmp_path / "small")]
    command.main(["make", *target, *sizes, *paths])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    after = next(x for x in lines if x.get("stage") == "after")["held out"]
    about = json.loads((tmp_path / "small" / "config.json").read_text())
    assert about["gating"] == "ones"
    assert about["split"]["after"]["held out"] == after
    assert 0 <= after["agreement"] <= 1

    command.main(["export", *target, str(tmp_path / "small"), str(tmp_path / "whole")])
    cfg, whole = load_hf(tmp_path / "whole", "float32")
    identity = about["split"]["base_identity"]
    want_cfg, want = cut(CFG, params, *load_split(tmp_path / "small", CFG, identity))
    assert cfg == want_cfg
    jax.tree.map(np.testing.assert_array_equal, whole, want)
