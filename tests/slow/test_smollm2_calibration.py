"""SmolLM2: chances of acceptance are learned, and anew when the texts change."""

from itertools import cycle, islice

import pytest

from dcut_jax.cost.table import CostTable
from dcut_jax.cut.calibration import auc, ece
from dcut_jax.decode.defer import CATCH_UPS
from dcut_jax.engine.config import EngineConfig
from dcut_jax.engine.engine import Engine
from dcut_jax.engine.policy import DCutPolicy
from dcut_jax.engine.requests import Request
from dcut_jax.prompts import load_prompts

SLOTS, STEPS, NEW_TOKENS = 16, 200, 96
SHOWN = 300  # with fewer, what is told from ten bins is mostly noise
ENOUGH = 0.03

pytestmark = pytest.mark.slow


def requests_of(pair, name, count):
    text = pair.target.text()
    some = list(islice(cycle(load_prompts(name, 40)), count))
    return [
        Request(tuple(text.chat(list(p.messages))), NEW_TOKENS, text.eos_ids)
        for p in some
    ]


def planner(shapes):
    """Plans every step, at full width, where a row costs a few hundredths of a step."""
    policy = DCutPolicy(
        CostTable.empty(), widths=(7,), plain=False, bypass=False, correct=False
    )
    B = shapes.slots
    verify = {
        (B, lay.rows, lay.width, 1): (1.0 + 0.1 * lay.rows / B,)
        for lay in policy.layouts(shapes)
    }
    table = CostTable(
        policy.table.fingerprint,
        draft={(B, 7, 1): (1e-3,)},
        verify=verify,
        plan={(B,): (1e-3,)},
        catch_up={(B, steps): (1e-6,) for steps in CATCH_UPS},
    )
    return DCutPolicy(table, widths=(7,), plain=False, bypass=False, correct=False)


def test_survivals_are_calibrated_after_two_hundred_steps(pair):
    kinds = {name: requests_of(pair, name, 400) for name in ("gsm8k", "humaneval")}
    longest = max(len(r.prompt) for rs in kinds.values() for r in rs) + NEW_TOKENS
    config = EngineConfig(SLOTS, longest)
    engine = Engine(pair.models, config, planner(config.shapes(pair.models)))
    ready = {name: [engine.prefill(r) for r in rs[:40]] for name, rs in kinds.items()}

    def run(name, steps, order):
        for _ in range(steps):
            while engine.running < SLOTS:
                engine.admit(ready[name][next(order)])
            engine.step()

    def report(label):
        raw, calibrated = engine.steering.reliability()
        print(
            f"{label}: {raw.count_X.sum()} drafts, "
            f"ECE raw {ece(raw):.4f} calibrated {ece(calibrated):.4f}, "
            f"AUC raw {auc(raw):.3f} calibrated {auc(calibrated):.3f}"
        )
        return ece(calibrated)

    for name in kinds:  # the second is the switch
        order = cycle(range(40))
        run(name, 50, order)
        report(f"{name}, steps 0 to 50")
        run(name, STEPS - 50, order)
        report(f"{name}, steps 50 to {STEPS}")
        run(name, SHOWN, order)
        assert report(f"{name}, steps {STEPS} to {STEPS + SHOWN}") <= ENOUGH
