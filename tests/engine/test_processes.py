"""Two processes of four devices each decode what one device does."""

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
GOLDEN = HERE.parent / "golden" / "dflash"
PAIR = [
    *("--target", str(GOLDEN / "target"), "--drafter", str(GOLDEN / "full")),
    *("--draft-dtype", "float32"),
]
PROMPTS = ["3 4 5 6", "7 9 11", "20 23 26 29 32", "50 51 52", "8 6", "90 80 70 60"]
MESH = ["--mesh", "data=2,model=4", "--strategy", "dp+tp"]
DEADLINE_S = 60


def start(records, *args):
    return subprocess.Popen(
        [sys.executable, str(HERE / "process.py"), str(records), *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def start_two(tmp_path, *args):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    flags = ["--coordinator", f"127.0.0.1:{port}", "--processes", "2"]
    return [
        start(tmp_path / f"records-{i}", *args, *MESH, *flags, "--process-id", str(i))
        for i in range(2)
    ]


def printed(output):
    """Without what the collectives' library says of its connections."""
    return [line for line in output.splitlines() if "peer ranks" not in line]


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in PROMPTS))
    return ["--prompts", str(path)]


def test_the_text_of_two_is_that_of_one(tmp_path, prompts):
    def flags(name):
        where = ["--cost-dir", str(tmp_path / name)]
        return ["generate", *PAIR, *prompts, *where, "--max-new-tokens", "48"]

    alone = start(tmp_path / "alone", *flags("one"), "--batch-size", "4")
    want, errors = alone.communicate(timeout=900)
    assert alone.returncode == 0, errors
    running = start_two(tmp_path, *flags("two"), "--batch-size", "4")
    (first, told), (second, errors) = [p.communicate(timeout=900) for p in running]
    assert [p.returncode for p in running] == [0, 0], told + errors
    assert printed(first) == printed(want)
    assert printed(second) == []
    # What each knew of every step, plans and their gains to the last bit.
    lines = [(tmp_path / f"records-{i}").read_text() for i in range(2)]
    assert lines[0] == lines[1]
    assert "Decision" in lines[0]
    # One table, measured together and written by the first.
    [table] = (tmp_path / "two").iterdir()
    found = json.loads(table.read_text())["fingerprint"]
    assert (found["device_count"], found["strategy"]) == (8, "dp+tp")


def test_the_bench_of_two_reports_once(tmp_path, prompts):
    flags = [
        *("bench", *PAIR, *prompts, "--batch-sizes", "4", "--max-new-tokens", "12"),
        *("--arms", "ar,fixed-7", "--rounds", "1", "--no-plot"),
        *("--out", str(tmp_path / "out")),
    ]
    running = start_two(tmp_path, *flags)
    (first, told), (second, errors) = [p.communicate(timeout=900) for p in running]
    assert [p.returncode for p in running] == [0, 0], told + errors
    result = json.loads(first.splitlines()[-1])
    assert result["machine"]["mesh"] == {"data": 2, "model": 4}
    assert result["machine"]["processes"] == 2
    assert [c["differences"] for c in result["checks"]] == [[], []]
    assert printed(second) == []


@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_dies_ends_the_other(tmp_path, prompts, victim):
    flags = ["generate", *PAIR, *prompts, "--mode", "fixed", "--width", "7"]
    running = start_two(
        tmp_path, *flags, "--batch-size", "2", "--max-new-tokens", "400"
    )
    records = tmp_path / "records-0"
    for _ in range(900):
        if records.exists() or any(p.poll() is not None for p in running):
            break
        time.sleep(0.3)
    assert records.exists(), [p.communicate()[1] for p in running]
    running[victim].send_signal(signal.SIGKILL)
    since = time.monotonic()
    _, errors = running[1 - victim].communicate(timeout=2 * DEADLINE_S)
    assert time.monotonic() - since < DEADLINE_S
    assert running[1 - victim].returncode not in (0, None)
    assert "another" in errors or "another task died" in errors, errors
    running[victim].communicate()
