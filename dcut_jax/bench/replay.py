"""`python -m dcut_jax.bench --replay`: policies on published tables, without a model.

Step times are looked up in what was published of D-Cut, drafts are drawn from a model
of acceptance, and the engine's own policies decide (`dcut_jax.simulate`). Whatever was
fitted was fitted to rows of AR, of DFlash and of the allocation table alone. What is
said of D-Cut is foretold, and how far it is off tells how far to believe the rest.

The published times do not hold what planning costs on the host and on the device, so
here it is free. Published D-Cut paid for it.
"""

import datetime
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from dcut_jax.bench.expert_aware import (
    BATCH_SIZES,
    EXPERT_NOTE,
    ROUTINGS,
    ExpertCell,
    expert_cells,
    expert_table,
    expert_title,
)
from dcut_jax.bench.on_paper import ACCEPTANCE, dcut_setup, work_ms
from dcut_jax.bench.published import (
    AR,
    BLOCK,
    PublishedModel,
    StepTimes,
    fit_step_times,
    load_published,
)
from dcut_jax.bench.records import host
from dcut_jax.bench.regret import RegretCell, cases, regret_cells, regret_table
from dcut_jax.bench.report import COLUMNS
from dcut_jax.cli import bar
from dcut_jax.cost.table import CostTable
from dcut_jax.cut.choice import PLAIN, Choice, StepCosts
from dcut_jax.cut.fairness import jain_index
from dcut_jax.decode.steps import StepShapes
from dcut_jax.engine.policy import (
    ArPolicy,
    DCutPolicy,
    FixedPolicy,
    Policy,
)
from dcut_jax.simulate import (
    Acceptance,
    Always,
    Chooser,
    Run,
    Setup,
    Simulation,
    simulate,
)

VERSION = 1

# Ease of a hard request: full blocks then yield 3.16 / 5.54 of an easy one's tokens,
# as published lengths on MT-Bench and GSM8K compare.
HARD = -2.6
# A drafter that is less sure than it might be, by so much of the log-odds. How sure
# DFlash is was not published, only that it is not sure enough (SGLang #36127).
UNSURE = 0.5

# Requests times steps that a cell counts, and steps before those that it does not.
REQUEST_STEPS = 8192
WARM_STEPS = 128
# The fairness table: a batch of three quarters easy and one quarter hard requests.
FAIR_BATCH = 32
FAIR_STEPS = 2000
FAIR_TOKENS = 128

# Rows per request of the terms' finer tiers; the engine's own are fewer.
FINER = (2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0, 12.0, 14.0, 16.0)


@dataclass(frozen=True)
class Arm:
    """A policy with a drafter of `block` rows.

    Attributes:
      kind: "fitted" where published throughputs of this method were used, "foretold"
        where none were, "" where there are none.
    """

    name: str
    policy: Policy
    block: int = BLOCK
    kind: str = ""


OURS, DCUT_16 = "joint width, as shipped", "D-Cut-B16"
FITTED, FORETOLD = "fitted", "foretold"

_PUBLISHED = DCutPolicy.published(CostTable.empty())  # a replay brings its own times
_ANCHORS = replace(_PUBLISHED, objective="tokens")
_FINER = replace(_ANCHORS, ratios=None, widths=(BLOCK - 1,), factors=FINER)
_OURS = DCutPolicy(CostTable.empty(), correct=False)  # costs are what they are
_OURS_FINER = replace(_OURS, factors=FINER)

ROWS = (
    Arm(AR, ArPolicy(), kind=FITTED),
    Arm("DFlash-B8", FixedPolicy(7), block=8, kind=FITTED),
    Arm("DFlash-B16", FixedPolicy(15), kind=FITTED),
    Arm("D-Cut-B8", _PUBLISHED, block=8, kind=FORETOLD),
    Arm(DCUT_16, _PUBLISHED, kind=FORETOLD),
    Arm(OURS, _OURS),
)
TERMS = (
    Arm("published policy", _PUBLISHED),
    Arm("+ anchors in the objective", _ANCHORS),
    Arm("+ finer tiers", _FINER),
    Arm("+ joint width", replace(_OURS_FINER, calibrate=False)),
    Arm("+ calibration", _OURS_FINER),
)
FAIR = (
    Arm(AR, ArPolicy()),
    Arm("published", _PUBLISHED),
    Arm("published, proportional", replace(_PUBLISHED, fairness="proportional")),
    Arm("joint width", _OURS),
    Arm("joint width, proportional", replace(_OURS, fairness="proportional")),
)


# -- runs ----------------------------------------------------------------------------


def prepare(arm: Arm, times: StepTimes) -> tuple[Setup, Chooser]:
    """An arm's steps with their costs, and what chooses among them."""
    shapes = StepShapes(slots=times.slots, positions=0, width=arm.block, stops=0)
    policy = arm.policy
    if isinstance(policy, DCutPolicy):
        costs = policy.costs(shapes, work_ms(policy, shapes, times))
        return dcut_setup(policy, shapes, costs), policy.chooser(shapes)
    widths = policy.ladder(shapes) or (arm.block - 1,)
    costs = StepCosts(
        plain_ms=times.verify_ms(times.slots),
        planned_MR=np.full((len(widths), 1), np.inf),
        full_M=np.array([times.full_ms(width) for width in widths]),
    )
    fixed = isinstance(policy, FixedPolicy)
    same = Choice(widths[0], planned=False) if fixed else PLAIN
    return Setup(widths, (times.slots * arm.block,), costs), Always(same)


def run_arm(arm: Arm, times: StepTimes, acceptance: Acceptance) -> Run:
    """A batch of requests that are all of the same ease."""
    setup, chooser = prepare(arm, times)
    batch = Simulation(setup, chooser, acceptance, [0.0] * times.slots)
    return simulate(batch, steps=REQUEST_STEPS // times.slots, warm_up=WARM_STEPS)


# -- results -------------------------------------------------------------------------


@dataclass(frozen=True)
class ReplayCell:
    """One arm at one batch size.

    Attributes:
      table: "rows", or "terms".
      sharpness: of the drafter, see `simulate.Acceptance`.
      ratio: to the published throughput of AR.
      published: the speed-up over AR published of this method; None without one.
      mean_accepted_length: tokens per request and step, the anchor's among them.
      kept_share: rows verified, of those of full blocks; `published_kept` likewise.
      mean_width: drafts asked for per request and step.
    """

    table: str
    model: str
    arm: str
    kind: str
    sharpness: float
    batch: int
    tokens_per_s: float
    ratio: float
    published: float | None
    mean_accepted_length: float
    kept_share: float
    published_kept: float | None
    mean_width: float

    @property
    def error(self) -> float | None:
        """Of the ratio, relative to the published one."""
        return None if self.published is None else self.ratio / self.published - 1


@dataclass(frozen=True)
class FairCell:
    """One policy on a mixed batch.

    Attributes:
      easy_p50_ms, ...: percentiles over requests, of a request's time per token.
      jain: index over the tokens per second of all requests.
    """

    arm: str
    tokens_per_s: float
    easy_p50_ms: float
    easy_p99_ms: float
    hard_p50_ms: float
    hard_p99_ms: float
    jain: float


@dataclass(frozen=True)
class ReplayResult:
    """A whole replay. No figure in it was measured where it ran."""

    command: str
    date: str
    source: str
    commit: str  # of the code that it is a function of; "" where none is known
    cells: tuple[ReplayCell, ...]
    fair: tuple[FairCell, ...]
    regret: tuple[RegretCell, ...] = ()
    experts: tuple[ExpertCell, ...] = ()

    def to_json(self) -> str:
        """One line."""
        data = {"version": VERSION, "replayed": True, **asdict(self)}
        data["cells"] = [{**asdict(cell), "error": cell.error} for cell in self.cells]
        data["regret"] = [{**asdict(cell), "lost": cell.lost} for cell in self.regret]
        data["experts"] = [{**asdict(cell), "gain": cell.gain} for cell in self.experts]
        return json.dumps(data, allow_nan=False)


def replay(
    command: str,
    update: Callable[[int, str], None] = lambda done, what: None,
    *,
    expert_aware: bool = False,
) -> ReplayResult:
    """All tables; `update` is told how many cells are done, and which arm is next.

    `expert_aware`: whether that of knowing experts is among them.
    """
    published = load_published()
    times = {m.name: fit_step_times(published, m) for m in published.models}
    dense = published.models[0]
    unsure = replace(ACCEPTANCE, sharpness=UNSURE)
    cells: list[ReplayCell] = []
    for model in published.models:
        for arm in ROWS:
            update(len(cells), f"{model.name}, {arm.name}")
            cells += arm_cells("rows", arm, model, times[model.name], ACCEPTANCE)
    for acceptance in (ACCEPTANCE, unsure):
        for arm in TERMS:
            update(len(cells), f"{dense.name}, {arm.name}")
            cells += arm_cells("terms", arm, dense, times[dense.name], acceptance)
    fair: list[FairCell] = []
    for arm in FAIR:
        update(len(cells) + len(fair), f"fairness, {arm.name}")
        fair.append(fair_cell(arm, times[dense.name][FAIR_BATCH]))
    regret: list[RegretCell] = []
    for case in cases(published):
        for cell in regret_cells(case, published.batch_sizes):
            regret.append(cell)
            done = len(cells) + len(fair) + len(regret)
            update(done, f"wrong costs, {case.what}")
    experts: list[ExpertCell] = []
    if expert_aware:
        for expert in expert_cells():
            experts.append(expert)
            done = len(cells) + len(fair) + len(regret) + len(experts)
            update(done, f"experts, {expert.routing}")
    update(cell_count(expert_aware), "replayed")
    return ReplayResult(
        command=command,
        date=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        source=published.source,
        commit=str(host()["commit"]) + (" and changes" if host()["dirty"] else ""),
        cells=tuple(cells),
        fair=tuple(fair),
        regret=tuple(regret),
        experts=tuple(experts),
    )


def cell_count(expert_aware: bool = False) -> int:
    """Cells of a whole replay."""
    published = load_published()
    arms = len(ROWS) * len(published.models) + 2 * len(TERMS)
    pairs = sum(len(case.costs) * (len(case.costs) - 1) for case in cases(published))
    experts = len(ROUTINGS) * len(BATCH_SIZES) if expert_aware else 0
    return (arms + pairs) * len(published.batch_sizes) + len(FAIR) + experts


def arm_cells(
    table: str,
    arm: Arm,
    model: PublishedModel,
    times: Mapping[int, StepTimes],
    acceptance: Acceptance,
) -> list[ReplayCell]:
    """An arm at every batch size."""
    ar = model.tokens_per_s[AR]
    unknown = (None,) * len(ar)
    speed_up = {AR: (1.0,) * len(ar), **model.speed_up}.get(arm.name, unknown)
    kept = model.kept_share.get(arm.name, unknown)
    said = zip(ar, speed_up, kept, strict=True)
    cells = []
    for (batch, at), (ar_per_s, speed_up_said, kept_said) in zip(
        times.items(), said, strict=True
    ):
        run = run_arm(arm, at, acceptance)
        cells.append(
            ReplayCell(
                table=table,
                model=model.name,
                arm=arm.name,
                kind=arm.kind,
                sharpness=acceptance.sharpness,
                batch=batch,
                tokens_per_s=run.tokens_per_s,
                ratio=run.tokens_per_s / ar_per_s,
                published=speed_up_said,
                mean_accepted_length=run.mean_accepted_length,
                kept_share=run.mean_rows / arm.block,
                published_kept=kept_said,
                mean_width=run.mean_width,
            )
        )
    return cells


def fair_cell(arm: Arm, times: StepTimes) -> FairCell:
    """Three quarters of the slots serve easy requests, one quarter hard ones."""
    easy = times.slots * 3 // 4
    ease_B = [0.0] * easy + [HARD] * (times.slots - easy)
    setup, chooser = prepare(arm, times)
    batch = Simulation(setup, chooser, ACCEPTANCE, ease_B, length=FAIR_TOKENS)
    run = simulate(batch, steps=FAIR_STEPS, warm_up=WARM_STEPS)
    easy_ms = [r.ms_per_token for r in run.served if r.slot < easy]
    hard_ms = [r.ms_per_token for r in run.served if r.slot >= easy]
    return FairCell(
        arm=arm.name,
        tokens_per_s=run.tokens_per_s,
        easy_p50_ms=float(np.percentile(easy_ms, 50)),
        easy_p99_ms=float(np.percentile(easy_ms, 99)),
        hard_p50_ms=float(np.percentile(hard_ms, 50)),
        hard_p99_ms=float(np.percentile(hard_ms, 99)),
        jain=jain_index([1 / ms for ms in (*easy_ms, *hard_ms)]),
    )


# -- for people ----------------------------------------------------------------------


def geometric_mean(cells: Iterable[ReplayCell]) -> float:
    """Of the ratios to AR."""
    return statistics.geometric_mean(cell.ratio for cell in cells)


def by_arm(cells: Iterable[ReplayCell]) -> dict[str, list[ReplayCell]]:
    """The cells of each arm, in their order."""
    arms: dict[str, list[ReplayCell]] = {}
    for cell in cells:
        arms.setdefault(cell.arm, []).append(cell)
    return arms


def cautious(ours: Sequence[ReplayCell], foretold: Sequence[ReplayCell]) -> list[float]:
    """Ratios less what another method was foretold too fast in the same cell."""
    return [
        own.ratio / (1 + max(other.error or 0.0, 0.0))
        for own, other in zip(ours, foretold, strict=True)
    ]


def render(result: ReplayResult) -> str:
    """All tables as text."""
    console = Console(width=COLUMNS, highlight=False, markup=False)
    rows = [c for c in result.cells if c.table == "rows"]
    terms = [c for c in result.cells if c.table == "terms"]
    with console.capture() as capture:
        for model in dict.fromkeys(c.model for c in rows):
            console.print(f"replayed: {model} on H20, throughput over AR's", style="b")
            console.print(_rows_table([c for c in rows if c.model == model]))
        console.print(_ROWS_NOTE)
        for sharpness in dict.fromkeys(c.sharpness for c in terms):
            console.print(_terms_title(terms[0].model, sharpness), style="b")
            console.print(_terms_table([c for c in terms if c.sharpness == sharpness]))
        console.print(_TERMS_NOTE)
        console.print(_fair_title(terms[0].model), style="b")
        console.print(_fair_table(result.fair))
        console.print(_FAIR_NOTE)
        if result.regret:
            console.print("replayed: throughput lost by wrong costs", style="b")
            console.print(regret_table(result.regret))
            console.print(_REGRET_NOTE)
        if result.experts:
            console.print(expert_title(), style="b")
            console.print(expert_table(result.experts))
            console.print(EXPERT_NOTE)
        console.print(f"source: {result.source}")
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


_ROWS_NOTE = f"""\
error: against the published speed-up of the method
rows kept: of full blocks; the published shares are of an earlier campaign
{FITTED}: its published throughputs were used; {FORETOLD}: none of D-Cut's were
cautious: less what {DCUT_16} was foretold too fast in that cell
"""
_TERMS_NOTE = """\
adds: to the geometric mean of the line above
"""
_FAIR_NOTE = f"""\
ms per token, over requests of {FAIR_TOKENS} tokens; Jain: index over their speeds
"""


_REGRET_NOTE = """\
against planning by the costs that are paid; computed: from peak rates
"""


def _rows_table(cells: Sequence[ReplayCell]) -> Table:
    arms = by_arm(cells)
    table = _table("method", "", *_batches(cells), "geometric mean")
    for name, own in arms.items():
        table.add_row(name, own[0].kind, *_row([c.ratio for c in own]), style="b")
        said = [c.published for c in own if c.published is not None]
        if said and name != AR:
            errors = [c.error for c in own if c.error is not None]
            errors.append(geometric_mean(own) / statistics.geometric_mean(said) - 1)
            table.add_row("", "error", *(f"{error:+.1%}" for error in errors))
        if own[0].published_kept is not None:
            table.add_row("", "rows kept", *(f"{c.kept_share:.0%}" for c in own))
            table.add_row("", "published", *(f"{c.published_kept:.0%}" for c in own))
    table.add_row("", "cautious", *_row(cautious(arms[OURS], arms[DCUT_16])))
    return table


def _terms_title(model: str, sharpness: float) -> str:
    drafter = "confidences are chances"
    if sharpness != 1:
        drafter = f"confidences have {sharpness:g} of the chances' log-odds"
    return f"replayed: what each term adds on {model}; {drafter}"


def _terms_table(cells: Sequence[ReplayCell]) -> Table:
    table = _table("policy", *_batches(cells), "geometric mean", "adds")
    above: float | None = None
    for name, own in by_arm(cells).items():
        mean = geometric_mean(own)
        adds = f"{mean / above - 1:+.1%}" if above else ""
        table.add_row(name, *_row([c.ratio for c in own]), adds)
        above = mean
    return table


def _fair_title(model: str) -> str:
    hard = FAIR_BATCH // 4
    easy = FAIR_BATCH - hard
    return f"replayed: {model} on H20, {easy} easy and {hard} hard requests together"


def _fair_table(cells: Sequence[FairCell]) -> Table:
    times = ("easy p50", "p99", "hard p50", "p99")
    table = _table("policy", "tokens/s", *times, "Jain")
    for c in cells:
        ms = (c.easy_p50_ms, c.easy_p99_ms, c.hard_p50_ms, c.hard_p99_ms)
        numbers = (f"{c.tokens_per_s:.0f}", *(f"{t:.1f}" for t in ms), f"{c.jain:.3f}")
        table.add_row(c.arm, *numbers)
    return table


def _table(*headers: str) -> Table:
    """The first column holds names, all others numbers."""
    table = Table(box=box.SIMPLE_HEAD, padding=0)
    for i, header in enumerate(headers):
        justify: Literal["left", "right"] = "right" if i else "left"
        table.add_column(header, justify=justify, no_wrap=True)
    return table


def _batches(cells: Iterable[ReplayCell]) -> list[str]:
    return [f"batch {batch}" for batch in dict.fromkeys(c.batch for c in cells)]


def _row(ratios: Sequence[float]) -> list[str]:
    """Ratios, and their geometric mean."""
    mean = statistics.geometric_mean(ratios)
    return [*(f"{ratio:.2f}" for ratio in ratios), f"{mean:.3f}"]


def run_replay(command: str, out: Path, *, expert_aware: bool = False) -> int:
    """Replays, writes the record, prints the tables; returns the status."""
    out.mkdir(parents=True, exist_ok=True)
    with bar("replaying", cell_count(expert_aware)) as update:
        result = replay(command, update, expert_aware=expert_aware)
    path = out / "replay.json"
    path.write_text(result.to_json() + "\n")
    print(render(result))
    print(f"wrote {path}")
    return 0
