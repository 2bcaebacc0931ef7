"""The commands from their flags to what they print, on a tiny target and drafter."""

import dataclasses
import io
import json
import sys
from pathlib import Path

import pytest

from dcut_jax import cli, generate, modes, profile
from dcut_jax.bench import __main__ as bench
from dcut_jax.bench.records import BenchResult, Difference, TextCheck
from dcut_jax.bench.runner import NEAR_TIE, wrong_arms
from dcut_jax.cost.table import CostError, CostTable
from dcut_jax.decode.compile import Compiler
from dcut_jax.engine import policy
from dcut_jax.engine.config import EngineConfig
from dcut_jax.engine.load import load_pair
from dcut_jax.weights.load import Target

GOLDEN = Path(__file__).parent / "golden" / "dflash"
TARGET = ["--target", str(GOLDEN / "target")]
PAIR = [*TARGET, "--drafter", str(GOLDEN / "full"), "--draft-dtype", "float32"]
TEXTS = ["3 1", "7 2", "20 3"]


class Progressions:
    """A tokenizer that reads "start stride" as the beginning of a progression."""

    eos_ids = (0, 100, 101, 102)  # as many as profiling reckons with

    def chat(self, messages):
        words = messages[-1]["content"].split()
        start, stride = map(int, words) if words[-1].isdigit() else (5, 1)
        return [(start + stride * i) % 100 for i in range(8)]

    def decode(self, tokens):
        return " ".join(map(str, tokens))

    def has_text(self, token):
        return True


@pytest.fixture(scope="module")
def compilers():
    """One for all commands: the same models at the same batch size compile once."""
    return {}


@pytest.fixture(autouse=True)
def tiny(compilers, monkeypatch):
    """A tokenizer for the target, and a single width, so that little is compiled."""

    def compiler(models, cache_dtype):
        key = models.drafter, cache_dtype
        if key not in compilers:
            compilers[key] = Compiler(models, cache_dtype)
        return compilers[key]

    for module in (bench, modes, profile):
        monkeypatch.setattr(module, "Compiler", compiler)
    monkeypatch.setattr(Target, "text", lambda self: Progressions())
    monkeypatch.setattr(policy, "WIDTHS", (3,))
    monkeypatch.setattr(policy, "TIER_FACTORS", (1.0, 2.0))


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": t}) + "\n" for t in TEXTS))
    return ["--prompts", str(path)]


@pytest.fixture
def nothing_loads(monkeypatch):
    """Fails a test in which a command goes as far as loading a model."""

    def load(*args):
        raise AssertionError("loaded a model before refusing")

    for module in (bench, generate, profile):
        monkeypatch.setattr(module, "load_pair", load)


@pytest.fixture
def refusal(capsys, nothing_loads):
    """What a command line is refused with."""

    def refusal(command, *flags):
        with pytest.raises(SystemExit) as caught:
            command.main(list(flags))
        assert caught.value.code == 2
        return capsys.readouterr().err

    return refusal


class TestBench:
    @pytest.mark.slow
    def test_every_arm(self, prompts, tmp_path, capsys):
        pytest.importorskip("matplotlib")
        flags = (
            "--limit 2 --batch-sizes 2 --max-new-tokens 8 --rounds 2 "
            "--tokens-per-request 3"
        )
        places = ["--out", str(tmp_path / "out"), "--cost-dir", str(tmp_path / "cost")]
        arms = ["--arms", "ar,fixed-3,published,dcut"]
        assert bench.main([*PAIR, *prompts, *flags.split(), *places, *arms]) == 0
        printed = capsys.readouterr().out
        line = (tmp_path / "out" / "bench.json").read_text()
        assert printed.splitlines()[-1] == line.strip()
        result = BenchResult.from_json(line)
        assert [c.arm for c in result.checks] == arms[1].split(",")
        assert not any(c.differences for c in result.checks)
        assert len(result.cells) == 8
        assert all(c.tokens >= 2 * 3 for c in result.cells)
        assert result.cache_dtype == "float32"
        assert (tmp_path / "out" / "curve.png").exists()
        [table] = (tmp_path / "cost").iterdir()
        assert CostTable.load(table).plan.keys() == {(2,)}

    def test_ar_alone_needs_no_drafter_and_no_picture(self, prompts, tmp_path, capsys):
        flags = "--arms ar --batch-sizes 2 --limit 2 --max-new-tokens 4 --no-plot"
        more = "--cache-dtype bfloat16 --tokens-per-request 2 --rounds 1".split()
        out = ["--out", str(tmp_path)]
        assert bench.main([*TARGET, *prompts, *flags.split(), *more, *out]) == 0
        result = BenchResult.from_json((tmp_path / "bench.json").read_text())
        assert result.drafter == ""
        assert result.cache_dtype == "bfloat16"
        assert "caches bfloat16" in capsys.readouterr().out
        assert not (tmp_path / "curve.png").exists()

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            ("--max-new-tokens 1", "expected at least 2, found 1"),
            ("--batch-sizes 1,8,1", "1 is there twice"),
            ("--expert-aware", "give --replay with it"),
            ("--arms ar,dcut,ar", "ar is there twice"),
            ("--arms ar,fixed", "arm 'fixed' is unknown"),
            ("--arms fixed-0", "arm 'fixed-0' is unknown"),
            ("--arms ar,fixed-3 --drafter none", "fixed-3 needs a drafter; name one"),
            ("--arms dcut --target elsewhere", "dcut needs a drafter; name one"),
            ("--arms published --drafter none", "with --drafter, or run --arms ar"),
        ],
    )
    def test_refused_before_any_work(self, refusal, flags, message):
        assert message in refusal(bench, *flags.split())

    def test_no_drafter_is_shipped(self, prompts, tmp_path):
        flags = [*TARGET, *prompts, "--no-plot", "--out", str(tmp_path)]
        with pytest.raises(ValueError, match="no drafter is shipped.*--drafter none"):
            bench.main(flags)

    def test_missing_packages_are_named_before_any_work(
        self, nothing_loads, tmp_path, monkeypatch
    ):
        out = ["--out", str(tmp_path / "out")]
        for name in ("torch", "matplotlib", "matplotlib.figure"):
            monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(ImportError, match="`pip install matplotlib`.*--no-plot"):
            bench.main(out)
        with pytest.raises(ImportError, match="`pip install torch transformers`"):
            bench.main([*out, "--no-plot", "--peer", "transformers"])
        assert not (tmp_path / "out").exists()

    def test_a_record_survives_a_picture_that_fails(
        self, prompts, tmp_path, monkeypatch
    ):
        def fail(*args):
            raise RuntimeError("no picture")

        monkeypatch.setattr(bench, "require_matplotlib", lambda: None)
        monkeypatch.setattr(bench, "plot", fail)
        monkeypatch.setattr(bench, "run_rounds", lambda *args, **more: [])
        monkeypatch.setattr(bench, "build", lambda *args: ({}, 0.0))
        monkeypatch.setattr(bench, "prefill_all", lambda *args: [])
        flags = "--arms ar --batch-sizes 2 --limit 2 --max-new-tokens 4".split()
        with pytest.raises(RuntimeError, match="no picture"):
            bench.main([*TARGET, *prompts, *flags, "--out", str(tmp_path)])
        BenchResult.from_json((tmp_path / "bench.json").read_text())

    @pytest.mark.parametrize(
        ("dtype", "gap", "wrong"),
        [
            ("float32", 9e-5, []),
            ("float32", -2e-4, ["dcut"]),
            ("float32", float("nan"), ["dcut"]),
            ("bfloat16", -0.2, []),
            ("bfloat16", 0.3, ["dcut"]),
            ("float16", 0.03, []),
            ("float16", 0.04, ["dcut"]),
        ],
    )
    def test_only_near_ties_are_forgiven(self, dtype, gap, wrong):
        checks = [
            TextCheck("ar", 1, 9, ()),
            TextCheck("dcut", 1, 9, (Difference(0, 3, 8, gap, 1, 2),)),
            TextCheck("transformers", 1, 9, (Difference(0, 3, 8, 9.0, 1, 2),)),
        ]
        assert wrong_arms(checks, NEAR_TIE[dtype]) == wrong


class TestGenerate:
    FLAGS = "--batch-size 2 --max-new-tokens 6".split()

    def test_every_mode_prints_the_same_text(self, prompts, tmp_path, capsys):
        texts = {}
        for mode, *more in (["ar"], ["fixed", "--width", "3"], ["dcut"]):
            if mode == "dcut":
                more = ["--cost-dir", str(tmp_path / "cost")]
            flags = [*PAIR, *prompts, *self.FLAGS, "--mode", mode, *more]
            assert generate.main(flags) == 0
            texts[mode] = capsys.readouterr().out
        lines = texts["ar"].splitlines()
        assert lines[::2] == [f"--- {t!r}" for t in TEXTS]
        assert all(len(line.split()) <= 6 for line in lines[1::2])
        assert texts["fixed"] == texts["dcut"] == texts["ar"]
        assert len(list((tmp_path / "cost").iterdir())) == 1

    def test_fairness_and_patience_reach_the_policy(
        self, prompts, tmp_path, capsys, monkeypatch
    ):
        flags = [*PAIR, *prompts, *self.FLAGS]
        generate.main([*flags, "--mode", "ar"])
        text, built = capsys.readouterr().out, []
        build = generate.build_engine

        def kept(*args, **kwargs):
            built.append(build(*args, **kwargs))
            return built[-1]

        monkeypatch.setattr(generate, "build_engine", kept)
        wishes = ["--fairness", "proportional", "--patience", "4"]
        cost = ["--costs", "roofline", "--cost-dir", str(tmp_path / "cost")]
        assert generate.main([*flags, *cost, *wishes]) == 0
        assert capsys.readouterr().out == text
        [engine] = built
        found = engine.policy.fairness, engine.policy.patience
        assert found == ("proportional", 4)

    def test_computed_costs_need_no_measuring(self, prompts, tmp_path, capsys):
        flags = [*PAIR, *prompts, *self.FLAGS]
        generate.main([*flags, "--mode", "ar"])
        text = capsys.readouterr().out
        cost = ["--costs", "roofline", "--cost-dir", str(tmp_path / "cost")]
        assert generate.main([*flags, *cost]) == 0
        assert capsys.readouterr().out == text
        assert not (tmp_path / "cost").exists()

    @pytest.mark.slow
    def test_draws_are_the_same_in_every_mode(self, prompts, tmp_path, capsys):
        draws = "--temperature 1.5 --top-p 0.95 --seed 3".split()
        texts = {}
        for mode, *more in (["ar"], ["fixed", "--width", "3"]):
            flags = [*PAIR, *prompts, *self.FLAGS, "--mode", mode, *more]
            generate.main([*flags, *draws])
            texts[mode] = capsys.readouterr().out
            generate.main(flags)
            assert capsys.readouterr().out != texts[mode]
        assert texts["fixed"] == texts["ar"]

    def test_stop_strings_end_texts_before_them(self, prompts, capsys):
        generate.main([*PAIR, *prompts, *self.FLAGS, "--mode", "ar"])
        whole = capsys.readouterr().out.splitlines()[1::2]
        # From the middle of a token to the middle of another, and one that comes later.
        first, second = whole[0].split()[2:4]
        assert len(first) == len(second) == 2
        stop = f"{first[1]} {second[0]}"
        flags = [*PAIR, *prompts, *self.FLAGS, "--stop", stop, "--stop", second]
        texts = {}
        for mode, *more in (["ar"], ["fixed", "--width", "3"]):
            generate.main([*flags, "--mode", mode, *more])
            texts[mode] = capsys.readouterr().out.splitlines()[1::2]
        assert texts["ar"][0] == whole[0][: whole[0].index(stop)]
        for text, line in zip(texts["ar"], whole, strict=True):
            assert line.startswith(text)
            assert stop not in text
        assert texts["fixed"] == texts["ar"]

    @pytest.mark.slow
    def test_logprobs_come_as_a_line_of_json(self, prompts, capsys):
        scores = {}
        for mode, *more in (["ar"], ["fixed", "--width", "3"]):
            flags = [*PAIR, *prompts, *self.FLAGS, "--mode", mode, *more]
            generate.main([*flags, "--logprobs"])
            lines = capsys.readouterr().out.splitlines()
            found = [json.loads(line) for line in lines[2::3]]
            for text, data in zip(lines[1::3], found, strict=True):
                assert text == Progressions().decode(data["tokens"])
                assert len(data["logprobs"]) == len(data["tokens"])
            scores[mode] = [x for data in found for x in data["logprobs"]]
        assert max(scores["ar"]) <= 0
        assert scores["fixed"] == pytest.approx(scores["ar"], abs=1e-4)

    def test_a_stop_string_of_nothing(self, refusal):
        message = "expected a text after --stop, found an empty one"
        assert message in refusal(generate, "hello", "--stop", "")

    @pytest.mark.parametrize("flag", ["--top-k", "--top-p", "--min-p", "--seed"])
    def test_settings_of_draws_without_draws(self, flag, nothing_loads, capsys):
        with pytest.raises(SystemExit):
            generate.main(["hello", flag, "1"])
        assert f"{flag} is of draws" in capsys.readouterr().err

    def test_without_a_drafter_it_decodes_plainly(self, capsys):
        assert generate.main([*TARGET, *self.FLAGS, *TEXTS]) == 0
        first = capsys.readouterr()
        assert "no drafter is shipped for target" in first.err
        flags = [*TARGET, "--drafter", "none", *self.FLAGS]
        assert generate.main([*flags, *TEXTS]) == 0
        second = capsys.readouterr()
        assert second.out == first.out
        assert "shipped" not in second.err

    def test_a_person_is_told_that_input_is_waited_for(self, monkeypatch, capsys):
        class Terminal(io.StringIO):
            def isatty(self):
                return True

        monkeypatch.setattr(sys, "stdin", Terminal("3 1\n"))
        assert generate.read_input() == "3 1"
        assert "reading a prompt from standard input" in capsys.readouterr().err
        monkeypatch.setattr(sys, "stdin", io.StringIO(""))
        with pytest.raises(ValueError, match="found an empty text"):
            generate.main([])
        assert capsys.readouterr().err == ""

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            ("--width 3", "--width belongs to --mode fixed; the mode is dcut"),
            ("--mode ar --width 3", "--width belongs to --mode fixed"),
            ("--limit 3 hello", "--limit belongs to --prompts"),
            ("--mode fixed --cost-dir x", "--cost-dir belongs to --mode dcut"),
            ("--drafter none --cost-dir x", "belongs to --mode dcut; the mode is ar"),
            ("--mode ar --costs roofline", "--costs belongs to --mode dcut"),
            ("--mode fixed --patience 4", "--patience belongs to --mode dcut"),
            ("--mode ar --fairness equal", "--fairness belongs to --mode dcut"),
            ("--drafter none --mode dcut", "--mode dcut needs a drafter; name one"),
            ("--target elsewhere --mode fixed", "--mode fixed needs a drafter"),
            ("--prompts default hello", "not both"),
        ],
    )
    def test_refused_before_any_work(self, refusal, flags, message):
        assert message in refusal(generate, *flags.split())

    def test_a_width_beyond_the_block(self):
        with pytest.raises(ValueError, match="width of 1 to 7 drafts.*found 8"):
            generate.main([*PAIR, "--mode", "fixed", "--width", "8", "3 1"])

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"costs": "roofline"}, "costs: expected mode 'dcut', .* found mode 'ar'"),
            ({"cost_dir": Path("x")}, "cost_dir: expected mode 'dcut'"),
            ({"costs": "rooflin"}, "costs 'rooflin' are unknown; choose from"),
        ],
    )
    def test_what_a_mode_does_not_heed_is_refused(self, options, message):
        pair = load_pair(str(GOLDEN / "target"), "none", "float32", "float32")
        with pytest.raises(ValueError, match=message):
            modes.build_engine(pair, EngineConfig(1, 24), "ar", None, list, **options)

    def test_a_block_shorter_than_the_default_width(self, monkeypatch):
        monkeypatch.setattr(modes, "WIDTH", 99)
        pair = load_pair(*PAIR[1::2][:2], "float32", "float32")
        found = modes.build_engine(pair, EngineConfig(1, 24), "fixed", None, list)
        assert found.policy == policy.FixedPolicy(7)

    def test_plain_decoding_keeps_the_target_of_synthetic_drafts(self, monkeypatch):
        asked = []

        def load(target, drafter, *rest):
            asked.append(drafter)
            raise ValueError("enough")

        monkeypatch.setattr(generate, "load_pair", load)
        for drafter in ("synthetic:some.json", "some/drafter"):
            words = ["--target", "random:some.toml", "--drafter", drafter, "a"]
            with pytest.raises(ValueError, match="enough"):
                generate.main([*words, "--mode", "ar"])
        assert asked == ["synthetic:some.json", "none"]


class TestProfile:
    def test_other_batch_sizes_stay_until_it_starts_afresh(self, tmp_path, capsys):
        def run(*more):
            flags = "--batch-sizes 2 --max-length 100 --rounds 1 --cost-dir".split()
            assert profile.main([*PAIR, *flags, str(tmp_path), *more]) == 0
            [path] = tmp_path.iterdir()
            assert str(path) in capsys.readouterr().out
            return path, CostTable.load(path)

        path, table = run()
        assert table.plan.keys() == {(2,)}
        dataclasses.replace(table, plan={(64,): (1.5,)}).save(path)
        table = run()[1]
        assert table.plan.keys() == {(2,), (64,)}
        assert table.plan[64,] == (1.5,)
        path.write_text("{}")
        with pytest.raises(CostError, match="--fresh starts it over"):
            run()
        assert run("--fresh")[1].plan.keys() == {(2,)}

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            ("--drafter none", "needs a drafter; name one with --drafter"),
            ("--target elsewhere", "needs a drafter; name one with --drafter"),
            ("--batch-sizes 4,4", "4 is there twice"),
        ],
    )
    def test_refused_before_any_work(self, refusal, flags, message):
        assert message in refusal(profile, *flags.split())


class TestRun:
    @staticmethod
    def mistake(argv):
        raise ValueError("expected this, found that")

    def test_an_error_is_one_line_that_says_how_to_see_more(self, monkeypatch):
        monkeypatch.delenv("DCUT_TRACEBACK", raising=False)
        with pytest.raises(SystemExit) as caught:
            cli.run(self.mistake)
        assert caught.value.code == (
            "error: expected this, found that (set DCUT_TRACEBACK=1 to see where)"
        )

    def test_or_the_error_itself(self, monkeypatch):
        monkeypatch.setenv("DCUT_TRACEBACK", "1")
        with pytest.raises(ValueError, match="found that$"):
            cli.run(self.mistake)

    def test_the_status_of_a_command(self):
        with pytest.raises(SystemExit) as caught:
            cli.run(lambda argv: 1)
        assert caught.value.code == 1


@pytest.mark.parametrize(
    ("text", "size"),
    [("512MiB", 2**29), ("4GiB", 2**32), ("1.5 KiB", 1536), ("700", 700)],
)
def test_sizes_of_memory(text, size):
    assert cli.memory_size(text) == size
    args = generate.parser().parse_args(["hello", "--kv-memory", text])
    assert args.kv_memory == size


@pytest.mark.parametrize("text", ["", "0", "-1", "4GB", "MiB", "1e9", "0.1"])
def test_sizes_that_are_none(text):
    with pytest.raises(Exception, match="expected a size such as 512MiB"):
        cli.memory_size(text)
