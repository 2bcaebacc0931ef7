"""SmolLM2 and its drafter, loaded once for all that takes long."""

import pytest

from dcut_jax.engine.load import load_pair
from dcut_jax.weights.load import SMOLLM2


@pytest.fixture(scope="session")
def pair():
    return load_pair(SMOLLM2, None, "float32", "bfloat16")
