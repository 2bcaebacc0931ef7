"""The engine on a tiny trained pair: one text for every policy, size and order."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcut_jax.cost.table import CostError
from dcut_jax.decode import sample
from dcut_jax.decode.compile import Compiler
from dcut_jax.decode.steps import Models
from dcut_jax.engine import engine as engine_module
from dcut_jax.engine.config import EngineConfig
from dcut_jax.engine.engine import Engine
from dcut_jax.engine.policy import ArPolicy, DCutPolicy, FixedPolicy, unmeasured
from dcut_jax.engine.requests import Completion, Request, halted_after
from dcut_jax.models.cache import NO_PAGE
from dcut_jax.models.dense import forward_sequences, head_VE, logits

# Caches of 256 positions, of which a request may use all but the engine's slack.
MAX_LENGTH = 224
# The trained drafter commits 6.2 tokens a step at full width.
FLOOR = 5.0


def read_trace(drafter):
    """Texts and steps of the published implementation, one prompt at a time."""
    path = Path(__file__).parents[1] / "golden" / "dflash" / drafter / "trace.json"
    return json.loads(path.read_text())


@pytest.fixture(scope="session")
def prompts():
    """Of 3 to 8 tokens, and one so long that 120 more fill its cache."""
    found = [tuple(p["prompt"]) for p in read_trace("full")]
    short = [p[: 3 + i % 6] for i, p in enumerate(found[:8])]
    return [*short, (found[8] * 13)[: MAX_LENGTH - 120]]


@pytest.fixture(scope="session")
def greedy(pair, prompts):
    """The target's text after each prompt, from whole passes without any cache."""
    target, new = pair.target, 60
    texts = [list(p) for p in prompts]

    @jax.jit
    def next_token(params, token_NS, last_N):
        rows = forward_sequences(
            params, target, token_NS, jnp.ones(token_NS.shape, bool)
        )
        hidden_NE = rows.hidden[jnp.arange(len(prompts)), last_N]
        return logits(hidden_NE, head_VE(params)).argmax(-1)

    for _ in range(new):
        token_NS = np.zeros((len(texts), MAX_LENGTH), np.int32)
        for row, text in zip(token_NS, texts, strict=True):
            row[: len(text)] = text
        last_N = np.array([len(t) - 1 for t in texts])
        found = next_token(pair.params["target"], token_NS, last_N)
        for text, token in zip(texts, found.tolist(), strict=True):
            text.append(token)
    return {p: t[len(p) :] for p, t in zip(prompts, texts, strict=True)}


@pytest.fixture(scope="session")
def requests(prompts, greedy):
    """Requests of every kind: stops in a block, at its ends, absent, early, late."""
    stop = {p: greedy[p] for p in prompts}
    p = prompts
    return [
        Request(p[0], 40),
        Request(p[1], 31, stop=(stop[p[1]][12],)),
        Request(p[2], 1),
        Request(p[3], 50, stop=(stop[p[3]][30], stop[p[3]][9], 100)),
        Request(p[4], 25),
        Request(p[5], 30, stop=(stop[p[5]][0],)),
        Request(p[8], 60),
        Request(p[6], 2),
        Request(p[7], 33, stop=(stop[p[7]][32],)),
        Request(p[0], 17, stop=(stop[p[0]][1],)),
        Request(p[1], 8),
    ]


def expected(request, greedy):
    """What plain greedy decoding of this request emits."""
    text = greedy[request.prompt][: request.max_new_tokens]
    ends = [i + 1 for i, token in enumerate(text) if token in request.stop]
    return text[: min(ends, default=len(text))]


def texts(completions):
    return [c.tokens for c in completions]


@pytest.fixture
def build(pair, compiler):
    """Engines on the tiny pair; equal shapes compile once in a session."""

    def make(policy, slots, **options):
        config = EngineConfig(slots, MAX_LENGTH)
        return Engine(pair, config, policy, compiler=compiler, **options)

    return make


@pytest.fixture
def shapes_of(build):
    """The shapes of engines of so many slots, for a policy that needs them."""

    def make(slots):
        return build(ArPolicy(), slots).shapes

    return make


# Every tier and width at one size, and few at the others: each takes time to compile.
CHOICES = {
    1: {"factors": (2.0, 4.0), "widths": (7,)},
    3: {"factors": (2.0, 4.0), "widths": (7,)},
    4: {},
}
TIERS = {1: (1, 2, 4, 8), 3: (3, 6, 12, 24), 4: (4, 8, 12, 16, 24, 32)}


def dcut(shapes, invented_table, verify_ms, draft_ms=lambda width: 1e-3, **choice):
    policy = replace(unmeasured(), **(CHOICES[shapes.slots] | choice))
    return replace(policy, table=invented_table(policy, shapes, verify_ms, draft_ms))


def planner_alone():
    """The plan at every step, and nothing that is learned."""
    return replace(
        unmeasured(),
        plain=False,
        bypass=False,
        calibrate=False,
        correct=False,
        patience=None,
    )


def realistic(lay):
    """Verification as it is: a fixed part, and a part that grows with the rows."""
    return 1.0 + 0.06 * lay.rows


class TestText:
    @pytest.mark.parametrize("slots", [1, 3, 4])
    def test_plain_decoding(self, build, requests, greedy, slots):
        got = build(ArPolicy(), slots).generate(requests)
        assert texts(got) == [expected(r, greedy) for r in requests]

    @pytest.mark.parametrize("slots", [1, 3, 4])
    @pytest.mark.parametrize("width", [3, 7])
    def test_fixed_width(self, build, requests, greedy, slots, width):
        got = build(FixedPolicy(width), slots).generate(requests)
        assert texts(got) == [expected(r, greedy) for r in requests]

    @pytest.mark.parametrize(
        ("slots", "rows"),
        [
            pytest.param(s, rows, marks=[pytest.mark.slow] * (s == 4))
            for s, tiers in TIERS.items()
            for rows in tiers
        ],
    )
    def test_every_tier(
        self, build, shapes_of, invented_table, requests, greedy, slots, rows
    ):
        shapes = shapes_of(slots)
        policy = dcut(
            shapes, invented_table, lambda lay: 0.1 if lay.rows == rows else 1e3
        )
        assert policy.tiers(shapes) == TIERS[slots]
        engine = build(policy, slots)
        got = engine.generate(requests)
        assert texts(got) == [expected(r, greedy) for r in requests]
        ran = Counter(
            r.rows for r in engine.records if rows in policy.offered(shapes, r.width)
        )
        assert ran.most_common(1)[0][0] == rows
        for record in engine.records:
            assert record.active + record.kept <= record.rows

    @pytest.mark.parametrize("slots", [1, 3, pytest.param(4, marks=pytest.mark.slow)])
    def test_a_choice_of_tiers_and_widths(
        self, build, shapes_of, invented_table, requests, greedy, slots
    ):
        policy = dcut(shapes_of(slots), invented_table, realistic, probe_every=4)
        engine = build(policy, slots)
        got = engine.generate(requests)
        assert texts(got) == [expected(r, greedy) for r in requests]
        widths = {r.width for r in engine.records}
        assert widths - {0} == set(policy.ladder(engine.shapes))

    @pytest.mark.parametrize("slots", [1, 4])
    def test_plain_steps_between_those_that_draft(
        self, build, shapes_of, invented_table, requests, greedy, slots
    ):
        # Drafting never pays; probes draft all the same.
        policy = dcut(
            shapes_of(slots),
            invented_table,
            lambda lay: float(lay.rows),
            draft_ms=lambda width: 20.0,
            probe_every=4,
            probe_share=1.0,
        )
        engine = build(policy, slots)
        got = engine.generate(requests)
        assert texts(got) == [expected(r, greedy) for r in requests]
        ran = [r.width for r in engine.records]
        assert ran[0] == 7
        assert ran.count(0) > len(ran) / 3
        assert set(policy.ladder(engine.shapes)) < set(ran[1:])

    @pytest.mark.parametrize("rows", [8, 16, 24, 32])
    def test_the_published_policy(
        self, build, shapes_of, invented_table, requests, greedy, rows
    ):
        shapes = shapes_of(4)
        policy = DCutPolicy.published(None)
        table = invented_table(
            policy, shapes, lambda lay: 0.1 if lay.rows == rows else 1e3
        )
        engine = build(replace(policy, table=table), 4)
        got = engine.generate(requests)
        assert texts(got) == [expected(r, greedy) for r in requests]
        full = [r for r in engine.records if r.active == 4]
        assert {(r.rows, r.kept) for r in full} == {(rows, rows - 4)}

    def test_without_a_drafter(self, pair, requests, greedy):
        alone = Models(pair.target, None, {"target": pair.params["target"]})
        engine = Engine(alone, EngineConfig(4, MAX_LENGTH), ArPolicy())
        got = engine.generate(requests)
        assert texts(got) == [expected(r, greedy) for r in requests]

    @pytest.mark.slow
    def test_a_poor_drafter_with_sliding_windows(self, sliding_pair, requests, greedy):
        engine = Engine(sliding_pair, EngineConfig(4, MAX_LENGTH), FixedPolicy(7))
        got = engine.generate(requests)
        assert texts(got) == [expected(r, greedy) for r in requests]
        trace = read_trace("swa")
        new = [len(t["output"]) - len(t["prompt"]) for t in trace]
        got = engine.generate(
            [Request(tuple(t["prompt"]), n) for t, n in zip(trace, new, strict=True)]
        )
        assert [c.steps for c in got] == [len(t["steps"]) for t in trace]

    def test_up_to_the_end_of_the_cache(self, build, prompts):
        # As long as the engine allows, beside a request that ends at once.
        request = Request(prompts[8], MAX_LENGTH - len(prompts[8]))
        want = build(ArPolicy(), 4).generate([request])
        got = build(FixedPolicy(7), 4).generate([request, Request(prompts[0], 5)])
        assert len(got[0].tokens) == request.max_new_tokens == 120
        assert got[0].tokens == want[0].tokens
        assert got[0].finish == "length"


class TestNeighbours:
    @pytest.fixture
    def engine(self, build, shapes_of, invented_table):
        return build(dcut(shapes_of(4), invented_table, realistic), 4)

    def test_alone(self, engine, requests, greedy):
        for request in requests[:5]:
            assert texts(engine.generate([request])) == [expected(request, greedy)]

    def test_any_order_of_arrival(self, engine, requests, greedy):
        rng = np.random.default_rng(0)
        for _ in range(4):
            order = [requests[i] for i in rng.permutation(len(requests))]
            got = engine.generate(order)
            assert texts(got) == [expected(r, greedy) for r in order]

    def test_twins(self, engine, requests, greedy):
        got = engine.generate([requests[0]] * 6)
        assert texts(got) == [expected(requests[0], greedy)] * 6

    def test_arrivals_while_others_run(self, engine, prompts, greedy):
        first, second = Request(prompts[0], 40), Request(prompts[8], 20)
        engine.reset()
        a = engine.admit(engine.prefill(first))
        engine.step()
        engine.step()
        b = engine.admit(engine.prefill(second))
        assert engine.running == 2
        while engine.running:
            engine.step()
        assert a.tokens == expected(first, greedy)
        assert b.tokens == expected(second, greedy)


def mean_accepted_length(engine):
    """Committed tokens per request and step, over everything an engine ran."""
    return sum(r.committed for r in engine.records) / sum(
        r.active for r in engine.records
    )


class TestAcceptance:
    def test_each_step_commits_what_the_published_implementation_does(self, build):
        engine = build(FixedPolicy(7), 1)
        for one in read_trace("full"):
            prompt, output = one["prompt"], one["output"]
            engine.records.clear()
            new = len(output) - len(prompt)
            got = engine.generate([Request(tuple(prompt), new)])
            assert got[0].tokens == output[len(prompt) :]
            committed = [r.committed for r in engine.records]
            produced = [s["produced"] for s in one["steps"]]
            # The trace counts tokens of the last step that the length limit drops.
            assert committed[:-1] == produced[:-1]
            assert committed[-1] <= produced[-1]

    def test_a_trained_drafter_is_worth_its_name(self, build, prompts):
        engine = build(FixedPolicy(7), 4)
        got = engine.generate([Request(p, 49) for p in prompts[:8]])
        assert mean_accepted_length(engine) > FLOOR
        assert min(c.mean_accepted_length for c in got) > 3

    def test_half_of_the_rows_are_enough_for_most_of_it(
        self, build, shapes_of, invented_table, prompts
    ):
        policy = dcut(
            shapes_of(4), invented_table, lambda lay: 0.1 if lay.rows == 16 else 1e3
        )
        engine = build(policy, 4)
        engine.generate([Request(p, 49) for p in prompts[:8]])
        # Of 4 rows a request 4 is the most there is.
        full = [r for r in engine.records if r.active == 4]
        kept = sum(r.kept for r in full)
        assert sum(r.accepted for r in full) > 0.8 * kept

    def test_what_is_counted_adds_up(self, build, shapes_of, invented_table, requests):
        engine = build(dcut(shapes_of(4), invented_table, realistic), 4)
        got = engine.generate(requests)
        decoded = sum(len(c.tokens) - 1 for c in got)
        assert sum(r.committed for r in engine.records) == decoded
        assert sum(c.steps for c in got) == sum(r.active for r in engine.records)
        assert sum(c.accepted for c in got) == sum(r.accepted for r in engine.records)
        for record in engine.records:
            assert record.accepted <= record.kept
            assert 0 < record.committed <= record.active + record.accepted
        for c in got:
            if c.steps:
                assert c.mean_accepted_length == (len(c.tokens) - 1) / c.steps
        assert np.isnan(got[2].mean_accepted_length)

    def test_a_plan_is_weighed_with_the_costs_of_its_width(
        self, build, shapes_of, invented_table, requests
    ):
        # Rows so dear that none pays, unless drafting has cost far more already.
        shapes = shapes_of(4)
        policy = replace(planner_alone(), probe_every=3, probe_share=1.0)
        table = invented_table(
            policy,
            shapes,
            lambda lay: 1.0 + lay.rows**2 / 8,
            draft_ms=lambda width: 0.01 if width == 3 else 500.0,
        )
        policy = replace(policy, table=table)
        engine = build(policy, 4)
        engine.generate(requests)
        ms = policy.measured(engine.shapes, 0.0)
        cost_ms = policy.costs(engine.shapes, ms).planned_MR
        widths = policy.ladder(engine.shapes)
        full = [r for r in engine.records if r.active == 4]
        assert {r.rows for r in full if r.width == 3} == {4}
        assert min(r.rows for r in full if r.width == 7) >= 16
        for record in engine.records:
            decision, at = record.decision, widths.index(record.width)
            assert decision.kept == record.kept
            assert 0 <= decision.gain <= record.kept
            assert record.rows == policy.tiers(engine.shapes)[decision.tier]
            gain_R = decision.gain_MR[at]
            assert decision.gain == pytest.approx(gain_R[decision.tier], rel=1e-5)
            utility_R = (record.active + gain_R) / cost_ms[at]
            assert utility_R[decision.tier] == pytest.approx(max(utility_R), rel=1e-5)
            # Wider than what was drafted nothing is known.
            assert np.isnan(decision.gain_MR[at + 1 :]).all()


def test_keeping_everything_is_the_path_without_a_plan(
    build, shapes_of, invented_table, prompts
):
    """Tokens, state and caches, bit for bit (`docs/design.md`, what always holds)."""
    policy = dcut(
        shapes_of(4),
        invented_table,
        lambda lay: 0.1 if lay.rows == 32 else 1e3,
        widths=(7,),
        plain=False,
        bypass=False,
    )
    plain, planned = build(FixedPolicy(7), 4), build(policy, 4)

    def check(requests):
        for engine in (plain, planned):
            engine.records = []
        want, got = plain.generate(requests), planned.generate(requests)
        assert got == want
        assert [r.committed for r in planned.records] == [
            r.committed for r in plain.records
        ]
        assert all(r.kept == 7 * r.active for r in planned.records)
        for engine in (plain, planned):  # one has told steps of its last free slot
            engine.state = replace(engine.state, table_BN=engine.paging.table_BN)
        for name in ("state", "caches"):
            jax.tree.map(
                np.testing.assert_array_equal,
                getattr(planned, name),
                getattr(plain, name),
            )

    check([Request(p, 20 + 5 * i) for i, p in enumerate(prompts[:4])])
    # No more than there are slots, since a plan learns of a free slot one step later.
    some = st.lists(
        st.builds(Request, st.sampled_from(prompts), st.integers(2, 40)),
        min_size=1,
        max_size=4,
    )
    settings(max_examples=10, deadline=None)(given(some)(check))()


@pytest.fixture(scope="module")
def own(pair):
    """A compiler for shapes of which no other test has compiled anything."""
    return Compiler(pair, "float32")


class TestSteps:
    @pytest.fixture(params=["ar", "fixed", "dcut"])
    def engine(self, request, pair, own, invented_table):
        def make(policy):
            return Engine(pair, EngineConfig(2, 90), policy, compiler=own)

        match request.param:
            case "ar":
                return make(ArPolicy())
            case "fixed":
                return make(FixedPolicy(7))
        shapes = make(ArPolicy()).shapes
        policy = DCutPolicy(None, factors=(4.0,), widths=(7,))
        table = invented_table(policy, shapes, realistic)
        return make(replace(policy, table=table))

    def test_nothing_compiles_after_construction(
        self, engine, own, compilations, prompts
    ):
        count = own.count
        compilations.clear()
        engine.generate([Request((prompts[8] * 2)[:n], 20) for n in (3, 30, 40, 60)])
        a = engine.admit(engine.prefill(Request(prompts[0], 20)))
        engine.step()
        engine.cancel(a)
        engine.free()
        with pytest.raises(ValueError, match=r"call reset\(\) before"):
            engine.step()
        engine.reset()
        assert compilations == []
        assert own.count == count

    def test_a_step_reads_back_once(self, engine, prompts, reads):
        engine.admit(engine.prefill(Request(prompts[0], 30)))
        engine.admit(engine.prefill(Request(prompts[1], 12)))
        while engine.running:
            reads.reads = 0
            engine.step()
            assert reads.reads == 1

    def test_a_step_of_nothing_is_harmless(self, engine):
        engine.reset()
        engine.step()
        assert engine.running == 0
        assert all(r.committed == 0 for r in engine.records)

    def test_phases_are_timed_only_when_asked(self, engine, prompts):
        engine.generate([Request(prompts[0], 9)])
        assert all(r.phase_ms == {} for r in engine.records)
        engine.time_phases = True
        engine.records.clear()
        engine.generate([Request(prompts[0], 9)])
        for record in engine.records:
            assert {"verify", "commit"} < set(record.phase_ms)
            assert all(ms >= 0 for ms in record.phase_ms.values())


def test_what_was_not_prepared_is_not_compiled(pair, shapes_of):
    compiler = Compiler(pair, "float32")
    with pytest.raises(RuntimeError, match="draft of .* was not prepared"):
        compiler.draft(shapes_of(1), 3)


def test_no_executable_is_called_first_by_a_request(pair, monkeypatch):
    # A first call takes up to ten times as long: runtimes load and pack then.
    ran, call = set(), jax.stages.Compiled.__call__

    def counted(self, *args):
        ran.add(id(self))
        return call(self, *args)

    monkeypatch.setattr(jax.stages.Compiled, "__call__", counted)
    compiler = Compiler(pair, "float32")
    config = EngineConfig(2, MAX_LENGTH)
    for policy in (ArPolicy(), FixedPolicy(7)):
        engine = Engine(pair, config, policy, compiler=compiler)
        assert ran == {id(made) for made in compiler.made}
        assert engine.active == 0
    assert len(ran) > 10


def test_compilations_are_noticed(compilations):
    """Or the test above would pass whatever compiles."""
    compilations.clear()
    jax.jit(lambda x: x * 3 + 41)(np.float32(1))
    assert len(compilations) == 1


def test_reads_are_noticed(reads):
    x = jax.device_put(np.float32([1, 2]))
    engine_module.np.asarray(x)
    assert reads.reads == 1
    x.tolist()
    assert reads.reads == 2


class TestCancel:
    @pytest.fixture(params=["fixed", "dcut"])
    def engine(self, request, build, shapes_of, invented_table):
        if request.param == "fixed":
            return build(FixedPolicy(7), 3)
        return build(dcut(shapes_of(3), invented_table, realistic), 3)

    def test_the_others_go_on_and_the_slot_is_free(self, engine, prompts, greedy):
        engine.reset()
        asked = [Request(p, 45) for p in prompts[:4]]
        running = [engine.admit(engine.prefill(r)) for r in asked[:3]]
        engine.step()
        engine.step()
        engine.cancel(running[1])
        part = running[1].tokens.copy()
        assert running[1].finish == "cancelled"
        assert engine.running == 2
        assert part == greedy[prompts[1]][: len(part)]
        assert 1 < len(part) < 45
        running.append(engine.admit(engine.prefill(asked[3])))
        while engine.running:
            engine.step()
        assert running[1].tokens == part
        for i in (0, 2, 3):
            assert running[i].tokens == expected(asked[i], greedy)

    def test_one_that_has_ended(self, engine, prompts):
        engine.reset()
        done = engine.admit(engine.prefill(Request(prompts[0], 1)))
        running = engine.admit(engine.prefill(Request(prompts[1], 20)))
        engine.cancel(done)
        assert engine.running == 1
        assert done.finish == "length"
        assert running.finish == "running"

    def test_a_reset_calls_off_what_runs(self, engine, prompts):
        engine.reset()
        running = engine.admit(engine.prefill(Request(prompts[1], 20)))
        engine.reset()
        assert running.finish == "cancelled"
        assert engine.running == 0

    def test_one_of_nowhere_is_an_error(self, engine):
        engine.reset()
        with pytest.raises(ValueError, match="a completion of this engine"):
            engine.cancel(Completion([1]))


class TestMisuse:
    def test_a_request_more_than_there_are_slots(self, build, prompts):
        engine = build(ArPolicy(), 1)
        engine.reset()
        ready = engine.prefill(Request(prompts[0], 9))
        engine.admit(ready)
        with pytest.raises(ValueError, match="all 1 slots are in use"):
            engine.admit(ready)

    def test_texts_beyond_what_the_target_was_made_for(self, pair):
        most = pair.target.max_position
        with pytest.raises(ValueError, match=f"beyond the {most} positions"):
            Engine(pair, EngineConfig(1, most + 1), ArPolicy())

    @pytest.mark.parametrize("other", ["models", "cache_dtype"])
    def test_a_compiler_of_something_else(self, pair, compiler, other):
        models, config = pair, EngineConfig(1, 64, cache_dtype="bfloat16")
        if other == "models":
            models = Models(pair.target, None, {"target": pair.params["target"]})
            config = EngineConfig(1, 64)
        with pytest.raises(ValueError, match="one Compiler per pair"):
            Engine(models, config, ArPolicy(), compiler=compiler)


class TestFinish:
    def test_reasons(self, build, requests, greedy):
        got = build(FixedPolicy(7), 4).generate(requests)
        for request, completion in zip(requests, got, strict=True):
            stopped = expected(request, greedy)[-1] in request.stop
            assert completion.finish == ("stop" if stopped else "length")
        assert {c.finish for c in got} == {"stop", "length"}

    def test_a_request_that_ends_with_its_first_token_takes_no_slot(
        self, build, prompts, greedy
    ):
        engine = build(ArPolicy(), 1)
        stop = (greedy[prompts[0]][0],)
        for request in (Request(prompts[0], 1), Request(prompts[0], 9, stop=stop)):
            done = engine.admit(engine.prefill(request))
            assert done.tokens == greedy[prompts[0]][:1]
            assert engine.running == 0

    def test_progress(self, build, requests):
        seen = []
        engine = build(FixedPolicy(7), 4)
        got = engine.generate(requests, on_progress=lambda *at: seen.append(at))
        assert seen == sorted(seen)
        assert seen[-1] == (len(requests), sum(len(c.tokens) for c in got))

    def test_nothing_asked(self, build):
        assert build(ArPolicy(), 1).generate([]) == []


class TestRefusals:
    @pytest.fixture
    def engine(self, build):
        return build(ArPolicy(), 1)

    @pytest.mark.parametrize("slots", [0, -1])
    def test_batch_size(self, slots):
        with pytest.raises(ValueError, match=f"at least 1; found {slots}"):
            EngineConfig(slots, 64)

    def test_a_cache_without_room(self):
        with pytest.raises(ValueError, match="max_length must hold"):
            EngineConfig(1, 1)

    def test_an_empty_prompt(self):
        with pytest.raises(ValueError, match="at least one prompt token"):
            Request((), 5)

    @pytest.mark.parametrize("new", [0, -3])
    def test_no_new_tokens(self, new):
        with pytest.raises(ValueError, match=f"at least 1; found {new}"):
            Request((1,), new)

    @pytest.mark.parametrize(
        ("request_", "message"),
        [
            (Request((1,) * 300, 1), "301 positions; the cache holds 224"),
            (Request((1,) * 220, 5), "225 positions; the cache holds 224.*max_length"),
            (Request((1, 101), 5), "token 101 is outside the vocabulary of 101"),
            (Request((1, -1), 5), "token -1 is outside the vocabulary of 101"),
            (Request((1,), 5, stop=(1, 2, 3, 4, 5)), "5 stop tokens; at most 4"),
        ],
        ids=["prompt", "prompt_and_new", "token", "below_zero", "stops"],
    )
    def test_a_request_that_does_not_fit(self, engine, request_, message):
        with pytest.raises(ValueError, match=message):
            engine.check(request_)
        # Nothing of a list is decoded when one of it cannot be.
        with pytest.raises(ValueError, match=message):
            engine.generate([Request((1,), 5), request_])
        assert engine.running == 0
        assert engine.records == []

    def test_the_longest_request_fits(self, engine):
        engine.check(Request((0, 100), MAX_LENGTH - 2, stop=(1, 2, 3, 4)))

    @pytest.mark.parametrize("policy", [FixedPolicy(3), unmeasured()], ids=str)
    def test_a_policy_without_a_drafter(self, pair, policy):
        alone = Models(pair.target, None, {"target": pair.params["target"]})
        with pytest.raises(
            ValueError, match=f"{type(policy).__name__} needs a drafter"
        ):
            Engine(alone, EngineConfig(1, 64), policy)

    def test_a_width_beyond_the_block(self, build):
        with pytest.raises(ValueError, match=r"width 8 is outside 1\.\.7"):
            build(FixedPolicy(8), 1)

    def test_costs_that_were_never_measured(self, build, compiler):
        count = compiler.count
        with pytest.raises(CostError, match="dcut_jax.profile"):
            build(unmeasured(), 1)
        assert compiler.count == count


@pytest.fixture(scope="module")
def asked(prompts):
    """Greedy and drawing requests of every kind, in one batch."""
    return [
        Request(prompts[0], 30, temperature=3.0, seed=1),
        Request(prompts[0], 30, temperature=3.0, seed=2),
        Request(prompts[1], 25),
        Request(prompts[2], 30, temperature=4.0, top_k=5, seed=3),
        Request(prompts[3], 20, temperature=3.0, top_p=0.95, seed=-4, stop=(7,)),
        Request(prompts[4], 30, temperature=3.0, min_p=0.01, seed=5),
        Request(prompts[5], 9, temperature=5.0, seed=6),
    ]


@pytest.fixture(scope="module")
def make(pair, compiler):
    def make(policy, slots):
        config = EngineConfig(slots, MAX_LENGTH, sampling=True)
        return Engine(pair, config, policy, compiler=compiler)

    return make


@pytest.fixture(scope="module")
def plain(make, asked):
    return texts(make(ArPolicy(), 1).generate(asked))


class TestSampling:
    """Speculative text equals plain sampling's, seed for seed."""

    def test_plain_sampling_is_what_whole_sequences_give(self, pair, asked, plain):
        @jax.jit
        def token_after(tokens_1S, last, sampling):
            valid = jnp.ones(tokens_1S.shape, bool)
            rows = forward_sequences(
                pair.params["target"], pair.target, tokens_1S, valid
            )
            logits_1V = logits(
                rows.hidden[0, last][None], head_VE(pair.params["target"])
            )
            return sample.next_token(logits_1V, sampling, (last + 1)[None])[0]

        request, text = asked[3], plain[3]
        settings = replace(
            sample.greedy(1),
            temperature=jnp.float32([4.0]),
            top_k=jnp.int32([5]),
            seed=jnp.int32([3]),
        )
        tokens = np.zeros((1, 64), np.int32)
        whole = [*request.prompt, *text]
        tokens[0, : len(whole)] = whole
        first = len(request.prompt)
        got = [
            int(token_after(tokens, np.int32(at - 1), settings))
            for at in range(first, len(whole))
        ]
        assert got == text

    @pytest.mark.parametrize("width", [3, pytest.param(7, marks=pytest.mark.slow)])
    def test_fixed_width(self, make, asked, plain, width):
        assert texts(make(FixedPolicy(width), 3).generate(asked)) == plain

    def test_dcut(self, make, asked, plain, shapes_of, invented_table):
        policy = dcut(shapes_of(3), invented_table, realistic, probe_every=2)
        engine = make(replace(policy, probe_share=1.0), 3)
        assert texts(engine.generate(asked[::-1])) == plain[::-1]
        assert len({(r.width, r.rows) for r in engine.records}) >= 3

    @pytest.mark.parametrize("settings", [{"min_p": 1.0}, {"top_k": 1}], ids=str)
    def test_settings_that_leave_one_token_are_greedy(
        self, make, prompts, greedy, settings
    ):
        asked = [Request(p, 12, temperature=0.7, **settings) for p in prompts[:4]]
        for policy, slots in ((ArPolicy(), 1), (FixedPolicy(3), 3)):
            got = texts(make(policy, slots).generate(asked))
            assert got == [greedy[p][:12] for p in prompts[:4]]

    def test_seeds_and_temperatures_matter(self, asked, plain, greedy):
        assert plain[0] != plain[1]
        assert plain[2] == greedy[asked[2].prompt][:25]
        for number in (0, 3, 6):
            text = plain[number]
            assert text != greedy[asked[number].prompt][: len(text)]

    def test_an_engine_that_takes_the_likeliest_refuses(self, build, prompts):
        with pytest.raises(ValueError, match="Build it with sampling=True"):
            build(ArPolicy(), 1).check(Request(prompts[0], 3, temperature=0.5))

    @pytest.mark.parametrize(
        "bad",
        [
            {"temperature": -0.1},
            {"temperature": float("nan")},
            {"top_k": -1},
            {"top_k": 2**31},
            {"stop": (2**31,)},
            {"top_p": 0.0},
            {"top_p": 1.1},
            {"min_p": 2.0},
            {"seed": 2**31},
        ],
        ids=str,
    )
    def test_settings_that_mean_nothing(self, bad):
        with pytest.raises(ValueError, match=f"{next(iter(bad))} must be"):
            Request((1,), 5, **bad)


def after(*run):
    """A halt that ends a text where these tokens stand in a row."""

    def make():
        seen = []

        def halt(token):
            seen.append(token)
            return tuple(seen[-len(run) :]) == run

        return halt

    return make


@pytest.fixture(scope="session")
def halting(requests, greedy):
    """Requests of which some end on the host: at once, early, late, with a stop token.

    Others end before their halt, and some have none.
    """
    text = {p: tuple(t) for p, t in greedy.items()}

    def at(request, *place):
        return replace(request, halt=after(*text[request.prompt][slice(*place)]))

    a, b, c, d, e, f, g, h, *more = requests
    return [
        at(a, 5, 8),
        at(b, 11, 13),  # as the stop token comes
        at(c, 0, 1),
        at(d, 1, 3),  # long before the stop token
        at(e, 22, 25),  # with the last token there may be
        replace(f, halt=after(-1)),  # never
        at(g, 17, 19),
        replace(h, halt=after(-1)),
        *more,
        at(a, 0, 1),
        at(g, 33, 34),
    ]


def halted(request, greedy):
    """What `expected` is of this request with its halt, and why it ends."""
    text = expected(request, greedy)
    end = halted_after(request.halt(), text) if request.halt else None
    ends = end is not None or text[-1] in request.stop
    return text[:end], "stop" if ends else "length"


class TestHalt:
    """A text that the host ends is the same in every policy, and harms no other."""

    def test_the_requests_are_of_every_kind(self, halting, greedy):
        ends = [
            halted_after(r.halt(), expected(r, greedy)) if r.halt else None
            for r in halting
        ]
        assert ends.count(None) == 5
        assert ends.count(1) >= 2
        shorter = [n for n, r in zip(ends, halting, strict=True) if n]
        assert len(set(shorter)) >= 5

    @pytest.fixture(params=["ar", "fixed-3", "fixed-7", "dcut", "dcut, all widths"])
    def engine_of(self, request, build, shapes_of, invented_table):
        def make(slots):
            match request.param:
                case "ar":
                    policy = ArPolicy()
                case "fixed-3" | "fixed-7":
                    policy = FixedPolicy(int(request.param[-1]))
                case "dcut":
                    policy = dcut(shapes_of(slots), invented_table, realistic)
                case _:
                    policy = dcut(
                        shapes_of(slots),
                        invented_table,
                        realistic,
                        probe_every=2,
                        probe_share=1.0,
                    )
            return build(policy, slots)

        return make

    @pytest.mark.parametrize("slots", [1, 3])
    def test_every_policy(self, engine_of, halting, greedy, slots):
        engine = engine_of(slots)
        want = [halted(r, greedy) for r in halting]
        for order in (slice(None), slice(None, None, -1)):
            engine.records.clear()
            got = engine.generate(halting[order])
            assert [(c.tokens, c.finish) for c in got] == want[order]
            assert not np.asarray(engine.state.active_B).any()
            decoded = sum(len(c.tokens) - 1 for c in got)
            assert sum(r.committed for r in engine.records) == decoded
            assert sum(c.steps for c in got) == sum(r.active for r in engine.records)

    def test_twins_are_halted_apart(self, engine_of, halting, greedy):
        got = engine_of(3).generate([halting[0]] * 7)
        assert [(c.tokens, c.finish) for c in got] == [halted(halting[0], greedy)] * 7

    def test_a_slot_is_free_at_once_and_its_neighbour_goes_on(
        self, engine_of, prompts, greedy
    ):
        engine = engine_of(3)
        engine.reset()
        run = greedy[prompts[0]]
        asked = [
            Request(prompts[0], 45, halt=after(*run[8:11])),
            Request(prompts[8], 45),
            Request(prompts[1], 45),
        ]
        running = [engine.admit(engine.prefill(r)) for r in asked]
        while running[0].finish == "running":
            engine.step()
        assert running[0].tokens == run[:11]
        assert engine.running == 2
        assert not np.asarray(engine.state.active_B)[0]
        # What the device may have decoded on is not the next one's.
        running.append(engine.admit(engine.prefill(Request(prompts[2], 30))))
        while engine.running:
            engine.step()
        assert running[0].tokens == run[:11]
        for completion, prompt in zip(running[1:], (8, 1, 2), strict=True):
            count = len(completion.tokens)
            assert count == (30 if prompt == 2 else 45)
            assert completion.tokens == greedy[prompts[prompt]][:count]

    def test_cancelling_one_that_has_just_halted(self, build, prompts, greedy):
        engine = build(FixedPolicy(7), 3)
        engine.reset()
        run = greedy[prompts[0]]
        done = engine.admit(
            engine.prefill(Request(prompts[0], 45, halt=after(*run[:3])))
        )
        engine.step()
        engine.cancel(done)
        assert done.finish == "stop"
        assert done.tokens == run[:3]


@pytest.fixture(scope="module")
def make_scored(pair, compiler):
    def make(policy, slots, sampling):
        config = EngineConfig(slots, MAX_LENGTH, sampling=sampling, logprobs=True)
        return Engine(pair, config, policy, compiler=compiler)

    return make


@pytest.fixture(scope="module")
def whole_logp(pair):
    """Log-probabilities of a completion's tokens, from one pass over the whole text."""

    @jax.jit
    def run(token_1S):
        valid = jnp.ones(token_1S.shape, bool)
        rows = forward_sequences(pair.params["target"], pair.target, token_1S, valid)
        logits_SV = logits(rows.hidden[0], head_VE(pair.params["target"]))
        return jax.nn.log_softmax(logits_SV, axis=-1)

    def of(request, completion):
        token_1S = np.zeros((1, MAX_LENGTH), np.int32)
        whole = [*request.prompt, *completion.tokens]
        token_1S[0, : len(whole)] = whole
        logp_SV = np.asarray(run(token_1S))
        at = np.arange(len(request.prompt), len(whole))
        return logp_SV[at - 1, completion.tokens]

    return of


class TestLogprobs:
    @pytest.mark.slow
    @pytest.mark.parametrize("sampling", [False, True], ids=["greedy", "sampled"])
    @pytest.mark.parametrize("kind", ["ar", "fixed", "dcut"])
    def test_they_are_those_of_a_plain_pass(
        self,
        make_scored,
        asked,
        plain,
        halting,
        greedy,
        whole_logp,
        invented_table,
        kind,
        sampling,
    ):
        slots = 1 if kind == "ar" else 3
        policy = FixedPolicy(7) if kind == "fixed" else ArPolicy()
        if kind == "dcut":
            shapes = make_scored(policy, slots, sampling).shapes
            policy = dcut(shapes, invented_table, realistic)
        engine = make_scored(policy, slots, sampling)
        requests = asked if sampling else halting
        got = engine.generate(requests)
        assert texts(got) == (
            plain if sampling else [halted(r, greedy)[0] for r in requests]
        )
        for request, completion in zip(requests, got, strict=True):
            want = whole_logp(request, completion)
            np.testing.assert_allclose(completion.logprobs, want, rtol=0, atol=1e-4)
            assert all(isinstance(x, float) and x <= 0 for x in completion.logprobs)
        unlikely = min(min(c.logprobs) for c in got)
        assert unlikely < (-3 if sampling else -0.01)  # or these tests test nothing

    def test_without_them_there_are_none(self, build, requests):
        got = build(FixedPolicy(7), 3).generate(requests)
        assert all(c.logprobs == [] for c in got)

    def test_a_step_reads_back_once(self, make_scored, prompts, invented_table, reads):
        shapes = make_scored(ArPolicy(), 3, False).shapes
        engine = make_scored(dcut(shapes, invented_table, realistic), 3, False)
        for prompt in prompts[:2]:
            engine.admit(engine.prefill(Request(prompt, 30)))
        while engine.running:
            reads.reads = 0
            engine.step()
            assert reads.reads == 1


def poisoned(engine, slot):
    """Makes the target's pages of a slot a field of NaN, and so its logits."""
    target, table_BN = engine.caches.target, engine.paging.table_BN
    pages = table_BN[slot][table_BN[slot] != NO_PAGE]
    broken = replace(
        target,
        k=target.k.at[:, pages].set(jnp.nan),
        v=target.v.at[:, pages].set(jnp.nan),
    )
    engine.caches = replace(engine.caches, target=broken)


class TestBrokenLogits:
    @pytest.mark.parametrize("name", ["ar", "fixed", "dcut"])
    def test_they_end_their_request_and_touch_no_other(
        self, build, shapes_of, invented_table, prompts, greedy, name
    ):
        policy = {
            "ar": ArPolicy(),
            "fixed": FixedPolicy(7),
            "dcut": dcut(shapes_of(3), invented_table, realistic),
        }[name]
        engine = build(policy, 3)
        found = [engine.admit(engine.prefill(Request(p, 30))) for p in prompts[:3]]
        for _ in range(2):
            engine.step()
        engine.flush()
        poisoned(engine, slot=1)
        before = list(found[1].tokens)
        engine.step()
        engine.flush()
        assert found[1].finish == "failed"
        assert found[1].tokens == before
        assert len(found[1].origins) == len(before)
        again = engine.admit(engine.prefill(Request(prompts[3], 30)))  # the same slot
        while engine.running:
            engine.step()
        for prompt, done in ((prompts[0], found[0]), (prompts[2], found[2])):
            assert (done.tokens, done.finish) == (greedy[prompt][:30], "length")
        assert again.tokens == greedy[prompts[3]][:30]

    def test_of_a_prompt(self, pair, prompts):
        embed_VE = pair.params["target"]["embed_VE"]
        target = pair.params["target"] | {
            "embed_VE": embed_VE.at[prompts[0][-1]].set(jnp.nan)
        }
        models = Models(pair.target, None, {"target": target})
        engine = Engine(models, EngineConfig(2, MAX_LENGTH), ArPolicy())
        done = engine.admit(engine.prefill(Request(prompts[0], 8)))
        assert (done.tokens, done.finish) == ([], "failed")
        assert engine.running == 0


class TestOrigins:
    @pytest.mark.parametrize("name", ["ar", "fixed", "dcut"])
    def test_each_token_has_one_and_they_add_up(
        self, build, shapes_of, invented_table, requests, name
    ):
        policy = {
            "ar": ArPolicy(),
            "fixed": FixedPolicy(7),
            "dcut": dcut(shapes_of(3), invented_table, realistic),
        }[name]
        for done in build(policy, 3).generate(requests):
            count = Counter(done.origins)
            assert len(done.origins) == len(done.tokens)
            assert done.origins[0] == "plain"
            assert count["draft"] <= done.accepted <= done.verified
            if name == "ar":
                assert set(count) == {"plain"}
            if name == "fixed":
                assert count["plain"] == 1  # the prefill's
                assert done.verified == 7 * done.steps
                # All but the last step end with a token of the target's own.
                assert done.steps - 1 <= count["bonus"] <= done.steps

    def test_a_callback_sees_every_step(self, build, prompts):
        engine = build(FixedPolicy(7), 3)
        seen = []
        engine.on_outcome = lambda record, outcome: seen.append((record, outcome))
        done = engine.generate([Request(prompts[0], 20)])[0]
        assert [record for record, _ in seen] == engine.records
        assert sum(o.accepted_B.sum() for _, o in seen) == done.accepted
