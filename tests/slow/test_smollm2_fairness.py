"""SmolLM2: what proportional weights give to texts that the drafter cannot predict."""

from itertools import cycle

import numpy as np
import pytest

from dcut_jax.cost.table import CostTable
from dcut_jax.cut.fairness import jain_index
from dcut_jax.decode.compile import Compiler
from dcut_jax.decode.defer import CATCH_UPS
from dcut_jax.engine.config import EngineConfig
from dcut_jax.engine.engine import Engine
from dcut_jax.engine.policy import DCutPolicy
from dcut_jax.engine.requests import Request
from dcut_jax.prompts import load_prompts

SLOTS, HARD, STEPS, NEW_TOKENS, PATIENCE = 16, 4, 150, 96, 32

pytestmark = pytest.mark.slow


def planner(shapes, fairness):
    """Plans every step, where a row costs a fortieth of what a step costs anyway."""
    choice = dict(
        widths=(7,), plain=False, bypass=False, correct=False, fairness=fairness
    )
    bare = DCutPolicy(CostTable.empty(), **choice)
    B = shapes.slots
    table = CostTable(
        bare.table.fingerprint,
        draft={(B, 7, 1): (1e-3,)},
        verify={
            (B, lay.rows, lay.width, 1): (1.0 + 0.4 * lay.rows / B,)
            for lay in bare.layouts(shapes)
        },
        plan={(B,): (1e-3,)},
        catch_up={(B, steps): (1e-6,) for steps in CATCH_UPS},
    )
    return DCutPolicy(table, patience=PATIENCE, **choice)


def test_the_hard_quarter_gains(pair):
    text = pair.target.text()

    def asked(name, **settings):
        ids = [tuple(text.chat(list(p.messages))) for p in load_prompts(name, 24)]
        return [Request(i, NEW_TOKENS, text.eos_ids, **settings) for i in ids]

    # Warm draws: the drafter can often not tell what comes.
    kinds = {False: asked("gsm8k"), True: asked("mt_bench", temperature=0.8)}
    longest = max(len(r.prompt) for rs in kinds.values() for r in rs) + NEW_TOKENS
    config = EngineConfig(SLOTS, longest, sampling=True)
    compiler = Compiler(pair.models, config.cache_dtype)
    found = {}
    for fairness in ("equal", "proportional"):
        policy = planner(config.shapes(pair.models), fairness)
        engine = Engine(pair.models, config, policy, compiler=compiler)
        queues = {hard: cycle(rs) for hard, rs in kinds.items()}
        slots = [None] * SLOTS
        tokens, waited, longest_wait = np.zeros(SLOTS), np.zeros(SLOTS), 0
        kept = np.zeros(SLOTS)
        for _ in range(STEPS):
            for i, (hard, running) in enumerate(slots_of(slots)):
                if running is None or running.finish != "running":
                    ready = engine.prefill(next(queues[hard]))
                    slots[i] = engine.admit(ready)
                    waited[i] = 0
            before = [len(c.tokens) for c in slots]
            engine.step()
            keep_B = np.asarray(engine.steering._memory.keep_B)
            kept += keep_B
            waited = np.where(keep_B > 0, 0, waited + 1)
            longest_wait = max(longest_wait, waited.max())
            tokens += [len(c.tokens) - n for c, n in zip(slots, before, strict=True)]
        ms = sum(
            policy.costs(engine.shapes, policy.measured(engine.shapes, 1)).planned_MR[
                0, r.decision.tier
            ]
            for r in engine.records
        )
        hard_rate, easy_rate = tokens[-HARD:].mean() / ms, tokens[:-HARD].mean() / ms
        share = kept[-HARD:].sum() / kept.sum()
        found[fairness] = hard_rate, share
        print(
            f"{fairness}: {tokens.sum() / ms:.2f} tokens per unit of cost, easy "
            f"{easy_rate:.3f}, hard {hard_rate:.3f} a request; "
            f"Jain {jain_index(tokens):.3f}; longest wait {longest_wait:.0f} steps; "
            f"of verified drafts hard ones are {share:.3f}"
        )
        assert longest_wait <= PATIENCE
    (hard, share), (equal_hard, equal_share) = found["proportional"], found["equal"]
    assert share > 1.1 * equal_share  # what weights do
    assert hard > equal_hard  # and what comes of it


def slots_of(slots):
    """Whether a slot is for hard texts, and what runs in it."""
    return [(i >= SLOTS - HARD, running) for i, running in enumerate(slots)]
