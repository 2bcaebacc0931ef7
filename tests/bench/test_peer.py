"""The peer: which device it takes, where its texts end, and that they are AR's."""

from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from dcut_jax.bench.peer import TransformersPeer, choose_device, ended
from dcut_jax.bench.records import PEER
from dcut_jax.bench.runner import Texts
from dcut_jax.decode.steps import Models
from dcut_jax.engine.config import EngineConfig
from dcut_jax.engine.engine import Engine
from dcut_jax.engine.policy import ArPolicy
from dcut_jax.engine.requests import Request
from dcut_jax.weights.load import load_target

TARGET = Path(__file__).parents[1] / "golden" / "dflash" / "target"


def torch(cuda):
    found = SimpleNamespace(is_available=lambda: cuda)
    return SimpleNamespace(cuda=found, __version__="2.99")


class TestChooseDevice:
    def test_the_kind_that_jax_runs_on(self):
        assert choose_device("cpu", torch(cuda=True)) == "cpu"
        assert choose_device("gpu", torch(cuda=True)) == "cuda"

    @pytest.mark.parametrize(("platform", "cuda"), [("gpu", False), ("tpu", True)])
    def test_no_other(self, platform, cuda):
        with pytest.raises(ValueError, match=f"runs on {platform}; torch 2.99 finds"):
            choose_device(platform, torch(cuda))


@pytest.mark.parametrize(
    ("tokens", "want"),
    [
        ([5, 6, 7], ([5, 6, 7], False)),
        ([5, 6, 7, 8], ([5, 6, 7, 8], True)),
        ([5, 6, 7, 8, 0], ([5, 6, 7, 8], True)),
        ([5, 0, 7], ([5, 0], True)),
    ],
)
def test_a_text_ends_where_its_request_says(tokens, want):
    assert ended(tokens, 4, (0,)) == want


@pytest.mark.parity
def test_its_text_is_ar_text():
    target = load_target(TARGET, jnp.float32)
    prompts = [[(s + i) % 100 for i in range(4 + s)] for s in (3, 9, 20)]
    requests = [Request(tuple(p), 8) for p in prompts]
    models = Models(target.cfg, None, {"target": target.params})
    engine = Engine(models, EngineConfig(2, 64), ArPolicy())
    texts = Texts(engine.generate(requests))
    peer = TransformersPeer(target, requests)
    for round in range(2):
        cell = peer.run_cell(2, texts, round=round, tokens_per_request=5)
        assert (cell.arm, cell.round, cell.tokens, cell.steps) == (PEER, round, 10, 5)
        assert cell.seconds > 0
    [check] = texts.results(lambda d: 0.0)
    assert (check.arm, check.prompts, check.tokens) == (PEER, 3, 3 * 7)
    assert check.differences == ()
