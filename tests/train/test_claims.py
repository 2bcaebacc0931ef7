"""What training options are for, shown at a small scale, with three seeds each."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcut_jax.models.dense import forward_sequences, head_VE
from dcut_jax.train.config import TrainConfig
from dcut_jax.train.data import Dataset, DatasetWriter
from dcut_jax.train.held_out import held_out_matches
from dcut_jax.train.loop import Trainer
from dcut_jax.train.step import new_state

pytestmark = pytest.mark.slow

PHRASES = np.arange(24).reshape(8, 3) + 10
DRAFTS = 6
TAPS = (1, 2, 3)
LADDER = (3, 7, 15)


def phrases(path, seed):
    """Phrases of three words, drawn at random; features say nothing of which is next.

    After the end of one, eight are equally likely: slots that do not know of each
    other agree on a phrase by chance alone.
    """
    rng = np.random.default_rng(seed)
    with DatasetWriter(path, {"taps": [1]}, channels=64) as writer:
        for _ in range(160):
            words = PHRASES[rng.integers(0, 8, 16)].ravel()
            writer.append(words, 3, rng.normal(size=(words.size, 64)))
    return Dataset.open(path)


def trained(trainer):
    while int(trainer.state.step) < trainer.cfg.steps:
        trainer.step()
    return trainer


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_markov_head_makes_slots_agree(target, tmp_path, seed):
    data = phrases(tmp_path, seed)
    cfg, params = target
    tables = params["embed_VE"], head_VE(params)
    plain = TrainConfig(
        **{"target": "", "data": "", "out": "", "mask_token": 100, "seed": seed},
        **{"layers": 1, "target_layers": (1,), "block": DRAFTS + 1, "gamma": 4.0},
        **{"docs": 8, "anchors": 8, "length": 48, "widths": (DRAFTS,)},
        **{"steps": 1000, "lr": 5e-3, "compute_dtype": "float32"},
        **{"eval_fraction": 0.2, "eval_docs": 32, "eval_anchors": 16},
    )
    alone = trained(Trainer(plain, cfg, *tables, data))
    before = alone.evaluate(DRAFTS)

    on_top = replace(plain, markov_rank=16, heads_only=True, steps=300, lr=1e-2)
    trainer = Trainer(on_top, cfg, *tables, data)
    trainer.state = new_state(trainer.state.params | alone.state.params, on_top)
    assert trainer.evaluate(DRAFTS) == before  # it begins without a say
    after = trained(trainer).evaluate(DRAFTS)

    print(seed, before, after)
    # Depth 1 has the anchor to go by already; deeper slots gain what they now know.
    assert abs(after["slots"][0] - before["slots"][0]) < 0.03
    assert all(
        a > b for a, b in zip(after["slots"][1:4], before["slots"][1:4], strict=True)
    )
    assert after["accepted"] > before["accepted"] + 0.15


def boilerplate(target, path, seed):
    """Eight phrases of two to five words, with the target's features.

    Half of the time the phrase that usually comes next does, else any: inside a phrase
    drafts are easy, and how far one gets depends on where a block begins.
    """
    cfg, params = target
    rng = np.random.default_rng(seed)
    phrase = [rng.integers(0, 100, rng.integers(2, 6)) for _ in range(8)]
    usual = rng.permutation(8)

    def text():
        now, words = int(rng.integers(8)), []
        while len(words) < 72:
            words += phrase[now].tolist()
            now = usual[now] if rng.random() < 0.5 else rng.integers(8)
        begin = rng.integers(0, 8)
        return words[begin : begin + 64]

    token_NS = np.array([text() for _ in range(1200)], np.int32)
    valid_NS = jnp.ones((100, 64), bool)
    features = jax.jit(
        lambda token_NS: forward_sequences(params, cfg, token_NS, valid_NS, TAPS).taps
    )
    with DatasetWriter(path, {"taps": list(TAPS)}, channels=192) as writer:
        for some in np.split(token_NS, 12):
            for words, taps in zip(some, np.asarray(features(some)), strict=True):
                writer.append(words, 8, taps)
    return Dataset.open(path)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_one_drafter_serves_all_widths(target, tmp_path, seed):
    """Thresholds as they were set before: 0.97 of a width's own, and above 1."""
    data = boilerplate(target, tmp_path, seed)
    cfg, params = target
    elastic = TrainConfig(
        **{"target": "", "data": "", "out": "", "mask_token": 100, "seed": seed},
        **{"layers": 1, "target_layers": TAPS, "block": 16, "gamma": 4.0},
        **{"docs": 8, "anchors": 8, "length": 64, "widths": LADDER},
        **{"width_weights": (1.0, 1.0, 1.0), "compute_dtype": "float32"},
        **{"steps": 1500, "lr": 3e-3},
        **{"eval_fraction": 0.15, "eval_docs": 160, "eval_anchors": 24},
    )

    def accepted(*widths):
        """By width, of a drafter trained at some widths; of the same blocks for all."""
        own = replace(elastic, widths=widths, width_weights=(1.0,) * len(widths))
        run = trained(Trainer(own, cfg, params["embed_VE"], head_VE(params), data))
        tables = run.embed_VE, run.head_VE, run.blocks, run.held_out, elastic
        found = {
            width: held_out_matches(run.state.best, run.drafter_cfg, *tables, width)
            for width in LADDER
        }
        print(seed, widths, {w: round(f["accepted"], 3) for w, f in found.items()})
        assert found[3]["blocks"] == found[15]["blocks"] > 2000
        return {width: f["accepted"] for width, f in found.items()}

    one, widest = accepted(*LADDER), accepted(15)
    for width in (3, 7):
        assert one[width] >= 0.97 * accepted(width)[width]
        assert one[width] > widest[width]
