"""The cost table: how samples become costs, and which tables are refused."""

import dataclasses
import json
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

from dcut_jax.cost.measure import measure
from dcut_jax.cost.table import (
    CostError,
    CostTable,
    Fingerprint,
)

HERE = Fingerprint(
    device_kind="cpu",
    device_count=1,
    host="a processor, 2 cores",
    mesh=(("data", 2), ("model", 4)),
    strategy="tp",
    target="target-1",
    drafter="drafter-1",
    dtype="float32",
    draft_dtype="bfloat16",
    cache_dtype="float32",
    positions=256,
    sampling=False,
    logprobs=False,
    backends="budget_topk=xla",
    jax="0.10.0",
    code="abc",
)
PROFILE = "python -m dcut_jax.profile"


def table(**changes):
    return CostTable(
        **{
            "fingerprint": HERE,
            "draft": {(4, 7, 128): (2.0, 1.0, 90.0), (4, 7, 256): (3.0,)},
            "catch_up": {(4, 32): (0.5, 0.25, 0.75)},
            "verify": {
                (4, 8, 8, 128): (5.0, 6.0, 4.0),
                (4, 8, 8, 256): (9.0, 9.0),
                (4, 8, 8, 512): (10.0,),
                (4, 4, 1, 128): (1.0,),
            },
            "plan": {(4,): (0.5, 0.25, 0.75, 0.5)},
        }
        | changes
    )


class TestCosts:
    def test_a_cost_is_the_median_of_its_samples(self):
        assert table().draft_ms(4, 7, 128) == 2.0
        assert table().verify_ms(4, 8, 8, 128) == 5.0
        assert table().plan_ms(4) == 0.5

    @pytest.mark.parametrize(
        ("context", "ms"),
        [(0, 5), (128, 5), (192, 7), (224, 8), (256, 9), (384, 9.5), (4096, 10)],
    )
    def test_linear_between_contexts_and_constant_outside(self, context, ms):
        assert table().verify_ms(4, 8, 8, context) == pytest.approx(ms)

    def test_the_order_of_cells_does_not_matter(self):
        cells = dict(reversed(table().verify.items()))
        assert table(verify=cells).verify_ms(4, 8, 8, 192) == pytest.approx(7)

    @pytest.mark.parametrize(
        ("ask", "kind"),
        [
            (lambda t: t.draft_ms(8, 7, 128), r"draft time for \(8, 7\)"),
            (lambda t: t.draft_ms(4, 3, 128), r"draft time for \(4, 3\)"),
            (lambda t: t.verify_ms(4, 12, 8, 128), r"verify time for \(4, 12, 8\)"),
            (lambda t: t.verify_ms(4, 8, 4, 128), r"verify time for \(4, 8, 4\)"),
            (lambda t: t.plan_ms(8), "plan time for 8 slots"),
        ],
        ids=["slots", "width", "rows", "widest", "plan"],
    )
    def test_a_missing_cell_says_what_is_missing_and_what_to_do(self, ask, kind):
        with pytest.raises(CostError, match=f"no {kind}.*{PROFILE}"):
            ask(table())

    def test_a_missing_cell_names_those_there_are(self):
        with pytest.raises(CostError, match=r"known: \[\(4, 4, 1\), \(4, 8, 8\)\]"):
            table().verify_ms(4, 5, 5, 128)

    def test_the_empty_table_knows_nothing(self):
        with pytest.raises(CostError, match=PROFILE):
            CostTable.empty().plan_ms(1)

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 0.0, -1.0])
    @pytest.mark.parametrize(
        ("kind", "cell"),
        [("draft", (4, 7, 1)), ("verify", (4, 8, 8, 1)), ("plan", (4,))],
    )
    def test_a_sample_that_is_no_time_is_refused(self, kind, cell, bad):
        with pytest.raises(CostError, match=f"{kind} time of .*finite.*{PROFILE}"):
            table(**{kind: {cell: (1.0, bad)}})

    def test_a_cell_without_samples_is_refused(self):
        with pytest.raises(CostError, match="finite samples"):
            table(plan={(4,): ()})


class TestFingerprint:
    OTHERS = {
        "device_kind": "H200",
        "device_count": 8,
        "backends": "budget_topk=pallas_tpu",
        "host": "another processor, 2 cores",
        "mesh": (("data", 8),),
        "strategy": "dp",
        "target": "target-2",
        "drafter": "",
        "dtype": "bfloat16",
        "draft_dtype": "float32",
        "cache_dtype": "bfloat16",
        "positions": 512,
        "sampling": True,
        "logprobs": True,
        "jax": "0.11.0",
        "code": "def",
    }

    def test_every_field_has_its_case(self):
        assert set(self.OTHERS) == {f.name for f in dataclasses.fields(Fingerprint)}

    @pytest.mark.parametrize("field", OTHERS)
    def test_any_difference_is_refused_and_named(self, field):
        other = self.OTHERS[field]
        there = dataclasses.replace(HERE, **{field: other})
        with pytest.raises(CostError, match=PROFILE) as error:
            table().require(there)
        named = [f"{field}: {getattr(HERE, field)!r}, here {other!r}"]
        assert HERE.differences(there) == named
        assert named[0] in str(error.value)

    def test_the_same_place_is_accepted(self):
        mine = table()
        assert mine.require(dataclasses.replace(HERE)) is mine


class TestMerge:
    def test_the_other_wins_where_both_have_a_cell(self):
        other = table(draft={(4, 7, 128): (8.0,)}, verify={}, plan={(8,): (1.0,)})
        got = table().merged(other)
        assert got.draft_ms(4, 7, 128) == 8
        assert got.draft_ms(4, 7, 256) == 3
        assert got.verify == table().verify
        assert got.plan_ms(4) == table().plan_ms(4)
        assert got.plan_ms(8) == 1.0

    def test_a_table_of_another_place_is_refused(self):
        there = dataclasses.replace(HERE, positions=512)
        with pytest.raises(CostError, match="positions: 512, here 256"):
            table().merged(table(fingerprint=there))


class TestStore:
    def test_round_trip(self, tmp_path):
        path = tmp_path / "new" / "table-0.10.json"
        table().save(path)
        assert CostTable.load(path) == table()
        assert [p.name for p in path.parent.iterdir()] == [path.name]

    def test_saving_replaces(self, tmp_path):
        path = tmp_path / "t.json"
        table().save(path)
        table(plan={(4,): (7.0,)}).save(path)
        assert CostTable.load(path).plan_ms(4) == 7

    def test_a_large_table_loads_in_milliseconds(self, tmp_path):
        path = tmp_path / "t.json"
        cells = {
            (slots, rows, width, context): (1.0, 2.0, 3.0, 2.5, 1.5)
            for slots in (1, 4, 8, 16, 32)
            for rows in range(9)
            for width in (4, 8, 16)
            for context in (128, 256)
        }
        table(verify=cells).save(path)
        times = []
        for _ in range(5):
            start = time.thread_time()  # not that of whoever else runs
            CostTable.load(path)
            times.append(time.thread_time() - start)
        assert min(times) < 0.05

    @pytest.mark.parametrize(
        "change",
        [
            lambda d: d.pop("fingerprint"),
            lambda d: d.pop("verify"),
            lambda d: d.pop("version"),
            lambda d: d["fingerprint"].pop("jax"),
            lambda d: d["fingerprint"].update(colour="red"),
            lambda d: d["fingerprint"].update(mesh=[["data"]]),
            lambda d: d["fingerprint"].update(mesh=[["data", "two"]]),
            lambda d: d.update(version=0),
            lambda d: d.update(draft=3),
            lambda d: d.update(draft=[[[4, 7, 128]]]),
            lambda d: d.update(draft=[[4, 1.0]]),
            lambda d: d.update(draft=[[[4, 7, 128], ["fast"]]]),
            lambda d: d.update(draft=[[[4, 7, 128], [-1.0]]]),
            lambda d: d.update(draft=[[[4, 7, 128], []]]),
            lambda d: d.update(draft=[["abc", [1.0]]]),
            lambda d: d.update(draft=[[[4, 7], [1.0]]]),
            lambda d: d.update(draft=[[[4, 7, "x"], [1.0]]]),
        ],
        ids=[
            "no_fingerprint",
            "no_cells",
            "no_version",
            "a_field_less",
            "a_field_more",
            "half_an_axis",
            "an_axis_of_no_size",
            "another_version",
            "cells_that_are_no_list",
            "a_cell_without_samples",
            "a_cell_that_is_a_number",
            "a_sample_that_is_text",
            "a_sample_below_zero",
            "no_samples",
            "a_key_that_is_text",
            "a_key_too_short",
            "a_key_with_text",
        ],
    )
    def test_a_damaged_table_is_refused(self, tmp_path, change):
        path = tmp_path / "t.json"
        table().save(path)
        data = json.loads(path.read_text())
        change(data)
        path.write_text(json.dumps(data))
        with pytest.raises(CostError, match=PROFILE):
            CostTable.load(path)

    @pytest.mark.parametrize(
        "text",
        [
            b"",
            b"{",
            b"[" * 100_000,
            b"[]",
            b"3",
            b"null",
            b'"text"',
            b"\xff\xfe\x00",
            b"{}",
        ],
        ids=lambda text: str(text[:8]),
    )
    def test_another_file_is_refused_by_name(self, tmp_path, text):
        path = tmp_path / "t.json"
        path.write_bytes(text)
        with pytest.raises(CostError, match=rf"t\.json.*{PROFILE}"):
            CostTable.load(path)

    def test_half_a_file_is_refused(self, tmp_path):
        path = tmp_path / "t.json"
        table().save(path)
        path.write_text(path.read_text()[:-40])
        with pytest.raises(CostError, match="not a cost table"):
            CostTable.load(path)


def test_reading_a_table_needs_no_jax():
    code = "import sys, dcut_jax.cost.table; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.fixture
def spend(monkeypatch):
    """Lets the clock that steps are timed by go on, ms: no machine's own time."""
    now = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr("dcut_jax.cost.measure.time", clock)

    def spend(ms):
        now[0] += ms / 1e3

    return spend


class TestMeasure:
    def test_steps_take_turns_after_one_run_that_does_not_count(self):
        ran, seen = [], []
        steps = {name: lambda name=name: ran.append(name) for name in "ab"}
        got = measure(steps, rounds=3, on_progress=lambda *at: seen.append(at))
        assert ran == ["a", "b"] * 4
        assert seen == [(i, 6) for i in range(1, 7)]
        assert {name: len(samples) for name, samples in got.items()} == {"a": 3, "b": 3}

    def test_a_long_step_is_timed_twice_and_a_short_one_in_every_round(self, spend):
        steps = {"long": lambda: spend(30), "short": lambda: spend(0.01)}
        seen = []
        got = measure(
            steps, rounds=5, enough_ms=30, on_progress=lambda *at: seen.append(at)
        )
        assert {name: len(samples) for name, samples in got.items()} == {
            "long": 2,
            "short": 5,
        }
        assert seen[-1] == (10, 10)

    def test_few_turns_are_spread_over_all_rounds(self, spend):
        ran = []

        def long():
            ran.append("long")
            spend(30)

        def short():
            ran.append("short")
            spend(0.01)

        steps = {"long": long, "short": short}
        measure(steps, rounds=5, enough_ms=95)
        turns = "".join(name[0] for name in ran[2:])  # two do not count
        assert turns == "ls" + "s" + "ls" + "s" + "ls"

    def test_times_are_milliseconds(self):
        got = measure({"nap": lambda: time.sleep(0.02)}, rounds=2)
        assert all(20 <= ms < 2000 for ms in got["nap"])
