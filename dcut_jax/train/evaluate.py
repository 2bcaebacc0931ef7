"""How good a drafter is when it decodes real prompts: accepted lengths, and speed.

That is what counts, more than held-out blocks (`held_out`): here a drafter reads its
own cache, blocks begin where the last ended, and prompts are of other kinds than those
it was trained on.
"""

import datetime
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from dcut_jax.cut.sts import Scaling
from dcut_jax.decode.compile import Compiler
from dcut_jax.engine.config import EngineConfig
from dcut_jax.engine.engine import Engine
from dcut_jax.engine.load import Pair
from dcut_jax.engine.policy import ArPolicy, FixedPolicy
from dcut_jax.engine.requests import Completion, Request
from dcut_jax.prompts import Prompt
from dcut_jax.train.candidates import Candidate
from dcut_jax.train.tally import Fit, Slot, Tally


@dataclass(frozen=True)
class Speed:
    """Decode steps of a whole set: tokens that they committed, and their seconds."""

    tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class WidthResult:
    """One width on one set.

    Attributes:
      steps: decode steps, counted once for each request that took part.
      tokens: what they committed; a request's first token is the prefill's.
      slots: by draft, `width` of them.
      confidence: of each reached draft, its own raw chance.
      survival: of each verified draft within the text, the product of the chances.
      scaling: what temperatures would do for these products; None for one text.
      speeds: by round.
      ratios: of tokens per second to AR's in the same round.
      texts_differ: how many texts are not AR's.
    """

    width: int
    steps: int
    tokens: int
    slots: tuple[Slot, ...]
    confidence: Fit
    survival: Fit
    scaling: Scaling | None
    speeds: tuple[Speed, ...]
    ratios: tuple[float, ...]
    texts_differ: int

    @property
    def mean_accepted_length(self) -> float:
        """Tokens per request and step, E[L]; the token after the drafts included.

        The last step of a text counts as far as the text goes.
        """
        return self.tokens / self.steps


@dataclass(frozen=True)
class SetResult:
    """One set of prompts; `ar` is plain decoding, by round."""

    name: str
    prompts: int
    ar: tuple[Speed, ...]
    widths: tuple[WidthResult, ...]


@dataclass(frozen=True)
class Evaluation:
    """A whole evaluation.

    Attributes:
      command: what was typed; `date` is ISO 8601.
      machine: where it ran.
      target, drafter: names for people; `step` is of the run that the drafter was
        taken from, None for an exported one.
    """

    command: str
    date: str
    machine: Mapping[str, Any]
    target: str
    target_identity: str
    drafter: str
    step: int | None
    dtype: str
    draft_dtype: str
    batch_size: int
    max_new_tokens: int
    sets: tuple[SetResult, ...]


def evaluate_set(
    name: str,
    requests: Sequence[Request],
    engines: Mapping[int, Engine],
    *,
    rounds: int,
    on_progress: Callable[[str], None] | None = None,
) -> SetResult:
    """Decodes a set with every engine: once to count, then in turns to time.

    Args:
      engines: by width; 0 is plain decoding.
      rounds: timed ones, 0 or more. In each every engine decodes the whole set, and
        another one begins, so that all see the machine alike.
      on_progress: told what was decoded, `(1 + rounds) * len(engines)` times.

    Raises:
      ValueError: every text ends at its first token, which no step decodes.
    """
    widths = [w for w in engines if w]
    tallies = {w: Tally(w) for w in widths}
    counted: dict[int, list[Completion]] = {}

    def tell(what: str) -> None:
        if on_progress is not None:
            on_progress(what)

    for width, engine in engines.items():
        engine.on_drafts = tallies.get(width)
        counted[width], speed = _decode(engine, requests)
        engine.on_drafts = None
        if not speed.tokens:
            raise ValueError(
                f"{name}: expected texts to decode, found that every one ends at its "
                f"first token, which comes with the prompt; use other prompts"
            )
        tell(f"{name}, {_arm(width)}")
    speeds: dict[int, list[Speed]] = {width: [] for width in engines}
    for round in range(rounds):
        turn = round % len(engines)
        order = [*engines.items()]
        for width, engine in (*order[turn:], *order[:turn]):
            speeds[width].append(_decode(engine, requests)[1])
            tell(f"{name}, {_arm(width)}, round {round + 1}")
    found = []
    for width in widths:
        texts = counted[width]
        confidence, survival = tallies[width].fits()
        pairs = zip(speeds[width], speeds[0], strict=True)
        differ = zip(texts, counted[0], strict=True)
        found.append(
            WidthResult(
                width=width,
                steps=sum(c.steps for c in texts),
                tokens=sum(len(c.tokens) - 1 for c in texts),
                slots=tallies[width].slots(),
                confidence=confidence,
                survival=survival,
                scaling=tallies[width].scaling(),
                speeds=tuple(speeds[width]),
                ratios=tuple(own.tokens_per_s / ar.tokens_per_s for own, ar in pairs),
                texts_differ=sum(own.tokens != ar.tokens for own, ar in differ),
            )
        )
    return SetResult(name, len(requests), tuple(speeds[0]), tuple(found))


def _arm(width: int) -> str:
    return f"width {width}" if width else "AR"


def _decode(
    engine: Engine, requests: Sequence[Request]
) -> tuple[list[Completion], Speed]:
    """All texts, and the time of their decode steps alone."""
    engine.reset()
    waiting = deque(requests)
    made: list[Completion] = []
    seconds = 0.0
    while waiting or engine.running:
        while waiting and engine.running < engine.config.slots:
            made.append(engine.admit(engine.prefill(waiting.popleft())))
        jax.block_until_ready(engine.caches)
        if engine.running:
            start = time.perf_counter()
            engine.step()
            jax.block_until_ready(engine.caches)
            seconds += time.perf_counter() - start
    engine.free()
    return made, Speed(sum(len(c.tokens) - 1 for c in made), seconds)


def evaluate(
    pair: Pair,
    candidate: Candidate,
    sets: Mapping[str, Sequence[Prompt]],
    widths: Sequence[int],
    *,
    command: str,
    machine: Mapping[str, Any],
    batch_size: int = 8,
    max_new_tokens: int = 128,
    rounds: int = 3,
    on_progress: Callable[[int, str], None] | None = None,
) -> Evaluation:
    """Decodes sets of prompts greedily, at every width and plainly.

    Args:
      widths: drafts per step, `1..` what the drafter's block holds.
      command, machine: for the record.
      batch_size: requests decoded together.
      max_new_tokens: of each text, at least 2: the first comes with the prompt.
      rounds: timed ones; 0 for counts alone.
      on_progress: told how many of `passes(...)` are done, and what was.

    Raises:
      CheckpointError: the target has no tokenizer.
      ValueError: a prompt does not fit the target, or nothing is left to decode.
    """
    text = pair.target.text()
    requests = {
        name: [
            Request(tuple(text.chat(list(p.messages))), max_new_tokens, text.eos_ids)
            for p in prompts
        ]
        for name, prompts in sets.items()
    }
    longest = max(len(r.prompt) for some in requests.values() for r in some)
    config = EngineConfig(
        batch_size, longest + max_new_tokens, max(len(text.eos_ids), 1)
    )
    plain = pair.without_drafter()
    alone, both = (Compiler(m, config.cache_dtype) for m in (plain, pair.models))
    engines: dict[int, Engine] = {}
    for width in (0, *widths):
        if width:
            engine = Engine(pair.models, config, FixedPolicy(width), compiler=both)
        else:
            engine = Engine(plain, config, ArPolicy(), compiler=alone)
        engine.free()  # caches are there while it decodes
        engines[width] = engine
    done = 0

    def tell(what: str) -> None:
        nonlocal done
        done += 1
        if on_progress is not None:
            on_progress(done, what)

    return Evaluation(
        command=command,
        date=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        machine=machine,
        target=pair.target.name,
        target_identity=pair.target.identity,
        drafter=candidate.name,
        step=candidate.step,
        dtype=str(pair.models.params["target"]["embed_VE"].dtype),
        draft_dtype=str(pair.models.params["draft_embed_VE"].dtype),
        batch_size=batch_size,
        max_new_tokens=max_new_tokens,
        sets=tuple(
            evaluate_set(name, some, engines, rounds=rounds, on_progress=tell)
            for name, some in requests.items()
        ),
    )


def passes(sets: int, widths: int, rounds: int) -> int:
    """How often a set is decoded, over all sets, widths and rounds, AR included."""
    return sets * (1 + widths) * (1 + rounds)
