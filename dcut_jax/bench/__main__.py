"""`python -m dcut_jax.bench`: throughput against batch size, arm by arm."""

import argparse
import datetime
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from dcut_jax.bench.peer import TransformersPeer
from dcut_jax.bench.prompts import DEFAULT, load_prompts
from dcut_jax.bench.records import AR, BenchResult, Cell
from dcut_jax.bench.report import plot, render_checks, render_table
from dcut_jax.bench.runner import (
    DCUT,
    PUBLISHED,
    Arm,
    Texts,
    logit_gap,
    policy_of,
    run_cell,
)
from dcut_jax.cli import add_model_flags, bar, positive, positives, run
from dcut_jax.decode.compile import Compiler
from dcut_jax.engine.engine import Engine, EngineConfig, Prefilled
from dcut_jax.engine.load import Pair, load_pair
from dcut_jax.engine.policy import WIDTHS, ArPolicy, DCutPolicy, profiled, unmeasured
from dcut_jax.engine.profile import (
    cost_table,
    cpu_model,
    default_directory,
    fingerprint,
    profile,
)
from dcut_jax.engine.requests import Request

# Two logits closer than this may change places when another batch shape rounds them.
NEAR_TIE = 1e-4


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(prog="python -m dcut_jax.bench", description=__doc__)
    add_model_flags(p)
    p.add_argument("--batch-sizes", type=positives, default=(1, 4, 8, 16, 32))
    p.add_argument(
        "--arms",
        type=lambda text: tuple(text.split(",")),
        help=f"between commas: {AR}, fixed-WIDTH, {PUBLISHED}, {DCUT}; default: all, "
        f"with widths {', '.join(map(str, WIDTHS))} as far as the drafter goes",
    )
    p.add_argument("--prompts", default=DEFAULT, help="a shipped set or a JSONL file")
    p.add_argument("--limit", type=positive, default=32, help="prompts to use")
    p.add_argument("--max-new-tokens", type=positive, default=64)
    p.add_argument("--max-length", type=positive, help="default: what prompts need")
    p.add_argument("--rounds", type=positive, default=3)
    p.add_argument(
        "--tokens-per-request",
        type=positive,
        default=12,
        help="timed tokens per slot and round",
    )
    p.add_argument("--cost-dir", type=Path, default=default_directory())
    p.add_argument("--out", type=Path, default=Path("bench-out"))
    p.add_argument("--peer", choices=("transformers",), help="a peer's AR as an arm")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the bench; status 1 if a text leaves AR's at more than a near-tie."""
    args = parser().parse_args(argv)
    started = time.perf_counter()
    prompts = load_prompts(args.prompts, args.limit)
    pair = load_pair(args.target, args.drafter, args.dtype, args.draft_dtype)
    most = pair.models.drafter.max_drafts if pair.models.drafter else 0
    arms = args.arms or default_arms(most)
    for name in arms:
        policy_of(name, unmeasured, most)  # an unknown arm fails before any work
    text = pair.target.text()
    ids = [tuple(text.chat(list(p.messages))) for p in prompts]
    longest = max(map(len, ids)) + args.max_new_tokens
    length = args.max_length or longest
    requests = [Request(i, args.max_new_tokens, text.eos_ids) for i in ids]
    stops = max(len(text.eos_ids), 1)
    configs = {b: EngineConfig(b, length, stops) for b in args.batch_sizes}

    plain, drafted = pair.without_drafter(), pair.models
    compilers = {True: Compiler(drafted, "float32"), False: Compiler(plain, "float32")}
    reference_config = EngineConfig(min(16, len(requests)), length, stops)
    print(f"{len(requests)} prompts, AR text of {args.max_new_tokens} tokens each")
    with bar("AR reference", len(requests)) as update:
        engine = Engine(plain, reference_config, ArPolicy(), compiler=compilers[False])
        texts = Texts(
            engine.generate(requests, on_progress=lambda done, tokens: update(done))
        )
        engine.free()
    profile_s, engines = 0.0, {}
    with bar("compiling and measuring", len(configs)) as update:
        for done, (batch, config) in enumerate(configs.items(), 1):
            engines[batch], spent = build(
                pair, config, arms, compilers, args.cost_dir, ids, most, update
            )
            profile_s += spent
            update(done, f"batch {batch} ready")
    ready = prefill_all(engines, requests)
    peer = TransformersPeer(pair.target, ids) if args.peer else None
    cells: list[Cell] = []
    total = args.rounds * (len(arms) + (peer is not None)) * len(configs)
    with bar("rounds", total) as update:
        for round in range(args.rounds):
            for batch in args.batch_sizes:
                turn = round % len(arms)  # no arm is always the first
                for name in (*arms[turn:], *arms[:turn]):
                    update(len(cells), f"round {round + 1}, batch {batch}, {name}")
                    cells.append(
                        run_cell(
                            engines[batch][name],
                            ready,
                            texts,
                            round=round,
                            tokens_per_request=args.tokens_per_request,
                        )
                    )
                if peer is not None:
                    update(len(cells), f"round {round + 1}, batch {batch}, {args.peer}")
                    cells.append(peer.run_cell(batch, round, args.tokens_per_request))
        update(len(cells), "rounds")
    checks = texts.results(lambda d: logit_gap(plain, ids[d.prompt], texts, d))
    result = BenchResult(
        command=shlex.join(["python", "-m", "dcut_jax.bench", *(argv or sys.argv[1:])]),
        date=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        machine=machine() | ({"peer": peer.version} if peer else {}),
        target=pair.target.name,
        drafter=pair.drafter,
        dtype=args.dtype,
        draft_dtype=args.draft_dtype,
        prompts=len(requests),
        max_new_tokens=args.max_new_tokens,
        compile_s=sum(c.seconds for c in compilers.values()),
        profile_s=profile_s,
        cells=tuple(cells),
        checks=checks,
    )
    args.out.mkdir(parents=True, exist_ok=True)
    print(render_table(result))
    print(render_checks(checks))
    (args.out / "bench.json").write_text(result.to_json() + "\n")
    picture = args.out / "curve.png"
    plot(result, picture)
    print(f"wrote {args.out / 'bench.json'} and {picture}")
    print(f"took {time.perf_counter() - started:.0f} s")
    print(result.to_json())
    wrong = [d for c in checks for d in c.differences if abs(d.gap) > NEAR_TIE]
    return 1 if wrong else 0


def default_arms(most: int) -> tuple[str, ...]:
    """Every arm that a drafter of `most` drafts allows."""
    if not most:
        return (AR,)
    widths = sorted({min(w, most) for w in WIDTHS})
    return (AR, *(f"fixed-{w}" for w in widths), PUBLISHED, DCUT)


def build(
    pair: Pair,
    config: EngineConfig,
    arms: Sequence[str],
    compilers: dict[bool, Compiler],
    cost_dir: Path,
    ids: Sequence[Sequence[int]],
    most: int,
    update: Callable[..., None],
) -> tuple[dict[str, Arm], float]:
    """An engine per arm at one batch size; measures costs where there are none."""
    spent = 0.0
    policy: DCutPolicy | None = None

    def costs() -> DCutPolicy:
        nonlocal policy, spent
        if policy is None:
            here = fingerprint(
                pair.models, config, pair.target.identity, pair.drafter_identity
            )
            compiled = compilers[True].seconds
            start = time.perf_counter()
            table = cost_table(
                profiled(),
                config.shapes(pair.models),
                here,
                cost_dir,
                measure_missing=lambda: profile(
                    pair.models,
                    config,
                    profiled(),
                    here,
                    [t for i in ids for t in i],
                    compiler=compilers[True],
                    on_progress=lambda what, done, total: update(
                        None, f"measuring {what}: {done}/{total}"
                    ),
                ),
            )
            spent = time.perf_counter() - start - (compilers[True].seconds - compiled)
            policy = DCutPolicy(table)
        return policy

    engines = {}
    for name in arms:
        update(None, f"compiling batch {config.slots}, {name}")
        chosen = policy_of(name, costs, most)
        drafts = not isinstance(chosen, ArPolicy)
        models = pair.models if drafts else pair.without_drafter()
        engine = Engine(models, config, chosen, compiler=compilers[drafts])
        engine.free()
        engines[name] = Arm(name, engine)
    return engines, spent


def prefill_all(
    engines: dict[int, dict[str, Arm]], requests: Sequence[Request]
) -> list[Prefilled]:
    """Every prompt through the target once; all arms and batch sizes share them."""
    arms = next(iter(engines.values()))
    engine = max((a.engine for a in arms.values()), key=lambda e: e.shapes.width)
    with bar("prefill", len(requests)) as update:
        ready = []
        for done, request in enumerate(requests, 1):
            ready.append(engine.prefill(request))
            update(done)
    return ready


def machine() -> dict[str, object]:
    """Where this process runs."""
    device = jax.devices()[0]

    def git(*words: str) -> str:
        try:
            where = Path(__file__).resolve().parent
            out = subprocess.run(
                ["git", *words], cwd=where, capture_output=True, text=True, check=True
            )
            return out.stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return ""

    return {
        "device": device.device_kind,
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "commit": git("rev-parse", "--short", "HEAD"),
        "dirty": bool(git("status", "--porcelain")),
    }


if __name__ == "__main__":
    run(main)
