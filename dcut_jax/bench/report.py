"""From raw cells to what a person reads: a table, a picture, a line per text check."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from dcut_jax.bench.records import (
    AR,
    NO_TOKEN,
    BenchResult,
    Cell,
    Difference,
    Reliability,
    TextCheck,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = 100
SHOWN_PHASES = ("draft", "plan", "verify")  # all others are shown as one
SHOWN_DIFFERENCES = 10

NAMES = {AR: "AR", "published": "D-Cut, published", "dcut": "D-Cut"}

# Okabe and Ito's colours, told apart with any colour vision; every arm has a marker of
# its own besides. Fixed widths are of one family: lighter and darker blues.
INK, GRID = "#222222", "#d9d9d9"
STYLES: dict[str, dict[str, Any]] = {
    AR: {"color": INK, "marker": "o", "linestyle": "--"},
    "published": {"color": "#009E73", "marker": "^"},
    "dcut": {"color": "#D55E00", "marker": "D", "linewidth": 2.6, "zorder": 4},
}
KINDS: dict[str, dict[str, Any]] = {
    "raw": {"color": "#7F7F7F", "marker": "o"},
    "calibrated": {"color": "#D55E00", "marker": "D"},
}
FAMILY = ("#9CCBEA", "#56B4E9", "#0072B2", "#003F6B")
OTHERS = ("#CC79A7", "#E69F00", "#7F7F7F", "#B59F00")
FAMILY_MARKERS = ("s", "v", "P", "X")


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest over the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Row:
    """One arm at one batch size, over all rounds.

    Attributes:
      ratio: tokens per second over AR's *of the same round and batch size*, so that a
        machine that slows down between rounds does not enter; None without AR.
      mean_accepted_length, kept_share, mean_width, phase_ms: medians; see `Cell`.
    """

    batch: int
    arm: str
    rounds: int
    tokens_per_s: Spread
    ratio: Spread | None
    mean_accepted_length: float
    kept_share: float
    mean_width: float
    phase_ms: dict[str, float]


def summarise(cells: Iterable[Cell]) -> list[Row]:
    """One row per batch size and arm: batch sizes rising, arms in the order they came.

    Raises:
      ValueError: two cells of one batch size, arm and round.
    """
    by_place: dict[tuple[int, str], dict[int, Cell]] = defaultdict(dict)
    for cell in cells:
        rounds = by_place[cell.batch, cell.arm]
        if cell.round in rounds:
            raise ValueError(
                f"expected one cell per batch size, arm and round, found two for batch "
                f"{cell.batch}, {cell.arm}, round {cell.round}; number the rounds"
            )
        rounds[cell.round] = cell
    arms = list(dict.fromkeys(arm for _, arm in by_place))
    places = sorted(by_place, key=lambda place: (place[0], arms.index(place[1])))
    return [_row(by_place[place], by_place.get((place[0], AR), {})) for place in places]


def _row(own: dict[int, Cell], reference: dict[int, Cell]) -> Row:
    """The row of an arm's cells by round, given AR's at the same batch size."""
    cells = list(own.values())
    ratios = [
        own[r].tokens_per_s / reference[r].tokens_per_s for r in own if r in reference
    ]
    phases = list(dict.fromkeys(name for c in cells for name in c.phase_ms))
    return Row(
        batch=cells[0].batch,
        arm=cells[0].arm,
        rounds=len(cells),
        tokens_per_s=Spread.of([c.tokens_per_s for c in cells]),
        ratio=Spread.of(ratios) if ratios else None,
        mean_accepted_length=statistics.median(c.mean_accepted_length for c in cells),
        kept_share=statistics.median(c.kept_share for c in cells),
        mean_width=statistics.median(c.mean_width for c in cells),
        phase_ms={
            name: statistics.median(c.phase_ms.get(name, 0.0) for c in cells)
            for name in phases
        },
    )


def arm_name(arm: str) -> str:
    """An arm's name for people."""
    return NAMES.get(arm, arm.replace("fixed-", "fixed "))


def render_table(result: BenchResult) -> str:
    """The run as a table, `COLUMNS` wide at most; the best arm of a batch is bold.

    On a terminal, that is; written to a file or a pipe it is plain text.
    """
    console = Console(width=COLUMNS, highlight=False, markup=False)
    with console.capture() as capture:
        console.print(_table(result))
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def _table(result: BenchResult) -> Table:
    rows = summarise(result.cells)
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=0,  # the box keeps columns a space apart
        title=_title(result),
        title_justify="left",
        title_style="bold",
        caption=_caption(result, rows),
        caption_justify="left",
    )
    table.add_column("batch", justify="right")
    table.add_column("arm", no_wrap=True)
    for header in ("tokens/s", "±", "× AR", "spread", "E[L]", "kept", "width"):
        table.add_column(header, justify="right", no_wrap=True)
    for phase in (*SHOWN_PHASES, "other"):
        table.add_column(f"{phase}\nms", justify="right", no_wrap=True)
    for i, row in enumerate(rows):
        same_batch = [r for r in rows if r.batch == row.batch]
        best = max(same_batch, key=lambda r: r.tokens_per_s.median)
        last = i + 1 == len(rows) or rows[i + 1].batch != row.batch
        first = i == 0 or rows[i - 1].batch != row.batch
        table.add_row(
            str(row.batch) if first else "",
            *_cells_of(row),
            style="bold" if row is best else "",
            end_section=last,
        )
    return table


def _cells_of(row: Row) -> list[str]:
    drafts = row.mean_width > 0
    rate, ratio = row.tokens_per_s, row.ratio
    other = sum(ms for name, ms in row.phase_ms.items() if name not in SHOWN_PHASES)
    phases = [*(row.phase_ms.get(name) for name in SHOWN_PHASES), other]
    return [
        arm_name(row.arm),
        f"{rate.median:.0f}",
        f"{(rate.high - rate.low) / 2 / rate.median:.0%}",
        f"{ratio.median:.2f}" if ratio else "",
        f"{ratio.low:.2f}–{ratio.high:.2f}" if ratio and row.arm != AR else "",
        f"{row.mean_accepted_length:.2f}",
        f"{row.kept_share:.0%}" if drafts else "",
        f"{row.mean_width:.1f}" if drafts else "",
        *(_milliseconds(ms) for ms in phases),
    ]


def _milliseconds(ms: float | None) -> str:
    """Two or three digits; nothing for a phase that an arm does not have."""
    if not ms:
        return ""
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}"


def _title(result: BenchResult) -> str:
    models = " + ".join(name for name in (result.target, result.drafter) if name)
    return f"{models} on {device_name(result)}, {result.date[:10]}"


def _picture_title(result: BenchResult) -> str:
    """Says whether drafts were drawn, for a picture is passed on without its table."""
    note = "\nsynthetic acceptance, random weights" if result.synthetic else ""
    return _title(result) + note


def device_name(result: BenchResult) -> str:
    """The device, for people; of a CPU its model and cores."""
    machine = result.machine
    kind = str(machine.get("device") or "unknown device")
    if kind.lower() != "cpu":
        return kind
    cores = machine.get("cores")
    name = str(machine.get("cpu") or "CPU")
    return f"{name}, {cores} cores" if cores else name


def _caption(result: BenchResult, rows: Sequence[Row]) -> str:
    rounds = max((row.rounds for row in rows), default=0)
    dtypes = result.dtype
    if result.drafter and result.draft_dtype != result.dtype:
        dtypes += f", drafter {result.draft_dtype}"
    if result.cache_dtype != result.dtype:
        dtypes += f", caches {result.cache_dtype}"
    return (
        f"{result.prompts} prompts, {result.max_new_tokens} new tokens each; {dtypes}\n"
        f"{_synthetic_note(result)}"
        f"medians of {rounds} {'round' if rounds == 1 else 'rounds'}; ±: half the "
        f"spread; × AR: within a round\n"
        f"E[L]: tokens per request and step; kept: rows verified, of full width\n"
        f"width: drafts asked for; ms: per step, every phase waited for\n"
        f"not in these times: {result.compile_s:.0f} s of compiling, "
        f"{result.profile_s:.0f} s of measuring costs"
    )


def _synthetic_note(result: BenchResult) -> str:
    """A line that says that drafts were drawn; nothing of a drafter."""
    if result.synthetic is None:
        return ""
    return (
        "SYNTHETIC: random weights; drafts are right as often as this says, and "
        f"cost what a drafter's cost: {result.synthetic['name']}\n"
    )


def render_checks(checks: Iterable[TextCheck]) -> str:
    """Whether each arm's text is AR's: one line per arm, then its differences."""
    return "\n".join(line for check in checks for line in _check_lines(check))


def _check_lines(check: TextCheck) -> list[str]:
    name = arm_name(check.arm)
    extent = f"{check.prompts} prompts, {check.tokens} tokens"
    count = len(check.differences)
    if not count:
        return [f"{name}: text equals AR: {extent}"]
    differ = "1 text differs" if count == 1 else f"{count} texts differ"
    lines = [f"{name}: {differ} from AR: {extent}"]
    lines += [f"  {_place(d)}" for d in check.differences[:SHOWN_DIFFERENCES]]
    if count > SHOWN_DIFFERENCES:
        lines.append(f"  and {count - SHOWN_DIFFERENCES} more, all in the JSON record")
    return lines


def _place(d: Difference) -> str:
    place = f"prompt {d.prompt}, position {d.position}, batch size {d.batch}: expected "
    if d.found == NO_TOKEN:
        return f"{place}token {d.expected}, found the end of the text"
    if d.expected == NO_TOKEN:
        return f"{place}the end of the text, found token {d.found}"
    return f"{place}token {d.expected}, found {d.found}, logit gap {d.gap:.2g}"


def render_reliability(known: Iterable[Reliability]) -> str:
    """How well each arm's chances were known: one line per arm and batch size."""
    lines = []
    for (arm, batch), kinds in _by_arm(known).items():
        parts = [f"{k.kind} ECE {k.ece:.3f}, AUC {k.auc:.3f}" for k in kinds]
        drafts = kinds[0].drafts
        lines.append(
            f"{arm_name(arm)}, batch {batch}: survival of {drafts} verified drafts: "
            f"{'; '.join(parts)}"
        )
    return "\n".join(lines)


def _by_arm(
    known: Iterable[Reliability],
) -> dict[tuple[str, int], list[Reliability]]:
    found: dict[tuple[str, int], list[Reliability]] = defaultdict(list)
    for one in known:
        found[one.arm, one.batch].append(one)
    return found


def plot_reliability(result: BenchResult, arm: str, path: Path) -> None:
    """Draws real over predicted survival of an arm, all batch sizes together.

    Raises:
      ImportError: matplotlib is not installed.
      ValueError: the arm has planned nothing.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    kinds = {
        k.kind: pooled(result.reliability, arm, k.kind) for k in result.reliability
    }
    kinds = {kind: bins for kind, bins in kinds.items() if bins}
    if not kinds:
        raise ValueError(f"expected plans of {arm} to draw, found none; run that arm")
    figure = Figure(figsize=(5.6, 5.4), layout="constrained", facecolor="white")
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color=INK, linestyle="--", linewidth=1.2, zorder=1)
    most = max(n for bins in kinds.values() for n, _, _ in bins)
    for kind, bins in kinds.items():
        style = KINDS[kind]
        x, y = [p for _, p, _ in bins], [s for _, _, s in bins]
        sizes = [8 + 240 * n / most for n, _, _ in bins]
        axes.plot(x, y, color=style["color"], linewidth=1.2, label=kind)
        axes.scatter(x, y, s=sizes, alpha=0.8, **style)
    axes.set_xlabel("predicted survival of verified drafts", color=INK)
    axes.set_ylabel("share that survived", color=INK)
    title = f"{arm_name(arm)}: chances and outcomes\n{_picture_title(result)}"
    axes.set_title(title, loc="left", fontsize=9, color=INK)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)


def pooled(
    known: Iterable[Reliability], arm: str, kind: str
) -> list[tuple[int, float, float]]:
    """Bins of one arm over all batch sizes; those without drafts are left out."""
    some = [one.bins for one in known if (one.arm, one.kind) == (arm, kind)]
    merged = []
    for same in zip(*some, strict=True):
        filled = [(n, p, s) for n, p, s in same if n]
        count = sum(n for n, _, _ in filled)
        if count:
            predicted = sum(n * p for n, p, _ in filled) / count
            survived = sum(n * s for n, _, s in filled) / count
            merged.append((count, predicted, survived))
    return merged


def require_matplotlib() -> None:
    """Raises ImportError, saying what to do, where matplotlib cannot be imported."""
    try:
        import matplotlib.figure  # noqa: F401  (an extra, and heavy)
    except ImportError as error:
        raise ImportError(
            f"drawing the curve needs matplotlib, which cannot be imported ({error}); "
            f"run `pip install matplotlib`, or pass --no-plot to do without"
        ) from error


def plot(result: BenchResult, path: Path) -> None:
    """Draws throughput against batch size per arm, and beside it the ratio to AR.

    Error bars span the rounds.

    Raises:
      ImportError: matplotlib is not installed.
      ValueError: there are no cells to draw.
    """
    require_matplotlib()
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    rows = summarise(result.cells)
    if not rows:
        raise ValueError("expected cells to draw, found none; run at least one arm")
    arms = list(dict.fromkeys(row.arm for row in rows))
    styles = arm_styles(arms)
    layout = ConstrainedLayoutEngine(h_pad=0.1, w_pad=0.1)
    figure = Figure(figsize=(11, 5.2), layout=layout, facecolor="white")
    figure.suptitle(_picture_title(result), fontsize=13, fontweight="bold", color=INK)
    rate_axes, ratio_axes = figure.subplots(1, 2)
    for arm in arms:
        own = [row for row in rows if row.arm == arm]
        rates = [(row.batch, row.tokens_per_s) for row in own]
        ratios = [(row.batch, row.ratio) for row in own if row.ratio]
        _draw(rate_axes, rates, styles[arm], arm_name(arm))
        if arm != AR and ratios:
            _draw(ratio_axes, ratios, styles[arm])
    batches = sorted({row.batch for row in rows})
    _dress(rate_axes, batches, "Throughput", "tokens per second")
    _dress(ratio_axes, batches, "Speed-up", "ratio to AR, same round")
    rate_axes.set_ylim(bottom=0)
    ratio_axes.axhline(1, color=INK, linestyle="--", linewidth=1.6, zorder=1)
    figure.legend(loc="outside lower center", ncols=len(arms), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)


def arm_styles(arms: Sequence[str]) -> dict[str, dict[str, Any]]:
    """How each arm is drawn; fixed widths get deeper blues as they get wider."""
    styles = {arm: STYLES[arm] for arm in arms if arm in STYLES}
    fixed = sorted(
        (arm for arm in arms if arm.startswith("fixed-")),
        key=lambda arm: (len(arm), arm),
    )
    others = [arm for arm in arms if arm not in styles and arm not in fixed]
    for i, arm in enumerate(fixed):
        shade = -1 if len(fixed) == 1 else i * (len(FAMILY) - 1) // (len(fixed) - 1)
        marker = FAMILY_MARKERS[i % len(FAMILY_MARKERS)]
        styles[arm] = {"color": FAMILY[shade], "marker": marker}
    for i, arm in enumerate(others):
        styles[arm] = {"color": OTHERS[i % len(OTHERS)], "marker": "*"}
    return styles


def _draw(
    axes: "Axes",
    points: Sequence[tuple[int, Spread]],
    style: dict[str, Any],
    label: str | None = None,
) -> None:
    medians = [spread.median for _, spread in points]
    below = [spread.median - spread.low for _, spread in points]
    above = [spread.high - spread.median for _, spread in points]
    axes.errorbar(
        [batch for batch, _ in points],
        medians,
        yerr=[below, above],
        label=label,
        capsize=3,
        elinewidth=1.2,
        **{"linewidth": 1.8, "markersize": 6.5, **style},
    )


def _dress(axes: "Axes", batches: Sequence[int], title: str, ylabel: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(b) for b in batches])
    axes.minorticks_off()
    axes.set_xlabel("batch size (requests decoded together)", color=INK)
    axes.set_ylabel(ylabel, color=INK)
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
