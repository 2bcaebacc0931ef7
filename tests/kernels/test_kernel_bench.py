"""The kernels' bench, on the device at hand."""

import json

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import bench


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="about the CPU")
def test_on_a_cpu_it_checks_and_claims_no_speed(capsys):
    assert bench.main(["--lower", "tpu"]) == 0
    out = capsys.readouterr().out
    assert "no speed is claimed" in out
    records = json.loads(out.splitlines()[-1])["records"]
    names = {r["work"].split()[0] for r in records}
    assert names == {"budget_topk", "confidence", "attention"}
    assert all(r["checked"] == "equal" or r["lowered"] for r in records)
    assert all(r["median_ms"] is None for r in records)


def test_timing_finds_every_form_of_the_device(monkeypatch):
    """The part that runs on accelerators, tried here with tiny sizes."""
    monkeypatch.setattr(bench, "REPEATS", 2)
    monkeypatch.setattr(bench, "copy_rate", lambda: 1e6)
    monkeypatch.setattr(bench, "product_rate", lambda: 1e6)
    works = (bench.topk_work(4, 3, 2), bench.confidence_work(2, 8, 40))
    records = list(bench.time_here(works, jax.devices()[0]))
    assert {r.work for r in records} == {w.name for w in works}
    assert all(r.checked == "equal" and r.median_ms > 0 for r in records)
    assert records[-1].floor_ms == max(2 * 40 * 8 + 4 * 2 * 8, 2 * 2 * 8 * 40) / 1e6
    assert "equal" in bench.table(records)


def test_a_wrong_result_fails_the_command():
    exact = (jnp.array([1, 2]), jnp.array([0.5]))
    assert bench.difference(exact, exact) == "equal"
    assert bench.difference(exact, (jnp.array([1, 3]), jnp.array([0.5]))) != "equal"
    assert "0.25" in bench.difference(exact, (exact[0], jnp.array([0.25])))
    for wrong in (jnp.nan, jnp.inf):
        assert "inf" in bench.difference(exact, (exact[0], jnp.array([wrong])))
        assert "inf" in bench.difference((exact[0], jnp.array([wrong])), exact)
    both = (jnp.array([jnp.inf]),)
    assert bench.difference(both, both) == "equal"


def test_a_form_that_fails_hides_no_other(monkeypatch):
    monkeypatch.setattr(bench, "REPEATS", 1)
    monkeypatch.setattr(bench, "copy_rate", lambda: 1e6)
    monkeypatch.setattr(bench, "product_rate", lambda: 1e6)

    def run(backend):
        if backend != "xla":
            raise RuntimeError("not\n installed")
        return jnp.negative

    def args():
        return (jnp.ones(3),)

    broken = bench.Work("broken", run, args, 1, 1, ("pallas_interpret",))
    records = list(
        bench.time_here([broken, bench.topk_work(4, 3, 2)], jax.devices()[0])
    )
    assert [r.checked for r in records] == ["equal", "fails: not installed", "equal"]
    assert records[1].median_ms is None
    assert "not installed" in bench.table(records)
