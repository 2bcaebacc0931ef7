"""A run that is stopped and resumed ends where an unbroken one does, bit for bit."""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
from dataclasses import asdict, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcut_jax.config import ConfigError
from dcut_jax.models.dense import head_VE
from dcut_jax.train import held_out, loop
from dcut_jax.train.__main__ import main
from dcut_jax.train.blocks import Blocks, labels
from dcut_jax.train.config import check_same_run, read_config
from dcut_jax.train.data import Dataset, DatasetError, DatasetWriter
from dcut_jax.train.export import describe, versions
from dcut_jax.train.loop import Trainer, make_trainer, split
from dcut_jax.train.shortlist import make_shortlist
from dcut_jax.train.step import init_state
from dcut_jax.weights.dflash import load_drafter, save_drafter
from dcut_jax.weights.load import load_target


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
    # With another config it is refused, and nothing is touched; with other intervals
    # it goes on.
    stored = Path(config.out, "config.json").read_bytes()
    with pytest.raises(ConfigError, match=r"in gamma \(4\.0 there, 5\.0 here\)"):
        trainer(replace(config, gamma=5.0), target).run()
    assert Path(config.out, "config.json").read_bytes() == stored
    second = trainer(replace(config, save_every=3), target)
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

    text = (tmp_path / "drafter" / "manifest.json").read_text()
    assert str(tmp_path) not in text
    manifest = json.loads(text)
    assert (manifest["name"], manifest["step"]) == ("drafter", config.steps)
    made_for = load_target(config.target)
    assert manifest["target"] == {"name": "target", "identity": made_for.identity}
    for name, digest in manifest["files"].items():
        written = (tmp_path / "drafter" / name).read_bytes()
        assert digest == hashlib.sha256(written).hexdigest()
    assert manifest["files"].keys() == {"config.json", "model.safetensors"}
    here = {"target": "target", "data": Path(config.data).name, "out": "run"}
    assert manifest["training"] == json.loads(
        json.dumps(asdict(config) | here | {"save_every": 3})
    )
    assert manifest["data"]["documents"] == 100
    assert manifest["versions"]["jax"] == jax.__version__


@pytest.mark.slow
def test_training_learns_progressions(config, target):
    steps, width = 150, 7
    more = replace(config, layers=2, docs=8, anchors=12, steps=steps)
    more = replace(more, shortlist=0, shortlist_frequent=0, widths=(width,))
    # Of progressions that no training document begins with; enough blocks for a mean.
    run = trainer(replace(more, eval_docs=99, eval_anchors=12), target)
    before = run.evaluate(width)["accepted"]
    for _ in range(steps):
        run.step()
    assert before < 1.2
    after = run.evaluate(width)
    assert after["blocks"] > 100
    assert after["accepted"] > 2.0


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


def test_nothing_left_to_train_on_or_to_hold_out(config, target):
    with pytest.raises(DatasetError, match="100 documents.* of which 100 are held out"):
        trainer(replace(config, eval_fraction=0.9999), target)
    with pytest.raises(DatasetError, match="none of them is held out"):
        trainer(replace(config, eval_fraction=1e-6), target)
    every, held_out = split(Dataset.open(config.data), replace(config, eval_fraction=0))
    assert (len(every), len(held_out)) == (100, 0)


def test_what_is_held_out_stays_held_out_as_the_dataset_grows(config, tmp_path):
    data = Dataset.open(config.data)
    with DatasetWriter(tmp_path / "early", {}, channels=192) as writer:
        for i in range(40):
            doc = data.document(i)
            writer.append(doc.tokens, doc.prompt_len, doc.features)
    all_of_them = replace(config, eval_docs=99)
    early = split(Dataset.open(tmp_path / "early"), all_of_them)
    some, every = split(data, config), split(data, all_of_them)

    held = set(early[1].tolist())
    assert held
    assert held == {i for i in every[1].tolist() if i < 40}
    for usable, _ in (some, every):
        assert not held & set(usable.tolist())
    assert sorted([*every[0], *every[1]]) == list(range(100))
    # Fewer are evaluated than are held out, and no more documents are trained on.
    assert len(some[1]) == config.eval_docs < len(every[1])
    np.testing.assert_array_equal(some[0], every[0])
    # One prompt, one side.
    prompts = [
        {tuple(data.document(i).tokens[:8].tolist()) for i in side} for side in every
    ]
    assert not prompts[0] & prompts[1]
    # Not the first of the dataset, and another seed holds out others.
    assert max(every[1]) > 50
    assert set(split(data, replace(all_of_them, seed=1))[1]) != set(every[1])


def test_widths_are_compared_on_the_same_blocks(config, target, monkeypatch):
    def right(params, cfg, embed_VE, head_VE, blocks, width, dtype):
        there_NAK = np.asarray(labels(blocks, width)[1])
        return there_NAK, there_NAK

    monkeypatch.setattr(held_out, "compiled_matches", right)
    more = replace(config, widths=(2, 7), width_weights=(0.5, 0.5), eval_anchors=12)
    run = trainer(more, target)
    narrow, wide = run.evaluate(2), run.evaluate(7)
    assert (narrow["accepted"], wide["accepted"]) == (3, 8)
    rng = np.random.default_rng((config.seed, 2))
    want = 0
    for first in (0, 4):
        docs = np.resize(run.held_out[first : first + 4], 4)
        blocks = loop.draw_blocks(run.data, docs, 12, config.length, rng)
        for n in range(min(4, len(run.held_out) - first)):
            anchors = blocks.anchor_NA[n][blocks.valid_NA[n]]
            want += sum(int(a) + 7 < blocks.length_N[n] for a in anchors)
    assert narrow["blocks"] == wide["blocks"] == want > 0


def test_a_run_goes_on_with_its_own_config_alone(config, tmp_path):
    path = tmp_path / "run" / "config.json"
    with pytest.raises(ConfigError, match="is this a training run"):
        check_same_run(config, path)
    path.parent.mkdir()
    path.write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        check_same_run(config, path)
    stored = json.loads(json.dumps(asdict(config)))
    path.write_text(json.dumps(stored))
    check_same_run(config, path)
    elsewhere = {"data": "d", "out": "o", "init": "i"}
    check_same_run(replace(config, **elsewhere, log_every=7, eval_every=9), path)

    changes = {
        "block": (16, "8 there, 16 here"),
        "mask_token": (3, "100 there, 3 here"),
        "length": (30, "40 there, 30 here"),
        "widths": ((7,), r"\[5\] there, \[7\] here"),
        "lr": (1.0, "0.002 there, 1.0 here"),
        "target": ("smollm2", ".*target.* there, .smollm2. here"),
        "steps": (7, r"6 there, 7 here\); the learning rate follows a cosine over"),
    }
    for name, (value, message) in changes.items():
        with pytest.raises(ConfigError, match=rf"differs in {name} \({message}"):
            check_same_run(replace(config, **{name: value}), path)
    both = replace(config, lr=1.0, gamma=1.0)
    with pytest.raises(ConfigError, match=r"gamma .*, lr .*; go on with .*config\.js"):
        check_same_run(both, path)
    # Runs of earlier versions held out other documents.
    del stored["eval_fraction"]
    path.write_text(json.dumps(stored))
    with pytest.raises(ConfigError, match=r"eval_fraction \(absent there, 0\.2 here\)"):
        check_same_run(config, path)


def test_features_of_another_target_are_refused(config, tmp_path):
    path = tmp_path / "theirs"
    with DatasetWriter(path, {"target": "another"}) as writer:
        writer.append([1, 2, 3], 1)
    ours = load_target(config.target).identity
    with pytest.raises(DatasetError, match=f"which is {ours}, found those of another"):
        make_trainer(replace(config, data=str(path)))


def test_a_run_starts_from_an_exported_drafter(config, target, tmp_path):
    first = trainer(config, target)
    stored = jax.tree.map(lambda p: p + 0.125, first.state.params)
    save_drafter(tmp_path / "drafter", first.drafter_cfg, stored, jnp.bfloat16)
    begun = replace(config, init=str(tmp_path / "drafter"))
    second = trainer(begun, target)
    assert int(second.state.step) == 0
    jax.tree.map(
        lambda got, want: np.testing.assert_array_equal(
            got, want.astype(jnp.bfloat16).astype(jnp.float32)
        ),
        second.state.params,
        stored,
    )
    assert {p.dtype for p in jax.tree.leaves(second.state.params)} == {
        jnp.dtype("float32")
    }

    message = re.escape(f"init {begun.init}: expected the drafter of this run, found ")
    with pytest.raises(ConfigError, match=message + "another layers, layer_types"):
        trainer(replace(begun, layers=2), target)
    with pytest.raises(ConfigError, match=message + "another block"):
        trainer(replace(begun, block=7), target)


def test_a_confidence_head_of_another_shape_is_begun_anew(config, tmp_path):
    judged = {"confidence": 1.0, "features": "online"}
    first = make_trainer(replace(config, **judged))
    stored = jax.tree.map(lambda p: p + 0.125, first.state.params)
    save_drafter(tmp_path / "drafter", first.drafter_cfg, stored, jnp.bfloat16)
    more = replace(config, **judged, init=str(tmp_path / "drafter"), markov_rank=4)
    second = make_trainer(more)
    shapes = jax.tree.map(jnp.shape, second.state.params["confidence"])
    fresh = jax.tree.map(jnp.shape, init_state(second.drafter_cfg, more).params)
    assert shapes == fresh["confidence"]
    np.testing.assert_allclose(
        second.state.params["norm_E"], first.state.params["norm_E"] + 0.125
    )


def test_where_it_starts_is_not_read_again(config, target, tmp_path):
    first = trainer(config, target)
    first.run(stop_after(3))
    second = trainer(replace(config, init=str(tmp_path / "gone")), target)
    second.run()
    assert int(second.state.step) == config.steps


def test_a_run_does_not_write_over_a_drafter(config, target):
    run = trainer(config, target)
    save_drafter(config.out, run.drafter_cfg, run.state.params, jnp.bfloat16)
    with pytest.raises(ConfigError, match="is an exported drafter"):
        run.run()
    load_drafter(config.out, jnp.float32)


def test_a_shortlist_that_some_step_does_not_fit_is_refused_at_the_start(
    config, target
):
    data = Dataset.open(config.data)
    run = trainer(config, target)
    most = 0
    for step in range(config.steps):
        documents, length = run.order.of_step(step)
        tokens = np.concatenate([data.document(i).tokens[:length] for i in documents])
        most = max(most, len({0, *tokens.tolist()}))
    few = replace(config, shortlist_frequent=0)
    with pytest.raises(ConfigError, match=rf"shortlist 20: expected at least {most}"):
        trainer(replace(few, shortlist=20), target)
    fits = trainer(replace(few, shortlist=most), target)
    for _ in range(config.steps):
        fits.step()
    with pytest.raises(ConfigError, match="at most the vocabulary, 101"):
        trainer(replace(config, shortlist=102), target)


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0.04), (2, 1.0)])
def test_the_shortest_runs(config, target, steps, warmup):
    run = trainer(replace(config, steps=steps, warmup=warmup), target)
    run.run()
    assert int(run.state.step) == steps


def test_a_manifest_says_only_what_is_known(config, target, tmp_path):
    run = trainer(config, target)
    save_drafter(tmp_path, run.drafter_cfg, run.state.params, jnp.bfloat16)
    stored = asdict(replace(config, data="/no/such/data", init="/some/drafter"))
    del stored["eval_fraction"]  # a run of an earlier version
    manifest = describe(tmp_path, stored, load_target(config.target), 3)
    assert "data" not in manifest
    assert "eval_fraction" not in manifest["training"]
    names = {k: manifest["training"][k] for k in ("target", "data", "out", "init")}
    want = {"target": "target", "data": "data", "out": "run", "init": "drafter"}
    assert names == want


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask_token": 101}, "mask_token_id 101 is outside the vocabulary of 101"),
        ({"target_layers": (1, 6)}, r"\[1, 6\] must name layers 0\.\.5 of the target"),
        ({"target_layers": (), "taps": 5}, "taps 5: expected at most 3.* has 6 layers"),
    ],
)
def test_what_the_target_does_not_have(config, monkeypatch, changes, message):
    def compile(*args):
        raise AssertionError("computed before refusing")

    monkeypatch.setattr(loop, "init_state", compile)
    with pytest.raises(ConfigError, match=message):
        make_trainer(replace(config, **changes))


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_is_that_of_our_own_checkout(tmp_path):
    def git(*words):
        names = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        command = ["git", *names, *words]
        done = subprocess.run(
            command, cwd=tmp_path / "clone", capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    package = tmp_path / "clone" / "dcut_jax"
    installed = tmp_path / "clone" / "venv" / "dcut_jax"
    for directory in (package, installed):
        directory.mkdir(parents=True)
    assert versions(package).keys() == {"dcut_jax", "jax"}
    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "first")
    found = versions(package)
    assert (found["commit"], found["dirty"]) == (git("rev-parse", "HEAD"), False)
    assert versions(installed).keys() == {"dcut_jax", "jax"}
    (package / "new.py").write_text("")
    assert versions(package)["dirty"] is True


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
        (plain + "log_every = 0\n", "log_every must be a whole number of at least 1"),
        (plain + 'steps = "two"\n', "steps must be a whole number; found 'two'"),
        (plain + "widths = 3\n", "widths must be a list of whole numbers; found 3"),
        (plain + "widths = [3.0]\n", r"widths must be a list .* found \[3\.0\]"),
        (plain + "pace = 1\n", "pace must be true or false; found 1"),
        (plain + "lr = true\n", "lr must be a number; found True"),
        (plain + "lr = -1e-3\n", r"lr -0\.001 must be above 0"),
        (plain + "warmup = 2.0\n", r"warmup 2\.0 must be a share"),
        (plain + "width_weights = [0]\n", r"width_weights \[0\] must be .* not all 0"),
        (plain + "seed = -1\n", "seed -1 must be at least 0"),
        (plain + "steps = \n", "run.toml is not TOML"),
        (plain + "eval_fraction = 1.0\n", r"eval_fraction 1\.0 must lie in 0\.\.1"),
    ]:
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_config(path)


def test_the_shipped_config_is_valid():
    root = Path(__file__).parents[2]
    for path in sorted((root / "configs" / "train").glob("*.toml")):
        assert read_config(path).target
