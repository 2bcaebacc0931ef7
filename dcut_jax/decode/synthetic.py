"""Drafts that agree with the target as often as one says, for timing without weights.

A target of random weights can be made to count: after token `v` it says `v + advance`
(`engine.synthetic` sees to that). So the device knows the target's text in advance, and
a draft is right or wrong by a draw, with whatever probability is wanted. The drafter's
own pass is still run, and its own drafts are thrown away last; so a step takes what a
step with that drafter takes. Verification is the ordinary one, and the text that comes
out is the target's whatever is drafted.

The log-odds of the chance that draft `k` is right, once those before it are, are

    level_k + step_sd * z + draft_sd * z'

with one standard normal z for each request and anchor and one z' for each position of
a text, as in `simulate.Acceptance`. The levels are such that all the first `k` drafts
are right as often as stated.
"""

import math
from dataclasses import dataclass
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from dcut_jax.cut.confidence import Top1

MOST_ODDS = 60.0  # log-odds of what is as good as certain
_NODES = np.linspace(-8.0, 8.0, 161)  # of a normal distribution
_BISECTIONS = 60


@dataclass(frozen=True)
class Synthetic:
    """How often drafts are right, and how sure the drafter is of them.

    Attributes:
      name, source: for people: of these numbers, and where they are from.
      survival: chance that the first `k` drafts are all right, for `k = 1..K`.
      step_sd, draft_sd: spread of the log-odds from anchor to anchor, and from one
        position of a text to another. With 0 and 0 all drafts `k` are equally likely.
      shift, slope: of the calibration: for every draft, in logs of odds,
        `right = shift + slope * confidence`. 0 and 1: a confidence is the chance.
      seed: of the draws.
      advance: what is added to a token, modulo the vocabulary, to get the next one of
        the target's text.
    """

    name: str
    source: str
    survival: tuple[float, ...]
    step_sd: float = 0.0
    draft_sd: float = 0.0
    shift: float = 0.0
    slope: float = 1.0
    seed: int = 0
    advance: int = 1

    def __post_init__(self) -> None:
        falls = all(
            a >= b for a, b in zip((1.0, *self.survival), self.survival, strict=False)
        )
        for what, fits in (
            ("survival: numbers in (0, 1] that never rise", falls and self.survival),
            ("survival above 0", all(s > 0 for s in self.survival)),
            ("step_sd and draft_sd in 0..20", _within(self.step_sd, self.draft_sd)),
            ("slope above 0", self.slope > 0),
            ("seed: a 32-bit integer", -(2**31) <= self.seed < 2**31),
        ):
            if not fits:
                raise ValueError(f"{self.name}: expected {what}, found {self}")


def _within(*spreads: float) -> bool:
    return all(0 <= sd <= 20 for sd in spreads)


@cache
def levels(
    survival: tuple[float, ...], step_sd: float, draft_sd: float
) -> tuple[float, ...]:
    """Levels at which drafts survive as often as stated, found one after another."""
    density = np.exp(-(_NODES**2) / 2)
    density /= density.sum()

    def chance(level: float) -> np.ndarray:
        """Of a right draft, by z of its anchor."""
        odds = level + step_sd * _NODES[:, None] + draft_sd * _NODES
        return (1 / (1 + np.exp(-odds))) @ density

    found, reached = [], density
    for wanted in survival:
        low, high = -MOST_ODDS, MOST_ODDS
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            enough = reached @ chance(middle) >= wanted
            low, high = (low, middle) if enough else (middle, high)
        found.append(low)
        reached = reached * chance(low)
    return tuple(found)


def drawn_drafts(
    synthetic: Synthetic,
    own: Top1,
    anchor_B: Int[Array, "B"],
    position_B: Int[Array, "B"],
    vocab: int,
) -> Top1:
    """Drawn drafts and confidences in the place of the drafter's own, `[B, K]`.

    What is drawn for a position of a text depends on the seed, the text and the
    position; for an anchor likewise. It is the same in a batch of any size and at any
    width, so arms of a bench meet the same luck.

    Args:
      own: of the drafter; only where its confidence is NaN is it left, which also
        keeps compilers from leaving the drafter's pass out.
      anchor_B: the last token of each text.
      position_B: where it stands.

    Raises:
      ValueError: more drafts are asked for than there are survivals.
    """
    K = own.token.shape[1]
    if K > len(synthetic.survival):
        raise ValueError(
            f"{synthetic.name} states the survival of {len(synthetic.survival)} "
            f"drafts, {K} are asked for; add to its list"
        )
    shape = synthetic.survival, synthetic.step_sd, synthetic.draft_sd
    level_1K = jnp.asarray(levels(*shape)[:K], jnp.float32)[None]
    # The same all along a text that counts, and another in most others.
    text_B = (anchor_B - synthetic.advance * position_B) % vocab
    position_BW = position_B[:, None] + jnp.arange(K + 1)[None]
    step_BW, draft_BW, luck_BW = _draws(synthetic.seed, text_B, position_BW)
    odds_BK = level_1K + synthetic.step_sd * step_BW[:, :1]
    odds_BK = odds_BK + synthetic.draft_sd * draft_BW[:, 1:]
    right_BK = luck_BW[:, 1:] < jax.nn.sigmoid(odds_BK)

    ahead_1K = jnp.arange(1, K + 1)[None]
    true_BK = (anchor_B[:, None] + synthetic.advance * ahead_1K) % vocab
    token_BK = jnp.where(right_BK, true_BK, (true_BK + 1) % vocab)
    logp_BK = jax.nn.log_sigmoid((odds_BK - synthetic.shift) / synthetic.slope)
    lost_BK = jnp.isnan(own.logp)
    return Top1(
        jnp.where(lost_BK, own.token, token_BK),
        jnp.where(lost_BK, own.logp, logp_BK),
    )


def _draws(
    seed: int, text_B: Array, position_BW: Array
) -> tuple[Float[Array, "B W"], Float[Array, "B W"], Float[Array, "B W"]]:
    """Two normal numbers and a uniform one for each position of each text."""
    place_BW = _mixed(_mixed(text_B[:, None]) ^ position_BW.astype(jnp.uint32))
    step_BW, draft_BW, luck_BW = (
        _uniform(place_BW ^ _mixed(jnp.uint32(seed % 2**32) + jnp.uint32(stream)))
        for stream in (0, 1, 2)
    )
    return _normal(step_BW), _normal(draft_BW), luck_BW


def _mixed(x: Array) -> Array:
    """Bits of an integer so mixed that any change of it changes half of them.

    The finaliser of MurmurHash3 (Austin Appleby, public domain). `jax.random` would do
    the same in a hundred times as many operations, in a step that is to be timed.
    """
    x = x.astype(jnp.uint32) + jnp.uint32(0x9E3779B9)
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _uniform(bits: Array) -> Float[Array, "..."]:
    """In the middle of one of 2**23 equal parts of 0..1, so neither end."""
    parts = (_mixed(bits) >> 9).astype(jnp.float32)
    return (parts + 0.5) * 2.0**-23


def _normal(uniform: Array) -> Float[Array, "..."]:
    return math.sqrt(2) * lax.erf_inv(2 * uniform - 1)
