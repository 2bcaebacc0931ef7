"""`python -m dcut_jax.cost advise`: which layout for a target on a node of devices."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import jax

from dcut_jax.bench.advise import Asked, advise, layout_count, render
from dcut_jax.cli import bar, positive, positives, run
from dcut_jax.config import read_config
from dcut_jax.cost.devices import find_device, known_devices
from dcut_jax.cost.roofline import BYTES
from dcut_jax.cost.shapes import drafter_shape, read_shape, usual_drafter
from dcut_jax.weights.dflash import drafter_config


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line's values."""
    p = argparse.ArgumentParser(prog="python -m dcut_jax.cost", description=__doc__)
    commands = p.add_subparsers(dest="command", required=True)
    a = commands.add_parser(
        "advise",
        help="predicted throughput of each layout, by batch size",
        description="Predicts AR's and D-Cut's throughput of every layout of a target "
        "on a node of devices, from peak rates. Allocates nothing and uses no "
        "accelerator.",
    )
    a.add_argument("--devices", type=positive, default=8)
    a.add_argument(
        "--kind",
        required=True,
        help=f"device kind: {', '.join(known_devices())}, or JAX's name for it",
    )
    a.add_argument(
        "--target",
        type=Path,
        required=True,
        help="a TOML file of configs/targets, a config.json, or a model's directory",
    )
    a.add_argument(
        "--drafter",
        type=Path,
        help="a DFlash drafter's config.json or directory; default: five layers as "
        "wide as the target's, as published for Qwen3-8B",
    )
    a.add_argument("--batch-sizes", type=positives, default=(1, 4, 16, 64, 256))
    a.add_argument(
        "--context",
        type=positive,
        default=2048,
        help="cached positions of a request when a step runs (default: 2048)",
    )
    a.add_argument(
        "--max-length",
        type=positive,
        default=4096,
        help="positions that a request's cache has room for (default: 4096)",
    )
    a.add_argument("--dtype", default="bfloat16", choices=tuple(BYTES))
    a.add_argument("--json", action="store_true", help="print one line of JSON instead")
    args = p.parse_args(argv)
    if args.max_length < args.context:
        a.error(
            f"--max-length: expected at least --context {args.context}, found "
            f"{args.max_length}"
        )
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Prints advice."""
    args = parse(argv)
    jax.config.update("jax_platforms", "cpu")  # what is simulated needs no accelerator
    target = read_shape(args.target)
    drafter = usual_drafter(target)
    if args.drafter:
        described = drafter_config(read_config(args.drafter), str(args.drafter))
        drafter = drafter_shape(described)
    asked = Asked(
        device=find_device(args.kind),
        devices=args.devices,
        target=target,
        drafter=drafter,
        batch_sizes=tuple(sorted(args.batch_sizes)),
        context=args.context,
        positions=args.max_length,
        dtype=args.dtype,
    )
    with bar("predicting", layout_count(args.devices), shown=not args.json) as update:
        advice = advise(asked, update)
    print(advice.to_json() if args.json else render(advice))
    return 0


if __name__ == "__main__":
    run(main)
