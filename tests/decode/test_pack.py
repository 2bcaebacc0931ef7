"""Packing and attention groups: by hand, against NumPy loops, and for every keep."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcut_jax.decode.pack import Layout, groups, layout, pack, tier_rows, unpack

jit_pack = jax.jit(pack, static_argnames="rows")
jit_groups = jax.jit(groups, static_argnames="lay")
jit_unpack = jax.jit(unpack, static_argnames="width")

FACTORS = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)


def packed_of(keep_B, active_B, rows):
    return jax.device_get(
        jit_pack(jnp.asarray(keep_B, jnp.int32), jnp.asarray(active_B, bool), rows)
    )


def rows_of(keep_B, active_B):
    """`(owner, offset)` of every real row, in order."""
    return [
        (b, k)
        for b, (keep, active) in enumerate(zip(keep_B, active_B, strict=True))
        if active
        for k in range(keep + 1)
    ]


def random_step(rng, batch, drafts):
    """Keep counts and active requests, with the corner cases drawn often."""
    keep_B = rng.integers(0, drafts + 1, batch)
    match rng.integers(4):
        case 0:
            keep_B[:] = 0
        case 1:
            keep_B[:] = drafts
    active_B = rng.random(batch) < rng.choice([0.0, 0.5, 0.8, 1.0])
    match rng.integers(4):
        case 0:
            active_B[0] = False
        case 1:
            active_B[-1] = False
    return keep_B, active_B


class TestPack:
    def test_by_hand(self):
        got = packed_of([1, 3, 0], [True, False, True], 5)
        assert got.owner_T[:3].tolist() == [0, 0, 2]
        assert got.offset_T.tolist() == [0, 1, 0, 0, 0]
        assert got.valid_T.tolist() == [True, True, True, False, False]
        assert got.count_B.tolist() == [2, 0, 1]
        assert got.first_B[[0, 2]].tolist() == [0, 2]

    @pytest.mark.parametrize(
        "active_B",
        [[False, True, True], [True, True, False], [False] * 3, [True] * 3],
        ids=["first_empty", "last_empty", "all_empty", "all_full"],
    )
    @pytest.mark.parametrize("keep", [0, 2], ids=["no_drafts", "all_drafts"])
    def test_slots_that_do_not_decode_have_no_rows(self, active_B, keep):
        got = packed_of([keep] * 3, active_B, 9)
        want = rows_of([keep] * 3, active_B)
        assert got.valid_T.tolist() == [True] * len(want) + [False] * (9 - len(want))
        assert [*zip(got.owner_T, got.offset_T, strict=True)][: len(want)] == want

    def test_against_loops(self):
        rng = np.random.default_rng(0)
        for _ in range(200):
            batch, drafts = 5, 4
            keep_B, active_B = random_step(rng, batch, drafts)
            want = rows_of(keep_B, active_B)
            rows = int(rng.choice([12, 25]))
            if len(want) > rows:
                continue
            got = packed_of(keep_B, active_B, rows)
            assert got.valid_T.sum() == len(want)
            for row, (owner, offset) in enumerate(want):
                assert got.valid_T[row]
                assert (got.owner_T[row], got.offset_T[row]) == (owner, offset)
                assert got.first_B[owner] + offset == row
            assert (got.owner_T >= 0).all()
            assert (got.owner_T < batch).all()
            assert not got.offset_T[len(want) :].any()
            assert got.count_B.tolist() == np.where(active_B, keep_B + 1, 0).tolist()

    def test_unpack_brings_rows_back_to_their_requests(self):
        rng = np.random.default_rng(1)
        x_T = rng.normal(size=(20, 3)).astype(np.float32)
        for _ in range(50):
            keep_B, active_B = random_step(rng, 5, 3)
            packed = jit_pack(jnp.asarray(keep_B), jnp.asarray(active_B), 20)
            got_BW = np.asarray(jit_unpack(x_T, packed, 4))
            assert got_BW.shape == (5, 4, 3)
            for row, (owner, offset) in enumerate(rows_of(keep_B, active_B)):
                np.testing.assert_array_equal(got_BW[owner, offset], x_T[row])

    def test_unpack_takes_rows_without_further_axes(self):
        packed = jit_pack(jnp.asarray([1, 0]), jnp.asarray([True, True]), 4)
        got_BW = jit_unpack(jnp.asarray([5, 6, 7, 8]), packed, 2)
        assert got_BW[0].tolist() == [5, 6]
        assert got_BW[1, 0] == 7


def place_rows(keep_B, active_B, lay):
    """Where each real row goes, filled group after group by a loop."""
    place, further = {}, lay.slots
    for b, (keep, active) in enumerate(zip(keep_B, active_B, strict=True)):
        for k in range(keep + 1 if active else 0):
            if k < lay.group:
                place[b, k] = b * lay.group + k
                continue
            if k % lay.group == 0:
                further += 1
            place[b, k] = (further - 1) * lay.group + k % lay.group
    return place


def check_groups(keep_B, active_B, lay):
    """Every real row lies in one place, and that place reads its request's cache."""
    packed = jit_pack(jnp.asarray(keep_B), jnp.asarray(active_B), lay.rows)
    got = jax.device_get(jit_groups(packed, lay))
    want = place_rows(keep_B, active_B, lay)
    places = (lay.slots + lay.overflow) * lay.group
    rows, owner, offset = got.row_IJ.ravel(), got.owner_I, got.offset_IJ.ravel()
    assert owner[: lay.slots].tolist() == list(range(lay.slots))
    assert rows.shape == (places,)
    assert (rows >= 0).all()
    assert (rows < lay.rows).all()
    assert (got.place_T >= 0).all()
    for row, (b, k) in enumerate(rows_of(keep_B, active_B)):
        place = got.place_T[row]
        assert place == want[b, k]
        assert place < places
        assert rows[place] == row
        assert owner[place // lay.group] == b
        assert offset[place] == k
    real = got.place_T[: len(want)]
    assert len(set(real.tolist())) == len(real)


class TestGroups:
    @pytest.mark.parametrize("overflow", [3, 5], ids=["exact", "spare"])
    def test_by_hand(self, overflow):
        # Groups of 2: request 0 has 5 rows and so two further groups, request 2 one.
        lay = Layout(slots=3, rows=12, width=6, group=2, overflow=overflow)
        packed = pack(jnp.asarray([4, 5, 2]), jnp.asarray([True, False, True]), 12)
        got = jax.device_get(groups(packed, lay))
        assert got.place_T[:8].tolist() == [0, 1, 6, 7, 8, 4, 5, 10]
        assert got.owner_I[3:6].tolist() == [0, 0, 2]
        assert got.offset_IJ[3:6].tolist() == [[2, 3], [4, 5], [2, 3]]
        check_groups([4, 5, 2], [True, False, True], lay)

    @pytest.mark.parametrize(
        ("slots", "width"), [(1, 8), (3, 8), (5, 16), (8, 4)], ids=str
    )
    def test_against_loops(self, slots, width):
        rng = np.random.default_rng(slots)
        for rows in tier_rows(slots, width, tuple(f for f in FACTORS if f <= width)):
            lay = layout(slots, rows, width)
            for _ in range(15):
                keep_B, active_B = random_step(rng, slots, width - 1)
                while keep_B.sum() > rows - slots:
                    keep_B[rng.integers(slots)] //= 2
                check_groups(keep_B, active_B, lay)

    @pytest.mark.parametrize("group", [1, 2, 3])
    def test_every_keep_that_a_narrow_group_can_meet(self, group):
        slots, width, rows = 3, 4, 8
        lay = Layout(slots, rows, width, group, (rows - slots) // group)
        active_B = [True] * slots
        for keep_B in itertools.product(range(width), repeat=slots):
            if sum(keep_B) <= rows - slots:
                check_groups(np.array(keep_B), active_B, lay)


class TestLayout:
    @pytest.mark.parametrize("slots", [1, 2, 3, 4])
    @pytest.mark.parametrize("width", [1, 2, 4, 6])
    def test_groups_are_enough_for_every_keep(self, slots, width):
        keeps_XB = np.array([*itertools.product(range(width), repeat=slots)])
        total_X = keeps_XB.sum(1)
        for rows in range(slots, slots * width + 1):
            lay = layout(slots, rows, width)
            fits_XB = keeps_XB[total_X <= rows - slots]
            further_X = (fits_XB // lay.group).sum(1)  # ceil((keep + 1) / J) - 1
            assert further_X.max() <= lay.overflow
            assert (fits_XB < lay.width).all()

    def test_large_batches_at_their_worst(self):
        # The most further groups: as many requests as possible at a multiple of J.
        for slots, width, factor in itertools.product(
            [8, 32, 64], [4, 8, 16], [1.0, 1.5, 2.0, 3.0, 4.0]
        ):
            lay = layout(slots, int(slots * factor), width)
            spare = lay.rows - lay.slots
            for each in range(lay.group, width, lay.group):
                requests = min(slots, spare // each)
                assert requests * (each // lay.group) <= lay.overflow

    def test_anchors_alone_need_one_row_each(self):
        assert layout(4, 4, 8) == Layout(4, 4, 1, 1, 0)

    def test_all_rows_need_no_further_group(self):
        assert layout(4, 32, 8) == Layout(4, 32, 8, 8, 0)

    def test_a_request_is_never_wider_than_the_tier_allows(self):
        assert layout(4, 6, 8).width == 3

    def test_it_is_the_cheapest_grouping(self):
        # Groups of 3 by hand: 8 * 3 places, and 5 gathered groups of 3 + 6.
        lay = layout(8, 24, 16)
        assert (lay.group, lay.overflow) == (3, 5)


class TestTierRows:
    def test_factors_are_rows_per_request(self):
        assert tier_rows(4, 8, (1.0, 1.5, 4.0)) == (4, 6, 16, 32)

    def test_fractions_round_up_and_duplicates_go(self):
        assert tier_rows(1, 3, (1.0, 1.5, 2.0)) == (1, 2, 3)

    def test_ends_are_always_there(self):
        assert tier_rows(5, 2, ()) == (5, 10)
        assert tier_rows(5, 1, ()) == (5,)

    @pytest.mark.parametrize("factor", [0.5, 8.5])
    def test_a_factor_out_of_range_is_refused(self, factor):
        with pytest.raises(ValueError, match=rf"1 to 8 here; found \[{factor}\]"):
            tier_rows(4, 8, (1.0, factor))
