"""Acceptance by hand, and against decoding one token at a time."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcut_jax.decode.accept import accept
from dcut_jax.decode.sample import Likeliest
from dcut_jax.decode.state import BROKEN, NO_STOP, DecodeState, from_wire, to_wire
from dcut_jax.decode.steps import widen

accept = jax.jit(accept)

# The target's arg-max after the anchor and after each of three drafts.
PREDICTED = [11, 12, 13, 14]


def state_of(batch, *, room=100, active=True, stop=()):
    full = np.full(batch, 0, np.int32)
    stop_Z = np.array([*stop, NO_STOP], np.int32)
    return DecodeState(
        anchor_B=jnp.asarray(full + 7),
        length_B=jnp.asarray(full + 40),
        room_B=jnp.asarray(full + np.asarray(room, np.int32)),
        active_B=jnp.asarray(np.broadcast_to(active, batch)),
        stop_BZ=jnp.asarray(np.broadcast_to(stop_Z, (batch, len(stop_Z)))),
        table_BN=jnp.asarray(full[:, None]),
    )


def run(draft, keep, **state):
    """One request; its tokens, the outcome's other fields, and the state after."""
    before = state_of(1, **state)
    outcome, after = jax.device_get(
        accept(
            jnp.asarray([PREDICTED]),
            jnp.asarray([draft]),
            jnp.asarray([keep]),
            before,
        )
    )
    tokens = outcome.token_BW[0, : outcome.count_B[0]].tolist()
    return tokens, int(outcome.accepted_B[0]), bool(outcome.finished_B[0]), after


class TestByHand:
    @pytest.mark.parametrize(
        ("draft", "keep", "tokens"),
        [
            ([99, 12, 13], 3, [11]),
            ([11, 99, 13], 3, [11, 12]),
            ([11, 12, 99], 3, [11, 12, 13]),
            ([11, 12, 13], 3, [11, 12, 13, 14]),
            ([11, 12, 13], 0, [11]),
            ([11, 12, 13], 1, [11, 12]),
            ([11, 12, 13], 2, [11, 12, 13]),
            ([11, 99, 13], 1, [11, 12]),
        ],
        ids=[
            "none",
            "one",
            "two",
            "all",
            "all_right_but_none_verified",
            "cut_after_one",
            "cut_after_two",
            "the_wrong_one_was_cut",
        ],
    )
    def test_the_prefix_and_one_more(self, draft, keep, tokens):
        got, accepted, finished, after = run(draft, keep)
        assert got == tokens
        assert accepted == len(tokens) - 1
        assert not finished
        assert after.anchor_B.tolist() == tokens[-1:]
        assert after.length_B.tolist() == [40 + len(tokens)]
        assert after.room_B.tolist() == [100 - len(tokens)]
        assert after.active_B.tolist() == [True]

    @pytest.mark.parametrize(
        ("stop", "draft", "tokens", "finished"),
        [
            ([12], [11, 12, 13], [11, 12], True),
            ([11], [11, 12, 13], [11], True),
            ([14], [11, 12, 13], [11, 12, 13, 14], True),
            ([12], [11, 99, 13], [11, 12], True),
            ([13], [11, 99, 13], [11, 12], False),
            ([14, 12], [11, 12, 13], [11, 12], True),
            ([12, 14], [11, 12, 13], [11, 12], True),
            ([50, 51], [11, 12, 13], [11, 12, 13, 14], False),
            ([7], [11, 12, 13], [11, 12, 13, 14], False),
        ],
        ids=[
            "in_the_middle",
            "first",
            "as_bonus",
            "as_correction",
            "behind_the_accepted_prefix",
            "the_earliest_of_two",
            "the_earliest_of_two_in_any_order",
            "absent",
            "the_anchor_does_not_count",
        ],
    )
    def test_stop_tokens(self, stop, draft, tokens, finished):
        got, _, ended, after = run(draft, 3, stop=stop)
        assert got == tokens
        assert ended == finished
        assert after.active_B.tolist() == [not finished]
        # A slot that ended has no context that others would have to wait for.
        assert after.length_B.tolist() == [0 if finished else 40 + len(tokens)]

    def test_drafts_behind_a_stop_still_count_as_accepted(self):
        _, accepted, _, _ = run([11, 12, 13], 3, stop=[11])
        assert accepted == 3

    @pytest.mark.parametrize("room", [1, 2, 3, 4, 5])
    def test_room(self, room):
        got, _, finished, after = run([11, 12, 13], 3, room=room)
        assert got == PREDICTED[:room]
        assert finished == (room <= 4)
        assert after.room_B.tolist() == [max(room - 4, 0)]
        assert after.anchor_B.tolist() == got[-1:]

    def test_a_stop_at_the_end_of_the_room(self):
        got, _, finished, _ = run([11, 12, 13], 3, room=2, stop=[12])
        assert (got, finished) == ([11, 12], True)

    def test_a_stop_beyond_the_room_is_not_reached(self):
        got, _, finished, _ = run([11, 12, 13], 3, room=2, stop=[13])
        assert (got, finished) == ([11, 12], True)

    def test_inactive_rows_change_nothing(self):
        got, accepted, finished, after = run([11, 12, 13], 3, active=False, stop=[11])
        assert (got, accepted, finished) == ([], 0, False)
        before = jax.device_get(state_of(1, active=False, stop=[11]))
        jax.tree.map(np.testing.assert_array_equal, after, before)

    def test_the_padding_of_stops_matches_nothing(self):
        before = state_of(1)
        assert (np.asarray(before.stop_BZ) == NO_STOP).all()
        outcome, _ = accept(
            jnp.asarray([[0, 1, 2, 3]]),
            jnp.asarray([[0, 1, 2]]),
            jnp.asarray([3]),
            before,
        )
        assert outcome.count_B.tolist() == [4]
        assert outcome.finished_B.tolist() == [False]

    def test_rows_of_a_narrow_step_ignore_wider_drafts(self):
        outcome, _ = accept(
            jnp.asarray([[11, 12]]),
            jnp.asarray([[11, 12, 13]]),
            jnp.asarray([1]),
            state_of(1),
        )
        assert outcome.token_BW[0, : outcome.count_B[0]].tolist() == [11, 12]

    def test_anchors_alone(self):
        outcome, after = accept(
            jnp.asarray([[11], [12]]),
            jnp.zeros((2, 3), int),
            jnp.asarray([3, 0]),
            state_of(2),
        )
        assert outcome.count_B.tolist() == [1, 1]
        assert after.anchor_B.tolist() == [11, 12]


def one_at_a_time(predicted_W, draft_K, keep, room, stop):
    """What a loop over the rows of one request commits."""
    tokens = []
    for row, token in enumerate(predicted_W):
        tokens.append(int(token))
        if token in stop or len(tokens) == room:
            return tokens, True
        if row == keep or row == len(draft_K) or draft_K[row] != token:
            return tokens, False
    raise AssertionError("the last row always ends the loop")


def test_against_a_loop():
    rng = np.random.default_rng(0)
    B, W = 64, 6
    for _ in range(20):
        predicted_BW = rng.integers(0, 8, (B, W))
        right_BK = rng.random((B, W - 1)) < 0.75
        draft_BK = np.where(right_BK, predicted_BW[:, :-1], 9)
        keep_B = rng.integers(0, W, B)
        active_B = rng.random(B) < 0.8
        room_B = rng.integers(1, 10, B)
        stop = rng.integers(0, 12, 2).tolist()
        outcome, after = jax.device_get(
            accept(
                jnp.asarray(predicted_BW, jnp.int32),
                jnp.asarray(draft_BK, jnp.int32),
                jnp.asarray(keep_B, jnp.int32),
                state_of(B, room=room_B, active=active_B, stop=stop),
            )
        )
        for b in range(B):
            got = outcome.token_BW[b, : outcome.count_B[b]].tolist()
            if not active_B[b]:
                assert got == []
                continue
            want, finished = one_at_a_time(
                predicted_BW[b], draft_BK[b], keep_B[b], room_B[b], stop
            )
            assert got == want
            assert outcome.finished_B[b] == finished
            assert after.active_B[b] == (not finished)
            assert after.anchor_B[b] == want[-1]
            assert after.length_B[b] == (0 if finished else 40 + len(want))
            assert after.room_B[b] == room_B[b] - len(want)


@pytest.mark.parametrize(
    ("draft", "tokens"), [([11, 12, 13], [11, 12, BROKEN]), ([11, 99, 13], [11, 12])]
)
def test_a_row_without_a_token_ends_the_request_once_it_is_reached(draft, tokens):
    outcome, after = accept(
        jnp.asarray([[11, 12, BROKEN, 14]]),
        jnp.asarray([draft]),
        jnp.asarray([3]),
        state_of(1),
    )
    reached = BROKEN in tokens
    assert outcome.token_BW[0, : outcome.count_B[0]].tolist() == tokens
    assert bool(outcome.finished_B[0]) == reached
    assert bool(after.active_B[0]) != reached


@pytest.mark.parametrize("logprobs", [0, 1, 3])
def test_the_wire_form_comes_back(logprobs):
    outcome, _ = accept(
        jnp.asarray([PREDICTED] * 2),
        jnp.asarray([[11, 99, 13], [11, 12, 13]]),
        jnp.asarray([3, 3]),
        state_of(2, stop=[13]),
    )
    if logprobs:
        logp_BW = jnp.asarray([[-0.0, -1e-30, -7.25, -np.inf]] * 2, jnp.float32)
        outcome = replace(outcome, logp_BW=logp_BW)
    if logprobs > 1:
        token_BWL = jnp.arange(16, dtype=jnp.int32).reshape(2, 4, 2)
        logp_BWL = -jnp.arange(16, dtype=jnp.float32).reshape(2, 4, 2) / 7
        outcome = replace(outcome, likeliest=Likeliest(token_BWL, logp_BWL))
    wire_BX = to_wire(widen(outcome, 13))
    assert wire_BX.dtype == jnp.int32
    back = from_wire(np.asarray(wire_BX), logprobs)
    assert back.finished_B.dtype == bool
    for name in ("count_B", "accepted_B", "verified_B", "finished_B"):
        np.testing.assert_array_equal(getattr(back, name), getattr(outcome, name))
    assert back.token_BW.shape == (2, 13)
    np.testing.assert_array_equal(back.token_BW[:, :4], outcome.token_BW)
    if logprobs:
        np.testing.assert_array_equal(back.logp_BW[:, :4], outcome.logp_BW)
    else:
        assert back.logp_BW is None
    if logprobs > 1:
        for got, want in zip(back.likeliest_BWL, (token_BWL, logp_BWL), strict=True):
            assert got.shape == (2, 13, 2)
            np.testing.assert_array_equal(got[:, :4], want)
    else:
        assert back.likeliest_BWL is None
