"""`python -m dcut_jax.profile`: measures the cost table of this machine."""

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
    run,
)
from dcut_jax.cost.table import CostError, CostTable, Fingerprint
from dcut_jax.decode.compile import Compiler
from dcut_jax.engine.engine import EngineConfig
from dcut_jax.engine.load import has_drafter, load_pair, measure_costs
from dcut_jax.engine.profile import ROUNDS, default_directory, table_path, table_text
from dcut_jax.processes import first
from dcut_jax.prompts import DEFAULT, load_prompts

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
    args = p.parse_args(argv)
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


def main(argv: Sequence[str] | None = None) -> int:
    """Profiles each batch size and adds it to the stored table."""
    args = parse(argv)
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
