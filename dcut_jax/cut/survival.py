"""The chance that a draft is reached and accepted."""

from itertools import accumulate

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32


def log_survival(logp_BK: Float[Array, "B K"]) -> Float32[Array, "B K"]:
    """Log of the chance that a draft and all before it are accepted, in [-inf, 0].

    Args:
      logp_BK: log-confidence of each draft, given that those before it are accepted.
        Above 0 counts as 0. NaN stands for a confidence that is unknown or absent; it
        makes the draft and all behind it NaN, which the plan never keeps.

    Source: D-Cut's survival score, indexed by draft: the anchor has no entry.
    """
    safe_BK = jnp.minimum(logp_BK.astype(jnp.float32), 0)  # keeps NaN
    # Left to right: a tree-shaped cumsum may round so that a row rises.
    return jnp.stack(list(accumulate(jnp.unstack(safe_BK, axis=1))), axis=1)
