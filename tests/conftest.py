"""Settings every test runs under: eight CPU devices, nothing promoted silently."""

import os
from pathlib import Path

# JAX reads these when it starts, so they are set before anything imports it. A run on
# an accelerator names its platform: `JAX_PLATFORMS=cuda pytest -m gpu`.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Most of the time goes into compiling small programs that run once. The engine's steps
# say themselves how far they are optimised; this is of all others.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# What took long to compile is kept, for other files and later runs. With a size, JAX
# locks it, so that processes may share it.
compiled = Path(__file__).parents[1] / ".jax-cache"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(compiled))
os.environ.setdefault("JAX_COMPILATION_CACHE_MAX_SIZE", str(2 * 2**30))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
os.environ["XLA_FLAGS"] = " ".join(
    [os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8"]
).strip()

import jax  # noqa: E402  (after the environment)

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
