"""Trains drafters.

`python -m dcut_jax.train prepare RESPONSES DATA`, `run CONFIG`, `export RUN OUT`.
"""

import argparse
import json
import sys
from collections.abc import Sequence

import jax.numpy as jnp

from dcut_jax.train.features import write_features
from dcut_jax.train.loop import export, make_trainer, read_config
from dcut_jax.weights.dflash import default_taps
from dcut_jax.weights.load import load_target


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m dcut_jax.train")
    commands = parser.add_subparsers(dest="command", required=True)
    prepare = commands.add_parser("prepare", help="features of the target's responses")
    prepare.add_argument("responses", help="JSONL with token lists prompt, response")
    prepare.add_argument("data", help="dataset to write or to continue")
    prepare.add_argument("--target", default="smollm2")
    prepare.add_argument("--taps", type=int, default=5, help="tapped layers")
    prepare.add_argument("--length", type=int, default=384, help="tokens kept")
    prepare.add_argument("--about", default="{}", help="JSON for the manifest")
    run = commands.add_parser("run", help="train, or go on with a run")
    run.add_argument("config", help="TOML file")
    run.add_argument("--data", help="dataset, in place of the config's")
    run.add_argument("--out", help="directory of the run, in place of the config's")
    run.add_argument("--steps", type=int, help="steps, in place of the config's")
    out = commands.add_parser("export", help="write the published layout, bfloat16")
    out.add_argument("run", help="directory of the run")
    out.add_argument("out", help="directory to write")
    args = parser.parse_args(argv)
    if args.command == "prepare":
        target = load_target(args.target, jnp.bfloat16)
        taps = default_taps(args.taps, target.cfg.layers)
        about = json.loads(args.about)
        write_features(target, args.responses, args.data, taps, about, args.length)
    elif args.command == "run":
        given = {"data": args.data, "out": args.out, "steps": args.steps}
        overrides = {k: v for k, v in given.items() if v is not None}
        make_trainer(read_config(args.config, overrides)).run()
    else:
        step = export(args.run, args.out)
        print(f"wrote {args.out}, step {step}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
