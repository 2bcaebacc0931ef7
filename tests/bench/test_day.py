"""The GPU day: its plan, its limits, what it writes, and all of it in small."""

import json
import os
import sys
from pathlib import Path

import pytest

from dcut_jax.bench import day
from dcut_jax.bench.day import Day, Stage
from dcut_jax.config import model_config_from_hf, read_config

ROOT = Path(__file__).parents[2]


def programs(tmp_path, **texts):
    """Modules to run as stages."""
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}


SLEEPS = """
import subprocess, sys, time
from pathlib import Path
Path(sys.argv[1]).write_text('{"so_far": 1}')
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
Path(sys.argv[1]).with_suffix(".pid").write_text(str(child.pid))
print("waiting", flush=True)
time.sleep(60)
"""


def test_a_bad_stage_is_recorded_and_the_others_go_on(tmp_path):
    environment = programs(
        tmp_path,
        stage_bad="raise SystemExit('out of memory, say')",
        stage_sleeps=SLEEPS,
        stage_mute="print('done')",
        stage_good="print('words')\nprint('{\"found\": 3}')",
    )
    late = tmp_path / "late.json"
    plan = [
        Stage("bad", ("stage_bad",), 30),
        Stage("late", ("stage_sleeps", str(late)), 5.0, result=late),
        Stage("mute", ("stage_mute",), 30),
        Stage("good", ("stage_good",), 30),
    ]
    said = []
    one = Day(tmp_path / "out", 60, environment)
    assert not one.run(plan, said.append)
    raw = json.loads((tmp_path / "out" / "day.json").read_text())
    bad, ended, mute, good = raw["stages"]
    assert bad["status"] == "failed"
    assert "out of memory, say" in bad["error"]
    assert ended["status"] == "out of time"
    assert ended["result"] == {"so_far": 1}
    assert "waiting" in ended["error"]
    assert mute["status"] == "failed"
    assert good["status"] == "ok"
    assert good["result"] == {"found": 3}
    assert "out of memory, say" in "".join(said)
    child = int(late.with_suffix(".pid").read_text())
    state = Path(f"/proc/{child}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_without_time_nothing_more_begins(tmp_path):
    plan = [Stage("first", ("none",), 30), Stage("second", ("none",), 30)]
    one = Day(tmp_path, day.RESERVE_S + 1)
    assert not one.run(plan, lambda text: None)
    assert [o.status for o in one.outcomes] == ["not begun"] * 2
    assert "were left" in one.outcomes[0].error


def test_what_is_needed_ends_the_day(tmp_path):
    environment = programs(tmp_path, stage_bad="raise SystemExit(1)")
    plan = [
        Stage("device", ("stage_bad",), 30, needed=True),
        Stage("other", ("stage_bad",), 30),
    ]
    one = Day(tmp_path, 60, environment)
    assert not one.run(plan, lambda text: None)
    assert [o.status for o in one.outcomes] == ["failed", "not begun"]


def test_an_earlier_days_result_is_not_taken_for_this_ones(tmp_path):
    old = tmp_path / "old.json"
    old.write_text('{"stale": true}')
    environment = programs(tmp_path, stage_mute="")
    done = day.run_stage(Stage("mute", ("stage_mute",), 30, old), 30, environment)
    assert (done.status, done.result) == ("failed", None)


def test_the_plan_of_a_gpu_fits_its_time_and_its_flags_are_known(tmp_path):
    """Every command is parsed by what it is for; nothing is loaded."""
    from dcut_jax.bench import __main__ as bench
    from dcut_jax.bench import step_times
    from pallas_kernels import bench as kernels

    sizes = day.full()
    for path in sizes.targets:
        model_config_from_hf(read_config(path), str(path))
    plan = day.stages(sizes, tmp_path)
    # The first of each kind is there even where every stage takes its limit.
    assert sum(stage.limit_s for stage in plan[:6]) <= 9 * 60 + 20
    parsers = {
        "dcut_jax.bench": bench.parse,
        "dcut_jax.bench.step_times": step_times.parser().parse_args,
        "pallas_kernels.bench": kernels.parser().parse_args,
        "dcut_jax.bench.day": day.parser().parse_args,
    }
    for some in (plan, day.stages(day.tiny(tmp_path), tmp_path)):
        parsed = [
            parsers[stage.command[0]](list(stage.command[1:]))
            for stage in some
            if stage.command[0] in parsers
        ]
        assert len(parsed) == len(some) - 1  # pytest's are its own
    batches = step_times.parser().get_default("batch_sizes")
    assert (min(batches), max(batches)) == (1, 256)


def test_another_device_is_refused(capsys):
    assert day.main(["--device", "gpu"]) == 1
    assert "expected a device of platform 'gpu'" in capsys.readouterr().out


def test_the_script_runs_the_day(tmp_path):
    """Found as it is, from elsewhere, with the environment that it is told."""
    import subprocess

    done = subprocess.run(
        [str(ROOT / "scripts" / "gpu_day.sh"), "--help"],
        env={**os.environ, "PYTHON": sys.executable},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "--tiny" in done.stdout


@pytest.mark.slow
def test_a_tiny_day(tmp_path):
    """All stages, as processes, on next to nothing.

    Not in every run: in one process on two busy cores its stages took 100 s of
    processor time, for they compile 110 programs.
    """
    pytest.importorskip("matplotlib")
    out = tmp_path / "day"
    assert day.main(["--tiny", "--out", str(out), "--minutes", "60"]) == 0
    raw = json.loads((out / "day.json").read_text())
    assert {s["status"] for s in raw["stages"]} == {"ok"}
    steps = [s["result"] for s in raw["stages"] if s["name"].startswith("steps")]
    kinds = {t["kind"] for t in steps[0]["times"]}
    assert kinds == {"draft", "verify", "plan", "catch_up"}
    assert all(t["roofline_ms"] > 0 for t in steps[0]["times"])
    benches = [s["result"] for s in raw["stages"] if s["name"].startswith("D-Cut")]
    assert benches
    for result in benches:
        assert result["synthetic"]["source"]
        assert not any(check["differences"] for check in result["checks"])
    assert (out / "steps-tiny-mixture.png").exists()
