"""A server on a tiny trained pair, behind real HTTP on a free port."""

import asyncio
import gc
import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import httpx
import jax
import jax.numpy as jnp
import pytest
import uvicorn
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from dcut_jax.cost.table import CostTable
from dcut_jax.decode.compile import Compiler
from dcut_jax.decode.defer import CATCH_UPS
from dcut_jax.decode.steps import Models
from dcut_jax.engine.config import EngineConfig
from dcut_jax.engine.engine import Engine
from dcut_jax.engine.policy import ArPolicy, unmeasured
from dcut_jax.models.dense import head_VE
from dcut_jax.serve.app import Server, make_app
from dcut_jax.serve.protocol import Served
from dcut_jax.serve.scheduler import Limits, Scheduler
from dcut_jax.weights.dflash import load_drafter
from dcut_jax.weights.hf import load_hf
from dcut_jax.weights.tokenizer import TextTokenizer

GOLDEN = Path(__file__).parents[1] / "golden" / "dflash"
SLOTS, MAX_LENGTH = 3, 224
NAME = "tiny"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}|{% endfor %}assistant:"


def tokenizer():
    """Of 101 tokens: ASCII, the bytes of two other characters, a pair, and an end."""
    spelled = [chr(code) for code in range(0x21, 0x7F)] + ["Ġ"]
    bytes_ = ["ä", "½", "ł", "Ã"]  # bytes E4, BD, A0 and C3
    tokens = [*spelled, *bytes_, "ab"]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab, [("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    assert backend.get_vocab_size() == 101
    return TextTokenizer(backend, (100,), TEMPLATE, {}, "here")


@pytest.fixture(scope="session")
def text():
    return tokenizer()


@pytest.fixture(scope="session")
def tiny():
    target_cfg, target = load_hf(GOLDEN / "target", jnp.dtype("float32"))
    cfg, weights = load_drafter(GOLDEN / "full", jnp.dtype("float32"))
    params = {
        "target": target,
        "drafter": weights,
        "draft_embed_VE": target["embed_VE"],
        "draft_head_VE": head_VE(target),
    }
    return Models(target_cfg, cfg, params)


def dcut(shapes):
    """Plans, whole blocks and plain steps in turn: what a step costs is the same."""
    policy = replace(
        unmeasured(), factors=(2.0, 4.0), widths=(7,), probe_every=2, probe_share=1.0
    )
    B = shapes.slots
    verify = {
        (B, lay.rows, lay.width, 128): (1.0 + 0.06 * lay.rows,)
        for lay in policy.layouts(shapes)
    }
    table = CostTable(
        policy.table.fingerprint,
        draft={(B, w, 128): (1e-3,) for w in policy.ladder(shapes)},
        verify=verify,
        plan={(B,): (1e-3,)},
        catch_up={(B, steps): (1e-6,) for steps in CATCH_UPS},
        share={
            (B, lay.rows, lay.width, chunk, 128): (2.0 + 0.06 * lay.rows,)
            for lay in policy.shared(shapes)
            for chunk in shapes.chunks
        },
    )
    return replace(policy, table=table)


@pytest.fixture(scope="session")
def config():
    settings = {"sampling": True, "logprobs": True, "likeliest": 2}
    settings["shared_chunks"] = (32,)
    return EngineConfig(SLOTS, MAX_LENGTH, 1, **settings)


@pytest.fixture(scope="session")
def engine(tiny, config):
    """One for all servers of a session: it takes a while to compile."""
    return Engine(tiny, config, dcut(config.shapes(tiny)))


@pytest.fixture(scope="session")
def plain(tiny, config):
    """From requests to what plain decoding emits for them, one after the other."""
    models = Models(tiny.target, None, {"target": tiny.params["target"]})
    compiler = Compiler(models, "float32")
    engine = Engine(
        models, replace(config, shared_chunks=()), ArPolicy(), compiler=compiler
    )
    known = {}

    def decode(request):
        key = replace(request, halt=None, priority=1.0, tpot_ms=float("inf"))
        key = (key, getattr(request.halt, "strings", None))
        if key not in known:
            known[key] = engine.generate([request])[0]
        return known[key]

    return decode


class Live:
    """A server that runs in a thread of its own."""

    def __init__(self, engine, text, limits=None, on_step=None, **options):
        limits = limits or Limits()
        engine.reset()
        engine.records = []
        self.text = text
        self.engine = engine
        self.scheduler = Scheduler(engine, limits, on_step=on_step)
        plans = engine.steering is not None
        served = Served(NAME, text, MAX_LENGTH, True, limits.choices, 2, plans)
        self.served = served
        self.server = Server(served, self.scheduler, limits, **options)
        config = uvicorn.Config(
            make_app(self.server),
            port=0,
            log_level="warning",
            ws="none",
            timeout_keep_alive=600,  # the client must be the one that closes
        )
        self.uvicorn = uvicorn.Server(config)
        self._listening = config.bind_socket()
        port = self._listening.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        while not self.uvicorn.started:
            time.sleep(0.01)
        self.http = httpx.Client(base_url=self.url, timeout=120)

    def _run(self):
        self.loop = asyncio.new_event_loop()
        self.loop.run_until_complete(self.uvicorn.serve([self._listening]))
        self.loop.close()

    def call(self, coroutine):
        """Awaits something in the server's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(120)

    def post(self, path="/v1/completions", **body):
        body = {"model": NAME, **body}
        if "chat" in path:
            body = {"messages": [{"role": "user", "content": "hi"}], **body}
        else:
            body = {"prompt": "hi", **body}
        headers = {"content-type": "application/json"}
        return self.http.post(path, content=json.dumps(body), headers=headers)

    def settle(self):
        """Waits until nothing runs or waits; raises where something is stuck."""
        end = time.monotonic() + 120
        while True:
            scheduler = self.scheduler
            if not scheduler.busy and not self.server.busy:
                return
            assert time.monotonic() < end, (scheduler.running, scheduler.waiting)
            time.sleep(0.01)

    def forgets(self, kind):
        """Waits until no object of this kind is left."""
        for _ in range(200):
            gc.collect()
            left = sum(isinstance(o, kind) for o in gc.get_objects())
            if not left:
                return
            time.sleep(0.05)
        raise AssertionError(f"{left} are left of {kind}")

    def shown(self):
        """Waits until what is published is of a server at rest."""
        self.settle()
        since, end = time.time(), time.monotonic() + 120
        while self.scheduler.watch.snapshot.get("at", 0) <= since:
            assert time.monotonic() < end, "nothing is published"
            time.sleep(0.01)

    def stop(self):
        self.http.close()
        self.uvicorn.should_exit = True
        self._thread.join(60)
        self._listening.close()


@pytest.fixture(scope="session")
def serve():
    """Starts a server on an engine, which the caller stops."""
    return Live


@pytest.fixture
def start(engine, text):
    """Starts servers with options of their own, one at a time."""
    running = []

    def make(**options):
        assert not running, "the engine serves one at a time"
        running.append(Live(engine, text, **options))
        return running[0]

    yield make
    for live in running:
        live.stop()


@pytest.fixture
def live(start):
    return start()


@pytest.fixture(scope="session")
def helpers():
    return SimpleNamespace(NAME=NAME, SLOTS=SLOTS, MAX_LENGTH=MAX_LENGTH)


@pytest.fixture(scope="session")
def compilations():
    """Names of all that JAX has compiled since; clear it and look again."""
    names = []

    def listen(event, duration, **details):
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(details.get("fun_name"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    return names
