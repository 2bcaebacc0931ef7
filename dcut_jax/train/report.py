"""The record, table and picture of an evaluation."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from dcut_jax.bench.report import GRID, INK, Spread
from dcut_jax.cut.sts import Scaling
from dcut_jax.train.evaluate import Evaluation, SetResult, Speed, WidthResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

VERSION = 1
COLUMNS = 100
SHOWN_SLOTS = 5
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F")
MARKERS = ("o", "D", "^", "s", "v", "P", "X")


def to_json(found: Evaluation) -> str:
    """The record of an evaluation: raw counts and times, and what follows from them.

    Numbers that are not finite become null. `definitions` says what each field means.
    """
    data = {
        "version": VERSION,
        "command": found.command,
        "date": found.date,
        "machine": dict(found.machine),
        "target": found.target,
        "target_identity": found.target_identity,
        "drafter": found.drafter,
        "step": found.step,
        "dtype": found.dtype,
        "draft_dtype": found.draft_dtype,
        "batch_size": found.batch_size,
        "max_new_tokens": found.max_new_tokens,
        "definitions": DEFINITIONS,
        "mean_accepted_length": lengths(found),
        "sets": [_set_json(one) for one in found.sets],
    }
    return json.dumps(_finite(data), indent=1, allow_nan=False, ensure_ascii=False)


DEFINITIONS = {
    "mean_accepted_length": "by set and width: tokens / steps, that is tokens that a "
    "request's decode steps committed, over those steps. The token that follows the "
    "accepted drafts is one of them, so it is at least 1; the last step of a text is "
    "counted as far as the text goes; the first token, which the prefill gives, is not "
    "counted",
    "slots": "for draft 1, 2, ...: how often it was reached, that is, all drafts "
    "before it were accepted and the text went that far, and how often it was then "
    "accepted; rate is the share",
    "confidence": "the drafter's own chance of each reached draft against whether it "
    "was accepted; raw, before anything is learned while decoding",
    "survival": "products of these chances along a block against whether all drafts up "
    "to there were accepted, of every verified draft within the text",
    "scaling": "sequential temperature scaling of the drafter's chances: temperatures "
    "by draft fitted on all texts, and the calibration error of survival by draft (20 "
    "bins), as it is and scaled: each half of the texts with temperatures of the other "
    "half; error_before and error_after are means over all drafts. null for a single "
    "text, which leaves none to judge on",
    "ece": "expected calibration error over ten bins; auc: chance that an accepted "
    "draft was given more than a rejected one",
    "tokens_per_s": "of decode steps; prefill is in no time",
    "ratio": "to plain decoding (AR) in the same round, all arms taking turns; median, "
    "lowest and highest over the rounds; null where nothing was timed",
    "texts_differ": "texts that are not token for token those of AR; in float32 there "
    "should be none",
}


def lengths(found: Evaluation) -> dict[str, dict[int, float]]:
    """Mean accepted length by set and width."""
    return {
        one.name: {w.width: w.mean_accepted_length for w in one.widths}
        for one in found.sets
    }


def _set_json(one: SetResult) -> dict[str, Any]:
    return {
        "name": one.name,
        "prompts": one.prompts,
        "ar": _speed_json(one.ar),
        "widths": [_width_json(w) for w in one.widths],
    }


def _speed_json(speeds: tuple[Speed, ...]) -> dict[str, Any]:
    rates = [s.tokens_per_s for s in speeds]
    return {
        "rounds": [{"tokens": s.tokens, "seconds": s.seconds} for s in speeds],
        "tokens_per_s": _spread_json(rates),
    }


def _spread_json(values: list[float]) -> dict[str, float]:
    return vars(_spread(values)).copy()


def _spread(values: Sequence[float]) -> Spread:
    """All NaN where nothing was timed."""
    return Spread.of(values) if values else Spread(math.nan, math.nan, math.nan)


def _width_json(w: WidthResult) -> dict[str, Any]:
    return {
        "width": w.width,
        "steps": w.steps,
        "tokens": w.tokens,
        "mean_accepted_length": w.mean_accepted_length,
        "slots": [
            {"slot": k, "reached": s.reached, "accepted": s.accepted, "rate": s.rate}
            for k, s in enumerate(w.slots, 1)
        ],
        "confidence": _fit_json(w.confidence),
        "survival": _fit_json(w.survival),
        "scaling": _scaling_json(w.scaling),
        **_speed_json(w.speeds),
        "ratio": _spread_json(list(w.ratios)),
        "texts_differ": w.texts_differ,
    }


def _fit_json(fit: Any) -> dict[str, Any]:
    return {
        "drafts": fit.drafts,
        "ece": fit.ece,
        "auc": fit.auc,
        "bins": [{"drafts": n, "predicted": p, "happened": s} for n, p, s in fit.bins],
    }


def _scaling_json(found: Scaling | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "error_before": found.error_before,
        "error_after": found.error_after,
        "by_draft": [
            {"temperature": t, "drafts": n, "before": b, "after": a}
            for t, n, b, a in zip(
                found.temperatures, found.drafts, found.before, found.after, strict=True
            )
        ],
    }


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return value


def title(found: Evaluation) -> str:
    """Which pair was evaluated, for people."""
    step = "" if found.step is None else f", step {found.step}"
    return f"{found.target} + {found.drafter}{step}, {found.date[:10]}"


def render_tables(found: Evaluation) -> str:
    """An evaluation as tables, `COLUMNS` wide at most; plain text in a pipe.

    What was measured, what temperatures would do for the drafter's chances, and once
    more the accepted lengths alone, a line per set.
    """
    tables = (_measured(found), _scaled(found), _lengths(found))
    console = Console(width=COLUMNS, highlight=False, markup=False)
    with console.capture() as capture:
        for table in tables:
            console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def _table(title: str, caption: str) -> Table:
    return Table(
        box=box.SIMPLE_HEAD,
        padding=0,
        title=title,
        title_justify="left",
        title_style="bold",
        caption=caption,
        caption_justify="left",
    )


def _measured(found: Evaluation) -> Table:
    table = _table(title(found), _caption(found))
    table.add_column("data", no_wrap=True)
    table.add_column("width", justify="right")
    table.add_column("E[L]", justify="right")
    most = max((len(w.slots) for one in found.sets for w in one.widths), default=0)
    shown = min(most, SHOWN_SLOTS)
    headers = [f"α{k}" for k in range(1, shown + 1)]
    headers += [f"α{most}"] if most > shown else []
    for header in (*headers, "ECE", "AUC", "tokens/s", "× AR", "spread"):
        table.add_column(header, justify="right", no_wrap=True)
    for one in found.sets:
        ar = _number(_spread([s.tokens_per_s for s in one.ar]).median, 0)
        blank = [""] * (len(headers) + 2)
        table.add_row(one.name, "AR", "1.00", *blank, ar, "", "")
        for i, w in enumerate(one.widths):
            last = i + 1 == len(one.widths)
            table.add_row("", *_cells(w, shown, most), end_section=last)
    return table


def _scaled(found: Evaluation) -> Table:
    table = _table(
        "Sequential temperature scaling",
        "ECE of survival, mean over drafts: raw, and with temperatures of the other\n"
        "half of the texts; Tk: temperature of draft k, fitted on all texts",
    )
    most = max(len(w.slots) for one in found.sets for w in one.widths)
    shown = sorted({*range(1, min(most, SHOWN_SLOTS) + 1), most})
    table.add_column("data", no_wrap=True)
    for header in ("width", "raw", "scaled", *(f"T{k}" for k in shown)):
        table.add_column(header, justify="right", no_wrap=True)
    for one in found.sets:
        for i, w in enumerate(one.widths):
            name = "" if i else one.name
            cells = ["one text only"]
            if w.scaling is not None:
                fitted = w.scaling.temperatures
                cells = [
                    _number(w.scaling.error_before, 3),
                    _number(w.scaling.error_after, 3),
                    *(f"{fitted[k - 1]:.2f}" if k <= w.width else "" for k in shown),
                ]
            last = i + 1 == len(one.widths)
            table.add_row(name, str(w.width), *cells, end_section=last)
    return table


def _lengths(found: Evaluation) -> Table:
    table = _table("Mean accepted length by width", "E[L], as above")
    widths = [w.width for w in found.sets[0].widths]  # the same for all sets
    table.add_column("data", no_wrap=True)
    table.add_column("prompts", justify="right")
    for width in widths:
        table.add_column(str(width), justify="right")
    by_set = lengths(found)
    for one in found.sets:
        cells = (f"{by_set[one.name][width]:.2f}" for width in widths)
        table.add_row(one.name, str(one.prompts), *cells)
    return table


def _cells(w: WidthResult, shown: int, most: int) -> list[str]:
    rates = [_number(s.rate, 2) for s in w.slots]
    slots = rates[:shown] + [""] * (shown - len(rates))
    if most > shown:
        slots.append(rates[-1] if len(rates) == most else "")
    rate = _spread([s.tokens_per_s for s in w.speeds])
    ratio = _spread(w.ratios)
    return [
        str(w.width),
        f"{w.mean_accepted_length:.2f}",
        *slots,
        _number(w.confidence.ece, 3),
        _number(w.confidence.auc, 3),
        _number(rate.median, 0),
        _number(ratio.median, 2),
        f"{ratio.low:.2f}–{ratio.high:.2f}" if w.ratios else "",
    ]


def _number(value: float, digits: int) -> str:
    return "" if math.isnan(value) else f"{value:.{digits}f}"


def _caption(found: Evaluation) -> str:
    prompts = ", ".join(f"{one.name} {one.prompts}" for one in found.sets)
    rounds = len(found.sets[0].ar)
    timed = f"× AR: within a round, medians of {rounds}" if rounds else "nothing timed"
    differ = sum(w.texts_differ for one in found.sets for w in one.widths)
    texts = f"{differ} texts are not AR's" if differ > 1 else "1 text is not AR's"
    if not differ:
        texts = "all texts are AR's"
    return (
        f"prompts: {prompts}; up to {found.max_new_tokens} new tokens, "
        f"{found.batch_size} at a time; {found.dtype}, drafter {found.draft_dtype}\n"
        f"E[L]: tokens per request and step, the token after the drafts included and\n"
        f"the last step as far as the text goes; αk: share of draft k accepted where\n"
        f"all before it were; ECE, AUC: of the drafter's raw chances, per draft\n"
        f"{timed}; {texts}"
    )


def plot(found: Evaluation, path: Path) -> None:
    """Draws accepted length, acceptance by slot, confidence and speed, set by set.

    Slots and confidence are those of the widest width. Error bars span the rounds.

    Raises:
      ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8.4), layout="constrained", facecolor="white")
    figure.suptitle(title(found), fontsize=13, fontweight="bold", color=INK)
    (length, slots), (chances, speed) = figure.subplots(2, 2)
    chances.plot([0, 1], [0, 1], color=INK, linestyle="--", linewidth=1.2, zorder=1)
    speed.axhline(1, color=INK, linestyle="--", linewidth=1.6, zorder=1)
    for i, one in enumerate(found.sets):
        style = {
            "color": COLOURS[i % len(COLOURS)],
            "marker": MARKERS[i % len(MARKERS)],
        }
        widths = [w.width for w in one.widths]
        lengths = [w.mean_accepted_length for w in one.widths]
        length.plot(widths, lengths, label=one.name, **style)
        widest = one.widths[-1]
        rates = [s.rate for s in widest.slots]
        slots.plot(range(1, len(rates) + 1), rates, **style)
        filled = [(p, s) for n, p, s in widest.confidence.bins if n]
        chances.plot([p for p, _ in filled], [s for _, s in filled], **style)
        ratios = [_spread(w.ratios) for w in one.widths]
        below = [r.median - r.low for r in ratios]
        above = [r.high - r.median for r in ratios]
        medians = [r.median for r in ratios]
        speed.errorbar(widths, medians, yerr=[below, above], capsize=3, **style)
    all_widths = sorted({w.width for one in found.sets for w in one.widths})
    wide = f"width {all_widths[-1]}"
    _dress(length, "Mean accepted length", "drafts a step", "tokens per step")
    _dress(slots, f"Acceptance by slot, {wide}", "slot", "accepted, where reached")
    _dress(chances, f"Confidence, {wide}", "the drafter's own chance", "accepted")
    _dress(speed, "Speed-up", "drafts a step", "ratio to AR, same round")
    for axes in (length, speed):
        axes.set_xticks(all_widths, [str(w) for w in all_widths])
    slots.set_ylim(0, 1)
    figure.legend(loc="outside lower center", ncols=len(found.sets), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)


def _dress(axes: "Axes", name: str, xlabel: str, ylabel: str) -> None:
    axes.set_title(name, loc="left", fontsize=11, color=INK)
    axes.set_xlabel(xlabel, color=INK)
    axes.set_ylabel(ylabel, color=INK)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
