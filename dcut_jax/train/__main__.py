"""Trains a drafter for a target, from prompts to a checkpoint.

    python -m dcut_jax.train data     PROMPTS... --out DATA
    python -m dcut_jax.train run      CONFIG
    python -m dcut_jax.train export   RUN OUT

`data` is two stages, which `respond` and `features` run one at a time; a dataset is
continued by the command that began it. All but `export` go on where they were stopped.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from dcut_jax.cli import DTYPES, bar, positive, run
from dcut_jax.train import collect
from dcut_jax.train.config import read_config
from dcut_jax.train.data import DatasetError, DatasetWriter
from dcut_jax.train.export import export
from dcut_jax.train.loop import make_trainer
from dcut_jax.weights.dflash import default_taps
from dcut_jax.weights.load import SMOLLM2, Target, load_target

# What the manifest of a dataset says of itself; `--about` may not.
RESERVED = {
    *("target", "sampling", "taps", "channels", "feature_dtype"),
    *("dtype", "max_length", "max_new_tokens"),
}


def _add_respond_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompts", nargs="+", type=Path, help="JSONL with `prompt`")
    parser.add_argument("--slots", type=positive, default=64, help="prompts at a time")
    parser.add_argument("--max-length", type=positive, default=384)
    parser.add_argument("--max-new-tokens", type=positive, default=170)
    parser.add_argument("--seed", type=int, default=0, help="order of the prompts")
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=DTYPES,
        help="the target's while it answers: as it will be served, or faster",
    )


def _add_features_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--taps", type=positive, default=5, help="tapped layers")
    parser.add_argument(
        "--about", default="{}", help="JSON for the manifest: sources and licences"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dcut_jax.train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)

    data = commands.add_parser("data", help="prompts to a dataset with features")
    data.add_argument("--out", type=Path, required=True, help="dataset to write")
    _add_respond_flags(data)
    _add_features_flags(data)

    respond = commands.add_parser("respond", help="the target answers prompts")
    respond.add_argument("--out", type=Path, required=True, help="JSONL to append to")
    _add_respond_flags(respond)

    features = commands.add_parser("features", help="hidden states of the responses")
    features.add_argument(
        "responses", type=Path, help="what `respond` wrote, .gz or not"
    )
    features.add_argument("data", type=Path, help="dataset to write or to continue")
    _add_features_flags(features)

    for command in (data, respond, features):
        command.add_argument("--target", default=SMOLLM2)

    train = commands.add_parser("run", help="train")
    train.add_argument("config", help="TOML file")
    train.add_argument("--data", help="dataset, in place of the config's")
    train.add_argument("--out", help="directory of the run, in place of the config's")
    train.add_argument("--steps", type=int, help="steps, in place of the config's")

    out = commands.add_parser("export", help="write the published layout, bfloat16")
    out.add_argument("run", help="directory of the run")
    out.add_argument("out", help="directory to write")
    return parser


def _respond(
    args: argparse.Namespace,
    prompts: Sequence[collect.Prompt],
    target: Target,
    out: Path,
) -> None:
    with bar("responses", len(prompts)) as update:
        left_out = collect.respond(
            target,
            prompts,
            out,
            slots=args.slots,
            max_length=args.max_length,
            max_new_tokens=args.max_new_tokens,
            on_progress=lambda done, _: update(done),
        )
    if left_out:
        print(
            f"left out {left_out} prompts longer than "
            f"{args.max_length - args.max_new_tokens} tokens (--max-length less "
            f"--max-new-tokens)"
        )


def _taps(args: argparse.Namespace, target: Target) -> tuple[int, ...]:
    return default_taps(args.taps, target.cfg.layers)


def _about(text: str) -> dict[str, Any]:
    """What `--about` adds to the manifest; it may not touch what we write there."""
    try:
        about = json.loads(text)
    except json.JSONDecodeError:
        about = None
    if not isinstance(about, dict):
        raise DatasetError(f"--about: expected a JSON object, found {text[:60]!r}")
    taken = sorted(about.keys() & RESERVED)
    if taken:
        raise DatasetError(
            f"--about names {', '.join(taken)}, which the manifest says of itself; "
            f"leave that out, or choose another name"
        )
    return about


def _writer(
    args: argparse.Namespace, target: Target, data: Path, about: dict[str, Any]
) -> DatasetWriter:
    taps = _taps(args, target)
    manifest = {"target": target.identity, "sampling": "greedy", "taps": list(taps)}
    return DatasetWriter(data, about | manifest, len(taps) * target.cfg.embed)


def _read(path: Path, target: Target) -> list[dict]:
    responses = collect.read_responses(path, target.identity)
    if not responses:
        raise DatasetError(f"{path} has no responses; nothing to make a dataset of")
    return responses


def _features(
    args: argparse.Namespace,
    target: Target,
    responses: Sequence[dict],
    writer: DatasetWriter,
) -> None:
    with bar("features", len(responses)) as update:
        collect.add_features(
            target,
            _taps(args, target),
            responses,
            writer,
            on_progress=lambda done, _: update(done),
        )


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    if args.command == "data":
        answers = ("dtype", "max_length", "max_new_tokens")
        about = _about(args.about) | {key: getattr(args, key) for key in answers}
        prompts = collect.read_prompts(args.prompts, args.seed)
        target = load_target(args.target, args.dtype)
        responses = args.out / "responses.jsonl"
        # Opened first: another dataset is refused before it takes hours of responses.
        with _writer(args, target, args.out, about) as writer:
            _respond(args, prompts, target, responses)
            _features(args, target, _read(responses, target), writer)
    elif args.command == "respond":
        prompts = collect.read_prompts(args.prompts, args.seed)
        _respond(args, prompts, load_target(args.target, args.dtype), args.out)
    elif args.command == "features":
        about = _about(args.about)
        target = load_target(args.target, jnp.bfloat16)
        responses = _read(args.responses, target)
        with _writer(args, target, args.data, about) as writer:
            _features(args, target, responses, writer)
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
