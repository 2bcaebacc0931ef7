"""`python -m dcut_jax.profile`: measures the cost table of this machine."""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from dcut_jax.bench.prompts import load_prompts
from dcut_jax.cli import add_model_flags, bar, positive, positives, run
from dcut_jax.decode.compile import Compiler
from dcut_jax.engine.engine import EngineConfig
from dcut_jax.engine.load import load_pair
from dcut_jax.engine.policy import profiled
from dcut_jax.engine.profile import (
    ROUNDS,
    default_directory,
    fingerprint,
    profile,
    table_path,
)


def show(update: Callable[..., None], what: str, done: int, total: int) -> None:
    """Moves a bar on."""
    update(done, f"{what} ({total} steps)")


def main(argv: Sequence[str] | None = None) -> int:
    """Profiles each batch size and stores the table."""
    parser = argparse.ArgumentParser(
        prog="python -m dcut_jax.profile", description=__doc__
    )
    add_model_flags(parser)
    parser.add_argument("--batch-sizes", type=positives, default=(1, 4, 8, 16, 32))
    parser.add_argument("--max-length", type=positive, default=384)
    parser.add_argument("--rounds", type=positive, default=ROUNDS)
    parser.add_argument("--cost-dir", type=Path, default=default_directory())
    args = parser.parse_args(argv)
    pair = load_pair(args.target, args.drafter, args.dtype, args.draft_dtype)
    text = pair.target.text()
    tokens = [
        t for p in load_prompts("default", 16) for t in text.chat(list(p.messages))
    ]
    compiler = Compiler(pair.models, "float32")
    table = None
    for batch in args.batch_sizes:
        config = EngineConfig(batch, args.max_length)
        here = fingerprint(
            pair.models, config, pair.target.identity, pair.drafter_identity
        )
        with bar(f"batch {batch}", None) as update:
            fresh = profile(
                pair.models,
                config,
                profiled(),
                here,
                tokens,
                compiler=compiler,
                rounds=args.rounds,
                on_progress=partial(show, update),
            )
        table = table.merged(fresh) if table else fresh
        table.save(table_path(args.cost_dir, here))
        print(f"batch {batch}: stored in {table_path(args.cost_dir, here)}")
    return 0


if __name__ == "__main__":
    run(main)
