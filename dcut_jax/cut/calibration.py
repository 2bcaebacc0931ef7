"""Chances of acceptance from confidences, learned online from what verification shows.

A drafter's confidence is the probability that it gives its own draft. How often the
target agrees is another number, and it depends on the drafter, the position in the
block and the texts. Here each position `k` has a line on log-odds,

    odds(accepted) = shift_k + slope_k * odds(confidence),

a logistic regression fitted while decoding. All of it is pure functions of small
arrays, so that it can live in the executable that plans a step.

**What counts.** Draft `k` has an outcome of its own only where it was verified
(`k <= keep`) and every draft before it was accepted: then the target was asked about
the very text that the drafter had assumed. A verified draft behind a rejected one
shows nothing, and a draft beyond the cut was never looked at. Counting either as
rejected would teach that deep drafts are bad because they are deep. What is left is
fair: whether a draft is verified depends on confidences alone, and whether it is
reached on drafts before it, so given its confidence its outcome is as likely as ever.

**How.** One Newton step a decode step, on sums that forget. A pool gets the labels of
all positions and learns one line, near the identity as long as little is known. Each
position learns how it deviates from the pool, near 0 as long as little is known there.
So deep positions, which see few labels, lean on the pool; and when the texts change,
they move with it at once instead of waiting for labels of their own.
"""

from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

# Evidence of n labels in a step costs a share n / (_MEMORY_LABELS + _MEMORY_STEPS * n)
# of what was known. Many labels a step: a memory of about 40 steps, for a change of
# text shows within those. One label a step: of 100 labels; fewer would be mostly noise.
# No label: nothing is forgotten, for nothing better is known.
_MEMORY_LABELS = 60.0
_MEMORY_STEPS = 40.0

# Labels before which confidences stand for themselves: fewer say less than a drafter
# does, which has been trained to know.
ENOUGH_LABELS = 32

# Log-odds are taken as they are up to here, a confidence of 0.9997, and a quarter of
# what goes beyond, up to a bound that float32 confidences below 1 do not reach. There a
# drafter's odds grow faster than the truth's, and one label would move the whole line;
# a plain clip, though, would make ties of drafts that the drafter tells apart.
_EVEN_ODDS = 8.0
_BEYOND = 0.25
_MOST_ODDS = 17.0

# A label that contradicts its line pulls by at most this much in log-odds. Newton's own
# step has no bound: where 0.99 was expected one rejection says -100.
_REACH = 4.0

# Below this a line would hardly rank, and below 0 it would turn the drafter's order
# within a position around. Few labels can look as if that were right, and a plan that
# prefers the least sure drafts verifies few of those that could correct it.
_LEAST_SLOPE = 0.1


class _Trust(NamedTuple):
    """Precision (1 / variance) of a prior; a label near even odds weighs 1/4."""

    shift: float
    slope: float


# The pool is thought near the identity: shift 0 +- 1, slope 1 +- 0.5.
_AROUND_IDENTITY = _Trust(1.0, 4.0)
# Positions are thought near the pool: +- 0.7 and +- 0.35.
_AROUND_POOL = _Trust(2.0, 8.0)


@flax.struct.dataclass
class Line:
    """`shift + slope * odds`: log-odds of acceptance over those of the confidence."""

    shift: Float32[Array, "*rows"]
    slope: Float32[Array, "*rows"]


@flax.struct.dataclass
class Evidence:
    """Decayed sums over labels: what they say of how a line deviates from its base.

    The log-likelihood of a deviation `v = (shift, slope)` is about
    `-1/2 v' I v + r' v`.

    Attributes:
      labels: how many.
      info_aa, info_ab, info_bb: the matrix I; `a` stands for shift, `b` for slope.
      pull_a, pull_b: the vector r.
    """

    labels: Float32[Array, "*rows"]
    info_aa: Float32[Array, "*rows"]
    info_ab: Float32[Array, "*rows"]
    info_bb: Float32[Array, "*rows"]
    pull_a: Float32[Array, "*rows"]
    pull_b: Float32[Array, "*rows"]


@flax.struct.dataclass
class Calibration:
    """What is known of a drafter's confidences: `[K]` by position, `[]` for the pool.

    Own evidence is about deviations from the pool's line, the pool's about those from
    the identity. The lines follow from both; they are kept so that `calibrate` need not
    solve for them.
    """

    own: Evidence
    pooled: Evidence
    own_line: Line
    pooled_line: Line


def identity(drafts: int) -> Calibration:
    """Nothing learned yet: confidences stand for themselves."""

    def nothing(shape: tuple[int, ...]) -> Evidence:
        # Each its own array, so that a caller may donate the whole.
        return Evidence(*(jnp.zeros(shape, jnp.float32) for _ in range(6)))

    return Calibration(
        own=nothing((drafts,)),
        pooled=nothing(()),
        own_line=_as_it_is((drafts,)),
        pooled_line=_as_it_is(()),
    )


def _as_it_is(shape: tuple[int, ...]) -> Line:
    return Line(jnp.zeros(shape, jnp.float32), jnp.ones(shape, jnp.float32))


def calibrate(cal: Calibration, logp_BK: Float[Array, "B K"]) -> Float32[Array, "B K"]:
    """Log of each draft's chance to be accepted once those before it are, at most 0.

    Args:
      logp_BK: log-confidences as the drafter gave them. NaN stays NaN. A confidence
        of exactly 0 or 1 counts as a very low or very high one, for no drafter knows;
        the result is finite.

    Returns:
      `logp_BK` itself, bit for bit, until there have been `ENOUGH_LABELS`, at whatever
      positions.
      Within a position the order of confidences is kept.
    """
    own = cal.own_line
    log_odds_BK = own.shift[None] + own.slope[None] * odds(logp_BK)
    learned_BK = jax.nn.log_sigmoid(log_odds_BK)
    untaught = cal.pooled.labels < ENOUGH_LABELS
    return jnp.where(untaught, logp_BK.astype(jnp.float32), learned_BK)


def learn(
    cal: Calibration,
    logp_BK: Float[Array, "B K"],
    keep_B: Int[Array, "B"],
    accepted_B: Int[Array, "B"],
) -> Calibration:
    """Takes in one verified step. A step without a label changes nothing.

    Args:
      logp_BK: log-confidences of that step as the drafter gave them, not calibrated.
        A NaN has no label.
      keep_B: drafts of each request that were verified, 0 for an inactive slot.
      accepted_B: length of the accepted prefix of those, at most `keep_B`.
    """
    odds_BK = odds(logp_BK)
    draft_1K = 1 + jnp.arange(logp_BK.shape[1], dtype=jnp.int32)[None]
    reached_BK = draft_1K <= accepted_B[:, None] + 1
    seen_BK = (draft_1K <= keep_B[:, None]) & reached_BK & ~jnp.isnan(odds_BK)
    yes_BK = draft_1K <= accepted_B[:, None]

    def shown(line: Line, base: Line, axis: int | tuple[int, ...]) -> Evidence:
        return _evidence(line, base, odds_BK, yes_BK, seen_BK, axis)

    as_it_is = _as_it_is(())
    own_1K = jax.tree.map(lambda x: x[None], cal.own_line)
    own = _remember(cal.own, shown(own_1K, cal.pooled_line, axis=0))
    pooled = _remember(cal.pooled, shown(cal.pooled_line, as_it_is, axis=(0, 1)))
    pooled_line = _fit(pooled, as_it_is, _AROUND_IDENTITY)
    return Calibration(
        own=own,
        pooled=pooled,
        own_line=_fit(own, pooled_line, _AROUND_POOL),
        pooled_line=pooled_line,
    )


def odds(logp: Float[Array, "*rows"]) -> Float32[Array, "*rows"]:
    """Log-odds of a confidence, compressed where they are extreme. NaN stays NaN."""
    logp = jnp.minimum(logp.astype(jnp.float32), 0)
    # -expm1 is 1 - confidence without the cancellation near 1. Of 0 or 1 the log-odds
    # are infinite; the clip makes them finite.
    plain = jnp.clip(logp - jnp.log(-jnp.expm1(logp)), -_MOST_ODDS, _MOST_ODDS)
    even = jnp.clip(plain, -_EVEN_ODDS, _EVEN_ODDS)
    return even + _BEYOND * (plain - even)


def _evidence(
    line: Line,
    base: Line,
    odds_BK: Float32[Array, "B K"],
    yes_BK: Bool[Array, "B K"],
    seen_BK: Bool[Array, "B K"],
    axis: int | tuple[int, ...],
) -> Evidence:
    """What one step's labels say of deviations from `base`, summed over `axis`.

    The log-likelihood is expanded around `line`, the best one known. Any positive
    weights leave the same fixed point, at which the residuals add up to 0; Newton's
    `p (1 - p)` get there fastest. A label that would pull beyond `_REACH` weighs more
    instead, and so a batch of surprises moves the line by about that.
    """
    x_BK = jnp.where(seen_BK, odds_BK, 0)
    log_odds_BK = line.shift + line.slope * x_BK
    p_BK = jax.nn.sigmoid(log_odds_BK)
    residual_BK = jnp.where(seen_BK, yes_BK.astype(jnp.float32) - p_BK, 0)
    newton_BK = jnp.where(seen_BK, p_BK * (1 - p_BK), 0)
    weight_BK = jnp.maximum(newton_BK, jnp.abs(residual_BK) / _REACH)
    away_BK = log_odds_BK - (base.shift + base.slope * x_BK)
    pull_BK = weight_BK * away_BK + residual_BK

    def total(value_BK: Array) -> Array:
        return jnp.sum(value_BK, axis=axis)

    return Evidence(
        labels=total(seen_BK.astype(jnp.float32)),
        info_aa=total(weight_BK),
        info_ab=total(weight_BK * x_BK),
        info_bb=total(weight_BK * x_BK * x_BK),
        pull_a=total(pull_BK),
        pull_b=total(pull_BK * x_BK),
    )


def _remember(old: Evidence, new: Evidence) -> Evidence:
    """Old evidence fades by as much as the new one's labels are worth."""
    fade = new.labels / (_MEMORY_LABELS + _MEMORY_STEPS * new.labels)
    return jax.tree.map(lambda was, now: (1 - fade) * was + now, old, new)


def _fit(evidence: Evidence, base: Line, trust: _Trust) -> Line:
    """The likeliest line of at least `_LEAST_SLOPE`: a 2 x 2 system, in closed form."""
    e = evidence
    aa = e.info_aa + trust.shift
    # Each term is at least 0 and one above: rounding cannot make the matrix singular.
    determinant = (
        jnp.maximum(e.info_aa * e.info_bb - e.info_ab * e.info_ab, 0)
        + trust.shift * e.info_bb
        + trust.slope * aa
    )
    slope = base.slope + (aa * e.pull_b - e.info_ab * e.pull_a) / determinant
    slope = jnp.maximum(slope, _LEAST_SLOPE)
    # The best shift for this slope, whether or not the bound has moved it.
    shift = base.shift + (e.pull_a - e.info_ab * (slope - base.slope)) / aa
    return Line(shift, slope)


# Fine enough for an AUC; a table and an ECE merge them.
BINS = 50


@flax.struct.dataclass
class Reliability:
    """Predicted and real survivals of verified drafts, in equal bins of the predicted.

    One histogram judges one kind of prediction: keep one for raw survivals and another
    for calibrated ones. It does not forget; start anew for a new report.

    Attributes:
      count_X: verified drafts whose predicted survival lies in the bin.
      predicted_X: sum of their predicted survivals.
      survived_X: how many of them were accepted.
    """

    count_X: Int32[Array, "X"]
    predicted_X: Float32[Array, "X"]
    survived_X: Int32[Array, "X"]


def no_reliability() -> Reliability:
    """Nothing observed."""
    return Reliability(
        count_X=jnp.zeros(BINS, jnp.int32),
        predicted_X=jnp.zeros(BINS, jnp.float32),
        survived_X=jnp.zeros(BINS, jnp.int32),
    )


def observe(
    rel: Reliability,
    survival_BK: Float[Array, "B K"],
    keep_B: Int[Array, "B"],
    accepted_B: Int[Array, "B"],
) -> Reliability:
    """Takes in one verified step.

    Whether a draft survives, that is, it and all before it are accepted, is known of
    every draft that was verified, reached or not. A plan keeps drafts for their scores
    alone, so those of one score are a fair sample of all that had it. That holds for
    the score that the plan went by. Of another, raw survivals beside a plan on
    calibrated ones, a bin shows those of its drafts that the plan liked.

    Args:
      survival_BK: predicted chance, as a probability, that draft k and all before it
        are accepted. A NaN is not counted.
      keep_B, accepted_B: as for `learn`.
    """
    draft_1K = 1 + jnp.arange(survival_BK.shape[1], dtype=jnp.int32)[None]
    known_BK = (draft_1K <= keep_B[:, None]) & ~jnp.isnan(survival_BK)
    survived_BK = known_BK & (draft_1K <= accepted_B[:, None])
    p_BK = jnp.where(known_BK, survival_BK.astype(jnp.float32), 0)
    bin_BK = jnp.clip((p_BK * BINS).astype(jnp.int32), 0, BINS - 1)
    # A product with a one-hot matrix, for adding into bins one by one is slow on
    # accelerators and there depends on the order. Sums of a step are whole below 2**24.
    values = known_BK.astype(jnp.float32), p_BK, survived_BK.astype(jnp.float32)
    value_3N = jnp.stack(values).reshape(3, -1)
    hot_NX = jax.nn.one_hot(bin_BK.ravel(), BINS, dtype=jnp.float32)
    count_X, predicted_X, survived_X = jnp.matmul(
        value_3N, hot_NX, precision=lax.Precision.HIGHEST
    )
    return Reliability(
        count_X=rel.count_X + count_X.astype(jnp.int32),
        predicted_X=rel.predicted_X + predicted_X,
        survived_X=rel.survived_X + survived_X.astype(jnp.int32),
    )


class ReliabilityRow(NamedTuple):
    """One row of a reliability table; the means are NaN where it has no drafts."""

    low: float
    high: float
    drafts: int
    predicted: float  # mean predicted survival
    survived: float  # share that survived


def table(rel: Reliability, rows: int = 10) -> list[ReliabilityRow]:
    """Bins merged to `rows` equal ones. NumPy; give it what `jax.device_get` gave.

    Raises:
      ValueError: `rows` does not divide the bins.
    """
    if rows < 1 or BINS % rows:
        raise ValueError(f"rows must divide the {BINS} bins; found {rows}")

    def merged(sum_X: Array) -> np.ndarray:
        return np.asarray(sum_X, np.float64).reshape(rows, -1).sum(axis=1)

    made = []
    sums = (merged(rel.count_X), merged(rel.predicted_X), merged(rel.survived_X))
    for i, (count, predicted, survived) in enumerate(zip(*sums, strict=True)):
        means = (predicted / count, survived / count) if count else (np.nan, np.nan)
        low, high = i / rows, (i + 1) / rows
        made.append(ReliabilityRow(low, high, int(count), *map(float, means)))
    return made


def ece(rel: Reliability, rows: int = 10) -> float:
    """Expected calibration error: mean distance of predicted from real survival.

    Over the merged bins, each by its count; noise in bins with few drafts adds to it.
    NaN where nothing was observed.
    """
    filled = [row for row in table(rel, rows) if row.drafts]
    total = sum(row.drafts for row in filled)
    gap = sum(row.drafts * abs(row.predicted - row.survived) for row in filled)
    return gap / total if total else float("nan")


def auc(rel: Reliability) -> float:
    """Chance that a draft which survived was given more than one which did not.

    Drafts of one bin are ties and count half. NaN unless there are some of both kinds.
    """
    survived_X = np.asarray(rel.survived_X, np.float64)
    failed_X = np.asarray(rel.count_X, np.float64) - survived_X
    below_X = np.cumsum(failed_X) - failed_X
    pairs = survived_X.sum() * failed_X.sum()
    won = float(survived_X @ (below_X + failed_X / 2))
    return won / float(pairs) if pairs else float("nan")
