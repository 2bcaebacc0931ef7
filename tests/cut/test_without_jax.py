"""The plan and the cost table serve engines that have no JAX."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module",
    [
        "dcut_jax.cut.experts",
        "dcut_jax.cut.numpy_plan",
        "dcut_jax.cut.sts",
        "dcut_jax.cut.choice",
        "dcut_jax.cut.evidence",
        "dcut_jax.cut.probes",
        "dcut_jax.cut.width",
        "dcut_jax.cost.devices",
        "dcut_jax.cost.experts",
        "dcut_jax.cost.table",
    ],
)
def test_it_imports_without_jax(module):
    code = f"import sys; sys.modules['jax'] = None; import {module}"
    subprocess.run([sys.executable, "-c", code], check=True)
