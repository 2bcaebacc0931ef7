"""`bench --replay --expert-aware`: does it help to know which experts a draft opens?

A mixture of experts decodes on paper. Rows ask for experts that are drawn: some
experts are popular, a request has favourites, and every row differs. Steps take what
the roofline says, with the experts that the verified rows really ask for. Compared
are plans by survival alone, on a cost table by rows that has seen this routing, and
plans that also know, or guess, each draft's experts (`cut.experts`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from rich import box
from rich.table import Table

from dcut_jax.bench.on_paper import ACCEPTANCE
from dcut_jax.cost.devices import find_device
from dcut_jax.cost.experts import distinct_experts, fit_concentration
from dcut_jax.cost.mesh import MeshShape
from dcut_jax.cost.roofline import BYTES, Roofline
from dcut_jax.cost.shapes import read_shape, targets_directory, usual_drafter
from dcut_jax.cut.experts import plan_experts
from dcut_jax.cut.numpy_plan import plan_numpy
from dcut_jax.simulate import raw_survival

TARGET, KIND, CONTEXT, WIDTH = "qwen3-30b-a3b", "H200", 512, 7
# Layers that are drawn; each stands for its share of the target's.
LAYERS = 4
REQUEST_STEPS, LEAST_STEPS = 512, 24
BATCH_SIZES = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Routing:
    """How rows ask for experts: logits, of which the largest `top_k` win.

    Attributes:
      popular, favourite, own: standard deviations over experts of what all rows share,
        what the rows of a request share, and what a row has for itself.
      known: chance that a predictor names an expert rightly; else it names any.
    """

    name: str
    popular: float
    favourite: float
    own: float = 1.0
    known: float = 1.0


ROUTINGS = (
    Routing("even", 0.0, 0.0),
    Routing("clustered", 0.5, 1.5),
    Routing("clustered, 7 of 10 known", 0.5, 1.5, known=0.7),
)


@dataclass(frozen=True)
class Times:
    """A step takes `fixed_ms + row_ms * rows + expert_ms * experts opened`."""

    fixed_ms: float
    row_ms: float
    expert_ms: float

    def ms(self, rows: float, opened: float) -> float:
        return self.fixed_ms + self.row_ms * rows + self.expert_ms * opened


def step_times(model: Roofline, batch: int) -> Times:
    """A mixture's step in three constants, by the roofline; drafting is in the first.

    Experts wait for their weights at these batch sizes, so that their products take
    no time of their own.
    """
    t = model.target

    def without_experts(rows: int) -> float:
        parts = model.verify(batch, rows, CONTEXT)
        return model.ms(part for part in parts if part.name != "experts")

    wide = batch * (WIDTH + 1)
    row_ms = (without_experts(wide) - without_experts(batch)) / (wide - batch)
    expert_bytes = BYTES[model.dtype] * t.expert_params * t.moe_layers / LAYERS
    return Times(
        fixed_ms=model.draft_ms(batch, WIDTH, CONTEXT)
        + without_experts(batch)
        - row_ms * batch,
        row_ms=row_ms,
        expert_ms=1e3 * expert_bytes / model.device.memory_per_s,
    )


@dataclass(frozen=True)
class ExpertCell:
    """One routing at one batch size; rates in tokens per ms, experts per layer.

    Attributes:
      all_rate: every draft verified.
      survival_rate: planned by survival, and costs by rows.
      aware_rate: planned with the experts of each draft.
    """

    routing: str
    batch: int
    all_rate: float
    survival_rate: float
    aware_rate: float
    survival_rows: float
    aware_rows: float
    survival_experts: float
    aware_experts: float

    @property
    def gain(self) -> float:
        """Of knowing experts, over planning by survival."""
        return self.aware_rate / self.survival_rate - 1


@dataclass
class _Tally:
    tokens: float = 0.0
    ms: float = 0.0
    rows: int = 0
    opened: int = 0

    def add(self, keep_B: np.ndarray, chance_BK, asks_BWX, times: Times) -> None:
        """What a plan really takes, and what it is expected to yield."""
        B, W = asks_BWX.shape[:2]
        kept_BW = np.arange(W) <= keep_B[:, None]
        reached_BK = np.cumprod(chance_BK, axis=1)
        self.tokens += B + reached_BK[kept_BW[:, 1:]].sum()
        rows = int(kept_BW.sum())
        opened = int(asks_BWX[kept_BW].any(axis=0).sum())
        self.rows, self.opened = self.rows + rows, self.opened + opened
        self.ms += times.ms(rows, opened)


def expert_cell(routing: Routing, batch: int, model: Roofline) -> ExpertCell:
    """Three plans of the same steps."""
    t, times = model.target, step_times(model, batch)
    rng = np.random.default_rng(batch)
    steps = max(REQUEST_STEPS // batch, LEAST_STEPS)
    popular_X = routing.popular * rng.standard_normal((LAYERS, t.experts))
    drawn = [_step(rng, routing, popular_X, batch, t.top_k) for _ in range(steps)]

    # What a table by rows would have measured: the mean over such steps.
    seen = [
        (batch * w, asks[:, :w].any(axis=(0, 1)).sum() / LAYERS)
        for _, asks, _ in drawn
        for w in range(1, WIDTH + 2)
    ]
    spread = fit_concentration(t.experts, t.top_k, seen)
    rows_R = np.arange(batch, batch * (WIDTH + 1) + 1)
    cost_R = np.array(
        [
            times.ms(n, LAYERS * distinct_experts(t.experts, t.top_k, n, spread))
            for n in rows_R.tolist()
        ]
    )
    tallies = {name: _Tally() for name in ("all", "survival", "aware")}
    active_B = np.ones(batch, bool)
    for drafts, asks, guessed in drawn:
        survival_BK = raw_survival(drafts.logp_BK)
        keeps = {
            "all": np.full(batch, WIDTH),
            "survival": plan_numpy(survival_BK, active_B, rows_R, cost_R).keep_B,
            "aware": plan_experts(
                survival_BK,
                active_B,
                guessed,
                fixed_ms=times.fixed_ms,
                row_ms=times.row_ms,
                expert_ms=times.expert_ms,
            ).keep_B,
        }
        for name, keep_B in keeps.items():
            tallies[name].add(keep_B, drafts.chance_BK, asks, times)
    rate = {name: tally.tokens / tally.ms for name, tally in tallies.items()}
    each, layer = steps * batch, steps * LAYERS
    return ExpertCell(
        routing=routing.name,
        batch=batch,
        all_rate=rate["all"],
        survival_rate=rate["survival"],
        aware_rate=rate["aware"],
        survival_rows=tallies["survival"].rows / each,
        aware_rows=tallies["aware"].rows / each,
        survival_experts=tallies["survival"].opened / layer,
        aware_experts=tallies["aware"].opened / layer,
    )


def _step(rng, routing: Routing, popular_YX: np.ndarray, batch: int, top_k: int):
    """Drafts of a step, the experts that rows ask for, and those they are said to."""
    layers, experts = popular_YX.shape
    drafts = ACCEPTANCE.draw(rng, np.zeros(batch), WIDTH)
    favourite = rng.standard_normal((batch, 1, layers, experts))
    own = rng.standard_normal((batch, WIDTH + 1, layers, experts))
    logits = popular_YX + routing.favourite * favourite + routing.own * own
    asked = np.argpartition(-logits, top_k - 1, axis=-1)[..., :top_k]
    wrong = rng.random(asked.shape) >= routing.known
    # An anchor is a token of the target's own: its experts are known of old.
    wrong[:, 0] = False
    guessed = np.where(wrong, rng.integers(0, experts, asked.shape), asked)
    return drafts, *(_one_hot(chosen, experts) for chosen in (asked, guessed))


def _one_hot(chosen: np.ndarray, experts: int) -> np.ndarray:
    asks = np.zeros((*chosen.shape[:-1], experts), bool)
    np.put_along_axis(asks, chosen, True, axis=-1)
    return asks.reshape(*chosen.shape[:2], -1)


def expert_cells(
    batch_sizes: Sequence[int] = BATCH_SIZES,
    routings: Sequence[Routing] = ROUTINGS,
) -> Iterator[ExpertCell]:
    """Every routing at every batch size."""
    target = read_shape(targets_directory() / f"{TARGET}.toml")
    drafter = replace(usual_drafter(target), block=WIDTH + 1)
    model = Roofline(find_device(KIND), MeshShape(), target, drafter)
    for routing in routings:
        for batch in batch_sizes:
            yield expert_cell(routing, batch, model)


def expert_title() -> str:
    return f"replayed: {TARGET} on one {KIND}, computed, {WIDTH} drafts a request"


def expert_table(cells: Sequence[ExpertCell]) -> Table:
    """Rates over that of verifying all, rows and experts."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("routing", no_wrap=True)
    for header in ("batch", "by survival", "expert-aware", "gain", "rows", "experts"):
        table.add_column(header, justify="right", no_wrap=True)
    above = None
    for c in cells:
        table.add_row(
            c.routing if c.routing != above else "",
            str(c.batch),
            f"{c.survival_rate / c.all_rate:.3f}",
            f"{c.aware_rate / c.all_rate:.3f}",
            f"{c.gain:+.1%}",
            f"{c.survival_rows:.1f} > {c.aware_rows:.1f}",
            f"{c.survival_experts:.0f} > {c.aware_experts:.0f}",
        )
        above = c.routing
    return table


EXPERT_NOTE = f"""\
by survival, expert-aware: throughput over that of verifying all drafts
rows of a request, and distinct experts of a layer: by survival > expert-aware
{LAYERS} layers are drawn and stand for all; the predictor of experts costs nothing
"""
