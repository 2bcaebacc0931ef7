"""A run that is stopped and resumed ends where an unbroken one does, bit for bit."""

import os
import signal
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcut_jax.config import ConfigError
from dcut_jax.models.dense import head_VE
from dcut_jax.train.__main__ import main
from dcut_jax.train.data import Dataset, DatasetError
from dcut_jax.train.loop import TrainConfig, Trainer, make_shortlist, read_config
from dcut_jax.train.loss import Blocks
from dcut_jax.weights.dflash import load_drafter


@pytest.fixture
def config(golden, dataset, tmp_path):
    return TrainConfig(
        target=str(golden / "target"),
        data=str(dataset),
        out=str(tmp_path / "run"),
        mask_token=100,
        layers=1,
        target_layers=(1, 2, 3),
        block=8,
        docs=4,
        anchors=4,
        length=40,
        widths=(5,),
        gamma=4.0,
        shortlist=100,
        shortlist_frequent=8,
        compute_dtype="float32",
        steps=6,
        lr=2e-3,
        log_every=1,
        eval_every=6,
        eval_docs=6,
        eval_anchors=2,
        save_every=2,
    )


def trainer(config, target):
    cfg, params = target
    data = Dataset.open(config.data)
    return Trainer(config, cfg, params["embed_VE"], head_VE(params), data)


def stop_after(step):
    def on_record(entry):
        if entry["step"] == step and "loss" in entry:
            os.kill(os.getpid(), signal.SIGTERM)

    return on_record


def test_stopped_and_resumed_equals_unbroken(config, target, tmp_path):
    whole = trainer(replace(config, out=str(tmp_path / "whole")), target)
    records = []
    whole.run(records.append)

    first = trainer(config, target)
    first.run(stop_after(3))
    assert int(first.state.step) == 3
    second = trainer(config, target)
    second.run()

    assert int(second.state.step) == config.steps
    jax.tree.map(np.testing.assert_array_equal, whole.state, second.state)
    assert [r["step"] for r in records if "loss" in r] == [1, 2, 3, 4, 5, 6]
    assert [(r["step"], r["width"]) for r in records if "accepted" in r] == [(6, 5)]

    # And the end of the run is what gets exported.
    assert main(["export", config.out, str(tmp_path / "drafter")]) == 0
    cfg, params = load_drafter(tmp_path / "drafter", jnp.float32)
    assert cfg == whole.drafter_cfg
    stored = jax.tree.map(lambda p: p.astype(jnp.bfloat16), whole.state.params)
    want = jax.tree.map(lambda p: p.astype(jnp.float32), stored)
    jax.tree.map(np.testing.assert_array_equal, params, want)


@pytest.mark.slow
def test_training_learns_progressions(config, target):
    steps, width = 150, 7
    more = replace(config, layers=2, docs=8, anchors=12, steps=steps)
    more = replace(more, shortlist=0, shortlist_frequent=0)
    run = trainer(replace(more, widths=(width,)), target)
    before = run.evaluate(width)["accepted"]
    for _ in range(steps):
        run.step()
    assert before < 1.2
    assert run.evaluate(width)["accepted"] > 3.0


def test_a_shortlist_holds_every_label_and_no_word_twice():
    rng = np.random.default_rng(0)
    token_NS = rng.integers(0, 30, (2, 10))
    empty = np.zeros(0)
    blocks = Blocks(token_NS, empty, empty, empty, empty)
    short = make_shortlist(blocks, np.arange(40, 50), 64, 200, rng)
    assert len(np.unique(short.word_M)) == 64
    sure = np.union1d(token_NS, np.arange(40, 50))
    assert set(sure) <= set(short.word_M.tolist())
    np.testing.assert_array_equal(short.word_M[short.place_V[token_NS]], token_NS)
    # Each drawn word stands for as many as it was drawn from.
    drawn = 64 - len(sure)
    want = np.r_[np.zeros(len(sure)), np.full(drawn, np.log((200 - len(sure)) / drawn))]
    np.testing.assert_allclose(short.bias_M, want, rtol=1e-6)
    with pytest.raises(ConfigError, match="shortlist 8 is too small"):
        make_shortlist(blocks, np.arange(4), 8, 200, rng)


def test_features_of_other_layers_are_refused(config, target):
    with pytest.raises(DatasetError, match=r"layers \[1, 2, 3\].*taps \[0, 2, 3\]"):
        trainer(replace(config, target_layers=(0, 2, 3)), target)


def test_nothing_left_to_train_on(config, target):
    with pytest.raises(DatasetError, match="100 documents, of which 100 are held out"):
        trainer(replace(config, eval_docs=100), target)


def test_config_files(tmp_path):
    path = tmp_path / "run.toml"
    plain = 'target = "t"\ndata = "d"\nout = "o"\nmask_token = 4\n'
    path.write_text(plain + "widths = [3]\n")
    cfg = read_config(path, {"steps": 5})
    assert (cfg.widths, cfg.steps, cfg.block) == ((3,), 5, 16)
    for text, message in [
        (plain + "colour = 1\n", "unknown keys colour"),
        ('target = "t"\n', "keys data, mask_token, out are missing"),
        (plain + "widths = [3, 7]\n", "2 widths and 1 weights"),
        (plain + "widths = [16]\n", r"widths \[16\] must lie in 1\.\.15"),
        (plain + "shortlist_frequent = 9\n", "shortlist_frequent 9 exceeds"),
    ]:
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_config(path)


def test_the_shipped_config_is_valid():
    from pathlib import Path

    root = Path(__file__).parents[2]
    for path in sorted((root / "configs" / "train").glob("*.toml")):
        assert read_config(path).target
