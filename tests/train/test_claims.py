"""What training options are for, shown at a small scale, with three seeds each."""

from dataclasses import replace

import numpy as np
import pytest

from dcut_jax.models.dense import head_VE
from dcut_jax.train.config import TrainConfig
from dcut_jax.train.data import Dataset, DatasetWriter
from dcut_jax.train.loop import Trainer
from dcut_jax.train.step import new_state

pytestmark = pytest.mark.slow

PHRASES = np.arange(24).reshape(8, 3) + 10
DRAFTS = 6


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
