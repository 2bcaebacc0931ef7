"""`python -m dcut_jax.bench serve`: servers of several arms under the same load."""

import argparse
import contextlib
import datetime
import json
import math
import shlex
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dcut_jax.bench.load import Load, Sample, Summary, replay, summarise
from dcut_jax.bench.records import AR, host
from dcut_jax.cli import (
    add_memory_flag,
    add_model_flags,
    bar,
    distinct,
    positive,
    positives,
    refuse_set,
)
from dcut_jax.engine.load import has_drafter
from dcut_jax.prompts import DEFAULT, load_prompts

VERSION = 1
COLUMNS = 110
DCUT, FIXED, SERVER = "dcut", "fixed-", "server"
START_S = 1800.0  # costs may have to be measured first
ROUND_S = 1.0  # quiet before a round


def serve_arms(text: str) -> tuple[str, ...]:
    """An `argparse` type: arms of servers, between commas, each once."""
    for name in text.split(","):
        width = name.removeprefix(FIXED)
        fixed = name.startswith(FIXED) and width.isdecimal() and int(width)
        if name not in (AR, DCUT) and not fixed:
            raise argparse.ArgumentTypeError(
                f"arm {name!r} is unknown; choose from {AR}, {FIXED}WIDTH, {DCUT}"
            )
    return distinct(text.split(","))


def rates(text: str) -> tuple[float, ...]:
    """An `argparse` type: numbers above 0, between commas."""
    try:
        found = tuple(map(float, text.split(",")))
    except ValueError:
        found = ()
    if not found or not all(0 < r < math.inf for r in found):
        raise argparse.ArgumentTypeError(f"expected numbers above 0, found {text!r}")
    return distinct(found)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="python -m dcut_jax.bench serve", description=__doc__
    )
    add_model_flags(p)
    p.add_argument("--arms", type=serve_arms, default=(AR, "fixed-7", DCUT))
    p.add_argument("--url", help="a server that runs already, instead of arms")
    p.add_argument("--model", help="its model's name, with --url")
    loads = p.add_mutually_exclusive_group()
    loads.add_argument(
        "--concurrencies",
        type=positives,
        help="requests at a time, between commas (default: 1,4,8)",
    )
    loads.add_argument("--rates", type=rates, help="requests per second instead")
    p.add_argument("--burst", type=positive, default=1, help="that arrive together")
    p.add_argument("--requests", type=positive, default=32, help="of a round")
    p.add_argument("--rounds", type=positive, default=3)
    p.add_argument("--seed", type=int, default=0, help="of arrivals")
    p.add_argument("--prompts", default=DEFAULT, help="a shipped set or a JSONL file")
    p.add_argument("--max-new-tokens", type=positive, default=64)
    p.add_argument("--tpot-ms", type=float, help="target that goodput is counted by")
    p.add_argument("--slots", type=positive, default=8)
    p.add_argument("--max-length", type=positive, default=1024)
    add_memory_flag(
        p, "what a server takes; where memory is short, arms may differ in it"
    )
    p.add_argument("--cost-dir", type=Path, help="of cost tables")
    p.add_argument("--out", type=Path, default=Path("bench-out"))
    return p


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line's values, with what they cannot do together refused."""
    p = parser()
    args = p.parse_args(argv)
    if (args.url is None) != (args.model is None):
        p.error("--url and --model belong together")
    if args.url:
        own = ["arms", "target", "drafter", "dtype", "draft_dtype", "cache_dtype"]
        own += ["slots", "max_length", "kv_memory", "cost_dir"]
        refuse_set(p, args, own, "is of servers that this starts, not of --url")
    if args.seed and not args.rates:
        p.error("--seed belongs to --rates")
    if args.burst > 1 and not args.rates:
        p.error("--burst belongs to --rates")
    drafting = [name for name in args.arms if name != AR]
    if drafting and not args.url and not has_drafter(args.target, args.drafter):
        p.error(
            f"--arms: {drafting[0]} needs a drafter; name one with --drafter, or run "
            f"--arms {AR}"
        )
    return args


@contextlib.contextmanager
def running(arm: str, args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """A server of an arm; gives its address and its model's name."""
    command = [sys.executable, "-m", "dcut_jax.serve", "--port", "0"]
    for name in ("target", "drafter", "dtype", "draft_dtype", "cache_dtype"):
        if (value := getattr(args, name)) is not None:
            command += [f"--{name.replace('_', '-')}", str(value)]
    command += ["--slots", str(args.slots), "--max-length", str(args.max_length)]
    if args.kv_memory is not None:
        command += ["--kv-memory", str(args.kv_memory)]
    command += ["--name", arm, "--no-logprobs"]
    if arm.startswith(FIXED):
        command += ["--mode", "fixed", "--width", arm.removeprefix(FIXED)]
    else:
        command += ["--mode", arm]
    if args.cost_dir and arm == DCUT:
        command += ["--cost-dir", str(args.cost_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            too_late = threading.Timer(START_S, server.kill)
            too_late.start()
            line = server.stdout.readline()
            too_late.cancel()
            if " at http" not in line:
                raise ValueError(
                    f"expected the server of arm {arm} to start, within "
                    f"{START_S:.0f} s, found it ended; what it said is above"
                )
            yield line.rsplit(" ", 1)[1].strip(), arm
        finally:
            server.terminate()
            server.wait(60)


def bodies(
    args: argparse.Namespace, first: int, model: str
) -> list[tuple[str, dict[str, Any]]]:
    """The requests of a round, each with its class."""
    prompts = load_prompts(args.prompts)
    found = []
    for i in range(first, first + args.requests):
        prompt = prompts[i % len(prompts)]
        kind = prompt.id.partition("/")[0] or str(args.prompts)
        body = {
            "model": model,
            "messages": list(prompt.messages),
            "max_tokens": args.max_new_tokens,
            "temperature": 0,
        }
        found.append((kind, body))
    return found


def run_serve(argv: Sequence[str]) -> int:
    """Runs all arms under all loads and prints what their clients saw.

    Returns:
      1 if a request got no whole answer, else 0.
    """
    args = parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.rates:
        loads = [Load(rate=r, burst=args.burst) for r in args.rates]
    else:
        loads = [Load(concurrency=c) for c in args.concurrencies or (1, 4, 8)]
    started = time.perf_counter()
    cells: list[dict[str, Any]] = []
    machine = host()  # now: the commit may be another one in the end
    load_prompts(args.prompts)  # what is wrong with them is told before servers start
    texts: dict[str, list[tuple[int, str]]] = {}
    with contextlib.ExitStack() as stack:
        if args.url:
            servers = {SERVER: (args.url, args.model)}
        else:
            servers = {}
            for arm in args.arms:
                print(f"starting {arm}", file=sys.stderr)
                servers[arm] = stack.enter_context(running(arm, args))
        for url, model in servers.values():  # first touches are nobody's
            replay(url, bodies(args, 0, model)[:4], Load(concurrency=4), 0)
        total = args.rounds * len(loads) * len(servers)
        with bar("rounds", total) as update:
            for round_ in range(args.rounds):
                names = list(servers)
                turn = round_ % len(names)  # no arm is always the first
                for load in loads:
                    for arm in (*names[turn:], *names[:turn]):
                        update(len(cells), f"round {round_ + 1}, {load.name}, {arm}")
                        url, model = servers[arm]
                        first = round_ * args.requests
                        some = bodies(args, first, model)
                        time.sleep(ROUND_S)
                        samples = replay(url, some, load, args.seed + round_)
                        texts.setdefault(arm, []).extend(
                            (first + i, sample.text)
                            for i, sample in enumerate(samples)
                            if sample.status == 200
                        )
                        cells.append(cell(arm, load, round_, samples, args.tpot_ms))
    print(render(cells, loads, list(servers), args.tpot_ms))
    base = next(iter(servers))
    differ = differences(texts, base)
    for arm, count in differ.items():
        print(f"{arm}: {count} texts differ from those of {base}")
    record = {
        "version": VERSION,
        "command": "python -m dcut_jax.bench serve " + shlex.join(argv),
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "machine": machine,  # the clients', and the servers' where this started them
        "url": args.url,
        "target": None if args.url else args.target,
        "drafter": args.drafter,
        "slots": None if args.url else args.slots,
        "requests": args.requests,
        "max_new_tokens": args.max_new_tokens,
        "tpot_target_ms": args.tpot_ms,
        "differences": differ,
        "cells": cells,
    }
    line = json.dumps(_finite(record), allow_nan=False)
    (args.out / "serve.json").write_text(line + "\n")
    print(
        f"wrote {args.out / 'serve.json'}; took {time.perf_counter() - started:.0f} s"
    )
    print(line)
    failed = sum(c["all"]["failed"] for c in cells)
    if failed:
        print(
            f"error: expected an answer to every request, found {failed} without; "
            f"column `failed` says of whom, and the servers' output why",
            file=sys.stderr,
        )
    return 1 if failed else 0


def differences(
    texts: Mapping[str, Sequence[tuple[int, str]]], base: str
) -> dict[str, int]:
    """How many texts of an arm are not what `base` first gave for the same request.

    Args:
      texts: of each arm, with the number of the request; under several loads more than
        one of a request, also of `base` itself.
    """
    want: dict[int, str] = {}
    for request, text in texts.get(base, ()):
        want.setdefault(request, text)
    found = {
        arm: sum(text != want.get(request, text) for request, text in some)
        for arm, some in texts.items()
    }
    return {arm: count for arm, count in found.items() if count}


def cell(
    arm: str,
    load: Load,
    round_: int,
    samples: Sequence[Sample],
    target_ms: float | None,
) -> dict[str, Any]:
    """One arm under one load in one round, with its classes."""
    whole = summarise(samples, target_ms)
    kinds = sorted({s.kind for s in samples})
    return {
        "arm": arm,
        "load": asdict(load),
        "round": round_,
        "all": asdict(whole),
        "classes": {
            kind: asdict(
                summarise(
                    [s for s in samples if s.kind == kind], target_ms, whole.seconds
                )
            )
            for kind in kinds
        },
    }


def render(
    cells: Sequence[dict[str, Any]],
    loads: Sequence[Load],
    arms: Sequence[str],
    target_ms: float | None,
) -> str:
    """A table: medians over rounds; ratios are of rounds, to the first arm.

    Where prompts are of several classes, a second table has each of them.
    """
    table = Table(title="What clients saw: medians over rounds")
    _add_columns(table, "load", "arm", "tokens/s", f"/ {arms[0]}")
    by_class = Table(title="By class of the prompt: medians over rounds")
    _add_columns(by_class, "load", "class", "arm", "tokens/s")
    classes = sorted({kind for c in cells for kind in c["classes"]})
    for load in loads:
        here = [c for c in cells if c["load"] == asdict(load)]
        base = {c["round"]: c["all"] for c in here if c["arm"] == arms[0]}
        for arm in arms:
            mine = [c for c in here if c["arm"] == arm]
            ratios = [
                c["all"]["throughput"] / (base[c["round"]]["throughput"] or math.nan)
                for c in mine
            ]
            rate, *rest = _medians([Summary(**c["all"]) for c in mine], target_ms)
            table.add_row(
                load.name, arm, rate, f"{statistics.median(ratios):.2f}", *rest
            )
        for kind in classes:
            for arm in arms:
                some = [
                    Summary(**c["classes"][kind])
                    for c in here
                    if c["arm"] == arm and kind in c["classes"]
                ]
                if some:
                    by_class.add_row(load.name, kind, arm, *_medians(some, target_ms))
    console = Console(width=COLUMNS, highlight=False)
    with console.capture() as capture:
        console.print(table)
        if len(classes) > 1:
            console.print(by_class)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def _add_columns(table: Table, *first: str) -> None:
    for name in first:
        named = name in ("load", "arm", "class")
        table.add_column(name, justify="left" if named else "right")
    for name in (
        "goodput",
        "failed",
        "TTFT ms p50",
        "p99",
        "TPOT ms p50",
        "p90",
        "p99",
    ):
        table.add_column(name, justify="right")


def _medians(some: Sequence[Summary], target_ms: float | None) -> list[str]:
    """Cells of a row: rate, goodput, failures, and times that clients saw."""
    good = [s.goodput for s in some]
    return [
        f"{statistics.median(s.throughput for s in some):.1f}",
        "" if target_ms is None else f"{statistics.median(good):.1f}",
        str(sum(s.failed for s in some)),
        *(f"{statistics.median(s.ttft_ms[i] for s in some):.0f}" for i in (0, 2)),
        *(f"{statistics.median(s.tpot_ms[i] for s in some):.1f}" for i in (0, 1, 2)),
    ]


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value
