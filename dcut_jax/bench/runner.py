"""Runs the arms of a bench side by side and checks every text against AR's."""

import os
import random
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count, islice, zip_longest
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dcut_jax.bench.records import (
    AR,
    NO_TOKEN,
    PEER,
    Cell,
    Difference,
    Reliability,
    TextCheck,
)
from dcut_jax.cut.calibration import auc, ece, table
from dcut_jax.cut.width import FIRST_REQUESTS
from dcut_jax.decode.steps import Caches, Models
from dcut_jax.engine.engine import Engine
from dcut_jax.engine.policy import (
    WIDTHS,
    ArPolicy,
    DCutPolicy,
    FixedPolicy,
    Policy,
)
from dcut_jax.engine.requests import Completion
from dcut_jax.engine.slots import Prefilled, StepRecord
from dcut_jax.models import dense

PUBLISHED, DCUT = "published", "dcut"
FIXED = "fixed-"
# Arms that show what a term of the policy is worth: D-Cut without it. Without a choice
# of width every step drafts and plans the widest block.
WITHOUT: dict[str, dict[str, Any]] = {
    "dcut-no-width": {"widths": (), "plain": False, "bypass": False},
    "dcut-no-plain": {"plain": False},
    "dcut-no-bypass": {"bypass": False},
    "dcut-no-calibration": {"calibrate": False},
    "dcut-no-correction": {"correct": False},
}
PHASE_STEPS = 2
WARM_STEPS = 8


# Two logits closer than this may change places when another batch shape rounds them.
# Float32: observed gaps move by some 1e-5. The others: two spacings of numbers near 20
# (2**-3 and 2**-6), about where the largest logits are, one for either logit. That is a
# choice, not a bound: on SmolLM2 on a CPU, other batch shapes moved the gap of the two
# best logits by up to 3e-5, 2e-2 and 8e-3 in 48 places; deeper models may need more.
NEAR_TIE = {"float32": 1e-4, "bfloat16": 2**-2, "float16": 2**-5}


def fixed_width(arm: str) -> int | None:
    """The width that an arm's name holds; None for an arm of another kind.

    Raises:
      ValueError: there is no such arm.
    """
    if arm in (AR, PUBLISHED, DCUT, *WITHOUT):
        return None
    width = arm.removeprefix(FIXED)
    if arm.startswith(FIXED) and width.isdecimal() and int(width):
        return int(width)
    raise ValueError(
        f"arm {arm!r} is unknown; choose from {AR}, {FIXED}WIDTH, {PUBLISHED}, {DCUT}, "
        f"{', '.join(WITHOUT)}"
    )


def policy_of(arm: str, costs: Callable[[], DCutPolicy], most: int) -> Policy:
    """The policy that an arm's name stands for; `most` drafts fit in a block.

    Raises:
      ValueError: an unknown arm, or a width that does not fit.
    """
    width = fixed_width(arm)
    if width is not None:
        if width > most:
            raise ValueError(
                f"arm {arm!r}: this drafter's block holds 1 to {most} drafts"
            )
        return FixedPolicy(width)
    if arm == AR:
        return ArPolicy()
    if arm == PUBLISHED:
        return DCutPolicy.published(costs().table)
    without = dict(WITHOUT.get(arm, {}))
    if "widths" in without:
        without["widths"] = (min(WIDTHS[-1], most),)
    return replace(costs(), **without)


class Stopwatch:
    """A clock that runs only while its owner does, in seconds."""

    def __init__(self) -> None:
        self._before = 0.0
        self._since: float | None = None

    def __call__(self) -> float:
        running = 0.0 if self._since is None else time.perf_counter() - self._since
        return self._before + running

    @contextmanager
    def running(self) -> Iterator[None]:
        """Lets it run for as long as the body does."""
        self._since = time.perf_counter()
        try:
            yield
        finally:
            self._before, self._since = self(), None


@dataclass
class Arm:
    """An arm at one batch size.

    Attributes:
      watch: the clock of `engine`, which stands still while other arms have their turn.
    """

    name: str
    engine: Engine
    watch: Stopwatch


# A cell under way: it yields the share of its tokens that it has, step by step.
Turns = Generator[float, None, Cell]


def take_turns(cells: Sequence[Turns], seed: int = 0) -> list[Cell]:
    """Runs cells side by side, a step at a time, always the one furthest behind.

    So a slow spell of the machine, of seconds or of minutes, falls on all of them. Of
    several as far behind a draw decides: a step leaves caches cold for the next, so
    nobody may always come after the arm with the largest steps.
    """
    rng = random.Random(seed)
    share = dict.fromkeys(range(len(cells)), 0.0)
    done: dict[int, Cell] = {}
    while share:
        behind = min(share, key=lambda i: (share[i], rng.random()))
        try:
            share[behind] = next(cells[behind])
        except StopIteration as end:
            done[behind] = end.value
            del share[behind]
    return [done[i] for i in range(len(cells))]


class Texts:
    """AR's text of every prompt, and where other arms left it."""

    def __init__(self, reference: Sequence[Completion]) -> None:
        self._reference = [c.tokens for c in reference]
        self._seen: dict[str, dict[int, int]] = {}
        self._differences: dict[str, dict[tuple[int, ...], Difference]] = {}

    def check(
        self,
        arm: str,
        batch: int,
        prompt: int,
        tokens: Sequence[int],
        *,
        finished: bool,
    ) -> None:
        """Compares a text, or if it is not `finished` what there is of it, with AR's.

        A text that ends early, or goes on where AR's has ended, differs there.
        """
        want = self._reference[prompt]
        seen = self._seen.setdefault(arm, {})
        seen[prompt] = max(seen.get(prompt, 0), len(tokens))
        pairs: Iterable[tuple[int, int]] = zip_longest(want, tokens, fillvalue=NO_TOKEN)
        if not finished:  # of AR's text only as much
            pairs = islice(pairs, len(tokens))
        for position, (a, b) in enumerate(pairs):
            if a != b:
                found = Difference(prompt, position, batch, float("nan"), a, b)
                # Every kind of difference once: a near-tie must not hide another.
                key = (prompt, batch, position, b)
                self._differences.setdefault(arm, {}).setdefault(key, found)
                return

    def results(self, gap: Callable[[Difference], float]) -> tuple[TextCheck, ...]:
        """One check per arm; `gap` gives the target's logit gap of a difference."""
        return tuple(
            TextCheck(
                arm,
                len(seen),
                sum(seen.values()),
                tuple(
                    replace(d, gap=gap(d))
                    for d in self._differences.get(arm, {}).values()
                ),
            )
            for arm, seen in self._seen.items()
        )

    def prefix(self, difference: Difference) -> list[int]:
        """AR's tokens up to a difference."""
        return self._reference[difference.prompt][: difference.position]


def wrong_arms(checks: Sequence[TextCheck], tie: float) -> list[str]:
    """Arms with a text that leaves AR's where the logits are no near-tie.

    A peer's texts are shown and not judged: it rounds in other places than we do.
    """
    return [
        check.arm
        for check in checks
        if check.arm != PEER
        and any(not abs(d.gap) <= tie for d in check.differences)  # NaN is no tie
    ]


def logit_gap(
    models: Models, prompt: Sequence[int], texts: Texts, difference: Difference
) -> float:
    """The target's logit of AR's token less that of the other, at the difference.

    NaN where one of the texts has ended: that is no tie of two logits.
    """
    if NO_TOKEN in (difference.expected, difference.found):
        return float("nan")
    tokens = [*prompt, *texts.prefix(difference)]
    padded = np.zeros((1, -(-len(tokens) // 128) * 128), np.int32)
    padded[0, : len(tokens)] = tokens
    valid = np.arange(padded.shape[1])[None] < len(tokens)
    weights = models.params["target"]
    rows = dense.forward_sequences(
        weights, models.target, jnp.asarray(padded), jnp.asarray(valid)
    )
    last_E = rows.hidden[0, len(tokens) - 1]
    logits_V = dense.logits(last_E[None], dense.head_VE(weights))[0]
    return float(logits_V[difference.expected] - logits_V[difference.found])


def for_arm(ready: Prefilled, models: Models) -> Prefilled:
    """A prefilled prompt for an engine with or without a drafter."""
    if models.drafter is not None:
        return ready
    return replace(ready, caches=Caches(ready.caches.target, None))


def decode_cell(
    arm: Arm,
    ready: Sequence[Prefilled],
    texts: Texts,
    *,
    round: int,
    tokens_per_request: int,
) -> Turns:
    """Decodes at constant concurrency until so many tokens per slot have come.

    It pauses after each step and after nothing else, see `take_turns`. Before the first
    round a few steps run untimed. A request that ends is replaced at once by the next
    prompt, whose prefill was done before and is in no arm's time. In the end a few
    steps more are run with every phase waited for; they give `phase_ms` and count
    nowhere else.

    Raises:
      ValueError: no prompt has anything to decode after its first token.
    """
    engine, B = arm.engine, arm.engine.config.slots
    engine.reset()
    running: list[tuple[int, Completion]] = []
    # Every arm meets the prompts in the same order; rounds start at different ones.
    order = (i % len(ready) for i in count(round * B))

    def check(some: Sequence[tuple[int, Completion]]) -> None:
        for prompt, done in some:
            finished = done.finish != "running"
            texts.check(arm.name, B, prompt, done.tokens, finished=finished)

    def refill() -> None:
        nonlocal running
        check([r for r in running if r[1].finish != "running"])
        running = [r for r in running if r[1].finish == "running"]
        ended = 0  # admissions in a row that took no slot
        while engine.running < B:
            if ended == len(ready):
                raise ValueError(
                    "every prompt ends at its first token, so there is nothing to "
                    "decode; use other prompts"
                )
            prompt = next(order)
            completion = engine.admit(for_arm(ready[prompt], engine.models))
            running.append((prompt, completion))
            ended = 0 if completion.finish == "running" else ended + 1
        jax.block_until_ready(engine.caches)

    def step() -> None:
        with arm.watch.running():
            engine.step()
            if engine.reads_first:  # or its host work would overlap with nothing
                engine.flush()
            jax.block_until_ready(engine.caches)

    engine.time_phases = False
    if round == 0:  # the policy's first looks and steps, and the caches' first touch
        for _ in range(WARM_STEPS + -(-FIRST_REQUESTS // B)):
            refill()
            step()
        engine.flush()
    first, start = len(engine.records), arm.watch()
    goal, committed = B * tokens_per_request, 0
    while committed < goal:
        refill()
        step()
        committed = sum(r.committed for r in engine.records[first:])
        yield committed / goal
    with arm.watch.running():
        engine.flush()  # a plan reads one step late; the last one's tokens count too
    seconds = arm.watch() - start
    timed = engine.records[first:]

    engine.time_phases = True
    first = len(engine.records)
    while len(engine.records) < first + PHASE_STEPS:
        refill()
        engine.step()
        engine.flush()  # a record is there once its step has been read
    phases = engine.records[first:]
    engine.time_phases = False
    check(running)
    engine.free()
    return Cell(
        batch=B,
        arm=arm.name,
        round=round,
        tokens=sum(r.committed for r in timed),
        steps=len(timed),
        seconds=seconds,
        **_shape_of(timed, engine.shapes.width),
        phase_ms=_mean_phases(phases),
        load=os.getloadavg()[0],
    )


def reliability_of(arm: Arm) -> list[Reliability]:
    """How an arm's chances compared with outcomes since the last call."""
    steering = arm.engine.steering
    if steering is None:
        return []
    kinds = zip(("raw", "calibrated"), steering.reliability(), strict=True)
    return [
        Reliability(
            batch=arm.engine.config.slots,
            arm=arm.name,
            kind=kind,
            drafts=int(found.count_X.sum()),
            ece=ece(found),
            auc=auc(found),
            bins=tuple((b.drafts, b.predicted, b.survived) for b in table(found)),
        )
        for kind, found in kinds
        if found.count_X.sum()
    ]


def _shape_of(records: Sequence[StepRecord], width: int) -> dict[str, float]:
    active = sum(r.active for r in records)
    return {
        "mean_accepted_length": sum(r.committed for r in records) / active,
        "kept_share": sum(r.active + r.kept for r in records) / (active * width),
        "mean_width": sum(r.width for r in records) / len(records),
    }


def _mean_phases(records: Sequence[StepRecord]) -> dict[str, float]:
    names = {name for r in records for name in r.phase_ms}
    return {
        name: float(np.mean([r.phase_ms.get(name, 0.0) for r in records]))
        for name in sorted(names)
    }
