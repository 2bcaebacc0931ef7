"""A run that is killed at twenty moments ends, bit for bit, as an unbroken one does."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcut_jax.models.dense import forward_sequences
from dcut_jax.train.checkpoints import checkpoints
from dcut_jax.train.config import TrainConfig
from dcut_jax.train.data import DatasetWriter
from dcut_jax.train.loop import make_trainer
from dcut_jax.weights.hf import load_hf

ROOT = Path(__file__).parents[2]
TARGET = ROOT / "tests" / "golden" / "dflash" / "target"
TAPS = (1, 2, 3)
KILLS, STEPS = 20, 90
TIMES = {"ms_per_step", "anchors_per_s"}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Arithmetic progressions, with features."""
    cfg, params = load_hf(TARGET, jnp.float32)
    path = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    start_N, stride_N = rng.integers(0, 100, 60), rng.integers(1, 7, 60)
    token_NS = (start_N[:, None] + stride_N[:, None] * np.arange(40)) % 100
    valid_NS = jnp.ones(token_NS.shape, bool)
    forward = jax.jit(lambda t: forward_sequences(params, cfg, t, valid_NS, TAPS).taps)
    taps_NSC = np.asarray(forward(token_NS.astype(np.int32)))
    with DatasetWriter(path, {"taps": list(TAPS)}, channels=192) as writer:
        for token_S, taps_SC in zip(token_NS, taps_NSC, strict=True):
            writer.append(token_S, 8, taps_SC)
    return path


def write_config(cfg, path):
    lines = []
    for name, value in dataclasses.asdict(cfg).items():
        value = list(value) if isinstance(value, tuple) else value
        lines.append(f"{name} = {json.dumps(value)}\n")
    path.write_text("".join(lines))


def lives(cfg, path, kills):
    """What became of each life; see `tests/train/lives.py`."""
    write_config(cfg, path)
    # Every life compiles the same; what one has compiled the others read.
    places = {
        "PYTHONPATH": str(ROOT),
        "JAX_COMPILATION_CACHE_DIR": str(path.parent / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    script = ROOT / "tests" / "train" / "lives.py"
    done = subprocess.run(
        [sys.executable, str(script), str(path), json.dumps(kills)],
        capture_output=True,
        text=True,
        env=os.environ | places,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def curve(run):
    """A run's log without times."""
    lines = map(json.loads, Path(run, "log.jsonl").read_text().splitlines())
    return [{k: v for k, v in line.items() if k not in TIMES} for line in lines]


def test_twenty_kills_change_nothing(dataset, tmp_path):
    cfg = TrainConfig(
        target=str(TARGET),
        data=str(dataset),
        out=str(tmp_path / "killed"),
        mask_token=100,
        layers=1,
        target_layers=TAPS,
        block=8,
        docs=4,
        anchors=4,
        length=40,
        widths=(3, 7),
        width_weights=(0.5, 0.5),
        shortlist=100,
        compute_dtype="float32",
        ema=0.9,
        steps=STEPS,
        lr=2e-3,
        log_every=2,  # odd checkpoints hold the losses of half a line
        eval_every=7,
        eval_fraction=0.2,
        eval_docs=6,
        eval_anchors=2,
        save_every=3,
        keep_every=30,
    )
    rng = np.random.default_rng(0)
    # Some while a life begins, which takes about two seconds; most anywhere in its
    # first lines, with a delay that may reach into the next step or write.
    early = [[0, float(rng.uniform(0, 3))] for _ in range(4)]
    later = [
        [int(rng.integers(1, 9)), float(rng.uniform(0, 0.08))]
        for _ in range(KILLS - len(early))
    ]
    kills = [*early, *later]
    rng.shuffle(kills)
    found = lives(cfg, tmp_path / "killed.toml", [*kills, [None, 0]])
    assert [life["killed"] for life in found] == [True] * KILLS + [False]
    whole = dataclasses.replace(cfg, out=str(tmp_path / "whole"))
    [life] = lives(whole, tmp_path / "whole.toml", [[None, 0]])
    assert life["lines"] == len(curve(whole.out))

    assert curve(cfg.out) == curve(whole.out)
    states = []
    for run in (cfg, whole):
        with checkpoints(Path(run.out)) as there:
            assert there.steps() == [30, 60, STEPS - 3, STEPS]
            states.append(there.restore(make_trainer(run).state).state)
    assert int(states[0].step) == STEPS
    jax.tree.map(np.testing.assert_array_equal, *states)
    names = [p.name for p in Path(cfg.out, "checkpoints").iterdir()]
    assert sorted(names) == sorted(map(str, (30, 60, STEPS - 3, STEPS)))
