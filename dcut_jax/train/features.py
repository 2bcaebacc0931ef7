"""What a drafter reads of its target: hidden states of whole documents."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dcut_jax.config import ModelConfig
from dcut_jax.models import dense, params

Features = tuple[Float[Array, "N S C"], Float[Array, "N S E"]]


def make_features(
    weights: Any, cfg: ModelConfig, taps: tuple[int, ...]
) -> Callable[[Int[Array, "N S"], Int[Array, "N"]], Features]:
    """A compiled function from documents and their lengths to the target's features.

    They are the outputs of the tapped layers, side by side, and the last hidden states,
    normed, ready for the LM head; both bfloat16. So are the weights it reads: what is
    rounded in the end need not be computed more finely.
    """
    weights = params.cast(weights, jnp.bfloat16)

    @partial(jax.jit, static_argnames="width")
    def run(weights: Any, token_NS: Array, length_N: Array, width: int) -> Features:
        valid_NS = jnp.arange(width)[None] < length_N[:, None]
        rows = dense.forward_sequences(weights, cfg, token_NS, valid_NS, taps)
        return rows.taps.astype(jnp.bfloat16), rows.hidden.astype(jnp.bfloat16)

    return lambda token_NS, length_N: run(
        weights, token_NS, length_N, token_NS.shape[1]
    )
