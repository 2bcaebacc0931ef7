"""How good a drafter is: on held-out blocks while it trains, and decoding real prompts.

Held-out blocks are cheap and always the same, so they draw a curve. What counts is
decoding: there a drafter reads its own cache, blocks begin where the last ended, and
prompts are of other kinds than those it was trained on.
"""

import datetime
import json
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from dcut_jax.config import ConfigError, DrafterConfig
from dcut_jax.cut.calibration import (
    Reliability,
    auc,
    ece,
    no_reliability,
    observe,
    table,
)
from dcut_jax.cut.survival import log_survival
from dcut_jax.decode.compile import Compiler
from dcut_jax.decode.state import HostOutcome
from dcut_jax.engine.engine import Engine, EngineConfig
from dcut_jax.engine.load import Pair
from dcut_jax.engine.policy import WIDTHS, ArPolicy, FixedPolicy
from dcut_jax.engine.requests import Completion, Request
from dcut_jax.prompts import Prompt, PromptError, load_prompts
from dcut_jax.train.blocks import Blocks
from dcut_jax.train.checkpoints import DIRECTORY
from dcut_jax.train.config import CONFIG, TrainConfig
from dcut_jax.train.export import MANIFEST, export, stored_config
from dcut_jax.train.loss import block_matches
from dcut_jax.weights.dflash import WEIGHTS, drafter_config
from dcut_jax.weights.errors import CheckpointError
from dcut_jax.weights.json_io import read_json
from dcut_jax.weights.load import SMOLLM2

compiled_matches = jax.jit(
    block_matches, static_argnames=("cfg", "width", "compute_dtype")
)


# -- held-out blocks ----------------------------------------------------------------


def held_out_matches(
    params: Any,
    drafter_cfg: DrafterConfig,
    embed_VE: Array,
    head_VE: Array,
    draw: Callable[[np.ndarray, int, int, np.random.Generator], Blocks],
    documents: np.ndarray,
    cfg: TrainConfig,
    width: int,
) -> dict[str, Any]:
    """Drafts of held-out blocks against their documents, whole vocabulary.

    Args:
      draw: blocks of documents: so many anchors of each, cut to so many tokens.
      documents: those held out; `cfg` says how many anchors of each, and how many at
        a time.
      width: drafts per block.

    Returns:
      `accepted`: mean accepted length, the anchor's token included, of the longest
      matching prefix; `slots`: per slot, how often it matches where all before it
      did; `blocks`: how many blocks that is over. They are the same for all of the
      run's widths: those whose document goes on for the widest.
    """
    widest = max((width, *cfg.widths))
    # The same blocks every time.
    rng = np.random.default_rng((cfg.seed, 2))
    reached = np.zeros(width, np.int64)
    matched = np.zeros(width, np.int64)
    count = 0
    for first in range(0, len(documents), cfg.docs):
        some = documents[first : first + cfg.docs]
        # One shape for all: the last batch repeats itself, and is cut below.
        full = np.resize(some, cfg.docs)
        blocks = draw(full, cfg.eval_anchors, cfg.length, rng)
        match, _ = compiled_matches(
            params,
            drafter_cfg,
            embed_VE,
            head_VE,
            blocks,
            width,
            jnp.dtype(cfg.compute_dtype),
        )
        reaches_NA = blocks.anchor_NA + widest < blocks.length_N[:, None]
        counted_NA = np.asarray(blocks.valid_NA & reaches_NA)
        counted_NA[len(some) :] = False
        prefix = np.cumprod(np.asarray(match)[counted_NA], axis=-1)
        count += len(prefix)
        matched += prefix.sum(axis=0)
        reached += np.concatenate([[len(prefix)], prefix.sum(axis=0)[:-1]])
    accepted = 1 + matched.sum() / max(count, 1)
    return {
        "accepted": float(accepted),
        "blocks": count,
        "slots": [round(float(s), 3) for s in matched / np.maximum(reached, 1)],
    }


# -- decoding real prompts ----------------------------------------------------------


@dataclass(frozen=True)
class Slot:
    """One place of a block, draft `k`.

    Attributes:
      reached: how often all drafts before it were accepted and the text went so far.
      accepted: how often it was then accepted.
    """

    reached: int
    accepted: int

    @property
    def rate(self) -> float:
        """Conditional acceptance; NaN where the slot was never reached."""
        return self.accepted / self.reached if self.reached else float("nan")


@dataclass(frozen=True)
class Fit:
    """How predicted chances compared with outcomes; see `cut.calibration`.

    Attributes:
      drafts: how many.
      ece, auc: NaN where there is nothing to compare.
      bins: ten equal ones of the prediction: drafts, mean prediction, share that
        happened; both NaN in an empty one.
    """

    drafts: int
    ece: float
    auc: float
    bins: tuple[tuple[int, float, float], ...]

    @classmethod
    def of(cls, rel: Reliability) -> "Fit":
        on_host = jax.device_get(rel)
        bins = tuple((r.drafts, r.predicted, r.survived) for r in table(on_host))
        return cls(int(on_host.count_X.sum()), ece(on_host), auc(on_host), bins)


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


class Tally:
    """Counts what became of the drafts of fixed-width steps; `Engine.on_drafts`.

    A draft counts as far as the text goes: what the target thinks of drafts behind a
    stop token, or beyond the room that a request has, is nobody's loss.
    """

    def __init__(self, width: int):
        self.width = width
        self._steps: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def __call__(self, logp_BK: np.ndarray, outcome: HostOutcome) -> None:
        """Takes in one step: log-confidences, NaN beyond the width, and outcome."""
        took_part_B = outcome.count_B > 0
        count_B = outcome.count_B[took_part_B]
        accepted_B = outcome.accepted_B[took_part_B]
        # A text that ends inside the accepted drafts says nothing of those behind.
        ended_B = count_B <= accepted_B
        known_B = np.where(ended_B, count_B, self.width)
        logp_BK = logp_BK[took_part_B, : self.width].astype(np.float32)
        self._steps.append((logp_BK, known_B, np.minimum(accepted_B, count_B)))

    def slots(self) -> tuple[Slot, ...]:
        """Conditional acceptance by draft."""
        _, known_N, accepted_N = self._all()
        reached_N = np.minimum(accepted_N + 1, known_N)
        return tuple(
            Slot(int(np.sum(reached_N >= k)), int(np.sum(accepted_N >= k)))
            for k in range(1, self.width + 1)
        )

    def fits(self) -> tuple[Fit, Fit]:
        """How confidences of reached drafts, and survivals of known ones, fit."""
        logp_NK, known_N, accepted_N = self._all()
        draft_1K = 1 + np.arange(self.width)[None]
        reached_NK = draft_1K <= accepted_N[:, None] + 1
        confidence_NK = np.where(reached_NK, np.exp(np.minimum(logp_NK, 0)), np.nan)
        survival_NK = np.exp(np.asarray(log_survival(jnp.asarray(logp_NK))))
        return (
            _fit(confidence_NK, known_N, accepted_N),
            _fit(survival_NK, known_N, accepted_N),
        )

    def _all(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        logp, known, accepted = zip(*self._steps, strict=True)
        return np.concatenate(logp), np.concatenate(known), np.concatenate(accepted)


def _fit(p_NK: np.ndarray, known_N: np.ndarray, accepted_N: np.ndarray) -> Fit:
    """NaN is not counted."""
    rel, most = no_reliability(), 2048  # rows at a time, for it makes arrays of 50 each
    for first in range(0, len(p_NK), most):
        rows = slice(first, first + most)
        some = (p_NK[rows], known_N[rows], accepted_N[rows])
        rel = observe(rel, *map(jnp.asarray, some))
    return Fit.of(rel)


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
      rounds: timed ones. In each every engine decodes the whole set, and another one
        begins, so that all see the machine alike.
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


@dataclass(frozen=True)
class Candidate:
    """A drafter to evaluate, in the published layout.

    Attributes:
      name: for people.
      step: of the run that it was taken from; None for an exported one.
    """

    directory: Path
    name: str
    step: int | None


def is_run(path: Path) -> bool:
    """Whether a directory is a training run's, not an exported drafter's.

    Raises:
      CheckpointError: it is neither.
    """
    if (path / CONFIG).is_file():
        if (path / DIRECTORY).is_dir():
            return True
        if (path / WEIGHTS).is_file():
            return False
    found = "nothing"
    if path.is_dir():
        found = (
            ", ".join(sorted(p.name for p in path.iterdir())[:20]) or "nothing in it"
        )
    raise CheckpointError(
        f"{path}: expected a training run ({CONFIG}, {DIRECTORY}) or an exported "
        f"drafter ({CONFIG}, {WEIGHTS}), found {found}; check the path"
    )


def most_drafts(path: Path) -> int:
    """Drafts of a full block, from the description of a run or drafter alone.

    Raises:
      CheckpointError, ConfigError: it is neither, or its description is broken.
    """
    if is_run(path):
        return stored_config(path)[1].block - 1
    described = drafter_config(read_json(path / CONFIG), str(path / CONFIG))
    return described.max_drafts


def choose_widths(wanted: Sequence[int] | None, most: int) -> tuple[int, ...]:
    """The widths to evaluate, rising; None: 3, 7 and 15 as far as the block goes.

    Raises:
      ConfigError: one is beyond the `most` drafts of the drafter's block.
    """
    if wanted is None:
        return tuple(sorted({min(w, most) for w in WIDTHS}))
    beyond = [w for w in wanted if not 1 <= w <= most]
    if beyond:
        raise ConfigError(
            f"--widths: expected 1 to {most} drafts, which is what this drafter's "
            f"block holds, found {', '.join(map(str, beyond))}"
        )
    return tuple(sorted(set(wanted)))


def read_sets(sources: Sequence[str], limit: int | None) -> dict[str, list[Prompt]]:
    """Prompts by the name of their set: a shipped one's, or a file's without `.jsonl`.

    Raises:
      PromptError: a file is missing or broken, naming file and line, or two sets
        have one name.
    """
    sets: dict[str, list[Prompt]] = {}
    for source in sources:
        prompts, name = load_prompts(source, limit), Path(source).stem
        if name in sets:
            raise PromptError(
                f"--data: expected sets with names of their own, found {name!r} twice; "
                f"rename one of the files"
            )
        sets[name] = prompts
    return sets


@contextmanager
def opened(path: Path, target: str | None) -> Iterator[tuple[Candidate, str]]:
    """A drafter ready to load, and where its target lies.

    A run's is what `export` would write of it now, for as long as the context lasts.

    Args:
      target: as named; None: the run's own, or SmolLM2 for an exported drafter.

    Raises:
      CheckpointError, ConfigError: there is no such run, drafter or target.
    """
    name = path.resolve().name
    if not is_run(path):
        yield Candidate(path, name, None), target or SMOLLM2
        return
    with tempfile.TemporaryDirectory() as made:
        step = export(path, made, target)
        yield (
            Candidate(Path(made), name, step),
            target or stored_config(path)[1].target,
        )


def check_made_for(candidate: Candidate, pair: Pair) -> None:
    """Refuses a drafter whose manifest names another target, though shapes agree.

    Raises:
      ConfigError: with both identities.
    """
    path = candidate.directory / MANIFEST
    if not path.is_file():
        return
    try:
        theirs = json.loads(path.read_text())["target"]
        identity, called = theirs["identity"], theirs["name"]
    except (ValueError, KeyError, TypeError):
        return  # a manifest of someone else's
    if identity != pair.target.identity:
        raise ConfigError(
            f"drafter {candidate.name}: expected target {called} ({identity}), which "
            f"it was trained for, found {pair.target.name} ({pair.target.identity}); "
            f"name its own with --target"
        )


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
      rounds: timed ones.
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
