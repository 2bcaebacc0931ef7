"""What knowing experts is worth: the simulation adds up, and its limits hold."""

from dataclasses import replace

import numpy as np
import pytest

from dcut_jax.bench import expert_aware as e
from dcut_jax.cost.devices import find_device
from dcut_jax.cost.mesh import MeshShape
from dcut_jax.cost.roofline import Roofline
from dcut_jax.cost.shapes import read_shape, targets_directory, usual_drafter

TARGET = read_shape(targets_directory() / f"{e.TARGET}.toml")
MODEL = Roofline(find_device(e.KIND), MeshShape(), TARGET, usual_drafter(TARGET))
CLUSTERED = e.ROUTINGS[1]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(e, "REQUEST_STEPS", 64)
    monkeypatch.setattr(e, "LAYERS", 1)


def test_step_times_are_the_rooflines():
    times = e.step_times(MODEL, 4)
    for rows in (4, 16, 32):
        opened = e.LAYERS * MODEL.distinct_experts(rows)
        whole = MODEL.draft_ms(4, e.WIDTH, e.CONTEXT)
        whole += MODEL.verify_ms(4, rows, e.CONTEXT)
        assert times.ms(rows, opened) == pytest.approx(whole, rel=0.02)


def test_routing_asks_for_its_experts_and_a_predictor_errs_as_it_says():
    rng = np.random.default_rng(0)
    routing = replace(CLUSTERED, known=0.7)
    popular = np.zeros((1, TARGET.experts))
    hits, clustered, even = [], [], []
    for _ in range(60):
        _, asks, guessed = e._step(rng, routing, popular, 4, TARGET.top_k)
        assert (asks.sum(axis=2) == TARGET.top_k).all()
        assert (guessed[:, 0] == asks[:, 0]).all()
        hits.append((guessed & asks)[:, 1:].sum() / asks[:, 1:].sum())
        clustered.append(asks[0].any(axis=0).sum())
        _, asks, _ = e._step(rng, e.ROUTINGS[0], popular, 4, TARGET.top_k)
        even.append(asks[0].any(axis=0).sum())
    assert np.mean(hits) == pytest.approx(0.7 + 0.3 * 8 / 128, abs=0.03)
    assert np.mean(clustered) < 0.7 * np.mean(even)


def test_knowing_all_experts_never_loses():
    """Of every step the plan with the best ratio; so on the average it cannot lose by
    more than by ratios of sums."""
    for batch in (1, 8):
        cell = e.expert_cell(CLUSTERED, batch, MODEL)
        assert cell.gain > -0.005
        assert cell.aware_rate > cell.all_rate
        assert 1 <= cell.aware_rows <= e.WIDTH + 1
        assert cell.aware_experts <= TARGET.experts


def test_the_table_shows_every_cell():
    cells = list(e.expert_cells(batch_sizes=(1, 4), routings=(CLUSTERED,)))
    assert [c.batch for c in cells] == [1, 4]
    assert e.expert_table(cells).row_count == 2
    assert e.expert_title().startswith("replayed: ")
