"""One process that answers, and those that follow it: one engine on one mesh.

Every process of a mesh has to dispatch the same steps in the same order. The first has
the scheduler. What changes an engine it tells the others before it does it, and they do
the same to theirs: host loops go by outcomes alone, and these are the same everywhere.
So requests, calls and steps travel, a line of JSON each; nothing that is decoded does.
"""

import hmac
import json
import math
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import Any, NoReturn

import jax

from dcut_jax.engine.engine import Engine
from dcut_jax.engine.requests import Completion, Halt, Request
from dcut_jax.engine.slots import Prefill, Prefilled
from dcut_jax.processes import first, text_of_first
from dcut_jax.stops import StopStrings

_JOIN_S = 120.0
_GREETING_S, _GREETING_BYTES = 5.0, 40
HaltOf = Callable[[Sequence[str]], Callable[[], Halt]]


class Lost(RuntimeError):
    """A process of the mesh has ended; nothing can be decoded on it any more."""

    def __init__(self, process: int) -> None:
        super().__init__(
            f"process {process} of {jax.process_count()} has ended, and the mesh with "
            f"it: look for its error first, then start all of them again"
        )


def meet(coordinator: str) -> list[socket.socket]:
    """Connects the first process with all others; each calls it once, at the start.

    Returns:
      In the first process a connection to each of the others, in the order of their
      numbers; in these the one to the first.
    """
    host = coordinator.rpartition(":")[0].strip("[]")
    if not first():
        port, secret = text_of_first("").split()
        line = socket.create_connection((host, int(port)), timeout=_JOIN_S)
        line.sendall(_greeting(secret, jax.process_index()))
        return [_lasting(line)]
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listening:
        listening.settimeout(_JOIN_S)
        secret = secrets.token_hex(16)
        text_of_first(f"{listening.getsockname()[1]} {secret}")
        found: dict[int, socket.socket] = {}
        while len(found) < jax.process_count() - 1:
            line, _ = listening.accept()
            line.settimeout(_GREETING_S)
            try:
                said = line.recv(_GREETING_BYTES, socket.MSG_WAITALL)
            except OSError:
                said = b""
            known = range(1, jax.process_count())
            who = [n for n in known if hmac.compare_digest(said, _greeting(secret, n))]
            if who:
                found[who[0]] = _lasting(line)
            else:
                line.close()  # somebody else who tried this port
    return [found[process] for process in sorted(found)]


def _greeting(secret: str, process: int) -> bytes:
    return f"{secret} {process:07d}".encode()


def _lasting(line: socket.socket) -> socket.socket:
    """A connection that waits as long as nothing is said, and then says it at once."""
    line.settimeout(None)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return line


class _Admitted:
    """Running texts by their number, which is the same in all processes."""

    def __init__(self) -> None:
        self._count = 0
        self._running: dict[int, Completion] = {}

    def add(self, done: Completion) -> None:
        still = {n: c for n, c in self._running.items() if c.finish == "running"}
        self._running = still | {self._count: done}
        self._count += 1

    def number(self, done: Completion) -> int | None:
        """None for one that ended a while ago."""
        return next((n for n, c in self._running.items() if c is done), None)

    def get(self, number: int | None) -> Completion | None:
        return None if number is None else self._running.get(number)


class Leader:
    """The first process's engine, as a scheduler takes it: the others do as it does.

    What only looks at the engine goes to it directly.
    """

    def __init__(self, engine: Engine, lines: Sequence[socket.socket]) -> None:
        self.__dict__.update(
            _engine=engine, _lines=lines, _lost=None, _texts=_Admitted()
        )
        for process, line in enumerate(lines, 1):
            threading.Thread(
                target=self._listen, args=(process, line), daemon=True
            ).start()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._engine, name, value)

    def _listen(self, process: int, line: socket.socket) -> None:
        """Nothing is ever said; a line that ends is a process that has ended."""
        try:
            line.recv(1)
        except OSError:
            pass
        self.__dict__["_lost"] = process

    @property
    def lost(self) -> int | None:
        """A process that has ended."""
        return self.__dict__["_lost"]

    def cause(self, failure: BaseException, wait_s: float = 1.0) -> BaseException:
        """What made a step fail: a process that has ended, if one has.

        What a step says then is of sockets, and may be heard before the line is.
        """
        end = time.monotonic() + wait_s
        while self.lost is None and time.monotonic() < end:
            time.sleep(wait_s / 20)
        return failure if self.lost is None else Lost(self.lost)

    def alive(self) -> None:
        """Raises `Lost` once a process has ended."""
        if self.lost is not None:
            raise Lost(self.lost)

    def _tell(self, *call: Any) -> None:
        self.alive()
        said = (json.dumps(call) + "\n").encode()
        for process, line in enumerate(self._lines, 1):
            try:
                line.sendall(said)
            except OSError as error:
                raise Lost(process) from error

    def begin_prefill(self, request: Request) -> Prefill:
        self._tell("begin", to_plain(request))
        return self._engine.begin_prefill(request)

    def prefill_chunk(self, begun: Prefill) -> int:
        self._tell("chunk")
        return self._engine.prefill_chunk(begun)

    def admit(self, ready: Prefilled) -> Completion:
        self._tell("admit")
        done = self._engine.admit(ready)
        self._texts.add(done)
        return done

    def step(self, beside: Prefill | None = None) -> None:
        self._tell("step", beside is not None, self._engine.time_phases)
        self._engine.step(beside)

    def cancel(self, done: Completion) -> None:
        self._tell("cancel", self._texts.number(done))
        self._engine.cancel(done)

    def flush(self) -> None:
        self._tell("flush")
        self._engine.flush()

    def end(self) -> None:
        """Lets the others end, as all is done."""
        self._tell("end")


def follow(engine: Engine, calls: Iterable[str], halt_of: HaltOf) -> None:
    """Does to an engine what the first process does to its own, until that ends it.

    Args:
      calls: what it says, a line each.
      halt_of: makes a request's halt of its stop strings.

    Raises:
      Lost: the first process has ended and did not say so.
    """
    texts = _Admitted()
    begun: Prefill | None = None
    for line in calls:
        name, *args = json.loads(line)
        match name:
            case "begin":
                begun = engine.begin_prefill(from_plain(args[0], halt_of))
            case "chunk":
                assert begun is not None, "a chunk of no prompt"
                engine.prefill_chunk(begun)
            case "admit":
                assert begun is not None, "no prompt to admit"
                texts.add(engine.admit(engine.end_prefill(begun)))
                begun = None
            case "step":
                beside, engine.time_phases = args
                engine.step(begun if beside else None)
            case "cancel":
                if (done := texts.get(args[0])) is not None:
                    engine.cancel(done)
                else:
                    engine.flush()  # as the first does for one that has ended
            case "flush":
                engine.flush()
            case "end":
                return
    raise Lost(0)


def to_plain(request: Request) -> dict[str, Any]:
    """A request as JSON can say it; its halt as stop strings."""
    plain = {f.name: getattr(request, f.name) for f in fields(request)}
    halt = plain["halt"]
    assert halt is None or isinstance(halt, StopStrings), "a halt that is no strings"
    return plain | {
        "halt": None if halt is None else halt.strings,
        "tpot_ms": None if math.isinf(request.tpot_ms) else request.tpot_ms,
    }


def from_plain(plain: dict[str, Any], halt_of: HaltOf) -> Request:
    """The request of `to_plain`."""
    strings, tpot_ms = plain["halt"], plain["tpot_ms"]
    return Request(
        **plain
        | {
            "prompt": tuple(plain["prompt"]),
            "stop": tuple(plain["stop"]),
            "halt": None if strings is None else halt_of(strings),
            "tpot_ms": math.inf if tpot_ms is None else tpot_ms,
        }
    )


def leave(error: BaseException) -> NoReturn:
    """Ends this process at once: an ordinary end would wait for one that is gone."""
    said = str(error) or type(error).__name__
    print(f"error: {said}", file=sys.stderr, flush=True)
    os._exit(1)
