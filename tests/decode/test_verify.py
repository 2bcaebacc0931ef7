"""Packed verification and prefill against whole sequences run without a cache."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from dcut_jax.config import DrafterConfig, ModelConfig, RopeConfig
from dcut_jax.decode import steps as S
from dcut_jax.decode.pack import Layout, layout, pack
from dcut_jax.decode.state import NO_STOP, DecodeState, from_wire
from dcut_jax.decode.verify import prefill_rows, verify_rows
from dcut_jax.models import dense, drafter
from dcut_jax.models.cache import in_order, init_cache, pages_for, write_rows
from dcut_jax.models.params import init

TARGET = ModelConfig(
    vocab=40,
    embed=32,
    mlp=48,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    rope=RopeConfig(10000.0),
    norm_eps=1e-5,
    max_position=512,
    tied=False,
)
DRAFTER = DrafterConfig(
    vocab=40,
    embed=32,
    mlp=48,
    layers=1,
    heads=4,
    kv_heads=2,
    head_dim=8,
    rope=RopeConfig(10000.0),
    norm_eps=1e-5,
    block=8,
    mask_token=39,
    target_layers=(0, 1),
    target_depth=2,
    layer_types=("full_attention",),
    causal=(False,),
)
B, WIDTH, POSITIONS = 4, 6, 256
LENGTHS = (0, 127, 129, 30)
# Pages of the slots, in no order, and two that nobody has.
PAGES = B * pages_for(POSITIONS) + 2
TABLE = np.random.default_rng(3).permutation(PAGES)[2:].reshape(B, -1).astype(np.int32)
TAPS = (0, 1)


@pytest.fixture(scope="module")
def models():
    keys = jax.random.split(jax.random.key(0))
    target = init(dense.specs(TARGET), keys[0], jnp.dtype("float32"))
    weights = {
        "target": target,
        "drafter": init(drafter.specs(DRAFTER), keys[1], jnp.dtype("float32")),
        "draft_embed_VE": target["embed_VE"],
        "draft_head_VE": dense.head_VE(target),
    }
    return S.Models(TARGET, DRAFTER, weights)


@jax.jit
def run_whole(params, token_BS):
    """Every position of every slot in one pass, and the token after each."""
    valid_BS = jnp.ones(token_BS.shape, bool)
    rows = dense.forward_sequences(params, TARGET, token_BS, valid_BS, TAPS)
    return rows, dense.logits(rows.hidden, dense.head_VE(params)).argmax(-1)


@pytest.fixture(scope="module")
def token_BS(models):
    """What each slot holds: its cached positions, the anchor, and drafts after it.

    Slots 1 and 2 draft right three times, so that verifying accepts something.
    """
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, TARGET.vocab, (B, max(LENGTHS) + WIDTH)).astype(np.int32)
    for ahead in range(3):
        _, next_BS = run_whole(models.params["target"], tokens)
        for b in (1, 2):
            at = LENGTHS[b] + ahead
            tokens[b, at + 1] = next_BS[b, at]
    return tokens


@pytest.fixture(scope="module")
def whole(models, token_BS):
    """Every position of every slot, without a cache."""
    return jax.device_get(run_whole(models.params["target"], token_BS)[0])


@pytest.fixture(scope="module")
def filled(models, whole):
    """Caches of both models, holding `LENGTHS` positions and stale ones behind."""
    caches = S.init_caches(models, PAGES, jnp.float32)
    weights, cfg = models.params["drafter"], models.drafter
    ctx = drafter.context(weights, cfg, whole.taps)
    position = jnp.broadcast_to(jnp.arange(ctx.shape[1]), ctx.shape[:2])
    draft_k, draft_v = drafter.context_kv(weights, cfg, ctx, position)
    slot = jnp.broadcast_to(jnp.arange(B)[:, None], position.shape)
    flat = [
        x.reshape(x.shape[0], -1, *x.shape[3:])
        for x in (whole.k, whole.v, draft_k, draft_v)
    ]
    place = (
        slot.ravel(),
        position.ravel(),
        position.ravel() < jnp.asarray(LENGTHS)[slot.ravel()],
    )
    caches = S.commit(
        jax.tree.map(lambda x: x + 5, caches),
        jnp.asarray(TABLE),
        S.Fresh(*flat, None, *place),
    )
    return jax.block_until_ready(caches)


def block_of(token_BS):
    """Anchor and drafts of each slot, `[B, W]`."""
    return np.stack([token_BS[b, n : n + WIDTH] for b, n in enumerate(LENGTHS)])


@partial(jax.jit, static_argnames="lay")
def run_verify(params, kv, block_BW, keep_B, active_B, lay):
    length_B = jnp.asarray(LENGTHS)
    packed = pack(keep_B, active_B, lay.rows)
    token_T = block_BW[packed.owner_T, packed.offset_T]
    table_BN = jnp.asarray(TABLE)
    rows = verify_rows(
        params, TARGET, kv, table_BN, token_T, length_B, packed, lay, TAPS
    )
    return packed, rows


LAYOUTS = {
    "anchors": layout(B, B, 1),
    "everything": layout(B, B * WIDTH, WIDTH),
    "cheapest": layout(B, 14, WIDTH),
    "single_places": Layout(B, 14, WIDTH, 1, 10),
    "pairs": Layout(B, 14, WIDTH, 2, 5),
    "with_padding": Layout(B, 23, WIDTH, 4, 5),
}
KEEPS = [(0, 0, 0, 0), (5, 5, 0, 0), (0, 3, 2, 5), (2, 3, 1, 4), (5, 5, 5, 5)]
ACTIVE = [(True,) * 4, (False, True, True, False), (True, False, False, True)]


@pytest.mark.parametrize("lay", LAYOUTS.values(), ids=LAYOUTS)
def test_each_row_is_what_the_whole_sequence_gives(
    models, token_BS, whole, filled, lay
):
    tried = 0
    for keep_B in KEEPS:
        if sum(keep_B) > lay.rows - B or max(keep_B) >= lay.width:
            continue
        for active_B in ACTIVE:
            packed, rows = jax.device_get(
                run_verify(
                    models.params["target"],
                    filled.target,
                    block_of(token_BS),
                    jnp.asarray(keep_B),
                    jnp.asarray(active_B),
                    lay,
                )
            )
            real = packed.valid_T
            owner, offset = packed.owner_T[real], packed.offset_T[real]
            at = owner, np.array(LENGTHS)[owner] + offset
            for name in ("hidden", "taps"):
                got, want = getattr(rows, name)[real], getattr(whole, name)[at]
                np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
            for name in ("k", "v"):
                got, want = getattr(rows, name), getattr(whole, name)
                np.testing.assert_allclose(
                    got[:, real], want[:, *at], rtol=1e-4, atol=1e-4
                )
            tried += 1
    assert tried


@jax.jit
def run_prefill(params, kv, token_P, done, count):
    rows = prefill_rows(params, TARGET, kv, token_P, done, count, TAPS)
    row_P = jnp.arange(token_P.shape[0])
    place = jnp.zeros_like(row_P), done + row_P, row_P < count
    table_1N = in_order(1, kv.k.shape[1])
    return rows, write_rows(kv, table_1N, rows.k, rows.v, *place)


@pytest.mark.parametrize("chunks", [(32, 32, 32, 32, 32), (128, 32)], ids=str)
@pytest.mark.parametrize("length", [129, 134])
def test_chunks_of_a_prompt_are_what_the_whole_sequence_gives(
    models, token_BS, whole, chunks, length
):
    kv, done = init_cache(TARGET, pages_for(POSITIONS), jnp.float32), 0
    for chunk in chunks:
        count = min(chunk, length - done)
        token_P = np.zeros(chunk, np.int32)
        token_P[:count] = token_BS[2, done : done + count]
        rows, kv = run_prefill(
            models.params["target"], kv, token_P, jnp.asarray(done), jnp.asarray(count)
        )
        for name in ("hidden", "taps"):
            got = getattr(rows, name)[:count]
            want = getattr(whole, name)[2, done : done + count]
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
        done += count
    assert done == length
    assert not kv.k[:, 1, ..., length - 128 :].any()
    assert not kv.v[:, 1, :, length - 128 :].any()


def state_of(anchor_B, active_B):
    return DecodeState(
        anchor_B=jnp.asarray(anchor_B, jnp.int32),
        length_B=jnp.asarray(LENGTHS, jnp.int32),
        room_B=jnp.full(B, 50, jnp.int32),
        active_B=jnp.asarray(active_B),
        stop_BZ=jnp.full((B, 1), NO_STOP, jnp.int32),
        table_BN=jnp.asarray(TABLE),
    )


@pytest.fixture(scope="module")
def step(models):
    """Verify and commit, with more rows and groups than any plan here needs."""

    @jax.jit
    def run(params, caches, state, token_BK, keep_B):
        wire, after, fresh = S.verify(
            params,
            caches.target,
            state,
            token_BK,
            keep_B,
            models=models,
            lay=LAYOUTS["with_padding"],
            wire_width=WIDTH,
        )
        return wire, after, fresh, S.commit(caches, state.table_BN, fresh)

    return run


@st.composite
def steps(draw):
    """Who is in a step, how many drafts of each are kept, and which are spoilt."""
    active_B = draw(st.tuples(*[st.booleans()] * B))
    keep_B = draw(st.tuples(*[st.integers(0, WIDTH - 1)] * B))
    room = LAYOUTS["with_padding"].rows - B
    assume(sum(keep_B) <= room)
    spoilt = st.sets(st.tuples(st.integers(0, B - 1), st.integers(1, WIDTH - 1)))
    return np.array(active_B), np.array(keep_B), draw(spoilt)


@settings(max_examples=80, deadline=None)
@given(steps())
@example((np.array(ACTIVE[0]), np.array([5, 4, 2, 5]), set()))
@example((np.array(ACTIVE[1]), np.array([5, 4, 2, 5]), set()))
def test_a_step_yields_ars_text_and_writes_the_committed_rows_alone(
    models, token_BS, filled, step, drawn
):
    active_B, keep_B, spoilt = drawn
    next_BS = np.asarray(run_whole(models.params["target"], token_BS)[1])
    block_BW = block_of(token_BS)
    for b, w in spoilt:  # a draft that is not what the target says
        block_BW[b, w] = (next_BS[b, LENGTHS[b] + w - 1] + 1) % TARGET.vocab
    state = state_of(block_BW[:, 0], active_B)

    wire, after, fresh, caches = step(
        models.params, filled, state, block_BW[:, 1:], jnp.asarray(keep_B)
    )
    outcome = from_wire(np.asarray(wire))
    count_B = outcome.count_B
    anchor_B = block_BW[:, 0].copy()
    for b, n in enumerate(LENGTHS):
        want = []
        while active_B[b]:
            row = len(want)
            want.append(int(next_BS[b, n + row]))
            if row == keep_B[b] or block_BW[b, row + 1] != want[-1]:
                break
        assert outcome.token_BW[b, : count_B[b]].tolist() == want
        anchor_B[b] = [anchor_B[b], *want][-1]
        if not spoilt and b in (1, 2):  # their first three drafts are right
            assert count_B[b] == (min(3, keep_B[b]) + 1 if active_B[b] else 0)
    np.testing.assert_array_equal(after.length_B, np.array(LENGTHS) + count_B)
    np.testing.assert_array_equal(after.active_B, active_B)
    np.testing.assert_array_equal(after.anchor_B, anchor_B)
    np.testing.assert_array_equal(after.room_B, 50 - count_B)
    np.testing.assert_array_equal(after.stop_BZ, state.stop_BZ)
    np.testing.assert_array_equal(after.table_BN, state.table_BN)
    rows_B = np.where(active_B, keep_B + 1, 0)
    first_B = np.cumsum(rows_B) - rows_B
    for before, now, k, v in (
        (filled.target, caches.target, fresh.target_k, fresh.target_v),
        (filled.drafter, caches.drafter, fresh.drafter_k, fresh.drafter_v),
    ):
        want_k, want_v = np.array(before.k), np.array(before.v)
        for b, n in enumerate(LENGTHS):
            for row in range(count_B[b]):
                packed_row = first_B[b] + row
                page, at = TABLE[b, (n + row) // 128], (n + row) % 128
                want_k[:, page, :, :, at] = k[:, packed_row]
                want_v[:, page, :, at] = v[:, packed_row]
        np.testing.assert_array_equal(now.k, want_k)
        np.testing.assert_array_equal(now.v, want_v)
