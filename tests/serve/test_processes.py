"""Two processes of four devices each serve as one; where one dies both end."""

import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from dcut_jax.engine.requests import Request

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
GOLDEN = HERE.parent / "golden" / "dflash"
PROMPTS = [
    "ab",
    "go on",
    "a",
    "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18",
    "hi",
    "x",
]


@pytest.fixture(params=["fixed", "dcut"])
def both(request, tmp_path):
    """Two processes, and the address of the first; `errors` of each are in a file."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    flags = ["--target", str(GOLDEN / "target"), "--drafter", str(GOLDEN / "full")]
    flags += ["--draft-dtype", "float32", "--mesh", "data=2,model=4"]
    flags += ["--strategy", "dp+tp", "--slots", "4", "--max-length", "224"]
    flags += ["--name", "tiny", "--port", "0", "--mode", request.param]
    if request.param == "dcut":
        flags += ["--cost-dir", str(tmp_path / "costs")]
    flags += ["--coordinator", f"127.0.0.1:{port}", "--processes", "2"]
    running = []
    for i in range(2):
        command = [sys.executable, str(HERE / "process.py"), *flags]
        with open(tmp_path / f"errors-{i}", "w") as errors:
            running.append(
                subprocess.Popen(
                    [*command, "--process-id", str(i)],
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                )
            )
    try:
        line = ""
        while "at http://" not in line:
            line = running[0].stdout.readline()
            assert line, said_by(tmp_path)
        yield running, line.rsplit(" ", 1)[1].strip()
    finally:
        for process in running:
            process.kill()
            process.communicate()


def said_by(folder):
    return [(folder / f"errors-{i}").read_text()[-2000:] for i in range(2)]


def ask(url, i, found, **more):
    body = {"model": "tiny", "prompt": PROMPTS[i], "max_tokens": 24}
    body |= {"temperature": 0, "ignore_eos": True} | more
    try:
        found[i] = httpx.post(f"{url}/v1/completions", json=body, timeout=300)
    except httpx.HTTPError as error:
        found[i] = error


def ask_all(url, count, **more):
    found = {}
    threads = [
        threading.Thread(target=ask, args=(url, i, found), kwargs=more)
        for i in range(count)
    ]
    for thread in threads:
        thread.start()
    return found, threads


def test_the_texts_are_those_of_one_and_an_end_is_an_end(both, text, plain, tmp_path):
    running, url = both
    found, threads = ask_all(url, len(PROMPTS))
    for thread in threads:
        thread.join(300)
    for i, prompt in enumerate(PROMPTS):
        want = plain(Request(tuple(text.encode(prompt)), 24))
        assert found[i].json()["choices"][0]["text"] == text.decode(want.tokens)
    gone = {}
    ask(url, 0, gone, deadline_ms=30, max_tokens=200)
    assert gone[0].status_code in (200, 408)
    running[0].send_signal(signal.SIGTERM)
    ends = [process.wait(120) for process in running]
    assert ends == [0, 0], said_by(tmp_path)


def test_a_worker_that_dies_drains_the_server(both, tmp_path):
    running, url = both
    found, threads = ask_all(url, 6, max_tokens=160)
    while "dcut_tokens_total" not in httpx.get(f"{url}/metrics").text:
        time.sleep(0.1)
    running[1].send_signal(signal.SIGKILL)
    since = time.monotonic()
    for thread in threads:
        thread.join(120)
    said = [f for f in found.values() if isinstance(f, httpx.Response)]
    # Whoever comes when it has ended finds nobody; all others are told.
    late = [f for f in found.values() if isinstance(f, httpx.ConnectError)]
    assert len(said) + len(late) == 6, found
    assert {f.status_code for f in said} <= {200, 500, 503}
    assert any(f.status_code == 500 for f in said)
    assert running[0].wait(60) == 1
    assert time.monotonic() - since < 90
    errors = said_by(tmp_path)[0]
    assert "process 1 of 2 has ended" in errors
