"""Trains a drafter for a target, from prompts to a checkpoint.

    python -m dcut_jax.train data     PROMPTS... --out DATA
    python -m dcut_jax.train run      CONFIG [--tensorboard]
    python -m dcut_jax.train eval     DRAFTER_OR_RUN --data PROMPTS...
    python -m dcut_jax.train roofline CONFIG
    python -m dcut_jax.train export   RUN OUT [--check]
    python -m dcut_jax.train check    OUT

`data` is two stages, which `respond` and `features` run one at a time; a dataset is
continued by the command that began it. These, and `run`, go on where they were stopped.
`eval` decodes prompts at several widths: how much is accepted, and how fast it is.
`check` decodes ten prompts with an exported drafter's files alone; its status is 1 if a
text is not the target's own.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from dcut_jax.axes import DATA, EXPERT, MODEL
from dcut_jax.bench.__main__ import machine
from dcut_jax.bench.report import require_matplotlib
from dcut_jax.cli import (
    DTYPES,
    add_process_flags,
    bar,
    mesh_sizes,
    positive,
    positives,
    run,
)
from dcut_jax.config import ConfigError
from dcut_jax.engine.load import load_pair
from dcut_jax.engine.policy import WIDTHS
from dcut_jax.files import write_text
from dcut_jax.processes import join
from dcut_jax.train import candidates, collect
from dcut_jax.train import evaluate as evaluation
from dcut_jax.train.check import PROMPTS, check
from dcut_jax.train.config import choose_taps, read_config
from dcut_jax.train.data import DatasetError, DatasetWriter
from dcut_jax.train.export import export, stored_config
from dcut_jax.train.loop import make_trainer
from dcut_jax.train.report import plot, render_tables, to_json
from dcut_jax.train.roofline import measure
from dcut_jax.train.run_log import require_tensorboard
from dcut_jax.weights.load import SMOLLM2, Target, load_target

# What the manifest of a dataset says of itself; `--about` may not.
TAPS = 5
RESERVED = {
    "hidden_channels",
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
    parser.add_argument("--taps", type=positive, help="tapped layers; 5 by default")
    parser.add_argument(
        "--no-features",
        action="store_true",
        help='store tokens alone, for a run with features = "online"',
    )
    parser.add_argument(
        "--about", default="{}", help="JSON for the manifest: sources and licences"
    )


def _add_eval_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("drafter", type=Path, help="a run, or an exported drafter")
    parser.add_argument(
        "--data",
        nargs="+",
        required=True,
        metavar="PROMPTS",
        help="sets, each reported on its own: JSONL with `prompt`, or a shipped name",
    )
    parser.add_argument(
        "--target", help=f"default: the run's; of an exported drafter {SMOLLM2}"
    )
    parser.add_argument(
        "--widths",
        type=positives,
        help=f"drafts per step, between commas; default: "
        f"{','.join(map(str, WIDTHS))}, as far as the drafter goes",
    )
    parser.add_argument("--limit", type=positive, help="prompts of each set")
    parser.add_argument("--out", type=Path, default=Path("eval-out"))
    parser.add_argument("--batch-size", type=positive, default=8)
    parser.add_argument("--max-new-tokens", type=at_least_two, default=128)
    parser.add_argument(
        "--rounds", type=at_least_zero, default=3, help="timed ones; 0 for counts alone"
    )
    parser.add_argument("--dtype", default="float32", choices=DTYPES)
    parser.add_argument("--draft-dtype", default="bfloat16", choices=DTYPES)
    parser.add_argument("--no-plot", action="store_true", help="draw no eval.png")


def at_least_zero(text: str) -> int:
    """An `argparse` type: a whole number, 0 included."""
    return 0 if text == "0" else positive(text)


def at_least_two(text: str) -> int:
    """An `argparse` type: a number of new tokens of which a step decodes some."""
    value = positive(text)
    if value < 2:
        raise argparse.ArgumentTypeError(
            "expected at least 2, found 1; a first token comes with the prompt"
        )
    return value


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

    checks = commands.add_parser("check", help="decode with an exported drafter")
    checks.add_argument("out", help="directory that was exported")

    for command in (data, respond, features, checks):
        command.add_argument("--target", default=SMOLLM2)

    train = commands.add_parser("run", help="train")
    train.add_argument("config", help="TOML file")
    train.add_argument("--data", help="dataset, in place of the config's")
    train.add_argument("--out", help="directory of the run, in place of the config's")
    train.add_argument("--steps", type=int, help="steps, in place of the config's")
    train.add_argument(
        "--tensorboard",
        action="store_true",
        help="also write event files, under the run's directory; needs tensorboardX",
    )

    train.add_argument(
        "--mesh",
        type=mesh_sizes,
        metavar="AXIS=SIZE,...",
        help="data and model, in place of the config's mesh_data and mesh_model; "
        "parameters are cut over both",
    )
    add_process_flags(train)

    roof = commands.add_parser("roofline", help="a run's steps against the machine")
    roof.add_argument("config", help="TOML file")
    roof.add_argument("--data", help="dataset, in place of the config's")
    roof.add_argument("--steps", type=positive, default=30, help="that are timed")

    evals = commands.add_parser("eval", help="decode prompts with a drafter")
    _add_eval_flags(evals)

    out = commands.add_parser("export", help="write the published layout, bfloat16")
    out.add_argument("run", help="directory of the run")
    out.add_argument("out", help="directory to write")
    out.add_argument("--check", action="store_true", help="then `check` what it wrote")
    out.add_argument("--target", help="where the run's target lies now, if elsewhere")
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
    return choose_taps(args.taps or TAPS, target.cfg.layers)


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
    manifest = about | {"target": target.identity, "sampling": "greedy"}
    if args.no_features:
        if args.taps:
            raise DatasetError(
                f"--taps {args.taps} says which features to store, and --no-features "
                f"that there are none; leave one of them out"
            )
        return DatasetWriter(data, manifest, 0)
    taps, embed = _taps(args, target), target.cfg.embed
    manifest |= {"taps": list(taps), "hidden_channels": embed}
    return DatasetWriter(data, manifest, (len(taps) + 1) * embed)


def _read(path: Path, target: Target) -> list[dict]:
    responses = collect.read_responses(path, target)
    if not responses:
        raise DatasetError(f"{path} has no responses; nothing to make a dataset of")
    return responses


def _features(
    args: argparse.Namespace,
    target: Target,
    responses: Sequence[dict],
    writer: DatasetWriter,
) -> None:
    print(collect.check_room(responses, writer))
    with bar("features", len(responses)) as update:
        collect.add_features(
            target,
            () if args.no_features else _taps(args, target),
            responses,
            writer,
            on_progress=lambda done, _: update(done),
        )


def _check(drafter: str, target: str) -> int:
    """Prints what a check found; status 1 if a text is not the target's own."""
    with bar("texts", 2 * PROMPTS) as update:
        found = check(drafter, target, on_progress=update)
    print(found)
    if found.wrong:
        print(
            f"error: expected the text of AR for every prompt, found "
            f"{len(found.texts.differences)} that differ, and not only where two "
            f"logits nearly tie. No drafter can change a text, so this is a fault of "
            f"the decoder or of the machine: report it with the lines above, and do "
            f"not trust what this machine decodes",
            file=sys.stderr,
        )
        return 1
    return 0


def _evaluate(args: argparse.Namespace, command: str) -> None:
    """Whatever can fail does so before any compute, the sooner the cheaper."""
    if not args.no_plot:
        require_matplotlib()
    sets = candidates.read_sets(args.data, args.limit)
    most = candidates.most_drafts(args.drafter)
    widths = candidates.choose_widths(args.widths, most)
    args.out.mkdir(parents=True, exist_ok=True)
    total = evaluation.passes(len(sets), len(widths), args.rounds)
    with candidates.opened(args.drafter, args.target) as (candidate, target):
        directory = str(candidate.directory)
        pair = load_pair(target, directory, args.dtype, args.draft_dtype)
        candidates.check_made_for(candidate, pair)
        with bar("compiling", total) as update:
            found = evaluation.evaluate(
                pair,
                candidate,
                sets,
                widths,
                command=command,
                machine=machine(),
                batch_size=args.batch_size,
                max_new_tokens=args.max_new_tokens,
                rounds=args.rounds,
                on_progress=update,
            )
    wrote = [args.out / "eval.json"]
    write_text(wrote[0], to_json(found) + "\n")  # first: the rest is made from it
    print(render_tables(found))
    if not args.no_plot:
        wrote.append(args.out / "eval.png")
        plot(found, wrote[-1])
    print(f"wrote {', '.join(map(str, wrote))}")


def _mesh_keys(sizes: dict[str, int] | None) -> dict[str, int]:
    """A config's keys for a mesh of the command line.

    Raises:
      ConfigError: it has an axis that training does not use.
    """
    if sizes is None:
        return {}
    if EXPERT in sizes:
        raise ConfigError(
            f"--mesh: training has the axes {DATA} and {MODEL}, found {EXPERT}; leave "
            f"it out"
        )
    return {f"mesh_{axis}": sizes.get(axis, 1) for axis in (DATA, MODEL)}


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
        cfg = read_config(args.config, overrides | _mesh_keys(args.mesh))
        if args.tensorboard:  # before target and data are read
            require_tensorboard()
        join(args.coordinator, args.processes, args.process_id)
        make_trainer(cfg).run(tensorboard=args.tensorboard)
    elif args.command == "roofline":
        cfg = read_config(args.config, {"data": args.data} if args.data else {})
        trainer = make_trainer(cfg)
        print(measure(trainer, load_target(cfg.target).cfg, args.steps))
    elif args.command == "eval":
        typed = sys.argv[1:] if argv is None else argv
        _evaluate(args, shlex.join(["python", "-m", "dcut_jax.train", *typed]))
    elif args.command == "export":
        step = export(args.run, args.out, args.target)
        print(f"wrote {args.out}, step {step}")
        if args.check:
            return _check(args.out, args.target or stored_config(args.run)[1].target)
    else:
        return _check(args.out, args.target)
    return 0


if __name__ == "__main__":
    run(main)
