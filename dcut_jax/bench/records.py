"""What a bench leaves behind: raw cells, checked texts, and where they were made.

One line of JSON holds a whole run. Ratios, medians and pictures are derived from it
(`report`), so a run can be told again without running again.
"""

import json
import math
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self, TypeVar

import jax

from dcut_jax.engine.profile import cores, cpu_model

VERSION = 1
AR = "ar"  # the arm that every other one is compared with
PEER = "transformers"
NO_TOKEN = -1  # where a text has ended

R = TypeVar("R")


class RecordError(ValueError):
    """A record that is not one of this version's."""


def host() -> dict[str, object]:
    """What a record says of the machine and the source, accelerators apart."""

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
        "cpu": cpu_model(),
        "cores": cores(),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "commit": git("rev-parse", "--short", "HEAD"),
        "dirty": bool(git("status", "--porcelain")),
    }


@dataclass(frozen=True)
class Cell:
    """One arm at one batch size in one round.

    Attributes:
      round: arms take turns, so cells of one round saw the machine in one mood.
      tokens, steps, seconds: emitted tokens, decode steps, and the time of both.
      mean_accepted_length: tokens committed per request and step, E[L]; the anchor's
        own is one of them.
      kept_share: rows verified, of the rows that full width would verify.
      mean_width: drafts asked for per request and step.
      phase_ms: mean time per step of draft, plan, verify, commit and read.
      load: the machine's 1-minute load average at the end.
    """

    batch: int
    arm: str
    round: int
    tokens: int
    steps: int
    seconds: float
    mean_accepted_length: float
    kept_share: float
    mean_width: float
    phase_ms: Mapping[str, float]
    load: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Difference:
    """The first place where an arm's text leaves AR's.

    Attributes:
      prompt, position: which prompt, and which of its new tokens, from 0.
      batch: batch size of the run that differed.
      gap: between the target's logits of the two tokens. A tiny one is a near-tie that
        another batch shape flipped; a large one is a bug, and so is NaN: one text ended
        and the other went on, or a logit is not finite.
      expected, found: AR's token and the arm's; NO_TOKEN where that text has ended.
    """

    prompt: int
    position: int
    batch: int
    gap: float
    expected: int
    found: int


@dataclass(frozen=True)
class TextCheck:
    """How one arm's texts compare with AR's."""

    arm: str
    prompts: int
    tokens: int
    differences: tuple[Difference, ...]


@dataclass(frozen=True)
class Reliability:
    """How predicted survivals of verified drafts compared with what became of them.

    Attributes:
      kind: "raw", products of the drafter's confidences, or "calibrated", what the plan
        went by.
      drafts: verified ones, over all rounds, warm-up included.
      ece: expected calibration error, 0 at best. auc: chance that a draft which
        survived was given more than one which did not; NaN unless there are both.
      bins: ten equal ones of predicted survival: drafts, mean predicted, share that
        survived.
    """

    batch: int
    arm: str
    kind: str
    drafts: int
    ece: float
    auc: float
    bins: tuple[tuple[int, float, float], ...]


@dataclass(frozen=True)
class BenchResult:
    """A whole run.

    Attributes:
      command: what was typed; `date` is ISO 8601.
      machine: `device`, `cpu`, `cores`, `jax`, `python`, `commit`, `dirty`.
      target, drafter: names for people; `dtype` and `draft_dtype` are of their weights,
        `cache_dtype` of both caches (records made before it was one had float32).
      prompts: how many were decoded, up to `max_new_tokens` tokens each.
      compile_s, profile_s: spent before the first cell, in none of them.
      reliability: of arms that plan.
      synthetic: how often drafts were right and from where that is, if they were drawn
        and not drafted (`decode.synthetic`); None of a drafter.
    """

    command: str
    date: str
    machine: Mapping[str, Any]
    target: str
    drafter: str
    dtype: str
    draft_dtype: str
    prompts: int
    max_new_tokens: int
    compile_s: float
    profile_s: float
    cells: tuple[Cell, ...]
    checks: tuple[TextCheck, ...]
    cache_dtype: str = "float32"
    reliability: tuple[Reliability, ...] = ()
    synthetic: Mapping[str, Any] | None = None

    def to_json(self) -> str:
        """One line. Numbers that are not finite become null, which JSON can hold."""
        data = {"version": VERSION, **asdict(self)}
        return json.dumps(_finite(data), allow_nan=False, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Reads what `to_json` wrote; null numbers come back as NaN.

        Raises:
          RecordError: the text is no such record.
        """
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise RecordError(
                f"expected a bench record on one line of JSON, found {error}; "
                f"pass the file that the bench wrote"
            ) from error
        found = data.pop("version", None) if isinstance(data, dict) else None
        if found != VERSION:
            raise RecordError(
                f"expected a bench record of version {VERSION}, found {found}; "
                f"run the bench again, or read it with the release that wrote it"
            )
        if data.get("synthetic") is None:
            data.pop("synthetic", None)  # no number that is not finite, but nothing
        cells = tuple(_build(Cell, c) for c in data.get("cells", ()))
        checks = tuple(_text_check(c) for c in data.get("checks", ()))
        known = tuple(_reliability(r) for r in data.get("reliability", ()))
        lists = {"cells": cells, "checks": checks, "reliability": known}
        return _build(cls, {**data, **lists})


def _text_check(raw: Mapping[str, Any]) -> TextCheck:
    differences = tuple(_build(Difference, d) for d in raw.get("differences", ()))
    return _build(TextCheck, {**raw, "differences": differences})


def _reliability(raw: Mapping[str, Any]) -> Reliability:
    def number(value: float | None) -> float:
        return math.nan if value is None else value

    bins = tuple((n, number(p), number(s)) for n, p, s in raw.get("bins", ()))
    return _build(Reliability, {**raw, "bins": bins})


def _build(record: type[R], raw: Mapping[str, Any]) -> R:
    """A record from its fields; every one without a default is there, and no other."""
    known = fields(record)  # type: ignore[arg-type]
    wanted = {f.name for f in known if f.default is MISSING}
    if not wanted <= raw.keys() <= {f.name for f in known}:
        raise RecordError(
            f"{record.__name__}: expected the fields {sorted(wanted)}, "
            f"found {sorted(raw)}; run the bench again"
        )
    missing_numbers = {k: math.nan for k, v in raw.items() if v is None}
    return record(**{**raw, **missing_numbers})


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value
