"""One optimiser step: micro-batches, averages, optimisers, and the same on a mesh."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from dcut_jax.axes import DATA, MODEL
from dcut_jax.config import ConfigError
from dcut_jax.mesh import place
from dcut_jax.train.blocks import Blocks
from dcut_jax.train.config import TrainConfig, make_drafter_config
from dcut_jax.train.loop import DivergedError, require_finite
from dcut_jax.train.mesh import (
    batch_sharding,
    check_mesh,
    make_mesh,
    table_sharding,
)
from dcut_jax.train.step import compiled_step, init_state, on_mesh

WORDS, S, DOCS, ANCHORS, WIDTH = 100, 32, 8, 4, 7


@pytest.fixture(scope="module")
def cfg():
    return TrainConfig(
        **{"target": "", "data": "", "out": "", "mask_token": WORDS - 1},
        **{"layers": 1, "target_layers": (1, 2), "block": 8, "widths": (WIDTH,)},
        **{"docs": DOCS, "anchors": ANCHORS, "length": S, "steps": 10, "warmup": 0.1},
        **{"ce": 0.1, "l1": 0.9, "confidence": 1.0, "markov_rank": 4, "pace": True},
        compute_dtype="float32",
    )


@pytest.fixture(scope="module")
def pair(cfg, target):
    """The drafter, and a target's tables whose words a mesh can divide."""
    words = replace(target[0], vocab=WORDS)
    embed, head = (target[1][n][:WORDS] for n in ("embed_VE", "head_VE"))
    return make_drafter_config(cfg, words), embed, head


@pytest.fixture(scope="module")
def blocks(pair):
    rng = np.random.default_rng(0)
    embed = pair[0].embed
    return Blocks(
        rng.integers(0, WORDS - 1, (1, DOCS, S)).astype(np.int32),
        rng.integers(S - 6, S + 1, (1, DOCS)).astype(np.int32),
        rng.normal(size=(1, DOCS, S, 2 * embed)).astype(np.float32),
        np.sort(rng.integers(4, S - 8, (1, DOCS, ANCHORS))).astype(np.int32),
        rng.random((1, DOCS, ANCHORS)) < 0.9,
        rng.normal(size=(1, DOCS, S, embed)).astype(np.float32),
    )


def train(cfg, pair, blocks, steps=2, mesh=None):
    """States and metrics of a few steps on the same blocks."""
    drafter_cfg, *tables = pair
    state, batches = init_state(drafter_cfg, cfg), (blocks, None)
    if mesh is not None:
        state = on_mesh(state, mesh, drafter_cfg, cfg)
        tables = place(tables, table_sharding(mesh))
        batches = place(batches, batch_sharding(mesh))
    found = []
    for _ in range(steps):
        state, metrics = compiled_step(
            state,
            *tables,
            batches,
            cfg=cfg,
            drafter_cfg=drafter_cfg,
            width=WIDTH,
            mesh=mesh,
        )
        found.append(jax.device_get((state, metrics)))
    return found


def close(a, b, atol):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=atol), a, b)


@pytest.fixture(scope="module")
def alone(cfg, pair, blocks):
    return train(cfg, pair, blocks, steps=3)


def test_micro_batches_are_the_batch_of_all_of_them(cfg, pair, blocks, alone):
    parts = replace(cfg, docs=DOCS // 4, accumulate=4)
    dealt = jax.tree.map(lambda x: x.reshape(4, DOCS // 4, *x.shape[2:]), blocks)
    for (state, metrics), (want, wanted) in zip(
        train(parts, pair, dealt), alone, strict=False
    ):
        close(metrics, wanted, 1e-5)
        # Adam divides by a gradient's size: one of 8192 differs by 1.3e-5.
        close(state.params, want.params, 2e-5)


def test_heads_alone_are_not_trained_by_a_rule_that_shrinks_the_rest(cfg):
    with pytest.raises(ConfigError, match="set optimizer to adamw"):
        replace(cfg, heads_only=True, markov_rank=8, optimizer="muon")


@pytest.mark.parametrize("metrics", [{"loss": np.nan}, {"loss": 1.0, "norm": np.inf}])
def test_a_loss_that_is_no_number_ends_a_run(metrics):
    require_finite({"loss": 1.0}, 7)
    with pytest.raises(DivergedError, match="step 7: expected a finite loss"):
        require_finite(metrics, 7)


def average(keep, old, new):
    return jax.tree.map(lambda a, p: keep * a + (1 - keep) * p, old, new)


@pytest.mark.slow
def test_the_average_follows_the_parameters(cfg, pair, blocks):
    states = [s for s, _ in train(replace(cfg, ema=0.75), pair, blocks, steps=3)]
    want = init_state(pair[0], cfg).params
    for step, state in enumerate(states):
        keep = min(0.75, (1 + step) / (10 + step))  # shorter at first
        want = average(keep, want, state.params)
        close(state.ema, want, 1e-6)
        assert state.best is state.ema


def test_without_an_average_the_parameters_are_the_best(alone):
    assert alone[0][0].best is alone[0][0].params


@pytest.mark.slow
def test_heads_alone_move(cfg, pair, blocks):
    only = replace(cfg, heads_only=True)
    before = init_state(pair[0], only).params
    after = train(only, pair, blocks, steps=3)[-1][0].params
    for name in before:
        moved = any(
            np.any(a != b)
            for a, b in zip(
                jax.tree.leaves(before[name]), jax.tree.leaves(after[name]), strict=True
            )
        )
        assert moved == (name in ("markov", "confidence")), name


@pytest.mark.slow
def test_a_step_learns_by_either_optimiser(cfg, pair, blocks, alone):
    muon = train(replace(cfg, optimizer="muon", lr=1e-3), pair, blocks, steps=6)
    adamw = train(replace(cfg, lr=1e-3), pair, blocks, steps=6)
    for found in (muon, adamw):
        losses = [float(m["loss"]) for _, m in found]
        assert losses[-1] < losses[0]
    assert float(muon[-1][1]["loss"]) != float(adamw[-1][1]["loss"])


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(8, 1), (4, 2), (2, 1)])
def test_a_mesh_gives_the_loss_of_one_device(cfg, pair, blocks, alone, shape):
    devices = np.asarray(jax.devices()[: shape[0] * shape[1]])
    mesh = Mesh(devices.reshape(shape), (DATA, MODEL))
    found = train(cfg, pair, blocks, steps=3, mesh=mesh)
    for (_, metrics), (_, want) in zip(found, alone, strict=True):
        assert float(metrics["loss"]) == pytest.approx(float(want["loss"]), rel=1e-5)
        norm = float(metrics["grad_norm"])
        assert norm == pytest.approx(float(want["grad_norm"]), rel=1e-4)


def test_every_device_holds_its_part_of_the_state_alone(cfg, pair):
    mesh = Mesh(np.asarray(jax.devices()).reshape(4, 2), (DATA, MODEL))
    with_average = replace(cfg, ema=0.9)
    state = on_mesh(init_state(pair[0], with_average), mesh, pair[0], with_average)
    for tree in (state.params, state.ema, state.opt_state):
        matrices = [x for x in jax.tree.leaves(tree) if x.ndim >= 2]
        whole = sum(x.size for x in matrices)
        here = sum(x.addressable_shards[0].data.size for x in matrices)
        # The rank and width of Markov tables, and a head's channels, are not cut.
        assert here < whole / 4
    assert state.params["layers"][0]["gate_EF"].sharding.spec == P(DATA, MODEL)


def test_a_mesh_that_divides_nothing_evenly_is_refused(pair):
    mesh = Mesh(np.asarray(jax.devices()[:6]).reshape(1, 6), (DATA, MODEL))
    with pytest.raises(ConfigError, match=r"mesh_model 6.*heads 4.*sizes.*1, 2$"):
        check_mesh(mesh, pair[0], DOCS)


def test_a_mesh_of_other_devices_than_there_are_is_refused():
    assert make_mesh(1, 1) is None
    with pytest.raises(ConfigError, match="there are 8; make the product 8"):
        make_mesh(3, 2)
