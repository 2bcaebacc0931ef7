"""One of several processes that serve the tiny wide pair: `process.py FLAGS...`."""

import importlib.util
import os
import sys
from dataclasses import replace
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"


def conftest(folder):
    path = Path(__file__).parents[1] / folder / "conftest.py"
    spec = importlib.util.spec_from_file_location(f"{folder}_conftest", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


from dcut_jax.cli import run  # noqa: E402
from dcut_jax.engine import load, policy  # noqa: E402
from dcut_jax.serve import __main__ as command  # noqa: E402
from dcut_jax.weights.load import Target  # noqa: E402

of_engine, of_serve = conftest("engine"), conftest("serve")
narrow = load._load_pair


def wide_pair(*args):
    pair = narrow(*args)
    return replace(pair, models=of_engine.widen(pair.models))


load._load_pair = wide_pair
Target.text = lambda self: of_serve.tokenizer()
policy.WIDTHS = (7,)
policy.TIER_FACTORS = (1.0, 2.0)
command.filling = lambda text: [5, 6, 7, 8]
run(lambda _: command.main(sys.argv[1:]))
