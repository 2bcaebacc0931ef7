"""What an evaluation counts, on a tiny pair and by hand; and what it refuses."""

import dataclasses
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from dcut_jax.config import ConfigError
from dcut_jax.cut.sts import Scaling
from dcut_jax.decode.compile import Compiler
from dcut_jax.decode.state import HostOutcome
from dcut_jax.engine.config import EngineConfig
from dcut_jax.engine.engine import Engine
from dcut_jax.engine.load import load_pair
from dcut_jax.engine.policy import ArPolicy, FixedPolicy
from dcut_jax.engine.requests import Request
from dcut_jax.prompts import PromptError
from dcut_jax.train import __main__ as command
from dcut_jax.train import candidates, evaluate, report
from dcut_jax.train.evaluate import Evaluation, SetResult, Speed
from dcut_jax.train.evaluate import WidthResult as Width
from dcut_jax.train.loop import make_trainer
from dcut_jax.train.tally import Fit, Slot, Tally
from dcut_jax.weights.errors import CheckpointError
from dcut_jax.weights.load import Target

NAN = float("nan")
TEXTS = {"easy": ["3 1", "7 2", "20 3", "11 5"], "hard": ["2 6", "9 4"]}


@pytest.fixture(scope="module")
def compilers():
    """By drafter: whatever has the same shapes compiles once."""
    return {}


@pytest.fixture
def tokenized(compilers, monkeypatch, tokenizer):
    """A tokenizer for the target, and executables that tests share."""

    def compiler(models, cache_dtype):
        if models.drafter not in compilers:
            compilers[models.drafter] = Compiler(models, cache_dtype)
        return compilers[models.drafter]

    monkeypatch.setattr(evaluate, "Compiler", compiler)
    monkeypatch.setattr(Target, "text", lambda self: tokenizer)
    return compiler


@pytest.fixture
def prompts(tmp_path):
    found = []
    for name, texts in TEXTS.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"prompt": t}) + "\n" for t in texts))
        found.append(str(path))
    return found


@pytest.fixture
def nothing_loads(monkeypatch):
    def load(*args):
        raise AssertionError("loaded a model before refusing")

    monkeypatch.setattr(command, "load_pair", load)
    monkeypatch.setattr(candidates, "export", load)


def outcome(count, accepted):
    zero_B = np.zeros(len(count), bool)
    accepted_B = np.array(accepted)
    return HostOutcome(
        None, np.array(count), accepted_B, accepted_B, zero_B, None, 0, None
    )


def test_a_tally_by_hand():
    tally = Tally(3)
    chance_BK = np.array(
        [
            [0.91, 0.81, 0.71, NAN],  # two accepted, then the target's own token
            [0.61, 0.51, 0.41, NAN],  # the first rejected
            [0.97, 0.95, 0.93, NAN],  # three accepted, the text ends with the second
            [0.5, 0.5, 0.5, 0.5],  # no request
        ]
    )
    logp = np.log(chance_BK).astype(np.float32)
    tally(logp, outcome([3, 1, 2, 0], [2, 0, 3, 0]))
    # One accepted, and the target's own token is the last of the text.
    tally(logp, outcome([2, 0, 0, 0], [1, 0, 0, 0]))

    assert tally.slots() == (Slot(4, 3), Slot(3, 2), Slot(1, 0))
    assert [s.rate for s in tally.slots()] == pytest.approx([3 / 4, 2 / 3, 0])

    confidence, survival = tally.fits()
    # Reached: 0.91 0.81 0.71 | 0.61 | 0.97 0.95 | 0.91 0.81, of which accepted: the
    # first two, the third row's both, and 0.91 of the last.
    bins = {round(p, 3): (n, s) for n, p, s in confidence.bins if n}
    assert bins == {
        0.935: (4, 1.0),  # 0.91, 0.97, 0.95, 0.91
        0.81: (2, 0.5),
        0.71: (1, 0.0),
        0.61: (1, 0.0),
    }
    assert confidence.drafts == 8
    gaps = 4 * (1 - 0.935) + 2 * (0.81 - 0.5) + 0.71 + 0.61
    assert confidence.ece == pytest.approx(gaps / 8, rel=1e-5)
    # Accepted: four above all others, and one tie with a rejected 0.81.
    assert confidence.auc == pytest.approx((4 * 3 + 2.5) / 15)
    # Of survivals all that were verified within the text count, reached or not.
    assert survival.drafts == 3 + 3 + 2 + 3
    survived = sum(n * s for n, _, s in survival.bins if n)
    assert survived == pytest.approx(2 + 0 + 2 + 1)


def test_temperatures_are_judged_on_texts_they_were_not_fitted_on():
    """Two slots; each decodes a sure text and then an unsure one, or the reverse."""
    tally = Tally(1)
    sure, never = np.log(np.float32(0.9)), np.log(np.float32(0.2))

    def step(first, second, accepted, finished):
        logp_BK = np.array([[first], [second]])
        told = outcome(np.add(accepted, 1), accepted)
        tally(logp_BK, told._replace(finished_B=np.array(finished)))

    # Texts 0 and 1, then 2 and 3: drafts of odd texts are always accepted.
    for finished in ([False, False], [True, True]):
        step(sure, never, [0, 1], finished)
    for _ in range(2):
        step(never, sure, [0, 1], [False, False])
    found = tally.scaling()
    assert found.drafts == (8,)
    # Even texts: 0.9 and 0.2 twice each, and all rejected; odd ones the mirror.
    assert found.before == pytest.approx(((0.9 + 0.2) / 2 * 0.5 + (0.1 + 0.8) / 4,))
    # Of even texts one learns the hottest 0.9, the coldest 0.2, and the reverse of odd
    # ones; no temperature does both, and what one half asks for costs the other.
    assert found.error_after > 0.3
    alone = Tally(1)
    alone(np.array([[sure]]), outcome([2], [1]))
    assert alone.scaling() is None


@pytest.fixture(scope="module")
def pair(golden):
    drafter = str(golden / "full")
    return load_pair(str(golden / "target"), drafter, "float32", "float32")


@pytest.mark.slow
def test_counts_are_those_of_steps_one_by_one(pair, tokenized, tokenizer):
    """Batches, refills and ends of texts, against one request after another."""
    width, config = 7, EngineConfig(2, 32, 2)
    compiler = tokenized(pair.models, "float32")
    alone = tokenized(pair.without_drafter(), "float32")
    prompts = [tokenizer.chat([{"content": t}]) for t in TEXTS["easy"]]
    requests = [Request(tuple(p), 9 + i, (0, 100)) for i, p in enumerate(prompts)]
    reached, accepted = np.zeros((2, width), int)
    engine = Engine(pair.models, config, FixedPolicy(width), compiler=compiler)
    tokens = steps = 0
    for request in requests:
        done = engine.admit(engine.prefill(request))
        while done.finish == "running":
            before = len(done.tokens), done.accepted
            engine.step()
            count, agreed = len(done.tokens) - before[0], done.accepted - before[1]
            for k in range(1, width + 1):
                # Draft k is the k-th token of the step, if the text goes that far.
                reached[k - 1] += k <= min(count, agreed + 1)
                accepted[k - 1] += k <= min(count, agreed)
            tokens, steps = tokens + count, steps + 1

    plain = Engine(pair.without_drafter(), config, ArPolicy(), compiler=alone)
    engines = {0: plain, width: engine}
    told = []
    found = evaluate.evaluate_set(
        "easy", requests, engines, rounds=2, on_progress=told.append
    )
    [result] = found.widths
    assert [(s.reached, s.accepted) for s in result.slots] == list(
        zip(reached.tolist(), accepted.tolist(), strict=True)
    )
    assert (result.tokens, result.steps) == (tokens, steps)
    assert result.mean_accepted_length == tokens / steps > 1.5
    assert result.texts_differ == 0
    assert result.confidence.drafts == reached.sum()
    assert result.scaling.drafts[0] == result.survival.drafts - sum(
        result.scaling.drafts[1:]
    )
    assert len(result.speeds) == len(found.ar) == len(result.ratios) == 2
    assert {s.tokens for s in (*result.speeds, *found.ar)} == {tokens}
    assert len(told) == evaluate.passes(1, 1, 2)
    assert engines[width].on_drafts is None


def test_texts_without_a_step_are_refused(pair, tokenized):
    plain, config = pair.without_drafter(), EngineConfig(2, 32, 2)
    compiler = tokenized(plain, "float32")
    engine = Engine(plain, config, ArPolicy(), compiler=compiler)
    first = engine.prefill(Request((1, 2, 3), 4)).first_token
    request = Request((1, 2, 3), 4, (first,))
    with pytest.raises(ValueError, match="some: expected texts.*use other prompts"):
        evaluate.evaluate_set("some", [request], {0: engine}, rounds=1)


def made_up():
    fit = Fit(4, 0.25, NAN, ((0, NAN, NAN), (4, 0.75, 0.5)))
    width = Width(
        width=3,
        steps=4,
        tokens=10,
        slots=(Slot(4, 3), Slot(3, 3), Slot(0, 0)),
        confidence=fit,
        survival=fit,
        scaling=Scaling((2.0, 0.5, 1.0), (4, 2, 0), (0.3, 0.15, NAN), (0.2, 0.1, NAN)),
        speeds=(Speed(10, 1.0), Speed(10, 2.0), Speed(10, 1.25)),
        ratios=(2.0, 1.5, 1.75),
        texts_differ=1,
    )
    ar = (Speed(10, 2.0), Speed(10, 3.0), Speed(10, 2.5))
    return Evaluation(
        command="python -m dcut_jax.train eval run",
        date="2026-01-02T03:04:05+00:00",
        machine={"device": "cpu"},
        target="tiny",
        target_identity="0123",
        drafter="run",
        step=7,
        dtype="float32",
        draft_dtype="bfloat16",
        batch_size=2,
        max_new_tokens=8,
        sets=(SetResult("easy", 4, ar, (width,)),),
    )


def test_the_record_of_an_evaluation_by_hand():
    found = json.loads(report.to_json(made_up()))
    assert (found["version"], found["step"], found["drafter"]) == (1, 7, "run")
    [one] = found["sets"]
    assert (one["name"], one["prompts"]) == ("easy", 4)
    assert one["ar"]["tokens_per_s"] == {"median": 4.0, "low": 10 / 3, "high": 5.0}
    [width] = one["widths"]
    assert width["mean_accepted_length"] == 2.5
    assert width["slots"] == [
        {"slot": 1, "reached": 4, "accepted": 3, "rate": 0.75},
        {"slot": 2, "reached": 3, "accepted": 3, "rate": 1.0},
        {"slot": 3, "reached": 0, "accepted": 0, "rate": None},
    ]
    assert width["confidence"]["auc"] is None
    assert width["confidence"]["bins"] == [
        {"drafts": 0, "predicted": None, "happened": None},
        {"drafts": 4, "predicted": 0.75, "happened": 0.5},
    ]
    assert width["rounds"][1] == {"tokens": 10, "seconds": 2.0}
    assert width["tokens_per_s"] == {"median": 8.0, "low": 5.0, "high": 10.0}
    assert width["ratio"] == {"median": 1.75, "low": 1.5, "high": 2.0}
    assert width["texts_differ"] == 1
    assert width["scaling"]["error_before"] == pytest.approx((4 * 0.3 + 2 * 0.15) / 6)
    assert width["scaling"]["error_after"] == pytest.approx((4 * 0.2 + 2 * 0.1) / 6)
    assert width["scaling"]["by_draft"][1:] == [
        {"temperature": 0.5, "drafts": 2, "before": 0.15, "after": 0.1},
        {"temperature": 1.0, "drafts": 0, "before": None, "after": None},
    ]
    assert found["mean_accepted_length"] == {"easy": {"3": 2.5}}
    assert "at least 1" in found["definitions"]["mean_accepted_length"]


def test_the_table_of_an_evaluation():
    text = report.render_tables(made_up())
    assert max(map(len, text.splitlines())) <= report.COLUMNS
    [ar] = [line for line in text.splitlines() if " AR " in line and "easy" in line]
    assert ar.split() == ["easy", "AR", "1.00", "4"]
    [row] = [line for line in text.splitlines() if "1.50–2.00" in line]
    assert row.split() == "3 2.50 0.75 1.00 0.250 8 1.75 1.50–2.00".split()
    assert "1 text is not AR's" in text
    rows = [line for line in text.splitlines() if line.strip().startswith("easy")]
    scaled, length = rows[1:]
    assert scaled.split() == "easy 3 0.250 0.167 2.00 0.50 1.00".split()
    assert length.split() == ["easy", "4", "2.50"]
    [one] = made_up().sets
    alone = dataclasses.replace(one.widths[0], scaling=None)
    single = dataclasses.replace(
        made_up(), sets=(dataclasses.replace(one, widths=(alone,)),)
    )
    assert "one text only" in report.render_tables(single)


def test_counts_without_times():
    [one] = made_up().sets
    width = dataclasses.replace(one.widths[0], speeds=(), ratios=())
    untimed = dataclasses.replace(one, ar=(), widths=(width,))
    found = dataclasses.replace(made_up(), sets=(untimed,))
    text = report.render_tables(found)
    [row] = [line for line in text.splitlines() if line.split()[:2] == ["3", "2.50"]]
    assert row.split() == "3 2.50 0.75 1.00 0.250".split()
    assert "nothing timed" in text
    [one] = json.loads(report.to_json(found))["sets"]
    assert one["widths"][0]["ratio"] == {"median": None, "low": None, "high": None}


def test_the_picture_of_an_evaluation(tmp_path):
    pytest.importorskip("matplotlib")
    report.plot(made_up(), tmp_path / "new" / "eval.png")
    assert (tmp_path / "new" / "eval.png").stat().st_size > 10_000


def flags(golden, prompts, out):
    places = ["--data", *prompts, "--out", str(out), "--target", str(golden / "target")]
    few = "--max-new-tokens 6 --batch-size 2 --rounds 1 --draft-dtype float32"
    return [*places, *few.split()]


@pytest.mark.slow
def test_an_exported_drafter(golden, prompts, tokenized, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out = tmp_path / "out"
    where = flags(golden, prompts, out)
    drafter = str(golden / "full")
    assert command.main(["eval", drafter, *where, "--widths", "7,3"]) == 0
    printed = capsys.readouterr().out
    assert f"wrote {out / 'eval.json'}, {out / 'eval.png'}" in printed
    found = json.loads((out / "eval.json").read_text())
    assert (found["drafter"], found["step"]) == ("full", None)
    sets = [(s["name"], s["prompts"]) for s in found["sets"]]
    assert sets == [("easy", 4), ("hard", 2)]
    for one in found["sets"]:
        assert [w["width"] for w in one["widths"]] == [3, 7]
        for width in one["widths"]:
            assert width["texts_differ"] == 0
            assert width["mean_accepted_length"] == width["tokens"] / width["steps"]
            assert len(width["slots"]) == width["width"]
            assert width["ratio"]["low"] > 0


@pytest.mark.slow
def test_a_run(config, prompts, tokenized, tmp_path, golden):
    run = make_trainer(dataclasses.replace(config, steps=2, eval_fraction=0.0))
    run.run()
    out = tmp_path / "out"
    where = [f for f in flags(golden, prompts[:1], out) if "golden" not in f]
    where.remove("--target")  # it is the run's own
    few = ["--limit", "1", "--widths", "2", "--no-plot"]
    assert command.main(["eval", config.out, *where, *few]) == 0
    found = json.loads((out / "eval.json").read_text())
    assert (found["drafter"], found["step"], found["target"]) == ("run", 2, "target")
    assert [s["prompts"] for s in found["sets"]] == [1]
    assert not (out / "eval.png").exists()


class TestRefusals:
    @pytest.fixture(autouse=True)
    def no_plot(self, monkeypatch):
        monkeypatch.setattr(command, "require_matplotlib", lambda: None)

    def test_prompts(self, golden, prompts, nothing_loads, tmp_path):
        def run(*data):
            return command.main(["eval", str(golden / "full"), "--data", *data])

        with pytest.raises(PromptError, match=r"none\.jsonl.*found nothing there"):
            run(prompts[0], str(tmp_path / "none.jsonl"))
        with open(prompts[1], "a") as file:
            file.write('{"prompt": "3 \n')
        with pytest.raises(PromptError, match=r"hard\.jsonl:3: expected a JSON object"):
            run(*prompts)
        with pytest.raises(PromptError, match="'easy' twice; rename"):
            run(prompts[0], prompts[0])

    def test_widths(self, golden, config, prompts, nothing_loads):
        for drafter, most in ((str(golden / "full"), 7), (config.out, 7)):
            if drafter == config.out:
                (Path(drafter) / "checkpoints").mkdir(parents=True)
                text = json.dumps(dataclasses.asdict(config))
                Path(drafter, "config.json").write_text(text)
            given = ["eval", drafter, "--data", *prompts, "--widths"]
            with pytest.raises(ConfigError, match=f"1 to {most} drafts.*found 8, 9"):
                command.main([*given, "3,8,9"])
        assert candidates.choose_widths(None, 7) == (3, 7)
        assert candidates.choose_widths(None, 20) == (3, 7, 15, 20)
        assert candidates.choose_widths(None, 31) == (3, 7, 15, 31)

    def test_what_is_no_drafter(self, prompts, nothing_loads, tmp_path):
        (tmp_path / "some").mkdir()
        (tmp_path / "some" / "config.json").write_text("{}")
        for name, found in (("nowhere", "nothing;"), ("some", "config.json;")):
            with pytest.raises(CheckpointError, match=f"or an exported.*found {found}"):
                command.main(["eval", str(tmp_path / name), "--data", *prompts])

    def test_a_drafter_of_another_target(self, golden, prompts, tokenized, tmp_path):
        theirs = tmp_path / "theirs"
        shutil.copytree(golden / "full", theirs)
        manifest = {"target": {"name": "another", "identity": "fedc"}}
        (theirs / "manifest.json").write_text(json.dumps(manifest))
        where = flags(golden, prompts, tmp_path / "out")
        message = r"expected target another \(fedc\).*found target \([0-9a-f]+\)"
        with pytest.raises(ConfigError, match=message):
            command.main(["eval", str(theirs), *where])
        described = json.loads((theirs / "config.json").read_text())
        (theirs / "config.json").write_text(
            json.dumps(described | {"num_target_layers": 9})
        )
        with pytest.raises(ConfigError, match="belongs to another target"):
            command.main(["eval", str(theirs), *where])
        assert not list((tmp_path / "out").iterdir())

    def test_a_single_token(self, golden, prompts, nothing_loads, capsys):
        given = ["eval", str(golden / "full"), "--data", *prompts]
        with pytest.raises(SystemExit):
            command.main([*given, "--max-new-tokens", "1"])
        assert "expected at least 2, found 1" in capsys.readouterr().err


def test_a_slot_that_was_never_reached_has_no_rate():
    assert math.isnan(Slot(0, 0).rate)
