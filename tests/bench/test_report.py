"""Summaries against numbers worked out by hand; tables, lines and pictures of them."""

import json
import math
import sys
from dataclasses import replace

import pytest

from dcut_jax.bench import report
from dcut_jax.bench.records import (
    AR,
    NO_TOKEN,
    BenchResult,
    Cell,
    Difference,
    RecordError,
    Reliability,
    TextCheck,
)
from dcut_jax.bench.report import (
    Spread,
    arm_name,
    arm_styles,
    plot,
    plot_reliability,
    pooled,
    render_checks,
    render_reliability,
    render_table,
    summarise,
)


def cell(batch, arm, round, seconds, **changes):
    """1000 tokens in so many seconds."""
    plain = Cell(
        batch=batch,
        arm=arm,
        round=round,
        tokens=1000,
        steps=100,
        seconds=seconds,
        mean_accepted_length=1.0,
        kept_share=1 / 16,
        mean_width=0.0,
        phase_ms={"verify": 20.0, "commit": 0.5, "read": 0.25},
        load=1.0,
    )
    return replace(plain, **changes)


def cut(round, seconds, length, kept, width, plan):
    phase_ms = {"draft": 4.0, "plan": plan, "verify": 30.0, "commit": 1.0, "read": 0.2}
    return cell(
        8,
        "dcut",
        round,
        seconds,
        mean_accepted_length=length,
        kept_share=kept,
        mean_width=width,
        phase_ms=phase_ms,
    )


# The machine is half as fast in round 1. AR: 100, 50 and 80 tokens/s; D-Cut: 150, 80
# and 100. By rounds the ratios are 1.5, 1.6 and 1.25; medians would say 100 / 80.
CELLS = (
    cell(8, AR, 0, 10.0),
    cut(0, 1000 / 150, 2.5, 0.4, 7.0, 0.3),
    cell(8, AR, 1, 20.0),
    cut(1, 12.5, 2.7, 0.2, 5.0, 0.5),
    cell(8, AR, 2, 12.5),
    cut(2, 10.0, 2.6, 0.3, 3.0, 0.2),
    cell(1, AR, 0, 40.0),
    cell(1, "fixed-3", 0, 50.0, mean_width=3.0, kept_share=0.25),
)
DIFFERENCE = Difference(
    prompt=3, position=41, batch=16, gap=3.25e-05, expected=12, found=99
)
RESULT = BenchResult(
    command="python -m dcut_jax.bench --batch-sizes 1,8",
    date="2026-03-01T12:00:00+00:00",
    machine={"device": "cpu", "cpu": "Abacus 9", "cores": 2, "dirty": False},
    target="tiny",
    drafter="tiny-dflash",
    dtype="float32",
    draft_dtype="bfloat16",
    prompts=64,
    max_new_tokens=96,
    compile_s=12.6,
    profile_s=3.0,
    cells=CELLS,
    checks=(
        TextCheck("fixed-3", 64, 6144, ()),
        TextCheck("dcut", 64, 6100, (DIFFERENCE,)),
    ),
)


class TestSummarise:
    def test_batches_rise_and_arms_keep_their_order(self):
        places = [(row.batch, row.arm) for row in summarise(CELLS)]
        assert places == [(1, AR), (1, "fixed-3"), (8, AR), (8, "dcut")]

    def test_by_hand(self):
        row = summarise(CELLS)[3]
        assert row.rounds == 3
        assert row.tokens_per_s == Spread(
            pytest.approx(100), pytest.approx(80), pytest.approx(150)
        )
        assert row.ratio == Spread(
            pytest.approx(1.5), pytest.approx(1.25), pytest.approx(1.6)
        )
        assert row.mean_accepted_length == 2.6
        assert row.kept_share == 0.3
        assert row.mean_width == 5.0
        assert row.phase_ms == {
            "draft": 4.0,
            "plan": 0.3,
            "verify": 30.0,
            "commit": 1.0,
            "read": 0.2,
        }

    def test_an_even_number_of_rounds_is_averaged_in_the_middle(self):
        rows = summarise([cell(4, AR, 0, 10.0), cell(4, AR, 1, 5.0)])
        assert rows[0].tokens_per_s == Spread(150.0, 100.0, 200.0)
        assert rows[0].ratio == Spread(1.0, 1.0, 1.0)

    def test_only_rounds_that_ar_ran_in_have_a_ratio(self):
        row = summarise([*CELLS, cut(3, 1.0, 2.6, 0.3, 3.0, 0.2)])[3]
        assert row.rounds == 4
        assert row.ratio == summarise(CELLS)[3].ratio

    def test_no_ratio_without_ar(self):
        rows = summarise([c for c in CELLS if c.arm != AR])
        assert [row.ratio for row in rows] == [None, None]

    def test_ar_of_another_batch_size_is_no_reference(self):
        rows = summarise([cell(1, AR, 0, 10.0), cell(2, "fixed-3", 0, 10.0)])
        assert rows[1].ratio is None

    def test_a_cell_twice_is_refused(self):
        with pytest.raises(ValueError, match="two for batch 1, fixed-3, round 0"):
            summarise([*CELLS, CELLS[-1]])


class TestTable:
    def test_the_numbers_by_hand(self):
        words = [line.split() for line in render_table(RESULT).splitlines()]
        assert "1 AR 25 0% 1.00 1.00 20.0 0.75".split() in words
        # 20 of 25 tokens/s, alone in its round.
        assert "fixed 3 20 0% 0.80 0.80–0.80 1.00 25% 3.0 20.0 0.75".split() in words
        # Half of 150 - 80 is 35% of 100; commit and read are the other 1.2 ms.
        assert (
            "D-Cut 100 35% 1.50 1.25–1.60 2.60 30% 5.0 4.00 0.30 30.0 1.20".split()
            in words
        )

    def test_it_says_what_ran_where(self):
        text = render_table(RESULT)
        assert text.startswith("tiny + tiny-dflash on Abacus 9, 2 cores, 2026-03-01\n")
        assert "64 prompts, 96 new tokens each; float32, drafter bfloat16" in text
        assert "medians of 3 rounds" in text
        assert "13 s of compiling, 3 s of measuring costs" in text

    def test_caches_are_named_where_their_dtype_is_another(self):
        assert "caches" not in render_table(RESULT)
        narrow = render_table(replace(RESULT, cache_dtype="bfloat16"))
        assert "float32, drafter bfloat16, caches bfloat16" in narrow

    def test_large_numbers_still_fit(self):
        wide = {
            "tokens": 98_765_432,
            "mean_accepted_length": 12.34,
            "kept_share": 1.0,
            "mean_width": 15.0,
            "phase_ms": {name: 1234.5 for name in ("draft", "plan", "verify", "read")},
        }
        cells = [
            cell(1024, AR, 0, 1000.0, tokens=65_432_100),
            cell(1024, "published", 0, 1000.0, **wide),
        ]
        lines = render_table(replace(RESULT, cells=tuple(cells))).splitlines()
        assert max(map(len, lines)) <= 100
        [line] = [line for line in lines if "D-Cut, published" in line]
        assert "98765 " in line
        assert "…" not in "".join(lines)

    def test_an_accelerator_is_named_and_an_empty_run_is_no_error(self):
        machine = {"device": "NVIDIA H200", "cpu": "Abacus 9", "cores": 2}
        empty = replace(RESULT, cells=(), drafter="", machine=machine)
        text = render_table(empty)
        assert text.startswith("tiny on NVIDIA H200, 2026-03-01")
        assert "drafter" not in text


class TestChecks:
    def test_one_line_per_arm_and_the_differences(self):
        assert render_checks(RESULT.checks).splitlines() == [
            "fixed 3: text equals AR: 64 prompts, 6144 tokens",
            "D-Cut: 1 text differs from AR: 64 prompts, 6100 tokens",
            "  prompt 3, position 41, batch size 16: expected token 12, found 99, "
            "logit gap 3.2e-05",
        ]

    def test_a_text_that_ended_has_no_gap(self):
        early = replace(DIFFERENCE, found=NO_TOKEN, gap=math.nan)
        late = replace(DIFFERENCE, expected=NO_TOKEN, gap=math.nan)
        lines = render_checks([TextCheck("dcut", 64, 1, (early, late))]).splitlines()
        place = "  prompt 3, position 41, batch size 16: expected "
        assert lines[1:] == [
            place + "token 12, found the end of the text",
            place + "the end of the text, found token 99",
        ]

    def test_many_differences_are_counted(self):
        many = tuple(replace(DIFFERENCE, prompt=i) for i in range(12))
        lines = render_checks([TextCheck("published", 64, 1, many)]).splitlines()
        assert lines[0].startswith("D-Cut, published: 12 texts differ from AR")
        assert len(lines) == 12
        assert lines[-1] == "  and 2 more, all in the JSON record"


class TestPlot:
    def test_draws_a_png(self, tmp_path):
        pytest.importorskip("matplotlib")
        path = tmp_path / "new" / "curve.png"
        plot(RESULT, path)
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size > 10_000

    def test_needs_no_ar(self, tmp_path):
        pytest.importorskip("matplotlib")
        cells = tuple(c for c in CELLS if c.arm != AR)
        plot(replace(RESULT, cells=cells), tmp_path / "curve.png")

    def test_nothing_to_draw(self, tmp_path):
        pytest.importorskip("matplotlib")
        with pytest.raises(ValueError, match="expected cells to draw, found none"):
            plot(replace(RESULT, cells=()), tmp_path / "curve.png")

    def test_without_matplotlib(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.raises(ImportError, match="`pip install matplotlib`, or pass --no"):
            plot(RESULT, tmp_path / "curve.png")

    def test_every_arm_looks_different(self):
        arms = [AR, "fixed-15", "fixed-3", "fixed-7", "published", "dcut", "peer"]
        styles = arm_styles(arms)
        assert styles.keys() == set(arms)
        looks = {(s["color"], s["marker"]) for s in styles.values()}
        assert len(looks) == len(arms)
        assert len({s["color"] for s in styles.values()}) == len(arms)

    def test_names(self):
        assert arm_name("fixed-15") == "fixed 15"
        assert arm_name("transformers") == "transformers"


class TestRecords:
    def test_one_line_of_json_and_back(self):
        line = RESULT.to_json()
        assert "\n" not in line
        assert BenchResult.from_json(line) == RESULT

    def test_older_records_had_caches_in_float32(self):
        data = json.loads(replace(RESULT, cache_dtype="bfloat16").to_json())
        assert BenchResult.from_json(json.dumps(data)).cache_dtype == "bfloat16"
        del data["cache_dtype"]
        assert BenchResult.from_json(json.dumps(data)) == RESULT

    def test_a_number_that_is_not_finite_survives(self):
        odd = cell(8, AR, 0, 10.0, mean_accepted_length=math.nan, load=math.inf)
        line = replace(RESULT, cells=(odd,)).to_json()
        assert json.loads(line)["cells"][0]["mean_accepted_length"] is None
        [back] = BenchResult.from_json(line).cells
        assert math.isnan(back.mean_accepted_length)
        assert back.seconds == 10.0

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("nonsense", "expected a bench record on one line of JSON"),
            ("[1]", "of version 1, found None"),
            ('{"version": 99}', "of version 1, found 99"),
            ('{"version": 1}', "BenchResult: expected the fields .*found"),
            (
                '{"version": 1, "cells": [{"batch": 1}]}',
                r"Cell: expected the fields .*found \['batch'\]",
            ),
        ],
    )
    def test_anything_else_is_refused(self, text, message):
        with pytest.raises(RecordError, match=message):
            BenchResult.from_json(text)


def known(batch, kind, *bins, arm="dcut"):
    """Ten bins, of which the last ones are given; the others are empty."""
    empty = [(0, math.nan, math.nan)] * (10 - len(bins))
    drafts = sum(n for n, _, _ in bins)
    return Reliability(batch, arm, kind, drafts, 0.0125, math.nan, (*empty, *bins))


RELIABILITY = (
    known(8, "raw", (10, 0.85, 0.5), (20, 0.95, 0.75)),
    known(8, "calibrated", (30, 0.81, 0.8), (0, math.nan, math.nan)),
    known(1, "raw", (30, 0.85, 0.9), (0, math.nan, math.nan)),
)


class TestReliability:
    def test_it_survives_its_record(self):
        result = replace(RESULT, reliability=RELIABILITY)
        again = BenchResult.from_json(result.to_json())
        # NaN is not equal to itself, but its text is.
        assert repr(again.reliability) == repr(RELIABILITY)

    def test_batch_sizes_are_pooled_by_their_drafts(self):
        assert pooled(RELIABILITY, "dcut", "raw") == [
            (40, pytest.approx(0.85), pytest.approx(0.8)),
            (20, 0.95, 0.75),
        ]
        assert pooled(RELIABILITY, "dcut", "calibrated") == [(30, 0.81, 0.8)]
        assert pooled(RELIABILITY, "published", "raw") == []

    def test_one_line_per_arm_and_batch_size(self):
        lines = render_reliability(RELIABILITY).splitlines()
        assert lines == [
            "D-Cut, batch 8: survival of 30 verified drafts: "
            "raw ECE 0.013, AUC nan; calibrated ECE 0.013, AUC nan",
            "D-Cut, batch 1: survival of 30 verified drafts: raw ECE 0.013, AUC nan",
        ]

    def test_the_picture_shows_both_kinds(self, tmp_path):
        pytest.importorskip("matplotlib")
        result = replace(RESULT, reliability=RELIABILITY)
        plot_reliability(result, "dcut", tmp_path / "some" / "picture.png")
        assert (tmp_path / "some" / "picture.png").stat().st_size > 10_000
        with pytest.raises(ValueError, match="plans of ar to draw, found none"):
            plot_reliability(result, AR, tmp_path / "none.png")


class TestSynthetic:
    """Drafts that were drawn are never shown as a drafter's."""

    drawn = replace(RESULT, synthetic={"name": "curve", "source": "made up"})

    def test_the_table_and_the_record_say_so(self):
        assert "SYNTHETIC" in render_table(self.drawn)
        assert "curve" in render_table(self.drawn)
        assert "SYNTHETIC" not in render_table(RESULT)
        again = BenchResult.from_json(self.drawn.to_json())
        assert again.synthetic == {"name": "curve", "source": "made up"}

    def test_pictures_say_so(self):
        assert "synthetic acceptance" in report._picture_title(self.drawn)
        assert "synthetic" not in report._picture_title(RESULT)
