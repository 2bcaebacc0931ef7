"""Checkpoints are whole or not taken, and a killed run ends as an unbroken one does."""

import dataclasses
import gc
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dcut_jax.config import ConfigError
from dcut_jax.models.dense import head_VE
from dcut_jax.train import checkpoints as module
from dcut_jax.train.__main__ import main
from dcut_jax.train.checkpoints import Checkpoints, SaveError, checkpoints, restore
from dcut_jax.train.data import Dataset, DatasetError
from dcut_jax.train.loop import Trainer, make_trainer
from dcut_jax.train.run_log import RunLog, cut_log, scalars
from dcut_jax.train.step import TrainState
from dcut_jax.weights.errors import CheckpointError

# Reads and writes that fail leave callbacks behind, in TensorStore.
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)
LIVES = Path(__file__).with_name("lives.py")
TIMES = {"ms_per_step", "anchors_per_s"}


def state_of(step, size=1000):
    """What a run may look like at a step, other numbers at each."""
    key = jax.random.fold_in(jax.random.key(0), step)
    p = {"w": jax.random.normal(key, (size,)), "layers": ({"b": jnp.ones((3, 4))},)}
    return TrainState(p, optax.adam(1e-3).init(p), jnp.int32(step))


def assert_same(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


def names(run):
    return sorted(p.name for p in (run / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run with checkpoints of steps 2 and 4."""
    out = tmp_path_factory.mktemp("saved")
    with Checkpoints(out, write=True) as run:
        for step in (2, 4):
            run.save(state_of(step), [step / 3, 1e-30])
    return out


@pytest.fixture
def run(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "run"))


@pytest.fixture(autouse=True)
def tidied():
    """What a test leaves behind is found within it, not within another."""
    yield
    gc.collect()


@contextmanager
def files_of_at_most(size):
    """The system refuses to let a file grow beyond it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_state_and_losses_come_back_bit_for_bit(run):
    with checkpoints(run) as found:
        assert (found.steps(), found.latest_step()) == ([2, 4], 4)
        there = found.restore(state_of(0))
    assert_same(there.state, state_of(4))
    assert there.losses == (4 / 3, 1e-30)


def test_without_a_checkpoint_a_run_begins_anew(tmp_path):
    with Checkpoints(tmp_path, write=True) as found:
        assert found.latest_step() is None
        there = found.restore(state_of(0))
    assert_same(there.state, state_of(0))
    assert there.losses == ()


def test_the_last_two_are_kept_and_some_for_good(tmp_path):
    with Checkpoints(tmp_path, keep_every=4, write=True) as found:
        for step in range(1, 11):
            found.save(state_of(step))
            found.wait()
            assert {step, max(step - 1, 1)} <= set(found.steps())
    assert names(tmp_path) == ["10", "4", "8", "9"]


def test_training_goes_on_with_donated_buffers_while_it_writes(tmp_path):
    @partial(jax.jit, donate_argnums=0)
    def spoil(state):
        return jax.tree.map(lambda x: x * 0 - 1, state)

    state = state_of(3, size=1_000_000)
    with Checkpoints(tmp_path, write=True) as found:
        found.save(state)
        assert found._manager.is_saving_in_progress()
        for _ in range(4):
            state = spoil(state)
        jax.block_until_ready(state)
        found.wait()
        assert_same(found.restore(state_of(0, 1_000_000)).state, state_of(3, 1_000_000))


def unfinish(run, step):
    """What a kill leaves: not all files, under the name of what is being written."""
    place = run / "checkpoints" / f"{step}.orbax-checkpoint-tmp"
    (run / "checkpoints" / str(step)).rename(place)
    data = max((p for p in place.rglob("*") if p.is_file()), key=os.path.getsize)
    data.write_bytes(data.read_bytes()[:100])
    (place / "_CHECKPOINT_METADATA").unlink()
    return place


def test_an_unfinished_checkpoint_is_not_taken(run, capsys):
    place = unfinish(run, 4)
    with checkpoints(run) as found:
        assert found.latest_step() == 2
        assert_same(restore(found, state_of(0)), state_of(2))
    assert place.exists()  # the run may be writing it
    with Checkpoints(run, write=True) as found:
        assert_same(found.restore(state_of(0)).state, state_of(2))
        found.save(state_of(4))
        found.wait()
        assert_same(found.restore(state_of(0)).state, state_of(4))
    assert names(run) == ["2", "4"]
    assert not capsys.readouterr().err


DAMAGES = {
    "gone": lambda data: None,
    "empty": lambda data: b"",
    "cut": lambda data: data[: len(data) // 2],
    "zeros": lambda data: bytes(len(data)),
    "flipped": lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_whatever_is_damaged(saved, tmp_path, how):
    files = [p for p in (saved / "checkpoints" / "4").rglob("*") if p.is_file()]
    passed_over = 0
    for number, file in enumerate(sorted(files)):
        run = Path(shutil.copytree(saved, tmp_path / str(number)))
        place = run / file.relative_to(saved)
        damaged = DAMAGES[how](place.read_bytes())
        if damaged is None:
            place.unlink()
        else:
            place.write_bytes(damaged)
        with Checkpoints(run, write=True) as found:
            there = found.restore(state_of(0))
        # Not every file is needed. But what is taken is whole.
        step = int(there.state.step)
        assert step in (2, 4)
        assert_same(there.state, state_of(step))
        assert there.losses == (step / 3, 1e-30)
        passed_over += step == 2
    assert passed_over >= 3


def test_what_is_damaged_is_said_and_set_aside(run, capsys):
    data = (run / "checkpoints" / "4" / "default").rglob("*")
    max((p for p in data if p.is_file()), key=os.path.getsize).unlink()
    with checkpoints(run) as found:
        assert_same(restore(found, state_of(0)), state_of(2))
    said = capsys.readouterr().err
    assert "step 4 is damaged (" in said
    assert said.endswith("; step 2 is taken instead\n")
    assert names(run) == ["2", "4"]
    with Checkpoints(run, write=True) as found:
        assert found.restore(state_of(0)).losses == (2 / 3, 1e-30)
        found.save(state_of(4))
    assert "it is now damaged-4" in capsys.readouterr().err
    assert names(run) == ["2", "4", "damaged-4"]
    with checkpoints(run) as found:
        assert_same(restore(found, state_of(0)), state_of(4))


def test_without_a_whole_checkpoint_nothing_is_begun_anew(run):
    for step in ("2", "4"):
        (run / "checkpoints" / step / "default" / "_METADATA").write_text("")
    with Checkpoints(run, write=True) as found:
        message = r"expected a whole checkpoint.*\(step 4: .*; step 2: .*move them away"
        with pytest.raises(CheckpointError, match=message):
            found.restore(state_of(0))
    assert names(run) == ["2", "4"]


def test_checkpoints_of_earlier_versions_have_no_check_sum(run, monkeypatch):
    path = run / "checkpoints" / "4" / "_CHECKPOINT_METADATA"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"custom_metadata": {}}))
    with checkpoints(run) as found:
        there = found.restore(state_of(0))
    assert_same(there.state, state_of(4))
    assert there.losses == ()


def test_a_full_disk_is_said_and_loses_nothing(run):
    large = 300_000  # over a megabyte of parameters that do not pack well

    def train():
        with Checkpoints(run, write=True) as found:
            found.save(state_of(6, large))

    with files_of_at_most(500_000), pytest.raises(SaveError) as caught:
        train()
    message = str(caught.value)
    pattern = (
        r"the checkpoint of step 6 could not be written under .*checkpoints: "
        r"File too large; it takes about 3\.6 MB, and [0-9.]+ MB are free there "
        r"\(saved before and untouched: 2, 4\); free some space and run the same "
        r"command again: it goes on from step 4"
    )
    assert re.fullmatch(pattern, message), message
    assert names(run) == ["2", "4"]
    with Checkpoints(run, write=True) as found:
        assert_same(found.restore(state_of(0)).state, state_of(4))
        found.save(state_of(6))
    assert names(run) == ["4", "6"]


def test_a_full_disk_is_noticed_while_training_goes_on(tmp_path, caplog):
    def train(found):
        while True:
            found.check()

    with files_of_at_most(500_000), Checkpoints(tmp_path, write=True) as found:
        found.save(state_of(6, 300_000))
        with pytest.raises(SaveError, match="nothing was saved before.*begins anew"):
            train(found)
    # And it is told once, by us.
    assert not caplog.records
    assert names(tmp_path) == []


def test_a_run_without_room_does_not_begin(tmp_path, monkeypatch):
    usage = SimpleNamespace(free=1_000_000)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage)
    with Checkpoints(tmp_path, write=True) as found:
        found.require_room(state_of(0))
        message = r"room for one more checkpoint, about 1\.2 MB, found 1\.0 MB free"
        with pytest.raises(SaveError, match=message):
            found.require_room(state_of(0, 100_000))


def test_a_log_has_no_step_twice(tmp_path):
    path = tmp_path / "log.jsonl"
    cut_log(path, 3)
    assert not path.exists()
    lines = [json.dumps({"step": s, "loss": s / 2}) + "\n" for s in (1, 2, 3, 4)]
    path.write_text("".join(lines) + '{"step": 5, "lo')
    with RunLog(tmp_path, 3) as log:
        assert path.read_text() == "".join(lines[:3])
        log.write({"step": 4, "loss": 2.0})
    assert path.read_text() == "".join(lines)
    for _ in range(2):
        cut_log(path, 9)
        assert path.read_text() == "".join(lines)
    path.write_text(lines[0] + "nonsense\n" + lines[1])
    with pytest.raises(DatasetError, match=r"log\.jsonl:2: expected .* 'nonsense"):
        cut_log(path, 9)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_log_on_a_full_disk(tmp_path):
    with RunLog(tmp_path, 0) as log:
        log.write({"step": 1})
        log._file.close()
        log._file = open("/dev/full", "ab", buffering=0)
        message = "expected to append a line, found: No space left on device; .* free"
        with pytest.raises(SaveError, match=message):
            log.write({"step": 2})
    assert (tmp_path / "log.jsonl").read_text() == '{"step": 1}\n'


def test_names_of_scalars():
    assert scalars({"step": 3, "loss": 1.5, "grad_norm": 2}) == {
        "train/loss": 1.5,
        "train/grad_norm": 2.0,
    }
    entry = {"step": 3, "width": 7, "accepted": 2.0, "blocks": 9, "slots": [0.5, 0.25]}
    assert scalars(entry) == {
        "eval/width 7/accepted": 2.0,
        "eval/width 7/blocks": 9.0,
        "eval/width 7/slot 01": 0.5,
        "eval/width 7/slot 02": 0.25,
    }


def write_config(cfg, path):
    """The TOML file of a config."""
    lines = []
    for name, value in dataclasses.asdict(cfg).items():
        value = list(value) if isinstance(value, tuple) else value
        lines.append(f"{name} = {json.dumps(value)}\n")
    path.write_text("".join(lines))
    return str(path)


def test_tensorboard_is_refused_before_anything_is_read(config, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    here = dataclasses.replace(config, target="no such", data="no such")
    path = write_config(here, tmp_path / "run.toml")
    with pytest.raises(ImportError, match="pip install tensorboardX"):
        main(["run", path, "--tensorboard"])
    assert not Path(config.out).exists()


@pytest.mark.slow
def test_tensorboard_gets_what_the_log_has(config, target, monkeypatch):
    import tensorboardX

    told = []

    class Writer(tensorboardX.SummaryWriter):
        def __init__(self, logdir, purge_step):
            told.append((Path(logdir).name, purge_step))
            super().__init__(logdir, purge_step=purge_step)

        def add_scalar(self, *args):
            told.append(args)
            super().add_scalar(*args)

    monkeypatch.setattr(tensorboardX, "SummaryWriter", Writer)
    cfg, params = target
    data = Dataset.open(config.data)
    few = dataclasses.replace(config, steps=2)
    trainer = Trainer(few, cfg, params["embed_VE"], head_VE(params), data)
    records = []
    trainer.run(records.append, tensorboard=True)
    assert told[0] == ("tensorboard", 1)
    want = [(n, v, r["step"]) for r in records for n, v in scalars(r).items()]
    assert told[1:] == want
    [events] = Path(config.out, "tensorboard").iterdir()
    assert events.stat().st_size > 0


def test_what_is_kept_for_good_has_to_be_saved(config):
    with pytest.raises(ConfigError, match="multiple of save_every, 2, or 0.*found 3"):
        dataclasses.replace(config, keep_every=3)
    assert dataclasses.replace(config, keep_every=4).keep_every == 4


def curve(run):
    """A run's log without times, and no step twice."""
    text = Path(run, "log.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    return [{k: v for k, v in entry.items() if k not in TIMES} for entry in lines]


def lives(config, path, kills):
    """Runs `lives.py`; what became of each life."""
    write_config(config, path)
    # What one life has compiled the next one reads.
    places = {
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "JAX_COMPILATION_CACHE_DIR": str(path.parent / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    done = subprocess.run(
        [sys.executable, str(LIVES), str(path), json.dumps(kills)],
        capture_output=True,
        text=True,
        env=os.environ | places,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_killed_and_resumed_equals_unbroken(config, tmp_path):
    # Three steps a line and two a checkpoint, so a line may be of two lives.
    config = dataclasses.replace(config, steps=9, log_every=3, eval_every=4)
    whole = make_trainer(dataclasses.replace(config, out=str(tmp_path / "whole")))
    whole.run()

    kills = [[1, 0.02], [2, 0.0]]
    assert all(life["killed"] for life in lives(config, tmp_path / "run.toml", kills))
    last = make_trainer(config)
    last.run()
    assert int(last.state.step) == 9
    assert_same(last.state, whole.state)
    assert curve(config.out) == curve(whole.cfg.out)
