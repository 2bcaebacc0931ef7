"""What is lost by planning with another machine's or layout's costs: replayed.

A cost table is refused where it was not measured. This is why: the engine's own policy
plans by a wrong table, and pays what the right one says. Costs are not corrected, as
the engine would do, so it is what a table costs that nobody notices to be wrong.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from rich import box
from rich.table import Table

from dcut_jax.bench.advise import POLICY
from dcut_jax.bench.on_paper import ACCEPTANCE, dcut_setup, work_ms
from dcut_jax.bench.published import BLOCK, Published, StepTimes, fit_step_times
from dcut_jax.cost.devices import find_device
from dcut_jax.cost.mesh import MeshShape
from dcut_jax.cost.roofline import Roofline
from dcut_jax.cost.shapes import read_shape, targets_directory, usual_drafter
from dcut_jax.cut.choice import StepCosts
from dcut_jax.decode.defer import CATCH_UPS
from dcut_jax.decode.steps import StepShapes, anchors_only
from dcut_jax.engine.policy import (
    PLAN_WORK,
    catch_up_work,
    draft_work,
    verify_work,
)
from dcut_jax.simulate import Simulation, simulate

REQUEST_STEPS, LEAST_STEPS, WARM_STEPS = 4096, 64, 64
CONTEXT = 2048
KIND, DEVICES = "H20", 8
# Layouts of one target, each planned by the other's costs.
LAYOUTS = {
    "qwen3-8b": (MeshShape("tp", model=DEVICES), MeshShape("dp", data=DEVICES)),
    "qwen3-30b-a3b": (
        MeshShape("ep", expert=DEVICES),
        MeshShape("dp+tp", data=2, model=4),
    ),
}

CostsOf = Callable[[StepShapes], StepCosts]


@dataclass(frozen=True)
class Case:
    """Two sets of costs under the same drafts.

    Attributes:
      what: for people.
      costs: by the name of a machine or layout.
    """

    what: str
    costs: Mapping[str, CostsOf]


@dataclass(frozen=True)
class RegretCell:
    """One batch size, planned by one table and paid by another.

    Attributes:
      paid, planned: whose costs are paid, and whose are planned by.
      tokens_per_s: so; `own_tokens_per_s`: had it planned by what it pays.
    """

    case: str
    paid: str
    planned: str
    batch: int
    tokens_per_s: float
    own_tokens_per_s: float

    @property
    def lost(self) -> float:
        """Share of the throughput; below 0 where a wrong table did better by luck."""
        return 1 - self.tokens_per_s / self.own_tokens_per_s


def cases(published: Published) -> tuple[Case, ...]:
    """Published tables of two targets, and computed ones of two layouts each."""
    times = {m.name: fit_step_times(published, m) for m in published.models}
    tables = {name: partial(_published_costs, by) for name, by in times.items()}
    layouts = (
        Case(
            f"{name} on {DEVICES} {KIND}, computed",
            {f"{m.strategy} {m}": partial(_layout_costs, name, m) for m in meshes},
        )
        for name, meshes in LAYOUTS.items()
    )
    return Case("published tables on H20", tables), *layouts


def _published_costs(
    by_batch: Mapping[int, StepTimes], shapes: StepShapes
) -> StepCosts:
    return POLICY.costs(shapes, work_ms(POLICY, shapes, by_batch[shapes.slots]))


def _layout_costs(name: str, mesh: MeshShape, shapes: StepShapes) -> StepCosts:
    target = read_shape(targets_directory() / f"{name}.toml")
    model = Roofline(find_device(KIND), mesh, target, usual_drafter(target))
    # Plans of two layouts are compared, so rows are those of all devices.
    work = {
        PLAN_WORK: model.ms(model.plan(shapes.slots)),
        **{
            catch_up_work(steps): model.ms(model.catch_up(shapes.slots, steps))
            for steps in CATCH_UPS
        },
        **{
            draft_work(width): model.draft_ms(shapes.slots, width, CONTEXT)
            for width in POLICY.ladder(shapes)
        },
        **{
            # A step of anchors alone leaves the drafter's context to a catch-up.
            verify_work(lay): model.verify_ms(
                shapes.slots, lay.rows, CONTEXT, features=lay.rows > shapes.slots
            )
            for lay in [anchors_only(shapes), *POLICY.layouts(shapes)]
        },
    }
    return POLICY.costs(shapes, work)


def regret_cells(case: Case, batch_sizes: Sequence[int]) -> Iterator[RegretCell]:
    """Every pair of different tables, at every batch size."""
    for batch in batch_sizes:
        shapes = StepShapes(slots=batch, positions=0, width=BLOCK, stops=0)
        costs = {name: of(shapes) for name, of in case.costs.items()}
        for paid in costs:
            own = _tokens_per_s(shapes, costs[paid], costs[paid])
            for planned in costs:
                if planned != paid:
                    got = _tokens_per_s(shapes, costs[planned], costs[paid])
                    yield RegretCell(case.what, paid, planned, batch, got, own)


def _tokens_per_s(shapes: StepShapes, plan: StepCosts, paid: StepCosts) -> float:
    """Drafts and luck are the same whatever is planned by."""
    setup = dcut_setup(POLICY, shapes, plan, paid)
    ease_B = [0.0] * shapes.slots
    run = Simulation(setup, POLICY.chooser(shapes), ACCEPTANCE, ease_B)
    steps = max(REQUEST_STEPS // shapes.slots, LEAST_STEPS)
    return simulate(run, steps=steps, warm_up=WARM_STEPS).tokens_per_s


def regret_table(cells: Sequence[RegretCell]) -> Table:
    """Percent lost, by batch size."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for header in ("costs that are paid", "costs planned by"):
        table.add_column(header, no_wrap=True)
    for batch in dict.fromkeys(c.batch for c in cells):
        table.add_column(f"batch {batch}", justify="right", no_wrap=True)
    rows: dict[tuple[str, str, str], list[str]] = {}
    for c in cells:
        row = rows.setdefault((c.case, c.paid, c.planned), [])
        row.append(f"{c.lost:.1%}")
    above = None
    for (case, paid, planned), lost in rows.items():
        if case != above:
            table.add_row(case, "", style="b")
        above = case
        table.add_row(f"  {paid}", planned, *lost)
    return table
