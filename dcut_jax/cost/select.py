"""Which costs to plan by: measured here, or else computed from peak rates.

The better is taken, in this order:

1. a table that was measured under exactly this fingerprint and holds all that is asked;
2. the roofline of the device kind, fitted to such a table where it holds other batch
   sizes alone;
3. the roofline as it is.

Which it was is in the table's `source`. Costs that are computed are corrected while
decoding like measured ones (`cost.online`). A device kind of which no peak rates are
published has measured costs or none.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dcut_jax.cost.devices import Device, find_device
from dcut_jax.cost.experts import EVEN, fit_concentration
from dcut_jax.cost.mesh import mesh_shape
from dcut_jax.cost.roofline import Fit, Roofline, fit
from dcut_jax.cost.shapes import DrafterShape, ModelShape
from dcut_jax.cost.table import CostTable, Fingerprint, Source


@dataclass(frozen=True)
class Wanted:
    """The costs that a batch size is planned by.

    Attributes:
      slots: the batch size, of all shards of a mesh.
      widths: draft widths.
      verifies: rows of a step on one shard, and the most of one request.
      catch_ups: plain steps that are caught up with at once.
      contexts: cached positions that costs are given at.
      shares: rows, the most of one request, and rows of a prompt beside them.
    """

    slots: int
    widths: tuple[int, ...]
    verifies: tuple[tuple[int, int], ...]
    catch_ups: tuple[int, ...]
    contexts: tuple[int, ...]
    shares: tuple[tuple[int, int, int], ...] = ()


def select(
    here: Fingerprint,
    wanted: Wanted,
    target: ModelShape,
    drafter: DrafterShape | None,
    *,
    stored: CostTable | None = None,
    device: Device | None = None,
) -> CostTable:
    """Costs for where the program runs; see this module for the order of choice.

    Args:
      here: mesh, strategy, device kind, models, dtypes and versions.
      stored: a table of earlier measurements. One of another fingerprint is refused.
      device: rates to compute with; None: those published of `here.device_kind`. On a
        CPU: `cost.host.measure_host()`.

    Raises:
      CostError: `stored` was measured elsewhere; or nothing was measured here, and
        nothing can be computed for want of peak rates.
      ConfigError: nor since the mesh does not divide the models.
    """
    if stored is not None:
        stored.require(here)
        if stored.source == "measured" and covers(stored, wanted):
            return stored
    device = device or find_device(here.device_kind)
    model = Roofline(
        device,
        mesh_shape(here.mesh, here.strategy),
        target,
        drafter,
        dtype=here.dtype,
        draft_dtype=here.draft_dtype or here.dtype,
        cache_dtype=here.cache_dtype,
    )
    if stored is None or stored.source != "measured":
        return roofline_table(model, here, wanted)
    model = replace(model, concentration=_routing(model, stored))
    return fitted_table(model, stored, wanted)


def covers(table: CostTable, wanted: Wanted) -> bool:
    """Whether a table holds every cost that is wanted, at some context."""
    B = wanted.slots
    drafts, verifies, shares = (
        {key[:-1] for key in kind} for kind in (table.draft, table.verify, table.share)
    )
    return (
        {(B, width) for width in wanted.widths} <= drafts
        and {(B, *rows) for rows in wanted.verifies} <= verifies
        and {(B, *rows) for rows in wanted.shares} <= shares
        and {(B, steps) for steps in wanted.catch_ups} <= table.catch_up.keys()
        and (not wanted.widths or (B,) in table.plan)
    )


Cells = dict[str, dict[tuple[int, ...], float]]


def roofline_table(model: Roofline, here: Fingerprint, wanted: Wanted) -> CostTable:
    """A table of computed costs; a sample of each."""
    return _table(here, _computed(model, wanted), "roofline")


def fitted_table(model: Roofline, stored: CostTable, wanted: Wanted) -> CostTable:
    """A table of computed costs, each kind fitted to those that were measured."""
    cells = _computed(model, wanted)
    for kind, by_key in cells.items():
        # Steps with a chunk beside miss the roofline as those without do.
        like = "verify" if kind == "share" and not stored.share else kind
        measured = getattr(stored, like)
        fitted = _fit(model, like, measured) if measured else Fit(0.0, 1.0)
        cells[kind] = {key: fitted.ms(ms) for key, ms in by_key.items()}
    return _table(stored.fingerprint, cells, "fitted roofline")


def _table(here: Fingerprint, cells: Cells, source: Source) -> CostTable:
    samples = {
        kind: {key: (ms,) for key, ms in by_key.items()}
        for kind, by_key in cells.items()
    }
    return CostTable(
        here,
        samples["draft"],
        samples["verify"],
        samples["plan"],
        samples["catch_up"],
        source=source,
        share=samples["share"],
    )


def _fit(
    model: Roofline, kind: str, measured: Mapping[tuple[int, ...], Sequence[float]]
) -> Fit:
    computed = [_cell_ms(model, kind, key) for key in measured]
    found = [float(np.median(samples)) for samples in measured.values()]
    if kind == "plan" and len(computed) == 1:
        # One batch size says nothing of the slope, and hardly any of it is arithmetic.
        return Fit(max(found[0] - computed[0], 0.0), 1.0)
    return fit(computed, found)


def _computed(model: Roofline, wanted: Wanted) -> Cells:
    B = wanted.slots
    keys: dict[str, Iterable[tuple[int, ...]]] = {
        "draft": ((B, w, c) for w in wanted.widths for c in wanted.contexts),
        "verify": ((B, *v, c) for v in wanted.verifies for c in wanted.contexts),
        "plan": [(B,)] if wanted.widths else [],
        "catch_up": ((B, steps) for steps in wanted.catch_ups),
        "share": ((B, *s, c) for s in wanted.shares for c in wanted.contexts),
    }
    return {
        kind: {key: _cell_ms(model, kind, key) for key in some}
        for kind, some in keys.items()
    }


def _cell_ms(model: Roofline, kind: str, key: tuple[int, ...]) -> float:
    """The computed time of a table's cell."""
    slots = key[0]
    if kind == "draft":
        return model.draft_ms(slots, key[1], key[2])
    if kind == "verify":
        rows = key[1] * model.mesh.shards  # a table's are those of a shard
        # A step of anchors alone leaves the drafter's context to a catch-up. Where it
        # has fewer rows than there are slots, the others are empty.
        features = rows > slots
        return model.verify_ms(min(slots, rows), rows, key[3], features=features)
    if kind == "share":
        rows = key[1] * model.mesh.shards
        return model.verify_ms(slots, rows, key[4], beside=key[3])
    if kind == "plan":
        return model.ms(model.plan(slots))
    return model.ms(model.catch_up(slots, key[1]))


def _routing(model: Roofline, stored: CostTable) -> float:
    """How unevenly rows were routed, where the measured steps tell."""
    target, shards = model.target, model.mesh.expert  # that share a set of experts
    seen = [
        (float(key[1] * shards), float(np.median(counts)))
        for key, counts in stored.experts.items()
        if key[1] * shards > 1
    ]
    if not target.experts or not seen:
        return EVEN
    return fit_concentration(target.experts, target.top_k, seen)
