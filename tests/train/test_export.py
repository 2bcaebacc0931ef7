"""From a run to published files and back, and what the files alone decode."""

import dataclasses
import json
import math
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcut_jax.bench.records import NO_TOKEN
from dcut_jax.config import ConfigError
from dcut_jax.decode.compile import Compiler
from dcut_jax.engine.engine import Engine
from dcut_jax.engine.load import drafter_directory
from dcut_jax.models.dense import head_VE
from dcut_jax.train import check as check_module
from dcut_jax.train.__main__ import main
from dcut_jax.train.check import PROMPTS, check
from dcut_jax.train.checkpoints import Checkpoints
from dcut_jax.train.data import Dataset
from dcut_jax.train.loop import Trainer, make_trainer
from dcut_jax.weights.dflash import load_drafter, save_drafter
from dcut_jax.weights.errors import CheckpointError
from dcut_jax.weights.hf import save_hf
from dcut_jax.weights.load import SMOLLM2

# What the trained drafter of the golden traces commits a step, at least.
FLOOR = 5.0


class Progressions:
    """A tokenizer to which every conversation is the beginning of a progression."""

    eos_ids = (100,)

    def chat(self, messages):
        start, stride = len(messages[-1]["content"]), len(messages[0]["content"]) % 5
        return [(start + (stride + 1) * i) % 100 for i in range(8)]


@pytest.fixture(scope="module")
def compilers():
    """One for all checks: drafters of one config compile once."""
    return {}


@pytest.fixture(autouse=True)
def share_compilers(compilers, monkeypatch):
    def compiler(models, cache_dtype):
        key = models.target, models.drafter, cache_dtype
        if key not in compilers:
            compilers[key] = Compiler(models, cache_dtype)
        return compilers[key]

    monkeypatch.setattr(check_module, "Compiler", compiler)


# The drafter it makes has the config of `full`, so that checks of both compile once.
@pytest.fixture
def config(config):
    return replace(config, layers=3, eval_fraction=0.0)


@pytest.fixture
def new_run(target):
    """Makes a run that has taken no step; returns its directory."""

    def make(config, **changes):
        config = replace(config, **changes)
        cfg, params = target
        data = Dataset.open(config.data)
        trainer = Trainer(config, cfg, params["embed_VE"], head_VE(params), data)
        out = Path(config.out)
        with Checkpoints(out, write=True) as saved:
            saved.save(trainer.state)
        (out / "config.json").write_text(json.dumps(asdict(config)))
        return str(out)

    return make


@pytest.fixture
def with_text(monkeypatch):
    """Gives the golden target a tokenizer."""
    load = check_module.load_pair

    def load_pair(*names):
        pair = load(*names)
        target = replace(pair.target, tokenizer=Progressions())
        return replace(pair, target=target)

    monkeypatch.setattr(check_module, "load_pair", load_pair)


@pytest.fixture
def change_text(monkeypatch):
    """Alters what an engine with a drafter says, as a broken decoder would."""

    def install(change):
        generate = Engine.generate

        def altered(self, *args, **options):
            completions = generate(self, *args, **options)
            if self.models.drafter is not None:
                change(completions)
            return completions

        monkeypatch.setattr(Engine, "generate", altered)

    return install


def files(directory):
    names = ("config.json", "model.safetensors")
    return [(Path(directory) / name).read_bytes() for name in names]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["full", "swa"])
def test_out_and_back_is_the_same_to_the_bit(golden, tmp_path, name, dtype):
    cfg, params = load_drafter(golden / name, jnp.float32)
    # More bits than bfloat16 holds, and what rounding may get wrong: zeros of either
    # sign, denormals of bfloat16, halves between two neighbours.
    key = jax.random.key(0)
    params = jax.tree.map(lambda x: x * (1 + 0.1 * jax.random.uniform(key)), params)
    odd = jnp.array([0.0, -0.0, 1e-40, -1e-40, 1 + 2**-8, 1 + 3 * 2**-8])
    params["norm_E"] = params["norm_E"].at[: len(odd)].set(odd)
    first, second = tmp_path / "first", tmp_path / "second"
    save_drafter(first, cfg, params, jnp.bfloat16)
    again, read = load_drafter(first, jnp.dtype(dtype))
    assert again == cfg
    save_drafter(second, again, read, jnp.bfloat16)
    assert files(first) == files(second)
    rounded = np.asarray(params["norm_E"]).astype(jnp.bfloat16)
    np.testing.assert_array_equal(
        np.asarray(read["norm_E"]).astype(jnp.bfloat16).view(np.uint16),
        rounded.view(np.uint16),
    )


def test_a_run_begun_from_an_export_exports_the_same_files(config, new_run, tmp_path):
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    assert main(["export", new_run(config), first]) == 0
    begun = new_run(config, out=str(tmp_path / "begun"), init=first, seed=1)
    assert main(["export", begun, second]) == 0
    assert files(first) == files(second)


@pytest.mark.slow
def test_a_target_that_has_moved_is_named(config, new_run, golden, tmp_path, capsys):
    shutil.copytree(golden / "target", tmp_path / "moved")
    run = new_run(config)
    stored = Path(run) / "config.json"
    gone = json.loads(stored.read_text()) | {"target": str(tmp_path / "gone")}
    stored.write_text(json.dumps(gone))
    out = str(tmp_path / "drafter")
    with pytest.raises(ValueError, match=r"gone.*found nothing"):
        main(["export", run, out])
    moved = ["--target", str(tmp_path / "moved")]
    assert main(["export", run, out, "--check", *moved]) == 0
    manifest = json.loads((tmp_path / "drafter" / "manifest.json").read_text())
    assert manifest["target"]["name"] == "moved"
    shown = capsys.readouterr().out
    assert f"wrote {out}, step 0\n" in shown
    # Random parameters: hardly a draft is accepted, and the text is right all the same.
    assert f"fixed 7: text equals AR: {PROMPTS} prompts, 640 tokens" in shown
    assert f"0 of {PROMPTS} texts differ, mean accepted length 1." in shown
    assert "random token ids: moved has no tokenizer" in shown


def test_another_target_than_the_runs_is_refused(config, new_run, target, tmp_path):
    cfg, params = target
    halved = jax.tree.map(lambda x: x, params)
    for layer in halved["layers"]:
        for name in ("gate_EF", "up_EF"):
            layer[name] = layer[name][:, :64]
        layer["down_FE"] = layer["down_FE"][:64]
    save_hf(tmp_path / "other", replace(cfg, mlp=64), halved)
    other = ["--target", str(tmp_path / "other")]
    message = r"expected the target of .*run, which names '.*target'; with '.*other' no"
    with pytest.raises(CheckpointError, match=message):
        main(["export", new_run(config), str(tmp_path / "drafter"), *other])


def test_another_target_of_the_same_shape_is_refused(config, target, tmp_path):
    cfg, params = target
    other = tmp_path / "other"
    save_hf(other, cfg, params | {"norm_E": params["norm_E"] * 2})
    make_trainer(replace(config, steps=1)).run()
    with pytest.raises(CheckpointError, match="expected its target target .*und other"):
        make_trainer(replace(config, steps=1, target=str(other)))
    run, out = config.out, tmp_path / "drafter"
    with pytest.raises(CheckpointError, match="expected its target target .*und other"):
        main(["export", run, str(out), "--target", str(other)])
    assert not out.exists()
    assert main(["export", run, str(out)]) == 0
    with pytest.raises(ConfigError, match="which it was trained for, found other"):
        check(out, str(other))
    # A run of a version that did not store it.
    (Path(run) / "target.json").unlink()
    assert main(["export", run, str(out), "--target", str(other)]) == 0


def test_exported_files_decode_alone(golden, tmp_path, with_text):
    cfg, params = load_drafter(golden / "full", jnp.float32)
    save_drafter(tmp_path, cfg, params, jnp.bfloat16)
    done = []
    found = check(tmp_path, str(golden / "target"), on_progress=done.append)
    assert found.texts.differences == ()
    assert not found.wrong
    assert found.texts.prompts == PROMPTS
    assert FLOOR < found.mean_accepted_length < cfg.block
    assert found.prompts == "10 prompts of the default mix"
    assert done == sorted(done)
    assert done[-1] == 2 * PROMPTS
    # Another drafter's files: the same texts in more steps.
    params["fc_CE"] = params["fc_CE"] * -1
    save_drafter(tmp_path, cfg, params, jnp.bfloat16)
    other = check(tmp_path, str(golden / "target"))
    assert not other.wrong
    assert other.texts.tokens == found.texts.tokens
    assert other.mean_accepted_length < 2


def test_a_text_that_is_not_the_targets_is_an_error(golden, change_text, capsys):
    def change(completions):
        completions[3].tokens[5] = (completions[3].tokens[5] + 1) % 100
        del completions[7].tokens[60:]

    change_text(change)
    files = [str(golden / "full"), "--target", str(golden / "target")]
    assert main(["check", *files]) == 1
    shown = capsys.readouterr()
    assert "fixed 7: 2 texts differ from AR: 10 prompts, 636 tokens" in shown.out
    assert "prompt 3, position 5, batch size 10: expected token" in shown.out
    assert "prompt 7, position 60, " in shown.out
    assert "found the end of the text" in shown.out
    assert "2 of 10 texts differ, mean accepted length" in shown.out
    assert "error: expected the text of AR for every prompt, found 2" in shown.err


@pytest.mark.parametrize(("gap", "wrong"), [(5e-5, False), (2e-4, True)])
def test_a_near_tie_is_shown_and_excused(
    golden, change_text, monkeypatch, capsys, gap, wrong
):
    def change(completions):
        completions[0].tokens[9] = (completions[0].tokens[9] + 1) % 100

    change_text(change)
    monkeypatch.setattr(check_module, "logit_gap", lambda *_: gap)
    files = [str(golden / "full"), "--target", str(golden / "target")]
    assert main(["check", *files]) == wrong
    shown = capsys.readouterr()
    assert "1 of 10 texts differ" in shown.out
    assert f"logit gap {gap:.2g}" in shown.out
    assert ("error: expected the text of AR" in shown.err) == wrong


def test_texts_that_end_at_once_have_no_accepted_length(golden, monkeypatch):
    monkeypatch.setattr(check_module, "NEW_TOKENS", 1)
    found = check(golden / "full", str(golden / "target"))
    assert math.isnan(found.mean_accepted_length)
    assert not found.wrong


def test_what_is_no_drafter_or_another_targets_is_refused(golden, tmp_path):
    with pytest.raises(ValueError, match="a DFlash drafter has config.json"):
        check(tmp_path, str(golden / "target"))
    cfg, params = load_drafter(golden / "full", jnp.float32)
    save_drafter(
        tmp_path, dataclasses.replace(cfg, target_depth=9), params, jnp.bfloat16
    )
    with pytest.raises(ValueError, match=r"another target.*layers of the target"):
        check(tmp_path, str(golden / "target"))


@pytest.mark.slow
def test_the_shipped_drafter_passes():
    directory = drafter_directory(SMOLLM2, None)
    found = check(directory, SMOLLM2)
    print(found)
    assert not found.wrong
    assert all(d.found != NO_TOKEN for d in found.texts.differences)
    assert found.mean_accepted_length > 1.5  # 1.67 as shipped
