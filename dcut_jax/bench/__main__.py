"""`python -m dcut_jax.bench`: throughput against batch size, arm by arm."""

import argparse
import datetime
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import jax

from dcut_jax.bench.peer import TransformersPeer, require_torch
from dcut_jax.bench.records import AR, PEER, BenchResult, Cell, host
from dcut_jax.bench.replay import run_replay
from dcut_jax.bench.report import (
    plot,
    plot_reliability,
    render_checks,
    render_reliability,
    render_table,
    require_matplotlib,
)
from dcut_jax.bench.runner import (
    DCUT,
    NEAR_TIE,
    PUBLISHED,
    WITHOUT,
    Arm,
    Stopwatch,
    Texts,
    decode_cell,
    fixed_width,
    logit_gap,
    policy_of,
    reliability_of,
    take_turns,
    wrong_arms,
)
from dcut_jax.bench.serve import run_serve
from dcut_jax.cli import (
    add_mesh_flags,
    add_model_flags,
    bar,
    distinct,
    placement_of,
    positive,
    positives,
    run,
)
from dcut_jax.decode.compile import Compiler
from dcut_jax.engine.config import EngineConfig
from dcut_jax.engine.engine import Engine
from dcut_jax.engine.load import (
    NO_DRAFTER,
    Pair,
    has_drafter,
    load_pair,
    stored_costs,
)
from dcut_jax.engine.policy import WIDTHS, ArPolicy, DCutPolicy, unmeasured
from dcut_jax.engine.profile import default_directory
from dcut_jax.engine.requests import Request
from dcut_jax.engine.slots import Prefilled
from dcut_jax.mesh import Placement
from dcut_jax.processes import first
from dcut_jax.prompts import (
    DEFAULT,
    load_prompts,
    random_ids,
    random_length,
)
from dcut_jax.weights.load import Target

# Timed at each batch size in each round: a dozen steps are too few to compare arms by.
LEAST_TOKENS = 96
TURNS = ("steps", "rounds")


def arm_names(text: str) -> tuple[str, ...]:
    """An `argparse` type: arms, between commas, each once."""
    names = text.split(",")
    for name in names:
        try:
            fixed_width(name)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
    return distinct(names)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="python -m dcut_jax.bench",
        description=__doc__,
        epilog="`bench serve` puts servers under load instead; it has flags of its own",
    )
    add_model_flags(p)
    add_mesh_flags(p)
    p.add_argument("--batch-sizes", type=positives, default=(1, 4, 8, 16, 32))
    p.add_argument(
        "--arms",
        type=arm_names,
        help=f"between commas: {AR}, fixed-WIDTH, {PUBLISHED}, {DCUT}; default: all, "
        f"with widths {', '.join(map(str, WIDTHS))} as far as the drafter goes. "
        f"Also, D-Cut without one of its terms: {', '.join(WITHOUT)}",
    )
    p.add_argument(
        "--prompts",
        default=DEFAULT,
        help="a shipped set, a JSONL file, or random:LENGTH, tokens at random for a "
        "target without a tokenizer",
    )
    p.add_argument("--limit", type=positive, default=32, help="prompts to use")
    p.add_argument(
        "--max-new-tokens", type=positive, default=64, help="at least 2 (default: 64)"
    )
    p.add_argument("--max-length", type=positive, help="default: what prompts need")
    p.add_argument("--rounds", type=positive, default=3)
    p.add_argument(
        "--tokens-per-request",
        type=positive,
        help="timed tokens per slot and round; default: 8, and more where fewer than "
        f"{LEAST_TOKENS} would be timed in all",
    )
    p.add_argument(
        "--turns",
        choices=TURNS,
        default=TURNS[0],
        help="when the next arm of a batch size takes its turn: after a step, or after "
        "a round, which has the caches of one arm in memory at a time (default: steps)",
    )
    p.add_argument("--cost-dir", type=Path, default=default_directory())
    p.add_argument("--out", type=Path, default=Path("bench-out"))
    p.add_argument("--no-plot", action="store_true", help="draw no curve.png")
    p.add_argument("--peer", choices=(PEER,), help="a peer's AR as an arm")
    p.add_argument(
        "--replay",
        action="store_true",
        help="policies on published cost tables instead, without a model; takes --out",
    )
    p.add_argument(
        "--expert-aware",
        action="store_true",
        help="with --replay: also what is gained by knowing which experts of a mixture "
        "each draft opens",
    )
    return p


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line's values, with what they cannot do together refused."""
    p = parser()
    args = p.parse_args(argv)
    if args.replay:
        given = {k for k, v in vars(args).items() if v != p.get_default(k)}
        if unused := sorted(given - {"replay", "out", "expert_aware"}):
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in unused)
            p.error(f"--replay runs no model: expected at most --out, found {flags}")
    elif args.expert_aware:
        p.error("--expert-aware is of the replay; give --replay with it")
    if args.max_new_tokens < 2:
        p.error(
            "--max-new-tokens: expected at least 2, found 1; a first token comes with "
            "the prompt, and nothing would be left to decode"
        )
    if args.peer and args.processes:
        p.error("--peer runs in one process; leave --processes out")
    drafting = [name for name in args.arms or () if name != AR]
    if drafting and not has_drafter(args.target, args.drafter):
        p.error(
            f"--arms: {drafting[0]} needs a drafter; name one with --drafter, or run "
            f"--arms {AR}"
        )
    if args.arms and not drafting:
        args.drafter = NO_DRAFTER
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the bench; status 1 if a text leaves AR's at more than a near-tie."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] == "serve":
        return run_serve(argv[1:])
    args = parse(argv)
    command = shlex.join(["python", "-m", "dcut_jax.bench", *argv])
    if args.replay:
        return run_replay(command, args.out, expert_aware=args.expert_aware)
    # Whatever can fail does so before any work.
    if not args.no_plot:
        require_matplotlib()
    if args.peer:
        require_torch()
    started = time.perf_counter()
    read_prompts = prompt_reader(args.prompts, args.limit)
    placement = placement_of(args)
    here = machine(placement)  # now: the commit may be another one in the end
    if first():
        args.out.mkdir(parents=True, exist_ok=True)
    pair = load_pair(args.target, args.drafter, args.dtype, args.draft_dtype, placement)
    most = pair.models.drafter.max_drafts if pair.models.drafter else 0
    arms = args.arms or default_arms(most)
    for name in arms:
        policy_of(name, unmeasured, most)
    ids, stop = read_prompts(pair.target)
    requests = [Request(i, args.max_new_tokens, stop) for i in ids]
    peer = TransformersPeer(pair.target, requests) if args.peer else None

    length = args.max_length or max(map(len, ids)) + args.max_new_tokens
    configs = {
        batch: EngineConfig(
            batch, length, max(len(stop), 1), cache_dtype=args.cache_dtype
        )
        for batch in args.batch_sizes
    }
    plain = pair.without_drafter()
    compilers = {
        True: Compiler(pair.models, args.cache_dtype),
        False: Compiler(plain, args.cache_dtype),
    }
    print(f"{len(requests)} prompts, AR text of {args.max_new_tokens} tokens each")
    with bar("AR reference", len(requests)) as update:
        slots = plain.even(min(16, len(requests)))
        config = replace(configs[args.batch_sizes[0]], slots=slots)
        engine = Engine(plain, config, ArPolicy(), compiler=compilers[False])
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
    cells = run_rounds(
        engines,
        ready,
        texts,
        peer,
        rounds=args.rounds,
        tokens_per_request=args.tokens_per_request,
        turns=args.turns,
    )
    # Of a mesh the target is on the host as well, whole.
    whole = replace(plain, params={"target": pair.target.params}, placement=None)
    checks = texts.results(lambda d: logit_gap(whole, ids[d.prompt], texts, d))
    result = BenchResult(
        command=command,
        date=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        machine=here | ({"peer": peer.version} if peer else {}),
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
        cache_dtype=args.cache_dtype,
        synthetic=asdict(made) if (made := pair.models.synthetic) else None,
        reliability=tuple(
            known
            for by_name in engines.values()
            for arm in by_name.values()
            for known in reliability_of(arm)
        ),
    )
    if first():
        report(result, args.out, plots=not args.no_plot, started=started)
    tie = max(NEAR_TIE[args.dtype], NEAR_TIE[args.cache_dtype])
    return 1 if wrong_arms(checks, tie) else 0


def prompt_reader(
    source: str, limit: int
) -> Callable[[Target], tuple[list[tuple[int, ...]], tuple[int, ...]]]:
    """From a target to token ids of prompts, and what ends a text.

    Whatever is wrong with the source is found here, before a target is loaded.
    """
    if (length := random_length(source)) is not None:
        return lambda target: (random_ids(length, limit, target.cfg.vocab), ())
    prompts = load_prompts(source, limit)

    def read(target: Target) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
        text = target.text()
        ids = [tuple(text.chat(list(p.messages))) for p in prompts]
        return ids, tuple(text.eos_ids)

    return read


def report(result: BenchResult, out: Path, *, plots: bool, started: float) -> None:
    """Writes the record and its pictures, and prints both tables and the record."""
    wrote = [out / "bench.json"]
    wrote[0].write_text(result.to_json() + "\n")  # first: the rest can be made from it
    print(render_table(result))
    print(render_checks(result.checks))
    if result.reliability:
        print(render_reliability(result.reliability))
    if plots:
        wrote.append(out / "curve.png")
        plot(result, wrote[-1])
        if any(known.arm == DCUT for known in result.reliability):
            wrote.append(out / "reliability.png")
            plot_reliability(result, DCUT, wrote[-1])
    print(f"wrote {', '.join(map(str, wrote))}")
    print(f"took {time.perf_counter() - started:.0f} s")
    print(result.to_json())


def run_rounds(
    engines: dict[int, dict[str, Arm]],
    ready: Sequence[Prefilled],
    texts: Texts,
    peer: TransformersPeer | None,
    *,
    rounds: int,
    tokens_per_request: int | None,
    turns: str,
) -> list[Cell]:
    """Every arm at every batch size, so that they see the machine alike.

    Args:
      turns: one of `TURNS`: whether arms of a batch size take turns with every step,
        which needs the caches of all of them at once, or with every round.
    """
    cells: list[Cell] = []
    per_round = sum(len(arms) + (peer is not None) for arms in engines.values())
    with bar("rounds", rounds * per_round) as update:
        for round in range(rounds):
            for batch, by_name in engines.items():
                label = f"round {round + 1}, batch {batch}"
                tokens = tokens_per_request or max(8, -(-LEAST_TOKENS // batch))
                arms = list(by_name.values())
                turn = round % len(arms)  # no arm is always the first
                in_order = (*arms[turn:], *arms[:turn])
                together = [in_order] if turns == "steps" else [(a,) for a in in_order]
                for some in together:
                    update(len(cells), f"{label}, {', '.join(a.name for a in some)}")
                    cells += take_turns(
                        [
                            decode_cell(
                                arm,
                                ready,
                                texts,
                                round=round,
                                tokens_per_request=tokens,
                            )
                            for arm in some
                        ],
                        seed=round,
                    )
                if peer is not None:
                    update(len(cells), f"{label}, {PEER}")
                    cells.append(
                        peer.run_cell(
                            batch,
                            texts,
                            round=round,
                            tokens_per_request=tokens,
                        )
                    )
        update(len(cells), "rounds")
    return cells


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
            compiled = compilers[True].seconds
            start = time.perf_counter()
            table = stored_costs(
                pair,
                config,
                [t for i in ids for t in i],
                compilers[True],
                cost_dir,
                on_progress=lambda what, done, total: update(
                    None, f"measuring {what}: {done}/{total}"
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
        watch, compiler = Stopwatch(), compilers[drafts]
        engine = Engine(models, config, chosen, compiler=compiler, clock=watch)
        engine.free()
        engines[name] = Arm(name, engine, watch)
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


def machine(placement: Placement | None = None) -> dict[str, object]:
    """Where this process runs, and on which mesh."""
    device = jax.devices()[0]

    mesh: dict[str, object] = {}
    if placement is not None:
        mesh = {
            "mesh": dict(placement.described),
            "strategy": placement.strategy,
            "processes": jax.process_count(),
        }
    return {"device": device.device_kind} | host() | mesh


if __name__ == "__main__":
    run(main)
