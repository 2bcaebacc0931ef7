"""Serving on a mesh of devices: the texts of one device."""

import importlib.util
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from dcut_jax.decode.placing import on_mesh
from dcut_jax.engine.engine import Engine
from dcut_jax.engine.policy import FixedPolicy
from dcut_jax.engine.requests import Request
from dcut_jax.mesh import make_placement

PROMPTS = [
    "ab",
    "go on",
    "a",
    "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18",
    "hi",
    "x",
]


def widen(pair):
    """`tests/engine/conftest.py`'s: as many heads as devices can share."""
    path = Path(__file__).parents[1] / "engine" / "conftest.py"
    spec = importlib.util.spec_from_file_location("engine_conftest", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.widen(pair)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "strategy"),
    [({"data": 4}, "dp"), ({"model": 4}, "tp"), ({"data": 2, "model": 2}, "dp+tp")],
)
def test_the_texts_are_those_of_one_device(
    serve, tiny, config, text, plain, sizes, strategy, compilations
):
    models = on_mesh(widen(tiny), make_placement(sizes, strategy))
    engine = Engine(models, replace(config, slots=4), FixedPolicy(3))
    live = serve(engine, text)
    found = {}

    def ask(i):
        body = {"prompt": PROMPTS[i], "max_tokens": 24, "ignore_eos": True}
        found[i] = live.post(temperature=0, **body)

    try:
        ask(0)  # JAX's own helpers compile once
        compilations.clear()
        threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(PROMPTS))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        live.settle()
    finally:
        live.stop()
    for i, prompt in enumerate(PROMPTS):
        want = plain(Request(tuple(text.encode(prompt)), 24))
        assert found[i].json()["choices"][0]["text"] == text.decode(want.tokens)
    assert compilations == []
    assert engine.paging.used == 0
