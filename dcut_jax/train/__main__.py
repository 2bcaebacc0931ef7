"""Trains a drafter for a target, from prompts to a checkpoint.

    python -m dcut_jax.train respond  PROMPTS... --out RESPONSES
    python -m dcut_jax.train features RESPONSES DATA
    python -m dcut_jax.train run      CONFIG
    python -m dcut_jax.train export   RUN OUT

Each stage goes on where it was stopped.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp

from dcut_jax.cli import run
from dcut_jax.train import collect
from dcut_jax.train.data import DatasetWriter
from dcut_jax.train.loop import export, make_trainer, read_config
from dcut_jax.weights.dflash import default_taps
from dcut_jax.weights.load import load_target


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dcut_jax.train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)

    respond = commands.add_parser("respond", help="the target answers prompts")
    respond.add_argument("prompts", nargs="+", type=Path, help="JSONL with `prompt`")
    respond.add_argument("--out", type=Path, required=True, help="JSONL to append to")
    respond.add_argument("--target", default="smollm2")
    respond.add_argument("--slots", type=int, default=64, help="prompts at a time")
    respond.add_argument("--max-length", type=int, default=384)
    respond.add_argument("--max-new-tokens", type=int, default=170)
    respond.add_argument("--seed", type=int, default=0, help="order of the prompts")

    features = commands.add_parser("features", help="hidden states of the responses")
    features.add_argument("responses", type=Path, help="JSONL that `respond` wrote")
    features.add_argument("data", type=Path, help="dataset to write or to continue")
    features.add_argument("--target", default="smollm2")
    features.add_argument("--taps", type=int, default=5, help="tapped layers")
    features.add_argument(
        "--about", default="{}", help="JSON for the manifest: sources and licences"
    )

    train = commands.add_parser("run", help="train")
    train.add_argument("config", help="TOML file")
    train.add_argument("--data", help="dataset, in place of the config's")
    train.add_argument("--out", help="directory of the run, in place of the config's")
    train.add_argument("--steps", type=int, help="steps, in place of the config's")

    out = commands.add_parser("export", help="write the published layout, bfloat16")
    out.add_argument("run", help="directory of the run")
    out.add_argument("out", help="directory to write")
    return parser


def _progress(done: int, of: int) -> None:
    print(f"{done} of {of}", flush=True)


def _respond(args: argparse.Namespace) -> None:
    collect.respond(
        load_target(args.target, jnp.float32),
        collect.read_prompts(args.prompts, args.seed),
        args.out,
        slots=args.slots,
        max_length=args.max_length,
        max_new_tokens=args.max_new_tokens,
        on_progress=_progress,
    )


def _features(args: argparse.Namespace) -> None:
    target = load_target(args.target, jnp.bfloat16)
    taps = default_taps(args.taps, target.cfg.layers)
    manifest = {"target": target.identity, "sampling": "greedy", "taps": list(taps)}
    manifest |= json.loads(args.about)
    responses = collect.read_responses(args.responses)
    with DatasetWriter(args.data, manifest, len(taps) * target.cfg.embed) as writer:
        collect.add_features(target, taps, responses, writer, on_progress=_progress)


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    if args.command == "respond":
        _respond(args)
    elif args.command == "features":
        _features(args)
    elif args.command == "run":
        given = {"data": args.data, "out": args.out, "steps": args.steps}
        overrides = {k: v for k, v in given.items() if v is not None}
        make_trainer(read_config(args.config, overrides)).run()
    else:
        step = export(args.run, args.out)
        print(f"wrote {args.out}, step {step}")
    return 0


if __name__ == "__main__":
    run(main)
