"""The pieces that targets and drafters share, as pure functions.

Numbers: weights and caches have the dtype they are stored in, products read it and
accumulate in float32, and everything between two products is float32. Float32 weights
mean float32 products: left alone, TPUs and recent GPUs round their inputs further, each
shape in its own way, and then the tier would show in the text.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from dcut_jax.config import RopeConfig
from dcut_jax.models.collectives import Over, total
from pallas_kernels.products import product


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def project(x: Array, weight: Array, contract: int = 1) -> Array:
    """Contracts the last `contract` axes of `x` with the first of `weight`.

    The result is float32 whatever the weight's dtype. So are the products of the
    gradient: left to itself JAX would multiply a float32 cotangent with a narrower
    weight, which no CPU or accelerator does fast.
    """
    axes = tuple(range(contract))
    last = tuple(a + x.ndim - contract for a in axes)
    return product(x, weight, ((last, axes), ((), ())))


def _project_forward(x: Array, weight: Array, contract: int):
    return project(x, weight, contract), (x, weight)


def _project_backward(contract: int, saved: tuple[Array, Array], grad: Array):
    x, weight = saved
    rows = tuple(range(x.ndim - contract))
    out = weight.ndim - contract
    last = tuple(range(grad.ndim - out, grad.ndim))
    outer = tuple(range(contract, weight.ndim))
    grad_x = product(grad, weight, ((last, outer), ((), ())))
    # In float32, since sums over many rows are no faster in bfloat16 on CPU.
    grad_weight = lax.dot_general(x.astype(jnp.float32), grad, ((rows, rows), ((), ())))
    return grad_x.astype(x.dtype), grad_weight.astype(weight.dtype)


project.defvjp(_project_forward, _project_backward)


def rms_norm(x: Float[Array, "*N E"], weight_E: Float[Array, "E"], eps: float) -> Array:
    """RMS norm over the last axis, in float32."""
    scale = lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    weight = weight_E.astype(jnp.float32)
    return x * scale * weight.reshape((1,) * (x.ndim - 1) + weight.shape)


def rope_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Radians per position of each rotated pair, float32 `[head_dim / 2]`.

    `llama3` scaling keeps fast frequencies, divides slow ones by `factor` and blends
    between (Llama 3.1's `rope_scaling`; parity is tested against transformers).
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / head_dim
    freq = 1.0 / np.power(np.float32(rope.theta), exponent, dtype=np.float32)
    if rope.scaling is None:
        return freq
    s = rope.scaling
    turns = s.original_max_position * freq / (2 * np.pi)
    blend = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return (freq * blend + freq / s.factor * (1 - blend)).astype(np.float32)


class Rotation(NamedTuple):
    """Cosine and sine of the angles of some rows, `[*N, 1, D / 2]`, for every head."""

    cos: Array
    sin: Array


def rotation(position: Int[Array, "*N"], rope: RopeConfig, head_dim: int) -> Rotation:
    """Rotary angles in float32; made once for all layers of a pass."""
    freq = jnp.asarray(rope_frequencies(rope, head_dim))
    freq = freq.reshape((1,) * position.ndim + freq.shape)
    angle = (position[..., None].astype(jnp.float32) * freq)[..., None, :]
    return Rotation(jnp.cos(angle), jnp.sin(angle))


def rotate(x: Float[Array, "*N H D"], by: Rotation) -> Float[Array, "*N H D"]:
    """Rotary embedding, half-split pairs `(i, i + D/2)`."""
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * by.cos - b * by.sin, b * by.cos + a * by.sin], axis=-1)


def swiglu(
    x: Float[Array, "*N E"], layer: dict[str, Any], over: Over = None
) -> Float[Array, "*N E"]:
    """`down(silu(gate x) * up x)`; `over`: see `models.collectives`."""
    gate = project(x, layer["gate_EF"])
    inner = jax.nn.silu(gate) * project(x, layer["up_EF"])
    return total(project(inner, layer["down_FE"]), over)


def attention_inputs(
    x: Float[Array, "*N E"],
    layer: dict[str, Any],
    by: Rotation,
    eps: float,
) -> tuple[Array, Array, Array]:
    """Rotated queries and keys, and values; q/k norm where the layer has it."""
    q_NHD = project(x, layer["q_EHD"])
    k_NGD, v_NGD = key_value(x, layer, by, eps)
    if "q_norm_D" in layer:
        q_NHD = rms_norm(q_NHD, layer["q_norm_D"], eps)
    return rotate(q_NHD, by), k_NGD, v_NGD


def key_value(
    x: Float[Array, "*N E"],
    layer: dict[str, Any],
    by: Rotation,
    eps: float,
) -> tuple[Array, Array]:
    """Rotated keys, and values, of rows that ask no question themselves."""
    k_NGD = project(x, layer["k_EGD"])
    if "k_norm_D" in layer:
        k_NGD = rms_norm(k_NGD, layer["k_norm_D"], eps)
    return rotate(k_NGD, by), project(x, layer["v_EGD"])
