"""Advice on layouts: what it must say, and that it needs no device."""

import json

import pytest

from dcut_jax.bench import advise as a
from dcut_jax.cost import __main__ as command
from dcut_jax.cost.devices import find_device
from dcut_jax.cost.mesh import MeshShape
from dcut_jax.cost.shapes import read_shape, targets_directory, usual_drafter


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    monkeypatch.setattr(a, "MOST_STEPS", 40)
    monkeypatch.setattr(a, "WARM_STEPS", 8)


def asked(name="qwen3-30b-a3b", kind="H200", devices=2, batches=(2, 16)):
    target = read_shape(targets_directory() / f"{name}.toml")
    drafter = usual_drafter(target)
    return a.Asked(find_device(kind), devices, target, drafter, batches, 512, 1024)


def test_every_mesh_of_every_strategy_is_there():
    found = {(p.strategy, str(p)) for p in a.all_meshes(8)}
    assert ("dp", "data=8") in found
    assert ("tp+ep", "expert=4,model=2") in found
    assert len(found) == 3 + 3 * 2  # three that use one axis, and two splits of pairs
    assert [p.strategy for p in a.all_meshes(1)] == ["single"]
    assert a.layout_count(8) == len(found)


def test_predictions_of_a_mixture():
    advice = a.advise(asked())
    by = {layout.strategy: layout for layout in advice.layouts}
    assert set(by) == {"dp", "tp", "ep"}
    assert by["ep"].weights_gb < by["dp"].weights_gb < 66
    for layout in advice.layouts:
        assert layout.impossible == ""
        for p in layout.predictions:
            assert p.fits
            assert p.dcut_per_s > p.ar_per_s > 0  # rows are cheap at these batch sizes
            assert p.memory_gb > layout.weights_gb
            assert 1 <= p.mean_rows <= 16
    for batch in (2, 16):
        layout, best = advice.best(batch, dcut=True)
        rates = [p.dcut_per_s for x in advice.layouts for p in x.predictions
                 if p.batch == batch]  # fmt: skip
        assert best.dcut_per_s == max(rates)


def test_what_does_not_fit_has_no_rate():
    advice = a.advise(asked("qwen3-235b-a22b", "H100"))
    assert all(not p.fits for layout in advice.layouts for p in layout.predictions)
    assert advice.best(2, dcut=True) is None
    assert "none fits" in a.render(advice)


def test_a_dense_target_has_no_experts_to_split():
    one = a.layout_advice(asked("qwen3-8b"), MeshShape("ep", expert=2))
    assert "qwen3-8b has none; choose dp, tp or dp+tp" in one.impossible
    assert one.predictions == ()


def test_the_command(capsys):
    target = str(targets_directory() / "qwen3-8b.toml")
    flags = "--devices 2 --kind H20 --batch-sizes 16,2 --context 256".split()
    assert command.main(["advise", *flags, "--target", target]) == 0
    text = capsys.readouterr().out
    assert "not measured: qwen3-8b (8.2 billion parameters" in text
    for word in ("dp", "data=2", "tp", "model=2", "batch 2", "batch 16", "best layout"):
        assert word in text
    assert "left out: ep expert=2" in text
    assert "NVIDIA publishes no data sheet" in " ".join(text.split())
    assert command.main(["advise", *flags, "--target", target, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["source"] == "roofline"
    assert set(data["best"]) == {"2", "16"}
    assert [x["strategy"] for x in data["layouts"]] == ["dp", "tp", "ep"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--kind L40S", "expected a device kind with published peak rates"),
        ("--kind H20 --dtype float32 --target nowhere.toml", "configs/targets"),
    ],
)
def test_what_cannot_be_answered(flags, says):
    target = str(targets_directory() / "qwen3-8b.toml")
    with pytest.raises(ValueError, match=says):
        command.main(["advise", "--target", target, *flags.split()])


def test_a_cache_must_hold_the_context(capsys):
    with pytest.raises(SystemExit):
        command.main("advise --kind H20 --target x --max-length 100".split())
    assert "expected at least --context 2048, found 100" in capsys.readouterr().err
