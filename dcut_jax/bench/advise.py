"""Which layout of a target on a node of devices, by batch size: `dcut_jax.cost advise`.

Times are computed from peak rates (`cost.roofline`), so what is said is an upper bound
of throughput, and a comparison of layouts. D-Cut's tokens come from the engine's own
policy on these costs (`simulate`), with drafts that are accepted as those published of
DFlash on Qwen3-8B (`bench.on_paper.ACCEPTANCE`), whatever the target.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from dcut_jax.bench.on_paper import ACCEPTANCE, dcut_setup, roofline_ms
from dcut_jax.config import ConfigError
from dcut_jax.cost.devices import Device
from dcut_jax.cost.mesh import STRATEGIES, MeshShape, mesh_shapes
from dcut_jax.cost.roofline import Roofline
from dcut_jax.cost.shapes import DrafterShape, ModelShape
from dcut_jax.cost.table import CostTable
from dcut_jax.decode.steps import StepShapes
from dcut_jax.engine.policy import DCutPolicy
from dcut_jax.simulate import Run, Simulation, simulate

VERSION = 1
# Requests times steps of a simulation, within so many steps, and those not counted.
REQUEST_STEPS, LEAST_STEPS, MOST_STEPS, WARM_STEPS = 2048, 32, 384, 32
# Confidences are chances here, so there is nothing to calibrate; costs are what they
# are, so there is nothing to correct.
POLICY = DCutPolicy(CostTable.empty(), calibrate=False, correct=False)


@dataclass(frozen=True)
class Asked:
    """What advice is asked for.

    Attributes:
      context: cached positions of every request when a step runs.
      positions: that a request's cache has room for.
    """

    device: Device
    devices: int
    target: ModelShape
    drafter: DrafterShape
    batch_sizes: tuple[int, ...]
    context: int
    positions: int
    dtype: str = "bfloat16"


@dataclass(frozen=True)
class Prediction:
    """One layout at one batch size; no rates where it does not fit.

    Attributes:
      memory_gb: of each device, in 1e9 bytes: weights, caches, logits.
      ar_per_s, dcut_per_s: tokens a second of the whole mesh.
      mean_width, mean_rows: drafted tokens and verified rows per request and step.
    """

    batch: int
    memory_gb: float
    fits: bool
    ar_per_s: float | None = None
    dcut_per_s: float | None = None
    mean_accepted_length: float | None = None
    mean_width: float | None = None
    mean_rows: float | None = None


@dataclass(frozen=True)
class LayoutAdvice:
    """One mesh under one strategy.

    Attributes:
      impossible: why there is no such layout of this target; "" where there is.
    """

    strategy: str
    mesh: str
    impossible: str
    weights_gb: float
    predictions: tuple[Prediction, ...]


@dataclass(frozen=True)
class Advice:
    """All layouts; no figure in it was measured."""

    asked: Asked
    layouts: tuple[LayoutAdvice, ...]

    def best(self, batch: int, *, dcut: bool) -> tuple[LayoutAdvice, Prediction] | None:
        """The fastest layout that fits; None where none does."""
        found = [
            (layout, p)
            for layout in self.layouts
            for p in layout.predictions
            if p.batch == batch and p.fits
        ]
        rate = "dcut_per_s" if dcut else "ar_per_s"
        return max(found, key=lambda pair: getattr(pair[1], rate), default=None)

    def to_json(self) -> str:
        """One line."""
        best = {
            batch: None
            if (found := self.best(batch, dcut=True)) is None
            else {"strategy": found[0].strategy, "mesh": found[0].mesh}
            for batch in self.asked.batch_sizes
        }
        data = {
            "version": VERSION,
            "source": "roofline",
            "asked": asdict(self.asked),
            "layouts": [asdict(layout) for layout in self.layouts],
            "best": best,
        }
        return json.dumps(data, allow_nan=False)


def all_meshes(devices: int) -> Iterator[MeshShape]:
    """Every mesh of so many devices under every strategy that can use them all."""
    if devices == 1:
        yield MeshShape()
        return
    for strategy in STRATEGIES:
        yield from mesh_shapes(devices, strategy)


def advise(
    asked: Asked, update: Callable[[int, str], None] = lambda done, what: None
) -> Advice:
    """Predictions for every layout; `update` is told how many are done and the next."""
    layouts = []
    for done, mesh in enumerate(all_meshes(asked.devices)):
        update(done, f"{mesh.strategy}, {mesh}")
        layouts.append(layout_advice(asked, mesh))
    return Advice(asked, tuple(layouts))


def layout_advice(asked: Asked, mesh: MeshShape) -> LayoutAdvice:
    """Predictions for one layout."""
    try:
        model = roofline(asked, mesh)
    except ConfigError as error:
        return LayoutAdvice(mesh.strategy, str(mesh), str(error), 0.0, ())
    rows = asked.drafter.block
    weights = model.memory(1, asked.positions, rows).weights
    return LayoutAdvice(
        strategy=mesh.strategy,
        mesh=str(mesh),
        impossible="",
        weights_gb=weights / 1e9,
        predictions=tuple(predict(asked, model, batch) for batch in asked.batch_sizes),
    )


def roofline(asked: Asked, mesh: MeshShape) -> Roofline:
    """Least times of the pair on a mesh."""
    return Roofline(
        device=asked.device,
        mesh=mesh,
        target=asked.target,
        drafter=asked.drafter,
        dtype=asked.dtype,
        draft_dtype=asked.dtype,
        cache_dtype=asked.dtype,
    )


def predict(asked: Asked, model: Roofline, batch: int) -> Prediction:
    """Rates of one layout at one batch size."""
    total = model.memory(batch, asked.positions, batch * asked.drafter.block).total
    if total > asked.device.memory_bytes:
        return Prediction(batch, total / 1e9, fits=False)
    run = simulated(model, batch, asked.context)
    return Prediction(
        batch=batch,
        memory_gb=total / 1e9,
        fits=True,
        ar_per_s=1e3 * batch / model.plain_ms(batch, asked.context),
        dcut_per_s=run.tokens_per_s * batch / -(-batch // model.mesh.shards),
        mean_accepted_length=run.mean_accepted_length,
        mean_width=run.mean_width,
        mean_rows=run.mean_rows,
    )


def simulated(model: Roofline, batch: int, context: int) -> Run:
    """D-Cut on computed costs, with the published drafter's acceptance: one shard.

    All shards run one tier, and here they are all alike. The fullest is simulated.
    """
    assert model.drafter is not None, "D-Cut needs a drafter"
    shards = model.mesh.shards
    slots = -(-batch // shards)
    width = model.drafter.block
    shapes = StepShapes(
        slots * shards, positions=0, width=width, stops=0, shards=shards
    )
    costs = POLICY.costs(shapes, roofline_ms(POLICY, shapes, model, context))
    setup = dcut_setup(POLICY, shapes, costs)
    run = Simulation(setup, POLICY.chooser(shapes), ACCEPTANCE, [0.0] * slots)
    steps = min(max(REQUEST_STEPS // slots, LEAST_STEPS), MOST_STEPS)
    return simulate(run, steps=steps, warm_up=WARM_STEPS)


# -- for people ----------------------------------------------------------------------


def render(advice: Advice) -> str:
    """The layouts and the best of them as text."""
    asked = advice.asked
    console = Console(width=_columns(asked), highlight=False, markup=False)
    head = (
        f"predicted from peak rates, not measured: {asked.target.name} "
        f"({asked.target.params / 1e9:.1f} billion parameters, "
        f"{asked.target.active_params / 1e9:.1f} active, {asked.dtype}) on "
        f"{asked.devices} {asked.device.name}"
    )
    with console.capture() as capture:
        console.print(head, style="b")
        console.print(_layouts_table(advice))
        console.print(_NOTE.format(asked.context, asked.positions))
        console.print("best layout by batch size", style="b")
        console.print(_best_table(advice))
        console.print(f"peak rates: {asked.device.source}")
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


_NOTE = """\
tokens a second, AR > D-Cut, of the whole mesh; context {}, room for {} positions
GB: memory of each device at the smallest and at the largest batch; -: does not fit
launches, collectives' latency, the host and prefill are not in it: an upper bound,
and the smaller the batch the further off; a shard without a request counts as if it
had one
"""


def _columns(asked: Asked) -> int:
    return 60 + 16 * len(asked.batch_sizes)


def _layouts_table(advice: Advice) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("strategy", "mesh"):
        table.add_column(name, no_wrap=True)
    table.add_column("GB", justify="right", no_wrap=True)
    for batch in advice.asked.batch_sizes:
        table.add_column(f"batch {batch}", justify="right", no_wrap=True)
    reasons = []
    for layout in advice.layouts:
        if layout.impossible:
            reasons.append(f"{layout.strategy} {layout.mesh}: {layout.impossible}")
            continue
        first, last = layout.predictions[0], layout.predictions[-1]
        table.add_row(
            layout.strategy,
            layout.mesh,
            f"{first.memory_gb:.0f} - {last.memory_gb:.0f}",
            *(_rates(p) for p in layout.predictions),
        )
    if reasons:
        table.caption = "left out: " + "; ".join(reasons)
        table.caption_justify = "left"
    return table


def _rates(p: Prediction) -> str:
    if p.ar_per_s is None or p.dcut_per_s is None:
        return "-"
    return f"{p.ar_per_s:,.0f} > {p.dcut_per_s:,.0f}"


def _best_table(advice: Advice) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("batch", "AR", "tokens/s", "D-Cut", "tokens/s", "drafts", "rows"):
        table.add_column(name, justify="right", no_wrap=True)
    for batch in advice.asked.batch_sizes:
        ar, dcut = (advice.best(batch, dcut=flag) for flag in (False, True))
        if ar is None or dcut is None:
            table.add_row(str(batch), "none fits")
            continue
        table.add_row(
            str(batch),
            f"{ar[0].strategy} {ar[0].mesh}",
            f"{ar[1].ar_per_s:,.0f}",
            f"{dcut[0].strategy} {dcut[0].mesh}",
            f"{dcut[1].dcut_per_s:,.0f}",
            f"{dcut[1].mean_width:.1f}",
            f"{dcut[1].mean_rows:.1f}",
        )
    return table


def layout_count(devices: int) -> int:
    """Layouts that advice on so many devices has."""
    return sum(1 for _ in all_meshes(devices))
