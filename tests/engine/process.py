"""One process of several that decode with the tiny wide pair.

Usage: process.py RECORDS COMMAND FLAGS...; COMMAND is `generate` or `bench`. What the
host knew of every step, plans too, goes to RECORDS.
"""

import importlib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
sys.path.insert(0, str(Path(__file__).parent))

import conftest  # noqa: E402

from dcut_jax.cli import run  # noqa: E402
from dcut_jax.engine import engine, load, policy  # noqa: E402
from dcut_jax.weights.load import Target  # noqa: E402


class Numbers:
    """A tokenizer that reads and writes numbers."""

    eos_ids = (0, 100)

    def chat(self, messages):
        return [int(word) for word in messages[-1]["content"].split()]

    def decode(self, tokens):
        return " ".join(map(str, tokens))

    def has_text(self, token):
        return True


def wide_pair(*args):
    pair = narrow(*args)
    return replace(pair, models=conftest.widen(pair.models))


narrow = load._load_pair
load._load_pair = wide_pair
Target.text = lambda self: Numbers()
policy.WIDTHS = (7,)
policy.TIER_FACTORS = (1.0, 2.0)
records, command, *flags = sys.argv[1:]
module = importlib.import_module(
    {"generate": "dcut_jax.generate", "bench": "dcut_jax.bench.__main__"}[command]
)
absorb = engine.Engine._absorb


def watched(self, wire):
    absorb(self, wire)
    if self.records:
        last = self.records[-1]
        gains = None if last.decision is None else repr(last.decision)
        line = (last.width, last.rows, last.kept, last.committed, gains)
        with open(records, "a") as out:
            out.write(json.dumps(line) + "\n")


engine.Engine._absorb = watched
run(lambda _: module.main(flags))
