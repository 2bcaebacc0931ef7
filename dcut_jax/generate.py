"""`python -m dcut_jax.generate`: text from prompts, decoded together."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from dcut_jax.cli import (
    add_memory_flag,
    add_mesh_flags,
    add_model_flags,
    bar,
    placement_of,
    positive,
    run,
)
from dcut_jax.cut.fairness import Fairness
from dcut_jax.engine.config import EngineConfig
from dcut_jax.engine.load import Pair, load_pair
from dcut_jax.engine.requests import Completion, Halt, Request
from dcut_jax.modes import (
    Costs,
    Mode,
    add_mode_flags,
    build_engine,
    settle_mode,
)
from dcut_jax.processes import first
from dcut_jax.prompts import is_unicode, load_prompts
from dcut_jax.stops import StopStrings


def generate(
    prompts: Sequence[Sequence[int]],
    pair: Pair,
    *,
    batch_size: int,
    max_new_tokens: int,
    stop: Sequence[int] = (),
    mode: Mode = "dcut",
    width: int | None = None,
    max_length: int | None = None,
    cache_dtype: str = "float32",
    kv_memory: int | None = None,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    halt: Callable[[], Halt] | None = None,
    logprobs: bool = False,
    cost_dir: Path | None = None,
    fairness: Fairness | None = None,
    patience: int | None = None,
    costs: Costs = "measured",
    progress: bool = False,
) -> list[Completion]:
    """Decodes prompts of any lengths, refilling slots as requests finish.

    The text is the target's own, whatever the mode: its most likely tokens, or with a
    temperature the draws that the seed fixes.

    Args:
      prompts: token ids; `pair.target.text().chat(...)` makes them from messages.
      batch_size: requests decoded together.
      stop: token ids that end a text.
      mode: "ar", "fixed" (`width` drafts, all verified), or "dcut", which measures
        this machine's costs the first time and keeps them in `cost_dir`.
      max_length: positions a slot can hold; None takes what the prompts need.
      costs, fairness, patience: see `modes.build_engine`.
      cache_dtype: of the key/value caches.
      kv_memory: bytes of each device for them; see `EngineConfig`.
      temperature, top_k, top_p, min_p: see `decode.sample.Sampling`.
      seed: of the first prompt; the next has the next number.
      halt: ends texts on the host; `StopStrings(pair.target.text(), ["###"])` does
        at strings.
      logprobs: whether completions hold the log-probabilities of their tokens.

    Raises:
      ValueError: a prompt that is empty or does not fit, a batch size below 1, or a
        mode that is unknown or that this pair cannot decode in.
    """
    requests = [
        Request(
            tuple(prompt),
            max_new_tokens,
            tuple(stop),
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed + i,
            halt=halt,
        )
        for i, prompt in enumerate(prompts)
    ]
    if max_length is None:
        max_length = max((len(p) for p in prompts), default=1) + max_new_tokens
    config = EngineConfig(
        batch_size,
        max_length,
        max(len(stop), 1),
        cache_dtype,
        sampling=any(r.draws for r in requests),
        logprobs=logprobs,
        kv_memory=kv_memory,
    )
    engine = build_engine(
        pair,
        config,
        mode,
        width,
        lambda: [t for p in prompts for t in p] or [0],
        costs=costs,
        cost_dir=cost_dir,
        fairness=fairness,
        patience=patience,
        progress=progress,
    )
    with bar("decoding", len(requests), shown=progress) as update:
        return engine.generate(
            requests,
            on_progress=lambda done, tokens: update(done, f"decoding, {tokens} tokens"),
        )


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(prog="python -m dcut_jax.generate", description=__doc__)
    add_model_flags(p)
    add_memory_flag(p)
    add_mesh_flags(p)
    p.add_argument("prompt", nargs="*", help="texts; default: standard input")
    p.add_argument("--prompts", help="a JSON Lines file instead, or a set's name")
    p.add_argument("--limit", type=positive, help="prompts to take of --prompts")
    p.add_argument("--batch-size", type=positive, default=8)
    p.add_argument("--max-new-tokens", type=positive, default=128)
    p.add_argument("--max-length", type=positive, help="default: what prompts need")
    p.add_argument(
        "--temperature", type=float, help="draw tokens; default: take the most likely"
    )
    p.add_argument("--top-k", type=positive, help="draw from the k most likely tokens")
    p.add_argument("--top-p", type=float, help="draw from the likeliest that sum to p")
    p.add_argument(
        "--min-p", type=float, help="draw none below this share of the likeliest"
    )
    p.add_argument("--seed", type=int, help="of the draws (default: 0)")
    p.add_argument(
        "--stop",
        metavar="TEXT",
        action="append",
        default=[],
        help="end before this text; several may be given, the first to come ends it",
    )
    p.add_argument(
        "--logprobs",
        action="store_true",
        help="after each text a line of JSON: tokens, and logs of their probabilities",
    )
    add_mode_flags(p)
    return p


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line's values, with what they cannot do together refused."""
    p = parser()
    args = p.parse_args(argv)
    settle_mode(p, args)
    if args.prompt and args.prompts:
        p.error("give prompts on the command line or --prompts, not both")
    if args.limit and not args.prompts:
        p.error("--limit belongs to --prompts, and there is no --prompts")
    for name in ("top_k", "top_p", "min_p", "seed"):
        if getattr(args, name) is not None and not args.temperature:
            flag = "--" + name.replace("_", "-")
            p.error(f"{flag} is of draws; give a --temperature above 0 with it")
    if not all(args.stop):
        p.error("expected a text after --stop, found an empty one")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the answer to each prompt."""
    args = parse(argv)
    if args.prompts:
        conversations = [
            list(p.messages) for p in load_prompts(args.prompts, args.limit)
        ]
    else:
        texts = args.prompt or [read_input()]
        if not all(texts):
            raise ValueError("expected a prompt, found an empty text; give one")
        if not all(map(is_unicode, texts)):
            raise ValueError(
                f"expected prompts in Unicode, found bytes that are none in "
                f"{ascii(next(t for t in texts if not is_unicode(t)))}; correct them"
            )
        conversations = [[{"role": "user", "content": t}] for t in texts]
    pair = load_pair(
        args.target, args.drafter, args.dtype, args.draft_dtype, placement_of(args)
    )
    text = pair.target.text()
    stops = StopStrings(text, args.stop) if args.stop else None
    prompts = [text.chat(c) for c in conversations]
    results = generate(
        prompts,
        pair,
        batch_size=pair.models.even(min(args.batch_size, len(prompts))),
        max_new_tokens=args.max_new_tokens,
        stop=text.eos_ids,
        mode=args.mode,
        width=args.width,
        max_length=args.max_length,
        cache_dtype=args.cache_dtype,
        kv_memory=args.kv_memory,
        temperature=args.temperature or 0.0,
        top_k=args.top_k or 0,
        top_p=1.0 if args.top_p is None else args.top_p,
        min_p=args.min_p or 0.0,
        seed=args.seed or 0,
        halt=stops,
        logprobs=args.logprobs,
        cost_dir=args.cost_dir,
        fairness=args.fairness,
        patience=args.patience,
        costs=args.costs,
        progress=sys.stderr.isatty(),
    )
    for conversation, result in zip(conversations, results, strict=True):
        if len(results) > 1:
            print(f"--- {conversation[-1]['content'][:70]!r}")
        answer = text.decode(result.tokens)
        print(stops.cut(answer) if stops else answer)
        if args.logprobs:
            data = {"tokens": result.tokens, "logprobs": result.logprobs}
            print(json.dumps(data))
        rate = f"{result.mean_accepted_length:.2f} tokens a step, "
        if not first():
            continue
        print(
            f"[{len(result.tokens)} tokens, {result.steps} steps, "
            f"{rate if result.steps else ''}{result.finish}]",
            file=sys.stderr,
        )
    return 0


def read_input() -> str:
    """A prompt from standard input; a person is told that it is waited for."""
    if sys.stdin.isatty():
        print("reading a prompt from standard input", file=sys.stderr)
    return sys.stdin.read().strip()


if __name__ == "__main__":
    run(main)
