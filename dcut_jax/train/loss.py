"""What a drafter is trained to do: losses of draft slots, and how much each counts.

Sources: cross entropy with decaying weights, DFlash (arXiv 2602.06036); the distance of
distributions, Markov and confidence heads, DSpark (arXiv 2607.05147). The adaptive
weights are D-PACE's, as the public trainers of DFlash drafters define them. Letters
beyond `axes`: N documents, A anchors of each, M words of a shortlist.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from dcut_jax.axes import DATA
from dcut_jax.config import DrafterConfig
from dcut_jax.models import drafter
from dcut_jax.models.layers import project
from dcut_jax.models.params import cast
from dcut_jax.train.blocks import (
    Blocks,
    block_hidden,
    labels,
    previous_tokens,
    target_hidden,
)

# D-PACE takes chances half way to 1, or one hopeless slot would hide all behind it.
_PACE_SMOOTHING = 0.5
_HEADS = ("markov", "confidence")


@dataclass(frozen=True)
class Objective:
    """What is minimised, for each draft slot, and the weight of a slot.

    Attributes:
      ce: weight of the cross entropy with the document's token.
      kl: of the divergence of the target's distribution from the drafter's.
      l1: of the distance of the two, twice their total variation.
      confidence: of the cross entropy of a confidence head with the analytic chance of
        acceptance, 1 less the total variation.
      gamma: slot `k` weighs `exp(-(k - 1) / gamma)`; 0 for all alike.
      pace: whether slots weigh what they do for the expected accepted length, too.
      heads_only: whether only Markov and confidence heads are trained.
    """

    ce: float = 1.0
    kl: float = 0.0
    l1: float = 0.0
    confidence: float = 0.0
    gamma: float = 0.0
    pace: bool = False
    heads_only: bool = False

    @property
    def compares(self) -> bool:
        """Whether the target's own distributions are needed."""
        return self.kl > 0 or self.l1 > 0 or self.confidence > 0


@flax.struct.dataclass
class Shortlist:
    """A part of the vocabulary that stands for the whole in one step.

    Attributes:
      word_M: its tokens, without repeats; every label of the step is among them.
      place_V: a token's index in `word_M` (anything for tokens outside).
      bias_M: added to the logits: minus the log of the chance a word had to be drawn,
        so that those drawn at random also stand for those that were not.
    """

    word_M: Int[Array, "M"]
    place_V: Int[Array, "V"]
    bias_M: Float[Array, "M"]


def slot_weights(width: int, gamma: float) -> Float[Array, "K"]:
    """`exp(-(k - 1) / gamma)` for drafts `k = 1..width`; 1 where `gamma` is 0."""
    if gamma == 0:
        return jnp.ones(width, jnp.float32)
    return jnp.exp(-jnp.arange(width, dtype=jnp.float32) / gamma)


def pace_weights(
    logp_XK: Float[Array, "*X K"], there_XK: Bool[Array, "*X K"]
) -> Float[Array, "*X K"]:
    """What each slot does for the expected accepted length, up to a common factor.

    The derivative of `sum_m prod_{i <= m} q_i` by the log of `q_k`: the chances of all
    slots that are reached through slot `k`. With `q` the label's probability, half way
    to 1. No gradient goes through it.

    Args:
      logp_XK: log-probability of each slot's label.
      there_XK: slots that have one; others count nothing.
    """
    chance_XK = jnp.exp(lax.stop_gradient(logp_XK))
    chance_XK = _PACE_SMOOTHING * chance_XK + (1 - _PACE_SMOOTHING)
    reached_XK = jnp.where(there_XK, jnp.cumprod(chance_XK, axis=-1), 0.0)
    return lax.cumsum(reached_XK, axis=reached_XK.ndim - 1, reverse=True)


@flax.struct.dataclass
class SlotTerms:
    """Losses of draft slots, and the target's chance to accept one.

    Attributes:
      ce_X: cross entropy with the label.
      kl_X: divergence of the target's distribution from the drafter's; 0 without one.
      l1_X: distance of the two; 0 without one.
    """

    ce_X: Float[Array, "*X"]
    kl_X: Float[Array, "*X"]
    l1_X: Float[Array, "*X"]


def slot_terms(
    logit_XM: Float[Array, "*X M"],
    target_XM: Float[Array, "*X M"] | None,
    label_X: Int[Array, "*X"],
) -> SlotTerms:
    """Compares the drafter's logits with a label, and with the target's logits."""
    logq_XM = jax.nn.log_softmax(logit_XM)
    ce_X = -jnp.take_along_axis(logq_XM, label_X[..., None], axis=-1)[..., 0]
    if target_XM is None:
        return SlotTerms(ce_X, jnp.zeros_like(ce_X), jnp.zeros_like(ce_X))
    logp_XM = jax.nn.log_softmax(lax.stop_gradient(target_XM))
    p_XM = jnp.exp(logp_XM)
    kl_X = jnp.sum(p_XM * (logp_XM - logq_XM), axis=-1)
    l1_X = jnp.sum(jnp.abs(p_XM - jnp.exp(logq_XM)), axis=-1)
    return SlotTerms(ce_X, kl_X, l1_X)


@dataclass(frozen=True)
class _Head:
    """The LM head over all words or a shortlist, with a Markov head's bias or none."""

    rows_ME: Array
    bias_M: Array | None
    markov: dict[str, Array] | None

    def drafter(self, hidden: Array, previous: Array) -> Array:
        """Logits of the drafter, of its hidden states and the tokens before."""
        out = self.target(hidden)
        if self.markov is None:
            return out
        state = self.markov["previous_VX"][previous]
        return out + project(state, self.markov["next_VX"].T)

    def target(self, hidden: Array) -> Array:
        """Logits of the target, of its hidden states."""
        # `project`, for its gradient multiplies in the head's dtype.
        out = project(hidden, self.rows_ME.T)
        if self.bias_M is None:
            return out
        # Of the same rank, for strict runs broadcast nothing implicitly.
        return out + jnp.expand_dims(self.bias_M, tuple(range(out.ndim - 1)))


def _head(
    params: dict[str, Any], head_VE: Array, shortlist: Shortlist | None, dtype: Any
) -> _Head:
    markov = params.get("markov")
    if shortlist is None:
        return _Head(head_VE.astype(dtype), None, markov)
    rows_ME = head_VE[shortlist.word_M].astype(dtype)
    if markov is not None:
        markov = markov | {"next_VX": markov["next_VX"][shortlist.word_M]}
    return _Head(rows_ME, shortlist.bias_M, markov)


def weighted_loss(
    params: dict[str, Any],
    cfg: DrafterConfig,
    embed_VE: Float[Array, "V E"],
    head_VE: Float[Array, "V E"],
    blocks: Blocks,
    width: int,
    objective: Objective,
    shortlist: Shortlist | None = None,
    compute_dtype: jnp.dtype = jnp.float32,
    mesh: Mesh | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Sum of the drafts' weighted losses, and the sum of the weights.

    Apart from each other, so that micro-batches and shards add up to what one batch
    of all of them gives.

    Args:
      params: float32 masters.
      embed_VE, head_VE: the target's, frozen.
      blocks: with `hidden_NSE` if the objective compares with the target.
      width: drafts per block; fewer than the full block train its narrow form.
      shortlist: if given, softmax runs over its words only.
      compute_dtype: what products read; they accumulate in float32 in any case.
      mesh: the devices that documents and parameters are dealt over, if several.
    """
    if objective.heads_only:
        heads = {n: params[n] for n in _HEADS if n in params}
        params = lax.stop_gradient(params) | heads
    params = cast(params, compute_dtype)
    hidden_NAKE = block_hidden(
        params, cfg, embed_VE, blocks, width, compute_dtype, mesh
    )
    label_NAK, there_NAK = labels(blocks, width)
    previous_NAK = previous_tokens(blocks, width)
    judged_NAKE = target_hidden(blocks, width) if objective.compares else None
    if shortlist is not None:
        label_NAK = shortlist.place_V[label_NAK]
    head = _head(params, head_VE, shortlist, compute_dtype)

    def terms(hidden: Array, judged: Array | None, previous: Array, label: Array):
        target = None if judged is None else head.target(judged)
        return slot_terms(head.drafter(hidden, previous), target, label)

    rows = (hidden_NAKE, judged_NAKE, previous_NAK, label_NAK)
    if shortlist is not None:
        found = terms(*rows)
    else:
        # A document of each shard at a time, anew in the backward pass: logits of all
        # over a whole vocabulary would not fit.
        shards = 1 if mesh is None else mesh.shape[DATA]
        found = _map_documents(jax.checkpoint(terms), rows, shards)
    loss_NAK = (
        objective.ce * found.ce_X
        + objective.kl * found.kl_X
        + objective.l1 * found.l1_X
    )
    if objective.confidence:
        # Nothing that judges a draft may see it: the token before is what it gets.
        logit_NAK = drafter.confidence_logit(params, cfg, hidden_NAKE, previous_NAK)
        chance_NAK = 1 - 0.5 * lax.stop_gradient(found.l1_X)
        loss_NAK += objective.confidence * _binary(logit_NAK, chance_NAK)
    slot_K = slot_weights(width, objective.gamma)
    weight_NAK = there_NAK.astype(jnp.float32) * slot_K[None, None, :]
    if objective.pace:
        weight_NAK = weight_NAK * pace_weights(-found.ce_X, there_NAK)
    return jnp.sum(loss_NAK * weight_NAK), jnp.sum(weight_NAK)


def _map_documents(f: Callable[..., Any], rows: Any, at_once: int) -> Any:
    """`f` of a few documents at a time, one of each of as many equal parts."""

    def deal(x: Array) -> Array:
        return x.reshape(at_once, -1, *x.shape[1:]).swapaxes(0, 1)

    def gather(x: Array) -> Array:
        return x.swapaxes(0, 1).reshape(-1, *x.shape[2:])

    found = lax.map(lambda some: f(*some), jax.tree.map(deal, rows))
    return jax.tree.map(gather, found)


def _binary(logit: Array, chance: Array) -> Array:
    """Cross entropy of a chance with a logistic guess of it."""
    return jax.nn.softplus(logit) - chance * logit


def block_matches(
    params: dict[str, Any],
    cfg: DrafterConfig,
    embed_VE: Float[Array, "V E"],
    head_VE: Float[Array, "V E"],
    blocks: Blocks,
    width: int,
    compute_dtype: jnp.dtype = jnp.float32,
) -> tuple[Bool[Array, "N A K"], Bool[Array, "N A K"]]:
    """Whether each draft is the document's token, and whether there is such a token.

    Over the whole vocabulary. Where the documents are the target's greedy text, the
    prefixes that match are those that greedy decoding accepts: up to its first miss a
    Markov head has been given what it would have drafted itself.
    """
    params = cast(params, compute_dtype)
    hidden_NAKE = block_hidden(params, cfg, embed_VE, blocks, width, compute_dtype)
    label_NAK, there_NAK = labels(blocks, width)
    head = _head(params, head_VE, None, compute_dtype)
    # One document at a time: logits of all would not fit.
    draft_NAK = lax.map(
        lambda some: jnp.argmax(head.drafter(*some), axis=-1),
        (hidden_NAKE, previous_tokens(blocks, width)),
    )
    return (draft_NAK == label_NAK) & there_NAK, there_NAK
