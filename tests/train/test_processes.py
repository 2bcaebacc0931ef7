"""Two processes of four devices each train what one device trains."""

import json
import socket
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from dcut_jax.train.checkpoints import checkpoints

pytestmark = pytest.mark.slow

PROCESS = """
import os, sys
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"
from dcut_jax.train.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def write(cfg, path):
    """A config as a TOML file; JSON's lists, numbers and strings are TOML's too."""
    lines = []
    for key, value in asdict(cfg).items():
        text = json.dumps(list(value) if isinstance(value, tuple) else value)
        lines.append(f"{key} = {text}")
    path.write_text("\n".join(lines))
    return path


def losses(out):
    text = (Path(out) / "log.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def test_two_processes_train_what_one_does(config, tmp_path):
    # The tiny target's 101 words divide over one device only, so parameters are cut
    # over `data` alone.
    whole = replace(config, docs=8, eval_every=100, steps=4, save_every=2)
    alone = write(replace(whole, out=str(tmp_path / "alone")), tmp_path / "alone.toml")
    many = replace(whole, out=str(tmp_path / "many"), mesh_data=8)
    both = write(many, tmp_path / "many.toml")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, "-c", PROCESS, "run"]
    one = subprocess.run([*command, str(alone)], check=False, capture_output=True)
    assert one.returncode == 0, one.stderr.decode()
    flags = ["--coordinator", f"127.0.0.1:{port}", "--processes", "2"]
    running = [
        subprocess.Popen(
            [*command, str(both), *flags, "--process-id", str(i)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for i in range(2)
    ]
    for process in running:
        _, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors.decode()
    np.testing.assert_allclose(losses(many.out), losses(tmp_path / "alone"), rtol=1e-4)
    with checkpoints(Path(many.out)) as saved:
        assert saved.latest_step() == 4
