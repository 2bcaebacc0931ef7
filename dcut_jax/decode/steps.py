"""One decode step in pieces, as pure functions of static shapes.

`decode.compile` makes executables of them.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dcut_jax.config import DrafterConfig, ModelConfig
from dcut_jax.decode.accept import accept
from dcut_jax.decode.decide import Proposal
from dcut_jax.decode.defer import Deferred, emptied, nothing_deferred, put_off
from dcut_jax.decode.pack import Layout, Packed, layout, pack, unpack
from dcut_jax.decode.propose import propose
from dcut_jax.decode.sample import (
    Likeliest,
    Sampling,
    likeliest,
    log_probability,
    next_token,
    sound,
)
from dcut_jax.decode.shards import Axes, from_shard, gathered, own, own_slot
from dcut_jax.decode.state import (
    BROKEN,
    COUNTS,
    DecodeState,
    Outcome,
    to_wire,
    told_columns,
)
from dcut_jax.decode.synthetic import Synthetic, drawn_drafts
from dcut_jax.decode.verify import prefill_rows, verify_rows
from dcut_jax.mesh import Placement
from dcut_jax.models import dense, drafter
from dcut_jax.models.cache import (
    CHUNK,
    NO_PAGE,
    KvCache,
    copy_pages,
    in_order,
    init_cache,
    write_pages,
    write_rows,
)
from dcut_jax.models.collectives import Dealt
from pallas_kernels.backends import PLAIN, Backends
from pallas_kernels.confidence import head_confidence


@dataclass(frozen=True)
class Models:
    """Target and drafter as the steps need them: configs and parameters.

    `params` holds `target`; with a drafter also `drafter`, and `draft_embed_VE` and
    `draft_head_VE`, the target's tables in the drafter's dtype.

    With `synthetic` drafts are drawn and the drafter's own thrown away, for timing.

    With a `placement` parameters lie on its mesh (`decode.placing.on_mesh` puts them
    there), and the functions below are mapped over it: each device runs them with its
    own parameters and slots.
    """

    target: ModelConfig
    drafter: DrafterConfig | None
    params: dict[str, Any]
    placement: Placement | None = None
    synthetic: Synthetic | None = None

    @property
    def over(self) -> str | None:
        """The mesh axis that parameters are cut over, see `models.collectives`."""
        return self.placement.model_axis if self.placement else None

    def dealt(self, rows: bool) -> Dealt | None:
        """How experts lie, for rows that are dealt as slots are, or are the same."""
        if self.placement is None or self.target.experts is None:
            return None
        axis = self.placement.expert_axis
        return Dealt(axis, self.slot_axes if rows else ()) if axis else None

    @property
    def slot_axes(self) -> tuple[str, ...]:
        """The mesh axes that slots are dealt over, see `decode.shards`."""
        return self.placement.slot_axes if self.placement else ()

    @property
    def shards(self) -> int:
        """Parts that slots are dealt into."""
        return self.placement.shards if self.placement else 1

    def even(self, slots: int) -> int:
        """The next number of slots that can be dealt evenly."""
        return -(-slots // self.shards) * self.shards

    @property
    def taps(self) -> tuple[int, ...]:
        return self.drafter.target_layers if self.drafter else ()

    @property
    def tap_columns(self) -> int:
        """Width of a row's tapped hidden states, side by side."""
        return len(self.taps) * self.target.embed


@flax.struct.dataclass
class Caches:
    """Key/value caches under the same pages; `drafter` is None without one.

    `deferred` is there where slots decode, not for a prompt on its own, which has its
    pages in order.
    """

    target: KvCache
    drafter: KvCache | None
    deferred: Deferred | None = None


@flax.struct.dataclass
class Fresh:
    """Keys and values of a step's rows, and which of them the commit writes where.

    Each of the two models has its own layers, heads and head dimension. A step that
    defers the drafter's leaves hidden states instead of them.
    """

    target_k: Float[Array, "Y T G D"]
    target_v: Float[Array, "Y T G D"]
    drafter_k: Float[Array, "Y T G D"] | None
    drafter_v: Float[Array, "Y T G D"] | None
    tap_TC: Float[Array, "T C"] | None
    slot_T: Int[Array, "T"]
    position_T: Int[Array, "T"]
    counted_T: Bool[Array, "T"]


def init_caches(models: Models, pages: int, dtype: Any, slots: int = 0) -> Caches:
    """Empty caches of `pages` pages, for `slots` that decode, or for a prompt alone."""
    target = init_cache(models.target, pages, dtype)
    if models.drafter is None:
        return Caches(target, None)
    return Caches(
        target=target,
        drafter=init_cache(models.drafter, pages, dtype),
        deferred=nothing_deferred(slots, models.tap_columns) if slots else None,
    )


def draft(
    params: dict[str, Any],
    kv: KvCache,
    state: DecodeState,
    *,
    models: Models,
    width: int,
    columns: int,
    backends: Backends = PLAIN,
) -> Proposal:
    """Asks the drafter for `width` drafts a request, padded to `columns`.

    A padded draft has no confidence (NaN), so no plan can keep it; one planner and one
    verifier per tier then serve every width.
    """
    cfg = models.drafter
    assert cfg is not None
    hidden_BKE = drafter.block_forward(
        params["drafter"],
        cfg,
        params["draft_embed_VE"],
        state.anchor_B,
        state.length_B,
        kv,
        state.table_BN,
        width,
        models.over,
        backends.attention,
    )
    best = propose(
        params["drafter"],
        cfg,
        hidden_BKE,
        state.anchor_B,
        params["draft_head_VE"],
        models.over,
        backends,
    )
    if models.synthetic is not None:
        vocab, at_B = models.target.vocab, state.length_B
        best = drawn_drafts(models.synthetic, best, state.anchor_B, at_B, vocab)
    pad = ((0, 0), (0, columns - width))
    proposal = Proposal(
        jnp.pad(best.token, pad), jnp.pad(best.logp, pad, constant_values=jnp.nan)
    )
    return gathered(proposal, models.slot_axes)


def verify(
    params: dict[str, Any],
    kv: KvCache,
    state: DecodeState,
    token_BK: Array,
    keep_B: Array,
    *,
    models: Models,
    lay: Layout,
    wire_width: int,
    logprobs: int = 0,
    backends: Backends = PLAIN,
) -> tuple[Array, DecodeState, Fresh]:
    """Checks anchors and kept drafts; the outcome comes in its wire form.

    On a mesh `token_BK`, `keep_B` and the outcome are of all slots, the rest of those
    of the shard, which has a layout of its own rows.
    """
    asked = ask(state, token_BK, keep_B, models, lay)
    rows = verify_rows(
        params["target"],
        models.target,
        kv,
        state.table_BN,
        asked.token_T,
        state.length_B,
        asked.packed,
        lay,
        models.taps,
        models.over,
        models.dealt(rows=True),
        backends,
    )
    return settle(
        params,
        state,
        asked,
        rows,
        models=models,
        lay=lay,
        wire_width=wire_width,
        logprobs=logprobs,
        backends=backends,
    )


class Asked(NamedTuple):
    """What a shard's slots are to have verified, and its rows."""

    token_BK: Array
    keep_B: Array
    packed: Packed
    token_T: Array


def ask(
    state: DecodeState, token_BK: Array, keep_B: Array, models: Models, lay: Layout
) -> Asked:
    """Packs anchors and kept drafts, of all slots, into the rows of a layout."""
    token_BK = own(token_BK, lay.slots, models.slot_axes)
    keep_B = own(keep_B, lay.slots, models.slot_axes)
    packed = pack(keep_B, state.active_B, lay.rows)
    block_BW = jnp.concatenate([state.anchor_B[:, None], token_BK], axis=1)
    token_T = block_BW[packed.owner_T, packed.offset_T]
    return Asked(token_BK, keep_B, packed, token_T)


def settle(
    params: dict[str, Any],
    state: DecodeState,
    asked: Asked,
    rows: dense.Rows,
    *,
    models: Models,
    lay: Layout,
    wire_width: int,
    logprobs: int,
    backends: Backends,
) -> tuple[Array, DecodeState, Fresh]:
    """What follows from the target's pass over what was asked; see `verify`."""
    token_BK, keep_B, packed, _ = asked
    chosen = choose(
        params,
        rows.hidden,
        None
        if state.sampling is None
        else jax.tree.map(lambda x: x[packed.owner_T], state.sampling),
        state.length_B[packed.owner_T] + packed.offset_T + 1,
        logprobs,
        models.over,
        backends,
    )
    predicted_BW = unpack(chosen.token, packed, lay.width)
    outcome, after = accept(predicted_BW, token_BK, keep_B, state)
    if rows.crowded is not None:
        crowded_B = jnp.broadcast_to(rows.crowded, outcome.count_B.shape)
        outcome = replace(outcome, crowded_B=crowded_B)
    told = jax.tree.map(
        lambda x: unpack(x, packed, lay.width), (chosen.logp, chosen.likeliest)
    )
    outcome = replace(outcome, logp_BW=told[0], likeliest=told[1])
    wire_BX = gathered(to_wire(widen(outcome, wire_width)), models.slot_axes)
    defer = defers(models, lay.rows, lay.slots)
    fresh = fresh_rows(params, models, rows, packed, state, outcome, defer=defer)
    return wire_BX, after, fresh


def defers(models: Models, rows: int, slots: int) -> bool:
    """Whether a step leaves the drafter's context to a later one: the anchors alone."""
    return models.drafter is not None and rows <= slots


class Chosen(NamedTuple):
    """The target's tokens; `logp` as `log_probability` has it, None if not asked.

    `likeliest` has the most likely ones beside it, None if not asked. A row whose
    logits hold a NaN or +inf, or nothing finite, has the token `BROKEN`.
    """

    token: Array
    logp: Array | None
    likeliest: Likeliest | None = None


def choose(
    params: dict[str, Any],
    hidden_TE: Array,
    sampling: Sampling | None,
    position_T: Array,
    logprobs: int,
    over: str | None,
    backends: Backends,
) -> Chosen:
    """The target's token for each of `position_T`, from the row before it."""
    head_VE = dense.head_VE(params["target"])
    if sampling is None:
        best = head_confidence(
            hidden_TE,
            head_VE,
            backend=backends.confidence,
            chunk=backends.head_chunk,
            over=over,
        )
        token_T = jnp.where(jnp.isfinite(best.peak), best.token, BROKEN)
        return Chosen(token_T, best.logp if logprobs else None)
    logits_TV = dense.logits(hidden_TE, head_VE)
    token_T = next_token(logits_TV, sampling, position_T, over)
    logp_T = log_probability(logits_TV, token_T, over) if logprobs else None
    beside = likeliest(logits_TV, logprobs - 1, over) if logprobs > 1 else None
    token_T = jnp.where(sound(logits_TV, over), token_T, BROKEN)
    return Chosen(token_T, logp_T, beside)


def widen(outcome: Outcome, width: int) -> Outcome:
    """Pads the columns of tokens, so that every step has one wire shape."""
    missing = width - outcome.token_BW.shape[1]

    def wider(x: Array) -> Array:
        return jnp.pad(x, ((0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)))

    token_BW, logp_BW, beside = jax.tree.map(
        wider, (outcome.token_BW, outcome.logp_BW, outcome.likeliest)
    )
    return replace(outcome, token_BW=token_BW, logp_BW=logp_BW, likeliest=beside)


def fresh_rows(
    params: dict[str, Any],
    models: Models,
    rows: dense.Rows,
    packed: Packed,
    state: DecodeState,
    outcome: Outcome,
    *,
    defer: bool,
) -> Fresh:
    """What a step leaves for the caches of target and drafter.

    `state` is the one before the step.
    """
    owner_T = packed.owner_T
    position_T = state.length_B[owner_T] + packed.offset_T
    draft_k, draft_v = None, None
    if not defer:
        draft_k, draft_v = draft_context(params, models, rows.taps, position_T)
    return Fresh(
        target_k=rows.k,
        target_v=rows.v,
        drafter_k=draft_k,
        drafter_v=draft_v,
        tap_TC=rows.taps if defer else None,
        slot_T=owner_T,
        position_T=position_T,
        counted_T=packed.valid_T & (packed.offset_T < outcome.count_B[owner_T]),
    )


def draft_context(
    params: dict[str, Any], models: Models, taps_TC: Array, position_T: Array
) -> tuple[Array, Array] | tuple[None, None]:
    """The drafter's keys and values of target rows; None where there is no drafter."""
    if models.drafter is None:
        return None, None
    weights = params["drafter"]
    ctx_TE = drafter.context(weights, models.drafter, taps_TC, models.over)
    return drafter.context_kv(weights, models.drafter, ctx_TE, position_T)


def commit(caches: Caches, table_BN: Int[Array, "B N"], fresh: Fresh) -> Caches:
    """Writes what committed rows leave; every other entry stays."""
    place = fresh.slot_T, fresh.position_T, fresh.counted_T
    kv, deferred = caches.drafter, caches.deferred
    if kv is not None and fresh.drafter_k is not None:
        assert fresh.drafter_v is not None, "keys without values"
        kv = write_rows(kv, table_BN, fresh.drafter_k, fresh.drafter_v, *place)
    if fresh.tap_TC is not None:
        assert deferred is not None, "caches that no row can be put off in"
        deferred = put_off(deferred, fresh.tap_TC, *place)
    target = caches.target
    return Caches(
        target=write_rows(target, table_BN, fresh.target_k, fresh.target_v, *place),
        drafter=kv,
        deferred=deferred,
    )


def catch_up(
    params: dict[str, Any],
    caches: Caches,
    table_BN: Int[Array, "B N"],
    *,
    models: Models,
    steps: int,
) -> Caches:
    """Projects the rows that wait, at most `steps` of a slot, for the drafter."""
    deferred, kv = caches.deferred, caches.drafter
    assert deferred is not None, "caches that no row can be put off in"
    assert kv is not None, "no drafter to project for"
    slots = deferred.count_B.shape[0]
    tap_TC = deferred.tap_BPC[:, :steps].reshape(slots * steps, -1)
    position_T = deferred.position_BP[:, :steps].reshape(-1)
    waits_BP = jnp.arange(steps)[None] < deferred.count_B[:, None]
    k, v = draft_context(params, models, tap_TC, position_T)
    assert k is not None, "no drafter to project for"
    assert v is not None, "keys without values"
    place = jnp.repeat(jnp.arange(slots), steps), position_T, waits_BP.reshape(-1)
    return Caches(
        target=caches.target,
        drafter=write_rows(kv, table_BN, k, v, *place),
        deferred=replace(deferred, count_B=jnp.zeros_like(deferred.count_B)),
    )


def prefill(
    params: dict[str, Any],
    caches: Caches,
    token_P: Array,
    length: Array,
    count: Array,
    sampling: Sampling | None,
    *,
    models: Models,
    logprobs: int = 0,
    backends: Backends = PLAIN,
) -> tuple[Caches, Chosen]:
    """One chunk of a prompt into caches of its own; the token that follows its rows.

    The first `count` of P rows are real; they stand at `length` onwards. `sampling` is
    of one slot.
    """
    rows = prefill_rows(
        params["target"],
        models.target,
        caches.target,
        token_P,
        length,
        count,
        models.taps,
        models.over,
        models.dealt(rows=False),
        backends,
    )
    return settle_chunk(
        params,
        caches,
        rows,
        length,
        count,
        sampling,
        models=models,
        logprobs=logprobs,
        backends=backends,
    )


def settle_chunk(
    params: dict[str, Any],
    caches: Caches,
    rows: dense.Rows,
    length: Array,
    count: Array,
    sampling: Sampling | None,
    *,
    models: Models,
    logprobs: int,
    backends: Backends,
) -> tuple[Caches, Chosen]:
    """What follows from the target's pass over a chunk; see `prefill`."""
    last_E = rows.hidden[count - 1]
    position_1 = (length + count)[None]
    chosen = choose(
        params, last_E[None], sampling, position_1, logprobs, models.over, backends
    )

    row_P = jnp.arange(rows.hidden.shape[0])
    position_P = length + row_P
    draft_k, draft_v = draft_context(params, models, rows.taps, position_P)
    fresh = Fresh(
        rows.k,
        rows.v,
        draft_k,
        draft_v,
        tap_TC=None,
        slot_T=jnp.zeros_like(row_P),
        position_T=position_P,
        counted_T=row_P < count,
    )
    table_1N = in_order(1, caches.target.k.shape[1])
    return commit(caches, table_1N, fresh), jax.tree.map(lambda x_1: x_1[0], chosen)


def insert(
    state: DecodeState,
    caches: Caches,
    one: Caches,
    slot: Array,
    page_N: Int[Array, "N"],
    anchor: Array,
    length: Array,
    room: Array,
    stop_Z: Array,
    sampling: Sampling | None,
    *,
    slot_axes: Axes = (),
) -> tuple[DecodeState, Caches]:
    """Puts a prefilled request into a slot; `sampling` is of one slot.

    On a mesh `slot` is one of the whole batch; only the shard that has it changes.

    Args:
      page_N: where the pages of `one` are copied to; `NO_PAGE`: nowhere. The table
        stays, which the host writes.
    """
    slot, here = own_slot(slot, state.anchor_B.shape[0], slot_axes)
    if here is not None:
        page_N = jnp.where(here, page_N, NO_PAGE)

    def put(all_B: Array, value: Array | bool) -> Array:
        return all_B.at[slot].set(value, mode="drop")

    state = replace(
        state,
        anchor_B=put(state.anchor_B, anchor),
        length_B=put(state.length_B, length),
        room_B=put(state.room_B, room),
        active_B=put(state.active_B, True),
        stop_BZ=put(state.stop_BZ, stop_Z),
        sampling=jax.tree.map(
            lambda all_B, one_1: put(all_B, one_1[0]), state.sampling, sampling
        ),
    )
    return state, Caches(
        target=write_pages(caches.target, one.target, page_N),
        drafter=None
        if caches.drafter is None or one.drafter is None
        else write_pages(caches.drafter, one.drafter, page_N),
        deferred=None if caches.deferred is None else emptied(caches.deferred, slot),
    )


def lend(
    caches: Caches, shard: Array, page_N: Int[Array, "N"], *, slot_axes: Axes = ()
) -> Caches:
    """Caches for a prompt that begins with what pages of the batch hold, copied.

    Args:
      shard: of a mesh, whose pages these are; all devices get them.
      page_N: the pages; behind them `NO_PAGE`, and anything is there.
    """
    one = jax.tree.map(
        lambda kv: copy_pages(kv, page_N),
        Caches(caches.target, caches.drafter),
        is_leaf=lambda x: isinstance(x, KvCache),
    )
    return from_shard(one, shard, slot_axes)


def release(state: DecodeState, slot: Array, *, slot_axes: Axes = ()) -> DecodeState:
    """Empties a slot whose request was called off; on a mesh one of the whole batch."""
    slot, _ = own_slot(slot, state.anchor_B.shape[0], slot_axes)
    return replace(
        state,
        active_B=state.active_B.at[slot].set(False, mode="drop"),
        length_B=state.length_B.at[slot].set(0, mode="drop"),
    )


@dataclass(frozen=True)
class StepShapes:
    """Static shapes of a batch in flight.

    Attributes:
      slots: requests decoded together, B, of all shards of a mesh.
      positions: cached positions that a slot can have, a multiple of `CHUNK`.
      width: rows of a full block, W; 1 without a drafter.
      stops: stop tokens a request may have.
      sampling: whether requests may draw their tokens.
      logprobs: what is told of a token: 0: nothing; 1: its log-probability; 1 + k: and
        the k likeliest with theirs.
      backends: the forms of the kernels.
      shards: parts that the slots are dealt into; layouts are those of one part.
      crowds: whether rows travel to experts, and so may be too many for one device.
      pages: of the caches, of all shards; 0 stands for as many as all slots can fill.
      chunks: of a prompt, in rows, that a step can take along, in ascending order.
      fewer: rows of plain steps of a shard where fewer run than it has slots, rising.
    """

    slots: int
    positions: int
    width: int
    stops: int
    sampling: bool = False
    logprobs: int = 0
    backends: Backends = PLAIN
    shards: int = 1
    crowds: bool = False
    pages: int = 0
    chunks: tuple[int, ...] = ()
    fewer: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.pages:
            object.__setattr__(self, "pages", self.slots * self.slot_pages)

    @property
    def slot_pages(self) -> int:
        """Pages that a slot can have, N."""
        return self.positions // CHUNK

    @property
    def own_pages(self) -> int:
        """Pages of a shard."""
        return self.pages // self.shards

    @property
    def own_slots(self) -> int:
        """Slots of a shard."""
        return self.slots // self.shards

    @property
    def wire_width(self) -> int:
        """Tokens of a request in an outcome's wire form, which holds a decision too."""
        return max(self.width, 16 - COUNTS)

    @property
    def wire_columns(self) -> int:
        """Columns of an outcome's wire form."""
        per_token = told_columns(self.logprobs)
        return COUNTS + self.wire_width * per_token + self.crowds


def anchors_only(shapes: StepShapes, running: int | None = None) -> Layout:
    """Plain autoregressive decoding.

    Args:
      running: slots in use, of the shard that has most; None: all may be.
    """
    enough = [r for r in shapes.fewer if running is not None and r >= running]
    return layout(shapes.own_slots, min(enough, default=shapes.own_slots), 1)


def plain_layouts(shapes: StepShapes) -> list[Layout]:
    """All that `anchors_only` gives."""
    return [anchors_only(shapes, rows) for rows in shapes.fewer] + [
        anchors_only(shapes)
    ]


def everything(shapes: StepShapes, width: int) -> Layout:
    """All `width` drafts of every request."""
    return layout(shapes.own_slots, shapes.own_slots * (width + 1), width + 1)
