"""What an engine keeps of its requests and of its steps."""

import time
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from dcut_jax.cut.ease import Ease
from dcut_jax.cut.fairness import Progress
from dcut_jax.decode import steps as S
from dcut_jax.decode.decide import Decision
from dcut_jax.engine.requests import Completion, Halt, Likeliest, Origin, Request


@dataclass
class StepRecord:
    """One step as the host saw it. Phase times are there when phases are timed."""

    width: int
    rows: int
    kept: int
    active: int
    committed: int = 0
    accepted: int = 0
    decision: Decision | None = None
    weight_B: np.ndarray | None = None  # of its plan
    tries: bool = False  # see `cut.choice.Choice`
    expected: float = 0.0  # drafts of any request that were to be accepted
    phase_ms: dict[str, float] = field(default_factory=dict)
    crowded: int = 0  # layers that took the slower way to their experts
    teaches: bool = True  # whether what it accepted may be held against its plan
    prompt_rows: int = 0  # of a chunk of a prompt that went along, padding included


@dataclass(frozen=True)
class Planned:
    """A plan: on the device, and as the host knows it."""

    keep_B: Any
    decision: Decision
    weight_B: np.ndarray  # of its requests; 0 where a slot has none
    tries: bool  # see `cut.choice.Choice`


@dataclass(frozen=True)
class Prefilled:
    """A prompt's one-slot caches, and the token that follows it."""

    request: Request
    caches: S.Caches
    first_token: int
    first_logprob: float | None = None
    first_likeliest: Likeliest = ()


@dataclass
class Prefill:
    """A prompt on its way through the target, chunk by chunk.

    Attributes:
      done: prompt tokens that are in the caches.
      found: those of them that were known and not run.
    """

    request: Request
    caches: S.Caches
    done: int = 0
    found: int = 0
    chosen: S.Chosen | None = None

    @property
    def left(self) -> int:
        """Prompt tokens that are still to be run."""
        return len(self.request.prompt) - self.done


@dataclass(frozen=True)
class Chunk:
    """The next tokens of a prompt.

    Attributes:
      token_P: padded to a static number of rows.
      count: those that are real.
    """

    of: Prefill
    token_P: np.ndarray
    count: int

    @classmethod
    def next(cls, begun: Prefill, rows: int) -> "Chunk":
        """As many as are left, up to so many rows."""
        count = min(begun.left, rows)
        token_P = np.zeros(rows, np.int32)
        token_P[:count] = begun.request.prompt[begun.done : begun.done + count]
        return cls(begun, token_P, count)

    @property
    def rows(self) -> int:
        """Static rows."""
        return len(self.token_P)

    def ran(self, caches: S.Caches, chosen: S.Chosen) -> None:
        """Takes in what was dispatched for it."""
        self.of.caches, self.of.chosen = caches, chosen
        self.of.done += self.count


@dataclass
class Slot:
    """A request in a slot, or put aside."""

    number: int  # of those admitted so far
    request: Request
    completion: Completion
    halt: Halt | None
    progress: Progress = field(default_factory=Progress)
    ease: Ease = field(default_factory=Ease)
    waited: int = 0  # drafting steps since a draft of it was verified, as far as read

    @property
    def cached(self) -> int:
        """Positions that are in the target's cache: all but the anchor's."""
        return len(self.request.prompt) + len(self.completion.tokens) - 1

    @property
    def most(self) -> int:
        """Positions that it may come to have there."""
        return most_positions(self.request)

    @property
    def rank(self) -> tuple[float, int]:
        """Who comes first where pages are short: the important, then the oldest."""
        return -self.request.priority, self.number

    def rest(self) -> Request:
        """What is left to do, where what was emitted is part of the prompt."""
        emitted = self.completion.tokens[:-1]
        return replace(
            self.request,
            prompt=(*self.request.prompt, *emitted),
            max_new_tokens=self.request.max_new_tokens - len(emitted),
        )


def most_positions(request: Request) -> int:
    """Cached positions that a request may come to: its last token is never one."""
    return len(request.prompt) + request.max_new_tokens - 1


def origins(count: int, accepted: int, verified: int) -> list[Origin]:
    """How the `count` tokens came that a request got from one step."""
    drafts: list[Origin] = ["draft"] * min(accepted, count)
    own: list[Origin] = ["bonus" if verified else "plain"]
    return drafts + own * (count > accepted)


class Phases:
    """Times the phases of a step; waits for the device only when asked to."""

    def __init__(self, on: bool) -> None:
        self.on = on
        self.ms: dict[str, float] = {}
        self._last = time.perf_counter()

    def stop(self, phase: str, wait_for: Any) -> None:
        if not self.on:
            return
        jax.block_until_ready(wait_for)
        now = time.perf_counter()
        self.ms[phase] = self.ms.get(phase, 0.0) + (now - self._last) * 1e3
        self._last = now
