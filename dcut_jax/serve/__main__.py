"""`python -m dcut_jax.serve`: an OpenAI-compatible server over one engine."""

import argparse
import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from types import FrameType
from typing import TYPE_CHECKING, cast

from dcut_jax.cli import (
    add_memory_flag,
    add_mesh_flags,
    add_model_flags,
    placement_of,
    positive,
    run,
)
from dcut_jax.config import ConfigError
from dcut_jax.decode.steps import Models
from dcut_jax.engine.config import EngineConfig
from dcut_jax.engine.dispatch import PREFILL_CHUNKS
from dcut_jax.engine.engine import Engine
from dcut_jax.engine.load import load_pair
from dcut_jax.engine.memory import kv_budget
from dcut_jax.modes import add_mode_flags, build_engine, settle_mode
from dcut_jax.processes import several
from dcut_jax.prompts import DEFAULT, load_prompts
from dcut_jax.serve.lead import Leader, Lost, follow, leave, meet
from dcut_jax.stops import StopStrings
from dcut_jax.weights.load import Target
from dcut_jax.weights.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from dcut_jax.serve.app import Server

CHOICES = 16
FILLING = 16  # prompts whose tokens fill the caches where costs are measured
API_KEY = "DCUT_API_KEY"
DRAIN_S = 30.0
STUCK_S, LOOK_S = 20.0, 0.2
SWITCH_S = 5e-4


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(prog="python -m dcut_jax.serve", description=__doc__)
    add_model_flags(p)
    add_memory_flag(
        p,
        "enough for all slots at full length, or where that is more, four fifths of "
        "what is free beside prompts on their way",
    )
    add_mesh_flags(p)
    p.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: loopback)"
    )
    p.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    p.add_argument("--slots", type=positive, default=8, help="texts decoded together")
    p.add_argument(
        "--max-length",
        type=positive,
        default=1024,
        help="longest prompt plus output, in tokens (default: 1024)",
    )
    add_mode_flags(p)
    p.add_argument("--name", help="of the model in requests (default: the target's)")
    p.add_argument(
        "--no-logprobs",
        action="store_true",
        help="offer no log-probabilities; steps are a little cheaper",
    )
    p.add_argument(
        "--likeliest",
        type=int,
        default=0,
        choices=range(21),
        metavar="0..20",
        help="tokens that logprobs can tell beside the one taken; makes every step "
        "longer (default: 0)",
    )
    p.add_argument(
        "--no-prefix-cache",
        action="store_true",
        help="run every prompt whole; else beginnings of prompts are kept, and how "
        "soon an answer comes tells whether somebody began alike",
    )
    p.add_argument(
        "--api-key",
        action="append",
        default=[],
        help=f"a key that requests have to bring; several may be given, and {API_KEY} "
        "in the environment is one, which no list of processes shows",
    )
    limits = p.add_argument_group("limits")
    limits.add_argument("--queue", type=positive, default=256, help="texts that wait")
    limits.add_argument(
        "--per-client",
        type=positive,
        default=64,
        help="requests under way of one key, or without keys of one address",
    )
    limits.add_argument("--body-bytes", type=positive, default=1 << 20)
    limits.add_argument(
        "--choices",
        type=positive,
        help=f"texts of one request (default: {CHOICES}, or as many as may wait)",
    )
    limits.add_argument(
        "--prefill-tokens",
        type=int,
        default=PREFILL_CHUNKS[-1],
        choices=PREFILL_CHUNKS,
        help=f"most of a prompt with a step of those who decode (default: "
        f"{PREFILL_CHUNKS[-1]})",
    )
    limits.add_argument(
        "--drain-s",
        type=float,
        default=DRAIN_S,
        help="time that what runs has to end after SIGTERM (default: 30)",
    )
    return p


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line's values, with what they cannot do together refused."""
    p = parser()
    args = p.parse_args(argv)
    settle_mode(p, args)
    if args.likeliest and args.no_logprobs:
        p.error("--likeliest: expected no --no-logprobs with it")
    args.choices = args.choices or min(CHOICES, args.queue)
    if args.choices > args.queue:
        p.error(
            f"--choices {args.choices}: never finds room in a queue of {args.queue}; "
            f"expected at most that, or a larger --queue"
        )
    if not 0 <= args.port < 2**16:
        p.error(f"--port: expected 0 to 65535, found {args.port}")
    if not args.drain_s >= 0:
        p.error(f"--drain-s: expected at least 0, found {args.drain_s}")
    if key := os.environ.get(API_KEY):
        args.api_key.append(key)
    if not all(args.api_key):
        p.error("--api-key: expected a key, found an empty text")
    return args


def filling(text: TextTokenizer) -> list[int]:
    """Tokens of real prompts, for the caches where costs are measured."""
    some = load_prompts(DEFAULT, FILLING)
    return [t for p in some for t in text.chat(list(p.messages))]


def powers_below(slots: int) -> tuple[int, ...]:
    """Rows of plain steps where few run: at most half of them are for nobody."""
    return tuple(2**i for i in range(slots.bit_length()) if 2**i < slots)


def shared_chunks(models: Models, most: int) -> tuple[int, ...]:
    """Chunks of prompts that steps take along: of so many rows at most.

    None where rows travel to experts; there prompts are run between steps, in the
    longest chunks.

    Raises:
      ConfigError: there, and chunks are to be shorter.
    """
    if models.dealt(rows=True) is not None:
        if most < PREFILL_CHUNKS[-1]:
            raise ConfigError(
                f"--prefill-tokens {most}: where rows travel to experts prompts are "
                f"run {PREFILL_CHUNKS[-1]} tokens at a time; leave it out there"
            )
        return ()
    return tuple(rows for rows in PREFILL_CHUNKS if rows <= most)


def make_engine(args: argparse.Namespace) -> tuple[Target, Engine]:
    """Models, and an engine of them; `args` are `parse`'s.

    Costs of steps are measured here, where there are none of this machine.
    """
    pair = load_pair(
        args.target, args.drafter, args.dtype, args.draft_dtype, placement_of(args)
    )
    text = pair.target.text()
    config = EngineConfig(
        args.slots,
        args.max_length,
        max(len(text.eos_ids), 1),
        args.cache_dtype,
        sampling=True,
        logprobs=not args.no_logprobs,
        likeliest=args.likeliest,
        kv_memory=args.kv_memory,
        prefix_cache=not args.no_prefix_cache,
        shared_chunks=shared_chunks(pair.models, args.prefill_tokens),
        fewer=powers_below(args.slots // pair.models.shards),
    )
    if config.kv_memory is None and (budget := kv_budget(pair.models, config)):
        config = replace(config, kv_memory=budget)
        print(
            f"keys and values get {budget / 2**20:.0f} MiB of each device, most of "
            f"what is free, less than {args.slots} slots of {args.max_length} tokens "
            f"can fill: texts may wait for each other; --kv-memory sets another bound",
            file=sys.stderr,
        )
    return pair.target, build_engine(
        pair,
        config,
        args.mode,
        args.width,
        lambda: filling(text),
        costs=args.costs,
        cost_dir=args.cost_dir,
        fairness=args.fairness,
        patience=args.patience,
        progress=sys.stderr.isatty(),
    )


def make_server(args: argparse.Namespace, target: Target, engine: Engine) -> "Server":
    """What answers for an engine; `args` are `parse`'s."""
    from dcut_jax.serve.app import Server
    from dcut_jax.serve.protocol import Served
    from dcut_jax.serve.scheduler import Limits, Scheduler

    limits = Limits(
        queue=args.queue,
        per_client=args.per_client,
        body_bytes=args.body_bytes,
        choices=args.choices,
        prefill_tokens=args.prefill_tokens,
    )
    served = Served(
        args.name or target.name,
        target.text(),
        engine.longest,
        not args.no_logprobs,
        choices=args.choices,
        likeliest=args.likeliest,
        plans=engine.steering is not None,
    )
    alive = engine.alive if isinstance(engine, Leader) else None
    scheduler = Scheduler(engine, limits, alive=alive)
    return Server(served, scheduler, limits, tuple(args.api_key))


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until it is told to end."""
    args = parse(argv)
    try:
        import_module("uvicorn")  # `answer` wants it, minutes from here
        from dcut_jax.serve.app import make_app
    except ImportError as error:
        raise ImportError(
            f"serving needs packages of the extra `serve`, found {error}; run "
            f"`pip install 'dcut-jax[serve]'`"
        ) from error
    listening = None
    if not args.process_id:  # before what takes minutes: a port may be taken
        listening = bound(args.host, args.port)
    target, engine = make_engine(args)
    if not several():
        assert listening is not None, "the one process answers"
        return answer(args, make_app, target, engine, listening)
    lines = meet(args.coordinator)
    # An ordinary end would wait for the others, and these do not know of it.
    try:
        if listening is not None:
            leader = Leader(engine, lines)
            status = answer(args, make_app, target, cast(Engine, leader), listening)
            leader.end()
            return status
        text = target.text()
        # Told to end, the first process lets requests finish, and then ends this one.
        for told in (signal.SIGINT, signal.SIGTERM):
            signal.signal(told, signal.SIG_IGN)
        with lines[0].makefile() as calls:
            follow(engine, calls, lambda strings: StopStrings(text, strings))
    except BaseException as error:
        leave(error)
    return 0


def bound(host: str, port: int) -> socket.socket:
    """A socket with this address, on which nobody listens yet.

    Raises:
      OSError: it cannot be had.
    """
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
        # Or another could bind it, too, until one of them listens.
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError as error:
        found.close()
        raise OSError(
            f"expected to listen at {host}, port {port}, found: {error.strerror}; give "
            f"another --host or --port (0 takes a free one)"
        ) from error
    return found


def answer(
    args: argparse.Namespace,
    make_app: "Callable[[Server], Starlette]",
    target: Target,
    engine: Engine,
    listening: socket.socket,
) -> int:
    """Answers requests until a signal comes; the status to end with."""
    import uvicorn

    # By default a thread that writes answers may keep the engine's waiting for 5 ms.
    sys.setswitchinterval(SWITCH_S)
    server = make_server(args, target, engine)
    scheduler = server.scheduler

    class Draining(uvicorn.Server):
        """Ends once what it has taken in is done; at once when told twice."""

        told = False

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if self.told:
                os._exit(1)  # whatever is in the way: a device that hangs, say
            self.told = True
            print(
                f"ending: what runs has {args.drain_s:.0f} s; a second signal ends "
                f"it at once",
                file=sys.stderr,
                flush=True,
            )
            loop.call_soon_threadsafe(lambda: tasks.append(loop.create_task(drain())))

    async def drain() -> None:
        await server.drain(args.drain_s)
        await scheduler.stop()  # tells those who still wait
        http.should_exit = True  # and the command ends with status 0

    tasks: list[asyncio.Task[None]] = []
    config = uvicorn.Config(
        make_app(server),
        log_level="warning",
        timeout_graceful_shutdown=5,
        backlog=1024,
    )
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    http = Draining(config)

    async def serve() -> None:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        host, port = listening.getsockname()[:2]
        where = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        print(
            f"{server.served.name}: {args.slots} slots of {args.max_length} tokens, "
            f"{scheduler.engine.shapes.pages} pages, mode {args.mode}; at {where}",
            flush=True,
        )
        if isinstance(engine, Leader):
            tasks.append(loop.create_task(end_when_broken(engine)))
        await http.serve([listening])

    async def end_when_broken(leader: Leader) -> None:
        """Of several processes none can go on alone: all have to be started again."""
        stuck_s = 0.0  # in a step that others will never take part in
        while scheduler.failure is None and stuck_s < STUCK_S:
            await asyncio.sleep(LOOK_S)
            stuck_s += LOOK_S if leader.lost is not None else 0.0
        if scheduler.failure is None and leader.lost is not None:
            leave(Lost(leader.lost))
        http.should_exit = True

    loop.run_until_complete(serve())
    if isinstance(engine, Leader) and scheduler.failure is not None:
        leave(engine.cause(scheduler.failure))
    return 1 if scheduler.failure else 0


if __name__ == "__main__":
    run(main)
