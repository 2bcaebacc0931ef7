"""Settings every test runs under: eight CPU devices, nothing promoted silently."""

import os

# JAX reads these when it starts, so they are set before anything imports it. A run on
# an accelerator names its platform: `JAX_PLATFORMS=cuda pytest -m gpu`.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Most of the time goes into compiling small programs that run once. The engine's steps
# say themselves how far they are optimised; this is of all others.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ["XLA_FLAGS"] = " ".join(
    [os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8"]
).strip()

import jax  # noqa: E402  (after the environment)

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
