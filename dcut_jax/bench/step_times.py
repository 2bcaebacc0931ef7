"""`python -m dcut_jax.bench.step_times`: steps of a model, beside the least they take.

A target of random weights with a drafter of random weights in its proportions: steps of
any shape can be timed where no checkpoint is. At each batch size the cost table is
measured by which D-Cut would plan, and each of its cells is set against the roofline
(`cost.roofline`): what its bytes and operations take at the device's peak rates. After
each batch size the record is written anew, so that what came before an end is kept.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import jax

from dcut_jax.bench.records import host
from dcut_jax.bench.report import GRID, INK, OTHERS, require_matplotlib
from dcut_jax.cli import DTYPES, bar, positive, positives, run
from dcut_jax.cost.devices import Device, find_device
from dcut_jax.cost.host import measure_host
from dcut_jax.cost.mesh import MeshShape
from dcut_jax.cost.roofline import Roofline
from dcut_jax.cost.select import roofline_table
from dcut_jax.cost.shapes import drafter_shape, model_shape
from dcut_jax.cost.table import KEY_PARTS, CostTable
from dcut_jax.decode.compile import Compiler
from dcut_jax.engine.config import EngineConfig
from dcut_jax.engine.load import Pair, load_pair
from dcut_jax.engine.policy import DCutPolicy, wanted_costs
from dcut_jax.engine.profile import contexts, profile
from dcut_jax.engine.synthetic import SYNTHETIC
from dcut_jax.files import write_text
from dcut_jax.prompts import random_ids
from dcut_jax.weights.load import RANDOM

# Worth knowing first: a run that is ended early has seen both ends.
BATCH_SIZES = (16, 64, 1, 256, 4, 128, 32, 8, 2)
FACTORS = (1, 2, 4, 8, 16)  # rows of a request


@dataclass(frozen=True)
class StepTime:
    """One cell of a cost table.

    Attributes:
      kind: "draft", "verify", "plan" or "catch_up"; `batch` is the number of slots.
      rows: of the target in a verification, else of the drafter or its context.
      median_ms, least_ms: measured; `samples` of them.
      roofline_ms: what it takes at least.
    """

    kind: str
    batch: int
    rows: int
    context: int
    median_ms: float
    least_ms: float
    samples: int
    roofline_ms: float

    @property
    def times_roofline(self) -> float:
        """How many times the least the median is."""
        return self.median_ms / self.roofline_ms


def here(dtypes: set[str]) -> Device:
    """The device at hand with its peak rates; a CPU's are measured."""
    if jax.default_backend() == "cpu":
        return measure_host(dtypes)
    return find_device(jax.devices()[0].device_kind)


def step_times(
    pair: Pair,
    config: EngineConfig,
    policy: DCutPolicy,
    compiler: Compiler,
    device: Device,
    *,
    rounds: int,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> list[StepTime]:
    """The cost table of one batch size, cell by cell."""
    shapes = config.shapes(pair.models)
    fingerprint = pair.here(config)
    [prompt] = random_ids(config.max_length, 1, pair.models.target.vocab)
    table = profile(
        pair.models,
        config,
        [policy],
        fingerprint,
        prompt,
        compiler=compiler,
        rounds=rounds,
        on_progress=on_progress,
    )
    drafter = pair.models.drafter
    assert drafter is not None, "the steps are those of speculation"
    least = Roofline(
        device,
        MeshShape(),
        model_shape(pair.models.target, pair.target.name),
        drafter_shape(drafter),
        dtype=fingerprint.dtype,
        draft_dtype=fingerprint.draft_dtype,
        cache_dtype=fingerprint.cache_dtype,
    )
    wanted = wanted_costs([policy], shapes, contexts(config))
    return list(side_by_side(table, roofline_table(least, fingerprint, wanted)))


def side_by_side(measured: CostTable, computed: CostTable) -> Iterator[StepTime]:
    """Cells that both tables have."""
    for kind in KEY_PARTS:
        least = getattr(computed, kind)
        for key, samples in sorted(getattr(measured, kind).items()):
            if key not in least:
                continue
            slots = key[0]
            rows = {
                "draft": lambda key: key[0] * (key[1] + 1),
                "verify": lambda key: key[1],
                "plan": lambda key: 0,
                "catch_up": lambda key: key[0] * key[1],
            }[kind](key)
            yield StepTime(
                kind=kind,
                batch=slots,
                rows=rows,
                context=key[-1] if kind in ("draft", "verify") else 0,
                median_ms=median(samples),
                least_ms=min(samples),
                samples=len(samples),
                roofline_ms=least[key][0],
            )


def table(name: str, times: Sequence[StepTime]) -> str:
    """For people."""
    lines = [
        name,
        f"{'batch':>6}  {'step':9}{'context':>8}{'rows':>6}{'ms':>10}{'least':>10}"
        f"{'x':>7}",
    ]
    for t in sorted(times, key=lambda t: (t.batch, t.kind, t.context, t.rows)):
        lines.append(
            f"{t.batch:6}  {t.kind:9}{t.context or '':>8}{t.rows:6}{t.median_ms:10.3f}"
            f"{t.roofline_ms:10.4f}{t.times_roofline:7.1f}"
        )
    return "\n".join(lines)


def plot(name: str, times: Sequence[StepTime], path: Path) -> None:
    """Draws verify times over rows, a line per batch size, and the roofline.

    At the longest context, where there are several.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    longest = max((t.context for t in times), default=0)
    verify = [t for t in times if t.kind == "verify" and t.context == longest]
    figure = Figure(figsize=(11, 5), layout="constrained", facecolor="white")
    figure.suptitle(f"{name}: verification", fontweight="bold", color=INK)
    time_axes, ratio_axes = figure.subplots(1, 2)
    batches = sorted({t.batch for t in verify})
    for i, batch in enumerate(batches):
        own = sorted((t for t in verify if t.batch == batch), key=lambda t: t.rows)
        rows = [t.rows for t in own]
        style = {"color": OTHERS[i % len(OTHERS)], "marker": "osvPDX^*<"[i % 9]}
        time_axes.plot(
            rows, [t.median_ms for t in own], label=f"batch {batch}", **style
        )
        time_axes.plot(rows, [t.roofline_ms for t in own], color=INK, linestyle=":")
        ratio_axes.plot(rows, [t.times_roofline for t in own], **style)
    time_axes.set_ylabel("ms; dotted: roofline", color=INK)
    ratio_axes.set_ylabel("times the roofline", color=INK)
    for axes in (time_axes, ratio_axes):
        axes.set_xlabel("rows verified", color=INK)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.grid(color=GRID, linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    ratio_axes.axhline(1.25, color=INK, linestyle="--", linewidth=1.2)
    time_axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)


def record(
    pair: Pair,
    device: Device,
    times: Sequence[StepTime],
    command: str,
    machine: Mapping[str, object],
) -> str:
    """The record, as JSON; `machine` is as `records.host` tells."""
    data = {
        "command": command,
        "machine": machine,
        "target": pair.target.name,
        "drafter": pair.drafter,
        "device": jax.devices()[0].device_kind,
        "rates": asdict(device),
        "jax": jax.__version__,
        "times": [asdict(t) for t in times],
    }
    return json.dumps(data, indent=1) + "\n"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="python -m dcut_jax.bench.step_times",
        description=(__doc__ or "").split("\n")[0],
    )
    p.add_argument("--target", required=True, help=f"{RANDOM}PATH of a config")
    p.add_argument(
        "--drafter", required=True, help=f"{SYNTHETIC}FILE, see configs/synthetic"
    )
    p.add_argument("--batch-sizes", type=positives, default=BATCH_SIZES)
    p.add_argument(
        "--factors", type=positives, default=FACTORS, help="rows verified of a request"
    )
    p.add_argument("--max-length", type=positive, default=384)
    p.add_argument("--rounds", type=positive, default=8)
    p.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    p.add_argument(
        "--out", type=Path, required=True, help="of the JSON; .png beside it"
    )
    p.add_argument("--no-plot", action="store_true")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Measures batch size after batch size."""
    args = parser().parse_args(argv)
    if not args.no_plot:  # before what takes minutes
        require_matplotlib()
    words = sys.argv[1:] if argv is None else argv
    command = shlex.join(["python", "-m", "dcut_jax.bench.step_times", *words])
    machine = host()  # now: the commit may be another one in the end
    pair = load_pair(args.target, args.drafter, args.dtype, args.dtype)
    drafter = pair.models.drafter
    if drafter is None:
        raise ValueError("the steps of speculation need a drafter; found none")
    policy = DCutPolicy(
        CostTable.empty(), widths=(drafter.max_drafts,), factors=args.factors
    )
    device = here({args.dtype})
    compiler = Compiler(pair.models, args.dtype)
    times: list[StepTime] = []
    for batch in args.batch_sizes:
        config = EngineConfig(batch, args.max_length, cache_dtype=args.dtype)
        with bar(f"batch {batch}", None) as update:

            def progress(
                what: str, done: int, total: int, update: Callable[..., None] = update
            ) -> None:
                update(done, f"{what} ({total} steps)")

            times += step_times(
                pair,
                config,
                policy,
                compiler,
                device,
                rounds=args.rounds,
                on_progress=progress,
            )
        write_text(args.out, record(pair, device, times, command, machine))
        if not args.no_plot:
            plot(pair.target.name, times, args.out.with_suffix(".png"))
    print(table(pair.target.name, times))
    return 0


if __name__ == "__main__":
    run(main)
