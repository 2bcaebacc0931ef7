"""Shared prefixes and too few pages: the text is that of an engine with enough."""

import json
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from dcut_jax.decode.steps import Models
from dcut_jax.engine import dispatch
from dcut_jax.engine.config import EngineConfig
from dcut_jax.engine.engine import Engine
from dcut_jax.engine.paging import bytes_of_page, dealt_out
from dcut_jax.engine.policy import ArPolicy, FixedPolicy, unmeasured
from dcut_jax.engine.requests import Request
from dcut_jax.models.cache import CHUNK, NO_PAGE

MAX_LENGTH, SLOTS = 224, 3
HALF = SLOTS  # of two pages that a slot can fill
TRACE = Path(__file__).parents[1] / "golden" / "dflash" / "full" / "trace.json"
MODES = ["ar", "fixed", "dcut"]


@pytest.fixture(scope="module")
def long():
    """Prompts of 140 tokens that share the first page, and one that does not."""
    some = 2 * [t for p in json.loads(TRACE.read_text()) for t in p["prompt"]]
    first = tuple(some[:CHUNK])
    ends = [tuple(some[CHUNK + 12 * i :][:12]) for i in range(4)]
    return [first + end for end in ends] + [tuple(some[1 : CHUNK + 13])]


@pytest.fixture(scope="module")
def make(pair, compiler, invented_table):
    """An engine for a mode, with too few pages; or plain decoding, with all."""

    def engine(mode, pages=HALF, **options):
        memory = None if pages is None else pages * bytes_of_page(pair, "float32")
        config = EngineConfig(
            SLOTS, MAX_LENGTH, sampling=True, kv_memory=memory, **options
        )
        policy = FixedPolicy(7) if mode == "fixed" else ArPolicy()
        if mode == "dcut":
            base = replace(
                unmeasured(),
                factors=(2.0,),
                widths=(7,),
                probe_every=2,
                probe_share=1.0,
            )
            shapes = config.shapes(pair)
            table = invented_table(base, shapes, lambda lay: 1.0 + 0.06 * lay.rows)
            policy = replace(base, table=table)
        return Engine(pair, config, policy, compiler=compiler)

    return engine


def heated(requests):
    """Every second one draws its tokens."""
    return [
        replace(r, temperature=2.0, top_p=0.9, seed=i) if i % 2 else r
        for i, r in enumerate(requests)
    ]


def texts(completions):
    return [c.tokens for c in completions]


def assert_adds_up(engine, used=0):
    paging = engine.paging
    assert paging.free + paging.used + paging.cached == engine.shapes.pages
    assert paging.used == used


@pytest.fixture(scope="module")
def alike(long):
    """The first is there twice, and so is a prompt of whole pages."""
    prompts = [*long, long[0], long[0][:CHUNK], long[0][:CHUNK]]
    return heated([Request(p, 20 + 5 * i) for i, p in enumerate(prompts)])


@pytest.fixture(scope="module")
def alike_text(make, alike):
    engine = make("ar", None, prefix_cache=False)
    found = texts(engine.generate(alike))
    assert engine.found_tokens == 0
    assert engine.paging.cached == 0
    return found


class TestPrefixes:
    @pytest.mark.parametrize(
        "mode",
        [pytest.param(m, marks=[pytest.mark.slow] * (m != "dcut")) for m in MODES],
    )
    def test_what_is_found_changes_no_text(self, make, alike, alike_text, mode):
        engine = make(mode)
        assert texts(engine.generate(alike)) == alike_text
        assert engine.found_tokens >= CHUNK
        assert_adds_up(engine)
        assert engine.paging.cached > 0

    def test_a_prompt_of_whole_pages_runs_its_last_one(self, make, long):
        engine = make("ar")
        whole = Request(long[0][:CHUNK], 2)
        engine.admit(engine.prefill(whole))
        assert engine.begin_prefill(whole).found == 0
        assert engine.begin_prefill(Request(long[0][: CHUNK + 1], 2)).found == CHUNK

    def test_pages_are_shared_while_their_first_user_runs(self, make, long):
        engine = make("fixed")
        engine.reset()
        a = engine.admit(engine.prefill(Request(long[0], 40)))
        begun = engine.begin_prefill(Request(long[1], 40))
        assert (begun.found, begun.left) == (CHUNK, 12)
        while begun.left:
            engine.prefill_chunk(begun)
        b = engine.admit(engine.end_prefill(begun))
        table_BN = engine.paging.table_BN
        assert table_BN[0, 0] == table_BN[1, 0]
        assert table_BN[0, 1] != table_BN[1, 1]
        assert_adds_up(engine, used=3)
        while engine.running:
            engine.step()
        assert_adds_up(engine)
        apart = make("ar", None, prefix_cache=False)
        requests = [Request(p, 40) for p in long[:2]]
        assert [a.tokens, b.tokens] == texts(apart.generate(requests))

    def test_the_drafters_part_comes_with_it(self, make, long):
        engine = make("fixed")
        engine.generate([Request(long[0], 9)])
        accepted = {}
        for found in (True, False):
            if not found:
                engine.reset()
            begun = engine.begin_prefill(Request(long[0], 60))
            assert (begun.found > 0) == found
            done = engine.admit(engine.prefill(Request(long[0], 60)))
            while engine.running:
                engine.step()
            accepted[found] = done.accepted, done.tokens
        assert accepted[True] == accepted[False]
        assert accepted[True][0] > 0

    @pytest.mark.parametrize("mode", ["ar", "fixed"])
    def test_an_answer_is_found_as_the_beginning_of_what_follows(
        self, make, long, mode
    ):
        """As far as the drafter has its part: plain steps leave that to later."""
        engine = make(mode)
        prompt = long[4][:100]
        done = engine.generate([Request(prompt, 60)])[0]
        more = Request((*prompt, *done.tokens, 5, 6), 20)
        begun = engine.begin_prefill(more)
        assert begun.found == CHUNK
        got = engine.admit(engine.prefill(more))
        while engine.running:
            engine.step()
        want = make("ar", None, prefix_cache=False).generate([more])[0]
        assert got.tokens == want.tokens

    def test_what_the_drafter_lacks_is_not_known(self, make, long):
        engine = make("ar")
        prompt = long[4][:120]
        engine.generate([Request(prompt, 12)])  # the page is full after eight steps
        assert engine.dispatch.behind == 11
        assert engine.begin_prefill(Request((*prompt, *[3] * 20), 2)).found == 0
        assert engine.paging.cached == 0

    def test_of_a_broken_text_nothing_is_found_again(self, make, long):
        engine = make("ar")
        engine.reset()
        bad = engine.admit(engine.prefill(Request(long[0], 30)))
        other = engine.admit(engine.prefill(Request(long[4][:100], 20)))
        pages = engine.paging.table_BN[0]
        target = engine.caches.target
        target = replace(target, v=target.v.at[:, pages].set(jnp.nan))
        engine.caches = replace(engine.caches, target=target)
        engine.step()
        assert bad.finish == "failed"
        assert_adds_up(engine, used=1)
        assert engine.paging.hit(long[1]) is None
        # Its pages come to others, who see nothing of what it left there.
        again = engine.admit(engine.prefill(Request(long[1], 30)))
        while engine.running:
            engine.step()
        requests = [Request(long[4][:100], 20), Request(long[1], 30)]
        want = texts(make("ar", None, prefix_cache=False).generate(requests))
        assert [other.tokens, again.tokens] == want
        assert_adds_up(engine)

    def test_a_reset_forgets(self, make, long):
        engine = make("ar")
        engine.generate([Request(long[0], 2)])
        assert engine.begin_prefill(Request(long[1], 2)).found == CHUNK
        engine.reset()
        assert engine.begin_prefill(Request(long[1], 2)).found == 0
        assert engine.paging.free == HALF


@pytest.fixture(scope="module")
def growing(long):
    """All but the last begin with one page and come to need two."""
    found = [Request(p[i : 100 + i], 60 + i) for i, p in enumerate(long)]
    last = Request(long[0][:20], 12)
    return heated([*found, replace(found[1], priority=9.0), last])


class TestTooFewPages:
    @pytest.mark.parametrize("mode", MODES)
    def test_texts_are_those_of_enough(self, make, growing, mode):
        want = texts(make("ar", None).generate(growing))
        engine = make(mode)
        assert engine.shapes.pages == HALF
        got = engine.generate(growing)
        assert texts(got) == want
        assert engine.preemptions > 0
        assert_adds_up(engine)
        for request, done in zip(growing, got, strict=True):
            assert done.finish == "length"
            assert len(done.origins) == len(done.tokens) == request.max_new_tokens

    def test_the_important_and_then_the_oldest_stay(self, make, growing, long):
        engine = make("ar")
        engine.reset()
        later = Request(long[4][:90], 60)
        some = [growing[0], replace(growing[2], priority=0.5), later]
        running = [engine.admit(engine.prefill(r)) for r in some]
        while not engine.preemptions:
            engine.step()
        assert [s.completion for s in engine.batch.aside] == [running[1]]
        assert (engine.running, engine.active) == (3, 2)
        assert not engine.admits(Request((1,), 2))
        while engine.preemptions < 2:
            engine.step()
        assert [s.completion for s in engine.batch.aside] == [running[2], running[1]]
        while engine.running:
            engine.step()
            assert_adds_up(engine, used=engine.paging.used)
        assert texts(running) == texts(make("ar", None).generate(some))

    @pytest.mark.parametrize("mode", MODES)
    def test_whoever_is_called_off_leaves_no_page_behind(
        self, make, growing, long, mode, monkeypatch
    ):
        engine = make(mode)
        engine.reset()
        # The second needs no more than a page, and as drafts fail it, many steps.
        slow = Request(long[3][:20], 100, temperature=3.0)
        asked = [growing[0], slow, growing[2]]
        running = [engine.admit(engine.prefill(r)) for r in asked]
        while not engine.batch.aside:
            engine.step()
        engine.cancel(running[2])
        assert running[2].finish == "cancelled"
        assert (engine.running, engine.active) == (2, 2)
        for done in running[:2]:
            engine.cancel(done)
        assert engine.running == 0
        assert_adds_up(engine)
        # Or while it comes back, which takes a few steps.
        monkeypatch.setattr(dispatch, "PREFILL_CHUNKS", (32,))
        engine.reset()
        running = [engine.admit(engine.prefill(r)) for r in asked]
        while engine.batch.returning is None and engine.running:
            engine.step()
        engine.cancel(running[2])
        assert engine.batch.returning is None
        while engine.running:
            engine.step()
        assert [d.finish for d in running] == ["length", "length", "cancelled"]
        assert_adds_up(engine)

    def test_a_reset_calls_off_who_is_aside(self, make, growing):
        engine = make("ar")
        engine.reset()
        running = [engine.admit(engine.prefill(r)) for r in growing[:3]]
        while not engine.batch.aside:
            engine.step()
        engine.reset()
        assert {done.finish for done in running} == {"cancelled"}
        assert engine.running == 0
        assert engine.paging.free == HALF

    def test_a_prompt_waits_for_its_pages(self, make, long):
        engine = make("ar")
        engine.reset()
        first, second = Request(long[0], 30), Request(long[4], 30)
        done = engine.admit(engine.prefill(first))
        assert not engine.admits(second)
        ready = engine.prefill(second)
        with pytest.raises(ValueError, match="waits for pages, of which 1 are not in"):
            engine.admit(ready)
        while not engine.admits(second):
            engine.step()
        assert done.finish == "length"
        engine.admit(ready)

    def test_one_that_can_never_fit_is_refused_at_once(self, make, long):
        engine = make("ar")
        engine.shapes = replace(engine.shapes, pages=1)  # as with memory for one
        engine.check(Request((1,) * 100, 29))
        with pytest.raises(ValueError, match="129 cached positions.*has room for 128"):
            engine.check(Request((1,) * 100, 30))
        assert engine.longest == 129

    def test_memory_without_a_page(self, pair):
        config = EngineConfig(1, 64, kv_memory=bytes_of_page(pair, "float32") - 1)
        with pytest.raises(ValueError, match="expected kv_memory to hold one at least"):
            config.shapes(pair)


def test_bytes_of_a_page_are_those_of_the_arrays(make, pair):
    engine = make("ar")
    engine.reset()
    caches = engine.caches
    arrays = [caches.target.k, caches.target.v, caches.drafter.k, caches.drafter.v]
    taken = sum(x.nbytes for x in arrays)
    assert taken == engine.shapes.pages * bytes_of_page(pair, "float32")
    alone = Models(pair.target, None, {"target": pair.params["target"]})
    assert bytes_of_page(alone, "bfloat16") * 2 * engine.shapes.pages == sum(
        x.nbytes for x in arrays[:2]
    )


def test_a_table_to_time_steps_with(make):
    shapes = make("ar", None).shapes
    assert dealt_out(shapes).tolist() == [[0, 1], [2, 3], [4, 5]]
    assert dealt_out(replace(shapes, pages=3)).tolist() == [[0, 1], [2, 0], [1, 2]]
    shapes = replace(shapes, slots=4, shards=2, pages=8)
    assert dealt_out(shapes).tolist() == [[0, 1], [2, 3]] * 2
    assert (dealt_out(shapes) != NO_PAGE).all()
    assert dealt_out(shapes).dtype == np.int32
