"""The page in a real browser, driven by its own WebDriver."""

import base64
import contextlib
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

import httpx
import pytest

pytestmark = pytest.mark.slow
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"),
    *("--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--window-size=1280,1500"),
)
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # by the WebDriver standard


class Browser:
    def __init__(self, http):
        self.http = http

    def do(self, path, **body):
        got = self.http.post(path, json=body)
        value = got.json()["value"]
        assert got.status_code == 200, value
        return value

    def run(self, script):
        return self.do("execute/sync", script=script, args=[])

    def click(self, css):
        found = self.do("element", using="css selector", value=css)
        self.do(f"element/{found[ELEMENT]}/click")

    def until(self, script, seconds=60):
        end = time.monotonic() + seconds
        while not (found := self.run(script)):
            assert time.monotonic() < end, self.run("return document.body.innerText")
            time.sleep(0.1)
        return found

    def screenshot(self, path):
        image = self.http.get("screenshot").json()["value"]
        Path(path).write_bytes(base64.b64decode(image))


@pytest.fixture
def browser(tmp_path):
    driver = shutil.which("chromedriver")
    if driver is None or shutil.which("chromium") is None:
        pytest.skip("needs chromium and chromedriver")
    with contextlib.closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [driver, f"--port={port}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        url = f"http://127.0.0.1:{port}"
        with httpx.Client(timeout=120, trust_env=False) as http:
            for _ in range(300):
                with contextlib.suppress(httpx.ConnectError):
                    if http.get(f"{url}/status").json()["value"]["ready"]:
                        break
                time.sleep(0.1)
            options = {
                "binary": shutil.which("chromium"),
                "args": [*FLAGS, f"--user-data-dir={tmp_path}"],
            }
            wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {}}
            wanted["goog:loggingPrefs"] = {"browser": "ALL"}
            body = {"capabilities": {"alwaysMatch": wanted}}
            got = http.post(f"{url}/session", json=body).json()["value"]
            session = f"{url}/session/{got['sessionId']}/"
            http.base_url = session
            yield Browser(http)
            http.delete(session.rstrip("/"))
        process.terminate()


def test_a_person_can_read_whether_it_helps_and_how_tokens_came(
    start, browser, tmp_path
):
    live = start()
    browser.do("url", url=live.url)
    browser.until("return document.getElementById('model').textContent === 'tiny'")
    assert "no step yet" in browser.run("return document.body.innerText")
    browser.run("document.getElementById('prompt').value = 'abab'")
    browser.click("#ask button")
    browser.until("return /bonus/.test(document.getElementById('count').textContent)")
    for _ in range(6):
        live.post(max_tokens=150, temperature=0, ignore_eos=True)
    said = browser.until(
        "const s = document.getElementById('said').textContent;"
        "return /helps|plainly/.test(s) && s"
    )
    outlook = live.scheduler.watch.snapshot
    assert ("plainly" in said) == (outlook["best"]["width"] == 0)
    browser.until("return document.querySelectorAll('#text .draft').length > 0")
    text = browser.run("return document.getElementById('text').textContent")
    body = {"messages": [{"role": "user", "content": "abab"}], "temperature": 0}
    want = live.post("/v1/chat/completions", max_tokens=64, **body).json()
    assert text == want["choices"][0]["message"]["content"]
    browser.until("return document.querySelectorAll('#tiers rect').length > 1")
    assert browser.run("return document.querySelectorAll('#costs tr').length") >= 3
    assert browser.run("return document.querySelectorAll('#survival rect').length") == 7
    log = browser.do("se/log", type="browser")
    assert not [entry for entry in log if entry["level"] == "SEVERE"], log
    picture = Path(os.environ.get("SCREENSHOTS", tmp_path)) / "page.png"
    browser.screenshot(picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
