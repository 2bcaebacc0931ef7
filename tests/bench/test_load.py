"""Load on a server: traces, what a client measures, and sums."""

import itertools
import json
import math
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from dcut_jax.bench.load import Load, Sample, replay, summarise
from dcut_jax.bench.serve import (
    cell,
    differences,
    parse,
    rates,
    render,
    serve_arms,
)

# What a server says that dies before the next chunk: whole events, and half of one.
WHOLE = b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'
BROKEN = {14: WHOLE, 15: WHOLE + WHOLE[:20], 16: b'data: {"choices": [{}]}\n\n'}


class Handler(BaseHTTPRequestHandler):
    """Streams as many pieces as a request asks for tokens."""

    running, most, lock = 0, 0, threading.Lock()

    def do_POST(self):
        with self.lock:
            type(self).running += 1
            type(self).most = max(self.most, self.running)
        length = int(self.headers["Content-Length"])
        body = json.loads(self.rfile.read(length))
        if body["max_tokens"] == 13:
            self.send_error(503)
        elif body["max_tokens"] in BROKEN:
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            said = BROKEN[body["max_tokens"]]
            self.wfile.write(b"%x\r\n%s\r\n" % (len(said), said))
        else:
            self.answer(body["max_tokens"])
        with self.lock:
            type(self).running -= 1

    def answer(self, tokens):
        self.send_response(200)
        self.end_headers()
        for _ in range(tokens):
            self.piece(choices=[{"delta": {"content": "a"}}])
            time.sleep(0.01)
        self.piece(choices=[], usage={"completion_tokens": tokens})
        self.wfile.write(b"data: [DONE]\n\n")

    def piece(self, **data):
        self.wfile.write(b"data: " + json.dumps(data).encode() + b"\n\n")
        self.wfile.flush()

    def log_message(self, *words):
        pass


@pytest.fixture
def url():
    Handler.running = Handler.most = 0
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def bodies(*tokens):
    return [("a" if i % 2 else "b", {"max_tokens": n}) for i, n in enumerate(tokens)]


def test_a_client_sees_tokens_times_and_failures(url):
    found = replay(url, bodies(5, 1, 13, 9), Load(concurrency=4), 0)
    assert [s.status for s in found] == [200, 200, 503, 200]
    assert [s.tokens for s in found] == [5, 1, 0, 9]
    assert [s.text for s in found] == ["aaaaa", "a", "", "a" * 9]
    assert found[0].tpot_s > 0
    assert math.isnan(found[1].tpot_s)
    whole = summarise(found, target_ms=1e6)
    assert (whole.requests, whole.failed, whole.tokens) == (4, 1, 15)
    assert whole.goodput == whole.throughput > 0
    assert summarise(found, target_ms=0.001).goodput < whole.throughput


def test_an_answer_that_breaks_off_is_a_failure_and_the_rest_goes_on(url):
    found = replay(url, bodies(14, 2, 15, 3, 16, 1), Load(concurrency=1), 0)
    assert [s.status for s in found] == [0, 200, 0, 200, 0, 200]
    assert [s.text for s in found] == ["a", "aa", "a", "aaa", "", "a"]


def test_an_end_token_takes_time_though_it_has_no_text(url, monkeypatch):
    ticks = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: next(ticks))
    monkeypatch.setattr("dcut_jax.bench.load.time", clock)

    def answer(self, tokens):
        self.send_response(200)
        self.end_headers()
        self.piece(choices=[{"delta": {"content": "a"}}])
        self.piece(choices=[{"delta": {}, "finish_reason": "stop"}])
        self.piece(choices=[], usage={"completion_tokens": 2})
        self.wfile.write(b"data: [DONE]\n\n")

    monkeypatch.setattr(Handler, "answer", answer)
    [one] = replay(url, bodies(2), Load(concurrency=1), 0)
    assert one.tpot_s == 1.0


def test_time_per_token_is_between_the_first_piece_and_the_last(url, monkeypatch):
    ticks = itertools.count()  # a second for each look at the clock
    clock = SimpleNamespace(perf_counter=lambda: next(ticks))
    monkeypatch.setattr("dcut_jax.bench.load.time", clock)
    [one] = replay(url, bodies(5), Load(concurrency=1), 0)
    assert one.tpot_s == 1.0


def test_so_many_are_under_way_at_a_time(url):
    replay(url, bodies(*[3] * 12), Load(concurrency=3), 0)
    assert Handler.most == 3


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://127.0.0.1:8x"])
def test_a_server_that_is_not_there(url):
    found = replay(url, bodies(3, 4), Load(concurrency=1), 0)
    assert [s.status for s in found] == [0, 0]


def test_texts_are_held_to_those_of_the_first_arm_whoever_ran_first():
    texts = {
        "fixed-7": [(0, "a"), (1, "wrong"), (2, "c")],
        "ar": [(0, "a"), (1, "b"), (0, "a")],
        "dcut": [(0, "a"), (1, "b")],
    }
    assert differences(texts, "ar") == {"fixed-7": 1}
    texts["ar"].append((1, "of another load"))
    assert differences(texts, "ar") == {"fixed-7": 1, "ar": 1}


class TestArrivals:
    def test_the_same_seed_is_the_same_trace(self):
        load = Load(rate=5.0)
        assert load.arrivals(50, 1) == load.arrivals(50, 1) != load.arrivals(50, 2)

    @pytest.mark.parametrize("burst", [1, 4])
    def test_the_rate_is_what_it_says(self, burst):
        times = Load(rate=5.0, burst=burst).arrivals(4000, 3)
        assert times == sorted(times)
        assert len(times) / times[-1] == pytest.approx(5, rel=0.15)
        assert len(set(times)) == 4000 // burst

    @pytest.mark.parametrize("bad", [{}, {"concurrency": 1, "rate": 1.0}])
    def test_neither_or_both(self, bad):
        with pytest.raises(ValueError, match="concurrency or a rate"):
            Load(**bad)


def test_percentiles_and_classes():
    samples = [Sample("a", 200, 11, 0.1 * i, 0.01 * i, 2.0, "") for i in range(1, 101)]
    whole = summarise(samples, target_ms=500)
    assert whole.tpot_ms == pytest.approx((505, 901, 990.1))
    assert whole.throughput == pytest.approx(11 * 100 / 2)
    assert whole.goodput == pytest.approx(11 * 50 / 2)
    one = summarise(samples[:10], None, seconds=2.0)
    assert one.throughput == pytest.approx(11 * 10 / 2)
    assert math.isnan(one.goodput)


def test_the_table_has_every_arm_and_load():
    loads = [Load(concurrency=2), Load(rate=0.5, burst=3)]
    cells = [
        cell(arm, load, r, [Sample("a", 200, tokens, 0.1, 0.02, 2.0, "")], 50)
        for arm, tokens in (("ar", 10), ("dcut", 15))
        for load in loads
        for r in range(3)
    ]
    table = render(cells, loads, ["ar", "dcut"], 50)
    assert table.count("1.50") == 2
    assert "concurrency 2" in table
    assert "0.5/s by 3" in table
    assert "class" not in table


def test_classes_have_a_table_of_their_own():
    load = Load(concurrency=2)
    samples = [
        Sample(kind, 200, n, 0.1, 0.02, 2.0, "") for kind, n in (("a", 9), ("b", 4))
    ]
    cells = [cell("ar", load, 0, samples, None)]
    rows = render(cells, [load], ["ar"], None).splitlines()
    parts = [[part.strip() for part in row.split("│")] for row in rows]
    rate = {row[2]: row[4] for row in parts if len(row) > 4 and row[3] == "ar"}
    assert rate == {"a": "4.5", "b": "2.0"}


class TestFlags:
    def test_arms(self):
        assert serve_arms("ar,fixed-3") == ("ar", "fixed-3")
        with pytest.raises(Exception, match="unknown"):
            serve_arms("fast")
        with pytest.raises(Exception, match="above 0"):
            rates("0")

    @pytest.mark.parametrize(
        "words",
        [
            ["--url", "http://a"],
            ["--url", "http://a", "--model", "m", "--slots", "4"],
            ["--seed", "1"],
            ["--burst", "2"],
            ["--rates", "1", "--conc", "2"],
        ],
    )
    def test_what_does_not_go_together(self, words, capsys):
        with pytest.raises(SystemExit):
            parse(words)
        assert "error" in capsys.readouterr().err
