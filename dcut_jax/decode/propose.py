"""Drafts and their scores from the hidden states of a block.

A plain DFlash drafter gives all drafts at once. With a Markov head (DSpark, arXiv
2607.05147) the heavy part still runs once, and what is serial is one row of a table and
one thin product a draft.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from dcut_jax.config import DrafterConfig
from dcut_jax.cut.confidence import Top1
from dcut_jax.models import dense, drafter
from pallas_kernels.backends import PLAIN, Backends
from pallas_kernels.confidence import from_logits, head_confidence


def propose(
    params: dict[str, Any],
    cfg: DrafterConfig,
    hidden_BKE: Float[Array, "B K E"],
    anchor_B: Int32[Array, "B"],
    head_VE: Float[Array, "V E"],
    over: str | None = None,
    backends: Backends = PLAIN,
) -> Top1:
    """The drafts of a block, `[B, K]`, and the log of the chance that each is accepted.

    A draft is the arg-max of its slot, the lowest index on ties: a point, whatever the
    temperature. So a plan may go by the score without changing the law of the text.

    Args:
      params: the drafter's.
      hidden_BKE: see `drafter.block_forward`.
      anchor_B: the token before the first draft.
      head_VE: the target's LM head.
      over: the mesh axis that both are cut over, see `models.collectives`.
      backends: the form of `head_confidence`; a Markov head wants logits instead.

    Returns:
      Of a drafter with a confidence head `logp` is what that head says; of any other,
      the log of the draft's own probability. What is learned about scores while
      decoding, `cut.calibration`, comes on top of either.
    """
    if cfg.markov_rank:
        logits_BKV = dense.logits(hidden_BKE, head_VE)
        best = _one_by_one(params, logits_BKV, anchor_B, over)
    else:
        B, K, E = hidden_BKE.shape
        sure = head_confidence(
            hidden_BKE.reshape(B * K, E),
            head_VE,
            backend=backends.confidence,
            chunk=backends.head_chunk,
            over=over,
        )
        best = Top1(sure.token.reshape(B, K), sure.logp.reshape(B, K))
    if not cfg.confidence_head:
        return best
    previous_BK = jnp.concatenate([anchor_B[:, None], best.token[:, :-1]], axis=1)
    logit_BK = drafter.confidence_logit(params, cfg, hidden_BKE, previous_BK, over)
    return Top1(best.token, jax.nn.log_sigmoid(logit_BK))


def _one_by_one(
    params: dict[str, Any],
    logits_BKV: Float[Array, "B K V"],
    anchor_B: Int32[Array, "B"],
    over: str | None,
) -> Top1:
    """Drafts of which each biases the logits of the next."""

    def step(token_B: Array, k: Array) -> tuple[Array, Top1]:
        # A slice in the loop: as a scanned input the logits would be copied, K first.
        base_BV = lax.dynamic_index_in_dim(logits_BKV, k, axis=1, keepdims=False)
        sure = from_logits(base_BV + drafter.markov_bias(params, token_B, over), over)
        return sure.token, Top1(sure.token, sure.logp)

    slot_K = jnp.arange(logits_BKV.shape[1])
    _, best_KB = lax.scan(step, anchor_B, slot_K)
    return jax.tree.map(jnp.transpose, best_KB)
