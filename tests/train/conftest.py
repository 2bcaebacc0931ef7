"""The tiny target of the golden traces, texts for it, and a dataset of its features."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcut_jax.models.dense import forward_sequences
from dcut_jax.train.config import TrainConfig
from dcut_jax.train.data import DatasetWriter
from dcut_jax.weights.hf import load_hf

TAPS = (1, 2, 3)


class Progressions:
    """A tokenizer that reads "start stride" as the beginning of a progression."""

    eos_ids = (0, 100)

    def chat(self, messages):
        start, stride = map(int, messages[-1]["content"].split())
        return [(start + stride * i) % 100 for i in range(8)]


@pytest.fixture(scope="session")
def tokenizer():
    return Progressions()


@pytest.fixture(scope="session")
def golden():
    return Path(__file__).parents[1] / "golden" / "dflash"


@pytest.fixture(scope="session")
def target(golden):
    return load_hf(golden / "target", jnp.float32)


@pytest.fixture(scope="session")
def dataset(target, tmp_path_factory):
    """Arithmetic progressions of several lengths, with features."""
    cfg, params = target
    path = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    start_N, stride_N = rng.integers(0, 100, 100), rng.integers(1, 7, 100)
    token_NS = (start_N[:, None] + stride_N[:, None] * np.arange(48)) % 100
    valid_NS = jnp.ones(token_NS.shape, bool)
    forward = jax.jit(lambda t: forward_sequences(params, cfg, t, valid_NS, TAPS).taps)
    taps_NSC = np.asarray(forward(token_NS.astype(np.int32)))
    with DatasetWriter(path, {"taps": list(TAPS)}, channels=192) as writer:
        for token_S, taps_SC in zip(token_NS, taps_NSC, strict=True):
            size = int(rng.integers(24, 49))
            writer.append(token_S[:size], 8, taps_SC[:size])
    return path


@pytest.fixture
def config(golden, dataset, tmp_path):
    """A run of a few steps."""
    return TrainConfig(
        target=str(golden / "target"),
        data=str(dataset),
        out=str(tmp_path / "run"),
        mask_token=100,
        layers=1,
        target_layers=(1, 2, 3),
        block=8,
        docs=4,
        anchors=4,
        length=40,
        widths=(5,),
        gamma=4.0,
        shortlist=100,
        shortlist_frequent=8,
        compute_dtype="float32",
        steps=6,
        lr=2e-3,
        log_every=1,
        eval_every=6,
        eval_fraction=0.2,
        eval_docs=6,
        eval_anchors=2,
        save_every=2,
    )
