"""Ahead-of-time compiling: the command's parts, on devices that are here."""

import json
import math
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from dcut_jax import aot
from dcut_jax.config import ConfigError, ModelConfig, RopeConfig
from dcut_jax.models.dense import specs

TINY = ModelConfig(
    vocab=64,
    embed=16,
    mlp=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    rope=RopeConfig(theta=1e4),
    norm_eps=1e-6,
    max_position=128,
    tied=False,
)
TARGETS = Path(__file__).parents[1] / "configs" / "targets"
HERE = aot.Target("cpu x2", 2, jax.devices)


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(aot, "SMOLLM2", TINY)
    monkeypatch.setattr(aot, "POSITIONS", 128)
    monkeypatch.setattr(aot, "DRAFT_LAYERS", 1)


@pytest.mark.slow
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="needs two devices")
def test_a_whole_step_compiles_from_declared_parameters_over_a_mesh(tiny):
    rows = [
        aot.compiled_row(HERE.name, program)
        for program in aot.step_programs(HERE, "SmolLM2-135M", slots=2)
    ]
    assert [r.error for r in rows] == [""] * 6
    assert [r.program.split(": ")[1] for r in rows] == [
        "draft 15",
        "decide",
        "verify anchors",
        "verify 32 rows",
        "commit 32 rows",
        "prefill 128",
    ]
    verify = rows[3]
    # In bfloat16. Each of two devices holds half of what is cut, and all of the rest.
    sizes = [math.prod(spec.shape) for spec in jax.tree.leaves(specs(TINY))]
    cache = 2 * 2 * 2 * 2 * 8 * 128 * 2
    assert sum(sizes) + cache / 2 < verify.arguments_bytes < 2 * sum(sizes) + cache
    assert verify.temporary_bytes > 0
    assert all(r.seconds > 0 for r in rows)


def test_targets_come_from_files_of_sizes():
    models = aot.models_of(str(TARGETS / "qwen3-8b.toml"))
    assert (models.target.layers, models.target.vocab) == (36, 151936)
    assert models.drafter.target_layers == (1, 9, 17, 25, 33)  # the published drafter's
    mixture = aot.models_of(str(TARGETS / "qwen3-30b-a3b.toml"))
    assert mixture.target.experts.count == 128
    with pytest.raises(ConfigError, match="nowhere.toml"):
        aot.models_of("nowhere.toml")


def test_what_a_compiler_refuses_is_a_row_of_the_table():
    def build():
        raise ValueError("no room |\n for this")

    row = aot.compiled_row("a chip", aot.Program("a program", build))
    assert row.error == "no room | for this"
    assert "refused: no room" in aot.markdown([row])


def test_numbers_are_those_of_the_program():
    x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    matrices = jax.jit(lambda a, b: a @ b).lower(x, x)
    row = aot.compiled_row("cpu", aot.Program("product", matrices.compile))
    assert row.arguments_bytes == 2 * 256 * 256 * 4
    assert row.outputs_bytes == 256 * 256 * 4
    assert row.flops == pytest.approx(2 * 256**3, rel=0.01)
    assert "0.03" in aot.markdown([row])


def test_the_command_writes_both_tables(tmp_path, monkeypatch, capsys):
    def refuse():
        raise ValueError("no")

    x = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    addition = aot.Program("an addition", jax.jit(lambda x: x + 1).lower(x).compile)
    programs = [addition, aot.Program("a refusal", refuse)]
    monkeypatch.setattr(aot, "programs_of", lambda *args: iter(programs))
    out = tmp_path / "tpu"
    command = ["tpu", "--targets", "v5e x1", "--out", str(out)]
    assert aot.main([*command, "--only", "addition"]) == 0
    assert "| v5e x1 | an addition | 1.0 | 0.0 |" in out.with_suffix(".md").read_text()
    [row] = json.loads(out.with_suffix(".json").read_text())["rows"]
    assert (row["target"], row["arguments_bytes"]) == ("v5e x1", 2**20)
    assert aot.main(command) == 1
    assert "a refusal: no" in capsys.readouterr().out
    assert len(json.loads(out.with_suffix(".json").read_text())["rows"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_the_whole_step_compiles_for_tpus_with_the_kernels(tiny, count):
    """By TPUs' own compiler, where it is installed: attention and plan, and a head."""
    pytest.importorskip("libtpu")
    devices = partial(aot.targets.tpu_devices, "v5e:2x2")
    target = aot.Target(f"v5e x{count}", count, devices)
    rows = [
        aot.compiled_row(target.name, program)
        for program in aot.step_programs(target, "SmolLM2-135M", slots=4)
    ]
    assert [(r.program, r.error) for r in rows if r.error] == []
    assert len(rows) == 8
