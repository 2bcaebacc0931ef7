"""Whatever is asked, with everything on: AR's text, one read a step, no compilation."""

from collections import deque
from dataclasses import replace
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcut_jax.decode.compile import Compiler
from dcut_jax.engine.config import EngineConfig
from dcut_jax.engine.engine import Engine
from dcut_jax.engine.paging import bytes_of_page
from dcut_jax.engine.policy import ArPolicy, unmeasured
from dcut_jax.engine.requests import Request

# Pages for two texts of full length, where there are four slots.
CONFIG = EngineConfig(
    4,
    200,
    sampling=True,
    logprobs=True,
    likeliest=2,
    shared_chunks=(32,),
    fewer=(1, 2),
)
PAGES = 4
WORDS = 101


def halting_after(tokens):
    def make():
        seen = count(1)
        return lambda token: next(seen) == tokens

    return make


HARD = (3, 91, 17, 64, 2)
HOT = {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "seed": 7}
ONE_OF_EACH = [
    Request((55, 56, 57, 58), 60),
    Request((8, 9, 10, 11), 50, **HOT),
    Request(HARD, 60, priority=4.0),
    Request((36, 37, 38, 39), 60, tpot_ms=11.0),
    Request((36, 37, 38, 39), 40, stop=(60,), halt=halting_after(9)),
    Request(HARD, 45, priority=0.5, halt=halting_after(20), **HOT),
    Request((HARD * 30)[:130], 50),
]
GROWING = [Request((HARD * 30)[i:][:120], 50) for i in range(4)]  # beyond a page


@pytest.fixture(scope="module")
def engines(pair, invented_table):
    """D-Cut with all its terms, and AR; more rows cost a little more."""
    policy = replace(
        unmeasured(),
        fairness="proportional",
        patience=3,
        probe_every=3,
        probe_share=1.0,
    )
    config = replace(CONFIG, kv_memory=PAGES * bytes_of_page(pair, "float32"))
    table = invented_table(
        policy,
        config.shapes(pair),
        lambda lay: 10.0 + 0.1 * lay.rows,
        draft_ms=lambda width: 1e-3,
    )
    compiler = Compiler(pair, "float32")
    everything = Engine(pair, config, replace(policy, table=table), compiler=compiler)
    return everything, Engine(pair, CONFIG, ArPolicy(), compiler=compiler)


counting_up = st.builds(
    lambda start, count: tuple(range(start, start + count)),
    st.integers(5, 60),
    st.integers(2, 8),
)
unheard_of = st.lists(st.integers(0, WORDS - 1), min_size=1, max_size=130).map(tuple)
drawn = st.fixed_dictionaries(
    {
        "temperature": st.floats(0.1, 2.0),
        "top_k": st.integers(0, 30),
        "top_p": st.floats(0.1, 1.0),
        "min_p": st.floats(0.0, 0.5),
        "seed": st.integers(-(2**31), 2**31 - 1),
    }
)


@st.composite
def any_request(draw):
    ends = draw(st.integers(0, 40))
    return Request(
        draw(counting_up | unheard_of),
        draw(st.integers(1, 50)),
        stop=draw(st.lists(st.integers(0, WORDS - 1), max_size=2).map(tuple)),
        halt=halting_after(ends) if ends else None,
        priority=draw(st.sampled_from([0.5, 1.0, 4.0])),
        tpot_ms=draw(st.sampled_from([float("inf"), 11.0, 1.0])),
        **draw(st.just({}) | drawn),
    )


def served(engine, requests):
    """Completions where prompts are run beside those who decode, as a server does."""
    engine.reset()
    found, waiting, begun = [], deque(requests), None
    while waiting or begun or engine.running:
        if begun is None and waiting:
            begun = engine.begin_prefill(waiting.popleft())
        if begun and not begun.left and engine.admits(begun.request):
            found.append(engine.admit(engine.end_prefill(begun)))
            begun = None
        elif begun and begun.left and not engine.active:
            engine.prefill_chunk(begun)
        elif engine.running:
            engine.step(begun if begun and begun.left else None)
    return found


@pytest.mark.slow
def test_the_text_is_ars_each_step_reads_once_and_nothing_compiles(
    engines, reads, compilations, monkeypatch
):
    engine, plain = engines
    step, read = engine.step, []

    def watched(*beside):
        reads.reads = 0
        step(*beside)
        assert reads.reads <= 1  # the first has nothing to read
        read.append(reads.reads)

    def check(requests):
        want = [(c.tokens, c.finish) for c in plain.generate(requests)]
        executables = engine.compiler.count
        compilations.clear()
        found = [(c.tokens, c.finish) for c in served(engine, requests)]
        engine.steering.reliability()
        assert found == want
        assert compilations == []
        assert engine.compiler.count == executables

    served(engine, ONE_OF_EACH)  # what JAX itself compiles once in a process
    engine.steering.reliability()
    kinds = {(r.width > 0, r.decision is not None) for r in engine.records}
    assert kinds >= {(True, True), (False, False)}
    assert any(r.prompt_rows for r in engine.records)
    monkeypatch.setattr(engine, "step", watched)
    check(ONE_OF_EACH[::-1])
    assert read[1:] == [1] * (len(read) - 1)
    anything = st.lists(any_request(), min_size=1, max_size=9)
    settings(max_examples=30, deadline=None)(given(anything)(check))()
    compilations.clear()
    want = [c.tokens for c in plain.generate(GROWING)]
    assert [c.tokens for c in engine.generate(GROWING)] == want
    assert engine.preemptions > 0
    assert compilations == []
