"""What a step verifies: anchors alone, everything, or what is worth its cost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np

from dcut_jax.cost.online import MOST_FACTOR, Work
from dcut_jax.cost.select import Wanted
from dcut_jax.cost.table import CostError, CostTable
from dcut_jax.cut.choice import StepCosts
from dcut_jax.cut.fairness import Fairness
from dcut_jax.cut.numpy_plan import Objective, ratio_fractions
from dcut_jax.cut.width import WidthChooser
from dcut_jax.decode.decide import PlanKey
from dcut_jax.decode.defer import CATCH_UPS, ROOM
from dcut_jax.decode.pack import Layout, layout, tier_rows
from dcut_jax.decode.steps import (
    StepShapes,
    anchors_only,
    everything,
    plain_layouts,
)

# Rows per request of the default tiers: about geometric, and holding the full widths of
# 3, 7 and 15 drafts and the quarters of a block of 16.
TIER_FACTORS = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)
WIDTHS = (3, 7, 15, 31)
# A step of a width is offered these tiers from this share of its block upwards, beside
# the anchors alone: who would keep less had better draft fewer.
LEAST_SHARE = 0.25
PAPER_RATIOS = (0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class ArPolicy:
    """Plain autoregressive decoding: the drafter never runs."""

    def ladder(self, shapes: StepShapes) -> tuple[int, ...]:
        """Draft widths that a step may ask for."""
        return ()

    def layouts(self, shapes: StepShapes) -> list[Layout]:
        return plain_layouts(shapes)

    def shared(self, shapes: StepShapes) -> list[Layout]:
        """Layouts that a chunk of a prompt may go along with."""
        return [anchors_only(shapes)]


@dataclass(frozen=True)
class FixedPolicy:
    """Always `width` drafts, at least one, all of them verified."""

    width: int

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ValueError(f"a fixed width is at least 1 draft; found {self.width}")

    def ladder(self, shapes: StepShapes) -> tuple[int, ...]:
        """Draft widths that a step may ask for."""
        return (self.width,)

    def layouts(self, shapes: StepShapes) -> list[Layout]:
        return [everything(shapes, self.width)]

    def shared(self, shapes: StepShapes) -> list[Layout]:
        """Layouts that a chunk of a prompt may go along with."""
        return self.layouts(shapes)


def draft_work(width: int) -> Work:
    """Drafting `width` tokens for every slot."""
    return "draft", width, 0


def verify_work(lay: Layout) -> Work:
    """Verifying a layout's rows, and committing them."""
    return "verify", lay.rows, lay.width


def share_work(lay: Layout, chunk: int) -> Work:
    """The same as `verify_work`, with so many rows of a prompt in the pass."""
    return f"verify beside {chunk}", lay.rows, lay.width


def catch_up_work(steps: int) -> Work:
    """Projecting the drafter's context of so many plain steps."""
    return "catch up", steps, 0


PLAN_WORK: Work = ("plan", 0, 0)


@dataclass(frozen=True)
class DCutPolicy:
    """Verifies the drafts of the batch that are worth their cost (arXiv 2607.14647).

    Attributes:
      table: measured costs of this machine, batch size included.
      widths: draft widths to choose from. None: `WIDTHS` as far as the drafter goes.
      factors: tiers, in rows per request; ends and the widths' full blocks are added.
        None: `TIER_FACTORS`.
      plain: whether a step may draft nothing, where that is best.
      bypass: whether a step may verify all its drafts unplanned, where that is best.
      calibrate: whether chances of acceptance are learned from outcomes
        (`cut.calibration`), or confidences stand for them.
      correct: whether costs are corrected by the time of real steps (`cost.online`).
      fairness: what a token of each request is worth, see `cut.fairness.weights`.
      patience: no request goes for longer than so many drafting steps without a draft
        of its own being verified. None: it may for ever.
      objective, ratios: see `cut.plan`. `published()` sets them as the paper does.
      probe_every, probe_share, margin: see `cut.width.WidthChooser`.
    """

    table: CostTable
    widths: tuple[int, ...] | None = None
    factors: tuple[float, ...] | None = None
    plain: bool = True
    bypass: bool = True
    calibrate: bool = True
    correct: bool = True
    fairness: Fairness = "equal"
    patience: int | None = 32
    objective: Objective = "tokens"
    ratios: tuple[float, ...] | None = None
    probe_every: int = 32
    probe_share: float = 0.005
    margin: float = 0.02

    @classmethod
    def published(cls, table: CostTable) -> "DCutPolicy":
        """The paper's policy: full blocks, four ratios, anchors not counted."""
        return cls(
            table=table,
            plain=False,
            bypass=False,
            calibrate=False,
            correct=False,
            patience=None,
            objective="paper",
            ratios=PAPER_RATIOS,
        )

    def __post_init__(self) -> None:
        if self.ratios is not None and (self.widths or self.factors or self.plain):
            raise ValueError(
                f"ratios are shares of a full block and leave no choice of widths or "
                f"tiers, nor plain steps; found widths {self.widths}, factors "
                f"{self.factors} and plain {self.plain}"
            )
        if self.ratios is not None and self.bypass and max(self.ratios) < 1:
            raise ValueError(
                f"without a ratio of 1 no tier holds whole blocks, which steps without "
                f"a plan verify; set bypass=False, found ratios {self.ratios}"
            )
        if self.objective == "paper" and (self.plain or self.bypass):
            raise ValueError(
                "the paper's objective leaves anchors out, so steps without a plan "
                "cannot be weighed against it; set plain=False and bypass=False"
            )
        choice = self.widths is None or len(set(self.widths)) > 1
        if self.objective == "paper" and self.ratios is None and choice:
            raise ValueError(
                "the paper's objective knows no choice of widths; give it one, or "
                "start from DCutPolicy.published()"
            )
        if self.objective not in get_args(Objective):
            raise ValueError(
                f"objective {self.objective!r} is unknown; choose one of "
                f"{get_args(Objective)}"
            )
        if self.fairness not in get_args(Fairness):
            raise ValueError(
                f"fairness {self.fairness!r} is unknown; choose one of "
                f"{get_args(Fairness)}"
            )
        if self.patience is not None and self.patience < 1:
            raise ValueError(
                f"patience is at least 1 step, or None; found {self.patience}"
            )

    def ladder(self, shapes: StepShapes) -> tuple[int, ...]:
        """Draft widths, as far as this drafter's block goes."""
        most = shapes.width - 1
        if most < 1:
            raise ValueError(f"{type(self).__name__} needs a drafter; found none")
        if self.ratios is not None:
            return (most,)
        if self.widths is None:
            return tuple(sorted({min(w, most) for w in WIDTHS}))
        beyond = [w for w in self.widths if not 1 <= w <= most]
        if beyond:
            raise ValueError(
                f"draft widths {beyond} are outside 1..{most}, what this drafter's "
                f"block holds"
            )
        return tuple(sorted(set(self.widths)))

    def tiers(self, shapes: StepShapes) -> tuple[int, ...]:
        """Rows of each tier, every width's full block included; on a mesh, of a shard.

        With ratios, one tier per ratio.
        """
        B, W = shapes.own_slots, shapes.width
        if self.ratios is not None:
            parts = zip(*ratio_fractions(self.ratios), strict=True)
            return tuple(max(B, -(-B * W * over // under)) for over, under in parts)
        factors = self.factors
        if factors is None:
            factors = tuple(f for f in TIER_FACTORS if f <= W)
        return tier_rows(B, W, (*factors, *(w + 1 for w in self.ladder(shapes))))

    def offered(self, shapes: StepShapes, width: int) -> tuple[int, ...]:
        """Rows of the tiers that a step of `width` drafts can take."""
        tiers, B = self.tiers(shapes), shapes.own_slots
        if self.ratios is not None:
            return tiers
        full = B * (width + 1)
        least = 0.0 if self.factors is not None else LEAST_SHARE * full
        return tuple(r for r in tiers if r == B or least <= r <= full)

    def plan_key(self, shapes: StepShapes) -> PlanKey:
        return PlanKey(
            rows_R=self.tiers(shapes),
            widths=self.ladder(shapes),
            objective=self.objective,
            ratios=self.ratios,
            backend=shapes.backends.budget_topk,
            calibrated=self.calibrate,
            patient=self.patience is not None,
            shards=shapes.shards,
        )

    def layout(self, shapes: StepShapes, width: int, rows: int) -> Layout:
        """The executable of a tier: the plain fixed-width one where all is verified."""
        return layout(shapes.own_slots, rows, width + 1)

    def layouts(self, shapes: StepShapes) -> list[Layout]:
        """Every executable that a step can ask for."""
        wanted = {
            self.layout(shapes, width, rows)
            for width in self.ladder(shapes)
            for rows in self.offered(shapes, width)
        }
        wanted.update(plain_layouts(shapes) if self.plain else [])
        return sorted(wanted, key=lambda lay: (lay.rows, lay.width))

    def shared(self, shapes: StepShapes) -> list[Layout]:
        """Layouts that a chunk of a prompt may go along with: the narrowest width's.

        Beside so many rows further drafts are the last that pay, and each layout is an
        executable per chunk. With `ratios` there are none.
        """
        if not shapes.chunks or self.ratios is not None:
            return []
        narrowest = self.ladder(shapes)[0]
        offered = self.offered(shapes, narrowest)
        wanted = {self.layout(shapes, narrowest, rows) for rows in offered}
        return sorted(wanted | {anchors_only(shapes)}, key=lambda lay: lay.rows)

    def measured(self, shapes: StepShapes, context: float) -> dict[Work, float]:
        """Time of every piece of work that a step can be made of, ms.

        Raises:
          CostError: for one that was not measured.
        """
        B, table = shapes.slots, self.table
        found = {PLAN_WORK: table.plan_ms(B)}
        for steps in CATCH_UPS:
            found[catch_up_work(steps)] = table.catch_up_ms(B, steps)
        for width in self.ladder(shapes):
            found[draft_work(width)] = table.draft_ms(B, width, context)
        for lay in (*self.layouts(shapes), *self.shared(shapes)):
            ms = table.verify_ms(B, lay.rows, lay.width, context)
            found[verify_work(lay)] = ms
        for lay in self.shared(shapes):
            for chunk in shapes.chunks:
                ms = table.share_ms(B, lay.rows, lay.width, chunk, context)
                found[share_work(lay, chunk)] = ms
        return found

    def beside(
        self, shapes: StepShapes, ms: Mapping[Work, float], chunk: int
    ) -> tuple[dict[Work, float], float]:
        """What decoding adds to steps that take a chunk along, and the chunk's own.

        A prompt has to be run whatever is drafted, so what it adds to a plain step is
        no reason to draft more, or less: the rest is what drafts cost beside it. Both
        together are the step's time. Layouts that take none along cost infinity.
        """
        anchors = anchors_only(shapes)
        own = ms[share_work(anchors, chunk)] - ms[verify_work(anchors)]
        found = dict(ms)
        for lay in self.layouts(shapes):
            found[verify_work(lay)] = np.inf
        for lay in self.shared(shapes):
            # Not below what the layout costs alone, however far measured times may err:
            # a row more costs the more the more rows there are.
            alone = verify_work(lay)
            found[alone] = max(ms[share_work(lay, chunk)] - own, ms[alone])
        return found, own

    def costs(
        self,
        shapes: StepShapes,
        ms: Mapping[Work, float],
        running: int | None = None,
    ) -> StepCosts:
        """What steps cost, from what their work does.

        Infinite where a width is not offered a tier, which no plan then takes. A tier
        that costs more than a wider one loses to it: the wider one can only gain more.

        Args:
          running: see `anchors_only`.
        """
        ladder, tiers = self.ladder(shapes), self.tiers(shapes)
        # Their drafter context comes later, and is theirs to pay for: after a planned
        # step at once, for it will draft again; after plain ones many at a time.
        anchors = anchors_only(shapes)
        planned_MR = np.full((len(ladder), len(tiers)), np.inf)
        full_M = np.full(len(ladder), np.inf)
        for m, width in enumerate(ladder):
            draft = ms[draft_work(width)]
            for r, rows in enumerate(tiers):
                if rows in self.offered(shapes, width):
                    lay = self.layout(shapes, width, rows)
                    verify = ms[verify_work(lay)]
                    if lay == anchors:
                        verify += ms[catch_up_work(CATCH_UPS[0])]
                    planned_MR[m, r] = draft + ms[PLAN_WORK] + verify
            if self.bypass:
                full_M[m] = draft + ms[verify_work(everything(shapes, width))]
        plain = np.inf
        if self.plain:
            alone = anchors_only(shapes, running)
            plain = ms[verify_work(alone)] + ms[catch_up_work(ROOM)] / ROOM
        return StepCosts(plain, planned_MR, full_M, self.ratios is None)

    def covered(self, shapes: StepShapes) -> bool:
        """Whether the table holds every cost that this policy asks for."""
        try:
            self.measured(shapes, 0.0)
        except CostError:
            return False
        return True

    def chooser(self, shapes: StepShapes) -> WidthChooser:
        widths = (0,) * self.plain + self.ladder(shapes)
        return WidthChooser(
            widths,
            self.probe_every,
            self.probe_share,
            self.margin,
            costs_err=MOST_FACTOR,
        )


def unmeasured() -> DCutPolicy:
    """The default D-Cut policy before its costs are known."""
    return DCutPolicy(CostTable.empty())


def wanted_costs(
    policies: Sequence[DCutPolicy], shapes: StepShapes, contexts: Sequence[int]
) -> Wanted:
    """What a cost table must hold for these policies at one batch size."""
    verifies = {
        (lay.rows, lay.width)
        for policy in policies
        for lay in (*policy.layouts(shapes), anchors_only(shapes))
    }
    return Wanted(
        slots=shapes.slots,
        widths=tuple(sorted({w for p in policies for w in p.ladder(shapes)})),
        verifies=tuple(sorted(verifies)),
        catch_ups=CATCH_UPS,
        contexts=tuple(contexts),
        shares=tuple(
            sorted(
                {
                    (lay.rows, lay.width, chunk)
                    for policy in policies
                    for lay in policy.shared(shapes)
                    for chunk in shapes.chunks
                }
            )
        ),
    )


def profiled() -> tuple[DCutPolicy, ...]:
    """The policies whose steps a cost table holds: the default and the paper's."""
    return unmeasured(), DCutPolicy.published(CostTable.empty())


Policy = ArPolicy | FixedPolicy | DCutPolicy
