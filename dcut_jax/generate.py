"""`python -m dcut_jax.generate`: text from prompts, decoded together."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from dcut_jax.bench.prompts import load_prompts
from dcut_jax.cli import add_model_flags, bar, positive, run
from dcut_jax.cost.table import CostTable
from dcut_jax.decode.compile import Compiler
from dcut_jax.engine.engine import Engine, EngineConfig
from dcut_jax.engine.load import Pair, load_pair
from dcut_jax.engine.policy import ArPolicy, DCutPolicy, FixedPolicy, Policy, profiled
from dcut_jax.engine.profile import cost_table, default_directory, fingerprint, profile
from dcut_jax.engine.requests import Completion, Request

Mode = Literal["ar", "fixed", "dcut"]
MODES: tuple[Mode, ...] = ("ar", "fixed", "dcut")


def generate(
    prompts: Sequence[Sequence[int]],
    pair: Pair,
    *,
    batch_size: int,
    max_new_tokens: int,
    stop: Sequence[int] = (),
    mode: Mode = "dcut",
    width: int = 7,
    max_length: int | None = None,
    cost_dir: Path | None = None,
    progress: bool = False,
) -> list[Completion]:
    """Decodes prompts of any lengths greedily, refilling slots as requests finish.

    The text is the target's own, whatever the mode.

    Args:
      prompts: token ids; `pair.target.text().chat(...)` makes them from messages.
      batch_size: requests decoded together.
      stop: token ids that end a text.
      mode: "ar", "fixed" (`width` drafts, all verified), or "dcut", which measures
        this machine's costs the first time and keeps them in `cost_dir`.
      max_length: positions a slot can hold; None takes what the prompts need.

    Raises:
      ValueError: a prompt that is empty or does not fit, or a batch size below 1.
    """
    requests = [Request(tuple(p), max_new_tokens, tuple(stop)) for p in prompts]
    if max_length is None:
        max_length = max((len(p) for p in prompts), default=1) + max_new_tokens
    config = EngineConfig(batch_size, max_length, max_stops=max(len(stop), 1))
    models = pair.models if mode != "ar" else pair.without_drafter()
    compiler = Compiler(models, config.cache_dtype)
    policy: Policy
    match mode:
        case "ar":
            policy = ArPolicy()
        case "fixed":
            policy = FixedPolicy(width)
        case "dcut":
            tokens = [t for p in prompts for t in p] or [0]
            table = stored_costs(
                pair,
                config,
                tokens,
                compiler,
                cost_dir or default_directory(),
                progress,
            )
            policy = DCutPolicy(table)
        case _:
            raise ValueError(
                f"mode {mode!r} is unknown; choose from {', '.join(MODES)}"
            )
    engine = Engine(models, config, policy, compiler=compiler)
    if not progress:
        return engine.generate(requests)
    with bar("decoding", len(requests)) as update:
        return engine.generate(
            requests,
            on_progress=lambda done, tokens: update(done, f"decoding, {tokens} tokens"),
        )


def stored_costs(
    pair: Pair,
    config: EngineConfig,
    tokens: Sequence[int],
    compiler: Compiler,
    directory: Path,
    progress: bool,
) -> CostTable:
    """This machine's cost table, measured now if this batch size never was."""
    if pair.models.drafter is None:
        raise ValueError(
            "mode 'dcut' needs a drafter; name one, or decode with mode 'ar'"
        )
    here = fingerprint(pair.models, config, pair.target.identity, pair.drafter_identity)

    def measure_now() -> CostTable:
        title = f"measuring step costs at batch size {config.slots}"
        if not progress:
            return profile(
                pair.models, config, profiled(), here, tokens, compiler=compiler
            )
        with bar(title, None) as update:
            return profile(
                pair.models,
                config,
                profiled(),
                here,
                tokens,
                compiler=compiler,
                on_progress=lambda what, done, total: update(done, f"measuring {what}"),
            )

    shapes = config.shapes(pair.models)
    return cost_table(profiled(), shapes, here, directory, measure_missing=measure_now)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the answer to each prompt."""
    parser = argparse.ArgumentParser(
        prog="python -m dcut_jax.generate", description=__doc__
    )
    add_model_flags(parser)
    parser.add_argument("prompt", nargs="*", help="texts; default: standard input")
    parser.add_argument("--prompts", help="a JSON Lines file instead, or a set's name")
    parser.add_argument("--limit", type=positive, help="prompts to take of it")
    parser.add_argument("--batch-size", type=positive, default=8)
    parser.add_argument("--max-new-tokens", type=positive, default=128)
    parser.add_argument("--max-length", type=positive)
    parser.add_argument("--mode", choices=MODES, default="dcut")
    parser.add_argument("--width", type=positive, default=7, help="of mode fixed")
    parser.add_argument("--cost-dir", type=Path)
    args = parser.parse_args(argv)
    if args.prompt and args.prompts:
        parser.error("give prompts on the command line or --prompts, not both")
    if args.prompts:
        conversations = [
            list(p.messages) for p in load_prompts(args.prompts, args.limit)
        ]
    else:
        texts = args.prompt or [sys.stdin.read().strip()]
        if not all(texts):
            parser.error("expected a prompt, found an empty text")
        conversations = [[{"role": "user", "content": t}] for t in texts]
    pair = load_pair(args.target, args.drafter, args.dtype, args.draft_dtype)
    text = pair.target.text()
    prompts = [text.chat(c) for c in conversations]
    results = generate(
        prompts,
        pair,
        batch_size=min(args.batch_size, len(prompts)),
        max_new_tokens=args.max_new_tokens,
        stop=text.eos_ids,
        mode=args.mode,
        width=args.width,
        max_length=args.max_length,
        cost_dir=args.cost_dir,
        progress=sys.stderr.isatty(),
    )
    for conversation, result in zip(conversations, results, strict=True):
        if len(results) > 1:
            print(f"--- {conversation[-1]['content'][:70]!r}")
        print(text.decode(result.tokens))
        if result.steps:
            print(
                f"[{len(result.tokens)} tokens, {result.steps} steps, "
                f"{result.mean_accepted_length:.2f} tokens a step, {result.finish}]",
                file=sys.stderr,
            )
    return 0


if __name__ == "__main__":
    run(main)
