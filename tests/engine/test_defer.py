"""The drafter's context of plain steps comes later, and is what it would have been."""

from functools import partial

import jax
import numpy as np
import pytest

from dcut_jax.decode.defer import CATCH_UPS, ROOM
from dcut_jax.engine.config import EngineConfig
from dcut_jax.engine.engine import Engine
from dcut_jax.engine.policy import ArPolicy, FixedPolicy
from dcut_jax.engine.requests import Request
from dcut_jax.models.cache import CHUNK

PROMPTS = [tuple(range(a, a + n)) for a, n in ((55, 4), (8, 6), (36, 3))]


@pytest.fixture
def engine(pair, compiler):
    return Engine(pair, EngineConfig(2, 200), ArPolicy(), compiler=compiler)


def assert_up_to_date(engine, slot, prompt, completion):
    """The cache holds what a prefill of the same text would have left."""
    text = (*prompt, *completion.tokens[:-1])  # the anchor is not cached yet
    want = jax.device_get(engine.prefill(Request(text, 1)).caches.drafter)
    pages = engine.paging.table_BN[slot]
    have = jax.device_get(engine.caches.drafter)
    close = partial(np.testing.assert_allclose, rtol=0, atol=2e-5)
    for at in range(0, len(text), CHUNK):
        n, page = min(len(text) - at, CHUNK), pages[at // CHUNK]
        close(have.k[:, page, :, :, :n], want.k[:, at // CHUNK, :, :, :n])
        close(have.v[:, page, :, :n], want.v[:, at // CHUNK, :, :n])


SMALL = CATCH_UPS[0]


@pytest.mark.parametrize("steps", [1, SMALL, SMALL + 1, ROOM, ROOM + 3, 75])
def test_after_a_catch_up_nothing_is_missing(engine, steps):
    done = [engine.admit(engine.prefill(Request(p, 120))) for p in PROMPTS[:2]]
    for _ in range(steps):
        engine.step()
    engine.dispatch.catch_up()
    for slot, (prompt, completion) in enumerate(zip(PROMPTS, done, strict=False)):
        assert len(completion.tokens) == steps + 1
        assert_up_to_date(engine, slot, prompt, completion)


def test_a_slot_that_gets_another_request(engine):
    short = engine.admit(engine.prefill(Request(PROMPTS[0], 6)))
    long = engine.admit(engine.prefill(Request(PROMPTS[1], 60)))
    while short.finish == "running":
        engine.step()
    other = engine.admit(engine.prefill(Request(PROMPTS[2], 60)))
    for _ in range(3):
        engine.step()
    engine.dispatch.catch_up()
    assert_up_to_date(engine, 0, PROMPTS[2], other)
    assert_up_to_date(engine, 1, PROMPTS[1], long)


def test_drafting_catches_up_first(pair, compiler, engine):
    # As long as it is as if it had drafted all along, it accepts as many.
    config = EngineConfig(2, 200)
    fixed = Engine(pair, config, FixedPolicy(7), compiler=compiler)
    engine.prepare(FixedPolicy(7))
    for some in (engine, fixed):
        some.reset()
        for p in PROMPTS[:2]:
            some.admit(some.prefill(Request(p, 150)))
    for _ in range(20):
        engine.step()
    engine.policy = FixedPolicy(7)
    for _ in range(8):
        engine.step()
    accepted = [r.accepted for r in engine.records[-8:]]
    assert np.mean(accepted) > 6  # of 14; without its context the drafter gets none


def test_nothing_waits_where_nothing_drafts(pair):
    plain = Engine(
        type(pair)(pair.target, None, {"target": pair.params["target"]}),
        EngineConfig(2, 200),
        ArPolicy(),
    )
    assert plain.caches.deferred is None
