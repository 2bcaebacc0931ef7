"""`python -m dcut_jax.profile`: measures the cost table of this machine.

With `--abstract` it compiles a target's steps for a mesh instead, from its config.json
alone, and tells what they take of each device's memory.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from dcut_jax.cli import (
    add_mesh_flags,
    add_model_flags,
    bar,
    placement_of,
    positive,
    positives,
    refuse_set,
    run,
)
from dcut_jax.config import ConfigError, model_config_from_hf, read_config
from dcut_jax.cost.table import CostError, CostTable, Fingerprint
from dcut_jax.decode.compile import Compiler
from dcut_jax.engine.config import EngineConfig
from dcut_jax.engine.footprint import footprint, footprint_of_layers, render
from dcut_jax.engine.load import has_drafter, load_pair, measure_costs
from dcut_jax.engine.profile import ROUNDS, default_directory, table_path, table_text
from dcut_jax.processes import first
from dcut_jax.prompts import DEFAULT, load_prompts

ROWS = (1, 4, 16)  # of a request, in the steps whose memory is told
FILLING = 16  # prompts whose tokens fill the caches


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line's values."""
    p = argparse.ArgumentParser(prog="python -m dcut_jax.profile", description=__doc__)
    add_model_flags(p)
    add_mesh_flags(p)
    p.add_argument("--batch-sizes", type=positives, default=(1, 4, 8, 16, 32))
    p.add_argument("--max-length", type=positive, default=384)
    p.add_argument("--rounds", type=positive, default=ROUNDS)
    p.add_argument("--cost-dir", type=Path, default=default_directory())
    p.add_argument(
        "--fresh",
        action="store_true",
        help="start the table over; default: other batch sizes in it stay",
    )
    p.add_argument(
        "--abstract",
        action="store_true",
        help="memory on each device of --mesh, of a --target that is a config.json, a "
        "directory with one, or a TOML file as in configs/targets; no weights are "
        "read, and no drafter is reckoned with",
    )
    p.add_argument(
        "--layers",
        type=positive,
        help="with --abstract: compile so many layers, and twice as many, and reckon "
        "with the rest as more of the same",
    )
    args = p.parse_args(argv)
    if args.layers and not args.abstract:
        p.error("--layers belongs to --abstract")
    if args.abstract:
        if args.mesh is None:
            p.error("--abstract is of a mesh; name one with --mesh")
        unused = ("drafter", "draft_dtype", "rounds", "cost_dir", "fresh")
        refuse_set(p, args, unused, "is of a measured table, not of --abstract")
        return args
    if not has_drafter(args.target, args.drafter):
        p.error(
            "the costs are those of speculative steps, so this needs a drafter; name "
            "one with --drafter"
        )
    return args


def show(update: Callable[..., None], what: str, done: int, total: int) -> None:
    """Moves a bar on."""
    update(done, f"{what} ({total} steps)")


def stored(path: Path, here: Fingerprint) -> CostTable | None:
    """The table that new batch sizes are added to; None where there is none yet.

    Raises:
      CostError: there is a file, but nothing can be added to it.
    """
    text = table_text(path)
    if not text:
        return None
    try:
        return CostTable.parse(text, path).require(here)
    except CostError as error:
        raise CostError(
            f"nothing can be added to {path} ({error}); --fresh starts it over"
        ) from error


def tell_memory(args: argparse.Namespace) -> int:
    """Prints what the steps of a target take, which need not be there."""
    target = model_config_from_hf(read_config(Path(args.target)), args.target)
    placement = placement_of(args)
    if placement is None:
        raise ConfigError("--abstract is of a mesh of several devices; found one")
    for batch in args.batch_sizes:
        config = EngineConfig(batch, args.max_length, cache_dtype=args.cache_dtype)
        rest = (placement, config, ROWS, args.dtype)
        if args.layers:
            steps = footprint_of_layers(target, args.layers, *rest)
        else:
            steps = footprint(target, *rest)
        print(f"batch {batch}\n{render(steps)}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Profiles each batch size and adds it to the stored table."""
    args = parse(argv)
    if args.abstract:
        return tell_memory(args)
    pair = load_pair(
        args.target, args.drafter, args.dtype, args.draft_dtype, placement_of(args)
    )
    text = pair.target.text()
    tokens = [
        t for p in load_prompts(DEFAULT, FILLING) for t in text.chat(list(p.messages))
    ]
    configs = [
        EngineConfig(batch, args.max_length, cache_dtype=args.cache_dtype)
        for batch in args.batch_sizes
    ]
    for config in configs:  # before the first is measured
        config.shapes(pair.models)
    here = pair.here(configs[0])  # the same at every batch size
    path = table_path(args.cost_dir, here)
    table = None if args.fresh else stored(path, here)
    compiler = Compiler(pair.models, args.cache_dtype)
    for config in configs:
        with bar(f"batch {config.slots}", None) as update:
            measured = measure_costs(
                pair,
                config,
                tokens,
                compiler,
                rounds=args.rounds,
                on_progress=partial(show, update),
            )
        table = table.merged(measured) if table else measured
        if first():
            table.save(path)
        print(f"batch {config.slots}: stored in {path}")
    return 0


if __name__ == "__main__":
    run(main)
