"""Backends: one table, asked with a device, and reasons for what does not run."""

from types import SimpleNamespace
from typing import get_args

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import backends
from pallas_kernels.backends import (
    DEFAULTS,
    FORMS,
    RUNS_ON,
    Backend,
    Backends,
    Kind,
    Operation,
)


def device(platform: str, capability: str | None = None):
    if capability is None:
        return SimpleNamespace(platform=platform)
    return SimpleNamespace(platform=platform, compute_capability=capability)


H200, B200, A100 = device("gpu", "9.0"), device("gpu", "10.0"), device("gpu", "8.0")
MI300, V5E, CPU = device("gpu", "gfx942"), device("tpu"), device("cpu")


@pytest.mark.parametrize(
    ("found", "kind"),
    [
        (H200, "hopper"),
        (B200, "hopper"),
        (A100, "gpu"),
        (MI300, "gpu"),
        (device("gpu"), "gpu"),
        (V5E, "tpu"),
        (CPU, "cpu"),
        (jax.devices("cpu")[0], "cpu"),
    ],
)
def test_a_device_has_one_row(found, kind):
    assert backends.device_kind(found) == kind


def test_every_default_runs_where_it_is_the_default():
    assert set(DEFAULTS) == set(get_args(Kind))
    for kind, found in [("cpu", CPU), ("gpu", A100), ("hopper", H200), ("tpu", V5E)]:
        DEFAULTS[kind].check(found)
    with pytest.raises(ValueError, match="this is a CPU"):
        DEFAULTS["tpu"].check(CPU)


def test_kernels_are_the_default_on_accelerators_that_run_it():
    assert backends.defaults(V5E).budget_topk == "pallas_tpu"
    assert backends.defaults(V5E).attention == "pallas_tpu"
    assert backends.defaults(H200).budget_topk == "pallas_mosaic_gpu"
    assert backends.defaults(A100).budget_topk == "xla"


@pytest.mark.parametrize(
    ("backend", "found", "message"),
    [
        ("pallas_tpu", CPU, 'runs on TPUs alone, and this is a CPU; use "xla" or'),
        ("pallas_tpu", H200, 'this is a GPU; use .* "pallas_mosaic_gpu"'),
        ("pallas_mosaic_gpu", A100, "this is a GPU below compute capability 9.0"),
        ("pallas_mosaic_gpu", V5E, 'this is a TPU; use .* "pallas_tpu"'),
        ("triton", H200, "no backend 'triton'; choose one of xla, pallas_tpu"),
    ],
)
def test_what_cannot_run_here_is_refused_with_the_reason(backend, found, message):
    with pytest.raises(ValueError, match=message):
        backends.check("budget_topk", backend, found)


def test_what_runs_anywhere_is_refused_nowhere():
    for found in (H200, A100, MI300, V5E, CPU):
        backends.PLAIN.check(found)
        for operation in ("budget_topk", "confidence", "attention"):
            backends.check(operation, "pallas_interpret", found)


@pytest.mark.parametrize("operation", get_args(Operation))
def test_every_operation_is_checked(operation):
    for form in FORMS[operation]:
        kind = dict.fromkeys(("cudnn", "pallas_mosaic_gpu", "tokamax"), H200)
        Backends(**{operation: form}).check((kind | {"pallas_tpu": V5E}).get(form, CPU))
    elsewhere = next(f for f in FORMS[operation] if "cpu" not in RUNS_ON[f])
    with pytest.raises(ValueError, match=f"of {operation} runs on .* this is a CPU"):
        Backends(**{operation: elsewhere}).check(CPU)


def test_only_forms_that_an_operation_has_are_offered():
    with pytest.raises(ValueError, match='use "xla" or "pallas_interpret"$'):
        backends.check("confidence", "pallas_tpu", H200)
    with pytest.raises(ValueError, match="confidence has no backend 'cudnn'"):
        Backends(confidence="cudnn").check(H200)


def test_an_unknown_platform_is_named():
    with pytest.raises(ValueError, match="'abacus'"):
        backends.device_kind(device("abacus"))


def test_a_requirement_that_is_met_changes_nothing():
    assert set(RUNS_ON) == set(get_args(Backend))
    assert backends.require(jnp.arange(3), "attention", "xla").tolist() == [0, 1, 2]
