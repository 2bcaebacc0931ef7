"""A run that is killed at twenty moments ends, bit for bit, as an unbroken one does."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from dcut_jax.train.checkpoints import checkpoints
from dcut_jax.train.loop import make_trainer

ROOT = Path(__file__).parents[2]
KILLS, STEPS = 20, 90
TIMES = {"ms_per_step", "anchors_per_s"}

pytestmark = pytest.mark.slow


def write_config(cfg, path):
    lines = []
    for name, value in dataclasses.asdict(cfg).items():
        value = list(value) if isinstance(value, tuple) else value
        lines.append(f"{name} = {json.dumps(value)}\n")
    path.write_text("".join(lines))


def lives(cfg, path, kills):
    """What became of each life; see `lives.py`."""
    write_config(cfg, path)
    # Every life compiles the same; what one has compiled the others read.
    places = {
        "PYTHONPATH": str(ROOT),
        "JAX_COMPILATION_CACHE_DIR": str(path.parent / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    script = Path(__file__).with_name("lives.py")
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


def test_twenty_kills_change_nothing(config, tmp_path):
    cfg = dataclasses.replace(
        config,
        out=str(tmp_path / "killed"),
        widths=(3, 7),
        width_weights=(0.5, 0.5),
        ema=0.9,
        steps=STEPS,
        log_every=2,  # odd checkpoints hold the losses of half a line
        eval_every=7,
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
