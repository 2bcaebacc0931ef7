"""Drawn drafts: as often right, and as sure, as is stated."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcut_jax.cut.confidence import Top1
from dcut_jax.decode.synthetic import Synthetic, drawn_drafts, levels

VOCAB = 1000
PLAIN = Synthetic("plain", "made up", survival=(0.9, 0.7, 0.4, 0.2))
SPREAD = replace(PLAIN, step_sd=1.3, draft_sd=3.0, shift=-0.5, slope=1.7)
ANCHORS = 20_000


def drawn(synthetic, anchor_B, position_B, drafts=4, logp=0.0):
    shape = (len(anchor_B), drafts)
    own = Top1(jnp.full(shape, 7, jnp.int32), jnp.full(shape, logp, jnp.float32))
    run = jax.jit(drawn_drafts, static_argnums=(0, 4))
    return run(synthetic, own, jnp.asarray(anchor_B), jnp.asarray(position_B), VOCAB)


def many(synthetic, drafts=4):
    """Drafts at many places of many texts, and which of them the target would say."""
    rng = np.random.default_rng(0)
    anchor_B = rng.integers(0, VOCAB, ANCHORS).astype(np.int32)
    position_B = rng.integers(0, 4000, ANCHORS).astype(np.int32)
    found = drawn(synthetic, anchor_B, position_B, drafts)
    ahead = synthetic.advance * np.arange(1, drafts + 1)
    return found, np.asarray(found.token) == (anchor_B[:, None] + ahead) % VOCAB


def test_levels_by_hand():
    """Without spread they are log-odds of one draft's own chance."""
    odds = [0.9 / 0.1, (7 / 9) / (2 / 9), (4 / 7) / (3 / 7), 1.0]
    np.testing.assert_allclose(levels(PLAIN.survival, 0, 0), np.log(odds), atol=1e-9)


@pytest.mark.parametrize("synthetic", [PLAIN, SPREAD], ids=["plain", "spread"])
def test_drafts_survive_as_often_as_stated(synthetic):
    _, right_BK = many(synthetic)
    survived_K = np.logical_and.accumulate(right_BK, axis=1).mean(axis=0)
    want_K = np.array(synthetic.survival)
    error_K = np.sqrt(want_K * (1 - want_K) / ANCHORS)
    assert (np.abs(survived_K - want_K) < 4 * error_K).all()


def test_confidences_are_calibrated_as_stated():
    found, right_BK = many(SPREAD)
    logp = np.asarray(found.logp, np.float64).ravel()
    odds = SPREAD.shift + SPREAD.slope * (logp - np.log(-np.expm1(logp)))
    chance = 1 / (1 + np.exp(-odds))
    order = np.argsort(chance)
    for part in np.array_split(order, 10):
        error = np.sqrt(np.mean(chance[part] * (1 - chance[part])) / len(part))
        gap = abs(right_BK.ravel()[part].mean() - chance[part].mean())
        assert gap < 5 * error + 1e-4
    assert np.quantile(chance, 0.1) < 0.3 < 0.9 < np.quantile(chance, 0.9)


def test_without_spread_all_are_equally_sure():
    found, _ = many(PLAIN)
    own_K = np.exp(np.asarray(found.logp[0]))
    np.testing.assert_allclose(own_K, [0.9, 7 / 9, 4 / 7, 0.5], rtol=1e-5)


def test_luck_belongs_to_a_place_of_a_text():
    """Not to the batch, the row, nor the width; another seed has another."""
    anchor_B = np.arange(64, dtype=np.int32) * 13 % VOCAB
    position_B = np.arange(64, dtype=np.int32) * 7
    wide = drawn(SPREAD, anchor_B, position_B)
    narrow = drawn(SPREAD, anchor_B[::-1], position_B[::-1], drafts=2)
    for a, b in zip(wide, narrow, strict=True):
        np.testing.assert_array_equal(a[::-1, :2], b)
    other = drawn(replace(SPREAD, seed=1), anchor_B, position_B)
    assert (np.asarray(other.logp) != np.asarray(wide.logp)).all()


def test_a_text_meets_the_same_places_again():
    """A step later, what was draft 2 is draft 1, as hard to guess as it was."""
    at = replace(SPREAD, step_sd=0.0)
    first = drawn(at, np.array([5], np.int32), np.array([20], np.int32))
    later = drawn(at, np.array([6], np.int32), np.array([21], np.int32), drafts=3)
    level_K = np.array(levels(at.survival, at.step_sd, at.draft_sd))

    def ease(logp, own_level):
        logp = np.asarray(logp, np.float64)
        return at.shift + at.slope * (logp - np.log(-np.expm1(logp))) - own_level

    np.testing.assert_allclose(
        ease(first.logp[0, 1:], level_K[1:]),
        ease(later.logp[0], level_K[:3]),
        rtol=1e-3,
    )


def test_a_target_may_repeat_its_token():
    found, right_BK = many(replace(PLAIN, advance=0))
    assert 0.8 < right_BK[:, 0].mean() < 1.0
    assert np.asarray(found.token).max() < VOCAB


def test_what_the_drafter_could_not_say_is_left():
    found = drawn(PLAIN, np.array([5], np.int32), np.array([2], np.int32), logp=np.nan)
    assert found.token.tolist() == [[7] * 4]
    assert np.isnan(found.logp).all()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"survival": (0.5, 0.6)}, "never rise"),
        ({"survival": (1.2,)}, "never rise"),
        ({"survival": ()}, "never rise"),
        ({"survival": (0.5, 0.0)}, "above 0"),
        ({"slope": 0.0}, "slope above 0"),
        ({"draft_sd": -1.0}, "step_sd and draft_sd"),
        ({"seed": 2**31}, "32-bit"),
    ],
)
def test_what_cannot_be_is_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        replace(PLAIN, **changed)


def test_more_drafts_than_survivals_are_refused():
    with pytest.raises(ValueError, match="of 4 drafts, 5 are asked for"):
        drawn(PLAIN, np.array([5], np.int32), np.array([2], np.int32), drafts=5)
